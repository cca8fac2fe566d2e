"""Chunks of training data: picture specifications packed as numbers for the GPU renderer, with tokenised conversations.

A chunk depends on its number, the faces and the seed alone. Worker processes write chunks to a folder in shared memory;
the trainer takes them in order.
"""

from __future__ import annotations

import math
import os
import random
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from . import charts, drawing, grammar, phrases, scenes
from .fonts import Face, find_faces, plain_faces
from .scenes import COLOUR_NAMES, SHAPES, SIDE, Picture, Text
from .tokenizer import Codec

SINGLES, PAIRS = 4096, 512  # conversations a chunk
ROWS = 2  # conversations about one picture
LENGTH_ONE, LENGTH_TWO = 128, 192  # tokens of a conversation with one and with two pictures
OBJECTS, HEAD, WIDTH = 8, 18, 11  # objects a picture, numbers a picture, numbers an object
RECORD = HEAD + OBJECTS * WIDTH
RECT = len(SHAPES)  # shape id of an upright rectangle (bars)
STRIP_BYTES = 80 * 2**20  # most bytes of text masks in a chunk
SAID = 1 << 15  # bit of a token that the model has to say
CHARACTERS = "".join(chr(c) for c in range(33, 127)) + "£€"
CLASSES = 1 + len(CHARACTERS) + len(SHAPES) * len(COLOUR_NAMES)  # of the auxiliary patch loss; 0 is background
_CLASS = {c: i + 1 for i, c in enumerate(CHARACTERS)}
MAX_CHARS = 24
FAILED = 2  # value of ``stop`` after an error in a worker; 1 is the order to stop


