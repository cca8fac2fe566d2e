"""The choice of a tile: always one that fits, or a refusal with numbers."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from vlm.kernels import tiles
from vlm.kernels.tiles import (
    COMPILED_FOR,
    FP8,
    Configuration,
    Gpu,
    Refusal,
    Tile,
    configurations,
    decode_splits,
    decode_tile,
    flash_tile,
    split_head,
)

T4 = COMPILED_FOR["sm_75"]
EVERY = [
    pytest.param(name, c, id=f"{name}-{i}")
    for name, gpu in COMPILED_FOR.items()
    for i, c in enumerate(configurations(gpu))
]


@pytest.mark.parametrize(("gpu", "configuration"), EVERY)
def test_what_is_chosen_fits(gpu: str, configuration: Configuration) -> None:
    tile = configuration.tile
    if isinstance(tile, Refusal):
        assert re.match(
            r"(shared_memory: needs \d+, has \d+|kv_dtype: \S+ needs capability 8\.9, has \S+)$", tile.reason
        )
        return
    assert tile.shared_memory <= COMPILED_FOR[gpu].shared_memory
    assert sum(tile.head) >= configuration.head_dim
    assert all(n & (n - 1) == 0 for n in (tile.block_m, tile.block_n, tile.num_warps, *tile.head))
    assert tile.dot is (configuration.use != "decode" or tile.block_m >= 16)


def test_every_rung_is_chosen_on_some_gpu() -> None:
    """No tile stands in a ladder that is never compiled: its shared memory would be a guess."""
    chosen = {
        (t.block_m, t.block_n, t.num_warps, t.shared_memory)
        for machine in COMPILED_FOR.values()
        for c in configurations(machine)
        if isinstance(t := c.tile, Tile) and t.kernel == "flash"
    }
    for ladders in (tiles.FLASH_16, tiles.FLASH_SHORT_16, tiles.FLASH_32):
        for name, ladder in ladders.items():
            for width, rungs in ladder.items():
                for rung in rungs:
                    assert (rung.block_m, rung.block_n, rung.num_warps, rung.shared) in chosen, (name, width, rung)


def test_all_that_is_refused_is_named() -> None:
    """Of what is served on each GPU, only these have no tile."""
    refused = {
        (gpu, c.use, c.dtype, c.head_dim)
        for gpu, machine in COMPILED_FOR.items()
        for c in configurations(machine)
        if isinstance(c.tile, Refusal) and c.kv_dtype != FP8
    }
    assert refused == {("sm_75", "paged", "float32", 512)}


@pytest.mark.parametrize("head_dim", range(64, 257, 8))
@pytest.mark.parametrize("kind", ["packed", "paged", "decode"])
def test_a_decoder_in_float16_always_has_a_tile_on_turing(kind: str, head_dim: int) -> None:
    if kind == "decode":
        tile = decode_tile(T4, "float16", head_dim, 4)
        assert isinstance(tile, Tile)
        assert not tile.dot, "Triton multiplies matrices by scalars there"
    else:
        assert isinstance(flash_tile(T4, "float16", head_dim, paged=kind == "paged"), Tile)


@pytest.mark.parametrize("group", [1, 3, 8, 64])
@pytest.mark.parametrize("gpu", COMPILED_FOR)
def test_every_group_of_heads_is_served(gpu: str, group: int) -> None:
    for dtype in ("float16", "float32"):
        tile = decode_tile(COMPILED_FOR[gpu], dtype, 128, group)
        assert isinstance(tile, Tile)
        assert tile.block_m >= min(group, 4)


def test_less_shared_memory_gives_a_smaller_tile_and_then_a_refusal() -> None:
    a100 = COMPILED_FOR["sm_80"]
    sizes = []
    for bytes_ in (166_912, 101_376, 60_000):
        found = flash_tile(replace(a100, shared_memory=bytes_), "float16", 256)
        sizes.append((found.block_m, found.block_n) if isinstance(found, Tile) else found.reason)
    assert sizes == [(64, 64), (64, 32), "shared_memory: needs 70656, has 60000"]


@pytest.mark.parametrize(
    ("machine", "dtype", "head_dim", "kv_dtype", "reason"),
    [
        (T4, "bfloat16", 64, None, "dtype: bfloat16 needs capability 8.0, has 7.5"),
        (T4, "float64", 64, None, "dtype: float64 is not one of float16, bfloat16, float32"),
        (T4, "float16", 513, None, "head_dim: 513 is not in 1..512"),
        (COMPILED_FOR["sm_86"], "float16", 64, FP8, f"kv_dtype: {FP8} needs capability 8.9, has 8.6"),
        (COMPILED_FOR["gfx942"], "float16", 64, FP8, f"kv_dtype: {FP8} needs capability 8.9, has gfx942"),
        (COMPILED_FOR["sm_90"], "float16", 64, "int8", f"kv_dtype: int8 is neither float16 nor {FP8}"),
        (Gpu("cuda", (7, 0), "", 98_304), "float16", 64, None, "capability: needs 7.5, has 7.0"),
        (Gpu("mps", None, "", 32_768), "float16", 64, None, "platform: mps has no Triton kernels"),
    ],
)
def test_refusals_say_why(machine: Gpu, dtype: str, head_dim: int, kv_dtype: str | None, reason: str) -> None:
    assert decode_tile(machine, dtype, head_dim, 1, kv_dtype=kv_dtype) == Refusal(reason)
    assert flash_tile(machine, dtype, head_dim, kv_dtype=kv_dtype, paged=True) == Refusal(reason)


def test_bfloat16_takes_the_tiles_of_float16() -> None:
    """tools/compile_kernels.py compiles the float16 ones only."""
    for machine in COMPILED_FOR.values():
        for head_dim in (64, 80, 256):
            if machine != T4:
                assert flash_tile(machine, "bfloat16", head_dim) == flash_tile(machine, "float16", head_dim)


@pytest.mark.parametrize(
    ("head_dim", "pieces"),
    [(32, (32, 0)), (72, (64, 16)), (80, (64, 16)), (88, (64, 32)), (96, (64, 32)), (112, (128, 0)), (24, (32, 0)),
     (192, (128, 64)), (512, (512, 0)), (8, (16, 0))],
)  # fmt: skip
def test_a_head_is_cut_into_two_powers_of_two(head_dim: int, pieces: tuple[int, int]) -> None:
    assert split_head(head_dim) == pieces


def test_splits_fill_the_processors_and_leave_no_short_parts() -> None:
    assert decode_splits(1, 2, 32_768, processors=132) == 64
    assert decode_splits(1, 2, 512, processors=132) == 2
    assert decode_splits(256, 4, 32_768, processors=132) == 1
    assert decode_splits(1, 1, 100, processors=132) == 1
    assert decode_splits(1, 1, 32_768, processors=0) == 1
