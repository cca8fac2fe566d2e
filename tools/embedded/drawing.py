"""Draws picture specifications with Pillow, at natural size, and squeezes them as the image processor does."""

from __future__ import annotations

import math

from PIL import Image, ImageDraw

from .charts import draw_ink, grid_colour
from .scenes import SIDE, Object, Picture, Text

Point = tuple[float, float]


def circle_points(r: float, n: int = 72) -> list[Point]:
    return [(r * math.cos(2 * math.pi * i / n), r * math.sin(2 * math.pi * i / n)) for i in range(n)]


def star_points() -> list[Point]:
    radii = [1.0, 0.42] * 5
    return [(r * math.sin(math.pi * i / 5), -r * math.cos(math.pi * i / 5)) for i, r in enumerate(radii)]


def heart_points(n: int = 72) -> list[Point]:
    points = []
    for i in range(n):
        t = 2 * math.pi * i / n
        x = 16 * math.sin(t) ** 3
        y = 13 * math.cos(t) - 5 * math.cos(2 * t) - 2 * math.cos(3 * t) - math.cos(4 * t)
        points.append((x / 17, -(y + 2.5) / 15))
    return points


def cross_points(arm: float = 0.34, reach: float = 0.95) -> list[Point]:
    a, b = arm, reach
    return [(-a, -b), (a, -b), (a, -a), (b, -a), (b, a), (a, a), (a, b), (-a, b), (-a, a), (-b, a), (-b, -a), (-a, -a)]


# Outline of each shape at radius 1, y down; the ring has a hole.
OUTLINES: dict[str, list[list[Point]]] = {
    "circle": [circle_points(0.9)],
    "square": [[(-0.8, -0.8), (0.8, -0.8), (0.8, 0.8), (-0.8, 0.8)]],
    "triangle": [[(0.0, -0.95), (0.95, 0.75), (-0.95, 0.75)]],
    "star": [star_points()],
    "diamond": [[(0.0, -1.0), (0.72, 0.0), (0.0, 1.0), (-0.72, 0.0)]],
    "cross": [cross_points()],
    "ring": [circle_points(0.95), circle_points(0.55)],
    "heart": [heart_points()],
}


def outline(obj: Object, zoom: float = 1.0) -> list[list[Point]]:
    """The object's outlines in natural pixels times ``zoom``."""
    c, s, r = math.cos(obj.angle), math.sin(obj.angle), obj.r * zoom
    return [
        [(obj.x * zoom + r * (c * u - s * v), obj.y * zoom + r * (s * u + c * v)) for u, v in path]
        for path in OUTLINES[obj.shape]
    ]


def backdrop(picture: Picture) -> Image.Image:
    if picture.background == picture.background2:
        return Image.new("RGB", (picture.width, picture.height), picture.background)
    top, bottom = (
        Image.new("RGB", (picture.width, picture.height), c) for c in (picture.background, picture.background2)
    )
    return Image.composite(bottom, top, Image.linear_gradient("L").resize((picture.width, picture.height)))


def draw_object(image: Image.Image, obj: Object, smooth: bool) -> None:
    """Fills the object's outline; ``smooth`` draws it three times as large first, for soft edges."""
    zoom, reach = 3 if smooth else 1, math.ceil(obj.r * 1.5) + 2
    left, top = round(obj.x) - reach, round(obj.y) - reach
    mask = Image.new("L", (2 * reach * zoom, 2 * reach * zoom), 0)
    draw = ImageDraw.Draw(mask)
    for i, path in enumerate(outline(obj, zoom)):
        draw.polygon([(x - left * zoom, y - top * zoom) for x, y in path], fill=0 if i else 255)
    if smooth:
        mask = mask.resize((2 * reach, 2 * reach), Image.Resampling.BOX)
    image.paste(obj.rgb, (left, top), mask)


def text_mask(text: Text, pad: int = 0) -> Image.Image:
    """The string as an "L" picture, upright, as large as its line (``length`` x ``height``) plus ``pad`` each side."""
    size = (math.ceil(text.font.length(text.string)) + 2 * pad, text.font.height() + 2 * pad)
    mask = Image.new("L", size, 0)
    ImageDraw.Draw(mask).text((pad, pad), text.string, fill=255, font=text.font.pil)
    return mask


def draw_text(image: Image.Image, text: Text) -> None:
    pad = max(2, text.font.size // 4)
    mask = text_mask(text, pad)
    if text.angle:
        mask = mask.rotate(-math.degrees(text.angle), resample=Image.Resampling.BICUBIC, expand=True)
    image.paste(text.rgb, (round(text.x - mask.width / 2), round(text.y - mask.height / 2)), mask)


def draw(picture: Picture, smooth: bool = True) -> Image.Image:
    """The picture at natural size, RGB. ``smooth``: shapes with soft edges, else as ImageDraw leaves them."""
    image = backdrop(picture)
    for obj in picture.objects:
        draw_object(image, obj, smooth)
    if picture.chart:
        chart = picture.chart
        draw_ink(ImageDraw.Draw(image), chart, chart.ink, grid_colour(chart, picture.background), list(chart.colours))
    if picture.text:
        draw_text(image, picture.text)
    return image


def fit(width: int, height: int) -> tuple[int, int]:
    """Size with the longest edge SIDE, the other one kept in proportion and even (as Idefics3ImageProcessor does)."""
    if width >= height:
        other = int(SIDE * height / width)
        return SIDE, max(1, other + other % 2)
    other = int(SIDE * width / height)
    return max(1, other + other % 2), SIDE


def squeeze(image: Image.Image) -> Image.Image:
    """To SIDE x SIDE in the two LANCZOS steps of the processor: longest edge first, then square."""
    return image.resize(fit(*image.size), Image.Resampling.LANCZOS).resize((SIDE, SIDE), Image.Resampling.LANCZOS)
