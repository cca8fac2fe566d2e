"""A small random checkpoint of each family behind the public API, loaded once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

MODEL_TYPES = ("qwen2_5_vl", "smolvlm", "idefics3")


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Model type -> folder of its checkpoint."""
    from vlm.testing import tiny_checkpoint

    made: dict[str, Path] = {}

    def folder(model_type: str) -> Path:
        if model_type not in made:
            made[model_type] = tiny_checkpoint(model_type, tmp_path_factory.mktemp("tiny") / model_type)
        return made[model_type]

    return folder


@pytest.fixture(scope="session")
def models(tiny: Callable[[str], Path]) -> Iterator[Callable[..., Any]]:
    """(model type, device) -> a VLM in float32, closed at the end of the session."""
    from vlm import VLM

    made: dict[tuple[str, str], Any] = {}

    def model(model_type: str = "smolvlm", device: str = "cpu") -> Any:
        key = (model_type, device)
        if key not in made:
            made[key] = VLM(tiny(model_type), dtype="float32", device=device, max_model_len=1024, max_num_seqs=16)
        return made[key]

    yield model
    for vlm in made.values():
        vlm.close()


@pytest.fixture(scope="session")
def picture() -> Callable[..., Any]:
    from vlm.testing.parity import sample_image

    return sample_image
