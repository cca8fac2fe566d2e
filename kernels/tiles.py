"""Which tile of an attention kernel runs on which GPU. Pure data and arithmetic: imports neither torch nor triton.

A tile is a function of the machine (capability, shared memory), the dtypes and head_dim. If none fits, the answer is
a `Refusal` that says what was needed and what there is, so that a backend can refuse when it is built and never at
the first request.

The ladders hold, per generation of GPUs and width of a head, the tiles from the best to the smallest, with the shared
memory that the compiler was seen to take for them. tools/compile_kernels.py compiles every configuration that can be
chosen and checks these numbers; it also lists the few that spill registers. Nothing is tuned for machines that are
not in `COMPILED_FOR`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

Kernel = Literal["flash", "decode"]
Generation = Literal["turing", "ampere", "hopper", "amd"]

COMPUTE_DTYPES = ("float16", "bfloat16", "float32")
FP8 = "float8_e4m3fn"
MAX_HEAD_DIM = 512
SHORT = 64  # up to so many queries a sequence (windows of a ViT), a tile for a single pass over the keys


class Machine(Protocol):
    """What a tile depends on. The platform of the attention layer has these attributes."""

    @property
    def kind(self) -> str: ...
    @property
    def capability(self) -> tuple[int, int] | None: ...
    @property
    def arch(self) -> str: ...
    @property
    def shared_memory(self) -> int: ...


@dataclass(frozen=True)
class Gpu:
    """A machine by its data sheet; `shared_memory` is bytes that a block may use."""

    kind: str
    capability: tuple[int, int] | None
    arch: str
    shared_memory: int


COMPILED_FOR = {
    "sm_75": Gpu("cuda", (7, 5), "", 65_536),
    "sm_80": Gpu("cuda", (8, 0), "", 166_912),
    "sm_86": Gpu("cuda", (8, 6), "", 101_376),
    "sm_90": Gpu("cuda", (9, 0), "", 232_448),
    "gfx942": Gpu("rocm", None, "gfx942", 65_536),
}


@dataclass(frozen=True)
class Tile:
    """How a kernel is launched.

    Attributes:
        block_m: query rows a program (flash), or query heads of one key/value head a program (decode). block_n: keys
            a step.
        head: the power-of-two pieces of head_dim; the second may be 0.
        shared_memory: bytes a program takes, at most.
        dot: whether the kernel multiplies matrices (False: multiply and reduce, for GPUs without tensor cores in the
            compiler).
        precision: how float32 is multiplied, as Triton names it.
    """

    kernel: Kernel
    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    head: tuple[int, int]
    shared_memory: int
    dot: bool = True
    precision: str = "ieee"


@dataclass(frozen=True)
class Refusal:
    """Why there is no tile: one typed reason, with numbers."""

    reason: str


class Rung(NamedTuple):
    """One tile of a ladder; `shared` is the most that any variant of the kernel takes with it, in bytes."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    shared: int


Ladder = dict[int, tuple[Rung, ...]]  # widest head_dim that the row is for -> rungs, best first

