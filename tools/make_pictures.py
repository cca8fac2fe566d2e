"""Draws the bundled example pictures and writes down what is right to say about them.

    python tools/make_pictures.py --fonts FOLDER...

Writes twelve PNG files and answers.json: for each file its caption and some questions with their answers, and questions
about pairs of files. What is in each picture is chosen here, by hand; captions and answers come from the grammar
that the embedded model was taught, and the printed strings from those that it never saw. The faces are DejaVu's.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from embedded import charts, drawing, grammar, phrases
from embedded.fonts import Face, default_folders, find_faces
from embedded.scenes import COLOURS, Object, Picture, Rgb, Text
from embedded.strings import held_out

FOLDER = Path(__file__).resolve().parent.parent / "examples" / "pictures"
PAPER, CREAM, SKY, NIGHT = (255, 255, 255), (250, 243, 224), (221, 236, 248), (24, 26, 44)
SMALL, MIDDLE, LARGE = 11.0, 16.0, 30.0  # radius in pixels of the picture as the model sees it
PAIR = ("pair_first.png", "pair_second.png")


@dataclass
class Example:
    """A picture with questions and their right answers."""

    picture: Picture
    questions: dict[str, str] = field(default_factory=dict)


def shape(picture: Picture, name: str, colour: str, x: float, y: float, r: float, size: str = "") -> None:
    """Adds a shape at (x, y), given as parts of the width and the height."""
    sx, sy = picture.scale
    natural = r / math.sqrt(sx * sy)
    at = (x * picture.width, y * picture.height)
    picture.objects.append(Object(name, colour, COLOURS[colour][0], *at, natural, 0.0, size))


def paper(kind: str, width: int, height: int, colour: Rgb = PAPER) -> Picture:
    return Picture(kind, width, height, colour, colour)


def printed(
    picture: Picture, string: str, face: Face, seen: float, x: float, y: float, rgb: Rgb, tilt: float = 0.0
) -> None:
    """Prints a string of font size ``seen`` (pixels as the model sees them, on the axis that shrinks more)."""
    if not held_out(string):
        raise ValueError(f"{string!r} may stand in training pictures")
    font = face.at(round(seen / min(picture.scale)))
    at = (x * picture.width, y * picture.height)
    picture.text = Text(string, font, *at, math.radians(tilt), rgb)


def bar_chart(faces: dict[str, Face]) -> Picture:
    """The first random chart of four bars that has a title, an axis and no printed values."""
    rng = random.Random(2026)
    while True:
        picture = charts.chart_picture(rng, [faces["DejaVuSans"]])
        chart = picture.chart
        assert chart is not None
        plain = len(chart.labels) == 4 and chart.title and chart.show_axis and not chart.show_values
        if plain and (picture.width, picture.height) == (480, 360):
            return picture


def shapes() -> dict[str, Example]:
    two = paper("two", 256, 256)
    shape(two, "circle", "red", 0.28, 0.45, LARGE, "large")
    shape(two, "square", "blue", 0.76, 0.55, SMALL, "small")
    one = paper("one", 320, 240, NIGHT)
    shape(one, "star", "yellow", 0.85, 0.16, SMALL, "small")
    same = paper("same", 400, 300, CREAM)
    for x, y in ((0.15, 0.2), (0.8, 0.3), (0.45, 0.45), (0.25, 0.8), (0.7, 0.78)):
        shape(same, "triangle", "green", x, y, SMALL, "small")
    groups = paper("groups", 384, 384, SKY)
    for name, colour, x, y in (
        ("square", "orange", 0.25, 0.2),
        ("square", "orange", 0.75, 0.85),
        ("heart", "purple", 0.7, 0.25),
        ("heart", "purple", 0.45, 0.55),
        ("heart", "purple", 0.2, 0.75),
    ):
        shape(groups, name, colour, x, y, MIDDLE)
    three = paper("several", 480, 360)
    for name, colour, x, y in (
        ("cross", "black", 0.2, 0.3),
        ("diamond", "pink", 0.5, 0.7),
        ("ring", "green", 0.82, 0.4),
    ):
        shape(three, name, colour, x, y, MIDDLE)
    return {
        "circle_and_square.png": Example(
            two, {"What colour is the square?": "blue", "What color is the circle?": "red"}
        ),
        "star.png": Example(one, {"What shape is the yellow object?": "star", "Read the text.": "There is no text."}),
        "triangles.png": Example(same, {"How many triangles are there?": "5", "How many circles are there?": "0"}),
        "hearts_and_squares.png": Example(
            groups, {"How many purple hearts are there?": "3", "How many objects are there?": "5"}
        ),
        "three_shapes.png": Example(three, {"What colour is the diamond?": "pink", "Is there a green ring?": "Yes."}),
    }


def pair() -> dict[str, Example]:
    """Two pictures to compare."""
    few, many = paper("same", 300, 300), paper("same", 300, 300, CREAM)
    for x, y in ((0.2, 0.25), (0.7, 0.4), (0.4, 0.8)):
        shape(few, "circle", "blue", x, y, SMALL, "small")
    for x, y in ((0.15, 0.2), (0.8, 0.15), (0.5, 0.5), (0.2, 0.8), (0.78, 0.75)):
        shape(many, "circle", "red", x, y, SMALL, "small")
    made = (Example(p, {"How many circles are there?": n}) for p, n in ((few, "3"), (many, "5")))
    return dict(zip(PAIR, made, strict=True))


def reading(faces: dict[str, Face]) -> dict[str, Example]:
    word = paper("text", 256, 192, CREAM)
    printed(word, "Library", faces["DejaVuSerif"], 26, 0.5, 0.5, (120, 20, 30))
    code = paper("text", 320, 320, NIGHT)
    printed(code, "R7kQ2mC", faces["DejaVuSansMono"], 20, 0.45, 0.4, (240, 240, 240), tilt=-5)
    line = paper("text", 600, 240)
    printed(line, "Museum opens at 12:20", faces["DejaVuSans-Bold"], 13, 0.5, 0.5, (20, 60, 120))
    mixed = paper("text", 400, 300, SKY)
    printed(mixed, "Gate 26", faces["DejaVuSans"], 18, 0.5, 0.75, (15, 15, 15))
    shape(mixed, "diamond", "purple", 0.5, 0.3, LARGE, "large")
    return {
        "word.png": Example(word, {"Read the text.": "Library"}),
        "code.png": Example(code, {"What is written here?": "R7kQ2mC"}),
        "wide_line.png": Example(line, {"Read the text.": "Museum opens at 12:20"}),
        "diamond_and_text.png": Example(mixed, {"Read the text.": "Gate 26", "What colour is the diamond?": "purple"}),
    }


def chart(faces: dict[str, Face]) -> dict[str, Example]:
    picture = bar_chart(faces)
    drawn = picture.chart
    assert drawn is not None
    ranked = sorted(zip(drawn.values, drawn.labels, strict=True))
    questions = {"Which bar is the highest?": ranked[-1][1], "Which bar is the lowest?": ranked[0][1]}
    return {"bar_chart.png": Example(picture, questions | {"How many bars are there?": str(len(ranked))})}


def examples(faces: dict[str, Face]) -> dict[str, Example]:
    """File name -> picture and questions."""
    return shapes() | reading(faces) | chart(faces) | pair()


def answers(made: dict[str, Example]) -> dict[str, object]:
    """The content of answers.json."""
    pictures = {
        name: {"caption": "".join(grammar.caption(example.picture)), "questions": example.questions}
        for name, example in made.items()
    }
    compared = {"Which picture has more circles?": phrases.SECOND, "How many circles are in the first picture?": "3"}
    return {"pictures": pictures, "pairs": [{"pictures": list(PAIR), "questions": compared}]}


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--fonts", nargs="+", default=None, help="folders that hold DejaVu's .ttf files")
    p.add_argument("--out", type=Path, default=FOLDER)
    args = p.parse_args()
    faces = {face.name: face for face in find_faces(args.fonts or default_folders())}
    made = examples(faces)
    args.out.mkdir(parents=True, exist_ok=True)
    for name, example in made.items():
        drawing.draw(example.picture).save(args.out / name, optimize=True)
    (args.out / "answers.json").write_text(json.dumps(answers(made), indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
