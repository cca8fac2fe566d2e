"""What the commands print: text that a terminal may be shown, JSON that is valid in any encoding, streams that may be
closed, full or read by someone who leaves.
"""

from __future__ import annotations

import json
import os
import re
import sys
from typing import IO, Any

import typer

from vlm.errors import VLMError

PIPE_CLOSED = 141
# C0, DEL and C1: what moves a cursor, sets a title or ends a line.
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_KEPT: list[IO[str]] = []


def open_closed_streams() -> None:
    """Give closed standard streams (`<&-`, `>&-`) the null device, so that no other file gets their descriptors.

    stdout stays None to Python: a command that has to write there says so.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            null = open(os.devnull, mode)  # noqa: SIM115 - stays open as long as the process runs
            if name == "stdout":
                _KEPT.append(null)
            else:
                setattr(sys, name, null)


def check_stdout() -> None:
    """Before the work: raise VLMError where there is no stdout to write to."""
    if sys.stdout is None:
        raise VLMError("stdout is closed, and what this command says goes there")


def visible(text: str, keep: str = "") -> str:
    """Control characters as escapes (`\\x1b`, `\\t`), but for those in `keep`."""
    return _CONTROL.sub(lambda c: c[0] if c[0] in keep else c[0].encode("unicode_escape").decode(), text)


def escaped(name: str) -> str:
    """A name as one field of a line: `visible`, and reversible, as a backslash is doubled."""
    return visible(name.replace("\\", "\\\\"))


def json_text(values: Any, encoding: str | None) -> str:
    """JSON on one line; ASCII alone where `encoding` lacks a character, as it does for file names that are no text."""
    text = json.dumps(values, ensure_ascii=False)
    try:
        text.encode(encoding or "utf-8")
    except UnicodeEncodeError:
        return json.dumps(values)
    return text


def write(text: str, end: str = "\n") -> None:
    """To stdout at once; what its encoding lacks as escapes. When the reader has gone (`| head`), end quietly."""
    check_stdout()
    encoding = sys.stdout.encoding or "utf-8"
    try:
        sys.stdout.write((text + end).encode(encoding, "backslashreplace").decode(encoding))
        sys.stdout.flush()
    except OSError as error:
        # Python flushes stdout once more at exit; let it have somewhere to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            raise typer.Exit(PIPE_CLOSED) from None
        raise OSError(error.errno, error.strerror, "stdout") from error


def write_json(values: Any) -> None:
    write(json_text(values, sys.stdout.encoding if sys.stdout else None))


def say(text: str) -> None:
    """A line, or a few, to stderr."""
    typer.echo(visible(text, keep="\n"), err=True)


def error_line(error: BaseException, name: str = "") -> str:
    """One line for an error, with the input's name unless the message has it. Foreign errors say their type."""
    text = " ".join(str(error).split()) or type(error).__name__
    if not isinstance(error, (VLMError, OSError)):
        text = f"{type(error).__name__}: {text}"
    return f"error: {text}" if not name or name in text else f"error: {name}: {text}"
