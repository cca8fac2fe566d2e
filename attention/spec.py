"""The values that go into the attention factory and the value that comes out. Pure data: no torch, no globals.

Dtypes are named as torch names them without the module: "float32", "float16", "bfloat16", "float8_e4m3fn".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

Role = Literal["encoder", "decoder", "cross"]
ROLES: tuple[Role, ...] = get_args(Role)
Source = Literal["explicit", "upgrade", "default"]

Feature = Literal[
    "varlen",  # packed sequences with cu_seqlens
    "causal",  # aligned to the last key (bottom right) where there are more keys than queries
    "paged",  # keys and values live in blocks of a paged cache
    "sliding_window",  # AttentionSpec.window keys to the left (and right, when not causal)
    "softcap",  # scores pass through cap * tanh(score / cap)
    "sinks",  # one learned logit a head joins the softmax
    "image_spans",  # bidirectional spans inside a causal prefix
]
FEATURES: tuple[Feature, ...] = get_args(Feature)
SpanRule = Literal["or", "and"]


@dataclass(frozen=True)
class AttentionSpec:
    """What one layer group needs from attention.

    Attributes:
        role: `encoder` self-attention over packed sequences, `decoder` self-attention over a KV cache, or `cross`.
        head_dim: width of one head as the model defines it, before any padding that a backend may do.
        num_heads, num_kv_heads: query heads and key/value heads (GQA when they differ).
        dtype: compute dtype; kv_cache_dtype: storage dtype of the cache (None: the compute dtype).
        features: what the layers use besides plain softmax attention.
        scale: multiplies the scores; None means head_dim ** -0.5.
        window: keys that a query sees to its left, itself included, when `sliding_window` is needed (1 is a window).
        softcap: the cap, when `softcap` is needed.
        span_rule: how image spans and a window combine: "or" is (causal and window) or span, "and" is (causal or span)
            and window, where the window bounds the left side.
        upstream_fa_unsuitable: a reason why this layer group stays out of its model's upgrade, or "".
    """

    role: Role
    head_dim: int
    num_heads: int
    num_kv_heads: int
    dtype: str
    kv_cache_dtype: str | None = None
    features: frozenset[Feature] = frozenset()
    scale: float | None = None
    window: int | None = None
    softcap: float | None = None
    span_rule: SpanRule = "or"
    upstream_fa_unsuitable: str = ""

    @property
    def softmax_scale(self) -> float:
        return self.head_dim**-0.5 if self.scale is None else self.scale


@dataclass(frozen=True)
class Preference:
    """The backend that the user configured for a role, or none, and where the setting came from.

    `origin` reads as in a sentence: "argument attention=", "environment variable VLM_VISION_ATTENTION".
    """

    backend: str | None = None
    origin: str = ""


@dataclass(frozen=True)
class Rejection:
    """One candidate that was passed over, and the typed reason (`capability: ...`, `dtype: ...`, `feature:softcap`)."""

    backend: str
    reason: str

    def as_dict(self) -> dict[str, str]:
        return {"backend": self.backend, "reason": self.reason}


@dataclass(frozen=True)
class Decision:
    """Which backend a layer group runs on, and why.

    Attributes:
        backend: name in the table of backends.
        provider, provider_version: the package that does the work ("torch", "flash_attn.cute"), and its version or "".
        source: `explicit` (configured), `upgrade` (the opt-in) or `default` (the row of the table).
        reasons: sentences, in the order in which the rules were applied. rejected: the candidates passed over.
        group: the layer group that it answers ("vision.full"), filled in when a model is built; else "".
    """

    backend: str
    provider: str
    provider_version: str
    source: Source
    reasons: tuple[str, ...] = ()
    rejected: tuple[Rejection, ...] = ()
    group: str = ""

    def as_dict(self) -> dict[str, Any]:
        """The JSON object of `vlm explain --json`."""
        provider = f"{self.provider} {self.provider_version}".strip()
        out: dict[str, Any] = {
            "backend": self.backend,
            "provider": provider,
            "source": self.source,
            "reasons": list(self.reasons),
            "rejected": [r.as_dict() for r in self.rejected],
        }
        return {"group": self.group, **out} if self.group else out
