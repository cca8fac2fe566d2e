"""The table of backends. A declaration is read without torch; its operation is imported when it is constructed.

To add one: a module here with `BACKEND`, a module with its operation, one line below, and its name in the rows of
table.py.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vlm.attention.capability import Backend

BACKENDS: dict[str, str] = {
    "flash_attn": "vlm.attention.backends.flash_attn",
    "torch_varlen": "vlm.attention.backends.torch_varlen",
    "torch_efficient": "vlm.attention.backends.torch_efficient",
    "triton": "vlm.attention.backends.triton",
    "sdpa": "vlm.attention.backends.sdpa",
}


def get_backend(name: str) -> Backend:
    """The declaration of a backend that is in the table."""
    backend: Backend = import_module(BACKENDS[name]).BACKEND
    return backend
