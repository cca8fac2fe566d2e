"""Qwen2.5-VL: its own ViT with a merger, and a Qwen2 decoder with three-axis positions.

Image features are spliced into the embeddings.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vlm.errors import PromptError
from vlm.families.base import Family, ImageInputs, ImagePlan, ImageProcessor, LayerGroup
from vlm.families.config import checked, reading, require_same, section
from vlm.families.model import SplicedModel, upload
from vlm.text.layers import decoder_weight_map, layer_ops
from vlm.text.qwen2 import Qwen2Config, Qwen2Decoder
from vlm.vision import qwen2_5_vl as vit

IMAGE_TOKEN = "<|image_pad|>"


@dataclass(frozen=True)
class Qwen25VLConfig:
    vision: vit.Qwen25VisionConfig
    text: Qwen2Config
    image_token_id: int
    tie_word_embeddings: bool


class Qwen25VLModel(SplicedModel):
    def __init__(self, config: Qwen25VLConfig, attention: Mapping[str, Callable[..., torch.Tensor]]) -> None:
        super().__init__(Qwen2Decoder(config.text, layer_ops(config.text, attention)), config.text)
        self.vision = vit.Qwen25VisionEncoder(config.vision, attention)

    def encode_images(self, images: Sequence[ImageInputs]) -> list[torch.Tensor]:
        if not images:
            return []
        patches = upload(images, like=self.vision.patch_embed.weight)
        features = self.vision(patches, [_grid(image.plan) for image in images])
        return list(features.split([image.plan.num_tokens for image in images]))


def _grid(plan: ImagePlan) -> tuple[int, int, int]:
    frames, rows, cols = plan.grid
    return frames, rows, cols


def _image_positions(start: int, plan: ImagePlan, merge: int) -> torch.Tensor:
    """(3, num_tokens): frame, row and column of each merged patch, counted from `start`."""
    frames, rows, cols = plan.grid
    axes = torch.meshgrid(torch.arange(frames), torch.arange(rows // merge), torch.arange(cols // merge), indexing="ij")
    return torch.stack([axis.reshape(-1) for axis in axes]) + start


class Qwen25VLFamily:
    name = "qwen2_5_vl"
    vision_stack = vit.SPEC.name
    text_stack = "Qwen2 decoder"
    upstream_fa = vit.SPEC.upstream_fa
    upstream_fa_reason = vit.SPEC.reason

    def parse(self, config: Mapping[str, Any]) -> Qwen25VLConfig:
        # Published configs hold the text part at the top level, transformers 5 nests it.
        config = checked(config, "")
        nested = config.get("text_config")
        text = {**config, **(checked(nested, "text_config.") if isinstance(nested, Mapping) else {})}
        tied = bool(config.get("tie_word_embeddings")) or bool(text.get("tie_word_embeddings"))
        with reading("vision_config"):
            vision_config = vit.Qwen25VisionConfig.from_hf(section(config, "vision_config"))
        with reading("the text part"):
            text_config = Qwen2Config.from_hf(text, tied)
            if (width := vision_config.out_hidden_size) != text_config.hidden_size:
                raise ValueError(
                    f"hidden_size {text_config.hidden_size} is not the vision encoder's out_hidden_size {width}"
                )
            return Qwen25VLConfig(vision_config, text_config, int(config.get("image_token_id", 151655)), tied)

    def layer_groups(self, config: Qwen25VLConfig, dtype: str) -> dict[str, LayerGroup]:
        vision = config.vision.attention_specs(dtype)
        groups = {name: LayerGroup(spec, "vision", vit.SPEC.upstream_fa) for name, spec in vision.items()}
        return groups | {name: LayerGroup(spec, "text") for name, spec in config.text.attention_specs(dtype).items()}

    def build(self, config: Qwen25VLConfig, attention: Mapping[str, Callable[..., torch.Tensor]]) -> Qwen25VLModel:
        return Qwen25VLModel(config, attention)

    def weight_map(self, config: Qwen25VLConfig) -> dict[str, tuple[str, ...]]:
        vision = vit.weight_map(config.vision, "visual.")
        text = decoder_weight_map(config.text, "model.", head="lm_head.weight")
        return {f"vision.{k}": v for k, v in vision.items()} | {f"text.{k}": v for k, v in text.items()}

    def canonical_name(self, name: str) -> str | None:
        """Published names: `visual.`, `model.`, `lm_head.`; transformers since 4.52 says model.visual and
        model.language_model."""
        if name.endswith("rotary_emb.inv_freq"):
            return None
        for prefix, canonical in _PREFIXES:
            if name.startswith(prefix):
                return canonical + name[len(prefix) :]
        return name

    def image_processor(
        self, preprocessor: Mapping[str, Any], config: Qwen25VLConfig, overrides: Mapping[str, Any]
    ) -> ImageProcessor:
        from vlm.images.qwen2_vl import Qwen2VLProcessor

        processor, vision = Qwen2VLProcessor.from_config(preprocessor, overrides), config.vision
        require_same(
            {
                "patch_size": (processor.patch_size, "vision_config.patch_size", vision.patch_size),
                "merge_size": (processor.merge_size, "vision_config.spatial_merge_size", vision.merge_size),
                "temporal_patch_size": (
                    processor.temporal_patch_size,
                    "vision_config.temporal_patch_size",
                    vision.temporal_patch_size,
                ),
            }
        )
        return processor

    def expand(self, plan: ImagePlan, config: Qwen25VLConfig) -> str:
        return IMAGE_TOKEN * plan.num_tokens

    def placeholder(self, config: Qwen25VLConfig) -> str:
        return IMAGE_TOKEN

    def image_token_id(self, config: Qwen25VLConfig) -> int:
        return config.image_token_id

    def positions(
        self, token_ids: Sequence[int], plans: Sequence[ImagePlan], config: Qwen25VLConfig
    ) -> tuple[torch.Tensor, int]:
        """mrope: text counts on along all three axes; an image starts at one place and spreads over frames, rows and
        columns, and what follows it starts after its longer side."""
        ids = torch.as_tensor(token_ids, dtype=torch.int64)
        places = (ids == config.image_token_id).nonzero().flatten().tolist()
        expected = sum(plan.num_tokens for plan in plans)
        if len(places) != expected:
            raise PromptError(f"the prompt holds {len(places)} image tokens, but its images make {expected}")
        merge = config.vision.merge_size
        parts: list[torch.Tensor] = []
        done = position = used = 0
        for plan in plans:
            begin = places[used]
            used += plan.num_tokens
            if places[used - 1] - begin != plan.num_tokens - 1:
                raise PromptError(
                    f"the {plan.num_tokens} image tokens of a {plan.size[0]}x{plan.size[1]} image are not contiguous"
                )
            parts.append((torch.arange(begin - done) + position).expand(3, -1))
            position += begin - done
            parts.append(_image_positions(position, plan, merge))
            position += max(plan.grid[1:]) // merge
            done = begin + plan.num_tokens
        parts.append((torch.arange(len(ids) - done) + position).expand(3, -1))
        positions = torch.cat(parts, dim=1)
        return positions, int(positions.max()) + 1 if len(ids) else 0


# Longest first: each also matches what stands below it.
_PREFIXES = (
    ("model.language_model.lm_head.", "lm_head."),
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("model.visual.", "visual."),
)

FAMILY: Family = Qwen25VLFamily()
