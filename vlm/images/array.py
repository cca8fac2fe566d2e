"""Arrays and tensors as pictures.

The rule: height, width, channels, in 8 bits. (H, W) and (H, W, 1) are grey, (H, W, 3) is RGB, (H, W, 4) is RGBA.
Booleans are black and white; floats must lie within 0..1; 16-bit unsigned integers are scaled by 1/257. Everything else
is refused with its shape and type in the message: an array whose layout has to be guessed is sooner or later guessed
wrong.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import PIL.Image as pil

from vlm.errors import ImageDecodeError


def is_array(source: object) -> bool:
    """numpy arrays, torch tensors, and whatever else offers itself as an array. Does not import torch."""
    return hasattr(source, "__array__") or _is_torch(source)


def as_numpy(array: Any) -> np.ndarray:
    """Any array or tensor, on any device, as numpy. bfloat16 becomes float32."""
    try:
        if _is_torch(array):
            array = array.detach().cpu()
            array = (array.float() if array.is_floating_point() else array).numpy()
        return np.asarray(array)
    except Exception as e:  # a foreign array type raises what it likes, and a meta tensor holds nothing
        raise ImageDecodeError(f"a {type(array).__name__} cannot be read as an array: {e}") from e


def describe_array(values: np.ndarray) -> str:
    return f"an array of shape {values.shape} and type {values.dtype}"


def check_layout(values: np.ndarray) -> None:
    """Raise ImageDecodeError unless the shape is (H, W) or (H, W, 1 | 3 | 4), not empty, and the type has a rule."""
    what, shape = describe_array(values), values.shape
    if values.dtype.kind not in "fb" and values.dtype not in (np.uint8, np.uint16):
        raise ImageDecodeError(f"{what} is no picture: convert it to uint8, uint16, bool or float in 0..1")
    if 0 in shape:
        raise ImageDecodeError(f"{what} is no picture: it has no pixels")
    if values.ndim == 2 or (values.ndim == 3 and shape[-1] in (1, 3, 4)):
        return
    if values.ndim == 3 and shape[0] in (1, 3, 4):
        raise ImageDecodeError(
            f"{what} is not (height, width, channels); if its channels come first, say "
            'vlm.Image.from_array(a, channels="first")'
        )
    if values.ndim == 4:
        raise ImageDecodeError(f"{what} is a batch: pass its pictures one by one")
    raise ImageDecodeError(f"{what} is no picture: it must be (height, width) or (height, width, 1 | 3 | 4)")


def array_to_picture(values: np.ndarray) -> pil.Image:
    """A checked array -> a PIL picture of mode L, RGB or RGBA, by the rule of this module."""
    check_layout(values)
    pixels = _to_uint8(values)
    if pixels.ndim == 3 and pixels.shape[-1] == 1:
        pixels = pixels[..., 0]
    return pil.fromarray(np.ascontiguousarray(pixels))


def _to_uint8(values: np.ndarray) -> np.ndarray:
    if values.dtype == np.uint8:
        return values
    if values.dtype == np.bool_:
        return values.astype(np.uint8) * np.uint8(255)
    if values.dtype == np.uint16:
        return ((values.astype(np.uint32) + 128) // 257).astype(np.uint8)
    low, high = float(values.min()), float(values.max())
    if not (low >= 0.0 and high <= 1.0):  # also false for NaN
        raise ImageDecodeError(
            f"{describe_array(values)} holds values from {low:g} to {high:g}: floats must lie within 0..1; "
            "undo any normalisation, or convert values of 0..255 to uint8"
        )
    return np.rint(values.astype(np.float64) * 255.0).astype(np.uint8)


def _is_torch(source: object) -> bool:
    return type(source).__module__.split(".")[0] == "torch" and hasattr(source, "detach")
