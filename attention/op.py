"""How a layer calls its attention. A backend constructs one of these two for a layer group; all its layers share it.

T query tokens and S key tokens are packed; H query heads, K key/value heads, D head_dim. Inputs may be strided views
(of a fused QKV) with a contiguous last dimension; the result is contiguous. A query that may see no key gives zeros.
"""

from __future__ import annotations

from typing import Protocol

import torch

from vlm.attention.layout import LayerCache, PagedStep, Segments


class SegmentAttention(Protocol):
    """Encoder self-attention and cross-attention."""

    def __call__(
        self,
        q_THD: torch.Tensor,
        k_SKD: torch.Tensor,
        v_SKD: torch.Tensor,
        segments: Segments,
        sinks_H: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """(T, H, D): each query attends to the keys of its own segment. `sinks_H` where the spec needs sinks."""


class PagedAttention(Protocol):
    """Decoder self-attention over a paged KV cache."""

    def __call__(
        self,
        q_THD: torch.Tensor,
        k_TKD: torch.Tensor,
        v_TKD: torch.Tensor,
        cache: LayerCache,
        step: PagedStep,
        sinks_H: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Write the new keys and values into the cache at step.slots_T, then attend causally. (T, H, D)."""
