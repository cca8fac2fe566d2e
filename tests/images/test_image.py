"""`vlm.Image`: a source with the switches of its reading reaches the same reader as the source alone."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import PIL.Image
import pytest

from vlm.errors import FetchError, ImageDecodeError, ImageTooLargeError
from vlm.images import Image, load_image, read_size, source_name

COLOURS = [(255, 0, 0), (0, 255, 0), (0, 0, 255)]


def encoded(image: PIL.Image.Image, file_format: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, file_format, **options)
    return buffer.getvalue()


def pages(*sizes: tuple[int, int]) -> bytes:
    """A TIFF of pages of these sizes, each of its own colour."""
    first, *rest = (PIL.Image.new("RGB", size, colour) for size, colour in zip(sizes, COLOURS, strict=False))
    return encoded(first, "TIFF", save_all=True, append_images=rest)


def test_without_a_switch_it_is_the_source() -> None:
    data = pages((8, 6), (4, 4))
    loaded = load_image(Image.open(data))
    assert (loaded.image.size, loaded.num_frames, len(loaded.frames)) == ((8, 6), 2, 1)
    assert read_size(Image.open(data)) == (8, 6)
    assert source_name(Image.open("a/b.png")) == "a/b.png"


def test_a_page_is_named_and_has_its_own_size() -> None:
    image = Image.open(pages((8, 6), (4, 4), (2, 10)), frame=2)
    loaded = load_image(image)
    assert loaded.image.getpixel((0, 0)) == COLOURS[2]
    assert loaded.original_size == read_size(image) == (2, 10)
    for read in (load_image, read_size):
        with pytest.raises(ImageDecodeError, match="frame 7 asked for, but it has frames 0 to 1"):
            read(Image.open(pages((8, 6), (4, 4)), frame=7))


def test_a_truncated_file_is_refused_with_the_switch_that_shows_it() -> None:
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    cut = encoded(PIL.Image.fromarray(noise), "JPEG")[:-500]
    with pytest.raises(ImageDecodeError, match=r"vlm\.Image\.open\(source, lenient=True\)"):
        load_image(cut)
    assert load_image(Image.open(cut, lenient=True)).truncated


def test_a_background_of_ones_own() -> None:
    clear = PIL.Image.new("RGBA", (4, 4), (9, 9, 9, 0))
    assert load_image(Image.open(clear, background=(0, 128, 255))).image.getpixel((0, 0)) == (0, 128, 255)
    assert load_image(Image.open(clear)).image.getpixel((0, 0)) == (255, 255, 255)


def test_the_pixel_limit_can_be_raised_and_lowered() -> None:
    picture = PIL.Image.new("RGB", (20, 10))
    for read in (load_image, read_size):
        with pytest.raises(ImageTooLargeError, match=r"vlm\.Image\.open\(source, max_pixels_decoded="):
            read(picture, max_pixels_decoded=199)
        with pytest.raises(ImageTooLargeError):
            read(Image.open(picture, max_pixels_decoded=199))
        read(Image.open(picture, max_pixels_decoded=200), max_pixels_decoded=199)


def test_private_addresses_on_request() -> None:
    """Port 9 is closed here: what is left of the refusal is that nobody answers."""
    for read in (load_image, read_size):
        with pytest.raises(FetchError, match="not a public address"):
            read(Image.open("http://127.0.0.1:9/x.png"))
        with pytest.raises(FetchError, match=r"^(?!.*not a public address)"):
            read(Image.open("http://127.0.0.1:9/x.png", allow_private=True))


@pytest.mark.parametrize(
    "switch",
    [
        {"lenient": "yes"},
        {"allow_private": 1},
        {"frame": -1},
        {"frame": 1.0},
        {"frame": True},
        {"background": "white"},
        {"background": (0, 0, 256)},
        {"max_pixels_decoded": 0},
    ],
)
def test_switches_of_the_wrong_kind_are_named(switch: dict[str, Any]) -> None:
    with pytest.raises(ImageDecodeError, match=f"^{next(iter(switch))} must be"):
        Image.open("a.png", **switch)
