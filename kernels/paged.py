"""Attention over a paged KV cache: decode, chunked prefill and any mix of them, and the kernel that writes the cache.

One entry for every step of a decoder. Sequences with one new token go to the split-KV decode kernel, longer ones to
the tiled kernel; each kernel passes over the other's sequences on the device, so that nothing asks the device for a
length. A step in which every sequence has one row may be captured in a CUDA graph: rows of length 0 come out as zeros.

Legend: T query tokens, N sequences, H query heads, G key/value heads, D head_dim, P blocks of the cache, B tokens a
block.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vlm.kernels.decode import combine_kernel, decode_kernel
from vlm.kernels.flash import PLAIN_INTEGERS, flash_kernel
from vlm.kernels.launch import Scores, alignment, check_spans, strides
from vlm.kernels.reference import dense_attention, visible_keys
from vlm.kernels.tiles import Tile

# Largest absolute difference to the float32 twin on standard normal inputs, scale D ** -0.5.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2, torch.float8_e4m3fn: 4e-3}


def paged_attention(
    q_THD: torch.Tensor,
    k_cache_PBGD: torch.Tensor,
    v_cache_PBGD: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    kv_lens_N: torch.Tensor,
    block_tables: torch.Tensor,
    max_q: int,
    *,
    scale: float,
    prefill: Tile | None,
    decode: Tile,
    num_splits: int = 1,
    window: int | None = None,
    softcap: float | None = None,
    sinks_H: torch.Tensor | None = None,
    spans_T2: torch.Tensor | None = None,
    span_rule: str = "or",
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    has_decode: bool = True,
) -> torch.Tensor:
    """Causal attention of new tokens over a cache that already holds them. (T, H, D), contiguous.

    Args:
        q_THD: last dim contiguous, any strides before it.
        k_cache_PBGD, v_cache_PBGD: last dim contiguous; the dtype of q, or float8_e4m3fn (then multiplied by k_scale,
            v_scale).
        cu_seqlens_q: int32 (N + 1,). Not read where max_q is 1 and T is N: then row i belongs to sequence i.
        kv_lens_N: int32 (N,), keys per sequence, the new ones included. block_tables: int32 (N, max_blocks).
        max_q: the most new tokens of any sequence (host).
        prefill, decode: tiles from `tiles.flash_tile` and `tiles.decode_tile`; `prefill` may be None when max_q is 1.
        num_splits: parts that the keys of a decoding sequence are cut into, from `tiles.decode_splits`.
        window, softcap, sinks_H, spans_T2, span_rule: as in `varlen_attention`.
        has_decode: say False when no sequence of a mixed step has exactly one new token: saves a launch.

    Raises:
        ValueError: shapes or dtypes that do not fit together.
    """
    _check(q_THD, k_cache_PBGD, v_cache_PBGD, kv_lens_N, block_tables, max_q, window, spans_T2)
    out_THD = torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
    if out_THD.numel() == 0:
        return out_THD
    scores = Scores.of(scale * k_scale, softcap)
    q_THD = scores.oriented(q_THD)
    align = alignment(q_THD, k_cache_PBGD, v_cache_PBGD, out_THD)
    shared = {
        "scale": scores.scale,
        "softcap": scores.softcap,
        "v_scale": v_scale,
        "window": window or 0,
        "HEAD_DIM": q_THD.shape[2],
        "BLOCK_SIZE": k_cache_PBGD.shape[1],
        "ALIGN": align,
        "WINDOWED": window is not None,
        "SOFTCAP": softcap is not None,
        "SINKS": sinks_H is not None,
        "SPANS": check_spans(spans_T2, span_rule),
    }
    inputs = (q_THD, k_cache_PBGD, v_cache_PBGD)
    extras = (cu_seqlens_q, kv_lens_N, block_tables, sinks_H, spans_T2)
    if max_q > 1:
        if prefill is None:
            raise ValueError(f"max_q is {max_q}: a prefill tile is needed")
        _prefill(inputs, out_THD, extras, max_q, prefill, has_decode, shared)
    if has_decode or max_q == 1:
        mixed = max_q > 1 or q_THD.shape[0] != kv_lens_N.shape[0]
        _decode(inputs, out_THD, extras, mixed, decode, num_splits, shared)
    return out_THD


def _check(
    q_THD: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    kv_lens_N: torch.Tensor,
    block_tables: torch.Tensor,
    max_q: int,
    window: int | None,
    spans_T2: torch.Tensor | None,
) -> None:
    if k_cache.shape != v_cache.shape or k_cache.dtype != v_cache.dtype:
        raise ValueError(
            f"keys are {tuple(k_cache.shape)} {k_cache.dtype}, values {tuple(v_cache.shape)} {v_cache.dtype}"
        )
    if k_cache.dtype not in (q_THD.dtype, torch.float8_e4m3fn):
        raise ValueError(f"queries are {q_THD.dtype}, the cache is {k_cache.dtype}")
    if q_THD.shape[1] % k_cache.shape[2] or q_THD.shape[2] != k_cache.shape[3]:
        raise ValueError(f"queries {tuple(q_THD.shape)} do not fit a cache of {tuple(k_cache.shape)}")
    if max_q == 1 and q_THD.shape[0] > kv_lens_N.shape[0]:
        raise ValueError(f"{q_THD.shape[0]} rows for {kv_lens_N.shape[0]} sequences of at most one token")
    if block_tables.shape[0] != kv_lens_N.shape[0] or block_tables.stride(1) != 1:
        raise ValueError("block_tables needs one row a sequence, rows contiguous")
    if window is not None and window < 1:
        raise ValueError(f"a window holds at least the query itself, is {window}")
    if spans_T2 is not None and spans_T2.shape[0] != q_THD.shape[0]:
        raise ValueError(f"{spans_T2.shape[0]} spans for {q_THD.shape[0]} queries")


Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Extras = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]


def _prefill(
    inputs: Inputs, out_THD: torch.Tensor, extras: Extras, max_q: int, tile: Tile, has_decode: bool, shared: dict
) -> None:
    q_THD, k_cache, v_cache = inputs
    cu_seqlens_q, kv_lens_N, block_tables, sinks_H, spans_T2 = extras
    num_heads, align = q_THD.shape[1], shared["ALIGN"]
    num_tiles = triton.cdiv(max_q, tile.block_m)
    flash_kernel[(num_tiles * num_heads * kv_lens_N.shape[0],)](
        q_THD, k_cache, v_cache, out_THD, cu_seqlens_q, kv_lens_N, block_tables, sinks_H, spans_T2,
        *strides(align, q_THD, 0, 1), *strides(align, k_cache, 0, 1, 2), *strides(align, v_cache, 0, 1, 2),
        *strides(align, out_THD, 0, 1), block_tables.stride(0),
        group=num_heads // k_cache.shape[2], num_heads=num_heads, num_tiles=num_tiles,
        D0=tile.head[0], D1=tile.head[1], BLOCK_M=tile.block_m, BLOCK_N=tile.block_n,
        CAUSAL=True, SKIP_SINGLE=has_decode, PRECISION=tile.precision,
        num_warps=tile.num_warps, num_stages=tile.num_stages, **shared,
    )  # fmt: skip


def _decode(
    inputs: Inputs, out_THD: torch.Tensor, extras: Extras, mixed: bool, tile: Tile, num_splits: int, shared: dict
) -> None:
    q_THD, k_cache, v_cache = inputs
    cu_seqlens_q, kv_lens_N, block_tables, sinks_H, spans_T2 = extras
    tokens, num_heads, head_dim = q_THD.shape
    align, sequences = shared["ALIGN"], kv_lens_N.shape[0]
    group = num_heads // k_cache.shape[2]
    split = num_splits > 1
    target, logsum = out_THD, None
    if split:
        target = torch.empty(tokens, num_heads, num_splits, head_dim, dtype=torch.float32, device=q_THD.device)
        logsum = torch.empty(tokens, num_heads, num_splits, dtype=torch.float32, device=q_THD.device)
    # The window looks left only, and so does "and": a token that is decoded sees nothing to its right.
    spans = shared["SPANS"] if shared["SPANS"] == 1 and shared["WINDOWED"] else 0
    decode_kernel[(num_splits, k_cache.shape[2] * triton.cdiv(group, tile.block_m), sequences)](
        q_THD, k_cache, v_cache, target, logsum, cu_seqlens_q if mixed else None, kv_lens_N, block_tables, sinks_H,
        spans_T2 if spans else None,
        *strides(align, q_THD, 0, 1), *strides(align, k_cache, 0, 1, 2), *strides(align, v_cache, 0, 1, 2),
        *strides(align, out_THD, 0, 1), block_tables.stride(0),
        group=group, num_heads=num_heads, num_splits=num_splits,
        D0=tile.head[0], D1=tile.head[1], BLOCK_H=tile.block_m, BLOCK_N=tile.block_n,
        MIXED=mixed, SPLIT=split, DOT=tile.dot, PRECISION=tile.precision,
        num_warps=tile.num_warps, num_stages=tile.num_stages, **{**shared, "SPANS": spans},
    )  # fmt: skip
    if split:
        combine_kernel[(sequences, num_heads)](
            target, logsum, out_THD, cu_seqlens_q if mixed else None, *strides(align, out_THD, 0, 1),
            num_heads, num_splits, HEAD_DIM=head_dim, BLOCK_D=max(16, triton.next_power_of_2(head_dim)),
            BLOCK_S=triton.next_power_of_2(num_splits), ALIGN=align, MIXED=mixed, num_warps=4,
        )  # fmt: skip


def paged_attention_reference(
    q_THD: torch.Tensor,
    k_cache_PBGD: torch.Tensor,
    v_cache_PBGD: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    kv_lens_N: torch.Tensor,
    block_tables: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks_H: torch.Tensor | None = None,
    spans_T2: torch.Tensor | None = None,
    span_rule: str = "or",
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> torch.Tensor:
    """The plain-torch twin of `paged_attention`, in float32: gathers each sequence's blocks and attends densely."""
    out_THD = torch.zeros(q_THD.shape, dtype=torch.float32, device=q_THD.device)
    starts = cu_seqlens_q.tolist()
    for i, kv_len in enumerate(kv_lens_N.tolist()):
        start, end = starts[i], starts[i + 1]
        if start == end or kv_len == 0:
            continue
        blocks = block_tables[i].long()
        k_NGD = k_cache_PBGD.float()[blocks].flatten(0, 1)[:kv_len] * k_scale
        v_NGD = v_cache_PBGD.float()[blocks].flatten(0, 1)[:kv_len] * v_scale
        spans = None if spans_T2 is None else spans_T2[start:end]
        visible_MN = visible_keys(
            end - start, kv_len, causal=True, window=window, spans_M2=spans, span_rule=span_rule, device=q_THD.device
        )
        out_THD[start:end] = dense_attention(
            q_THD[start:end], k_NGD, v_NGD, visible_MN, scale=scale, softcap=softcap, sinks_H=sinks_H
        )
    return out_THD


