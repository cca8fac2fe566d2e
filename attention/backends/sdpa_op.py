"""Attention through scaled_dot_product_attention, or float32 matrix products where it has no argument for a feature.

A layout becomes a plan once: batches of sequences that have one (query, key) length each, so that a batch is one
call. Layers then only index. Softcap and sinks take `explicit`, whose scores are float32 and cut into blocks of
queries.

Tolerance against a dense float32 reference, absolute, for unit-normal inputs: 2e-6 in float32, 3e-3 in float16, 2e-2
in bfloat16.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import torch
import torch.nn.functional as F

from vlm.attention.layout import LayerCache, PagedStep, Segments
from vlm.attention.paging import PlanCache, first_key, padded_rows, rows_of, write
from vlm.attention.platform import Platform
from vlm.attention.spec import AttentionSpec, Decision

MAX_SCORES = 1 << 24  # float32 scores that `explicit` holds at once: 64 MiB, and a few such tensors exist together


@dataclass(frozen=True, eq=False)
class Rows:
    """Which rows of a packed tensor a batch takes: a run (no copy), or an int64 index."""

    start: int
    stop: int
    index: torch.Tensor | None = None

    def take(self, x_THD: torch.Tensor) -> torch.Tensor:
        return x_THD[self.start : self.stop] if self.index is None else x_THD.index_select(0, self.index)

    def put(self, out_THD: torch.Tensor, x_THD: torch.Tensor) -> None:
        if self.index is None:
            out_THD[self.start : self.stop] = x_THD
        else:
            out_THD.index_copy_(0, self.index, x_THD)


@dataclass(frozen=True, eq=False)
class Batch:
    """`count` sequences of len_q queries and len_k keys each.

    Attributes:
        queries, keys: rows of the packed tensors, count * len_q and count * len_k of them. cached: the keys are rows
            of the KV cache.
        causal: the square causal mask. mask: bool, (len_q, len_k) or (count, 1, 1, len_k); True may be seen. None: no
            mask but `causal`.
        dead: leading queries of each sequence that see no key; their result is zero.
    """

    count: int
    len_q: int
    len_k: int
    queries: Rows
    keys: Rows
    cached: bool = False
    causal: bool = False
    mask: torch.Tensor | None = None
    dead: int = 0


def visible(len_q: int, len_k: int, causal: bool, window: int | None, device: torch.device) -> torch.Tensor:
    """bool (len_q, len_k): which keys each query may see, with the last query at the last key."""
    position = torch.arange(len_q, device=device)[:, None] + (len_k - len_q)
    distance = position - torch.arange(len_k, device=device)[None, :]
    seen = distance >= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
    if window is not None:
        seen = seen & (distance.abs() < window)
    return seen


def _dead(len_q: int, len_k: int, causal: bool, window: int | None) -> int:
    """Queries before the first key: those that see none, being causal, or further from it than the window reaches."""
    reach = 0 if causal else (window or len_k + len_q) - 1
    return min(len_q, max(0, len_q - len_k - reach)) if causal or window is not None else 0


def _rows(starts: Sequence[int], length: int, device: torch.device) -> Rows:
    """Rows of sequences that begin at `starts`: a run where they follow each other."""
    if all(b - a == length for a, b in pairwise(starts)):
        return Rows(starts[0], starts[0] + length * len(starts))
    index = torch.tensor(starts, device=device)[:, None] + torch.arange(length, device=device)
    return Rows(0, 0, index.reshape(-1))


def _group(
    lengths_q: Sequence[int],
    lengths_k: Sequence[int],
    sequences: Sequence[int],
    causal: bool,
    window: int | None,
    device: torch.device,
) -> list[Batch]:
    """Packed sequences, batched by their lengths. Those without queries or without keys are left out."""
    begin_q, begin_k = [0, *accumulate(lengths_q)], [0, *accumulate(lengths_k)]
    groups: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    for i in sequences:
        if lengths_q[i] and lengths_k[i]:
            groups[lengths_q[i], lengths_k[i]].append(i)
    batches = []
    for (len_q, len_k), members in groups.items():
        windowed = window is not None and window < max(len_q, len_k)
        square = causal and not windowed and len_q == len_k
        masked = windowed or (causal and len_q != len_k)
        batches.append(
            Batch(
                len(members),
                len_q,
                len_k,
                _rows([begin_q[i] for i in members], len_q, device),
                _rows([begin_k[i] for i in members], len_k, device),
                causal=square and len_q > 1,
                mask=visible(len_q, len_k, causal, window, device) if masked else None,
                dead=_dead(len_q, len_k, causal, window),
            )
        )
    return batches


def _length_buckets(spans: Sequence[tuple[int, int]]) -> list[list[int]]:
    """Split (sequence, keys) pairs by power of two where padding to the longest would more than double the keys."""
    longest = max(length for _, length in spans)
    if longest * len(spans) <= 2 * sum(length for _, length in spans):
        return [[i for i, _ in spans]]
    buckets: defaultdict[int, list[int]] = defaultdict(list)
    for i, length in spans:
        buckets[length.bit_length()].append(i)
    return list(buckets.values())


def _decode_batches(step: PagedStep, sequences: Sequence[int], window: int | None, device: torch.device) -> list[Batch]:
    """Sequences that add one token to a cache: padded to the longest of their bucket, padding masked."""
    begin = [0, *accumulate(step.query_lens)]
    batches = []
    starts = {i: first_key(1, step.kv_lens[i], window) for i in sequences}
    for members in _length_buckets([(i, step.kv_lens[i] - starts[i]) for i in sequences]):
        lengths = [step.kv_lens[i] - starts[i] for i in members]
        longest = max(lengths)
        mask = None
        if min(lengths) < longest:
            seen = torch.arange(longest, device=device) < torch.tensor(lengths, device=device)[:, None]
            mask = seen[:, None, None, :]
        keys = Rows(0, 0, padded_rows(step, members, [starts[i] for i in members], longest))
        queries = _rows([begin[i] for i in members], 1, device)
        batches.append(Batch(len(members), 1, longest, queries, keys, cached=True, mask=mask))
    return batches


def _chunk_batches(step: PagedStep, sequences: Sequence[int], window: int | None, device: torch.device) -> list[Batch]:
    """Sequences that add several tokens to a cache, batched where both lengths agree."""
    begin = [0, *accumulate(step.query_lens)]
    groups: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    for i in sequences:
        groups[step.query_lens[i], step.kv_lens[i]].append(i)
    batches = []
    for (len_q, len_kv), members in groups.items():
        start = first_key(len_q, len_kv, window)
        len_k = len_kv - start
        keys = Rows(0, 0, padded_rows(step, members, [start] * len(members), len_k))
        queries = _rows([begin[i] for i in members], len_q, device)
        mask = visible(len_q, len_k, True, window, device)
        batches.append(Batch(len(members), len_q, len_k, queries, keys, cached=True, mask=mask))
    return batches


def plan_segments(segments: Segments, causal: bool, window: int | None) -> list[Batch]:
    lengths_q, lengths_k = segments.lengths_q, segments.lengths_k
    return _group(lengths_q, lengths_k, range(len(lengths_q)), causal, window, segments.cu_seqlens_q.device)


def plan_step(step: PagedStep, window: int | None) -> list[Batch]:
    """Fresh prompts attend to what they bring, the rest reads the cache. What has no queries or no keys is left out."""
    device = step.block_tables.device
    live = [i for i, (q, kv) in enumerate(zip(step.query_lens, step.kv_lens, strict=True)) if q and kv]
    fresh = [i for i in live if step.query_lens[i] == step.kv_lens[i]]
    single = [i for i in live if step.query_lens[i] == 1 and step.kv_lens[i] > 1]
    chunks = [i for i in live if 1 < step.query_lens[i] < step.kv_lens[i]]
    batches = _group(step.query_lens, step.query_lens, fresh, True, window, device)
    if single:
        batches += _decode_batches(step, single, window, device)
    return batches + _chunk_batches(step, chunks, window, device)


def explicit(
    q_NHLD: torch.Tensor,
    k_NKSD: torch.Tensor,
    v_NKSD: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    softcap: float | None,
    sinks_H: torch.Tensor | None,
) -> torch.Tensor:
    """Attention in float32 matrix products: softcap through tanh, which saturates; sinks as one more column.

    Every query must see a key. Returns (N, H, L, D) in the dtype of q. Cut into blocks of queries so that no more
    than MAX_SCORES scores exist at once.
    """
    n, h, length, d = q_NHLD.shape
    heads, len_k = k_NKSD.shape[1], k_NKSD.shape[2]
    groups = h // heads
    k_T, v = k_NKSD.float().transpose(-1, -2), v_NKSD.float()
    out = torch.empty((n, h, length, d), dtype=q_NHLD.dtype, device=q_NHLD.device)
    rows = max(1, MAX_SCORES // max(1, n * h * len_k))
    for begin in range(0, length, rows):
        block = slice(begin, min(begin + rows, length))
        size = block.stop - begin
        q = q_NHLD[:, :, block].float().reshape(n, heads, groups * size, d)
        scores = (q @ k_T * scale).view(n, h, size, len_k)
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        if mask is not None:
            scores = scores.masked_fill(~(mask[block] if mask.dim() == 2 else mask), float("-inf"))
        if sinks_H is not None:
            sink = sinks_H.float().view(1, h, 1, 1).expand(n, h, size, 1)
            weights = torch.softmax(torch.cat([scores, sink], dim=-1), dim=-1)[..., :-1]
        else:
            weights = torch.softmax(scores, dim=-1)
        result = weights.reshape(n, heads, groups * size, len_k) @ v
        out[:, :, block] = result.view(n, h, size, d).to(out.dtype)
    return out


def _open_dead(mask: torch.Tensor | None, dead: int) -> torch.Tensor | None:
    """The mask with the rows that see nothing opened, so that no softmax divides by zero; results are zeroed after."""
    if mask is None or not dead:
        return mask
    return torch.cat([torch.ones_like(mask[:dead]), mask[dead:]])


class _Sdpa:
    """What both operations share: from a plan to a result."""

    def __init__(self, decision: Decision, spec: AttentionSpec, platform: Platform) -> None:
        self.spec = spec
        self._scale = spec.softmax_scale
        self._groups = spec.num_heads // spec.num_kv_heads
        self._window = spec.window if "sliding_window" in spec.features else None
        self._softcap = spec.softcap if "softcap" in spec.features else None
        self._sinks = "sinks" in spec.features
        self._explicit = self._softcap is not None or self._sinks

    def _prepared(self, plan: list[Batch], device: torch.device) -> list[Batch]:
        """The masks as the layers need them, made once."""
        out = []
        for batch in plan:
            mask = batch.mask
            if self._explicit and batch.causal:
                mask = visible(batch.len_q, batch.len_k, True, None, device)
            mask = _open_dead(mask, batch.dead)
            if mask is not None and mask.dim() == 2 and not self._explicit:
                mask = mask.repeat(self._groups, 1)
            out.append(replace(batch, mask=mask))
        return out

    def _run(
        self,
        plan: list[Batch],
        q_THD: torch.Tensor,
        packed: tuple[torch.Tensor, torch.Tensor],
        cached: tuple[torch.Tensor, torch.Tensor],
        sinks_H: torch.Tensor | None,
    ) -> torch.Tensor:
        assert self._sinks == (sinks_H is not None), "sinks are passed exactly where the spec needs them"
        if len(plan) == 1 and plan[0].queries.index is None and plan[0].count * plan[0].len_q == q_THD.shape[0]:
            return self._attend(plan[0], q_THD, *(cached if plan[0].cached else packed), sinks_H).contiguous()
        out = q_THD.new_zeros(q_THD.shape)
        for batch in plan:
            batch.queries.put(out, self._attend(batch, q_THD, *(cached if batch.cached else packed), sinks_H))
        return out

    def _attend(
        self, batch: Batch, q_THD: torch.Tensor, k_SKD: torch.Tensor, v_SKD: torch.Tensor, sinks_H: torch.Tensor | None
    ) -> torch.Tensor:
        """The batch's result, packed: (count * len_q, H, D)."""

        def heads_first(rows: Rows, x: torch.Tensor, length: int) -> torch.Tensor:
            return rows.take(x).unflatten(0, (batch.count, length)).transpose(1, 2)

        q = heads_first(batch.queries, q_THD, batch.len_q)
        k, v = heads_first(batch.keys, k_SKD, batch.len_k), heads_first(batch.keys, v_SKD, batch.len_k)
        if self._explicit:
            out = explicit(q, k, v, batch.mask, self._scale, self._softcap, sinks_H)
        else:
            out = self._sdpa(batch, q, k, v)
        out = out.transpose(1, 2)
        if batch.dead:
            out[:, : batch.dead] = 0
        return out.reshape(-1, *q_THD.shape[1:])

    def _sdpa(self, batch: Batch, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if self._groups == 1 or batch.mask is None:
            return F.scaled_dot_product_attention(
                q, k, v, attn_mask=batch.mask, is_causal=batch.causal, scale=self._scale, enable_gqa=self._groups > 1
            )
        # With a mask and grouped heads CUDA has only the kernel that materialises the scores. So the query heads that
        # share a key head become more queries of it: (N, H, L, D) -> (N, K, groups * L, D).
        folded = q.reshape(q.shape[0], -1, self._groups * q.shape[2], q.shape[3])
        return F.scaled_dot_product_attention(folded, k, v, attn_mask=batch.mask, scale=self._scale).reshape(q.shape)


class SdpaSegments(_Sdpa):
    """Encoder self-attention and cross-attention (vlm.attention.op.SegmentAttention)."""

    def __init__(self, decision: Decision, spec: AttentionSpec, platform: Platform) -> None:
        super().__init__(decision, spec, platform)
        causal = "causal" in spec.features
        self._plan: PlanCache[Segments, list[Batch]] = PlanCache(
            lambda s: self._prepared(plan_segments(s, causal, self._window), s.cu_seqlens_q.device)
        )

    def __call__(
        self,
        q_THD: torch.Tensor,
        k_SKD: torch.Tensor,
        v_SKD: torch.Tensor,
        segments: Segments,
        sinks_H: torch.Tensor | None = None,
    ) -> torch.Tensor:
        keys = k_SKD, v_SKD
        return self._run(self._plan(segments), q_THD, keys, keys, sinks_H)


class SdpaPaged(_Sdpa):
    """Decoder self-attention over a paged cache (vlm.attention.op.PagedAttention)."""

    def __init__(self, decision: Decision, spec: AttentionSpec, platform: Platform) -> None:
        super().__init__(decision, spec, platform)
        self._plan: PlanCache[PagedStep, list[Batch]] = PlanCache(
            lambda s: self._prepared(plan_step(s, self._window), s.block_tables.device)
        )

    def __call__(
        self,
        q_THD: torch.Tensor,
        k_TKD: torch.Tensor,
        v_TKD: torch.Tensor,
        cache: LayerCache,
        step: PagedStep,
        sinks_H: torch.Tensor | None = None,
    ) -> torch.Tensor:
        write(cache, k_TKD, v_TKD, step)
        return self._run(self._plan(step), q_THD, (k_TKD, v_TKD), (rows_of(cache.k), rows_of(cache.v)), sinks_H)


def construct(decision: Decision, spec: AttentionSpec, platform: Platform) -> SdpaSegments | SdpaPaged:
    return (SdpaPaged if spec.role == "decoder" else SdpaSegments)(decision, spec, platform)
