"""For people who integrate a model: small random checkpoints, parity with the reference, fake machines.

Nothing is imported until it is used: transformers is the reference, and costs a second.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vlm.testing.parity import assert_parity
    from vlm.testing.platforms import fake_platform
    from vlm.testing.tiny import tiny_checkpoint

__all__ = ["assert_parity", "fake_platform", "tiny_checkpoint"]

_HOME = {
    "assert_parity": "vlm.testing.parity",
    "fake_platform": "vlm.testing.platforms",
    "tiny_checkpoint": "vlm.testing.tiny",
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
