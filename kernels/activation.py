"""The gate of a gated MLP: silu(gate) * up in one pass.

Legend: T tokens, M width of the MLP.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# Largest difference to the twin, relative to the largest magnitude of its output.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
BLOCK = 1024


@triton.jit
def silu_mul_kernel(gate_up_ptr, out_ptr, row_stride, M: tl.constexpr, BLOCK: tl.constexpr):
    """BLOCK columns of one row. Grid: (ceil(M / BLOCK), T)."""
    row = tl.program_id(1).to(tl.int64)
    m = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = m < M
    gate = tl.load(gate_up_ptr + row * row_stride + m, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * row_stride + M + m, mask=mask, other=0.0).to(tl.float32)
    # exp of a large negative gate goes to infinity and the quotient to -0, which is the limit.
    out = gate / (1.0 + tl.exp2(gate * -1.4426950408889634)) * up
    tl.store(out_ptr + row * M + m, out.to(out_ptr.dtype.element_ty), mask=mask)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """(..., 2 M) with the gate in the first half -> silu(gate) * up, (..., M), computed in float32 and rounded once."""
    width = gate_up.shape[-1] // 2
    rows = gate_up.reshape(-1, 2 * width)
    if rows.stride(1) != 1:
        raise ValueError(f"the last dim must be contiguous, strides are {gate_up.stride()}")
    out = torch.empty((*gate_up.shape[:-1], width), dtype=gate_up.dtype, device=gate_up.device)
    # The rows go on the second axis of the grid, which holds 65,535.
    for start in range(0, rows.shape[0], 65_535):
        part = rows[start : start + 65_535]
        silu_mul_kernel[(triton.cdiv(width, BLOCK), part.shape[0])](
            part, out.view(-1, width)[start:], part.stride(0), M=width, BLOCK=BLOCK, num_warps=4
        )
    return out


def silu_mul_reference(gate_up: torch.Tensor) -> torch.Tensor:
    """The plain-torch twin of `silu_mul`."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (gate * torch.sigmoid(gate) * up).to(gate_up.dtype)
