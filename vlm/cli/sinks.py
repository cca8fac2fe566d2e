"""Where captions go: stdout, one JSON Lines file, or a text file a picture. Nothing is overwritten unasked."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Protocol

from vlm.cli.common import write
from vlm.cli.inputs import Item
from vlm.errors import PromptError

if TYPE_CHECKING:
    from vlm.outputs import Output

FORMATS = ("txt", "jsonl")


class Sink(Protocol):
    def check(self, items: list[Item], overwrite: bool) -> None:
        """Before the model loads: raise PromptError for whatever could not be written."""

    def target(self, item: Item) -> str:
        """Where an item's caption goes, for `--dry-run`."""

    def open(self) -> None: ...

    def put(self, item: Item, output: Output, caption: str) -> None: ...

    def close(self) -> None: ...


def make_sink(output: Path | None, format: str | None, as_json: bool, several: bool) -> Sink:
    if format is not None and format not in FORMATS:
        raise PromptError(f"--format {format}: this version writes {' or '.join(FORMATS)}")
    if output is None:
        if format == "txt":
            raise PromptError("--format txt writes a file a picture: say where with --output FOLDER")
        return Stdout(record if as_json or format == "jsonl" else line if several else bare)
    if as_json:
        raise PromptError("--json writes to stdout; with --output use --format jsonl")
    if format == "jsonl" or (format is None and output.suffix == ".jsonl"):
        return JsonLines(output)
    if format is None and output.suffix and not output.is_dir():
        raise PromptError(f"--output {output}: end it in .jsonl, name a folder, or say --format")
    return Sidecars(output)


def record(item: Item, output: Output, caption: str) -> str:
    """One line of JSON. `width` and `height` are the picture's own, upright; `seconds` from its turn to its end."""
    width, height = output.source_sizes[0] if output.source_sizes else (None, None)
    error = output.error
    values: dict[str, Any] = {
        "path": item.name,
        "caption": caption,
        "finish_reason": output.finish_reason,
        "prompt_tokens": output.usage.prompt_tokens,
        "image_tokens": output.usage.image_tokens,
        "completion_tokens": output.usage.completion_tokens,
        "width": width,
        "height": height,
        "seconds": round(output.metrics.total_time, 4),
        "error": None if error is None else {"type": type(error).__name__, "message": str(error)},
    }
    return json.dumps(values, ensure_ascii=False)


def line(item: Item, output: Output, caption: str) -> str:
    """PATH, tab, caption; what would break a line is escaped in the path and a space in the caption."""
    name = item.name.replace("\\", "\\\\").replace("\t", "\\t").replace("\n", "\\n").replace("\r", "\\r")
    return f"{name}\t{' '.join(caption.split())}"


def bare(item: Item, output: Output, caption: str) -> str:
    return caption


class Stdout:
    def __init__(self, render: Callable[[Item, Output, str], str]) -> None:
        self._render = render

    def check(self, items: list[Item], overwrite: bool) -> None: ...

    def target(self, item: Item) -> str:
        return "stdout"

    def open(self) -> None: ...

    def put(self, item: Item, output: Output, caption: str) -> None:
        """A failed picture has a record, but no line of text: stderr has one."""
        if output.error is None or self._render is record:
            write(self._render(item, output, caption))

    def close(self) -> None: ...


class JsonLines:
    """One file, a record a picture, each written out whole as it comes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: IO[str] | None = None
        self._mode = "x"

    def check(self, items: list[Item], overwrite: bool) -> None:
        if self.path.is_dir():
            raise PromptError(f"--output {self.path} is a folder; name a .jsonl file")
        if os.path.lexists(self.path) and not overwrite:
            raise PromptError(f"{self.path} exists already; use --overwrite to replace it, or another --output")
        _check_writable(self.path.parent)
        self._mode = "w" if overwrite else "x"

    def target(self, item: Item) -> str:
        return str(self.path)

    def open(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open(self._mode, encoding="utf-8")

    def put(self, item: Item, output: Output, caption: str) -> None:
        assert self._file is not None
        self._file.write(record(item, output, caption) + "\n")
        self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


class Sidecars:
    """A .txt file a picture, in the output folder, under the same subfolders as below the input folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, item: Item) -> Path:
        return self.folder / item.relative.with_name(item.relative.name + ".txt")

    def check(self, items: list[Item], overwrite: bool) -> None:
        if os.path.lexists(self.folder) and not self.folder.is_dir():
            raise PromptError(f"--output {self.folder} is a file; name a folder, or a file that ends in .jsonl")
        first: dict[str, Item] = {}
        for item in items:
            # Compared without case: some file systems do not tell a.txt from A.txt.
            other = first.setdefault(str(self.path(item)).lower(), item)
            if other is not item:
                raise PromptError(
                    f"{other.name} and {item.name} would both be captioned in {self.path(item)}; "
                    "rename one, caption them into different folders, or use --format jsonl"
                )
        existing = [path for item in items if os.path.lexists(path := self.path(item))]
        if existing and not overwrite:
            more = f" and {len(existing) - 1} more" if len(existing) > 1 else ""
            raise PromptError(f"{existing[0]}{more} exists already; use --overwrite to replace, or another --output")
        _check_writable(self.folder)

    def target(self, item: Item) -> str:
        return str(self.path(item))

    def open(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)

    def put(self, item: Item, output: Output, caption: str) -> None:
        """Whole or not at all: written aside, then moved into place."""
        if output.error is not None:
            return
        path = self.path(item)
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            aside.write_text(caption + "\n", encoding="utf-8")
            aside.replace(path)
        finally:
            aside.unlink(missing_ok=True)

    def close(self) -> None: ...


def _check_writable(folder: Path) -> None:
    """The folder, or the nearest one above it that exists, must take files."""
    folder = folder.absolute()
    existing = next(parent for parent in (folder, *folder.parents) if os.path.lexists(parent))
    if not existing.is_dir():
        raise PromptError(f"{existing} is a file, so {folder} cannot be a folder")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise PromptError(f"{existing} is not writable; choose another --output")
