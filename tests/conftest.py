"""Shared fixtures: the device that a parity test runs on, and the skip of GPU tests where there is no GPU.

The repository root must not be on sys.path: transformers looks for a package called `kernels` and would execute our
folder of that name. pytest runs in importlib mode for that reason, and with `python -P`; what is left is dropped here.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != ROOT]


def _no_cuda() -> str:
    """Why CUDA cannot be used here, or ""."""
    import torch

    return "" if torch.cuda.is_available() else "no CUDA device"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    if gpu and (reason := _no_cuda()):
        for item in gpu:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """Each test that takes it runs on the CPU, and on CUDA where there is one."""
    return str(request.param)
