"""Rotary position embedding, and its fusion with the write of new keys and values into a paged cache.

Every scheme in use (1-D, the 2-D grid of a ViT, multimodal sections) is the same rotation with another table:
frequency r turns by the position along its own axis. `rotary_table` makes the table once a forward pass; the kernels
only read it.

Legend: T tokens, H query heads, G key/value heads, D head_dim, R rotary frequencies (2 R <= D), A axes of the position.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

# Largest absolute difference to the twin on standard normal inputs.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3.2e-2}


def grid_axes(frequencies: int, axes: int) -> torch.Tensor:
    """(R,) axis of each frequency where axes share them evenly: 1 for text, 2 for the grid of a ViT."""
    return torch.arange(axes).repeat_interleave(-(-frequencies // axes))[:frequencies]


def section_axes(sections: Sequence[int], *, interleaved: bool = False) -> torch.Tensor:
    """(R,) axis of each frequency for multimodal rotary embedding with axes (time, height, width).

    `sections` counts the frequencies of each axis: one after the other (Qwen2-VL, Qwen2.5-VL), or, interleaved
    (Qwen3-VL), dealt out in turn: height and width take frequencies 1, 4, 7 ... and 2, 5, 8 ... as long as their
    sections last, time has the rest.
    """
    if not interleaved:
        return torch.arange(len(sections)).repeat_interleave(torch.tensor(list(sections)))
    axes = torch.zeros(sum(sections), dtype=torch.long)
    for axis in range(1, len(sections)):
        axes[axis : axis + len(sections) * sections[axis] : len(sections)] = axis
    return axes


def rotary_table(
    positions: torch.Tensor, inv_freq_R: torch.Tensor, axes_R: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(cos, sin), each float32 (T, R), from integer positions (T,), or (A, T) with the axis of each frequency."""
    if axes_R is None:
        angles_TR = positions.float()[:, None] * inv_freq_R.float()
    else:
        angles_TR = positions.float()[axes_R].T * inv_freq_R.float()
    return angles_TR.cos(), angles_TR.sin()


@triton.jit
def rotate_rows(
    from_ptr, to_ptr, cos, sin, h, h_mask, r, r_mask, from_head, to_head, to_scale,
    R: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_REST: tl.constexpr, INTERLEAVED: tl.constexpr, FILL: tl.constexpr,
):  # fmt: skip
    """Rotate heads `h` of one token into `to_ptr`; dims past 2 R are carried over.

    `to_scale` divides what is stored.
    """
    mask = h_mask[:, None] & r_mask[None, :]
    if INTERLEAVED:
        one, two = 2 * r, 2 * r + 1
    else:
        one, two = r, R + r
    source = from_ptr + h[:, None] * from_head
    target = to_ptr + h[:, None] * to_head
    x = tl.load(source + one[None, :], mask=mask, other=0.0).to(tl.float32)
    y = tl.load(source + two[None, :], mask=mask, other=0.0).to(tl.float32)
    # Rounded as the unfused rotation rounds, then scaled for the cache.
    first = (x * cos[None, :] - y * sin[None, :]).to(from_ptr.dtype.element_ty).to(tl.float32) / to_scale
    second = (y * cos[None, :] + x * sin[None, :]).to(from_ptr.dtype.element_ty).to(tl.float32) / to_scale
    tl.store(target + one[None, :], first.to(to_ptr.dtype.element_ty), mask=mask)
    tl.store(target + two[None, :], second.to(to_ptr.dtype.element_ty), mask=mask)
    if FILL:
        rest = 2 * R + tl.arange(0, BLOCK_REST)
        rest_mask = h_mask[:, None] & (rest[None, :] < HEAD_DIM)
        kept = tl.load(source + rest[None, :], mask=rest_mask, other=0.0).to(tl.float32) / to_scale
        tl.store(target + rest[None, :], kept.to(to_ptr.dtype.element_ty), mask=rest_mask)


