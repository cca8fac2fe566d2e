"""Rotary frequencies and positions against transformers' own functions."""

import pytest
import torch
from transformers import LlamaConfig as HFLlamaConfig
from transformers import Qwen2_5_VLTextConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLRotaryEmbedding

from vlm.text.rope import RopeConfig, Rotary, inverse_frequencies

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
YARN = {"factor": 4.0, "original_max_position_embeddings": 4096}
CASES = [
    ("linear", {"factor": 3.0}),
    ("llama3", LLAMA3),
    ("yarn", YARN),
    ("yarn", YARN | {"beta_fast": 16.0, "beta_slow": 2.0, "attention_factor": 0.7}),
    ("yarn", YARN | {"truncate": False}),
]


@pytest.mark.parametrize(("kind", "parameters"), CASES)
@pytest.mark.parametrize("head_dim", [20, 128])
def test_scaled_frequencies_match_the_reference(kind, parameters, head_dim):
    given = {"rope_type": kind, "rope_theta": 5e5, **parameters}
    hf = HFLlamaConfig(head_dim=head_dim, max_position_embeddings=16384, rope_parameters=dict(given))
    expected, scaling = ROPE_INIT_FUNCTIONS[kind](hf)
    rope = RopeConfig.from_hf({"rope_parameters": given, "max_position_embeddings": 16384}, default_theta=1e4)
    torch.testing.assert_close(inverse_frequencies(rope, head_dim), expected, rtol=1e-5, atol=0)
    assert rope.attention_scaling == pytest.approx(scaling)


def test_default_frequencies_are_the_geometric_series():
    expected = torch.tensor([1e6 ** (-2 * i / 16) for i in range(8)])
    torch.testing.assert_close(inverse_frequencies(RopeConfig(theta=1e6), 16), expected)


@pytest.mark.parametrize(
    "hf",
    [
        {"rope_theta": 7e4, "rope_scaling": {"type": "llama3", **LLAMA3}},
        {"rope_theta": 7e4, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 7e4, **LLAMA3}},
    ],
)
def test_old_and_new_spellings_mean_the_same(hf):
    assert RopeConfig.from_hf(hf, 1e4) == RopeConfig(theta=7e4, kind="llama3", original_context=8192, factor=8.0)


def test_mrope_as_published_is_the_default_kind_with_sections():
    hf = {"rope_theta": 1e6, "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}}
    assert RopeConfig.from_hf(hf, 1e4) == RopeConfig(theta=1e6, sections=(16, 24, 24))


@pytest.mark.parametrize(
    ("scaling", "error", "says"),
    [
        ({"rope_type": "longrope", "factor": 2.0}, NotImplementedError, "longrope"),
        ({"rope_type": "linear"}, ValueError, "factor"),
        ({"rope_type": "llama3", "factor": 2.0}, ValueError, "original_max_position_embeddings"),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, NotImplementedError, "partial_rotary_factor"),
        ({"rope_type": "yarn", **YARN, "mscale": 1.0, "mscale_all_dim": 0.5}, NotImplementedError, "mscale"),
    ],
)
def test_what_is_not_served_is_refused_by_name(scaling, error, says):
    with pytest.raises(error, match=says):
        RopeConfig.from_hf({"rope_parameters": scaling}, 1e4)


def test_three_axis_positions_match_the_reference():
    sections = [2, 3, 5]
    parameters = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": sections}
    hf = Qwen2_5_VLTextConfig(hidden_size=40, num_attention_heads=2, num_key_value_heads=2, rope_parameters=parameters)
    positions = torch.randint(0, 500, (3, 37))
    cos, sin = Qwen2_5_VLRotaryEmbedding(hf)(torch.zeros(1), positions[:, None])
    ours = Rotary(RopeConfig(theta=1e6, sections=tuple(sections)), 20)(positions)
    torch.testing.assert_close(ours[0], cos[0, :, :10])
    torch.testing.assert_close(ours[1], sin[0, :, :10])


def test_one_position_a_token_means_the_same_place_on_all_axes():
    rotary = Rotary(RopeConfig(theta=1e4, sections=(4, 2, 2)), 16)
    positions = torch.arange(9)
    for flat, spread in zip(rotary(positions), rotary(positions.expand(3, -1)), strict=True):
        assert torch.equal(flat, spread)


def test_frequencies_survive_a_meta_build():
    with torch.device("meta"):
        rotary = Rotary(RopeConfig(theta=1e4, sections=(4, 2, 2)), 16)
    assert not rotary.inv_freq_R.is_meta
    assert not rotary.axis_R.is_meta
    assert rotary.inv_freq_R.dtype == torch.float32
