"""The two operations over a kernel that takes packed queries and keys with cu_seqlens: torch_varlen and flash_attn.

A kernel knows its scale, masks and softcap; this module gives it keys. A decoder step that only has fresh prompts
attends to what it brings; any other step reads its keys from the cache, gathered into packed form, or in place where
the kernel can.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch

from vlm.attention.layout import LayerCache, PagedStep, Segments
from vlm.attention.paging import PlanCache, first_key, packed_rows, rows_of, write
from vlm.attention.spec import AttentionSpec


@dataclass(frozen=True, eq=False)
class Packing:
    """Lengths as a kernel takes them: int32 prefix sums on the device, bounds on the host.

    `masked` is False where the keys are already those that each query may see, so that neither the causal mask nor
    the window would change anything: then FlashAttention-2 takes its decode path, which reads each key once for a
    group of heads.
    """

    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor
    max_q: int
    max_k: int
    masked: bool = True


class PackedKernel(Protocol):
    """FlashAttention's semantics: causal and windows are aligned to the last key; a query without keys gives zeros."""

    def packed(
        self,
        q_THD: torch.Tensor,
        k_SKD: torch.Tensor,
        v_SKD: torch.Tensor,
        packing: Packing,
        sinks_H: torch.Tensor | None,
    ) -> torch.Tensor:
        """(T, H, D) for at least one query and one key."""

    def in_place(
        self, q_THD: torch.Tensor, cache: LayerCache, step: PagedStep, sinks_H: torch.Tensor | None
    ) -> torch.Tensor:
        """The same, with the keys read from the paged cache. Called only where `reads_cache`."""

    reads_cache: bool


def window_size(spec: AttentionSpec, causal: bool) -> tuple[int, int]:
    """FlashAttention's (left, right), which do not count the query itself; -1 is unbounded."""
    if "sliding_window" not in spec.features:
        return -1, 0 if causal else -1
    assert spec.window, "a sliding window needs a width"
    left = spec.window - 1
    return left, 0 if causal else left


def bound(lengths: Sequence[int]) -> int:
    """The length bound to give a kernel: at least the longest.

    FlashAttention-2 takes a bound of 1 for a decode step, and regroups its queries as if every sequence had one;
    where some have none, the bound must be 2.
    """
    longest = max(lengths, default=0)
    return 2 if longest == 1 and min(lengths) == 0 else longest


class PackedSegments:
    """Encoder self-attention and cross-attention (vlm.attention.op.SegmentAttention)."""

    def __init__(self, kernel: PackedKernel) -> None:
        self.kernel = kernel
        self._plan: PlanCache[Segments, Packing] = PlanCache(
            lambda s: Packing(s.cu_seqlens_q, s.cu_seqlens_k, bound(s.lengths_q), s.max_k)
        )

    def __call__(
        self,
        q_THD: torch.Tensor,
        k_SKD: torch.Tensor,
        v_SKD: torch.Tensor,
        segments: Segments,
        sinks_H: torch.Tensor | None = None,
    ) -> torch.Tensor:
        packing = self._plan(segments)
        if packing.max_q == 0 or packing.max_k == 0:
            return q_THD.new_zeros(q_THD.shape)
        return self.kernel.packed(q_THD, k_SKD, v_SKD, packing, sinks_H).contiguous()


@dataclass(frozen=True, eq=False)
class StepPlan:
    """How a step reads its keys: `rows` of the cache; None where it brings them all or the kernel reads the cache."""

    packing: Packing
    rows: torch.Tensor | None


class PackedPaged:
    """Decoder self-attention over a paged cache (vlm.attention.op.PagedAttention)."""

    def __init__(self, kernel: PackedKernel, window: int | None) -> None:
        self.kernel = kernel
        self._window = window
        self._plan: PlanCache[PagedStep, StepPlan] = PlanCache(self._make_plan)

    def _make_plan(self, step: PagedStep) -> StepPlan:
        cu_q, max_q = step.cu_seqlens_q, bound(step.query_lens)
        if step.fresh:
            return StepPlan(Packing(cu_q, cu_q, max_q, max(step.kv_lens, default=0)), None)
        if self.kernel.reads_cache:
            return StepPlan(Packing(cu_q, cu_q, max_q, max(step.kv_lens)), None)
        starts = [
            first_key(q, kv, self._window) if q else kv for q, kv in zip(step.query_lens, step.kv_lens, strict=True)
        ]
        rows, lengths = packed_rows(step, starts)
        cu_k = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=cu_q.device)
        return StepPlan(Packing(cu_q, cu_k, max_q, max(lengths), masked=not step.decode), rows)

    def __call__(
        self,
        q_THD: torch.Tensor,
        k_TKD: torch.Tensor,
        v_TKD: torch.Tensor,
        cache: LayerCache,
        step: PagedStep,
        sinks_H: torch.Tensor | None = None,
    ) -> torch.Tensor:
        write(cache, k_TKD, v_TKD, step)
        plan = self._plan(step)
        if plan.packing.max_q == 0 or plan.packing.max_k == 0:
            return q_THD.new_zeros(q_THD.shape)
        if step.fresh:
            k, v = k_TKD, v_TKD
        elif plan.rows is None:
            return self.kernel.in_place(q_THD, cache, step, sinks_H).contiguous()
        else:
            k, v = rows_of(cache.k).index_select(0, plan.rows), rows_of(cache.v).index_select(0, plan.rows)
        return self.kernel.packed(q_THD, k, v, plan.packing, sinks_H).contiguous()
