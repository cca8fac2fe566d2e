"""Every kernel configuration compiles within the shared memory of its GPU, without that GPU.

The whole matrix takes tools/compile_kernels.py twenty minutes of a core. Its report is in the repository: here it is
checked that the report speaks of the kernels as they are and keeps the limits, and a sample is compiled again.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest

from vlm.kernels.tiles import COMPILED_FOR, Refusal, configurations

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="interpreted kernels do not compile")

# The heaviest of each GPU, and each kernel once.
SAMPLE = [
    "sm_75/decode/float16/kv float16/128/all/4 heads",
    "sm_75/paged/float16/kv float16/256/causal",
    "sm_80/packed/float16/kv float16/80/plain",
    "sm_86/packed/float16/kv float16/256/all",
    "sm_86/decode/float16/kv float16/128/split/16 heads",
    "sm_90/short/float16/kv float16/80/plain",
    "sm_90/paged/float16/kv float8_e4m3fn/128/causal",
    "sm_90/combine",
    "gfx942/packed/float16/kv float16/128/all",
    "gfx942/rotary_write_kv",
]


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    """tools/compile_kernels.py, which is not installed."""
    path = Path(__file__).resolve().parents[2] / "tools" / "compile_kernels.py"
    spec = importlib.util.spec_from_file_location("compile_kernels", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("gpu", COMPILED_FOR)
def test_the_report_is_of_these_kernels_and_within_the_limits(tool: ModuleType, gpu: str) -> None:
    report = tool.read_report()
    jobs = {job.name: job for job in tool.jobs(gpu)}
    recorded = {name: entry for name, entry in report["kernels"].items() if name.startswith(f"{gpu}/")}
    again = "run tools/compile_kernels.py"
    assert recorded.keys() == jobs.keys(), again
    stale = [name for name, job in jobs.items() if recorded[name]["key"] != job.key()]
    assert not stale, again
    results = {name: tool.Result(e["shared"], e["registers"], e["spilled"]) for name, e in recorded.items()}
    wrong = [problem for name, job in jobs.items() for problem in tool.problems(job, results[name])]
    assert not wrong, "\n".join(wrong)
    assert {k: v for k, v in report["refused"].items() if k.startswith(f"{gpu}/")} == tool.refusals(gpu)


def test_every_choice_of_a_tile_is_compiled(tool: ModuleType) -> None:
    for gpu, machine in COMPILED_FOR.items():
        names = {job.name.rsplit("/", 1)[0] for job in tool.jobs(gpu)} | {job.name for job in tool.jobs(gpu)}
        for c in configurations(machine):
            if not isinstance(c.tile, Refusal):
                prefix = f"{gpu}/{c.use}/{c.dtype}/kv {c.kv_dtype}/{c.head_dim}"
                assert any(name.startswith(prefix) for name in names), prefix


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLE)
def test_a_sample_compiles_to_what_the_report_says(tool: ModuleType, name: str) -> None:
    job = next(job for job in tool.jobs(name.split("/")[0]) if job.name == name)
    result = tool.compile_job(job)
    assert not tool.problems(job, result)
    report = tool.read_report()
    if report["triton"] == tool.triton.__version__:
        entry = report["kernels"][name]
        assert (result.shared, result.spilled) == (entry["shared"], entry["spilled"])


def test_a_kernel_that_is_too_large_is_a_problem(tool: ModuleType) -> None:
    """The check itself works."""
    job = next(iter(tool.jobs("sm_75")))
    found = tool.problems(job, tool.Result(shared=70_000, registers=255, spilled=4_000))
    assert len(found) == 3
    assert "70000 bytes of shared memory, the GPU has 65536" in found[1]
    assert "spills 4000 bytes" in found[2]
