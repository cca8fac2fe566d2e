"""The cache of image features: bounded in bytes, the longest unused goes first, nothing else is kept alive."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vlm.engine.features import FeatureCache


def rows(count: int) -> torch.Tensor:
    """4 bytes a row."""
    return torch.zeros(count, 1)


def test_what_was_used_longest_ago_goes_first() -> None:
    cache = FeatureCache(40)
    for key in (b"a", b"b"):
        cache.put(key, rows(4))
    assert cache.get(b"a") is not None
    cache.put(b"c", rows(4))
    assert (b"a" in cache, b"b" in cache, b"c" in cache) == (True, False, True)
    assert (cache.num_bytes, len(cache)) == (32, 2)
    assert cache.get(b"b") is None


def test_what_never_fits_is_used_and_not_kept() -> None:
    cache = FeatureCache(40)
    cache.put(b"a", rows(4))
    large = rows(11)
    assert cache.put(b"b", large) is large
    assert (b"a" in cache, b"b" in cache, cache.num_bytes) == (True, False, 16)
    assert b"x" not in FeatureCache(0)


def test_a_part_of_a_batch_does_not_keep_the_batch_alive() -> None:
    cache = FeatureCache(100)
    kept = cache.put(b"a", rows(1000)[10:12])
    assert cache.get(b"a") is kept
    assert kept.untyped_storage().nbytes() == cache.num_bytes == 8


def test_what_is_forgotten_gives_its_room_back() -> None:
    cache = FeatureCache(40)
    cache.put(b"a", rows(4))
    cache.forget([b"a", b"unknown"])
    assert (b"a" in cache, cache.num_bytes) == (False, 0)
    cache.put(b"a", rows(10))
    with pytest.raises(AssertionError, match="encoded again"):
        cache.put(b"a", rows(1))


@given(st.integers(0, 60), st.lists(st.tuples(st.sampled_from(["use", "forget"]), st.integers(0, 9)), max_size=60))
def test_bytes_are_those_held_and_never_too_many(max_bytes: int, actions: list[tuple[str, int]]) -> None:
    cache = FeatureCache(max_bytes)
    order: list[int] = []  # used last at the end
    for action, n in actions:
        order = [other for other in order if other != n]
        if action == "forget":
            cache.forget([bytes([n])])
        else:
            if cache.get(bytes([n])) is None:
                cache.put(bytes([n]), rows(n))
            if bytes([n]) in cache:
                order.append(n)
        kept = [other for other in range(10) if bytes([other]) in cache]
        assert cache.num_bytes == sum(4 * other for other in kept) <= max_bytes
        order = [other for other in order if other in kept]
        assert sorted(order) == kept
