"""Picture specifications: what is in a picture and where, before anything is drawn.

Lengths are natural pixels of a ``width`` x ``height`` picture. The model sees every picture squeezed to SIDE x SIDE, so
sizes and margins are chosen in that space ("seen" pixels) and divided by the scale of each axis.
"""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import dataclass, field

from . import strings
from .fonts import Font

SIDE = 192
SHAPES = ("circle", "square", "triangle", "star", "diamond", "cross", "ring", "heart")
COLOURS = {
    "red": [(255, 0, 0), (220, 30, 30), (200, 20, 20)],
    "orange": [(255, 165, 0), (245, 130, 20), (255, 140, 0)],
    "yellow": [(255, 255, 0), (245, 220, 30), (255, 215, 0)],
    "green": [(0, 128, 0), (0, 200, 0), (40, 160, 60), (0, 255, 0)],
    "blue": [(0, 0, 255), (30, 80, 220), (40, 100, 230), (0, 0, 180)],
    "purple": [(128, 0, 128), (130, 50, 170), (150, 60, 200)],
    "pink": [(255, 192, 203), (255, 105, 180), (245, 130, 180)],
    "brown": [(139, 69, 19), (120, 75, 40), (150, 90, 45)],
    "black": [(0, 0, 0), (25, 25, 25)],
    "white": [(255, 255, 255), (245, 245, 245)],
    "grey": [(128, 128, 128), (110, 110, 110), (150, 150, 150)],
}
COLOUR_NAMES = tuple(COLOURS)
SMALL, LARGE = (9.0, 14.0), (25.0, 37.0)  # seen radius
Rgb = tuple[int, int, int]
NATURAL_SIZES = [
    (192, 192),
    (256, 256),
    (384, 384),
    (512, 512),
    (400, 300),
    (640, 480),
    (320, 240),
    (300, 400),
    (480, 640),
    (480, 320),
    (640, 360),
    (448, 336),
    (600, 600),
    (800, 600),
    (224, 224),
    (500, 350),
]


@dataclass
class Object:
    """One shape: centre and radius in natural pixels, angle in radians (clockwise on the screen)."""

    shape: str
    colour: str
    rgb: Rgb
    x: float
    y: float
    r: float
    angle: float
    size: str = ""  # "small", "large" or "" (not said)


@dataclass
class Text:
    """One printed string; (x, y) is the centre of its box in natural pixels."""

    string: str
    font: Font
    x: float
    y: float
    angle: float
    rgb: Rgb


@dataclass
class Chart:
    """A bar chart; drawn by ``charts.draw_chart``."""

    labels: list[str]
    values: list[int]
    top: int  # value at the top of the axis
    step: int  # distance of ticks
    show_axis: bool
    show_values: bool
    show_grid: bool
    title: str
    font: Font
    bars: list[tuple[float, float, float, float]]  # x0, y0, x1, y1
    colours: list[Rgb]
    ink: Rgb
    frame: tuple[float, float, float, float]  # plot area x0, y0, x1, y1


@dataclass
class Picture:
    """A picture before drawing; ``kind`` says which grammar describes it."""

    kind: str  # one, two, same, groups, several, blank, text, chart
    width: int
    height: int
    background: Rgb
    background2: Rgb
    objects: list[Object] = field(default_factory=list)
    text: Text | None = None
    chart: Chart | None = None

    @property
    def scale(self) -> tuple[float, float]:
        """Seen pixels a natural pixel, by axis."""
        return SIDE / self.width, SIDE / self.height


def jitter(rng: random.Random, rgb: Rgb, by: int) -> Rgb:
    r, g, b = (min(255, max(0, c + rng.randint(-by, by))) for c in rgb)
    return r, g, b


def distance(a: Rgb, b: Rgb) -> float:
    return math.dist(a, b)


def luminance(rgb: Rgb) -> float:
    return 0.3 * rgb[0] + 0.59 * rgb[1] + 0.11 * rgb[2]


def random_rgb(rng: random.Random) -> Rgb:
    return rng.randrange(256), rng.randrange(256), rng.randrange(256)


def canvas(rng: random.Random, widest: float = 1.8) -> tuple[int, int]:
    """Natural size: usual sizes, or any with an aspect ratio between 1/1.8 and ``widest``."""
    if rng.random() < 0.6:
        return rng.choice(NATURAL_SIZES)
    aspect = math.exp(rng.uniform(math.log(1 / 1.8), math.log(widest)))
    area = math.exp(rng.uniform(math.log(180.0), math.log(700.0)))
    return max(96, round(area * math.sqrt(aspect))), max(96, round(area / math.sqrt(aspect)))


def background(rng: random.Random, avoid: list[Rgb], gap: float = 105.0) -> tuple[Rgb, Rgb]:
    """A background at least ``gap`` (RGB distance) from the colours of ``avoid``, and the end of its gradient."""
    for attempt in range(200):
        p = rng.random() if attempt < 60 else 1.0
        if p < 0.35:
            rgb = jitter(rng, (255, 255, 255), 10)
        elif p < 0.6:
            rgb = (rng.randint(195, 255), rng.randint(195, 255), rng.randint(195, 255))
        elif p < 0.75:
            rgb = (rng.randint(0, 50), rng.randint(0, 50), rng.randint(0, 60))
        else:
            rgb = random_rgb(rng)
        if all(distance(rgb, other) >= gap for other in avoid):
            break
    if rng.random() < 0.15:
        return rgb, jitter(rng, rgb, 24)
    return rgb, rgb


