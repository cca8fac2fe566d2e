"""The scheduler as pure data: budgets hold, nothing leaks, nobody starves, everybody ends."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from hypothesis import given, settings
from hypothesis import strategies as st

from vlm.engine.blocks import BlockManager
from vlm.engine.request import Request, Sequence
from vlm.engine.scheduler import Limits, Scheduler, Step


def sequence(id: int, prompt: int, image_values: int = 0) -> Sequence:
    pixels = SimpleNamespace(numel=lambda: image_values)
    images = (SimpleNamespace(pixels=pixels),) if image_values else ()
    request = Request(id, tuple(range(prompt)), cast(Any, None), prompt, cast(Any, None), cast(Any, images))
    return Sequence(request, 0, cast(Any, None))


def scheduler(num_blocks: int = 100, block_size: int = 4, **limits: int) -> Scheduler:
    defaults = {"max_num_seqs": 8, "max_batch_tokens": 64, "max_image_values": 100}
    return Scheduler(BlockManager(num_blocks, block_size), Limits(**defaults | limits))


def ids(step: Step | None) -> list[int]:
    assert step is not None
    return [s.id for s in step.sequences]


def take(step: Step | None, scheduler: Scheduler) -> Step:
    """Run a step: every sequence of it gets a token."""
    assert step is not None
    scheduler.advance(step)
    for s in step.sequences:
        s.output_ids.append(0)
    return step


def test_prompts_are_taken_in_order_up_to_the_token_budget() -> None:
    s = scheduler(max_batch_tokens=10)
    for i, length in enumerate([4, 6, 1, 30, 2]):
        s.add(sequence(i, length))
    assert ids(take(s.schedule(), s)) == [0, 1]
    assert ids(take(s.schedule(), s)) == [2]  # 3 does not fit beside it, and 4 does not overtake 3
    assert ids(take(s.schedule(), s)) == [3]  # longer than the budget: alone
    assert ids(take(s.schedule(), s)) == [4]


def test_large_images_have_a_budget_of_their_own() -> None:
    s = scheduler(max_image_values=100)
    for i, values in enumerate([60, 40, 1, 500, 0]):
        s.add(sequence(i, 2, values))
    assert [ids(take(s.schedule(), s)) for _ in range(4)] == [[0, 1], [2], [3], [4]]
    assert not s.waiting


def test_running_sequences_are_limited() -> None:
    s = scheduler(max_num_seqs=2)
    for i in range(3):
        s.add(sequence(i, 2))
    assert ids(take(s.schedule(), s)) == [0, 1]
    step = take(s.schedule(), s)
    assert not step.is_prefill
    s.remove(step.sequences[0])
    assert ids(take(s.schedule(), s)) == [2]


def test_decoding_is_not_starved_by_a_stream_of_prompts() -> None:
    s = scheduler(max_batch_tokens=4, max_num_seqs=4, max_prefill_streak=2)
    oldest = sequence(0, 2)
    s.add(oldest)
    take(s.schedule(), s)
    since = 0
    for i in range(1, 30):
        s.add(sequence(i, 4))
        step = take(s.schedule(), s)
        since = 0 if oldest in step.sequences else since + 1
        assert since <= 2
        for other in list(step.sequences):
            if other is not oldest:
                s.remove(other)  # one-token answers: their slots are free again at once


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


def test_a_preempted_sequence_comes_before_those_that_never_ran() -> None:
    s = scheduler(num_blocks=4, block_size=2, max_num_seqs=2)
    for i in range(3):
        s.add(sequence(i, 2))
    take(s.schedule(), s)
    while not (step := take(s.schedule(), s)).preempted:
        pass
    assert [w.id for w in s.waiting] == [1, 2]
    s.remove(step.sequences[0])
    assert ids(s.schedule())[0] == 1


def test_nothing_to_do_is_no_step() -> None:
    assert scheduler().schedule() is None


requests = st.lists(
    st.tuples(st.integers(1, 24), st.integers(1, 20), st.sampled_from([0, 0, 7, 60, 300])), min_size=1, max_size=14
)


@settings(max_examples=200, deadline=None)
@given(
    requests=requests,
    cancels=st.dictionaries(st.integers(0, 13), st.integers(0, 30)),
    num_blocks=st.integers(11, 40),
    max_num_seqs=st.integers(1, 6),
    max_batch_tokens=st.integers(1, 50),
    max_prefill_streak=st.integers(1, 4),
    arrivals=st.integers(1, 4),
)
def test_every_request_ends_and_no_block_is_lost(
    requests: list[tuple[int, int, int]],
    cancels: dict[int, int],
    num_blocks: int,
    max_num_seqs: int,
    max_batch_tokens: int,
    max_prefill_streak: int,
    arrivals: int,
) -> None:
    s = scheduler(
        num_blocks,
        4,
        max_num_seqs=max_num_seqs,
        max_batch_tokens=max_batch_tokens,
        max_prefill_streak=max_prefill_streak,
    )
    todo = [(sequence(i, prompt, values), answer) for i, (prompt, answer, values) in enumerate(requests)]
    left = {seq.id: answer for seq, answer in todo}
    alive: dict[int, Sequence] = {}
    waits = dict.fromkeys(left, 0)
    total = sum(prompt + answer for prompt, answer, _ in requests)
    for tick in range(10 * total + 50):
        for _ in range(arrivals):
            if todo:
                seq, _ = todo.pop(0)
                s.add(seq)
                alive[seq.id] = seq
        for victim in [i for i, when in cancels.items() if when == tick and i in alive]:
            s.remove(alive.pop(victim))
        if (step := s.schedule()) is None:
            assert not alive
            if not todo:
                break
            continue
        check_step(s, step, alive)
        oldest = s.running[0]
        waits[oldest.id] = 0 if oldest in step.sequences else waits[oldest.id] + 1
        assert waits[oldest.id] <= max_prefill_streak
        take(step, s)
        for seq in step.sequences:
            left[seq.id] -= 1
            if left[seq.id] == 0:
                s.remove(alive.pop(seq.id))
    assert not alive
    assert not todo
    assert s.blocks.num_free == num_blocks


def check_step(s: Scheduler, step: Step, alive: dict[int, Sequence]) -> None:
    assert step.sequences
    assert [x.id for x in s.running] == sorted(x.id for x in s.running)
    assert {x.id for x in s.running} | {x.id for x in s.waiting} == set(alive)
    assert len(s.running) <= s.limits.max_num_seqs
    held = [b for x in alive.values() for b in x.block_table]
    assert len(held) == len(set(held))
    assert len(held) + s.blocks.num_free == s.blocks.num_blocks
    for x in step.sequences:
        assert len(x.block_table) == s.blocks.blocks_for(x.num_tokens)
    if step.is_prefill and len(step.sequences) > 1:
        assert sum(x.new_tokens for x in step.sequences) <= s.limits.max_batch_tokens
        assert sum(x.image_cost for x in step.sequences) <= s.limits.max_image_values
