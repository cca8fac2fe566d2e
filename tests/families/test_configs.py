"""config.json of each family: published spellings, and errors that say which field is wrong."""

import pytest
import torch

from vlm.errors import CheckpointError, UnsupportedModelError
from vlm.families import FAMILIES, get_family
from vlm.loading.folder import ModelFolder

# config.json of Qwen2.5-VL-3B-Instruct, as published: the text part at the top level, `in_chans`, type "mrope".
QWEN_3B = {
    "model_type": "qwen2_5_vl",
    "image_token_id": 151655,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "max_position_embeddings": 128000,
    "max_window_layers": 70,
    "num_attention_heads": 16,
    "num_hidden_layers": 36,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vision_config": {
        "depth": 32,
        "hidden_act": "silu",
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "in_chans": 3,
        "out_hidden_size": 2048,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "spatial_patch_size": 14,
        "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31],
        "tokens_per_second": 2,
        "temporal_patch_size": 2,
    },
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "vocab_size": 151936,
}
# What SmolVLM-256M-Instruct's config.json says of its shape.
SMOLVLM_256M = {
    "model_type": "idefics3",
    "image_token_id": 49190,
    "scale_factor": 4,
    "tie_word_embeddings": False,
    "text_config": {
        "model_type": "llama",
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_attention_heads": 9,
        "num_hidden_layers": 30,
        "num_key_value_heads": 3,
        "rms_norm_eps": 1e-05,
        "rope_theta": 100000,
        "max_position_embeddings": 8192,
        "vocab_size": 49280,
    },
    "vision_config": {
        "hidden_size": 768,
        "image_size": 512,
        "intermediate_size": 3072,
        "num_attention_heads": 12,
        "patch_size": 16,
        "max_image_size": {"longest_edge": 512},
    },
}


def test_published_qwen_config():
    family = get_family("qwen2_5_vl")
    config = family.parse(QWEN_3B)
    assert config.tie_word_embeddings
    assert (config.vision.head_dim, config.vision.window, config.vision.patch_dim) == (80, 4, 1176)
    groups = family.layer_groups(config, "bfloat16")
    assert list(groups) == ["vision.full", "vision.window", "text"]
    assert [g.upstream_fa for g in groups.values()] == [True, True, False]
    assert [g.stack for g in groups.values()] == ["vision", "vision", "text"]
    assert groups["text"].spec.num_kv_heads == 2


def test_the_nested_form_reads_the_same():
    family = get_family("qwen2_5_vl")
    outer = {"model_type", "image_token_id", "vision_config", "tie_word_embeddings"}
    text = {k: v for k, v in QWEN_3B.items() if k not in outer}
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}
    del text["rope_scaling"], text["rope_theta"]
    nested = {k: v for k, v in QWEN_3B.items() if k in outer} | {"text_config": text}
    assert family.parse(nested) == family.parse(QWEN_3B)
    inside = {**nested, "tie_word_embeddings": False, "text_config": {**text, "tie_word_embeddings": True}}
    assert family.parse(inside) == family.parse(QWEN_3B)


def test_published_smolvlm_config():
    family = get_family("smolvlm")
    config = family.parse(SMOLVLM_256M)
    assert config.tokens_per_tile(512) == 64
    assert (config.vision.num_layers, config.vision.head_dim, config.text.head_dim) == (12, 64, 64)
    groups = family.layer_groups(config, "bfloat16")
    assert {name: g.upstream_fa for name, g in groups.items()} == {"vision": False, "text": False}


@pytest.mark.parametrize(("config", "parameters"), [(QWEN_3B, 3_754_622_976), (SMOLVLM_256M, 256_484_928)])
def test_published_models_have_their_published_number_of_parameters(config, parameters):
    family = get_family(config["model_type"])
    parsed = family.parse(config)
    with torch.device("meta"):
        model = family.build(parsed, dict.fromkeys(family.layer_groups(parsed, "bfloat16")))
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters


@pytest.mark.parametrize("model_type", FAMILIES)
def test_configs_written_by_transformers_are_read(model_type, vlm_tiny_checkpoints):
    folder = ModelFolder(vlm_tiny_checkpoints(model_type))
    config = get_family(model_type).parse(folder.config)
    assert config.text.num_layers == 3


