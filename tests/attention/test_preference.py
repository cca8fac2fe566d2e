"""Which setting wins: argument over environment, one stack over both."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from vlm.attention.errors import AttentionBackendError
from vlm.attention.preference import read_preferences, stack_of
from vlm.attention.spec import Preference

BOTH = {"VLM_ATTENTION": "triton"}
ALL = {**BOTH, "VLM_VISION_ATTENTION": "sdpa"}


@pytest.mark.parametrize(
    ("argument", "environ", "vision", "text"),
    [
        (None, {}, None, None),
        ("auto", {}, None, None),
        ("", {}, None, None),
        ("sdpa", {}, "sdpa", "sdpa"),
        ({"vision": "sdpa"}, {}, "sdpa", None),
        (None, BOTH, "triton", "triton"),
        (None, ALL, "sdpa", "triton"),
        ("flash_attn", ALL, "flash_attn", "flash_attn"),
        ({"text": "flash_attn"}, ALL, "sdpa", "flash_attn"),
        ({"text": "auto"}, BOTH, "triton", "triton"),
        (None, {**BOTH, "VLM_VISION_ATTENTION": "auto"}, None, "triton"),
        (None, {**BOTH, "VLM_VISION_ATTENTION": " "}, "triton", "triton"),
        (None, {"VLLM_ATTENTION_BACKEND": "triton", "XFORMERS_DISABLED": "1"}, None, None),
    ],
)
def test_which_setting_wins(
    argument: str | None, environ: Mapping[str, str], vision: str | None, text: str | None
) -> None:
    got = read_preferences(argument, environ)
    assert (got["vision"].backend, got["text"].backend) == (vision, text)


def test_the_origin_says_where_a_setting_came_from() -> None:
    got = read_preferences({"vision": "sdpa"}, {"VLM_TEXT_ATTENTION": "triton"})
    assert got["vision"] == Preference("sdpa", "argument attention= for vision")
    assert got["text"] == Preference("triton", "environment variable VLM_TEXT_ATTENTION")


@pytest.mark.parametrize(
    ("argument", "environ", "message"),
    [
        ("fa2", {}, "argument attention= names 'fa2', .* use auto or one of flash_attn, torch_varlen"),
        ({"vision": "xformers"}, {}, "argument attention= for vision names 'xformers'"),
        ({"audio": "sdpa"}, {}, "no role 'audio': use vision or text"),
        (None, {"VLM_TEXT_ATTENTION": "fa2"}, "environment variable VLM_TEXT_ATTENTION names 'fa2'"),
        (3, {}, "not int"),
        ({"vision": None}, {}, "not NoneType"),
    ],
)
def test_what_is_unknown_is_an_error_that_lists_what_is_known(
    argument: str | None, environ: Mapping[str, str], message: str
) -> None:
    with pytest.raises(AttentionBackendError, match=message):
        read_preferences(argument, environ)


def test_cross_attention_follows_the_text_stack() -> None:
    assert [stack_of(role) for role in ("encoder", "decoder", "cross")] == ["vision", "text", "text"]
