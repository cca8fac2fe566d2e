"""Which blocks of the paged KV cache are free, who holds the others, and what full blocks hold. Pure data.

A block may be held more than once (sequences that share a prefix). What a full block holds is known by a hash, given
with `register`; a block that nobody holds any more keeps its content, and can be found and held again, until it is
needed for something else. Of those the one that was let go first is given away first, after all blocks that hold
nothing of use.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence


class BlockManager:
    """`num_blocks` blocks of `block_size` tokens, numbered from 0."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"a cache of {num_blocks} blocks of {block_size} tokens holds nothing")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._blank: deque[int] = deque(range(num_blocks))
        self._idle: OrderedDict[int, None] = OrderedDict()  # free, with known content; first let go first
        self._holders = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._by_hash: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds, with known content or without."""
        return len(self._blank) + len(self._idle)

    @property
    def num_known(self) -> int:
        """Blocks that can be found by what they hold."""
        return len(self._by_hash)

    @property
    def capacity(self) -> int:
        """Tokens that fit in all blocks together."""
        return self.num_blocks * self.block_size

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens of one sequence take."""
        return -(-num_tokens // self.block_size)

    def allocate(self, count: int) -> list[int] | None:
        """`count` blocks to write to, each held once; None, and nothing taken, when fewer are free."""
        if count > self.num_free:
            return None
        taken = [self._take() for _ in range(count)]
        for block in taken:
            self._holders[block] = 1
        return taken

    def find(self, hashes: Iterable[bytes]) -> list[int]:
        """The blocks that hold a beginning of this chain of contents, the longest there is. They are not held yet."""
        found: list[int] = []
        for key in hashes:
            if (block := self._by_hash.get(key)) is None:
                break
            found.append(block)
        return found

    def count_free(self, blocks: Iterable[int]) -> int:
        """How many of these blocks nobody holds: holding them leaves so many fewer free."""
        return sum(self._holders[block] == 0 for block in blocks)

    def share(self, blocks: Iterable[int]) -> None:
        """Hold blocks that somebody holds already, or whose content is known, once more."""
        for block in blocks:
            if self._holders[block] == 0:
                assert block in self._idle, f"block {block} is free and cannot be shared"
                del self._idle[block]
            self._holders[block] += 1

    def free(self, blocks: Sequence[int]) -> None:
        """Let go of each block once, the last first: a chain is given away from its end, as its rest is still found."""
        for block in reversed(blocks):
            assert self._holders[block] > 0, f"block {block} is freed twice"
            self._holders[block] -= 1
            if self._holders[block] > 0:
                continue
            if self._hashes[block] is None:
                self._blank.append(block)
            else:
                self._idle[block] = None

    def register(self, block: int, key: bytes) -> None:
        """A held block is full, and will not be written to again; `key` says what it holds. The first of two stays."""
        assert self._holders[block] > 0, f"block {block} is free and cannot be registered"
        if key not in self._by_hash:
            self.forget([block])
            self._by_hash[key] = block
            self._hashes[block] = key

    def forget(self, blocks: Iterable[int]) -> None:
        """What these held blocks hold is not to be found any more."""
        for block in blocks:
            assert self._holders[block] > 0, f"block {block} is free and cannot be forgotten"
            self._drop(block)

    def _take(self) -> int:
        if self._blank:
            return self._blank.popleft()
        block, _ = self._idle.popitem(last=False)
        self._drop(block)
        return block

    def _drop(self, block: int) -> None:
        if (key := self._hashes[block]) is not None:
            del self._by_hash[key]
            self._hashes[block] = None
