"""Text configs, as transformers 4 and 5 spell them."""

import pytest

from vlm.text.llama import LlamaConfig
from vlm.text.qwen2 import Qwen2Config

# The fields of the published Qwen2.5-VL-3B config that the text stack reads.
QWEN_3B = {
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
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "sliding_window": 32768,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
LLAMA = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 100,
}


def test_published_qwen_config():
    config = Qwen2Config.from_hf(QWEN_3B, tie_word_embeddings=True)
    assert (config.head_dim, config.num_kv_heads, config.rms_norm_eps) == (128, 2, 1e-6)
    assert config.rope.sections == (16, 24, 24)
    assert (config.qkv_bias, config.output_bias, config.tie_word_embeddings) == (True, False, True)
    assert config.sliding_window is None
    assert list(config.attention_specs("bfloat16")) == ["text"]


def test_sliding_layers_are_their_own_group_when_switched_on():
    config = Qwen2Config.from_hf(QWEN_3B | {"use_sliding_window": True, "max_window_layers": 30}, False)
    assert [config.group_of(i) for i in (0, 29, 30, 35)] == ["text", "text", "text.window", "text.window"]
    specs = config.attention_specs("float16")
    assert list(specs) == ["text", "text.window"]
    assert "sliding_window" in specs["text.window"].features
    assert specs["text.window"].window == 32768
    assert "sliding_window" not in specs["text"].features


def test_layer_types_win_over_max_window_layers():
    kinds = ["sliding_attention"] * 36
    config = Qwen2Config.from_hf(QWEN_3B | {"use_sliding_window": True, "layer_types": kinds}, False)
    assert list(config.attention_specs("float32")) == ["text.window"]


def test_llama_defaults_and_overrides():
    plain = LlamaConfig.from_hf(LLAMA, False)
    assert (plain.head_dim, plain.num_kv_heads, plain.qkv_bias, plain.rope.theta) == (16, 4, False, 1e4)
    wide = LlamaConfig.from_hf(
        LLAMA | {"head_dim": 24, "attention_bias": True, "mlp_bias": True, "num_key_value_heads": 2}, True
    )
    assert (wide.head_dim, wide.num_kv_heads) == (24, 2)
    assert wide.qkv_bias
    assert wide.output_bias
    assert wide.mlp_bias


@pytest.mark.parametrize(
    ("reader", "hf", "change", "error", "says"),
    [
        (Qwen2Config, QWEN_3B, {"hidden_act": "gelu"}, NotImplementedError, "gelu"),
        (Qwen2Config, QWEN_3B, {"num_attention_heads": 15}, ValueError, "multiple"),
        (
            Qwen2Config,
            QWEN_3B,
            {"rope_scaling": {"type": "mrope", "mrope_section": [1, 2]}},
            ValueError,
            "mrope_section",
        ),
        (
            Qwen2Config,
            QWEN_3B,
            {"use_sliding_window": True, "layer_types": ["full_attention"]},
            ValueError,
            "layer_types",
        ),
        (LlamaConfig, LLAMA, {"hidden_act": "relu"}, NotImplementedError, "relu"),
        (LlamaConfig, LLAMA, {"num_attention_heads": 5}, ValueError, "multiple"),
        (LlamaConfig, LLAMA, {"vocab_size": "many"}, ValueError, "many"),
    ],
)
def test_configs_that_make_no_sense_are_refused(reader, hf, change, error, says):
    with pytest.raises(error, match=says):
        reader.from_hf(hf | change, False)


def test_a_missing_field_is_named():
    with pytest.raises(KeyError, match="hidden_size"):
        LlamaConfig.from_hf({k: v for k, v in LLAMA.items() if k != "hidden_size"}, False)
