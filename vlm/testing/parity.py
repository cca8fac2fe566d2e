"""Does a checkpoint give the numbers that transformers gives? And if not, where does it depart?"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from vlm.attention.platform import Platform
from vlm.attention.spec import Preference
from vlm.families.base import ImageInputs
from vlm.loading.folder import ModelFolder
from vlm.loading.model import LoadedModel, load_model
from vlm.testing.greedy import Prompt, greedy, make_prompt, prompt_logits
from vlm.testing.reference import Reference, record, reference_pixels

# Odd and square, tall and wide, below the smallest and above a tile or a window.
SIZES = ((56, 84), (200, 120), (37, 61), (150, 152))


def relative_error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """The largest difference over the largest magnitude of the reference."""
    scale = theirs.abs().max().clamp(min=1e-12)
    return float((ours.float().to(theirs.device) - theirs.float()).abs().max() / scale)


def sample_image(width: int, height: int, seed: int = 0) -> Any:
    """An RGB PIL image of smooth shapes and noise: every patch differs from every other."""
    from PIL import Image

    generator = torch.Generator().manual_seed(seed + 1000 * width + height)
    y, x = torch.meshgrid(torch.linspace(0, 1, height), torch.linspace(0, 1, width), indexing="ij")
    waves = torch.stack([torch.sin(6.3 * (a * x + b * y)) for a, b in ((1, 2), (3, -1), (2, 5))], dim=-1)
    noise = torch.rand((height, width, 3), generator=generator)
    return Image.fromarray(((waves * 0.35 + 0.5) * 200 + noise * 55).clamp(0, 255).byte().numpy(), "RGB")


class ParityChecker:
    """Our model and the reference of one folder, side by side.

    Args:
        device: "cpu" or a torch device name: where ours runs, in float32. The reference stays on the CPU.
        preferences: attention backends to use instead of the defaults.
        process: PIL image -> ImageInputs; by default the family's own processor.
    """

    def __init__(
        self,
        folder: str | Path,
        device: str = "cpu",
        preferences: Mapping[str, Preference] | None = None,
        process: Callable[[Any], ImageInputs] | None = None,
    ) -> None:
        from tokenizers import Tokenizer

        self.folder = ModelFolder(Path(folder))
        self.ours: LoadedModel = load_model(
            self.folder,
            Platform.detect(device),
            dtype="float32",
            device=device,
            preferences=preferences or {},
            progress=False,
        )
        self.theirs = Reference(self.folder.path, self.folder.model_type)
        self.tokenizer = Tokenizer.from_file(str(self.folder.path / "tokenizer.json"))
        own = self.ours.family.image_processor
        self.process = process or own(self.folder.preprocessor_config, self.ours.config, {})

    def images(self, sizes: Sequence[tuple[int, int]]) -> list[ImageInputs]:
        return [self.process(sample_image(*size, seed=i)) for i, size in enumerate(sizes)]

    def prompt(self, *parts: str | ImageInputs) -> Prompt:
        """Texts and images in order; texts are tokenised with special tokens recognised."""
        family, config = self.ours.family, self.ours.config
        text = "".join(part if isinstance(part, str) else family.expand(part.plan, config) for part in parts)
        images = [part for part in parts if isinstance(part, ImageInputs)]
        return make_prompt(self.ours, self.tokenizer.encode(text, add_special_tokens=False).ids, images)

    def prompts(self, sizes: Sequence[tuple[int, int]] = SIZES) -> dict[str, Prompt]:
        """Without an image, with one of each size, with two at once."""
        images = self.images(sizes)
        named = {"text only": self.prompt("The quick brown fox jumps over")}
        for size, image in zip(sizes, images, strict=True):
            named[f"one image of {size[0]}x{size[1]}"] = self.prompt("Describe ", image, " this image.")
        if len(images) > 1:
            named["two images"] = self.prompt("First: ", images[0], " second: ", images[1], "\nWhich picture has more?")
        return named

    def check_pixels(self, sizes: Sequence[tuple[int, int]]) -> None:
        """Our image processing against the reference's: same sizes and grids, values within one 8-bit step."""
        config = self.folder.preprocessor_config
        step = float(config.get("rescale_factor", 1 / 255)) / min(config.get("image_std", [0.5]))
        reference = reference_pixels(self.folder.path, self.folder.model_type, self.ours.config)
        for i, (width, height) in enumerate(sizes):
            image = sample_image(width, height, seed=i)
            ours, theirs = self.process(image), reference(image)
            if ours.plan != theirs.plan:
                raise AssertionError(f"a {width}x{height} image becomes {ours.plan}, in the reference {theirs.plan}")
            if not (error := float((ours.pixels - theirs.pixels).abs().max())) <= 1.01 * step:
                raise AssertionError(f"pixels of a {width}x{height} image: {error / step:.1f} 8-bit steps off")

    def check_features(self, images: Sequence[ImageInputs], tolerance: float) -> None:
        """All images as one batch of ours, each by itself in the reference."""
        with torch.inference_mode():
            ours = self.ours.model.encode_images(images)
        for image, features in zip(images, ours, strict=True):
            theirs = self.theirs.features([image])
            where = f"vision features of a {image.plan.size[0]}x{image.plan.size[1]} image"
            if features.shape != theirs.shape:
                raise AssertionError(f"{where}: shape {tuple(features.shape)}, reference {tuple(theirs.shape)}")
            error = relative_error(features, theirs)
            if not error <= tolerance:
                place = self.first_departure_vision(image, tolerance)
                raise AssertionError(f"{where}: {error:.2e} off (allowed {tolerance:.0e}); {place}")

    def check_logits(self, name: str, prompt: Prompt, tolerance: float) -> None:
        (ours,), theirs = prompt_logits(self.ours, [prompt]), self.theirs.logits(prompt)
        error = relative_error(ours, theirs)
        if not error <= tolerance:
            place = self.first_departure_text(prompt, tolerance)
            raise AssertionError(f"logits ({name}): {error:.2e} off (allowed {tolerance:.0e}); {place}")

    def check_greedy(self, prompts: Mapping[str, Prompt], max_tokens: int) -> None:
        """All prompts as one batch of ours, each by itself in the reference."""
        for (name, prompt), ours in zip(
            prompts.items(), greedy(self.ours, list(prompts.values()), max_tokens), strict=True
        ):
            theirs = self.theirs.greedy(prompt, max_tokens)
            if ours != theirs:
                at = next(i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b)
                raise AssertionError(
                    f"greedy tokens ({name}) depart at token {at}: {ours[at:][:5]}, reference {theirs[at:][:5]}"
                )

    def first_departure_vision(self, image: ImageInputs, tolerance: float) -> str:
        """The first vision layer whose output is off, in words."""
        with torch.inference_mode():
            return self._first_departure(
                self.theirs.adapter.vision,
                lambda: self.ours.model.encode_images([image]),
                lambda: self.theirs.features([image]),
                tolerance,
            )

    def first_departure_text(self, prompt: Prompt, tolerance: float) -> str:
        """The first decoder layer whose output is off, in words; embeddings are compared through what reaches layer
        0."""
        return self._first_departure(
            self.theirs.adapter.text,
            lambda: prompt_logits(self.ours, [prompt]),
            lambda: self.theirs.logits(prompt),
            tolerance,
        )

    def _first_departure(
        self, prefixes: tuple[str, str], ours: Callable[[], Any], theirs: Callable[[], Any], tolerance: float
    ) -> str:
        mine = record(self.ours.model, prefixes[0], ours)
        reference = record(self.theirs.model, prefixes[1], theirs)
        for i, (a, b) in enumerate(zip(mine, reference, strict=True)):
            if a.shape != b.shape:
                return f"layer {prefixes[0]}{i} gives shape {tuple(a.shape)}, reference {tuple(b.shape)}"
            if not (error := relative_error(a, b)) <= tolerance:
                return f"the first layer that departs is {prefixes[0]}{i} (reference {prefixes[1]}{i}), {error:.2e} off"
        return f"all {len(mine)} layers {prefixes[0]}* agree: look at what follows them"


