"""The sdpa operations beyond what the conformance test draws: batching, plans, edges, memory."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from vlm.attention.backends import sdpa_op
from vlm.attention.factory import build, select
from vlm.attention.layout import LayerCache, PagedStep, Segments
from vlm.attention.platform import Platform
from vlm.attention.spec import AttentionSpec, Preference

ENCODER = AttentionSpec("encoder", 16, 4, 4, "float32", features=frozenset({"varlen"}))
DECODER = AttentionSpec("decoder", 16, 6, 2, "float32", features=frozenset({"varlen", "causal", "paged"}))


def make(spec: AttentionSpec) -> Any:
    platform = Platform.fake("cpu")
    return build(select(spec, platform, Preference("sdpa", "this test"), False), spec, platform)


class CountCalls(TorchDispatchMode):
    """Counts attention kernels, and fails on anything that brings a value from the device to the host."""

    SYNCS = ("_local_scalar_dense", "nonzero", "equal", "masked_select", "_unique2")

    def __init__(self) -> None:
        super().__init__()
        self.attention = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        assert name not in self.SYNCS, name
        self.attention += "scaled_dot_product" in name
        return func(*args, **(kwargs or {}))


def packed(spec: AttentionSpec, length: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(length, spec.num_heads, spec.head_dim, generator=generator),
        torch.randn(length, spec.num_kv_heads, spec.head_dim, generator=generator),
        torch.randn(length, spec.num_kv_heads, spec.head_dim, generator=generator),
    )


# Encoder and cross


@pytest.mark.parametrize(
    ("lengths", "calls"),
    [((4, 4, 4, 4), 1), ((8,), 1), ((4, 4, 2, 4, 4, 2, 2), 2), ((5, 0, 7), 2), ((0, 0), 0), ((), 0), ((3, 0, 3), 1)],
)
def test_equal_lengths_are_one_call(
    lengths: tuple[int, ...], calls: int, oracle: ModuleType, cases: ModuleType
) -> None:
    op = make(ENCODER)
    with CountCalls() as counter:
        q, k, v = packed(ENCODER, sum(lengths))
        got = op(q, k, v, Segments.packed(lengths, "cpu"))
    assert counter.attention == calls
    assert cases.error(got, oracle.attend(q, k, v, lengths, lengths, ENCODER, False)) < 1e-5


@pytest.mark.parametrize(
    "features", [frozenset({"varlen"}), frozenset({"varlen", "causal"}), frozenset({"varlen", "sliding_window"})]
)
def test_cross_attention_with_every_relation_of_lengths(
    features: frozenset[str], oracle: ModuleType, cases: ModuleType
) -> None:
    """More queries than keys, fewer, none of either: a query that sees no key gives zeros, never NaN."""
    spec = AttentionSpec("cross", 16, 4, 2, "float32", features=features, window=2)  # type: ignore[arg-type]
    lengths_q, lengths_k = (5, 2, 3, 0, 1, 5), (2, 6, 0, 4, 1, 2)
    assert cases.run_segments(make(spec), oracle.attend, spec, lengths_q, lengths_k, "cpu") < 1e-5
    q, k, v = cases.qkv(spec, 16, 15, "cpu")
    got = make(spec)(q, k, v, Segments.cross(lengths_q, lengths_k, "cpu"))
    assert bool((got[7:10] == 0).all())
    assert bool(torch.isfinite(got).all())


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_a_batch_gives_what_its_members_give_alone(softcap: float | None) -> None:
    features = ENCODER.features | ({"softcap"} if softcap else set())
    spec = replace(ENCODER, features=frozenset(features), softcap=softcap)
    op, lengths = make(spec), (9, 33, 9, 1, 33)
    q, k, v = packed(spec, sum(lengths))
    together = op(q, k, v, Segments.packed(lengths, "cpu")).split(lengths)
    alone = [
        op(*parts, Segments.packed([length], "cpu"))
        for length, *parts in zip(lengths, q.split(lengths), k.split(lengths), v.split(lengths), strict=True)
    ]
    for a, b in zip(together, alone, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


def test_softcap_saturates_and_does_not_overflow() -> None:
    spec = replace(ENCODER, features=frozenset({"varlen", "softcap"}), softcap=30.0, scale=1e4)
    q, k, v = packed(spec, 6)
    got = make(spec)(q * 1e3, k * 1e3, v, Segments.packed([6], "cpu"))
    assert bool(torch.isfinite(got).all())


def test_scores_are_cut_into_blocks_of_queries(
    monkeypatch: pytest.MonkeyPatch, oracle: ModuleType, cases: ModuleType
) -> None:
    spec = replace(ENCODER, num_kv_heads=2, features=frozenset({"varlen", "causal", "softcap", "sinks"}), softcap=3.0)
    monkeypatch.setattr(sdpa_op, "MAX_SCORES", 2 * 4 * 11 * 3)
    largest = 0
    softmax = torch.softmax

    def watched(scores: torch.Tensor, dim: int) -> torch.Tensor:
        nonlocal largest
        largest = max(largest, scores.numel())
        return softmax(scores, dim=dim)

    monkeypatch.setattr(torch, "softmax", watched)
    assert cases.run_segments(make(spec), oracle.attend, spec, (11, 11), (11, 11), "cpu") < 1e-5
    assert largest <= 2 * 4 * 12 * 3


def test_grouped_heads_up_to_64(oracle: ModuleType, cases: ModuleType) -> None:
    spec = replace(ENCODER, num_heads=64, num_kv_heads=1, features=frozenset({"varlen", "causal"}))
    assert cases.run_segments(make(spec), oracle.attend, spec, (3, 5), (3, 5), "cpu") < 1e-5


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=5),
    causal=st.booleans(),
    window=st.one_of(st.none(), st.integers(1, 7)),
    groups=st.sampled_from([1, 2]),
)
def test_any_packing(
    lengths: list[tuple[int, int]], causal: bool, window: int | None, groups: int, oracle: ModuleType, cases: ModuleType
) -> None:
    features = {"varlen"} | ({"causal"} if causal else set()) | ({"sliding_window"} if window else set())
    spec = AttentionSpec("cross", 8, 2, 2 // groups, "float32", features=frozenset(features), window=window)  # type: ignore[arg-type]
    lengths_q, lengths_k = zip(*lengths, strict=True)
    assert cases.run_segments(make(spec), oracle.attend, spec, lengths_q, lengths_k, "cpu") < 1e-5


# Plans


def test_layers_share_a_plan_and_it_goes_with_the_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    plan = sdpa_op.plan_segments
    monkeypatch.setattr(sdpa_op, "plan_segments", lambda *args: made.append(1) or plan(*args))
    op, q = make(ENCODER), packed(ENCODER, 10)
    segments = Segments.packed([3, 7], "cpu")
    for _ in range(4):
        op(*q, segments)
    assert len(made) == 1
    op(*q, Segments.packed([7, 3], "cpu"))
    assert len(made) == 2
    gone = weakref.ref(segments)
    del segments
    gc.collect()
    assert gone() is None


def test_a_step_brings_no_value_to_the_host() -> None:
    op = make(DECODER)
    cache = LayerCache(torch.zeros(8, 4, 2, 16), torch.zeros(8, 4, 2, 16))
    step = PagedStep.build([1, 3, 2, 1], [9, 3, 7, 4], [[0, 1, 2], [3], [4, 5], [6]], 4, "cpu")
    with CountCalls() as counter:
        op(*packed(DECODER, 7), cache, step)
    assert counter.attention == 3  # fresh, single tokens, chunk


# Decoder


def test_a_step_mixes_fresh_prompts_chunks_and_single_tokens(
    device: str, oracle: ModuleType, cases: ModuleType
) -> None:
    platform = Platform.detect(device)
    op = build(select(DECODER, platform, Preference("sdpa", "this test"), False), DECODER, platform)
    cache = cases.Cache(DECODER, sequences=5, blocks_each=8, block_size=4, device=device)
    for lens in [(9, 2, 0, 0, 1), (1, 3, 4, 4, 1), (1, 1, 1, 1, 1), (2, 1, 2, 2, 7), (1, 1, 1, 1, 1)]:
        assert cache.step(op, oracle.attend, lens) < 1e-5


@pytest.mark.parametrize("window", [1, 2, 5, 100])
def test_a_windowed_decoder_reads_only_its_window(window: int, oracle: ModuleType, cases: ModuleType) -> None:
    spec = replace(DECODER, features=DECODER.features | {"sliding_window"}, window=window)
    op, cache = make(spec), cases.Cache(spec, sequences=3, blocks_each=6, block_size=4, device="cpu")
    for lens in [(7, 1, 3), (1, 4, 1), (3, 3, 3), (1, 1, 1)]:
        assert cache.step(op, oracle.attend, lens) < 1e-5
    step = PagedStep.build([1], [20], [cache.tables[0][:5]], 4, "cpu")
    (batch,) = sdpa_op.plan_step(step, window)
    assert batch.len_k == min(window, 20)


def test_very_unequal_lengths_are_not_padded_to_the_longest() -> None:
    kv_lens = [1000, 3, 4, 5, 6, 7]
    step = PagedStep.build([1] * 6, kv_lens, [list(range(63))] + [[70 + i] for i in range(5)], 16, "cpu")
    padded = sum(batch.count * batch.len_k for batch in sdpa_op.plan_step(step, None))
    assert padded <= 2 * sum(kv_lens)


def test_a_padded_row_is_zero() -> None:
    """A row without keys is written, with zeros: a captured graph must not spread what memory held."""
    step = PagedStep(
        (1, 1),
        (3, 0),
        torch.tensor([0, 1, 2], dtype=torch.int32),
        torch.tensor([3, 0], dtype=torch.int32),
        torch.tensor([[0], [1]], dtype=torch.int32),
        torch.tensor([2, 4]),
        4,
    )
    cache = LayerCache(torch.zeros(2, 4, 2, 16), torch.zeros(2, 4, 2, 16))
    got = make(DECODER)(*packed(DECODER, 2), cache, step)
    assert bool((got[1] == 0).all())
    assert bool((got[0] != 0).any())


def test_new_keys_are_written_where_the_step_says_and_nowhere_else() -> None:
    cache = LayerCache(torch.zeros(3, 4, 2, 16), torch.zeros(3, 4, 2, 16))
    q, k, v = packed(DECODER, 3)
    make(DECODER)(q, k, v, cache, PagedStep.build([3], [6], [[2, 0]], 4, "cpu"))
    written = torch.zeros(12, dtype=torch.bool)
    written[[11, 0, 1]] = True  # position 3 of block 2, positions 0 and 1 of block 0
    assert torch.equal(cache.k.flatten(0, 1)[[11, 0, 1]], k)
    assert torch.equal(cache.v.flatten(0, 1)[[11, 0, 1]], v)
    assert bool((cache.k.flatten(0, 1)[~written] == 0).all())


def test_decoding_token_by_token_gives_what_one_prompt_gives() -> None:
    q, k, v = packed(DECODER, 12)
    op = make(DECODER)

    def cache() -> LayerCache:
        return LayerCache(torch.zeros(3, 4, 2, 16), torch.zeros(3, 4, 2, 16))

    whole = op(q, k, v, cache(), PagedStep.build([12], [12], [[2, 0, 1]], 4, "cpu"))
    kept, parts, done = cache(), [], 0
    for size in (5, 1, 3, 1, 2):
        part = slice(done, done + size)
        done += size
        parts.append(
            op(q[part], k[part], v[part], kept, PagedStep.build([size], [done], [[2, 0, 1][: -(-done // 4)]], 4, "cpu"))
        )
    torch.testing.assert_close(torch.cat(parts), whole, rtol=0, atol=1e-6)
