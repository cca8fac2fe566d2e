"""From a conversation to a request that the engine can run: pictures decoded, prompt expanded, positions computed.

Used from many threads at once: everything here is read-only once made.
"""

from __future__ import annotations

import hashlib
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from enum import Enum
from functools import cached_property
from typing import Any

import numpy as np

from vlm.engine.request import Request
from vlm.errors import ImageDecodeError, PromptError
from vlm.families.base import Family, ImageProcessor
from vlm.images import KINDS, load_image, read_size
from vlm.outputs import Usage
from vlm.params import CHAT_MAX_TOKENS, ResolvedParams, SamplingParams, resolve
from vlm.prompt.builder import PromptBuilder
from vlm.prompt.messages import parse_messages
from vlm.prompt.tokenizer import Tokenizer

DEFAULT_PROMPT = "Describe this image."

Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, eq=False)
class Prepared:
    """A request, and what its output says of its pictures.

    Attributes:
        image_sizes, source_sizes: (width, height) as the model sees them and as they came.
        source_frames: frames or pages that the source of each holds.
    """

    request: Request
    image_sizes: tuple[tuple[int, int], ...]
    source_sizes: tuple[tuple[int, int], ...]
    source_frames: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Memory that the preprocessed pictures hold."""
        return sum(image.pixels.nbytes for image in self.request.images)


@dataclass(frozen=True, eq=False)
class Preparer:
    """Everything of a model that a request is made with.

    Attributes:
        generation_config: the checkpoint's, its end-of-sequence ids filled in.
        check_length: raises ContextLengthError for a number of prompt tokens that can never run.
        keys: whether pictures get a key, by which the engine's caches know them again.
    """

    family: Family
    config: Any
    tokenizer: Tokenizer
    processor: ImageProcessor
    builder: PromptBuilder
    generation_config: Mapping[str, Any]
    check_length: Callable[[int], None]
    keys: bool = True

    @cached_property
    def _settings(self) -> bytes:
        return fingerprint(self.processor)

    def resolve(self, params: SamplingParams | None, default_max_tokens: int = CHAT_MAX_TOKENS) -> ResolvedParams:
        """Parameters without gaps; a stop string that spells a special token stops at the token's id."""
        resolved = resolve(params, self.generation_config, default_max_tokens=default_max_tokens)
        vocab_size = self.config.text.vocab_size
        if outside := [i for i in (params and params.stop_token_ids) or () if i >= vocab_size]:
            raise PromptError(f"stop_token_ids has {outside[0]}, but the model's ids end at {vocab_size - 1}")
        spelled = {text: self.tokenizer.token_id(text) for text in resolved.stop}
        special = {i for i in spelled.values() if i is not None and i in self.tokenizer.special_ids}
        if not special:
            return resolved
        stop = tuple(text for text in resolved.stop if spelled[text] not in special)
        return replace(resolved, stop=stop, stop_token_ids=resolved.stop_token_ids | special)

    def prepare(self, request_id: int, messages: Messages, params: ResolvedParams) -> Prepared:
        """Decode, plan, expand, check, preprocess: a prompt that is too long is refused before its pixels are made."""
        arrival = time.perf_counter()
        parsed = parse_messages(messages)
        pictures = [load_image(source) for source in self.builder.images(parsed)]
        plans = [self.processor.plan(*picture.image.size) for picture in pictures]
        prompt = self.builder.build(parsed, plans)
        self.check_length(len(prompt.token_ids))
        positions, next_position = self.family.positions(prompt.token_ids, plans, self.config)
        request = Request(
            id=request_id,
            token_ids=tuple(prompt.token_ids),
            positions=positions,
            next_position=next_position,
            params=params,
            images=tuple(self.processor(picture.image) for picture in pictures),
            num_image_tokens=prompt.image_tokens,
            image_keys=tuple(image_key(p.image, self._settings) for p in pictures) if self.keys else (),
            arrival=arrival,
        )
        return Prepared(
            request,
            image_sizes=tuple(plan.size for plan in plans),
            source_sizes=tuple(picture.original_size for picture in pictures),
            source_frames=tuple(picture.num_frames for picture in pictures),
        )

    def count(self, messages: Messages) -> Usage:
        """Tokens of a prompt; pictures are read no further than their header."""
        parsed = parse_messages(messages)
        plans = [self.processor.plan(*read_size(source)) for source in self.builder.images(parsed)]
        prompt = self.builder.build(parsed, plans)
        return Usage(prompt_tokens=len(prompt.token_ids), image_tokens=prompt.image_tokens)


def image_key(image: Any, settings: bytes) -> bytes:
    """A key for what the model sees of a decoded picture: equal only for equal pixels, size, mode and settings.

    The decoded picture is all that the processor reads beside its settings, and of what would do it is the cheapest to
    hash at no loss: the processor's output is four to eight times its bytes, and the bytes of a file tell apart what
    is the same picture. SHA-256, as processors have instructions for it.
    """
    width, height = image.size
    digest = hashlib.sha256(settings)
    digest.update(struct.pack("<QQ", width, height) + image.mode.encode())
    digest.update(image.tobytes())
    return digest.digest()


def fingerprint(value: Any) -> bytes:
    """A digest of settings: dataclasses of plain values and arrays, their classes' names included."""
    digest = hashlib.sha256(type(value).__qualname__.encode())
    if is_dataclass(value):
        for f in fields(value):
            digest.update(f.name.encode() + fingerprint(getattr(value, f.name)))
    elif isinstance(value, np.ndarray):
        digest.update(f"{value.dtype.str} {value.shape}".encode() + value.tobytes())
    else:
        # Only types whose repr is their value: an address in it would tell equal settings apart, or worse.
        assert isinstance(value, (int, float, str, Enum, type(None))), f"a setting of type {type(value).__name__}"
        digest.update(repr(value).encode())
    return digest.digest()


def caption_messages(image: Any, prompt: str | None) -> Messages:
    """The conversation that asks for a caption of one image."""
    if image is None:
        raise ImageDecodeError(f"None is no image: pass {KINDS}")
    text = DEFAULT_PROMPT if prompt is None else prompt
    if not isinstance(text, str):
        raise PromptError(f"prompt must be a string or None, not a {type(text).__name__}")
    return [{"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": text}]}]
