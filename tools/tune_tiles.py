#!/usr/bin/env python3
"""Time candidate tiles of the attention kernels on the GPU that is here: how kernels/tiles.py found its ladders.

    python -P tools/tune_tiles.py                every case
    python -P tools/tune_tiles.py packed decode  cases whose name begins so

Candidates are compiled in parallel first (they land in Triton's cache), then timed one by one in this process. One
line a candidate, fastest first; the tile that tiles.py chooses today is marked. A candidate that does not fit or is
wrong says so.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import accumulate
from multiprocessing import get_context

import torch
import triton

from vlm.attention.platform import Platform
from vlm.kernels.paged import paged_attention
from vlm.kernels.tiles import Refusal, Tile, decode_splits, decode_tile, flash_tile
from vlm.kernels.varlen import varlen_attention

Shape = tuple[int, int, int, int, int, int]  # sequences, queries, keys, heads, key/value heads, head_dim
Candidate = tuple[int, int, int, int]  # block_m, block_n, warps, stages
LONG: list[Candidate] = [
    *((128, 64, 4, stages) for stages in (2, 3, 4)),
    *((128, 64, 8, stages) for stages in (2, 3, 4)),
    *((128, 128, 8, stages) for stages in (2, 3)),
    *((64, 64, 4, stages) for stages in (2, 3, 4)),
    (128, 32, 4, 4),
    (64, 128, 4, 2),
]
SHORT: list[Candidate] = [
    *((64, 64, 4, stages) for stages in (1, 2, 3)),
    (64, 32, 4, 2),
    (64, 64, 8, 2),
    (32, 64, 4, 2),
]
DECODE: list[Candidate] = [
    *((16, 64, warps, stages) for warps in (2, 4, 8) for stages in (2, 3, 4, 5)),
    *((16, 128, warps, stages) for warps in (4, 8) for stages in (2, 3)),
    *((16, 32, warps, 4) for warps in (1, 2, 4)),
]
CASES: dict[str, tuple[Shape, list[Candidate]]] = {
    "packed 80": ((16, 1728, 1728, 16, 16, 80), LONG),
    "packed 72": ((32, 729, 729, 16, 16, 72), LONG),
    "packed 64": ((32, 1025, 1025, 16, 16, 64), LONG),
    "packed windows": ((432, 64, 64, 16, 16, 80), SHORT),
    "prompt 128": ((8, 2048, 2048, 28, 4, 128), LONG),
    "chunk 128": ((8, 512, 4096, 28, 4, 128), LONG),
    "decode 32 x 4096": ((32, 1, 4096, 16, 2, 128), DECODE),
    "decode 1 x 32768": ((1, 1, 32768, 28, 4, 128), DECODE),
    "decode 256 x 4096": ((256, 1, 4096, 28, 4, 128), DECODE),
}


@dataclass(frozen=True)
class Bench:
    """Inputs of one case on the GPU. `small` shrinks the case to what compiling needs."""

    name: str
    small: bool = False

    def run(self, machine: Platform, candidates: list[Candidate]) -> Iterator[Callable[[], torch.Tensor]]:
        count, queries, keys, heads, kv_heads, head_dim = CASES[self.name][0]
        decoding = self.name.startswith("decode")
        splits = decode_splits(count, kv_heads, keys, processors=machine.processors)
        if self.small:
            count, queries, keys = 1, min(queries, 64), min(keys, 256)
        q = torch.randn(count * queries, heads, head_dim, device="cuda", dtype=torch.bfloat16)
        k, v = torch.randn(2, count * keys // 16, 16, kv_heads, head_dim, device="cuda", dtype=torch.bfloat16)
        cu = torch.tensor([0, *accumulate([queries] * count)], dtype=torch.int32, device="cuda")
        lens = torch.full((count,), keys, dtype=torch.int32, device="cuda")
        tables = torch.arange(count * keys // 16, dtype=torch.int32, device="cuda").view(count, -1)
        for candidate in candidates:
            tile = tile_of(self.name, machine, candidate)
            if self.name.startswith(("packed", "prompt")):
                cu_k = cu if queries == keys else cu * (keys // queries)
                causal = self.name.startswith("prompt")
                packed = (q, k.flatten(0, 1), v.flatten(0, 1), cu, cu_k, queries)

                def call(tile: Tile = tile, packed: tuple = packed, causal: bool = causal) -> torch.Tensor:
                    return varlen_attention(*packed, scale=head_dim**-0.5, tile=tile, causal=causal)
            else:
                options = {"prefill": None if decoding else tile, "decode": tile, "num_splits": splits}

                def call(options: dict = options) -> torch.Tensor:
                    return paged_attention(
                        q, k, v, cu, lens, tables, queries, scale=head_dim**-0.5, has_decode=decoding, **options
                    )

            yield call


def tile_of(name: str, machine: Platform, candidate: Candidate | None = None) -> Tile:
    """The tile that tiles.py chooses for a case, or the same with another shape."""
    _, queries, _, heads, kv_heads, head_dim = CASES[name][0]
    if name.startswith("decode"):
        found = decode_tile(machine, "bfloat16", head_dim, heads // kv_heads)
    elif name.startswith("chunk"):
        found = flash_tile(machine, "bfloat16", head_dim, paged=True)
    else:
        found = flash_tile(machine, "bfloat16", head_dim, max_q=queries)
    if isinstance(found, Refusal):
        raise SystemExit(f"error: {name}: {found.reason}")
    if candidate is None:
        return found
    block_m, block_n, warps, stages = candidate
    return replace(found, block_m=block_m, block_n=block_n, num_warps=warps, num_stages=stages)


def compile_one(name: str, candidate: Candidate, machine: Platform) -> str:
    """Compile in a process of its own; what goes wrong, in a line, or ""."""
    try:
        next(iter(Bench(name, small=True).run(machine, [candidate])))()
        torch.cuda.synchronize()
    except (RuntimeError, triton.runtime.errors.OutOfResources, triton.compiler.errors.CompilationError) as error:
        return str(error).strip().splitlines()[0]
    return ""


def tune(name: str, machine: Platform, errors: dict[tuple[str, Candidate], str]) -> None:
    torch.manual_seed(0)
    current = tile_of(name, machine)
    today = (current.block_m, current.block_n, current.num_warps, current.num_stages)
    candidates = [c for c in dict.fromkeys([today, *CASES[name][1]]) if not errors[name, c]]
    timed, expected = [], None
    for candidate, call in zip(candidates, Bench(name).run(machine, candidates), strict=True):
        out = call().float()
        expected = out if expected is None else expected
        wrong = float((out - expected).abs().max()) > 2e-2
        timed.append((triton.testing.do_bench(call, warmup=5, rep=30, return_mode="median"), candidate, wrong))
    print(name)
    for ms, candidate, wrong in sorted(timed):
        print(f"  {ms:.4f} ms  {candidate}{'  <- today' if candidate == today else ''}{'  WRONG' if wrong else ''}")
    for candidate in CASES[name][1]:
        if errors[name, candidate]:
            print(f"  {candidate}: {errors[name, candidate]}")
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help=f"beginnings of: {', '.join(CASES)}")
    args = parser.parse_args()
    names = [n for n in CASES if not args.cases or n.startswith(tuple(args.cases))]
    if not torch.cuda.is_available():
        print("error: tiles are tuned on a CUDA device", file=sys.stderr)
        return 2
    machine = Platform.detect("cuda")
    print(f"{machine.name}, torch {torch.__version__}, triton {triton.__version__}, bfloat16")
    jobs = []
    for name in names:
        current = tile_of(name, machine)
        today = (current.block_m, current.block_n, current.num_warps, current.num_stages)
        jobs += [(name, candidate) for candidate in dict.fromkeys([today, *CASES[name][1]])]
    with ProcessPoolExecutor(max(1, (os.cpu_count() or 2) - 2), mp_context=get_context("spawn")) as pool:
        futures = {job: pool.submit(compile_one, *job, machine) for job in jobs}
        errors = {job: future.result() for job, future in futures.items()}
    for name in names:
        tune(name, machine, errors)
    return 0


if __name__ == "__main__":
    sys.exit(main())
