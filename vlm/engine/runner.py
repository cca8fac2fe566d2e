"""One step of the model: token ids and image features in, logits of the rows that sample out.

Vision features are spliced into the token embeddings at the image tokens. Nothing here asks the device for a value.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence as SequenceOf
from itertools import accumulate, groupby

import torch

from vlm.attention.layout import LayerCache, PagedStep
from vlm.engine.isolate import run_in_halves
from vlm.engine.memory import release_cached
from vlm.engine.request import Run
from vlm.families.base import ImageInputs, VisionLanguageModel

log = logging.getLogger(__name__)


class Runner:
    def __init__(
        self,
        model: VisionLanguageModel,
        caches: SequenceOf[LayerCache],
        block_size: int,
        max_image_values: int,
        device: torch.device,
    ) -> None:
        self.model = model
        self.caches = caches
        self.block_size = block_size
        self.max_image_values = max_image_values
        self.device = device

    def encode(self, images: SequenceOf[ImageInputs]) -> list[torch.Tensor | Exception]:
        """(num_tokens, hidden) features an image, or why there are none; in batches under the encoder budget."""
        out: list[torch.Tensor | Exception] = []
        for batch in image_batches(images, self.max_image_values):
            out += run_in_halves(self._encode_batch, batch, "encoding images", lambda: release_cached(self.device))
        return out

    def _encode_batch(self, images: SequenceOf[ImageInputs]) -> list[torch.Tensor]:
        features = self.model.encode_images(images)
        for image, rows_FC in zip(images, features, strict=True):
            assert rows_FC.shape[0] == image.plan.num_tokens, (
                f"the vision stack made {rows_FC.shape[0]} features of a picture planned at {image.plan.num_tokens}"
            )
        return features

    def logits(self, runs: SequenceOf[Run]) -> torch.Tensor | None:
        """Run tokens of sequences; (R, V) logits of the rows that sample, in order, None where none does.

        The features of the images whose tokens run are in their sequences.
        """
        ids = [token_id for run in runs for token_id in run.sequence.tokens(run.start, run.stop)]
        embeds_TC = self._splice(self.model.embed(self._index(ids)), runs)
        step = PagedStep.build(
            [run.count for run in runs],
            [run.stop for run in runs],
            [run.sequence.block_table for run in runs],
            self.block_size,
            self.device,
        )
        hidden_TC = self.model.decode(embeds_TC, positions_of(runs).to(self.device), self.caches, step)
        ends = accumulate(run.count for run in runs)
        rows = [end - 1 for run, end in zip(runs, ends, strict=True) if run.samples]
        if not rows:
            return None
        return self.model.logits(hidden_TC if len(rows) == len(ids) else hidden_TC.index_select(0, self._index(rows)))

    def _splice(self, embeds_TC: torch.Tensor, runs: SequenceOf[Run]) -> torch.Tensor:
        """The embeddings with image features in the places of their tokens."""
        rows: list[int] = []
        features: list[torch.Tensor] = []
        begin = 0
        for run in runs:
            where = run.sequence.image_rows
            rows += [at - run.start + begin for at in where.positions_in(run.start, run.stop)]
            features += [run.sequence.features[p.image][p.first : p.stop] for p in where.pieces(run.start, run.stop)]
            begin += run.count
        if not rows:
            return embeds_TC
        return embeds_TC.index_copy(0, self._index(rows), torch.cat(features).to(embeds_TC.dtype))

    def _index(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)


def image_batches(images: SequenceOf[ImageInputs], max_values: int) -> list[list[ImageInputs]]:
    """Consecutive batches of at most `max_values` pixel values; a larger image is a batch of its own."""
    batches: list[list[ImageInputs]] = []
    room = 0
    for image in images:
        cost = image.pixels.numel()
        if not batches or cost > room:
            batches.append([])
            room = max_values
        batches[-1].append(image)
        room -= cost
    return batches


def positions_of(runs: SequenceOf[Run]) -> torch.Tensor:
    """int64 (T,) or (3, T) on the host: positions of the tokens of each run, generated ones counted on."""
    parts: list[torch.Tensor] = []
    for decoding, group in groupby(runs, lambda run: run.is_decode):
        if decoding:  # one tensor for all of them: a step of many answers has little else to do here
            parts.append(torch.tensor([run.sequence.position_at(run.start) for run in group], dtype=torch.int64))
        else:
            parts += [run.sequence.positions(run.start, run.stop) for run in group]
    rope_dims = runs[0].sequence.request.positions.shape[:-1]
    return torch.cat([part.expand(*rope_dims, -1) for part in parts], dim=-1)
