"""The plainest loop that drives a model through its paged cache: no scheduler, no batching policy, no sampling.

What the engine does must give the same tokens; what goes wrong here is the model's or the attention's doing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from vlm.attention.layout import LayerCache, PagedStep
from vlm.families.base import ImageInputs, VisionLanguageModel
from vlm.loading.model import LoadedModel


@dataclass(frozen=True, eq=False)
class Prompt:
    """A prompt with its pictures. `positions` is (T,) or (3, T), `next_position` that of the first generated token."""

    token_ids: tuple[int, ...]
    images: tuple[ImageInputs, ...]
    positions: torch.Tensor
    next_position: int


def make_prompt(loaded: LoadedModel, token_ids: Sequence[int], images: Sequence[ImageInputs] = ()) -> Prompt:
    """Lay out a prompt whose image placeholders are already expanded."""
    plans = [image.plan for image in images]
    positions, following = loaded.family.positions(token_ids, plans, loaded.config)
    return Prompt(tuple(token_ids), tuple(images), positions, following)


class PagedLoop:
    """Sequences of one batch, their blocks and the caches of all layers.

    Args:
        capacity: tokens that each sequence may reach. block_size: tokens a block. Blocks are dealt out interleaved, so
            that a sequence's blocks never lie side by side.
    """

    def __init__(self, loaded: LoadedModel, sequences: int, capacity: int, block_size: int = 16) -> None:
        self.loaded, self.model, self.block_size = loaded, loaded.model, block_size
        per_sequence = -(-capacity // block_size)
        self.tables = [[block * sequences + i for block in range(per_sequence)] for i in range(sequences)]
        kv = self.model.kv
        shape = (sequences * per_sequence, block_size, kv.num_kv_heads, kv.head_dim)
        self.caches = [
            LayerCache(*(torch.zeros(shape, dtype=loaded.dtype, device=loaded.device) for _ in "kv"))
            for _ in range(kv.num_layers)
        ]
        self.cached = [0] * sequences

    def step(self, embeds: Sequence[torch.Tensor], positions: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """One decoder step: new (t, hidden) embeddings of every sequence -> its (t, hidden) hidden states."""
        lengths = [len(e) for e in embeds]
        self.cached = [done + new for done, new in zip(self.cached, lengths, strict=True)]
        step = PagedStep.build(lengths, self.cached, self.tables, self.block_size, self.loaded.device)
        placed = torch.cat(list(positions), dim=-1).to(self.loaded.device)
        hidden = self.model.decode(torch.cat(list(embeds)), placed, self.caches, step)
        return list(hidden.split(lengths))


@torch.inference_mode()
def embed_prompts(loaded: LoadedModel, prompts: Sequence[Prompt]) -> list[torch.Tensor]:
    """(T, hidden) embeddings of each prompt with the image features in their places; all images are one batch."""
    features = loaded.model.encode_images([image for prompt in prompts for image in prompt.images])
    token = loaded.family.image_token_id(loaded.config)
    out, used = [], 0
    for prompt in prompts:
        ids = torch.tensor(prompt.token_ids, device=loaded.device)
        embeds = loaded.model.embed(ids)
        if prompt.images:
            embeds[ids == token] = torch.cat(features[used : used + len(prompt.images)])
            used += len(prompt.images)
        out.append(embeds)
    return out


@torch.inference_mode()
def prompt_logits(loaded: LoadedModel, prompts: Sequence[Prompt], chunk: int | None = None) -> list[torch.Tensor]:
    """(T, vocab) logits at every position of each prompt; `chunk` feeds that many tokens a step instead of all at
    once."""
    loop = PagedLoop(loaded, len(prompts), max(len(p.token_ids) for p in prompts))
    embeds = embed_prompts(loaded, prompts)
    longest = max(len(e) for e in embeds)
    size = chunk or longest
    pieces: list[list[torch.Tensor]] = [[] for _ in prompts]
    for start in range(0, longest, size):
        window = slice(start, start + size)
        hidden = loop.step([e[window] for e in embeds], [p.positions[..., window] for p in prompts])
        for piece, rows in zip(pieces, hidden, strict=True):
            piece.append(loaded.model.logits(rows))
    return [torch.cat(piece) for piece in pieces]


@torch.inference_mode()
def greedy(loaded: LoadedModel, prompts: Sequence[Prompt], max_tokens: int) -> list[list[int]]:
    """`max_tokens` greedy tokens after each prompt, all prompts as one batch; stop tokens do not stop it."""
    model: VisionLanguageModel = loaded.model
    loop = PagedLoop(loaded, len(prompts), max(len(p.token_ids) for p in prompts) + max_tokens)
    hidden = loop.step(embed_prompts(loaded, prompts), [p.positions for p in prompts])
    last = torch.stack([rows[-1] for rows in hidden])
    generated: list[torch.Tensor] = []
    for done in range(max_tokens):
        token_ids = model.logits(last).argmax(-1)
        generated.append(token_ids)
        embeds = list(model.embed(token_ids).split(1))
        positions = [torch.full((*p.positions.shape[:-1], 1), p.next_position + done) for p in prompts]
        last = torch.cat(loop.step(embeds, positions))
    return torch.stack(generated, dim=1).tolist()
