"""The operations of the triton backend beyond the conformance test: Turing, fp8 caches. Interpreted, as in
test_interpreted.py, which starts the process for it; what needs no kernel runs anywhere."""

from __future__ import annotations

import os
from types import ModuleType
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from vlm.attention.factory import build, select
from vlm.attention.layout import LayerCache, PagedStep
from vlm.attention.platform import Platform
from vlm.attention.spec import AttentionSpec, Feature, Preference

needs_interpreter = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="runs in the process that test_interpreted.py starts"
)
DECODER: frozenset[Feature] = frozenset({"varlen", "causal", "paged"})
TURING, HOPPER = Platform.fake("cuda", (7, 5)), Platform.fake("cuda", (9, 0))


def make(platform: Platform, dtype: str = "float16", head_dim: int = 64, **changes: Any) -> tuple[AttentionSpec, Any]:
    features = DECODER | changes.pop("more", frozenset())
    spec = AttentionSpec("decoder", head_dim, 4, 2, dtype, features=features, **changes)
    return spec, build(select(spec, platform, Preference("triton", "this test"), False), spec, platform)


@pytest.mark.parametrize(
    ("platform", "changes", "through_torch"),
    [
        (TURING, {}, True),
        (TURING, {"dtype": "float32"}, True),
        (TURING, {"more": frozenset({"softcap"}), "softcap": 2.0}, False),
        (TURING, {"more": frozenset({"sliding_window"}), "window": 3}, False),
        (TURING, {"more": frozenset({"image_spans"})}, False),
        (HOPPER, {}, False),
        (Platform.fake("rocm", arch="gfx942"), {}, False),
    ],
)
def test_fresh_prompts_go_through_torch_where_triton_has_no_tensor_cores(
    platform: Platform, changes: dict[str, Any], through_torch: bool
) -> None:
    _, op = make(platform, **changes)
    assert (op._prompts is not None) is through_torch


@needs_interpreter
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("window", [None, 4])
def test_a_decoder_on_turing(
    dtype: str,
    window: int | None,
    monkeypatch: pytest.MonkeyPatch,
    flash_doubles: ModuleType,
    oracle: ModuleType,
    cases: ModuleType,
) -> None:
    """Its decode kernel has no matrix products; its fresh prompts are torch's, but for what torch cannot do."""
    calls = []

    def watched(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
        calls.append(args)
        out: tuple[torch.Tensor, ...] = flash_doubles.efficient(*args, **kwargs)
        return out

    monkeypatch.setattr(torch.ops.aten, "_efficient_attention_forward", watched)
    changes = {} if window is None else {"more": frozenset({"sliding_window"}), "window": window}
    spec, op = make(TURING, dtype, **changes)
    cache = cases.Cache(spec, sequences=3, blocks_each=5, block_size=4, device="cpu")
    errors = [cache.step(op, oracle.attend, lens) for lens in ((3, 1, 5), (1, 1, 1), (2, 4, 0), (1, 0, 1), (1, 1, 1))]
    assert max(errors) <= cases.TOLERANCE[dtype]
    assert len(calls) == (1 if window is None else 0)


@needs_interpreter
def test_an_fp8_cache_is_written_and_read(oracle: ModuleType) -> None:
    """Keys that fp8 holds exactly, so that the comparison is of the attention and not of the rounding."""
    spec, op = make(HOPPER, kv_cache_dtype="float8_e4m3fn")
    cache = LayerCache(*(torch.zeros(8, 4, 2, 64, dtype=torch.float8_e4m3fn) for _ in "kv"))
    torch.manual_seed(0)
    keys, values = (torch.randint(-8, 9, (14, 2, 64)).half() / 8 for _ in range(2))
    done = 0
    for new in (9, 1, 3, 1):
        step = PagedStep.build([new], [done + new], [[5, 1, 7, 2]], 4, "cpu")
        q = torch.randn(new, 4, 64).half()
        out = op(q, keys[done : done + new], values[done : done + new], cache, step)
        done += new
        expected = oracle.attend(q, keys[:done], values[:done], [new], [done], spec, True)
        assert float((out.float() - expected).abs().max()) <= 3e-3


def test_a_step_without_its_spans_is_a_mistake_of_ours() -> None:
    _, op = make(HOPPER, more=frozenset({"image_spans"}))
    cache = LayerCache(*(torch.zeros(2, 4, 2, 64, dtype=torch.float16) for _ in "kv"))
    empty = torch.empty(0, 4, 64, dtype=torch.float16)
    step = PagedStep.build([0], [0], [[0]], 4, "cpu")
    with pytest.raises(AssertionError, match="needs them in each step"):
        op(empty, empty[:, :2], empty[:, :2], cache, step)
