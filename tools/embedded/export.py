"""Writes the checkpoint folder in Hugging Face's SmolVLM layout."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from .model import Config, Model
from .render import PATCH
from .scenes import SIDE
from .tokenizer import END, FAKE, GLOBAL, IMAGE, IMAGE_TOKENS, PAD, SPECIALS, START, Codec

CHAT_TEMPLATE = """\
{{- '<|im_start|>' -}}
{%- for message in messages -%}
  {{- message['role'] | capitalize ~ ':' -}}
  {%- if message['content'] is string -%}
    {{- message['content'] -}}
  {%- else -%}
    {%- for part in message['content'] -%}
      {%- if part is string -%}
        {{- part -}}
      {%- elif part['type'] in ['image', 'image_url'] -%}
        {{- '<image>' -}}
      {%- elif part['type'] == 'text' -%}
        {{- part['text'] -}}
      {%- endif -%}
    {%- endfor -%}
  {%- endif -%}
  {{- '<end_of_utterance>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- 'Assistant:' -}}
{%- endif -%}
"""
MAX_POSITIONS = 1024


def config_json(c: Config, codec: Codec) -> dict:
    """``config.json``."""
    return {
        "architectures": ["SmolVLMForConditionalGeneration"],
        "model_type": "smolvlm",
        "dtype": "bfloat16",
        "image_token_id": codec.image,
        "pad_token_id": codec.pad,
        "scale_factor": c.scale_factor,
        "tie_word_embeddings": True,
        "use_cache": True,
        "text_config": {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "dtype": "bfloat16",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": codec.start,
            "eos_token_id": codec.end,
            "pad_token_id": codec.pad,
            "head_dim": c.head_dim,
            "hidden_act": "silu",
            "hidden_size": c.text_width,
            "initializer_range": 0.02,
            "intermediate_size": c.text_mlp,
            "max_position_embeddings": MAX_POSITIONS,
            "mlp_bias": False,
            "num_attention_heads": c.text_heads,
            "num_hidden_layers": c.text_layers,
            "num_key_value_heads": c.text_kv_heads,
            "rms_norm_eps": c.text_eps,
            "rope_parameters": {"rope_theta": c.rope_theta, "rope_type": "default"},
            "rope_theta": c.rope_theta,
            "tie_word_embeddings": True,
            "use_cache": True,
            "vocab_size": c.vocab,
        },
        "vision_config": {
            "model_type": "smolvlm_vision",
            "dtype": "bfloat16",
            "attention_dropout": 0.0,
            "hidden_act": "gelu_pytorch_tanh",
            "hidden_size": c.vision_width,
            "image_size": SIDE,
            "initializer_range": 0.02,
            "intermediate_size": c.vision_mlp,
            "layer_norm_eps": c.vision_eps,
            "num_attention_heads": c.vision_width // c.head_dim,
            "num_channels": 3,
            "num_hidden_layers": c.vision_layers,
            "patch_size": PATCH,
        },
    }


PREPROCESSOR = {
    "image_processor_type": "Idefics3ImageProcessor",
    "processor_class": "Idefics3Processor",
    "do_convert_rgb": True,
    "do_image_splitting": False,
    "do_normalize": True,
    "do_pad": True,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "max_image_size": {"longest_edge": SIDE},
    "resample": 1,
    "rescale_factor": 1 / 255,
    "size": {"longest_edge": SIDE},
}


def write_folder(folder: Path, codec: Codec, c: Config) -> None:
    """Everything but the weights and the model card."""
    folder.mkdir(parents=True, exist_ok=True)
    codec.tokenizer.save(str(folder / "tokenizer.json"))
    tokens = {
        str(i): {
            "content": t,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": True,
        }
        for i, t in enumerate(SPECIALS)
    }
    files = {
        "config.json": config_json(c, codec),
        "generation_config.json": {
            "bos_token_id": codec.start,
            "eos_token_id": [codec.end, codec.pad],
            "pad_token_id": codec.pad,
            "do_sample": False,
            "max_new_tokens": 64,
        },
        "preprocessor_config.json": PREPROCESSOR,
        "processor_config.json": {"image_seq_len": IMAGE_TOKENS, "processor_class": "Idefics3Processor"},
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "added_tokens_decoder": tokens,
            "bos_token": START,
            "eos_token": END,
            "pad_token": PAD,
            "unk_token": PAD,
            "additional_special_tokens": [FAKE, IMAGE, GLOBAL, END],
            "fake_image_token": FAKE,
            "image_token": IMAGE,
            "global_image_token": GLOBAL,
            "end_of_utterance_token": END,
            "clean_up_tokenization_spaces": False,
            "add_prefix_space": False,
            "model_max_length": MAX_POSITIONS,
        },
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)


def state_dict(model: Model) -> dict[str, torch.Tensor]:
    """bf16 weights under the checkpoint's names (the tied output head is not stored)."""
    return {
        k: v.detach().to("cpu", torch.bfloat16).contiguous()
        for k, v in model.state_dict().items()
        if k.startswith("model.")
    }


def save_weights(model: Model, folder: Path, shards: int = 1) -> None:
    """``model.safetensors``, or that many shards with their index."""
    state = state_dict(model)
    meta = {"format": "pt"}
    folder.mkdir(parents=True, exist_ok=True)
    if shards == 1:
        save_file(state, folder / "model.safetensors", metadata=meta)
        return
    total = sum(v.nbytes for v in state.values())
    parts: list[dict[str, torch.Tensor]] = [{} for _ in range(shards)]
    done = 0
    for key in sorted(state):
        parts[min(shards - 1, done * shards // total)][key] = state[key]
        done += state[key].nbytes
    where = {}
    for i, part in enumerate(parts):
        name = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        save_file(part, folder / f"{name}.part", metadata=meta)
        (folder / f"{name}.part").rename(folder / name)  # a reader meets whole files only
        where.update(dict.fromkeys(part, name))
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    """What `save_weights` wrote: ``model.safetensors`` if that is there, else the shards."""
    from safetensors.torch import load_file

    whole = folder / "model.safetensors"
    state: dict[str, torch.Tensor] = {}
    for part in [whole] if whole.is_file() else sorted(folder.glob("model-*-of-*.safetensors")):
        state.update(load_file(part))
    if not state:
        raise FileNotFoundError(f"{folder} holds no model.safetensors and no shards of one")
    return state


def load_weights(model: Model, folder: Path) -> None:
    """The weights that `save_weights` wrote; what is not exported stays as it is."""
    missing, unknown = model.load_state_dict(read_weights(folder), strict=False)
    wrong = [*unknown, *(name for name in missing if name.startswith("model."))]
    if wrong:
        raise ValueError(f"{folder}: not a checkpoint of this model: {', '.join(wrong)}")


def merge_shards(folder: Path, out: Path) -> None:
    """One ``model.safetensors`` from the weights of ``folder``."""
    save_file(read_weights(folder), out / "model.safetensors", metadata={"format": "pt"})
