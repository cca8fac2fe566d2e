"""From a model folder to a built model on its device: config, attention decisions, modules, weights."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from vlm.attention.factory import build, select
from vlm.attention.platform import Platform, resolve_dtype
from vlm.attention.spec import Decision, Preference
from vlm.errors import UnsupportedModelError
from vlm.families import get_family
from vlm.families.base import Family, VisionLanguageModel
from vlm.loading.folder import ModelFolder
from vlm.loading.safetensors_files import TensorEntry, read_checkpoint
from vlm.loading.weights import canonical, fill, fill_randomly, match, same_values, stored_dtype

log = logging.getLogger(__name__)

LOAD_FORMATS = ("auto", "safetensors", "dummy")


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A model that is ready to run.

    Attributes:
        config: the family's own config. decisions: one a layer group, `group` filled in.
        weight_bytes: bytes of all parameters, on the device. load_seconds: from the first header to the last weight.
    """

    model: VisionLanguageModel
    family: Family
    config: Any
    decisions: list[Decision]
    device: torch.device
    dtype: torch.dtype
    weight_bytes: int
    load_seconds: float


def load_model(
    folder: ModelFolder,
    platform: Platform,
    dtype: str = "auto",
    device: str = "auto",
    preferences: Mapping[str, Preference] | None = None,
    load_format: str = "auto",
    progress: bool = True,
    seed: int = 0,
) -> LoadedModel:
    """Build the model of a folder and fill it.

    Args:
        dtype: "auto" (the checkpoint's; float32 on a CPU) or a torch dtype name. device: "auto" (the platform's) or a
            torch device.
        preferences: the configured attention backend of "vision" and of "text", where there is one.
        load_format: "auto" and "safetensors" read the weights, "dummy" makes them up from `seed`, for benchmarks.
        progress: show a bar when stderr is a terminal.

    Raises:
        UnsupportedModelError: an architecture, quantisation or setting that is not served.
        CheckpointError: configs or weights that are missing, damaged or do not belong together.
        AttentionBackendError: a configured backend that cannot do the job.
    """
    if load_format not in LOAD_FORMATS:
        raise UnsupportedModelError(
            f"load_format {load_format!r} is unknown: expected one of {', '.join(LOAD_FORMATS)}"
        )
    started = time.perf_counter()
    family, config = read_config(folder)
    tensors = {} if load_format == "dummy" else read_checkpoint(folder.path)
    entries = canonical(tensors, family.canonical_name)
    config, entries = _settle_tied_head(family, config, entries)

    dtype_name, warning = resolve_dtype(dtype, _config_dtype(folder.config) or stored_dtype(entries), platform)
    if warning:
        log.warning(warning)
    target = torch.device(platform.device if device == "auto" else device)
    torch_dtype = getattr(torch, dtype_name)

    model, decisions = _build(family, config, dtype_name, platform, preferences or {})
    if load_format == "dummy":
        _materialise(model, target, torch_dtype)
        fill_randomly(model, seed)
    else:
        sources = match(folder.path, model, family.weight_map(config), entries)
        _materialise(model, target, torch_dtype)
        fill(model, sources, progress)
    if target.type == "cuda":
        pad_odd_widths(model)
    weight_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    seconds = time.perf_counter() - started
    log.info("weights loaded: %.2f GiB of %s on %s in %.1f s", weight_bytes / 2**30, dtype_name, target, seconds)
    return LoadedModel(model.eval(), family, config, decisions, target, torch_dtype, weight_bytes, seconds)


def read_config(folder: ModelFolder) -> tuple[Family, Any]:
    """The family of a folder and its own form of config.json: what can be known without the weights.

    Raises:
        UnsupportedModelError: an architecture, quantisation or setting that is not served.
        CheckpointError: a config.json that is missing or wrong.
    """
    family = get_family(folder.model_type)
    _refuse_quantised(folder)
    return family, family.parse(folder.config)


def _refuse_quantised(folder: ModelFolder) -> None:
    """Exports put the entry at the top or into the part that is quantised."""
    parts = (folder.config, folder.config.get("text_config"), folder.config.get("vision_config"))
    for part in parts:
        if isinstance(part, Mapping) and (how := part.get("quantization_config")):
            method = how.get("quant_method", "unknown") if isinstance(how, Mapping) else how
            raise UnsupportedModelError(
                f"{folder.path} is quantised ({method}), which this version does not serve: "
                "use the unquantised checkpoint"
            )


def _config_dtype(config: Mapping[str, Any]) -> str | None:
    """The dtype that config.json states, at the top or in its text part; None where it is silent."""
    nested = config.get("text_config")
    for part in (config, nested if isinstance(nested, Mapping) else {}):
        value = part.get("dtype") or part.get("torch_dtype")
        if isinstance(value, str) and value != "auto":
            return value.removeprefix("torch.")
    return None


def _settle_tied_head(
    family: Family, config: Any, entries: dict[str, TensorEntry]
) -> tuple[Any, dict[str, TensorEntry]]:
    """Some exports say that head and embeddings are tied, yet store both. Where the two differ, the weights are right
    and the config is not; where they are equal, the head is a copy that needs no memory."""
    if not config.tie_word_embeddings:
        return config, entries
    untied = replace(config, tie_word_embeddings=False, text=replace(config.text, tie_word_embeddings=False))
    tied_map, untied_map = family.weight_map(config), family.weight_map(untied)
    (head,) = (untied_map[name][0] for name in untied_map.keys() - tied_map.keys())
    embeddings = tied_map["text.embed_tokens.weight"][0]
    if head not in entries or embeddings not in entries:
        return config, entries
    if not same_values(entries[head], entries[embeddings]):
        return untied, entries
    return config, {name: entry for name, entry in entries.items() if name != head}


def _build(
    family: Family, config: Any, dtype: str, platform: Platform, preferences: Mapping[str, Preference]
) -> tuple[VisionLanguageModel, list[Decision]]:
    """Modules without memory, each layer group with the backend that the factory chose."""
    decisions: list[Decision] = []
    ops: dict[str, Callable[..., torch.Tensor]] = {}
    for name, group in family.layer_groups(config, dtype).items():
        decision = select(group.spec, platform, preferences.get(group.stack, Preference()), group.upstream_fa)
        decisions.append(replace(decision, group=name))
        ops[name] = build(decision, group.spec, platform)
    with torch.device("meta"):
        return family.build(config, ops), decisions


def _materialise(model: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Memory for the parameters, not yet filled; buffers keep their values and their dtype (rotary frequencies stay
    float32)."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                empty = torch.empty(parameter.shape, dtype=dtype, device=device)
                module._parameters[name] = nn.Parameter(empty, requires_grad=False)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                assert not buffer.is_meta, f"{type(module).__name__}.{name} must be made on the CPU"
                module._buffers[name] = buffer.to(device)


def pad_odd_widths(model: nn.Module) -> None:
    """Zero-pad the MLPs whose width costs tensor cores their speed. The outputs stay the same."""
    for module in model.modules():
        if callable(pad := getattr(module, "pad_width", None)):
            pad()