def assert_parity(
    folder: str | Path,
    reference: str = "transformers",
    *,
    device: str = "cpu",
    preferences: Mapping[str, Preference] | None = None,
    sizes: Sequence[tuple[int, int]] = SIZES,
    max_tokens: int = 32,
    tolerance: float = 1e-4,
    process: Callable[[Any], ImageInputs] | None = None,
) -> None:
    """Compare a model folder with its reference implementation, in float32.

    Pixels (unless `process` makes them), vision features of images of all `sizes` in one batch, logits of prompts with
    no, one and two images, and `max_tokens` greedy tokens of all prompts in one batch.

    Args:
        reference: "transformers" is the only one.
        device, preferences, process: see ParityChecker. tolerance: the largest difference over the largest magnitude.

    Raises:
        AssertionError: what departs, by how much, and the first layer where it shows.
    """
    if reference != "transformers":
        raise ValueError(f"unknown reference {reference!r}: expected 'transformers'")
    checker = ParityChecker(folder, device, preferences, process)
    if process is None:
        checker.check_pixels(sizes)
    checker.check_features(checker.images(sizes), tolerance)
    prompts = checker.prompts(sizes)
    for name, prompt in prompts.items():
        checker.check_logits(name, prompt, tolerance)
    checker.check_greedy(prompts, max_tokens)
