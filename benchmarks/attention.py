#!/usr/bin/env python3
"""Attention on one GPU: our Triton kernels beside everything else that is installed, on the same tensors in one run.

    python -P benchmarks/attention.py                      encoder, prefill and decode
    python -P benchmarks/attention.py decode --seconds 60  one group, at most a minute
    python -P benchmarks/attention.py --json table.json    the table as JSON too

Prints the hardware, the versions, the limits measured in this run (a large bf16 matrix product, a large copy), and one
line a shape and provider: milliseconds (median), TFLOP/s or GB/s of keys and values, the fraction of the limit, and the
time of the best other provider over ours. An output that is not torch_varlen's is named, not timed.
Peers that read no block table are given packed keys and are not charged for packing them.
"""

from __future__ import annotations

import argparse
import inspect
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import cache
from importlib import import_module
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn

from vlm.attention.platform import Platform
from vlm.kernels.paged import paged_attention
from vlm.kernels.tiles import Refusal, Tile, decode_splits, decode_tile, flash_tile
from vlm.kernels.varlen import varlen_attention

Run = Callable[[], torch.Tensor]
OURS = "triton"
BLOCK = 16
DTYPE = torch.bfloat16

ENCODERS = {  # name: sequences, tokens each, heads, head_dim
    "qwen2.5-vl full": (16, 1728, 16, 80),
    "qwen2-vl high resolution": (4, 7744, 16, 80),
    "qwen2.5-vl windows": (432, 64, 16, 80),
    "siglip 384": (32, 729, 16, 72),
    "clip 336": (32, 577, 16, 64),
    "internvit 448": (32, 1025, 16, 64),
}
PREFILLS = {  # name: sequences, new tokens, keys, heads, key/value heads, head_dim
    "qwen-3b prompt": (16, 512, 512, 16, 2, 128),
    "qwen-7b prompt": (8, 2048, 2048, 28, 4, 128),
    "qwen-7b chunk": (8, 512, 4096, 28, 4, 128),
}
DECODES = {
    f"batch {batch}, context {context}, {heads}/{kv_heads}": (batch, context, heads, kv_heads, 128)
    for heads, kv_heads in ((16, 2), (28, 4))
    for batch in (1, 32, 256)
    for context in (512, 4096, 32768)
}


@dataclass(frozen=True)
class Line:
    """One row of the table. `rate` in `unit`; `of_limit` is its share of the measured limit."""

    group: str
    shape: str
    provider: str
    ms: float
    rate: float
    unit: str
    of_limit: float


@dataclass(frozen=True)
class Work:
    """What a shape asks for, and who does it. `amount` in FLOP or bytes."""

    group: str
    shape: str
    amount: float
    unit: str
    providers: dict[str, Run]


@cache
def flash_interfaces() -> dict[str, Any]:
    """The FlashAttention packages that import here."""
    found = {}
    for label, name in (("fa3_fwd", "fa3_fwd_interface"), ("fa3", "flash_attn_interface"), ("fa2", "flash_attn")):
        try:
            found[label] = import_module(name).flash_attn_varlen_func
        except (ImportError, OSError, AttributeError) as error:
            print(f"{label}: not here ({type(error).__name__}: {error})")
    return found


def prefix(count: int, length: int) -> torch.Tensor:
    return torch.tensor([0, *accumulate([length] * count)], dtype=torch.int32, device="cuda")


def tile_of(found: Tile | Refusal) -> Tile:
    if isinstance(found, Refusal):
        raise SystemExit(f"error: no tile on this GPU: {found.reason}")
    return found


def packed_peers(q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, len_q: int, len_k: int, causal: bool) -> dict[str, Run]:
    """Providers that take cu_seqlens. q, k, v: (T, H, D), (S, G, D)."""
    out: dict[str, Run] = {}
    window = (-1, 0) if causal else (-1, -1)
    announced = "enable_gqa" in inspect.signature(varlen_attn).parameters
    grouped = {"enable_gqa": True} if announced and q.shape[1] != k.shape[1] else {}
    out["torch_varlen"] = lambda: varlen_attn(q, k, v, cu_q, cu_k, len_q, len_k, window_size=window, **grouped)
    for label, attend in flash_interfaces().items():

        def run(attend: Any = attend) -> torch.Tensor:
            made = attend(q, k, v, cu_q, cu_k, len_q, len_k, causal=causal)
            return made[0] if isinstance(made, tuple) else made

        out[label] = run
    return out


