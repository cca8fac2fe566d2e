#!/usr/bin/env python3
"""Compile every attention kernel configuration for every GPU of `tiles.COMPILED_FOR`, on a machine without a GPU.

    python tools/compile_kernels.py                 compile what has changed, check it, rewrite the report
    python tools/compile_kernels.py --gpu sm_75     one GPU only
    python tools/compile_kernels.py --all           everything again

Checks that the shared memory of each program is within what its tile promises and within the limit of the GPU, and
counts the bytes of registers that it spills. The report, compiled_kernels.json beside this file, is keyed on the
source of the kernels, so that a test can tell whether it still speaks of them. A full run takes about twenty minutes
of one core.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import hashlib
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from vlm.kernels import activation, decode, flash, norm, paged, rotary, tiles

REPORT = Path(__file__).with_name("compiled_kernels.json")
TARGETS = {
    "sm_75": GPUTarget("cuda", 75, 32),
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_86": GPUTarget("cuda", 86, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
TRITON_DTYPES = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32", tiles.FP8: "fp8e4nv"}
MOST_SPILLED = 64  # bytes a thread: a few values that are spilled once, outside of the loop

EVERYTHING = {"WINDOWED": True, "SOFTCAP": True, "SINKS": True, "SPANS": 1}
NOTHING = {"WINDOWED": False, "SOFTCAP": False, "SINKS": False, "SPANS": 0}
# What is compiled of each use: the lightest and the heaviest set of features.
VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "packed": {
        "plain": {**NOTHING, "CAUSAL": False},
        "causal": {**NOTHING, "CAUSAL": True},
        "all": {**EVERYTHING, "CAUSAL": True},
    },
    "short": {"plain": {**NOTHING, "CAUSAL": False}, "all": {**EVERYTHING, "CAUSAL": True}},
    "paged": {"causal": {**NOTHING, "CAUSAL": True}, "all": {**EVERYTHING, "CAUSAL": True}},
    "decode": {
        "split": {**NOTHING, "MIXED": False, "SPLIT": True},
        "all": {**EVERYTHING, "MIXED": True, "SPLIT": False},
    },
}


@dataclass(frozen=True)
class Job:
    """One compilation: a kernel, the types of its arguments and its constants, for one GPU."""

    name: str
    gpu: str
    kernel: Any
    types: dict[str, str]
    constants: dict[str, Any]
    num_warps: int
    num_stages: int
    promised: int

    def key(self) -> str:
        """Changes when the source, the types, the constants or the options do."""
        parts = [source_of(self.kernel), self.types, self.constants, self.num_warps, self.num_stages]
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Result:
    """Bytes of shared memory a program, registers a thread, bytes of registers spilled a thread."""

    shared: int
    registers: int
    spilled: int


def source_of(kernel: Any) -> str:
    """The code of a kernel's module and of the kernels that it may call, without comments, docstrings and layout."""
    paths = {Path(kernel.fn.__code__.co_filename), Path(flash.__file__)}
    return "\n".join(_bare(path) for path in sorted(paths))


@cache
def _bare(path: Path) -> str:
    """The Triton functions of a file."""
    functions = [
        node
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef) and any("triton.jit" in ast.unparse(d) for d in node.decorator_list)
    ]
    for node in functions:
        if ast.get_docstring(node) is not None:
            node.body = node.body[1:]
    return "\n".join(ast.unparse(node) for node in functions)


def jobs(gpu: str) -> Iterator[Job]:
    """Every compilation for one GPU."""
    seen: set[str] = set()
    for config in tiles.configurations(tiles.COMPILED_FOR[gpu]):
        if isinstance(config.tile, tiles.Refusal):
            continue
        for variant, features in VARIANTS[config.use].items():
            job = attention_job(gpu, config, config.tile, variant, features)
            if job.name not in seen:
                seen.add(job.name)
                yield job
    yield from helper_jobs(gpu)


def refusals(gpu: str) -> dict[str, str]:
    """What no tile fits, by name."""
    return {
        f"{gpu}/{c.use}/{c.dtype}/kv {c.kv_dtype}/{c.head_dim}": c.tile.reason
        for c in tiles.configurations(tiles.COMPILED_FOR[gpu])
        if isinstance(c.tile, tiles.Refusal)
    }


