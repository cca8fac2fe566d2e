"""The parts of decoders: norm, attention over a paged cache, gated MLP, and the stack that they make.

Model files say which config fields become which of these parts. Attention arrives as a value; nothing here knows its
backend.

Legend: T packed new tokens of all sequences, C hidden size, H query heads, K key/value heads, D head_dim, R = D / 2.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import nn

from vlm.attention.layout import LayerCache, PagedStep
from vlm.attention.spec import AttentionSpec, Feature
from vlm.kernels.ops import apply_rotary, rms_norm, silu_mul
from vlm.text.rope import RopeConfig, Rotary

DecoderAttention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, LayerCache, PagedStep], torch.Tensor]


@dataclass(frozen=True)
class DecoderConfig:
    """Shape of a decoder.

    Attributes:
        qkv_bias, output_bias, mlp_bias: which linears carry a bias.
        sliding_window: keys that a token of a windowed layer sees, itself included. windowed: which layers are
            windowed.
        tie_word_embeddings: the output head is the embedding matrix.
        max_position_embeddings: the context that the model was trained for, tokens.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    tie_word_embeddings: bool
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    sliding_window: int | None = None
    windowed: tuple[bool, ...] = ()

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"{self.num_heads} attention heads are no multiple of {self.num_kv_heads} key/value heads")
        if self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} is odd, which rotary positions do not allow")

    def group_of(self, layer: int) -> str:
        """The layer group of a layer: "text", or "text.window" where it slides."""
        return "text.window" if self.windowed and self.windowed[layer] else "text"

    def attention_specs(self, dtype: str) -> dict[str, AttentionSpec]:
        """Layer groups by name, for those that have layers."""
        features: frozenset[Feature] = frozenset({"varlen", "causal", "paged"})
        full = AttentionSpec("decoder", self.head_dim, self.num_heads, self.num_kv_heads, dtype, features=features)
        window = replace(full, features=features | {"sliding_window"}, window=self.sliding_window)
        used = {self.group_of(i) for i in range(self.num_layers)}
        return {name: spec for name, spec in (("text", full), ("text.window", window)) if name in used}


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, self.eps)


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)), gate and up as one matrix product."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.gate_up = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=config.mlp_bias)
        self.down = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)

    def forward(self, x_TC: torch.Tensor) -> torch.Tensor:
        return self.down(silu_mul(self.gate_up(x_TC)))


class Attention(nn.Module):
    """Grouped-query self-attention over a paged KV cache, the three projections as one matrix product."""

    def __init__(self, config: DecoderConfig, attention: DecoderAttention) -> None:
        super().__init__()
        self.heads = (config.num_heads, config.num_kv_heads)
        self.head_dim = config.head_dim
        rows = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
        self.qkv = nn.Linear(config.hidden_size, rows, bias=config.qkv_bias)
        self.out = nn.Linear(config.num_heads * config.head_dim, config.hidden_size, bias=config.output_bias)
        self.attention = attention

    def forward(
        self, x_TC: torch.Tensor, cos_TR: torch.Tensor, sin_TR: torch.Tensor, cache: LayerCache, step: PagedStep
    ) -> torch.Tensor:
        num_heads, num_kv_heads = self.heads
        qkv = self.qkv(x_TC).unflatten(-1, (num_heads + 2 * num_kv_heads, self.head_dim))
        qk, v_TKD = qkv.split((num_heads + num_kv_heads, num_kv_heads), dim=1)
        q_THD, k_TKD = apply_rotary(qk, cos_TR, sin_TR).split((num_heads, num_kv_heads), dim=1)
        return self.out(self.attention(q_THD, k_TKD, v_TKD, cache, step).flatten(1))


class DecoderLayer(nn.Module):
    def __init__(self, config: DecoderConfig, attention: DecoderAttention) -> None:
        super().__init__()
        self.attn_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attn = Attention(config, attention)
        self.mlp_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = GatedMLP(config)

    def forward(
        self, x_TC: torch.Tensor, cos_TR: torch.Tensor, sin_TR: torch.Tensor, cache: LayerCache, step: PagedStep
    ) -> torch.Tensor:
        x_TC = x_TC + self.attn(self.attn_norm(x_TC), cos_TR, sin_TR, cache, step)
        return x_TC + self.mlp(self.mlp_norm(x_TC))


class Decoder(nn.Module):
    """Embeddings and positions in, hidden states and logits out.

    Args:
        attention: one op a layer, `op(q_THD, k_TKD, v_TKD, cache, step) -> (T, H, D)`, which writes the cache and
            attends causally.
    """

    def __init__(self, config: DecoderConfig, attention: Sequence[DecoderAttention]) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.rotary = Rotary(config.rope, config.head_dim)
        self.layers = nn.ModuleList(DecoderLayer(config, op) for op in attention)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = (
            None if config.tie_word_embeddings else nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        )

    def forward(
        self, x_TC: torch.Tensor, positions: torch.Tensor, caches: Sequence[LayerCache], step: PagedStep
    ) -> torch.Tensor:
        """(T, C) embeddings at (T,) or (3, T) positions -> (T, C) after the last norm."""
        cos_TR, sin_TR = self.rotary(positions)
        for layer, cache in zip(self.layers, caches, strict=True):
            x_TC = layer(x_TC, cos_TR, sin_TR, cache, step)
        return self.norm(x_TC)

    def logits(self, hidden_RC: torch.Tensor) -> torch.Tensor:
        """(rows, C) -> (rows, vocab)."""
        return F.linear(hidden_RC, (self.embed_tokens if self.lm_head is None else self.lm_head).weight)


def layer_ops(config: DecoderConfig, ops: Mapping[str, DecoderAttention]) -> list[DecoderAttention]:
    """The op of each layer out of those of the layer groups."""
    return [ops[config.group_of(i)] for i in range(config.num_layers)]


def decoder_weight_map(config: DecoderConfig, stack: str, head: str) -> dict[str, tuple[str, ...]]:
    """Parameter name -> checkpoint names below `stack` ("model."), and `head`, the name of the output head."""
    names: dict[str, tuple[str, ...]] = {
        "embed_tokens.weight": (f"{stack}embed_tokens.weight",),
        "norm.weight": (f"{stack}norm.weight",),
    }
    if not config.tie_word_embeddings:
        names["lm_head.weight"] = (head,)
    linears = {
        "attn.qkv": (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), config.qkv_bias),
        "attn.out": (("self_attn.o_proj",), config.output_bias),
        "mlp.gate_up": (("mlp.gate_proj", "mlp.up_proj"), config.mlp_bias),
        "mlp.down": (("mlp.down_proj",), config.mlp_bias),
    }
    norms = {"attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
    for i in range(config.num_layers):
        ours, theirs = f"layers.{i}.", f"{stack}layers.{i}."
        for name, source in norms.items():
            names[f"{ours}{name}.weight"] = (f"{theirs}{source}.weight",)
        for name, (sources, has_bias) in linears.items():
            for kind in ("weight", "bias") if has_bias else ("weight",):
                names[f"{ours}{name}.{kind}"] = tuple(f"{theirs}{source}.{kind}" for source in sources)
    return names
