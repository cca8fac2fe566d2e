"""Attention through aten's memory-efficient kernel over packed sequences.

The public scaled_dot_product_attention takes no cu_seqlens, so the operator behind it is called.

Tolerance: 1e-5 in float32, 3e-3 in float16 and 2e-2 in bfloat16, absolute, for unit-normal inputs.
"""

from __future__ import annotations

from itertools import accumulate

import torch

from vlm.attention.backends.packed import PackedPaged, PackedSegments, Packing
from vlm.attention.layout import LayerCache, PagedStep, Segments
from vlm.attention.paging import PlanCache
from vlm.attention.platform import Platform
from vlm.attention.spec import AttentionSpec, Decision

NO_MASK, CAUSAL_BOTTOM_RIGHT = 0, 2  # kernel_forward.h, CustomMaskType


class EfficientKernel:
    """aten._efficient_attention_forward with the settings of one layer group."""

    reads_cache = False

    def __init__(self, spec: AttentionSpec) -> None:
        self._scale = spec.softmax_scale
        self._causal = spec.role == "decoder" or "causal" in spec.features
        self._group = spec.num_heads // spec.num_kv_heads

    def packed(
        self,
        q_THD: torch.Tensor,
        k_SKD: torch.Tensor,
        v_SKD: torch.Tensor,
        packing: Packing,
        sinks_H: torch.Tensor | None,
    ) -> torch.Tensor:
        """Rows that see no key are left undefined."""
        assert sinks_H is None, "this backend declares no sinks"
        if self._group > 1:  # the kernel knows no groups
            k_SKD, v_SKD = (x.repeat_interleave(self._group, dim=1) for x in (k_SKD, v_SKD))
        out = torch.ops.aten._efficient_attention_forward(
            q_THD[None],
            k_SKD[None],
            v_SKD[None],
            None,
            packing.cu_seqlens_q,
            packing.cu_seqlens_k,
            packing.max_q,
            packing.max_k,
            0.0,
            CAUSAL_BOTTOM_RIGHT if self._causal and packing.masked else NO_MASK,
            scale=self._scale,
        )[0]
        assert isinstance(out, torch.Tensor)
        return out[0]

    def in_place(
        self, q_THD: torch.Tensor, cache: LayerCache, step: PagedStep, sinks_H: torch.Tensor | None
    ) -> torch.Tensor:
        raise AssertionError("this kernel does not read the cache")


def blind_rows(segments: Segments) -> list[int]:
    """Queries that see no key: those of sequences without keys. Causal segments are an encoder's, as long in queries as
    in keys, so that every query sees one."""
    rows: list[int] = []
    starts = [0, *accumulate(segments.lengths_q)]
    for start, len_q, len_k in zip(starts, segments.lengths_q, segments.lengths_k, strict=False):
        rows += range(start, start + len_q) if len_k == 0 else ()
    return rows


class EfficientSegments:
    """Encoder self-attention and cross-attention (vlm.attention.op.SegmentAttention)."""

    def __init__(self, spec: AttentionSpec) -> None:
        self._attend = PackedSegments(EfficientKernel(spec))
        self._blind: PlanCache[Segments, torch.Tensor] = PlanCache(
            lambda s: torch.tensor(blind_rows(s), dtype=torch.int64, device=s.cu_seqlens_q.device)
        )

    def __call__(
        self,
        q_THD: torch.Tensor,
        k_SKD: torch.Tensor,
        v_SKD: torch.Tensor,
        segments: Segments,
        sinks_H: torch.Tensor | None = None,
    ) -> torch.Tensor:
        out_THD = self._attend(q_THD, k_SKD, v_SKD, segments, sinks_H)
        blind = self._blind(segments)
        return out_THD.index_fill_(0, blind, 0.0) if blind.numel() else out_THD


def construct(decision: Decision, spec: AttentionSpec, platform: Platform) -> EfficientSegments | PackedPaged:
    if spec.role == "decoder":
        return PackedPaged(EfficientKernel(spec), None)
    return EfficientSegments(spec)
