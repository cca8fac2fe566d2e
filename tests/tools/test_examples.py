"""The bundled pictures are what tools/make_pictures.py draws."""

from __future__ import annotations

import json
import math
from pathlib import Path

import make_pictures
import numpy as np
import pytest
from embedded import drawing
from embedded.fonts import Face, default_folders, find_faces
from embedded.scenes import Picture
from PIL import Image


@pytest.fixture(scope="module")
def faces() -> dict[str, Face]:
    try:
        found = {face.name: face for face in find_faces(default_folders())}
    except FileNotFoundError as error:
        pytest.skip(str(error))
    if not {"DejaVuSans", "DejaVuSans-Bold", "DejaVuSansMono", "DejaVuSerif"} <= found.keys():
        pytest.skip("the pictures are printed in DejaVu, which is not installed")
    return found


def away(picture: Picture, path: Path) -> float:
    """What differs from the file, in parts of what stands on the picture; infinite for another size."""
    made, empty = (np.asarray(image, dtype=float) for image in (drawing.draw(picture), drawing.backdrop(picture)))
    with Image.open(path) as image:
        there = np.asarray(image.convert("RGB"), dtype=float)
    return float(np.abs(there - made).sum() / np.abs(there - empty).sum()) if there.shape == made.shape else math.inf


def test_the_bundled_pictures_are_drawn_again(faces: dict[str, Face]) -> None:
    """Other releases of Pillow and FreeType may smooth edges in another way."""
    made = make_pictures.examples(faces)
    assert {p.name for p in make_pictures.FOLDER.glob("*.png")} == made.keys()
    errors = {name: away(example.picture, make_pictures.FOLDER / name) for name, example in made.items()}
    assert max(errors.values()) < 0.05, errors


def test_the_answers_are_written_again(faces: dict[str, Face]) -> None:
    text = json.dumps(make_pictures.answers(make_pictures.examples(faces)), indent=1, ensure_ascii=False)
    assert (make_pictures.FOLDER / "answers.json").read_text() == text + "\n"
