"""Decode attention: one query a sequence against a paged cache, the keys split over programs (device code).

Decoding is bound by reading the cache, so a program serves all query heads of one key/value head at once and keys are
split until every processor has work. Splits leave normalised partial results and their log-sum; a second kernel
weighs them together. With one split the first kernel writes the output itself.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vlm.kernels.flash import PLAIN_INTEGERS, attend, load_rows, start_softmax


@triton.jit(do_not_specialize=PLAIN_INTEGERS)
def decode_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, logsum_ptr, cu_q_ptr, len_k_ptr, table_ptr, sinks_ptr, spans_ptr,
    q_token, q_head, k_block, k_token, k_head, v_block, v_token, v_head, out_token, out_head, table_row,
    scale, softcap, v_scale, window, group, num_heads, num_splits,
    HEAD_DIM: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, ALIGN: tl.constexpr, WINDOWED: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr,
    SPANS: tl.constexpr, MIXED: tl.constexpr, SPLIT: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One split of the keys for BLOCK_H query heads of one key/value head of one sequence.

    Grid: (splits, heads / group blocks, sequences).

    Without MIXED, row i of q is the query of sequence i, and a sequence of length 0 (padding of a captured graph)
    gives zeros. With MIXED, `cu_q_ptr` says where rows are, and sequences with any other number of queries than one
    are left alone.
    With SPLIT, `out_ptr` is float32 (T, H, splits, D) and `logsum_ptr` float32 (T, H, splits), both contiguous.
    """
    split = tl.program_id(0)
    blocks_per_group = tl.cdiv(group, BLOCK_H)
    kv_head = tl.program_id(1) // blocks_per_group
    seq = tl.program_id(2)
    row = seq
    if MIXED:
        row = tl.load(cu_q_ptr + seq)
        if tl.load(cu_q_ptr + seq + 1) - row != 1:
            return
    len_k = tl.load(len_k_ptr + seq)
    in_group = (tl.program_id(1) % blocks_per_group) * BLOCK_H + tl.arange(0, BLOCK_H)
    head_mask = in_group < group
    heads = kv_head * group + in_group

    row = row.to(tl.int64)
    d0 = tl.arange(0, D0)
    q_ptr += row * (q_token * ALIGN)
    q0 = load_rows(q_ptr, heads * (q_head * ALIGN), head_mask, d0, HEAD_DIM, D0, True)
    acc0 = tl.zeros([BLOCK_H, D0], tl.float32)
    if D1 > 0:
        q1 = load_rows(q_ptr, heads * (q_head * ALIGN), head_mask, D0 + tl.arange(0, D1), HEAD_DIM, D0 + D1, True)
        acc1 = tl.zeros([BLOCK_H, D1], tl.float32)
    else:
        q1 = q0
        acc1 = acc0

    lo = 0
    q_pos = tl.zeros([BLOCK_H], tl.int32) + (len_k - 1)
    span_start = q_pos
    span_end = q_pos
    if WINDOWED:
        lo = tl.maximum(0, len_k - window)
    if SPANS == 1:  # a span may reach further back than the window; forward there is nothing yet
        start = tl.load(spans_ptr + 2 * row)
        end = tl.load(spans_ptr + 2 * row + 1)
        lo = tl.where(end > start, tl.minimum(lo, start), lo)
        span_start = tl.zeros([BLOCK_H], tl.int32) + start
        span_end = tl.zeros([BLOCK_H], tl.int32) + end
    lo = lo // BLOCK_N * BLOCK_N
    step = tl.cdiv(tl.cdiv(tl.maximum(len_k - lo, 0), BLOCK_N), num_splits) * BLOCK_N
    lo += split * step
    hi = tl.minimum(lo + step, len_k)

    peak, total = start_softmax(BLOCK_H, sinks_ptr, heads, head_mask, SINKS)
    if SINKS and SPLIT:  # noqa: SIM102 (the compiler decides the outer condition)
        if split > 0:  # the sink counts once
            peak = tl.full([BLOCK_H], -1.0e30, tl.float32)
            total = tl.zeros([BLOCK_H], tl.float32)
    k_ptr += kv_head.to(tl.int64) * (k_head * ALIGN)
    v_ptr += kv_head.to(tl.int64) * (v_head * ALIGN)
    table_ptr += seq.to(tl.int64) * table_row
    acc0, acc1, peak, total = attend(
        acc0, acc1, peak, total, q0, q1, lo, hi, len_k, q_pos, span_start, span_end,
        k_ptr, v_ptr, table_ptr, k_block, k_token, v_block, v_token, scale, softcap, window,
        HEAD_DIM, D0, D1, BLOCK_N, BLOCK_SIZE, ALIGN, True, WINDOWED, SOFTCAP, SPANS, True, DOT, PRECISION,
    )  # fmt: skip

    seen = total > 0.0
    norm = (v_scale / tl.where(seen, total, 1.0))[:, None]
    keep = head_mask
    if SPLIT:
        cell = (row * num_heads + heads) * num_splits + split
        logsum = tl.where(seen, peak + tl.log2(tl.where(seen, total, 1.0)), float("-inf"))
        tl.store(logsum_ptr + cell, logsum, mask=head_mask)
        out_rows = out_ptr + cell[:, None] * HEAD_DIM
        keep = keep & seen
    else:
        out_rows = out_ptr + row * (out_token * ALIGN) + heads[:, None] * (out_head * ALIGN)
    tl.store(
        out_rows + d0[None, :],
        (acc0 * norm).to(out_ptr.dtype.element_ty),
        mask=keep[:, None] & (d0[None, :] < HEAD_DIM),
    )
    if D1 > 0:
        d1 = D0 + tl.arange(0, D1)
        tl.store(
            out_rows + d1[None, :],
            (acc1 * norm).to(out_ptr.dtype.element_ty),
            mask=keep[:, None] & (d1[None, :] < HEAD_DIM),
        )


@triton.jit(do_not_specialize=PLAIN_INTEGERS)
def combine_kernel(
    part_ptr, logsum_ptr, out_ptr, cu_q_ptr, out_token, out_head, num_heads, num_splits,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr, ALIGN: tl.constexpr, MIXED: tl.constexpr,
):  # fmt: skip
    """Weigh the splits of one head of one sequence.

    Grid: (sequences, heads). Splits that saw no key were not written: they are not read.
    """
    seq = tl.program_id(0)
    head = tl.program_id(1)
    row = seq
    if MIXED:
        row = tl.load(cu_q_ptr + seq)
        if tl.load(cu_q_ptr + seq + 1) - row != 1:
            return
    row = row.to(tl.int64)
    s = tl.arange(0, BLOCK_S)
    d = tl.arange(0, BLOCK_D)
    cells = (row * num_heads + head) * num_splits + s
    logsum = tl.load(logsum_ptr + cells, mask=s < num_splits, other=float("-inf"))
    seen = logsum > float("-inf")
    weight = tl.exp2(logsum - tl.maximum(tl.max(logsum, 0), -1.0e30))
    part = tl.load(
        part_ptr + cells[:, None] * HEAD_DIM + d[None, :], mask=seen[:, None] & (d[None, :] < HEAD_DIM), other=0.0
    )
    total = tl.sum(weight, 0)
    out = tl.sum(part * weight[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    out_ptr += row * (out_token * ALIGN) + head * (out_head * ALIGN)
    tl.store(out_ptr + d, out.to(out_ptr.dtype.element_ty), mask=d < HEAD_DIM)
