"""Hashes of blocks: equal where keys and values are, different wherever anything is that they depend on."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import torch

from vlm.engine.image_rows import ImageRows
from vlm.engine.prefix import block_hashes
from vlm.engine.request import Request, Sequence

Fake = SimpleNamespace
SIZE = 4


def sequence(request: Request, output: tuple[int, ...] = ()) -> Sequence:
    rows = ImageRows.find(request.token_ids, 5, [i.plan.num_tokens for i in request.images])
    return Sequence(request, 0, cast(Any, None), list(output), image_rows=rows)


def hashes(request: Request, count: int = 3, output: tuple[int, ...] = ()) -> list[bytes]:
    return list(block_hashes(sequence(request, output), SIZE, count))


def with_picture(fake: Fake, picture: Any, before: int = 3, **options: Any) -> Request:
    tokens = [*range(10, 10 + before), *[fake.IMAGE_TOKEN] * picture.plan.num_tokens, *range(30, 42)]
    request: Request = fake.request(0, tokens, [picture], **options)
    return request


def test_a_hash_covers_what_stands_before(fake: Fake) -> None:
    first = hashes(fake.request(0, range(10, 22)))
    assert len(set(first)) == 3
    assert hashes(fake.request(1, range(10, 22), max_tokens=3)) == first
    middle = hashes(fake.request(0, [10, 11, 12, 13, 77, *range(15, 22)]))
    assert middle[0] == first[0]
    assert not {*middle[1:]} & {*first}
    repeated = hashes(fake.request(0, [10, 11, 12, 13] * 3))
    assert len(set(repeated)) == 3


def test_positions_are_part_of_it(fake: Fake) -> None:
    request = fake.request(0, range(10, 22), dims=3)
    moved = request.positions.clone()
    moved[1, 7] += 1
    a, b = hashes(request), hashes(replace(request, positions=moved))
    assert a[0] == b[0]
    assert a[1] != b[1]
    assert a[2] != b[2]
    assert hashes(fake.request(0, range(10, 22))) != a


def test_different_pictures_under_one_text_share_what_stands_before_them_only(fake: Fake) -> None:
    a, b = (hashes(with_picture(fake, fake.image(value, 3), before=5), 4) for value in (300, 301))
    assert a[0] == b[0]
    assert not {*a[1:]} & {*b[1:]}
    assert hashes(with_picture(fake, fake.image(300, 3), before=5), 4) == a


def test_one_picture_under_other_settings_is_another(fake: Fake) -> None:
    request = with_picture(fake, fake.image(300, 3))
    other = replace(request, image_keys=(b"the same pixels, processed otherwise",))
    assert not {*hashes(request, 4)} & {*hashes(other, 4)}


def test_rows_of_a_picture_are_told_apart(fake: Fake) -> None:
    picture = fake.image(300, 12)
    request = fake.request(0, [fake.IMAGE_TOKEN] * 12, [picture])
    still = replace(request, positions=torch.zeros(12, dtype=torch.int64))
    assert len({*hashes(still)}) == 3


def test_keys_of_neighbours_do_not_run_together(fake: Fake) -> None:
    request = fake.request(0, [fake.IMAGE_TOKEN] * 2 + [9, 9], [fake.image(1, 1), fake.image(2, 1)])
    one, two = (hashes(replace(request, image_keys=keys), 1) for keys in ((b"ab", b"c"), (b"a", b"bc")))
    assert one != two


def test_behind_a_picture_without_a_key_nothing_is_shared(fake: Fake) -> None:
    assert len(hashes(with_picture(fake, fake.image(300, 3), before=5, keys=False), 4)) == 1
    assert len(hashes(fake.request(0, range(10, 26), keys=False), 4)) == 4


def test_an_answer_hashes_as_the_prompt_that_repeats_it(fake: Fake) -> None:
    for dims in (1, 3):
        answered = hashes(fake.request(0, range(10, 16), dims=dims), output=(50, 51, 52, 53, 54, 55))
        asked = hashes(fake.request(1, [*range(10, 16), *range(50, 56)], dims=dims))
        assert answered == asked


def test_hashes_are_kept_and_continued(fake: Fake) -> None:
    x = sequence(fake.request(0, range(10, 16)))
    first = list(block_hashes(x, SIZE, 1))
    x.output_ids += [50, 51]
    assert list(block_hashes(x, SIZE, 2))[:1] == first == x.block_hashes[:1]
    assert list(block_hashes(x, SIZE, 1)) == first
