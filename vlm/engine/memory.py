"""How much memory the device has, and how many blocks of KV cache it is worth.

The one module of the engine that asks the machine; the device that it asks about was named by the platform.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from vlm.engine.cache import bytes_per_token
from vlm.errors import UnsupportedModelError
from vlm.families.base import KVGeometry

GIB = 1 << 30
# Where memory is shared with everything else on the machine (CPU, Apple), a fixed budget stands in for a fraction
# of it.
HOST_KV_BYTES = GIB


@dataclass(frozen=True)
class MemoryInfo:
    """Bytes of a device, as its driver reports them."""

    free: int
    total: int


def device_memory(device: torch.device) -> MemoryInfo | None:
    """Free and total bytes of a device with memory of its own, else None."""
    if device.type == "cuda":
        return MemoryInfo(*torch.cuda.mem_get_info(device))
    if device.type == "xpu":
        return MemoryInfo(*torch.xpu.mem_get_info(device))
    return None


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Make a device the current one of this thread: kernels that are launched by name go to the current device."""
    if device.type == "cuda":
        return torch.cuda.device(device)
    if device.type == "xpu":
        return torch.xpu.device(device)
    return nullcontext()


def release_cached(device: torch.device) -> None:
    """Give memory that the allocator keeps back to the device."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif device.type == "xpu":
        torch.xpu.empty_cache()


def is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, (MemoryError, torch.OutOfMemoryError))


def peak_bytes(device: torch.device, trial: Callable[[], object]) -> int:
    """Bytes that `trial` needs at its highest, above what is allocated now; 0 where the allocator keeps no count."""
    if device.type != "cuda":
        trial()
        return 0
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    trial()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def kv_budget(memory: MemoryInfo | None, fraction: float, working_bytes: int, kv_cache_bytes: int | None) -> int:
    """Bytes for the KV cache.

    What the caller asked for (`kv_cache_bytes`), else what `fraction` of the device leaves beside what is in use
    and the `working_bytes` of a step and of other caches, else a fixed budget for shared memory.
    """
    if kv_cache_bytes is not None:
        return kv_cache_bytes
    if memory is None:
        return HOST_KV_BYTES
    used = memory.total - memory.free
    budget = int(memory.total * fraction) - used - working_bytes
    if budget <= 0:
        raise UnsupportedModelError(
            f"gpu_memory_fraction={fraction} leaves nothing for the KV cache: of {memory.total / GIB:.1f} GiB, "
            f"{used / GIB:.1f} are in use and a step and image features need {working_bytes / GIB:.1f}; raise the "
            "fraction, lower max_batch_tokens, max_pixels or image_cache_gib, or free the device"
        )
    return budget


def num_blocks(
    geometry: KVGeometry, dtype: torch.dtype, block_size: int, budget: int, max_num_seqs: int, max_model_len: int
) -> int:
    """Blocks that the budget buys, but no more than every sequence could fill."""
    block_bytes = bytes_per_token(geometry, dtype) * block_size
    affordable = budget // block_bytes
    if affordable < 1:
        raise UnsupportedModelError(
            f"a KV cache of {budget} bytes holds no block of {block_size} tokens, which takes {block_bytes} bytes; "
            "raise kv_cache_gib or gpu_memory_fraction"
        )
    return min(affordable, max_num_seqs * math.ceil(max_model_len / block_size))
