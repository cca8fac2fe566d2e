"""Small random checkpoints in float32: chunks and caches change no token."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from vlm import VLM, PromptError, SamplingParams

MODEL_TYPES = ("qwen2_5_vl", "smolvlm")
SHORT = SamplingParams(max_tokens=10, ignore_eos=True)
COLD: dict[str, Any] = {"enable_prefix_cache": False, "image_cache_gib": 0}
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


def test_cached_is_cold(start: Start) -> None:
    cold, cached = start(**COLD), start()
    first = answers(cached)
    assert answers(cached) == first == answers(cold)
    metrics = cached.metrics()
    assert metrics.prefix_hits >= 4
    assert metrics.prefix_tokens > metrics.prompt_tokens / 3
    assert cold.metrics().prefix_hits == 0


def test_the_next_turn_starts_behind_the_last_answer(start: Start) -> None:
    from vlm.testing.parity import sample_image

    cold, cached = start(**COLD), start()
    messages = ask("What is this, and what is it good for?", sample_image(60, 84))
    for turn in range(3):
        answer = cached.chat(messages, SHORT)
        assert answer.token_ids == cold.chat(messages, SHORT).token_ids
        messages += [{"role": "assistant", "content": answer.text}, *ask(f"And then, number {turn}?")]
    metrics = cached.metrics()
    assert metrics.prefix_hits == 2
    assert metrics.images == 1  # the picture lies in blocks that the later turns found


def test_other_pictures_under_one_text_get_their_own_answers(start: Start) -> None:
    from vlm.testing.parity import sample_image

    pictures = [sample_image(60, 84, seed=seed) for seed in range(4)]
    cold, cached = start(**COLD), start()
    for _ in range(2):
        for picture in pictures:
            wanted = cold.caption(picture, params=SHORT).token_ids
            assert cached.caption(picture, params=SHORT).token_ids == wanted


def test_a_small_cache_with_many_prompts_stays_right(start: Start) -> None:
    cold, small = start(**COLD), start(kv_cache_gib=2**-13, max_num_seqs=4)  # 9 or 17 blocks
    wanted = answers(cold)
    for _ in range(3):
        assert answers(small) == wanted


def test_a_picture_that_comes_again_is_not_encoded_again(start: Start) -> None:
    from vlm.testing.parity import sample_image

    a, b = sample_image(60, 84), sample_image(150, 90, seed=3)
    prompts = [ask("What is this?", a), ask("Compare.", b, a), ask("Compare.", a, b), ask("Why?", b)]
    cold, known = start(**COLD), start(enable_prefix_cache=False)
    for messages in prompts:
        assert known.chat(messages, SHORT).token_ids == cold.chat(messages, SHORT).token_ids
    metrics = known.metrics()
    assert (metrics.images, metrics.feature_hits) == (2, 4)
    assert metrics.feature_bytes > 0
    assert (cold.metrics().images, cold.metrics().feature_bytes) == (6, 0)


def test_one_picture_at_two_sizes_is_two_pictures(start: Start) -> None:
    from vlm.testing.parity import sample_image

    picture = sample_image(60, 84)
    model = start(enable_prefix_cache=False)
    for image in (picture, picture.resize((120, 168)), picture):
        model.caption(image, params=SHORT)
    assert model.metrics().images == 2


def test_a_negative_image_cache_is_refused(start: Start) -> None:
    for size in (-0.1, float("nan")):
        with pytest.raises(PromptError, match="image_cache_gib"):
            start(image_cache_gib=size)
