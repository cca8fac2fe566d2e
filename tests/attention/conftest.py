"""The oracle as a fixture: in importlib mode test modules do not import each other."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest


def load(name: str) -> ModuleType:
    """A helper module of this folder."""
    full = f"attention_tests_{name}"
    if full not in sys.modules:
        spec = importlib.util.spec_from_file_location(full, Path(__file__).parent / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[full] = module
        spec.loader.exec_module(module)
    return sys.modules[full]


@pytest.fixture(scope="session")
def oracle() -> ModuleType:
    """tests/attention/oracle.py: `attend` and `attend_one`, dense loops in float64."""
    return load("oracle")


@pytest.fixture(scope="session")
def flash_doubles() -> ModuleType:
    """tests/attention/flash_doubles.py: the calling conventions of the FlashAttention packages, on the CPU."""
    return load("flash_doubles")


@pytest.fixture(scope="session")
def cases() -> ModuleType:
    """tests/attention/cases.py: inputs, a paged cache, runs against the oracle."""
    return load("cases")
