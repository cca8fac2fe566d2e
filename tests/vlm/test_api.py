"""The public API on small random checkpoints: right tokens, exactly one output an input, and nothing left running."""

from __future__ import annotations

import asyncio
import gc
import io
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from vlm import (
    VLM,
    AttentionBackendError,
    CheckpointError,
    ContextLengthError,
    Image,
    ImageDecodeError,
    Output,
    PromptError,
    SamplingParams,
    UnsupportedModelError,
    VLMError,
)
from vlm.attention.spec import Decision

MODEL_TYPES = ("qwen2_5_vl", "smolvlm", "idefics3")
SHORT = SamplingParams(max_tokens=12, ignore_eos=True)
Models = Callable[..., Any]
Picture = Callable[..., Any]


def ask(text: str, *images: Any) -> list[dict[str, Any]]:
    parts = [{"type": "image", "image": image} for image in images]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


def mixed(picture: Picture) -> list[list[dict[str, Any]]]:
    """Text only, one picture, two, text between them, a system message, an earlier answer."""
    a, b = picture(60, 84), picture(150, 90, seed=3)
    between = [{"type": "text", "text": "First "}, {"type": "image", "image": a}, {"type": "text", "text": " then "}]
    return [
        ask("Say something."),
        ask("What is this?", a),
        ask("Compare.", a, b),
        [{"role": "user", "content": [*between, {"type": "image", "image": b}, {"type": "text", "text": "which?"}]}],
        [{"role": "system", "content": "Be brief."}, *ask("Describe.", b)],
        [*ask("What is this?", b), {"role": "assistant", "content": "A thing."}, *ask("Why?")],
    ]


