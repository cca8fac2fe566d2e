"""What `load_image` makes of good, odd and hostile pictures: one test a kind."""

from __future__ import annotations

import base64
import contextlib
import io
import os
import resource
import socket
import struct
import threading
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import PIL.Image
import PIL.ImageChops
import PIL.ImageFile
import pytest

from vlm.errors import FetchError, ImageDecodeError, ImageTooLargeError
from vlm.images import MAX_PIXELS_DECODED, LoadedImage, load_image, read_size


def encoded(image: PIL.Image.Image, file_format: str, **options: object) -> bytes:
    out = io.BytesIO()
    image.save(out, file_format, **options)
    return out.getvalue()


def scene(width: int = 24, height: int = 16) -> PIL.Image.Image:
    """A smooth picture whose four corners differ, so that every turn and flip of it is a different one."""
    y, x = np.mgrid[0:height, 0:width].astype(np.float64)
    red, green = 255 * x / max(width - 1, 1), 255 * y / max(height - 1, 1)
    return PIL.Image.fromarray(np.stack([red, green, 255 - red], axis=-1).astype(np.uint8))


def pixels(image: PIL.Image.Image) -> np.ndarray:
    return np.asarray(image).astype(int)


def difference(a: PIL.Image.Image, b: PIL.Image.Image) -> int:
    assert a.size == b.size
    return int(np.abs(pixels(a) - pixels(b)).max())


