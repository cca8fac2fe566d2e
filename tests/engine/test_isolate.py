"""A batch that fails is cut in halves until what fails stands alone."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence

import torch

from vlm.engine.isolate import run_in_halves
from vlm.errors import VLMError


def test_each_item_has_its_result_or_its_error() -> None:
    def run(items: Sequence[int]) -> list[int]:
        if any(i % 5 == 3 for i in items):
            raise ValueError(f"no {items}")
        return [10 * i for i in items]

    got = run_in_halves(run, list(range(9)), "counting")
    assert [r if isinstance(r, int) else type(r) for r in got] == [0, 10, 20, ValueError, 40, 50, 60, 70, ValueError]
    assert str(got[3]) == "no [3]"


def test_nothing_runs_for_no_items() -> None:
    assert run_in_halves(lambda items: [1 / 0], [], "nothing") == []


def test_a_failure_keeps_no_tensor_alive() -> None:
    """The frames of the failed try hold its tensors; the retry must find their memory free."""
    refs: list[weakref.ref[torch.Tensor]] = []
    alive_on_retry: list[bool] = []

    def run(items: Sequence[int]) -> list[int]:
        big = torch.zeros(10)
        if len(items) > 1:
            refs.append(weakref.ref(big))
            try:
                raise KeyError("inner")
            except KeyError:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB. GPU 0 ...") from None
        return list(items)

    def after_failure() -> None:
        alive_on_retry.append(refs[-1]() is not None)

    gc.disable()
    try:
        assert run_in_halves(run, [1, 2], "encoding", after_failure) == [1, 2]
    finally:
        gc.enable()
    assert alive_on_retry == [False]


def test_out_of_memory_says_what_to_do() -> None:
    def run(items: Sequence[int]) -> list[int]:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nmore")

    (error,) = run_in_halves(run, [1], "encoding images")
    assert isinstance(error, VLMError)
    assert "encoding images: CUDA out of memory; lower max_pixels" in str(error)
