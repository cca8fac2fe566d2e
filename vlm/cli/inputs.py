"""Which pictures a command line means: files, folders, patterns, URLs, and lists of them in .txt or .jsonl files."""

from __future__ import annotations

import glob
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
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
KEYS = (*SOURCE_KEYS, "prompt")
_URL = re.compile(r"(data):|([a-z][a-z0-9+.-]*)://", re.IGNORECASE)


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
    """Whether it starts as a URL does, of whatever scheme, and is no local file for all that."""
    return _URL.match(text) is not None and not os.path.lexists(text)


def at_home(text: str) -> str:
    """A path with ~ for the home folder; a file that is really called ~ stays what it is."""
    return text if os.path.lexists(text) else os.path.expanduser(text)


def _expand(text: str, recursive: bool) -> Iterator[Item]:
    if not text.strip():
        raise PromptError("an empty path is no picture; . is this folder")
    if text == "-":
        raise PromptError("- does not stand for stdin; write the pictures' paths into a .txt file and name that")
    path = Path(at_home(text))
    if is_url(text):
        _check_scheme(text)
        yield _item(text)
    elif path.is_dir():
        yield from _folder(path, recursive)
    elif path.suffix.lower() in NOT_YET:
        raise PromptError(
            f"{text}: {NOT_YET[path.suffix.lower()]} are not read by this version; list the pictures in a .txt file"
        )
    elif path.suffix.lower() in LISTS and path.exists():
        if not path.is_file():
            raise PromptError(f"{text} is a pipe or a device; a list is a regular file")
        yield from _list(path)
    elif not os.path.lexists(path) and glob.has_magic(text):
        matches = sorted(glob.glob(str(path), recursive=True))
        if not matches:
            raise PromptError(f"nothing matches the pattern {text!r}")
        for match in matches:
            yield from _folder(Path(match), recursive) if os.path.isdir(match) else iter((_item(match),))
    else:
        yield _item(text)


def _check_scheme(url: str) -> None:
    found = _URL.match(url)
    assert found is not None
    scheme = (found[1] or found[2]).lower()
    if scheme == "file":
        raise PromptError(f"{url}: pass the path itself instead of a file: URL")
    if scheme not in ("http", "https", "data"):
        raise PromptError(f"{url}: only http and https URLs are fetched; download it and pass the file's path")


def _item(text: str, folder: Path | None = None, prompt: str | None = None) -> Item:
    """A single picture; a relative path in a list counts from the list's folder."""
    if is_url(text):
        tail = text.partition("?")[0].rstrip("/").rpartition("/")[2] if text[:5].lower() != "data:" else "data"
        return Item(text, text if len(text) <= 200 else f"{text[:60]}...", _without_ending(Path(tail)), prompt)
    path = Path(text if folder and os.path.lexists(folder / text) else at_home(text))
    inside = folder is not None and not path.is_absolute() and ".." not in path.parts
    relative = path if inside else Path(path.name)
    return Item(folder / path if folder else path, text, _without_ending(relative), prompt)


def _without_ending(path: Path) -> Path:
    """For the name of a sidecar; "/" and "." have no name of their own."""
    return path.with_suffix("") if path.name else Path("picture")


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
        with path.open(encoding="utf-8-sig") as lines:
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
        record = {"path": record}
    if isinstance(record, dict):
        _check_keys(record, where)
    found = [record[key] for key in SOURCE_KEYS if key in record] if isinstance(record, dict) else []
    if len(found) != 1 or not isinstance(found[0], str):
        raise PromptError(f"{where}: expected an object with one of {', '.join(SOURCE_KEYS)} as a string")
    if not found[0].strip():
        raise PromptError(f"{where}: the path is empty")
    prompt = record.get("prompt")
    if prompt is not None and not isinstance(prompt, str):
        raise PromptError(f"{where}: prompt must be a string, got {type(prompt).__name__}")
    if prompt is not None and not prompt.strip():
        raise PromptError(f"{where}: the prompt is empty; leave it out, or say null, for the default one")
    return _item(found[0], path.parent, prompt)


def _check_keys(record: dict[str, Any], where: str) -> None:
    """Lists often carry columns of their own, which are left alone; one that is nearly ours is a slip."""
    for key in record:
        plain = key.lower().replace("-", "_").replace(" ", "_")
        near = get_close_matches(plain, KEYS, n=1, cutoff=0.9)  # a letter more or less, no longer name
        if near and key not in KEYS and not (plain.endswith("s") and plain[:-1] in KEYS):
            raise PromptError(f"{where}: unknown key {key!r}; did you mean {near[0]!r}?")
