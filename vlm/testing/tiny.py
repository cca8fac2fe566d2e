"""Small random checkpoints in Hugging Face layout.

transformers itself writes them, so that every name in them is the real one. The shapes are tiny but not tame: several
grids of windows, grouped queries, head dims of 18 to 24, tied and untied heads.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import nn

from vlm.testing import tiny_tokenizer as tok


@dataclass(frozen=True)
class _Recipe:
    """How the checkpoint of one model type is made. `config` gets the tokenizer for its ids and returns config.json's
    fields."""

    specials: tuple[str, ...]
    template: str
    eos: str
    pad: str
    bos: str | None
    config: Callable[[Tokenizer], dict[str, Any]]
    preprocessor: Mapping[str, Any]
    processor: Mapping[str, Any]


def tiny_checkpoint(
    family: str, path: str | Path, *, seed: int = 0, max_shard_size: str = "50MB", dtype: str = "float32", **config: Any
) -> Path:
    """Write a small random checkpoint of a model type.

    Args:
        family: "qwen2_5_vl", "smolvlm" or "idefics3". path: the folder, made where it does not exist.
        max_shard_size: as save_pretrained takes it; "100KB" gives several shards and an index.
        dtype: how the weights are stored.
        config: fields of config.json that replace the recipe's; dicts are merged ("text_config", "vision_config").

    Returns:
        The folder.
    """
    from transformers import AutoConfig, AutoModelForImageTextToText

    if family not in _RECIPES:
        raise ValueError(f"no recipe for {family!r}: expected one of {', '.join(_RECIPES)}")
    recipe = _RECIPES[family]
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = tok.train_tokenizer(recipe.specials)
    fields = _merged(recipe.config(tokenizer), config)
    generator = torch.Generator().manual_seed(seed)
    model = AutoModelForImageTextToText.from_config(AutoConfig.for_model(family, **fields))
    _randomise(model, generator)
    model.to(getattr(torch, dtype)).save_pretrained(folder, max_shard_size=max_shard_size)
    tok.write_tokenizer(folder, tokenizer, recipe.template, recipe.eos, recipe.pad, recipe.bos)
    eos = tokenizer.token_to_id(recipe.eos)
    generation = {"do_sample": False, "eos_token_id": [eos], "pad_token_id": tokenizer.token_to_id(recipe.pad)}
    for name, content in (
        ("generation_config.json", generation),
        ("preprocessor_config.json", recipe.preprocessor),
        ("processor_config.json", recipe.processor),
    ):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return folder


def _merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in changes.items():
        nested = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
        merged[key] = {**merged[key], **value} if nested else value
    return merged


# Spreads over 1 / sqrt(fan in). Sharp attention and strong MLPs keep greedy text from falling into one repeated token,
# which would hide most errors: with these, 32 greedy tokens hold 25 different ones.
_SPREAD = {"q_proj": 2.0, "k_proj": 2.0, "down_proj": 3.0}
_EMBEDDING_STD = 0.1


def _randomise(model: nn.Module, generator: torch.Generator) -> None:
    """Weights large enough that every part moves the output: an initial 0.02 would let a wrong layer pass unnoticed."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "embed_tokens" in name:
                parameter.copy_(noise * _EMBEDDING_STD)
            elif parameter.ndim > 1:
                spread = _SPREAD.get(name.split(".")[-2], 1.0)
                parameter.copy_(noise * spread * parameter[0].numel() ** -0.5)
            else:
                parameter.copy_(noise * 0.2 + (1.0 if name.endswith("weight") else 0.0))


