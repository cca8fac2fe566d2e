"""What several commands share: options, loading a model, tables."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vlm.attention.backends import BACKENDS
from vlm.attention.errors import AttentionBackendError
from vlm.attention.preference import STACKS

if TYPE_CHECKING:
    from vlm.api import VLM

ModelOption = Annotated[
    str | None,
    typer.Option(
        "--model", help="Hub id or local folder; else VLM_MODEL, else the embedded model.", show_default=False
    ),
]
MaxTokensOption = Annotated[
    int | None, typer.Option("--max-tokens", help="Most tokens of an answer.", show_default=False)
]
TemperatureOption = Annotated[
    float | None, typer.Option("--temperature", help="0 is greedy; else sampling.", show_default="the model's")
]
SeedOption = Annotated[int, typer.Option("--seed", help="Seed of sampled answers.")]
AttentionOption = Annotated[
    str, typer.Option("--attention", help="A backend, or vision=NAME,text=NAME. Used or refused, never replaced.")
]
DtypeOption = Annotated[str, typer.Option("--dtype", help="auto, float32, float16 or bfloat16.")]
DeviceOption = Annotated[str, typer.Option("--device", help="auto, cpu, cuda, cuda:1, xpu or mps.")]
QuietOption = Annotated[bool, typer.Option("--quiet", help="Nothing on stderr but errors.")]
JsonOption = Annotated[bool, typer.Option("--json", help="JSON on stdout.")]


def parse_attention(values: Sequence[str], option: str) -> str | dict[str, str]:
    """`sdpa`, or `vision=sdpa` and `text=triton` as the mapping that `VLM` takes; with both, a stack's own wins."""
    both: list[str] = []
    stacks: dict[str, str] = {}
    for value in values:
        stack, found, backend = (part.strip() for part in value.rpartition("="))
        if not backend or (found and not stack):
            raise AttentionBackendError(f"{option} {value!r}: expected BACKEND, vision=BACKEND or text=BACKEND")
        if backend not in ("auto", *BACKENDS):
            raise AttentionBackendError(
                f"{option} names {backend!r}, which is no attention backend: use auto or one of {', '.join(BACKENDS)}"
            )
        if found and stack not in STACKS:
            raise AttentionBackendError(f"{option} has no role {stack!r}: use {' or '.join(STACKS)}")
        if stack in stacks or (both and not found):
            raise AttentionBackendError(f"{option} names two backends for {stack or 'both stacks'}: leave one out")
        if found:
            stacks[stack] = backend
        else:
            both.append(backend)
    if both and not stacks:
        return both[0]
    return {**(dict.fromkeys(STACKS, both[0]) if both else {}), **stacks}


def load_vlm(model: str | None, quiet: bool, **settings: Any) -> VLM:
    """A model for a command, its start-up lines on stderr."""
    from vlm.api import VLM
    from vlm.logs import configure_command_line

    configure_command_line(os.environ, quiet, sys.stderr)
    return VLM(model, **settings)


def table(rows: list[Mapping[str, str]]) -> str:
    """Rows under their keys, in columns."""
    names = list(rows[0])
    widths = [max(len(name), *(len(row[name]) for row in rows)) for name in names]
    lines = [names, *([row[name] for name in names] for row in rows)]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in lines)
