"""The adapters of packed kernels, over doubles with the calling conventions of the real packages."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.nn.attention.varlen

from vlm.attention.backends import packed
from vlm.attention.errors import AttentionBackendError
from vlm.attention.factory import build, select
from vlm.attention.layout import LayerCache, PagedStep, Segments
from vlm.attention.platform import Platform
from vlm.attention.spec import AttentionSpec, Feature, Preference

VARLEN: frozenset[Feature] = frozenset({"varlen"})
SPECS = {
    "encoder": AttentionSpec("encoder", 24, 4, 4, "bfloat16", features=VARLEN),
    "encoder-gqa-scale": AttentionSpec("encoder", 72, 4, 2, "bfloat16", features=VARLEN, scale=0.2),
    "encoder-causal": AttentionSpec("encoder", 24, 4, 2, "bfloat16", features=VARLEN | {"causal"}),
    "encoder-window": AttentionSpec("encoder", 24, 4, 2, "bfloat16", features=VARLEN | {"sliding_window"}, window=1),
    "encoder-causal-window": AttentionSpec(
        "encoder", 24, 4, 2, "bfloat16", features=VARLEN | {"causal", "sliding_window"}, window=3
    ),
    "encoder-softcap": AttentionSpec("encoder", 24, 4, 2, "bfloat16", features=VARLEN | {"softcap"}, softcap=2.0),
    "encoder-sinks": AttentionSpec("encoder", 24, 4, 2, "bfloat16", features=VARLEN | {"sinks"}),
    "cross": AttentionSpec("cross", 24, 4, 2, "bfloat16", features=VARLEN),
    "cross-causal": AttentionSpec("cross", 24, 4, 2, "bfloat16", features=VARLEN | {"causal"}),
    "decoder": AttentionSpec("decoder", 24, 4, 2, "bfloat16", features=VARLEN | {"causal", "paged"}),
    "decoder-window": AttentionSpec(
        "decoder", 24, 4, 2, "bfloat16", features=VARLEN | {"causal", "paged", "sliding_window"}, window=3
    ),
    "decoder-softcap": AttentionSpec(
        "decoder", 24, 4, 2, "bfloat16", features=VARLEN | {"causal", "paged", "softcap"}, softcap=2.0
    ),
    "decoder-float16": AttentionSpec("decoder", 24, 4, 4, "float16", features=VARLEN | {"causal", "paged"}),
}
# What runs: torch's function by release, or a provider of flash_attn with a chip on which it is the one that is chosen.
PROVIDERS = {
    "torch-2.11": ("torch_varlen", (8, 0), "torch_2_11"),
    "torch-2.13": ("torch_varlen", (8, 0), "torch_2_13"),
    "torch-efficient": ("torch_efficient", (8, 0), "efficient"),
    "fa2": ("flash_attn", (8, 0), "flash_attn"),
    "fa3": ("flash_attn", (9, 0), "flash_attn_interface"),
    "fa3-fwd": ("flash_attn", (9, 0), "fa3_fwd_interface"),
    "fa4": ("flash_attn", (10, 0), "flash_attn.cute"),
}


# What each refuses, by the part of the spec's name that says why.
REFUSED = {
    "torch-2.11": {"softcap": "feature:softcap", "sinks": "feature:sinks"},
    "torch-2.13": {"softcap": "feature:softcap", "sinks": "feature:sinks"},
    "torch-efficient": {
        "softcap": "feature:softcap",
        "sinks": "feature:sinks",
        "window": "feature:sliding_window",
        "cross-causal": r"feature:causal \(not in cross-attention",
    },
    "fa2": {"sinks": "feature:sinks"},
    "fa3": {"sinks": "feature:sinks"},
    "fa3-fwd": {"sinks": "feature:sinks", "window": "feature:sliding_window", "float16": "dtype: float16"},
    "fa4": {},
}


def machine(provider: str, monkeypatch: pytest.MonkeyPatch, doubles: ModuleType) -> tuple[str, Platform]:
    """A backend, and a faked machine with exactly one thing that provides it."""
    backend, capability, name = PROVIDERS[provider]
    if backend == "torch_varlen":
        monkeypatch.setattr(torch.nn.attention.varlen, "varlen_attn", getattr(doubles, name))
        return backend, Platform.fake("cuda", capability)
    if backend == "torch_efficient":
        monkeypatch.setattr(torch.ops.aten, "_efficient_attention_forward", doubles.efficient)
        return backend, Platform.fake("cuda", capability)
    monkeypatch.setitem(sys.modules, name, doubles.modules()[name])
    return backend, Platform.fake("cuda", capability, importable={name: "9.0"})


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("provider", PROVIDERS)
def test_an_adapter_says_to_its_package_what_the_spec_means(
    provider: str,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    flash_doubles: ModuleType,
    oracle: ModuleType,
    cases: ModuleType,
) -> None:
    spec = SPECS[name]
    backend, platform = machine(provider, monkeypatch, flash_doubles)
    refusal = next((reason for part, reason in REFUSED[provider].items() if part in name), None)
    if refusal is not None:
        with pytest.raises(AttentionBackendError, match=refusal):
            select(spec, platform, Preference(backend, "this test"), False)
        return
    op = build(select(spec, platform, Preference(backend, "this test"), False), spec, platform)
    if spec.role == "decoder":
        cache = cases.Cache(spec, sequences=4, blocks_each=5, block_size=4, device="cpu")
        steps = [(3, 1, 5, 2), (1, 1, 1, 1), (2, 4, 0, 1), (1, 6, 1, 0), (1, 1, 1, 1)]
        errors = [cache.step(op, oracle.attend, lens) for lens in steps]
    elif spec.role == "cross":
        pairs = [((3, 1, 4), (5, 7, 2)), ((1, 0, 1), (3, 2, 4)), ((2, 2), (0, 3)), ((5,), (2,))]
        errors = [cases.run_segments(op, oracle.attend, spec, q, k, "cpu") for q, k in pairs]
    else:
        errors = [
            cases.run_segments(op, oracle.attend, spec, lens, lens, "cpu")
            for lens in ((5, 0, 7), (4, 4), (1, 0, 1), (1, 1))
        ]
    assert max(errors) <= cases.TOLERANCE[spec.dtype]


@pytest.mark.parametrize("provider", PROVIDERS)
def test_nothing_to_attend_to_is_zeros_without_a_call(
    provider: str, monkeypatch: pytest.MonkeyPatch, flash_doubles: ModuleType
) -> None:
    backend, platform = machine(provider, monkeypatch, flash_doubles)
    spec = SPECS["cross"]
    op = build(select(spec, platform, Preference(backend, "this test"), False), spec, platform)
    q = torch.randn(3, 4, 24, dtype=torch.bfloat16)
    none = torch.empty(0, 2, 24, dtype=torch.bfloat16)
    assert torch.equal(op(q, none, none, Segments.cross([3], [0], "cpu")), torch.zeros_like(q))
    assert op(q[:0], none, none, Segments.cross([0], [0], "cpu")).shape == (0, 4, 24)


def test_plain_decoding_takes_the_decode_path_of_the_kernel(
    monkeypatch: pytest.MonkeyPatch, flash_doubles: ModuleType
) -> None:
    """FlashAttention-2 groups the heads of a key only without mask and window: one new token needs neither."""
    windows = []

    def watched(*args: object, **kwargs: object) -> torch.Tensor:
        windows.append(kwargs["window_size"])
        result: torch.Tensor = flash_doubles.torch_2_11(*args, **kwargs)
        return result

    monkeypatch.setattr(torch.nn.attention.varlen, "varlen_attn", watched)
    spec, platform = SPECS["decoder-window"], Platform.fake("cuda", (8, 0))
    op = build(select(spec, platform, Preference("torch_varlen", "this test"), False), spec, platform)
    cache = LayerCache(torch.zeros(4, 4, 2, 24, dtype=torch.bfloat16), torch.zeros(4, 4, 2, 24, dtype=torch.bfloat16))
    for query, total in ((5, 5), (1, 6), (2, 8)):
        q, k, v = (torch.randn(query, heads, 24, dtype=torch.bfloat16) for heads in (4, 2, 2))
        op(q, k, v, cache, PagedStep.build([query], [total], [[0, 1]], 4, "cpu"))
    assert windows == [(2, 0), (-1, -1), (2, 0)]


def test_an_optional_package_is_imported_by_no_other_backend(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from vlm.attention.factory import build, select\n"
        "from vlm.attention.platform import Platform\n"
        "from vlm.attention.spec import AttentionSpec, Preference\n"
        "spec, platform = AttentionSpec('encoder', 80, 16, 16, 'bfloat16'), Platform.fake('cuda', (9, 0))\n"
        "for name in ('torch_varlen', 'sdpa'):\n"
        "    build(select(spec, platform, Preference(name, 'x'), False), spec, platform)\n"
        "assert not {'flash_attn', 'fa3_fwd_interface', 'flash_attn_interface'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)


@pytest.mark.parametrize(("lengths", "expected"), [((), 0), ((0, 0), 0), ((1, 1), 1), ((1, 0), 2), ((3, 0), 3)])
def test_a_bound_of_one_is_given_only_where_every_sequence_has_one_query(
    lengths: tuple[int, ...], expected: int
) -> None:
    assert packed.bound(lengths) == expected


# The signatures that the doubles stand for, where the real thing is installed.


def parameters(function: Callable[..., object]) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(function).parameters)


def test_the_double_of_efficient_attention_has_the_operators_arguments(flash_doubles: ModuleType) -> None:
    schema = torch.ops.aten._efficient_attention_forward.default._schema
    assert [a.name for a in schema.arguments] == list(parameters(flash_doubles.efficient))


def test_the_double_of_varlen_attn_is_the_one_that_torch_has(flash_doubles: ModuleType) -> None:
    have = parameters(torch.nn.attention.varlen.varlen_attn)
    double = parameters(flash_doubles.torch_2_13 if "enable_gqa" in have else flash_doubles.torch_2_11)
    assert list(have) == list(double)
    assert [p.kind for p in have.values()] == [p.kind for p in double.values()]


@pytest.mark.gpu
@pytest.mark.parametrize("provider", ["fa2", "fa3", "fa3-fwd", "fa4"])
def test_the_doubles_of_installed_packages_take_no_argument_that_those_lack(
    provider: str, flash_doubles: ModuleType
) -> None:
    name = PROVIDERS[provider][2]
    if Platform.detect("cuda").providers.probe(name).error is not None:
        pytest.skip(f"{name} does not import here")
    have = parameters(importlib.import_module(name).flash_attn_varlen_func)
    wanted = {
        "cu_seqlens_q",
        "cu_seqlens_k",
        "max_seqlen_q",
        "max_seqlen_k",
        "softmax_scale",
        "causal",
        "window_size",
        "softcap",
    }
    assert wanted <= have.keys()
    double = {"fa3-fwd": flash_doubles.fa3_varlen}.get(provider, flash_doubles.modules()[name].flash_attn_varlen_func)
    assert parameters(double).keys() <= have.keys()
