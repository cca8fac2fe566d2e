"""Random shapes and any mix of features, interpreted: the twin is right about all of them."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vlm.kernels.paged import paged_attention, paged_attention_reference
from vlm.kernels.tiles import Tile, split_head
from vlm.kernels.varlen import TOLERANCE, varlen_attention, varlen_attention_reference

DTYPES = st.sampled_from([torch.float16, torch.float32])
HEAD_DIMS = st.sampled_from([16, 24, 32, 40, 64, 72, 88])
BLOCKS = st.sampled_from([(16, 16), (32, 16), (16, 32)])
PROFILE = settings(max_examples=40, deadline=None, derandomize=True, database=None)


def prefix(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


@st.composite
def spans(draw: st.DrawFn, lengths_q: list[int], lengths_k: list[int]) -> torch.Tensor:
    """The span around each query: sequences are cut at random places, and each piece is a span or is not."""
    rows: list[tuple[int, int]] = []
    for q, k in zip(lengths_q, lengths_k, strict=True):
        cuts = [0, *sorted(draw(st.sets(st.integers(1, 40), max_size=3))), 10_000]
        pieces = [(a, b) if draw(st.booleans()) else (0, 0) for a, b in pairwise(cuts)]
        for position in range(k - q, k):
            rows.append(next((p for a, p in zip(cuts[1:], pieces, strict=True) if position < a), (0, 0)))
    return torch.tensor(rows, dtype=torch.int32).reshape(-1, 2)


@st.composite
def features(draw: st.DrawFn, heads: int) -> dict[str, Any]:
    return {
        "scale": draw(st.sampled_from([0.1, 1.0, -0.5])),
        "window": draw(st.none() | st.integers(1, 30)),
        "softcap": draw(st.none() | st.just(2.0)),
        "sinks_H": draw(st.none() | st.just(torch.linspace(-1, 2, heads))),
        "span_rule": draw(st.sampled_from(["or", "and"])),
    }


@PROFILE
@given(st.data(), DTYPES, HEAD_DIMS, BLOCKS, st.sampled_from([(1, 1), (4, 2), (3, 1)]), st.booleans(), st.booleans())
def test_packed(
    data: st.DataObject,
    dtype: torch.dtype,
    head_dim: int,
    blocks: tuple[int, int],
    heads: tuple[int, int],
    causal: bool,
    cross: bool,
) -> None:
    torch.manual_seed(0)
    lengths_q = data.draw(st.lists(st.integers(0, 36), min_size=1, max_size=3))
    lengths_k = (
        data.draw(st.lists(st.integers(0, 36), min_size=len(lengths_q), max_size=len(lengths_q)))
        if cross
        else lengths_q
    )
    options = data.draw(features(heads[0]))
    options["spans_T2"] = data.draw(spans(lengths_q, lengths_k)) if causal and data.draw(st.booleans()) else None
    q = torch.randn(sum(lengths_q), heads[0], head_dim).to(dtype)
    k, v = (torch.randn(sum(lengths_k), heads[1], head_dim).to(dtype) for _ in range(2))
    where = (prefix(lengths_q), prefix(lengths_k))
    tile = Tile("flash", *blocks, 4, 1, split_head(head_dim), 0)
    out = varlen_attention(q, k, v, *where, max(lengths_q), tile=tile, causal=causal, **options)
    expected = varlen_attention_reference(q, k, v, *where, causal=causal, **options)
    torch.testing.assert_close(out.float(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@PROFILE
@given(
    st.data(),
    DTYPES,
    HEAD_DIMS,
    st.sampled_from([(1, 1), (4, 2), (5, 1)]),
    st.sampled_from([4, 16, 20]),
    st.sampled_from([1, 2, 8]),
    st.booleans(),
)
def test_paged(
    data: st.DataObject,
    dtype: torch.dtype,
    head_dim: int,
    heads: tuple[int, int],
    block_size: int,
    splits: int,
    dot: bool,
) -> None:
    torch.manual_seed(0)
    query_lens = data.draw(st.lists(st.integers(1, 20) | st.just(1), min_size=1, max_size=3))
    kv_lens = [q + data.draw(st.integers(0, 30)) for q in query_lens]
    options = data.draw(features(heads[0]))
    options["spans_T2"] = data.draw(spans(query_lens, kv_lens)) if data.draw(st.booleans()) else None
    width = -(-max(kv_lens) // block_size)
    tables = torch.randperm(width * len(kv_lens)).to(torch.int32).view(len(kv_lens), width)
    k, v = (torch.randn(tables.numel(), block_size, heads[1], head_dim).to(dtype) for _ in range(2))
    q = torch.randn(sum(query_lens), heads[0], head_dim).to(dtype)
    inputs = (q, k, v, prefix(query_lens), torch.tensor(kv_lens, dtype=torch.int32), tables)
    group = heads[0] // heads[1]
    tiles = {
        "prefill": Tile("flash", 16, 16, 4, 1, split_head(head_dim), 0),
        "decode": Tile(
            "decode", 16 if dot else min(4, 1 << (group - 1).bit_length()), 16, 4, 1, split_head(head_dim), 0, dot
        ),
    }
    out = paged_attention(*inputs, max(query_lens), num_splits=splits, **tiles, **options)
    expected = paged_attention_reference(*inputs, **options)
    torch.testing.assert_close(out.float(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
