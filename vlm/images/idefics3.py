"""The image processor of Idefics3 and SmolVLM: resize to a longest edge, then split into square tiles and a global
view.

Follows `Idefics3ImageProcessor` and `SmolVLMImageProcessor` of transformers, which differ in their defaults only: same
sizes, same pixels.
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

OVERRIDES = ("max_pixels", "size", "do_image_splitting")
MAX_EDGE = 4096  # the reference shrinks what is longer, whatever the config says

_HALF = (0.5, 0.5, 0.5)
_TILE = 364
_LONGEST_EDGE = 4 * 364


@dataclass(frozen=True, eq=False)
class Idefics3Processor:
    """RGB pictures -> (tiles, 3, tile, tile).

    Tiles come row by row, the global view last. `grid` of a plan is (rows, columns) of tiles, (0, 0) for a picture that
    is not split; `num_tokens` is `tokens_per_tile` for each tile and the global view.
    """

    longest_edge: int
    tile: int
    do_image_splitting: bool
    tokens_per_tile: int
    resample: pil.Resampling
    normalizer: Normalizer
    max_pixels: int | None = None

    @classmethod
    def from_config(
        cls, preprocessor: Mapping[str, Any], overrides: Mapping[str, Any], tokens_per_tile: int | None = None
    ) -> Idefics3Processor:
        """From preprocessor_config.json and the caller's overrides.

        Args:
            preprocessor: the config; `image_seq_len` in it (from processor_config.json) stands in for
                `tokens_per_tile`.
            overrides: `size`, the longest edge before splitting, as a number or {"longest_edge": ...};
                `do_image_splitting`; `max_pixels`, a cap on the area of the resized picture that is split into tiles:
                the longest edge is lowered, tile by tile, until rows * columns * tile ** 2 is within it.
            tokens_per_tile: image tokens of one tile: (image_size / patch_size / scale_factor) ** 2 of the model's
                config.

        Raises:
            PromptError: an unknown or impossible override. CheckpointError: a config that cannot be used.
        """
        require_steps(preprocessor, "do_resize")
        chosen = check_overrides(overrides, OVERRIDES)
        tile = _edge(preprocessor, "max_image_size", _TILE)
        tokens = tokens_per_tile if tokens_per_tile is not None else preprocessor.get("image_seq_len")
        if not isinstance(tokens, int) or tokens < 1:
            raise CheckpointError(
                f"processor_config.json: image_seq_len (image tokens of a tile) must be a whole number, not {tokens!r}"
            )
        max_pixels = chosen.get("max_pixels")
        if max_pixels is not None and positive_int("max_pixels", max_pixels) < tile * tile:
            raise PromptError(
                f"max_pixels is {max_pixels}, below one tile of this model: {tile}x{tile} is {tile * tile}"
            )
        splitting = chosen.get("do_image_splitting", preprocessor.get("do_image_splitting", True))
        if not isinstance(splitting, bool):
            error = PromptError if "do_image_splitting" in chosen else CheckpointError
            raise error(f"do_image_splitting must be true or false, not {splitting!r}")
        longest_edge = _edge(preprocessor, "size", _LONGEST_EDGE)
        return cls(
            longest_edge=_size_override(chosen["size"]) if "size" in chosen else longest_edge,
            tile=tile,
            do_image_splitting=splitting,
            tokens_per_tile=tokens,
            resample=resample_filter(preprocessor, pil.Resampling.LANCZOS),
            normalizer=Normalizer.from_config(preprocessor, _HALF, _HALF),
            max_pixels=max_pixels,
        )

    def plan(self, width: int, height: int) -> ImagePlan:
        """What a picture of this size becomes."""
        if min(width, height) < 1:
            raise ImageDecodeError(f"a picture of {width}x{height} pixels has nothing to see")
        size = self._sizes(width, height)[-1]
        columns, rows = size[0] // self.tile, size[1] // self.tile
        if (rows, columns) == (1, 1):
            return ImagePlan(size, self.tokens_per_tile, (0, 0))
        return ImagePlan(size, (rows * columns + 1) * self.tokens_per_tile, (rows, columns))

    def __call__(self, image: pil.Image) -> ImageInputs:
        """Resize, split and normalise one RGB picture."""
        plan = self.plan(*image.size)
        for size in self._sizes(*image.size):
            image = image.resize(size, self.resample)
        tiles = [image]
        if plan.grid != (0, 0):
            rows, columns, t = *plan.grid, self.tile
            corners = [(c * t, r * t) for r in range(rows) for c in range(columns)]
            tiles = [image.crop((x, y, x + t, y + t)) for x, y in corners]
            tiles.append(image.resize((t, t), self.resample))
        pixels = np.empty((len(tiles), 3, self.tile, self.tile), dtype=np.float32)
        for out, picture in zip(pixels, tiles, strict=True):
            array = to_array(picture)
            for c in range(3):
                out[c] = self.normalizer.channel(c, array[..., c])
        return ImageInputs(torch.from_numpy(pixels), plan)

    def _sizes(self, width: int, height: int) -> list[tuple[int, int]]:
        """The sizes that a picture is resized to, one after the other; the last is a multiple of the tile."""
        if not self.do_image_splitting:
            return [_fit_longest_edge(width, height, self.longest_edge), (self.tile, self.tile)]
        edge = self.longest_edge
        while True:
            fitted = _fit_longest_edge(width, height, edge)
            tiled = _round_up_to_tiles(*fitted, self.tile)
            if self.max_pixels is None or tiled[0] * tiled[1] <= self.max_pixels:
                return [fitted, tiled]
            # One tile less along the longer side; rounding to even can carry a picture back over the edge of an odd
            # tile, so the edge shrinks in any case.
            edge = min((max(tiled) // self.tile - 1) * self.tile, edge - 1)
            if edge < self.tile:
                return [fitted, (self.tile, self.tile)]


def _fit_longest_edge(width: int, height: int, edge: int) -> tuple[int, int]:
    """(width, height) with the longer side `edge` (4096 at most) and the other in proportion, rounded to even."""
    ratio = width / height
    if width >= height:
        width, height = edge, int(edge / ratio)
        height += height % 2
    else:
        width, height = int(edge * ratio), edge
        width += width % 2
    width, height = max(width, 1), max(height, 1)
    if max(width, height) > MAX_EDGE:
        ratio = width / height
        if width >= height:
            width, height = MAX_EDGE, int(MAX_EDGE / ratio)
        else:
            width, height = int(MAX_EDGE * ratio), MAX_EDGE
    return max(width, 1), max(height, 1)


def _round_up_to_tiles(width: int, height: int, tile: int) -> tuple[int, int]:
    """(width, height) grown to multiples of the tile: the longer side first, the other after it in proportion."""
    ratio = width / height
    if width >= height:
        width = math.ceil(width / tile) * tile
        height = math.ceil(int(width / ratio) / tile) * tile
    else:
        height = math.ceil(height / tile) * tile
        width = math.ceil(int(height * ratio) / tile) * tile
    return max(width, tile), max(height, tile)


def _edge(config: Mapping[str, Any], key: str, default: int) -> int:
    value = config.get(key)
    if value is None:
        return default
    if not isinstance(value, Mapping) or "longest_edge" not in value:
        raise CheckpointError(f'{CONFIG_FILE}: {key} must be {{"longest_edge": ...}}, not {value!r}')
    return config_int(value, "longest_edge", default)


def _size_override(value: Any) -> int:
    if isinstance(value, Mapping):
        if set(value) != {"longest_edge"}:
            raise PromptError(f'size must be a number or {{"longest_edge": ...}}, not {value!r}')
        value = value["longest_edge"]
    return positive_int("size", value)
