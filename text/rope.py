"""Rotary position embedding of decoders: the frequencies that a checkpoint's config asks for, and the angles of a step.

Legend: T tokens, D head_dim, R = D / 2 frequencies.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

KINDS = ("default", "linear", "llama3", "yarn")
_TUNABLE = ("factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor", "truncate")


@dataclass(frozen=True)
class RopeConfig:
    """Which frequencies a decoder rotates with.

    Attributes:
        theta: base of the geometric series. kind: one of KINDS. factor: how far the context was stretched.
        low_freq_factor, high_freq_factor: llama3's bounds, in turns over the original context.
        beta_fast, beta_slow, attention_factor, truncate: yarn's parameters (https://arxiv.org/abs/2309.00071).
        original_context: max_position_embeddings before stretching (llama3 and yarn).
        sections: mrope: how many frequencies follow the temporal, height and width position; () for one position a
            token.
    """

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    truncate: bool = True
    original_context: int = 0
    sections: tuple[int, ...] = ()

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any], default_theta: float) -> RopeConfig:
        """Read `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before).

        Raises NotImplementedError for a kind outside KINDS, ValueError for parameters that contradict each other.
        """
        scaling = dict(hf.get("rope_parameters") or hf.get("rope_scaling") or {})
        kind = scaling.get("rope_type") or scaling.get("type") or "default"
        if kind == "mrope":  # how Qwen2-VL spelt it: the sections alone make it multi-dimensional
            kind = "default"
        if kind not in KINDS:
            raise NotImplementedError(f"rope type {kind!r} (supported: {', '.join(KINDS)})")
        if (part := scaling.get("partial_rotary_factor") or hf.get("partial_rotary_factor") or 1) != 1:
            raise NotImplementedError(f"partial_rotary_factor {part}")
        if scaling.get("mscale") and scaling.get("mscale_all_dim"):
            raise NotImplementedError("rope parameters mscale and mscale_all_dim")
        theta = scaling.get("rope_theta") or hf.get("rope_theta") or default_theta
        given = {name: scaling[name] for name in _TUNABLE if scaling.get(name) is not None}
        if kind != "default" and "factor" not in given:
            raise ValueError(f"rope type {kind!r} needs a factor")
        original = scaling.get("original_max_position_embeddings") or hf.get("max_position_embeddings") or 0
        if kind in ("llama3", "yarn") and not original:
            raise ValueError(f"rope type {kind!r} needs original_max_position_embeddings")
        sections = tuple(int(n) for n in scaling.get("mrope_section") or ())
        return cls(theta=float(theta), kind=kind, original_context=int(original), sections=sections, **given)

    @property
    def attention_scaling(self) -> float:
        """What cosines and sines are multiplied by: 1 but for yarn."""
        if self.kind != "yarn":
            return 1.0
        if self.attention_factor is not None:
            return float(self.attention_factor)
        return 0.1 * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """float32 (R,) on the CPU, whatever the default device is: radians per position."""
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
    inv_freq = 1.0 / (rope.theta**exponent)
    if rope.kind == "linear":
        return inv_freq / rope.factor
    if rope.kind == "llama3":
        return _llama3(inv_freq, rope)
    if rope.kind == "yarn":
        return _yarn(inv_freq, rope, head_dim)
    return inv_freq


def _llama3(inv_freq: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
    """Long wavelengths are stretched by the factor, short ones kept, those between blended by their turns over the
    context."""
    turns = rope.original_context * inv_freq / (2 * math.pi)
    keep = ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0, 1)
    return inv_freq * (keep + (1 - keep) / rope.factor)


def _yarn(inv_freq: torch.Tensor, rope: RopeConfig, head_dim: int) -> torch.Tensor:
    def dim_of(turns: float) -> float:
        return head_dim * math.log(rope.original_context / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dim_of(rope.beta_fast), dim_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    span = high - low if high != low else 0.001
    index = torch.arange(head_dim // 2, dtype=torch.float32, device="cpu")
    keep = 1 - ((index - low) / span).clamp(0, 1)
    return inv_freq * (keep + (1 - keep) / rope.factor)


class Rotary(nn.Module):
    """Positions -> float32 cosines and sines, (T, R) each.

    With `rope.sections`, positions may be (3, T) (temporal, height, width: mrope, https://arxiv.org/abs/2409.12191);
    each run of frequencies follows its own axis. Positions of (T,) put all axes at the same place.
    """

    inv_freq_R: torch.Tensor
    axis_R: torch.Tensor

    def __init__(self, rope: RopeConfig, head_dim: int) -> None:
        super().__init__()
        assert not rope.sections or sum(rope.sections) == head_dim // 2
        self.scaling = rope.attention_scaling
        self.register_buffer("inv_freq_R", inverse_frequencies(rope, head_dim), persistent=False)
        axes = [i % 3 for i, count in enumerate(rope.sections) for _ in range(count)]
        self.register_buffer("axis_R", torch.tensor(axes, dtype=torch.int64, device="cpu"), persistent=False)

    def forward(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        per_token = positions[self.axis_R].t() if positions.ndim == 2 else positions[:, None]
        angles_TR = per_token.float() * self.inv_freq_R
        return angles_TR.cos() * self.scaling, angles_TR.sin() * self.scaling
