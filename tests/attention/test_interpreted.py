"""The conformance of the triton backend without a GPU: Triton's interpreter, in a process of its own.

Triton reads TRITON_INTERPRET when it is imported, so the variable cannot be set for one test.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
pytest.importorskip("triton")


def interpreted(least: int, *arguments: str) -> None:
    """Run tests in the interpreter: they pass, and at least so many of them ran."""
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "0", *arguments]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, cwd=HERE.parent.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) >= least, done.stdout[-500:]


@pytest.mark.slow
@pytest.mark.parametrize("role", ["encoder", "decoder", "cross"])
def test_what_triton_declares_it_computes(role: str) -> None:
    name = f"test_accepted_is_computed_and_refused_is_explained and triton and {role} and cpu"
    interpreted(40, "-k", name, str(HERE / "test_conformance.py"))


@pytest.mark.slow
def test_turing_and_fp8() -> None:
    interpreted(10, str(HERE / "test_triton_op.py"))