# Tiled attention, 16-bit. 4 warps on 128 rows keep the scores of a head of up to 80 in registers; wider heads need 8.
FLASH_16: dict[Generation, Ladder] = {
    "hopper": {
        32: (Rung(128, 64, 4, 3, 33_792),),
        64: (Rung(128, 64, 4, 3, 66_560),),
        80: (Rung(128, 64, 4, 3, 82_944),),
        96: (Rung(128, 64, 8, 3, 99_328),),
        128: (Rung(128, 128, 8, 2, 164_864),),
        192: (Rung(128, 64, 8, 2, 148_480),),
        256: (Rung(128, 64, 8, 2, 197_632),),
        512: (Rung(32, 32, 8, 2, 100_480),),
    },
    "ampere": {
        32: (Rung(128, 64, 8, 3, 25_600),),
        64: (Rung(128, 64, 8, 3, 50_176),),
        80: (Rung(128, 64, 8, 3, 62_464),),
        96: (Rung(128, 64, 8, 3, 74_752),),
        128: (Rung(128, 64, 8, 3, 99_328),),
        192: (Rung(128, 32, 8, 2, 74_752),),
        256: (Rung(64, 64, 8, 2, 106_752), Rung(64, 32, 8, 2, 70_656)),
        512: (Rung(32, 32, 8, 2, 100_480),),
    },
    # Without tensor cores every product is a scalar multiply-add: small tiles that do not spill, and no pipelining.
    "turing": {
        32: (Rung(64, 32, 8, 1, 16_384),),
        64: (Rung(64, 32, 8, 1, 24_576),),
        80: (Rung(32, 32, 8, 1, 22_528),),
        96: (Rung(32, 32, 8, 1, 24_576),),
        128: (Rung(32, 32, 8, 1, 32_768),),
        192: (Rung(32, 32, 8, 1, 45_056),),
        256: (Rung(32, 16, 8, 1, 49_152),),
        512: (Rung(16, 16, 8, 1, 65_536),),
    },
    "amd": {
        32: (Rung(128, 64, 4, 2, 16_384),),
        64: (Rung(128, 64, 4, 2, 16_384),),
        80: (Rung(128, 64, 4, 2, 36_864),),
        96: (Rung(128, 64, 4, 2, 36_864),),
        128: (Rung(128, 64, 4, 2, 40_960),),
        192: (Rung(64, 32, 4, 2, 36_864),),
        256: (Rung(64, 32, 4, 2, 36_864),),
        512: (Rung(16, 32, 4, 1, 32_768),),
    },
}
FLASH_SHORT_16: dict[Generation, Ladder] = {
    "hopper": {
        32: (Rung(64, 64, 4, 2, 20_480),),
        64: (Rung(64, 64, 4, 2, 40_960),),
        80: (Rung(64, 64, 4, 2, 51_200),),
        96: (Rung(64, 64, 4, 2, 61_440),),
        128: (Rung(64, 64, 4, 2, 81_920),),
        192: (Rung(64, 32, 4, 2, 73_728),),
        256: (Rung(64, 32, 8, 2, 98_304),),
    },
    "ampere": {
        32: (Rung(64, 64, 4, 2, 12_288),),
        64: (Rung(64, 64, 4, 2, 24_576),),
        80: (Rung(64, 64, 4, 2, 30_720),),
        96: (Rung(64, 64, 4, 2, 36_864),),
        128: (Rung(64, 32, 4, 2, 36_864),),
    },
    "amd": {
        64: (Rung(64, 64, 4, 2, 24_576),),
        128: (Rung(64, 64, 4, 2, 40_960),),
    },
    "turing": {},
}
# float32 is multiplied exactly ("ieee"): on NVIDIA by scalar multiply-adds, on AMD by its float32 matrix units.
FLASH_32_SCALAR: Ladder = {
    32: (Rung(32, 32, 8, 1, 12_416),),
    64: (Rung(32, 32, 8, 1, 20_608),),
    80: (Rung(32, 16, 8, 1, 16_512),),
    96: (Rung(32, 16, 8, 1, 18_560),),
    128: (Rung(32, 16, 8, 1, 26_752),),
    192: (Rung(16, 16, 8, 1, 25_728),),
    256: (Rung(16, 16, 8, 1, 33_856),),
    512: (Rung(16, 16, 8, 1, 66_624),),
}
FLASH_32: dict[Generation, Ladder] = {
    "turing": FLASH_32_SCALAR,
    "ampere": FLASH_32_SCALAR,
    "hopper": FLASH_32_SCALAR,
    "amd": {
        64: (Rung(64, 32, 4, 1, 16_384),),
        128: (Rung(64, 32, 4, 1, 32_768),),
        256: (Rung(32, 16, 4, 1, 32_768),),
        512: (Rung(16, 16, 4, 1, 32_768),),
    },
}
# Decode: block_m is the least number of heads a program; the load through the block table takes one of the stages.
DECODE_DOT: Ladder = {
    64: (Rung(16, 64, 4, 4, 44_000),),
    96: (Rung(16, 64, 4, 4, 61_952),),
    128: (Rung(16, 64, 4, 4, 82_176),),
    256: (Rung(16, 32, 4, 4, 42_112),),
    512: (Rung(16, 32, 8, 3, 83_072),),
}
DECODE_SCALAR: Ladder = {
    64: (Rung(1, 32, 4, 1, 4_096),),
    96: (Rung(1, 32, 4, 1, 4_096),),
    128: (Rung(1, 16, 4, 1, 4_096),),
    256: (Rung(1, 16, 8, 1, 8_192),),
    512: (Rung(1, 8, 8, 1, 8_192),),
}
DECODE_16: dict[Generation, Ladder] = {
    "hopper": DECODE_DOT,
    "ampere": DECODE_DOT,
    "turing": DECODE_SCALAR,
    "amd": {
        64: (Rung(16, 64, 4, 2, 24_576),),
        96: (Rung(16, 64, 4, 2, 32_768),),
        128: (Rung(16, 64, 4, 2, 40_960),),
        256: (Rung(16, 32, 4, 2, 32_768),),
        512: (Rung(16, 32, 4, 1, 32_768),),
    },
}
DECODE_32: dict[Generation, Ladder] = {
    "hopper": DECODE_SCALAR,
    "ampere": DECODE_SCALAR,
    "turing": DECODE_SCALAR,
    "amd": {
        128: (Rung(16, 32, 4, 1, 32_768),),
        512: (Rung(16, 16, 4, 1, 32_768),),
    },
}
# Query heads of one key/value head that a decode program serves at most; more heads take more programs, which read
# the cache again.
MOST_HEADS = {True: 64, False: 4}  # with and without matrix products
WIDE_HEAD = 128  # above it, a program with matrix products serves the least number of heads


