"""The kernels without a GPU: Triton's interpreter, in a process of its own for each file of tests/kernels/device.

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
LEAST = {"test_varlen.py": 60, "test_paged.py": 80, "test_pointwise.py": 40, "test_random_shapes.py": 2}

pytest.importorskip("triton")


def interpreted(path: Path, least: int) -> None:
    """Run a file of tests in the interpreter: they pass, and at least so many of them ran."""
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", str(path)]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, cwd=HERE.parent.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) >= least, done.stdout[-500:]


@pytest.mark.slow
@pytest.mark.parametrize("name", LEAST)
def test_kernels_agree_with_their_twins(name: str) -> None:
    interpreted(HERE / "device" / name, LEAST[name])


def test_every_file_is_run() -> None:
    """What only a GPU can run says so by its name."""
    files = {path.name for path in (HERE / "device").glob("test_*.py")}
    assert files - {"test_real_shapes.py"} == set(LEAST)
