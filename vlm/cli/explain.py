"""`vlm explain`: which attention backend each layer group gets, and why, on this machine or on a faked one.

A faked machine needs no torch: the declarations of the backends are read, nothing is run.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from vlm.attention.errors import AttentionBackendError, VLMError
from vlm.attention.factory import select
from vlm.attention.platform import BUNDLED, DISTRIBUTIONS, Platform, canonical_dtype, resolve_dtype
from vlm.attention.preference import read_preferences, stack_of
from vlm.attention.spec import FEATURES, ROLES, AttentionSpec, Decision, Feature, Preference, Role
from vlm.attention.table import TOP
from vlm.cli.common import parse_attention
from vlm.cli.streams import say, write, write_json

if TYPE_CHECKING:
    from vlm.families.base import LayerGroup

KV_DTYPES = {"fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "float8": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}
BY_ROLE: dict[Role, frozenset[Feature]] = {
    "encoder": frozenset({"varlen"}),
    "decoder": frozenset({"varlen", "causal", "paged"}),
    "cross": frozenset({"varlen"}),
}


def _import_name(name: str) -> str:
    """A package by the name it is installed or imported under -> the name it is imported under. Raises VLMError for
    one that no backend asks for."""
    plain = name.strip().replace("_", "-").lower()
    for import_name, distributions in DISTRIBUTIONS.items():
        if name.strip() == import_name or plain in {d.replace("_", "-") for d in distributions}:
            return import_name
    if plain in BUNDLED:
        return plain
    raise VLMError(f"{name.strip()!r} is no package that a backend uses: use {', '.join((*DISTRIBUTIONS, *BUNDLED))}")


def _pairs(values: Sequence[str], option: str, expected: str = "NAME=VALUE") -> dict[str, str]:
    out = {}
    for value in values:
        name, found, rest = value.partition("=")
        if not found or not name.strip():
            raise VLMError(f"{option} {value!r}: expected {expected}")
        out[name.strip()] = rest.strip()
    return out


def _importable(values: Sequence[str]) -> dict[str, str]:
    parts = [value.partition("==") for value in values]
    return {_import_name(name): version.strip() for name, _, version in parts}


def _broken(values: Sequence[str]) -> dict[str, str]:
    given = _pairs(values, "--broken", "NAME=ERROR, such as flash_attn=OSError")
    return {
        _import_name(name): text if ":" in text else f"{text or 'ImportError'}: found, but does not load"
        for name, text in given.items()
    }


def _capability(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)\.(\d)|sm_?(\d+)(\d)a?", text)
    if match is None:
        raise VLMError(f"--capability {text!r}: expected one such as 8.0, or gfx942 for ROCm")
    major, minor = match.group(1, 2) if match.group(1) else match.group(3, 4)
    if (int(major), int(minor)) >= TOP:
        raise VLMError(f"--capability {text!r}: there is no such compute capability")
    return int(major), int(minor)


def _machine(
    platform: str | None, capability: str | None, importable: Sequence[str], broken: Sequence[str]
) -> Platform | None:
    """The faked machine, or None for this one."""
    if capability is not None and platform is None:
        platform = "rocm" if capability.startswith("gfx") else "cuda"
    if platform is None:
        if importable or broken:
            raise VLMError(
                "--importable and --broken describe a faked machine: name it with --platform and --capability"
            )
        return None
    have, fail = _importable(importable), _broken(broken)
    if platform == "rocm":
        if capability is not None and not re.fullmatch(r"gfx\d{1,2}[0-9a-f]{2}", capability):
            raise VLMError(f"--capability {capability!r}: on rocm it is an architecture such as gfx942")
        return Platform.fake("rocm", arch=capability or "", importable=have, broken=fail)
    if platform != "cuda" and capability is not None:
        raise VLMError(f"--capability {capability!r}: only cuda and rocm have one, leave it out for {platform}")
    return Platform.fake(platform, _capability(capability) if capability else None, importable=have, broken=fail)


def _features(needs: str | None, role: Role, window: int | None) -> frozenset[Feature]:
    asked = [name.strip() for name in (needs or "").split(",") if name.strip()]
    unknown = [name for name in asked if name not in FEATURES]
    if unknown:
        raise VLMError(f"--needs {unknown[0]!r} is no feature: use {', '.join(FEATURES)}")
    out = {feature for feature in FEATURES if feature in asked}
    return frozenset(out | BY_ROLE[role] | ({"sliding_window"} if window is not None else set()))


def _shape(head_dim: int | None, heads: int | None, kv_heads: int | None, window: int | None) -> tuple[int, int, int]:
    """(head_dim, heads, kv_heads), where they were left out with a ViT's usual ones."""
    numbers = [number for number in (head_dim, heads, kv_heads, window) if number is not None]
    if numbers and min(numbers) < 1:
        raise VLMError("--head-dim, --heads, --kv-heads and --window are at least 1")
    heads = heads or 16
    return head_dim or 64, heads, kv_heads or heads


