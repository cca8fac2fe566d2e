"""The image processor of Qwen2-VL and Qwen2.5-VL: dynamic resolution, flattened patches in merge order.

Follows `Qwen2VLImageProcessor` of transformers: same sizes, same pixels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import PIL.Image as pil
import torch

from vlm.errors import CheckpointError, ImageDecodeError, PromptError
from vlm.families.base import ImageInputs, ImagePlan
from vlm.images.settings import (
    CONFIG_FILE,
    Normalizer,
    check_overrides,
    config_int,
    positive_int,
    require_steps,
    resample_filter,
    to_array,
)

MAX_ASPECT_RATIO = 200
OVERRIDES = ("max_pixels", "min_pixels")

_MEAN = (0.48145466, 0.4578275, 0.40821073)
_STD = (0.26862954, 0.26130258, 0.27577711)
_MIN_PIXELS = 56 * 56
_MAX_PIXELS = 28 * 28 * 1280


def smart_resize(width: int, height: int, factor: int, min_pixels: int, max_pixels: int) -> tuple[int, int]:
    """The (width, height) that a picture is resized to: multiples of `factor`, an area within the limits, about the
    shape.

    For very long pictures the limits give way to at least one `factor` a side, as in the reference.

    Raises:
        ImageDecodeError: one side is more than 200 times the other.
    """
    if min(width, height) < 1:
        raise ImageDecodeError(f"a picture of {width}x{height} pixels has nothing to see")
    if max(width, height) > MAX_ASPECT_RATIO * min(width, height):
        raise ImageDecodeError(
            f"a picture of {width}x{height} pixels is too long for this model: one side may be at most "
            f"{MAX_ASPECT_RATIO} times the other; crop it or cut it into pieces"
        )
    w, h = round(width / factor) * factor, round(height / factor) * factor
    if w * h > max_pixels:
        shrink = math.sqrt(height * width / max_pixels)
        w = max(factor, math.floor(width / shrink / factor) * factor)
        h = max(factor, math.floor(height / shrink / factor) * factor)
    elif w * h < min_pixels:
        grow = math.sqrt(min_pixels / (height * width))
        w = math.ceil(width * grow / factor) * factor
        h = math.ceil(height * grow / factor) * factor
    return w, h


@dataclass(frozen=True, eq=False)
class Qwen2VLProcessor:
    """RGB pictures -> (patches, 3 * temporal_patch_size * patch_size ** 2).

    Patches come in merge order: the merge_size x merge_size block of each output token together, blocks row by row.
    `grid` of a plan is (1, rows, columns) of patches; `num_tokens` is their number over merge_size ** 2.
    """

    patch_size: int
    temporal_patch_size: int
    merge_size: int
    min_pixels: int
    max_pixels: int
    resample: pil.Resampling
    normalizer: Normalizer

    @classmethod
    def from_config(cls, preprocessor: Mapping[str, Any], overrides: Mapping[str, Any]) -> Qwen2VLProcessor:
        """From preprocessor_config.json and the caller's overrides: `max_pixels`, `min_pixels` (areas after resizing).

        Raises:
            PromptError: an unknown or impossible override. CheckpointError: a config that cannot be used.
        """
        require_steps(preprocessor, "do_resize")
        chosen = check_overrides(overrides, OVERRIDES)
        patch_size = config_int(preprocessor, "patch_size", 14)
        merge_size = config_int(preprocessor, "merge_size", 2)
        min_pixels, max_pixels = _pixel_limits(preprocessor)
        if chosen:
            min_pixels = positive_int("min_pixels", chosen.get("min_pixels", min_pixels))
            max_pixels = positive_int("max_pixels", chosen.get("max_pixels", max_pixels))
            unit = (patch_size * merge_size) ** 2
            if max_pixels < max(min_pixels, unit):
                least = f"min_pixels ({min_pixels})" if min_pixels >= unit else f"one token's {unit} pixels"
                raise PromptError(f"max_pixels is {max_pixels}, below {least}: raise it, or lower min_pixels as well")
        return cls(
            patch_size=patch_size,
            temporal_patch_size=config_int(preprocessor, "temporal_patch_size", 2),
            merge_size=merge_size,
            min_pixels=min_pixels,
            max_pixels=max_pixels,
            resample=resample_filter(preprocessor, pil.Resampling.BICUBIC),
            normalizer=Normalizer.from_config(preprocessor, _MEAN, _STD),
        )

    def plan(self, width: int, height: int) -> ImagePlan:
        """What a picture of this size becomes. Raises ImageDecodeError beyond the aspect ratio of 200."""
        size = smart_resize(width, height, self.patch_size * self.merge_size, self.min_pixels, self.max_pixels)
        columns, rows = size[0] // self.patch_size, size[1] // self.patch_size
        num_tokens = rows * columns // self.merge_size**2
        if num_tokens < 1:
            raise ImageDecodeError(f"a picture of {width}x{height} pixels would give this model no image token")
        return ImagePlan(size=size, num_tokens=num_tokens, grid=(1, rows, columns))

    def __call__(self, image: pil.Image) -> ImageInputs:
        """Resize, normalise and patchify one RGB picture."""
        plan = self.plan(*image.size)
        pixels = to_array(image.resize(plan.size, self.resample))
        return ImageInputs(torch.from_numpy(self._patchify(pixels)), plan)

    def _patchify(self, pixels: np.ndarray) -> np.ndarray:
        """uint8 (height, width, 3) -> float32 (patches, 3 * t * p * p); a still picture is repeated t times."""
        p, m, t = self.patch_size, self.merge_size, self.temporal_patch_size
        block = p * m
        rows, columns = pixels.shape[0] // block, pixels.shape[1] // block
        # (rows, m, p, columns, m, p, 3) -> (rows, columns, m, m, 3, p, p), still in bytes: a quarter of the traffic.
        blocks = pixels.reshape(rows, m, p, columns, m, p, 3).transpose(0, 3, 1, 4, 6, 2, 5)
        patches = np.ascontiguousarray(blocks).reshape(-1, 3, p * p)
        out = np.empty((len(patches), 3, t, p * p), dtype=np.float32)
        for c in range(3):
            out[:, c] = self.normalizer.channel(c, patches[:, c])[:, None]
        return out.reshape(len(patches), -1)


def _pixel_limits(config: Mapping[str, Any]) -> tuple[int, int]:
    """(min_pixels, max_pixels), in either spelling: at the top level, which wins, or inside `size`."""
    size = config.get("size") or {}
    if not isinstance(size, Mapping):
        raise CheckpointError(f"{CONFIG_FILE}: size must be an object, not {size!r}")
    limits = []
    for name, edge, default in (
        ("min_pixels", "shortest_edge", _MIN_PIXELS),
        ("max_pixels", "longest_edge", _MAX_PIXELS),
    ):
        inner = config_int(size, edge, config_int(size, name, default))
        limits.append(config_int(config, name, inner))
    if limits[0] > limits[1]:
        raise CheckpointError(f"{CONFIG_FILE}: min_pixels is {limits[0]}, above max_pixels, which is {limits[1]}")
    return limits[0], limits[1]
