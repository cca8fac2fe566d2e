"""Text to token ids and back, through the tokenizers library. Knows no roles, templates or pictures."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from vlm.errors import CheckpointError

# A character takes at most four bytes in UTF-8 and a token is at least one byte, so an unfinished character at the
# end reaches back over three tokens at most, and reads as one to three replacement characters.
_UNFINISHED = 3
_REPLACEMENT = "\ufffd"
_WINDOW = 24
_CONTEXT = 6


@dataclass(frozen=True, eq=False)
class Tokenizer:
    """A tokenizer as its folder describes it.

    Attributes:
        special_tokens: text -> id of the tokens that structure a prompt and do not show in answers.
    """

    backend: tokenizers.Tokenizer
    special_tokens: Mapping[str, int]

    @cached_property
    def special_ids(self) -> frozenset[int]:
        return frozenset(self.special_tokens.values())

    @cached_property
    def _plain(self) -> tokenizers.Tokenizer:
        """A twin that sees the spelling of a special token as text like any other."""
        twin = tokenizers.Tokenizer.from_str(self.backend.to_str())
        twin.encode_special_tokens = True
        return twin

    def encode(self, text: str) -> list[int]:
        """Special tokens that are spelled in `text` become their ids; none is added around it."""
        return list(self.backend.encode(text, add_special_tokens=False).ids)

    def encode_plain(self, text: str) -> list[int]:
        """As `encode`, but what spells a special token stays text."""
        return list(self._plain.encode(text, add_special_tokens=False).ids)

    def token_id(self, text: str) -> int | None:
        """The id of the token that is spelled exactly so, or None."""
        found: int | None = self.backend.token_to_id(text)
        return found

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`, without special tokens."""
        shown = [i for i in ids if i not in self.special_ids]
        return str(self.backend.decode(shown, skip_special_tokens=False))

    def stream_decoder(self) -> StreamDecoder:
        return StreamDecoder(self)


class StreamDecoder:
    """Token ids to text as they come. What `push` and the last `flush` return, joined, is `decode` of all ids.

    A few tokens back are decoded again with each new one, because tokens read differently at the start of a text;
    never the whole answer.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._shown = 0  # characters of the text of `_ids` that were returned

    def push(self, ids: Iterable[int]) -> str:
        """The text that became certain."""
        self._ids += [i for i in ids if i not in self._tokenizer.special_ids]
        text = self._tokenizer.decode(self._ids)
        new = text[self._shown : _certain(text)]
        self._shown += len(new)
        if len(self._ids) > _WINDOW:
            left = len(text) - self._shown
            self._ids = self._ids[-_CONTEXT:]
            self._shown = len(self._tokenizer.decode(self._ids)) - left
        return new

    def flush(self) -> str:
        """The rest, an unfinished character as a replacement character."""
        new = self._tokenizer.decode(self._ids)[self._shown :]
        self._shown += len(new)
        return new


def _certain(text: str) -> int:
    """How much of `text` later tokens cannot change."""
    end = len(text)
    while end > max(0, len(text) - _UNFINISHED) and text[end - 1] == _REPLACEMENT:
        end -= 1
    return end


def load_tokenizer(folder: Path) -> Tokenizer:
    """From tokenizer.json; for a folder without one, converted by transformers (which takes seconds to import).

    Raises:
        CheckpointError: the files are not there or cannot be read.
    """
    file = folder / "tokenizer.json"
    if file.exists():
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as e:  # the library raises bare Exception
            raise CheckpointError(f"{file}: no tokenizer that the tokenizers library reads: {e}") from e
    else:
        backend = _converted(folder)
    backend.no_padding()
    backend.no_truncation()
    # Tokens that the configs name as special are, whatever tokenizer.json says: a user could spell the others.
    named = [*_listed_specials(folder), *_picture_tokens(folder, backend)]
    special = _special_tokens(backend)
    backend.add_special_tokens([t for t in named if t not in special and backend.token_to_id(t) is not None])
    return Tokenizer(backend, _special_tokens(backend))


def _special_tokens(backend: tokenizers.Tokenizer) -> dict[str, int]:
    return {token.content: i for i, token in backend.get_added_tokens_decoder().items() if token.special}


def _converted(folder: Path) -> tokenizers.Tokenizer:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False).backend_tokenizer
    except (OSError, ValueError, KeyError, ImportError, AttributeError) as e:
        raise CheckpointError(
            f"{folder}: no tokenizer.json, and transformers makes no fast tokenizer of what is there: {e}"
        ) from e


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file; {} where there is no such file."""
    if not file.exists():
        return {}
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise CheckpointError(f"{file}: cannot be read: {e}") from e
    if not isinstance(value, dict):
        raise CheckpointError(f"{file}: holds a {type(value).__name__}, not an object")
    return value


def _text_of(token: Any) -> str | None:
    """A token as configs write it: a string, or an object with its `content`."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None


def special_token_names(folder: Path) -> dict[str, str]:
    """`bos_token`, `eos_token` and so on -> their text: what chat templates may refer to."""
    config = {**read_json(folder / "special_tokens_map.json"), **read_json(folder / "tokenizer_config.json")}
    named = {name: _text_of(token) for name, token in config.items() if name.endswith("_token")}
    return {name: text for name, text in named.items() if text is not None}


def _listed_specials(folder: Path) -> list[str]:
    config = read_json(folder / "tokenizer_config.json")
    listed: list[Any] = []
    for name in ("additional_special_tokens", "extra_special_tokens"):
        value = config.get(name) or []
        listed += list(value.values()) if isinstance(value, dict) else list(value) if isinstance(value, list) else []
    texts = [*special_token_names(folder).values(), *map(_text_of, listed)]
    return [text for text in dict.fromkeys(texts) if text]


def _picture_tokens(folder: Path, backend: tokenizers.Tokenizer) -> list[str]:
    """The texts of image_token_id, image_token_index, vision_start_token_id and so on of config.json."""
    config = read_json(folder / "config.json")
    kinds = ("image", "video", "vision")
    ids = [i for name, i in config.items() if name.startswith(kinds) and name.endswith(("_token_id", "_token_index"))]
    return [text for i in ids if isinstance(i, int) and (text := backend.id_to_token(i))]
