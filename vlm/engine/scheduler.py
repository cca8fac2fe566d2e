"""Which tokens run in the next step: continuous batching over a paged cache. Pure data: no tensor, no model.

A step first takes one token of every sequence that is decoding, so that no prompt holds an answer up; what the token
budget leaves goes to prompts, in order of arrival. A prompt that is longer runs in chunks, a step each. Its blocks are
reserved as a whole when it is admitted, so that it never stops half-way for lack of them. When the blocks run out, the
youngest running sequence gives its own back and starts again later from what it has (recomputation); the oldest never
does, so that every request ends. With a prefix cache a sequence starts behind the longest beginning that full blocks
hold already, whoever computed them; it shares these and never writes to them, as it goes on in a block of its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container
from dataclasses import dataclass

from vlm.engine.blocks import BlockManager
from vlm.engine.prefix import block_hashes
from vlm.engine.request import Run, Sequence


@dataclass(frozen=True)
class Limits:
    """Budgets of a step.

    Attributes:
        max_num_seqs: sequences that run at once.
        max_batch_tokens: tokens of a step. No more sequences than this run at once, each having its share.
        max_image_values: pixel values that a step encodes. A larger image has the encoder to itself for a step.
    """

    max_num_seqs: int
    max_batch_tokens: int
    max_image_values: int

    @property
    def seats(self) -> int:
        """Sequences that run at once, each at least one token a step."""
        return min(self.max_num_seqs, self.max_batch_tokens)


@dataclass(frozen=True)
class Step:
    """What runs: sequences that decode first, then prompts; both in order of arrival."""

    runs: tuple[Run, ...]
    preempted: tuple[Sequence, ...] = ()

    @property
    def is_prefill(self) -> bool:
        """Whether it runs prompt tokens."""
        return any(not run.is_decode for run in self.runs)


@dataclass
class _Room:
    """What is left of a step's budgets."""

    tokens: int
    image_values: int
    encodes: bool = False


