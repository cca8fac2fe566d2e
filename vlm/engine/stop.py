"""When an answer ends, and which of its text may be shown. One checker a sequence; knows ids and text only."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from vlm.outputs import FinishReason
from vlm.params import ResolvedParams

LONGEST_REPEATED_RUN = 32


class TextDecoder(Protocol):
    """Token ids to text, a few at a time; only whole characters come out."""

    def push(self, ids: Iterable[int]) -> str: ...

    def flush(self) -> str: ...


@dataclass(frozen=True)
class Verdict:
    """Text that is safe to show after one more token, and why the answer ends, if it does."""

    text: str
    finish_reason: FinishReason | None = None


class RepetitionCounter:
    """Counts how often the run of tokens at the end stands there in a row, for runs of 1 to 32 tokens."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._ids: list[int] = []
        # For each period n: how many of the last ids equal the one n before them, without a gap.
        self._matching = [0] * (LONGEST_REPEATED_RUN + 1)

    def push(self, token_id: int) -> bool:
        """Whether some run now stands `limit` times in a row."""
        self._ids.append(token_id)
        reached = False
        for period in range(1, min(LONGEST_REPEATED_RUN, len(self._ids) - 1) + 1):
            same = self._ids[-1 - period] == token_id
            self._matching[period] = self._matching[period] + 1 if same else 0
            reached = reached or self._matching[period] >= period * (self.limit - 1)
        return reached


class StopChecker:
    """Feeds on generated tokens one by one.

    Text that may be the beginning of a stop string is held back until it is known not to be one. The text of all
    verdicts
    together is the answer: cut before the stop string that is complete first, without the text of a stop id.
    """

    def __init__(self, params: ResolvedParams, decoder: TextDecoder, max_tokens: int) -> None:
        """`max_tokens` is what the parameters and the room left in the context allow."""
        self._params = params
        self._decoder = decoder
        self._left = max_tokens
        self._held = ""
        self._repetition = RepetitionCounter(params.repetition_limit) if params.repetition_limit else None

    def push(self, token_id: int) -> Verdict:
        self._left -= 1
        if token_id in self._params.stop_token_ids:
            return self._end(self._decoder.flush(), "stop")
        text = self._decoder.push([token_id])
        repeated = self._repetition is not None and self._repetition.push(token_id)
        if repeated or self._left <= 0:
            return self._end(text + self._decoder.flush(), "repetition" if repeated else "length")
        return self._show(text)

    def flush(self) -> str:
        """What is left to show of an answer that is broken off."""
        return self._end(self._decoder.flush(), "cancelled").text

    def _show(self, text: str) -> Verdict:
        if not self._params.stop:
            return Verdict(text)
        text = self._held + text
        if (cut := self._find_stop(text)) is not None:
            return Verdict(text[:cut], "stop")
        keep = self._prefix_length(text)
        self._held = text[len(text) - keep :]
        return Verdict(text[: len(text) - keep])

    def _end(self, text: str, reason: FinishReason) -> Verdict:
        text = self._held + text
        self._held = ""
        if (cut := self._find_stop(text)) is not None:
            return Verdict(text[:cut], "stop")
        return Verdict(text, reason)

    def _find_stop(self, text: str) -> int | None:
        """Where to cut: the stop string that is complete first wins, however the text falls into tokens."""
        found = [(at + len(stop), at) for stop in self._params.stop if (at := text.find(stop)) >= 0]
        return min(found)[1] if found else None

    def _prefix_length(self, text: str) -> int:
        """Length of the longest end of `text` that a stop string begins with."""
        longest = max((len(stop) for stop in self._params.stop), default=1) - 1
        for length in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[len(text) - length :]) for stop in self._params.stop):
                return length
        return 0
