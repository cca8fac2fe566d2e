"""Pictures: the same for the same seed, true to their captions, and drawn on the GPU as Pillow draws them."""

from __future__ import annotations

import random
import re
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from embedded import charts, drawing, grammar, heldout, phrases, pool, render, scenes
from embedded.fonts import Face
from embedded.scenes import COLOUR_NAMES, SIDE, Picture


def components(mask: np.ndarray) -> list[tuple[float, float]]:
    """Centres (x, y) of the connected areas of a boolean picture; single stray pixels do not count."""
    left, centres = {(int(y), int(x)) for y, x in zip(*np.nonzero(mask), strict=True)}, []
    while left:
        area, edge = [], [left.pop()]
        while edge:
            y, x = edge.pop()
            area.append((x, y))
            near = {(y + dy, x + dx) for dy in (-1, 0, 1) for dx in (-1, 0, 1)} & left
            left -= near
            edge += near
        if len(area) > 1:
            centres.append((sum(x for x, _ in area) / len(area), sum(y for _, y in area) / len(area)))
    return centres


def areas(picture: Picture) -> dict[str, list[tuple[float, float]]]:
    """Colour name -> centres of what has that colour in the drawn picture."""
    pixels = np.asarray(drawing.draw(picture, smooth=False))
    palette = {obj.colour: obj.rgb for obj in picture.objects}
    return {name: components((pixels == np.array(rgb)).all(-1)) for name, rgb in palette.items()}


def said_counts(caption: str) -> Counter[str]:
    """Colour name -> number of shapes that a caption tells of."""
    found: Counter[str] = Counter()
    numbers = {word.lower(): n for n, word in enumerate(phrases.NUMBERS)} | {"a": 1, "an": 1}
    form = rf"\b({'|'.join(numbers)}) (?:small |large )?({'|'.join(COLOUR_NAMES)}) "
    for number, colour in re.findall(form, caption.lower()):
        found[colour] += numbers[number]
    return found


@pytest.mark.parametrize("kind", ["one", "two", "same", "groups", "several"])
def test_captions_count_what_is_drawn(kind: str) -> None:
    rng = random.Random(kind)
    for _ in range(12):
        picture = scenes.scene(rng, kind)
        drawn = {colour: len(centres) for colour, centres in areas(picture).items()}
        assert said_counts("".join(grammar.caption(picture))) == drawn


def test_captions_say_which_of_two_is_left_or_above() -> None:
    rng, seen = random.Random(3), Counter[str]()
    while min(seen["left of"], seen["above"]) < 8:
        picture = scenes.scene(rng, "two")
        found = areas(picture)
        if len(found) < 2:
            continue
        caption = "".join(grammar.caption(picture)).lower()
        first, second = re.findall("|".join(COLOUR_NAMES), caption)
        axis, word = (0, "left of") if "left of" in caption else (1, "above")
        assert found[first][0][axis] < found[second][0][axis], caption
        seen[word] += 1


def test_shapes_lie_inside_the_picture_and_apart() -> None:
    rng = random.Random(4)
    for _ in range(40):
        picture = scenes.scene(rng, "groups")
        sx, sy = picture.scale
        for obj in picture.objects:
            x, y = obj.x * sx, obj.y * sy
            assert 8 < x < SIDE - 8
            assert 8 < y < SIDE - 8


def test_bars_are_as_high_as_their_values(face: Face) -> None:
    rng = random.Random(5)
    for _ in range(20):
        chart = charts.chart_picture(rng, [face]).chart
        assert chart is not None
        heights = [bottom - top for _, top, _, bottom in chart.bars]
        assert heights.index(max(heights)) == chart.values.index(max(chart.values))
        assert heights.index(min(heights)) == chart.values.index(min(chart.values))
        scale = max(heights) / max(chart.values)
        assert np.allclose(heights, np.array(chart.values) * scale)


def test_a_chunk_depends_on_its_number_and_the_seed(face: Face, chunk: dict[str, Any]) -> None:
    again = pool.Maker([face], seed=1).chunk(5, singles=60, pairs=6)
    assert all(np.array_equal(chunk[name], again[name]) for name in chunk)
    for seed, number in ((1, 6), (2, 5)):
        other = pool.Maker([face], seed=seed).chunk(number, singles=60, pairs=6)
        assert not np.array_equal(chunk["records"], other["records"])


def test_held_out_pictures_are_the_same_every_time(face: Face) -> None:
    for task in ("caption", "line", "value", "same_text"):
        first, second = (list(heldout.items(task, 3, [face])) for _ in range(2))
        assert [(i.question, i.answer) for i in first] == [(i.question, i.answer) for i in second]
        pairs = zip(first, second, strict=True)
        assert all(x.tobytes() == y.tobytes() for a, b in pairs for x, y in zip(a.images(), b.images(), strict=True))


def drawn_on_device(picture: Picture) -> np.ndarray:
    """(S, S, 3) levels: the packed picture as the training renderer draws it, without noise or blur."""
    packer = pool.Packer(1)
    packer.add(0, picture)
    strips = torch.frombuffer(bytearray(b"".join(packer.strips) or b"\0"), dtype=torch.uint8)
    plain = torch.tensor([[0.3, 1, 0, 0.5, 0.5, 1, 0, 0]])
    renderer = render.Renderer("cpu", lambda f: f)
    records, offsets = torch.from_numpy(packer.records), torch.from_numpy(packer.offsets)
    pixels = renderer.draw(records, offsets, strips, plain, torch.zeros(1, 3, SIDE, SIDE))
    return ((pixels[0].permute(1, 2, 0) + 1) * 127.5).numpy()


@pytest.mark.parametrize("kind", ["scene", "text", "mixed", "chart"])
def test_training_draws_as_pillow_does(kind: str, face: Face) -> None:
    """Else the model would be trained on other pictures than it meets. Only edges differ."""
    rng = random.Random(kind)
    for _ in range(6):
        if kind == "scene":
            picture = scenes.scene(rng, "groups")
        elif kind == "chart":
            picture = charts.chart_picture(rng, [face])
        else:
            picture = scenes.text_picture(rng, "Handed 42", [face], shapes=1 if kind == "mixed" else 0)
        want, empty = (
            np.asarray(drawing.squeeze(image), dtype=np.float32)
            for image in (drawing.draw(picture), drawing.backdrop(picture))
        )
        away = np.abs(drawn_on_device(picture) - want)
        assert away.sum() < 0.3 * np.abs(want - empty).sum()  # a shift by one pixel gives 0.35 to 0.7


def test_patch_labels_name_the_shape_that_is_there() -> None:
    picture = Picture("one", 192, 192, (255, 255, 255), (255, 255, 255))
    picture.objects.append(scenes.Object("square", "blue", (0, 0, 255), 60.0, 120.0, 30.0, 0.0))
    packer = pool.Packer(1)
    packer.add(0, picture)
    arrays = (torch.from_numpy(a) for a in (packer.records, packer.edges, packer.classes))
    labels = render.Renderer("cpu", lambda f: f).label(*arrays).view(16, 16, 3)
    square = scenes.SHAPES.index("square") * len(COLOUR_NAMES) + COLOUR_NAMES.index("blue")
    assert (labels[10, 5] == 1 + len(pool.CHARACTERS) + square).all()  # the patch of (60..72, 120..132)
    assert (labels[2, 12] == 0).all()
