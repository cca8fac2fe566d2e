"""The newest chunks of training data, on the device, and the batches drawn from them."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from queue import Empty, Queue
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from . import pool


class Sample(NamedTuple):
    """Pictures (P of them) and conversations (N) before drawing: the packer's arrays, and token rows (N, T) int16."""

    records: Tensor
    offsets: Tensor
    edges: Tensor
    classes: Tensor
    rows: Tensor


class Ring:
    """Takes chunks from ``folder`` in order of their numbers; holds the last ``slots`` of them."""

    def __init__(self, folder: Path, slots: int, stop: Any, device: str) -> None:
        self.folder, self.slots, self.stop, self.device = folder, slots, stop, device
        pictures = pool.SINGLES + 2 * pool.PAIRS

        def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        # Ones: a radius of 0, on the empty ring that the trainer compiles with, would give indices that are no numbers.
        self.records = zeros(slots, pictures, pool.RECORD, dtype=torch.float32) + 1
        self.offsets = zeros(slots, pictures, dtype=torch.int64)
        self.edges = zeros(slots, pictures, pool.MAX_CHARS + 1, dtype=torch.float32)
        self.classes = zeros(slots, pictures, pool.MAX_CHARS, dtype=torch.uint8)
        self.strips = zeros(slots * pool.STRIP_BYTES, dtype=torch.uint8)
        self.one = zeros(slots, pool.SINGLES, pool.ROWS, pool.LENGTH_ONE, dtype=torch.int16)
        self.two = zeros(slots, pool.PAIRS, pool.LENGTH_TWO, dtype=torch.int16)
        self.filled, self.waited = 0, 0.0
        self.queue: Queue[dict[str, Tensor] | Exception] = Queue(maxsize=4)
        threading.Thread(target=self._load, daemon=True).start()

    def _load(self) -> None:
        """Reads chunks into pinned memory, for ever; an error goes to the one who takes them."""
        number = 0
        try:
            while True:
                path = self.folder / f"chunk{number}.npz"
                while not path.exists():
                    time.sleep(0.02)
                with np.load(path) as data:
                    arrays = {k: torch.from_numpy(data[k]) for k in data.files}
                path.unlink()
                if self.device == "cuda":
                    arrays = {k: v.pin_memory() for k, v in arrays.items()}
                self.queue.put(arrays)
                number += 1
        except Exception as error:
            self.queue.put(error)

    def _next(self) -> dict[str, Tensor]:
        while True:
            if self.stop.value == pool.FAILED:
                raise RuntimeError("a worker failed; its traceback is above")
            try:
                arrays = self.queue.get(timeout=1)
            except Empty:
                continue
            if isinstance(arrays, Exception):
                raise RuntimeError("a chunk could not be read") from arrays
            return arrays

    def take(self) -> None:
        """Puts the next chunk in place of the oldest one."""
        begin = time.time()
        arrays = self._next()
        self.waited += time.time() - begin
        slot = self.filled % self.slots
        for name in ("records", "edges", "classes", "one", "two"):
            getattr(self, name)[slot].copy_(arrays[name], non_blocking=True)
        base = slot * pool.STRIP_BYTES
        self.offsets[slot].copy_(arrays["offsets"], non_blocking=True)
        self.offsets[slot] += base
        self.strips[base : base + len(arrays["strips"])].copy_(arrays["strips"], non_blocking=True)
        self.filled += 1

    def sample(self, n: int, per: int, generator: torch.Generator) -> Sample:
        """``n`` conversations about ``per`` pictures each (1 or 2), at random."""
        have = max(1, min(self.filled, self.slots))

        def draw(high: int) -> Tensor:
            return torch.randint(high, (n,), device=self.device, generator=generator)

        slot = draw(have)
        if per == 1:
            at = draw(pool.SINGLES)
            rows = self.one[slot, at, draw(pool.ROWS)]
            where = (slot, at)
        else:
            at = draw(pool.PAIRS)
            rows = self.two[slot, at]
            both = pool.SINGLES + 2 * at[:, None] + torch.arange(2, device=self.device)
            where = (slot.repeat_interleave(2), both.reshape(-1))
        return Sample(self.records[where], self.offsets[where], self.edges[where], self.classes[where], rows)
