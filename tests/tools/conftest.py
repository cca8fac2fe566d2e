"""What makes the embedded model's pictures is a folder of scripts, not a package that installs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tools"))

if TYPE_CHECKING:
    from embedded.fonts import Face


@pytest.fixture(scope="session")
def face() -> Face:
    """The one face that is on every machine: Pillow's."""
    from embedded.fonts import BUILT_IN, Face

    return Face(BUILT_IN)


@pytest.fixture(scope="session")
def assets() -> Path:
    """The folder of the embedded model."""
    return ROOT / "vlm" / "assets" / "embedded"


@pytest.fixture(scope="session")
def chunk(face: Face) -> dict[str, Any]:
    """A small chunk of training data."""
    from embedded.pool import Maker

    return Maker([face], seed=1).chunk(5, singles=60, pairs=6)