def attention_job(
    gpu: str, config: tiles.Configuration, tile: tiles.Tile, variant: str, features: dict[str, Any]
) -> Job:
    decoding = config.use == "decode"
    kernel = decode.decode_kernel if decoding else flash.flash_kernel
    dtype, kv_dtype = TRITON_DTYPES[config.dtype], TRITON_DTYPES[config.kv_dtype]
    split = features.get("SPLIT", False)
    types = {name: "i32" for name in flash.PLAIN_INTEGERS if name in kernel.arg_names}
    types |= {"scale": "fp32", "softcap": "fp32", "v_scale": "fp32", "len_k_ptr": "*i32", "q_ptr": f"*{dtype}"}
    types |= {"k_ptr": f"*{kv_dtype}", "v_ptr": f"*{kv_dtype}", "out_ptr": "*fp32" if split else f"*{dtype}"}
    optional = {
        "cu_q_ptr": ("*i32", not decoding or features["MIXED"]),
        "table_ptr": ("*i32", config.use in ("paged", "decode")),
        "logsum_ptr": ("*fp32", split),
        "sinks_ptr": (f"*{dtype}", features["SINKS"]),
        "spans_ptr": ("*i32", features["SPANS"] > 0),
    }
    types |= {name: kind for name, (kind, used) in optional.items() if used and name in kernel.arg_names}
    constants = {
        "HEAD_DIM": config.head_dim,
        "D0": tile.head[0],
        "D1": tile.head[1],
        "BLOCK_H" if decoding else "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_SIZE": 16 if config.use in ("paged", "decode") else 0,
        "ALIGN": 16 if config.head_dim % 16 == 0 else 8,
        "PRECISION": tile.precision,
        **({"DOT": tile.dot} if decoding else {"SKIP_SINGLE": config.use == "paged"}),
        **features,
    }
    name = f"{gpu}/{config.use}/{config.dtype}/kv {config.kv_dtype}/{config.head_dim}/{variant}"
    name += f"/{tile.block_m} heads" if decoding else ""
    return Job(name, gpu, kernel, types, constants, tile.num_warps, tile.num_stages, tile.shared_memory)


def helper_jobs(gpu: str) -> Iterator[Job]:
    """The kernels without a choice of tile: one typical shape each."""

    def job(
        name: str, kernel: Any, pointers: dict[str, str], floats: tuple[str, ...], constants: dict[str, Any]
    ) -> Job:
        types = {n: "i32" for n in kernel.arg_names if n not in constants and n not in floats}
        types |= dict.fromkeys(floats, "fp32") | pointers
        return Job(f"{gpu}/{name}", gpu, kernel, types, constants, 4, 1, 32_768)

    half = "*fp16"
    cache = dict.fromkeys(("k_ptr", "v_ptr", "k_cache_ptr", "v_cache_ptr"), half) | {"slots_ptr": "*i64"}
    turn = {"HEAD_DIM": 128, "R": 64, "BLOCK_H": 8, "BLOCK_R": 64, "BLOCK_REST": 1, "INTERLEAVED": False}
    table = {"cos_ptr": "*fp32", "sin_ptr": "*fp32"}
    parts = {"part_ptr": "*fp32", "logsum_ptr": "*fp32", "out_ptr": half, "cu_q_ptr": "*i32"}
    norms = dict.fromkeys(("x_ptr", "residual_ptr", "weight_ptr", "out_ptr", "sum_ptr"), half)
    scales = ("k_scale", "v_scale")
    yield job(
        "rms_norm", norm.rms_norm_kernel, norms, ("eps", "weight_offset"), {"C": 2048, "BLOCK": 2048, "FUSED": True}
    )
    gate = {"gate_up_ptr": half, "out_ptr": half}
    yield job("silu_mul", activation.silu_mul_kernel, gate, (), {"M": 11008, "BLOCK": 1024})
    yield job("rotary", rotary.rotary_kernel, {"x_ptr": half, "out_ptr": half, **table}, (), {"HEADS": 16, **turn})
    write = {"Q_BLOCKS": 2, "HEADS": 16, "KV_HEADS": 2, "BLOCK_SIZE": 16, "BLOCK_D": 128, **turn}
    pointers = {"q_ptr": half, "out_ptr": half, **cache, **table}
    yield job("rotary_write_kv", rotary.rotary_write_kernel, pointers, scales, write)
    store = {"HEADS": 2, "HEAD_DIM": 128, "BLOCK_SIZE": 16, "BLOCK": 256}
    yield job("write_kv", paged.write_kv_kernel, cache, scales, store)
    combine = {"HEAD_DIM": 128, "BLOCK_D": 128, "BLOCK_S": 64, "ALIGN": 16, "MIXED": True}
    yield job("combine", decode.combine_kernel, parts, (), combine)