@triton.jit(do_not_specialize=(*PLAIN_INTEGERS, "width"))
def write_kv_kernel(
    k_ptr, v_ptr, k_cache_ptr, v_cache_ptr, slots_ptr, k_token, k_head, v_token, v_head,
    k_block, k_slot, k_cache_head, v_block, v_slot, v_cache_head, k_scale, v_scale,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One new token: its keys and values into the slot of the cache; a negative slot is passed over."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    if slot < 0:
        return
    i = tl.arange(0, BLOCK)
    head, d = i // HEAD_DIM, i % HEAD_DIM
    mask = i < HEADS * HEAD_DIM
    block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    k = tl.load(k_ptr + token * k_token + head * k_head + d, mask=mask)
    v = tl.load(v_ptr + token * v_token + head * v_head + d, mask=mask)
    k_to = k_cache_ptr + block * k_block + offset * k_slot + head * k_cache_head + d
    v_to = v_cache_ptr + block * v_block + offset * v_slot + head * v_cache_head + d
    tl.store(k_to, (k.to(tl.float32) / k_scale).to(k_cache_ptr.dtype.element_ty), mask=mask)
    tl.store(v_to, (v.to(tl.float32) / v_scale).to(v_cache_ptr.dtype.element_ty), mask=mask)


def write_kv(
    k_TGD: torch.Tensor,
    v_TGD: torch.Tensor,
    k_cache_PBGD: torch.Tensor,
    v_cache_PBGD: torch.Tensor,
    slots_T: torch.Tensor,
    *,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """Write new keys and values into the cache at `slots_T`.

    slots_T: int64, block * block_size + offset; negative for padding, which is passed over. The cache may be
    float8_e4m3fn: values are divided by their scale first. Last dims contiguous. Raises ValueError on shapes.
    """
    if k_TGD.shape != v_TGD.shape or k_TGD.shape[1:] != k_cache_PBGD.shape[2:]:
        raise ValueError(
            f"keys {tuple(k_TGD.shape)}, values {tuple(v_TGD.shape)} for a cache of {tuple(k_cache_PBGD.shape)}"
        )
    tokens, heads, head_dim = k_TGD.shape
    if tokens == 0:
        return
    width = triton.next_power_of_2(heads * head_dim)
    write_kv_kernel[(tokens,)](
        k_TGD, v_TGD, k_cache_PBGD, v_cache_PBGD, slots_T, *k_TGD.stride()[:2], *v_TGD.stride()[:2],
        *k_cache_PBGD.stride()[:3], *v_cache_PBGD.stride()[:3], k_scale, v_scale,
        HEADS=heads, HEAD_DIM=head_dim, BLOCK_SIZE=k_cache_PBGD.shape[1], BLOCK=width,
        num_warps=min(8, max(1, width // 512)),
    )  # fmt: skip


def write_kv_reference(
    k_TGD: torch.Tensor,
    v_TGD: torch.Tensor,
    k_cache_PBGD: torch.Tensor,
    v_cache_PBGD: torch.Tensor,
    slots_T: torch.Tensor,
    *,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """The plain-torch twin of `write_kv`."""
    block_size = k_cache_PBGD.shape[1]
    for token, slot in enumerate(slots_T.tolist()):
        if slot >= 0:
            k_cache_PBGD[slot // block_size, slot % block_size] = (k_TGD[token].float() / k_scale).to(
                k_cache_PBGD.dtype
            )
            v_cache_PBGD[slot // block_size, slot % block_size] = (v_TGD[token].float() / v_scale).to(
                v_cache_PBGD.dtype
            )
