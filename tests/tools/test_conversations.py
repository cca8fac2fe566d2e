"""Training tokens are those that the shipped tokenizer and chat template give."""

from __future__ import annotations

import json
import random
from pathlib import Path

import jinja2
import pytest
from embedded import grammar, heldout, phrases, scenes
from embedded.fonts import Face
from embedded.grammar import Spelled, Turn
from embedded.tokenizer import IMAGE, IMAGE_BLOCK, Codec, build_tokenizer
from tokenizers import Tokenizer


def test_tokenizer_is_the_shipped_one(assets: Path) -> None:
    shipped = Tokenizer.from_file(str(assets / "tokenizer.json"))
    assert json.loads(build_tokenizer().to_str()) == json.loads(shipped.to_str())


@pytest.mark.parametrize("text", ["Describe this image.", "R7k?", "  two  spaces\n", "naïve £9 — 東京 🙂"])
def test_tokenizer_round_trip(text: str, assets: Path) -> None:
    shipped = Tokenizer.from_file(str(assets / "tokenizer.json"))
    assert shipped.decode(shipped.encode(text).ids, skip_special_tokens=False) == text


def test_prompts_and_answers_are_the_templates(assets: Path) -> None:
    template = jinja2.Environment().from_string((assets / "chat_template.jinja").read_text())
    turns = [Turn(["Read the text."], [Spelled("Gate 26")], "read"), Turn(["How many circles?"], ["3"], "count")]
    messages: list[dict[str, object]] = [{"role": "system", "content": "Answer briefly."}]
    for i, turn in enumerate(turns):
        pictures = [{"type": "image"}] * (2 if i == 0 else 0)
        messages += [
            {"role": "user", "content": [*pictures, {"type": "text", "text": turn.question_text}]},
            {"role": "assistant", "content": turn.answer_text},
        ]
    text = template.render(messages=messages).replace(IMAGE, IMAGE_BLOCK)
    codec = Codec()
    ids, said = codec.conversation(turns, 2, system="Answer briefly.")
    whole = codec.tokenizer.decode(ids, skip_special_tokens=False)
    assert whole + "\n" == text
    spoken = [t for t, s in zip(ids, said, strict=True) if s]
    assert codec.tokenizer.decode(spoken, skip_special_tokens=False) == "Gate 26<end_of_utterance>3<end_of_utterance>"


def test_a_prompt_is_what_the_template_and_the_tokenizer_give(assets: Path) -> None:
    template = jinja2.Environment().from_string((assets / "chat_template.jinja").read_text())
    codec = Codec()
    for question in ("Describe this image.", "describe this image", "What color is the ring?", "WHAT IS IT"):
        content = [{"type": "image"}, {"type": "text", "text": question}]
        text = template.render(messages=[{"role": "user", "content": content}], add_generation_prompt=True)
        assert codec.prompt(question, 1) == codec.tokenizer.encode(text.replace(IMAGE, IMAGE_BLOCK)).ids


def test_the_usual_question_and_its_variants_are_trained() -> None:
    rng = random.Random(1)
    asked = {grammar.ask(rng, phrases.DESCRIBE[:1])[0] for _ in range(3000)}
    variants = {"Describe this image", "describe this image.", "describe this image", "DESCRIBE THIS IMAGE."}
    assert asked >= variants | {"Describe this image.", "Describe this image!", "Please describe this image."}


@pytest.mark.parametrize("task", heldout.TASKS)
def test_every_task_has_an_answer_within_the_limit(task: str, face: Face) -> None:
    codec = Codec()
    for item in heldout.items(task, 5, [face]):
        assert item.answer
        assert len(codec.tokenizer.encode(item.answer).ids) < 48
        assert len(item.pictures) == (2 if task in ("more", "same_text", "read_nth") else 1)


def test_counts_are_of_what_is_asked() -> None:
    rng = random.Random(7)
    for _ in range(50):
        picture = scenes.scene(rng, "several")
        shape, colour = picture.objects[0].shape, picture.objects[0].colour
        same = [o for o in picture.objects if o.shape == shape]
        assert grammar.matches(picture, shape, None) == len(same)
        assert grammar.matches(picture, shape, colour) == sum(o.colour == colour for o in same)
        assert grammar.matches(picture, None, None) == len(picture.objects)
