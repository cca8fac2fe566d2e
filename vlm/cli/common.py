"""What several commands share: options, loading a model, writing to stdout."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from vlm.api import VLM

PIPE_CLOSED = 141

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


def parse_attention(text: str) -> str | dict[str, str]:
    """`sdpa`, or `vision=sdpa,text=triton` as the mapping that `VLM` takes."""
    if "=" not in text:
        return text
    pairs = [part.partition("=") for part in text.split(",")]
    return {stack.strip(): backend.strip() for stack, _, backend in pairs}


def load_vlm(model: str | None, quiet: bool, **settings: Any) -> VLM:
    """A model for a command, its start-up lines on stderr."""
    from vlm.api import VLM
    from vlm.logs import configure_command_line

    configure_command_line(os.environ, quiet, sys.stderr)
    return VLM(model, **settings)


def write(text: str, end: str = "\n") -> None:
    """To stdout at once. When the reader has gone (`| head`), end quietly."""
    try:
        sys.stdout.write(text + end)
        sys.stdout.flush()
    except BrokenPipeError:
        # Python flushes stdout once more at exit; let it have somewhere to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(PIPE_CLOSED) from None


def error_line(error: BaseException, name: str = "") -> str:
    """One line for an error, with the input's name unless the message has it. Foreign errors say their type."""
    from vlm.errors import VLMError

    text = " ".join(str(error).split()) or type(error).__name__
    if not isinstance(error, (VLMError, OSError)):
        text = f"{type(error).__name__}: {text}"
    return f"error: {text}" if not name or name in text else f"error: {name}: {text}"


def table(rows: list[Mapping[str, str]]) -> str:
    """Rows under their keys, in columns."""
    names = list(rows[0])
    widths = [max(len(name), *(len(row[name]) for row in rows)) for name in names]
    lines = [names, *([row[name] for name in names] for row in rows)]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in lines)
