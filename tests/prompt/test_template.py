"""Chat templates: where they are found, how they differ, what they may do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from vlm.errors import CheckpointError, PromptError
from vlm.prompt.template import load_template

LOOP = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


def write(folder: Path, text: str) -> Path:
    (folder / "chat_template.jinja").write_text(text, encoding="utf-8")
    return folder


def text(value: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": value}]


def test_the_files_in_order(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "config{{ eos_token }}"}]
    config: dict[str, Any] = {"chat_template": named, "eos_token": {"content": "</s>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert load_template(tmp_path).render([]) == "config</s>"
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "json"}))
    assert load_template(tmp_path).render([]) == "json"
    write(tmp_path, "jinja")
    assert load_template(tmp_path).render([]) == "jinja"
    assert load_template(tmp_path).source.endswith("chat_template.jinja")


def test_no_template(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no chat template"):
        load_template(tmp_path)


def test_a_broken_template_names_the_line(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="line 2"):
        load_template(write(tmp_path, "a\n{% if %}"))


@pytest.mark.parametrize(
    ("template", "strings"),
    [
        (LOOP, {"system", "user", "assistant"}),  # prints a list as Python does
        ("{% for m in messages %}{{ m.role + m.content }}{% endfor %}", {"system", "user", "assistant"}),
        ("{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}", set()),
        (
            "{% for m in messages %}{% if m.role == 'user' %}{% for p in m.content %}{{ p.text }}{% endfor %}"
            "{% else %}{{ m.content | trim }}{% endif %}{% endfor %}",
            {"system", "assistant"},
        ),
        (
            "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
            "{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}{% endfor %}",
            set(),
        ),
        ("{% for m in messages %}{% if m.role == 'user' %}{{ m.content[0].text }}{% endif %}{% endfor %}", set()),
    ],
)
def test_which_roles_take_strings(tmp_path: Path, template: str, strings: set[str]) -> None:
    assert load_template(write(tmp_path, template)).strings == strings


def test_what_templates_use(tmp_path: Path) -> None:
    folder = write(
        tmp_path,
        "{% for m in messages %}\n    {% if loop.first %}{% continue %}{% endif %}\n"
        "{{ m.content[0].text }}\n{% endfor %}\n"
        "{% generation %}{{ strftime_now('%Y') | length }}{% endgeneration %} {{ {'a': '<é>'} | tojson }}"
        "{{ tools is defined }}",
    )
    rendered = load_template(folder).render([{"content": text("0")}, {"content": text("1")}])
    assert rendered == '1\n4 {"a": "<é>"}False'


def test_a_refusal_is_told(tmp_path: Path) -> None:
    template = load_template(write(tmp_path, "{{ raise_exception('roles must alternate') }}"))
    with pytest.raises(PromptError, match="roles must alternate"):
        template.render([])


@pytest.mark.parametrize("attack", ["{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", "{% include 'x' %}"])
def test_templates_run_in_a_sandbox(tmp_path: Path, attack: str) -> None:
    with pytest.raises(PromptError):
        load_template(write(tmp_path, attack)).render([])


@pytest.mark.parametrize("program", ["{% for i in range(10**9) %}x{% endfor %}", "{{ 1 // 0 }}", "{{ [][3] + 1 }}"])
def test_a_template_that_fails_in_any_way_refuses_the_conversation(program: str, tmp_path: Path) -> None:
    template = load_template(write(tmp_path, program))
    with pytest.raises(PromptError, match=r"chat_template\.jinja\) refuses this conversation"):
        template.render([])
