"""A model that is a plain function of its tokens, positions and image features, read back through the paged cache.

What it answers can be computed without an engine (`FakeModel.expected`), so a block that is mixed up, lost or
written by somebody else changes an answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vlm.attention.layout import LayerCache, PagedStep
from vlm.engine.engine import Engine, EngineConfig
from vlm.engine.request import Event, Request
from vlm.engine.scheduler import Limits
from vlm.families.base import ImageInputs, ImagePlan, KVGeometry, VisionLanguageModel
from vlm.params import ResolvedParams

VOCAB = 97
IMAGE_TOKEN = 5


def follow(state: int, value: int, position: int) -> int:
    return (state * 31 + value * 7 + position * 3 + 1) % 9973


class FakeModel(VisionLanguageModel):
    """Keys hold the embedded value of a token, values its position; the next token hashes all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.kv = KVGeometry(num_layers=1, num_kv_heads=1, head_dim=1)
        self.vocab_size = VOCAB
        self.encoded: list[int] = []
        self.rows: list[int] = []
        self.fail_on_value: int | None = None
        self.max_images = 1000
        self.max_rows = 1000
        self.nan_on_value: int | None = None
        self.poison = False

    def encode_images(self, images: Sequence[ImageInputs]) -> list[torch.Tensor]:
        self.encoded.append(len(images))
        if len(images) > self.max_images:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has ...")
        values = [int(image.pixels.flatten()[0]) for image in images]
        if self.fail_on_value in values:
            raise RuntimeError("a kernel failed")
        return [
            torch.full((image.plan.num_tokens, 1), float(value)) for image, value in zip(images, values, strict=True)
        ]

    def embed(self, token_ids_T: torch.Tensor) -> torch.Tensor:
        return token_ids_T[:, None].float()

    def decode(
        self, embeds_TC: torch.Tensor, positions: torch.Tensor, caches: Sequence[LayerCache], step: PagedStep
    ) -> torch.Tensor:
        self.rows.append(len(step.query_lens))
        if len(step.query_lens) > self.max_rows:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has ...")
        keys, values = caches[0].k.view(-1), caches[0].v.view(-1)
        keys[step.slots_T] = embeds_TC[:, 0]
        values[step.slots_T] = positions.reshape(-1, embeds_TC.shape[0])[-1].float()
        rows: list[int] = []
        for i, (new, total) in enumerate(zip(step.query_lens, step.kv_lens, strict=True)):
            table = step.block_tables[i].tolist()
            state, states = 0, []
            for at in range(total):
                slot = table[at // step.block_size] * step.block_size + at % step.block_size
                state = follow(state, int(keys[slot]), int(values[slot]))
                states.append(state)
            rows += states[total - new :]
        return torch.tensor(rows)[:, None].float()

    def logits(self, hidden_RC: torch.Tensor) -> torch.Tensor:
        state = hidden_RC[:, 0].long()
        scores = -((torch.arange(VOCAB) - (state % VOCAB)[:, None]) % VOCAB).float()
        if self.poison:
            scores[:] = float("nan")
        if self.nan_on_value is not None:
            scores[state == self.nan_on_value] = float("nan")
        return scores

    @staticmethod
    def expected(values: Sequence[int], positions: Sequence[int], next_position: int, count: int) -> list[int]:
        """The greedy answer, with IMAGE_TOKEN banned and no stop."""
        state = 0
        for value, position in zip(values, positions, strict=True):
            state = follow(state, value, position)
        out: list[int] = []
        for step in range(count):
            token = state % VOCAB
            if token == IMAGE_TOKEN:
                token += 1  # the next best in `logits`
            out.append(token)
            state = follow(state, token, next_position + step)
        return out


class LetterDecoder:
    """Id n reads as the n-th character from 'A' on."""

    def push(self, ids: Iterable[int]) -> str:
        return "".join(chr(65 + i) for i in ids)

    def flush(self) -> str:
        return ""


def image(value: int, num_tokens: int, num_values: int = 12) -> ImageInputs:
    return ImageInputs(torch.full((num_values,), float(value)), ImagePlan((1, 1), num_tokens, (1, 1)))


def key_of(image: ImageInputs) -> bytes:
    """What the model sees of an image."""
    return f"{image.pixels.tolist()} {image.plan}".encode()


def make_request(
    id: int,
    tokens: Sequence[int],
    images: Sequence[ImageInputs] = (),
    *,
    dims: int = 1,
    keys: bool = True,
    **params: Any,
) -> Request:
    """Positions run from 100 for the fake to see them; `dims` 3 makes them (3, T)."""
    positions = torch.arange(100, 100 + len(tokens))
    return Request(
        id,
        tuple(tokens),
        positions if dims == 1 else positions.expand(dims, -1),
        100 + len(tokens),
        ResolvedParams(**{"max_tokens": 8, **params}),
        tuple(images),
        sum(i.plan.num_tokens for i in images),
        tuple(key_of(i) for i in images) if keys else (),
    )


def expected(request: Request, count: int) -> list[int]:
    """What the model answers, computed without an engine."""
    values, features = [], iter([int(i.pixels[0]) for i in request.images for _ in range(i.plan.num_tokens)])
    for token_id in request.token_ids:
        values.append(next(features) if token_id == IMAGE_TOKEN else token_id)
    positions = request.positions.reshape(-1, len(values))[-1].tolist()
    return FakeModel.expected(values, positions, request.next_position, count)


def make_engine(model: FakeModel | None = None, **changes: Any) -> Engine:
    limits = {"max_num_seqs": 8, "max_batch_tokens": 64, "max_image_values": 100}
    limits |= {name: changes.pop(name) for name in list(changes) if name in limits}
    config: dict[str, Any] = {
        "max_model_len": 64,
        "num_blocks": 64,
        "block_size": 4,
        "dtype": torch.float32,
        "device": torch.device("cpu"),
        "image_token_id": IMAGE_TOKEN,
        "banned_ids": frozenset({IMAGE_TOKEN}),
    }
    return Engine(model or FakeModel(), EngineConfig(limits=Limits(**limits), **config | changes), LetterDecoder)


def run(engine: Engine, on_step: Callable[[], object] = lambda: None) -> dict[int, SimpleNamespace]:
    """Steps until nothing is left: ids, text and last event of each request."""
    done: dict[int, SimpleNamespace] = {}
    while engine.has_work:
        collect(engine.step(), done)
        on_step()
    return done


def collect(events: Iterable[Event], into: dict[int, SimpleNamespace]) -> None:
    for event in events:
        answer = into.setdefault(event.request_id, SimpleNamespace(ids=[], text="", last=None))
        assert answer.last is None, "news of a request that has ended"
        answer.ids += event.token_ids
        answer.text += event.text
        if event.finish_reason is not None:
            answer.last = event


@pytest.fixture(scope="session")
def fake() -> SimpleNamespace:
    """The helpers of this file, for test modules that cannot import it."""
    return SimpleNamespace(
        Model=FakeModel,
        Decoder=LetterDecoder,
        engine=make_engine,
        request=make_request,
        image=image,
        run=run,
        collect=collect,
        expected=expected,
        VOCAB=VOCAB,
        IMAGE_TOKEN=IMAGE_TOKEN,
    )
