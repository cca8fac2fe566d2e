from collections.abc import Iterator

import pytest
import torch

from vlm.testing.plugin import vlm_tiny_checkpoints, vlm_tiny_model

__all__ = ["vlm_tiny_checkpoints", "vlm_tiny_model"]


@pytest.fixture(autouse=True, scope="package")
def one_thread() -> Iterator[None]:
    """The tensors here are so small that handing them to threads costs ten times what the work does."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
