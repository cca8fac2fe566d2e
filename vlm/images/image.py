"""`vlm.Image`: an image source together with how it is to be read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from vlm.errors import ImageDecodeError
from vlm.images.array import as_numpy, check_layout, describe_array

Channels = Literal["first", "last"]


@dataclass(frozen=True, eq=False)
class Image:
    """A picture for which something has to be said. Accepted wherever an image is; made by `open` or `from_array`.

    Attributes:
        source: whatever else is accepted as an image. options: keyword arguments of `load_image` for it.
    """

    source: Any
    options: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def open(
        cls,
        source: Any,
        *,
        lenient: bool = False,
        frame: int | None = None,
        background: tuple[int, int, int] | None = None,
        allow_private: bool = False,
        max_pixels_decoded: int | None = None,
    ) -> Image:
        """A source with the switches of its reading. Nothing is read before the image is used.

        Args:
            lenient: show what is there of a truncated file, the rest blank, instead of refusing it.
            frame: which frame of an animation or page of a document, from 0; None: the first.
            background: RGB of 0..255 that transparent pixels are composited on; None: white.
            allow_private: fetch a URL from a loopback, private or reserved address too.
            max_pixels_decoded: pixels above which the source is refused from its header; None: the usual limit.

        Raises:
            ImageDecodeError: a switch of the wrong type.
        """
        from vlm.images.source import FetchPolicy

        for name, value in (("lenient", lenient), ("allow_private", allow_private)):
            if not isinstance(value, bool):
                raise ImageDecodeError(f"{name} must be True or False, not {value!r}")
        for name, number, low in (("frame", frame, 0), ("max_pixels_decoded", max_pixels_decoded, 1)):
            if number is not None and (not isinstance(number, int) or isinstance(number, bool) or number < low):
                raise ImageDecodeError(f"{name} must be a whole number, {low} or more, not {number!r}")
        if background is not None and not _is_colour(background):
            raise ImageDecodeError(f"background must be three whole numbers of 0..255, not {background!r}")
        options: dict[str, Any] = {
            "lenient": lenient or None,
            "frames": None if frame is None else (frame,),
            "background": None if background is None else tuple(background),
            "fetch_policy": FetchPolicy(allow_private=True) if allow_private else None,
            "max_pixels_decoded": max_pixels_decoded,
        }
        return cls(source, {name: value for name, value in options.items() if value is not None})

    @classmethod
    def from_array(cls, array: Any, channels: Channels = "last") -> Image:
        """A numpy array or torch tensor as a picture.

        Args:
            array: (H, W, C) with `channels="last"`, (C, H, W) with `channels="first"`; uint8, bool, uint16 or float in
                0..1.

        Raises:
            ImageDecodeError: a shape or type that the rule of vlm.images.array refuses.
        """
        if channels not in ("first", "last"):
            raise ImageDecodeError(f'channels must be "first" or "last", not {channels!r}')
        values = as_numpy(array)
        if channels == "first":
            if values.ndim != 3:
                raise ImageDecodeError(f'channels="first" needs an array of (C, H, W), not {describe_array(values)}')
            values = np.moveaxis(values, 0, -1)
        check_layout(values)
        return cls(values)


def _is_colour(value: Any) -> bool:
    parts = value if isinstance(value, (tuple, list)) else ()
    return len(parts) == 3 and all(isinstance(v, int) and not isinstance(v, bool) and 0 <= v <= 255 for v in parts)