def wait_until_idle(model: Any, seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while (m := model.metrics()).running or m.waiting:
        assert time.monotonic() < end, m
        time.sleep(0.005)


def reference_answer(reference: Any, prompt: Any, count: int) -> list[int]:
    """Greedy tokens of transformers' generate; as with us, the image placeholder is no answer."""
    generated = reference.model.generate(
        **reference.arguments(prompt),
        max_new_tokens=count,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        suppress_tokens=[reference.image_token],
    )
    tokens: list[int] = generated[0, len(prompt.token_ids) :].tolist()
    return tokens


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_many_conversations_answer_as_transformers_does(
    models: Models, tiny: Any, picture: Picture, model_type: str, device: str
) -> None:
    from vlm.testing.greedy import Prompt
    from vlm.testing.reference import Reference

    model = models(model_type, device)
    conversations = mixed(picture)
    outputs = list(model.chat_many(conversations, SHORT, on_error="raise"))
    reference = Reference(tiny(model_type), model_type)
    for messages, output in zip(conversations, outputs, strict=True):
        request = model._preparer.prepare(0, messages, model._preparer.resolve(SHORT)).request
        prompt = Prompt(request.token_ids, request.images, request.positions, request.next_position)
        assert list(output.token_ids) == reference_answer(reference, prompt, 12)
        assert output.usage.prompt_tokens == len(request.token_ids)
        assert output.finish_reason == "length"


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_a_batch_gives_what_each_gives_alone(models: Models, picture: Picture, model_type: str, device: str) -> None:
    model = models(model_type, device)
    conversations = mixed(picture) * 3
    together = [o.token_ids for o in model.chat_many(conversations, SHORT)]
    alone = [model.chat(messages, SHORT).token_ids for messages in mixed(picture)]
    assert together == alone * 3


def test_each_prompt_gets_its_own_picture(models: Models) -> None:
    from PIL import Image as Pictures

    colours = [(i * 40 % 256, i * 90 % 256, i * 140 % 256) for i in range(12)]
    model = models()
    images = [Pictures.new("RGB", (48, 48), colour) for colour in colours]
    alone = [model.caption(image, params=SHORT).token_ids for image in images]
    order = [7, 3, 11, 0, 5, 9, 1, 10, 2, 8, 4, 6]
    together = list(model.caption_many([images[i] for i in order], params=SHORT))
    assert [o.token_ids for o in together] == [alone[i] for i in order]
    assert len(set(alone)) > 1


def test_a_caption_asks_to_describe_the_image(models: Models, picture: Picture) -> None:
    model, image = models(), picture(60, 84)
    assert (
        model.caption(image, params=SHORT).token_ids == model.chat(ask("Describe this image.", image), SHORT).token_ids
    )
    asked = model.caption(image, "What colour is it?", SHORT)
    assert asked.token_ids == model.chat(ask("What colour is it?", image), SHORT).token_ids


def test_captions_end_after_256_tokens_unless_told(models: Models, picture: Picture) -> None:
    output = models().caption(picture(48, 48), params=SamplingParams(ignore_eos=True))
    assert len(output.token_ids) == 256
    assert output.finish_reason == "length"


def test_the_output_says_what_the_model_saw(models: Models, picture: Picture) -> None:
    model = models("qwen2_5_vl")
    output = model.caption(picture(100, 60), params=SHORT)
    assert output.source_sizes == ((100, 60),)
    assert output.image_sizes == ((112, 56),)
    assert output.usage.image_tokens == 4 * 2
    assert output.usage.completion_tokens == 12
    assert 0 < output.metrics.time_to_first_token <= output.metrics.total_time


def test_the_output_says_that_there_were_more_frames(models: Models, picture: Picture) -> None:
    buffer = io.BytesIO()
    frames = [picture(48, 48, seed=i) for i in range(3)]
    frames[0].save(buffer, "TIFF", save_all=True, append_images=frames[1:])
    model, data = models(), buffer.getvalue()
    first, last = (model.caption(Image.open(data, frame=i), params=SHORT) for i in (0, 2))
    assert first.source_frames == last.source_frames == (3,)
    assert last.token_ids == model.caption(frames[2], params=SHORT).token_ids != first.token_ids
    assert model.chat(ask("x", data, frames[0]), SHORT).source_frames == (3, 1)


def test_images_come_in_every_form(models: Models, picture: Picture, tmp_path: Path) -> None:
    import base64

    import numpy as np
    import torch

    image, model = picture(60, 84), models()
    path = tmp_path / "p.png"
    image.save(path)
    data = path.read_bytes()
    uri = "data:image/png;base64," + base64.b64encode(data).decode()
    array = np.array(image)
    forms = [image, path, str(path), data, io.BytesIO(data), uri, array, torch.from_numpy(array)]
    outputs = list(model.caption_many(forms, params=SHORT, on_error="raise"))
    assert len({o.token_ids for o in outputs}) == 1


def test_a_bad_input_in_the_middle_harms_nobody(models: Models, picture: Picture, tmp_path: Path) -> None:
    model, good = models(), picture(60, 84)
    bad = tmp_path / "bad.jpg"
    bad.write_bytes(b"not a picture")
    inputs = [good, bad, good, tmp_path / "missing.png", "no such file or url", good]
    outputs = list(model.caption_many(inputs, params=SHORT))
    assert [o.index for o in outputs] == list(range(6))
    assert [type(o.error).__name__ for o in outputs[1:5:2]] == ["ImageDecodeError", "FileNotFoundError"]
    assert "bad.jpg" in str(outputs[1].error)
    assert outputs[4].error is not None
    assert len({outputs[i].token_ids for i in (0, 2, 5)}) == 1
    assert all(o.text == "" and o.finish_reason == "error" for o in outputs if o.error)


def test_raise_stops_there_and_the_model_goes_on(models: Models, picture: Picture, tmp_path: Path) -> None:
    model, good = models(), picture(60, 84)
    (tmp_path / "bad.jpg").write_bytes(b"no")
    outputs = model.caption_many(
        itertools.chain([good, tmp_path / "bad.jpg"], itertools.repeat(good)), params=SHORT, on_error="raise"
    )
    assert next(outputs).error is None
    with pytest.raises(ImageDecodeError, match=r"bad\.jpg"):
        next(outputs)
    wait_until_idle(model)
    assert model.caption(good, params=SHORT).error is None


def test_a_prompt_beyond_the_context_fails_alone(models: Models, picture: Picture) -> None:
    model = models()
    conversations = [ask("short"), ask("long " * 2000), ask("with", picture(60, 84))]
    outputs = list(model.chat_many(conversations, SHORT))
    assert [o.error is None for o in outputs] == [True, False, True]
    assert isinstance(outputs[1].error, ContextLengthError)
    assert model.chat(ask("short"), SHORT).token_ids == outputs[0].token_ids


def test_an_answer_ends_with_the_context(models: Models) -> None:
    prompt = ask("word " * 240)
    model = models()
    used = model.count_tokens(prompt).prompt_tokens
    assert used < 1024
    output = model.chat(prompt, SamplingParams(max_tokens=5000, ignore_eos=True))
    assert output.finish_reason == "length"
    assert used + len(output.token_ids) == 1024


def test_inputs_are_pulled_lazily(models: Models, picture: Picture) -> None:
    pulled = 0

    def endless() -> Iterator[Any]:
        nonlocal pulled
        while True:
            pulled += 1
            yield picture(48, 48)

    model = models()
    outputs = model.caption_many(endless(), params=SHORT)
    assert pulled == 0
    for _ in range(3):
        next(outputs)
    assert pulled <= 3 + 2 * 16
    outputs.close()
    wait_until_idle(model)


def test_as_completed_gives_every_input_once(models: Models, picture: Picture) -> None:
    outputs = list(models().caption_many([picture(48, 48)] * 20, params=SHORT, ordered=False))
    assert sorted(o.index for o in outputs) == list(range(20))


def test_a_single_image_for_many_is_refused(models: Models, picture: Picture) -> None:
    for single in ("picture.png", Path("picture.png"), picture(4, 4)):
        with pytest.raises(PromptError, match="iterable of images"):
            models().caption_many(single)


def test_stream_pieces_make_the_answer(models: Models, picture: Picture) -> None:
    model, messages = models(), ask("What is this?", picture(60, 84))
    whole = model.chat(messages, SHORT)
    chunks = list(model.stream(messages, SHORT))
    assert "".join(c.text for c in chunks) == whole.text
    assert tuple(t for c in chunks for t in c.token_ids) == whole.token_ids
    assert [c.finish_reason for c in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].finish_reason == "length"
    assert all(c.text for c in chunks[:-1])


def test_stream_raises_before_anything_streams(models: Models) -> None:
    with pytest.raises(FileNotFoundError):
        models().stream(ask("x", Path("missing.png")))
    with pytest.raises(ContextLengthError):
        models().stream(ask("long " * 3000))


def test_a_stream_closed_early_stops_the_request(models: Models) -> None:
    model = models()
    chunks = model.stream(ask("Go on."), SamplingParams(max_tokens=900, ignore_eos=True))
    next(chunks)
    chunks.close()
    wait_until_idle(model)


def test_two_threads_at_once(models: Models, picture: Picture) -> None:
    model, conversations = models(), mixed(picture)
    alone = [model.chat(m, SHORT).token_ids for m in conversations]
    got: dict[int, list[Any]] = {}

    def work(i: int) -> None:
        got[i] = [o.token_ids for o in model.chat_many(conversations, SHORT)] + [
            model.chat(conversations[0], SHORT).token_ids
        ]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert got == {i: [*alone, alone[0]] for i in range(3)}


def test_async_answers_and_chunks(models: Models, picture: Picture) -> None:
    model, conversations = models(), mixed(picture)

    async def run() -> tuple[list[Output], str]:
        outputs = await asyncio.gather(*(model.achat(m, SHORT) for m in conversations))
        texts = [chunk.text async for chunk in model.astream(conversations[1], SHORT)]
        return outputs, "".join(texts)

    outputs, text = asyncio.run(run())
    assert [o.token_ids for o in outputs] == [model.chat(m, SHORT).token_ids for m in conversations]
    assert text == outputs[1].text


def test_a_cancelled_task_stops_its_request(models: Models) -> None:
    model = models()

    async def run() -> None:
        task = asyncio.create_task(model.achat(ask("Go on."), SamplingParams(max_tokens=900, ignore_eos=True)))
        while not model.metrics().running:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
    wait_until_idle(model)


def test_async_errors_raise(models: Models) -> None:
    async def run() -> None:
        with pytest.raises(ContextLengthError):
            await models().achat(ask("long " * 3000))
        with pytest.raises(FileNotFoundError):
            async for _ in models().astream(ask("x", Path("missing.png"))):
                pass

    asyncio.run(run())


def test_counting_tokens_runs_no_model(models: Models, picture: Picture, tmp_path: Path) -> None:
    model = models("qwen2_5_vl")
    path = tmp_path / "p.png"
    picture(100, 60).save(path)
    before = model.metrics()
    usage = model.count_tokens(ask("What is this?", path))
    output = model.chat(ask("What is this?", path), SHORT)
    assert (usage.prompt_tokens, usage.image_tokens) == (output.usage.prompt_tokens, output.usage.image_tokens)
    assert before.requests + 1 == model.metrics().requests


def test_sampling_is_repeatable_with_a_seed_in_any_batch(models: Models, picture: Picture) -> None:
    model, messages = models(), ask("Say something.", picture(60, 84))
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=12, ignore_eos=True)
    alone = model.chat(messages, params).token_ids
    together = list(model.chat_many([*mixed(picture), messages, messages], params))
    assert [o.token_ids for o in together[-2:]] == [alone, alone]
    other = SamplingParams(temperature=1.0, seed=6, max_tokens=12, ignore_eos=True)
    assert model.chat(messages, other).token_ids != alone


