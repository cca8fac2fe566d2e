"""Dense attention of one sequence in float32: what the packed and the paged twins are made of. Slow, to be read.

Legend: M queries, N keys, H query heads, G key/value heads, D head_dim.
"""

from __future__ import annotations

import torch


def visible_keys(
    queries: int,
    keys: int,
    *,
    causal: bool = False,
    window: int | None = None,
    spans_M2: torch.Tensor | None = None,
    span_rule: str = "or",
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """(M, N) bool: which key each query sees. The last query stands at the last key.

    window: keys to the left, the query itself included (and as many to the right when not causal).
    spans_M2: start and end, in key positions, of the bidirectional span that a query belongs to; (0, 0) for none.
    span_rule: "or" for (causal and window) or span, "and" for (causal or span) and window, where the window looks
        left only.
    """
    q_M1 = torch.arange(queries, device=device)[:, None] + (keys - queries)
    k_1N = torch.arange(keys, device=device)[None, :]
    everything = torch.ones(queries, keys, dtype=torch.bool, device=device)
    left = everything if window is None else k_1N > q_M1 - window
    if not causal:
        return left if window is None else left & (k_1N < q_M1 + window)
    past = (k_1N <= q_M1) & everything
    if spans_M2 is None:
        return past & left
    inside = (k_1N >= spans_M2[:, :1]) & (k_1N < spans_M2[:, 1:])
    return (past & left) | inside if span_rule == "or" else (past | inside) & left


def dense_attention(
    q_MHD: torch.Tensor,
    k_NGD: torch.Tensor,
    v_NGD: torch.Tensor,
    visible_MN: torch.Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    sinks_H: torch.Tensor | None = None,
) -> torch.Tensor:
    """(M, H, D) in float32. A query that sees no key gives zeros."""
    group = q_MHD.shape[1] // k_NGD.shape[1]
    k_NHD = k_NGD.float().repeat_interleave(group, 1)
    v_NHD = v_NGD.float().repeat_interleave(group, 1)
    scores_HMN = torch.einsum("mhd,nhd->hmn", q_MHD.float(), k_NHD) * scale
    if softcap is not None:
        scores_HMN = softcap * torch.tanh(scores_HMN / softcap)
    scores_HMN = scores_HMN.masked_fill(~visible_MN, float("-inf"))
    if sinks_H is not None:
        sink_HM1 = sinks_H.float()[:, None, None].expand(-1, q_MHD.shape[0], 1)
        scores_HMN = torch.cat((scores_HMN, sink_HM1), dim=-1)
    weights_HMN = torch.softmax(scores_HMN, dim=-1).nan_to_num(0.0)
    return torch.einsum("hmn,nhd->mhd", weights_HMN[..., : k_NGD.shape[0]], v_NHD)