def png(width: int, height: int, depth: int, colour_type: int, rows: bytes, *extra: tuple[bytes, bytes]) -> bytes:
    """A PNG written by hand, for what Pillow's encoder cannot write."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, depth, colour_type, 0, 0, 0)
    before = b"".join(chunk(*e) for e in extra if e[0] != b"eXIf")
    after = b"".join(chunk(*e) for e in extra if e[0] == b"eXIf")
    body = chunk(b"IDAT", zlib.compress(rows, 9))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + before + body + after + chunk(b"IEND", b"")


@pytest.fixture(autouse=True)
def pillow_switches_stay_as_they_are() -> Iterator[None]:
    before = PIL.ImageFile.LOAD_TRUNCATED_IMAGES, PIL.Image.MAX_IMAGE_PIXELS
    yield
    assert before == (PIL.ImageFile.LOAD_TRUNCATED_IMAGES, PIL.Image.MAX_IMAGE_PIXELS)


# --- orientation ---------------------------------------------------------------------------------------------------


def stored_for(upright: PIL.Image.Image, tag: int) -> PIL.Image.Image:
    """How a camera stores a picture that orientation `tag` turns upright: the inverse of the turn."""
    t = PIL.Image.Transpose
    inverse = {
        2: t.FLIP_LEFT_RIGHT,
        3: t.ROTATE_180,
        4: t.FLIP_TOP_BOTTOM,
        5: t.TRANSPOSE,
        6: t.ROTATE_90,
        7: t.TRANSVERSE,
        8: t.ROTATE_270,
    }
    return upright.transpose(inverse[tag]) if tag in inverse else upright


def exif(tag: int) -> PIL.Image.Exif:
    data = PIL.Image.Exif()
    data[0x0112] = tag
    return data


@pytest.mark.parametrize("file_format", ["JPEG", "PNG", "WEBP", "TIFF", "AVIF"])
@pytest.mark.parametrize("tag", range(1, 9))
def test_exif_orientation_is_applied(tag: int, file_format: str) -> None:
    if file_format == "AVIF" and not PIL.features.check("avif"):
        pytest.skip("this Pillow has no AVIF")
    upright = scene(16, 24)
    options = {"quality": 95} if file_format in ("JPEG", "WEBP", "AVIF") else {}
    data = encoded(stored_for(upright, tag), file_format, exif=exif(tag), **options)
    for source in (data, PIL.Image.open(io.BytesIO(data))):
        assert read_size(source) == (16, 24)
        loaded = load_image(source)
        assert loaded.image.size == loaded.original_size == (16, 24)
        assert difference(loaded.image, upright) < 40
        assert load_image(loaded.image).image.size == (16, 24), "a second pass must not turn it again"


def test_jpeg_of_24x16_with_orientation_6_is_seen_as_16x24() -> None:
    assert load_image(encoded(scene(24, 16), "JPEG", exif=exif(6))).image.size == (16, 24)


def test_orientation_behind_the_pixels_of_a_png_is_seen_by_both_readers() -> None:
    upright = scene(4, 6)
    stored = stored_for(upright, 6)
    rows = b"".join(b"\0" + row.tobytes() for row in np.asarray(stored))
    data = png(6, 4, 8, 2, rows, (b"eXIf", exif(6).tobytes()[6:]))
    assert read_size(data) == (4, 6)
    assert difference(load_image(data).image, upright) == 0


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data:UserWarning")
@pytest.mark.parametrize("broken", [b"Exif\0\0garbage", b"Exif\0\0II*\0\xff\xff\xff\xff"])
def test_broken_exif_counts_as_upright(broken: bytes) -> None:
    data = encoded(scene(), "JPEG", exif=broken)
    assert read_size(data) == load_image(data).image.size == (24, 16)


@pytest.mark.parametrize("tag", [0, 9, 77])
def test_unknown_orientation_counts_as_upright(tag: int) -> None:
    assert load_image(encoded(scene(), "JPEG", exif=exif(tag))).image.size == (24, 16)


# --- transparency --------------------------------------------------------------------------------------------------


def noise_under_alpha() -> tuple[PIL.Image.Image, np.ndarray]:
    """RGBA with noise where alpha is 0 (left half) and plain red where it is 255."""
    rng = np.random.default_rng(0)
    array = rng.integers(0, 256, (8, 12, 4), dtype=np.uint8)
    array[:, :6, 3] = 0
    array[:, 6:] = (255, 0, 0, 255)
    expected = np.full((8, 12, 3), 255)
    expected[:, 6:] = (255, 0, 0)
    return PIL.Image.fromarray(array), expected


def test_noise_under_alpha_zero_is_never_seen() -> None:
    image, expected = noise_under_alpha()
    for data in (image, encoded(image, "PNG"), encoded(image, "WEBP", lossless=True, exact=True), np.asarray(image)):
        np.testing.assert_array_equal(pixels(load_image(data).image), expected)


def test_background_can_be_chosen() -> None:
    image, expected = noise_under_alpha()
    expected[:, :6] = (0, 0, 128)
    np.testing.assert_array_equal(pixels(load_image(image, background=(0, 0, 128)).image), expected)


def test_half_transparent_pixels_mix_with_white() -> None:
    image = PIL.Image.new("RGBA", (2, 2), (0, 0, 0, 128))
    assert abs(pixels(load_image(image).image) - 127).max() <= 1


@pytest.mark.parametrize("mode", ["LA", "PA", "La", "RGBa"])
def test_other_modes_with_alpha(mode: str) -> None:
    grey = PIL.Image.merge("LA", (PIL.Image.new("L", (2, 1), 60), PIL.Image.new("L", (2, 1), 255)))
    grey.putpixel((0, 0), (17, 0))
    via = {"LA": ["LA"], "La": ["La"], "PA": ["RGBA", "PA"], "RGBa": ["RGBA", "RGBa"]}[mode]
    for step in via:
        grey = grey.convert(step)
    np.testing.assert_allclose(pixels(load_image(grey).image)[0], [[255] * 3, [60] * 3], atol=1)


def test_palette_with_alpha_for_each_colour() -> None:
    image = PIL.Image.new("P", (3, 1))
    image.putpalette([10, 20, 30, 200, 0, 0, 0, 200, 0])
    image.putdata([0, 1, 2])
    data = encoded(image, "PNG", transparency=bytes([0, 255, 255]))
    expected = [[255, 255, 255], [200, 0, 0], [0, 200, 0]]
    np.testing.assert_array_equal(pixels(load_image(data).image)[0], expected)
    gif = encoded(image, "GIF", transparency=0)
    np.testing.assert_array_equal(pixels(load_image(gif).image)[0], expected)


def test_palette_without_alpha() -> None:
    image = scene().quantize(16)
    assert difference(load_image(encoded(image, "PNG")).image, image.convert("RGB")) == 0


@pytest.mark.parametrize(
    ("depth", "row", "key", "expected"),
    [
        (1, b"\x50", 0, [255, 255, 255, 255]),
        (1, b"\x50", 1, [0, 255, 0, 255]),
        (2, b"\x1b", 1, [0, 255, 170, 255]),
        (4, b"\x01\x23", 2, [0, 17, 255, 51]),
        (8, b"\x00\x55\xaa\xff", 0x55, [0, 255, 170, 255]),
        (16, b"\x00\x00\x20\x00\x40\x00\xff\xff", 0x4000, [0, 32, 255, 255]),
    ],
)
def test_grey_png_with_a_colour_key_of_every_depth(depth: int, row: bytes, key: int, expected: list[int]) -> None:
    data = png(4, 1, depth, 0, b"\0" + row, (b"tRNS", struct.pack(">H", key)))
    np.testing.assert_array_equal(pixels(load_image(data).image)[0, :, 0], expected)


@pytest.mark.parametrize("depth", [8, 16])
def test_rgb_png_with_a_colour_key(depth: int) -> None:
    size = ">3B" if depth == 8 else ">3H"
    scale = 1 if depth == 8 else 257
    rows = b"\0" + b"".join(struct.pack(size, *(v * scale for v in p)) for p in [(1, 2, 3), (200, 100, 50)])
    key = struct.pack(">3H", *(v * scale for v in (1, 2, 3)))
    loaded = load_image(png(2, 1, depth, 2, rows, (b"tRNS", key)))
    np.testing.assert_array_equal(pixels(loaded.image)[0], [[255] * 3, [200, 100, 50]])


# --- depth and colour ----------------------------------------------------------------------------------------------


def ramp() -> np.ndarray:
    return np.linspace(0, 65535, 256 * 16).round().reshape(16, 256)


def sixteen_bit_sources() -> dict[str, object]:
    grey = PIL.Image.fromarray(ramp().astype(np.uint16))
    return {
        "I;16": grey,
        "I;16B": PIL.Image.frombytes("I;16B", grey.size, ramp().astype(">u2").tobytes()),
        "I": PIL.Image.fromarray(ramp().astype(np.int32)),
        "F": PIL.Image.fromarray(ramp().astype(np.float32)),
        "png": encoded(grey, "PNG"),
        "tiff": encoded(grey, "TIFF"),
        "pgm": b"P5 256 16 65535\n" + ramp().astype(">u2").tobytes(),
        "uint16 array": ramp().astype(np.uint16),
    }


@pytest.mark.parametrize("kind", sixteen_bit_sources())
def test_sixteen_bit_ramp_keeps_256_levels(kind: str) -> None:
    image = load_image(sixteen_bit_sources()[kind]).image
    np.testing.assert_allclose(pixels(image)[..., 0], ramp() / 257, atol=0.51)
    assert len(np.unique(pixels(image))) == 256


def test_dark_sixteen_bit_file_stays_dark() -> None:
    """Its depth is declared, so its values are not taken for 8-bit ones."""
    dark = np.full((4, 4), 200)
    assert load_image(b"P5 4 4 65535\n" + dark.astype(">u2").tobytes()).image.getextrema() == ((1, 1),) * 3
    assert load_image(PIL.Image.fromarray(dark.astype(np.uint16))).image.getextrema() == ((1, 1),) * 3


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([0, 100, 255], [0, 100, 255]),  # within 8 bits
        ([0, 25700, 65535], [0, 100, 255]),  # within 16 bits
        ([-100, 0, 155], [0, 100, 255]),  # neither: from smallest to largest
        ([0, 10**9, 2 * 10**9], [0, 128, 255]),
        ([70000, 70000, 70000], [0, 0, 0]),
    ],
)
@pytest.mark.parametrize("kind", [np.int32, np.float32])
def test_integers_and_floats_of_unknown_range(values: list[int], expected: list[int], kind: type) -> None:
    image = PIL.Image.fromarray(np.array([values], dtype=kind))
    np.testing.assert_array_equal(pixels(load_image(image).image)[0, :, 0], expected)


def test_float_picture_within_0_and_1_is_scaled() -> None:
    image = PIL.Image.fromarray(np.array([[0.0, 0.5, 1.0]], dtype=np.float32))
    np.testing.assert_array_equal(pixels(load_image(image).image)[0, :, 0], [0, 128, 255])


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_float_picture_with_nan_is_refused(bad: float) -> None:
    with pytest.raises(ImageDecodeError, match="NaN or infinite"):
        load_image(PIL.Image.fromarray(np.array([[0.0, bad]], dtype=np.float32)))


def test_black_and_white() -> None:
    image = PIL.Image.fromarray(np.array([[True, False]]))
    for source in (image, encoded(image, "PNG"), encoded(image, "TIFF")):
        np.testing.assert_array_equal(pixels(load_image(source).image)[0, :, 0], [255, 0])


def test_cmyk_jpeg_is_close_to_the_rgb_original() -> None:
    original = scene(64, 48)
    data = encoded(original.convert("CMYK"), "JPEG", quality=100, subsampling=0)
    assert b"Adobe" in data, "inverted, as Adobe writes it"
    assert difference(load_image(data).image, original) <= 6


def test_ycck_jpeg_is_close_to_the_rgb_original() -> None:
    original = scene(64, 48)
    # A YCCK file holds Y, Cb, Cr of the inverted C, M, Y; Pillow's encoder inverts once more.
    luma_chroma = PIL.ImageChops.invert(original).convert("YCbCr").split()
    inverted = [PIL.Image.eval(plane, lambda v: 255 - v) for plane in luma_chroma]
    planes = PIL.Image.merge("CMYK", (*inverted, PIL.Image.new("L", original.size)))
    data = bytearray(encoded(planes, "JPEG", quality=100, subsampling=0))
    at = data.index(b"Adobe")
    assert data[at + 11] == 0
    data[at + 11] = 2
    assert difference(load_image(bytes(data)).image, original) <= 8


@pytest.mark.parametrize("mode", ["YCbCr", "HSV", "RGBX", "CMYK", "L", "P"])
def test_other_colour_modes(mode: str) -> None:
    image = scene().convert(mode)
    assert difference(load_image(image).image, image.convert("RGB")) == 0


def test_mode_that_pillow_cannot_convert_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_args: object, **_options: object) -> None:
        raise ValueError("conversion from LAB to RGB not supported")

    image = PIL.Image.new("LAB", (2, 2))
    monkeypatch.setattr(PIL.Image.Image, "convert", refuse)
    with pytest.raises(ImageDecodeError, match="'LAB'"):
        load_image(image)


# --- damage --------------------------------------------------------------------------------------------------------


def test_cut_jpeg_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "cut.jpg"
    path.write_bytes(encoded(scene(240, 160), "JPEG")[:-128])
    with pytest.raises(ImageDecodeError, match=r"cut\.jpg: its pixels cannot be decoded.*truncated"):
        load_image(path)
    assert read_size(path) == (240, 160)


@pytest.mark.parametrize("options", [{}, {"progressive": True}])
def test_lenient_decodes_what_is_there_of_a_jpeg(options: dict[str, bool]) -> None:
    original = scene(240, 160)
    data = encoded(original, "JPEG", quality=95, **options)
    loaded = load_image(data[: len(data) * 2 // 3], lenient=True)
    assert loaded.truncated
    assert loaded.image.size == (240, 160)
    top = (0, 0, 240, 40)
    assert difference(loaded.image.crop(top), original.crop(top)) < 30
    assert not load_image(data, lenient=True).truncated


@pytest.mark.parametrize("file_format", ["PNG", "BMP", "GIF", "PPM"])
def test_lenient_decodes_the_first_rows_of_other_formats(file_format: str) -> None:
    rng = np.random.default_rng(0)
    original = PIL.Image.fromarray(rng.integers(0, 255, (100, 100), dtype=np.uint8)).convert("RGB")
    data = encoded(original, file_format, **({"interlace": 0} if file_format == "GIF" else {}))
    half = data[: len(data) // 2]
    with pytest.raises(ImageDecodeError):
        load_image(half)
    loaded = load_image(half, lenient=True)
    assert loaded.truncated
    rows = slice(90, 100) if file_format == "BMP" else slice(0, 10)  # BMP is stored from the bottom
    np.testing.assert_array_equal(pixels(loaded.image)[rows], pixels(original)[rows])


@pytest.mark.parametrize("file_format", ["JPEG", "PNG", "GIF", "WEBP", "BMP", "TIFF", "PPM", "JPEG2000", "AVIF"])
def test_every_cut_of_a_file_is_a_picture_or_a_typed_error(file_format: str) -> None:
    """Nothing but our own error leaves the reader, strict or lenient, however the bytes end."""
    data = encoded(scene(32, 32), file_format)
    for length in sorted({*range(64), *range(64, len(data), max(1, len(data) // 40))}):
        for lenient in (False, True):
            with contextlib.suppress(ImageDecodeError):
                assert load_image(data[:length], lenient=lenient).image.mode == "RGB"


@pytest.mark.parametrize("file_format", ["JPEG", "PNG", "GIF", "WEBP", "BMP", "TIFF", "PPM", "JPEG2000", "AVIF", "QOI"])
def test_damaged_bytes_are_a_picture_or_a_typed_error(file_format: str) -> None:
    rng = np.random.default_rng(1)
    if file_format == "QOI":
        data = b"qoif" + struct.pack(">IIBB", 8, 8, 3, 0) + bytes(rng.integers(0, 256, 200, dtype=np.uint8))
    else:
        data = encoded(scene(32, 32), file_format)
    for _ in range(60):
        damaged = bytearray(data)
        for _ in range(int(rng.integers(1, 12))):
            damaged[int(rng.integers(0, len(damaged)))] = int(rng.integers(0, 256))
        with contextlib.suppress(ImageDecodeError):
            assert load_image(bytes(damaged), max_pixels_decoded=10**6).image.mode == "RGB"


# --- size ----------------------------------------------------------------------------------------------------------


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def bomb(width: int, height: int, depth: int, colour_type: int) -> bytes:
    """A PNG header that announces a large picture, over a few kilobytes of zeros."""
    return png(width, height, depth, colour_type, b"\0" * 100_000)


@pytest.mark.parametrize(
    "data",
    [bomb(15000, 15000, 1, 0), bomb(12000, 12000, 8, 2), b"P6 60000 60000 255\n" + b"\0" * 1000],
    ids=["15000x15000 1-bit", "12000x12000 RGB", "PPM"],
)
@pytest.mark.parametrize("read", [load_image, read_size], ids=["load_image", "read_size"])
def test_too_many_pixels_are_refused_from_the_header(data: bytes, read: Callable[[bytes], object]) -> None:
    before = peak_mib()
    with pytest.raises(ImageTooLargeError, match="refused from its header"):
        read(data)
    assert peak_mib() - before < 20


def test_webp_canvas_is_refused_before_its_decoder_exists() -> None:
    before = peak_mib()
    for head in (
        b"VP8X" + struct.pack("<I", 10) + b"\0\0\0\0" + (15999).to_bytes(3, "little") * 2,
        b"VP8L" + struct.pack("<I", 10) + b"\x2f" + (15999 | 15999 << 14).to_bytes(4, "little") + b"\0" * 5,
        b"VP8 " + struct.pack("<I", 10) + b"\0\0\0\x9d\x01\x2a" + struct.pack("<HH", 16000, 16000),
    ):
        with pytest.raises(ImageTooLargeError, match="16000x16000"):
            load_image(b"RIFF" + struct.pack("<I", 100) + b"WEBP" + head + b"\0" * 80)
    assert peak_mib() - before < 20


def test_pixel_limit_is_exact_and_can_be_set() -> None:
    data = encoded(scene(20, 10), "PNG")
    assert load_image(data, max_pixels_decoded=200).image.size == (20, 10)
    with pytest.raises(ImageTooLargeError, match="20x10 pixels are more than the limit of 199"):
        load_image(data, max_pixels_decoded=199)
    with pytest.raises(ImageTooLargeError):
        load_image(np.zeros((10, 20, 3), np.uint8), max_pixels_decoded=199)


def test_default_pixel_limit_passes_camera_pictures_without_a_warning() -> None:
    """Pillow itself warns at 89 megapixels; warnings are errors in these tests."""
    assert 12000 * 9000 <= MAX_PIXELS_DECODED < 12000 * 12000
    assert read_size(bomb(12000, 9000, 8, 2)) == (12000, 9000)
    assert read_size(bomb(30000, 10000, 8, 2), max_pixels_decoded=10**9) == (30000, 10000)


# --- frames --------------------------------------------------------------------------------------------------------

COLOURS = [(255, 0, 0), (0, 255, 0), (0, 0, 255)]


def animation(file_format: str) -> bytes:
    first, *rest = (PIL.Image.new("RGB", (8, 8), c) for c in COLOURS)
    options = {"lossless": True} if file_format == "WEBP" else {}
    return encoded(first, file_format, save_all=True, append_images=rest, **options)


@pytest.mark.parametrize("file_format", ["GIF", "WEBP", "PNG", "TIFF"])
def test_animations_and_pages_give_the_first_frame_and_say_so(file_format: str) -> None:
    loaded = load_image(animation(file_format))
    assert loaded.num_frames == 3
    assert len(loaded.frames) == 1
    assert loaded.image.getpixel((0, 0)) == COLOURS[0]


@pytest.mark.parametrize("file_format", ["GIF", "WEBP", "PNG", "TIFF"])
def test_more_frames_when_asked(file_format: str) -> None:
    def colours(loaded: LoadedImage) -> list[object]:
        return [frame.getpixel((0, 0)) for frame in loaded.frames]

    data = animation(file_format)
    assert colours(load_image(data, frames=2)) == COLOURS[:2]
    assert colours(load_image(data, frames=99)) == COLOURS
    assert colours(load_image(data, frames=[2, 0])) == [COLOURS[2], COLOURS[0]]
    with pytest.raises(ImageDecodeError, match="frame 3 asked for, but it has frames 0 to 2"):
        load_image(data, frames=[0, 3])
    with pytest.raises(ImageTooLargeError, match="in 3 frames"):
        load_image(data, frames=3, max_pixels_decoded=64 * 3 - 1)


def test_one_frame_asked_of_a_still_picture() -> None:
    loaded = load_image(encoded(scene(), "PNG"), frames=4)
    assert loaded.num_frames == len(loaded.frames) == 1


def test_pil_animation_is_left_at_its_frame() -> None:
    image = PIL.Image.open(io.BytesIO(animation("GIF")))
    image.seek(1)
    assert load_image(image).image.getpixel((0, 0)) == COLOURS[1]
    assert len(load_image(image, frames=3).frames) == 3
    assert image.tell() == 1


# --- sources -------------------------------------------------------------------------------------------------------


def test_every_kind_of_source_gives_the_same_pixels(tmp_path: Path) -> None:
    import torch

    image = scene()
    data = encoded(image, "PNG")
    path = tmp_path / "a.png"
    path.write_bytes(data)
    uri = "data:image/png;base64," + base64.b64encode(data).decode()
    array = np.asarray(image)
    with path.open("rb") as file:
        sources = [image, path, str(path), data, bytearray(data), memoryview(data), io.BytesIO(data), file, uri, array]
        for source in [*sources, torch.from_numpy(array.copy())]:
            assert difference(load_image(source).image, image) == 0
            assert read_size(source) == (24, 16)


def test_file_object_can_be_read_again_and_pipes_can_be_read_once() -> None:
    class Pipe:
        def __init__(self, data: bytes) -> None:
            self.data = data

        def read(self) -> bytes:
            data, self.data = self.data, b""
            return data

    file = io.BytesIO(encoded(scene(), "PNG"))
    assert read_size(file) == load_image(file).image.size
    pipe = Pipe(file.getvalue())
    assert load_image(pipe).image.size == (24, 16)
    with pytest.raises(ImageDecodeError, match="empty"):
        load_image(pipe)


def test_text_file_object_is_refused() -> None:
    with pytest.raises(ImageDecodeError, match="binary mode"):
        load_image(io.StringIO("text"))


def test_picture_file_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "a.gif"
    path.write_bytes(animation("GIF"))
    before = set(os.listdir("/proc/self/fd"))
    load_image(path)
    assert set(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("source", [3, None, 1.5, object(), [1, 2], {"path": "x"}])
def test_other_objects_are_refused_with_what_is_accepted(source: object) -> None:
    with pytest.raises(ImageDecodeError, match="pass a path, an http"):
        load_image(source)


@pytest.mark.parametrize(
    "name", ["nothing.jpg", "", "s3://bucket/a.jpg", "ftp://host/a.jpg", "file:///a.jpg", "a\0b", "x" * 5000]
)
def test_string_that_names_no_file_is_an_error(name: str) -> None:
    with pytest.raises((FileNotFoundError, ImageDecodeError, FetchError)) as caught:
        load_image(name)
    assert len(str(caught.value)) < 1000


def test_missing_file_and_dangling_link_name_the_path(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"gone\.jpg"):
        load_image(tmp_path / "gone.jpg")
    link = tmp_path / "link.jpg"
    link.symlink_to(tmp_path / "target.jpg")
    with pytest.raises(FileNotFoundError, match=r"link\.jpg: a link to .*target\.jpg"):
        load_image(link)


def test_what_is_no_regular_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "sock"))
        for path, what in ((tmp_path, "a folder"), (tmp_path / "pipe", "a pipe"), (Path("/dev/zero"), "a device")):
            with pytest.raises(ImageDecodeError, match=rf"{path.name}: is {what}"):
                load_image(path)
        with pytest.raises(ImageDecodeError, match="sock"):
            load_image(tmp_path / "sock")


def test_file_without_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "secret.png"
    path.write_bytes(encoded(scene(), "PNG"))
    path.chmod(0)
    if os.access(path, os.R_OK):  # root may read everything; then the refusal itself is faked

        def refuse(*_args: object) -> int:
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(ImageDecodeError, match=r"secret\.png: no permission"):
        load_image(path)


@pytest.mark.parametrize(
    "name", ["x.jpg", "X.JPG", "été 图.png", "new\nline.png", "noextension", "a#b?c%20.png", "data.png"]
)
def test_names_do_not_matter(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(encoded(scene(), "PNG"))
    loaded = load_image(str(path))
    assert loaded.image.size == (24, 16)
    assert "\n" not in loaded.source_name


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (b"", "empty"),
        (b"hello, world\n", "a text file"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "SVG.*rsvg-convert"),
        (b"<?xml version='1.0'?>\n<svg/>", "SVG"),
        (b"%PDF-1.7\n", "PDF.*pdftoppm"),
        (b"<!DOCTYPE html><html>404</html>", "HTML page"),
        (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
        (b"\0\0\0\x18ftypisom\0\0\0\0isomavc1", "video.*extract frames"),
        (b"\x00\x01\x02\x03" * 100, "no picture format"),
        (b"PK\3\4rest", "zip archive"),
    ],
)
def test_bytes_that_are_no_picture_say_what_they_are(tmp_path: Path, data: bytes, what: str) -> None:
    path = tmp_path / "picture.jpg"
    path.write_bytes(data)
    for read in (load_image, read_size):
        with pytest.raises(ImageDecodeError, match=rf"picture\.jpg: .*{what}"):
            read(path)


def test_heic_without_its_decoder_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "pillow_heif.as_plugin", None)
    with pytest.raises(ImageDecodeError, match="pip install pillow-heif"):
        load_image(b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + b"\0" * 50)


def test_avif_without_its_codec_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    import PIL.features

    monkeypatch.setattr(PIL.features, "check", lambda _name: False)
    with pytest.raises(ImageDecodeError, match=r"AVIF: install Pillow 11\.3"):
        load_image(b"\0\0\0\x1cftypavif\0\0\0\0avifmif1" + b"\0" * 50)


@pytest.mark.parametrize(
    "uri",
    [
        "data:",
        "data:image/png",
        "data:image/png;base64",
        "data:image/png;base64,",
        "data:image/png;base64,@@@@",
        "data:image/png;base64,AAAA",
        "data:image/png;base64,A",
        "data:text/html;base64,AAAA",
        "data:image/png,notapicture",
        "data:image/svg+xml;utf8,<svg/>",
    ],
)
def test_malformed_data_uri(uri: str) -> None:
    for read in (load_image, read_size):
        with pytest.raises(ImageDecodeError, match=r"data:|bytes|empty"):
            read(uri)


def test_well_formed_data_uris() -> None:
    from urllib.parse import quote

    data = encoded(scene(), "PNG")
    plain = base64.b64encode(data).decode()
    wrapped = "\n".join(plain[i : i + 60] for i in range(0, len(plain), 60))
    for uri in (
        f"data:image/png;base64,{plain}",
        f"DATA:image/PNG;BASE64,{plain}",
        f"data:image/png;name=a.png;base64,{wrapped}",
        f"data:;base64,{plain.rstrip('=')}",
        f"data:image/png;base64,{quote(plain)}",
        f"data:image/png,{quote(data)}",
        f"data:image/jpeg;base64,{plain}",  # says JPEG, is PNG: the bytes decide
    ):
        loaded = load_image(uri)
        assert loaded.image.size == (24, 16)
        assert len(loaded.source_name) < 120


def test_one_lazy_pil_picture_in_many_threads() -> None:
    data = encoded(scene(400, 300), "PNG")
    expected = load_image(data).image
    image = PIL.Image.open(io.BytesIO(data))
    results: list[PIL.Image.Image] = []
    threads = [threading.Thread(target=lambda: results.append(load_image(image).image)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [difference(r, expected) for r in results] == [0] * 8
