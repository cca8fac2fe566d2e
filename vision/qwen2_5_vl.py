"""The vision encoder of Qwen2.5-VL (https://arxiv.org/abs/2502.13923): a ViT at native resolution.

Positions are 2-D rotary. Most layers attend inside square windows, a few over whole frames. Patches are put into window
order once, right after the patch embedding, so that both kinds are packed segments; merged features go back to raster
order at the end.

Legend: P patches of all images, M merged units (merge x merge patches each), C hidden size, H heads, D head_dim,
R = D / 2 rotary frequencies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from vlm.attention.layout import Segments
from vlm.attention.spec import AttentionSpec, Feature
from vlm.kernels.ops import apply_rotary, padded_width, rms_norm, silu_mul
from vlm.vision.spec import VisionSpec

SPEC = VisionSpec(
    name="Qwen2.5-VL ViT",
    upstream_fa=True,
    reason="whole-frame layers are long and bidirectional with head_dim 80, where the package's kernels lead",
)
_WINDOWS_UNSUITABLE = (
    "windows of at most 64 tokens, where the package's kernel is slower than torch varlen "
    "(36 against 54 TFLOP/s on an H200)"
)

EncoderAttention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Segments], torch.Tensor]
Grid = tuple[int, int, int]
_EPS = 1e-6  # fixed by the model, absent from its config


@dataclass(frozen=True)
class Qwen25VisionConfig:
    """Shape of the encoder. `window` counts merged units a side; `full_layers` are the layers that see whole frames."""

    depth: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    out_hidden_size: int
    in_channels: int
    patch_size: int
    temporal_patch_size: int
    merge_size: int
    window: int
    full_layers: frozenset[int]
    rope_theta: float

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> Qwen25VisionConfig:
        """From vision_config. Raises KeyError, ValueError or NotImplementedError as the text configs do."""
        if (act := hf.get("hidden_act", "silu")) != "silu":
            raise NotImplementedError(f"hidden_act {act!r} in the Qwen2.5-VL vision encoder (supported: silu)")
        hidden, heads = int(hf["hidden_size"]), int(hf["num_heads"])
        if hidden % heads or (hidden // heads) % 4:
            raise ValueError(f"vision hidden_size {hidden} does not give {heads} heads of a multiple of 4")
        patch, merge = int(hf.get("patch_size", 14)), int(hf.get("spatial_merge_size", 2))
        window = int(hf.get("window_size", 112)) // merge // patch
        if window < 1:
            raise ValueError(f"window_size {hf.get('window_size')} is smaller than {merge} patches of {patch}")
        return cls(
            depth=int(hf["depth"]),
            hidden_size=hidden,
            intermediate_size=int(hf["intermediate_size"]),
            num_heads=heads,
            out_hidden_size=int(hf["out_hidden_size"]),
            # Published configs say in_chans, which the reference ignores in favour of its own default.
            in_channels=int(hf.get("in_channels", 3)),
            patch_size=patch,
            temporal_patch_size=int(hf.get("temporal_patch_size", 2)),
            merge_size=merge,
            window=window,
            full_layers=frozenset(int(i) for i in hf.get("fullatt_block_indexes", (7, 15, 23, 31))),
            rope_theta=float((hf.get("rope_parameters") or {}).get("rope_theta", 1e4)),
        )

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def patch_dim(self) -> int:
        """Values of one flattened patch."""
        return self.in_channels * self.temporal_patch_size * self.patch_size**2

    def group_of(self, layer: int) -> str:
        return "vision.full" if layer in self.full_layers else "vision.window"

    def attention_specs(self, dtype: str) -> dict[str, AttentionSpec]:
        """Layer groups by name, for those that have layers."""
        features: frozenset[Feature] = frozenset({"varlen"})
        full = AttentionSpec("encoder", self.head_dim, self.num_heads, self.num_heads, dtype, features=features)
        window = replace(full, upstream_fa_unsuitable=_WINDOWS_UNSUITABLE)
        used = {self.group_of(i) for i in range(self.depth)}
        return {name: spec for name, spec in (("vision.full", full), ("vision.window", window)) if name in used}


@lru_cache(maxsize=256)
def window_order(grid: Grid, merge: int, window: int) -> tuple[np.ndarray, tuple[int, ...]]:
    """Merged units of one image in window order.

    Args:
        grid: (frames, rows, columns) of patches. merge: patches a side of a merged unit. window: merged units a side of
            a window.

    Returns:
        int64 (frames * rows/merge * cols/merge,): raster index of the unit at each place; and the units of each window,
        in order.
    """
    frames, rows, cols = grid[0], grid[1] // merge, grid[2] // merge
    wide, high = -(-cols // window), -(-rows // window)
    in_frame = (np.arange(rows)[:, None] // window) * wide + np.arange(cols)[None, :] // window
    key = (np.arange(frames)[:, None, None] * (high * wide) + in_frame).reshape(-1)
    order = np.argsort(key, kind="stable")
    order.setflags(write=False)  # shared by every caller of the cache
    return order, tuple(np.bincount(key).tolist())


@dataclass(frozen=True, eq=False)
class VisionLayout:
    """Where the patches of a batch go. Made on the host, once a forward pass.

    Attributes:
        order_M, inverse_M: raster -> window order of merged units, and back.
        coords_P2: (row, column) of each patch, in window order.
        windows, frames: the segments of the two kinds of layers, in patches.
    """

    order_M: torch.Tensor
    inverse_M: torch.Tensor
    coords_P2: torch.Tensor
    windows: Segments
    frames: Segments

    @classmethod
    def build(cls, grids: Sequence[Grid], merge: int, window: int, device: torch.device) -> VisionLayout:
        orders, coords, windows, frames = [], [], [], []
        start = 0
        inner = np.stack(np.divmod(np.arange(merge * merge), merge), axis=-1)
        for t, h, w in grids:
            order, lengths = window_order((t, h, w), merge, window)
            row, col = np.divmod(order % ((h // merge) * (w // merge)), w // merge)
            coords.append((np.stack((row, col), axis=-1)[:, None] * merge + inner).reshape(-1, 2))
            orders.append(order + start)
            start += len(order)
            windows += [n * merge * merge for n in lengths]
            frames += [h * w] * t
        order_M = np.concatenate(orders)
        return cls(
            torch.from_numpy(order_M).to(device),
            torch.from_numpy(np.argsort(order_M)).to(device),
            torch.from_numpy(np.concatenate(coords)).to(device),
            Segments.packed(windows, device),
            Segments.packed(frames, device),
        )


class PatchEmbed(nn.Module):
    """The reference's convolution, whose stride is its kernel: one matrix product over flattened patches."""

    def __init__(self, config: Qwen25VisionConfig) -> None:
        super().__init__()
        kernel = (config.temporal_patch_size, config.patch_size, config.patch_size)
        self.weight = nn.Parameter(torch.empty(config.hidden_size, config.in_channels, *kernel))

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        return F.linear(patches, self.weight.flatten(1))


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, _EPS)


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)), gate and up as one matrix product."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_up = nn.Linear(width, 2 * inner)
        self.down = nn.Linear(inner, width)

    def forward(self, x_PC: torch.Tensor) -> torch.Tensor:
        return self.down(silu_mul(self.gate_up(x_PC)))

    def pad_width(self) -> None:
        """Widen the inner dim with zeros where tensor cores want it. The result stays: silu(0) * 0 adds nothing."""
        inner = self.down.in_features
        if extra := padded_width(inner) - inner:
            gate, up = self.gate_up.weight.data.chunk(2)
            gate_bias, up_bias = self.gate_up.bias.data.chunk(2)
            self.gate_up.weight.data = torch.cat([F.pad(w, (0, 0, 0, extra)) for w in (gate, up)])
            self.gate_up.bias.data = torch.cat([F.pad(b, (0, extra)) for b in (gate_bias, up_bias)])
            self.down.weight.data = F.pad(self.down.weight.data, (0, extra))
            self.gate_up.out_features, self.down.in_features = 2 * (inner + extra), inner + extra


