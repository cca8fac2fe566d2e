"""The scheduler as pure data: budgets hold, nothing leaks, nobody starves, everybody ends."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from vlm.engine.blocks import BlockManager
from vlm.engine.image_rows import ImageRows
from vlm.engine.request import Request, Sequence
from vlm.engine.scheduler import Limits, Scheduler, Step


def sequence(id: int, prompt: int, image_values: int = 0, image_tokens: int = 1, kind: int = 0) -> Sequence:
    """A prompt that begins with an image where it has `image_values`; those of one `kind` begin alike."""
    pixels = SimpleNamespace(numel=lambda: image_values)
    images = (SimpleNamespace(pixels=pixels),) if image_values else ()
    rows = ImageRows(tuple(range(image_tokens)), (0, image_tokens)) if image_values else ImageRows()
    keys = (f"{kind} {image_values} {image_tokens}".encode(),) if images else ()
    tokens = tuple(range(1000 * kind, 1000 * kind + prompt))
    request = Request(id, tokens, torch.arange(prompt), prompt, cast(Any, None), cast(Any, images), image_keys=keys)
    return Sequence(request, 0, cast(Any, None), image_rows=rows)


def scheduler(num_blocks: int = 100, block_size: int = 4, prefix_cache: bool = False, **limits: int) -> Scheduler:
    defaults = {"max_num_seqs": 8, "max_batch_tokens": 64, "max_image_values": 100}
    return Scheduler(BlockManager(num_blocks, block_size), Limits(**defaults | limits), prefix_cache)


def ids(step: Step | None) -> list[int]:
    assert step is not None
    return [run.sequence.id for run in step.runs]


def counts(step: Step | None) -> dict[int, int]:
    """Tokens that each sequence of a step runs."""
    assert step is not None
    return {run.sequence.id: run.count for run in step.runs}


def take(step: Step | None, scheduler: Scheduler) -> Step:
    """Run a step: images are encoded, and every sequence whose prompt is through gets a token."""
    assert step is not None
    for run in step.runs:
        samples = run.samples
        for piece in run.sequence.image_rows.pieces(run.start, run.stop):
            run.sequence.features[piece.image] = cast(Any, "features")
        scheduler.advance(run)
        if samples:
            run.sequence.output_ids.append(0)
    return step


def test_prompts_are_taken_in_order_up_to_the_token_budget() -> None:
    s = scheduler(max_batch_tokens=10)
    for i, length in enumerate([4, 6, 1]):
        s.add(sequence(i, length))
    assert ids(take(s.schedule(), s)) == [0, 1]
    assert counts(take(s.schedule(), s)) == {0: 1, 1: 1, 2: 1}


def test_a_long_prompt_runs_in_chunks_and_nobody_overtakes_it() -> None:
    s = scheduler(max_batch_tokens=10)
    for i, length in enumerate([4, 30, 2]):
        s.add(sequence(i, length))
    assert counts(take(s.schedule(), s)) == {0: 4, 1: 6}
    assert counts(take(s.schedule(), s)) == {0: 1, 1: 9}
    assert counts(take(s.schedule(), s)) == {0: 1, 1: 9}
    assert counts(take(s.schedule(), s)) == {0: 1, 1: 6, 2: 2}
    assert [counts(take(s.schedule(), s)) for _ in range(2)] == [{0: 1, 1: 1, 2: 1}] * 2


def test_answers_go_on_while_a_long_prompt_runs() -> None:
    s = scheduler(num_blocks=1000, max_batch_tokens=8)
    answering = [sequence(i, 1) for i in range(3)]
    for x in answering:
        s.add(x)
    take(s.schedule(), s)
    s.add(sequence(9, 500))
    for _ in range(100):
        assert counts(take(s.schedule(), s)) == {0: 1, 1: 1, 2: 1, 9: 5}
    assert not take(s.schedule(), s).is_prefill


def test_a_budget_below_the_number_of_sequences_leaves_a_token_for_each() -> None:
    s = scheduler(max_batch_tokens=3, max_num_seqs=8)
    for i in range(5):
        s.add(sequence(i, 2))
    for _ in range(20):
        step = take(s.schedule(), s)
        assert sum(run.count for run in step.runs) <= 3
    assert [len(x.output_ids) > 10 for x in s.running] == [True] * 3
    assert len(s.waiting) == 2


def test_large_images_have_a_budget_of_their_own() -> None:
    s = scheduler(max_image_values=100)
    for i, values in enumerate([60, 40, 1, 500, 0]):
        s.add(sequence(i, 2, values))
    new = [{i for i, n in counts(take(s.schedule(), s)).items() if n > 1} for _ in range(4)]
    assert new == [{0, 1}, {2}, {3, 4}, set()]  # an image beyond the budget is alone in its step; text is not held up


def test_the_images_of_one_prompt_are_spread_over_steps() -> None:
    s = scheduler(max_image_values=100)
    x = sequence(0, 12, 60)
    images = (x.request.images[0],) * 3
    rows = ImageRows((1, 2, 5, 6, 9, 10), (0, 2, 4, 6))
    many = Sequence(replace(x.request, images=images, image_keys=()), 0, cast(Any, None), image_rows=rows)
    s.add(many)
    assert [counts(take(s.schedule(), s))[0] for _ in range(3)] == [5, 4, 3]
    assert not many.features  # given up as soon as their tokens have run


def test_an_image_whose_tokens_fall_in_two_chunks_is_paid_for_once() -> None:
    s = scheduler(max_batch_tokens=4, max_image_values=10)
    s.add(sequence(0, 7, 10, image_tokens=6))
    s.add(sequence(1, 2, 10))
    assert counts(take(s.schedule(), s)) == {0: 4}
    assert list(s.running[0].features) == [0]
    assert counts(s.schedule()) == {0: 3, 1: 1}


def test_running_sequences_are_limited() -> None:
    s = scheduler(max_num_seqs=2)
    for i in range(3):
        s.add(sequence(i, 2))
    assert ids(take(s.schedule(), s)) == [0, 1]
    step = take(s.schedule(), s)
    assert not step.is_prefill
    s.remove(step.runs[0].sequence)
    assert ids(take(s.schedule(), s)) == [1, 2]


def test_the_youngest_gives_way_when_blocks_run_out() -> None:
    s = scheduler(num_blocks=6, block_size=2)
    for i in range(3):
        s.add(sequence(i, 2))
    take(s.schedule(), s)
    assert ids(take(s.schedule(), s)) == [0, 1, 2]
    take(s.schedule(), s)
    step = take(s.schedule(), s)
    assert ids(step) == [0, 1]
    assert [p.id for p in step.preempted] == [2]
    assert [w.id for w in s.waiting] == [2]
    assert s.waiting[0].num_cached == 0
    assert s.waiting[0].new_tokens == 5  # prompt and answer so far run again


def test_a_prompt_half_through_gives_way_too() -> None:
    s = scheduler(num_blocks=6, block_size=2, max_batch_tokens=3)
    old, young = sequence(0, 1), sequence(1, 8, image_values=10, image_tokens=6)
    s.add(old)
    take(s.schedule(), s)
    s.add(young)
    take(s.schedule(), s)
    assert young.num_cached == 2
    assert young.features
    s.blocks.allocate(s.blocks.num_free)  # somebody else takes the rest
    step = take(s.schedule(), s)
    assert step.preempted == (young,)
    assert ids(step) == [0]  # it does not come back in the step that sent it away
    assert (young.num_cached, young.block_table, young.features) == (0, [], {})


def test_a_preempted_sequence_comes_before_those_that_never_ran() -> None:
    s = scheduler(num_blocks=4, block_size=2, max_num_seqs=2)
    for i in range(3):
        s.add(sequence(i, 2))
    take(s.schedule(), s)
    while not (step := take(s.schedule(), s)).preempted:
        pass
    assert [w.id for w in s.waiting] == [1, 2]
    s.remove(step.runs[0].sequence)
    assert ids(s.schedule())[0] == 1


def finish(s: Scheduler, x: Sequence, answer: int = 1) -> None:
    """Run everything until a sequence has `answer` tokens, and end it."""
    while len(x.output_ids) < answer:
        take(s.schedule(), s)
    s.remove(x)


def test_a_prompt_starts_behind_what_ran_before() -> None:
    s = scheduler(prefix_cache=True)
    first = sequence(0, 11)
    s.add(first)
    finish(s, first, answer=3)
    again, longer, other = sequence(1, 11), sequence(2, 30), sequence(3, 11, kind=1)
    for x in (again, longer, other):
        s.add(x)
    step = s.schedule()
    assert counts(step) == {1: 3, 2: 22, 3: 11}
    assert again.block_table[:2] == longer.block_table[:2]
    assert again.block_table[2] != longer.block_table[2]
    assert (s.prefix_hits, s.prefix_tokens) == (2, 16)


def test_the_last_token_of_a_prompt_that_is_all_there_runs() -> None:
    s = scheduler(prefix_cache=True)
    first = sequence(0, 12)
    s.add(first)
    finish(s, first, answer=5)
    s.add(sequence(1, 12))
    assert counts(take(s.schedule(), s)) == {1: 4}  # of three full blocks the last runs again
    s.add(sequence(2, 13))
    assert counts(take(s.schedule(), s)) == {1: 1, 2: 1}


def test_without_a_prefix_cache_nothing_is_kept() -> None:
    s = scheduler()
    first = sequence(0, 12)
    s.add(first)
    finish(s, first)
    s.add(sequence(1, 12))
    assert counts(s.schedule()) == {1: 12}
    assert (s.blocks.num_known, s.prefix_hits) == (0, 0)


def test_one_that_gave_way_comes_back_to_its_own_blocks() -> None:
    s = scheduler(num_blocks=8, block_size=2, prefix_cache=True)
    old, young = sequence(0, 2), sequence(1, 9, kind=1)
    s.add(old)
    s.add(young)
    take(s.schedule(), s)
    while not (step := take(s.schedule(), s)).preempted:
        pass
    assert step.preempted == (young,)
    s.remove(old)
    step = take(s.schedule(), s)
    assert step.runs[0].sequence is young
    assert (step.runs[0].start, step.runs[0].count) == (10, 2)  # its prompt of 9 and what it had answered
    assert s.prefix_hits == 0  # it counts once, when it first ran


def test_found_blocks_that_nobody_holds_count_as_taken() -> None:
    s = scheduler(num_blocks=6, block_size=2, prefix_cache=True)
    known = sequence(0, 8)
    s.add(known)
    finish(s, known)
    growing = sequence(1, 3, kind=1)
    s.add(growing)
    take(s.schedule(), s)
    s.add(sequence(2, 9))  # 4 blocks found and a new one: more than is free beside the running one
    assert ids(take(s.schedule(), s)) == [1]


def test_what_is_disowned_is_not_found() -> None:
    s = scheduler(prefix_cache=True)
    bad = sequence(0, 12)
    s.add(bad)
    take(s.schedule(), s)
    s.disown(bad)
    s.remove(bad)
    s.add(sequence(1, 12))
    assert counts(s.schedule()) == {1: 12}


def test_nothing_to_do_is_no_step() -> None:
    assert scheduler().schedule() is None


requests = st.lists(
    st.tuples(
        st.integers(1, 24),
        st.integers(1, 20),
        st.sampled_from([0, 0, 7, 60, 300]),
        st.floats(0, 1, exclude_min=True),
        st.integers(0, 1),
    ),
    min_size=1,
    max_size=14,
)


@settings(max_examples=200, deadline=None)
@example(  # the youngest gives way, and then needs fewer blocks, as the other one has computed the same prompt
    requests=[(1, 1, 0, 1.0, 0), (19, 12, 0, 1.0, 0), (19, 11, 0, 1.0, 0)],
    cancels={},
    num_blocks=11,
    max_num_seqs=2,
    max_batch_tokens=3,
    arrivals=1,
    prefix_cache=True,
)
@given(
    requests=requests,
    cancels=st.dictionaries(st.integers(0, 13), st.integers(0, 30)),
    num_blocks=st.integers(11, 40),
    max_num_seqs=st.integers(1, 6),
    max_batch_tokens=st.integers(1, 50),
    arrivals=st.integers(1, 4),
    prefix_cache=st.booleans(),
)
def test_every_request_ends_and_no_block_is_lost(
    requests: list[tuple[int, int, int, float, int]],
    cancels: dict[int, int],
    num_blocks: int,
    max_num_seqs: int,
    max_batch_tokens: int,
    arrivals: int,
    prefix_cache: bool,
) -> None:
    s = scheduler(num_blocks, 4, prefix_cache, max_num_seqs=max_num_seqs, max_batch_tokens=max_batch_tokens)
    todo = [
        sequence(i, prompt, values, max(1, int(prompt * share)), kind)
        for i, (prompt, _, values, share, kind) in enumerate(requests)
    ]
    left = {i: answer for i, (_, answer, *_) in enumerate(requests)}
    alive: dict[int, Sequence] = {}
    total = sum(prompt + answer for prompt, answer, *_ in requests)
    for tick in range(10 * total + 50):
        for seq in todo[:arrivals]:
            s.add(seq)
            alive[seq.id] = seq
        del todo[:arrivals]
        for victim in [i for i, when in cancels.items() if when == tick and i in alive]:
            s.remove(alive.pop(victim))
        decoding = [x for x in s.running if x.decoding]
        if (step := s.schedule()) is None:
            assert not alive
            if not todo:
                break
            continue
        check_step(s, step, alive)
        assert {x.id for x in decoding} <= {*ids(step), *(x.id for x in step.preempted)}
        before = {i: len(x.output_ids) for i, x in alive.items()}
        take(step, s)
        for i in [i for i, n in before.items() if len(alive[i].output_ids) > n]:
            left[i] -= 1
            if left[i] == 0:
                s.remove(alive.pop(i))
    assert not alive
    assert not todo
    assert s.blocks.num_free == num_blocks


def check_step(s: Scheduler, step: Step, alive: dict[int, Sequence]) -> None:
    assert [x.id for x in s.running] == sorted(x.id for x in s.running)
    assert {x.id for x in s.running} | {x.id for x in s.waiting} == set(alive)
    assert len(s.running) <= s.limits.max_num_seqs
    held = [b for x in alive.values() for b in x.block_table]
    assert len(set(held)) + s.blocks.num_free == s.blocks.num_blocks
    written = [b for run in step.runs for b in run.sequence.block_table[run.start // s.blocks.block_size :]]
    assert all(held.count(b) == 1 for b in written)
    assert len(set(ids(step))) == len(step.runs)
    assert not {x.id for x in step.preempted} & set(ids(step))
    assert not any(x.features or x.block_table for x in s.waiting)
    assert sum(run.count for run in step.runs) <= s.limits.max_batch_tokens
    for run in step.runs:
        assert run.start == run.sequence.num_cached
        assert all(len(set(x.block_table)) == len(x.block_table) for x in alive.values())
        assert 0 < run.count <= run.sequence.new_tokens
        assert len(run.sequence.block_table) == s.blocks.blocks_for(run.sequence.num_tokens)
    encoded = [
        run.sequence.request.images[piece.image].pixels.numel()
        for run in step.runs
        for piece in run.sequence.image_rows.pieces(run.start, run.stop)
        if piece.image not in run.sequence.features
    ]
    assert len(encoded) <= 1 or sum(encoded) <= s.limits.max_image_values
