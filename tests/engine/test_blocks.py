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


def held(blocks: BlockManager, count: int) -> list[int]:
    taken = blocks.allocate(count)
    assert taken is not None
    return taken


def test_what_a_block_holds_is_found_until_it_is_needed() -> None:
    blocks = BlockManager(3, 16)
    chain = held(blocks, 2)
    for block, key in zip(chain, (b"a", b"b"), strict=True):
        blocks.register(block, key)
    assert blocks.find([b"a", b"b", b"c"]) == chain
    assert blocks.find([b"c", b"a"]) == []
    blocks.free(chain)
    assert (blocks.num_free, blocks.num_known) == (3, 2)
    assert blocks.count_free(chain) == 2
    blocks.share(chain[:1])
    assert (blocks.num_free, blocks.count_free(chain)) == (2, 1)
    held(blocks, 2)
    assert blocks.find([b"a", b"b"]) == chain[:1]  # b was given away; a is held


def test_blank_blocks_go_first_then_the_end_of_the_chain_let_go_first() -> None:
    blocks = BlockManager(5, 16)
    old, new = held(blocks, 2), held(blocks, 2)
    for i, block in enumerate([*old, *new]):
        blocks.register(block, bytes([i]))
    blocks.free(old)
    blocks.free(new)
    assert [held(blocks, 1)[0] for _ in range(5)] == [4, old[1], old[0], new[1], new[0]]


def test_being_used_again_keeps_a_block() -> None:
    blocks = BlockManager(2, 16)
    a, b = held(blocks, 1), held(blocks, 1)
    blocks.register(a[0], b"a")
    blocks.register(b[0], b"b")
    blocks.free(a)
    blocks.free(b)
    blocks.share(a)
    blocks.free(a)
    assert held(blocks, 1) == b


def test_of_two_blocks_with_one_content_the_first_is_found() -> None:
    blocks = BlockManager(2, 16)
    first, second = held(blocks, 2)
    blocks.register(first, b"x")
    blocks.register(second, b"x")
    assert blocks.find([b"x"]) == [first]
    blocks.free([first, second])
    assert held(blocks, 2) == [second, first]
    assert blocks.num_known == 0


def test_what_is_forgotten_is_not_found_and_its_block_is_blank() -> None:
    blocks = BlockManager(2, 16)
    taken = held(blocks, 1)
    blocks.register(taken[0], b"x")
    blocks.forget(taken)
    blocks.free(taken)
    assert blocks.find([b"x"]) == []
    with pytest.raises(AssertionError, match="cannot be shared"):
        blocks.share(taken)


@given(st.lists(st.tuples(st.sampled_from(["take", "share", "find", "free", "full"]), st.integers(0, 7)), max_size=80))
def test_held_and_free_blocks_are_all_blocks(actions: list[tuple[str, int]]) -> None:
    blocks = BlockManager(8, 4)
    held: list[list[int]] = []
    content: dict[int, bytes] = {}  # what was last written to each block
    for action, n in actions:
        if action == "take":
            enough = n <= blocks.num_free
            taken = blocks.allocate(n)
            assert (taken is not None) == enough
            if taken is not None:
                assert not {b for group in held for b in group} & set(taken)
                assert not any(blocks.find([content.pop(b)]) == [b] for b in taken if b in content)
                held.append(taken)
        elif action == "find":
            found = blocks.find([bytes([n])])
            assert all(content[b] == bytes([n]) for b in found)
            blocks.share(found)
            held.append(found)
        elif held:
            group = held[n % len(held)]
            if action == "share":
                blocks.share(group)
                held.append(list(group))
            elif action == "full" and group and group[0] not in content:
                content[group[0]] = bytes([n])
                blocks.register(group[0], bytes([n]))
                assert blocks.find([bytes([n])])
            elif action == "free":
                held.remove(group)
                blocks.free(group)
        assert blocks.num_free == 8 - len({b for group in held for b in group})
        assert blocks.num_known <= len(content)
