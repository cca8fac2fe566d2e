"""Model families, by the `model_type` of config.json.

A literal table of module names, imported when asked for: a broken dependency of one family is never taken for an
unknown model, and listing the families costs no import of torch.
"""

from __future__ import annotations

from difflib import get_close_matches
from importlib import import_module
from typing import TYPE_CHECKING

from vlm.errors import UnsupportedModelError

if TYPE_CHECKING:
    from vlm.families.base import Family

FAMILIES: dict[str, str] = {
    "qwen2_5_vl": "vlm.families.qwen2_5_vl",
    "smolvlm": "vlm.families.idefics3",
    "idefics3": "vlm.families.idefics3",
}


def get_family(model_type: str) -> Family:
    """The family that serves `model_type`. Raises UnsupportedModelError that names the nearest supported ones."""
    if model_type not in FAMILIES:
        near = get_close_matches(model_type, FAMILIES, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        raise UnsupportedModelError(
            f"model_type {model_type!r} is not supported: {hint}Supported are {', '.join(sorted(FAMILIES))}."
        )
    return import_module(FAMILIES[model_type]).FAMILY
