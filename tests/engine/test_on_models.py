"""Small random checkpoints in float32: chunks and caches change no token."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from vlm import VLM, SamplingParams

MODEL_TYPES = ("qwen2_5_vl", "smolvlm")
SHORT = SamplingParams(max_tokens=10, ignore_eos=True)
Start = Callable[..., VLM]


@pytest.fixture(scope="module", params=MODEL_TYPES)
def start(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """Settings -> the model on the CPU with them."""
    from vlm.testing import tiny_checkpoint

    folder: Path = tiny_checkpoint(request.param, tmp_path_factory.mktemp("tiny") / request.param)
    made: list[VLM] = []

    def vlm(**settings: Any) -> VLM:
        made.append(VLM(folder, dtype="float32", device="cpu", max_model_len=1024, **settings))
        return made[-1]

    yield vlm
    for model in made:
        model.close()


def ask(text: str, *images: Any) -> list[dict[str, Any]]:
    parts = [{"type": "image", "image": image} for image in images]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


def conversations() -> list[list[dict[str, Any]]]:
    from vlm.testing.parity import sample_image

    a, b = sample_image(60, 84), sample_image(150, 90, seed=3)
    return [
        ask("Say something."),
        ask("What is this?", a),
        ask("Compare these two, and say which of them is the larger one.", a, b),
        [*ask("What is this?", b), {"role": "assistant", "content": "A thing."}, *ask("Why?")],
    ]


def answers(model: VLM) -> list[tuple[int, ...]]:
    return [o.token_ids for o in model.chat_many(conversations(), SHORT, on_error="raise")]


@pytest.mark.parametrize("max_batch_tokens", [1, 5, 37])
def test_chunked_is_whole(start: Start, max_batch_tokens: int) -> None:
    whole = start()
    chunked = start(max_batch_tokens=max_batch_tokens)
    assert answers(chunked) == answers(whole)
    assert whole.metrics().prefill_steps <= 4 < chunked.metrics().prefill_steps
