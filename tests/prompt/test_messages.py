"""What counts as a conversation, and what each wrong one is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import PIL.Image
import pytest

from vlm.errors import PromptError
from vlm.prompt.messages import ImagePart, Message, TextPart, parse_messages


def user(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


def test_parts_keep_their_order_and_kind() -> None:
    picture = PIL.Image.new("RGB", (2, 2))
    parsed = parse_messages(
        user(
            {"type": "text", "text": "a"},
            {"type": "image", "image": picture},
            {"type": "image", "path": "http://is.a/file"},
            {"type": "image", "url": "HTTPS://x/y.png"},
            {"type": "image_url", "image_url": {"url": "data:,x", "detail": "auto"}},
            {"type": "image_url", "image_url": "http://x/y"},
            {"type": "text", "text": ""},
        )
    )
    sources = [part.source if isinstance(part, ImagePart) else part.text for part in parsed[0].parts]
    assert sources == ["a", picture, Path("http://is.a/file"), "HTTPS://x/y.png", "data:,x", "http://x/y", ""]
    assert isinstance(sources[2], Path)  # a path is never fetched


def test_a_string_is_one_text_part() -> None:
    both = [{"role": "system", "content": "s"}, {"role": "system", "content": [{"type": "text", "text": "s"}]}]
    assert parse_messages(both) == (Message("system", (TextPart("s"),)),) * 2
    assert parse_messages(tuple(both)) == parse_messages(both)


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ("Describe this", "must be a list such as"),
        ({"role": "user", "content": "x"}, "must be a list such as"),
        (None, "not a NoneType"),
        (iter([]), "must be a list"),
        ([], "is empty"),
        (["x"], r"messages\[0\] must be"),
        (
            [{"role": "user", "content": "x"}, {"role": "usr", "content": "x"}],
            r"messages\[1\]: role 'usr' is none of system",
        ),
        ([{"content": "x"}], "role None"),
        ([{"role": "user"}], "content must be a string or a list"),
        ([{"role": "user", "content": {"type": "text", "text": "x"}}], "not a dict"),
        ([{"role": "user", "content": "x", "image": "a.png"}], "unknown key 'image'"),
        ([{"role": "user", "content": []}], r"messages\[0\]: content is an empty list"),
        (user("x"), "part 0 must be a part"),
        (user({"type": "text", "text": "x"}, {"type": "video", "video": "a.mp4"}), "part 1: type 'video'"),
        (user({"text": "x"}), "type None"),
        (user({"type": "text", "content": "x"}), "unknown key 'content'"),
        (user({"type": "text", "text": 3}), "text must be a string, not a int"),
        (user({"type": "text", "text": "ab\ud800"}), r"U\+D800\) at position 2"),
        (user({"type": "image"}), "found none of them"),
        (user({"type": "image", "image": "a", "path": "b"}), "found image and path"),
        (user({"type": "image", "image": "a", "max_pixel": 3}), "unknown key 'max_pixel'"),
        (user({"type": "image", "url": "a.png"}), "is no http"),
        (user({"type": "image", "url": "file:///etc/passwd"}), "is no http"),
        (user({"type": "image", "path": b"a"}), "path must be a path"),
        (user({"type": "image_url", "image_url": {"url": "/etc/passwd"}}), "is no http"),
        (user({"type": "image_url", "image_url": {"url": "http://x", "detail": "low"}}), "max_pixels"),
        (user({"type": "image_url", "image_url": {"uri": "http://x"}}), "unknown key 'uri'"),
        (user({"type": "image_url", "image_url": None}), "must be a string, not a NoneType"),
    ],
)
def test_what_is_not_understood_is_an_error(messages: Any, says: str) -> None:
    with pytest.raises(PromptError, match=says):
        parse_messages(messages)