def test_stop_strings_and_special_ones(models: Models) -> None:
    model = models()
    free = model.chat(ask("Say something."), SamplingParams(max_tokens=40, ignore_eos=True))
    middle = free.text[len(free.text) // 2 :][:3]
    stopped = model.chat(ask("Say something."), SamplingParams(max_tokens=40, ignore_eos=True, stop=middle))
    assert stopped.text == free.text[: free.text.index(middle)]
    assert stopped.finish_reason == "stop"
    resolved = model._preparer.resolve(SamplingParams(stop=["<end_of_utterance>", "x"], ignore_eos=True))
    assert resolved.stop == ("x",)
    assert len(resolved.stop_token_ids) == 1


def test_logprobs_are_reported(models: Models) -> None:
    output = models().chat(ask("Say."), SamplingParams(max_tokens=4, ignore_eos=True, logprobs=2))
    assert output.logprobs is not None
    assert [p.token_id for p in output.logprobs] == list(output.token_ids)
    assert all(p.logprob == max(p.top.values()) for p in output.logprobs)
    assert models().chat(ask("Say."), SHORT).logprobs is None


def test_attention_report_names_each_group(models: Models) -> None:
    report = models("qwen2_5_vl").attention_report()
    assert all(isinstance(d, Decision) for d in report)
    assert {d.group for d in report} == {"vision.full", "vision.window", "text"}


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"deterministic": True}, UnsupportedModelError),
        ({"max_pixels": 0}, PromptError),
        ({"max_model_len": 0}, PromptError),
        ({"max_model_len": 10**9}, UnsupportedModelError),
        ({"max_batch_tokens": True}, PromptError),
        ({"gpu_memory_fraction": 1.5}, PromptError),
        ({"kv_cache_gib": 0}, PromptError),
        ({"kv_cache_gib": 1e-9}, UnsupportedModelError),
        ({"seed": -1}, PromptError),
        ({"attention": "flashy"}, AttentionBackendError),
        ({"device": "tpu"}, VLMError),
        ({"load_format": "gguf"}, UnsupportedModelError),
    ],
)
def test_settings_that_cannot_be_honoured(tiny: Any, arguments: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error, match=next(iter(arguments))):
        VLM(tiny("smolvlm"), **arguments)


