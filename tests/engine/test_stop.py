"""Answers end where they should, and no text is shown that may turn out to be a stop string."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlm.engine.stop import StopChecker, Verdict
from vlm.params import ResolvedParams


class Pieces:
    """Ids index a list of strings; with `late` the last character of a piece comes out with the next one."""

    def __init__(self, pieces: list[str], late: bool = False) -> None:
        self.pieces, self.late, self.kept = pieces, late, ""

    def push(self, ids: Iterable[int]) -> str:
        text = self.kept + "".join(self.pieces[i] for i in ids)
        cut = len(text) - 1 if self.late and text else len(text)
        self.kept = text[cut:]
        return text[:cut]

    def flush(self) -> str:
        text, self.kept = self.kept, ""
        return text


def answer(pieces: list[str], late: bool = False, max_tokens: int = 100, **params: object) -> list[Verdict]:
    resolved = ResolvedParams(max_tokens=max_tokens, **params)  # type: ignore[arg-type]
    checker = StopChecker(resolved, Pieces(pieces, late), max_tokens)
    verdicts = []
    for token_id in range(len(pieces)):
        verdicts.append(checker.push(token_id))
        if verdicts[-1].finish_reason:
            break
    return verdicts


def text_of(verdicts: list[Verdict]) -> str:
    return "".join(v.text for v in verdicts)


def test_a_stop_string_across_tokens_is_cut_and_never_shown() -> None:
    verdicts = answer(["one ", "tw", "o th", "ree"], stop=("two three",))
    assert [v.text for v in verdicts] == ["one ", "", "", ""]
    assert verdicts[-1].finish_reason == "stop"


def test_held_back_text_is_shown_once_it_is_harmless() -> None:
    verdicts = answer(["a", "b", "c"], stop=("abd",))
    assert [v.text for v in verdicts] == ["", "", "abc"]


def test_the_stop_string_complete_first_wins() -> None:
    verdicts = answer(["hello world, bye"], stop=("bye", "wor", "world"))
    assert text_of(verdicts) == "hello "


@pytest.mark.parametrize("late", [False, True])
def test_a_stop_id_ends_without_its_text(late: bool) -> None:
    verdicts = answer(["ab", "cd", "EOS", "no"], late, stop_token_ids=frozenset({2}))
    assert text_of(verdicts) == "abcd"
    assert len(verdicts) == 3
    assert verdicts[-1].finish_reason == "stop"


def test_several_stop_ids() -> None:
    assert len(answer(["a", "b", "c"], stop_token_ids=frozenset({9, 1}))) == 2


def test_a_stop_id_lets_held_back_text_out() -> None:
    assert text_of(answer(["ab", "EOS"], stop=("abc",), stop_token_ids=frozenset({1}))) == "ab"


def test_max_tokens_ends_with_all_text() -> None:
    verdicts = answer(["ab", "cd", "ef"], late=True, max_tokens=2, stop=("d!",))
    assert text_of(verdicts) == "abcd"
    assert verdicts[-1].finish_reason == "length"


def test_a_stop_string_that_only_the_last_flush_completes() -> None:
    verdicts = answer(["ab", "cd"], late=True, max_tokens=2, stop=("d",))
    assert text_of(verdicts) == "abc"
    assert verdicts[-1].finish_reason == "stop"


@pytest.mark.parametrize(("run", "limit"), [(1, 2), (1, 5), (2, 3), (3, 4), (32, 2)])
def test_repetition_stops_at_the_limit(run: int, limit: int) -> None:
    ids = [100, 101, *list(range(run)) * (limit + 3)]
    checker = StopChecker(ResolvedParams(max_tokens=999, repetition_limit=limit), Pieces([""] * 200), 999)
    reasons = [checker.push(i).finish_reason for i in ids]
    assert reasons.index("repetition") == 2 + run * limit - 1


@given(st.lists(st.integers(0, 3), max_size=80), st.integers(2, 4))
def test_repetition_is_what_a_look_at_the_end_says(ids: list[int], limit: int) -> None:
    checker = StopChecker(ResolvedParams(max_tokens=999, repetition_limit=limit), Pieces([""] * 4), 999)
    for end, token_id in enumerate(ids, start=1):
        so_far = ids[:end]
        expected = any(len(so_far) >= n * limit and so_far[-n * limit :] == so_far[-n:] * limit for n in range(1, 33))
        assert (checker.push(token_id).finish_reason == "repetition") == expected
        if expected:
            break


def test_no_limit_lets_repetition_go_on() -> None:
    assert all(v.finish_reason is None for v in answer(["a"] * 60))


@given(
    st.lists(st.text("ab.", max_size=4), max_size=12),
    st.lists(st.text("ab.", min_size=1, max_size=4), max_size=3),
    st.booleans(),
)
def test_shown_text_is_the_answer_up_to_the_first_stop(pieces: list[str], stops: list[str], late: bool) -> None:
    """Holds however the text is cut into tokens; and what was shown is never taken back."""
    pieces = [*pieces, "EOS"]
    verdicts = answer(pieces, late, stop=tuple(stops), stop_token_ids=frozenset({len(pieces) - 1}))
    whole = "".join(pieces[:-1])
    found = [(at + len(s), at) for s in stops if (at := whole.find(s)) >= 0]
    cut = min(found)[1] if found else len(whole)
    assert text_of(verdicts) == whole[:cut]
