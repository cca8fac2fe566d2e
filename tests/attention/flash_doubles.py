"""The calling conventions of the FlashAttention packages on the CPU, to test adapters where those cannot run.

Signatures and meanings are those of the releases named in each function. Unknown arguments are errors, as they are
there.
"""

from __future__ import annotations

from itertools import pairwise
from types import ModuleType
from typing import Any

import torch


def _one(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    left: int,
    right: int,
    softcap: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """(L, H, D) against (S, K, D); a query at i sees keys i + S - L - left .. i + S - L + right, -1 being unbounded."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.float().repeat_interleave(groups, 1), v.float().repeat_interleave(groups, 1)
    scores = torch.einsum("lhd,shd->hls", q.float(), k) * scale
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    offset = torch.arange(k.shape[0])[None, :] - torch.arange(q.shape[0])[:, None] - (k.shape[0] - q.shape[0])
    hidden = torch.zeros(offset.shape, dtype=torch.bool)
    if left >= 0:
        hidden |= offset < -left
    if right >= 0:
        hidden |= offset > right
    scores = scores.masked_fill(hidden, float("-inf"))
    top = scores.amax(-1, keepdim=True).clamp(min=-1e30)
    weights = torch.exp(scores - top)
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + torch.exp(sinks.float()[:, None, None] - top)
    out = torch.einsum("hls,shd->lhd", weights / total.clamp(min=1e-30), v)
    return out.to(q.dtype)


def varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_q: torch.Tensor,
    cu_k: torch.Tensor,
    max_q: int,
    max_k: int,
    scale: float | None,
    causal: bool,
    window: tuple[int, int],
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """The kernel behind all of them, with the checks that a wrong call would fail."""
    assert q.dtype in {torch.float16, torch.bfloat16}
    assert q.shape[-1] % 8 == 0
    assert q.shape[-1] <= 256
    assert cu_q.dtype == cu_k.dtype == torch.int32
    assert len(cu_q) == len(cu_k)
    assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
    lengths_q, lengths_k = [(b - a).item() for a, b in pairwise(cu_q)], [(b - a).item() for a, b in pairwise(cu_k)]
    assert sum(lengths_q) == len(q)
    assert sum(lengths_k) == len(k) == len(v)
    assert max(lengths_q) <= max_q
    assert max(lengths_k) <= max_k
    if max_q == 1:
        assert min(lengths_q) == 1, "a bound of 1 makes FlashAttention-2 regroup its queries as one a sequence"
    left, right = window
    right = 0 if causal else right
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    parts = [
        _one(q[a:b], k[c:d], v[c:d], scale, left, right, softcap, sinks) if d > c else torch.zeros_like(q[a:b])
        for (a, b), (c, d) in zip(pairwise(cu_q.tolist()), pairwise(cu_k.tolist()), strict=True)
    ]
    return torch.cat(parts)


def torch_2_11(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    *,
    return_aux: Any = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
) -> torch.Tensor:
    """torch.nn.attention.varlen.varlen_attn of torch 2.11: causal is window (-1, 0)."""
    return varlen(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale, window_size == (-1, 0), window_size)


def torch_2_13(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    *,
    return_aux: Any = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    num_splits: int | None = None,
) -> torch.Tensor:
    """varlen_attn of torch 2.12 and 2.13: grouped heads must be announced."""
    assert enable_gqa or query.shape[1] == key.shape[1]
    assert block_table is None
    assert seqused_k is None
    assert cu_seq_k is not None
    return varlen(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale, window_size == (-1, 0), window_size)


def efficient(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    dropout_p: float,
    custom_mask_type: int,
    compute_log_sumexp: bool = False,
    *,
    scale: float | None = None,
    seqlen_k: torch.Tensor | None = None,
    window_size: int | None = None,
) -> tuple[torch.Tensor, ...]:
    """aten._efficient_attention_forward of torch 2.11 to 2.13: equal heads, one batch; rows without keys are NaN."""
    assert bias is None
    assert seqlen_k is None
    assert window_size is None
    assert dropout_p == 0.0
    assert custom_mask_type in {0, 2}
    assert cu_seqlens_q is not None
    assert cu_seqlens_k is not None
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    assert query.shape[0] == key.shape[0] == value.shape[0] == 1
    assert query.shape[2] == key.shape[2] == value.shape[2]
    assert all(x.stride(-1) == 1 and x.shape[-1] % 8 == 0 for x in (query, key, value))
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    right = 0 if custom_mask_type == 2 else -1
    out = query.new_full(query.shape[1:], float("nan"))
    for (a, b), (c, d) in zip(pairwise(cu_seqlens_q.tolist()), pairwise(cu_seqlens_k.tolist()), strict=True):
        assert b - a <= (max_seqlen_q or 0)
        blind = b - a if c == d else max(0, b - a - (d - c)) if right == 0 else 0
        if b - a > blind:
            out[a + blind : b] = _one(query[0, a:b], key[0, c:d], value[0, c:d], scale, -1, right, 0.0, None)[blind:]
    return out[None], query.new_empty(0), query.new_empty(0), query.new_empty(0)


def fa2_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None,
) -> torch.Tensor:
    """flash_attn 2.8: flash_attn_varlen_func."""
    assert dropout_p == 0.0
    assert block_table is None
    return varlen(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal, window_size, softcap
    )


def fa3_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Any = None,
    q_descale: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> torch.Tensor:
    """FlashAttention-3 and fa3-fwd 0.0.3: flash_attn_varlen_func, which has no block table."""
    return varlen(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal, window_size, softcap
    )


def fa3_fwd_varlen(*args: Any, **kwargs: Any) -> torch.Tensor:
    """fa3-fwd 0.0.3: built without float16 and without windows."""
    assert args[0].dtype == torch.bfloat16
    assert "window_size" not in kwargs
    return fa3_varlen(*args, **kwargs)


def fa3_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    cache_seqlens: torch.Tensor,
    page_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    max_seqlen_q: int,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
) -> torch.Tensor:
    """FlashAttention-3: flash_attn_with_kvcache over pages of any size, with packed queries."""
    assert cache_seqlens.dtype == page_table.dtype == torch.int32
    block = k_cache.shape[1]
    rows = [
        [int(page_table[i, p // block]) * block + p % block for p in range(length)]
        for i, length in enumerate(cache_seqlens.tolist())
    ]
    index = torch.tensor([row for sequence in rows for row in sequence])
    k, v = k_cache.flatten(0, 1)[index], v_cache.flatten(0, 1)[index]
    cu_k = torch.cat([torch.zeros(1, dtype=torch.int32), cache_seqlens.cumsum(0).int()])
    max_k = int(cache_seqlens.max())
    return varlen(q, k, v, cu_seqlens_q, cu_k, max_seqlen_q, max_k, softmax_scale, causal, window_size, softcap)


def fa4_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    qv: Any = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (None, None),
    learnable_sink: torch.Tensor | None = None,
    softcap: float = 0.0,
) -> tuple[torch.Tensor, None]:
    """flash-attn-4 4.0.0b36: None is an open side of a window, and the log-sum-exp comes with the output."""
    assert cu_seqlens_q is not None
    assert cu_seqlens_k is not None
    assert max_seqlen_q is not None
    assert max_seqlen_k is not None
    assert all(side is None or side >= 0 for side in window_size)
    window = tuple(-1 if side is None else side for side in window_size)
    return (
        varlen(
            q,
            k,
            v,
            cu_seqlens_q,
            cu_seqlens_k,
            max_seqlen_q,
            max_seqlen_k,
            softmax_scale,
            causal,
            window,
            softcap,
            learnable_sink,
        ),  # type: ignore[arg-type]
        None,
    )


def modules() -> dict[str, ModuleType]:
    """What sys.modules would hold, by import name."""
    out = {}
    for name, functions in {
        "flash_attn": {"flash_attn_varlen_func": fa2_varlen},
        "flash_attn.cute": {"flash_attn_varlen_func": fa4_varlen},
        "flash_attn_interface": {"flash_attn_varlen_func": fa3_varlen, "flash_attn_with_kvcache": fa3_kvcache},
        "fa3_fwd_interface": {"flash_attn_varlen_func": fa3_fwd_varlen},
    }.items():
        out[name] = ModuleType(name)
        vars(out[name]).update(functions)
    return out