class Packer:
    """Packs pictures into arrays and their masks into one flat buffer."""

    def __init__(self, n: int) -> None:
        self.records = np.zeros((n, RECORD), np.float32)
        self.offsets = np.zeros(n, np.int64)
        self.edges = np.zeros(
            (n, MAX_CHARS + 1), np.float32
        )  # left edges of characters in the strip, then the right edge
        self.classes = np.zeros((n, MAX_CHARS), np.uint8)
        self.strips: list[bytes] = []
        self.used = 0

    def add(self, i: int, picture: Picture) -> None:
        sx, sy = picture.scale
        head: list[float] = [*picture.background, *picture.background2]
        if picture.text:
            head += self.text(i, picture, picture.text)
        elif picture.chart:
            mask = drawing.squeeze(charts.ink_mask(picture))
            self.strip(i, mask)
            head += [SIDE, SIDE, SIDE / 2, SIDE / 2, 1.0, 0.0, 1.0, *picture.chart.ink, 0.0, 1.0]
        else:
            head += [0.0] * 4 + [1.0, 0.0, 1.0] + [0.0] * 5
        objects: list[float] = []
        for obj in picture.objects:
            objects += [
                SHAPES.index(obj.shape),
                *obj.rgb,
                obj.x * sx,
                obj.y * sy,
                obj.r * sx,
                obj.r * sy,
                math.cos(obj.angle),
                math.sin(obj.angle),
                COLOUR_NAMES.index(obj.colour),
            ]
        if picture.chart:
            for (x0, y0, x1, y1), rgb in zip(picture.chart.bars, picture.chart.colours, strict=True):
                x0, y0, x1, y1 = round(x0), round(y0), round(x1) + 1, round(y1) + 1
                objects += [
                    RECT,
                    *rgb,
                    (x0 + x1) / 2 * sx,
                    (y0 + y1) / 2 * sy,
                    (x1 - x0) / 2 * sx,
                    (y1 - y0) / 2 * sy,
                    1,
                    0,
                    0,
                ]
        objects += [-1.0, *[0.0] * 5, 1.0, 1.0, 1.0, 0.0, 0.0] * (OBJECTS - len(objects) // WIDTH)
        self.records[i] = [*head, *objects]

    def strip(self, i: int, mask: Image.Image) -> None:
        data = mask.tobytes()
        self.offsets[i] = self.used
        self.used += len(data)
        self.strips.append(data)

    def text(self, i: int, picture: Picture, text: Text) -> list[float]:
        """Adds the text's mask, squeezed as the whole picture is; returns its numbers of the record."""
        sx, sy = picture.scale
        fit_w, fit_h = drawing.fit(picture.width, picture.height)
        pad = math.ceil(4 / min(sx, sy)) + text.font.size // 4 + 1
        mask = drawing.text_mask(text, pad)
        left, top = round(text.x - mask.width / 2), round(text.y - mask.height / 2)
        # The strip's edges on the grid of seen pixels, then as a box of the natural mask.
        x0, y0 = math.ceil(left * sx), math.ceil(top * sy)
        x1, y1 = math.floor((left + mask.width) * sx), math.floor((top + mask.height) * sy)
        w, h = x1 - x0, y1 - y0
        box = (
            max(0.0, x0 / sx - left),
            max(0.0, y0 / sy - top),
            min(float(mask.width), x1 / sx - left),
            min(float(mask.height), y1 / sy - top),
        )
        first = (max(1, round(w * fit_w / SIDE)), max(1, round(h * fit_h / SIDE)))
        seen = mask.resize(first, Image.Resampling.LANCZOS, box=box)
        if first != (w, h):
            seen = seen.resize((w, h), Image.Resampling.LANCZOS)
        self.strip(i, seen)
        edge = pad - box[0]
        for j, char in enumerate(text.string[:MAX_CHARS]):
            self.edges[i, j] = edge * sx
            self.classes[i, j] = _CLASS.get(char, 0)
            edge += text.font.advance(char)
        self.edges[i, len(text.string) :] = edge * sx
        middle = (pad + text.font.ascent * 0.62 - box[1]) * sy  # about the height of an x above the base line
        return [
            w,
            h,
            (x0 + x1) / 2,
            (y0 + y1) / 2,
            math.cos(text.angle),
            math.sin(text.angle),
            sx / sy,
            *text.rgb,
            middle,
            max(text.font.size * sy * 0.5, 6.3),
        ]  # at least one row of patch centres


def token_row(ids: list[int], said: list[bool], length: int, pad: int) -> np.ndarray | None:
    """Ids with the SAID bit, padded to ``length``; None if they do not fit."""
    if len(ids) > length:
        return None
    row = np.full(length, pad, np.uint16)
    row[: len(ids)] = [t | SAID if s else t for t, s in zip(ids, said, strict=True)]
    return row


@dataclass(frozen=True)
class Mixture:
    """What chunks show and ask.

    Attributes:
        scenes, texts, mixed: shares of the pictures; the rest are charts.
        value: share of the questions about a chart that ask for the value of a bar; count: of those about a scene that
            ask how many. More of each is asked than `grammar.single_turn` would.
        scene_pairs: share of the pairs that are scenes, the others are texts. same: share of the latter's questions
            that compare them.
        shout: share of the questions in capitals, beside those of `grammar.ask`.
    """

    scenes: float = 0.27
    texts: float = 0.49
    mixed: float = 0.07
    value: float = 0.0
    count: float = 0.0
    scene_pairs: float = 0.5
    same: float = 0.0
    shout: float = 0.0


MIXTURES = {
    "first": Mixture(),
    # What comes out weakest of the first: values of bars, counts, comparisons of texts, questions in capitals.
    "second": Mixture(
        scenes=0.36, texts=0.18, mixed=0.06, value=0.65, count=0.35, scene_pairs=0.4, same=0.6, shout=0.06
    ),
}


class Maker:
    """Makes chunks for one process."""

    def __init__(self, faces: list[Face], seed: int, mixture: Mixture = MIXTURES["first"]) -> None:
        self.faces = faces
        self.mixture = mixture
        self.plain = plain_faces(self.faces)
        self.codec = Codec()
        self.seed = seed

    def picture(self, rng: random.Random) -> Picture:
        p, m = rng.random(), self.mixture
        if p < m.scenes:
            return scenes.scene(rng)
        if p < m.scenes + m.texts:
            return scenes.text_picture(rng, scenes.any_string(rng, False), self.faces)
        if p < m.scenes + m.texts + m.mixed:
            return scenes.text_picture(rng, scenes.any_string(rng, False), self.faces, shapes=rng.randint(1, 2))
        return charts.chart_picture(rng, self.plain)

    def turn(self, rng: random.Random, picture: Picture) -> grammar.Turn:
        m = self.mixture
        if m.value and picture.chart and rng.random() < m.value:
            turn = grammar.chart_turn(rng, picture, "value")
        elif m.count and not picture.chart and not picture.text and rng.random() < m.count:
            turn = grammar.count(rng, picture)
        else:
            turn = grammar.single_turn(rng, picture)
        return self.shouted(rng, turn)

    def shouted(self, rng: random.Random, turn: grammar.Turn) -> grammar.Turn:
        if self.mixture.shout and len(turn.question) == 1 and rng.random() < self.mixture.shout:
            return replace(turn, question=[turn.question_text.upper()])
        return turn

    def rows(self, rng: random.Random, picture: Picture) -> list[np.ndarray]:
        """ROWS conversations: the first with one turn, the others with as many as fit, up to three."""
        rows: list[np.ndarray] = []
        while len(rows) < ROWS:
            turns = [self.turn(rng, picture)]
            if rows:
                turns += [self.turn(rng, picture) for _ in range(rng.randint(0, 2))]
            system = rng.choice(phrases.SYSTEM) if rng.random() < 0.06 else ""
            text_first = rng.random() < 0.07
            for keep in range(len(turns), 0, -1):
                conversation = self.codec.conversation(turns[:keep], 1, system, text_first)
                row = token_row(*conversation, LENGTH_ONE, self.codec.pad)
                if row is not None:
                    rows.append(row)
                    break
        return rows

    def pair(self, rng: random.Random) -> tuple[Picture, Picture, np.ndarray]:
        while True:
            task = None
            if rng.random() < self.mixture.scene_pairs:
                first, second = scenes.scene(rng), scenes.scene(rng)
            else:
                string = scenes.any_string(rng, False)
                p = rng.random()
                other = string if p < 0.45 else scenes.any_string(rng, False)
                if p > 0.7:
                    other = grammar_near(rng, string)
                first = scenes.text_picture(rng, string, self.faces)
                second = scenes.text_picture(rng, other, self.faces)
                if self.mixture.same and rng.random() < self.mixture.same:
                    task = "same_text"
            turns = [self.shouted(rng, grammar.pair_turn(rng, first, second, task))]
            row = token_row(*self.codec.conversation(turns, 2), LENGTH_TWO, self.codec.pad)
            if row is not None:
                return first, second, row

    def chunk(self, number: int, singles: int = SINGLES, pairs: int = PAIRS) -> dict[str, np.ndarray]:
        """Arrays of chunk ``number``; pictures of the singles first, then the pairs' two by two."""
        rng = random.Random(self.seed * 1_000_003 + number)
        packer = Packer(singles + 2 * pairs)
        one = np.zeros((singles, ROWS, LENGTH_ONE), np.uint16)
        two = np.zeros((pairs, LENGTH_TWO), np.uint16)
        for i in range(singles):
            picture = self.picture(rng)
            packer.add(i, picture)
            one[i] = self.rows(rng, picture)
        for j in range(pairs):
            first, second, two[j] = self.pair(rng)
            packer.add(singles + 2 * j, first)
            packer.add(singles + 2 * j + 1, second)
        strips = np.frombuffer(b"".join(packer.strips), np.uint8)
        assert len(strips) <= STRIP_BYTES, len(strips)
        return {
            "records": packer.records,
            "offsets": packer.offsets,
            "edges": packer.edges,
            "classes": packer.classes,
            "strips": strips,
            "one": one.view(np.int16),
            "two": two.view(np.int16),
        }


def grammar_near(rng: random.Random, string: str) -> str:
    from .strings import held_out, near_miss

    for _ in range(50):
        other = near_miss(rng, string) if any(c.isalnum() for c in string) else scenes.any_string(rng, False)
        if not held_out(other):
            return other
    return string


def work(
    index: int,
    workers: int,
    folder: str,
    fonts: list[str],
    seed: int,
    consumed: Any,
    stop: Any,
    ahead: int,
    mixture: Mixture,
) -> None:
    """Worker process: writes chunks ``index``, ``index + workers`` ... until told to stop; ``ahead`` of use at most."""
    os.nice(10)
    maker, number = Maker(find_faces(fonts), seed, mixture), index
    while not stop.value:
        if number > consumed.value + ahead:
            time.sleep(0.05)
            continue
        arrays = maker.chunk(number)
        part = Path(folder) / f"part{number}.npz"
        np.savez(part, **arrays)  # type: ignore[arg-type]
        part.rename(Path(folder) / f"chunk{number}.npz")
        number += workers
