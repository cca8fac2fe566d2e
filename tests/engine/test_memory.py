"""How many blocks a device is worth."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from vlm.engine.memory import GIB, HOST_KV_BYTES, MemoryInfo, kv_budget, num_blocks, peak_bytes
from vlm.engine.scheduler import Limits
from vlm.engine.trial import working_bytes
from vlm.errors import UnsupportedModelError
from vlm.families.base import KVGeometry

GEOMETRY = KVGeometry(num_layers=4, num_kv_heads=2, head_dim=64)


def test_a_gpu_gives_what_the_fraction_leaves() -> None:
    memory = MemoryInfo(free=70 * GIB, total=80 * GIB)
    assert kv_budget(memory, 0.9, 2 * GIB, None) == (72 - 10 - 2) * GIB


def test_a_full_gpu_is_refused_with_the_numbers() -> None:
    memory = MemoryInfo(free=4 * GIB, total=80 * GIB)
    with pytest.raises(UnsupportedModelError, match=r"gpu_memory_fraction=0\.9 .* 80\.0 GiB, 76\.0 are in use"):
        kv_budget(memory, 0.9, 2 * GIB, None)


def test_shared_memory_has_a_fixed_budget_and_a_setting() -> None:
    assert kv_budget(None, 0.9, 0, None) == HOST_KV_BYTES
    assert kv_budget(None, 0.9, 0, 123) == 123


def test_blocks_are_bounded_by_what_sequences_can_fill() -> None:
    per_block = 2 * 4 * 2 * 64 * 4 * 16
    assert num_blocks(GEOMETRY, torch.float32, 16, 10 * per_block + 1, 64, 1024) == 10
    assert num_blocks(GEOMETRY, torch.float32, 16, 1 << 50, 8, 100) == 8 * 7


def test_a_budget_below_one_block_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="holds no block"):
        num_blocks(GEOMETRY, torch.float32, 16, 1000, 8, 100)


def test_the_trial_step_runs(fake: SimpleNamespace) -> None:
    """On the CPU there is nothing to measure; that the largest step can be run is what start-up on a GPU relies on."""
    model = fake.Model()
    limits = Limits(max_num_seqs=4, max_batch_tokens=50, max_image_values=100)
    image = fake.image(300, 2, num_values=30)
    assert working_bytes(model, limits, 64, image, (3,), torch.float32, torch.device("cpu")) == 0
    assert model.encoded == [3]
    assert model.rows == [4]


@pytest.mark.gpu
def test_peak_bytes_sees_what_is_allocated_and_freed() -> None:
    def trial() -> None:
        torch.empty(64 << 20, dtype=torch.uint8, device="cuda")

    assert 64 << 20 <= peak_bytes(torch.device("cuda"), trial) < 80 << 20