@pytest.mark.parametrize(
    ("base", "change", "error", "says"),
    [
        (QWEN_3B, {"vision_config": None}, CheckpointError, "'vision_config' is missing"),
        (QWEN_3B, {"vocab_size": "many"}, CheckpointError, "config.json: vocab_size is 'many', but must be a whole"),
        (QWEN_3B, {"vocab_size": None}, CheckpointError, "the text part lacks the field 'vocab_size'"),
        (QWEN_3B, {"hidden_size": 4096, "num_attention_heads": 32}, CheckpointError, "out_hidden_size 2048"),
        (QWEN_3B, {"hidden_act": "gelu"}, UnsupportedModelError, "gelu"),
        (QWEN_3B, {"rope_scaling": {"type": "dynamic", "factor": 2}}, UnsupportedModelError, "dynamic"),
        (SMOLVLM_256M, {"text_config": []}, CheckpointError, "'text_config' is no object"),
        (SMOLVLM_256M, {"text_config": {"model_type": "mistral"}}, UnsupportedModelError, "mistral"),
        (SMOLVLM_256M, {"text_config": {"model_type": "llama"}}, CheckpointError, "lacks the field 'hidden_size'"),
        (SMOLVLM_256M, {"scale_factor": 5}, CheckpointError, "scale_factor 5"),
    ],
)
def test_wrong_configs_are_refused_by_field(base, change, error, says):
    with pytest.raises(error, match=says):
        get_family(base["model_type"]).parse(base | change)


@pytest.mark.parametrize(
    ("base", "part", "key", "values"),
    [
        (QWEN_3B, "", "hidden_size", (-1, 0, True, 2.5, 10**12)),
        (QWEN_3B, "", "num_attention_heads", (0,)),
        (QWEN_3B, "", "num_key_value_heads", (0, -2)),
        (QWEN_3B, "", "max_position_embeddings", (0, -1)),
        (QWEN_3B, "", "image_token_id", (-1, "x", 1 << 40)),
        (QWEN_3B, "", "video_token_id", (-1,)),
        (QWEN_3B, "", "vision_start_token_id", (-1,)),
        (QWEN_3B, "", "sliding_window", (-1,)),
        (QWEN_3B, "", "rms_norm_eps", (0, "x", float("nan"), float("inf"))),
        (QWEN_3B, "rope_scaling", "mrope_section", (3, [-1, 65], ["x"])),
        (QWEN_3B, "vision_config", "patch_size", (0, -14)),
        (QWEN_3B, "vision_config", "num_heads", (0,)),
        (QWEN_3B, "vision_config", "spatial_merge_size", (0,)),
        (QWEN_3B, "vision_config", "depth", (0,)),
        (QWEN_3B, "vision_config", "in_channels", (1, -1)),
        (QWEN_3B, "vision_config", "fullatt_block_indexes", (7, [-1])),
        (SMOLVLM_256M, "", "scale_factor", (0, -1, "x")),
        (SMOLVLM_256M, "vision_config", "patch_size", (0,)),
        (SMOLVLM_256M, "vision_config", "num_attention_heads", (0,)),
        (SMOLVLM_256M, "vision_config", "num_channels", (-1, 1)),
        (SMOLVLM_256M, "text_config", "intermediate_size", (-1,)),
        (SMOLVLM_256M, "text_config", "rope_theta", (0, -1)),
    ],
)
def test_numbers_that_make_no_sense_are_named_with_their_place(base, part, key, values):
    for value in values:
        change = {key: value} if not part else {part: base[part] | {key: value}}
        place = f"{part}.{key}" if part else key
        with pytest.raises(CheckpointError, match=f"^config.json: {place} is .*, but must be ") as raised:
            get_family(base["model_type"]).parse(base | change)
        assert repr(value) in str(raised.value)


@pytest.mark.parametrize(
    ("change", "says"), [({"num_key_value_heads": 2}, "no multiple of 2"), ({"head_dim": 63}, "63 is odd")]
)
def test_heads_that_do_not_fit_are_refused(change, says):
    with pytest.raises(CheckpointError, match=f"text_config is not valid: .*{says}"):
        get_family("smolvlm").parse(SMOLVLM_256M | {"text_config": SMOLVLM_256M["text_config"] | change})


@pytest.mark.parametrize(
    ("base", "preprocessor", "says"),
    [
        (QWEN_3B, {"patch_size": 7}, "patch_size is 7, but config.json: vision_config.patch_size is 14"),
        (QWEN_3B, {"merge_size": 1}, "merge_size is 1, but config.json: vision_config.spatial_merge_size is 2"),
        (QWEN_3B, {"temporal_patch_size": 1}, "temporal_patch_size is 1, but .*vision_config.temporal_patch_size is 2"),
        (SMOLVLM_256M, {}, "max_image_size is 364, but config.json: vision_config.image_size is 512"),
        (SMOLVLM_256M, {"max_image_size": {"longest_edge": 384}}, "max_image_size is 384, but .* is 512"),
    ],
)
def test_a_preprocessor_of_another_model_is_refused(base, preprocessor, says):
    family = get_family(base["model_type"])
    with pytest.raises(CheckpointError, match=f"^preprocessor_config.json: {says}; .*do not belong together"):
        family.image_processor(preprocessor, family.parse(base), {})
