"""`vlm caption`: captions of files, folders, patterns, URLs and lists."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vlm.cli.common import (
    AttentionOption,
    DeviceOption,
    DtypeOption,
    JsonOption,
    MaxTokensOption,
    ModelOption,
    QuietOption,
    SeedOption,
    TemperatureOption,
    load_vlm,
    parse_attention,
)
from vlm.cli.inputs import Item, gather
from vlm.cli.sinks import Sink, make_sink
from vlm.cli.streams import error_line, escaped, say, write
from vlm.errors import PromptError

if TYPE_CHECKING:
    from vlm.api import VLM
    from vlm.outputs import Output
    from vlm.params import SamplingParams


def caption(
    paths: Annotated[list[str], typer.Argument(help="Files, folders, patterns, URLs, or .txt/.jsonl lists of them.")],
    model: ModelOption = None,
    prompt: Annotated[
        str | None, typer.Option(help="What to ask. Default: Describe this image.", show_default=False)
    ] = None,
    prompt_file: Annotated[str | None, typer.Option(metavar="FILE", help="Read the prompt from a file.")] = None,
    output: Annotated[
        str | None,
        typer.Option(metavar="PATH", help="A .jsonl file, or a folder for a .txt file a picture; default stdout."),
    ] = None,
    format: Annotated[str | None, typer.Option(help="txt or jsonl; default by the form of --output.")] = None,
    recursive: Annotated[bool, typer.Option(help="Whether to go into subfolders.")] = True,
    limit: Annotated[int | None, typer.Option(min=1, help="Take only the first pictures.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace output that exists.")] = False,
    prefix: Annotated[str, typer.Option(help="Put before every caption.")] = "",
    suffix: Annotated[str, typer.Option(help="Put after every caption.")] = "",
    max_tokens: MaxTokensOption = None,
    temperature: TemperatureOption = None,
    seed: SeedOption = 0,
    attention: AttentionOption = "auto",
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    on_error: Annotated[str, typer.Option(help="record: go on past a bad picture; raise: stop at it.")] = "record",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be done, load nothing.")] = False,
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> int:
    """Caption pictures.

    Captions go to stdout (PATH, tab, caption when there are several), or with --output to files. Progress and
    errors go to stderr. Exit status: 0 all captioned, 1 some failed, 2 none captioned.
    """
    from vlm.params import SamplingParams

    if on_error not in ("record", "raise"):
        raise PromptError(f"--on-error {on_error}: use record or raise")
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature)
    settings = {"attention": parse_attention(attention.split(","), "--attention"), "dtype": dtype, "device": device}
    question = _prompt(prompt, prompt_file)
    items = gather(paths, recursive, limit)
    if not items:
        raise PromptError(f"no pictures in {', '.join(paths)}")
    if all(isinstance(item.source, Path) and not os.path.lexists(item.source) for item in items):
        others = {1: "", 2: ", nor does the other one"}.get(len(items), f", nor do the other {len(items) - 1}")
        raise PromptError(f"{items[0].name} does not exist{others}")
    sink = make_sink(output, format, json, several=len(items) > 1)
    sink.check(items, overwrite)
    if dry_run:
        for item in items:
            write(f"{escaped(item.name)}\t{escaped(sink.target(item))}")
        return 0
    with load_vlm(model, quiet, seed=seed, **settings) as vlm:
        outputs = _outputs(vlm, items, question, params)
        # On a terminal that shows the captions themselves a bar would only get in their way.
        bar = sys.stderr.isatty() and not quiet and (output is not None or not sys.stdout.isatty())
        return _write_all(outputs, items, sink, (prefix, suffix), _Options(on_error == "raise", quiet, bar))


def _prompt(prompt: str | None, prompt_file: str | None) -> str | None:
    if prompt_file is None:
        if prompt is not None and not prompt.strip():
            raise PromptError("--prompt is empty; leave it out for the default one")
        return prompt
    if prompt is not None:
        raise PromptError("--prompt and --prompt-file exclude each other")
    try:
        text = Path(prompt_file).read_text(encoding="utf-8-sig").strip() if prompt_file else ""
    except (OSError, UnicodeDecodeError) as error:
        raise PromptError(f"--prompt-file {prompt_file!r} cannot be read: {error}") from error
    if not text:
        raise PromptError(f"--prompt-file {prompt_file!r} is empty")
    return text


@dataclass(frozen=True)
class _Options:
    stop_at_error: bool
    quiet: bool
    bar: bool


def _outputs(vlm: VLM, items: list[Item], prompt: str | None, params: SamplingParams) -> Iterator[Output]:
    from vlm.params import CAPTION_MAX_TOKENS
    from vlm.prepare import caption_messages

    if all(item.prompt is None for item in items):
        return vlm.caption_many((item.source for item in items), prompt, params)
    params = replace(params, max_tokens=params.max_tokens or CAPTION_MAX_TOKENS)
    asked = ((item.source, prompt if item.prompt is None else item.prompt) for item in items)
    conversations = (caption_messages(source, question) for source, question in asked)
    return vlm.chat_many(conversations, params)


def _write_all(
    outputs: Iterator[Output], items: list[Item], sink: Sink, around: tuple[str, str], options: _Options
) -> int:
    """The exit status. Output that cannot be written ends it: what is counted as captioned has been written."""
    from tqdm import tqdm

    started = time.perf_counter()
    captioned = failed = 0
    sink.open()
    try:
        with tqdm(total=len(items), unit=" pictures", file=sys.stderr, disable=not options.bar) as progress:
            for output in outputs:
                item, text = items[output.index], ""
                if output.error is None:
                    text = around[0] + output.text.strip() + around[1]
                else:
                    failed += 1
                    progress.clear()
                    say(_failure(output.error, item))
                sink.put(item, output, text)
                captioned += output.error is None
                progress.update()
                if failed and options.stop_at_error:
                    break
    except OSError as error:
        if not captioned:
            raise
        say(error_line(error))
        return 1
    finally:
        sink.close()
        if not options.quiet:
            say(_summary(captioned, failed, len(items), time.perf_counter() - started))
    return 0 if not failed else 1 if captioned else 2


def _failure(error: BaseException, item: Item) -> str:
    """A missing file is told in this command's words: the library's list what else an image may be in Python."""
    from vlm.images import source_name

    name = source_name(item.source)
    if isinstance(error, FileNotFoundError) and not os.path.lexists(item.source):
        error = PromptError(f"{name} does not exist")
    return error_line(error, name)


def _summary(captioned: int, failed: int, total: int, seconds: float) -> str:
    text = f"captioned {captioned} of {total} in {seconds:.1f} s ({captioned / seconds:.1f} pictures/s)"
    return f"{text}; {failed} failed" if failed else text
