"""The rules of the factory on faked machines. Case numbers are those of the acceptance table of its design."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from vlm.attention.backends import BACKENDS, get_backend
from vlm.attention.backends.triton import tiles_of
from vlm.attention.errors import AttentionBackendError
from vlm.attention.factory import select
from vlm.attention.platform import KINDS, Platform
from vlm.attention.spec import ROLES, AttentionSpec, Decision, Preference, Role
from vlm.attention.table import ROWS, default_row
from vlm.kernels.tiles import Tile

NONE = Preference()
FA2 = {"flash_attn": "2.8.3"}
VIT = AttentionSpec("encoder", 80, 16, 16, "bfloat16", features=frozenset({"varlen"}))
TEXT = AttentionSpec("decoder", 128, 16, 4, "float16", features=frozenset({"varlen", "causal", "paged"}))
HALF = replace(VIT, dtype="float16")
CROSS = AttentionSpec("cross", 64, 12, 12, "float16", features=frozenset({"varlen"}))


def chosen(backend: str, origin: str = "argument attention=") -> Preference:
    return Preference(backend, origin)


def asked(platform: Platform) -> tuple[str, ...]:
    """The optional packages that were imported; triton comes with the installation."""
    return tuple(name for name in platform.providers.asked if name != "triton")


def reasons_for(decision: Decision | AttentionBackendError, backend: str) -> list[str]:
    return [r.reason for r in decision.rejected if r.backend == backend]


@dataclass(frozen=True)
class Case:
    """A row of the acceptance table."""

    number: str
    platform: Platform
    spec: AttentionSpec
    preference: Preference
    upstream_fa: bool
    backend: str
    source: str
    told: str = ""  # found in the reasons or the rejections
    asked: tuple[str, ...] = ()  # packages that were imported for it


XPU = Platform.fake("xpu", importable=FA2)
CASES = [
    Case(
        "1",
        Platform.fake("cuda", (8, 0), importable=FA2),
        VIT,
        NONE,
        True,
        "flash_attn",
        "upgrade",
        "opts into",
        ("flash_attn",),
    ),
    Case("2", Platform.fake("cuda", (8, 0), importable=FA2), VIT, NONE, False, "torch_varlen", "default"),
    Case(
        "3",
        Platform.fake("cuda", (9, 0), importable=FA2),
        VIT,
        chosen("sdpa"),
        True,
        "sdpa",
        "explicit",
        "the configured backend wins",
    ),
    Case("4", XPU, VIT, NONE, True, "sdpa", "default", "upstream_fa has no effect on xpu"),
    Case("5", XPU, VIT, chosen("sdpa"), True, "sdpa", "explicit"),
    Case("7", Platform.fake("rocm", arch="gfx942", importable=FA2), VIT, chosen("sdpa"), True, "sdpa", "explicit"),
    Case(
        "8",
        Platform.fake("rocm", arch="gfx1100", importable=FA2),
        VIT,
        NONE,
        True,
        "triton",
        "default",
        "upstream_fa has no effect on rocm",
    ),
    Case(
        "11",
        Platform.fake("cuda", (7, 5), importable=FA2),
        replace(VIT, dtype="float16"),
        NONE,
        True,
        "torch_efficient",
        "default",
        "capability: 7.5 < 8.0",
    ),
    Case(
        "12",
        Platform.fake("cuda", (9, 0), importable=FA2),
        replace(VIT, dtype="float32"),
        NONE,
        True,
        "triton",
        "default",
        "dtype: float32",
    ),
    Case(
        "14 text",
        Platform.fake("cuda", (10, 0), importable=FA2),
        replace(TEXT, dtype="bfloat16"),
        chosen("flash_attn"),
        False,
        "flash_attn",
        "explicit",
        asked=("flash_attn.cute", "flash_attn"),
    ),
    Case("14 vision", Platform.fake("cuda", (10, 0), importable=FA2), VIT, NONE, False, "torch_varlen", "default"),
    Case("18 sm80", Platform.fake("cuda", (8, 0)), TEXT, NONE, False, "triton", "default", "default row for decoder"),
    Case("18 sm75", Platform.fake("cuda", (7, 5)), TEXT, NONE, False, "triton", "default", "default row for decoder"),
    Case("18 cross", Platform.fake("cuda", (7, 5)), CROSS, NONE, False, "torch_efficient", "default"),
    Case(
        "18 causal cross",
        Platform.fake("cuda", (7, 5)),
        replace(CROSS, features=frozenset({"varlen", "causal"})),
        NONE,
        False,
        "triton",
        "default",
        "torch_efficient: feature:causal (not in cross-attention",
    ),
    Case("amd cross", Platform.fake("rocm", arch="gfx942"), CROSS, NONE, False, "triton", "default"),
    Case("amd encoder", Platform.fake("rocm", arch="gfx942"), VIT, chosen("triton"), False, "triton", "explicit"),
    Case("amd cross set", Platform.fake("rocm", arch="gfx942"), CROSS, chosen("triton"), False, "triton", "explicit"),
    Case("turing encoder set", Platform.fake("cuda", (7, 5)), HALF, chosen("triton"), False, "triton", "explicit"),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.number)
def test_acceptance(case: Case) -> None:
    decision = select(case.spec, replace(case.platform), case.preference, case.upstream_fa)
    assert (decision.backend, decision.source) == (case.backend, case.source)
    everything = " | ".join([*decision.reasons, *(f"{r.backend}: {r.reason}" for r in decision.rejected)])
    assert case.told in everything
    assert asked(case.platform) == case.asked


def test_15_flash_attn_on_turing_is_refused_with_reason_and_alternatives() -> None:
    platform = Platform.fake("cuda", (7, 5), importable=FA2)
    with pytest.raises(AttentionBackendError) as caught:
        select(replace(VIT, dtype="float16"), platform, chosen("flash_attn", "argument attention= for vision"), True)
    message = str(caught.value)
    assert "'flash_attn', set by argument attention= for vision" in message
    assert "capability: 7.5 < 8.0" in message
    assert "These would work: torch_efficient, triton, sdpa" in message
    assert asked(platform) == ()


@pytest.mark.parametrize("head_dim", [64, 72, 80, 88, 96, 128, 192, 256])
@pytest.mark.parametrize("heads", [(8, 8), (16, 4), (28, 4), (64, 1)])
def test_18_a_decoder_on_turing_takes_triton(head_dim: int, heads: tuple[int, int]) -> None:
    """FlashAttention does not run there; nothing that a decoder may look like leaves it to sdpa."""
    spec = replace(TEXT, head_dim=head_dim, num_heads=heads[0], num_kv_heads=heads[1])
    decision = select(spec, Platform.fake("cuda", (7, 5)), NONE, False)
    assert (decision.backend, decision.source) == ("triton", "default")


@pytest.mark.parametrize("preference", [NONE, chosen("triton")])
def test_19_fp8_kv_on_sm86_is_refused_with_the_dtype_and_the_capability(preference: Preference) -> None:
    spec = replace(TEXT, kv_cache_dtype="float8_e4m3fn")
    with pytest.raises(AttentionBackendError) as caught:
        select(spec, Platform.fake("cuda", (8, 6), importable={"triton": "3.6.0"}), preference, False)
    assert reasons_for(caught.value, "triton") == ["kv_dtype: float8_e4m3fn needs compute capability 8.9, has 8.6"]
    assert "float8_e4m3fn" in str(caught.value)
    assert "8.6" in str(caught.value)


def test_19_fp8_kv_is_taken_from_sm89() -> None:
    decision = select(replace(TEXT, kv_cache_dtype="float8_e4m3fn"), Platform.fake("cuda", (8, 9)), NONE, False)
    assert decision.backend == "triton"


@pytest.mark.parametrize(("capability", "keys"), [((8, 6), 32), ((8, 0), 64)])
def test_17_a_tile_is_shrunk_to_the_shared_memory(capability: tuple[int, int], keys: int) -> None:
    spec, platform = replace(HALF, head_dim=256), Platform.fake("cuda", capability)
    assert select(spec, platform, chosen("triton"), False).backend == "triton"
    tile = tiles_of(spec, platform)[0]
    assert isinstance(tile, Tile)
    assert tile.block_n == keys
    assert tile.shared_memory <= platform.shared_memory


@pytest.mark.parametrize("role", ROLES)
def test_17_where_no_tile_fits_the_refusal_has_the_numbers(role: Role) -> None:
    platform = Platform.fake("cuda", (8, 0), shared_memory_bytes=16_384)
    with pytest.raises(AttentionBackendError) as caught:
        select(replace(HALF, role=role, head_dim=256), platform, chosen("triton"), False)
    (reason, *_) = reasons_for(caught.value, "triton")
    assert re.fullmatch(r"shared_memory: needs \d+, has 16384", reason)
    assert "These would work:" in str(caught.value)


def test_17_float32_of_512_does_not_fit_turing() -> None:
    spec = replace(TEXT, head_dim=512, dtype="float32")
    with pytest.raises(AttentionBackendError, match=r"shared_memory: needs 66624, has 65536"):
        select(spec, Platform.fake("cuda", (7, 5)), chosen("triton"), False)


def test_a_triton_that_is_too_old_is_refused() -> None:
    platform = Platform.fake("cuda", (8, 0), importable={"triton": "3.5.1"})
    with pytest.raises(AttentionBackendError, match=r"version: 3\.5\.1 < 3\.6"):
        select(TEXT, platform, chosen("triton"), False)


# Rule 1: explicit


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("role", ROLES)
def test_a_configured_backend_is_used_on_every_platform(kind: str, role: Role) -> None:
    decision = select(replace(VIT, role=role, dtype="float16"), Platform.fake(kind), chosen("sdpa"), True)
    assert (decision.backend, decision.source) == ("sdpa", "explicit")
    assert decision.reasons[0] == "sdpa is set by argument attention="


@pytest.mark.parametrize("kind", ["rocm", "xpu", "mps", "cpu"])
@pytest.mark.parametrize("backend", ["flash_attn", "torch_varlen"])
def test_a_configured_backend_that_cannot_run_there_is_an_error_and_not_a_fallback(kind: str, backend: str) -> None:
    platform = Platform.fake(kind, importable=FA2)
    with pytest.raises(AttentionBackendError) as caught:
        select(replace(VIT, dtype="float16"), platform, chosen(backend), True)
    assert reasons_for(caught.value, backend) == [f"platform: {kind} is not among cuda"]
    assert asked(platform) == ()


def test_a_configured_package_that_is_missing_says_what_to_install() -> None:
    with pytest.raises(AttentionBackendError) as caught:
        select(VIT, Platform.fake("cuda", (8, 0)), chosen("flash_attn"), False)
    assert reasons_for(caught.value, "flash_attn") == [
        "import: ModuleNotFoundError: No module named 'flash_attn' [FlashAttention-2]"
    ]
    assert "pip install 'vlm-runtime[flash-attn]'" in str(caught.value)


def test_a_refusal_names_only_backends_that_would_work() -> None:
    spec = replace(VIT, features=frozenset({"varlen", "softcap"}))
    with pytest.raises(AttentionBackendError, match=r"feature:softcap\nThese would work: triton, sdpa\.$"):
        select(spec, Platform.fake("cuda", (8, 0), importable=FA2), chosen("torch_varlen"), False)
    spans = replace(VIT, features=frozenset({"varlen", "image_spans"}))
    with pytest.raises(
        AttentionBackendError, match=r"feature:image_spans\nNo other backend of this version would work either\.$"
    ):
        select(spans, Platform.fake("cuda", (8, 0)), chosen("sdpa"), False)


def test_an_unknown_backend_in_a_preference_is_an_error() -> None:
    with pytest.raises(AttentionBackendError, match="'fa9', which is no attention backend"):
        select(VIT, Platform.fake("cuda"), chosen("fa9"), False)


# Rule 2: the upgrade


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_model_that_does_not_opt_in_never_has_a_package_imported(role: Role, kind: str) -> None:
    platform = Platform.fake(
        kind, importable={"flash_attn": "2.8.3", "flash_attn.cute": "4.0.0", "fa3_fwd_interface": "0.0.3"}
    )
    select(replace(VIT, role=role, dtype="float16"), platform, NONE, False)
    assert asked(platform) == ()


ALL_FLASH = {
    "flash_attn": "2.8.3",
    "flash_attn.cute": "4.0.0b36",
    "fa3_fwd_interface": "0.0.3",
    "flash_attn_interface": "3.0.0",
}


@pytest.mark.parametrize(
    ("capability", "importable", "provider"),
    [
        ((8, 0), ALL_FLASH, "flash_attn"),
        ((8, 9), ALL_FLASH, "flash_attn"),
        ((9, 0), ALL_FLASH, "flash_attn_interface"),
        ((9, 0), {"fa3_fwd_interface": "0.0.3", "flash_attn.cute": "4.0.0", **FA2}, "fa3_fwd_interface"),
        ((9, 0), {"flash_attn.cute": "4.0.0", **FA2}, "flash_attn.cute"),
        ((9, 0), FA2, "flash_attn"),
        ((10, 0), ALL_FLASH, "flash_attn.cute"),
        ((10, 3), FA2, "flash_attn"),
        ((12, 0), ALL_FLASH, "flash_attn"),
    ],
)
def test_the_provider_that_fits_the_chip_best(
    capability: tuple[int, int], importable: Mapping[str, str], provider: str
) -> None:
    decision = select(VIT, Platform.fake("cuda", capability, importable=importable), NONE, True)
    assert (decision.backend, decision.source, decision.provider) == ("flash_attn", "upgrade", provider)
    assert decision.provider_version == importable[provider]


@pytest.mark.parametrize(
    ("change", "provider", "passed"),
    [
        ({"dtype": "float16"}, "flash_attn", "dtype: float16 is not among bfloat16 [FlashAttention-3 forward]"),
        (
            {"features": frozenset({"varlen", "sliding_window"}), "window": 4},
            "flash_attn",
            "feature:sliding_window [FlashAttention-3 forward]",
        ),
    ],
)
def test_a_provider_that_cannot_do_the_spec_is_passed_over_unimported(
    change: dict[str, object], provider: str, passed: str
) -> None:
    platform = Platform.fake("cuda", (9, 0), importable={"fa3_fwd_interface": "0.0.3", **FA2})
    decision = select(replace(VIT, **change), platform, NONE, True)  # type: ignore[arg-type]
    assert decision.provider == provider
    assert passed in reasons_for(decision, "flash_attn")
    assert "fa3_fwd_interface" not in platform.providers.asked


def test_a_package_that_breaks_on_import_leaves_the_default_row_with_the_reason() -> None:
    platform = Platform.fake(
        "cuda", (8, 0), broken={"flash_attn": "OSError: libcudart.so.12: cannot open shared object file"}
    )
    decision = select(VIT, platform, NONE, True)
    assert (decision.backend, decision.source) == ("torch_varlen", "default")
    told = "import: OSError: libcudart.so.12: cannot open shared object file [FlashAttention-2]"
    assert reasons_for(decision, "flash_attn") == [told]
    assert any(told in reason for reason in decision.reasons)


@pytest.mark.parametrize(
    ("version", "features", "reason"),
    [
        ("2.3.6", frozenset({"varlen"}), "version: 2.3.6 < 2.5 [FlashAttention-2]"),
        ("2.5.8", frozenset({"varlen", "softcap"}), "feature:softcap needs version 2.6, has 2.5.8 [FlashAttention-2]"),
    ],
)
def test_a_release_that_is_too_old_for_the_spec_is_not_taken(
    version: str, features: frozenset[str], reason: str
) -> None:
    spec = replace(VIT, features=features)  # type: ignore[arg-type]
    decision = select(spec, Platform.fake("cuda", (8, 0), importable={"flash_attn": version}), NONE, True)
    assert decision.backend != "flash_attn"
    assert reason in reasons_for(decision, "flash_attn")


def test_a_release_that_is_new_enough_is_taken() -> None:
    spec = replace(VIT, features=frozenset({"varlen", "softcap"}))
    assert (
        select(spec, Platform.fake("cuda", (8, 0), importable={"flash_attn": "2.6.0"}), NONE, True).backend
        == "flash_attn"
    )


def test_a_layer_group_can_stay_out_of_its_models_upgrade() -> None:
    platform = Platform.fake("cuda", (9, 0), importable=FA2)
    decision = select(replace(VIT, upstream_fa_unsuitable="64-token windows"), platform, NONE, True)
    assert (decision.backend, decision.source) == ("torch_varlen", "default")
    assert "this layer group stays out of upstream_fa: 64-token windows" in decision.reasons
    assert platform.providers.asked == ()


@pytest.mark.parametrize(
    ("head_dim", "provider"), [(128, "flash_attn.cute"), (160, "flash_attn"), (256, "flash_attn.cute")]
)
def test_flash_attention_4_has_gaps_above_128_on_blackwell(head_dim: int, provider: str) -> None:
    decision = select(replace(VIT, head_dim=head_dim), Platform.fake("cuda", (10, 0), importable=ALL_FLASH), NONE, True)
    assert decision.provider == provider


# Rule 4: default rows


def test_every_role_has_one_row_on_every_platform() -> None:
    machines = [Platform.fake("cuda", c) for c in ((7, 0), (7, 5), (8, 0), (8, 6), (9, 0), (10, 0), (12, 1))]
    machines += [Platform.fake(kind) for kind in KINDS if kind != "cuda"]
    for platform in machines:
        for role in ROLES:
            have = platform.capability or (0, 0)
            rows = [r for r in ROWS if r.role == role and r.kind == platform.kind and r.low <= have < r.high]
            assert rows == [default_row(role, platform)]
            assert "sdpa" in rows[0].backends
            assert set(rows[0].backends) <= set(BACKENDS)


def test_the_upstream_package_is_in_no_default_row() -> None:
    assert all("flash_attn" not in row.backends for row in ROWS)


def test_a_default_row_that_leaves_nothing_is_an_error_with_every_reason() -> None:
    spec = replace(VIT, features=frozenset({"varlen", "image_spans"}))
    with pytest.raises(AttentionBackendError) as caught:
        select(spec, Platform.fake("cuda", (8, 0)), NONE, False)
    assert [(r.backend, r.reason) for r in caught.value.rejected] == [
        ("torch_varlen", "feature:image_spans"),
        ("triton", "feature:image_spans (of a decoder's prompt only)"),
        ("sdpa", "feature:image_spans"),
    ]


# Purity


def test_the_answer_depends_on_the_arguments_alone() -> None:
    """In any order, a question has one answer: nothing is remembered under less than the whole question."""
    questions = [
        (
            replace(VIT, dtype=dtype, head_dim=head_dim, features=features),
            Platform.fake("cuda", capability, importable=importable),
            fa,
        )
        for dtype in ("float16", "float32")
        for head_dim in (64, 512)
        for features in (frozenset({"varlen"}), frozenset({"varlen", "softcap"}))
        for capability in ((7, 5), (9, 0))
        for importable in ({}, FA2)
        for fa in (False, True)
    ]
    forwards = [select(spec, platform, NONE, fa) for spec, platform, fa in questions]  # type: ignore[arg-type]
    backwards = [select(spec, platform, NONE, fa) for spec, platform, fa in reversed(questions)]  # type: ignore[arg-type]
    assert forwards == backwards[::-1]


def test_every_declaration_answers_to_its_name_and_refuses_in_typed_reasons() -> None:
    types = (
        "platform:",
        "capability:",
        "role:",
        "dtype:",
        "kv_dtype:",
        "head_dim:",
        "heads:",
        "feature:",
        "shared_memory:",
        "version:",
        "import:",
    )
    absurd = AttentionSpec("decoder", 1000, 7, 2, "float64", "int4", frozenset({"image_spans"}))
    for name in BACKENDS:
        assert get_backend(name).name == name
        with pytest.raises(AttentionBackendError) as caught:
            select(absurd, Platform.fake("cuda", (7, 0)), chosen(name), False)
        assert caught.value.rejected
        assert all(r.reason.startswith(types) for r in caught.value.rejected)


def test_bf16_is_refused_where_the_device_does_not_compute_it() -> None:
    with pytest.raises(
        AttentionBackendError, match=r"bfloat16 is not computed by this device \(compute capability 7\.5\)"
    ):
        select(VIT, Platform.fake("cuda", (7, 5)), chosen("sdpa"), False)


def test_deciding_needs_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from vlm.attention.factory import select\n"
        "from vlm.attention.platform import Platform\n"
        "from vlm.attention.preference import read_preferences\n"
        "from vlm.attention.spec import AttentionSpec, Preference\n"
        "read_preferences('sdpa', {})\n"
        "spec = AttentionSpec('encoder', 80, 16, 16, 'bfloat16')\n"
        "select(spec, Platform.fake('cuda', (9, 0), importable={'flash_attn': '2.8.3'}), Preference(), True)\n"
        "assert not {'torch', 'triton', 'numpy', 'flash_attn'} & set(sys.modules), sorted(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)
