"""Attention over a paged cache agrees with its float32 twin, and the cache is written right."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from vlm.kernels.paged import TOLERANCE, paged_attention, paged_attention_reference, write_kv, write_kv_reference

FP8 = torch.float8_e4m3fn


class Cache:
    """A cache whose blocks are handed out in a random order. What no sequence owns is NaN, so that reading it shows."""

    def __init__(
        self, device: str, dtype: torch.dtype, kv_lens: Sequence[int], block_size: int, kv_heads: int, head_dim: int
    ) -> None:
        needed = [-(-n // block_size) for n in kv_lens]
        blocks = torch.randperm(sum(needed) + 2).tolist()
        shape = (len(blocks), block_size, kv_heads, head_dim)
        self.tables = torch.zeros(len(kv_lens), max(needed) + 2, dtype=torch.int32)
        k = torch.full(shape, float("nan"))
        v = torch.full(shape, float("nan"))
        for i, n in enumerate(kv_lens):
            mine = [blocks.pop() for _ in range(needed[i])]
            self.tables[i, : len(mine)] = torch.tensor(mine, dtype=torch.int32)
            for p in range(n):
                k[mine[p // block_size], p % block_size] = torch.randn(kv_heads, head_dim)
                v[mine[p // block_size], p % block_size] = torch.randn(kv_heads, head_dim)
        self.k, self.v = k.to(device, dtype), v.to(device, dtype)
        self.tables = self.tables.to(device)
        self.kv_lens = torch.tensor(kv_lens, dtype=torch.int32, device=device)


@pytest.fixture
def check(device: str, prefix: Any, flash: Any, decode: Any, dtype: torch.dtype) -> Any:
    """check(query_lens, kv_lens, heads, kv_heads, head_dim, ...) compares with the twin and returns the output."""

    def run(
        query_lens: Sequence[int],
        kv_lens: Sequence[int],
        heads: int,
        kv_heads: int,
        head_dim: int,
        *,
        block_size: int = 16,
        splits: int = 1,
        kv_dtype: torch.dtype | None = None,
        has_decode: bool = True,
        **features: Any,
    ) -> torch.Tensor:
        cache = Cache(device, kv_dtype or dtype, kv_lens, block_size, kv_heads, head_dim)
        q = torch.randn(sum(query_lens), heads, head_dim, device=device).to(dtype)
        features.setdefault("scale", head_dim**-0.5)
        inputs = (q, cache.k, cache.v, prefix(query_lens, device), cache.kv_lens, cache.tables)
        tiles = {
            "prefill": flash(dtype, head_dim, paged=True) if max(query_lens) > 1 else None,
            "decode": decode(dtype, head_dim, heads // kv_heads),
        }
        out = paged_attention(*inputs, max(query_lens), num_splits=splits, has_decode=has_decode, **tiles, **features)
        expected = paged_attention_reference(*inputs, **features)
        torch.testing.assert_close(out.float(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
        return out

    return run


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(2, 2, 64), (4, 2, 80), (7, 1, 72), (2, 1, 256)])
def test_decode(check: Any, splits: int, heads: int, kv_heads: int, head_dim: int) -> None:
    check((1, 1), (5, 70), heads, kv_heads, head_dim, splits=splits)


@pytest.mark.parametrize("splits", [1, 2])
def test_padded_rows_are_zero(check: Any, splits: int) -> None:
    """What a captured graph pads its batch with: rows of length 0, whose block tables point anywhere."""
    out = check((1, 1, 1), (0, 33, 0), 2, 1, 64, splits=splits)
    assert not out[0].any()
    assert not out[2].any()


@pytest.mark.parametrize("block_size", [8, 24])
def test_mixture_of_prompts_chunks_and_single_tokens(check: Any, block_size: int) -> None:
    check((1, 8, 1, 20, 0), (5, 30, 40, 20, 9), 2, 1, 64, block_size=block_size, splits=2)


def test_single_tokens_beside_sequences_without_one(check: Any) -> None:
    check((1, 0, 1), (5, 30, 40), 4, 2, 32, splits=2)


def test_chunks_only(check: Any) -> None:
    check((8, 5), (30, 5), 4, 2, 32, has_decode=False)


FEATURES: dict[str, dict[str, Any]] = {
    "window": {"window": 6},
    "window of one": {"window": 1},
    "softcap that saturates": {"softcap": 3.0, "scale": 300.0},
    "sinks": {"sinks": True},
    "spans": {"spans": True},
    "spans or window": {"spans": True, "window": 4},
    "spans and window": {"spans": True, "window": 4, "span_rule": "and"},
    "negative scale": {"scale": -0.2},
    "everything": {"spans": True, "window": 4, "softcap": 5.0, "sinks": True, "scale": 0.4},
}


@pytest.mark.parametrize("name", FEATURES)
def test_features(check: Any, device: str, name: str) -> None:
    features = dict(FEATURES[name])
    if features.pop("sinks", False):
        features["sinks_H"] = torch.randn(2, device=device)
    if features.pop("spans", False):
        spans = torch.zeros(30, 2, dtype=torch.int32)
        spans[0] = torch.tensor([1, 9])  # a single token inside a span that began before its window
        spans[1:6] = torch.tensor([10, 27])  # a chunk that begins inside a span
        spans[13:18] = torch.tensor([3, 8])
        features["spans_T2"] = spans.to(device)
    check((1, 8, 1, 20), (7, 30, 40, 20), 2, 1, 32, splits=2, **features)


@pytest.mark.parametrize("group", [8, 64])
def test_grouped_heads(check: Any, group: int) -> None:
    check((1, 3), (20, 12), group, 1, 32, splits=2)


def test_fp8_cache(check: Any, dtype: torch.dtype) -> None:
    if dtype == torch.float32:
        pytest.skip("an fp8 cache goes with 16-bit queries")
    if torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("fp8 needs capability 8.9")
    check((1, 8), (40, 20), 4, 2, 64, kv_dtype=FP8, k_scale=0.5, v_scale=2.0)


def test_strided_queries_and_a_cache_inside_a_larger_tensor(
    device: str, prefix: Any, flash: Any, decode: Any, dtype: torch.dtype
) -> None:
    cache = Cache(device, dtype, (9, 20), 16, 2, 64)
    both = torch.stack((cache.k, cache.v), dim=2)  # (P, B, 2, G, D)
    qkv = torch.randn(5, 8, 64, device=device).to(dtype)
    inputs = (qkv[:, :4], both[:, :, 0], both[:, :, 1], prefix((1, 4), device), cache.kv_lens, cache.tables)
    tiles = {"prefill": flash(dtype, 64, paged=True), "decode": decode(dtype, 64, 2)}
    out = paged_attention(*inputs, 4, scale=0.125, num_splits=2, **tiles)
    torch.testing.assert_close(
        out.float(), paged_attention_reference(*inputs, scale=0.125), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype]
    )


def test_wrong_arguments_are_refused(device: str, prefix: Any, decode: Any, dtype: torch.dtype) -> None:
    cache = Cache(device, dtype, (9, 20), 16, 2, 64)
    q = torch.randn(2, 4, 64, device=device).to(dtype)
    rest = (prefix((1, 1), device), cache.kv_lens, cache.tables)
    options = {"scale": 0.125, "prefill": None, "decode": decode(dtype, 64, 2)}
    for arguments, message in [
        ((q, cache.k, cache.v, *rest, 2), "prefill tile"),
        ((torch.cat((q, q)), cache.k, cache.v, *rest, 1), "4 rows for 2 sequences"),
        ((q[:, :3], cache.k, cache.v, *rest, 1), "do not fit"),
        ((q, cache.k, cache.v[:-1], *rest, 1), "values"),
        ((q.double(), cache.k, cache.v, *rest, 1), "the cache is"),
    ]:
        with pytest.raises(ValueError, match=message):
            paged_attention(*arguments, **options)


@pytest.mark.parametrize("kv_dtype", [None, FP8], ids=str)
def test_write_kv(device: str, dtype: torch.dtype, kv_dtype: torch.dtype | None) -> None:
    if kv_dtype is FP8 and torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("fp8 needs capability 8.9")
    kv = torch.randn(6, 2, 3, 24, device=device).to(dtype)
    if kv_dtype is FP8 and device == "cpu":
        # The interpreter rounds to fp8 wrongly (no carry into the exponent, no subnormals): values that need no
        # rounding.
        kv = torch.randint(-8, 9, kv.shape).to(dtype) / 4
    slots = torch.tensor([17, 0, -1, 31, 8, 5], dtype=torch.int64, device=device)
    empty = torch.zeros(4, 8, 3, 24, device=device).to(kv_dtype or dtype)
    caches = [empty.clone() for _ in range(4)]
    scales = {"k_scale": 0.5, "v_scale": 2.0} if kv_dtype else {}
    write_kv(kv[:, 0], kv[:, 1], caches[0], caches[1], slots, **scales)
    write_kv_reference(kv[:, 0], kv[:, 1], caches[2], caches[3], slots, **scales)
    for ours, expected in zip(caches[:2], caches[2:], strict=True):
        assert torch.equal(ours.float(), expected.float())
        assert expected.float().any()
    with pytest.raises(ValueError, match="for a cache of"):
        write_kv(kv[:, 0, :2], kv[:, 1, :2], caches[0], caches[1], slots)
