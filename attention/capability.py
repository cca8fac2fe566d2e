"""What a backend can do, as data, and the one function that reads it.

`reasons` answers with typed reasons rather than a bool; an empty list means yes. It knows no package and asks no
device: everything comes from the spec, the platform and the declared `Capability`. This module and every declaration
import without torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any

from vlm.attention.spec import AttentionSpec, Decision, Feature, Role

if TYPE_CHECKING:
    from vlm.attention.platform import Platform

HALF = frozenset({"float16", "bfloat16"})
ANY_DTYPE = HALF | {"float32"}
Version = tuple[int, int]


@dataclass(frozen=True)
class HeadDim:
    """Widths of a head that a kernel takes. `also` names widths above `maximum` that it takes as well."""

    maximum: int | None = None
    minimum: int = 1
    multiple_of: int = 1
    also: tuple[int, ...] = ()

    def reasons(self, head_dim: int) -> list[str]:
        if head_dim in self.also:
            return []
        if head_dim < self.minimum:
            return [f"head_dim: {head_dim} < {self.minimum}"]
        if self.maximum is not None and head_dim > self.maximum:
            return [f"head_dim: {head_dim} > {self.maximum}"]
        if head_dim % self.multiple_of:
            return [f"head_dim: {head_dim} is not a multiple of {self.multiple_of}"]
        return []


@dataclass(frozen=True)
class Capability:
    """What a kernel does. `None` as a minimum capability means any device of that platform.

    Attributes:
        roles, features: what it computes. dtypes: compute dtypes.
        head_dim: the widths that it takes; head_dim_by_role overrides it for one role.
        platforms: platform kind -> minimum compute capability (only CUDA has one).
        majors: the major compute capabilities that it has machine code for; empty: all from the minimum up.
        kv_dtypes: storage dtype of the KV cache, other than the compute dtype -> minimum CUDA capability.
        feature_majors: a feature that only some major capabilities have.
        minimum_version, feature_versions: the first release of the providing package that works, or that has the
            feature.
        check: a rule that is not data, such as the tile that must fit the shared memory.
        unavailable: a reason that holds for every spec, or "".
    """

    roles: frozenset[Role]
    dtypes: frozenset[str]
    head_dim: HeadDim
    features: frozenset[Feature]
    platforms: Mapping[str, Version | None]
    head_dim_by_role: Mapping[Role, HeadDim] = field(default_factory=dict)
    majors: tuple[int, ...] = ()
    kv_dtypes: Mapping[str, Version | None] = field(default_factory=dict)
    feature_majors: Mapping[Feature, tuple[int, ...]] = field(default_factory=dict)
    minimum_version: str = ""
    feature_versions: Mapping[Feature, str] = field(default_factory=dict)
    check: Callable[[AttentionSpec, Platform], list[str]] | None = None
    unavailable: str = ""


@dataclass(frozen=True)
class Provider:
    """An optional package that does the work of a backend, imported when a rule comes to choose it and not before.

    Attributes:
        import_name: what is imported. label: the name that people use. install: how to have it.
    """

    import_name: str
    label: str
    install: str
    capability: Capability


@dataclass(frozen=True)
class Backend:
    """One entry of the table of backends: what it can do, and where the operation is.

    Attributes:
        capability: what holds whatever package provides it. summary: one line for people.
        package: who does the work where there is no choice of providers: "torch", or a package that must import
            ("triton").
        providers: the optional packages, and `order`: which of them to try, best first, on a given platform.
        op: "module:function" that makes the operation from (decision, spec, platform). It imports torch.
    """

    name: str
    summary: str
    capability: Capability
    op: str
    package: str = "torch"
    providers: tuple[Provider, ...] = ()
    order: Callable[[Platform], tuple[Provider, ...]] | None = None

    def construct(self, decision: Decision, spec: AttentionSpec, platform: Platform) -> Any:
        module, _, name = self.op.partition(":")
        return getattr(import_module(module), name)(decision, spec, platform)


def release(version: str) -> tuple[int, ...]:
    """The numbers of a version: "2.8.3.post2" -> (2, 8, 3), "2.13.0+cpu" -> (2, 13, 0), "4.0.0b36" -> (4, 0, 0)."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in match.group().split(".")) if match else ()


