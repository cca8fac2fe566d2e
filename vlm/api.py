"""`VLM`: the Python surface. It hands over: to `start` for loading, `prepare` for prompts, the engine for answers."""

from __future__ import annotations

import asyncio
import itertools
import os
import queue
import weakref
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from vlm.attention.spec import Decision
from vlm.collect import Answer, ChunkMaker
from vlm.engine.engine import EngineMetrics
from vlm.engine.request import Event
from vlm.engine.thread import CLOSED, EngineThread
from vlm.errors import VLMError
from vlm.logs import configure
from vlm.many import ManyRun, OnError, Window, check_iterable, check_on_error, check_ordered
from vlm.outputs import Chunk, Output, Usage
from vlm.params import CAPTION_MAX_TOKENS, ResolvedParams, SamplingParams
from vlm.prepare import Messages, Prepared, caption_messages
from vlm.start import Settings, start

# Preprocessed pictures that one call of caption_many or chat_many holds before it stops pulling inputs.
MAX_PREPARED_BYTES = 2 << 30


class VLM:
    """A vision-language model, ready to answer. Safe to use from several threads at once; a context manager.

    Args:
        model: a hub id, or a local folder in Hugging Face layout. None: the folder that VLM_MODEL names, else the
            embedded model.
        dtype: "auto" (the checkpoint's; float32 on a CPU), "float32", "float16" or "bfloat16".
        device: "auto", "cpu", "cuda", "cuda:1", "xpu" or "mps".
        attention: a backend for both stacks, a mapping such as {"vision": "sdpa"}, or "auto". Used or refused,
            never replaced.
        max_model_len: most tokens of prompt and answer together; None: what the model was trained for.
        max_pixels: cap on the pixels of a picture after resizing; None: the checkpoint's own.
        max_batch_tokens: tokens that run in one step: one of each answer that goes on, and prompts with what is left. A
            longer prompt runs in chunks. No more requests than this run at once.
        gpu_memory_fraction: share of the GPU that weights, cache and work may take together.
        seed: where sampled requests without a seed of their own get theirs.
        enable_prefix_cache: keep keys and values of what ran while there is room, so that a prompt that begins like an
            earlier one (the same pictures included) starts behind it. `metrics()` says how often that helped.
        deterministic: True is refused: this version does not promise answers that are bit-identical in every batch.
        trust_remote_code: accepted; no code of a checkpoint is ever run, whichever the value.
        revision: branch, tag or commit of a hub repository; refused with a local folder.
        load_format: "auto" reads the weights; "dummy" makes random ones of the config's shape, for benchmarks.
        max_num_seqs: requests that run at once; None: 256 on a GPU, 64 on a CPU.
        kv_cache_gib: memory of the KV cache; None: what gpu_memory_fraction leaves on a GPU, at most 1 GiB on a CPU.
        image_cache_gib: memory for the features of pictures that were encoded, so that one that comes again is not; 0
            keeps none.

    Raises:
        VLMError: of the kind that says what is wrong with the model, the settings or the device.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        dtype: str = "auto",
        device: str = "auto",
        attention: str | Mapping[str, str] = "auto",
        max_model_len: int | None = None,
        max_pixels: int | None = None,
        max_batch_tokens: int | None = None,
        gpu_memory_fraction: float = 0.9,
        seed: int = 0,
        enable_prefix_cache: bool = True,
        deterministic: bool = False,
        trust_remote_code: bool = False,
        revision: str | None = None,
        load_format: str = "auto",
        max_num_seqs: int | None = None,
        kv_cache_gib: float | None = None,
        image_cache_gib: float = 0.25,
    ) -> None:
        configure(os.environ)
        settings = Settings(
            model=model,
            dtype=dtype,
            device=device,
            attention=attention,
            max_model_len=max_model_len,
            max_pixels=max_pixels,
            max_batch_tokens=max_batch_tokens,
            gpu_memory_fraction=gpu_memory_fraction,
            seed=seed,
            enable_prefix_cache=enable_prefix_cache,
            deterministic=deterministic,
            trust_remote_code=trust_remote_code,
            revision=revision,
            load_format=load_format,
            max_num_seqs=max_num_seqs,
            kv_cache_gib=kv_cache_gib,
            image_cache_gib=image_cache_gib,
        )
        started = start(settings, os.environ)
        self._decisions = tuple(started.loaded.decisions)
        self._preparer = started.preparer
        self._engine = EngineThread(started.engine)
        self._max_num_seqs = started.engine.config.limits.max_num_seqs
        self._threads = max(2, min(16, os.cpu_count() or 2))
        self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="vlm-images")
        self._next_id = itertools.count().__next__
        # Also ends the thread when the object is dropped, or the interpreter exits, without close().
        self._finalizer = weakref.finalize(self, _close, self._engine, self._pool)

    def caption(self, image: Any, prompt: str | None = None, params: SamplingParams | None = None) -> Output:
        """Describe one image. `prompt` None asks "Describe this image."; `params` may allow more than 256 tokens.

        An image is a path, an http(s) URL, a data: URI, bytes, a binary file, a PIL image, an HWC uint8 array or
        tensor, or a `vlm.Image`, which says how to read one of these. Raises ImageDecodeError, FileNotFoundError or
        FetchError for one that cannot be had.
        """
        return self._answer(caption_messages(image, prompt), self._caption_params(params))

    def caption_many(
        self,
        images: Iterable[Any],
        prompt: str | None = None,
        params: SamplingParams | None = None,
        on_error: OnError = "record",
        ordered: bool = True,
    ) -> Iterator[Output]:
        """Caption any number of images: exactly one Output each, in order or, with `ordered=False`, as they finish.

        `images` is pulled lazily, a bounded number ahead. With `on_error="record"` a bad input gives an Output
        whose `error` is set; "raise" raises at that input. Closing the iterator early cancels what is in flight.
        """
        check_iterable(images, "images")
        resolved = self._caption_params(params)
        return self._many(
            images, lambda i, image: self._prepare(i, caption_messages(image, prompt), resolved), on_error, ordered
        )

    def chat(self, messages: Messages, params: SamplingParams | None = None) -> Output:
        """Answer a conversation: Hugging Face's and OpenAI's list of {"role", "content"}, with text and image parts."""
        return self._answer(messages, self._preparer.resolve(params))

    def chat_many(
        self,
        conversations: Iterable[Messages],
        params: SamplingParams | None = None,
        on_error: OnError = "record",
        ordered: bool = True,
    ) -> Iterator[Output]:
        """Answer any number of conversations; the rest is as in `caption_many`."""
        check_iterable(conversations, "conversations")
        resolved = self._preparer.resolve(params)
        return self._many(conversations, lambda i, messages: self._prepare(i, messages, resolved), on_error, ordered)

    def stream(self, messages: Messages, params: SamplingParams | None = None) -> Iterator[Chunk]:
        """Answer a conversation piece by piece. What is wrong with the prompt raises here, before anything streams."""
        prepared = self._prepare(self._next_id(), messages, self._preparer.resolve(params))
        return self._chunks(prepared)

    async def achat(self, messages: Messages, params: SamplingParams | None = None) -> Output:
        """`chat` for asyncio; cancelling the task cancels the request."""
        loop = asyncio.get_running_loop()
        prepared = await self._aprepare(messages, self._preparer.resolve(params))
        done: asyncio.Future[Output] = loop.create_future()

        def settle(output: Output) -> None:
            if not done.done():
                done.set_result(output)

        answer = Answer(0, prepared, lambda output: _to_loop(loop, settle, output))
        self._engine.submit(prepared.request, answer)
        try:
            return _raise_error(await done)
        finally:
            self._engine.cancel(prepared.request.id)

    async def astream(self, messages: Messages, params: SamplingParams | None = None) -> AsyncIterator[Chunk]:
        """`stream` for asyncio; leaving the loop early and closing the iterator cancels the request."""
        loop = asyncio.get_running_loop()
        prepared = await self._aprepare(messages, self._preparer.resolve(params))
        events: asyncio.Queue[Event] = asyncio.Queue()
        self._engine.submit(prepared.request, lambda event: _to_loop(loop, events.put_nowait, event))
        chunks = ChunkMaker()
        try:
            reason = None
            while reason is None:
                event = await events.get()
                reason = event.finish_reason
                if chunk := chunks.push(event):
                    yield chunk
        finally:
            self._engine.cancel(prepared.request.id)

    def count_tokens(self, messages: Messages) -> Usage:
        """Tokens that a conversation costs. The model is not run; of pictures only the header is read."""
        self._check_open()
        return self._preparer.count(messages)

    def attention_report(self) -> list[Decision]:
        """Which attention backend each layer group has, and why."""
        return list(self._decisions)

    def metrics(self) -> EngineMetrics:
        """Totals of the engine since the start, and its state now."""
        return self._engine.metrics()

    def close(self) -> None:
        """Cancel what is in flight (its outputs say `cancelled`), end the threads and free the model's memory."""
        self._finalizer()

    def __enter__(self) -> VLM:
        self._check_open()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if not self._finalizer.alive:
            raise VLMError(CLOSED)

    def _caption_params(self, params: SamplingParams | None) -> ResolvedParams:
        return self._preparer.resolve(params, CAPTION_MAX_TOKENS)

    def _prepare(self, request_id: int, messages: Messages, params: ResolvedParams) -> Prepared:
        self._check_open()
        return self._preparer.prepare(request_id, messages, params)

    async def _aprepare(self, messages: Messages, params: ResolvedParams) -> Prepared:
        """`_prepare` without holding up the event loop."""
        try:
            work = self._pool.submit(self._prepare, self._next_id(), messages, params)
        except RuntimeError as error:
            raise VLMError(CLOSED) from error
        return await asyncio.wrap_future(work)

    def _answer(self, messages: Messages, params: ResolvedParams) -> Output:
        prepared = self._prepare(self._next_id(), messages, params)
        done: queue.SimpleQueue[Output] = queue.SimpleQueue()
        self._engine.submit(prepared.request, Answer(0, prepared, done.put))
        try:
            return _raise_error(done.get())
        finally:
            self._engine.cancel(prepared.request.id)

    def _chunks(self, prepared: Prepared) -> Iterator[Chunk]:
        events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._engine.submit(prepared.request, events.put)
        chunks = ChunkMaker()
        try:
            reason = None
            while reason is None:
                event = events.get()
                reason = event.finish_reason
                if chunk := chunks.push(event):
                    yield chunk
        finally:
            self._engine.cancel(prepared.request.id)

    def _many(self, inputs: Iterable[Any], prepare: Any, on_error: OnError, ordered: bool) -> Iterator[Output]:
        check_on_error(on_error)
        check_ordered(ordered)
        window = Window(2 * self._max_num_seqs, 2 * self._threads, MAX_PREPARED_BYTES)
        run = ManyRun(self._engine, self._pool, prepare, self._next_id, window, ordered, on_error)
        return run.outputs(inputs)


def _raise_error(output: Output) -> Output:
    if output.error is not None:
        raise output.error
    return output


def _to_loop(loop: asyncio.AbstractEventLoop, call: Any, argument: object) -> None:
    """From the engine's thread into an event loop, which may be gone already."""
    if not loop.is_closed():
        loop.call_soon_threadsafe(call, argument)


def _close(engine: EngineThread, pool: ThreadPoolExecutor) -> None:
    engine.close()
    pool.shutdown(wait=False)
