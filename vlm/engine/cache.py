"""The tensors of the paged KV cache."""

from __future__ import annotations

import numpy as np
import torch

from vlm.attention.layout import LayerCache
from vlm.families.base import KVGeometry


def bytes_per_token(geometry: KVGeometry, dtype: torch.dtype) -> int:
    """What one token costs over all layers, keys and values."""
    return 2 * geometry.num_layers * geometry.num_kv_heads * geometry.head_dim * dtype.itemsize


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros; on the CPU they take memory only once written, as numpy asks the system for zeroed pages."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    raw = torch.from_numpy(np.zeros(int(np.prod(shape)) * dtype.itemsize, np.uint8))
    return raw.view(dtype).view(shape)


def allocate_cache(
    geometry: KVGeometry, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
) -> list[LayerCache]:
    """One LayerCache a layer. Filled with zeros: a masked position that held NaN would still spoil a weighted sum."""
    shape = (num_blocks, block_size, geometry.num_kv_heads, geometry.head_dim)
    return [LayerCache(_zeros(shape, dtype, device), _zeros(shape, dtype, device)) for _ in range(geometry.num_layers)]
