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


@pytest.mark.slow
@pytest.mark.parametrize("role", ["encoder", "decoder", "cross"])
def test_what_triton_declares_it_computes(role: str) -> None:
    name = f"test_accepted_is_computed_and_refused_is_explained and triton and {role} and cpu"
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "0", "-k", name]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, str(HERE / "test_conformance.py")],
        env=environment,
        cwd=HERE.parent.parent,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) >= 40, done.stdout[-500:]
