"""The engine behind its queue: many threads, closing, and an engine that breaks."""

from __future__ import annotations

import queue
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from vlm.engine.request import Event
from vlm.engine.thread import EngineThread
from vlm.errors import ContextLengthError, VLMError

Fake = SimpleNamespace
TIMEOUT = 30


def answer(thread: EngineThread, request: Any) -> list[Event]:
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    thread.submit(request, events.put)
    got = [events.get(timeout=TIMEOUT)]
    while got[-1].finish_reason is None:
        got.append(events.get(timeout=TIMEOUT))
    return got


def test_requests_from_many_threads_get_their_own_answers(fake: Fake) -> None:
    thread = EngineThread(fake.engine())
    alone = {i: [t for e in answer(thread, fake.request(i, [10 + i])) for t in e.token_ids] for i in range(8)}
    got: dict[int, list[int]] = {}

    def work(i: int) -> None:
        for n in range(5):
            events = answer(thread, fake.request(100 + 10 * i + n, [10 + i]))
            got[10 * i + n] = [t for e in events for t in e.token_ids]

    workers = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(TIMEOUT)
    assert got == {10 * i + n: alone[i] for i in range(8) for n in range(5)}
    thread.close()


def test_a_refusal_comes_as_an_event(fake: Fake) -> None:
    thread = EngineThread(fake.engine())
    (event,) = answer(thread, fake.request(0, [10] * 200))
    assert isinstance(event.error, ContextLengthError)
    assert answer(thread, fake.request(1, [10]))[-1].finish_reason == "length"
    thread.close()


def test_closing_cancels_what_is_in_flight(fake: Fake) -> None:
    model = fake.Model()
    gate, reached = threading.Event(), threading.Event()
    decode = model.decode

    def slow(*args: Any) -> Any:
        reached.set()
        assert gate.wait(TIMEOUT)
        return decode(*args)

    model.decode = slow
    thread = EngineThread(fake.engine(model))
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    for i in range(3):
        thread.submit(fake.request(i, [10 + i]), events.put)
    assert reached.wait(TIMEOUT)
    closer = threading.Thread(target=thread.close)
    closer.start()
    gate.set()
    closer.join(TIMEOUT)
    assert not closer.is_alive()
    last = [e for e in iter_queue(events) if e.finish_reason]
    assert sorted(e.request_id for e in last) == [0, 1, 2]
    assert "cancelled" in {e.finish_reason for e in last}
    with pytest.raises(VLMError, match="closed"):
        thread.submit(fake.request(9, [10]), events.put)
    thread.cancel(9)
    thread.close()
    assert thread.metrics().running == 0


def iter_queue(events: queue.SimpleQueue[Event]) -> list[Event]:
    return [events.get() for _ in range(events.qsize())]


def test_closing_before_the_first_request(fake: Fake) -> None:
    EngineThread(fake.engine()).close()


def test_a_broken_step_ends_its_requests_and_the_next_one_works(fake: Fake, caplog: pytest.LogCaptureFixture) -> None:
    engine = fake.engine()
    thread = EngineThread(engine)
    schedule = engine._scheduler.schedule
    engine._scheduler.schedule = lambda: 1 / 0
    (event,) = answer(thread, fake.request(0, [10]))
    assert isinstance(event.error, ZeroDivisionError)
    assert "the engine failed" in caplog.text
    engine._scheduler.schedule = schedule
    assert answer(thread, fake.request(1, [10]))[-1].finish_reason == "length"
    thread.close()


def test_a_receiver_that_raises_harms_nobody(fake: Fake, caplog: pytest.LogCaptureFixture) -> None:
    thread = EngineThread(fake.engine())

    def bad(event: Event) -> None:
        raise ValueError("receiver")

    thread.submit(fake.request(0, [10]), bad)
    assert answer(thread, fake.request(1, [11]))[-1].finish_reason == "length"
    thread.close()
    assert "a receiver of request 0 failed" in caplog.text


def test_a_thread_that_dies_tells_everybody(fake: Fake, caplog: pytest.LogCaptureFixture) -> None:
    engine = fake.engine()
    thread = EngineThread(engine)

    def die() -> None:
        raise SystemExit

    engine._scheduler.schedule = die
    (event,) = answer(thread, fake.request(0, [10]))
    assert isinstance(event.error, SystemExit)
    with pytest.raises(VLMError, match="closed"):
        thread.submit(fake.request(1, [10]), print)
    thread.close()
