"""What a vision model declares about itself."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class VisionSpec:
    """The declaration of a vision model. Nothing has a default: whoever adds a model says it.

    Attributes:
        name: how reports and `vlm models` call it.
        upstream_fa: whether the upstream FlashAttention package may stand in front of its default backends.
        reason: why, in a sentence.
    """

    name: str
    upstream_fa: bool
    reason: str