def older(version: str, minimum: str) -> bool:
    """Whether `version` comes before `minimum`. An unknown version ("") is taken at its word: not older."""
    return bool(version) and release(version) < release(minimum)


def _dotted(version: Version) -> str:
    return f"{version[0]}.{version[1]}"


def _platform_reasons(capability: Capability, platform: Platform) -> list[str]:
    if platform.kind not in capability.platforms:
        return [f"platform: {platform.kind} is not among {', '.join(sorted(capability.platforms))}"]
    minimum = capability.platforms[platform.kind]
    have = platform.capability
    if minimum is None or have is None:
        return []
    if have < minimum:
        return [f"capability: {_dotted(have)} < {_dotted(minimum)}"]
    if capability.majors and have[0] not in capability.majors:
        names = ", ".join(f"{major}.x" for major in capability.majors)
        return [f"capability: {_dotted(have)} is not among {names}"]
    return []


def _dtype_reasons(capability: Capability, spec: AttentionSpec, platform: Platform) -> list[str]:
    if spec.dtype not in capability.dtypes:
        return [f"dtype: {spec.dtype} is not among {', '.join(sorted(capability.dtypes))}"]
    if spec.dtype == "bfloat16" and not platform.bf16 and platform.kind != "cpu":
        device = (
            f"compute capability {_dotted(platform.capability)}"
            if platform.capability
            else platform.arch or platform.kind
        )
        return [f"dtype: bfloat16 is not computed by this device ({device})"]
    return []


def _kv_reasons(capability: Capability, spec: AttentionSpec, platform: Platform) -> list[str]:
    kv_dtype = spec.kv_cache_dtype
    if spec.role != "decoder" or kv_dtype is None or kv_dtype == spec.dtype:
        return []
    if kv_dtype not in capability.kv_dtypes:
        return [f"kv_dtype: {kv_dtype}: this backend keeps the KV cache in the compute dtype, {spec.dtype}"]
    minimum = capability.kv_dtypes[kv_dtype]
    if minimum is not None and platform.capability is not None and platform.capability < minimum:
        need, have = _dotted(minimum), _dotted(platform.capability)
        return [f"kv_dtype: {kv_dtype} needs compute capability {need}, has {have}"]
    return []


def _feature_reasons(capability: Capability, spec: AttentionSpec, platform: Platform) -> list[str]:
    out = [f"feature:{name}" for name in sorted(spec.features - capability.features)]
    if platform.capability is not None:
        for name in sorted(spec.features & capability.feature_majors.keys()):
            if platform.capability[0] not in capability.feature_majors[name]:
                out.append(f"feature:{name} (not on compute capability {_dotted(platform.capability)})")
    return out


def reasons(capability: Capability, spec: AttentionSpec, platform: Platform) -> list[str]:
    """Why this capability does not serve the spec on this platform; empty: it does.

    Versions of packages are a separate question (`version_reasons`), since asking one may import it.
    """
    out = _platform_reasons(capability, platform)
    if spec.role not in capability.roles:
        out.append(f"role: {spec.role} is not among {', '.join(sorted(capability.roles))}")
    out += _dtype_reasons(capability, spec, platform)
    out += _kv_reasons(capability, spec, platform)
    out += capability.head_dim_by_role.get(spec.role, capability.head_dim).reasons(spec.head_dim)
    if spec.num_kv_heads < 1 or spec.num_heads % spec.num_kv_heads:
        out.append(f"heads: {spec.num_heads} query heads are not a multiple of {spec.num_kv_heads} key/value heads")
    out += _feature_reasons(capability, spec, platform)
    if capability.check is not None and not out:
        out += capability.check(spec, platform)
    if capability.unavailable:
        out.append(capability.unavailable)
    return out


def version_reasons(capability: Capability, spec: AttentionSpec, version: str) -> list[str]:
    """Why this release of the providing package is too old for the spec; empty: it is not."""
    out = []
    if capability.minimum_version and older(version, capability.minimum_version):
        out.append(f"version: {version} < {capability.minimum_version}")
    for name in sorted(spec.features & capability.feature_versions.keys()):
        if older(version, capability.feature_versions[name]):
            out.append(f"feature:{name} needs version {capability.feature_versions[name]}, has {version}")
    return out
