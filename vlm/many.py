"""Many inputs through the engine: pulled lazily, decoded ahead on threads, answered in order, within a bounded window.

The caller's thread pulls the inputs and waits; pool threads prepare them and hand them to the engine; the engine's
thread answers. What they tell the caller goes through one queue.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any, Literal

from vlm.collect import Answer, failed
from vlm.engine.thread import CLOSED, EngineThread
from vlm.errors import PromptError, VLMError
from vlm.outputs import Output
from vlm.prepare import Prepared

OnError = Literal["record", "raise"]


@dataclass(frozen=True)
class Window:
    """How far to run ahead of the consumer.

    Attributes:
        max_inputs: inputs pulled and not yet yielded. max_preparing: of these, inputs being decoded.
        max_bytes: preprocessed pictures held; one input more may be on its way.
    """

    max_inputs: int
    max_preparing: int
    max_bytes: int


def check_on_error(on_error: str) -> None:
    if on_error not in ("record", "raise"):
        raise PromptError(f"on_error={on_error!r}: use 'record' or 'raise'")


def check_ordered(ordered: bool) -> None:
    if not isinstance(ordered, bool):
        raise PromptError(f"ordered={ordered!r}: ordered must be True or False")


def check_iterable(inputs: Any, what: str) -> None:
    """A single input passed for many would be walked by character or by pixel: refuse it."""
    single = (
        isinstance(inputs, (str, bytes, bytearray, dict))
        or hasattr(inputs, "__fspath__")
        or hasattr(inputs, "read")
        or 0 < len(getattr(inputs, "shape", ())) <= 3
    )
    if single or not isinstance(inputs, Iterable):
        raise PromptError(
            f"expected an iterable of {what}, got one {type(inputs).__name__}; for a single one use a list"
        )


@dataclass(eq=False)
class ManyRun:
    """One call of caption_many or chat_many.

    `prepare(request_id, input)` runs on the pool; `next_id` numbers requests in the order of the inputs.
    """

    engine: EngineThread
    pool: Executor
    prepare: Callable[[int, Any], Prepared]
    next_id: Callable[[], int]
    window: Window
    ordered: bool
    on_error: OnError
    _news: queue.SimpleQueue[Callable[[], None]] = field(default_factory=queue.SimpleQueue)
    _stopped: threading.Event = field(default_factory=threading.Event)
    _ids: dict[int, int] = field(default_factory=dict)  # index -> request id, while unfinished
    _bytes: dict[int, int] = field(default_factory=dict)  # index -> bytes of its pictures, while unfinished
    _done: dict[int, Output] = field(default_factory=dict)  # finished, not yet yielded
    _preparing: int = 0

    def outputs(self, inputs: Iterable[Any]) -> Iterator[Output]:
        """Closing the generator early, or an exception in it, cancels what is in flight."""
        source = iter(inputs)
        pulled = yielded = 0
        ended: Exception | bool = False
        try:
            while True:
                while not ended and self._has_room(pulled - yielded):
                    try:
                        item = next(source)
                    except StopIteration:
                        ended = True
                    except Exception as error:  # the caller's own iterable: raised once its earlier inputs are answered
                        ended = error
                    else:
                        self._start(pulled, item)
                        pulled += 1
                if pulled == yielded:
                    break
                for output in self._take(yielded):
                    yielded += 1
                    yield self._checked(output)
            if isinstance(ended, Exception):
                raise ended
        finally:
            self._stop()

    def _has_room(self, in_flight: int) -> bool:
        window = self.window
        fits = sum(self._bytes.values()) < window.max_bytes or not in_flight
        return in_flight < window.max_inputs and self._preparing < window.max_preparing and fits

    def _checked(self, output: Output) -> Output:
        if output.error is not None and self.on_error == "raise":
            raise output.error
        return output

    def _take(self, first: int) -> Iterator[Output]:
        """Wait for news, then give what may be yielded now; `first` is the next index when ordered."""
        self._news.get()()
        while not self._news.empty():
            self._news.get()()
        if not self.ordered:
            while self._done:
                yield self._done.pop(next(iter(self._done)))
            return
        while first in self._done:
            yield self._done.pop(first)
            first += 1

    def _start(self, index: int, item: Any) -> None:
        self._preparing += 1
        request_id = self._ids[index] = self.next_id()
        try:
            self.pool.submit(self._work, index, request_id, item)
        except RuntimeError as error:
            raise VLMError(CLOSED) from error

    def _work(self, index: int, request_id: int, item: Any) -> None:
        """On a pool thread."""
        if self._stopped.is_set():
            return
        started = time.perf_counter()
        try:
            prepared = self.prepare(request_id, item)
            self._news.put(lambda: self._on_prepared(index, prepared.num_bytes))
            answer = Answer(index, prepared, lambda output: self._news.put(lambda: self._on_done(output)))
            self.engine.submit(prepared.request, answer)
        except Exception as error:
            output = failed(index, error, time.perf_counter() - started)
            self._news.put(lambda: self._on_failed(output))
        if self._stopped.is_set():
            self.engine.cancel(request_id)

    def _on_prepared(self, index: int, num_bytes: int) -> None:
        self._preparing -= 1
        self._bytes[index] = num_bytes

    def _on_failed(self, output: Output) -> None:
        if output.index not in self._bytes:
            self._preparing -= 1
        self._on_done(output)

    def _on_done(self, output: Output) -> None:
        self._bytes.pop(output.index, None)
        self._ids.pop(output.index)
        self._done[output.index] = output

    def _stop(self) -> None:
        self._stopped.set()
        for request_id in self._ids.values():
            self.engine.cancel(request_id)
