"""Many inputs: exactly one output each, a bounded window, and an early end that leaves nothing running."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from vlm.engine.request import Event
from vlm.errors import PromptError, VLMError
from vlm.many import ManyRun, Window, check_iterable, check_on_error
from vlm.outputs import Output


class EchoEngine:
    """Answers each request with its input, from a thread of its own; `hold` keeps requests until it is set."""

    def __init__(self, hold: bool = False, reverse: bool = False) -> None:
        self.cancelled: list[int] = []
        self.submitted: list[int] = []
        self.closed = False
        self._hold, self._reverse = hold, reverse
        self._kept: list[Any] = []

    def submit(self, request: Any, on_event: Any) -> None:
        if self.closed:
            raise VLMError("closed")
        self.submitted.append(request.id)
        event = Event(request.id, text=request.text, token_ids=(1,), finish_reason="stop")
        if self._hold or self._reverse:
            self._kept.append((on_event, event))
            if self._reverse and len(self._kept) == 4:
                self.release()
            return
        threading.Thread(target=on_event, args=(event,)).start()

    def release(self) -> None:
        kept, self._kept = self._kept[::-1], []
        for on_event, event in kept:
            on_event(event)

    def cancel(self, request_id: int) -> None:
        self.cancelled.append(request_id)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as executor:
        yield executor


def prepare(request_id: int, value: Any) -> Any:
    if isinstance(value, Exception):
        raise value
    request = SimpleNamespace(id=request_id, text=f"<{value}>", images=())
    return SimpleNamespace(request=request, image_sizes=(), source_sizes=(), source_frames=(), num_bytes=10)


def make(
    engine: Any, pool: Any, *, ordered: bool = True, on_error: Any = "record", prepare: Any = prepare, **window: int
) -> ManyRun:
    sizes = {"max_inputs": 8, "max_preparing": 4, "max_bytes": 1000, **window}
    return ManyRun(engine, pool, prepare, itertools.count(100).__next__, Window(**sizes), ordered, on_error)


def test_one_output_an_input_in_order(pool: Any) -> None:
    outputs = list(make(EchoEngine(), pool).outputs(range(50)))
    assert [o.index for o in outputs] == list(range(50))
    assert [o.text for o in outputs] == [f"<{i}>" for i in range(50)]


def test_answers_that_come_in_another_order(pool: Any) -> None:
    assert [o.index for o in make(EchoEngine(reverse=True), pool).outputs(range(8))] == list(range(8))
    unordered = [o.index for o in make(EchoEngine(reverse=True), pool, ordered=False).outputs(range(8))]
    assert sorted(unordered) == list(range(8))
    assert unordered != list(range(8))


def test_nothing_in_nothing_out(pool: Any) -> None:
    assert list(make(EchoEngine(), pool).outputs([])) == []


@pytest.mark.parametrize("ordered", [True, False])
def test_a_bad_input_is_recorded_where_it_stands(pool: Any, ordered: bool) -> None:
    inputs = [1, ValueError("bad"), 3, 4, KeyError("worse")]
    outputs = sorted(make(EchoEngine(), pool, ordered=ordered).outputs(inputs), key=lambda o: o.index)
    assert [o.index for o in outputs] == list(range(5))
    assert [type(o.error) for o in outputs] == [type(None), ValueError, type(None), type(None), KeyError]
    assert outputs[1].finish_reason == "error"
    assert outputs[1].text == ""


def test_raise_raises_at_that_input_and_cancels_the_rest(pool: Any) -> None:
    engine = EchoEngine()
    got: list[Output] = []
    with pytest.raises(ValueError, match="bad"):
        got.extend(make(engine, pool, on_error="raise").outputs([1, 2, ValueError("bad"), 4]))
    outputs = make(engine, pool, on_error="raise").outputs([1, 2, ValueError("bad"), 4])
    assert [next(outputs).text, next(outputs).text] == ["<1>", "<2>"]
    with pytest.raises(ValueError, match="bad"):
        next(outputs)


def test_inputs_are_pulled_no_further_than_the_window(pool: Any) -> None:
    engine = EchoEngine(hold=True)
    pulled = itertools.count()
    run = make(engine, pool, max_inputs=5, max_preparing=2)
    outputs = run.outputs(next(pulled) for _ in itertools.repeat(None))
    waiting = threading.Thread(target=lambda: next(outputs))
    waiting.start()
    wait_for(lambda: len(engine.submitted) == 5)
    time.sleep(0.05)
    assert next(pulled) == 5
    engine.release()
    waiting.join(10)
    assert not waiting.is_alive()


def test_pictures_held_are_bounded_in_bytes(pool: Any) -> None:
    engine = EchoEngine(hold=True)
    run = make(engine, pool, max_inputs=100, max_preparing=1, max_bytes=30)
    outputs = run.outputs(range(100))
    waiting = threading.Thread(target=lambda: next(outputs))
    waiting.start()
    wait_for(lambda: len(engine.submitted) == 3)
    time.sleep(0.05)
    assert len(engine.submitted) == 3  # 10 bytes each
    engine.release()
    waiting.join(10)
    assert not waiting.is_alive()


def test_one_picture_beyond_the_bytes_still_runs(pool: Any) -> None:
    assert len(list(make(EchoEngine(), pool, max_bytes=1).outputs(range(5)))) == 5


def test_closing_early_cancels_what_is_in_flight(pool: Any) -> None:
    engine = EchoEngine(hold=True)
    run = make(engine, pool, max_inputs=4)
    outputs = run.outputs(itertools.count())
    thread = threading.Thread(target=lambda: next(outputs))
    thread.start()
    wait_for(lambda: len(engine.submitted) == 4)
    on_event, event = engine._kept.pop(0)
    on_event(event)
    thread.join(10)
    outputs.close()  # type: ignore[attr-defined]
    wait_for(lambda: set(engine.submitted) - {100} <= set(engine.cancelled))


def test_what_is_still_being_prepared_at_an_early_end_is_cancelled(pool: Any) -> None:
    engine = EchoEngine()
    started, gate = threading.Event(), threading.Event()

    def slow(request_id: int, value: Any) -> Any:
        if value == 1:
            started.set()
            assert gate.wait(10)
        return prepare(request_id, value)

    outputs = make(engine, pool, prepare=slow).outputs(range(4))
    assert next(outputs).text == "<0>"
    assert started.wait(10)
    outputs.close()  # type: ignore[attr-defined]
    engine.cancelled.clear()
    gate.set()
    wait_for(lambda: 101 in engine.cancelled)


def test_an_iterable_that_raises_does_so_after_its_earlier_inputs(pool: Any) -> None:
    def inputs() -> Iterator[int]:
        yield from range(3)
        raise OSError("the list ends badly")

    outputs = make(EchoEngine(), pool).outputs(inputs())
    assert [next(outputs).text for _ in range(3)] == ["<0>", "<1>", "<2>"]
    with pytest.raises(OSError, match="ends badly"):
        next(outputs)


def test_a_closed_engine_is_an_error_of_every_input(pool: Any) -> None:
    engine = EchoEngine()
    engine.closed = True
    outputs = list(make(engine, pool).outputs(range(3)))
    assert [type(o.error) for o in outputs] == [VLMError] * 3


def test_a_closed_pool_raises(pool: Any) -> None:
    pool.shutdown()
    with pytest.raises(VLMError, match="closed"):
        list(make(EchoEngine(), pool).outputs(range(3)))


def test_many_random_runs_lose_and_double_nothing(pool: Any) -> None:
    for seed in range(20):
        engine = EchoEngine(reverse=seed % 2 == 1)
        inputs: list[Any] = [ValueError(str(i)) if (i * 7 + seed) % 5 == 0 and not seed % 2 else i for i in range(24)]
        outputs = list(make(engine, pool, max_inputs=4 + 4 * (seed % 3), max_preparing=4).outputs(inputs))
        assert [o.index for o in outputs] == list(range(24))
        assert all((o.error is not None) == isinstance(x, Exception) for o, x in zip(outputs, inputs, strict=True))


@pytest.mark.parametrize("single", ["a.jpg", b"bytes", {"role": "user"}, 3, None])
def test_a_single_input_for_many_is_refused(single: Any) -> None:
    with pytest.raises(PromptError, match="expected an iterable of images"):
        check_iterable(single, "images")


def test_arrays_and_paths_for_many(tmp_path: Any) -> None:
    import numpy as np
    from PIL import Image

    for single in (tmp_path, np.zeros((4, 4, 3), np.uint8), Image.new("RGB", (2, 2)), (tmp_path / "x").open("wb")):
        with pytest.raises(PromptError, match="expected an iterable"):
            check_iterable(single, "images")
        if hasattr(single, "close"):
            single.close()
    check_iterable(np.zeros((2, 4, 4, 3), np.uint8), "images")
    check_iterable(iter([1]), "images")


def test_on_error_is_one_of_two() -> None:
    with pytest.raises(PromptError, match="ignore"):
        check_on_error("ignore")


def wait_for(condition: Any, seconds: float = 10) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "timed out"
        time.sleep(0.002)
