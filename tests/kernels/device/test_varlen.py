"""Packed attention agrees with its float32 twin, feature by feature."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from vlm.kernels.varlen import TOLERANCE, varlen_attention, varlen_attention_reference

Lengths = tuple[int, ...]


class Case:
    """Inputs of packed attention, and the comparison of the kernel with its twin."""

    def __init__(
        self, device: str, prefix: Any, dtype: torch.dtype, lengths_q: Lengths, lengths_k: Lengths | None = None
    ) -> None:
        self.device, self.dtype = device, dtype
        self.lengths_q, self.lengths_k = lengths_q, lengths_k or lengths_q
        self.cu_q, self.cu_k = prefix(self.lengths_q, device), prefix(self.lengths_k, device)

    def tensors(self, heads: int, kv_heads: int, head_dim: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        def normal(tokens: int, heads: int) -> torch.Tensor:
            return torch.randn(tokens, heads, head_dim, device=self.device).to(self.dtype)

        return (
            normal(sum(self.lengths_q), heads),
            normal(sum(self.lengths_k), kv_heads),
            normal(sum(self.lengths_k), kv_heads),
        )

    def run(self, qkv: Any, tile: Any, **features: Any) -> torch.Tensor:
        features.setdefault("scale", qkv[0].shape[2] ** -0.5)
        out = varlen_attention(*qkv, self.cu_q, self.cu_k, max(self.lengths_q), tile=tile, **features)
        expected = varlen_attention_reference(*qkv, self.cu_q, self.cu_k, **features)
        assert out.is_contiguous()
        assert out.dtype == self.dtype
        torch.testing.assert_close(out.float(), expected, atol=TOLERANCE[self.dtype], rtol=TOLERANCE[self.dtype])
        return out


@pytest.fixture
def case(device: str, prefix: Any, dtype: torch.dtype) -> Any:
    return lambda *lengths: Case(device, prefix, dtype, *lengths)


SPANS = (
    [(0, 0)] * 4 + [(4, 27)] * 23 + [(0, 0)] * 3 + [(30, 36)] * 6 + [(0, 0)] * 4
)  # one longer than the windows below

FEATURES: dict[str, dict[str, Any]] = {
    "bidirectional": {},
    "causal": {"causal": True},
    "window": {"window": 5},
    "window of one": {"window": 1},
    "causal window": {"causal": True, "window": 5},
    "causal window of one": {"causal": True, "window": 1},
    "softcap": {"softcap": 2.0},
    "softcap that saturates": {"softcap": 3.0, "scale": 500.0},
    "sinks": {"sinks": True},
    "sinks, causal, window": {"sinks": True, "causal": True, "window": 7},
    "spans": {"causal": True, "spans": True},
    "spans or window": {"causal": True, "spans": True, "window": 6},
    "spans and window": {"causal": True, "spans": True, "window": 6, "span_rule": "and"},
    "scale of one": {"scale": 1.0},
    "negative scale": {"scale": -0.3, "causal": True},
    "no scale": {"scale": 0.0},
    "everything": {"causal": True, "spans": True, "window": 6, "softcap": 4.0, "sinks": True, "scale": 0.7},
}


def features_on(device: str, name: str, heads: int) -> dict[str, Any]:
    features = dict(FEATURES[name])
    if features.pop("spans", False):
        features["spans_T2"] = torch.tensor(SPANS, dtype=torch.int32, device=device)
    if features.pop("sinks", False):
        features["sinks_H"] = torch.randn(heads, device=device)
    return features


@pytest.mark.parametrize("name", FEATURES)
def test_features(case: Any, flash: Any, device: str, dtype: torch.dtype, name: str) -> None:
    c = case((40,))
    out = c.run(c.tensors(2, 1, 32), flash(dtype, 32), **features_on(device, name, 2))
    assert out.isfinite().all()


@pytest.mark.parametrize("head_dim", [16, 20, 32, 64, 72, 80, 88, 96, 112, 128, 160, 192, 256])
def test_head_widths(case: Any, flash: Any, dtype: torch.dtype, head_dim: int) -> None:
    c = case((19, 0, 33))
    c.run(c.tensors(2, 2, head_dim), flash(dtype, head_dim), causal=head_dim % 32 == 0)


@pytest.mark.parametrize("causal", [False, True])
def test_empty_segments_anywhere(case: Any, flash: Any, dtype: torch.dtype, causal: bool) -> None:
    c = case((0, 5, 0, 0, 7, 0))
    c.run(c.tensors(2, 1, 64), flash(dtype, 64, max_q=7), causal=causal)


def test_cross_attention_of_two_packings(case: Any, flash: Any, dtype: torch.dtype) -> None:
    c = case((7, 3, 0, 21), (37, 0, 4, 5))
    out = c.run(c.tensors(4, 2, 64), flash(dtype, 64))
    assert not out[7:10].any(), "queries without keys give zeros"


def test_causal_aligns_the_last_query_with_the_last_key(case: Any, flash: Any, dtype: torch.dtype) -> None:
    c = case((7, 20), (37, 12))  # the second has more queries than keys: its first eight see nothing
    out = c.run(c.tensors(4, 2, 64), flash(dtype, 64), causal=True)
    assert not out[7:15].any()


def test_a_chunk_that_begins_inside_a_span(case: Any, flash: Any, device: str, dtype: torch.dtype) -> None:
    """Spans are given as positions in the sequence, so that a chunk sees what the whole prompt would."""
    whole = case((40,))
    features = features_on(device, "spans or window", 2)
    q, k, v = whole.tensors(2, 1, 32)
    expected = whole.run((q, k, v), flash(dtype, 32), **features)
    for start in (10, 26, 33):
        chunk = case((40 - start,), (40,))
        rows = {**features, "spans_T2": features["spans_T2"][start:].contiguous()}
        out = chunk.run((q[start:], k, v), flash(dtype, 32), **rows)
        torch.testing.assert_close(out, expected[start:], atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("head_dim", [64, 72])
def test_views_of_a_fused_qkv(case: Any, flash: Any, device: str, dtype: torch.dtype, head_dim: int) -> None:
    c = case((18, 9))
    qkv = torch.randn(27, 3, 4, head_dim, device=device).to(dtype)
    c.run(qkv.unbind(1), flash(dtype, head_dim))
    heads_first = torch.randn(4, 27, head_dim, device=device).to(dtype).transpose(0, 1)
    c.run((heads_first, heads_first[:, :2], heads_first[:, 2:]), flash(dtype, head_dim), causal=True)


@pytest.mark.parametrize("group", [3, 7, 64])
def test_grouped_heads(case: Any, flash: Any, dtype: torch.dtype, group: int) -> None:
    c = case((9,), (17,))
    c.run(c.tensors(group, 1, 32), flash(dtype, 32), causal=True)


def test_nothing_to_do(case: Any, flash: Any, dtype: torch.dtype) -> None:
    c = case((0, 0))
    assert c.run(c.tensors(2, 2, 64), flash(dtype, 64)).shape == (0, 2, 64)


@pytest.mark.parametrize(
    ("features", "message"),
    [
        ({"window": 0}, "at least the query itself"),
        ({"span_rule": "xor"}, "span_rule"),
        ({"softcap": -1.0}, "positive"),
    ],
)
def test_wrong_arguments_are_refused(case: Any, flash: Any, dtype: torch.dtype, features: Any, message: str) -> None:
    c = case((4,))
    with pytest.raises(ValueError, match=message):
        varlen_attention(*c.tensors(2, 2, 64), c.cu_q, c.cu_k, 4, scale=1.0, tile=flash(dtype, 64), **features)


def test_wrong_shapes_are_refused(case: Any, flash: Any, dtype: torch.dtype) -> None:
    c = case((4,))
    q, k, v = c.tensors(2, 2, 64)
    for wrong in (
        (q, k[:, :, :32], v),
        (q[:, :1], k, v),
        (q, k.to(torch.float64), v),
        (q[:, :, ::2], k[:, :, ::2], v[:, :, ::2]),
    ):
        with pytest.raises(ValueError, match=r"queries|contiguous"):
            varlen_attention(*wrong, c.cu_q, c.cu_k, 4, scale=1.0, tile=flash(dtype, 64))
