"""Which rows of which image stand at which tokens."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from vlm.engine.image_rows import NO_IMAGES, ImageRows, Piece

IMAGE = 5


def test_pieces_of_images_that_are_cut_anywhere() -> None:
    #        0  1      2      3  4      5      6      7
    ids = [9, IMAGE, IMAGE, 9, IMAGE, IMAGE, IMAGE, 9]
    rows = ImageRows.find(ids, IMAGE, [3, 2])
    assert rows.complete
    assert rows.pieces(0, 8) == [Piece(0, 0, 3), Piece(1, 0, 2)]
    assert rows.pieces(2, 6) == [Piece(0, 1, 3), Piece(1, 0, 1)]
    assert rows.pieces(0, 1) == rows.pieces(7, 8) == []
    assert rows.positions_in(2, 6) == (2, 4, 5)
    assert [(rows.begin(i), rows.end(i)) for i in (0, 1)] == [(1, 5), (5, 7)]


def test_placeholders_that_do_not_add_up() -> None:
    assert not ImageRows.find([IMAGE, 9], IMAGE, [2]).complete
    assert not ImageRows.find([IMAGE], IMAGE, []).complete
    assert ImageRows.find([1, 2], None, []).complete
    assert NO_IMAGES.pieces(0, 100) == []


@given(
    counts=st.lists(st.integers(1, 5), max_size=4),
    gaps=st.lists(st.integers(0, 3), min_size=21, max_size=21),
    cuts=st.lists(st.integers(0, 60)),
)
def test_chunks_of_any_size_take_every_row_once_in_order(counts: list[int], gaps: list[int], cuts: list[int]) -> None:
    ids: list[int] = []
    for gap in gaps[: sum(counts)]:
        ids += [9] * gap + [IMAGE]
    rows = ImageRows.find(ids, IMAGE, counts)
    borders = sorted({0, len(ids), *(c for c in cuts if c < len(ids))})
    seen = [
        (piece.image, row)
        for start, stop in pairwise(borders)
        for piece in rows.pieces(start, stop)
        for row in range(piece.first, piece.stop)
    ]
    assert seen == [(image, row) for image, count in enumerate(counts) for row in range(count)]
