"""Where the kernels run: compiled on a CUDA device, or, in a process with TRITON_INTERPRET=1, interpreted on the CPU.

Triton reads the variable when it is imported, so that one process does one or the other;
tests/kernels/test_interpreted.py starts the second. bfloat16 arithmetic is wrong in the interpreter, and is tested on
the GPU only.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from itertools import accumulate

import pytest
import torch

pytest.importorskip("triton")

from vlm.kernels.tiles import Gpu, Machine, Refusal, Tile, decode_tile, flash_tile, split_head

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DTYPES = [torch.float16, torch.float32] if INTERPRETED else [torch.bfloat16, torch.float16, torch.float32]

collect_ignore = ["test_real_shapes.py"] if INTERPRETED else ["test_random_shapes.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if INTERPRETED:  # numpy speaks up where tanh saturates, which is what it should do
        for item in items:
            item.add_marker(pytest.mark.filterwarnings("ignore:overflow encountered in exp2:RuntimeWarning"))


@pytest.fixture(params=["cpu"] if INTERPRETED else [pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """Seeds the generator as well."""
    torch.manual_seed(0)
    return str(request.param)


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


def this_gpu() -> Machine:
    properties = torch.cuda.get_device_properties(0)
    return Gpu("cuda", (properties.major, properties.minor), "", properties.shared_memory_per_block_optin)


Tiles = Callable[..., Tile]


@pytest.fixture
def flash() -> Tiles:
    """flash(dtype, head_dim, **kwargs) -> the tile that this machine takes; a small one in the interpreter."""

    def choose(dtype: torch.dtype, head_dim: int, **kwargs: object) -> Tile:
        if INTERPRETED:
            return Tile("flash", 16, 16, 4, 1, split_head(head_dim), 0)
        tile = flash_tile(this_gpu(), str(dtype).removeprefix("torch."), head_dim, **kwargs)
        assert not isinstance(tile, Refusal), tile
        return tile

    return choose


@pytest.fixture(params=[True, False], ids=["dot", "no dot"])
def decode(request: pytest.FixtureRequest) -> Tiles:
    """decode(dtype, head_dim, group) -> a tile; each test runs with matrix products and without."""

    def choose(dtype: torch.dtype, head_dim: int, group: int) -> Tile:
        if INTERPRETED:
            heads = 16 if request.param else min(4, 1 << (group - 1).bit_length())
            return Tile("decode", heads, 16, 4, 1, split_head(head_dim), 0, request.param)
        machine = this_gpu() if request.param else Gpu("cuda", (7, 5), "", 65_536)
        # Turing's tile has the kernel without matrix products; it knows no bfloat16, whose tiles are those of float16.
        name = str(dtype).removeprefix("torch.")
        tile = decode_tile(machine, name if request.param or name != "bfloat16" else "float16", head_dim, group)
        assert not isinstance(tile, Refusal), tile
        return tile

    return choose


@pytest.fixture
def prefix() -> Callable[[Sequence[int], str], torch.Tensor]:
    """Lengths -> int32 prefix sums on the device."""

    def sums(lengths: Sequence[int], device: str) -> torch.Tensor:
        return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)

    return sums
