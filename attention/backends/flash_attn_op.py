"""Attention through the upstream FlashAttention packages: one adapter a provider, all with the same settings.

Tolerance: 3e-3 in float16 and 2e-2 in bfloat16, absolute, for unit-normal inputs.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch

from vlm.attention.backends.packed import PackedPaged, PackedSegments, Packing, window_size
from vlm.attention.layout import LayerCache, PagedStep
from vlm.attention.platform import Platform
from vlm.attention.spec import AttentionSpec, Decision


class FlashKernel:
    """flash_attn_varlen_func with the settings of one layer group, in FlashAttention-2's calling convention."""

    reads_cache = False
    sinks_argument: str | None = None
    unbounded: int | None = -1  # how an open side of a window is written

    def __init__(self, module: Any, spec: AttentionSpec) -> None:
        self._module = module
        causal = spec.role == "decoder" or "causal" in spec.features
        self._unmasked: dict[str, Any] = {"softmax_scale": spec.softmax_scale}
        if "softcap" in spec.features:
            assert spec.softcap, "a softcap needs its cap"
            self._unmasked["softcap"] = spec.softcap
        self._masked = {**self._unmasked, "causal": causal}
        if "sliding_window" in spec.features:
            self._masked["window_size"] = tuple(
                self.unbounded if side < 0 else side for side in window_size(spec, causal)
            )

    def _sinks(self, sinks_H: torch.Tensor | None) -> dict[str, Any]:
        if sinks_H is None:
            return {}
        assert self.sinks_argument is not None, "this provider declares no sinks"
        return {self.sinks_argument: sinks_H}

    def packed(
        self,
        q_THD: torch.Tensor,
        k_SKD: torch.Tensor,
        v_SKD: torch.Tensor,
        packing: Packing,
        sinks_H: torch.Tensor | None,
    ) -> torch.Tensor:
        return self._output(
            self._module.flash_attn_varlen_func(
                q_THD,
                k_SKD,
                v_SKD,
                cu_seqlens_q=packing.cu_seqlens_q,
                cu_seqlens_k=packing.cu_seqlens_k,
                max_seqlen_q=packing.max_q,
                max_seqlen_k=packing.max_k,
                **(self._masked if packing.masked else self._unmasked),
                **self._sinks(sinks_H),
            )
        )

    def in_place(
        self, q_THD: torch.Tensor, cache: LayerCache, step: PagedStep, sinks_H: torch.Tensor | None
    ) -> torch.Tensor:
        raise AssertionError("this provider's paged cache is not used: the declaration says why")

    @staticmethod
    def _output(result: Any) -> torch.Tensor:
        """Some providers and releases return the output alone, some with the log-sum-exp."""
        out: torch.Tensor = result[0] if isinstance(result, tuple) else result
        return out


class Fa3Kernel(FlashKernel):
    """FlashAttention-3. It reads a paged cache of any block size."""

    reads_cache = True

    def in_place(
        self, q_THD: torch.Tensor, cache: LayerCache, step: PagedStep, sinks_H: torch.Tensor | None
    ) -> torch.Tensor:
        return self._output(
            self._module.flash_attn_with_kvcache(
                q_THD,
                cache.k,
                cache.v,
                cache_seqlens=step.kv_lens_N,
                page_table=step.block_tables,
                cu_seqlens_q=step.cu_seqlens_q,
                max_seqlen_q=max(step.query_lens),
                **self._masked,
                **self._sinks(sinks_H),
            )
        )


class Fa3ForwardKernel(FlashKernel):
    """fa3-fwd: FlashAttention-3's convention, built without paging and without windows."""


class Fa4Kernel(FlashKernel):
    """FlashAttention-4."""

    sinks_argument = "learnable_sink"
    unbounded = None


KERNELS: dict[str, type[FlashKernel]] = {
    "flash_attn": FlashKernel,
    "flash_attn_interface": Fa3Kernel,
    "fa3_fwd_interface": Fa3ForwardKernel,
    "flash_attn.cute": Fa4Kernel,
}


def construct(decision: Decision, spec: AttentionSpec, platform: Platform) -> PackedSegments | PackedPaged:
    kernel = KERNELS[decision.provider](import_module(decision.provider), spec)
    if spec.role == "decoder":
        return PackedPaged(kernel, spec.window if "sliding_window" in spec.features else None)
    return PackedSegments(kernel)
