"""What a model family is: the contract between a checkpoint's parts and the rest of the runtime.

A family says which vision stack, projector and text stack make a model, what an image costs in tokens, how it stands
in the prompt, and which positions the tokens have. The engine sees only `VisionLanguageModel`; the prompt builder sees
only the image processor and `expand`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from vlm.attention.layout import LayerCache, PagedStep
from vlm.attention.spec import AttentionSpec


@dataclass(frozen=True)
class ImagePlan:
    """What a picture of a given size becomes; known from its header, before anything is decoded.

    Attributes:
        size: (width, height) that the model sees, after resizing and before tiling.
        num_tokens: rows of image features spliced into the prompt.
        grid: family-specific: (t, h, w) patches for Qwen-type models, (rows, cols) of tiles for Idefics3-type ones.
    """

    size: tuple[int, int]
    num_tokens: int
    grid: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class ImageInputs:
    """A preprocessed picture.

    `pixels` is float32 on the CPU: (patches, channels * t * p * p) or (tiles, 3, height, width).
    """

    pixels: torch.Tensor
    plan: ImagePlan


class ImageProcessor(Protocol):
    """Pixels in, model inputs out, by the rules of the checkpoint's preprocessor_config.json."""

    def plan(self, width: int, height: int) -> ImagePlan:
        """What a picture of this size becomes. Raises ImageDecodeError where the model's rule refuses the size."""

    def __call__(self, image: Any) -> ImageInputs:
        """Resize, rescale, normalise and patchify one RGB PIL image."""


@dataclass(frozen=True)
class KVGeometry:
    """What one token costs in the cache: `num_layers` times 2 x (num_kv_heads, head_dim)."""

    num_layers: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class LayerGroup:
    """One group of layers that shares an attention decision.

    Attributes:
        spec: what the layers need. stack: "vision" or "text": which preference applies.
        upstream_fa: whether the model declares the upgrade (False for every text group).
    """

    spec: AttentionSpec
    stack: str
    upstream_fa: bool = False


class VisionLanguageModel(nn.Module):
    """A built model: what the engine runs. Subclasses own `vision`, a projector and `text`."""

    kv: KVGeometry
    vocab_size: int

    def encode_images(self, images: Sequence[ImageInputs]) -> list[torch.Tensor]:
        """One (num_tokens, hidden) tensor an image, in order; images of any mix of sizes are one batch."""
        raise NotImplementedError

    def embed(self, token_ids_T: torch.Tensor) -> torch.Tensor:
        """(T,) token ids -> (T, hidden) embeddings."""
        raise NotImplementedError

    def decode(
        self, embeds_TC: torch.Tensor, positions: torch.Tensor, caches: Sequence[LayerCache], step: PagedStep
    ) -> torch.Tensor:
        """Run the decoder: (T, hidden) embeddings, (T,) or (3, T) positions -> (T, hidden) after the last norm."""
        raise NotImplementedError

    def logits(self, hidden_RC: torch.Tensor) -> torch.Tensor:
        """(R, hidden) rows where a token is sampled -> (R, vocab) logits."""
        raise NotImplementedError


class Family(Protocol):
    """One module of vlm/families exposes `FAMILY`, an object with these members."""

    name: str
    vision_stack: str
    text_stack: str
    upstream_fa: bool
    upstream_fa_reason: str

    def parse(self, config: Mapping[str, Any]) -> Any:
        """config.json -> the family's frozen config. Raises UnsupportedModelError or CheckpointError."""

    def layer_groups(self, config: Any, dtype: str) -> dict[str, LayerGroup]:
        """Layer groups by name ("vision.full", "vision.window", "text")."""

    def build(self, config: Any, attention: Mapping[str, Callable[..., torch.Tensor]]) -> VisionLanguageModel:
        """Make the modules (on the current default device, possibly meta) with one attention op per layer group."""

    def weight_map(self, config: Any) -> dict[str, tuple[str, ...]]:
        """Parameter name -> checkpoint names, concatenated along dim 0 where there are several."""

    def canonical_name(self, name: str) -> str | None:
        """A tensor name as any known export writes it -> the name used in `weight_map`; None: known and not needed."""

    def image_processor(
        self, preprocessor: Mapping[str, Any], config: Any, overrides: Mapping[str, Any]
    ) -> ImageProcessor:
        """The processor of preprocessor_config.json with the caller's overrides; an unknown one is a PromptError."""

    def expand(self, plan: ImagePlan, config: Any) -> str:
        """The text that replaces one image placeholder, image tokens repeated; tokenised with special tokens."""

    def placeholder(self, config: Any) -> str:
        """The text of the image placeholder as the chat template writes it."""

    def image_token_id(self, config: Any) -> int:
        """The id whose positions receive image features."""

    def positions(self, token_ids: Sequence[int], plans: Sequence[ImagePlan], config: Any) -> tuple[torch.Tensor, int]:
        """int64 positions, (T,) or (3, T), for a prompt, and the position of the first generated token."""