class Attention(nn.Module):
    def __init__(self, config: Qwen25VisionConfig, attention: EncoderAttention) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.proj = nn.Linear(config.hidden_size, config.hidden_size)
        self.attention = attention

    def forward(
        self, x_PC: torch.Tensor, cos_PR: torch.Tensor, sin_PR: torch.Tensor, segments: Segments
    ) -> torch.Tensor:
        qkv = self.qkv(x_PC).unflatten(-1, (3 * self.num_heads, -1))
        qk, v_PHD = qkv.split((2 * self.num_heads, self.num_heads), dim=1)
        q_PHD, k_PHD = apply_rotary(qk, cos_PR, sin_PR).chunk(2, dim=1)
        return self.proj(self.attention(q_PHD, k_PHD, v_PHD, segments).flatten(1))


class Block(nn.Module):
    def __init__(self, config: Qwen25VisionConfig, attention: EncoderAttention) -> None:
        super().__init__()
        self.norm1 = RMSNorm(config.hidden_size)
        self.attn = Attention(config, attention)
        self.norm2 = RMSNorm(config.hidden_size)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size)

    def forward(
        self, x_PC: torch.Tensor, cos_PR: torch.Tensor, sin_PR: torch.Tensor, segments: Segments
    ) -> torch.Tensor:
        x_PC = x_PC + self.attn(self.norm1(x_PC), cos_PR, sin_PR, segments)
        return x_PC + self.mlp(self.norm2(x_PC))