def dense(q: Any, k: Any, v: Any, count: int, backend: SDPBackend, causal: bool = False) -> Run:
    """scaled_dot_product_attention on the same rows, as (B, H, L, D) views."""
    views = [x.view(count, -1, *x.shape[1:]).transpose(1, 2) for x in (q, k, v)]

    def run() -> torch.Tensor:
        with sdpa_kernel(backend):
            out = F.scaled_dot_product_attention(*views, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])
        return out.transpose(1, 2).reshape(q.shape)

    return run


def encoder(name: str, machine: Platform) -> Work:
    count, length, heads, head_dim = ENCODERS[name]
    q, k, v = torch.randn(3, count * length, heads, head_dim, device="cuda", dtype=DTYPE)
    cu, scale = prefix(count, length), head_dim**-0.5
    tile = tile_of(flash_tile(machine, "bfloat16", head_dim, max_q=length))
    providers: dict[str, Run] = {
        OURS: lambda: varlen_attention(q, k, v, cu, cu, length, scale=scale, tile=tile),
        **packed_peers(q, k, v, cu, cu, length, length, False),
        "sdpa_cudnn": dense(q, k, v, count, SDPBackend.CUDNN_ATTENTION),
        "sdpa_efficient": dense(q, k, v, count, SDPBackend.EFFICIENT_ATTENTION),
    }
    return Work("encoder", name, 4.0 * count * length**2 * heads * head_dim, "TFLOP/s", providers)


@dataclass(frozen=True)
class Paged:
    """Random keys in a cache whose blocks lie in random order, and the same keys packed."""

    k_cache: torch.Tensor
    v_cache: torch.Tensor
    tables: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor

    @classmethod
    def make(cls, count: int, context: int, kv_heads: int, head_dim: int) -> Paged:
        width = context // BLOCK
        tables = torch.randperm(count * width, device="cuda", dtype=torch.int32).view(count, width)
        k, v = (torch.randn(count * context, kv_heads, head_dim, device="cuda", dtype=DTYPE) for _ in range(2))
        caches = []
        for packed in (k, v):
            cache = torch.empty(count * width, BLOCK, kv_heads, head_dim, device="cuda", dtype=DTYPE)
            cache[tables.flatten().long()] = packed.view(cache.shape)
            caches.append(cache)
        return cls(caches[0], caches[1], tables, k, v)


