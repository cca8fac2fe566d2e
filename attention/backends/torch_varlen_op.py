"""Attention through torch.nn.attention.varlen.

Tolerance: 3e-3 in float16 and 2e-2 in bfloat16, absolute, for unit-normal inputs.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch.nn.attention import varlen

from vlm.attention.backends.packed import PackedPaged, PackedSegments, Packing, window_size
from vlm.attention.layout import LayerCache, PagedStep
from vlm.attention.platform import Platform
from vlm.attention.spec import AttentionSpec, Decision


class TorchVarlenKernel:
    """varlen_attn with the settings of one layer group."""

    reads_cache = False

    def __init__(self, spec: AttentionSpec) -> None:
        self._scale = spec.softmax_scale
        self._window = window_size(spec, spec.role == "decoder" or "causal" in spec.features)
        # The kernel groups heads in every release; from 2.12 the function in front of it wants to be told.
        asks = "enable_gqa" in inspect.signature(varlen.varlen_attn).parameters
        self._gqa: dict[str, Any] = {"enable_gqa": True} if asks and spec.num_heads != spec.num_kv_heads else {}

    def packed(
        self,
        q_THD: torch.Tensor,
        k_SKD: torch.Tensor,
        v_SKD: torch.Tensor,
        packing: Packing,
        sinks_H: torch.Tensor | None,
    ) -> torch.Tensor:
        assert sinks_H is None, "this backend declares no sinks"
        out = varlen.varlen_attn(
            q_THD,
            k_SKD,
            v_SKD,
            packing.cu_seqlens_q,
            packing.cu_seqlens_k,
            packing.max_q,
            packing.max_k,
            scale=self._scale,
            window_size=self._window if packing.masked else (-1, -1),
            **self._gqa,
        )
        assert isinstance(out, torch.Tensor)
        return out

    def in_place(
        self, q_THD: torch.Tensor, cache: LayerCache, step: PagedStep, sinks_H: torch.Tensor | None
    ) -> torch.Tensor:
        raise AssertionError("this kernel does not read the cache: its declaration says why")


def construct(decision: Decision, spec: AttentionSpec, platform: Platform) -> PackedSegments | PackedPaged:
    kernel = TorchVarlenKernel(spec)
    if spec.role == "decoder":
        return PackedPaged(kernel, spec.window if "sliding_window" in spec.features else None)
    return PackedSegments(kernel)