def _qwen2_5_vl(tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "text_config": {
            "vocab_size": tokenizer.get_vocab_size(),
            "hidden_size": 72,
            "intermediate_size": 96,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 4]},
            "bos_token_id": tokenizer.token_to_id("<|endoftext|>"),
            "eos_token_id": tokenizer.token_to_id("<|im_end|>"),
        },
        "vision_config": {
            "depth": 4,
            "hidden_size": 40,
            "intermediate_size": 52,
            "num_heads": 2,
            "out_hidden_size": 72,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "window_size": 84,
            "fullatt_block_indexes": [1, 3],
        },
        "image_token_id": tokenizer.token_to_id("<|image_pad|>"),
        "video_token_id": tokenizer.token_to_id("<|video_pad|>"),
        "vision_start_token_id": tokenizer.token_to_id("<|vision_start|>"),
        "vision_end_token_id": tokenizer.token_to_id("<|vision_end|>"),
        "tie_word_embeddings": True,
    }


def _siglip_llama(tokenizer: Tokenizer, vision: Mapping[str, Any], text: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "text_config": {
            "model_type": "llama",
            "vocab_size": tokenizer.get_vocab_size(),
            "hidden_size": 60,
            "intermediate_size": 96,
            "num_hidden_layers": 3,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "eos_token_id": tokenizer.token_to_id("<end_of_utterance>"),
            **text,
        },
        "vision_config": {
            "hidden_size": 36,
            "intermediate_size": 50,
            "num_hidden_layers": 3,
            "num_attention_heads": 2,
            **vision,
        },
        "image_token_id": tokenizer.token_to_id("<image>"),
    }


def _smolvlm(tokenizer: Tokenizer) -> dict[str, Any]:
    fields = _siglip_llama(tokenizer, {"image_size": 48, "patch_size": 8}, {"rope_parameters": _rope(1e5)})
    return fields | {"scale_factor": 3, "tie_word_embeddings": True}


def _idefics3(tokenizer: Tokenizer) -> dict[str, Any]:
    scaled = _rope(5e5) | {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    text = {
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 24,
        "rope_parameters": scaled,
    }
    fields = _siglip_llama(tokenizer, {"image_size": 56, "patch_size": 14}, text)
    return fields | {"scale_factor": 2, "tie_word_embeddings": False}


def _rope(theta: float) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": theta}


def _tiles(kind: str, edge: int) -> dict[str, Any]:
    return {
        "image_processor_type": kind,
        "do_convert_rgb": True,
        "do_image_splitting": True,
        "do_normalize": True,
        "do_pad": True,
        "do_rescale": True,
        "do_resize": True,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "max_image_size": {"longest_edge": edge},
        "resample": 1,
        "rescale_factor": 1 / 255,
        "size": {"longest_edge": 3 * edge},
    }


_QWEN_PIXELS = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "do_convert_rgb": True,
    "do_normalize": True,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "max_pixels": 28 * 28 * 160,
    "min_pixels": 28 * 28 * 4,
    "merge_size": 2,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "resample": 3,
    "rescale_factor": 1 / 255,
}

_RECIPES = {
    "qwen2_5_vl": _Recipe(
        specials=tok.QWEN_SPECIALS,
        template=tok.QWEN_TEMPLATE,
        eos="<|im_end|>",
        pad="<|endoftext|>",
        bos=None,
        config=_qwen2_5_vl,
        preprocessor=_QWEN_PIXELS,
        processor={"processor_class": "Qwen2_5_VLProcessor"},
    ),
    "smolvlm": _Recipe(
        specials=tok.SMOLVLM_SPECIALS,
        template=tok.SMOLVLM_TEMPLATE,
        eos="<end_of_utterance>",
        pad="<|endoftext|>",
        bos=None,
        config=_smolvlm,
        preprocessor=_tiles("SmolVLMImageProcessor", 48),
        processor={"processor_class": "SmolVLMProcessor", "image_seq_len": 4},
    ),
    "idefics3": _Recipe(
        specials=tok.IDEFICS3_SPECIALS,
        template=tok.IDEFICS3_TEMPLATE,
        eos="<end_of_utterance>",
        pad="<|finetune_right_pad_id|>",
        bos="<|begin_of_text|>",
        config=_idefics3,
        preprocessor=_tiles("Idefics3ImageProcessor", 56),
        processor={"processor_class": "Idefics3Processor", "image_seq_len": 4},
    ),
}
