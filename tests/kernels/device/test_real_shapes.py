"""Shapes of real models on a GPU: tiles that are full, many programs, split keys; against the float32 twin."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from vlm.kernels.paged import TOLERANCE, paged_attention, paged_attention_reference
from vlm.kernels.tiles import decode_splits
from vlm.kernels.varlen import varlen_attention, varlen_attention_reference

ENCODERS = {
    "qwen2.5-vl full": ((1728, 900), 80),
    "qwen2.5-vl windows": ((64,) * 30 + (48, 16), 80),
    "siglip": ((729, 729), 72),
    "internvit": ((1025, 1025), 64),
    "head 96": ((700, 300), 96),
    "head 128": ((1100,), 128),
    "head 256": ((500,), 256),
}
HEADS = [(16, 2, 128), (28, 4, 128), (8, 1, 256), (12, 12, 64), (64, 1, 128), (8, 8, 512)]


def sixteen_bits(dtype: torch.dtype) -> None:
    if dtype == torch.float32:
        pytest.skip("float32 is tested on small shapes")


@pytest.mark.parametrize("name", ENCODERS)
@pytest.mark.parametrize("causal", [False, True])
def test_packed(device: str, prefix: Any, flash: Any, dtype: torch.dtype, name: str, causal: bool) -> None:
    sixteen_bits(dtype)
    lengths, head_dim = ENCODERS[name]
    qkv = torch.randn(sum(lengths), 12, head_dim, device=device).to(dtype)
    q, k, v = qkv.split(4, dim=1)
    cu, max_q = prefix(lengths, device), max(lengths)
    scale = head_dim**-0.5
    out = varlen_attention(q, k, v, cu, cu, max_q, scale=scale, causal=causal, tile=flash(dtype, head_dim, max_q=max_q))
    expected = varlen_attention_reference(q, k, v, cu, cu, scale=scale, causal=causal)
    torch.testing.assert_close(out.float(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), HEADS)
@pytest.mark.parametrize(
    ("query_lens", "kv_lens"),
    [((1, 1, 1, 1), (4096, 513, 1, 3000)), ((256, 1, 64, 1), (1280, 900, 65, 2047)), ((1,), (20_000,))],
    ids=["decode", "mixed", "long"],
)
def test_paged(
    device: str,
    prefix: Any,
    flash: Any,
    decode: Any,
    dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    head_dim: int,
    query_lens: tuple[int, ...],
    kv_lens: tuple[int, ...],
) -> None:
    sixteen_bits(dtype)
    width = -(-max(kv_lens) // 16)
    tables = torch.randperm(width * len(kv_lens), device=device).to(torch.int32).view(len(kv_lens), width)
    k, v = torch.randn(2, tables.numel(), 16, kv_heads, head_dim, device=device).to(dtype)
    q = torch.randn(sum(query_lens), heads, head_dim, device=device).to(dtype)
    lens = torch.tensor(kv_lens, dtype=torch.int32, device=device)
    inputs = (q, k, v, prefix(query_lens, device), lens, tables)
    out = paged_attention(
        *inputs,
        max(query_lens),
        scale=head_dim**-0.5,
        prefill=flash(dtype, head_dim, paged=True),
        decode=decode(dtype, head_dim, heads // kv_heads),
        num_splits=decode_splits(len(kv_lens), kv_heads, max(kv_lens), processors=132),
    )
    expected = paged_attention_reference(*inputs, scale=head_dim**-0.5)
    torch.testing.assert_close(out.float(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_a_captured_step_serves_every_length_and_leaves_no_nan(
    device: str, prefix: Any, decode: Any, dtype: torch.dtype
) -> None:
    """One capture at batch 4; replayed with other lengths, other blocks, and rows that are padding."""
    sixteen_bits(dtype)
    heads, kv_heads, head_dim, width = 8, 2, 64, 64
    k, v = torch.randn(2, 4 * width, 16, kv_heads, head_dim, device=device).to(dtype)
    q = torch.zeros(4, heads, head_dim, device=device, dtype=dtype)
    lens = torch.ones(4, dtype=torch.int32, device=device)
    tables = torch.zeros(4, width, dtype=torch.int32, device=device)
    cu = prefix((1, 1, 1, 1), device)
    tile = decode(dtype, head_dim, heads // kv_heads)

    def step() -> torch.Tensor:
        options = {"scale": 0.125, "prefill": None, "decode": tile, "num_splits": 8}
        return paged_attention(q, k, v, cu, lens, tables, 1, **options)

    step()  # compiles outside of the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for kv_lens in ((5, 1024, 0, 77), (0, 0, 0, 1), (300, 2, 900, 0)):
        q.copy_(torch.randn(4, heads, head_dim, device=device))
        lens.copy_(torch.tensor(kv_lens))
        tables.copy_(torch.randperm(4 * width, device=device).view(4, width))
        out.fill_(float("nan"))
        graph.replay()
        expected = paged_attention_reference(q, k, v, cu, lens, tables, scale=0.125)
        torch.testing.assert_close(out.float(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
