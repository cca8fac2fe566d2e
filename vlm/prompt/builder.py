"""A checked conversation and the plans of its pictures -> token ids. Knows no pixels.

User text cannot forge structure: where it spells a special token it is masked before the template is rendered, and
encoded as text afterwards. All other prompts are encoded in one piece, as the reference does, because tokens may
reach over the border between the template's text and the user's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vlm.errors import CheckpointError, PromptError
from vlm.families.base import Family, ImagePlan
from vlm.prompt.messages import ImagePart, Message, TextPart
from vlm.prompt.template import ChatTemplate
from vlm.prompt.tokenizer import Tokenizer

# Around the number of a masked spelling; a noncharacter, which no text in interchange holds and no template touches.
_MASK = "\ufdd0"


@dataclass(frozen=True)
class Prompt:
    """`image_tokens` of the ids receive image features."""

    token_ids: list[int]
    image_tokens: int


class PromptBuilder:
    """Lays out conversations for one model."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate, family: Family, config: Any) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._family = family
        self._config = config
        self._placeholder = family.placeholder(config)
        self._image_id = family.image_token_id(config)
        found = tokenizer.special_tokens.get(self._placeholder)
        if found != self._image_id:
            raise CheckpointError(
                f"the image placeholder {self._placeholder!r} has id {found} in the tokenizer and {self._image_id} in "
                "config.json; the two files do not belong together"
            )
        longest_first = sorted(tokenizer.special_tokens, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, longest_first)))

    def images(self, messages: Sequence[Message]) -> list[Any]:
        """The image sources, in the order of the prompt."""
        return [part.source for message in messages for part in message.parts if isinstance(part, ImagePart)]

    def build(self, messages: Sequence[Message], plans: Sequence[ImagePlan]) -> Prompt:
        """Render, expand and tokenise; `plans` are those of `images(messages)`, in order.

        Raises:
            PromptError: the template refuses the conversation, or does not show all of its pictures.
        """
        masked: list[str] = []
        text = self._template.render([self._message(message, masked) for message in messages])
        pieces = text.split(self._placeholder)
        if len(pieces) - 1 != len(plans):
            raise PromptError(
                f"the chat template ({self._template.source}) shows {len(pieces) - 1} of the {len(plans)} images of "
                "this conversation; put the images into a user message"
            )
        expanded = [self._family.expand(plan, self._config) for plan in plans]
        text = pieces[0] + "".join(image + piece for image, piece in zip(expanded, pieces[1:], strict=True))
        ids = self._encode_masked(text, masked) if masked else self._tokenizer.encode(text)
        wanted = sum(plan.num_tokens for plan in plans)
        if (found := ids.count(self._image_id)) != wanted:
            raise CheckpointError(
                f"the tokenizer makes {found} image tokens of a prompt that has {wanted}: a special token of this "
                "model's prompts is missing from tokenizer.json"
            )
        return Prompt(ids, wanted)

    def _message(self, message: Message, masked: list[str]) -> Mapping[str, Any]:
        """As templates take it: a list of parts, or one string for those that concatenate."""
        if message.role in self._template.strings:
            content = [
                self._mask(p.text, masked) if isinstance(p, TextPart) else self._placeholder for p in message.parts
            ]
            return {"role": message.role, "content": "".join(content)}
        parts = [
            {"type": "text", "text": self._mask(part.text, masked)} if isinstance(part, TextPart) else {"type": "image"}
            for part in message.parts
        ]
        return {"role": message.role, "content": parts}

    def _mask(self, text: str, masked: list[str]) -> str:
        """Replace what spells a special token by a numbered mark; `masked` collects the spellings."""

        def mark(match: re.Match[str]) -> str:
            masked.append(match[0])
            return f"{_MASK}{len(masked) - 1}{_MASK}"

        # The mark's own character counts as masked, so that a text that holds one cannot imitate a mark.
        return re.sub(f"{_MASK}|{self._special.pattern}", mark, text)

    def _encode_masked(self, text: str, masked: Sequence[str]) -> list[int]:
        """Special tokens of the template become ids; everything between two of them is encoded as plain text."""
        ids: list[int] = []
        at = 0
        for match in [*self._special.finditer(text), None]:
            end = len(text) if match is None else match.start()
            if plain := re.sub(f"{_MASK}(\\d+){_MASK}", lambda m: masked[int(m[1])], text[at:end]):
                ids += self._tokenizer.encode_plain(plain)
            if match is not None:
                ids.append(self._tokenizer.special_tokens[match[0]])
                at = match.end()
        return ids
