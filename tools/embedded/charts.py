"""Bar charts: specification and drawing."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from PIL import Image, ImageDraw

from . import strings
from .fonts import Face
from .scenes import SIDE, Chart, Picture, Rgb, background, contrasting, distance, jitter, luminance, random_rgb

Ink = int | Rgb  # of an "L" or an "RGB" picture
LABEL_SETS = [
    ["A", "B", "C", "D", "E"],
    ["A", "B", "C", "D", "E"],
    ["1", "2", "3", "4", "5"],
    ["Mon", "Tue", "Wed", "Thu", "Fri"],
    ["Jan", "Feb", "Mar", "Apr", "May"],
    ["Q1", "Q2", "Q3", "Q4"],
    ["2021", "2022", "2023", "2024", "2025"],
    ["X", "Y", "Z"],
    ["Red", "Blue", "Green", "Pink"],
    ["North", "South", "East", "West"],
    ["Cats", "Dogs", "Fish", "Birds"],
    ["Tea", "Milk", "Juice", "Water"],
    ["Anna", "Ben", "Carl", "Dora", "Eve"],
]
TITLES = [
    "Sales",
    "Votes",
    "Results",
    "Visitors",
    "Rain",
    "Scores",
    "Points",
    "Total",
    "Survey",
    "Units sold",
    "Growth",
    "Budget",
    "Orders",
    "Sales 2024",
    "Goals",
    "Cost",
    "Revenue",
    "Temperature",
    "Pets",
    "Population",
]


def pick_labels(rng: random.Random, n: int) -> list[str]:
    """``n`` different labels from one set in order, or single letters or short words at random."""
    p = rng.random()
    if p < 0.15:
        return rng.sample(list(strings.UPPER), n)
    if p < 0.35:
        short = [w.capitalize() for w in strings.WORDS if 3 <= len(w) <= 5]
        return rng.sample(short, n)
    labels = rng.choice([s for s in LABEL_SETS if len(s) >= n])
    return labels[:n] if rng.random() < 0.6 else [labels[i] for i in sorted(rng.sample(range(len(labels)), n))]


def pick_values(rng: random.Random, n: int, exact: bool) -> tuple[list[int], int, int]:
    """Values, top of the axis and tick step. Without printed values they lie on ticks or half-way between two."""
    step = rng.choice([1, 2, 5, 10, 10, 20, 20, 25, 50, 100])
    ticks = rng.randint(3, 6)
    top = step * ticks
    while True:
        if exact:
            values = [rng.randint(max(1, top // 20), top) for _ in range(n)]
        else:
            half = step / 2 if step % 2 == 0 else step
            values = [int(half * rng.randint(1, int(top / half))) for _ in range(n)]
        ranked = sorted(values)
        gap = top * 0.045
        if ranked[-1] - ranked[-2] >= gap and ranked[1] - ranked[0] >= gap:
            return values, top, step


def chart_picture(rng: random.Random, faces: list[Face]) -> Picture:
    """A chart of 2 to 5 bars with a value axis, printed values or both."""
    while True:
        picture = try_chart(rng, faces)
        if picture is not None:
            return picture


def try_chart(rng: random.Random, faces: list[Face]) -> Picture | None:
    width, height = rng.choice(
        [
            (192, 192),
            (384, 384),
            (256, 256),
            (400, 300),
            (320, 240),
            (640, 480),
            (480, 360),
            (300, 300),
            (500, 400),
            (360, 360),
            (300, 360),
        ]
    )
    sx, sy = SIDE / width, SIDE / height
    n = rng.randint(2, 5)
    mode = rng.random()
    show_axis, show_values = mode < 0.7, mode > 0.4
    values, top, step = pick_values(rng, n, exact=show_values)
    labels = pick_labels(rng, n)
    font = rng.choice(faces).at(max(8, round(rng.uniform(10.5, 17) / sx)))
    title = rng.choice(TITLES) if rng.random() < 0.4 else ""
    line = font.height()
    tick_width = max(font.length(str(v)) for v in range(0, top + 1, step)) if show_axis else 0
    x0 = tick_width + font.size * rng.uniform(0.5, 1.0)
    x1 = width - font.size * rng.uniform(0.3, 1.2)
    y0 = line * (1.25 if title else 0.3) + (line if show_values else line * 0.35) + rng.uniform(0, 0.06) * height
    y1 = height - line * rng.uniform(1.1, 1.35)
    if title and font.length(title) > width - 8:
        title = ""
    slot = (x1 - x0) / n
    widest = max(font.length(label) for label in labels)
    if show_values:
        widest = max(widest, *(font.length(str(v)) for v in values))
    if widest > slot * 0.92 or (y1 - y0) * sy < 70:
        return None
    if show_axis and (y1 - y0) * step / top < line * 0.8:
        return None
    share = rng.uniform(0.4, 0.85)
    back, back2 = background(rng, [])
    ink = contrasting(rng, back)
    while abs(luminance(ink) - luminance(back)) < 110:
        back, back2 = background(rng, [])
        ink = (15, 15, 15) if luminance(back) > 128 else (240, 240, 240)
    bars = []
    for i, value in enumerate(values):
        left = x0 + slot * (i + 0.5 - share / 2)
        bars.append((left, y1 - (y1 - y0) * value / top, left + slot * share, y1))
    colours = [pick_bar(rng, back)] * n if rng.random() < 0.5 else [pick_bar(rng, back) for _ in range(n)]
    chart = Chart(
        labels,
        values,
        top,
        step,
        show_axis,
        show_values,
        show_axis and rng.random() < 0.4,
        title,
        font,
        bars,
        colours,
        ink,
        (x0, y0, x1, y1),
    )
    return Picture("chart", width, height, back, back2, chart=chart)


def pick_bar(rng: random.Random, back: Rgb) -> Rgb:
    while True:
        rgb = random_rgb(rng) if rng.random() < 0.7 else jitter(rng, (31, 119, 180), 20)
        if distance(rgb, back) > 90:
            return rgb


def draw_ink(draw: ImageDraw.ImageDraw, chart: Chart, ink: Ink, grid: Ink, bars: Sequence[Ink]) -> None:
    """Grid, bars, axis, labels and title; ``ink``, ``grid`` and ``bars`` are colours of the draw target's mode."""
    x0, y0, x1, y1 = chart.frame
    font, line = chart.font.pil, max(1, round(chart.font.size / 11))
    ticks = range(0, chart.top + 1, chart.step)
    place = {v: y1 - (y1 - y0) * v / chart.top for v in ticks}
    if chart.show_grid:
        for v in ticks:
            draw.line([(x0, place[v]), (x1, place[v])], fill=grid, width=line)
    for (a, b, c, d), colour in zip(chart.bars, bars, strict=True):
        draw.rectangle([round(a), round(b), round(c), round(d)], fill=colour)
    draw.line([(x0, y1), (x1, y1)], fill=ink, width=line)
    if chart.show_axis:
        draw.line([(x0, y0 - line), (x0, y1)], fill=ink, width=line)
        for v in ticks:
            draw.line([(x0 - chart.font.size * 0.2, place[v]), (x0, place[v])], fill=ink, width=line)
            draw.text((x0 - chart.font.size * 0.3, place[v]), str(v), fill=ink, font=font, anchor="rm")
    for (a, b, c, _), label, value in zip(chart.bars, chart.labels, chart.values, strict=True):
        draw.text(((a + c) / 2, y1 + line), label, fill=ink, font=font, anchor="ma")
        if chart.show_values:
            draw.text(((a + c) / 2, b - line), str(value), fill=ink, font=font, anchor="md")
    if chart.title:
        draw.text(((x0 + x1) / 2, line + 1), chart.title, fill=ink, font=font, anchor="ma")


def ink_mask(picture: Picture) -> Image.Image:
    """The chart's ink alone, as an "L" picture of the natural size: 255 where ink covers, 70 on grid lines."""
    assert picture.chart is not None
    mask = Image.new("L", (picture.width, picture.height), 0)
    draw_ink(ImageDraw.Draw(mask), picture.chart, 255, 70, [0] * len(picture.chart.bars))
    return mask


def grid_colour(chart: Chart, back: Rgb) -> Rgb:
    """The colour that the mask's 70 of 255 gives over ``back``."""
    r, g, b = (math.floor(k + (i - k) * 70 / 255) for i, k in zip(chart.ink, back, strict=True))
    return r, g, b