def test_a_missing_folder_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere"):
        VLM(tmp_path / "nowhere")


def test_the_environment_names_the_default_model(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLM_MODEL", str(tiny("smolvlm")))
    with VLM(dtype="float32", device="cpu") as model:
        assert model.chat(ask("x"), SHORT).error is None


def test_a_longer_prompt_than_the_step_budget_runs_in_chunks(tiny: Any) -> None:
    with VLM(tiny("smolvlm"), device="cpu", max_batch_tokens=8) as model:
        outputs = list(model.chat_many([ask("word " * 40), ask("x"), ask("y " * 30)], SHORT))
        assert all(o.error is None for o in outputs)


def test_max_pixels_makes_pictures_smaller(tiny: Any, picture: Picture) -> None:
    with VLM(tiny("qwen2_5_vl"), device="cpu", max_pixels=56 * 56) as model:
        assert model.caption(picture(200, 200), params=SHORT).image_sizes == ((56, 56),)


def test_after_closing_nothing_is_served(tiny: Any, picture: Picture) -> None:
    model = VLM(tiny("smolvlm"), device="cpu")
    streamed = model.stream(ask("Go on."), SamplingParams(max_tokens=2000, ignore_eos=True))
    next(streamed)
    many = model.caption_many([picture(48, 48)] * 3, params=SamplingParams(max_tokens=2000, ignore_eos=True))
    model.close()
    model.close()
    assert [chunk.finish_reason for chunk in streamed][-1] == "cancelled"
    with pytest.raises(VLMError, match="closed"):
        list(many)
    with pytest.raises(VLMError, match="closed"):
        asyncio.run(model.achat(ask("x")))
    for call in (lambda: model.chat(ask("x")), lambda: model.stream(ask("x")), lambda: model.caption(picture(4, 4))):
        with pytest.raises(VLMError, match="closed"):
            call()
    with pytest.raises(VLMError, match="closed"):
        model.count_tokens(ask("x"))
    with pytest.raises(VLMError, match="closed"), model:
        pass


def test_closing_from_another_thread_ends_a_call(tiny: Any) -> None:
    model = VLM(tiny("smolvlm"), device="cpu")
    got: list[Output] = []
    caller = threading.Thread(
        target=lambda: got.append(model.chat(ask("x"), SamplingParams(max_tokens=4000, ignore_eos=True)))
    )
    caller.start()
    while not model.metrics().running:
        time.sleep(0.001)
    model.close()
    caller.join(30)
    assert [o.finish_reason for o in got] == ["cancelled"]
    assert got[0].token_ids


def test_a_model_that_is_dropped_ends_its_thread(tiny: Any) -> None:
    model = VLM(tiny("smolvlm"), device="cpu")
    model.chat(ask("x"), SHORT)
    before = threading.active_count()
    del model
    gc.collect()
    end = time.monotonic() + 10
    while threading.active_count() >= before:
        assert time.monotonic() < end
        time.sleep(0.01)


def test_an_iterator_keeps_its_model_alive(tiny: Any, picture: Picture) -> None:
    outputs = list(VLM(tiny("smolvlm"), device="cpu").caption_many([picture(48, 48)] * 3, params=SHORT))
    assert [o.error for o in outputs] == [None] * 3


def test_random_weights_for_benchmarks(tiny: Any, picture: Picture) -> None:
    with VLM(tiny("smolvlm"), device="cpu", load_format="dummy") as model:
        assert len(model.caption(picture(48, 48), params=SHORT).token_ids) == 12
