"""Where captions go: stdout, one JSON Lines file, or a text file a picture. Nothing is overwritten unasked."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Protocol

from vlm.cli.inputs import Item
from vlm.cli.streams import check_stdout, escaped, json_text, visible, write
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


def make_sink(output: str | None, format: str | None, as_json: bool, several: bool) -> Sink:
    if format is not None and format not in FORMATS:
        raise PromptError(f"--format {format}: this version writes {' or '.join(FORMATS)}")
    if output is None:
        if format == "txt":
            raise PromptError("--format txt writes a file a picture: say where with --output FOLDER")
        return Stdout(json_line if as_json or format == "jsonl" else line if several else bare)
    if as_json:
        raise PromptError("--json writes to stdout; with --output use --format jsonl")
    if not output.strip():
        raise PromptError("--output is empty; name a .jsonl file or a folder (. is this one)")
    path, is_folder = Path(output), output.endswith(("/", os.sep))
    if is_folder and format == "jsonl":
        raise PromptError(f"--output {output} is a folder; name a .jsonl file")
    if format == "jsonl" or (format is None and path.suffix.lower() == ".jsonl" and not is_folder):
        return JsonLines(path)
    if format is None and path.suffix and not (is_folder or path.is_dir()):
        raise PromptError(f"--output {output}: end it in .jsonl, name a folder, or say --format")
    return Sidecars(path)


def record(item: Item, output: Output, caption: str) -> dict[str, Any]:
    """What a JSON line says. `width` and `height` are the picture's own, upright; `seconds` from its turn to its end;
    `prompt` is there where the list gave the picture one of its own."""
    width, height = output.source_sizes[0] if output.source_sizes else (None, None)
    error = output.error
    return {
        "path": item.name,
        **({} if item.prompt is None else {"prompt": item.prompt}),
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


def json_line(item: Item, output: Output, caption: str) -> str:
    return json_text(record(item, output, caption), sys.stdout.encoding)


def line(item: Item, output: Output, caption: str) -> str:
    """PATH, tab, caption; white space becomes a space in the caption, and other control characters escapes."""
    return f"{escaped(item.name)}\t{visible(' '.join(caption.split()))}"


def bare(item: Item, output: Output, caption: str) -> str:
    return visible(caption, keep="\n\t")


class Stdout:
    def __init__(self, render: Callable[[Item, Output, str], str]) -> None:
        self._render = render

    def check(self, items: list[Item], overwrite: bool) -> None:
        check_stdout()

    def target(self, item: Item) -> str:
        return "stdout"

    def open(self) -> None: ...

    def put(self, item: Item, output: Output, caption: str) -> None:
        """A failed picture has a record, but no line of text: stderr has one."""
        if output.error is None or self._render is json_line:
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
        if not self.path.exists():
            _check_writable(self.path.parent)
        elif not os.access(self.path, os.W_OK):
            raise PromptError(f"{self.path} is not writable; choose another --output")
        self._mode = "w" if overwrite else "x"

    def target(self, item: Item) -> str:
        return str(self.path)

    def open(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open(self._mode, encoding="utf-8")

    def put(self, item: Item, output: Output, caption: str) -> None:
        assert self._file is not None
        with _naming(self.path):
            try:
                self._file.write(json_text(record(item, output, caption), "utf-8") + "\n")
                self._file.flush()
            except OSError:
                # What could not be written is still in the buffer, and would fail again.
                file, self._file = self._file, None
                with suppress(OSError):
                    file.close()
                raise

    def close(self) -> None:
        if self._file is not None:
            with _naming(self.path):
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
        self._check_collisions(items)
        existing = [path for item in items if os.path.lexists(path := self.path(item))]
        if existing and not overwrite:
            more = f" and {len(existing) - 1} more" if len(existing) > 1 else ""
            raise PromptError(f"{existing[0]}{more} exists already; use --overwrite to replace, or another --output")
        if folder := next((path for path in existing if path.is_dir()), None):
            raise PromptError(f"{folder} is a folder, so no caption can be written there; choose another --output")
        _check_writable(self.folder, *{self.path(item).parent for item in items})

    def _check_collisions(self, items: list[Item]) -> None:
        """No two captions in one file, and no file where another caption needs a folder. Compared without case: some
        file systems do not tell a.txt from A.txt."""
        first: dict[Path, Item] = {}
        for item in items:
            other = first.setdefault(_key(self.path(item)), item)
            if other is item:
                continue
            if other.source == item.source:
                why, remedy = f"{item.name} has several prompts, whose captions would all be", "use --format jsonl"
            else:
                why = f"{other.name} and {item.name} would both be captioned"
                remedy = "rename one, caption them into different folders, or use --format jsonl"
            raise PromptError(f"{why} in {self.path(item)}; {remedy}")
        for item in items:
            for parent in _key(self.path(item)).parents:
                if parent in first:
                    raise PromptError(
                        f"the caption of {first[parent].name} would be the file {self.path(first[parent])}, which has "
                        f"to be a folder for {item.name}; rename one, or use --format jsonl"
                    )

    def target(self, item: Item) -> str:
        return str(self.path(item))

    def open(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)

    def put(self, item: Item, output: Output, caption: str) -> None:
        """Whole or not at all: written aside, then moved into place."""
        if output.error is not None:
            return
        path = self.path(item)
        aside = path.with_name(f".vlm-{os.getpid()}.txt")  # no longer than a name may be
        with _naming(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                aside.write_text(caption + "\n", encoding="utf-8", errors="backslashreplace")
                aside.replace(path)
            finally:
                aside.unlink(missing_ok=True)

    def close(self) -> None: ...


def _check_writable(*folders: Path) -> None:
    """Each folder, or the nearest one above it that exists, must take files."""
    nearest: dict[Path, Path] = {}
    for folder in (f.absolute() for f in folders):
        nearest[next(parent for parent in (folder, *folder.parents) if os.path.lexists(parent))] = folder
    for existing, folder in nearest.items():
        if not existing.is_dir():
            raise PromptError(f"{existing} is a file, so {folder} cannot be a folder")
        try:
            # Tried, as permissions do not tell all: some file systems take no files from anyone.
            with tempfile.TemporaryFile(dir=existing):
                pass
        except OSError as error:
            raise PromptError(f"{existing} is not writable ({error.strerror}); choose another --output") from error


def _key(path: Path) -> Path:
    return Path(str(path).lower())


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Some errors of the system, as of a full disk, do not say of which file."""
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error
