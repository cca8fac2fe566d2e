"""Which blocks of the paged KV cache are free, and who holds the others. Pure data: no tensor, no request.

A block may be held more than once (sequences that share a prefix); it is free again when the last holder lets go.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable


class BlockManager:
    """`num_blocks` blocks of `block_size` tokens, numbered from 0."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"a cache of {num_blocks} blocks of {block_size} tokens holds nothing")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free: deque[int] = deque(range(num_blocks))
        self._holders = [0] * num_blocks

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def capacity(self) -> int:
        """Tokens that fit in all blocks together."""
        return self.num_blocks * self.block_size

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens of one sequence take."""
        return -(-num_tokens // self.block_size)

    def allocate(self, count: int) -> list[int] | None:
        """`count` blocks, each held once; None, and nothing taken, when fewer are free."""
        if count > len(self._free):
            return None
        taken = [self._free.popleft() for _ in range(count)]
        for block in taken:
            self._holders[block] = 1
        return taken

    def share(self, blocks: Iterable[int]) -> None:
        """Hold blocks that somebody holds already once more."""
        for block in blocks:
            assert self._holders[block] > 0, f"block {block} is free and cannot be shared"
            self._holders[block] += 1

    def free(self, blocks: Iterable[int]) -> None:
        """Let go of each block once."""
        for block in blocks:
            assert self._holders[block] > 0, f"block {block} is freed twice"
            self._holders[block] -= 1
            if self._holders[block] == 0:
                self._free.append(block)