def split_head(head_dim: int) -> tuple[int, int]:
    """Two power-of-two pieces that hold head_dim with the least padding: 80 -> (64, 16), 112 -> (128, 0)."""
    whole = max(16, 1 << (head_dim.bit_length() - 1))
    if head_dim <= whole:
        return whole, 0
    rest = max(16, 1 << (head_dim - whole - 1).bit_length())
    return (2 * whole, 0) if rest >= whole else (whole, rest)


def generation(machine: Machine) -> Generation | None:
    """The row of the ladders that serves a machine, or None where there is none."""
    if machine.kind == "cuda" and machine.capability is not None:
        major, minor = machine.capability
        if (major, minor) < (7, 5):
            return None
        # 12.x (consumer Blackwell) has the shared memory and the matrix instructions of 8.x.
        return "turing" if major == 7 else "hopper" if major in (9, 10) else "ampere"
    return {"rocm": "amd", "xpu": "amd"}.get(machine.kind)  # type: ignore[return-value]


def flash_tile(
    machine: Machine,
    dtype: str,
    head_dim: int,
    *,
    max_q: int | None = None,
    paged: bool = False,
    kv_dtype: str | None = None,
) -> Tile | Refusal:
    """The tile of packed attention, or of prefill over a paged cache (`paged`), for float16, bfloat16 or float32.

    max_q: the longest sequence of queries where it is known; up to `SHORT` there is a tile of its own. kv_dtype: of
    the cache.
    """
    refusal = _refusal(machine, dtype, head_dim, kv_dtype)
    if refusal is not None:
        return refusal
    row = generation(machine)
    assert row is not None
    ladder = (FLASH_32 if dtype == "float32" else FLASH_16)[row]
    if max_q is not None and max_q <= SHORT and not paged and dtype != "float32":
        ladder = {**ladder, **FLASH_SHORT_16[row]}
    rung = _fitting(machine, ladder, head_dim)
    if isinstance(rung, Refusal):
        return rung
    # Keys that are found through a block table are loaded a stage later: one more stage keeps the pipeline as deep.
    stages = rung.num_stages + (paged and dtype != "float32" and row in ("ampere", "hopper"))
    return Tile("flash", rung.block_m, rung.block_n, rung.num_warps, stages, split_head(head_dim), rung.shared)


def decode_tile(
    machine: Machine, dtype: str, head_dim: int, group: int, *, kv_dtype: str | None = None
) -> Tile | Refusal:
    """The tile of split-KV decoding with `group` query heads to a key/value head; any group is served."""
    refusal = _refusal(machine, dtype, head_dim, kv_dtype)
    if refusal is not None:
        return refusal
    row = generation(machine)
    assert row is not None
    rung = _fitting(machine, (DECODE_32 if dtype == "float32" else DECODE_16)[row], head_dim)
    if isinstance(rung, Refusal):
        return rung
    dot = rung.block_m >= 16
    heads = rung.block_m
    if group > heads and (not dot or head_dim <= WIDE_HEAD):
        heads = min(MOST_HEADS[dot], 1 << (group - 1).bit_length())
    return Tile("decode", heads, rung.block_n, rung.num_warps, rung.num_stages, split_head(head_dim), rung.shared, dot)


