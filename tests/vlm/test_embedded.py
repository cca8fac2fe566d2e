"""The embedded model through the public API: right about the bundled pictures, and the same as transformers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

PICTURES = Path(__file__).resolve().parents[2] / "examples" / "pictures"
ANSWERS = json.loads((PICTURES / "answers.json").read_text())
NAMES = tuple(ANSWERS["pictures"])
QUESTIONS = [
    *(((name,), q, a) for name, known in ANSWERS["pictures"].items() for q, a in known["questions"].items()),
    *((tuple(pair["pictures"]), q, a) for pair in ANSWERS["pairs"] for q, a in pair["questions"].items()),
]


@pytest.fixture(scope="module")
def embedded() -> Iterator[Any]:
    from vlm import VLM
    from vlm.loading.folder import EMBEDDED

    with VLM(EMBEDDED, device="cpu", dtype="float32") as model:
        yield model


def opened(name: str) -> Image.Image:
    with Image.open(PICTURES / name) as image:
        return image.convert("RGB")


def asked(pictures: tuple[str, ...], question: str) -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = [{"type": "image", "path": str(PICTURES / name)} for name in pictures]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": question}]}]


def test_twelve_pictures_of_many_sizes_are_bundled() -> None:
    files = {p.name for p in PICTURES.glob("*.png")}
    assert files == set(NAMES)
    assert len(files) == 12
    sizes = {opened(name).size for name in NAMES}
    assert len(sizes) > 5
    assert {edge for size in sizes for edge in size} <= set(range(192, 601))
    assert sum((PICTURES / name).stat().st_size for name in NAMES) < 1_000_000


def test_captions_are_right_and_the_same_one_by_one(embedded: Any) -> None:
    together = list(embedded.caption_many([PICTURES / name for name in NAMES]))
    assert [o.text for o in together] == [ANSWERS["pictures"][name]["caption"] for name in NAMES]
    alone = [embedded.caption(PICTURES / name) for name in NAMES[::3]]
    assert [o.token_ids for o in alone] == [o.token_ids for o in together[::3]]
    assert {o.finish_reason for o in together} == {"stop"}


def test_questions_are_answered_right(embedded: Any) -> None:
    outputs = embedded.chat_many([asked(pictures, question) for pictures, question, _ in QUESTIONS])
    given = [(pictures, question, o.text) for (pictures, question, _), o in zip(QUESTIONS, outputs, strict=True)]
    assert given == QUESTIONS


@pytest.mark.parametrize("prompt", ["describe this image", "Describe this image!", "Describe the picture."])
def test_the_caption_does_not_hang_on_the_wording(prompt: str, embedded: Any) -> None:
    name = "circle_and_square.png"
    assert embedded.caption(PICTURES / name, prompt).text == ANSWERS["pictures"][name]["caption"]


@pytest.fixture(scope="module")
def reference() -> tuple[Any, Any]:
    """transformers' processor and model, from the same folder."""
    import torch
    from transformers import AutoModelForImageTextToText, AutoProcessor

    from vlm.loading.folder import EMBEDDED

    model = AutoModelForImageTextToText.from_pretrained(EMBEDDED, dtype=torch.float32).eval()
    return AutoProcessor.from_pretrained(EMBEDDED), model


@pytest.mark.parametrize("case", range(len(NAMES) + 2))
def test_greedy_tokens_are_those_of_transformers(case: int, embedded: Any, reference: tuple[Any, Any]) -> None:
    import torch

    prompts = [*(((name,), "Describe this image.") for name in NAMES), *((p, q) for p, q, _ in QUESTIONS[-2:])]
    pictures, question = prompts[case]
    processor, model = reference
    content = [*({"type": "image"} for _ in pictures), {"type": "text", "text": question}]
    text = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    images = [opened(name) for name in pictures]
    inputs = processor(text=text, images=[images], return_tensors="pt")
    with torch.no_grad():
        wanted = model.generate(**inputs, do_sample=False, max_new_tokens=64)[0, inputs["input_ids"].shape[1] :]
    given = embedded.chat(asked(pictures, question)).token_ids
    assert list(given) == wanted.tolist()
