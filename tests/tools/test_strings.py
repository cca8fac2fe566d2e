"""What is printed: evaluation strings and seeds are never trained on, and every string can be read."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from embedded import heldout, pool, strings
from embedded.fonts import Face
from embedded.tokenizer import Codec


@pytest.mark.parametrize("kind", strings.MAKERS)
def test_training_and_evaluation_share_no_string(kind: str) -> None:
    rng = random.Random(1)
    trained = {strings.draw_string(rng, kind, evaluation=False) for _ in range(2000)}
    evaluated = {strings.draw_string(rng, kind, evaluation=True) for _ in range(500)}
    assert not trained & evaluated
    assert not any(map(strings.held_out, trained))
    assert all(map(strings.held_out, evaluated))
    assert max(map(len, trained | evaluated)) <= strings.MAX_CHARS


def test_held_out_questions_print_held_out_strings(face: Face) -> None:
    for task in ("word", "random", "number", "line", "text_caption", "mixed_caption", "same_text", "read_nth"):
        for item in heldout.items(task, 10, [face]):
            for picture in item.pictures:
                assert picture.text is not None
                assert strings.held_out(picture.text.string)


def test_a_chunk_prints_no_held_out_string(chunk: dict[str, Any]) -> None:
    """Read back from its edges' classes, as the auxiliary loss sees them; a space has no class."""
    texts = {"".join(pool.CHARACTERS[c - 1] for c in row if c) for row in chunk["classes"]} - {""}
    whole = [t for t in texts if len(t) < 9]  # most of these have no space
    assert len(whole) > 20
    codec, answers = Codec(), []
    for row in chunk["one"].view(np.uint16).reshape(-1, pool.LENGTH_ONE):
        said = [int(t) & 0x7FFF for t in row if t & pool.SAID]
        answers += codec.tokenizer.decode(said, skip_special_tokens=False).split("<end_of_utterance>")
    read = {answer for answer in answers if answer.replace(" ", "") in texts}
    assert len(read) > 20
    assert not any(map(strings.held_out, read))


def test_held_out_seeds_are_no_training_seeds() -> None:
    used = {heldout.SEED + i for i in range(len(heldout.TASKS))}
    chunks = {1 * 1_000_003 + number for number in range(100_000)}
    assert not used & chunks


def test_a_string_without_a_right_case_is_not_printed() -> None:
    assert not strings.readable("xos")
    assert not strings.readable("W-C.")
    assert strings.readable("xor")


def test_near_miss_changes_one_character() -> None:
    rng = random.Random(2)
    for text in ("Gate 26", "R7kQ2m", "ab"):
        other = strings.near_miss(rng, text)
        assert len(other) == len(text)
        assert sum(a != b for a, b in zip(text, other, strict=True)) == 1
