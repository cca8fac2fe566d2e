"""Logits to tokens, for a whole batch at once on the device, with one transfer to the host a step.

Each sampled row consumes one uniform number, a hash of its request's seed and of the position in its answer: the same
request with the same seed gives the same answer, whatever else is in the batch and whichever device draws.

Row legend: R rows of the step, P penalised ones, S sampled (not greedy) ones, V vocabulary.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import torch

from vlm.engine.penalties import PenaltyState
from vlm.engine.request import Sequence
from vlm.outputs import TokenLogprobs

NO_TOKEN = -1


@dataclass(frozen=True)
class Sampled:
    """The token of one row, NO_TOKEN where its logits were not finite; `logprobs` where they were asked for."""

    token_id: int
    logprobs: TokenLogprobs | None = None


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits, the same on every machine."""
    digest = hashlib.blake2b(struct.pack("<QQ", seed % (1 << 64), position), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


class Sampler:
    def __init__(self, vocab_size: int, banned_ids: Iterable[int], max_num_seqs: int, device: torch.device) -> None:
        """`banned_ids` are never sampled, as the placeholders that stand for image features."""
        self._device = device
        banned = sorted(i for i in banned_ids if 0 <= i < vocab_size)
        self._banned = torch.tensor(banned, dtype=torch.int64, device=device)
        self._penalties = PenaltyState(max_num_seqs, vocab_size, device)

    def release(self, sequence: Sequence) -> None:
        """A sequence has left the running batch."""
        self._penalties.release(sequence)

    def __call__(self, logits_RV: torch.Tensor, sequences: SequenceOf[Sequence]) -> list[Sampled]:
        """One token a row. Row i belongs to sequences[i]."""
        logits_RV = logits_RV.float().index_fill(1, self._banned, float("-inf"))
        scores_RV = self._penalise(logits_RV, sequences)
        best_R, tokens_R = scores_RV.max(dim=-1)
        self._sample(scores_RV, tokens_R, sequences)
        self._record(tokens_R, sequences)
        # NaN and infinity propagate into the maximum.
        tokens = torch.where(best_R.isfinite(), tokens_R, NO_TOKEN).tolist()
        logprobs = self._logprobs(logits_RV, tokens, sequences)
        return [Sampled(token, logprobs.get(row)) for row, token in enumerate(tokens)]

    def _index(self, rows: list[int]) -> torch.Tensor:
        return torch.tensor(rows, dtype=torch.int64, device=self._device)

    def _penalise(self, logits_RV: torch.Tensor, sequences: SequenceOf[Sequence]) -> torch.Tensor:
        rows = [row for row, s in enumerate(sequences) if s.request.params.penalised]
        if not rows:
            return logits_RV
        index = self._index(rows)
        return logits_RV.index_copy(0, index, self._penalties.apply(logits_RV[index], [sequences[r] for r in rows]))

    def _record(self, tokens_R: torch.Tensor, sequences: SequenceOf[Sequence]) -> None:
        rows = [row for row, s in enumerate(sequences) if s.request.params.penalised]
        if rows:
            self._penalties.record([sequences[r] for r in rows], tokens_R[self._index(rows)])

    def _sample(self, scores_RV: torch.Tensor, tokens_R: torch.Tensor, sequences: SequenceOf[Sequence]) -> None:
        """Replace the tokens of the rows that are not greedy."""
        rows = [row for row, s in enumerate(sequences) if not s.request.params.greedy]
        if not rows:
            return
        params = [sequences[r].request.params for r in rows]
        draws = [uniform(sequences[r].seed, len(sequences[r].output_ids)) for r in rows]

        def column(values: list[float]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.float32, device=self._device)[:, None]

        index = self._index(rows)
        vocab_size = scores_RV.shape[1]
        tokens_S = sample_rows(
            scores_RV[index] / column([p.temperature for p in params]),
            top_k_S1=column([float(p.top_k or vocab_size) for p in params]),
            top_p_S1=column([p.top_p for p in params]),
            min_p_S1=column([p.min_p for p in params]),
            draws_S1=column(draws),
        )
        tokens_R[index] = tokens_S

    def _logprobs(
        self, logits_RV: torch.Tensor, tokens: list[int], sequences: SequenceOf[Sequence]
    ) -> dict[int, TokenLogprobs]:
        wanted = {r: s.request.params.logprobs for r, s in enumerate(sequences) if tokens[r] != NO_TOKEN}
        asked = {row: count for row, count in wanted.items() if count is not None}
        if not asked:
            return {}
        rows = list(asked)
        logprobs_AV = logits_RV[self._index(rows)].log_softmax(dim=-1)
        taken = logprobs_AV.gather(1, self._index([tokens[r] for r in rows])[:, None])[:, 0].tolist()
        values_AK, ids_AK = logprobs_AV.topk(min(max(asked.values()), logprobs_AV.shape[1]), dim=-1)
        values, ids = values_AK.tolist(), ids_AK.tolist()
        return {
            row: TokenLogprobs(tokens[row], taken[i], dict(zip(ids[i][: asked[row]], values[i], strict=False)))
            for i, row in enumerate(rows)
        }


def sample_rows(
    logits_SV: torch.Tensor,
    top_k_S1: torch.Tensor,
    top_p_S1: torch.Tensor,
    min_p_S1: torch.Tensor,
    draws_S1: torch.Tensor,
) -> torch.Tensor:
    """Draw one token a row by inverting the cumulated distribution at `draws_S1`, uniform in [0, 1).

    Filters apply in transformers' order: top-k, top-p over what is left, min-p. Each keeps a beginning of the row
    sorted by probability, and always its first. The sort is stable, so that equal logits fall the same way in every
    batch.
    """
    sorted_SV, ids_SV = logits_SV.sort(dim=-1, descending=True, stable=True)
    rank_V = torch.arange(sorted_SV.shape[1], device=sorted_SV.device)
    probs_SV = sorted_SV.masked_fill(rank_V >= top_k_S1, float("-inf")).softmax(dim=-1)
    before_SV = probs_SV.cumsum(dim=-1) - probs_SV
    keep_SV = (before_SV < top_p_S1) & (probs_SV >= min_p_S1 * probs_SV[:, :1]) & (rank_V < top_k_S1)
    keep_SV[:, 0] = True
    cumulated_SV = (probs_SV * keep_SV).cumsum(dim=-1)
    target_S1 = draws_S1 * cumulated_SV[:, -1:]
    # Rounding may put the target at the very end: the last kept token is then the one.
    last_S1 = keep_SV.sum(dim=-1, keepdim=True) - 1
    chosen_S1 = torch.minimum((cumulated_SV <= target_S1).sum(dim=-1, keepdim=True), last_S1)
    return ids_SV.gather(1, chosen_S1)[:, 0]
