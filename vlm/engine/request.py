"""A request as the engine sees it, and the state of one that is being served."""

from __future__ import annotations

import time
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from vlm.engine.image_rows import NO_IMAGES, ImageRows
from vlm.outputs import FinishReason, TokenLogprobs, Usage

if TYPE_CHECKING:
    from vlm.engine.stop import StopChecker
    from vlm.families.base import ImageInputs
    from vlm.params import ResolvedParams


@dataclass(frozen=True, eq=False)
class Request:
    """One prompt to continue.

    Attributes:
        id: unique among the requests that the engine holds.
        token_ids: the prompt, image tokens expanded. images: preprocessed pictures, in the order of their tokens.
        image_keys: a key for each picture, equal for two pictures only if the model sees the same; () for none, and
            nothing that depends on these pictures is shared with other requests.
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
    image_keys: tuple[bytes, ...] = ()
    arrival: float = field(default_factory=time.perf_counter)

    def key_of(self, image: int) -> bytes | None:
        """The key of an image, by its number, where it has one."""
        return self.image_keys[image] if self.image_keys else None


@dataclass(eq=False)
class Sequence:
    """A request while it is served. The scheduler owns `block_table`, `num_cached` and `admitted`; the engine the rest.

    `num_cached` tokens (prompt first, then generated) have their keys and values in the cache. A preempted sequence
    starts again from 0 with what it generated as part of its prompt. `features` holds those of the images (by number)
    whose tokens run now: from the step that encodes an image to the one that runs its last token. `block_hashes`: see
    vlm.engine.prefix.
    """

    request: Request
    seed: int
    checker: StopChecker
    output_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    block_table: list[int] = field(default_factory=list)
    num_cached: int = 0
    image_rows: ImageRows = NO_IMAGES
    features: dict[int, torch.Tensor] = field(default_factory=dict)
    block_hashes: list[bytes] = field(default_factory=list)
    admitted: bool = False
    first_token_at: float | None = None

    @property
    def id(self) -> int:
        return self.request.id

    @property
    def num_tokens(self) -> int:
        return len(self.request.token_ids) + len(self.output_ids)

    @property
    def new_tokens(self) -> int:
        """Tokens that are not in the cache yet."""
        return self.num_tokens - self.num_cached

    @property
    def decoding(self) -> bool:
        """Whether only its last generated token is left to run."""
        return self.new_tokens == 1 and bool(self.output_ids)

    def tokens(self, start: int, stop: int) -> SequenceOf[int]:
        """Token ids start .. stop of prompt and answer."""
        prompt = self.request.token_ids
        if start >= len(prompt):
            return self.output_ids[start - len(prompt) : stop - len(prompt)]
        return [*prompt[start:stop], *self.output_ids[: max(0, stop - len(prompt))]]

    def position_at(self, index: int) -> int:
        """Position of a generated token, by its index in prompt and answer."""
        return self.request.next_position + index - len(self.request.token_ids)

    def positions(self, start: int, stop: int) -> torch.Tensor:
        """int64 (stop - start,) or (3, stop - start): positions of the tokens start .. stop."""
        prompt = self.request.positions[..., start:stop]
        missing = stop - start - prompt.shape[-1]
        if not missing:
            return prompt
        generated = prompt.new_tensor([self.position_at(i) for i in range(stop - missing, stop)])
        return torch.cat((prompt, generated.expand(*prompt.shape[:-1], -1)), dim=-1)

    @property
    def usage(self) -> Usage:
        request = self.request
        return Usage(len(request.token_ids), request.num_image_tokens, len(self.output_ids))


@dataclass(frozen=True, eq=False)
class Run:
    """What a step does of one sequence: its next `count` tokens, from `start` on."""

    sequence: Sequence
    start: int
    count: int

    @property
    def stop(self) -> int:
        return self.start + self.count

    @property
    def samples(self) -> bool:
        """Whether a token follows: no part of the prompt is left to run."""
        return self.stop == self.sequence.num_tokens

    @property
    def is_decode(self) -> bool:
        """Whether it runs one generated token, as every step of an answer but the first."""
        return self.count == 1 and self.start >= len(self.sequence.request.token_ids)


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
