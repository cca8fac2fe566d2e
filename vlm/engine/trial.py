"""What a step needs in memory beside weights and cache: the largest steps are run once, and the peak is read."""

from __future__ import annotations

from collections.abc import Callable

import torch

from vlm.engine.blocks import BlockManager
from vlm.engine.cache import allocate_cache
from vlm.engine.memory import peak_bytes, release_cached
from vlm.engine.request import Request, Run, Sequence
from vlm.engine.runner import Runner
from vlm.engine.sampler import Sampler
from vlm.engine.scheduler import Limits
from vlm.engine.stop import StopChecker, TextDecoder
from vlm.families.base import ImageInputs, VisionLanguageModel
from vlm.params import ResolvedParams

BLOCK_SIZE = 16


class _NoText:
    def push(self, ids: object) -> str:
        return ""

    def flush(self) -> str:
        return ""


def working_bytes(
    model: VisionLanguageModel,
    limits: Limits,
    max_model_len: int,
    image: ImageInputs | None,
    rope_dims: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
) -> int:
    """Peak bytes of a full step of prompts, of sampling for every sequence at once, and of a full batch of images.

    `image` is a large picture as the processor makes it; the encoder budget says how many of it are encoded together.
    `rope_dims` is (3,) for a model with three positions a token, else ().
    """
    trial = _largest_step(model, limits, max_model_len, image, rope_dims, dtype, device)
    peak = peak_bytes(device, trial)
    del trial  # and with it the cache that it ran on
    release_cached(device)
    return peak


def _largest_step(
    model: VisionLanguageModel,
    limits: Limits,
    max_model_len: int,
    image: ImageInputs | None,
    rope_dims: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
) -> Callable[[], None]:
    rows = limits.seats
    length = min(max_model_len, limits.max_batch_tokens) if rows == 1 else max(1, limits.max_batch_tokens // rows)
    blocks = BlockManager(rows * -(-length // BLOCK_SIZE), BLOCK_SIZE)
    caches = allocate_cache(model.kv, blocks.num_blocks, BLOCK_SIZE, dtype, device)
    runner = Runner(model, caches, BLOCK_SIZE, limits.max_image_values, device)
    sampler = Sampler(model.vocab_size, (), limits.max_num_seqs, device)
    sequences = [_sequence(i, length, rope_dims, blocks) for i in range(rows)]

    @torch.inference_mode()
    def trial() -> None:
        if image is not None:
            model.encode_images([image] * max(1, limits.max_image_values // image.pixels.numel()))
        logits = runner.logits([Run(s, 0, length) for s in sequences])
        assert logits is not None
        sampler(logits, sequences)

    return trial


def _sequence(id: int, length: int, rope_dims: tuple[int, ...], blocks: BlockManager) -> Sequence:
    positions = torch.arange(length).expand(*rope_dims, -1)
    params = ResolvedParams(max_tokens=1, temperature=1.0, repetition_penalty=1.1)
    request = Request(id, (0,) * length, positions, length, params)
    decoder: TextDecoder = _NoText()
    table = blocks.allocate(blocks.blocks_for(length))
    assert table is not None
    return Sequence(request, 0, StopChecker(params, decoder, 1), block_table=table)
