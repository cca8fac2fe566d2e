"""The engine with a model whose answers are known: batching, preemption, failures, cancelling, budgets."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vlm.engine.engine import _not_finite
from vlm.engine.request import Request
from vlm.engine.runner import image_batches
from vlm.errors import ContextLengthError, PromptError, VLMError

Fake = SimpleNamespace


def expected(fake: Fake, request: Request, count: int) -> list[int]:
    answer: list[int] = fake.expected(request, count)
    return answer


def mixed_requests(fake: Fake, count: int, seed: int = 0, **params: Any) -> list[Request]:
    """Prompts of many lengths, some with one or two pictures."""
    rng = random.Random(seed)
    requests = []
    for i in range(count):
        tokens = [rng.randrange(6, fake.VOCAB) for _ in range(rng.randrange(1, 12))]
        images = [fake.image(rng.randrange(200, 900), rng.randrange(1, 4)) for _ in range(rng.choice([0, 0, 1, 2]))]
        for picture in images:
            at = rng.randrange(len(tokens) + 1)
            tokens[at:at] = [fake.IMAGE_TOKEN] * picture.plan.num_tokens
        requests.append(fake.request(i, tokens, images, dims=3, **{"max_tokens": rng.randrange(1, 9), **params}))
    return requests


def test_answers_are_those_of_the_model(fake: Fake) -> None:
    engine = fake.engine()
    requests = mixed_requests(fake, 12)
    for request in requests:
        engine.add(request)
    done = fake.run(engine)
    for request in requests:
        answer = expected(fake, request, request.params.max_tokens)
        assert done[request.id].ids == answer
        assert done[request.id].text == "".join(chr(65 + t) for t in answer)
        last = done[request.id].last
        assert last.finish_reason == "length"
        assert last.usage.prompt_tokens == len(request.token_ids)
        assert last.usage.image_tokens == request.num_image_tokens
        assert last.usage.completion_tokens == request.params.max_tokens
        assert 0 < last.time_to_first_token <= last.total_time


def test_preemption_does_happen_in_a_small_cache(fake: Fake) -> None:
    engine = fake.engine(num_blocks=8, block_size=2)
    requests = [fake.request(i, [10 + i, 20, 30], [], dims=3, max_tokens=9) for i in range(3)]
    for request in requests:
        engine.add(request)
    done = fake.run(engine)
    assert engine.metrics().preemptions > 0
    assert all(done[r.id].ids == expected(fake, r, 9) for r in requests)
    assert engine.metrics().prompt_tokens == 9  # a prompt that ran twice counts once


def test_seeded_sampling_survives_preemption_and_company(fake: Fake) -> None:
    params = {"temperature": 30.0, "seed": 7, "max_tokens": 9, "repetition_penalty": 1.1}
    alone = fake.engine()
    alone.add(fake.request(0, [11, 12, 13], **params))
    reference = fake.run(alone)[0].ids
    crowded = fake.engine(num_blocks=8, block_size=2)
    for i in range(3):
        crowded.add(fake.request(i, [11, 12, 13], **params))
    done = fake.run(crowded)
    assert crowded.metrics().preemptions > 0
    assert [done[i].ids for i in range(3)] == [reference] * 3


def test_a_prompt_that_never_fits_is_refused_and_leaves_nothing(fake: Fake) -> None:
    engine = fake.engine(max_model_len=20)
    engine.add(fake.request(0, [10, 11]))
    before = engine.metrics()
    with pytest.raises(ContextLengthError, match=r"25 tokens .* context of 20"):
        engine.add(fake.request(1, [10] * 25))
    with pytest.raises(ContextLengthError):
        engine.add(fake.request(1, [10] * 20))  # no room for a single token
    assert engine.metrics() == before
    engine.add(fake.request(1, [10] * 19))
    done = fake.run(engine)
    assert len(done[0].ids) == 8
    assert len(done[1].ids) == 1
    assert done[1].last.finish_reason == "length"


def test_a_cache_smaller_than_the_context_says_so(fake: Fake) -> None:
    engine = fake.engine(max_model_len=1000, num_blocks=5)
    with pytest.raises(ContextLengthError, match="KV cache of 20 tokens"):
        engine.add(fake.request(0, [10] * 30))


def test_an_empty_prompt_is_refused(fake: Fake) -> None:
    with pytest.raises(PromptError, match="empty"):
        fake.engine().add(fake.request(0, []))


def test_placeholders_and_images_must_match(fake: Fake) -> None:
    engine = fake.engine()
    with pytest.raises(PromptError, match="1 image tokens, but its 1 images make 2"):
        engine.add(fake.request(0, [10, fake.IMAGE_TOKEN], [fake.image(3, 2)]))
    assert not engine.has_work


def test_the_placeholder_is_never_sampled(fake: Fake) -> None:
    engine = fake.engine(max_model_len=500, num_blocks=200)
    for i in range(8):
        engine.add(fake.request(i, [10 + i], max_tokens=200))
    done = fake.run(engine)
    requests = [fake.request(i, [10 + i]) for i in range(8)]
    assert all(done[i].ids == expected(fake, r, 200) for i, r in enumerate(requests))
    assert not any(fake.IMAGE_TOKEN in done[i].ids for i in range(8))


def test_one_picture_that_fails_ends_its_request_only(fake: Fake) -> None:
    model = fake.Model()
    model.fail_on_value = 666
    engine = fake.engine(model)
    requests = []
    for i, value in enumerate([300, 301, 666, 303, 304]):
        requests.append(fake.request(i, [10, fake.IMAGE_TOKEN], [fake.image(value, 1)]))
        engine.add(requests[-1])
    done = fake.run(engine)
    assert [done[i].last.finish_reason for i in range(5)] == ["length", "length", "error", "length", "length"]
    assert "a kernel failed" in str(done[2].last.error)
    assert done[2].ids == []
    assert all(done[i].ids == expected(fake, requests[i], 8) for i in (0, 1, 3, 4))
    assert engine.metrics().free_blocks == 64


def test_out_of_memory_in_the_encoder_halves_the_batch(fake: Fake, caplog: pytest.LogCaptureFixture) -> None:
    model = fake.Model()
    model.max_images = 2
    engine = fake.engine(model)
    requests = [fake.request(i, [10, fake.IMAGE_TOKEN], [fake.image(300 + i, 1)]) for i in range(5)]
    for request in requests:
        engine.add(request)
    done = fake.run(engine)
    assert all(done[r.id].ids == expected(fake, r, 8) for r in requests)
    assert max(model.encoded) == 5
    assert "trying again in halves" in caplog.text


def test_a_picture_too_large_alone_says_what_to_lower(fake: Fake) -> None:
    model = fake.Model()
    model.max_images = 0
    engine = fake.engine(model)
    engine.add(fake.request(0, [10, fake.IMAGE_TOKEN], [fake.image(300, 1)]))
    engine.add(fake.request(1, [10]))
    done = fake.run(engine)
    assert isinstance(done[0].last.error, VLMError)
    assert "max_pixels" in str(done[0].last.error)
    assert done[1].last.finish_reason == "length"


def test_out_of_memory_in_the_decoder_halves_the_batch(fake: Fake) -> None:
    model = fake.Model()
    model.max_rows = 2
    engine = fake.engine(model)
    requests = mixed_requests(fake, 7)
    for request in requests:
        engine.add(request)
    done = fake.run(engine)
    assert all(done[r.id].ids == expected(fake, r, r.params.max_tokens) for r in requests)


def test_logits_that_are_not_finite_end_that_request_only(fake: Fake) -> None:
    model = fake.Model()
    engine = fake.engine(model)
    bad, good = fake.request(0, [10, 11]), fake.request(1, [12, 13])
    state = 0
    from_prompt = zip([10, 11], [100, 101], strict=True)
    for value, position in from_prompt:
        state = (state * 31 + value * 7 + position * 3 + 1) % 9973
    model.nan_on_value = state
    engine.add(bad)
    engine.add(good)
    done = fake.run(engine)
    assert str(done[0].last.error).startswith("the model's logits are not finite in float32: ")
    assert "weights are damaged" in str(done[0].last.error)
    assert done[1].ids == expected(fake, good, 8)


def test_only_16_bits_may_be_the_reason_for_logits_that_are_not_finite() -> None:
    for dtype in (torch.float16, torch.bfloat16):
        assert _not_finite(dtype).endswith("try dtype='float32'")
    assert "try dtype" not in _not_finite(torch.float32)


def test_cancelling_while_waiting_and_while_running(fake: Fake) -> None:
    engine = fake.engine(max_num_seqs=2)
    requests = [fake.request(i, [10 + i], max_tokens=20) for i in range(4)]
    for request in requests:
        engine.add(request)
    done: dict[int, Any] = {}
    fake.collect(engine.step(), done)
    fake.collect(engine.step(), done)
    for victim in (0, 3):
        event = engine.cancel(victim)
        assert event.finish_reason == "cancelled"
        fake.collect([event], done)
        assert engine.cancel(victim) is None
    assert done[0].last.usage.completion_tokens == 2
    done |= {i: a for i, a in fake.run(engine).items() if i not in (1,)}
    assert done[2].ids == expected(fake, requests[2], 20)
    assert engine.metrics().free_blocks == 64


def test_stop_ids_and_strings_end_an_answer(fake: Fake) -> None:
    answer = expected(fake, fake.request(0, [10, 11]), 8)
    engine = fake.engine()
    engine.add(fake.request(0, [10, 11], stop_token_ids=frozenset({answer[3]})))
    text = "".join(chr(65 + t) for t in answer)
    engine.add(fake.request(1, [10, 11], stop=(text[2:4],)))
    done = fake.run(engine)
    assert done[0].ids == answer[:4]
    assert done[0].text == text[:3]
    assert done[1].text == text[:2]
    assert {done[0].last.finish_reason, done[1].last.finish_reason} == {"stop"}


def test_logprobs_come_one_a_token(fake: Fake) -> None:
    engine = fake.engine()
    engine.add(fake.request(0, [10], logprobs=2))
    engine.add(fake.request(1, [10]))
    done = fake.run(engine)
    assert [p.token_id for p in done[0].last.logprobs] == done[0].ids
    assert all(len(p.top) == 2 for p in done[0].last.logprobs)
    assert done[1].last.logprobs is None


def test_an_engine_failure_ends_all_and_serves_on(fake: Fake) -> None:
    engine = fake.engine()
    engine.add(fake.request(0, [10]))
    engine.add(fake.request(1, [11]))
    engine.step()
    events = engine.fail_all(RuntimeError("broken"))
    assert [e.finish_reason for e in events] == ["error", "error"]
    assert not engine.has_work
    again = fake.request(2, [10])
    engine.add(again)
    assert fake.run(engine)[2].ids == expected(fake, again, 8)


def test_image_batches_keep_order_and_budget(fake: Fake) -> None:
    images = [fake.image(i, 1, num_values=n) for i, n in enumerate([40, 60, 1, 500, 20, 80])]
    batches = image_batches(images, 100)
    assert [[int(i.pixels[0]) for i in b] for b in batches] == [[0, 1], [2], [3], [4, 5]]
    assert image_batches([], 100) == []


def test_engine_seed_makes_unseeded_requests_repeatable(fake: Fake) -> None:
    def answers(seed: int) -> list[list[int]]:
        engine = fake.engine(seed=seed)
        for i in range(3):
            engine.add(fake.request(i, [10], temperature=50.0))
        done = fake.run(engine)
        return [done[i].ids for i in range(3)]

    assert answers(1) == answers(1)
    assert answers(1) != answers(2)
    assert answers(1)[0] != answers(1)[1]


def test_cache_is_zero_and_shaped() -> None:
    from vlm.engine.cache import allocate_cache, bytes_per_token
    from vlm.families.base import KVGeometry

    geometry = KVGeometry(num_layers=3, num_kv_heads=2, head_dim=5)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        caches = allocate_cache(geometry, 7, 4, dtype, torch.device("cpu"))
        assert len(caches) == 3
        assert {c.k.shape for c in caches} | {c.v.shape for c in caches} == {(7, 4, 2, 5)}
        assert all(c.k.dtype == dtype and not c.k.any() and not c.v.any() for c in caches)
        assert sum(c.k.nbytes + c.v.nbytes for c in caches) == bytes_per_token(geometry, dtype) * 28
