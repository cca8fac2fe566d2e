"""Held-out questions: pictures drawn by Pillow at natural size, from seeds and strings that training never uses."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from PIL import Image

from . import charts, drawing, grammar, scenes
from .fonts import Face, plain_faces
from .grammar import Turn
from .scenes import Picture

SEED = 77_000_000  # training uses other seeds: seed * 1,000,003 + chunk
READING = {"word": "word", "random": "random", "number": "number", "line": "line"}
TASKS = (
    "caption",
    "count",
    "colour",
    "word",
    "random",
    "number",
    "line",
    "text_caption",
    "mixed_caption",
    "highest",
    "lowest",
    "value",
    "chart_caption",
    "more",
    "same_text",
    "read_nth",
    "no_text",
    "absent",
    "blank",
)
TARGETS = {
    "caption": 99,
    "count": 99,
    "colour": 99,
    "word": 95,
    "random": 95,
    "line": 90,
    "highest": 90,
    "lowest": 90,
    "value": 90,
    "more": 95,
    "same_text": 95,
}


@dataclass
class Item:
    """One question about one or two pictures, with its only right answer."""

    task: str
    pictures: list[Picture]
    question: str
    answer: str
    smooth: bool
    tags: dict[str, str] = field(default_factory=dict)

    def images(self) -> list[Image.Image]:
        """The pictures at natural size."""
        return [drawing.draw(p, self.smooth) for p in self.pictures]


def of_kind(rng: random.Random, maker: object, task: str, *pictures: Picture) -> Turn:
    while True:
        turn: Turn = maker(rng, *pictures)  # type: ignore[operator]
        if turn.task == task:
            return turn


def make(rng: random.Random, task: str, faces: list[Face], plain: list[Face]) -> tuple[list[Picture], Turn]:
    """Pictures and a turn of one task."""

    def printed(kind: str | None = None, shapes: int = 0, string: str | None = None) -> Picture:
        string = string or scenes.any_string(rng, True, kind)
        return scenes.text_picture(rng, string, faces, low=12.0, shapes=shapes)

    def shapes_only() -> Picture:
        while True:
            picture = scenes.scene(rng)
            if picture.kind != "blank":
                return picture

    if task in READING:
        picture = printed(task)
        return [picture], grammar.read(rng, picture)
    if task == "text_caption":
        picture = printed()
        return [picture], grammar.describe(rng, picture)
    if task == "mixed_caption":
        picture = printed(rng.choice(["word", "random", "number"]), shapes=rng.randint(1, 2))
        return [picture], grammar.describe(rng, picture)
    if task in ("highest", "lowest", "value"):
        picture = charts.chart_picture(rng, plain)
        return [picture], grammar.chart_turn(rng, picture, task)
    if task == "chart_caption":
        picture = charts.chart_picture(rng, plain)
        return [picture], grammar.describe(rng, picture)
    if task == "more":
        pair = [scenes.scene(rng), scenes.scene(rng)]
        return pair, grammar.more(rng, *pair)
    if task in ("same_text", "read_nth"):
        string = scenes.any_string(rng, True)
        other = string if task == "same_text" and rng.random() < 0.5 else scenes.any_string(rng, True)
        pair = [printed(string=string), printed(string=other)]
        return pair, of_kind(rng, grammar.pair_turn, task, *pair)
    if task == "no_text":
        picture = shapes_only()
        return [picture], grammar.read(rng, picture)
    if task == "blank":
        picture = scenes.scene(rng, "blank")
        return [picture], grammar.describe(rng, picture)
    picture = shapes_only()
    if task == "absent":
        while True:
            turn = grammar.count(rng, picture, absent=1.0)
            if turn.answer_text == "0":
                return [picture], turn
    maker = {"caption": grammar.describe, "count": grammar.count, "colour": grammar.colour_question}[task]
    return [picture], of_kind(rng, maker, task, picture)


def items(task: str, n: int, faces: list[Face]) -> Iterator[Item]:
    """``n`` held-out questions of a task; the same ones for the same faces."""
    rng = random.Random(SEED + TASKS.index(task))
    plain = plain_faces(faces)
    for _ in range(n):
        pictures, turn = make(rng, task, faces, plain)
        item = Item(task, pictures, turn.question_text, turn.answer_text, rng.random() < 0.5)
        text = pictures[0].text
        if text:
            seen = text.font.size * min(pictures[0].scale)
            low = next(s for s in (24, 20, 16, 14, 12, 11) if seen >= s - 0.5)
            item.tags = {"size": f"{low} px", "face": text.font.path.rsplit("/", 1)[-1]}
        yield item


def write(task: str, n: int, faces: list[Face], folder: Path) -> None:
    """A task's questions in ``folder``: pictures as the model sees them (N, pictures, S, S, 3), and their text."""
    made = list(items(task, n, faces))
    images = [np.stack([np.asarray(drawing.squeeze(image)) for image in item.images()]) for item in made]
    np.save(folder / f"{task}.npy", np.stack(images))
    part = folder / f"{task}.part"
    part.write_text(json.dumps([[item.question, item.answer, item.tags] for item in made]))
    part.rename(folder / f"{task}.json")  # when this is there, both are whole
