"""One step of the model: token ids and image features in, logits of the rows that sample out.

Vision features are spliced into the token embeddings at the image tokens. Nothing here asks the device for a value.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence as SequenceOf

import torch

from vlm.attention.layout import LayerCache, PagedStep
from vlm.engine.isolate import run_in_halves
from vlm.engine.memory import release_cached
from vlm.engine.request import Sequence
from vlm.families.base import ImageInputs, VisionLanguageModel

log = logging.getLogger(__name__)


class Runner:
    def __init__(
        self,
        model: VisionLanguageModel,
        caches: SequenceOf[LayerCache],
        block_size: int,
        image_token_id: int | None,
        max_image_values: int,
        device: torch.device,
    ) -> None:
        self.model = model
        self.caches = caches
        self.block_size = block_size
        self.image_token_id = image_token_id
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

    def logits(self, sequences: SequenceOf[Sequence], features: SequenceOf[torch.Tensor]) -> torch.Tensor:
        """Run the new tokens of the sequences; (R, V) logits that follow the last token of each.

        `features` are those of all images of the sequences whose prompt runs in this step, in order.
        """
        ids: list[int] = []
        for sequence in sequences:
            ids += sequence.tokens_from(sequence.num_cached)
        embeds_TC = self.model.embed(torch.tensor(ids, dtype=torch.int64, device=self.device))
        if features:
            embeds_TC = self._splice(embeds_TC, ids, torch.cat(tuple(features)))
        query_lens = [s.new_tokens for s in sequences]
        step = PagedStep.build(
            query_lens,
            [s.num_tokens for s in sequences],
            [s.block_table for s in sequences],
            self.block_size,
            self.device,
        )
        positions = positions_of(sequences).to(self.device)
        hidden_TC = self.model.decode(embeds_TC, positions, self.caches, step)
        if step.decode:
            return self.model.logits(hidden_TC)
        return self.model.logits(hidden_TC.index_select(0, step.cu_seqlens_q[1:].long() - 1))

    def _splice(self, embeds_TC: torch.Tensor, ids: list[int], features_FC: torch.Tensor) -> torch.Tensor:
        rows = [row for row, token_id in enumerate(ids) if token_id == self.image_token_id]
        assert len(rows) == features_FC.shape[0], f"{len(rows)} image tokens for {features_FC.shape[0]} features"
        index = torch.tensor(rows, dtype=torch.int64, device=self.device)
        return embeds_TC.index_copy(0, index, features_FC.to(embeds_TC.dtype))


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


def positions_of(sequences: SequenceOf[Sequence]) -> torch.Tensor:
    """int64 (T,) or (3, T) on the host: positions of each sequence's new tokens, generated ones counted on."""
    rope_dims = sequences[0].request.positions.shape[:-1]
    if all(s.new_tokens == 1 and s.output_ids for s in sequences):
        last = [s.request.next_position + len(s.output_ids) - 1 for s in sequences]
        return torch.tensor(last, dtype=torch.int64).expand(*rope_dims, -1)
    parts: list[torch.Tensor] = []
    for s in sequences:
        generated = torch.arange(s.request.next_position, s.request.next_position + len(s.output_ids))
        whole = torch.cat((s.request.positions, generated.expand(*rope_dims, -1)), dim=-1)
        parts.append(whole[..., s.num_cached :])
    return torch.cat(parts, dim=-1)
