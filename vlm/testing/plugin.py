"""pytest plugin: `-p vlm.testing.plugin` gives the fixtures `vlm_tiny_model` and `vlm_tiny_checkpoints`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def vlm_tiny_checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Model type -> the folder of its small random checkpoint, each made once a session. Do not write into it."""
    made: dict[str, Path] = {}

    def folder(family: str) -> Path:
        if family not in made:
            from vlm.testing.tiny import tiny_checkpoint

            made[family] = tiny_checkpoint(family, tmp_path_factory.mktemp("tiny") / family)
        return made[family]

    return folder


@pytest.fixture(scope="session")
def vlm_tiny_model(request: pytest.FixtureRequest, vlm_tiny_checkpoints: Callable[[str], Path]) -> Path:
    """The folder of a small random checkpoint: SmolVLM's, or of the model type that the test asks for:

    @pytest.mark.parametrize("vlm_tiny_model", ["qwen2_5_vl"], indirect=True)
    """
    return vlm_tiny_checkpoints(getattr(request, "param", "smolvlm"))
