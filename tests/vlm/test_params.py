"""Sampling parameters: what is refused, and what None comes to."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from vlm.errors import CheckpointError, PromptError, UnsupportedModelError
from vlm.params import CHAT_MAX_TOKENS, ResolvedParams, SamplingParams, check_generation_config, resolve


def test_an_unknown_name_is_an_error_that_lists_the_known_ones() -> None:
    with pytest.raises(PromptError, match=r"'temprature'; known: temperature, top_p"):
        SamplingParams(temprature=0.5)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", "hot"),
        ("temperature", True),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_k", -2),
        ("top_k", 1.5),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("max_tokens", 0),
        ("max_tokens", 2.0),
        ("max_tokens", True),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop", [3]),
        ("stop", 3),
        ("stop_token_ids", 3),
        ("stop_token_ids", [None]),
        ("stop_token_ids", "12"),
        ("ignore_eos", "yes"),
        ("temperature", 10**400),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", ["</s>"]),
        ("seed", -1),
        ("repetition_penalty", 0.0),
        ("presence_penalty", 2.5),
        ("frequency_penalty", -2.5),
        ("logprobs", -1),
        ("logprobs", 101),
        ("repetition_limit", 1),
        ("n", 0),
    ],
)
def test_a_value_outside_its_range_is_named(name: str, value: Any) -> None:
    with pytest.raises(PromptError, match=name):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(("name", "value"), [("n", 2), ("json_schema", {"type": "object"}), ("regex", "a+")])
def test_what_is_not_served_is_refused(name: str, value: Any) -> None:
    with pytest.raises(UnsupportedModelError, match="not served by this version"):
        SamplingParams(**{name: value})


def test_values_are_frozen_and_replaceable() -> None:
    params = SamplingParams(temperature=0.5, stop="x")
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.temperature = 1.0  # type: ignore[misc]
    assert dataclasses.replace(params, top_k=3) == SamplingParams(temperature=0.5, stop="x", top_k=3)


def test_without_any_setting_a_model_is_greedy() -> None:
    assert resolve(None, {}) == ResolvedParams(max_tokens=CHAT_MAX_TOKENS)
    assert resolve(None, {"temperature": 0.7, "top_p": 0.9}).greedy  # do_sample is what counts


def test_the_models_own_settings_fill_the_gaps() -> None:
    config = {
        "do_sample": True,
        "temperature": 0.7,
        "top_p": 0.8,
        "top_k": 20,
        "repetition_penalty": 1.05,
        "max_new_tokens": 33,
        "eos_token_id": [7, 8],
    }
    got = resolve(SamplingParams(top_k=5), config)
    assert (got.temperature, got.top_p, got.top_k, got.repetition_penalty, got.max_tokens) == (0.7, 0.8, 5, 1.05, 33)
    assert got.stop_token_ids == {7, 8}


@pytest.mark.parametrize("temperature", [0, 0.0, 1e-6])
def test_a_temperature_of_nothing_is_greedy(temperature: float) -> None:
    assert resolve(SamplingParams(temperature=temperature), {"do_sample": True}).greedy


def test_asking_for_a_filter_is_asking_to_sample() -> None:
    assert resolve(SamplingParams(top_p=0.9), {}).temperature == 1.0
    assert resolve(SamplingParams(top_p=0.9, temperature=0), {}).greedy


@pytest.mark.parametrize("off", [{"top_k": 0}, {"top_k": -1}, {"top_p": 1}, {"top_p": 1.0}, {"min_p": 0.0}])
def test_a_filter_that_is_off_does_not_ask_to_sample(off: dict[str, Any]) -> None:
    assert resolve(SamplingParams(**off), {}).greedy
    assert resolve(SamplingParams(**off), {"do_sample": True, "temperature": 0.7}).temperature == 0.7


def test_top_k_off_in_either_spelling() -> None:
    assert resolve(SamplingParams(top_k=-1), {"top_k": 50}).top_k == 0
    assert resolve(SamplingParams(top_k=0), {"top_k": 50}).top_k == 0


def test_stop_ids_join_and_eos_can_be_ignored() -> None:
    config = {"eos_token_id": 2}
    assert resolve(SamplingParams(stop_token_ids=[5]), config).stop_token_ids == {2, 5}
    assert resolve(SamplingParams(stop_token_ids=[5], ignore_eos=True), config).stop_token_ids == {5}


def test_stop_takes_one_string_or_several() -> None:
    assert resolve(SamplingParams(stop="ab"), {}).stop == ("ab",)
    assert resolve(SamplingParams(stop=["a", "b"]), {}).stop == ("a", "b")


def test_params_of_another_type_are_refused() -> None:
    with pytest.raises(PromptError, match="SamplingParams, got dict"):
        resolve({"temperature": 1.0}, {})  # type: ignore[arg-type]


PUBLISHED = {
    "do_sample": True,
    "temperature": 0.000001,
    "top_k": 1,
    "top_p": 0.001,
    "repetition_penalty": 1.05,
    "eos_token_id": [151645, 151643],
    "bad_words_ids": [[7], [8, 9]],
    "suppress_tokens": None,
}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", "hot"),
        ("temperature", -1),
        ("top_p", 5),
        ("top_k", "x"),
        ("top_k", -3),
        ("min_p", 2),
        ("repetition_penalty", 0),
        ("repetition_penalty", "x"),
        ("max_new_tokens", 0),
        ("max_new_tokens", "many"),
        ("do_sample", "yes"),
        ("eos_token_id", "x"),
        ("eos_token_id", [1, "x"]),
        ("eos_token_id", -4),
        ("suppress_tokens", [1.5]),
        ("bad_words_ids", [3]),
        ("bad_words_ids", [[]]),
    ],
)
def test_a_generation_config_is_checked_by_entry(name: str, value: Any) -> None:
    check_generation_config(PUBLISHED, "generation_config.json")
    with pytest.raises(CheckpointError, match=f"^generation_config.json: {name} is .*, but must be "):
        check_generation_config(PUBLISHED | {name: value}, "generation_config.json")
