"""Reading preprocessor configs and the caller's overrides, and the arithmetic that every processor shares."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import numpy as np
import PIL.Image as pil

from vlm.errors import CheckpointError, PromptError

CONFIG_FILE = "preprocessor_config.json"


@dataclass(frozen=True, eq=False)
class Normalizer:
    """uint8 -> float32 as `(value * scale - mean) / std` per channel, rounded exactly as the reference rounds it.

    A byte has 256 values, so each channel is one table, filled by the reference's own steps: the product in float64
    rounded to float32, the rest in float32. Looking a value up is as fast as computing it.
    """

    table: np.ndarray  # float32 (3, 256)

    @classmethod
    def from_config(cls, config: Mapping[str, Any], mean: tuple[float, ...], std: tuple[float, ...]) -> Normalizer:
        """`mean` and `std` are the defaults of the processor's class, for configs that leave them out."""
        values = np.tile(np.arange(256, dtype=np.float64), (3, 1))
        if config.get("do_rescale", True):
            factor = config.get("rescale_factor", 1 / 255)
            if isinstance(factor, bool) or not isinstance(factor, (int, float)):
                raise CheckpointError(f"{CONFIG_FILE}: rescale_factor must be a number, not {factor!r}")
            values = values * factor
        values = values.astype(np.float32)
        if config.get("do_normalize", True):
            means, stds = _per_channel(config, "image_mean", mean), _per_channel(config, "image_std", std)
            if not stds.all():
                raise CheckpointError(f"{CONFIG_FILE}: image_std holds a zero")
            values = (values - means) / stds
        return cls(np.ascontiguousarray(values, dtype=np.float32))

    def channel(self, index: int, values: np.ndarray) -> np.ndarray:
        """uint8 of any shape, all of one channel -> float32 of the same shape."""
        return np.take(self.table[index], values, mode="clip")


def _per_channel(config: Mapping[str, Any], key: str, default: tuple[float, ...]) -> np.ndarray:
    given = config.get(key)
    values = default if given is None else given
    try:
        return np.broadcast_to(np.asarray(values, dtype=np.float32), (3,)).reshape(3, 1)
    except (TypeError, ValueError) as e:
        raise CheckpointError(f"{CONFIG_FILE}: {key} must be a number or three numbers, not {values!r}") from e


def resample_filter(config: Mapping[str, Any], default: pil.Resampling) -> pil.Resampling:
    """Pillow's filter by its number, as configs write it."""
    value = config.get("resample")
    if value is None:
        return default
    try:
        return pil.Resampling(value)
    except ValueError as e:
        raise CheckpointError(f"{CONFIG_FILE}: resample is {value!r}, which is no filter of Pillow's (0 to 5)") from e


def config_int(config: Mapping[str, Any], key: str, default: int) -> int:
    """A positive whole number of the config."""
    value = config.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise CheckpointError(f"{CONFIG_FILE}: {key} must be a positive whole number, not {value!r}")
    return value


def require_steps(config: Mapping[str, Any], *keys: str) -> None:
    """Refuse a config that switches off a step without which its model's shapes would not hold."""
    for key in keys:
        if config.get(key) is False:
            raise CheckpointError(f"{CONFIG_FILE}: {key} is false, which this processor does not support")


def check_overrides(overrides: Mapping[str, Any], known: tuple[str, ...]) -> dict[str, Any]:
    """The overrides that are set (None means unset). Raises PromptError for a name that the processor does not know."""
    for name in overrides:
        if name not in known:
            near = get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise PromptError(
                f"unknown image setting {name!r}: {hint}this model takes {', '.join(known[:-1])} and {known[-1]}"
            )
    return {name: value for name, value in overrides.items() if value is not None}


def positive_int(name: str, value: Any) -> int:
    """An override that must be a positive whole number."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise PromptError(f"{name} must be a positive whole number, not {value!r}")
    return value


def to_array(image: pil.Image) -> np.ndarray:
    """An RGB picture as uint8 (height, width, 3)."""
    assert image.mode == "RGB", f"processors take RGB pictures, not {image.mode}: use load_image"
    return np.asarray(image)
