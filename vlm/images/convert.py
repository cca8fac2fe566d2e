"""Any decoded picture -> 8-bit RGB, upright. One written rule for each kind of pixel.

* Transparency (an alpha channel, a palette with alpha, a PNG colour key) is composited on a background, white unless
  the caller says otherwise: what lies under alpha 0 is noise and must not be seen.
* 16-bit grey is scaled by 1/257, which maps 0..65535 onto 0..255 evenly.
* 32-bit integers (mode I) are taken as 8-bit where all are within 0..255, as 16-bit where all are within 0..65535, and
  else stretched from their smallest to their largest value. Floats (mode F) likewise, and as 0..1 where all are within
  that.
* CMYK and YCCK are converted by Pillow's formula; colour profiles are not applied, as in the reference processors.
"""

from __future__ import annotations

import numpy as np
import PIL.Image as pil

from vlm.errors import ImageDecodeError

WHITE = (255, 255, 255)
_ORIENTATION_TAG = 0x0112

# EXIF orientation -> how to turn the stored picture upright.
_UPRIGHT = {
    2: pil.Transpose.FLIP_LEFT_RIGHT,
    3: pil.Transpose.ROTATE_180,
    4: pil.Transpose.FLIP_TOP_BOTTOM,
    5: pil.Transpose.TRANSPOSE,
    6: pil.Transpose.ROTATE_270,
    7: pil.Transpose.TRANSVERSE,
    8: pil.Transpose.ROTATE_90,
}


def orientation(picture: pil.Image) -> int:
    """EXIF (or XMP) orientation, 1..8, from what the header holds. Broken metadata counts as upright.

    Pillow turns TIFF pages itself while it decodes them, and already reports their upright size.
    """
    if hasattr(picture, "tag_v2"):
        return 1
    try:
        # Not the subclass's method: PNG's would decode the whole picture first.
        value = pil.Image.getexif(picture).get(_ORIENTATION_TAG, 1)
    except Exception:  # metadata is whatever the camera wrote, and Pillow's reader raises a dozen types on it
        return 1
    return value if isinstance(value, int) and value in _UPRIGHT else 1


def upright_size(picture: pil.Image) -> tuple[int, int]:
    """(width, height) once turned upright."""
    width, height = picture.size
    return (height, width) if orientation(picture) >= 5 else (width, height)


def colour_key_depth(picture: pil.Image) -> int:
    """Bits a sample in the file, for a picture that is not decoded yet; a PNG colour key is written at that depth."""
    tiles = getattr(picture, "tile", None)  # only a picture that came from a file has them
    args = tiles[0][3] if tiles else ""
    return {"L;2": 2, "L;4": 4, "RGB;16B": 16}.get(args, 8) if isinstance(args, str) else 8


def to_rgb(picture: pil.Image, name: str, background: tuple[int, int, int] = WHITE, key_depth: int = 8) -> pil.Image:
    """A decoded picture -> mode RGB, by the rules of this module; not turned.

    `key_depth` is `colour_key_depth` from before the decoding.

    Raises ImageDecodeError for a pixel layout that has no rule.
    """
    mode = picture.mode
    try:
        if mode.startswith("I;16"):
            return _from_16_bit(picture, background)
        if mode in {"I", "F"}:
            return pil.fromarray(_stretch(np.asarray(picture), name, declared_bits(picture))).convert("RGB")
        if mode == "RGB" and "transparency" not in picture.info:
            return picture
        if picture.has_transparency_data:
            return _composite(_to_rgba(picture, key_depth), background)
        return picture.convert("RGB")
    except (ValueError, OSError) as e:
        raise ImageDecodeError(f"{name}: pixels of mode {mode!r} cannot be converted to RGB: {e}") from e


def turn_upright(picture: pil.Image, orientation_tag: int) -> pil.Image:
    """The picture turned as its EXIF orientation (1..8) asks."""
    return picture.transpose(_UPRIGHT[orientation_tag]) if orientation_tag in _UPRIGHT else picture


def declared_bits(picture: pil.Image) -> int | None:
    """Bits a grey sample where the file tells more than the mode: 16 for PNG and PPM in mode I, 12 for some TIFF."""
    if picture.mode == "I":
        return 16 if picture.format in {"PNG", "PPM"} else None
    samples = getattr(picture, "tag_v2", {}).get(258, ())
    return int(samples[0]) if samples and picture.mode.startswith("I;16") else None


def _to_rgba(picture: pil.Image, key_depth: int) -> pil.Image:
    key = picture.info.get("transparency")
    if picture.mode == "La":
        return picture.convert("LA").convert("RGBA")
    if picture.mode in {"L", "RGB"} and key is not None:
        return _apply_colour_key(picture, key, key_depth)
    return picture.convert("RGBA")


def _apply_colour_key(picture: pil.Image, key: int | tuple[int, ...], depth: int) -> pil.Image:
    """Pillow compares the key with decoded pixels without scaling it from the file's depth to theirs."""
    values = (key,) if isinstance(key, int) else key
    scaled = [v >> 8 if depth == 16 else v * 255 // ((1 << depth) - 1) for v in values]
    pixels = np.asarray(picture).reshape(picture.height, picture.width, -1)
    alpha = np.where((pixels == scaled).all(axis=-1), 0, 255).astype(np.uint8)
    rgba = picture.convert("RGB")
    rgba.putalpha(pil.fromarray(alpha))
    return rgba


def _composite(rgba: pil.Image, background: tuple[int, int, int]) -> pil.Image:
    if rgba.getchannel("A").getextrema() == (255, 255):
        return rgba.convert("RGB")
    canvas = pil.new("RGBA", rgba.size, (*background, 255))
    canvas.alpha_composite(rgba)
    return canvas.convert("RGB")


def _from_16_bit(picture: pil.Image, background: tuple[int, int, int]) -> pil.Image:
    values = np.asarray(picture).astype(np.uint32)
    top = (1 << (declared_bits(picture) or 16)) - 1
    grey = pil.fromarray(np.minimum((values * 255 + top // 2) // top, 255).astype(np.uint8))
    key = picture.info.get("transparency")
    if key is None:
        return grey.convert("RGB")
    opaque = pil.fromarray(np.where(values == key, 0, 255).astype(np.uint8))
    return _composite(pil.merge("LA", (grey, opaque)).convert("RGBA"), background)


def _stretch(values: np.ndarray, name: str, bits: int | None) -> np.ndarray:
    """(H, W) integers or floats -> uint8. `bits` is what the file declares; None: the values themselves must tell."""
    tops = (255.0, 65535.0) if values.dtype.kind in "iu" else (1.0, 255.0, 65535.0)
    low, high = float(values.min()), float(values.max())
    if not np.isfinite(low + high):
        raise ImageDecodeError(f"{name}: the picture holds NaN or infinite values: replace them first")
    if bits is not None:
        low, high = 0.0, float((1 << bits) - 1)
    elif low >= 0 and high <= tops[-1]:
        low, high = 0.0, next(top for top in tops if high <= top)
    scale = 255.0 / (high - low) if high > low else 0.0
    return np.clip(np.rint((values.astype(np.float64) - low) * scale), 0, 255).astype(np.uint8)