@triton.jit
def rotary_kernel(
    x_ptr, out_ptr, cos_ptr, sin_ptr, x_token, x_head, out_token, out_head, table_row, table_column,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, R: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_REST: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """BLOCK_H heads of one token. Grid: (T, ceil(HEADS / BLOCK_H))."""
    token = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    r = tl.arange(0, BLOCK_R)
    cos = tl.load(cos_ptr + token * table_row + r * table_column, mask=r < R, other=0.0)
    sin = tl.load(sin_ptr + token * table_row + r * table_column, mask=r < R, other=0.0)
    rotate_rows(
        x_ptr + token * x_token, out_ptr + token * out_token, cos, sin, h, h < HEADS, r, r < R, x_head, out_head, 1.0,
        R, HEAD_DIM, BLOCK_REST, INTERLEAVED, HEAD_DIM > 2 * R,
    )  # fmt: skip


@triton.jit
def rotary_write_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, k_cache_ptr, v_cache_ptr, slots_ptr, cos_ptr, sin_ptr,
    q_token, q_head, k_token, k_head, v_token, v_head, out_token, out_head, table_row, table_column,
    k_block, k_slot, k_cache_head, v_block, v_slot, v_cache_head, k_scale, v_scale,
    Q_BLOCKS: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, R: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_REST: tl.constexpr,
    BLOCK_D: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """BLOCK_H heads of one token.

    Grid: (T, Q_BLOCKS + blocks of key/value heads): queries to `out`, keys and values to the cache.
    """
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    r = tl.arange(0, BLOCK_R)
    cos = tl.load(cos_ptr + token * table_row + r * table_column, mask=r < R, other=0.0)
    sin = tl.load(sin_ptr + token * table_row + r * table_column, mask=r < R, other=0.0)
    if part < Q_BLOCKS:
        h = part * BLOCK_H + tl.arange(0, BLOCK_H)
        rotate_rows(
            q_ptr + token * q_token, out_ptr + token * out_token, cos, sin, h, h < HEADS, r, r < R, q_head, out_head,
            1.0, R, HEAD_DIM, BLOCK_REST, INTERLEAVED, HEAD_DIM > 2 * R,
        )  # fmt: skip
    else:
        slot = tl.load(slots_ptr + token)
        if slot >= 0:
            h = (part - Q_BLOCKS) * BLOCK_H + tl.arange(0, BLOCK_H)
            block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
            rotate_rows(
                k_ptr + token * k_token, k_cache_ptr + block * k_block + offset * k_slot, cos, sin, h, h < KV_HEADS, r,
                r < R, k_head, k_cache_head, k_scale, R, HEAD_DIM, BLOCK_REST, INTERLEAVED, HEAD_DIM > 2 * R,
            )  # fmt: skip
            d = tl.arange(0, BLOCK_D)
            mask = (h < KV_HEADS)[:, None] & (d < HEAD_DIM)[None, :]
            v = tl.load(v_ptr + token * v_token + h[:, None] * v_head + d[None, :], mask=mask, other=0.0)
            to = v_cache_ptr + block * v_block + offset * v_slot + h[:, None] * v_cache_head + d[None, :]
            tl.store(to, (v.to(tl.float32) / v_scale).to(v_cache_ptr.dtype.element_ty), mask=mask)


def _shape(heads: int, head_dim: int, frequencies: int) -> dict[str, int]:
    """The constants of a launch: about a thousand elements a program."""
    block_r = triton.next_power_of_2(frequencies)
    return {
        "HEAD_DIM": head_dim,
        "R": frequencies,
        "BLOCK_R": block_r,
        "BLOCK_H": min(triton.next_power_of_2(heads), max(1, 512 // block_r)),
        "BLOCK_REST": triton.next_power_of_2(max(1, head_dim - 2 * frequencies)),
    }


def _check(cos_TR: torch.Tensor, sin_TR: torch.Tensor, *tensors: torch.Tensor) -> None:
    tokens, frequencies = cos_TR.shape
    if cos_TR.shape != sin_TR.shape or cos_TR.stride() != sin_TR.stride():
        raise ValueError(f"cos {tuple(cos_TR.shape)} and sin {tuple(sin_TR.shape)} need one shape and one layout")
    for x in tensors:
        if x.shape[0] != tokens or x.shape[2] < 2 * frequencies or x.stride(2) != 1:
            raise ValueError(f"{tuple(x.shape)}, strides {x.stride()}, does not fit a table of {tuple(cos_TR.shape)}")


def apply_rotary(
    x_THD: torch.Tensor,
    cos_TR: torch.Tensor,
    sin_TR: torch.Tensor,
    *,
    interleaved: bool = False,
    out_THD: torch.Tensor | None = None,
) -> torch.Tensor:
    """Rotate every head. (T, H, D) in the dtype of x, computed in float32.

    Dims i and i + R form a pair (Hugging Face checkpoints), or 2 i and 2 i + 1 when interleaved; dims past 2 R stay.
    x may be a strided view. `out_THD` may be x itself. Raises ValueError on shapes.
    """
    _check(cos_TR, sin_TR, x_THD)
    out_THD = torch.empty(x_THD.shape, dtype=x_THD.dtype, device=x_THD.device) if out_THD is None else out_THD
    tokens, heads, head_dim = x_THD.shape
    if x_THD.numel():
        shape = _shape(heads, head_dim, cos_TR.shape[1])
        rotary_kernel[(tokens, triton.cdiv(heads, shape["BLOCK_H"]))](
            x_THD, out_THD, cos_TR, sin_TR, *x_THD.stride()[:2], *out_THD.stride()[:2], *cos_TR.stride(),
            HEADS=heads, INTERLEAVED=interleaved, num_warps=4, **shape,
        )  # fmt: skip
    return out_THD


def apply_rotary_reference(
    x_THD: torch.Tensor, cos_TR: torch.Tensor, sin_TR: torch.Tensor, *, interleaved: bool = False
) -> torch.Tensor:
    """The plain-torch twin of `apply_rotary`."""
    turned, rest = x_THD[..., : 2 * cos_TR.shape[1]].float(), x_THD[..., 2 * cos_TR.shape[1] :]
    cos, sin = cos_TR[:, None], sin_TR[:, None]
    x, y = (turned[..., 0::2], turned[..., 1::2]) if interleaved else turned.chunk(2, dim=-1)
    first, second = x * cos - y * sin, y * cos + x * sin
    turned = torch.stack((first, second), -1).flatten(-2) if interleaved else torch.cat((first, second), -1)
    return torch.cat((turned.to(x_THD.dtype), rest), -1)


def rotary_write_kv(
    q_THD: torch.Tensor,
    k_TGD: torch.Tensor,
    v_TGD: torch.Tensor,
    cos_TR: torch.Tensor,
    sin_TR: torch.Tensor,
    k_cache_PBGD: torch.Tensor,
    v_cache_PBGD: torch.Tensor,
    slots_T: torch.Tensor,
    *,
    interleaved: bool = False,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> torch.Tensor:
    """Rotate queries and keys, and write keys and values into the cache: one launch for three.

    Returns the queries, (T, H, D). Shapes as in `paged.write_kv` and `apply_rotary`; a token with a negative slot
    (padding) writes nothing to the cache.
    """
    _check(cos_TR, sin_TR, q_THD, k_TGD)
    if (
        k_TGD.shape != v_TGD.shape
        or k_TGD.shape[1:] != k_cache_PBGD.shape[2:]
        or k_cache_PBGD.shape != v_cache_PBGD.shape
    ):
        raise ValueError(
            f"keys {tuple(k_TGD.shape)}, values {tuple(v_TGD.shape)} for a cache of {tuple(k_cache_PBGD.shape)}"
        )
    out_THD = torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
    tokens, heads, head_dim = q_THD.shape
    if tokens == 0:
        return out_THD
    shape = _shape(max(heads, k_TGD.shape[1]), head_dim, cos_TR.shape[1])
    q_blocks, kv_blocks = triton.cdiv(heads, shape["BLOCK_H"]), triton.cdiv(k_TGD.shape[1], shape["BLOCK_H"])
    rotary_write_kernel[(tokens, q_blocks + kv_blocks)](
        q_THD, k_TGD, v_TGD, out_THD, k_cache_PBGD, v_cache_PBGD, slots_T, cos_TR, sin_TR,
        *q_THD.stride()[:2], *k_TGD.stride()[:2], *v_TGD.stride()[:2], *out_THD.stride()[:2], *cos_TR.stride(),
        *k_cache_PBGD.stride()[:3], *v_cache_PBGD.stride()[:3], k_scale, v_scale,
        Q_BLOCKS=q_blocks, HEADS=heads, KV_HEADS=k_TGD.shape[1], BLOCK_SIZE=k_cache_PBGD.shape[1],
        BLOCK_D=triton.next_power_of_2(head_dim), INTERLEAVED=interleaved, num_warps=4, **shape,
    )  # fmt: skip
    return out_THD
