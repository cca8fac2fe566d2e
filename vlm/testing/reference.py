"""The reference implementation in transformers, seen through the same inputs as ours.

One adapter a family: how our preprocessed images become its arguments, and which of its modules stand beside ours.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vlm.families.base import ImageInputs, ImagePlan
from vlm.testing.greedy import Prompt


@dataclass(frozen=True)
class Adapter:
    """`inputs`: images -> keyword arguments. `vision`, `text`: (our prefix, its prefix) of the stacked layers."""

    inputs: Callable[[Sequence[ImageInputs]], dict[str, torch.Tensor]]
    vision: tuple[str, str]
    text: tuple[str, str]


def _qwen_inputs(images: Sequence[ImageInputs]) -> dict[str, torch.Tensor]:
    return {
        "pixel_values": torch.cat([image.pixels for image in images]),
        "image_grid_thw": torch.tensor([image.plan.grid for image in images]),
    }


def _idefics_inputs(images: Sequence[ImageInputs]) -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.cat([image.pixels for image in images])[None]}


_QWEN = Adapter(
    _qwen_inputs, ("vision.blocks.", "model.visual.blocks."), ("text.layers.", "model.language_model.layers.")
)
_IDEFICS = Adapter(
    _idefics_inputs,
    ("vision.blocks.", "model.vision_model.encoder.layers."),
    ("text.layers.", "model.text_model.layers."),
)
ADAPTERS = {"qwen2_5_vl": _QWEN, "smolvlm": _IDEFICS, "idefics3": _IDEFICS}
_PROCESSORS = {
    "qwen2_5_vl": ("qwen2_vl", "Qwen2VL"),
    "smolvlm": ("smolvlm", "SmolVLM"),
    "idefics3": ("idefics3", "Idefics3"),
}


class Reference:
    """transformers' model of a folder, with its SDPA attention. What it returns lies on the CPU.

    Args:
        model_type: picks the adapter. dtype: what it computes in.
        device: where. In float32 stay on the CPU whatever device ours runs on: on CUDA its convolutions may round to
            TF32, which would blur the comparison.
    """

    def __init__(self, folder: Path, model_type: str, dtype: torch.dtype = torch.float32, device: str = "cpu") -> None:
        from transformers import AutoModelForImageTextToText

        self.adapter = ADAPTERS[model_type]
        self.device = device
        self.model: Any = (
            AutoModelForImageTextToText.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa")
            .eval()
            .to(device)
        )
        self.image_token = self.model.config.image_token_id

    def arguments(self, prompt: Prompt) -> dict[str, torch.Tensor]:
        """Keyword arguments of its forward and generate."""
        ids = torch.tensor([prompt.token_ids])
        arguments = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if prompt.images:
            arguments |= self.adapter.inputs(prompt.images)
        if "mm_token_type_ids" in inspect.signature(self.model.forward).parameters:
            arguments["mm_token_type_ids"] = (ids == self.image_token).int()
        return {name: value.to(self.device) for name, value in arguments.items()}

    @torch.inference_mode()
    def features(self, images: Sequence[ImageInputs]) -> torch.Tensor:
        """(rows of all images, hidden) features after the projector."""
        arguments = {name: value.to(self.device) for name, value in self.adapter.inputs(images).items()}
        return torch.cat(list(self.model.model.get_image_features(**arguments).pooler_output)).cpu()

    @torch.inference_mode()
    def logits(self, prompt: Prompt) -> torch.Tensor:
        """(T, vocab)."""
        self._forget_positions()
        return self.model(**self.arguments(prompt), use_cache=False).logits[0].float().cpu()

    @torch.inference_mode()
    def greedy(self, prompt: Prompt, max_tokens: int) -> list[int]:
        """`max_tokens` greedy tokens; stop tokens do not stop it."""
        self._forget_positions()
        arguments = self.arguments(prompt)
        out = self.model.generate(
            **arguments,
            max_new_tokens=max_tokens,
            min_new_tokens=max_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        return out[0, len(prompt.token_ids) :].tolist()

    def _forget_positions(self) -> None:
        """Qwen's model keeps the position offset of the last prompt with images; a prompt without any must not inherit
        it."""
        if hasattr(self.model.model, "rope_deltas"):
            self.model.model.rope_deltas = None


def record(model: nn.Module, prefix: str, run: Callable[[], Any]) -> list[torch.Tensor]:
    """The outputs of the layers `prefix`0, `prefix`1, ... while `run` runs, as (rows, width)."""
    seen: list[torch.Tensor] = []

    def keep(_module: nn.Module, _inputs: Any, output: Any) -> None:
        first = output[0] if isinstance(output, tuple) else output
        seen.append(first.detach().float().reshape(-1, first.shape[-1]))

    names = {name for name, _ in model.named_modules() if name.startswith(prefix) and name[len(prefix) :].isdigit()}
    handles = [module.register_forward_hook(keep) for name, module in model.named_modules() if name in names]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return seen


def reference_pixels(folder: Path, model_type: str, config: Any) -> Callable[[Any], ImageInputs]:
    """PIL image -> ImageInputs by transformers' own image processor (its Pillow backend, which needs no torchvision).

    Args:
        config: the family's config, for the tokens of a tile.
    """
    module, kind = _PROCESSORS[model_type]
    # By its module: up to 5.17, the name at transformers' top level asks for torchvision.
    pil = import_module(f"transformers.models.{module}.image_processing_pil_{module}")
    processor = getattr(pil, f"{kind}ImageProcessorPil").from_pretrained(folder)

    def qwen(image: Any) -> ImageInputs:
        out = processor(images=[image], return_tensors="pt")
        frames, rows, cols = out["image_grid_thw"][0].tolist()
        unit, patch = processor.merge_size**2, processor.patch_size
        plan = ImagePlan((cols * patch, rows * patch), frames * rows * cols // unit, (frames, rows, cols))
        return ImageInputs(out["pixel_values"].float(), plan)

    def idefics(image: Any) -> ImageInputs:
        out = processor(images=[image], return_tensors="pt", return_row_col_info=True)
        pixels = out["pixel_values"][0].float()
        (rows,), (cols,) = out["rows"][0], out["cols"][0]
        edge = pixels.shape[-1]
        plan = ImagePlan(
            (edge * max(cols, 1), edge * max(rows, 1)), len(pixels) * config.tokens_per_tile(edge), (rows, cols)
        )
        return ImageInputs(pixels, plan)

    return qwen if model_type == "qwen2_5_vl" else idefics
