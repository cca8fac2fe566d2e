"""The block manager never hands out a block twice and never loses one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlm.engine.blocks import BlockManager


def test_allocation_is_all_or_nothing() -> None:
    blocks = BlockManager(4, 16)
    assert blocks.allocate(5) is None
    assert blocks.num_free == 4
    assert sorted(blocks.allocate(4) or []) == [0, 1, 2, 3]
    assert blocks.allocate(1) is None
    assert blocks.allocate(0) == []


def test_a_shared_block_is_free_when_the_last_holder_lets_go() -> None:
    blocks = BlockManager(2, 16)
    taken = blocks.allocate(1)
    assert taken is not None
    blocks.share(taken)
    blocks.free(taken)
    assert blocks.num_free == 1
    blocks.free(taken)
    assert blocks.num_free == 2


def test_freeing_twice_is_our_own_bug() -> None:
    blocks = BlockManager(2, 16)
    taken = blocks.allocate(1)
    assert taken is not None
    blocks.free(taken)
    with pytest.raises(AssertionError, match="freed twice"):
        blocks.free(taken)


@pytest.mark.parametrize(("tokens", "expected"), [(0, 0), (1, 1), (16, 1), (17, 2), (32, 2)])
def test_blocks_for_rounds_up(tokens: int, expected: int) -> None:
    assert BlockManager(8, 16).blocks_for(tokens) == expected


@given(st.lists(st.tuples(st.sampled_from(["take", "share", "free"]), st.integers(0, 7)), max_size=60))
def test_held_and_free_blocks_are_all_blocks(actions: list[tuple[str, int]]) -> None:
    blocks = BlockManager(8, 4)
    held: list[list[int]] = []
    for action, n in actions:
        if action == "take":
            enough = n <= blocks.num_free
            taken = blocks.allocate(n)
            assert (taken is not None) == enough
            if taken is not None:
                assert not {b for group in held for b in group} & set(taken)
                held.append(taken)
        elif held:
            group = held[n % len(held)]
            if action == "share":
                blocks.share(group)
                held.append(list(group))
            else:
                held.remove(group)
                blocks.free(group)
        assert blocks.num_free == 8 - len({b for group in held for b in group})
