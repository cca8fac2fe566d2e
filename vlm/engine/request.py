"""A request as the engine sees it, and the state of one that is being served."""

from __future__ import annotations

import time
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vlm.outputs import FinishReason, TokenLogprobs, Usage

if TYPE_CHECKING:
    import torch

    from vlm.engine.stop import StopChecker
    from vlm.families.base import ImageInputs
    from vlm.params import ResolvedParams


@dataclass(frozen=True, eq=False)
class Request:
    """One prompt to continue.

    Attributes:
        id: unique among the requests that the engine holds.
        token_ids: the prompt, image tokens expanded. images: preprocessed pictures, in the order of their tokens.
        positions: int64 (T,) or (3, T). next_position: position of the first generated token.
        params: complete sampling parameters. num_image_tokens: how many of `token_ids` hold image features.
        arrival: host clock (`time.perf_counter`) at which the caller asked.
    """

    id: int
    token_ids: tuple[int, ...]
    positions: torch.Tensor
    next_position: int
    params: ResolvedParams
    images: tuple[ImageInputs, ...] = ()
    num_image_tokens: int = 0
    arrival: float = field(default_factory=time.perf_counter)

    @property
    def image_cost(self) -> int:
        """Pixel values that the vision encoder reads: the unit of the encoder budget."""
        return sum(image.pixels.numel() for image in self.images)


@dataclass(eq=False)
class Sequence:
    """A request while it is served. The scheduler owns `block_table` and `num_cached`; the engine the rest.

    `num_cached` tokens (prompt first, then generated) have their keys and values in the cache. A preempted sequence
    starts again from 0 with what it generated as part of its prompt.
    """

    request: Request
    seed: int
    checker: StopChecker
    output_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    block_table: list[int] = field(default_factory=list)
    num_cached: int = 0
    first_token_at: float | None = None

    @property
    def id(self) -> int:
        return self.request.id

    @property
    def num_tokens(self) -> int:
        return len(self.request.token_ids) + len(self.output_ids)

    @property
    def new_tokens(self) -> int:
        """Tokens that the next step has to run."""
        return self.num_tokens - self.num_cached

    @property
    def image_cost(self) -> int:
        return self.request.image_cost if self.num_cached == 0 else 0

    def tokens_from(self, start: int) -> SequenceOf[int]:
        prompt = self.request.token_ids
        if start >= len(prompt):
            return self.output_ids[start - len(prompt) :]
        return [*prompt[start:], *self.output_ids]

    @property
    def usage(self) -> Usage:
        request = self.request
        return Usage(len(request.token_ids), request.num_image_tokens, len(self.output_ids))


@dataclass(frozen=True)
class Event:
    """News of one request: text and ids since the last event; `finish_reason` is set on the last one only.

    `error` is set with finish_reason `error`. The last event carries the whole of usage, logprobs and times.
    """

    request_id: int
    text: str = ""
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    error: BaseException | None = None
    usage: Usage = field(default_factory=Usage)
    logprobs: tuple[TokenLogprobs, ...] | None = None
    time_to_first_token: float | None = None
    total_time: float = 0.0
