"""Weights from a checkpoint into a model's parameters, all checked from the headers before memory is filled."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vlm.errors import CheckpointError
from vlm.loading.safetensors_files import TensorEntry, listed

# The dtypes that are weights as they stand; integers and 8-bit floats are some quantisation's, and mean nothing without
# it.
DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}

Sources = Mapping[str, Sequence[TensorEntry]]


def canonical(
    tensors: Mapping[str, TensorEntry], canonical_name: Callable[[str], str | None]
) -> dict[str, TensorEntry]:
    """The tensors by the names that a weight map uses, those that no model needs left out."""
    named = ((canonical_name(name), entry) for name, entry in tensors.items())
    return {name: entry for name, entry in named if name is not None}


def stored_dtype(entries: Mapping[str, TensorEntry]) -> str:
    """The dtype that most tensors are stored in, by torch's name; "float32" where there are none."""
    counts = Counter(DTYPES[entry.dtype] for entry in entries.values() if entry.dtype in DTYPES)
    return counts.most_common(1)[0][0] if counts else "float32"


def match(
    folder: Path,
    model: nn.Module,
    weight_map: Mapping[str, tuple[str, ...]],
    entries: Mapping[str, TensorEntry],
) -> dict[str, list[TensorEntry]]:
    """Which tensors fill which parameter.

    Raises:
        CheckpointError: tensors missing, too many, or of the wrong shape or dtype; lists the first ten and says how
            many there are.
    """
    parameters = dict(model.named_parameters())
    assert parameters.keys() == weight_map.keys(), sorted(parameters.keys() ^ weight_map.keys())
    found: list[str] = []
    wrong: list[str] = []
    sources: dict[str, list[TensorEntry]] = {}
    for name, wanted in weight_map.items():
        missing = [source for source in wanted if source not in entries]
        found += [f"missing tensor {source}" for source in missing]
        sources[name] = [entries[source] for source in wanted if source in entries]
        if not missing:
            wrong += _shape_problems(parameters[name], sources[name])
    needed = {source for wanted in weight_map.values() for source in wanted}
    extra = [
        f"unexpected tensor {entry.name} in {entry.file.name}" for name, entry in entries.items() if name not in needed
    ]
    found += wrong + extra
    if found:
        raise CheckpointError(
            f"the weights in {folder} do not fit its config.json: {listed(found)}\n"
            "Check that the download is complete and that config.json belongs to these weights."
        )
    return sources


def _shape_problems(parameter: nn.Parameter, entries: Sequence[TensorEntry]) -> list[str]:
    problems = [
        f"tensor {e.name} is stored as {e.dtype}; expected one of {', '.join(DTYPES)}"
        for e in entries
        if e.dtype not in DTYPES
    ]
    expected = tuple(parameter.shape)
    if len(entries) == 1:
        if entries[0].shape != expected:
            problems.append(f"tensor {entries[0].name} has shape {list(entries[0].shape)}, expected {list(expected)}")
    elif any(e.shape[1:] != expected[1:] for e in entries) or sum(e.shape[0] for e in entries) != expected[0]:
        parts = ", ".join(f"{e.name} {list(e.shape)}" for e in entries)
        problems.append(f"tensors {parts} do not make {list(expected)} when concatenated")
    return problems


def fill(model: nn.Module, sources: Sources, progress: bool) -> None:
    """Stream every tensor into its rows of its parameter, converting the dtype on the way; shard by shard."""
    jobs: dict[Path, list[tuple[nn.Parameter, int, TensorEntry]]] = {}
    parameters = dict(model.named_parameters())
    for name, entries in sources.items():
        row = 0
        for entry in entries:
            jobs.setdefault(entry.file, []).append((parameters[name], row, entry))
            row += entry.shape[0] if entry.shape else 0
    total = sum(len(shard) for shard in jobs.values())
    with ExitStack() as stack:
        advance = stack.enter_context(_bar(total)) if progress and sys.stderr.isatty() else None
        for file, shard in sorted(jobs.items()):
            for parameter, row, entry, tensor in _tensors(file, shard):
                rows = parameter.data if not entry.shape else parameter.data[row : row + entry.shape[0]]
                rows.copy_(tensor)
                if advance is not None:
                    advance.update(1)


def _tensors(
    file: Path, shard: Sequence[tuple[nn.Parameter, int, TensorEntry]]
) -> Iterator[tuple[nn.Parameter, int, TensorEntry, torch.Tensor]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(file), framework="pt", device="cpu") as reader:
            for parameter, row, entry in shard:
                yield parameter, row, entry, reader.get_tensor(entry.name)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}; download it again") from error


def same_values(first: TensorEntry, second: TensorEntry) -> bool:
    """Whether two stored tensors are equal. Reads both."""
    from safetensors import safe_open

    if (first.shape, first.dtype) != (second.shape, second.dtype):
        return False
    with safe_open(str(first.file), framework="pt") as a, safe_open(str(second.file), framework="pt") as b:
        return torch.equal(a.get_tensor(first.name), b.get_tensor(second.name))


def _bar(total: int) -> Any:
    from tqdm import tqdm

    return tqdm(total=total, desc="loading weights", unit="tensor", leave=False, file=sys.stderr)


def fill_randomly(model: nn.Module, seed: int) -> None:
    """Weights for benchmarks: matrices normal with standard deviation 0.02, norms one, biases zero; the same for the
    same seed."""
    generators: dict[torch.device, torch.Generator] = {}
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            device = parameter.device
            generator = generators.setdefault(device, torch.Generator(device).manual_seed(seed))
            parameter.data.normal_(std=0.02, generator=generator)
        else:
            parameter.data.fill_(1.0 if name.endswith("weight") else 0.0)
