"""A checkpoint's chat template, rendered by jinja in a sandbox. Knows strings, no tokens and no pictures."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from vlm.errors import CheckpointError, PromptError
from vlm.prompt.tokenizer import read_json, special_token_names


class _GenerationBlock(Extension):
    """`{% generation %}` marks what a model learns from; when prompts are made its content stands as it is."""

    tags = {"generation"}  # noqa: RUF012 (as the base class declares it)

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@dataclass(frozen=True, eq=False)
class ChatTemplate:
    """`render` fills in a conversation; `source` is the file it came from, for messages.

    Templates differ in whether the content of a message is a string or a list of parts. `strings` names the roles
    whose messages must be strings: found once, by rendering a probe of each role.
    """

    template: jinja2.Template
    special_tokens: Mapping[str, str]
    source: str
    strings: frozenset[str]

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The prompt, ready for the answer. Raises PromptError where the template refuses the conversation."""
        try:
            return self.template.render(messages=messages, add_generation_prompt=True, **self.special_tokens)
        except Exception as e:  # a template is a program, which may fail in any way
            raise PromptError(f"the chat template ({self.source}) refuses this conversation: {e}") from e


def load_template(folder: Path) -> ChatTemplate:
    """chat_template.jinja, else chat_template.json, else the chat_template of tokenizer_config.json.

    Raises:
        CheckpointError: none of them is there, or it is no template.
    """
    text, source = _find(folder)
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        template = environment.from_string(text)
    except jinja2.TemplateSyntaxError as e:
        raise CheckpointError(f"{source}: no valid template: line {e.lineno}: {e.message}") from e
    made = ChatTemplate(template, special_token_names(folder), source, frozenset())
    return replace(made, strings=frozenset(_roles_of_strings(made)))


_PROBE = "probe"


def _roles_of_strings(template: ChatTemplate) -> list[str]:
    """Roles whose text the template shows only when the content is a string."""

    def shown(role: str, content: Any) -> bool:
        ask = {"role": "user", "content": [{"type": "text", "text": "?"}] if isinstance(content, list) else "?"}
        conversation = {"user": [], "system": [], "assistant": [ask]}[role] + [{"role": role, "content": content}]
        try:
            text = template.render([*conversation, ask] if role == "system" else conversation)
        except PromptError:
            return False
        return (
            text.count(_PROBE) == 1 and "'text'" not in text
        )  # a list that is printed as Python prints it is lost too

    parts = [{"type": "text", "text": _PROBE}]
    return [role for role in ("system", "user", "assistant") if not shown(role, parts) and shown(role, _PROBE)]


def _find(folder: Path) -> tuple[str, str]:
    file = folder / "chat_template.jinja"
    if file.exists():
        try:
            return file.read_text(encoding="utf-8"), str(file)
        except (OSError, UnicodeDecodeError) as e:
            raise CheckpointError(f"{file}: cannot be read: {e}") from e
    for name in ("chat_template.json", "tokenizer_config.json"):
        found = read_json(folder / name).get("chat_template")
        if isinstance(found, list):  # several by name: [{"name": "default", "template": ...}, ...]
            found = {entry.get("name"): entry.get("template") for entry in found if isinstance(entry, dict)}.get(
                "default"
            )
        if isinstance(found, str):
            return found, str(folder / name)
    raise CheckpointError(
        f"{folder}: no chat template: neither chat_template.jinja, nor chat_template.json, nor a chat_template in "
        "tokenizer_config.json; a base model without one cannot be asked in messages"
    )


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None) -> str:
    """Jinja's own filter escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)
