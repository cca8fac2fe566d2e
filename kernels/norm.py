"""RMS norm, with the residual addition in front of it fused in.

Legend: T tokens, C channels.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# Largest difference to the twin, relative to the largest magnitude of its output.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
MAX_CHANNELS = 32_768


@triton.jit
def rms_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, out_ptr, sum_ptr, x_row, residual_row, eps, weight_offset,
    C: tl.constexpr, BLOCK: tl.constexpr, FUSED: tl.constexpr,
):  # fmt: skip
    """The norm of one row.

    FUSED: x + residual is written to `sum_ptr` in the dtype of x, and it is that rounded sum which is normed.
    """
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    mask = c < C
    x = tl.load(x_ptr + row * x_row + c, mask=mask, other=0.0).to(tl.float32)
    if FUSED:
        x += tl.load(residual_ptr + row * residual_row + c, mask=mask, other=0.0).to(tl.float32)
        rounded = x.to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + row * C + c, rounded, mask=mask)
        x = rounded.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(x * x, 0) / C + eps)
    # Rounded to the dtype of x before the weight is applied, as the reference models do.
    normed = (x * inverse).to(out_ptr.dtype.element_ty).to(tl.float32)
    weight = tl.load(weight_ptr + c, mask=mask, other=0.0).to(tl.float32) + weight_offset
    tl.store(out_ptr + row * C + c, (normed * weight).to(out_ptr.dtype.element_ty), mask=mask)


def rms_norm(
    x_TC: torch.Tensor,
    weight_C: torch.Tensor,
    eps: float,
    residual_TC: torch.Tensor | None = None,
    *,
    weight_offset: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Root-mean-square norm of x, or of x + residual. (normed, x + residual), both (T, C) in the dtype of x.

    Without a residual the second is x itself. weight_offset: 1.0 for models that store the weight minus one (Gemma).
    Rows may be strided. Raises ValueError for more than `MAX_CHANNELS` channels.
    """
    tokens, channels = x_TC.shape
    if channels > MAX_CHANNELS or weight_C.shape != (channels,):
        raise ValueError(
            f"x is {tuple(x_TC.shape)}, the weight {tuple(weight_C.shape)}; at most {MAX_CHANNELS} channels"
        )
    if x_TC.stride(1) != 1 or (
        residual_TC is not None and (residual_TC.stride(1) != 1 or residual_TC.shape != x_TC.shape)
    ):
        raise ValueError("x and the residual need the same shape and contiguous rows")
    out_TC = torch.empty((tokens, channels), dtype=x_TC.dtype, device=x_TC.device)
    sum_TC = x_TC if residual_TC is None else torch.empty_like(out_TC)
    if tokens:
        block = triton.next_power_of_2(channels)
        rms_norm_kernel[(tokens,)](
            x_TC, residual_TC, weight_C, out_TC, None if residual_TC is None else sum_TC,
            x_TC.stride(0), 0 if residual_TC is None else residual_TC.stride(0), eps, weight_offset,
            C=channels, BLOCK=block, FUSED=residual_TC is not None, num_warps=min(16, max(1, block // 512)),
        )  # fmt: skip
    return out_TC, sum_TC


def rms_norm_reference(
    x_TC: torch.Tensor,
    weight_C: torch.Tensor,
    eps: float,
    residual_TC: torch.Tensor | None = None,
    *,
    weight_offset: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The plain-torch twin of `rms_norm`."""
    sum_TC = x_TC if residual_TC is None else (x_TC.float() + residual_TC.float()).to(x_TC.dtype)
    x32 = sum_TC.float()
    normed = (x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)).to(x_TC.dtype)
    return (normed.float() * (weight_C.float() + weight_offset)).to(x_TC.dtype), sum_TC
