"""The training model: SmolVLM's architecture with static shapes, under the Hugging Face checkpoint's parameter names.

Letters: B pictures, N conversations, T tokens, P patches, D width, H heads, E head_dim.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .pool import CLASSES
from .render import PATCH, PATCHES, POINTS


@dataclass(frozen=True)
class Config:
    """Sizes; the defaults are the embedded model's."""

    vocab: int
    vision_width: int = 320
    vision_layers: int = 6
    vision_mlp: int = 1280
    text_width: int = 256
    text_layers: int = 4
    text_heads: int = 4
    text_kv_heads: int = 2
    text_mlp: int = 768
    head_dim: int = 64
    scale_factor: int = 2
    rope_theta: float = 10000.0
    vision_eps: float = 1e-6
    text_eps: float = 1e-5


class VisionAttention(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (
            nn.Linear(c.vision_width, c.vision_width) for _ in range(4)
        )
        self.head_dim = c.head_dim

    def forward(self, x_BPD: Tensor) -> Tensor:
        b, p, d = x_BPD.shape
        q, k, v = (
            f(x_BPD).view(b, p, -1, self.head_dim).transpose(1, 2) for f in (self.q_proj, self.k_proj, self.v_proj)
        )
        return self.out_proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, p, d))


class VisionMLP(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(c.vision_width, c.vision_mlp), nn.Linear(c.vision_mlp, c.vision_width)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x), approximate="tanh"))


class VisionLayer(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.layer_norm1 = nn.LayerNorm(c.vision_width, eps=c.vision_eps)
        self.self_attn = VisionAttention(c)
        self.layer_norm2 = nn.LayerNorm(c.vision_width, eps=c.vision_eps)
        self.mlp = VisionMLP(c)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.layer_norm1(x))
        return x + self.mlp(self.layer_norm2(x))


