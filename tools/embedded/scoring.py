"""Scores of the training model on the held-out questions, with its weights as they are exported."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from . import heldout
from .decode import greedy
from .model import Model
from .pool import FAILED
from .tokenizer import Codec

Text = list[tuple[str, str, dict[str, str]]]  # question, answer, tags


def wait_for(path: Path, stop: Any) -> None:
    while not path.exists():
        if stop.value == FAILED:
            raise RuntimeError("a worker failed; its traceback is above")
        time.sleep(0.1)


def tally(task: str, right: list[bool], tags: list[dict[str, str]]) -> dict[str, Any]:
    """Exact answers in per cent, and for reading tasks [per cent, questions] of each font size."""
    score: dict[str, Any] = {"exact": round(100 * sum(right) / len(right), 2)}
    if task in heldout.READING:
        for size in sorted({t["size"] for t in tags}, key=lambda s: int(s.split()[0])):
            part = [r for r, t in zip(right, tags, strict=True) if t["size"] == size]
            score[size] = [round(100 * sum(part) / len(part), 1), len(part)]
    return score


def score_task(model: Model, codec: Codec, task: str, folder: Path, device: str, say: Callable) -> dict[str, Any]:
    text: Text = json.loads((folder / f"{task}.json").read_text())
    images = torch.from_numpy(np.load(folder / f"{task}.npy")).to(device)
    answers = greedy(model, codec, images, [q for q, _, _ in text], device)
    right = [a == b for a, (_, b, _) in zip(answers, text, strict=True)]
    score = tally(task, right, [t for _, _, t in text])
    wrong = [(q, b, a) for a, (q, b, _), r in zip(answers, text, right, strict=True) if not r]
    say(task, json.dumps(score), "question, answer, given:", wrong[:5])
    return score


def evaluate(model: Model, codec: Codec, folder: Path, stop: Any, device: str, say: Callable) -> dict[str, Any]:
    """Greedy answers to every task's questions, in bf16 throughout as the checkpoint runs on a GPU; on a CPU in float32
    with the weights rounded to bf16."""
    model.to(torch.bfloat16)
    if device == "cpu":
        model.float()
    scores = {}
    for task in heldout.TASKS:
        wait_for(folder / f"{task}.json", stop)
        scores[task] = score_task(model, codec, task, folder, device, say)
    return scores
