"""The Qwen2 decoder as Qwen2.5-VL uses it.

Grouped-query attention with biases on q, k and v, gated SiLU MLP, rotary positions in three axes (mrope).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from vlm.text.layers import Decoder, DecoderConfig
from vlm.text.rope import RopeConfig

# The sections of every published Qwen2.5-VL; a config that leaves them out means these.
_SECTIONS = (16, 24, 24)


@dataclass(frozen=True)
class Qwen2Config(DecoderConfig):
    @classmethod
    def from_hf(cls, hf: Mapping[str, Any], tie_word_embeddings: bool) -> Qwen2Config:
        """From the text part of config.json, as transformers 4 or 5 write it.

        Raises KeyError for a missing field, ValueError for one that makes no sense, NotImplementedError for what is not
        served.
        """
        if (act := hf.get("hidden_act", "silu")) != "silu":
            raise NotImplementedError(f"hidden_act {act!r} in the Qwen2 decoder (supported: silu)")
        num_layers, hidden = int(hf["num_hidden_layers"]), int(hf["hidden_size"])
        num_heads = int(hf["num_attention_heads"])
        if hidden % num_heads:
            raise ValueError(f"hidden_size {hidden} is no multiple of num_attention_heads {num_heads}")
        rope = RopeConfig.from_hf(hf, default_theta=1e6)
        rope = replace(rope, sections=rope.sections or _SECTIONS)
        if sum(rope.sections) != hidden // num_heads // 2:
            raise ValueError(
                f"mrope_section {list(rope.sections)} does not sum to half of head_dim {hidden // num_heads}"
            )
        windowed = _windowed_layers(hf, num_layers)
        return cls(
            vocab_size=int(hf["vocab_size"]),
            hidden_size=hidden,
            intermediate_size=int(hf["intermediate_size"]),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=int(hf.get("num_key_value_heads") or num_heads),
            head_dim=hidden // num_heads,
            rms_norm_eps=float(hf.get("rms_norm_eps", 1e-5)),
            rope=rope,
            max_position_embeddings=int(hf.get("max_position_embeddings", 32768)),
            tie_word_embeddings=tie_word_embeddings,
            qkv_bias=True,
            sliding_window=int(hf["sliding_window"]) if any(windowed) else None,
            windowed=windowed,
        )


def _windowed_layers(hf: Mapping[str, Any], num_layers: int) -> tuple[bool, ...]:
    """Which layers slide: those that `layer_types` names, else those from max_window_layers on; none unless switched
    on."""
    if not hf.get("use_sliding_window") or not hf.get("sliding_window"):
        return ()
    if kinds := hf.get("layer_types"):
        if len(kinds) != num_layers:
            raise ValueError(f"{len(kinds)} layer_types for {num_layers} layers")
        return tuple(kind == "sliding_attention" for kind in kinds)
    first = int(hf.get("max_window_layers", num_layers))
    return tuple(i >= first for i in range(num_layers))


class Qwen2Decoder(Decoder):
    """See `Decoder`; positions are (3, T)."""
