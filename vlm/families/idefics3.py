"""Idefics3 and SmolVLM: a SigLIP ViT over tiles, pixel shuffle and one linear, and a Llama decoder.

Both model types are one architecture; features are spliced into the embeddings. A picture is either one square tile, or
rows x columns of tiles and a small whole view after them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vlm.errors import CheckpointError
from vlm.families.base import Family, ImageInputs, ImagePlan, ImageProcessor, LayerGroup
from vlm.families.config import checked, reading, require_same, section
from vlm.families.model import SplicedModel, upload
from vlm.families.projectors import PixelShuffleProjector
from vlm.text.layers import decoder_weight_map, layer_ops
from vlm.text.llama import LlamaConfig, LlamaDecoder
from vlm.vision import siglip

IMAGE_TOKEN = "<image>"
_AROUND = "<fake_token_around_image>"
_WHOLE = "<global-img>"


@dataclass(frozen=True)
class Idefics3Config:
    """`scale_factor`: patches a side that pixel shuffle folds into one row of features."""

    vision: siglip.SiglipConfig
    text: LlamaConfig
    image_token_id: int
    scale_factor: int
    tie_word_embeddings: bool

    def tokens_per_tile(self, edge: int) -> int:
        """Rows of features of a square tile of `edge` pixels. Raises CheckpointError where it does not fold evenly."""
        side = edge // self.vision.patch_size
        if side < self.scale_factor or side % self.scale_factor:
            raise CheckpointError(
                f"tiles of {edge} pixels have {side} patches of {self.vision.patch_size} a side, which scale_factor "
                f"{self.scale_factor} does not divide; config.json and preprocessor_config.json do not belong together"
            )
        return (side // self.scale_factor) ** 2


class Idefics3Model(SplicedModel):
    def __init__(self, config: Idefics3Config, attention: Mapping[str, Callable[..., torch.Tensor]]) -> None:
        super().__init__(LlamaDecoder(config.text, layer_ops(config.text, attention)), config.text)
        self.vision = siglip.SiglipEncoder(config.vision, attention)
        self.projector = PixelShuffleProjector(config.vision.hidden_size, config.text.hidden_size, config.scale_factor)

    def encode_images(self, images: Sequence[ImageInputs]) -> list[torch.Tensor]:
        if not images:
            return []
        pixels_NCHW = upload(images, like=self.vision.embeddings.patch_weight)
        features = self.projector(self.vision(pixels_NCHW))
        return [tiles.flatten(0, 1) for tiles in features.split([len(image.pixels) for image in images])]


class Idefics3Family:
    name = "idefics3"
    vision_stack = siglip.SPEC.name
    text_stack = "Llama decoder"
    upstream_fa = siglip.SPEC.upstream_fa
    upstream_fa_reason = siglip.SPEC.reason

    def parse(self, config: Mapping[str, Any]) -> Idefics3Config:
        config = checked(config, "")
        text, vision = section(config, "text_config"), section(config, "vision_config")
        tied = bool(config.get("tie_word_embeddings", False))
        with reading("vision_config"):
            vision_config = siglip.SiglipConfig.from_hf(vision)
        with reading("text_config"):
            if (kind := text.get("model_type", "llama")) != "llama":
                raise NotImplementedError(f"a text model of type {kind!r} (supported: llama)")
            text_config = LlamaConfig.from_hf(text, tied)
        with reading("the top level"):
            parsed = Idefics3Config(
                vision_config,
                text_config,
                int(config.get("image_token_id", 128257)),
                int(config.get("scale_factor", 2)),
                tied,
            )
        parsed.tokens_per_tile(vision_config.image_size)
        return parsed

    def layer_groups(self, config: Idefics3Config, dtype: str) -> dict[str, LayerGroup]:
        vision = config.vision.attention_specs(dtype)
        groups = {name: LayerGroup(spec, "vision", siglip.SPEC.upstream_fa) for name, spec in vision.items()}
        return groups | {name: LayerGroup(spec, "text") for name, spec in config.text.attention_specs(dtype).items()}

    def build(self, config: Idefics3Config, attention: Mapping[str, Callable[..., torch.Tensor]]) -> Idefics3Model:
        return Idefics3Model(config, attention)

    def weight_map(self, config: Idefics3Config) -> dict[str, tuple[str, ...]]:
        vision = siglip.weight_map(config.vision, "model.vision_model.")
        text = decoder_weight_map(config.text, "model.text_model.", head="lm_head.weight")
        return {
            **{f"vision.{k}": v for k, v in vision.items()},
            "projector.proj.weight": ("model.connector.modality_projection.proj.weight",),
            **{f"text.{k}": v for k, v in text.items()},
        }

    def canonical_name(self, name: str) -> str | None:
        if name.endswith(("rotary_emb.inv_freq", "embeddings.position_ids")):
            return None
        return f"model.{name}" if name.startswith(("vision_model.", "connector.", "text_model.")) else name

    def image_processor(
        self, preprocessor: Mapping[str, Any], config: Idefics3Config, overrides: Mapping[str, Any]
    ) -> ImageProcessor:
        from vlm.images.idefics3 import Idefics3Processor

        edge = config.vision.image_size
        tokens = config.tokens_per_tile(edge)
        processor = Idefics3Processor.from_config(preprocessor, overrides, tokens_per_tile=tokens)
        require_same({"max_image_size": (processor.tile, "vision_config.image_size", edge)})
        return processor

    def expand(self, plan: ImagePlan, config: Idefics3Config) -> str:
        rows, cols = plan.grid
        tile = IMAGE_TOKEN * (plan.num_tokens // (rows * cols + 1))
        whole = f"{_AROUND}{_WHOLE}{tile}{_AROUND}"
        if not rows * cols:
            return whole
        lines = ["".join(f"{_AROUND}<row_{r}_col_{c}>{tile}" for c in range(1, cols + 1)) for r in range(1, rows + 1)]
        return "\n".join(lines) + "\n\n" + whole

    def placeholder(self, config: Idefics3Config) -> str:
        return IMAGE_TOKEN

    def image_token_id(self, config: Idefics3Config) -> int:
        return config.image_token_id

    def positions(
        self, token_ids: Sequence[int], plans: Sequence[ImagePlan], config: Idefics3Config
    ) -> tuple[torch.Tensor, int]:
        return torch.arange(len(token_ids)), len(token_ids)


FAMILY: Family = Idefics3Family()
