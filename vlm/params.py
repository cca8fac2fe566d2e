"""Sampling parameters: what a caller may ask of generation, and what it comes to for one model.

`SamplingParams` is what users write, with None for "as the model says". `resolve` fills it from the checkpoint's
generation_config.json and gives the engine a value without gaps. Pure data: imports no torch.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from numbers import Integral, Real
from types import NoneType
from typing import Any

from vlm.errors import CheckpointError, PromptError, UnsupportedModelError

CAPTION_MAX_TOKENS = 256
CHAT_MAX_TOKENS = 1024
# Below this a division of the logits only moves them towards infinity: the answer is the greedy one.
GREEDY_BELOW = 1e-5
MAX_LOGPROBS = 100


@dataclass(frozen=True)
class _Rule:
    """Which values a parameter takes: finite numbers from `low` (above it when `low_open`) to `high`; None is unset."""

    says: str
    low: float
    high: float = sys.float_info.max
    low_open: bool = False
    whole: bool = False

    def allows(self, value: Any) -> bool:
        if value is None:
            return True
        is_number = isinstance(value, Integral if self.whole else Real) and not isinstance(value, bool)
        # The comparison is false for NaN.
        return is_number and bool(self.low <= value <= self.high) and not (self.low_open and value == self.low)


_TOKEN_ID = _Rule("a token id, an integer from 0", 0, whole=True)
_RULES = {
    "temperature": _Rule("a finite number, 0 or more", 0),
    "top_p": _Rule("a number above 0 and at most 1", 0, 1, low_open=True),
    "top_k": _Rule("an integer, 1 or more, or 0 or -1 for off", -1, whole=True),
    "min_p": _Rule("a number from 0 to 1", 0, 1),
    "max_tokens": _Rule("an integer, 1 or more", 1, whole=True),
    "seed": _Rule("an integer, 0 or more", 0, whole=True),
    "repetition_penalty": _Rule("a finite number above 0", 0, low_open=True),
    "presence_penalty": _Rule("a number from -2 to 2", -2, 2),
    "frequency_penalty": _Rule("a number from -2 to 2", -2, 2),
    "logprobs": _Rule(f"an integer from 0 to {MAX_LOGPROBS}", 0, MAX_LOGPROBS, whole=True),
    "repetition_limit": _Rule("an integer, 2 or more", 2, whole=True),
    "n": _Rule("an integer, 1 or more", 1, whole=True),
}
# Values that leave a filter off: to ask for one of them is not to ask for sampling.
_OFF = {"top_p": (None, 1), "top_k": (None, 0, -1), "min_p": (None, 0)}


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to generate. None leaves the choice to the model's generation_config.json, then to the default named here.

    Attributes:
        temperature: 0 is greedy (so is anything below 1e-5). Unset: the model's own setting, which is greedy unless its
            generation_config says `do_sample`; where the caller switches top_p, top_k or min_p on, sampling at
            temperature 1.
        top_p: keep the most likely tokens up to this probability, in (0, 1]. 1 is off.
        top_k: keep this many of the most likely tokens. 0 or -1 is off.
        min_p: drop tokens below this fraction of the most likely one's probability, in [0, 1]. 0 is off.
        max_tokens: most tokens to generate; 256 for captions and 1,024 for chat where neither caller nor model
            says. The context of the model ends an answer too, with the same finish_reason `length`.
        stop: a string or strings that end the answer; the text is cut before the one that is
            complete first.
        stop_token_ids: ids that end the answer as the model's own end-of-sequence ids do. The id stays in
            `token_ids`, its text is left out.
        seed: makes a sampled answer repeatable, whatever else is in the batch. Unset: drawn from the seed of `VLM`.
        repetition_penalty: divides the score of every token of the prompt and of the answer so far; 1 is off
            (Keskar et al. 2019, as transformers applies it).
        presence_penalty, frequency_penalty: subtracted once for a token that the answer has, and once for each time
            it has it; in [-2, 2].
        logprobs: report the log-probability of each generated token and of this many most likely ones (0..100).
            They are the model's own, before penalties, temperature and filters.
        n: answers a prompt. This version serves 1.
        ignore_eos: go on past the model's end-of-sequence ids.
        json_schema, regex: constrain the answer. Not served by this version.
        repetition_limit: stop with finish_reason `repetition` once a run of 1 to 32 tokens stands this many times
            in a row at the end of the answer (at least 2). None is off.

    Raises:
        PromptError: an unknown name, or a value outside its range.
        UnsupportedModelError: a parameter that this version does not serve.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    max_tokens: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    seed: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logprobs: int | None = None
    n: int = 1
    ignore_eos: bool = False
    json_schema: Any = None
    regex: str | None = None
    repetition_limit: int | None = None

    def __new__(cls, *args: Any, **values: Any) -> SamplingParams:
        """Turn an unknown name into an error that lists the known ones, before the generated __init__ sees it."""
        known = [f.name for f in fields(cls)]
        if unknown := [name for name in values if name not in known]:
            raise PromptError(f"unknown sampling parameter {', '.join(map(repr, unknown))}; known: {', '.join(known)}")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for name, rule in _RULES.items():
            if not rule.allows(value := getattr(self, name)):
                raise PromptError(f"{name}={value!r}: {name} must be {rule.says}")
        if not isinstance(self.ignore_eos, bool):
            raise PromptError(f"ignore_eos={self.ignore_eos!r}: ignore_eos must be True or False")
        strings = self.stop_strings if isinstance(self.stop, Iterable) or self.stop is None else (None,)
        if not all(isinstance(text, str) and text for text in strings):
            raise PromptError(f"stop={self.stop!r}: stop must be a string or strings, none of them empty")
        if (ids := self.stop_token_ids) is not None and not _all_ids(ids):
            raise PromptError(
                f"stop_token_ids={ids!r}: stop_token_ids must be a sequence of token ids, integers from 0"
            )
        self._refuse_what_is_not_served()

    def _refuse_what_is_not_served(self) -> None:
        if self.n != 1:
            raise UnsupportedModelError(
                f"n={self.n} is not served by this version; send the prompt {self.n} times, each with a seed"
            )
        for name in ("json_schema", "regex"):
            if getattr(self, name) is not None:
                raise UnsupportedModelError(f"{name} (structured output) is not served by this version; leave it out")

    @property
    def stop_strings(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


@dataclass(frozen=True)
class ResolvedParams:
    """SamplingParams with every gap filled: what the engine reads. `temperature` 0 is greedy, `top_k` 0 is off.

    `stop_token_ids` holds the model's end-of-sequence ids (unless ignored) and the caller's; `seed` None means that the
    engine draws one.
    """

    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logprobs: int | None = None
    repetition_limit: int | None = None

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def penalised(self) -> bool:
        return self.repetition_penalty != 1.0 or self.counts

    @property
    def counts(self) -> bool:
        """Whether a penalty needs to know how often a token was generated."""
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


def id_set(value: Any) -> frozenset[int]:
    """The ids of a generation_config entry that may be missing, one id, or a list of ids."""
    if value is None:
        return frozenset()
    return frozenset(value if isinstance(value, Iterable) else (value,))


def _all_ids(value: Any) -> bool:
    ids = isinstance(value, Iterable) and not isinstance(value, (str, bytes))
    return ids and all(i is not None and _TOKEN_ID.allows(i) for i in value)


def check_generation_config(config: Mapping[str, Any], file: str) -> None:
    """Raise CheckpointError for an entry of generation_config.json that `resolve` or the engine could not use.

    Args:
        config: the entries. file: how messages call the file that they come from.
    """
    ours = {"max_new_tokens": "max_tokens"}
    for name in ("temperature", "top_p", "top_k", "min_p", "max_new_tokens", "repetition_penalty"):
        rule = _RULES[ours.get(name, name)]
        if not rule.allows(config.get(name)):
            raise CheckpointError(f"{file}: {name} is {config[name]!r}, but must be {rule.says}")
    if not isinstance(config.get("do_sample"), (bool, NoneType)):
        raise CheckpointError(f"{file}: do_sample is {config['do_sample']!r}, but must be true or false")
    for name in ("eos_token_id", "suppress_tokens"):
        value = config.get(name)
        if value is not None and not _all_ids(value if isinstance(value, list) else [value]):
            raise CheckpointError(f"{file}: {name} is {value!r}, but must be a token id or a list of them")
    words = config.get("bad_words_ids") or []
    if not isinstance(words, list) or not all(isinstance(word, list) and word and _all_ids(word) for word in words):
        raise CheckpointError(f"{file}: bad_words_ids is {words!r}, but must be a list of lists of token ids")


def _first(*values: Any) -> Any:
    """The first that is set."""
    return next(value for value in values if value is not None)


def _temperature(params: SamplingParams, config: Mapping[str, Any]) -> float:
    asked_to_sample = any(getattr(params, name) not in off for name, off in _OFF.items())
    if params.temperature is None and not (asked_to_sample or config.get("do_sample")):
        return 0.0
    temperature = float(_first(params.temperature, config.get("temperature"), 1.0))
    return 0.0 if temperature < GREEDY_BELOW else temperature


def resolve(
    params: SamplingParams | None,
    generation_config: Mapping[str, Any],
    *,
    default_max_tokens: int = CHAT_MAX_TOKENS,
) -> ResolvedParams:
    """What `params` comes to for a model with this generation_config.json; its `eos_token_id` is one id or several."""
    params = params or SamplingParams()
    if not isinstance(params, SamplingParams):
        raise PromptError(
            f"params must be SamplingParams, got {type(params).__name__}; write params=SamplingParams(...)"
        )
    eos = frozenset() if params.ignore_eos else id_set(generation_config.get("eos_token_id"))
    return ResolvedParams(
        max_tokens=int(_first(params.max_tokens, generation_config.get("max_new_tokens"), default_max_tokens)),
        temperature=_temperature(params, generation_config),
        top_p=float(_first(params.top_p, generation_config.get("top_p"), 1.0)),
        top_k=max(0, int(_first(params.top_k, generation_config.get("top_k"), 0))),
        min_p=float(_first(params.min_p, generation_config.get("min_p"), 0.0)),
        stop=params.stop_strings,
        stop_token_ids=eos | frozenset(params.stop_token_ids or ()),
        seed=params.seed,
        repetition_penalty=float(_first(params.repetition_penalty, generation_config.get("repetition_penalty"), 1.0)),
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        logprobs=params.logprobs,
        repetition_limit=params.repetition_limit,
    )
