"""Attention through our own Triton kernels. Which tile runs was settled when the layer group was built.

Tolerance against a dense float32 reference, absolute, for unit-normal inputs: 2e-5 in float32 (1e-5 at the sizes of the
tests), 3e-3 in float16 and 2e-2 in bfloat16.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from vlm.attention.backends import get_backend
from vlm.attention.backends.packed import PackedPaged
from vlm.attention.backends.torch_efficient_op import EfficientKernel
from vlm.attention.backends.triton import tiles_of
from vlm.attention.capability import reasons
from vlm.attention.layout import LayerCache, PagedStep, Segments
from vlm.attention.platform import Platform
from vlm.attention.spec import AttentionSpec, Decision
from vlm.kernels.paged import paged_attention, write_kv
from vlm.kernels.tiles import SHORT, Tile, decode_splits
from vlm.kernels.varlen import varlen_attention


@dataclass(frozen=True)
class Settings:
    """Of one layer group, as the kernels take them."""

    scale: float
    window: int | None
    softcap: float | None

    @classmethod
    def of(cls, spec: AttentionSpec) -> Settings:
        window = spec.window if "sliding_window" in spec.features else None
        softcap = spec.softcap if "softcap" in spec.features else None
        assert window or "sliding_window" not in spec.features, "a sliding window needs a width"
        assert softcap or "softcap" not in spec.features, "a softcap needs its cap"
        return cls(spec.softmax_scale, window, softcap)

    def arguments(self, sinks_H: torch.Tensor | None) -> dict[str, Any]:
        return {"scale": self.scale, "window": self.window, "softcap": self.softcap, "sinks_H": sinks_H}


class TritonSegments:
    """Encoder self-attention and cross-attention (vlm.attention.op.SegmentAttention)."""

    def __init__(self, spec: AttentionSpec, long: Tile, short: Tile) -> None:
        self._settings = Settings.of(spec)
        self._causal = "causal" in spec.features
        self._long, self._short = long, short

    def __call__(
        self,
        q_THD: torch.Tensor,
        k_SKD: torch.Tensor,
        v_SKD: torch.Tensor,
        segments: Segments,
        sinks_H: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return varlen_attention(
            q_THD,
            k_SKD,
            v_SKD,
            segments.cu_seqlens_q,
            segments.cu_seqlens_k,
            segments.max_q,
            tile=self._short if segments.max_q <= SHORT else self._long,
            causal=self._causal,
            **self._settings.arguments(sinks_H),
        )


class TritonPaged:
    """Decoder self-attention over a paged cache (vlm.attention.op.PagedAttention).

    A step of fresh prompts attends to the keys that it brings; any other reads the cache in place. `prompts` takes the
    fresh prompts where another kernel does them better (Turing, whose tensor cores Triton does not use).
    """

    def __init__(
        self, spec: AttentionSpec, packed: Tile, paged: Tile, decode: Tile, processors: int, prompts: PackedPaged | None
    ) -> None:
        self._settings = Settings.of(spec)
        self._rule, self._spans = spec.span_rule, "image_spans" in spec.features
        self._packed, self._paged, self._decode = packed, paged, decode
        self._kv_heads, self._processors = spec.num_kv_heads, processors
        self._prompts = prompts

    def __call__(
        self,
        q_THD: torch.Tensor,
        k_TKD: torch.Tensor,
        v_TKD: torch.Tensor,
        cache: LayerCache,
        step: PagedStep,
        sinks_H: torch.Tensor | None = None,
    ) -> torch.Tensor:
        max_q = max(step.query_lens, default=0)
        fresh = step.fresh and max_q > 1
        if fresh and self._prompts is not None:
            return self._prompts(q_THD, k_TKD, v_TKD, cache, step, sinks_H)
        write_kv(k_TKD, v_TKD, cache.k, cache.v, step.slots_T)
        options = self._settings.arguments(sinks_H)
        if self._spans:
            assert step.spans_T2 is not None, "a layer group with image spans needs them in each step"
            options |= {"spans_T2": step.spans_T2, "span_rule": self._rule}
        if fresh:
            cu_seqlens = step.cu_seqlens_q
            return varlen_attention(
                q_THD, k_TKD, v_TKD, cu_seqlens, cu_seqlens, max_q, tile=self._packed, causal=True, **options
            )
        # What the tables can hold and not what they hold: a captured graph serves every length up to that.
        longest = step.block_tables.shape[1] * step.block_size
        splits = decode_splits(
            len(step.kv_lens), self._kv_heads, longest, processors=self._processors, block_n=self._decode.block_n
        )
        return paged_attention(
            q_THD,
            cache.k,
            cache.v,
            step.cu_seqlens_q,
            step.kv_lens_N,
            step.block_tables,
            max_q,
            prefill=self._paged,
            decode=self._decode,
            num_splits=splits,
            has_decode=1 in step.query_lens,
            **options,
        )


def _prompts(spec: AttentionSpec, platform: Platform) -> PackedPaged | None:
    """torch's memory-efficient kernel for fresh prompts on CUDA below 8.0, where it can do what the layers need."""
    before_ampere = platform.kind == "cuda" and (platform.capability or (0, 0)) < (8, 0)
    if before_ampere and not reasons(get_backend("torch_efficient").capability, spec, platform):
        return PackedPaged(EfficientKernel(spec), None)
    return None


def construct(decision: Decision, spec: AttentionSpec, platform: Platform) -> TritonSegments | TritonPaged:
    tiles = [tile for tile in tiles_of(spec, platform) if isinstance(tile, Tile)]
    if spec.role != "decoder":
        long, short = tiles
        return TritonSegments(spec, long, short)
    packed, paged, decode = tiles
    return TritonPaged(spec, packed, paged, decode, platform.processors, _prompts(spec, platform))
