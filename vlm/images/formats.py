"""Which picture formats are read, told apart by their first bytes, and what to do about the others.

A file name's extension is never asked. Pillow's decoders are called one by one instead of through `PIL.Image.open`:
that keeps its process-wide pixel limit (`Image.MAX_IMAGE_PIXELS`, a warning or an error that this package has no right
to change) out of the way of ours, and offers hostile bytes to one decoder only.
"""

from __future__ import annotations

import importlib
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import BinaryIO, NoReturn

import PIL.Image as pil

from vlm.errors import ImageDecodeError, ImageTooLargeError

# 128 Mi pixels are 384 MiB as RGB. The largest common camera pictures (108 megapixels) pass; what compresses to a few
# kilobytes and decodes to half a gigabyte does not.
MAX_PIXELS_DECODED = 128 * 1024 * 1024

HEAD_BYTES = 4096

# format -> (module, class or function): imported when a picture of that format is met.
DECODERS: dict[str, tuple[str, str]] = {
    "AVIF": ("PIL.AvifImagePlugin", "AvifImageFile"),
    "BMP": ("PIL.BmpImagePlugin", "BmpImageFile"),
    "GIF": ("PIL.GifImagePlugin", "GifImageFile"),
    "HEIF": ("pillow_heif.as_plugin", "HeifImageFile"),
    "JPEG": ("PIL.JpegImagePlugin", "jpeg_factory"),
    "JPEG2000": ("PIL.Jpeg2KImagePlugin", "Jpeg2KImageFile"),
    "PNG": ("PIL.PngImagePlugin", "PngImageFile"),
    "PPM": ("PIL.PpmImagePlugin", "PpmImageFile"),
    "QOI": ("PIL.QoiImagePlugin", "QoiImageFile"),
    "TIFF": ("PIL.TiffImagePlugin", "TiffImageFile"),
    "WEBP": ("PIL.WebPImagePlugin", "WebPImageFile"),
}

MISSING_DECODER = {
    "AVIF": "this Pillow was built without AVIF: install Pillow 11.3 or later from its wheel",
    "HEIF": "HEIC pictures need another package: pip install pillow-heif",
    "JPEG2000": "this Pillow was built without OpenJPEG: install Pillow from its wheel",
    "WEBP": "this Pillow was built without WebP: install Pillow from its wheel",
}

