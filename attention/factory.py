"""From what a layer group needs to a backend, with the reasons. `select` is pure: same inputs, same answer.

The rules, in order (docs/attention.md): a configured backend is used or refused, never replaced; a model that opted
in gets the upstream FlashAttention package where it can do the job; else the first backend of the default row that
can.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vlm.attention.backends import BACKENDS, get_backend
from vlm.attention.capability import Backend, reasons, version_reasons
from vlm.attention.errors import AttentionBackendError
from vlm.attention.platform import Platform
from vlm.attention.spec import AttentionSpec, Decision, Preference, Rejection
from vlm.attention.table import default_row

UPGRADE = "flash_attn"


@dataclass(frozen=True)
class _Match:
    """A backend that can do the job, and who provides it. `passed`: better providers that could not."""

    provider: str
    version: str
    label: str
    passed: tuple[Rejection, ...] = ()


def _match(backend: Backend, spec: AttentionSpec, platform: Platform) -> _Match | tuple[Rejection, ...]:
    """Whether a backend can do the job: by its declaration first, and only then by importing what it needs."""
    refused = reasons(backend.capability, spec, platform)
    if backend.package == "torch" and not backend.providers:
        refused += version_reasons(backend.capability, spec, platform.torch_version)
    if refused:
        return tuple(Rejection(backend.name, reason) for reason in refused)
    if backend.order is not None:
        return _match_provider(backend, spec, platform)
    if backend.package == "torch":
        return _Match("torch", platform.torch_version, "torch")
    probe = platform.providers.probe(backend.package)
    if probe.error is not None:
        return (Rejection(backend.name, f"import: {probe.error}"),)
    if old := version_reasons(backend.capability, spec, probe.version or ""):
        return tuple(Rejection(backend.name, reason) for reason in old)
    return _Match(backend.package, probe.version or "", backend.package)


def _match_provider(backend: Backend, spec: AttentionSpec, platform: Platform) -> _Match | tuple[Rejection, ...]:
    assert backend.order is not None
    passed: list[Rejection] = []
    for provider in backend.order(platform):
        refused = reasons(provider.capability, spec, platform)
        if not refused:
            probe = platform.providers.probe(provider.import_name)
            if probe.error is not None:
                refused = [f"import: {probe.error}"]
            else:
                refused = version_reasons(provider.capability, spec, probe.version or "")
        if not refused:
            return _Match(provider.import_name, probe.version or "", provider.label, tuple(passed))
        passed += [Rejection(backend.name, f"{reason} [{provider.label}]") for reason in refused]
    return tuple(passed)


def _needs(spec: AttentionSpec) -> str:
    """The request in a line, with its values, for messages."""
    parts = [spec.role, spec.dtype, f"head_dim {spec.head_dim}", f"heads {spec.num_heads}/{spec.num_kv_heads}"]
    if spec.kv_cache_dtype not in {None, spec.dtype}:
        parts.append(f"KV cache {spec.kv_cache_dtype}")
    if spec.features:
        parts.append(f"needs {', '.join(sorted(spec.features))}")
    return ", ".join(parts)


def _lines(rejected: tuple[Rejection, ...]) -> str:
    return "\n".join(f"  {r.backend}: {r.reason}" for r in rejected)


def _alternatives(name: str, spec: AttentionSpec, platform: Platform) -> str:
    """The other backends that would work. Optional packages are not imported to find out."""
    others = [get_backend(other) for other in BACKENDS if other != name]
    works = [b.name for b in others if not b.providers and isinstance(_match(b, spec, platform), _Match)]
    return f"These would work: {', '.join(works)}." if works else "No other backend of this version would work either."


def _explicit(spec: AttentionSpec, platform: Platform, preference: Preference, upstream_fa: bool) -> Decision:
    name = preference.backend
    assert name is not None
    if name not in BACKENDS:
        raise AttentionBackendError(
            f"{preference.origin} names {name!r}, which is no attention backend: use one of {', '.join(BACKENDS)}"
        )
    backend = get_backend(name)
    found = _match(backend, spec, platform)
    if not isinstance(found, _Match):
        message = (
            f"attention backend {name!r}, set by {preference.origin or 'the configuration'}, cannot do this job on "
            f"{platform.describe()} ({_needs(spec)}):\n{_lines(found)}\n{_alternatives(name, spec, platform)}"
        )
        installs = [p.install for p in backend.order(platform)] if backend.order is not None else []
        if any(r.reason.startswith("import:") for r in found) and installs:
            message += f" To bring {name}: {'; or '.join(installs)}."
        raise AttentionBackendError(message, found)
    told = [f"{name} is set by {preference.origin or 'the configuration'}"]
    if upstream_fa and name != UPGRADE:
        told.append("the model opts into upstream_fa; the configured backend wins")
    return Decision(name, found.provider, found.version, "explicit", tuple(told), found.passed)


def _upgrade(spec: AttentionSpec, platform: Platform) -> Decision | tuple[str, tuple[Rejection, ...]]:
    """The upstream package for a model that opted in, or the sentence and the reasons why not."""
    if platform.kind != "cuda":
        reason = f"upstream_fa has no effect on {platform.kind}"
        return reason, (Rejection(UPGRADE, f"platform: {reason}"),)
    if spec.upstream_fa_unsuitable:
        reason = f"this layer group stays out of upstream_fa: {spec.upstream_fa_unsuitable}"
        return reason, (Rejection(UPGRADE, f"unsuitable: {spec.upstream_fa_unsuitable}"),)
    found = _match(get_backend(UPGRADE), spec, platform)
    if isinstance(found, _Match):
        told = (
            f"the model opts into upstream_fa, and {found.label} {found.version}".rstrip()
            + " imports and serves this spec"
        )
        return Decision(UPGRADE, found.provider, found.version, "upgrade", (told,), found.passed)
    return f"the model opts into upstream_fa, which is not taken: {found[0].reason}", found


def _default(spec: AttentionSpec, platform: Platform, told: list[str], rejected: list[Rejection]) -> Decision:
    row = default_row(spec.role, platform)
    told.append(f"default row for {spec.role} on {platform.describe()}: {', '.join(row.backends)}")
    for name in row.backends:
        found = _match(get_backend(name), spec, platform)
        if isinstance(found, _Match):
            return Decision(name, found.provider, found.version, "default", tuple(told), (*rejected, *found.passed))
        rejected += found
    raise AttentionBackendError(
        f"no attention backend of the default row does this job on {platform.describe()} ({_needs(spec)}):\n"
        + _lines(tuple(rejected)),
        rejected,
    )


def select(spec: AttentionSpec, platform: Platform, preference: Preference, upstream_fa: bool) -> Decision:
    """Choose the backend of one layer group.

    Args:
        spec: what the layers need. platform: where they run. preference: what the user configured for this stack, or
            none.
        upstream_fa: whether the model opts into the upstream FlashAttention package. A model that does not never has
            it imported.

    Raises AttentionBackendError if the configured backend cannot do the job, or if nothing in the default row can.
    """
    if preference.backend is not None:
        return _explicit(spec, platform, preference, upstream_fa)
    told: list[str] = []
    rejected: list[Rejection] = []
    if upstream_fa:
        upgrade = _upgrade(spec, platform)
        if isinstance(upgrade, Decision):
            return upgrade
        told.append(upgrade[0])
        rejected += upgrade[1]
    return _default(spec, platform, told, rejected)


def build(decision: Decision, spec: AttentionSpec, platform: Platform) -> Any:
    """Construct the operation that was decided on (see vlm.attention.op for how it is called). Imports torch."""
    return get_backend(decision.backend).construct(decision, spec, platform)
