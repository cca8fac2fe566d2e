"""`vlm env`: what this machine has, for bug reports."""

from __future__ import annotations

import json as json_module
import os
import platform as host
from importlib import metadata
from typing import Any

from vlm.cli.common import JsonOption
from vlm.cli.streams import visible, write

PACKAGES = (
    "vlm-runtime",
    "torch",
    "triton",
    "transformers",
    "tokenizers",
    "safetensors",
    "pillow",
    "numpy",
    "huggingface-hub",
)
VARIABLES = (
    "VLM_ATTENTION",
    "VLM_VISION_ATTENTION",
    "VLM_TEXT_ATTENTION",
    "VLM_MODEL",
    "VLM_LOG_LEVEL",
    "HF_HOME",
    "HF_HUB_OFFLINE",
    "CUDA_VISIBLE_DEVICES",
)


def env(json: JsonOption = False) -> int:
    """Show versions, devices and attention providers."""
    facts = gather_facts()
    if json:
        write(json_module.dumps(facts, indent=2))
        return 0
    for title, values in facts.items():
        write(f"{title}:")
        entries = values.items() if isinstance(values, dict) else enumerate(values)
        for name, value in entries:
            write(f"  {name}: {visible(str(value))}")
    return 0


def gather_facts() -> dict[str, Any]:
    """Versions, host, devices, providers (each really imported, with the reason where it fails) and what is set."""
    return {
        "packages": {name: _version(name) for name in PACKAGES},
        "host": {
            "python": host.python_version(),
            "system": host.platform(),
            "machine": host.machine(),
            "cpus": os.cpu_count(),
            "cpu_threads": _torch_threads(),
        },
        "devices": _devices(),
        "platform": _platform(),
        "providers": _providers(),
        "environment": {name: os.environ[name] for name in VARIABLES if name in os.environ},
    }


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def _torch_threads() -> int:
    import torch

    return torch.get_num_threads()


def _devices() -> list[str]:
    import torch

    found = []
    for index in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(index)
        found.append(f"cuda:{index} {p.name}, {p.total_memory / 2**30:.1f} GiB, compute capability {p.major}.{p.minor}")
    if hasattr(torch, "xpu"):
        found += [f"xpu:{i} {torch.xpu.get_device_name(i)}" for i in range(torch.xpu.device_count())]
    if torch.backends.mps.is_available():
        found.append("mps")
    return [*found, "cpu"]


def _platform() -> dict[str, Any]:
    from vlm.attention.platform import Platform

    p = Platform.detect("auto")
    return {
        "kind": p.kind,
        "name": p.name,
        "capability": ".".join(map(str, p.capability)) if p.capability else p.arch,
        "shared_memory": p.shared_memory,
        "bf16": p.bf16,
    }


def _providers() -> dict[str, str]:
    from vlm.attention.platform import DISTRIBUTIONS, Providers

    providers = Providers()
    found = {}
    for name in (*DISTRIBUTIONS, "triton"):
        probe = providers.probe(name)
        found[name] = probe.error or probe.version or "imports"
    return found
