"""Which backend the user configured for which stack, from the argument and from the environment.

Argument beats environment; in either, a setting for one stack beats a setting for both. "auto" and "" mean: none.
"""

from __future__ import annotations

from collections.abc import Mapping

from vlm.attention.backends import BACKENDS
from vlm.attention.errors import AttentionBackendError
from vlm.attention.spec import Preference, Role

STACKS = ("vision", "text")
VARIABLES = {"vision": "VLM_VISION_ATTENTION", "text": "VLM_TEXT_ATTENTION"}
VARIABLE = "VLM_ATTENTION"


def stack_of(role: Role) -> str:
    """Which stack's setting applies to a role: cross-attention belongs to the text stack."""
    return "vision" if role == "encoder" else "text"


def _checked(backend: str, origin: str) -> Preference:
    name = backend.strip()
    if name in {"", "auto"}:
        return Preference()
    if name not in BACKENDS:
        raise AttentionBackendError(
            f"{origin} names {name!r}, which is no attention backend: use auto or one of {', '.join(BACKENDS)}"
        )
    return Preference(name, origin)


def _from_argument(argument: str | Mapping[str, str] | None) -> dict[str, Preference]:
    if argument is None:
        return {}
    if isinstance(argument, str):
        return {stack: _checked(argument, "argument attention=") for stack in STACKS}
    if not isinstance(argument, Mapping):
        raise AttentionBackendError(
            f"attention= takes a backend's name or a mapping as {{'vision': 'sdpa'}}, not {type(argument).__name__}"
        )
    unknown = [str(key) for key in argument if key not in STACKS]
    if unknown:
        raise AttentionBackendError(f"attention= has no role {unknown[0]!r}: use {' or '.join(STACKS)}")
    for stack, backend in argument.items():
        if not isinstance(backend, str):
            raise AttentionBackendError(
                f"attention={{{stack!r}: ...}} takes a backend's name, not {type(backend).__name__}"
            )
    return {stack: _checked(backend, f"argument attention= for {stack}") for stack, backend in argument.items()}


def _from_environment(stack: str, environ: Mapping[str, str]) -> Preference:
    for variable in (VARIABLES[stack], VARIABLE):
        if environ.get(variable, "").strip():
            return _checked(environ[variable], f"environment variable {variable}")
    return Preference()


def read_preferences(argument: str | Mapping[str, str] | None, environ: Mapping[str, str]) -> dict[str, Preference]:
    """The configured backend for "vision" and for "text".

    Args:
        argument: one backend for both stacks, a mapping from stack to backend, or None. An argument of "auto" leaves
            the
            decision to the environment and then to the default rows.
        environ: where VLM_ATTENTION, VLM_VISION_ATTENTION and VLM_TEXT_ATTENTION are looked up.

    Raises AttentionBackendError for an unknown backend or role, naming the ones there are.
    """
    given = _from_argument(argument)
    out = {}
    for stack in STACKS:
        preference = given.get(stack, Preference())
        out[stack] = preference if preference.backend else _from_environment(stack, environ)
    return out
