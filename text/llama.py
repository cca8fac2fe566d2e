"""The Llama decoder (Llama 2 and 3, SmolLM2): grouped-query attention, gated SiLU MLP, rotary positions in one axis."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vlm.text.layers import Decoder, DecoderConfig
from vlm.text.rope import RopeConfig


@dataclass(frozen=True)
class LlamaConfig(DecoderConfig):
    @classmethod
    def from_hf(cls, hf: Mapping[str, Any], tie_word_embeddings: bool) -> LlamaConfig:
        """From the text part of config.json, as transformers 4 or 5 write it.

        Raises KeyError for a missing field, ValueError for one that makes no sense, NotImplementedError for what is not
        served.
        """
        if (act := hf.get("hidden_act", "silu")) != "silu":
            raise NotImplementedError(f"hidden_act {act!r} in the Llama decoder (supported: silu)")
        hidden, num_heads = int(hf["hidden_size"]), int(hf["num_attention_heads"])
        if not hf.get("head_dim") and hidden % num_heads:
            raise ValueError(f"hidden_size {hidden} is no multiple of num_attention_heads {num_heads}")
        attention_bias = bool(hf.get("attention_bias", False))
        return cls(
            vocab_size=int(hf["vocab_size"]),
            hidden_size=hidden,
            intermediate_size=int(hf["intermediate_size"]),
            num_layers=int(hf["num_hidden_layers"]),
            num_heads=num_heads,
            num_kv_heads=int(hf.get("num_key_value_heads") or num_heads),
            head_dim=int(hf.get("head_dim") or hidden // num_heads),
            rms_norm_eps=float(hf.get("rms_norm_eps", 1e-6)),
            rope=RopeConfig.from_hf(hf, default_theta=1e4),
            max_position_embeddings=int(hf.get("max_position_embeddings", 2048)),
            tie_word_embeddings=tie_word_embeddings,
            qkv_bias=attention_bias,
            output_bias=attention_bias,
            mlp_bias=bool(hf.get("mlp_bias", False)),
        )


class LlamaDecoder(Decoder):
    """See `Decoder`; positions are (T,)."""
