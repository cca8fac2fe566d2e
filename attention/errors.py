"""The root of the error tree and the attention layer's own error.

They live here because this is the lowest layer that refuses a user's request; `vlm.errors` draws the whole tree and
is what users import from.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vlm.attention.spec import Rejection


class VLMError(Exception):
    """Base of every error that this package raises on purpose. The message says what was wrong and what to do."""


class AttentionBackendError(VLMError):
    """A configured attention backend cannot do the job, or no backend can.

    `rejected` holds one typed reason per backend that was passed over, in the order in which they were considered.
    """

    def __init__(self, message: str, rejected: Sequence[Rejection] = ()) -> None:
        super().__init__(message)
        self.rejected: tuple[Rejection, ...] = tuple(rejected)
