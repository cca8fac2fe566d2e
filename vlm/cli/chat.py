"""`vlm chat`: one question, streamed, or a conversation when no question is given."""

from __future__ import annotations

import os
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
    load_vlm,
    parse_attention,
)
from vlm.cli.inputs import at_home, is_url
from vlm.cli.streams import check_stdout, error_line, say, visible, write
from vlm.errors import PromptError, VLMError

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

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
    settings = {"attention": parse_attention(attention.split(","), "--attention"), "dtype": dtype, "device": device}
    check_stdout()
    images = [_picture(text) for text in image or []]
    with load_vlm(model, quiet, seed=seed, **settings) as vlm:
        conversation = Conversation(vlm, params, system, images)
        if question is not None:
            conversation.ask(question)
        else:
            interact(conversation, quiet)
    return 0


def _picture(text: str) -> Picture:
    """What a path or URL shows, read once for the whole conversation. Raises VLMError where it is no picture."""
    from vlm.images import load_image

    if not text.strip():
        raise PromptError("an empty path is no picture")
    source = text if is_url(text) else Path(at_home(text))
    if isinstance(source, Path) and not os.path.lexists(source):
        raise PromptError(f"{text} does not exist")
    return load_image(source).image


class Conversation:
    """The messages so far, and the pictures that go with the next question."""

    def __init__(self, vlm: VLM, params: SamplingParams, system: str | None, images: list[Picture]) -> None:
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
        parts: list[dict[str, Any]] = [{"type": "image", "image": picture} for picture in self.pending]
        parts.append({"type": "text", "text": question})
        messages = [*self._messages, {"role": "user", "content": parts}]
        texts: list[str] = []
        for chunk in self._vlm.stream(messages, self._params):
            texts.append(chunk.text)
            write(visible(chunk.text, keep="\n\t"), end="")
        write("")
        answer = {"role": "assistant", "content": [{"type": "text", "text": "".join(texts)}]}
        self._messages = [*messages, answer]
        self.pending = []


def interact(conversation: Conversation, quiet: bool) -> None:
    """Questions from stdin, line by line, until its end or /quit. An error is one line, and the talk goes on."""
    terminal = sys.stdin.isatty()
    if not quiet:
        say(HELP)
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
        say(error_line(error))


def _command(conversation: Conversation, line: str) -> None:
    command, _, rest = line.partition(" ")
    if not line.startswith("/"):
        conversation.ask(line)
    elif line == "/clear":
        conversation.clear()
    elif command == "/image" and not rest.strip():
        raise PromptError(f"/image is followed by a path or a URL. {HELP}")
    elif command == "/image":
        conversation.pending.append(_picture(_unquoted(rest.strip())))
    else:
        raise PromptError(f"unknown command {command}. {HELP}")


def _unquoted(path: str) -> str:
    """Without the quotes that a shell would have wanted, unless a file is called so."""
    quoted = len(path) > 1 and path[0] == path[-1] and path[0] in "'\""
    return path[1:-1] if quoted and not os.path.lexists(path) else path
