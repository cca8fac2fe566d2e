"""Which pictures a command line means: files, folders, patterns, URLs, and lists of them in .txt or .jsonl files."""

from __future__ import annotations

import glob
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from vlm.errors import PromptError

# What is taken from folders. A file that is named on the command line or in a list is tried whatever its ending.
# fmt: off
PICTURES = frozenset({
    ".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".avif", ".heic", ".heif",
    ".ppm", ".pgm", ".pbm", ".pnm", ".tga", ".jp2", ".ico",
})
# fmt: on
LISTS = frozenset((".txt", ".jsonl"))
NOT_YET = {".parquet": "parquet tables", ".tar": "tar archives"}
SOURCE_KEYS = ("path", "image", "url", "file_name")


@dataclass(frozen=True)
class Item:
    """One picture to caption.

    Attributes:
        source: a local path or a URL. name: how output calls it: as given, or below the folder that was given.
        relative: where a sidecar stands below the output folder, without its ending. prompt: its own, from a .jsonl
            list.
    """

    source: Path | str
    name: str
    relative: Path
    prompt: str | None = None


def gather(paths: list[str], recursive: bool, limit: int | None) -> list[Item]:
    """The pictures that `paths` mean, in order, each local file once. Raises PromptError where one means nothing."""
    return list(islice(_once(item for path in paths for item in _expand(path, recursive)), limit))


def _once(items: Iterator[Item]) -> Iterator[Item]:
    seen: set[tuple[str, str | None]] = set()
    for item in items:
        key = (item.source if isinstance(item.source, str) else os.path.abspath(item.source), item.prompt)
        if key not in seen:
            seen.add(key)
            yield item


def is_url(text: str) -> bool:
    return text.startswith(("http://", "https://", "data:"))


def _expand(text: str, recursive: bool) -> Iterator[Item]:
    path = Path(text).expanduser()
    if is_url(text):
        yield _item(text)
    elif path.is_dir():
        yield from _folder(path, recursive)
    elif path.suffix.lower() in NOT_YET:
        raise PromptError(
            f"{text}: {NOT_YET[path.suffix.lower()]} are not read by this version; list the pictures in a .txt file"
        )
    elif path.suffix.lower() in LISTS and path.exists():
        yield from _list(path)
    elif not os.path.lexists(path) and glob.has_magic(text):
        matches = sorted(glob.glob(os.path.expanduser(text), recursive=True))
        if not matches:
            raise PromptError(f"nothing matches the pattern {text!r}")
        for match in matches:
            yield from _folder(Path(match), recursive) if os.path.isdir(match) else iter((_item(match),))
    else:
        yield _item(text)


def _item(text: str, folder: Path | None = None, prompt: str | None = None) -> Item:
    """A single picture; a relative path in a list counts from the list's folder."""
    if is_url(text):
        tail = text.partition("?")[0].rstrip("/").rpartition("/")[2] if not text.startswith("data:") else "data"
        return Item(text, text if len(text) <= 200 else f"{text[:60]}...", Path(tail).with_suffix(""), prompt)
    path = Path(text).expanduser()
    inside = folder is not None and not path.is_absolute() and ".." not in path.parts
    relative = path if inside else Path(path.name)
    return Item(folder / path if folder else path, text, relative.with_suffix(""), prompt)


def _folder(folder: Path, recursive: bool) -> Iterator[Item]:
    """Pictures by their ending, sorted by name; what is hidden stays hidden."""
    for entry in sorted(os.scandir(folder), key=lambda e: e.name):
        if entry.name.startswith("."):
            continue
        if entry.is_dir():
            if recursive:
                for item in _folder(Path(entry.path), recursive):
                    yield Item(item.source, item.name, Path(entry.name) / item.relative)
        elif os.path.splitext(entry.name)[1].lower() in PICTURES:
            path = Path(entry.path)
            yield Item(path, entry.path, Path(entry.name).with_suffix(""))


def _list(path: Path) -> Iterator[Item]:
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if not (text := line.strip()):
                    continue
                if path.suffix.lower() == ".jsonl":
                    yield _record(text, path, number)
                else:
                    yield _item(text, path.parent)
    except UnicodeDecodeError as error:
        raise PromptError(f"{path} is not UTF-8 text: {error}; lists hold one path or URL a line") from error


def _record(text: str, path: Path, number: int) -> Item:
    where = f"{path}, line {number}"
    try:
        record: Any = json.loads(text)
    except json.JSONDecodeError as error:
        raise PromptError(f"{where}: not valid JSON: {error.msg} at column {error.colno}") from error
    if isinstance(record, str):
        return _item(record, path.parent)
    found = [record[key] for key in SOURCE_KEYS if key in record] if isinstance(record, dict) else []
    if len(found) != 1 or not isinstance(found[0], str):
        raise PromptError(f"{where}: expected an object with one of {', '.join(SOURCE_KEYS)} as a string")
    prompt = record.get("prompt")
    if prompt is not None and not isinstance(prompt, str):
        raise PromptError(f"{where}: prompt must be a string, got {type(prompt).__name__}")
    return _item(found[0], path.parent, prompt)