_SIGNATURES: tuple[tuple[int, bytes, str], ...] = (
    (0, b"\xff\xd8\xff", "JPEG"),
    (0, b"\x89PNG\r\n\x1a\n", "PNG"),
    (0, b"GIF87a", "GIF"),
    (0, b"GIF89a", "GIF"),
    (8, b"WEBP", "WEBP"),
    (0, b"II*\0", "TIFF"),
    (0, b"MM\0*", "TIFF"),
    (0, b"II+\0", "TIFF"),
    (0, b"MM\0+", "TIFF"),
    (0, b"BM", "BMP"),
    (0, b"qoif", "QOI"),
    (0, b"\xff\x4f\xff\x51", "JPEG2000"),
    (0, b"\0\0\0\x0cjP  \r\n\x87\n", "JPEG2000"),
    *((0, b"P" + digit, "PPM") for digit in (b"1", b"2", b"3", b"4", b"5", b"6", b"f", b"F")),
)
_AVIF_BRANDS = {b"avif", b"avis"}
_HEIF_BRANDS = {b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1"}

_CONVERT = "convert it to PNG or JPEG first"
# first bytes -> what it is and what to do
_FOREIGN: tuple[tuple[int, bytes, str], ...] = (
    (0, b"%PDF", "a PDF document: turn its pages into pictures first, for example with pdftoppm -png"),
    (0, b"%!PS", f"a PostScript drawing: {_CONVERT}"),
    (0, b"\xc5\xd0\xd3\xc6", f"a PostScript drawing: {_CONVERT}"),
    (0, b"8BPS", f"a Photoshop document: {_CONVERT}"),
    (0, b"\xff\x0a", f"a JPEG XL picture: {_CONVERT}"),
    (0, b"\0\0\0\x0cJXL ", f"a JPEG XL picture: {_CONVERT}"),
    (0, b"\0\0\1\0", f"a Windows icon: {_CONVERT}"),
    (0, b"PK\3\4", "a zip archive: unpack it first"),
    (0, b"\x1f\x8b", "a gzip file: unpack it first"),
    (0, b"\x1a\x45\xdf\xa3", "a Matroska or WebM video: extract frames first"),
    (0, b"version https://git-lfs", "a Git LFS pointer, not the picture itself: fetch it with git lfs pull"),
)


@dataclass(frozen=True)
class Foreign:
    """Bytes of no format that is read here: what they are, and the remedy."""

    what: str


def sniff(head: bytes) -> str | Foreign:
    """The format that the first bytes announce (a key of `DECODERS`), or what they are instead."""
    if not head:
        return Foreign("empty: it has no bytes")
    for offset, magic, name in _SIGNATURES:
        if head.startswith(magic, offset) and (name != "WEBP" or head.startswith(b"RIFF")):
            return name
    if head[4:8] == b"ftyp":
        return _sniff_iso_media(head)
    for offset, magic, what in _FOREIGN:
        if head.startswith(magic, offset):
            return Foreign(what)
    return Foreign(_describe_text(head) or "of no picture format that is known here")


def _sniff_iso_media(head: bytes) -> str | Foreign:
    """AVIF, HEIF or a video, by the major brand and the compatible ones."""
    end = min(struct.unpack(">I", head[:4])[0], len(head))
    brands = [head[8:12], *(head[i : i + 4] for i in range(16, end, 4))]
    if _AVIF_BRANDS & set(brands):
        return "AVIF"
    if _HEIF_BRANDS & set(brands):
        return "HEIF"
    return Foreign("an MP4 or QuickTime video: extract frames first")


def _describe_text(head: bytes) -> str:
    text = head.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if text.startswith(b"<svg") or (text.startswith((b"<?xml", b"<!--", b"<!doctype svg")) and b"<svg" in text):
        return "an SVG drawing, which needs a renderer: turn it into a PNG first, for example with rsvg-convert"
    if text.startswith((b"<!doctype html", b"<html")):
        return "an HTML page, not a picture: a download may have been answered by a web page"
    if all(byte >= 32 or byte in b"\t\r\n\f" for byte in head):
        return "a text file, not a picture"
    return ""


def decoder_for(format_name: str, name: str) -> Callable[..., pil.Image]:
    """The function that opens a stream of this format. Raises ImageDecodeError saying which package is missing."""
    module, attribute = DECODERS[format_name]
    try:
        decoder: Callable[..., pil.Image] = getattr(importlib.import_module(module), attribute)
        if format_name in {"AVIF", "WEBP", "JPEG2000"}:
            _require_codec(format_name)
    except ImportError as e:
        remedy = MISSING_DECODER.get(format_name, f"the {format_name} decoder of Pillow does not load: {e}")
        raise ImageDecodeError(f"{name}: a {format_name} picture; {remedy}") from e
    return decoder


def _require_codec(format_name: str) -> None:
    from PIL import features

    codec = {"AVIF": "avif", "WEBP": "webp", "JPEG2000": "jpg_2000"}[format_name]
    if not features.check(codec):
        raise ImportError(codec)


def open_picture(stream: BinaryIO, name: str, max_pixels: int) -> pil.Image:
    """Read the header of the picture in a seekable stream at its start; pixels are not decoded.

    Raises:
        ImageDecodeError: no picture, or one of a format that is not read; the message says what it is and what to do.
        ImageTooLargeError: the header announces more than `max_pixels` pixels.
    """
    head = stream.read(HEAD_BYTES)
    format_name = sniff(head)
    if isinstance(format_name, Foreign):
        raise ImageDecodeError(f"{name}: cannot be read as a picture: it is {format_name.what}")
    decoder = decoder_for(format_name, name)
    if format_name == "WEBP" and (size := _webp_size(head)):
        # libwebp's animation decoder allocates its canvas when it is made.
        check_pixels(size, name, max_pixels)
    stream.seek(0)
    try:
        picture = decoder(stream, "")
        if format_name == "PNG" and "exif" not in picture.info:
            picture.info.update(_late_png_exif(stream))
    except Exception as e:
        raise_decode_error(e, name, f"its {format_name} header cannot be read")
    check_pixels(picture.size, name, max_pixels)
    return picture


def check_pixels(size: tuple[int, int], name: str, max_pixels: int, frames: int = 1) -> None:
    """Refuse a picture, or a set of frames of one, that would take more memory than allowed."""
    width, height = size
    if width < 1 or height < 1:
        raise ImageDecodeError(f"{name}: the picture is {width}x{height} pixels: there is nothing to see")
    if width * height * frames > max_pixels:
        what = f"{width}x{height} pixels" + (f" in {frames} frames" if frames > 1 else "")
        raise ImageTooLargeError(
            f"{name}: refused from its header: {what} are more than the limit of {max_pixels:,} decoded pixels; "
            "scale it down, or, if you trust the file, raise the limit: vlm.Image.open(source, max_pixels_decoded=...)"
        )


def raise_decode_error(error: Exception, name: str, what: str) -> NoReturn:
    """What a decoder raised, as one of our errors. Decoders raise anything at all on damaged bytes."""
    if isinstance(error, (MemoryError, ImageDecodeError)):
        raise error
    if isinstance(error, (pil.DecompressionBombError, pil.DecompressionBombWarning)):
        raise ImageTooLargeError(f"{name}: refused by Pillow's own pixel limit: {error}") from error
    detail = str(error) or type(error).__name__
    raise ImageDecodeError(f"{name}: {what}: {detail}") from error


def _webp_size(head: bytes) -> tuple[int, int] | None:
    """(width, height) of the canvas, from the first chunk of a WebP file."""
    kind, body = head[12:16], head[20:30]
    if len(body) < 10:
        return None
    if kind == b"VP8X":
        return int.from_bytes(body[4:7], "little") + 1, int.from_bytes(body[7:10], "little") + 1
    if kind == b"VP8L":
        bits = int.from_bytes(body[1:5], "little")
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    if kind == b"VP8 ":
        return int.from_bytes(body[6:8], "little") & 0x3FFF, int.from_bytes(body[8:10], "little") & 0x3FFF
    return None


def _late_png_exif(stream: BinaryIO) -> dict[str, bytes]:
    """The eXIf chunk of a PNG that has it behind the pixels, where some editors write it; found without decoding."""
    position = stream.tell()
    try:
        stream.seek(8)
        while len(header := stream.read(8)) == 8:
            length, kind = struct.unpack(">I4s", header)
            if kind == b"eXIf":
                return {"exif": b"Exif\0\0" + stream.read(length)}
            stream.seek(length + 4, 1)
        return {}
    finally:
        stream.seek(position)