def compile_job(job: Job) -> Result:
    """Compile for the job's GPU, as a launch with aligned pointers would be compiled."""
    names = job.kernel.arg_names
    signature = {n: job.types.get(n, "constexpr") for n in names}
    constants = {(i,): job.constants.get(n) for i, n in enumerate(names) if n not in job.types}
    # Without the hint nothing is pipelined, and the shared memory reads too low.
    hints = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if job.types.get(n, "").startswith("*")}
    source = ASTSource(job.kernel, signature, constants, hints)
    options = {"num_warps": job.num_warps, "num_stages": job.num_stages}
    with triton.knobs.compilation.scope():
        triton.knobs.compilation.always_compile = True
        compiled = triton.compile(source, target=TARGETS[job.gpu], options=options)
    registers, spilled = _usage(compiled.asm)
    return Result(int(compiled.metadata.shared), registers, spilled)


def _usage(asm: dict[str, Any]) -> tuple[int, int]:
    """(registers, bytes spilled) a thread, from the machine code."""
    if "amdgcn" in asm:
        found = {k: int(v) for k, v in re.findall(r"\.(vgpr_count|vgpr_spill_count):\s+(\d+)", asm["amdgcn"])}
        return found["vgpr_count"], 4 * found["vgpr_spill_count"]
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(asm["cubin"])
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    match = re.search(r"REG:(\d+) STACK:(\d+)", out)
    if match is None:
        raise RuntimeError(f"cuobjdump said nothing about registers: {out!r}")
    return int(match[1]), int(match[2])


def problems(job: Job, result: Result) -> list[str]:
    """What is wrong with a compiled kernel; empty means nothing."""
    limit = tiles.COMPILED_FOR[job.gpu].shared_memory
    found = []
    if result.shared > job.promised:
        found.append(f"{job.name}: takes {result.shared} bytes of shared memory, its tile promises {job.promised}")
    if result.shared > limit:
        found.append(f"{job.name}: takes {result.shared} bytes of shared memory, the GPU has {limit}")
    if result.spilled > MOST_SPILLED:
        found.append(f"{job.name}: spills {result.spilled} bytes a thread, at most {MOST_SPILLED} are allowed")
    return found


def read_report() -> dict[str, Any]:
    return json.loads(REPORT.read_text()) if REPORT.exists() else {"kernels": {}}


def update(gpus: list[str], everything: bool, say: Callable[[str], None]) -> list[str]:
    """Compile what is stale, write the report, and return the problems."""
    report = read_report()
    old = {} if everything and set(gpus) == set(TARGETS) else report["kernels"]
    kernels = {name: entry for name, entry in old.items() if name.split("/")[0] not in gpus}
    found: list[str] = []
    for gpu in gpus:
        started, compiled = time.perf_counter(), 0
        for job in jobs(gpu):
            entry = old.get(job.name)
            if everything or entry is None or entry["key"] != job.key():
                entry = {"key": job.key(), **dataclasses.asdict(compile_job(job))}
                compiled += 1
            kernels[job.name] = entry
            result = Result(entry["shared"], entry["registers"], entry["spilled"])
            found += problems(job, result)
            if result.spilled:
                say(f"  {job.name}: spills {result.spilled} bytes a thread")
        say(f"{gpu}: {compiled} compiled in {time.perf_counter() - started:.0f} s")
    refused = {name: reason for gpu in TARGETS for name, reason in refusals(gpu).items()}
    report = {"triton": triton.__version__, "refused": refused, "kernels": dict(sorted(kernels.items()))}
    lines = json.dumps(report, indent=0)
    REPORT.write_text(re.sub(r"\{\n(\"key\"[^}]*)\n\}", lambda m: "{" + m[1].replace("\n", " ") + "}", lines) + "\n")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", action="append", choices=list(TARGETS), help="only this one; may be repeated")
    parser.add_argument("--all", action="store_true", help="compile what has not changed as well")
    args = parser.parse_args()
    found = update(args.gpu or list(TARGETS), args.all, lambda line: print(line, flush=True))
    print("\n".join(found) or "all within their limits")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