class Merger(nn.Module):
    """merge x merge patches -> one row of the width of the text model."""

    def __init__(self, config: Qwen25VisionConfig) -> None:
        super().__init__()
        self.width = config.hidden_size * config.merge_size**2
        self.norm = RMSNorm(config.hidden_size)
        self.up = nn.Linear(self.width, self.width)
        self.down = nn.Linear(self.width, config.out_hidden_size)

    def forward(self, x_PC: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(self.norm(x_PC).view(-1, self.width))))


class Qwen25VisionEncoder(nn.Module):
    """Patches of images of any mix of sizes, packed -> features of the text model's width.

    Args:
        attention: ops of the layer groups, `op(q_PHD, k_PHD, v_PHD, segments) -> (P, H, D)`.
    """

    inv_freq: torch.Tensor

    def __init__(self, config: Qwen25VisionConfig, attention: Mapping[str, EncoderAttention]) -> None:
        super().__init__()
        self.config = config
        self.patch_embed = PatchEmbed(config)
        self.blocks = nn.ModuleList(Block(config, attention[config.group_of(i)]) for i in range(config.depth))
        self.merger = Merger(config)
        half = config.head_dim // 2  # rows and columns share the head: half of it each
        exponent = torch.arange(0, half, 2, dtype=torch.float32, device="cpu") / half
        self.register_buffer("inv_freq", 1.0 / (config.rope_theta**exponent), persistent=False)

    def forward(self, patches: torch.Tensor, grids: Sequence[Grid]) -> torch.Tensor:
        """(P, patch_dim) patches in merge-block order, and (frames, rows, cols) of each image -> (M,
        out_hidden_size)."""
        config = self.config
        layout = VisionLayout.build(grids, config.merge_size, config.window, patches.device)
        unit = config.merge_size**2
        x_PC = self.patch_embed(patches).unflatten(0, (-1, unit))[layout.order_M].flatten(0, 1)
        angles_PR = (layout.coords_P2[..., None].float() * self.inv_freq).flatten(1)
        cos_PR, sin_PR = angles_PR.cos(), angles_PR.sin()
        for i, block in enumerate(self.blocks):
            x_PC = block(x_PC, cos_PR, sin_PR, layout.frames if i in config.full_layers else layout.windows)
        return self.merger(x_PC)[layout.inverse_M]


def weight_map(config: Qwen25VisionConfig, stack: str) -> dict[str, tuple[str, ...]]:
    """Parameter name -> checkpoint names below `stack` ("visual.")."""
    names: dict[str, tuple[str, ...]] = {
        "patch_embed.weight": (f"{stack}patch_embed.proj.weight",),
        "merger.norm.weight": (f"{stack}merger.ln_q.weight",),
        "merger.up.weight": (f"{stack}merger.mlp.0.weight",),
        "merger.up.bias": (f"{stack}merger.mlp.0.bias",),
        "merger.down.weight": (f"{stack}merger.mlp.2.weight",),
        "merger.down.bias": (f"{stack}merger.mlp.2.bias",),
    }
    linears = {
        "attn.qkv": ("attn.qkv",),
        "attn.proj": ("attn.proj",),
        "mlp.gate_up": ("mlp.gate_proj", "mlp.up_proj"),
        "mlp.down": ("mlp.down_proj",),
    }
    for i in range(config.depth):
        for norm in ("norm1", "norm2"):
            names[f"blocks.{i}.{norm}.weight"] = (f"{stack}blocks.{i}.{norm}.weight",)
        for name, sources in linears.items():
            for kind in ("weight", "bias"):
                names[f"blocks.{i}.{name}.{kind}"] = tuple(f"{stack}blocks.{i}.{source}.{kind}" for source in sources)
    return names
