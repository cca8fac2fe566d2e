"""Tiled attention with an online softmax: the device code that packed and paged attention share.

A program owns BLOCK_M query rows of one head and walks over the keys in tiles of BLOCK_N. Keys and values come either
packed (rows of one tensor) or through a block table. What a query may see is one mask (`visible`), so that
bidirectional, causal, windowed and span attention are the same code.

Legend: M query rows of a tile, N keys of a tile, D head_dim. A head that is no power of two is cut into two pieces,
D0 + D1 (80 = 64 + 16): two dot products for the scores and two accumulators cost less than padding to 128.

Strides arrive divided by ALIGN and are multiplied again here: this is how the compiler learns that rows start on
16-byte borders for heads such as 72 or 88, which it otherwise sees only for multiples of 16 and without which loads
are neither wide nor pipelined.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Launch arguments whose value changes from call to call: no kernel variant for a value that happens to be 1 or a
# multiple of 16.
PLAIN_INTEGERS = (
    "q_token", "q_head", "k_block", "k_token", "k_head", "v_block", "v_token", "v_head", "out_token", "out_head",
    "table_row", "window", "group", "num_heads", "num_tiles", "num_splits",
)  # fmt: skip


@triton.jit
def visible(
    rel, n, len_k, window, span_start, span_end, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, SPANS: tl.constexpr
):
    """(M, N) mask from `rel`, key position minus query position.

    SPANS: 0 none, 1 (causal and window) or span, 2 (causal or span) and window.
    """
    keep = n[None, :] < len_k
    if SPANS == 0:
        if CAUSAL:
            keep = keep & (rel <= 0)
        if WINDOWED:
            keep = keep & (rel > -window)
            if not CAUSAL:
                keep = keep & (rel < window)
    else:
        inside = (n[None, :] >= span_start[:, None]) & (n[None, :] < span_end[:, None])
        sees = rel <= 0
        if SPANS == 1:
            if WINDOWED:
                sees = sees & (rel > -window)
            keep = keep & (sees | inside)
        else:
            sees = sees | inside
            if WINDOWED:
                sees = sees & (rel > -window)
            keep = keep & sees
    return keep


@triton.jit
def load_rows(ptr, rows, row_mask, dims, HEAD_DIM: tl.constexpr, LAST: tl.constexpr, MASKED: tl.constexpr):
    """A (rows, dims) tile; rows beyond the sequence and dims beyond the head read as zero.

    LAST: one past the largest of `dims`.
    """
    ptrs = ptr + rows[:, None] + dims[None, :]
    if LAST > HEAD_DIM:
        if MASKED:
            tile = tl.load(ptrs, mask=row_mask[:, None] & (dims[None, :] < HEAD_DIM), other=0.0)
        else:
            tile = tl.load(ptrs, mask=dims[None, :] < HEAD_DIM, other=0.0)
    elif MASKED:
        tile = tl.load(ptrs, mask=row_mask[:, None], other=0.0)
    else:
        tile = tl.load(ptrs)
    return tile


@triton.jit
def scores(q, k, s, DOT: tl.constexpr, PRECISION: tl.constexpr):
    """s + q @ k^T. Without DOT by multiplying and adding, for GPUs where the compiler has no tensor cores."""
    if DOT:
        s = tl.dot(q, tl.trans(k), s, input_precision=PRECISION)
    else:
        s += tl.sum(q[:, None, :].to(tl.float32) * k[None, :, :].to(tl.float32), axis=2)
    return s


@triton.jit
def weighted(p, v, acc, DOT: tl.constexpr, PRECISION: tl.constexpr):
    """acc + p @ v."""
    if DOT:
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
    else:
        acc += tl.sum(p[:, :, None] * v[None, :, :].to(tl.float32), axis=1)
    return acc


@triton.jit
def attend(
    acc0, acc1, peak, total, q0, q1, lo, hi, len_k, q_pos, span_start, span_end,
    k_ptr, v_ptr, table_ptr, k_block, k_token, v_block, v_token, scale, softcap, window,
    HEAD_DIM: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    ALIGN: tl.constexpr, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, SOFTCAP: tl.constexpr, SPANS: tl.constexpr,
    MASKED: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Fold keys lo..hi into the running softmax (acc0, acc1, peak, total). `peak` is in units of log2.

    Without softcap, `scale` is scale * log2(e). With it, scores become softcap * tanh(score * scale / softcap), and
    `scale` is 2 log2(e) scale / softcap, `softcap` is log2(e) softcap: tanh(x) = 1 - 2 / (1 + e^2x) saturates on both
    sides, as the exponential goes to infinity or zero. BLOCK_SIZE 0: keys are packed.
    """
    d0 = tl.arange(0, D0)
    for start in tl.range(lo, hi, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        inside = n < len_k
        if BLOCK_SIZE > 0:
            if MASKED:
                block = tl.load(table_ptr + n // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
            else:
                block = tl.load(table_ptr + n // BLOCK_SIZE).to(tl.int64)
            slot = n % BLOCK_SIZE
            k_rows = block * (k_block * ALIGN) + slot * (k_token * ALIGN)
            v_rows = block * (v_block * ALIGN) + slot * (v_token * ALIGN)
            k_base = k_ptr
            v_base = v_ptr
        else:  # 64-bit arithmetic for the start of the tile only
            k_rows = tl.arange(0, BLOCK_N) * (k_token * ALIGN)
            v_rows = tl.arange(0, BLOCK_N) * (v_token * ALIGN)
            k_base = k_ptr + tl.cast(start, tl.int64) * (k_token * ALIGN)
            v_base = v_ptr + tl.cast(start, tl.int64) * (v_token * ALIGN)
        k0 = load_rows(k_base, k_rows, inside, d0, HEAD_DIM, D0, MASKED).to(q0.dtype)
        s = scores(q0, k0, tl.zeros([q0.shape[0], BLOCK_N], tl.float32), DOT, PRECISION)
        if D1 > 0:
            d1 = D0 + tl.arange(0, D1)
            k1 = load_rows(k_base, k_rows, inside, d1, HEAD_DIM, D0 + D1, MASKED).to(q0.dtype)
            s = scores(q1, k1, s, DOT, PRECISION)
        if SOFTCAP:
            s = softcap - 2.0 * softcap / (1.0 + tl.exp2(s * scale))
        if MASKED:
            keep = visible(n[None, :] - q_pos[:, None], n, len_k, window, span_start, span_end, CAUSAL, WINDOWED, SPANS)
            s = tl.where(keep, s, float("-inf"))
        if SOFTCAP:
            new_peak = tl.maximum(peak, tl.max(s, 1))
            p = tl.exp2(s - new_peak[:, None])
        else:
            # The multiplication goes into the fused multiply-add of the exponent.
            new_peak = tl.maximum(peak, tl.max(s, 1) * scale)
            p = tl.exp2(s * scale - new_peak[:, None])
        shrink = tl.exp2(peak - new_peak)
        total = total * shrink + tl.sum(p, 1)
        peak = new_peak
        v0 = load_rows(v_base, v_rows, inside, d0, HEAD_DIM, D0, MASKED).to(q0.dtype)
        acc0 = weighted(p, v0, acc0 * shrink[:, None], DOT, PRECISION)
        if D1 > 0:
            d1 = D0 + tl.arange(0, D1)
            v1 = load_rows(v_base, v_rows, inside, d1, HEAD_DIM, D0 + D1, MASKED).to(q0.dtype)
            acc1 = weighted(p, v1, acc1 * shrink[:, None], DOT, PRECISION)
    return acc0, acc1, peak, total


@triton.jit
def start_softmax(rows: tl.constexpr, sinks_ptr, heads, head_mask, SINKS: tl.constexpr):
    """(peak, total) before any key.

    A sink is a logit without a value; a finite floor keeps rows that see nothing free of NaN.
    """
    if SINKS:
        peak = tl.load(sinks_ptr + heads, mask=head_mask, other=0.0).to(tl.float32) * 1.4426950408889634
        total = tl.full([rows], 1.0, tl.float32)
    else:
        peak = tl.full([rows], -1.0e30, tl.float32)
        total = tl.zeros([rows], tl.float32)
    return peak, total


@triton.jit
def key_range(
    first, last, len_k, window, span_start, span_end, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, SPANS: tl.constexpr
):
    """Keys [lo, hi) that any query at a position in [first, last] can see."""
    lo = 0
    hi = len_k
    if CAUSAL:
        hi = tl.minimum(hi, last + 1)
    if WINDOWED:
        lo = tl.maximum(0, first - window + 1)
        if not CAUSAL:
            hi = tl.minimum(hi, last + window)
    if SPANS > 0:
        hi = tl.maximum(hi, tl.minimum(len_k, tl.max(span_end, 0)))
        if WINDOWED and SPANS == 1:
            lo = tl.minimum(lo, tl.min(tl.where(span_end > span_start, span_start, lo), 0))
    return lo, hi


@triton.jit(do_not_specialize=PLAIN_INTEGERS)
def flash_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, cu_q_ptr, len_k_ptr, table_ptr, sinks_ptr, spans_ptr,
    q_token, q_head, k_block, k_token, k_head, v_block, v_token, v_head, out_token, out_head, table_row,
    scale, softcap, v_scale, window, group, num_heads, num_tiles,
    HEAD_DIM: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, ALIGN: tl.constexpr, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr, SPANS: tl.constexpr, SKIP_SINGLE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of queries of one head of one sequence. Grid: num_tiles * num_heads * sequences, tiles fastest.

    `len_k_ptr` holds prefix sums (packed) or lengths (paged). SKIP_SINGLE leaves sequences with one query to the
    decode kernel.
    """
    pid = tl.program_id(0)
    tile = pid % num_tiles
    if CAUSAL:  # the long rows first, so that the last programs to run are short
        tile = num_tiles - 1 - tile
    head = (pid // num_tiles) % num_heads
    seq = pid // (num_tiles * num_heads)
    start_q = tl.load(cu_q_ptr + seq)
    len_q = tl.load(cu_q_ptr + seq + 1) - start_q
    if tile * BLOCK_M >= len_q:
        return
    if SKIP_SINGLE:  # noqa: SIM102 (the compiler decides the outer condition)
        if len_q == 1:
            return
    kv_head = head // group
    k_ptr += kv_head.to(tl.int64) * (k_head * ALIGN)
    v_ptr += kv_head.to(tl.int64) * (v_head * ALIGN)
    if BLOCK_SIZE > 0:
        len_k = tl.load(len_k_ptr + seq)
        table_ptr += seq.to(tl.int64) * table_row
    else:
        start_k = tl.load(len_k_ptr + seq)
        len_k = tl.load(len_k_ptr + seq + 1) - start_k
        k_ptr += start_k.to(tl.int64) * (k_token * ALIGN)
        v_ptr += start_k.to(tl.int64) * (v_token * ALIGN)

    m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    row_mask = m < len_q
    d0 = tl.arange(0, D0)
    start_m = start_q.to(tl.int64) + tile * BLOCK_M
    q_rows = tl.arange(0, BLOCK_M) * (q_token * ALIGN)
    q_ptr += start_m * (q_token * ALIGN) + head.to(tl.int64) * (q_head * ALIGN)
    q0 = load_rows(q_ptr, q_rows, row_mask, d0, HEAD_DIM, D0, True)
    acc0 = tl.zeros([BLOCK_M, D0], tl.float32)
    if D1 > 0:
        q1 = load_rows(q_ptr, q_rows, row_mask, D0 + tl.arange(0, D1), HEAD_DIM, D0 + D1, True)
        acc1 = tl.zeros([BLOCK_M, D1], tl.float32)
    else:
        q1 = q0
        acc1 = acc0

    shift = len_k - len_q  # the last query stands at the last key
    q_pos = m + shift
    first = tile * BLOCK_M + shift
    last = tl.minimum(tile * BLOCK_M + BLOCK_M, len_q) - 1 + shift
    span_start = q_pos
    span_end = q_pos
    if SPANS > 0:
        rows = 2 * (start_q.to(tl.int64) + m)
        span_start = tl.load(spans_ptr + rows, mask=row_mask, other=0)
        span_end = tl.load(spans_ptr + rows + 1, mask=row_mask, other=0)
    lo, hi = key_range(first, last, len_k, window, span_start, span_end, CAUSAL, WINDOWED, SPANS)
    peak, total = start_softmax(BLOCK_M, sinks_ptr, head + tl.zeros([BLOCK_M], tl.int32), row_mask, SINKS)
    if not WINDOWED and SPANS == 0:
        # Tiles that every row sees whole need no mask.
        if CAUSAL:
            whole = tl.maximum(tl.minimum(len_k, first + 1), 0) // BLOCK_N * BLOCK_N
        else:
            whole = len_k // BLOCK_N * BLOCK_N
        acc0, acc1, peak, total = attend(
            acc0, acc1, peak, total, q0, q1, 0, whole, len_k, q_pos, span_start, span_end,
            k_ptr, v_ptr, table_ptr, k_block, k_token, v_block, v_token, scale, softcap, window,
            HEAD_DIM, D0, D1, BLOCK_N, BLOCK_SIZE, ALIGN, CAUSAL, WINDOWED, SOFTCAP, SPANS, False, True, PRECISION,
        )  # fmt: skip
        lo = whole
    else:
        lo = lo // BLOCK_N * BLOCK_N
    acc0, acc1, peak, total = attend(
        acc0, acc1, peak, total, q0, q1, lo, hi, len_k, q_pos, span_start, span_end,
        k_ptr, v_ptr, table_ptr, k_block, k_token, v_block, v_token, scale, softcap, window,
        HEAD_DIM, D0, D1, BLOCK_N, BLOCK_SIZE, ALIGN, CAUSAL, WINDOWED, SOFTCAP, SPANS, True, True, PRECISION,
    )  # fmt: skip

    norm = (v_scale / tl.where(total == 0.0, 1.0, total))[:, None]
    out_ptr += start_m * (out_token * ALIGN) + head.to(tl.int64) * (out_head * ALIGN)
    out_rows = out_ptr + (tl.arange(0, BLOCK_M) * (out_token * ALIGN))[:, None]
    keep0 = row_mask[:, None] & (d0[None, :] < HEAD_DIM)
    tl.store(out_rows + d0[None, :], (acc0 * norm).to(out_ptr.dtype.element_ty), mask=keep0)
    if D1 > 0:
        d1 = D0 + tl.arange(0, D1)
        keep1 = row_mask[:, None] & (d1[None, :] < HEAD_DIM)
        tl.store(out_rows + d1[None, :], (acc1 * norm).to(out_ptr.dtype.element_ty), mask=keep1)
