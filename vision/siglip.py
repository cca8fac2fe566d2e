"""The SigLIP vision encoder (https://arxiv.org/abs/2303.15343) in the form of Idefics3 and SmolVLM.

Pictures come as square tiles, positions are learned. The position table belongs to the tile size of the config; a tile
of another size looks its positions up by bucketing, as NaViT does.

Legend: N tiles, S patches a tile, T = N * S, C hidden size, H heads, D head_dim.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from vlm.attention.layout import Segments
from vlm.attention.spec import AttentionSpec
from vlm.vision.spec import VisionSpec

SPEC = VisionSpec(
    name="SigLIP ViT",
    upstream_fa=False,
    reason="tiles are short and all of one length with head_dim 64 or 72, which torch's own kernels serve well: "
    "nothing to gain that justifies another package",
)

EncoderAttention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Segments], torch.Tensor]
_GELU = {"gelu_pytorch_tanh": "tanh", "gelu": "none"}


@dataclass(frozen=True)
class SiglipConfig:
    """Shape of the encoder. `image_size` and `patch_size` are pixels a side; `gelu`: torch's name of the
    approximation."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_channels: int
    image_size: int
    patch_size: int
    layer_norm_eps: float
    gelu: str

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> SiglipConfig:
        """From vision_config; published SmolVLM configs leave out what equals the reference's defaults.

        Raises ValueError for what makes no sense and NotImplementedError for what is not served.
        """
        act = hf.get("hidden_act", "gelu_pytorch_tanh")
        if act not in _GELU:
            raise NotImplementedError(
                f"hidden_act {act!r} in the SigLIP vision encoder (supported: {', '.join(_GELU)})"
            )
        hidden, heads = int(hf.get("hidden_size", 1152)), int(hf.get("num_attention_heads", 16))
        if hidden % heads:
            raise ValueError(f"vision hidden_size {hidden} is no multiple of num_attention_heads {heads}")
        return cls(
            num_layers=int(hf.get("num_hidden_layers", 12)),
            hidden_size=hidden,
            intermediate_size=int(hf.get("intermediate_size", 3072)),
            num_heads=heads,
            num_channels=int(hf.get("num_channels", 3)),
            image_size=int(hf.get("image_size", 224)),
            patch_size=int(hf.get("patch_size", 32)),
            layer_norm_eps=float(hf.get("layer_norm_eps", 1e-6)),
            gelu=_GELU[act],
        )

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def grid(self) -> int:
        """Patches a side of a tile of the size that the model was trained for."""
        return self.image_size // self.patch_size

    def attention_specs(self, dtype: str) -> dict[str, AttentionSpec]:
        spec = AttentionSpec(
            "encoder", self.head_dim, self.num_heads, self.num_heads, dtype, features=frozenset({"varlen"})
        )
        return {"vision": spec}


@lru_cache(maxsize=64)
def _position_ids(rows: int, cols: int, grid: int) -> torch.Tensor:
    """int64 (rows * cols,) on the CPU: where in the grid x grid table each patch of a tile looks up its position.

    float32 throughout: bucketing in 16 bits puts rows into the wrong bucket for several grid sizes (12, 14, 24, 27).
    """
    boundaries = torch.arange(1 / grid, 1.0, 1 / grid, dtype=torch.float32, device="cpu")

    def buckets(count: int) -> torch.Tensor:
        step = torch.tensor(1.0, device="cpu") / count
        coords = (torch.arange(count, dtype=torch.float32, device="cpu") * step).clamp(max=1.0 - 1e-6)
        return torch.bucketize(coords, boundaries, right=True)

    return (buckets(rows)[:, None] * grid + buckets(cols)[None, :]).flatten()


