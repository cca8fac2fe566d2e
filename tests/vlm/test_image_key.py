"""Pictures have one key exactly where the model sees the same."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from PIL import Image

from vlm.images import load_image
from vlm.images.idefics3 import Idefics3Processor
from vlm.images.qwen2_vl import Qwen2VLProcessor
from vlm.prepare import fingerprint, image_key

PIXELS = np.random.default_rng(0).integers(0, 256, (40, 30, 3), dtype=np.uint8)
SETTINGS = b"settings"


def key(source: Any, settings: bytes = SETTINGS) -> bytes:
    return image_key(load_image(source).image, settings)


def test_one_picture_has_one_key_however_it_comes() -> None:
    png = io.BytesIO()
    Image.fromarray(PIXELS).save(png, "PNG")
    assert key(png.getvalue()) == key(PIXELS) == key(Image.fromarray(PIXELS))


def test_pixels_size_mode_and_settings_tell_pictures_apart() -> None:
    changed = PIXELS.copy()
    changed[39, 29, 2] ^= 1
    same_bytes = PIXELS.reshape(30, 40, 3)
    grey = Image.fromarray(PIXELS[..., 0])
    keys = [key(x) for x in (PIXELS, changed, same_bytes)]
    keys += [image_key(grey, SETTINGS), key(grey), key(PIXELS, b"others")]
    assert len(set(keys)) == 6


def qwen(changes: dict[str, Any] | None = None, **overrides: Any) -> bytes:
    return fingerprint(Qwen2VLProcessor.from_config(changes or {}, overrides))


def test_equal_settings_have_one_fingerprint() -> None:
    assert qwen() == qwen({"image_mean": [0.48145466, 0.4578275, 0.40821073]}) == qwen({"unknown": 1})


@pytest.mark.parametrize(
    "changes", [{"image_mean": [0.5, 0.5, 0.5]}, {"do_normalize": False}, {"resample": 2}, {"patch_size": 16}]
)
def test_any_setting_changes_the_fingerprint(changes: dict[str, Any]) -> None:
    assert qwen(changes) != qwen()


def test_an_override_changes_the_fingerprint() -> None:
    assert len({qwen(), qwen(max_pixels=100_000), qwen(max_pixels=100_001), qwen(min_pixels=784)}) == 4
    processors = [
        Idefics3Processor.from_config({}, {"do_image_splitting": split}, tokens_per_tile=4) for split in (False, True)
    ]
    assert len({*map(fingerprint, processors), qwen()}) == 3