class VisionEmbeddings(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.patch_embedding = nn.Conv2d(3, c.vision_width, PATCH, stride=PATCH)
        self.position_embedding = nn.Embedding(PATCHES * PATCHES, c.vision_width)

    def forward(self, pixels: Tensor) -> Tensor:
        b = pixels.shape[0]
        x = (
            pixels.view(b, 3, PATCHES, PATCH, PATCHES, PATCH)
            .permute(0, 2, 4, 1, 3, 5)
            .reshape(b, PATCHES * PATCHES, -1)
        )
        x = F.linear(
            x, self.patch_embedding.weight.flatten(1), self.patch_embedding.bias
        )  # the convolution as a product
        return x + self.position_embedding.weight


class Encoder(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.layers = nn.ModuleList(VisionLayer(c) for _ in range(c.vision_layers))


class VisionModel(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.embeddings, self.encoder = VisionEmbeddings(c), Encoder(c)
        self.post_layernorm = nn.LayerNorm(c.vision_width, eps=c.vision_eps)

    def forward(self, pixels: Tensor) -> Tensor:
        x = self.embeddings(pixels)
        for layer in self.encoder.layers:
            x = layer(x)
        return self.post_layernorm(x)


class Projection(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.proj = nn.Linear(c.vision_width * c.scale_factor**2, c.text_width, bias=False)


class Connector(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.modality_projection = Projection(c)
        self.factor = c.scale_factor

    def forward(self, x_BPD: Tensor) -> Tensor:
        b, p, d = x_BPD.shape
        f, side = self.factor, PATCHES // self.factor
        x = x_BPD.view(b, side, f, side, f, d).permute(0, 1, 3, 2, 4, 5).reshape(b, p // (f * f), d * f * f)
        return self.modality_projection.proj(x)


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), x.shape[-1:], self.weight.float(), self.eps).to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding in the half-split convention."""
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat([-b, a], -1) * sin


class TextAttention(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = c.text_heads, c.text_kv_heads, c.head_dim
        self.q_proj = nn.Linear(c.text_width, c.text_heads * c.head_dim, bias=False)
        self.k_proj = nn.Linear(c.text_width, c.text_kv_heads * c.head_dim, bias=False)
        self.v_proj = nn.Linear(c.text_width, c.text_kv_heads * c.head_dim, bias=False)
        self.o_proj = nn.Linear(c.text_heads * c.head_dim, c.text_width, bias=False)

    def forward(self, x_NTD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        n, t, _ = x_NTD.shape
        q, k, v = (
            f(x_NTD).view(n, t, -1, self.head_dim).transpose(1, 2) for f in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotate(q, cos, sin).to(v.dtype), rotate(k, cos, sin).to(v.dtype)
        repeat = self.heads // self.kv_heads
        k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(out.transpose(1, 2).reshape(n, t, -1))


class TextMLP(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(c.text_width, c.text_mlp, bias=False)
        self.up_proj = nn.Linear(c.text_width, c.text_mlp, bias=False)
        self.down_proj = nn.Linear(c.text_mlp, c.text_width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class TextLayer(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(c.text_width, c.text_eps)
        self.self_attn = TextAttention(c)
        self.post_attention_layernorm = RMSNorm(c.text_width, c.text_eps)
        self.mlp = TextMLP(c)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class TextModel(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(c.vocab, c.text_width)
        self.layers = nn.ModuleList(TextLayer(c) for _ in range(c.text_layers))
        self.norm = RMSNorm(c.text_width, c.text_eps)
        self.theta, self.head_dim = c.rope_theta, c.head_dim

    def forward(self, x_NTD: Tensor) -> Tensor:
        t, device = x_NTD.shape[1], x_NTD.device
        inverse = self.theta ** -(torch.arange(0, self.head_dim, 2, device=device).float() / self.head_dim)
        angle = torch.outer(torch.arange(t, device=device).float(), inverse)
        angle = torch.cat([angle, angle], -1)
        for layer in self.layers:
            x_NTD = layer(x_NTD, angle.cos(), angle.sin())
        return self.norm(x_NTD)


class Body(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.vision_model, self.connector, self.text_model = VisionModel(c), Connector(c), TextModel(c)


class Model(nn.Module):
    """SmolVLM with one head more, ``patch_head``, for the auxiliary loss; the head is not exported."""

    def __init__(self, c: Config, image_id: int) -> None:
        super().__init__()
        self.config, self.image_id = c, image_id
        self.model = Body(c)
        self.patch_head = nn.Linear(c.vision_width, POINTS * CLASSES)
        self.initialise()

    def initialise(self) -> None:
        """Normal weights of 1/sqrt(fan in); what writes to the residual stream is scaled down by its depth."""
        c = self.config
        for name, p in self.named_parameters():
            if p.ndim < 2:
                nn.init.zeros_(p) if name.endswith("bias") else nn.init.ones_(p)
            elif "embed" in name and "patch" not in name:
                nn.init.normal_(p, std=0.02)
            else:
                std = 1 / math.sqrt(p[0].numel())
                if any(s in name for s in ("out_proj", "fc2", "o_proj", "down_proj")):
                    std /= math.sqrt(2 * (c.vision_layers if "vision" in name else c.text_layers))
                nn.init.normal_(p, std=std)

    def see(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """Patch features (B, P, D) and image tokens (B, 64, text width) of pictures (B, 3, S, S)."""
        patches = self.model.vision_model(pixels)
        return patches, self.model.connector(patches)

    def hidden(self, ids_NT: Tensor, images_NLD: Tensor) -> Tensor:
        """Last hidden states; the l-th image placeholder of a conversation takes the l-th row of ``images_NLD``."""
        x = self.model.text_model.embed_tokens(ids_NT)
        here = ids_NT == self.image_id
        at = (here.long().cumsum(1) - 1).clamp(0, images_NLD.shape[1] - 1)
        picked = images_NLD.gather(1, at[..., None].expand(-1, -1, images_NLD.shape[-1]))
        return self.model.text_model(torch.where(here[..., None], picked.to(x.dtype), x))

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.model.text_model.embed_tokens.weight)

    def losses(
        self, patches_BPD: Tensor, images: Tensor, ids_NT: Tensor, said_NT: Tensor, patch_labels: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Mean losses of the said tokens and of the patch labels; a conversation's pictures stand together."""
        images = images.reshape(ids_NT.shape[0], -1, images.shape[-1])
        logits = self.logits(self.hidden(ids_NT, images)[:, :-1]).float()
        target = torch.where(said_NT[:, 1:], ids_NT[:, 1:], -100)
        loss = F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=-100)
        aux = self.patch_head(patches_BPD).view(-1, CLASSES).float()
        return loss, F.cross_entropy(aux, patch_labels.flatten(), ignore_index=-1)


def parameters_of(model: Model) -> int:
    """Exported parameters."""
    return sum(p.numel() for p in model.model.parameters())