def ours_paged(
    q: torch.Tensor, keys: Paged, count: int, new: int, context: int, machine: Platform, dtype: str = "bfloat16"
) -> Run:
    kv_heads, head_dim = keys.k.shape[1:]
    decode = tile_of(decode_tile(machine, dtype, head_dim, q.shape[1] // kv_heads))
    splits = decode_splits(count, kv_heads, context, processors=machine.processors, block_n=decode.block_n)
    prefill = tile_of(flash_tile(machine, dtype, head_dim, paged=True))
    lens = torch.full((count,), context, dtype=torch.int32, device="cuda")
    cu = prefix(count, new)
    options = {"prefill": prefill, "decode": decode, "num_splits": splits, "has_decode": new == 1}
    scale = head_dim**-0.5
    return lambda: paged_attention(q, keys.k_cache, keys.v_cache, cu, lens, keys.tables, new, scale=scale, **options)


def prefill(name: str, machine: Platform) -> Work:
    count, new, context, heads, kv_heads, head_dim = PREFILLS[name]
    q = torch.randn(count * new, heads, head_dim, device="cuda", dtype=DTYPE)
    keys = Paged.make(count, context, kv_heads, head_dim)
    cu_q, cu_k = prefix(count, new), prefix(count, context)
    providers: dict[str, Run] = {f"{OURS} paged": ours_paged(q, keys, count, new, context, machine)}
    if new == context:
        tile = tile_of(flash_tile(machine, "bfloat16", head_dim))
        providers[OURS] = lambda: varlen_attention(
            q, keys.k, keys.v, cu_q, cu_k, new, scale=head_dim**-0.5, tile=tile, causal=True
        )
        providers["sdpa_cudnn"] = dense(q, keys.k, keys.v, count, SDPBackend.CUDNN_ATTENTION, True)
    providers |= packed_peers(q, keys.k, keys.v, cu_q, cu_k, new, context, True)
    seen = new * (context - new) + new * (new + 1) / 2
    return Work("prefill", name, 4.0 * count * seen * heads * head_dim, "TFLOP/s", providers)


def decode(name: str, machine: Platform) -> Work:
    count, context, heads, kv_heads, head_dim = DECODES[name]
    q = torch.randn(count, heads, head_dim, device="cuda", dtype=DTYPE)
    keys = Paged.make(count, context, kv_heads, head_dim)
    cu_q, cu_k = prefix(count, 1), prefix(count, context)
    providers: dict[str, Run] = {
        OURS: ours_paged(q, keys, count, 1, context, machine),
        **packed_peers(q, keys.k, keys.v, cu_q, cu_k, 1, context, False),
        "sdpa_flash": dense(q, keys.k, keys.v, count, SDPBackend.FLASH_ATTENTION),
    }
    return Work("decode", name, 4.0 * count * context * kv_heads * head_dim, "GB/s", providers)


GROUPS: dict[str, tuple[dict[str, Any], Callable[[str, Platform], Work]]] = {
    "encoder": (ENCODERS, encoder),
    "prefill": (PREFILLS, prefill),
    "decode": (DECODES, decode),
}


def milliseconds(run: Run) -> float:
    """Median; the L2 cache is flushed before each run."""
    return float(triton.testing.do_bench(run, warmup=10, rep=60, return_mode="median"))


def limits() -> dict[str, float]:
    a, b = torch.randn(2, 8192, 8192, device="cuda", dtype=DTYPE)
    source = torch.empty(1 << 31, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    flops = 2 * 8192**3 / milliseconds(lambda: a @ b) / 1e9
    return {"TFLOP/s": flops, "GB/s": 2 * source.numel() / milliseconds(lambda: target.copy_(source)) / 1e6}


def lines(work: Work, limit: dict[str, float]) -> Iterator[Line]:
    scaling = 1e9 if work.unit == "TFLOP/s" else 1e6
    expected = work.providers["torch_varlen"]().float()
    for provider, run in work.providers.items():
        try:
            out = run().float()
        except RuntimeError as error:
            print(f"  {work.shape}: {provider} does not run: {str(error).splitlines()[0]}")
            continue
        if not torch.allclose(out, expected, atol=2e-2, rtol=2e-2):
            print(f"  {work.shape}: {provider} is WRONG by {float((out - expected).abs().max()):.3g}: not timed")
            continue
        ms = milliseconds(run)
        rate = work.amount / ms / scaling
        yield Line(work.group, work.shape, provider, ms, rate, work.unit, rate / limit[work.unit])


def show(found: list[Line]) -> None:
    others = [line.ms for line in found if not line.provider.startswith(OURS)]
    for line in found:
        ratio = f"{min(others) / line.ms:5.2f}x" if line.provider.startswith(OURS) and others else ""
        print(
            f"| {line.group} | {line.shape} | {line.provider} | {line.ms:.4f} | {line.rate:.0f} {line.unit} "
            f"| {100 * line.of_limit:.0f} % | {ratio} |",
            flush=True,
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("groups", nargs="*", help=f"of {', '.join(GROUPS)}; default: all")
    parser.add_argument("--seconds", type=float, default=600.0, help="start no shape after so many seconds")
    parser.add_argument("--json", help="write the table there too")
    args = parser.parse_args()
    if unknown := set(args.groups) - GROUPS.keys():
        parser.error(f"unknown group {', '.join(sorted(unknown))}")
    if not torch.cuda.is_available():
        print("error: this benchmark needs a CUDA device", file=sys.stderr)
        return 2
    started = time.monotonic()
    machine = Platform.detect("cuda")
    print(f"{machine.name}, torch {torch.__version__}, triton {triton.__version__}, {DTYPE}, medians of CUDA events")
    limit = limits()
    print(f"limits of this run: {limit['TFLOP/s']:.0f} TFLOP/s (8192^3 product), {limit['GB/s']:.0f} GB/s (2 GiB copy)")
    print("| group | shape | provider | ms | rate | of the limit | best other / ours |\n|---|---|---|---|---|---|---|")
    table: list[Line] = []
    for group in args.groups or GROUPS:
        shapes, make = GROUPS[group]
        for name in shapes:
            if time.monotonic() - started > args.seconds:
                print(f"  {name}: left out, {args.seconds:.0f} s are over")
                continue
            torch.manual_seed(0)
            found = list(lines(make(name, machine), limit))
            show(found)
            table += found
            if args.json:
                report = {"machine": machine.name, "torch": torch.__version__, "triton": triton.__version__}
                with open(args.json, "w") as file:
                    json.dump({**report, "limits": limit, "lines": [asdict(line) for line in table]}, file, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
