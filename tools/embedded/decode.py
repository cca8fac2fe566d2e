"""Greedy answers with the training model: whole prompts again at each token; no cache, and fast enough."""

from __future__ import annotations

import torch
from torch import Tensor

from .model import Model
from .tokenizer import Codec

AT_ONCE = 1000  # questions


@torch.no_grad()
def greedy(model: Model, codec: Codec, images: Tensor, questions: list[str], device: str, limit: int = 48) -> list[str]:
    """Answers to ``questions``; ``images`` (N, pictures a question, S, S, 3) uint8, on the device."""
    answers: list[str] = []
    for begin in range(0, len(questions), AT_ONCE):
        end = begin + AT_ONCE
        answers += greedy_batch(model, codec, images[begin:end], questions[begin:end], device, limit)
    return answers


def look(model: Model, images: Tensor) -> Tensor:
    """Image tokens (N, pictures * tokens, D) of uint8 pictures (N, pictures, S, S, 3)."""
    dtype = model.model.text_model.embed_tokens.weight.dtype
    pixels = (images.flatten(0, 1).permute(0, 3, 1, 2).float() / 127.5 - 1).to(dtype)
    seen = torch.cat([model.see(part)[1] for part in pixels.split(500)])
    return seen.reshape(len(images), -1, seen.shape[-1])


def greedy_batch(
    model: Model, codec: Codec, images: Tensor, questions: list[str], device: str, limit: int
) -> list[str]:
    """Answers of one batch: prompts padded on the right, each row written on where it ends."""
    n = len(questions)
    prompts = [codec.prompt(q, images.shape[1]) for q in questions]
    ends = torch.tensor([len(p) for p in prompts], device=device)
    ids = torch.full((n, max(map(len, prompts)) + limit), codec.pad)
    for i, prompt in enumerate(prompts):
        ids[i, : len(prompt)] = torch.tensor(prompt)
    ids, seen = ids.to(device), look(model, images)
    done, rows = torch.zeros(n, dtype=torch.bool, device=device), torch.arange(n, device=device)
    for _ in range(limit):
        hidden = model.hidden(ids[:, : int(ends.max())], seen)
        token = model.logits(hidden[rows, ends - 1]).argmax(-1)
        done |= token == codec.end
        if bool(done.all()):
            break
        ids[rows, ends] = torch.where(done, codec.pad, token)
        ends = ends + (~done).long()
    written, stops = ids.tolist(), ends.tolist()
    return [codec.decode(written[i][len(prompt) : stops[i]]) for i, prompt in enumerate(prompts)]
