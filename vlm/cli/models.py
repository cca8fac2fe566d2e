"""`vlm models`: the families, what they are made of, and which vision models opt into the upgrade."""

from __future__ import annotations

import json as json_module
from typing import Any

from vlm.cli.common import JsonOption, table
from vlm.cli.streams import write


def models(json: JsonOption = False) -> int:
    """List the model families."""
    rows = family_rows()
    if json:
        write(json_module.dumps(rows, indent=2))
        return 0
    shown = [{**row, "upstream_fa": "yes" if row["upstream_fa"] else "no"} for row in rows]
    write(table([{k: row[k] for k in ("model_type", "vision_stack", "text_stack", "upstream_fa")} for row in shown]))
    write("\nupstream_fa: whether the vision model takes the upstream FlashAttention package (CUDA 8.0 and up)")
    reasons: dict[str, list[str]] = {}
    for row in rows:
        reasons.setdefault(row["upstream_fa_reason"], []).append(row["model_type"])
    for reason, names in reasons.items():
        write(f"  {', '.join(names)}: {reason}")
    return 0


def family_rows() -> list[dict[str, Any]]:
    """One row a model_type."""
    from vlm.families import FAMILIES, get_family

    rows = []
    for model_type in FAMILIES:
        family = get_family(model_type)
        rows.append(
            {
                "model_type": model_type,
                "family": family.name,
                "vision_stack": family.vision_stack,
                "text_stack": family.text_stack,
                "upstream_fa": family.upstream_fa,
                "upstream_fa_reason": family.upstream_fa_reason,
            }
        )
    return rows
