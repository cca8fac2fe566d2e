"""Attention written out: one query at a time, in float64. Slow, and right by inspection."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from vlm.attention.spec import AttentionSpec


def attend_one(
    q_HD: torch.Tensor,
    k_SKD: torch.Tensor,
    v_SKD: torch.Tensor,
    position: int,
    spec: AttentionSpec,
    causal: bool,
    sinks_H: torch.Tensor | None,
    spans: Sequence[tuple[int, int]] = (),
) -> torch.Tensor:
    """One query at `position` against keys at positions 0 .. S - 1: (H, D) float64."""
    heads, head_dim = q_HD.shape
    group = heads // k_SKD.shape[1]
    scale = head_dim**-0.5 if spec.scale is None else spec.scale
    out = torch.zeros(heads, head_dim, dtype=torch.float64)
    for h in range(heads):
        logits, values = [], []
        for j in range(k_SKD.shape[0]):
            past = j <= position or not causal
            near = "sliding_window" not in spec.features or spec.window is None or abs(position - j) < spec.window
            together = any(a <= position < b and a <= j < b for a, b in spans)
            if spec.span_rule == "and" and together and j > position:
                past, near = True, True  # the window bounds the left side only
            if not (past and near) and not (together and spec.span_rule == "or"):
                continue
            score = float(torch.dot(q_HD[h].double(), k_SKD[j, h // group].double())) * scale
            if "softcap" in spec.features and spec.softcap is not None:
                score = spec.softcap * math.tanh(score / spec.softcap)
            logits.append(score)
            values.append(v_SKD[j, h // group].double())
        if not logits:
            continue
        top = max([*logits, float(sinks_H[h])] if sinks_H is not None else logits)
        weights = [math.exp(score - top) for score in logits]
        total = sum(weights) + (math.exp(float(sinks_H[h]) - top) if sinks_H is not None else 0.0)
        for weight, value in zip(weights, values, strict=True):
            out[h] += weight / total * value
    return out


def attend(
    q_THD: torch.Tensor,
    k_SKD: torch.Tensor,
    v_SKD: torch.Tensor,
    lengths_q: Sequence[int],
    lengths_k: Sequence[int],
    spec: AttentionSpec,
    causal: bool,
    sinks_H: torch.Tensor | None = None,
    spans: Sequence[Sequence[tuple[int, int]]] | None = None,
) -> torch.Tensor:
    """Packed sequences, each on its own, the last query of each at its last key: (T, H, D) float32 on the CPU."""
    q, k, v = q_THD.cpu(), k_SKD.cpu(), v_SKD.cpu()
    sinks = None if sinks_H is None else sinks_H.cpu()
    out = torch.zeros(q.shape, dtype=torch.float64)
    begin_q = begin_k = 0
    for sequence, (len_q, len_k) in enumerate(zip(lengths_q, lengths_k, strict=True)):
        mine = spans[sequence] if spans else ()
        keys, values = k[begin_k : begin_k + len_k], v[begin_k : begin_k + len_k]
        for i in range(len_q):
            position = i + len_k - len_q
            out[begin_q + i] = attend_one(q[begin_q + i], keys, values, position, spec, causal, sinks, mine)
        begin_q, begin_k = begin_q + len_q, begin_k + len_k
    return out.float()