def _spec(
    role: str,
    shape: tuple[int, int, int],
    dtype: str,
    kv_dtype: str | None,
    scale: float | None,
    window: int | None,
    needs: str | None,
) -> AttentionSpec:
    known = next((name for name in ROLES if name == role), None)
    if known is None:
        raise VLMError(f"--role {role!r}: use {', '.join(ROLES)}")
    kv = None
    if kv_dtype not in {None, "auto"}:
        kv = KV_DTYPES.get(str(kv_dtype), str(kv_dtype).removeprefix("torch."))
        kv = kv if kv.startswith("float8") else canonical_dtype(kv)
    features = _features(needs, known, window)
    if kv is not None and "paged" not in features:
        raise VLMError("--kv-dtype describes a KV cache, which only a decoder has: say --role decoder")
    if scale is not None and not (math.isfinite(scale) and scale > 0):
        raise VLMError(f"--scale {scale}: the factor on the scores is a number above 0")
    head_dim, heads, kv_heads = shape
    return AttentionSpec(known, head_dim, heads, kv_heads, dtype, kv, features, scale, window)


def _told(decision: Decision, warning: str | None) -> Decision:
    return decision if warning is None else replace(decision, reasons=(warning, *decision.reasons))


def explain_layer(
    spec: AttentionSpec, platform: Platform, preferences: Mapping[str, Preference], upstream_fa: bool
) -> Decision:
    """The decision for one layer, by the setting of the stack that its role belongs to."""
    return select(spec, platform, preferences[stack_of(spec.role)], upstream_fa)


def _config_dtype(config: Mapping[str, Any]) -> str:
    """What config.json says the weights are in, at the top or in its text part; float32 where it says nothing."""
    nested = config.get("text_config")
    for part in (config, nested if isinstance(nested, Mapping) else {}):
        for key in ("dtype", "torch_dtype"):
            if isinstance(part.get(key), str) and part[key] != "auto":
                return str(part[key])
    return "float32"


def explain_model(
    model: str | None, platform: Platform, dtype: str, preferences: Mapping[str, Preference]
) -> list[Decision]:
    """The decision for every layer group of a model (None: the embedded one). Reads its configs, not its weights."""
    from vlm.loading.folder import ModelFolder, resolve_folder
    from vlm.loading.model import read_config

    folder = ModelFolder(resolve_folder(model))
    family, config = read_config(folder)
    compute, warning = resolve_dtype(dtype, _config_dtype(folder.config), platform)
    groups: Mapping[str, LayerGroup] = family.layer_groups(config, compute)
    decisions = []
    for name, group in groups.items():
        try:
            decision = select(group.spec, platform, preferences.get(group.stack, Preference()), group.upstream_fa)
        except AttentionBackendError as error:
            raise AttentionBackendError(f"{name}: {error}", error.rejected) from error
        decisions.append(replace(_told(decision, warning), group=name))
    return decisions


def describe(decision: Decision, title: str) -> str:
    """A decision for people: a few lines."""
    given = decision.as_dict()
    lines = [title, *(f"  {key:<9} {given[key]}" for key in ("backend", "provider", "source"))]
    lines += [f"  {'because' if i == 0 else '':<9} {reason}" for i, reason in enumerate(decision.reasons)]
    width = max((len(r.backend) for r in decision.rejected), default=0)
    lines += [
        f"  {'not taken' if i == 0 else '':<9} {r.backend:<{width}}  {r.reason}"
        for i, r in enumerate(decision.rejected)
    ]
    return "\n".join(lines)


def _title(spec: AttentionSpec, platform: Platform) -> str:
    heads = f"{spec.num_heads}" if spec.num_heads == spec.num_kv_heads else f"{spec.num_heads}/{spec.num_kv_heads}"
    return f"{spec.role}, {spec.dtype}, head_dim {spec.head_dim}, heads {heads}, on {platform.describe()}"


