"""`vlm chat`: one question, streamed, or a conversation when no question is given."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vlm.cli.common import (
    AttentionOption,
    DeviceOption,
    DtypeOption,
    MaxTokensOption,
    ModelOption,
    QuietOption,
    SeedOption,
    TemperatureOption,
    error_line,
    load_vlm,
    parse_attention,
    write,
)
from vlm.cli.inputs import is_url
from vlm.errors import PromptError, VLMError

if TYPE_CHECKING:
    from vlm.api import VLM
    from vlm.params import SamplingParams

HELP = "/image PATH adds a picture to the next question, /clear starts over, /quit ends."


def chat(
    question: Annotated[str | None, typer.Argument(help="What to ask; without it the command is interactive.")] = None,
    image: Annotated[list[str] | None, typer.Option("--image", help="A file or URL; may repeat.")] = None,
    system: Annotated[str | None, typer.Option(help="A system message.")] = None,
    model: ModelOption = None,
    max_tokens: MaxTokensOption = None,
    temperature: TemperatureOption = None,
    seed: SeedOption = 0,
    attention: AttentionOption = "auto",
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    quiet: QuietOption = False,
) -> int:
    """Ask about images; the answer streams to stdout.

    Interactive without a question: a line is a question, /image PATH adds a picture to the next one, /clear starts
    over, /quit ends.
    """
    from vlm.params import SamplingParams

    params = SamplingParams(max_tokens=max_tokens, temperature=temperature)
    images = [_image(text) for text in image or []]
    for missing in (i for i in images if isinstance(i, Path) and not i.exists()):
        raise PromptError(f"--image {missing} does not exist")
    settings = {"attention": parse_attention(attention), "dtype": dtype, "device": device, "seed": seed}
    with load_vlm(model, quiet, **settings) as vlm:
        conversation = Conversation(vlm, params, system, images)
        if question is not None:
            conversation.ask(question)
        else:
            interact(conversation, quiet)
    return 0


def _image(text: str) -> Path | str:
    return text if is_url(text) else Path(text).expanduser()


class Conversation:
    """The messages so far, and the pictures that go with the next question."""

    def __init__(self, vlm: VLM, params: SamplingParams, system: str | None, images: list[Path | str]) -> None:
        self._vlm = vlm
        self._params = params
        self._start: list[dict[str, Any]] = [] if system is None else [{"role": "system", "content": system}]
        self._messages = list(self._start)
        self.pending = list(images)

    def clear(self) -> None:
        self._messages = list(self._start)
        self.pending = []

    def ask(self, question: str) -> None:
        """Stream the answer to stdout. A question that fails, or is interrupted, leaves the conversation as it was."""
        parts: list[dict[str, Any]] = [{"type": "image", "image": source} for source in self.pending]
        parts.append({"type": "text", "text": question})
        messages = [*self._messages, {"role": "user", "content": parts}]
        texts: list[str] = []
        for chunk in self._vlm.stream(messages, self._params):
            texts.append(chunk.text)
            write(chunk.text, end="")
        write("")
        answer = {"role": "assistant", "content": [{"type": "text", "text": "".join(texts)}]}
        self._messages = [*messages, answer]
        self.pending = []


def interact(conversation: Conversation, quiet: bool) -> None:
    """Questions from stdin, line by line, until its end or /quit. An error is one line, and the talk goes on."""
    terminal = sys.stdin.isatty()
    if not quiet:
        typer.echo(HELP, err=True)
    while True:
        try:
            line = input("> ").strip() if terminal else _next_line()
        except EOFError:
            return
        if line in ("/quit", "/exit"):
            return
        if line:
            _guarded(lambda line=line: _command(conversation, line))  # type: ignore[misc]


def _next_line() -> str:
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.strip()


def _guarded(action: Callable[[], None]) -> None:
    try:
        action()
    except (VLMError, OSError) as error:
        typer.echo(error_line(error), err=True)


def _command(conversation: Conversation, line: str) -> None:
    if not line.startswith("/"):
        conversation.ask(line)
    elif line == "/clear":
        conversation.clear()
    elif line.startswith("/image "):
        source = _image(line.removeprefix("/image ").strip())
        if isinstance(source, Path) and not source.is_file():
            raise PromptError(f"{source} is no file")
        conversation.pending.append(source)
    else:
        raise PromptError(f"unknown command {line.split()[0]}. {HELP}")
