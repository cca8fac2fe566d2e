"""Image bytes -> RGB -> patches, as the reference processors compute them.

`load_image` reads any source; the processors (one module a model family) turn a picture into model inputs. This package
knows neither prompts nor the engine.
"""

from __future__ import annotations

from vlm.images.formats import MAX_PIXELS_DECODED
from vlm.images.image import Image
from vlm.images.load import LoadedImage, load_image, read_size
from vlm.images.source import KINDS, FetchPolicy, source_name

__all__ = [
    "KINDS",
    "MAX_PIXELS_DECODED",
    "FetchPolicy",
    "Image",
    "LoadedImage",
    "load_image",
    "read_size",
    "source_name",
]
