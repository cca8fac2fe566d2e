"""How the tokens of one forward pass are laid out. Built once a step on the host, read by every layer.

T is the number of packed query tokens, S of packed key tokens, N of sequences. Host tuples stand beside the device
tensors so that no layer ever asks the device for a length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch


def _cu_seqlens(lengths: Sequence[int], device: torch.device | str) -> torch.Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)


@dataclass(frozen=True, eq=False)
class Segments:
    """Packed sequences for encoder self-attention or cross-attention. Segments may be empty.

    Attributes:
        lengths_q, lengths_k: tokens per sequence, on the host (the same tuple for self-attention).
        cu_seqlens_q, cu_seqlens_k: int32 (N + 1,) prefix sums on the device.
    """

    lengths_q: tuple[int, ...]
    lengths_k: tuple[int, ...]
    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor

    @classmethod
    def packed(cls, lengths: Sequence[int], device: torch.device | str) -> Segments:
        """Self-attention: every token of a sequence may see every other one of the same sequence."""
        cu = _cu_seqlens(lengths, device)
        return cls(tuple(lengths), tuple(lengths), cu, cu)

    @classmethod
    def cross(cls, lengths_q: Sequence[int], lengths_k: Sequence[int], device: torch.device | str) -> Segments:
        """Queries of one packing against keys of another; sequence i sees keys i only."""
        if len(lengths_q) != len(lengths_k):
            raise ValueError(f"{len(lengths_q)} query sequences against {len(lengths_k)} key sequences")
        return cls(tuple(lengths_q), tuple(lengths_k), _cu_seqlens(lengths_q, device), _cu_seqlens(lengths_k, device))

    @property
    def max_q(self) -> int:
        return max(self.lengths_q, default=0)

    @property
    def max_k(self) -> int:
        return max(self.lengths_k, default=0)


def _spans(
    query_lens: Sequence[int],
    kv_lens: Sequence[int],
    spans: Sequence[Sequence[tuple[int, int]]],
    device: torch.device | str,
) -> torch.Tensor:
    rows: list[tuple[int, int]] = []
    for q, kv, mine in zip(query_lens, kv_lens, spans, strict=True):
        rows += [next((s for s in mine if s[0] <= p < s[1]), (0, 0)) for p in range(kv - q, kv)]
    return torch.tensor(rows, dtype=torch.int32, device=device).reshape(len(rows), 2)


@dataclass(frozen=True, eq=False)
class LayerCache:
    """Keys and values of one layer: each (num_blocks, block_size, num_kv_heads, head_dim)."""

    k: torch.Tensor
    v: torch.Tensor


@dataclass(frozen=True, eq=False)
class PagedStep:
    """One decoder step over a paged KV cache: any mix of fresh prompts, prompt chunks and single tokens.

    Attributes:
        query_lens: new tokens per sequence (host). kv_lens: keys per sequence once the new ones are written (host).
        cu_seqlens_q: int32 (N + 1,). kv_lens_N: int32 (N,). block_tables: int32 (N, max_blocks), unused entries 0.
        slots_T: int64 (T,): block * block_size + offset of each new token's cache slot.
        block_size: tokens a block.
        spans_T2: int32 (T, 2), where the layers need image spans: start and end, as positions in the sequence, of the
            bidirectional span that a new token belongs to; (0, 0) for none.
    """

    query_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    cu_seqlens_q: torch.Tensor
    kv_lens_N: torch.Tensor
    block_tables: torch.Tensor
    slots_T: torch.Tensor
    block_size: int
    spans_T2: torch.Tensor | None = None

    @classmethod
    def build(
        cls,
        query_lens: Sequence[int],
        kv_lens: Sequence[int],
        block_tables: Sequence[Sequence[int]],
        block_size: int,
        device: torch.device | str,
        spans: Sequence[Sequence[tuple[int, int]]] | None = None,
    ) -> PagedStep:
        """Lay out a step from host lists; sequence i writes its new tokens from position kv_lens[i] - query_lens[i].

        spans: the image spans of each sequence, [start, end) in positions of the whole prompt, in any order; None
            where no layer needs them.
        """
        slots: list[int] = []
        for q, kv, table in zip(query_lens, kv_lens, block_tables, strict=True):
            slots += [table[p // block_size] * block_size + p % block_size for p in range(kv - q, kv)]
        width = max((len(t) for t in block_tables), default=0)
        tables = [list(t) + [0] * (width - len(t)) for t in block_tables]
        return cls(
            tuple(query_lens),
            tuple(kv_lens),
            _cu_seqlens(query_lens, device),
            torch.tensor(kv_lens, dtype=torch.int32, device=device),
            torch.tensor(tables, dtype=torch.int32, device=device).reshape(len(tables), width),
            torch.tensor(slots, dtype=torch.int64, device=device),
            block_size,
            None if spans is None else _spans(query_lens, kv_lens, spans, device),
        )

    @property
    def fresh(self) -> bool:
        """Every sequence starts here: nothing was cached before this step."""
        return self.query_lens == self.kv_lens

    @property
    def decode(self) -> bool:
        """Every sequence adds exactly one token."""
        return all(q == 1 for q in self.query_lens)