class Embeddings(nn.Module):
    """Patches as one matrix product (the reference's convolution has its kernel as stride), plus positions."""

    def __init__(self, config: SiglipConfig) -> None:
        super().__init__()
        self.patch, self.grid = config.patch_size, config.grid
        self.patch_weight = nn.Parameter(torch.empty(config.hidden_size, config.num_channels, self.patch, self.patch))
        self.patch_bias = nn.Parameter(torch.empty(config.hidden_size))
        self.position = nn.Embedding(config.grid**2, config.hidden_size)

    def forward(self, pixels_NCHW: torch.Tensor) -> torch.Tensor:
        p = self.patch
        rows, cols = pixels_NCHW.shape[2] // p, pixels_NCHW.shape[3] // p
        tiles = pixels_NCHW[:, :, : rows * p, : cols * p].unflatten(2, (rows, p)).unflatten(4, (cols, p))
        patches = tiles.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)
        embedded = F.linear(patches, self.patch_weight.flatten(1), self.patch_bias)
        return embedded + self.position(_position_ids(rows, cols, self.grid).to(pixels_NCHW.device))


class Attention(nn.Module):
    def __init__(self, config: SiglipConfig, attention: EncoderAttention) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.out = nn.Linear(config.hidden_size, config.hidden_size)
        self.attention = attention

    def forward(self, x_TC: torch.Tensor, segments: Segments) -> torch.Tensor:
        q_THD, k_THD, v_THD = self.qkv(x_TC).unflatten(-1, (3, self.num_heads, -1)).unbind(1)
        return self.out(self.attention(q_THD, k_THD, v_THD, segments).flatten(1))


class MLP(nn.Module):
    def __init__(self, config: SiglipConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.hidden_size, config.intermediate_size)
        self.down = nn.Linear(config.intermediate_size, config.hidden_size)
        self.gelu = config.gelu

    def forward(self, x_TC: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x_TC), approximate=self.gelu))


class Block(nn.Module):
    def __init__(self, config: SiglipConfig, attention: EncoderAttention) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.attn = Attention(config, attention)
        self.norm2 = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.mlp = MLP(config)

    def forward(self, x_TC: torch.Tensor, segments: Segments) -> torch.Tensor:
        x_TC = x_TC + self.attn(self.norm1(x_TC), segments)
        return x_TC + self.mlp(self.norm2(x_TC))


class SiglipEncoder(nn.Module):
    """Tiles of one size -> features of every patch.

    Args:
        attention: `op(q_THD, k_THD, v_THD, segments) -> (T, H, D)` of the group "vision".
    """

    def __init__(self, config: SiglipConfig, attention: Mapping[str, EncoderAttention]) -> None:
        super().__init__()
        self.config = config
        self.embeddings = Embeddings(config)
        self.blocks = nn.ModuleList(Block(config, attention["vision"]) for _ in range(config.num_layers))
        self.post_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(self, pixels_NCHW: torch.Tensor) -> torch.Tensor:
        """(N, channels, height, width), normalised -> (N, height/patch, width/patch, C)."""
        p = self.config.patch_size
        x_NSC = self.embeddings(pixels_NCHW)
        tiles, length, _ = x_NSC.shape
        segments = Segments.packed([length] * tiles, pixels_NCHW.device)
        x_TC = x_NSC.flatten(0, 1)
        for block in self.blocks:
            x_TC = block(x_TC, segments)
        return self.post_norm(x_TC).unflatten(0, (tiles, pixels_NCHW.shape[2] // p, pixels_NCHW.shape[3] // p))


def weight_map(config: SiglipConfig, stack: str) -> dict[str, tuple[str, ...]]:
    """Parameter name -> checkpoint names below `stack` ("model.vision_model.")."""
    names: dict[str, tuple[str, ...]] = {
        "embeddings.patch_weight": (f"{stack}embeddings.patch_embedding.weight",),
        "embeddings.patch_bias": (f"{stack}embeddings.patch_embedding.bias",),
        "embeddings.position.weight": (f"{stack}embeddings.position_embedding.weight",),
    }
    parts = {
        "norm1": ("layer_norm1",),
        "norm2": ("layer_norm2",),
        "attn.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "attn.out": ("self_attn.out_proj",),
        "mlp.up": ("mlp.fc1",),
        "mlp.down": ("mlp.fc2",),
    }
    for kind in ("weight", "bias"):
        names[f"post_norm.{kind}"] = (f"{stack}post_layernorm.{kind}",)
        for i in range(config.num_layers):
            for name, sources in parts.items():
                names[f"blocks.{i}.{name}.{kind}"] = tuple(f"{stack}encoder.layers.{i}.{s}.{kind}" for s in sources)
    return names
