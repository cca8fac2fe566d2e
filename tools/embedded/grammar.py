"""Questions and answers about picture specifications.

An answer is a list of pieces: plain strings are grammar (whole words are tokens), ``Spelled`` strings come from the
picture and are written a character at a time.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from .phrases import (
    BOTH,
    COLOUR,
    COUNT,
    COUNT_NTH,
    DESCRIBE,
    DESCRIBE_NTH,
    EMPTY,
    FIRST,
    HIGHEST,
    IMPERATIVES,
    LOWEST,
    MORE,
    NO_TEXT,
    NTH,
    NUMBERS,
    PLACES,
    PLURALS,
    PRESENT,
    READ,
    READ_NTH,
    SAME_TEXT,
    SECOND,
    SHAPE,
    SYSTEM,
    VALUE,
)
from .scenes import COLOUR_NAMES, SHAPES, Object, Picture


class Spelled(str):
    """Text that is read off the picture."""

    __slots__ = ()


Answer = list[str]


@dataclass
class Turn:
    """A question with its answer; ``task`` names it in score tables."""

    question: list[str]
    answer: Answer
    task: str

    @property
    def question_text(self) -> str:
        return "".join(self.question)

    @property
    def answer_text(self) -> str:
        return "".join(self.answer)


def article(words: str) -> str:
    return ("an " if words[0] in "aeio" else "a ") + words


def capital(text: str) -> str:
    return text[0].upper() + text[1:]


def name(obj: Object) -> str:
    return article(" ".join(w for w in (obj.size, obj.colour, obj.shape) if w))


def group(count: int, shape: str, colour: str, size: str = "") -> str:
    if count == 1:
        return article(f"{colour} {shape}")
    return " ".join(w for w in (NUMBERS[count].lower(), size, colour, PLURALS[shape]) if w)


def place(obj: Object, picture: Picture) -> str:
    third = lambda v, low, high: low if v < 1 / 3 else "mid" if v < 2 / 3 else high  # noqa: E731
    return PLACES[third(obj.x / picture.width, "left", "right"), third(obj.y / picture.height, "top", "bottom")]


def listed(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " and " + parts[-1]


def caption(picture: Picture) -> Answer:
    """The one caption of a picture."""
    objects = picture.objects
    if picture.chart:
        chart = picture.chart
        best = chart.labels[chart.values.index(max(chart.values))]
        return [f"A bar chart with {NUMBERS[len(chart.labels)].lower()} bars. The highest is ", Spelled(best), "."]
    if picture.text and not objects:
        return ['The text "', Spelled(picture.text.string), '" on a plain background.']
    if picture.text:
        return [capital(", ".join(name(o) for o in objects)) + ' and the text "', Spelled(picture.text.string), '".']
    if picture.kind == "blank":
        return [EMPTY]
    if picture.kind == "one":
        return [f"{capital(name(objects[0]))} {place(objects[0], picture)}."]
    if picture.kind == "two":
        (sx, sy), (a, b) = picture.scale, objects
        if abs(a.x - b.x) * sx > abs(a.y - b.y) * sy:
            a, b = (a, b) if a.x < b.x else (b, a)
            return [f"{capital(name(a))} left of {name(b)}."]
        a, b = (a, b) if a.y < b.y else (b, a)
        return [f"{capital(name(a))} above {name(b)}."]
    if picture.kind == "same":
        return [capital(group(len(objects), objects[0].shape, objects[0].colour, objects[0].size)) + "."]
    if picture.kind == "groups":
        tally = Counter((o.shape, o.colour) for o in objects)
        order = sorted(tally, key=lambda k: (SHAPES.index(k[0]), COLOUR_NAMES.index(k[1])))
        return [capital(listed([group(tally[k], *k) for k in order])) + "."]
    return [capital(listed([name(o) for o in objects])) + "."]


def ask(rng: random.Random, forms: list[str], *fill: str) -> list[str]:
    """One phrasing of a question; now and then without its end mark, in lower case or in capitals, as people type."""
    text = rng.choice(forms).format(*fill)
    p, mark = rng.random(), text[-1]
    text = text[:-1] + ("" if p < 0.1 else "!" if p < 0.11 else " " + mark if p < 0.12 else mark)
    p = rng.random()
    if p < 0.05 and text.startswith(IMPERATIVES):
        text = "Please " + text[0].lower() + text[1:]
    elif p < 0.1:
        text = text[0].lower() + text[1:]
    elif p < 0.115:
        text = text.upper()
    if "grey" in text and rng.random() < 0.5:
        text = text.replace("grey", "gray")
    return [text]


def describe(rng: random.Random, picture: Picture) -> Turn:
    forms = DESCRIBE[:1] if rng.random() < 0.35 else DESCRIBE
    return Turn(ask(rng, forms), caption(picture), "caption")


def read(rng: random.Random, picture: Picture) -> Turn:
    answer: Answer = [Spelled(picture.text.string)] if picture.text else [NO_TEXT]
    return Turn(ask(rng, READ), answer, "read")


def kind_name(shape: str | None, colour: str | None, plural: bool) -> str:
    noun = (PLURALS[shape] if plural else shape) if shape else ("objects" if plural else "object")
    return f"{colour} {noun}" if colour else noun


def matches(picture: Picture, shape: str | None, colour: str | None) -> int:
    return sum((shape in (None, o.shape)) and (colour in (None, o.colour)) for o in picture.objects)


def count(rng: random.Random, picture: Picture, absent: float = 0.2) -> Turn:
    """How many of a shape, a colour, both, or any; one time in five of something that is not there."""
    if picture.objects and rng.random() >= absent:
        obj = rng.choice(picture.objects)
        shape, colour = rng.choice(
            [
                (obj.shape, obj.colour),
                (obj.shape, None),
                (None, obj.colour),
                (None, None),
                (obj.shape, obj.colour),
                (obj.shape, None),
            ]
        )
    else:
        near = rng.choice(picture.objects) if picture.objects and rng.random() < 0.5 else None
        shape = near.shape if near and rng.random() < 0.5 else rng.choice(SHAPES)
        colour = near.colour if near and rng.random() < 0.5 else rng.choice([None, *COLOUR_NAMES])
    noun = kind_name(shape, colour, plural=True)
    if shape is None and rng.random() < 0.4:
        noun = noun.replace("objects", "shapes")
    return Turn(ask(rng, COUNT, noun), [str(matches(picture, shape, colour))], "count")


def colour_question(rng: random.Random, picture: Picture) -> Turn:
    """The colour of a shape that has one colour, or of one that is not there."""
    known = [s for s in SHAPES if len({o.colour for o in picture.objects if o.shape == s}) == 1]
    shape = rng.choice(known) if known and rng.random() < 0.9 else rng.choice(SHAPES)
    colours = {o.colour for o in picture.objects if o.shape == shape}
    if len(colours) > 1:
        return count(rng, picture)
    answer = colours.pop() if colours else f"There is no {shape}."
    noun = PLURALS[shape] if matches(picture, shape, None) > 1 else shape
    question = ask(rng, COLOUR, noun)
    if noun != shape:
        question = [question[0].replace(" is the ", " are the ").replace("does the", "do the")]
        question = [question[0].replace("What are the colo", "What is the colo")]
    return Turn(question, [answer], "colour")


def shape_question(rng: random.Random, picture: Picture) -> Turn:
    known = [c for c in COLOUR_NAMES if len({o.shape for o in picture.objects if o.colour == c}) == 1]
    if not known:
        return count(rng, picture)
    colour = rng.choice(known)
    shape = next(o.shape for o in picture.objects if o.colour == colour)
    return Turn(ask(rng, SHAPE, colour), [shape], "shape")


def present(rng: random.Random, picture: Picture) -> Turn:
    colour: str | None
    if picture.objects and rng.random() < 0.5:
        obj = rng.choice(picture.objects)
        shape, colour = obj.shape, obj.colour
    else:
        shape, colour = rng.choice(SHAPES), rng.choice(COLOUR_NAMES)
    if rng.random() < 0.4:
        colour = None
    question = ask(rng, PRESENT, kind_name(shape, colour, plural=False))
    if colour == "orange":
        question = [question[0].replace(" a orange", " an orange")]
    return Turn(question, ["Yes." if matches(picture, shape, colour) else "No."], "present")


def chart_turn(rng: random.Random, picture: Picture, task: str | None = None) -> Turn:
    chart = picture.chart
    assert chart is not None
    task = task or rng.choices(["highest", "lowest", "value", "bars"], [25, 22, 45, 8])[0]
    if task == "bars":
        return Turn(ask(rng, COUNT, "bars"), [str(len(chart.labels))], "bars")
    if task == "value":
        i = rng.randrange(len(chart.labels))
        form = rng.choice(VALUE)
        before, after = form.split("{}")
        return Turn([before, chart.labels[i], after], [Spelled(chart.values[i])], "value")
    pick = max if task == "highest" else min
    best = chart.labels[chart.values.index(pick(chart.values))]
    return Turn(ask(rng, HIGHEST if task == "highest" else LOWEST), [Spelled(best)], task)


def single_turn(rng: random.Random, picture: Picture) -> Turn:
    """A question about one picture, of the kinds that fit it."""
    if picture.chart:
        p = rng.random()
        return describe(rng, picture) if p < 0.2 else count(rng, picture) if p < 0.23 else chart_turn(rng, picture)
    makers: list[Callable[[random.Random, Picture], Turn]]
    if picture.text:
        if picture.objects:
            makers, weights = [read, describe, count, colour_question, present], [45, 35, 10, 6, 4]
        else:
            makers, weights = [read, describe, count, colour_question, present], [64, 28, 4, 2, 2]
    elif picture.kind == "blank":
        makers, weights = [describe, read, count, present], [50, 25, 20, 5]
    else:
        makers = [describe, count, colour_question, shape_question, present, read]
        weights = [40, 28, 16, 4, 6, 6]
    return rng.choices(makers, weights)[0](rng, picture)


def pair_turn(rng: random.Random, first: Picture, second: Picture, task: str | None = None) -> Turn:
    """A question about two pictures."""
    both = (first, second)
    if first.text and second.text:
        if task == "same_text" or (task is None and rng.random() < 0.5):
            return Turn(
                ask(rng, SAME_TEXT), ["Yes." if first.text.string == second.text.string else "No."], "same_text"
            )
        i = rng.randrange(2)
        turn = Turn(ask(rng, READ_NTH, NTH[i]), read(rng, both[i]).answer, "read_nth")
        return turn if rng.random() < 0.7 else Turn(ask(rng, DESCRIBE_NTH, NTH[i]), caption(both[i]), "describe_nth")
    if task == "more" or (task is None and rng.random() < 0.65):
        return more(rng, first, second)
    i = rng.randrange(2)
    if rng.random() < 0.5:
        return Turn(ask(rng, DESCRIBE_NTH, NTH[i]), caption(both[i]), "describe_nth")
    shape = rng.choice([None, *[o.shape for o in both[rng.randrange(2)].objects]])
    answer = [str(matches(both[i], shape, None))]
    return Turn(ask(rng, COUNT_NTH, kind_name(shape, None, plural=True), NTH[i]), answer, "count_nth")


def more(rng: random.Random, first: Picture, second: Picture) -> Turn:
    shapes = [o.shape for p in (first, second) for o in p.objects]
    shape = rng.choice(shapes) if shapes and rng.random() < 0.7 else None
    a, b = matches(first, shape, None), matches(second, shape, None)
    answer = FIRST if a > b else SECOND if b > a else BOTH
    return Turn(ask(rng, MORE, kind_name(shape, None, plural=True)), [answer], "more")


def corpus() -> list[str]:
    """Every sentence frame and word of the grammar; the vocabulary's whole words come from here."""
    frames = [
        *DESCRIBE,
        *READ,
        *COUNT,
        *COLOUR,
        *SHAPE,
        *PRESENT,
        *HIGHEST,
        *LOWEST,
        *VALUE,
        *MORE,
        *SAME_TEXT,
        *DESCRIBE_NTH,
        *READ_NTH,
        *COUNT_NTH,
        *SYSTEM,
        *PLACES.values(),
        NO_TEXT,
        EMPTY,
        FIRST,
        SECOND,
        BOTH,
        "Yes.",
        "No.",
    ]
    texts = [f.replace("{}", "x") for f in frames]
    texts += [t[0].lower() + t[1:] for t in texts]
    words = [
        *SHAPES,
        *PLURALS.values(),
        *COLOUR_NAMES,
        *NUMBERS,
        *(n.lower() for n in NUMBERS),
        "object",
        "objects",
        "shapes",
        "Please",
        "small",
        "large",
        "first",
        "second",
        "an",
        "are",
        "do",
        "left of",
        "above",
        "and",
    ]
    texts += [f"x {w}" for w in words] + words
    texts += [
        'The text "x" on a plain background.',
        'A x and the text "x".',
        "An x, a x, two x.",
        "A bar chart with three bars. The highest is x.",
        "There is no circle.",
        "gray",
        "x gray",
        "User:",
        "Assistant:",
        "System:",
    ]
    return texts
