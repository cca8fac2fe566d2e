"""The one way from an image source to pixels: upright 8-bit RGB, or a typed error that names the source.

Pillow's process-wide switches (`LOAD_TRUNCATED_IMAGES`, `MAX_IMAGE_PIXELS`) are neither set nor relied upon.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, BinaryIO

import PIL.Image as pil
from PIL.ImageFile import ImageFile

from vlm.errors import ImageDecodeError
from vlm.images.convert import WHITE, colour_key_depth, orientation, to_rgb, turn_upright, upright_size
from vlm.images.formats import MAX_PIXELS_DECODED, check_pixels, open_picture, raise_decode_error
from vlm.images.image import Image
from vlm.images.source import FetchPolicy, Opened, open_source

# A picture that a caller opened with Pillow decodes on first use, which is not safe from two threads at once; the same
# object may well stand in two requests.
_LAZY_PICTURE_LOCK = threading.Lock()


@dataclass(frozen=True, eq=False)
class LoadedImage:
    """A decoded picture.

    Attributes:
        image: mode RGB, upright: the first of `frames`.
        source_name: how the source is called in messages.
        original_size: (width, height) upright, as decoded.
        num_frames: frames or pages that the source holds; more than 1 means that `image` is only a part of it.
        frames: the frames that were asked for, each RGB and upright.
        truncated: whether data was missing and the rest of the picture is blank (lenient decoding only).
    """

    image: pil.Image
    source_name: str
    original_size: tuple[int, int]
    num_frames: int = 1
    frames: tuple[pil.Image, ...] = ()
    truncated: bool = False


def load_image(
    source: Any,
    *,
    frames: int | Sequence[int] | None = None,
    max_pixels_decoded: int = MAX_PIXELS_DECODED,
    lenient: bool = False,
    background: tuple[int, int, int] = WHITE,
    fetch_policy: FetchPolicy | None = None,
) -> LoadedImage:
    """Decode one image source.

    Args:
        source: a path, an http(s) URL, a data: URI, bytes, a binary file object, a PIL image, an (H, W, C) array or
            tensor, or a `vlm.Image`, whose own options win.
        frames: of an animation or a multi-page file: None for the first frame (of a PIL image, the one it stands at), a
            number for that many from the start (fewer where there are fewer), or the frame indices wanted.
        max_pixels_decoded: pixels, over all frames asked for, above which the source is refused from its header.
        lenient: decode what is there of a truncated file and leave the rest blank, instead of raising.
        background: what transparent pixels are composited on.
        fetch_policy: limits of a download.

    Raises:
        FileNotFoundError: a path that names nothing.
        ImageDecodeError: whatever else cannot be read as a picture. ImageTooLargeError: the pixel limit.
        FetchError: a URL that could not be had.
    """
    if isinstance(source, Image):
        given = {
            "frames": frames,
            "max_pixels_decoded": max_pixels_decoded,
            "lenient": lenient,
            "background": background,
            "fetch_policy": fetch_policy,
        }
        return load_image(source.source, **(given | dict(source.options)))
    with open_source(source, fetch_policy) as opened:
        reader = _Reader(opened, max_pixels_decoded, lenient, background)
        with _exclusive(opened.picture):
            indices = reader.choose(frames)
            decoded = tuple(reader.read(index) for index in indices)
            return LoadedImage(
                decoded[0], opened.name, decoded[0].size, reader.num_frames, decoded, truncated=reader.truncated
            )


def read_size(
    source: Any,
    *,
    frame: int | None = None,
    max_pixels_decoded: int = MAX_PIXELS_DECODED,
    fetch_policy: FetchPolicy | None = None,
) -> tuple[int, int]:
    """(width, height) of the upright picture, from the header: pixels are not decoded. A URL is downloaded.

    Of a `frame` beyond the first the size may be another, and finding it may take decoding. Raises as `load_image`
    does; damage behind the header goes unseen.
    """
    if isinstance(source, Image):
        limit, policy = (source.options.get(name) for name in ("max_pixels_decoded", "fetch_policy"))
        (index,) = source.options.get("frames", (frame,))
        return read_size(
            source.source,
            frame=index,
            max_pixels_decoded=limit or max_pixels_decoded,
            fetch_policy=policy or fetch_policy,
        )
    with open_source(source, fetch_policy) as opened:
        reader = _Reader(opened, max_pixels_decoded, lenient=False, background=WHITE)
        with _exclusive(opened.picture):
            return reader.size(frame)


@contextmanager
def _exclusive(picture: pil.Image | None) -> Iterator[None]:
    """Hold off other threads while a picture of the caller's is decoded or moved between its frames."""
    if not isinstance(picture, ImageFile):
        yield
        return
    with _LAZY_PICTURE_LOCK:
        position = picture.tell()
        yield
        if picture.tell() != position:
            picture.seek(position)


