"""Which tokens a sequence has seen, on the device: what repetition, presence and frequency penalties read."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import torch

from vlm.engine.request import Sequence


class PenaltyState:
    """A slot a penalised sequence: `seen` (slots, V) bool over prompt and answer, `counts` (slots, V) over the answer.

    Tables are made when the first sequence needs them, and updated in place with the tokens just sampled, so that
    no step sends an answer back to the device.
    """

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self._shape = (num_slots, vocab_size)
        self._device = device
        self._seen: torch.Tensor | None = None
        self._counts: torch.Tensor | None = None
        self._free = list(range(num_slots))
        self._slots: dict[int, int] = {}

    def release(self, sequence: Sequence) -> None:
        """Forget a sequence; it may come back, and is then read again from its tokens."""
        if (slot := self._slots.pop(sequence.id, None)) is not None:
            self._free.append(slot)

    def apply(self, logits_PV: torch.Tensor, sequences: SequenceOf[Sequence]) -> torch.Tensor:
        """Penalised logits of the sequences, which all have a penalty, in float32."""
        seen_PV = self._rows(sequences)
        params = [s.request.params for s in sequences]
        repetition_P1 = self._column([p.repetition_penalty for p in params])
        penalised_PV = torch.where(logits_PV > 0, logits_PV / repetition_P1, logits_PV * repetition_P1)
        logits_PV = torch.where(seen_PV, penalised_PV, logits_PV)
        if self._counts is not None and any(p.counts for p in params):
            counts_PV = self._counts[self._slot_index(sequences)]
            presence_P1 = self._column([p.presence_penalty for p in params])
            frequency_P1 = self._column([p.frequency_penalty for p in params])
            logits_PV = logits_PV - presence_P1 * (counts_PV > 0) - frequency_P1 * counts_PV
        return logits_PV

    def record(self, sequences: SequenceOf[Sequence], tokens_P: torch.Tensor) -> None:
        """The sequences, whose rows `apply` has just read, took these tokens."""
        assert self._seen is not None
        index = self._slot_index(sequences)
        self._seen[index, tokens_P] = True
        if self._counts is not None:
            self._counts[index, tokens_P] += 1

    def _rows(self, sequences: SequenceOf[Sequence]) -> torch.Tensor:
        if self._seen is None:
            self._seen = torch.zeros(self._shape, dtype=torch.bool, device=self._device)
        if self._counts is None and any(s.request.params.counts for s in sequences):
            # Rows of sequences that are in already stay 0: they have no count penalty, or the table would exist.
            self._counts = torch.zeros(self._shape, dtype=torch.int32, device=self._device)
        for sequence in sequences:
            if sequence.id not in self._slots:
                self._enter(sequence)
        return self._seen[self._slot_index(sequences)]

    def _enter(self, sequence: Sequence) -> None:
        assert self._seen is not None
        assert self._free, "more penalised sequences than run at once"
        slot = self._slots[sequence.id] = self._free.pop()
        ids = torch.tensor(sorted({*sequence.request.token_ids, *sequence.output_ids}), device=self._device)
        self._seen[slot].zero_()
        self._seen[slot, ids] = True
        if self._counts is not None:
            output = torch.tensor(sequence.output_ids, dtype=torch.int64, device=self._device)
            self._counts[slot] = torch.bincount(output, minlength=self._shape[1]).to(torch.int32)

    def _slot_index(self, sequences: SequenceOf[Sequence]) -> torch.Tensor:
        return torch.tensor([self._slots[s.id] for s in sequences], device=self._device)

    def _column(self, values: list[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float32, device=self._device)[:, None]