def colour_of(rng: random.Random, name: str) -> Rgb:
    return jitter(rng, rng.choice(COLOURS[name]), rng.choice([0, 6, 10]))


def tilt(rng: random.Random) -> float:
    return 0.0 if rng.random() < 0.5 else math.radians(rng.uniform(-10, 10))


class Placer:
    """Places shapes without overlap, in seen pixels."""

    def __init__(self, rng: random.Random, width: int, height: int) -> None:
        self.rng, self.sx, self.sy = rng, SIDE / width, SIDE / height
        self.taken: list[tuple[float, float, float, float]] = []

    def radii(self, r: float) -> tuple[float, float]:
        k = math.sqrt(self.sx / self.sy)
        return r * k, r / k

    def free(self, x: float, y: float, rx: float, ry: float) -> bool:
        return all(math.hypot((x - u) / (rx + a + 3), (y - v) / (ry + b + 3)) > 1.08 for u, v, a, b in self.taken)

    def place(self, r: float, box: tuple[float, float, float, float] | None = None) -> tuple[float, float] | None:
        """Centre of a free place for radius ``r``, inside ``box`` of the picture, in seen pixels."""
        rx, ry = self.radii(r)
        x0, y0, x1, y1 = box or (0, 0, SIDE, SIDE)
        x0, y0, x1, y1 = max(x0, rx + 2), max(y0, ry + 2), min(x1, SIDE - rx - 2), min(y1, SIDE - ry - 2)
        if x1 <= x0 or y1 <= y0:
            return None
        for _ in range(40):
            x, y = self.rng.uniform(x0, x1), self.rng.uniform(y0, y1)
            if self.free(x, y, rx, ry):
                return x, y
        return None

    def add(self, shape: str, colour: str, rgb: Rgb, at: tuple[float, float], r: float, size: str = "") -> Object:
        self.taken.append((*at, *self.radii(r)))
        natural = r / math.sqrt(self.sx * self.sy)
        return Object(shape, colour, rgb, at[0] / self.sx, at[1] / self.sy, natural, tilt(self.rng), size)


def sized(rng: random.Random) -> tuple[str, float]:
    return ("small", rng.uniform(*SMALL)) if rng.random() < 0.5 else ("large", rng.uniform(*LARGE))


ZONES = {"left": (0, 46), "mid": (78, 114), "right": (146, 192)}


def zone(rng: random.Random) -> tuple[float, float, float, float]:
    """One of the nine places that captions name, with gaps between them."""
    h, v = ZONES[rng.choice(list(ZONES))], ZONES[rng.choice(list(ZONES))]
    return h[0], v[0], h[1], v[1]


def scene(rng: random.Random, kind: str | None = None) -> Picture:
    """A picture of coloured shapes; ``kind`` as in Picture, chosen at random if None."""
    while True:
        picture = try_scene(
            rng, kind or rng.choices(["one", "two", "same", "groups", "several", "blank"], [14, 26, 20, 22, 16, 2])[0]
        )
        if picture is not None:
            return picture


def pick_kinds(rng: random.Random, n: int) -> list[tuple[str, str]]:
    """``n`` different (shape, colour) pairs; often sharing the shape or the colour."""
    pairs: list[tuple[str, str]] = []
    while len(pairs) < n:
        pair = (rng.choice(SHAPES), rng.choice(COLOUR_NAMES))
        if pairs and rng.random() < 0.3:
            old = rng.choice(pairs)
            pair = (old[0], pair[1]) if rng.random() < 0.6 else (pair[0], old[1])
        if pair not in pairs:
            pairs.append(pair)
    return pairs


def try_scene(rng: random.Random, kind: str) -> Picture | None:
    width, height = canvas(rng)
    placer = Placer(rng, width, height)
    if kind == "blank":
        back, back2 = background(rng, [])
        return Picture(kind, width, height, back, back2)
    counts = {
        "one": [1],
        "two": [1, 1],
        "same": [rng.randint(2, 6)],
        "several": [1] * rng.choice([3, 3, 4]),
        "groups": [rng.randint(1, 4), rng.randint(2, 4)],
    }[kind]
    kinds = pick_kinds(rng, len(counts))
    rgbs = {c: colour_of(rng, c) for _, c in kinds}
    if any(distance(rgbs[a], rgbs[b]) < 50 for a in rgbs for b in rgbs if a < b):
        return None
    back, back2 = background(rng, list(rgbs.values()))
    objects = []
    group_size = sized(rng) if kind == "same" else None
    total = sum(counts)
    for (shape, colour), count in zip(kinds, counts, strict=True):
        for _ in range(count):
            size, r = "", rng.uniform(9, 26 if total < 4 else 20)
            if kind in ("one", "two"):
                size, r = sized(rng)
            elif group_size:
                size, r = group_size[0], group_size[1] * rng.uniform(0.95, 1.05)
                if total > 4 and size == "large":
                    return None
            at = placer.place(r, zone(rng) if kind == "one" else None)
            if at is None:
                return None
            objects.append(placer.add(shape, colour, rgbs[colour], at, r, size))
    if kind == "two" and not related(objects, placer.sx, placer.sy):
        return None
    if kind == "several":
        xs = sorted(o.x * placer.sx for o in objects)
        if min(b - a for a, b in itertools.pairwise(xs)) < 12:
            return None
        objects.sort(key=lambda o: o.x)
    rng.shuffle(objects) if kind == "groups" else None
    return Picture(kind, width, height, back, back2, objects)


