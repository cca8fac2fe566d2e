"""What the tests of operations share: packed inputs, a paged cache that grows by steps, runs against the oracle."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch

from vlm.attention.layout import LayerCache, PagedStep, Segments
from vlm.attention.spec import AttentionSpec

TOLERANCE = {"float32": 1e-5, "float16": 3e-3, "bfloat16": 2e-2}


def qkv(
    spec: AttentionSpec, len_q: int, len_k: int, device: str, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Unit-normal (T, H, D), (S, K, D), (S, K, D); strided views of one fused tensor where the lengths agree."""
    generator = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, spec.dtype)
    heads, kv = spec.num_heads, spec.num_kv_heads
    if len_q == len_k:
        fused = torch.randn(len_q, (heads + 2 * kv) * spec.head_dim, generator=generator).to(dtype).to(device)
        q, k, v = fused.view(len_q, heads + 2 * kv, spec.head_dim).split([heads, kv, kv], dim=1)
        return q, k, v
    q = torch.randn(len_q, heads, spec.head_dim, generator=generator)
    k, v = torch.randn(2, len_k, kv, spec.head_dim, generator=generator)
    return q.to(dtype).to(device), k.to(dtype).to(device), v.to(dtype).to(device)


def sinks_of(spec: AttentionSpec, device: str) -> torch.Tensor | None:
    return torch.linspace(-2, 3, spec.num_heads, device=device) if "sinks" in spec.features else None


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Largest absolute difference; infinite where there is anything that is no number."""
    difference = (got.float().cpu() - want).abs()
    return (
        float(difference.max())
        if difference.numel() and bool(torch.isfinite(difference).all())
        else float("inf")
        if difference.numel()
        else 0.0
    )


def run_segments(
    op: Callable[..., torch.Tensor],
    attend: Callable[..., torch.Tensor],
    spec: AttentionSpec,
    lengths_q: Sequence[int],
    lengths_k: Sequence[int],
    device: str,
) -> float:
    """The error of an encoder or cross operation against the oracle. Checks shape, dtype and layout on the way."""
    q, k, v = qkv(spec, sum(lengths_q), sum(lengths_k), device)
    segments = (
        Segments.packed(lengths_q, device) if lengths_q == lengths_k else Segments.cross(lengths_q, lengths_k, device)
    )
    sinks = sinks_of(spec, device)
    got = op(q, k, v, segments) if sinks is None else op(q, k, v, segments, sinks)
    assert (got.shape, got.dtype) == (q.shape, q.dtype)
    assert got.is_contiguous()
    return error(got, attend(q, k, v, lengths_q, lengths_k, spec, "causal" in spec.features, sinks))


SPANS = [(1, 6), (7, 9), (9, 13)]  # of every sequence, where a spec needs them


class Cache:
    """Sequences that grow step by step in one paged cache, and all that they ever wrote, for the oracle.

    Blocks are handed out in a shuffled order; what was never written is NaN, as memory fresh from the allocator may be.
    """

    def __init__(self, spec: AttentionSpec, sequences: int, blocks_each: int, block_size: int, device: str) -> None:
        shape = (sequences * blocks_each, block_size, spec.num_kv_heads, spec.head_dim)
        dtype = getattr(torch, spec.dtype)
        self.layer = LayerCache(
            torch.full(shape, float("nan"), dtype=dtype, device=device),
            torch.full(shape, float("nan"), dtype=dtype, device=device),
        )
        order = list(range(shape[0]))
        random.Random(3).shuffle(order)
        self.tables = [order[i * blocks_each : (i + 1) * blocks_each] for i in range(sequences)]
        self.spec, self.block_size, self.device = spec, block_size, device
        empty = torch.empty(0, spec.num_kv_heads, spec.head_dim, dtype=dtype, device=device)
        self.keys, self.values = [empty] * sequences, [empty] * sequences
        self.steps = 0

    def step(self, op: Any, attend: Callable[..., torch.Tensor], query_lens: Sequence[int]) -> float:
        """Add query_lens[i] tokens to sequence i and return the error of the operation."""
        self.steps += 1
        q, k, v = qkv(self.spec, sum(query_lens), sum(query_lens), self.device, seed=self.steps)
        for i, (new_k, new_v) in enumerate(zip(k.split(list(query_lens)), v.split(list(query_lens)), strict=True)):
            self.keys[i], self.values[i] = torch.cat([self.keys[i], new_k]), torch.cat([self.values[i], new_v])
        kv_lens = [len(keys) for keys in self.keys]
        used = [table[: -(-length // self.block_size)] for table, length in zip(self.tables, kv_lens, strict=True)]
        spans = [SPANS] * len(kv_lens) if "image_spans" in self.spec.features else None
        step = PagedStep.build(query_lens, kv_lens, used, self.block_size, self.device, spans)
        sinks = sinks_of(self.spec, self.device)
        got = op(q, k, v, self.layer, step) if sinks is None else op(q, k, v, self.layer, step, sinks)
        assert (got.shape, got.dtype) == (q.shape, q.dtype)
        assert got.is_contiguous()
        keys, values = torch.cat(self.keys), torch.cat(self.values)
        return error(got, attend(q, keys, values, query_lens, kv_lens, self.spec, True, sinks, spans))
