"""The SigLIP encoder against Idefics3's in transformers, from pixels on."""

import pytest
import torch
from transformers.models.idefics3.configuration_idefics3 import Idefics3VisionConfig
from transformers.models.idefics3.modeling_idefics3 import Idefics3VisionTransformer

from vlm.attention.layout import Segments
from vlm.vision.siglip import SPEC, SiglipConfig, SiglipEncoder, weight_map

FIELDS = {
    "hidden_size": 36,
    "intermediate_size": 50,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 48,
    "patch_size": 8,
}


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segments: Segments) -> torch.Tensor:
    outs = []
    for qs, ks, vs in zip(*(x.split(segments.lengths_q) for x in (q, k, v)), strict=True):
        scores = torch.einsum("qhd,khd->hqk", qs, ks) * q.shape[-1] ** -0.5
        outs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), vs))
    return torch.cat(outs)


def make_pair(**change) -> tuple[SiglipEncoder, Idefics3VisionTransformer]:
    torch.manual_seed(0)
    theirs = Idefics3VisionTransformer._from_config(Idefics3VisionConfig(**FIELDS | change)).eval()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    config = SiglipConfig.from_hf(FIELDS | change)
    ours = SiglipEncoder(config, {"vision": dense})
    state = theirs.state_dict()
    ours.load_state_dict(
        {name: torch.cat([state[s] for s in sources]) for name, sources in weight_map(config, "").items()}
    )
    return ours.requires_grad_(False), theirs.requires_grad_(False)


@pytest.mark.parametrize("size", [(48, 48), (40, 24), (8, 48), (56, 72)], ids=str)
@pytest.mark.parametrize("act", ["gelu_pytorch_tanh", "gelu"])
def test_features_match_the_reference(size, act, device):
    ours, theirs = make_pair(hidden_act=act)
    pixels = torch.randn(5, 3, *size)
    expected = theirs(pixels).last_hidden_state
    got = ours.to(device)(pixels.to(device)).cpu()
    assert got.shape == (5, size[0] // 8, size[1] // 8, 36)
    assert (got.flatten(1, 2) - expected).abs().max() <= 1e-4 * expected.abs().max()


@pytest.mark.parametrize("grid", [4, 12, 14, 16, 24, 27, 32])
def test_positions_match_the_reference_for_every_usual_grid(grid):
    """Weights of positions only: any patch that looks its position up in the wrong bucket shows."""
    ours, theirs = make_pair(image_size=grid * 8, num_hidden_layers=0)
    for embeddings in (ours.embeddings.patch_weight, theirs.embeddings.patch_embedding.weight):
        embeddings.zero_()
    for rows, cols in ((grid, grid), (grid, max(grid // 2, 1)), (grid - 1, grid + 3)):
        pixels = torch.zeros(1, 3, rows * 8, cols * 8)
        assert torch.equal(ours(pixels).flatten(1, 2), theirs(pixels).last_hidden_state)


def test_positions_do_not_depend_on_the_dtype_of_the_pixels():
    ours, _ = make_pair(image_size=27 * 8)
    in_half = ours.embeddings.half()(torch.zeros(1, 3, 216, 216, dtype=torch.float16))
    in_float = ours.embeddings.float()(torch.zeros(1, 3, 216, 216))
    torch.testing.assert_close(in_half.float(), in_float, rtol=1e-3, atol=1e-3)


def test_a_tile_has_the_same_features_alone_and_in_a_batch():
    ours, _ = make_pair()
    pixels = torch.randn(4, 3, 48, 48)
    batched = ours(pixels)
    for i in range(4):
        torch.testing.assert_close(ours(pixels[i : i + 1])[0], batched[i], rtol=1e-5, atol=1e-5)


def test_published_configs_may_leave_defaults_out():
    config = SiglipConfig.from_hf({"hidden_size": 768, "num_attention_heads": 12, "image_size": 512, "patch_size": 16})
    assert (config.num_layers, config.intermediate_size, config.grid, config.head_dim) == (12, 3072, 32, 64)


def test_declaration():
    assert SPEC.upstream_fa is False
    assert SPEC.reason


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"hidden_act": "quick_gelu"}, NotImplementedError, "quick_gelu"),
        ({"num_attention_heads": 5}, ValueError, "multiple"),
    ],
)
def test_configs_that_are_not_served_are_refused(change, error, says):
    with pytest.raises(error, match=says):
        SiglipConfig.from_hf(FIELDS | change)
