"""What an image becomes in the prompt, and where its tokens stand, against transformers' processors and models."""

import pytest
import torch
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLModel
from transformers.models.idefics3.processing_idefics3 import Idefics3Processor
from transformers.models.smolvlm.processing_smolvlm import get_image_prompt_string

from vlm.errors import CheckpointError, PromptError
from vlm.families import get_family
from vlm.families.base import ImagePlan
from vlm.loading.folder import ModelFolder

IMAGE = 1000


@pytest.fixture(scope="module")
def qwen(vlm_tiny_checkpoints):
    folder = ModelFolder(vlm_tiny_checkpoints("qwen2_5_vl"))
    family = get_family("qwen2_5_vl")
    return family, family.parse({**folder.config, "image_token_id": IMAGE})


@pytest.fixture(scope="module")
def idefics(vlm_tiny_checkpoints):
    folder = ModelFolder(vlm_tiny_checkpoints("idefics3"))
    family = get_family("idefics3")
    return family, family.parse(folder.config)


def plan(t: int, h: int, w: int) -> ImagePlan:
    return ImagePlan((w * 14, h * 14), t * h * w // 4, (t, h, w))


def reference_positions(token_ids, plans):
    config = Qwen2_5_VLConfig(image_token_id=IMAGE, video_token_id=1001, vision_start_token_id=1002)
    config.text_config.num_hidden_layers = config.vision_config.depth = 0
    with torch.device("meta"):
        model = Qwen2_5_VLModel(config)
    ids = torch.tensor([token_ids])
    grids = torch.tensor([p.grid for p in plans]) if plans else None
    positions, delta = model.get_rope_index(ids, mm_token_type_ids=(ids == IMAGE).int(), image_grid_thw=grids)
    return positions[:, 0], int(delta) + len(token_ids)


@pytest.mark.parametrize(
    "prompt",
    [
        [3, 4, plan(1, 4, 6), 5, 6, 7],
        [plan(1, 2, 2), 9],
        [1, plan(1, 8, 2), 2, plan(1, 2, 10), 3, plan(1, 6, 6), 4],
        [5, 5, plan(1, 4, 4)],
        [1, plan(3, 4, 4), 2, 3],
    ],
    ids=str,
)
def test_qwen_positions_match_the_reference(qwen, prompt):
    family, config = qwen
    plans = [part for part in prompt if isinstance(part, ImagePlan)]
    ids = [i for part in prompt for i in ([IMAGE] * part.num_tokens if isinstance(part, ImagePlan) else [part])]
    positions, following = family.positions(ids, plans, config)
    expected, expected_following = reference_positions(ids, plans)
    assert positions.dtype == torch.int64
    assert torch.equal(positions, expected)
    assert following == expected_following


def test_qwen_positions_of_text_count_on(qwen):
    family, config = qwen
    positions, following = family.positions([7, 8, 9], [], config)
    assert positions.tolist() == [[0, 1, 2]] * 3
    assert following == 3


def test_qwen_images_may_touch(qwen):
    """Without a token between them the reference takes two images for one; each keeps its own place here."""
    family, config = qwen
    positions, following = family.positions([IMAGE] * 5 + [7], [plan(1, 4, 4), plan(1, 2, 2)], config)
    assert positions.tolist() == [[0, 0, 0, 0, 2, 3], [0, 0, 1, 1, 2, 3], [0, 1, 0, 1, 2, 3]]
    assert following == 4


def test_qwen_positions_refuse_a_prompt_that_does_not_fit_its_images(qwen):
    family, config = qwen
    with pytest.raises(PromptError, match="3 image tokens, but its images make 4"):
        family.positions([1, IMAGE, IMAGE, IMAGE], [plan(1, 4, 4)], config)
    with pytest.raises(PromptError, match="not contiguous"):
        family.positions([IMAGE, 1, IMAGE, IMAGE, IMAGE], [plan(1, 4, 4)], config)


def test_qwen_expands_to_one_placeholder_a_token(qwen):
    family, config = qwen
    assert family.expand(plan(1, 4, 6), config) == "<|image_pad|>" * 6
    assert family.placeholder(config) == "<|image_pad|>"


@pytest.mark.parametrize("grid", [(0, 0), (1, 2), (2, 1), (3, 4)], ids=str)
def test_tiles_expand_as_both_references_do(idefics, grid):
    family, config = idefics
    rows, cols = grid
    text = family.expand(ImagePlan((1, 1), 4 * (rows * cols + 1), grid), config)
    assert text == get_image_prompt_string(rows, cols, 4, "<fake_token_around_image>", "<image>", "<global-img>")

    class Names:
        fake_image_token, image_token, global_image_tag, image_seq_len = (
            "<fake_token_around_image>",
            "<image>",
            "<global-img>",
            4,
        )

    assert text == Idefics3Processor.replace_image_token(Names, {"rows": [[rows]], "cols": [[cols]]}, 0)
    assert text.count(family.placeholder(config)) == 4 * (rows * cols + 1)


def test_idefics_positions_count_on(idefics):
    family, config = idefics
    positions, following = family.positions([1, 2, 3, 4], [], config)
    assert positions.tolist() == [0, 1, 2, 3]
    assert following == 4


def test_tiles_that_do_not_fold_evenly_are_refused(idefics):
    _, config = idefics
    assert config.tokens_per_tile(56) == 4
    with pytest.raises(CheckpointError, match="scale_factor 2"):
        config.tokens_per_tile(70)
