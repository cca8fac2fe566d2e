"""Start-up: from the arguments of `VLM` to a loaded model, its engine and all that requests are made with."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from types import NoneType
from typing import Any

from vlm.attention.platform import Platform
from vlm.attention.preference import read_preferences
from vlm.engine.cache import bytes_per_token
from vlm.engine.engine import Engine, EngineConfig
from vlm.engine.memory import GIB, device_memory, kv_budget, num_blocks, on_device
from vlm.engine.scheduler import Limits
from vlm.engine.trial import working_bytes
from vlm.errors import PromptError, UnsupportedModelError
from vlm.families.base import ImageProcessor
from vlm.loading.folder import ModelFolder, resolve_folder
from vlm.loading.model import LoadedModel, load_model, read_config
from vlm.params import check_generation_config, id_set
from vlm.prepare import Preparer
from vlm.prompt.builder import PromptBuilder
from vlm.prompt.template import load_template
from vlm.prompt.tokenizer import load_tokenizer

log = logging.getLogger(__name__)

BLOCK_SIZE = 16
# Pixels a side of the picture that the trial step encodes at start-up: beyond what most runs send.
TRIAL_EDGE = 2048
# Entries of generation_config.json that would change answers, with the values that mean "off".
NOT_SERVED: dict[str, tuple[Any, ...]] = {
    "num_beams": (None, 1),
    "no_repeat_ngram_size": (None, 0),
    "typical_p": (None, 1.0),
    "epsilon_cutoff": (None, 0.0),
    "eta_cutoff": (None, 0.0),
    "penalty_alpha": (None, 0.0),
    "encoder_repetition_penalty": (None, 1.0),
    "min_new_tokens": (None, 0),
    "forced_bos_token_id": (None,),
    "forced_eos_token_id": (None,),
    "begin_suppress_tokens": (None, []),
    "sequence_bias": (None, {}, []),
}


# Arguments of `VLM` that have one type, or two: their names, the types, and how messages call these.
_TYPES: tuple[tuple[tuple[str, ...], tuple[type, ...], str], ...] = (
    (("model",), (str, PathLike, NoneType), "a folder, a hub id or None"),
    (("dtype", "device", "load_format"), (str,), "a string"),
    (("revision",), (str, NoneType), "a string or None"),
    (("enable_prefix_cache", "deterministic", "trust_remote_code"), (bool,), "True or False"),
)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


@dataclass(frozen=True)
class Settings:
    """The arguments of `VLM`; see there."""

    model: str | Path | None = None
    dtype: str = "auto"
    device: str = "auto"
    attention: str | Mapping[str, str] = "auto"
    max_model_len: int | None = None
    max_pixels: int | None = None
    max_batch_tokens: int | None = None
    max_num_seqs: int | None = None
    kv_cache_gib: float | None = None
    image_cache_gib: float = 0.25
    gpu_memory_fraction: float = 0.9
    seed: int = 0
    enable_prefix_cache: bool = True
    deterministic: bool = False
    trust_remote_code: bool = False
    revision: str | None = None
    load_format: str = "auto"

    def check(self) -> None:
        """Refuse what can be refused before anything is loaded."""
        for names, types, what in _TYPES:
            for name in names:
                if not isinstance(value := getattr(self, name), types):
                    raise PromptError(f"{name}={value!r}: {name} must be {what}")
        for name in ("max_model_len", "max_pixels", "max_batch_tokens", "max_num_seqs"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise PromptError(f"{name}={value!r}: {name} must be an integer, 1 or more, or None")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or self.seed < 0:
            raise PromptError(f"seed={self.seed!r}: seed must be an integer, 0 or more")
        if not _is_number(self.gpu_memory_fraction) or not 0 < self.gpu_memory_fraction <= 1:
            raise PromptError(f"gpu_memory_fraction={self.gpu_memory_fraction!r} must be above 0 and at most 1")
        if (gib := self.kv_cache_gib) is not None and (not _is_number(gib) or not 0 < gib < math.inf):
            raise PromptError(f"kv_cache_gib={gib!r} must be a number above 0, or None")
        if not _is_number(self.image_cache_gib) or not 0 <= self.image_cache_gib < math.inf:
            raise PromptError(f"image_cache_gib={self.image_cache_gib!r} must be a number, 0 or more")
        if self.deterministic:
            raise UnsupportedModelError(
                "deterministic=True (answers that do not depend on the batch, bit by bit) is not served by this version"
            )


@dataclass(frozen=True, eq=False)
class Started:
    """A model that is ready for requests."""

    loaded: LoadedModel
    engine: Engine
    preparer: Preparer


def start(settings: Settings, environ: Mapping[str, str], progress: bool = True) -> Started:
    """Load the model and lay out its cache. Raises VLMError of the kind that fits; nothing is left behind then."""
    settings.check()
    preferences = read_preferences(settings.attention, environ)
    model = settings.model if settings.model is not None else environ.get("VLM_MODEL") or None
    folder = ModelFolder(resolve_folder(model, settings.revision))
    # What is small first: reading the weights takes long.
    family, family_config = read_config(folder)
    overrides = {} if settings.max_pixels is None else {"max_pixels": settings.max_pixels}
    processor = family.image_processor(folder.preprocessor_config, family_config, overrides)
    generation = _generation_config(folder)
    tokenizer = load_tokenizer(folder.path)
    platform = Platform.detect(settings.device)
    loaded = load_model(
        folder,
        platform,
        dtype=settings.dtype,
        device=platform.device,
        preferences=preferences,
        load_format=settings.load_format,
        progress=progress,
        seed=settings.seed,
    )
    log.info("attention: %s", ", ".join(f"{d.group} {d.backend} ({d.source})" for d in loaded.decisions))
    config = engine_config(settings, loaded, processor, _banned(loaded, generation))
    engine = Engine(loaded.model, config, tokenizer.stream_decoder)
    template = load_template(folder.path)
    preparer = Preparer(
        family=loaded.family,
        config=loaded.config,
        tokenizer=tokenizer,
        processor=processor,
        builder=PromptBuilder(tokenizer, template, loaded.family, loaded.config),
        generation_config=generation,
        check_length=config.check_length,
        keys=config.prefix_cache or config.feature_cache_bytes > 0,
    )
    _log_cache(config, loaded)
    return Started(loaded, engine, preparer)


def engine_config(
    settings: Settings, loaded: LoadedModel, processor: ImageProcessor, banned_ids: frozenset[int]
) -> EngineConfig:
    """Budgets for this device, and a cache of what its memory leaves."""
    on_cpu = loaded.device.type == "cpu"
    limits = Limits(
        max_num_seqs=settings.max_num_seqs or (64 if on_cpu else 256),
        max_batch_tokens=settings.max_batch_tokens or (2048 if on_cpu else 8192),
        max_image_values=1 << (23 if on_cpu else 25),
    )
    max_model_len = _max_model_len(settings, loaded)
    feature_cache_bytes = int(settings.image_cache_gib * GIB)
    working = 0
    if settings.kv_cache_gib is None and loaded.device.type == "cuda":
        with on_device(loaded.device):
            working = _trial(loaded, processor, limits, max_model_len)
    budget = kv_budget(
        device_memory(loaded.device),
        settings.gpu_memory_fraction,
        working + feature_cache_bytes,
        None if settings.kv_cache_gib is None else int(settings.kv_cache_gib * GIB),
    )
    return EngineConfig(
        max_model_len=max_model_len,
        num_blocks=num_blocks(loaded.model.kv, loaded.dtype, BLOCK_SIZE, budget, limits.max_num_seqs, max_model_len),
        block_size=BLOCK_SIZE,
        limits=limits,
        dtype=loaded.dtype,
        device=loaded.device,
        image_token_id=loaded.family.image_token_id(loaded.config),
        banned_ids=banned_ids,
        seed=settings.seed,
        prefix_cache=settings.enable_prefix_cache,
        feature_cache_bytes=feature_cache_bytes,
    )


def _max_model_len(settings: Settings, loaded: LoadedModel) -> int:
    trained = int(loaded.config.text.max_position_embeddings)
    if settings.max_model_len is not None and settings.max_model_len > trained:
        raise UnsupportedModelError(
            f"max_model_len={settings.max_model_len} is beyond the model's {trained} positions; leave it out"
        )
    return settings.max_model_len or trained


def _trial(loaded: LoadedModel, processor: ImageProcessor, limits: Limits, max_model_len: int) -> int:
    from PIL import Image

    image = processor(Image.new("RGB", (TRIAL_EDGE, TRIAL_EDGE)))
    positions, _ = loaded.family.positions([0], [], loaded.config)
    rope_dims = tuple(positions.shape[:-1])
    return working_bytes(loaded.model, limits, max_model_len, image, rope_dims, loaded.dtype, loaded.device)


def _generation_config(folder: ModelFolder) -> Mapping[str, Any]:
    """generation_config.json; where it has no end-of-sequence id, with that of config.json, as in older checkpoints."""
    generation = dict(folder.generation_config)
    check_generation_config(generation, str(folder.path / "generation_config.json"))
    text = folder.config.get("text_config")
    for config in (folder.config, text if isinstance(text, Mapping) else {}):
        if generation.get("eos_token_id") is None and config.get("eos_token_id") is not None:
            generation["eos_token_id"] = config["eos_token_id"]
            check_generation_config({"eos_token_id": config["eos_token_id"]}, str(folder.path / "config.json"))
    for name in NOT_SERVED:
        if generation.get(name) not in NOT_SERVED[name]:
            log.warning("generation_config.json sets %s=%r, which this version does not apply", name, generation[name])
    return generation


def _banned(loaded: LoadedModel, generation: Mapping[str, Any]) -> frozenset[int]:
    """Ids that no answer may have: the image placeholder's, and those that the checkpoint forbids."""
    words = generation.get("bad_words_ids") or []
    if any(len(word) > 1 for word in words):
        log.warning("generation_config.json forbids sequences of tokens, which this version does not apply")
    single = {word[0] for word in words if len(word) == 1}
    return id_set(generation.get("suppress_tokens")) | single | {loaded.family.image_token_id(loaded.config)}


def _log_cache(config: EngineConfig, loaded: LoadedModel) -> None:
    tokens = config.num_blocks * config.block_size
    log.info(
        "KV cache: %s tokens, %.2f GiB; %.1f requests at once at the full length of %s tokens, %d at most",
        f"{tokens:,}",
        tokens * bytes_per_token(loaded.model.kv, loaded.dtype) / GIB,
        tokens / config.max_tokens,
        f"{config.max_tokens:,}",
        config.limits.seats,
    )
