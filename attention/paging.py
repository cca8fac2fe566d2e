"""From a step's block tables to cache rows, and the write of new keys. Nothing here waits for the device.

A cache row is one token's keys: the cache (num_blocks, block_size, K, D) seen as (num_blocks * block_size, K, D).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from itertools import accumulate
from typing import Generic, TypeVar
from weakref import WeakKeyDictionary

import torch

from vlm.attention.layout import LayerCache, PagedStep

Key = TypeVar("Key", bound=Hashable)
Plan = TypeVar("Plan")


class PlanCache(Generic[Key, Plan]):
    """One plan per layout object, for as long as the layout lives: the layers of a step share it.

    Keyed by the identity of an immutable layout, and held by one operation, whose settings never change: nothing else
    enters a plan but the device, which the layout's own tensors are on.
    """

    def __init__(self, make: Callable[[Key], Plan]) -> None:
        self._make = make
        self._plans: WeakKeyDictionary[Key, Plan] = WeakKeyDictionary()

    def __call__(self, layout: Key) -> Plan:
        plan = self._plans.get(layout)
        if plan is None:
            plan = self._plans[layout] = self._make(layout)
        return plan


def rows_of(cache_NBKD: torch.Tensor) -> torch.Tensor:
    """(num_blocks, block_size, K, D) -> (num_blocks * block_size, K, D), sharing memory."""
    return cache_NBKD.view(-1, *cache_NBKD.shape[2:])


def write(cache: LayerCache, k_TKD: torch.Tensor, v_TKD: torch.Tensor, step: PagedStep) -> None:
    """Store the new tokens of a step in their slots."""
    rows_of(cache.k).index_copy_(0, step.slots_T, k_TKD)
    rows_of(cache.v).index_copy_(0, step.slots_T, v_TKD)


def first_key(query_len: int, kv_len: int, window: int | None) -> int:
    """The first position that the earliest new query of a sequence may see."""
    return 0 if window is None else max(0, kv_len - query_len - window + 1)


def _take(step: PagedStep, sequence: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    block = step.block_tables[sequence, position // step.block_size].long()
    return block * step.block_size + position % step.block_size


def padded_rows(step: PagedStep, sequences: Sequence[int], starts: Sequence[int], length: int) -> torch.Tensor:
    """Cache rows of positions starts[i] .. starts[i] + length of each sequence: int64 (N * length,).

    Positions past the end of a sequence repeat its last row: rows that were never written may hold NaN, which no mask
    would stop.
    """
    device = step.block_tables.device
    table = torch.tensor(
        [sequences, starts, [step.kv_lens[i] - 1 for i in sequences]], dtype=torch.int64, device=device
    )
    sequence, start, last = table.unsqueeze(-1)
    position = torch.minimum(start + torch.arange(length, device=device), last)
    return _take(step, sequence, position).reshape(-1)


def packed_rows(step: PagedStep, starts: Sequence[int]) -> tuple[torch.Tensor, tuple[int, ...]]:
    """Cache rows of positions starts[i] .. kv_lens[i] of every sequence, back to back: int64 (S,), and the lengths."""
    device = step.block_tables.device
    lengths = tuple(kv - start for kv, start in zip(step.kv_lens, starts, strict=True))
    total = sum(lengths)
    before = [0, *accumulate(lengths)][:-1]
    table = torch.tensor(
        [lengths, [s - b for s, b in zip(starts, before, strict=True)]], dtype=torch.int64, device=device
    )
    sequence = torch.repeat_interleave(torch.arange(len(lengths), device=device), table[0], output_size=total)
    position = torch.arange(total, device=device) + table[1].index_select(0, sequence)
    return _take(step, sequence, position), lengths