class Scheduler:
    """Sequences from arrival to end. Whoever calls `schedule` runs the step, then says `advance` and `remove`."""

    def __init__(
        self,
        blocks: BlockManager,
        limits: Limits,
        prefix_cache: bool = False,
        known_images: Container[bytes | None] = (),
    ) -> None:
        """`prefix_cache`: whether a sequence starts from blocks that hold what it begins with, where there are any.

        `known_images`: keys of the pictures whose features are at hand, so that they cost the encoder nothing.
        """
        self.blocks = blocks
        self.limits = limits
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.prefix_hits = 0
        self.prefix_tokens = 0
        self._prefix_cache = prefix_cache
        self._known_images = known_images

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
        decoding, preempted = self._decode()
        room = _Room(self.limits.max_batch_tokens - len(decoding), self.limits.max_image_values)
        chunks = self._prefill(room, admit=not preempted)
        runs = (*decoding, *chunks)
        assert runs or not self.has_work, "nothing runs, and somebody waits"
        return Step(runs, tuple(preempted)) if runs else None

    def advance(self, run: Run) -> None:
        """The run went well: its tokens are in the cache, and images whose tokens all are need no features any more."""
        sequence = run.sequence
        assert sequence.num_cached == run.start
        sequence.num_cached = run.stop
        for image in [i for i in sequence.features if sequence.image_rows.end(i) <= run.stop]:
            del sequence.features[image]
        if self._prefix_cache:
            self._register(sequence, run.start // self.blocks.block_size, run.stop // self.blocks.block_size)

    def disown(self, sequence: Sequence) -> None:
        """What the sequence has in the cache is no good: nobody is to start from it."""
        self.blocks.forget(sequence.block_table)

    def _register(self, sequence: Sequence, first: int, stop: int) -> None:
        """Blocks number first .. stop of the sequence are full now."""
        if stop > first:
            hashes = block_hashes(sequence, self.blocks.block_size, stop)
            for block, key in zip(sequence.block_table[first:stop], hashes[first:], strict=False):
                self.blocks.register(block, key)

    def _decode(self) -> tuple[list[Run], list[Sequence]]:
        """The last token of every answer that goes on, and who had to give way."""
        runs: list[Run] = []
        preempted: list[Sequence] = []
        at = 0
        while at < len(self.running):
            sequence = self.running[at]
            if not sequence.decoding:
                at += 1
            elif self._grow(sequence):
                runs.append(Run(sequence, sequence.num_cached, 1))
                at += 1
            else:
                assert len(self.running) > 1, "the oldest sequence does not fit in the cache alone"
                preempted.append(self._preempt_youngest())
        return runs, preempted

    def _prefill(self, room: _Room, admit: bool) -> list[Run]:
        """Chunks of prompts. Nobody overtakes: the first that does not get all that is left of it is the last.

        `admit`: whether waiting ones may start. Not where somebody just gave way: that one is the first to wait, and
        may fit again at once, where others have computed its prompt meanwhile.
        """
        runs: list[Run] = []
        unfinished = [s for s in self.running if not s.decoding]
        for sequence in unfinished:
            if not self._take_chunk(sequence, room, runs):
                return runs
        while admit and self.waiting and room.tokens and len(self.running) < self.limits.seats:
            sequence = self.waiting[0]
            if not self._reserve(sequence):
                break
            self.running.append(self.waiting.popleft())
            if not self._take_chunk(sequence, room, runs):
                break
        return runs

    def _take_chunk(self, sequence: Sequence, room: _Room, runs: list[Run]) -> bool:
        """Run as much of a prompt as the budgets allow; whether that was all of it."""
        start = sequence.num_cached
        stop = self._affordable(sequence, start, min(sequence.num_tokens, start + room.tokens), room)
        if stop > start:
            runs.append(Run(sequence, start, stop - start))
            room.tokens -= stop - start
        return stop == sequence.num_tokens

    def _affordable(self, sequence: Sequence, start: int, stop: int, room: _Room) -> int:
        """Where to stop so that the images up to there are within the encoder's budget; pays for them."""
        for piece in sequence.image_rows.pieces(start, stop):
            request = sequence.request
            if piece.image in sequence.features or request.key_of(piece.image) in self._known_images:
                continue
            cost = request.images[piece.image].pixels.numel()
            if room.encodes and cost > room.image_values:
                return max(start, sequence.image_rows.begin(piece.image))
            room.image_values -= cost
            room.encodes = True
        return stop

    def _reserve(self, sequence: Sequence) -> bool:
        """Take blocks for all that a sequence has, if one stays free for each running sequence to grow into."""
        found = self._find_prefix(sequence)
        count = self.blocks.blocks_for(sequence.num_tokens) - len(found)
        needed = count + self.blocks.count_free(found)
        if needed + len(self.running) > self.blocks.num_free:
            return False
        self.blocks.share(found)
        taken = self.blocks.allocate(count)
        assert taken is not None
        sequence.block_table = found + taken
        sequence.num_cached = len(found) * self.blocks.block_size
        if found and not sequence.admitted:
            self.prefix_hits += 1
            self.prefix_tokens += sequence.num_cached
        sequence.admitted = True
        return True

    def _find_prefix(self, sequence: Sequence) -> list[int]:
        """Blocks that hold what the sequence begins with. Its last token is left to run: its logits are needed."""
        if not self._prefix_cache:
            return []
        full = (sequence.num_tokens - 1) // self.blocks.block_size
        return self.blocks.find(block_hashes(sequence, self.blocks.block_size, full))

    def _grow(self, sequence: Sequence) -> bool:
        missing = self.blocks.blocks_for(sequence.num_tokens) - len(sequence.block_table)
        taken = self.blocks.allocate(missing)
        if taken is None:
            return False
        sequence.block_table += taken
        return True

    def _preempt_youngest(self) -> Sequence:
        sequence = self.running.pop()
        self._release(sequence)
        self.waiting.appendleft(sequence)
        return sequence

    def _release(self, sequence: Sequence) -> None:
        self.blocks.free(sequence.block_table)
        sequence.block_table = []
        sequence.num_cached = 0
        sequence.features.clear()
