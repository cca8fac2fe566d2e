"""The Qwen2.5-VL encoder against transformers', from patches on: grids of every kind in one batch."""

from collections.abc import Callable

import pytest
import torch
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel

from vlm.attention.layout import Segments
from vlm.vision.qwen2_5_vl import (
    SPEC,
    GatedMLP,
    Qwen25VisionConfig,
    Qwen25VisionEncoder,
    VisionLayout,
    weight_map,
)

FIELDS = {
    "depth": 4,
    "hidden_size": 40,
    "intermediate_size": 52,
    "num_heads": 2,
    "out_hidden_size": 24,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "window_size": 24,  # three merged units a side
    "fullatt_block_indexes": [1, 3],
}
# One unit; below a window; exactly one; one over on either side; long strips; several frames.
GRIDS = [(1, 2, 2), (1, 4, 2), (1, 6, 6), (1, 8, 6), (1, 6, 14), (1, 2, 26), (1, 18, 12), (2, 8, 4), (3, 2, 6)]


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segments: Segments) -> torch.Tensor:
    """Attention written out, segment by segment."""
    outs = []
    for qs, ks, vs in zip(*(x.split(segments.lengths_q) for x in (q, k, v)), strict=True):
        scores = torch.einsum("qhd,khd->hqk", qs, ks) * q.shape[-1] ** -0.5
        outs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), vs))
    return torch.cat(outs)


OPS: dict[str, Callable[..., torch.Tensor]] = {"vision.full": dense, "vision.window": dense}


@pytest.fixture(scope="module")
def pair() -> tuple[Qwen25VisionEncoder, Qwen2_5_VisionTransformerPretrainedModel]:
    """Our encoder and the reference with the same random weights."""
    torch.manual_seed(0)
    theirs = Qwen2_5_VisionTransformerPretrainedModel._from_config(Qwen2_5_VLVisionConfig(**FIELDS)).eval()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    config = Qwen25VisionConfig.from_hf(FIELDS)
    ours = Qwen25VisionEncoder(config, OPS)
    state = theirs.state_dict()
    ours.load_state_dict(
        {name: torch.cat([state[s] for s in sources]) for name, sources in weight_map(config, "").items()}
    )
    return ours.requires_grad_(False), theirs.requires_grad_(False)


def walk_windows(grid: tuple[int, int, int], window: int) -> list[list[tuple[int, int, int]]]:
    """The windows of an image in order, each a list of (frame, row, column) of merged units."""
    frames, rows, cols = grid[0], grid[1] // 2, grid[2] // 2
    return [
        [(t, r, c) for r in range(top, min(top + window, rows)) for c in range(left, min(left + window, cols))]
        for t in range(frames)
        for top in range(0, rows, window)
        for left in range(0, cols, window)
    ]


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("window", [1, 2, 3, 4])
def test_layout_matches_a_walk_over_the_windows(grid, window):
    grids = [grid, (1, 4, 6)]
    layout = VisionLayout.build(grids, 2, window, torch.device("cpu"))
    order, coords, lengths, before = [], [], [], 0
    for t, h, w in grids:
        for units in walk_windows((t, h, w), window):
            lengths.append(4 * len(units))
            for frame, row, col in units:
                order.append(before + (frame * (h // 2) + row) * (w // 2) + col)
                coords += [(2 * row + i, 2 * col + j) for i in (0, 1) for j in (0, 1)]
        before += t * h * w // 4
    assert layout.order_M.tolist() == order
    assert layout.coords_P2.tolist() == [list(c) for c in coords]
    assert layout.windows.lengths_q == tuple(lengths)
    assert layout.order_M[layout.inverse_M].tolist() == list(range(before))
    assert layout.frames.lengths_q == (grid[1] * grid[2],) * grid[0] + (24,)


def test_features_of_a_mixed_batch_match_the_reference(pair, device):
    ours, theirs = pair
    patches = torch.randn(sum(t * h * w for t, h, w in GRIDS), ours.config.patch_dim)
    expected = theirs(patches, grid_thw=torch.tensor(GRIDS)).pooler_output
    got = ours.to(device)(patches.to(device), GRIDS).cpu()
    ours.to("cpu")
    assert (got - expected).abs().max() <= 1e-4 * expected.abs().max()


def test_an_image_has_the_same_features_alone_and_in_a_batch(pair):
    ours, _ = pair
    patches = torch.randn(sum(t * h * w for t, h, w in GRIDS), ours.config.patch_dim)
    batched = ours(patches, GRIDS).split([t * h * w // 4 for t, h, w in GRIDS])
    for grid, part, expected in zip(GRIDS, patches.split([t * h * w for t, h, w in GRIDS]), batched, strict=True):
        torch.testing.assert_close(ours(part, [grid]), expected, rtol=1e-5, atol=1e-5)


def test_full_and_window_layers_use_their_own_op():
    used: list[str] = []

    def spy(name: str) -> Callable[..., torch.Tensor]:
        def op(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segments: Segments) -> torch.Tensor:
            used.append(f"{name} {len(segments.lengths_q)}")
            return torch.zeros_like(q)

        return op

    encoder = Qwen25VisionEncoder(Qwen25VisionConfig.from_hf(FIELDS), {name: spy(name) for name in OPS})
    encoder(torch.randn(64, encoder.config.patch_dim), [(1, 8, 8)])
    assert used == ["vision.window 4", "vision.full 1"] * 2


def test_padding_the_mlp_keeps_its_output(pair):
    ours, _ = pair
    mlp = GatedMLP(40, 52).double()
    mlp.load_state_dict(ours.blocks[0].mlp.state_dict())
    x = torch.randn(48, 40, dtype=torch.float64)
    expected = mlp.requires_grad_(False)(x)
    mlp.pad_width()
    assert mlp.down.weight.shape == (40, 64)
    assert mlp.gate_up.weight.shape == (128, 40)
    torch.testing.assert_close(mlp(x), expected, rtol=1e-12, atol=1e-12)


def test_declaration_and_specs():
    assert SPEC.upstream_fa
    specs = Qwen25VisionConfig.from_hf(FIELDS).attention_specs("bfloat16")
    assert set(specs) == {"vision.full", "vision.window"}
    assert not specs["vision.full"].upstream_fa_unsuitable
    assert "64 tokens" in specs["vision.window"].upstream_fa_unsuitable
    every = Qwen25VisionConfig.from_hf(FIELDS | {"fullatt_block_indexes": [0, 1, 2, 3]}).attention_specs("bfloat16")
    assert set(every) == {"vision.full"}


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"hidden_act": "quick_gelu"}, NotImplementedError, "quick_gelu"),
        ({"num_heads": 3}, ValueError, "3 heads"),
        ({"window_size": 4}, ValueError, "window_size"),
    ],
)
def test_configs_that_are_not_served_are_refused(change, error, says):
    with pytest.raises(error, match=says):
        Qwen25VisionConfig.from_hf(FIELDS | change)
