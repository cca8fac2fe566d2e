"""Many requests at once under every budget: each gets the model's own answer, ends, and leaves no block behind."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vlm.engine.request import Request

Fake = SimpleNamespace


def requests_of(fake: Fake, seed: int, count: int) -> list[Request]:
    """Prompts of many lengths, some with one or two pictures; half of them go on where another one ends or stops."""
    rng = random.Random(seed)
    requests: list[Request] = []
    for i in range(count):
        if requests and rng.random() < 0.5:
            requests.append(variant(fake, rng.choice(requests), i, rng))
            continue
        tokens = [rng.randrange(6, fake.VOCAB) for _ in range(rng.randrange(1, 12))]
        images = []
        for _ in range(rng.choice([0, 0, 1, 2])):
            picture = fake.image(rng.randrange(200, 900), rng.randrange(1, 6), rng.choice([5, 12, 70, 200]))
            images.append(picture)
            at = rng.randrange(len(tokens) + 1)
            tokens[at:at] = [fake.IMAGE_TOKEN] * picture.plan.num_tokens
        requests.append(fake.request(i, tokens, images, dims=3, max_tokens=rng.randrange(1, 9)))
    return requests


def variant(fake: Fake, request: Request, id: int, rng: random.Random) -> Request:
    """The same again, with more text, with other pictures, or as the next turn of the conversation."""
    tokens, images = list(request.token_ids), list(request.images)
    change = rng.choice(["none", "longer", "pictures", "turn"])
    if change == "turn":
        tokens += fake.expected(request, rng.randrange(1, 6))
    if change in ("longer", "turn"):
        tokens += [rng.randrange(6, fake.VOCAB) for _ in range(rng.randrange(1, 4))]
    if change == "pictures":
        images = [fake.image(rng.randrange(200, 900), i.plan.num_tokens, i.pixels.numel()) for i in images]
    again: Request = fake.request(id, tokens, images, dims=3, max_tokens=rng.randrange(1, 9), keys=rng.random() < 0.9)
    return again


def serve(
    fake: Fake, engine: Any, requests: list[Request], arrivals: int, cancels: dict[int, int]
) -> dict[int, SimpleNamespace]:
    """`arrivals` requests a step; `cancels`: request id -> step. What each got."""
    done: dict[int, SimpleNamespace] = {}
    todo = list(requests)
    for tick in range(10_000):
        for request in todo[:arrivals]:
            engine.add(request)
        del todo[:arrivals]
        for victim in [i for i, when in cancels.items() if when == tick]:
            if event := engine.cancel(victim):
                fake.collect([event], done)
        if not engine.has_work and not todo:
            return done
        fake.collect(engine.step(), done)
    raise AssertionError("requests never end")


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    num_blocks=st.integers(10, 30),
    max_num_seqs=st.integers(1, 6),
    max_batch_tokens=st.integers(1, 24),
    arrivals=st.integers(1, 4),
    cancels=st.dictionaries(st.integers(0, 11), st.integers(0, 25), max_size=4),
    prefix_cache=st.booleans(),
    feature_cache_bytes=st.sampled_from([0, 8, 40, 10_000]),
)
def test_no_budget_changes_an_answer(
    fake: Fake,
    seed: int,
    num_blocks: int,
    max_num_seqs: int,
    max_batch_tokens: int,
    arrivals: int,
    cancels: dict[int, int],
    prefix_cache: bool,
    feature_cache_bytes: int,
) -> None:
    engine = fake.engine(
        num_blocks=num_blocks,
        block_size=2,
        max_num_seqs=max_num_seqs,
        max_batch_tokens=max_batch_tokens,
        prefix_cache=prefix_cache,
        feature_cache_bytes=feature_cache_bytes,
    )
    requests = [r for r in requests_of(fake, seed, 12) if len(r.token_ids) < engine.config.max_tokens]
    done = serve(fake, engine, requests, arrivals, cancels)
    for request in requests:
        room = min(request.params.max_tokens, engine.config.max_tokens - len(request.token_ids))
        answer, reason = fake.expected(request, room), done[request.id].last.finish_reason
        assert reason == "length" or (reason == "cancelled" and request.id in cancels)
        assert done[request.id].ids == (answer if reason == "length" else answer[: len(done[request.id].ids)])
    metrics = engine.metrics()
    assert (metrics.running, metrics.waiting, metrics.free_blocks) == (0, 0, num_blocks)
    assert metrics.feature_bytes <= feature_cache_bytes


def test_a_picture_in_several_chunks_is_encoded_once(fake: Fake) -> None:
    model = fake.Model()
    engine = fake.engine(model, max_batch_tokens=4)
    request = fake.request(0, [10, *[fake.IMAGE_TOKEN] * 9, 11, 12], [fake.image(300, 9)])
    engine.add(request)
    done = fake.run(engine)
    assert done[0].ids == fake.expected(request, 8)
    assert model.encoded == [1]
    metrics = engine.metrics()
    assert (metrics.images, metrics.prefill_steps, metrics.prompt_tokens) == (1, 3, 12)


def test_answers_do_not_wait_for_a_long_prompt(fake: Fake) -> None:
    engine = fake.engine(max_batch_tokens=4, max_model_len=100)
    short, long = fake.request(0, [10], max_tokens=20), fake.request(1, range(6, 46))
    engine.add(short)
    engine.step()
    engine.add(long)
    for _ in range(13):  # 40 tokens, 3 a step beside the one that decodes
        assert [e.request_id for e in engine.step()] == [0]
    assert [e.request_id for e in engine.step()] == [0, 1]
    assert fake.run(engine)[1].ids == fake.expected(long, 8)[1:]


def test_a_prompt_half_through_can_be_cancelled(fake: Fake) -> None:
    engine = fake.engine(max_batch_tokens=4)
    engine.add(fake.request(0, [10, *[fake.IMAGE_TOKEN] * 9], [fake.image(300, 9)]))
    assert engine.step() == []
    assert engine.cancel(0).finish_reason == "cancelled"
    assert not engine.has_work
    assert engine.metrics().free_blocks == 64


@pytest.mark.parametrize("max_rows", [1, 2])
def test_out_of_memory_with_prompts_and_answers_in_one_step(fake: Fake, max_rows: int) -> None:
    model = fake.Model()
    model.max_rows = max_rows
    engine = fake.engine(model, max_batch_tokens=7)
    requests = requests_of(fake, 3, 6)
    done = serve(fake, engine, requests, 2, {})
    assert all(done[r.id].ids == fake.expected(r, r.params.max_tokens) for r in requests)


def test_cached_is_cold(fake: Fake) -> None:
    engine = fake.engine(max_num_seqs=1, num_blocks=200)
    requests = requests_of(fake, 5, 40)
    done = serve(fake, engine, requests, 1, {})
    assert all(done[r.id].ids == fake.expected(r, r.params.max_tokens) for r in requests)
    metrics = engine.metrics()
    assert metrics.prefix_hits > 10
    assert 0 < metrics.prefix_tokens < metrics.prompt_tokens == sum(len(r.token_ids) for r in requests)


def test_a_picture_behind_a_known_beginning_is_not_encoded_again(fake: Fake) -> None:
    model = fake.Model()
    engine = fake.engine(model)
    tokens = [10, *[fake.IMAGE_TOKEN] * 6, 11, 12, 13]
    for i in range(3):
        request = fake.request(i, [*tokens, 50 + i], [fake.image(300, 6)])
        engine.add(request)
        assert fake.run(engine)[i].ids == fake.expected(request, 8)
    assert model.encoded == [1]
    metrics = engine.metrics()
    assert (metrics.images, metrics.prefix_hits, metrics.prefix_tokens) == (1, 2, 16)


def test_a_beginning_that_ends_inside_a_picture(fake: Fake) -> None:
    engine = fake.engine(max_batch_tokens=3)
    for i, tokens in enumerate([7, 7, 7]):
        request = fake.request(i, [10, *[fake.IMAGE_TOKEN] * tokens], [fake.image(300, tokens)])
        engine.add(request)
        assert fake.run(engine)[i].ids == fake.expected(request, 8)
    assert engine.metrics().prefix_tokens == 8


def test_other_pictures_under_one_text_are_other_prompts(fake: Fake) -> None:
    engine = fake.engine()
    tokens = [*[fake.IMAGE_TOKEN] * 6, *range(10, 20)]
    for i, value in enumerate([300, 301, 302]):
        request = fake.request(i, tokens, [fake.image(value, 6)])
        engine.add(request)
        assert fake.run(engine)[i].ids == fake.expected(request, 8)
    assert engine.metrics().prefix_hits == 0


def test_what_is_not_finite_is_not_shared(fake: Fake) -> None:
    model = fake.Model()
    engine = fake.engine(model, feature_cache_bytes=1000)
    tokens = [*range(10, 20), fake.IMAGE_TOKEN]
    model.poison = True
    engine.add(fake.request(0, tokens, [fake.image(300, 1)]))
    assert fake.run(engine)[0].last.finish_reason == "error"
    assert engine.metrics().feature_bytes == 0
    model.poison = False
    again = fake.request(1, tokens, [fake.image(300, 1)])
    engine.add(again)
    assert fake.run(engine)[1].ids == fake.expected(again, 8)
    assert (engine.metrics().prefix_hits, engine.metrics().feature_hits) == (0, 0)


def test_requests_that_failed_or_ended_early_leave_a_cache_that_is_right(fake: Fake) -> None:
    model = fake.Model()
    engine = fake.engine(model, max_batch_tokens=6)
    model.fail_on_value = 666
    tokens = [*range(10, 18), *[fake.IMAGE_TOKEN] * 3, 20]
    engine.add(fake.request(0, tokens, [fake.image(666, 3)]))
    assert fake.run(engine)[0].last.finish_reason == "error"
    engine.add(fake.request(1, tokens, [fake.image(300, 3)]))
    engine.step()
    engine.cancel(1)
    model.fail_on_value = None
    for i, value in ((2, 300), (3, 666)):
        request = fake.request(i, tokens, [fake.image(value, 3)])
        engine.add(request)
        assert fake.run(engine)[i].ids == fake.expected(request, 8)
    assert engine.metrics().prefix_hits >= 2


def test_a_picture_under_many_texts_is_encoded_once(fake: Fake) -> None:
    model = fake.Model()
    engine = fake.engine(model, feature_cache_bytes=1000, prefix_cache=False)
    requests = [fake.request(i, [10 + i, *[fake.IMAGE_TOKEN] * 2], [fake.image(300, 2)]) for i in range(6)]
    done = serve(fake, engine, requests, 3, {})  # three in one step, three in the next
    assert all(done[r.id].ids == fake.expected(r, 8) for r in requests)
    assert model.encoded == [1]
    metrics = engine.metrics()
    assert (metrics.images, metrics.feature_hits, metrics.feature_bytes) == (1, 5, 8)


def test_known_pictures_do_not_use_up_the_encoder_budget(fake: Fake) -> None:
    engine = fake.engine(max_image_values=100, feature_cache_bytes=1000, prefix_cache=False)

    def steps(first: int) -> int:
        before = engine.metrics().prefill_steps
        for i in range(4):
            engine.add(fake.request(first + i, [10, fake.IMAGE_TOKEN], [fake.image(300 + i, 1, 60)], max_tokens=1))
        fake.run(engine)
        return int(engine.metrics().prefill_steps - before)

    assert steps(0) == 4
    assert steps(10) == 1


def test_a_picture_that_fails_fails_all_that_show_it_and_is_not_known(fake: Fake) -> None:
    model = fake.Model()
    model.fail_on_value = 666
    engine = fake.engine(model, feature_cache_bytes=1000)
    for i, value in enumerate([666, 300, 666]):
        engine.add(fake.request(i, [10 + i, fake.IMAGE_TOKEN], [fake.image(value, 1)]))
    done = fake.run(engine)
    assert [done[i].last.finish_reason for i in range(3)] == ["error", "length", "error"]
    assert engine.metrics().feature_bytes == 4
