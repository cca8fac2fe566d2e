"""Run a batch so that what fails is found and the rest still gets its result."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

from vlm.engine.memory import is_out_of_memory
from vlm.errors import VLMError

log = logging.getLogger(__name__)
Item = TypeVar("Item")
Result = TypeVar("Result")


def run_in_halves(
    run: Callable[[Sequence[Item]], Sequence[Result]],
    items: Sequence[Item],
    what: str,
    after_failure: Callable[[], None] = lambda: None,
) -> list[Result | Exception]:
    """One result an item, in order; an item that fails even alone has its exception instead.

    A batch that raises is run again in halves: too large a batch for the memory gets smaller, and one bad item ends
    up alone. `after_failure` runs before each retry, once the frames of the failure, and the tensors in them, are
    gone.
    """
    if not items:
        return []
    try:
        return list(run(items))
    except Exception as error:
        log.debug("%s failed on %d items", what, len(items), exc_info=True)
        failure = _without_frames(error, what)
    after_failure()
    if len(items) == 1:
        return [failure]
    log.warning("%s failed on a batch of %d (%s); trying again in halves", what, len(items), failure)
    half = len(items) // 2
    first = run_in_halves(run, items[:half], what, after_failure)
    return first + run_in_halves(run, items[half:], what, after_failure)


def _without_frames(error: Exception, what: str) -> Exception:
    """The error without its traceback, whose frames would keep the failed batch's tensors alive."""
    if is_out_of_memory(error):
        detail = str(error).split("\n", 1)[0].split(". ", 1)[0]
        return VLMError(f"out of memory in {what}: {detail}; lower max_pixels, max_batch_tokens or gpu_memory_fraction")
    error.__context__ = error.__cause__ = None
    return error.with_traceback(None)
