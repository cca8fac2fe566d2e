"""Tokenizers and chat templates for small checkpoints: byte-level BPE with the special tokens of a family."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

# Enough repetition for a hundred merges; "\n\n" among them, as in the tokenizers of real models.
_CORPUS = (
    "Describe this image. What is in the picture? How many circles are there? Read the text.\n\n",
    "a large red circle left of a small blue square; the quick brown fox jumps over the lazy dog.\n\n",
    "User: Which picture has more?\n\nAssistant: The first picture. It shows a green triangle and two stars.\n\n",
)

QWEN_SPECIALS = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    *("<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"),
)
_TILES = tuple(f"<row_{r}_col_{c}>" for r in range(1, 7) for c in range(1, 7))
_IMAGE = ("<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>", *_TILES)
SMOLVLM_SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *_IMAGE)
IDEFICS3_SPECIALS = ("<|begin_of_text|>", "<|end_of_text|>", "<|finetune_right_pad_id|>", *_IMAGE)

QWEN_TEMPLATE = """\
{%- if messages[0].role != 'system' %}<|im_start|>system
You are a helpful assistant.<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}
{%- else %}{% for part in message.content %}
{%- if part.type == 'text' %}{{ part.text }}
{%- else %}<|vision_start|><|image_pad|><|vision_end|>{% endif %}
{%- endfor %}{% endif %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

# {start} is what a conversation begins with; the rest is common to SmolVLM and Idefics3.
_IDEFICS_TEMPLATE = """\
{start}{% for message in messages %}{{ message.role | capitalize }}:
{%- if message.content is string %} {{ message.content }}
{%- else %}{% if message.content[0].type == 'text' %} {% endif %}
{%- for part in message.content %}{% if part.type == 'text' %}{{ part.text }}{% else %}<image>{% endif %}{% endfor %}
{%- endif %}<end_of_utterance>
{% endfor %}
{%- if add_generation_prompt %}Assistant:{% endif %}"""
SMOLVLM_TEMPLATE = _IDEFICS_TEMPLATE.replace("{start}", "<|im_start|>")
IDEFICS3_TEMPLATE = _IDEFICS_TEMPLATE.replace("{start}", "<|begin_of_text|>")


def train_tokenizer(specials: Sequence[str]) -> Tokenizer:
    """All 256 bytes, some merges, and `specials` at the end."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=360, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(_CORPUS * 4, trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in specials])
    return tokenizer


def write_tokenizer(
    folder: Path, tokenizer: Tokenizer, template: str, eos: str, pad: str, bos: str | None = None
) -> None:
    """tokenizer.json, tokenizer_config.json and chat_template.jinja."""
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": bos,
        "eos_token": eos,
        "pad_token": pad,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 4096,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