class _Reader:
    """Decodes frames of one open source."""

    def __init__(self, opened: Opened, max_pixels: int, lenient: bool, background: tuple[int, int, int]) -> None:
        self.name = opened.name
        self.stream = opened.stream
        self.max_pixels = max_pixels
        self.lenient = lenient
        self.background = background
        self.truncated = False
        self.num_frames = 1
        if opened.picture is not None:
            self.picture = opened.picture
        else:
            assert opened.stream is not None
            self.picture = open_picture(opened.stream, self.name, max_pixels)

    def choose(self, frames: int | Sequence[int] | None) -> list[int | None]:
        """Count the frames and name those to read; None stands for where the picture is."""
        check_pixels(self.picture.size, self.name, self.max_pixels)
        try:
            self.num_frames = int(getattr(self.picture, "n_frames", 1))
        except Exception as e:
            # Counting walks the whole file. A lenient caller has asked for what is there.
            if not self.lenient:
                raise_decode_error(e, self.name, "its frames cannot be counted")
            self.truncated = True
        if frames is None:
            return [None]
        wanted = list(range(min(frames, self.num_frames))) if isinstance(frames, int) else list(frames)
        outside = [i for i in wanted if not 0 <= i < self.num_frames]
        if outside or not wanted:
            asked = f"frame {outside[0]}" if outside else f"frames={frames!r}"
            raise ImageDecodeError(f"{self.name}: {asked} asked for, but it has frames 0 to {self.num_frames - 1}")
        check_pixels(self.picture.size, self.name, self.max_pixels, len(wanted))
        return [None] if wanted == [0] and self.num_frames == 1 else [*wanted]

    def read(self, index: int | None) -> pil.Image:
        """One frame: decoded, RGB, upright."""
        if index is not None:
            self._seek(index)
        tag, depth = orientation(self.picture), colour_key_depth(self.picture)
        self._decode()
        rgb = to_rgb(self.picture, self.name, self.background, depth)
        upright = turn_upright(rgb, tag)
        if upright is self.picture and (self.stream is not None or self.num_frames > 1):
            # The next seek would overwrite it, and it would keep the encoded bytes alive.
            upright = upright.copy()
        if upright is not self.picture:
            upright.info = {}  # no orientation to be applied a second time
        return upright

    def size(self, index: int | None) -> tuple[int, int]:
        """Of one frame, upright, undecoded."""
        check_pixels(self.picture.size, self.name, self.max_pixels)
        if index is not None:
            self.choose((index,))
            self._seek(index)
        return upright_size(self.picture)

    def _seek(self, index: int) -> None:
        try:
            self.picture.seek(index)
        except Exception as e:
            raise_decode_error(e, self.name, f"frame {index} cannot be read")
        check_pixels(self.picture.size, self.name, self.max_pixels)

    def _decode(self) -> None:
        try:
            self.picture.load()
        except Exception as e:
            if not self.lenient or not self._decode_partly():
                remedy = "" if self.lenient else " (vlm.Image.open(source, lenient=True) shows what is there)"
                raise_decode_error(e, self.name, f"its pixels cannot be decoded{remedy}")
            self.truncated = True

    def _decode_partly(self) -> bool:
        """Keep the rows that a failed decoder wrote. A JPEG is decoded again with an end: progressive ones need it."""
        if self.stream is not None and self.picture.format == "JPEG":
            self.stream.seek(0)
            again = open_picture(self.stream, self.name, self.max_pixels)
            again.fp = _EndlessJpeg(self.stream)  # type: ignore[attr-defined]
            try:
                again.load()
            except Exception:  # then the rows of the first attempt are all there is
                pass
            else:
                self.picture = again
                return True
        if getattr(self.picture, "_im", None) is None:
            return False
        self.picture.tile = []  # type: ignore[attr-defined]
        self.picture.load()
        return True


class _EndlessJpeg:
    """A JPEG stream that goes on with end-of-image markers where the data stops."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream

    def read(self, size: int = -1) -> bytes:
        return self._stream.read(size) or b"\xff\xd9" * 512

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
