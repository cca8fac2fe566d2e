"""The part of a built model that is the same for every family whose image features are spliced into the embeddings."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vlm.attention.layout import LayerCache, PagedStep
from vlm.families.base import ImageInputs, KVGeometry, VisionLanguageModel
from vlm.text.layers import Decoder, DecoderConfig


class SplicedModel(VisionLanguageModel):
    """A vision stack, a projector and a decoder. Subclasses set the first two and say how images go through them."""

    def __init__(self, text: Decoder, config: DecoderConfig) -> None:
        super().__init__()
        self.text = text
        self.kv = KVGeometry(config.num_layers, config.num_kv_heads, config.head_dim)
        self.vocab_size = config.vocab_size

    def embed(self, token_ids_T: torch.Tensor) -> torch.Tensor:
        return self.text.embed_tokens(token_ids_T)

    def decode(
        self, embeds_TC: torch.Tensor, positions: torch.Tensor, caches: Sequence[LayerCache], step: PagedStep
    ) -> torch.Tensor:
        return self.text(embeds_TC, positions, caches, step)

    def logits(self, hidden_RC: torch.Tensor) -> torch.Tensor:
        return self.text.logits(hidden_RC)


def upload(images: Sequence[ImageInputs], like: torch.Tensor) -> torch.Tensor:
    """Pixels of all images, concatenated along their first dim, on the device and in the dtype of `like`."""
    pixels = [image.pixels.to(like.device, non_blocking=True).to(like.dtype) for image in images]
    return torch.cat(pixels) if len(pixels) > 1 else pixels[0]
