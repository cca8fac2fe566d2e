"""What a request gives back. Plain frozen values; nothing here holds a tensor or a picture."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "repetition", "cancelled", "error"]


@dataclass(frozen=True)
class Usage:
    """Token counts. `prompt_tokens` includes `image_tokens`, the positions that hold image features."""

    prompt_tokens: int = 0
    image_tokens: int = 0
    completion_tokens: int = 0


@dataclass(frozen=True)
class Metrics:
    """Seconds on the host clock: from arrival to the first token, and to the end."""

    time_to_first_token: float | None = None
    total_time: float = 0.0


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities at one position: of the token taken, and of the most likely ones (token id -> logprob)."""

    token_id: int
    logprob: float
    top: dict[int, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Output:
    """The answer to one request, or why there is none.

    Attributes:
        index: position of the input in what the caller passed.
        text: the answer, "" when `error` is set. token_ids: generated ids, the stop token included.
        image_sizes: (width, height) of each image as the model saw it, after resizing.
        source_sizes: (width, height) of each image as it came, upright.
        source_frames: frames or pages that the source of each image holds. Where it is more than 1, the model saw one
            of them: the first, or the one that `vlm.Image.open(source, frame=...)` named.
        logprobs: one entry a generated token where SamplingParams.logprobs asked for it, else None.
        error: the exception of a failed input, else None.
    """

    index: int
    text: str = ""
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason = "stop"
    usage: Usage = Usage()
    image_sizes: tuple[tuple[int, int], ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None
    error: BaseException | None = None
    metrics: Metrics = Metrics()
    source_sizes: tuple[tuple[int, int], ...] = ()
    source_frames: tuple[int, ...] = ()


@dataclass(frozen=True)
class Chunk:
    """A piece of a streamed answer. Texts concatenate to the whole; `finish_reason` is set on the last one only."""

    text: str
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
