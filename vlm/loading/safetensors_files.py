"""The safetensors files of a model folder: which there are, and what their headers promise. Reads no weights.

The format: 8 bytes little-endian header length, a JSON header, then the tensors' bytes at the offsets that the header
gives.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vlm.errors import CheckpointError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_MAX_HEADER = 100 << 20  # the format's own limit
_LFS = b"version https://git-lfs"
_SHOWN = 10


@dataclass(frozen=True)
class TensorEntry:
    """One tensor as a header announces it. `dtype` is the format's name ("F32", "BF16", ...)."""

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]


def read_checkpoint(folder: Path) -> dict[str, TensorEntry]:
    """The tensors of a folder by the name in the file, from the headers of all its weight files.

    Raises:
        CheckpointError: there are none at all, only other formats, or files that are missing or damaged. The latter
            are listed without what follows from them: that tensors are missing.
    """
    index = folder / INDEX
    problems: list[str] = []
    tensors: dict[str, TensorEntry] = {}
    if index.is_file():
        where = _read_index(index)
    elif (folder / SINGLE).is_file():
        where = {}
        _collect(folder / SINGLE, tensors, problems)
    else:
        raise CheckpointError(_nothing_there(folder))
    for file in sorted(set(where.values())):
        if Path(file).name != file:
            problems.append(f"{INDEX} names {file!r}, which is no file of the folder")
        elif not (folder / file).is_file():
            problems.append(f"{file} is missing; {INDEX} lists {sum(f == file for f in where.values())} tensors in it")
        else:
            _collect(folder / file, tensors, problems)
    if not problems:
        lost = [name for name in where if name not in tensors]
        problems = [f"{name} is not in {where[name]}, where {INDEX} says it is" for name in lost]
    if problems:
        raise CheckpointError(f"the weights in {folder} cannot be read: {listed(problems)}")
    return tensors


def listed(problems: Sequence[str]) -> str:
    """The problem where there is one, else the first ten, a line each, and how many there are."""
    if len(problems) == 1:
        return problems[0]
    more = f"\n  ... and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
    return f"{len(problems)} problems:" + "".join(f"\n  {line}" for line in problems[:_SHOWN]) + more


def _nothing_there(folder: Path) -> str:
    shards = sorted(p.name for p in folder.glob("*.safetensors"))
    if shards:
        return (
            f"{folder} has {len(shards)} safetensors files ({shards[0]}, ...) but neither {SINGLE} nor {INDEX}: "
            "copy the index from the original"
        )
    if others := sorted(p.name for pattern in ("*.bin", "*.pt", "*.pth", "*.gguf") for p in folder.glob(pattern)):
        return (
            f"{folder} holds weights only as {others[0]}, which is not loaded (pickled weights can run code): "
            "convert it with transformers: "
            "AutoModelForImageTextToText.from_pretrained(folder).save_pretrained(new_folder)"
        )
    return f"{folder} has no weights: expected {SINGLE} or {INDEX} with its shards"


def _read_index(path: Path) -> dict[str, str]:
    try:
        where = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        return {str(name): str(file) for name, file in where.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{path} is no valid index ({type(error).__name__}: {error}): download it again"
        ) from error


def _collect(path: Path, tensors: dict[str, TensorEntry], problems: list[str]) -> None:
    try:
        for entry in read_header(path):
            tensors[entry.name] = entry
    except CheckpointError as error:
        problems.append(str(error))


def read_header(path: Path) -> list[TensorEntry]:
    """The tensors that one file promises. Raises CheckpointError where the file cannot hold them."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        if start + file.read(len(_LFS) - 8) == _LFS:
            raise CheckpointError(
                f"{path.name} is a Git LFS pointer, not the weights: run `git lfs pull` in the folder"
            )
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 0 < length <= min(_MAX_HEADER, size - 8):
            raise CheckpointError(f"{path.name} is truncated or no safetensors file ({size} bytes): download it again")
        file.seek(8)
        try:
            header = json.loads(file.read(length))
            entries = [(name, _spec(spec)) for name, spec in header.items() if name != "__metadata__"]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{path.name} has a damaged header ({error}): download it again") from error
    needed = 8 + length + max((end for _, (_, _, end) in entries), default=0)
    if size < needed:
        raise CheckpointError(
            f"{path.name} is truncated: {size} bytes where its header needs {needed}; download it again"
        )
    return [TensorEntry(path, name, dtype, shape) for name, (dtype, shape, _) in entries]


def _spec(spec: Mapping[str, Any]) -> tuple[str, tuple[int, ...], int]:
    return str(spec["dtype"]), tuple(int(n) for n in spec["shape"]), int(spec["data_offsets"][1])
