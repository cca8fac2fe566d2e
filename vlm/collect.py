"""From the engine's events to what callers get: one Output a request, or Chunks as they come."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from vlm.engine.request import Event
from vlm.outputs import Chunk, Metrics, Output
from vlm.prepare import Prepared


@dataclass(eq=False)
class Answer:
    """Gathers the events of one request; `on_done` gets the Output of the last."""

    index: int
    prepared: Prepared
    on_done: Callable[[Output], None]
    _texts: list[str] = field(default_factory=list)
    _token_ids: list[int] = field(default_factory=list)

    def __call__(self, event: Event) -> None:
        self._texts.append(event.text)
        self._token_ids += event.token_ids
        if event.finish_reason is not None:
            self.on_done(self._output(event))

    def _output(self, event: Event) -> Output:
        assert event.finish_reason is not None
        failed = event.error is not None
        return Output(
            index=self.index,
            text="" if failed else "".join(self._texts),
            token_ids=tuple(self._token_ids),
            finish_reason=event.finish_reason,
            usage=event.usage,
            image_sizes=self.prepared.image_sizes,
            source_sizes=self.prepared.source_sizes,
            source_frames=self.prepared.source_frames,
            logprobs=event.logprobs,
            error=event.error,
            metrics=Metrics(event.time_to_first_token, event.total_time),
        )


def failed(index: int, error: BaseException, seconds: float = 0.0) -> Output:
    """The output of an input that never became a request."""
    return Output(index=index, finish_reason="error", error=error, metrics=Metrics(None, seconds))


class ChunkMaker:
    """Joins events without text to the next that has some, so that every chunk but the last shows something."""

    def __init__(self) -> None:
        self._token_ids: list[int] = []

    def push(self, event: Event) -> Chunk | None:
        """Raises the error of a request that failed."""
        if event.error is not None:
            raise event.error
        self._token_ids += event.token_ids
        if not event.text and event.finish_reason is None:
            return None
        chunk = Chunk(event.text, tuple(self._token_ids), event.finish_reason)
        self._token_ids = []
        return chunk
