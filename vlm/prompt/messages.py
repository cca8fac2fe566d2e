"""The conversations that callers pass -> a checked, typed form. Knows their shape; reads no picture and no template.

Hugging Face's and OpenAI's list of {"role", "content"}, the content a string or a list of parts. Anything that is not
understood is an error that says where it stands: a misspelt key that is passed over would change the answer unseen.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vlm.errors import PromptError

ROLES = ("system", "user", "assistant")
_SOURCES = ("image", "url", "path")
_EXAMPLE = '[{"role": "user", "content": [{"type": "image", "path": "a.png"}, {"type": "text", "text": "..."}]}]'


@dataclass(frozen=True)
class TextPart:
    text: str


@dataclass(frozen=True, eq=False)
class ImagePart:
    """`source` is whatever `load_image` takes."""

    source: Any


@dataclass(frozen=True)
class Message:
    role: str
    parts: tuple[TextPart | ImagePart, ...]


def parse_messages(messages: Any) -> tuple[Message, ...]:
    """Check a conversation and bring it into one form; a string as content is one text part.

    Raises:
        PromptError: it is no such list; the message says which part is wrong and what would be right.
    """
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise PromptError(f"messages must be a list such as {_EXAMPLE}, not {_kind(messages)}")
    if not messages:
        raise PromptError(f"messages is empty; pass a list such as {_EXAMPLE}")
    return tuple(_message(message, f"messages[{i}]") for i, message in enumerate(messages))


def _message(message: Any, where: str) -> Message:
    if not isinstance(message, Mapping):
        raise PromptError(f'{where} must be {{"role": ..., "content": ...}}, not {_kind(message)}')
    _only(message, ("role", "content"), where)
    role = message.get("role")
    if role not in ROLES:
        raise PromptError(f"{where}: role {role!r} is none of {', '.join(ROLES)}")
    content = message.get("content")
    if isinstance(content, str):
        return Message(role, (TextPart(_text(content, f"{where}: content")),))
    if isinstance(content, (bytes, Mapping)) or not isinstance(content, Sequence):
        raise PromptError(f"{where}: content must be a string or a list of parts, not {_kind(content)}")
    if not content:
        raise PromptError(f"{where}: content is an empty list; give it a text or an image part")
    return Message(role, tuple(_part(part, f"{where}: part {i}") for i, part in enumerate(content)))


def _part(part: Any, where: str) -> TextPart | ImagePart:
    if not isinstance(part, Mapping):
        raise PromptError(f'{where} must be a part such as {{"type": "text", "text": ...}}, not {_kind(part)}')
    kind = part.get("type")
    if kind == "text":
        _only(part, ("type", "text"), where)
        return TextPart(_text(part.get("text"), f"{where}: text"))
    if kind == "image":
        _only(part, ("type", *_SOURCES), where)
        return _image(part, where)
    if kind == "image_url":
        _only(part, ("type", "image_url"), where)
        return ImagePart(_image_url(part.get("image_url"), where))
    raise PromptError(f'{where}: type {kind!r} is none of "text", "image", "image_url"')


def _image(part: Mapping[str, Any], where: str) -> ImagePart:
    given = [name for name in _SOURCES if part.get(name) is not None]
    if len(given) != 1:
        found = " and ".join(given) or "none of them"
        raise PromptError(f'{where}: an image part has exactly one of "image", "url" and "path"; found {found}')
    value = part[given[0]]
    if given[0] == "url":
        return ImagePart(_url(value, f"{where}: url"))
    if given[0] == "path":
        if not isinstance(value, (str, os.PathLike)):
            raise PromptError(f"{where}: path must be a path, not {_kind(value)}")
        return ImagePart(Path(value))  # as a path, so that one that reads like a URL is not fetched
    return ImagePart(value)


def _image_url(value: Any, where: str) -> str:
    if isinstance(value, Mapping):
        _only(value, ("url", "detail"), f"{where}: image_url")
        if value.get("detail") not in (None, "auto"):
            raise PromptError(f"{where}: detail {value['detail']!r} is not served; set VLM(max_pixels=...) instead")
        value = value.get("url")
    return _url(value, f"{where}: image_url")


def _url(value: Any, where: str) -> str:
    """An http(s) or data: URL. A file's path here would let a message that came over the network read local files."""
    if not isinstance(value, str):
        raise PromptError(f"{where} must be a string, not {_kind(value)}")
    if not re.match(r"\s*(https?://|data:)", value, re.IGNORECASE):
        raise PromptError(
            f'{where} {value[:80]!r} is no http(s) or data: URL; a file is {{"type": "image", "path": ...}}'
        )
    return value


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise PromptError(f"{where} must be a string, not {_kind(value)}")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as e:
        raise PromptError(
            f"{where} holds half a character (U+{ord(value[e.start]):04X}) at position {e.start}"
        ) from None
    return value


def _only(mapping: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    unknown = [str(key) for key in mapping if key not in known]
    if unknown:
        raise PromptError(f"{where}: unknown key {', '.join(map(repr, unknown))}; known are {', '.join(known)}")


def _kind(value: Any) -> str:
    return f"{type(value).__name__} {value[:40]!r}" if isinstance(value, str) else f"a {type(value).__name__}"
