"""Attention over packed sequences: encoders, fresh prompts and cross-attention.

Legend: T query tokens, S key tokens, N sequences, H query heads, G key/value heads, D head_dim.
"""

from __future__ import annotations

import torch
import triton

from vlm.kernels.flash import flash_kernel
from vlm.kernels.launch import Scores, alignment, check_spans, strides
from vlm.kernels.reference import dense_attention, visible_keys
from vlm.kernels.tiles import Tile

# Largest absolute difference to the float32 twin on standard normal inputs, scale D ** -0.5.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def varlen_attention(
    q_THD: torch.Tensor,
    k_SGD: torch.Tensor,
    v_SGD: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_q: int,
    *,
    scale: float,
    tile: Tile,
    causal: bool = False,
    window: int | None = None,
    softcap: float | None = None,
    sinks_H: torch.Tensor | None = None,
    spans_T2: torch.Tensor | None = None,
    span_rule: str = "or",
) -> torch.Tensor:
    """Attention of each sequence's queries over the same sequence's keys. (T, H, D), contiguous, in the dtype of q.

    Args:
        q_THD, k_SGD, v_SGD: float16, bfloat16 or float32; last dim contiguous, any strides before it (views of a
            fused QKV). H is a multiple of G.
        cu_seqlens_q, cu_seqlens_k: int32 (N + 1,) prefix sums. The same tensor for self-attention; sequences may be
            empty, and queries without keys give zeros.
        max_q: the longest sequence of queries (host).
        scale: multiplies the scores; any number.
        tile: from `tiles.flash_tile`.
        causal: the last query of a sequence stands at its last key (bottom right).
        window: keys to the left that a query sees, itself included; as many to the right when not causal. 1 is a
            window.
        softcap: scores become softcap * tanh(score / softcap).
        sinks_H: one logit a head that joins the softmax without a value.
        spans_T2: int32, start and end of the bidirectional span that a query belongs to, as key positions in its
            sequence; (0, 0) for none. Needs causal.
        span_rule: "or": (causal and window) or span. "and": (causal or span) and window, where the window bounds the
            left side.

    Raises:
        ValueError: shapes or dtypes that do not fit together.
    """
    _check(q_THD, k_SGD, v_SGD, causal, window, spans_T2)
    out_THD = torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
    if out_THD.numel() == 0 or max_q == 0:
        return out_THD
    scores = Scores.of(scale, softcap)
    q_THD = scores.oriented(q_THD)
    align = alignment(q_THD, k_SGD, v_SGD, out_THD)
    num_heads = q_THD.shape[1]
    num_tiles = triton.cdiv(max_q, tile.block_m)
    flash_kernel[(num_tiles * num_heads * (cu_seqlens_q.shape[0] - 1),)](
        q_THD, k_SGD, v_SGD, out_THD, cu_seqlens_q, cu_seqlens_k, None, sinks_H, spans_T2,
        *strides(align, q_THD, 0, 1), 0, *strides(align, k_SGD, 0, 1), 0, *strides(align, v_SGD, 0, 1),
        *strides(align, out_THD, 0, 1), 0,
        scores.scale, scores.softcap, 1.0, window or 0, num_heads // k_SGD.shape[1], num_heads, num_tiles,
        HEAD_DIM=q_THD.shape[2], D0=tile.head[0], D1=tile.head[1], BLOCK_M=tile.block_m, BLOCK_N=tile.block_n,
        BLOCK_SIZE=0, ALIGN=align, CAUSAL=causal, WINDOWED=window is not None, SOFTCAP=softcap is not None,
        SINKS=sinks_H is not None, SPANS=check_spans(spans_T2, span_rule), SKIP_SINGLE=False, PRECISION=tile.precision,
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    return out_THD


def _check(
    q_THD: torch.Tensor,
    k_SGD: torch.Tensor,
    v_SGD: torch.Tensor,
    causal: bool,
    window: int | None,
    spans_T2: torch.Tensor | None,
) -> None:
    if k_SGD.shape != v_SGD.shape or q_THD.shape[1] % k_SGD.shape[1] or q_THD.shape[2] != k_SGD.shape[2]:
        raise ValueError(f"queries {tuple(q_THD.shape)}, keys {tuple(k_SGD.shape)}, values {tuple(v_SGD.shape)}")
    if not q_THD.dtype == k_SGD.dtype == v_SGD.dtype or q_THD.dtype not in TOLERANCE:
        raise ValueError(f"queries are {q_THD.dtype}, keys {k_SGD.dtype}, values {v_SGD.dtype}")
    if window is not None and window < 1:
        raise ValueError(f"a window holds at least the query itself, is {window}")
    if spans_T2 is not None and (not causal or spans_T2.shape[0] != q_THD.shape[0]):
        raise ValueError(f"{spans_T2.shape[0]} spans for {q_THD.shape[0]} queries, causal={causal}")


def varlen_attention_reference(
    q_THD: torch.Tensor,
    k_SGD: torch.Tensor,
    v_SGD: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    *,
    scale: float,
    causal: bool = False,
    window: int | None = None,
    softcap: float | None = None,
    sinks_H: torch.Tensor | None = None,
    spans_T2: torch.Tensor | None = None,
    span_rule: str = "or",
) -> torch.Tensor:
    """The plain-torch twin of `varlen_attention`, in float32: one dense softmax a sequence."""
    out_THD = torch.zeros(q_THD.shape, dtype=torch.float32, device=q_THD.device)
    starts_q, starts_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for i in range(len(starts_q) - 1):
        q, k = slice(starts_q[i], starts_q[i + 1]), slice(starts_k[i], starts_k[i + 1])
        if q.start == q.stop:
            continue
        visible_MN = visible_keys(
            q.stop - q.start,
            k.stop - k.start,
            causal=causal,
            window=window,
            spans_M2=None if spans_T2 is None else spans_T2[q],
            span_rule=span_rule,
            device=q_THD.device,
        )
        out_THD[q] = dense_attention(
            q_THD[q], k_SGD[k], v_SGD[k], visible_MN, scale=scale, softcap=softcap, sinks_H=sinks_H
        )
    return out_THD
