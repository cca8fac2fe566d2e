"""The engine behind a queue: one background thread runs it, any thread may send requests.

Events go to the callback that came with the request, on the engine's thread: a callback hands over and returns.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Iterable

from vlm.engine.engine import Engine, EngineMetrics
from vlm.engine.memory import on_device
from vlm.engine.request import Event, Request
from vlm.errors import VLMError

log = logging.getLogger(__name__)
OnEvent = Callable[[Event], None]
Command = Callable[[Engine], None]
CLOSED = "this model is closed; make a new VLM"


class EngineThread:
    """Starts with the first request; `close` ends it."""

    def __init__(self, engine: Engine) -> None:
        self._engine: Engine | None = engine
        self._last_metrics = engine.metrics()
        self._inbox: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._callbacks: dict[int, OnEvent] = {}
        # Reentrant: closing may be the work of a garbage collection that runs inside another call.
        self._lock = threading.RLock()
        self._thread: threading.Thread | None = None
        self._closed = False

    def submit(self, request: Request, on_event: OnEvent) -> None:
        """Queue a request. Every outcome, a refusal too, comes as an event; only a closed engine raises here."""
        self._send(lambda engine: self._admit(engine, request, on_event))

    def cancel(self, request_id: int) -> None:
        """End a request soon; it gets a last event `cancelled`, or had its last one already. Never raises."""
        with self._lock:
            if not self._closed:
                self._inbox.put(lambda engine: self._cancel(engine, request_id))

    def metrics(self) -> EngineMetrics:
        """A snapshot; numbers may be of neighbouring steps."""
        engine = self._engine
        return self._last_metrics if engine is None else engine.metrics()

    def close(self) -> None:
        """Cancel what is in flight, end the thread and let go of the engine, and so of the model. Idempotent."""
        with self._lock:
            self._closed = True
            thread = self._thread
            self._inbox.put(lambda engine: None)
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        if self._engine is not None:
            self._last_metrics = self._engine.metrics()
            self._engine = None

    def _send(self, command: Command) -> None:
        with self._lock:
            if self._closed:
                raise VLMError(CLOSED)
            if self._thread is None:
                self._thread = threading.Thread(target=self._loop, args=(self._engine,), name="vlm-engine", daemon=True)
                self._thread.start()
            self._inbox.put(command)

    def _loop(self, engine: Engine) -> None:
        try:
            with on_device(engine.config.device):
                self._serve(engine)
        except BaseException as error:
            log.exception("the engine's thread ends")
            self._abandon(engine, error)

    def _serve(self, engine: Engine) -> None:
        while not self._closed:
            self._take_commands(engine)
            self._deliver(self._step(engine))
        self._take_commands(engine, block=False)
        for request_id in list(self._callbacks):
            self._cancel(engine, request_id)

    def _abandon(self, engine: Engine, error: BaseException) -> None:
        """Nobody will run the engine any more: tell everybody who waits for it."""
        with self._lock:
            self._closed = True
        with contextlib.suppress(Exception):
            self._take_commands(engine, block=False)
        self._deliver([Event(request_id, finish_reason="error", error=error) for request_id in self._callbacks])

    def _take_commands(self, engine: Engine, block: bool = True) -> None:
        """Run what other threads sent; wait for it when there is nothing else to do."""
        block = block and not engine.has_work and not self._closed
        while True:
            try:
                command = self._inbox.get(block=block)
            except queue.Empty:
                return
            command(engine)
            block = False

    def _step(self, engine: Engine) -> list[Event]:
        try:
            return engine.step()
        except Exception as error:
            log.exception("the engine failed; the requests that it held are lost")
            return engine.fail_all(error)

    def _admit(self, engine: Engine, request: Request, on_event: OnEvent) -> None:
        self._callbacks[request.id] = on_event
        try:
            engine.add(request)
        except Exception as error:
            self._deliver([Event(request.id, finish_reason="error", error=error)])

    def _cancel(self, engine: Engine, request_id: int) -> None:
        if event := engine.cancel(request_id):
            self._deliver([event])

    def _deliver(self, events: Iterable[Event]) -> None:
        for event in events:
            on_event = self._callbacks[event.request_id]
            if event.finish_reason is not None:
                del self._callbacks[event.request_id]
            try:
                on_event(event)
            except Exception:
                log.exception("a receiver of request %d failed", event.request_id)