def _refuse(error: VLMError, as_json: bool) -> NoReturn:
    if as_json:
        rejected = [r.as_dict() for r in getattr(error, "rejected", ())]
        write_json({"error": {"type": type(error).__name__, "message": str(error), "rejected": rejected}})
    else:
        say(f"error: {error}")
    raise typer.Exit(2)


def _answer(as_json: bool, work: Callable[[], tuple[dict[str, Any], str]]) -> None:
    try:
        data, text = work()
    except VLMError as error:
        _refuse(error, as_json)
    write_json(data) if as_json else write(text)


def explain(
    model: Annotated[
        str | None, typer.Argument(help="A model folder or hub id: explain each of its layer groups.")
    ] = None,
    role: Annotated[str | None, typer.Option(help="encoder (the default), decoder or cross.")] = None,
    head_dim: Annotated[int | None, typer.Option(help="Width of one head [64].")] = None,
    heads: Annotated[int | None, typer.Option(help="Query heads [16].")] = None,
    kv_heads: Annotated[int | None, typer.Option(help="Key/value heads [as many as query heads].")] = None,
    dtype: Annotated[str, typer.Option(help="auto, float32, float16 or bfloat16 (fp32, fp16, bf16).")] = "auto",
    kv_dtype: Annotated[str | None, typer.Option(help="Storage dtype of the KV cache, such as fp8.")] = None,
    scale: Annotated[float | None, typer.Option(help="Factor on the scores [head_dim ** -0.5].")] = None,
    window: Annotated[int | None, typer.Option(help="Sliding window, in keys.")] = None,
    needs: Annotated[str | None, typer.Option(help="Features beyond the role's own, as a list: softcap,sinks.")] = None,
    upstream_fa: Annotated[
        bool, typer.Option("--upstream-fa", help="The model opts into the upstream package.")
    ] = False,
    setting: Annotated[
        list[str] | None, typer.Option("--set", help="A configured backend: BACKEND, vision=BACKEND or text=BACKEND.")
    ] = None,
    platform: Annotated[str | None, typer.Option(help="Fake a machine: cuda, rocm, xpu, mps or cpu.")] = None,
    capability: Annotated[str | None, typer.Option(help="Its compute capability (8.0), or gfx942 for ROCm.")] = None,
    importable: Annotated[list[str] | None, typer.Option(help="A package it has: NAME==VERSION. May repeat.")] = None,
    broken: Annotated[
        list[str] | None, typer.Option(help="A package that fails to import: NAME=OSError. May repeat.")
    ] = None,
    env: Annotated[list[str] | None, typer.Option(help="An environment variable: NAME=VALUE. May repeat.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say which attention backend each layer group gets, and why.

    With MODEL: its layer groups. With options that describe a layer: of that layer. With neither: of the model in
    VLM_MODEL, else of the embedded one. On this machine, or on one faked with --platform.
    """

    def work() -> tuple[dict[str, Any], str]:
        layer = {
            "--role": role,
            "--head-dim": head_dim,
            "--heads": heads,
            "--kv-heads": kv_heads,
            "--kv-dtype": kv_dtype,
            "--scale": scale,
            "--window": window,
            "--needs": needs,
            "--upstream-fa": upstream_fa or None,
        }
        given = [option for option, value in layer.items() if value is not None]
        if model is not None and given:
            raise VLMError(f"{given[0]} describes a layer, and MODEL has its own: leave one out")
        whole = model is not None or not (given or platform or capability)
        faked = _machine(platform, capability, importable or [], broken or [])
        environ = {**({} if faked else os.environ), **_pairs(env or [], "--env")}
        preferences = read_preferences(parse_attention(setting, "--set") if setting else None, environ)
        machine = faked or Platform.detect()
        if whole:
            decisions = explain_model(model or os.environ.get("VLM_MODEL") or None, machine, dtype, preferences)
            text = "\n\n".join(describe(d, f"{d.group}, on {machine.describe()}") for d in decisions)
            return {"groups": [d.as_dict() for d in decisions]}, text
        compute, warning = resolve_dtype(dtype, "bfloat16", machine)
        shape = _shape(head_dim, heads, kv_heads, window)
        spec = _spec(role or "encoder", shape, compute, kv_dtype, scale, window, needs)
        decision = _told(explain_layer(spec, machine, preferences, upstream_fa), warning)
        return decision.as_dict(), describe(decision, _title(spec, machine))

    _answer(as_json, work)