def decode_splits(sequences: int, kv_heads: int, max_kv: int, *, processors: int, block_n: int = 64) -> int:
    """Parts to cut the keys of each sequence into: a power of two, so that few variants of the kernel are compiled.

    Enough that every processor (SM, CU) has four programs, and none shorter than four steps of keys. `max_kv` is the
    longest sequence that the launch must serve: for a captured graph, what the block tables can hold.
    """
    wanted = 4 * processors // max(1, sequences * kv_heads)
    longest = max(1, max_kv // (4 * block_n))
    return 1 << (max(1, min(wanted, longest, 64)).bit_length() - 1)


def _refusal(machine: Machine, dtype: str, head_dim: int, kv_dtype: str | None) -> Refusal | None:
    capability = machine.capability or (0, 0)
    has = f"{capability[0]}.{capability[1]}"
    if generation(machine) is None:
        if machine.kind == "cuda":
            return Refusal(f"capability: needs 7.5, has {has}")
        return Refusal(f"platform: {machine.kind} has no Triton kernels")
    if dtype not in COMPUTE_DTYPES:
        return Refusal(f"dtype: {dtype} is not one of {', '.join(COMPUTE_DTYPES)}")
    if dtype == "bfloat16" and machine.kind == "cuda" and capability < (8, 0):
        return Refusal(f"dtype: bfloat16 needs capability 8.0, has {has}")
    if kv_dtype not in (None, dtype, FP8):
        return Refusal(f"kv_dtype: {kv_dtype} is neither {dtype} nor {FP8}")
    if kv_dtype == FP8 and (machine.kind != "cuda" or capability < (8, 9)):
        return Refusal(f"kv_dtype: {FP8} needs capability 8.9, has {has if machine.kind == 'cuda' else machine.arch}")
    if not 1 <= head_dim <= MAX_HEAD_DIM:
        return Refusal(f"head_dim: {head_dim} is not in 1..{MAX_HEAD_DIM}")
    return None


def _fitting(machine: Machine, ladder: Ladder, head_dim: int) -> Rung | Refusal:
    """The first rung of the narrowest row for this head that fits the machine's shared memory."""
    width = sum(split_head(head_dim))
    rungs = ladder[min(bound for bound in ladder if bound >= width)]
    for rung in rungs:
        if rung.shared <= machine.shared_memory:
            return rung
    return Refusal(f"shared_memory: needs {rungs[-1].shared}, has {machine.shared_memory}")


@dataclass(frozen=True)
class Configuration:
    """One kernel variant that can be chosen: what tools/compile_kernels.py compiles.

    use: "packed" (long sequences), "short", "paged" (prefill over the cache) or "decode". tile: a Refusal is listed
    too.
    """

    use: str
    dtype: str
    kv_dtype: str
    head_dim: int
    tile: Tile | Refusal


HEAD_DIMS = (32, 64, 72, 80, 88, 96, 128, 192, 256)
DECODER_HEAD_DIMS = (64, 80, 96, 128, 192, 256, 512)
GROUPS = (1, 2, 4, 64)


def configurations(machine: Machine) -> Iterator[Configuration]:
    """Every choice for the head widths that models have. bfloat16 takes float16's tiles and is not listed again."""
    for dtype in ("float16", "float32"):
        for head_dim in HEAD_DIMS:
            long = flash_tile(machine, dtype, head_dim)
            short = flash_tile(machine, dtype, head_dim, max_q=SHORT)
            yield Configuration("packed", dtype, dtype, head_dim, long)
            if short != long:
                yield Configuration("short", dtype, dtype, head_dim, short)
        for head_dim in DECODER_HEAD_DIMS:
            for kv_dtype in (dtype, FP8) if dtype == "float16" else (dtype,):
                tile = flash_tile(machine, dtype, head_dim, paged=True, kv_dtype=kv_dtype)
                yield Configuration("paged", dtype, kv_dtype, head_dim, tile)
                tiles = (decode_tile(machine, dtype, head_dim, group, kv_dtype=kv_dtype) for group in GROUPS)
                for tile in dict.fromkeys(tiles):
                    yield Configuration("decode", dtype, kv_dtype, head_dim, tile)
