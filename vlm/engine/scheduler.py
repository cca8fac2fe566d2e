"""Which sequences run in the next step: continuous batching over a paged cache. Pure data: no tensor, no model.

Two kinds of step. A prefill step takes waiting prompts whole, in order of arrival, as far as the budgets go; a
decode step adds one token to every running sequence. Prefill goes first, since a fuller batch decodes for the same
weights read, but not more than `max_prefill_streak` times in a row while somebody waits for a token. When the
blocks run out, the youngest running sequence gives its own back and starts again later from what it has
(recomputation); the oldest never does, so that every request ends.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from vlm.engine.blocks import BlockManager
from vlm.engine.request import Sequence


@dataclass(frozen=True)
class Limits:
    """Budgets of a step.

    Attributes:
        max_num_seqs: sequences that run at once.
        max_batch_tokens: prompt tokens of a prefill step. A longer prompt is not split: it has a step to itself.
        max_image_values: pixel values that a prefill step encodes. A larger request has a step to itself as well.
        max_prefill_streak: prefill steps in a row while running sequences wait.
    """

    max_num_seqs: int
    max_batch_tokens: int
    max_image_values: int
    max_prefill_streak: int = 4


@dataclass(frozen=True)
class Step:
    """The sequences of one step, in order of arrival; each runs its `new_tokens`."""

    sequences: tuple[Sequence, ...]
    is_prefill: bool
    preempted: tuple[Sequence, ...] = ()


class Scheduler:
    """Sequences from arrival to end. Whoever calls `schedule` runs the step, then says `advance` and `remove`."""

    def __init__(self, blocks: BlockManager, limits: Limits) -> None:
        self.blocks = blocks
        self.limits = limits
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self._prefill_streak = 0

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence. The caller has made sure that its prompt fits in the cache when alone."""
        assert sequence.num_tokens <= self.blocks.capacity, "a prompt that can never fit was admitted"
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence that has ended, for whatever reason, and free its blocks."""
        if sequence in self.running:
            self.running.remove(sequence)
        else:
            self.waiting.remove(sequence)
        self._release(sequence)

    def schedule(self) -> Step | None:
        """The next step, its blocks reserved; None when there is nothing to run."""
        decode_is_due = self.running and self._prefill_streak >= self.limits.max_prefill_streak
        if not decode_is_due and (admitted := self._admit()):
            self._prefill_streak += 1
            return Step(tuple(admitted), is_prefill=True)
        self._prefill_streak = 0
        return self._decode() if self.running else None

    def advance(self, step: Step) -> None:
        """The step ran: everything that its sequences had is in the cache."""
        for sequence in step.sequences:
            sequence.num_cached = sequence.num_tokens

    def _admit(self) -> list[Sequence]:
        admitted: list[Sequence] = []
        tokens = image_values = 0
        while self.waiting and len(self.running) < self.limits.max_num_seqs:
            sequence = self.waiting[0]
            tokens += sequence.num_tokens
            image_values += sequence.image_cost
            over = tokens > self.limits.max_batch_tokens or image_values > self.limits.max_image_values
            if (admitted and over) or not self._take_prompt_blocks(sequence):
                break
            self.running.append(self.waiting.popleft())
            admitted.append(sequence)
        return admitted

    def _take_prompt_blocks(self, sequence: Sequence) -> bool:
        """Reserve the prompt's blocks, if one stays free for each running sequence to grow into."""
        count = self.blocks.blocks_for(sequence.num_tokens)
        if self.running and count + len(self.running) > self.blocks.num_free:
            return False
        taken = self.blocks.allocate(count)
        if taken is None:
            return False
        sequence.block_table = taken
        return True

    def _decode(self) -> Step:
        scheduled: list[Sequence] = []
        preempted: list[Sequence] = []
        candidates = deque(self.running)
        while candidates:
            sequence = candidates.popleft()
            while not self._grow(sequence):
                victim = candidates.pop() if candidates else sequence
                self._preempt(victim)
                preempted.append(victim)
                if victim is sequence:
                    break
            else:
                scheduled.append(sequence)
        assert scheduled, "the oldest sequence does not fit in the cache alone"
        return Step(tuple(scheduled), is_prefill=False, preempted=tuple(preempted))

    def _grow(self, sequence: Sequence) -> bool:
        missing = self.blocks.blocks_for(sequence.num_tokens) - len(sequence.block_table)
        taken = self.blocks.allocate(missing)
        if taken is None:
            return False
        sequence.block_table += taken
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._release(sequence)
        self.waiting.appendleft(sequence)

    def _release(self, sequence: Sequence) -> None:
        self.blocks.free(sequence.block_table)
        sequence.block_table = []
        sequence.num_cached = 0
