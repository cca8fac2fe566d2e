"""What the second stage of training shows and asks more of."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from embedded import grammar, pool
from embedded.fonts import Face
from embedded.scenes import Picture

TURNS, PAIRS = 1200, 300
Asked = list[tuple[Picture, grammar.Turn]]


def kind_of(picture: Picture) -> str:
    """Which share of a Mixture the picture belongs to."""
    if picture.chart:
        return "charts"
    return ("mixed" if picture.objects else "texts") if picture.text else "scenes"


def asked(face: Face, mixture: str) -> Asked:
    """Pictures of a mixture, each with one question."""
    rng, maker = random.Random(11), pool.Maker([face], seed=1, mixture=pool.MIXTURES[mixture])
    pictures = (maker.picture(rng) for _ in range(TURNS))
    return [(picture, maker.turn(rng, picture)) for picture in pictures]


def share(turns: Asked, kind: str, task: str) -> float:
    """Of the questions about pictures of that kind, the part of that task."""
    found = [turn.task == task for picture, turn in turns if kind_of(picture) == kind]
    return sum(found) / len(found)


def loud(turns: Asked) -> float:
    """Part of the questions in capitals, of those that quote nothing printed."""
    said = [turn.question_text for _, turn in turns if len(turn.question) == 1]
    return sum(text.isupper() for text in said) / len(said)


@pytest.fixture(scope="module")
def first(face: Face) -> Asked:
    return asked(face, "first")


@pytest.fixture(scope="module")
def second(face: Face) -> Asked:
    return asked(face, "second")


@pytest.mark.parametrize("mixture", ["first", "second"])
def test_pictures_come_in_the_shares_that_are_said(mixture: str, first: Asked, second: Asked) -> None:
    said = pool.MIXTURES[mixture]
    want = {"scenes": said.scenes, "texts": said.texts, "mixed": said.mixed}
    want["charts"] = 1 - sum(want.values())
    turns = {"first": first, "second": second}[mixture]
    for kind, wanted in want.items():
        assert abs(sum(kind_of(picture) == kind for picture, _ in turns) / TURNS - wanted) < 0.05, kind


def test_the_second_stage_asks_more_for_what_came_out_weakest(first: Asked, second: Asked) -> None:
    said = pool.MIXTURES["second"]
    assert share(second, "charts", "value") > said.value > share(first, "charts", "value") + 0.15
    assert share(second, "scenes", "count") > said.count > share(first, "scenes", "count") + 0.03
    assert loud(second) > loud(first) + 0.6 * said.shout


def pairs(face: Face, mixture: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[bool, str]]:
    """Whether a pair is of texts, and what is asked about it."""
    real, seen = grammar.pair_turn, []

    def watched(rng: random.Random, one: Picture, two: Picture, task: str | None = None) -> grammar.Turn:
        turn = real(rng, one, two, task)
        seen.append((one.text is not None and two.text is not None, turn.task))
        return turn

    with monkeypatch.context() as patch:
        patch.setattr(grammar, "pair_turn", watched)
        maker, rng = pool.Maker([face], seed=1, mixture=pool.MIXTURES[mixture]), random.Random(12)
        for _ in range(PAIRS):
            maker.pair(rng)
            yield seen[-1]


def test_the_second_stage_compares_more_texts(face: Face, monkeypatch: pytest.MonkeyPatch) -> None:
    compared = {}
    for mixture in ("first", "second"):
        made = list(pairs(face, mixture, monkeypatch))
        texts = [task for text, task in made if text]
        assert abs(len(texts) / PAIRS - (1 - pool.MIXTURES[mixture].scene_pairs)) < 0.08
        compared[mixture] = texts.count("same_text") / len(texts)
    assert compared["second"] > pool.MIXTURES["second"].same > compared["first"]
