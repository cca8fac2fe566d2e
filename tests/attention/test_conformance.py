"""What a backend declares is what it does: every backend x role x features x (dtype, head_dim).

What the flags accept constructs and matches a dense reference; what they refuse says why. On the CPU that runs sdpa;
on a GPU also triton, torch_varlen, torch_efficient, and flash_attn with the providers that import there. In a process
with TRITON_INTERPRET=1 (tests/attention/test_interpreted.py starts one) triton runs on the CPU, with an A100's tiles.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from itertools import accumulate
from types import ModuleType

import pytest
import torch

from vlm.attention.backends import BACKENDS
from vlm.attention.errors import AttentionBackendError
from vlm.attention.factory import build, select
from vlm.attention.layout import LayerCache, PagedStep, Segments
from vlm.attention.platform import KINDS, Platform
from vlm.attention.spec import ROLES, AttentionSpec, Decision, Feature, Preference, Role

BY_ROLE: dict[Role, frozenset[Feature]] = {
    "encoder": frozenset({"varlen"}),
    "decoder": frozenset({"varlen", "causal", "paged"}),
    "cross": frozenset({"varlen"}),
}
FEATURES: dict[str, tuple[frozenset[Feature], int | None, float | None]] = {
    "plain": (frozenset(), None, None),
    "causal": (frozenset({"causal"}), None, None),
    "window3": (frozenset({"sliding_window"}), 3, None),
    "window1": (frozenset({"sliding_window"}), 1, None),
    "causal-window4": (frozenset({"causal", "sliding_window"}), 4, None),
    "softcap": (frozenset({"softcap"}), None, 2.0),
    "sinks": (frozenset({"sinks"}), None, None),
    "all": (frozenset({"causal", "sliding_window", "softcap", "sinks"}), 5, 3.0),
    "image_spans": (frozenset({"image_spans"}), None, None),
    "image_spans-or-window4": (frozenset({"image_spans", "sliding_window"}), 4, None),
    "image_spans-and-window4": (frozenset({"image_spans", "sliding_window"}), 4, None),
}
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
SHAPES = [("float32", 20), ("float32", 72), ("float16", 64), ("float16", 88), ("bfloat16", 80), ("bfloat16", 256)]


def spec_of(role: Role, features: str, dtype: str, head_dim: int) -> AttentionSpec:
    extra, window, softcap = FEATURES[features]
    return AttentionSpec(
        role,
        head_dim,
        4,
        2,
        dtype,
        features=BY_ROLE[role] | extra,
        scale=None if head_dim != 72 else 0.3,  # not head_dim ** -0.5
        window=window,
        softcap=softcap,
        span_rule="and" if "-and-" in features else "or",
    )


def decide(backend: str, spec: AttentionSpec, platform: Platform) -> Decision | AttentionBackendError:
    try:
        return select(spec, platform, Preference(backend, "this test"), False)
    except AttentionBackendError as error:
        return error


@pytest.fixture(scope="module")
def here() -> dict[str, Platform]:
    """The machine behind each device name, detected once."""
    return {}


@pytest.mark.parametrize(("dtype", "head_dim"), SHAPES)
@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_accepted_is_computed_and_refused_is_explained(
    backend: str,
    role: Role,
    features: str,
    dtype: str,
    head_dim: int,
    device: str,
    here: dict[str, Platform],
    oracle: ModuleType,
    cases: ModuleType,
) -> None:
    interpreted = INTERPRETED and backend == "triton" and device == "cpu"
    if interpreted and dtype == "bfloat16":
        pytest.skip("the interpreter computes bfloat16 wrongly: it is tested on a GPU")
    platform = Platform.fake("cuda", (8, 0)) if interpreted else here.setdefault(device, Platform.detect(device))
    spec = spec_of(role, features, dtype, head_dim)
    decision = decide(backend, spec, platform)
    if isinstance(decision, AttentionBackendError):
        assert decision.rejected
        assert all(r.backend == backend and r.reason and r.reason in str(decision) for r in decision.rejected)
        assert backend != "sdpa" or "image_spans" in features, "sdpa is to serve everything but image spans"
        assert not interpreted or head_dim == 20 or (role != "decoder" and "image_spans" in features)
        return
    op = build(decision, spec, platform)
    if role == "decoder":
        cache = cases.Cache(spec, sequences=3, blocks_each=5, block_size=4, device=device)
        steps = [(3, 1, 5), (1, 1, 1), (2, 4, 0), (1, 6, 1), (1, 1, 1)]
        errors = [cache.step(op, oracle.attend, lens) for lens in steps]
    elif role == "cross":
        errors = [cases.run_segments(op, oracle.attend, spec, (3, 1, 4), (5, 7, 2), device)]
    else:
        errors = [cases.run_segments(op, oracle.attend, spec, lens, lens, device) for lens in ((5, 0, 7), (4, 4))]
    assert max(errors) <= cases.TOLERANCE[dtype]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_flags_and_constructors_agree_on_faked_machines(
    backend: str, role: Role, kind: str, monkeypatch: pytest.MonkeyPatch, flash_doubles: ModuleType
) -> None:
    """Whatever is accepted for a machine constructs here; only running it needs the machine."""
    for name, module in flash_doubles.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    importable = {
        "flash_attn": "2.8.3",
        "flash_attn.cute": "4.0.0",
        "fa3_fwd_interface": "0.0.3",
        "flash_attn_interface": "3.0.0",
    }
    accepted = 0
    for capability in ((7, 5), (8, 0), (9, 0), (10, 0)) if kind == "cuda" else (None,):
        platform = Platform.fake(kind, capability, importable=importable)
        for features in FEATURES:
            for dtype, head_dim in SHAPES:
                spec = spec_of(role, features, dtype, head_dim)
                decision = decide(backend, spec, platform)
                if isinstance(decision, AttentionBackendError):
                    assert decision.rejected
                else:
                    assert callable(build(decision, spec, platform))
                    accepted += 1
    kinds = {"sdpa": set(KINDS), "triton": {"cuda", "rocm", "xpu"}}
    assert bool(accepted) is (kind in kinds.get(backend, {"cuda"}))


REAL: dict[str, tuple[AttentionSpec, list[int], list[int]]] = {
    "qwen-vit-full": (spec_of("encoder", "plain", "bfloat16", 80), [1728, 1024, 1], []),
    "qwen-vit-window": (spec_of("encoder", "plain", "bfloat16", 80), [64] * 20 + [32, 16], []),
    "siglip": (spec_of("encoder", "plain", "bfloat16", 72), [729] * 3, []),
    "prefill": (spec_of("decoder", "plain", "bfloat16", 128), [700, 1, 300], [700, 1, 300]),
    "decode": (spec_of("decoder", "plain", "bfloat16", 128), [1, 1, 1], [3000, 17, 4097]),
    "chunk": (spec_of("decoder", "plain", "bfloat16", 128), [256, 1, 64], [1280, 900, 65]),
    "decode-window": (spec_of("decoder", "causal-window4", "bfloat16", 128), [1, 1, 1], [3000, 17, 4097]),
}


@pytest.mark.gpu
@pytest.mark.parametrize("case", REAL)
@pytest.mark.parametrize("backend", BACKENDS)
def test_real_lengths_against_float32(backend: str, case: str) -> None:
    """Lengths at which kernels split keys and schedule tiles, bf16 against sdpa in float32 on the same values."""
    platform = Platform.detect("cuda")
    spec, query_lens, kv_lens = REAL[case]
    decision = decide(backend, spec, platform)
    if isinstance(decision, AttentionBackendError):
        pytest.skip(str(decision.rejected[0].reason))
    exact_spec = replace(spec, dtype="float32")
    exact_decision = select(exact_spec, platform, Preference("sdpa", "this test"), False)
    op, exact = build(decision, spec, platform), build(exact_decision, exact_spec, platform)
    torch.manual_seed(0)
    tokens = sum(query_lens)
    q, k, v = (
        torch.randn(tokens, heads, spec.head_dim, device="cuda").bfloat16()
        for heads in (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
    )
    if not kv_lens:
        segments = Segments.packed(query_lens, "cuda")
        got, want = op(q, k, v, segments), exact(q.float(), k.float(), v.float(), segments)
    else:
        blocks = [-(-length // 16) for length in kv_lens]
        first = [0, *accumulate(blocks)]
        tables = [list(range(start, start + count)) for start, count in zip(first, blocks, strict=False)]
        step = PagedStep.build(query_lens, kv_lens, tables, 16, "cuda")
        keys, values = torch.randn(2, sum(blocks), 16, spec.num_kv_heads, spec.head_dim, device="cuda").bfloat16()
        got = op(q, k, v, LayerCache(keys.clone(), values.clone()), step)
        want = exact(q.float(), k.float(), v.float(), LayerCache(keys.float(), values.float()), step)
    assert bool(torch.isfinite(got).all())
    assert float((got.float() - want).abs().max()) <= 2e-2