def related(objects: list[Object], sx: float, sy: float) -> bool:
    """Whether it is clear if two objects stand beside or above each other."""
    dx, dy = abs(objects[0].x - objects[1].x) * sx, abs(objects[0].y - objects[1].y) * sy
    return abs(dx - dy) > 14


# ---- text


def contrasting(rng: random.Random, back: Rgb) -> Rgb:
    """An ink that can be read on ``back``."""
    while True:
        p = rng.random()
        rgb = (
            jitter(rng, (12, 12, 12), 12)
            if p < 0.3
            else jitter(rng, (245, 245, 245), 10)
            if p < 0.45
            else random_rgb(rng)
        )
        if abs(luminance(rgb) - luminance(back)) > 75:
            return rgb


def seen_size(rng: random.Random, low: float = 10.0, high: float = 40.0) -> float:
    return math.exp(rng.uniform(math.log(low), math.log(high)))


def text_picture(
    rng: random.Random, string: str, fonts: list, *, low: float = 10.0, size: float | None = None, shapes: int = 0
) -> Picture:
    """A printed string with 0 to 2 shapes beside it. ``size``: font size in seen pixels, on the narrower axis."""
    while True:
        long = len(string) > 12
        width, height = canvas(rng, widest=3.6 if long and rng.random() < 0.35 else 1.8)
        sx, sy = SIDE / width, SIDE / height
        want = size or seen_size(rng, low)
        face = rng.choice(fonts)
        natural = max(8, round(want / min(sx, sy)))
        font = face.at(natural)
        w, h = font.length(string), font.height()
        if size is None and w * sx > SIDE - 8:
            natural = int(natural * (SIDE - 8) / (w * sx) * rng.uniform(0.85, 1.0))
            font = face.at(max(8, natural))
            w, h = font.length(string), font.height()
        if font.size * min(sx, sy) < low - 1.0 or w * sx > SIDE - 6 or h * sy > SIDE - 8:
            continue
        angle = 0.0
        if rng.random() < 0.5:
            angle = math.radians(max(-10, min(10, rng.gauss(0, 4))))
        bw = (w * math.cos(angle) + h * abs(math.sin(angle))) * sx / 2
        bh = (w * abs(math.sin(angle)) + h * math.cos(angle)) * sy / 2
        if bw > SIDE / 2 - 2 or bh > SIDE / 2 - 2:
            angle, bw, bh = 0.0, w * sx / 2, h * sy / 2
        x, y = rng.uniform(bw + 1, SIDE - bw - 1), rng.uniform(bh + 1, SIDE - bh - 1)
        if rng.random() < 0.3:
            x, y = SIDE / 2, SIDE / 2
        back, back2 = background(rng, [])
        text = Text(string, font, x / sx, y / sy, angle, contrasting(rng, back))
        picture = Picture("text", width, height, back, back2, text=text)
        if shapes == 0 or add_shapes(rng, picture, shapes, (x, y, bw, bh)):
            return picture
        size = None


def add_shapes(rng: random.Random, picture: Picture, n: int, box: tuple[float, float, float, float]) -> bool:
    """Adds ``n`` different shapes beside the text box (centre, half sizes; seen pixels); False if there is no room."""
    placer = Placer(rng, picture.width, picture.height)
    x, y, bw, bh = box
    for shape, colour in pick_kinds(rng, n):
        size, r = sized(rng)
        rx, ry = placer.radii(r)
        rgb = colour_of(rng, colour)
        if distance(rgb, picture.background) < 105:
            return False
        for _ in range(20):
            at = placer.place(r)
            if at and (abs(at[0] - x) > bw + rx + 3 or abs(at[1] - y) > bh + ry + 3):
                picture.objects.append(placer.add(shape, colour, rgb, at, r, size))
                break
        else:
            picture.objects.clear()
            return False
    if n == 2:
        xs = [o.x * placer.sx for o in picture.objects]
        if abs(xs[0] - xs[1]) < 12:
            picture.objects.clear()
            return False
        picture.objects.sort(key=lambda o: o.x)
    return True


def any_string(rng: random.Random, evaluation: bool, kind: str | None = None) -> str:
    kind = kind or rng.choices(["word", "random", "number", "line"], [18, 32, 8, 42])[0]
    return strings.draw_string(rng, kind, evaluation)
