"""Sampling: greedy is exact, filters match a plain reading, seeds do not see the batch."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch

from vlm.engine.request import Request, Sequence
from vlm.engine.sampler import NO_TOKEN, Sampled, Sampler, sample_rows, uniform
from vlm.params import ResolvedParams

V = 50


def sequence(
    id: int = 0, *, prompt: tuple[int, ...] = (1, 2), output: tuple[int, ...] = (), seed: int = 0, **params: Any
) -> Sequence:
    request = Request(id, prompt, cast(Any, None), len(prompt), ResolvedParams(max_tokens=99, **params))
    return Sequence(request, seed, cast(Any, None), list(output))


def sampler(device: str = "cpu", banned: tuple[int, ...] = ()) -> Sampler:
    return Sampler(V, banned, 16, torch.device(device))


def logits(rows: int, seed: int = 0, device: str = "cpu") -> torch.Tensor:
    return (3 * torch.randn(rows, V, generator=torch.Generator().manual_seed(seed))).to(device)


def tokens(sampled: list[Sampled]) -> list[int]:
    return [s.token_id for s in sampled]


def test_greedy_is_the_maximum(device: str) -> None:
    x = logits(5, device=device)
    assert tokens(sampler(device)(x, [sequence(i) for i in range(5)])) == x.argmax(-1).tolist()


def test_banned_ids_are_never_taken(device: str) -> None:
    x = logits(4, device=device)
    best = x.argmax(-1).tolist()
    banned = sampler(device, tuple(best))
    greedy = tokens(banned(x, [sequence(i) for i in range(4)]))
    sampled = [
        t for s in range(30) for t in tokens(banned(x, [sequence(i, seed=s, temperature=5.0) for i in range(4)]))
    ]
    assert not {*greedy, *sampled} & set(best)


def test_the_logits_that_came_in_are_left_alone() -> None:
    x = logits(2)
    before = x.clone()
    sampler(banned=(0,))(x, [sequence(0, temperature=1.0), sequence(1, repetition_penalty=2.0)])
    assert torch.equal(x, before)


def test_seeds_do_not_see_the_batch(device: str) -> None:
    """Alone, in a mixed batch, and at another row: the same request draws the same tokens."""
    x = logits(6, device=device)
    who = sequence(3, seed=1234, temperature=1.5, top_p=0.95)
    alone, together = [], []
    for step in range(20):
        who.output_ids = [0] * step
        alone += tokens(sampler(device)(x[:1], [who]))
        others = [sequence(10 + i, seed=i, temperature=0.0 if i % 2 else 1.0, min_p=0.1) for i in range(5)]
        rows = [*others[:3], who, *others[3:]]
        together.append(tokens(sampler(device)(x[[1, 2, 3, 0, 4, 5]], rows))[3])
    assert alone == together
    assert len(set(alone)) > 3


def test_another_seed_draws_otherwise() -> None:
    x = logits(1).expand(1, V)
    draws = {s: tokens(sampler()(x, [sequence(seed=s, temperature=2.0)]))[0] for s in range(40)}
    assert len(set(draws.values())) > 5


def test_uniform_numbers_are_uniform() -> None:
    numbers = torch.tensor([uniform(seed, position) for seed in range(40) for position in range(100)])
    assert (numbers >= 0).all()
    assert (numbers < 1).all()
    histogram = torch.histc(numbers, 10, 0, 1)
    assert (histogram - 400).abs().max() < 80
    assert uniform(3, 4) == uniform(3 + (1 << 64), 4)


def kept_tokens(x: torch.Tensor, top_k: int = V, top_p: float = 1.0, min_p: float = 0.0) -> set[int]:
    """Every token that some draw gives."""
    draws = torch.linspace(0, 1, 4001)[:, None]
    column = torch.ones_like(draws)
    rows = x.expand(len(draws), -1)
    return set(sample_rows(rows, top_k * column, top_p * column, min_p * column, draws).tolist())


@pytest.mark.parametrize("top_k", [1, 3, 10])
def test_top_k(top_k: int) -> None:
    x = torch.linspace(0, 3, V)
    assert kept_tokens(x, top_k=top_k) == set(range(V - top_k, V))


@pytest.mark.parametrize(("top_p", "kept"), [(0.4, 1), (0.5, 1), (0.51, 2), (0.8, 2), (0.81, 3), (1.0, 4), (1e-6, 1)])
def test_top_p_keeps_the_token_that_crosses(top_p: float, kept: int) -> None:
    x = torch.tensor([0.5, 0.3, 0.125, 0.075]).log()
    assert kept_tokens(x, top_p=top_p) == set(range(kept))


@pytest.mark.parametrize(("min_p", "kept"), [(0.0, 4), (0.2, 3), (0.26, 2), (0.7, 1), (1.0, 1)])
def test_min_p_is_relative_to_the_most_likely(min_p: float, kept: int) -> None:
    x = torch.tensor([0.5, 0.3, 0.125, 0.075]).log()
    assert kept_tokens(x, min_p=min_p) == set(range(kept))


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"), [(0, 1.0, 0.0), (5, 1.0, 0.0), (0, 0.7, 0.0), (0, 1.0, 0.3), (8, 0.9, 0.05)]
)
def test_filters_keep_what_transformers_keeps(top_k: int, top_p: float, min_p: float) -> None:
    from transformers.generation import logits_process as reference

    x = logits(1, seed=7)
    warped = x.clone()
    if top_k:
        warped = reference.TopKLogitsWarper(top_k)(cast(Any, None), warped)
    if top_p < 1:
        warped = reference.TopPLogitsWarper(top_p)(cast(Any, None), warped)
    if min_p:
        warped = reference.MinPLogitsWarper(min_p)(cast(Any, None), warped)
    likely = set((warped[0].softmax(-1) > 1e-3).nonzero().flatten().tolist())
    possible = set(warped[0].isfinite().nonzero().flatten().tolist())
    kept = kept_tokens(x, top_k or V, top_p, min_p)
    assert likely <= kept <= possible


def test_draws_follow_the_distribution() -> None:
    probs = torch.tensor([0.5, 0.3, 0.2])
    draws = torch.tensor([[uniform(0, i)] for i in range(4000)])
    one = torch.ones_like(draws)
    drawn = sample_rows(probs.log().expand(4000, 3), 3 * one, one, 0 * one, draws)
    assert (drawn.bincount(minlength=3) / 4000 - probs).abs().max() < 0.03


def test_repetition_penalty_is_that_of_transformers(device: str) -> None:
    from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

    x = logits(3, seed=2)
    prompt, output = (3, 4, 5, 4), (7, 8)
    ids = torch.tensor([prompt + output])
    expected = torch.cat(
        [RepetitionPenaltyLogitsProcessor(penalty)(ids, x[i : i + 1].clone()) for i, penalty in enumerate((1.3, 4.0))]
    )
    rows = [sequence(i, prompt=prompt, output=output, repetition_penalty=p) for i, p in enumerate((1.3, 4.0))]
    got = sampler(device)(x.to(device), [*rows, sequence(2)])
    assert tokens(got) == [*expected.argmax(-1).tolist(), int(x[2].argmax())]


def test_penalties_follow_the_tokens_taken(device: str) -> None:
    """State kept on the device over the steps equals state read afresh from the ids."""
    params = {"repetition_penalty": 1.2, "presence_penalty": 0.7, "frequency_penalty": 0.9}
    kept = sampler(device)
    first, second = sequence(1, **params), sequence(2, prompt=(9,), frequency_penalty=2.0)
    for step in range(25):
        x = logits(2, seed=step // 8, device=device)
        fresh = tokens(sampler(device)(x, [first, second]))
        assert tokens(kept(x, [first, second])) == fresh
        first.output_ids.append(fresh[0])
        second.output_ids.append(fresh[1])
    assert len(set(second.output_ids)) > 3


def test_a_presence_penalty_counts_once_and_a_frequency_penalty_each_time() -> None:
    x = torch.zeros(1, V)
    x[0, 7], x[0, 8] = 4.0, 2.5
    assert tokens(sampler()(x, [sequence(output=(7, 7, 7), presence_penalty=1.0)])) == [7]
    assert tokens(sampler()(x, [sequence(output=(7, 7, 7), frequency_penalty=1.0)])) == [8]
    assert tokens(sampler()(x, [sequence(prompt=(7, 7, 7), frequency_penalty=2.0)])) == [7]  # the prompt does not count


def test_a_slot_is_clean_for_the_next_sequence() -> None:
    one = Sampler(V, (), 1, torch.device("cpu"))
    x = logits(1)
    best = int(x.argmax())
    first = sequence(1, prompt=(best,), output=(best,), repetition_penalty=9.0, frequency_penalty=2.0)
    assert tokens(one(x, [first])) != [best]
    one.release(first)
    assert tokens(one(x, [sequence(2, repetition_penalty=9.0, frequency_penalty=2.0)])) == [best]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_give_no_token(bad: float) -> None:
    x = logits(3)
    x[1, 4] = bad
    params = [{}, {"temperature": 1.0}, {}]
    got = tokens(sampler()(x, [sequence(i, **p) for i, p in enumerate(params)]))
    assert got[1] == NO_TOKEN
    assert got[0] == int(x[0].argmax())
    assert got[2] == int(x[2].argmax())


def test_logprobs_are_the_models_own(device: str) -> None:
    x = logits(3, device=device)
    rows = [sequence(0, logprobs=3), sequence(1), sequence(2, logprobs=0, temperature=3.0, repetition_penalty=1.5)]
    got = sampler(device)(x, rows)
    expected = x.log_softmax(-1)
    assert got[1].logprobs is None
    top = got[0].logprobs
    assert top is not None
    assert top.token_id == got[0].token_id
    assert top.logprob == pytest.approx(float(expected[0].max()), abs=1e-5)
    values, ids = expected[0].topk(3)
    assert list(top.top) == ids.tolist()
    assert list(top.top.values()) == pytest.approx(values.tolist(), abs=1e-5)
    other = got[2].logprobs
    assert other is not None
    assert other.top == {}
    assert other.logprob == pytest.approx(float(expected[2, got[2].token_id]), abs=1e-5)


def test_half_precision_logits_are_sampled_in_float32() -> None:
    x = logits(1).half()
    got = sampler()(x, [sequence(temperature=0.7, seed=5)])
    assert got == sampler()(x.float(), [sequence(temperature=0.7, seed=5)])


def test_a_mixed_batch_equals_its_rows() -> None:
    x = logits(6, seed=11)
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 0.8, "top_k": 5},
        {"repetition_penalty": 1.4},
        {"temperature": 1.2, "presence_penalty": 1.0, "top_p": 0.8},
        {"temperature": 2.0, "min_p": 0.2},
        {"temperature": 1.0, "repetition_penalty": 0.8, "top_k": 3, "top_p": 0.5},
    ]
    rows = [sequence(i, output=(4, 5), seed=i, **kind) for i, kind in enumerate(kinds)]
    single = [tokens(sampler()(x[i : i + 1], [row]))[0] for i, row in enumerate(rows)]
    assert tokens(sampler()(x, rows)) == single
