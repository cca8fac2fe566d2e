"""The engine: schedule, run, postprocess. Single-threaded; vlm.engine.thread puts it behind a queue.

A request is admitted whole or refused with nothing left behind; what goes wrong with one request ends that one only.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace

import torch

from vlm.engine.blocks import BlockManager
from vlm.engine.cache import allocate_cache
from vlm.engine.features import FeatureCache, ImageEncoder
from vlm.engine.image_rows import ImageRows
from vlm.engine.isolate import run_in_halves
from vlm.engine.memory import release_cached
from vlm.engine.request import Event, Request, Run, Sequence
from vlm.engine.runner import Runner
from vlm.engine.sampler import NO_TOKEN, Sampled, Sampler
from vlm.engine.scheduler import Limits, Scheduler, Step
from vlm.engine.stop import StopChecker, TextDecoder
from vlm.errors import ContextLengthError, PromptError, VLMError
from vlm.families.base import VisionLanguageModel

log = logging.getLogger(__name__)
HASH_PRIME = 0x9E3779B97F4A7C15
# What a run brings: a token, none yet (more of its prompt is to run), or why it failed.
Result = Sampled | Exception | None


@dataclass(frozen=True)
class EngineConfig:
    """Sizes and budgets, fixed for the engine's life.

    Attributes:
        max_model_len: most tokens of a sequence, prompt and answer. num_blocks, block_size: the paged KV cache.
        limits: budgets of a step. image_token_id: whose positions take image features; None for a text model.
        banned_ids: ids that are never sampled. seed: where requests without a seed get theirs from.
        prefix_cache: whether prompts that begin alike share their blocks. feature_cache_bytes: for features of pictures
            that were encoded; 0 keeps none.
    """

    max_model_len: int
    num_blocks: int
    block_size: int
    limits: Limits
    dtype: torch.dtype
    device: torch.device
    image_token_id: int | None = None
    banned_ids: frozenset[int] = frozenset()
    seed: int = 0
    prefix_cache: bool = True
    feature_cache_bytes: int = 0

    @property
    def max_tokens(self) -> int:
        """Most tokens of a sequence: the context, or the whole cache where that is smaller."""
        return min(self.max_model_len, self.num_blocks * self.block_size)

    def check_length(self, num_tokens: int) -> None:
        """Refuse a prompt that can never fit, with ContextLengthError."""
        if num_tokens == 0:
            raise PromptError("the prompt is empty: it has no token to continue from")
        if num_tokens < self.max_tokens:
            return
        limit = f"the model's context of {self.max_model_len} tokens"
        remedy = "shorten it, send fewer images or set max_pixels"
        if self.max_tokens < self.max_model_len:
            limit = f"the KV cache of {self.max_tokens} tokens"
            remedy += ", or give the cache more memory (gpu_memory_fraction, kv_cache_gib)"
        raise ContextLengthError(f"a prompt of {num_tokens} tokens leaves no room for an answer in {limit}; {remedy}")


@dataclass(frozen=True)
class EngineMetrics:
    """Totals since the start, and the state now.

    Attributes:
        prompt_tokens, completion_tokens: of prompts that ran, and of answers.
        images: pictures encoded. feature_hits: pictures that were not, because their features were there.
            feature_bytes: held for pictures to come.
        prefill_steps: steps that ran prompt tokens, beside whatever was decoding. decode_steps: all others.
        preemptions: how often a sequence gave its cache blocks back to start again later.
        prefix_hits: requests whose prompt began like one before. prefix_tokens: prompt tokens that did not run for it;
            prompt_tokens counts them too.
        running, waiting: sequences. free_blocks: of the KV cache; those that a prompt may find again are free too.
    """

    requests: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    images: int = 0
    feature_hits: int = 0
    feature_bytes: int = 0
    prefill_steps: int = 0
    decode_steps: int = 0
    preemptions: int = 0
    prefix_hits: int = 0
    prefix_tokens: int = 0
    running: int = 0
    waiting: int = 0
    free_blocks: int = 0


class Engine:
    def __init__(
        self, model: VisionLanguageModel, config: EngineConfig, make_decoder: Callable[[], TextDecoder]
    ) -> None:
        """`make_decoder` gives each request its own incremental decoder of token ids."""
        self.config = config
        self._make_decoder = make_decoder
        caches = allocate_cache(model.kv, config.num_blocks, config.block_size, config.dtype, config.device)
        self._runner = Runner(model, caches, config.block_size, config.limits.max_image_values, config.device)
        self._encoder = ImageEncoder(self._runner.encode, FeatureCache(config.feature_cache_bytes))
        blocks = BlockManager(config.num_blocks, config.block_size)
        self._scheduler = Scheduler(blocks, config.limits, config.prefix_cache, self._encoder.cache)
        self._sampler = Sampler(model.vocab_size, config.banned_ids, config.limits.max_num_seqs, config.device)
        self._sequences: dict[int, Sequence] = {}
        self._totals: Counter[str] = Counter()

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work

    def metrics(self) -> EngineMetrics:
        scheduler = self._scheduler
        return EngineMetrics(
            **dict(self._totals),
            images=self._encoder.encoded,
            feature_hits=self._encoder.hits,
            feature_bytes=self._encoder.cache.num_bytes,
            prefix_hits=scheduler.prefix_hits,
            prefix_tokens=scheduler.prefix_tokens,
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            free_blocks=scheduler.blocks.num_free,
        )

    def add(self, request: Request) -> None:
        """Admit a request, or raise ContextLengthError or PromptError with nothing left behind."""
        num_tokens = len(request.token_ids)
        self.config.check_length(num_tokens)
        image_rows = self._place_images(request)
        assert len(request.image_keys) in (0, len(request.images)), "a key for each picture, or none at all"
        assert request.id not in self._sequences, f"request id {request.id} is taken"
        params = request.params
        seed = params.seed if params.seed is not None else (self.config.seed * HASH_PRIME + request.id) % (1 << 64)
        max_tokens = min(params.max_tokens, self.config.max_tokens - num_tokens)
        checker = StopChecker(params, self._make_decoder(), max_tokens)
        sequence = Sequence(request, seed, checker, image_rows=image_rows)
        self._scheduler.add(sequence)
        self._sequences[request.id] = sequence
        self._totals.update(requests=1)

    def _place_images(self, request: Request) -> ImageRows:
        counts = [image.plan.num_tokens for image in request.images]
        rows = ImageRows.find(request.token_ids, self.config.image_token_id, counts)
        if not rows.complete:
            raise PromptError(
                f"the prompt has {len(rows.positions)} image tokens, but its {len(counts)} images make {sum(counts)}; "
                "each image needs exactly one placeholder"
            )
        return rows

    def cancel(self, request_id: int) -> Event | None:
        """End a request now, wherever it is; None when it has ended already."""
        sequence = self._sequences.get(request_id)
        if sequence is None:
            return None
        return self._end(sequence, Event(request_id, sequence.checker.flush(), finish_reason="cancelled"))

    def fail_all(self, error: Exception) -> list[Event]:
        """End every request with an error: the engine itself failed. It serves new requests afterwards."""
        return [self._fail(sequence, error) for sequence in list(self._sequences.values())]

    @torch.inference_mode()
    def step(self) -> list[Event]:
        """Run one step; what it brought, for each request that it concerned."""
        step = self._scheduler.schedule()
        if step is None:
            return []
        results = self._run(step)
        return self._postprocess(step, results)

    def _run(self, step: Step) -> list[Result]:
        """One result a run of the step."""
        for sequence in step.preempted:
            log.info("request %d gives its cache blocks back and starts again later", sequence.id)
            self._sampler.release(sequence)
        self._totals.update(
            preemptions=len(step.preempted), **{"prefill_steps" if step.is_prefill else "decode_steps": 1}
        )
        failed = self._encoder(step.runs)
        healthy = [run for run in step.runs if run.sequence.id not in failed]
        what = "running prompts" if step.is_prefill else "decoding"
        results = iter(run_in_halves(self._sample, healthy, what, lambda: release_cached(self.config.device)))
        return [failed[run.sequence.id] if run.sequence.id in failed else next(results) for run in step.runs]

    def _sample(self, runs: SequenceOf[Run]) -> list[Sampled | None]:
        """Run them; the token that follows each, None after a chunk that is not the prompt's last."""
        sequences = [run.sequence for run in runs if run.samples]
        logits = self._runner.logits(runs)
        sampled = iter(() if logits is None else self._sampler(logits, sequences))
        return [next(sampled) if run.samples else None for run in runs]

    def _postprocess(self, step: Step, results: list[Result]) -> list[Event]:
        events = []
        for run, result in zip(step.runs, results, strict=True):
            sequence = run.sequence
            if run.samples and not sequence.output_ids:
                self._totals.update(prompt_tokens=len(sequence.request.token_ids))
            if isinstance(result, Exception):
                events.append(self._fail(sequence, result))
                continue
            self._scheduler.advance(run)
            if result is not None:
                events.append(self._accept(sequence, result))
        return events

    def _accept(self, sequence: Sequence, result: Sampled) -> Event:
        if result.token_id == NO_TOKEN:
            self._scheduler.disown(sequence)
            self._encoder.cache.forget(sequence.request.image_keys)
            return self._fail(sequence, VLMError(_not_finite(self.config.dtype)))
        self._totals.update(completion_tokens=1)
        if sequence.first_token_at is None:
            sequence.first_token_at = time.perf_counter()
        sequence.output_ids.append(result.token_id)
        if result.logprobs is not None:
            sequence.logprobs.append(result.logprobs)
        verdict = sequence.checker.push(result.token_id)
        event = Event(sequence.id, verdict.text, (result.token_id,), verdict.finish_reason)
        return self._end(sequence, event) if verdict.finish_reason else event

    def _fail(self, sequence: Sequence, error: Exception) -> Event:
        return self._end(sequence, Event(sequence.id, finish_reason="error", error=error))

    def _end(self, sequence: Sequence, event: Event) -> Event:
        """Forget the sequence; the event with all that is known of it in the end."""
        self._scheduler.remove(sequence)
        self._sampler.release(sequence)
        del self._sequences[sequence.id]
        arrival, first = sequence.request.arrival, sequence.first_token_at
        return replace(
            event,
            usage=sequence.usage,
            logprobs=tuple(sequence.logprobs) if sequence.request.params.logprobs is not None else None,
            time_to_first_token=None if first is None else first - arrival,
            total_time=time.perf_counter() - arrival,
        )


def _not_finite(dtype: torch.dtype) -> str:
    name = str(dtype).removeprefix("torch.")
    remedy = (
        "the checkpoint's weights are damaged (NaN, infinite or far too large): download them again"
        if dtype == torch.float32
        else "try dtype='float32'"
    )
    return f"the model's logits are not finite in {name}: {remedy}"
