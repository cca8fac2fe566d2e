"""Where the image features of a prompt stand. Pure data: positions and row numbers.

The tokens of one image need not stand side by side (tiles have text between them), and a step may run any part of a
prompt: so a step asks which rows of which image belong to the tokens that it runs.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True)
class Piece:
    """Rows `first` .. `stop` of the features of image number `image`."""

    image: int
    first: int
    stop: int


@dataclass(frozen=True)
class ImageRows:
    """`positions` of all image tokens, ascending; the rows of image i are offsets[i] .. offsets[i + 1] of them."""

    positions: tuple[int, ...] = ()
    offsets: tuple[int, ...] = (0,)

    @classmethod
    def find(cls, token_ids: Sequence[int], image_token_id: int | None, counts: Sequence[int]) -> ImageRows:
        """`counts`: rows an image. They may fail to add up to the image tokens: see `complete`."""
        positions = tuple(at for at, token_id in enumerate(token_ids) if token_id == image_token_id)
        return cls(positions, (0, *accumulate(counts)))

    @property
    def complete(self) -> bool:
        """Whether there are as many image tokens as rows."""
        return len(self.positions) == self.offsets[-1]

    def positions_in(self, start: int, stop: int) -> tuple[int, ...]:
        """The image tokens among the tokens start .. stop."""
        return self.positions[bisect_left(self.positions, start) : bisect_left(self.positions, stop)]

    def pieces(self, start: int, stop: int) -> list[Piece]:
        """The rows that stand at the tokens start .. stop, in order."""
        row, end = bisect_left(self.positions, start), bisect_left(self.positions, stop)
        pieces: list[Piece] = []
        while row < end:
            image = bisect_right(self.offsets, row) - 1
            begin, following = self.offsets[image], self.offsets[image + 1]
            pieces.append(Piece(image, row - begin, min(end, following) - begin))
            row = following
        return pieces

    def begin(self, image: int) -> int:
        """Position of the first token of an image."""
        return self.positions[self.offsets[image]]

    def end(self, image: int) -> int:
        """Position after the last token of an image."""
        return self.positions[self.offsets[image + 1] - 1] + 1


NO_IMAGES = ImageRows()
