"""The default rows: the backends that a role tries on a platform, in order. Read `ROWS` for what an A100 gets.

A row is data and nothing else; whether a backend in it can do a given job is the backend's own declaration.
"""

from __future__ import annotations

from dataclasses import dataclass

from vlm.attention.platform import Platform
from vlm.attention.spec import Role

ANY: tuple[int, int] = (0, 0)
TOP: tuple[int, int] = (99, 0)
AMPERE: tuple[int, int] = (8, 0)


@dataclass(frozen=True)
class Row:
    """Backends for a role on a platform whose CUDA capability is at least `low` and below `high`."""

    role: Role
    kind: str
    low: tuple[int, int]
    high: tuple[int, int]
    backends: tuple[str, ...]


ROWS: tuple[Row, ...] = (
    # Ampere and later: torch carries FlashAttention-2. A decoder reads its paged cache in place through our kernels;
    # torch_varlen gathers the cache first.
    Row("encoder", "cuda", AMPERE, TOP, ("torch_varlen", "triton", "sdpa")),
    Row("decoder", "cuda", AMPERE, TOP, ("triton", "torch_varlen", "sdpa")),
    Row("cross", "cuda", AMPERE, TOP, ("torch_varlen", "triton", "sdpa")),
    # Volta and Turing: no FlashAttention. The memory-efficient kernel uses tensor cores there, Triton's dot does not.
    Row("encoder", "cuda", ANY, AMPERE, ("torch_efficient", "triton", "sdpa")),
    Row("decoder", "cuda", ANY, AMPERE, ("triton", "sdpa")),
    Row("cross", "cuda", ANY, AMPERE, ("torch_efficient", "triton", "sdpa")),
    Row("encoder", "rocm", ANY, TOP, ("triton", "sdpa")),
    Row("decoder", "rocm", ANY, TOP, ("triton", "sdpa")),
    Row("cross", "rocm", ANY, TOP, ("triton", "sdpa")),
    # Our kernels are not compiled for Intel GPUs by any test: there they are what one may choose, not what one gets.
    Row("encoder", "xpu", ANY, TOP, ("sdpa", "triton")),
    Row("decoder", "xpu", ANY, TOP, ("sdpa", "triton")),
    Row("cross", "xpu", ANY, TOP, ("sdpa", "triton")),
    Row("encoder", "mps", ANY, TOP, ("sdpa",)),
    Row("decoder", "mps", ANY, TOP, ("sdpa",)),
    Row("cross", "mps", ANY, TOP, ("sdpa",)),
    Row("encoder", "cpu", ANY, TOP, ("sdpa",)),
    Row("decoder", "cpu", ANY, TOP, ("sdpa",)),
    Row("cross", "cpu", ANY, TOP, ("sdpa",)),
)


def default_row(role: Role, platform: Platform) -> Row:
    """The row that applies. Every role has exactly one on every platform (a test walks them)."""
    have = platform.capability or ANY
    return next(row for row in ROWS if row.role == role and row.kind == platform.kind and row.low <= have < row.high)
