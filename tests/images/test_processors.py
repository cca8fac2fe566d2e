"""Our processors against the reference: the same sizes, grids and pixels, for every shape of picture."""

from __future__ import annotations

from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize as reference_smart_resize
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

from vlm.errors import CheckpointError, ImageDecodeError, PromptError
from vlm.images import load_image
from vlm.images.idefics3 import Idefics3Processor
from vlm.images.qwen2_vl import Qwen2VLProcessor, smart_resize

QWEN: dict[str, Any] = {
    "min_pixels": 3136,
    "max_pixels": 12845056,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}
SMOLVLM: dict[str, Any] = {
    "do_image_splitting": True,
    "max_image_size": {"longest_edge": 512},
    "size": {"longest_edge": 2048},
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "resample": 1,
    "rescale_factor": 0.00392156862745098,
}
EMBEDDED = {
    **SMOLVLM,
    "do_image_splitting": False,
    "max_image_size": {"longest_edge": 192},
    "size": {"longest_edge": 192},
}

SIZES = [(1, 1), (2, 2), (26, 28), (28, 28), (1000, 5), (5, 1000), (37, 53), (640, 480), (333, 777), (1, 200), (200, 1)]


def noise(width: int, height: int, seed: int = 0) -> PIL.Image.Image:
    return PIL.Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def assert_same_pixels(ours: torch.Tensor, reference: Any) -> None:
    """Equal to the last bit: both look at the same bytes and the same 256 values."""
    assert ours.dtype == torch.float32
    np.testing.assert_array_equal(ours.numpy(), np.asarray(reference))


# --- Qwen2-VL ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [*SIZES, (1400, 900)])
def test_qwen_equals_the_reference(size: tuple[int, int]) -> None:
    image = noise(*size)
    want = Qwen2VLImageProcessorPil(**QWEN)(image, return_tensors="np")
    got = Qwen2VLProcessor.from_config(QWEN, {})(image)
    assert got.plan == Qwen2VLProcessor.from_config(QWEN, {}).plan(*size)
    assert got.plan.grid == tuple(want["image_grid_thw"][0])
    assert got.plan.num_tokens == np.prod(got.plan.grid) // 4
    assert_same_pixels(got.pixels, want["pixel_values"])


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"patch_size": 16, "merge_size": 2, "image_mean": [0.5] * 3, "image_std": [0.5] * 3},
        {"patch_size": 8, "merge_size": 3, "temporal_patch_size": 1},
        {"resample": 2},
        {"do_normalize": False},
        {"do_rescale": False},
        {"size": {"shortest_edge": 4 * 784, "longest_edge": 64 * 784}},
        {"size": {"shortest_edge": 784, "longest_edge": 784 * 1000}, "min_pixels": 784 * 32, "max_pixels": 784 * 40},
    ],
)
def test_qwen_configs(config: dict[str, Any]) -> None:
    image = noise(210, 333)
    want = Qwen2VLImageProcessorPil(**{k: dict(v) if isinstance(v, dict) else v for k, v in config.items()})
    expected = want(image, return_tensors="np")
    got = Qwen2VLProcessor.from_config(config, {})(image)
    assert got.plan.grid == tuple(expected["image_grid_thw"][0])
    assert_same_pixels(got.pixels, expected["pixel_values"])


def test_qwen_limits_in_every_spelling() -> None:
    spellings = [
        {"min_pixels": 784, "max_pixels": 7840},
        {"size": {"shortest_edge": 784, "longest_edge": 7840}},
        {"size": {"min_pixels": 784, "max_pixels": 7840}},
        {"size": {"shortest_edge": 1, "longest_edge": 2}, "min_pixels": 784, "max_pixels": 7840},
    ]
    for spelling in spellings:
        processor = Qwen2VLProcessor.from_config(spelling, {})
        assert (processor.min_pixels, processor.max_pixels) == (784, 7840)


@settings(max_examples=300, deadline=None)
@given(
    width=st.integers(1, 20000),
    height=st.integers(1, 20000),
    factor=st.sampled_from([28, 32, 24]),
    limits=st.sampled_from([(3136, 12845056), (3136, 28 * 28 * 1280), (65536, 16777216), (784, 7840)]),
)
def test_qwen_sizes_equal_the_reference(width: int, height: int, factor: int, limits: tuple[int, int]) -> None:
    if max(width, height) > 200 * min(width, height):
        with pytest.raises(ImageDecodeError, match="200 times"):
            smart_resize(width, height, factor, *limits)
        return
    size = smart_resize(width, height, factor, *limits)
    assert size[::-1] == reference_smart_resize(height, width, factor, *limits)
    assert min(size) >= factor


@pytest.mark.parametrize("size", [(200, 1), (1, 200), (2800, 14), (14, 2800)])
def test_qwen_accepts_an_aspect_ratio_of_exactly_200(size: tuple[int, int]) -> None:
    assert Qwen2VLProcessor.from_config(QWEN, {}).plan(*size).num_tokens >= 1


@pytest.mark.parametrize("size", [(201, 1), (1, 201), (1, 10000), (2801, 14)])
def test_qwen_refuses_longer_pictures_before_any_work(size: tuple[int, int]) -> None:
    processor = Qwen2VLProcessor.from_config(QWEN, {})
    with pytest.raises(ImageDecodeError, match="200 times"):
        processor.plan(*size)
    with pytest.raises(ImageDecodeError, match="200 times"):
        processor(noise(*size))


def test_qwen_overrides() -> None:
    processor = Qwen2VLProcessor.from_config(QWEN, {"max_pixels": 28 * 28 * 20, "min_pixels": None})
    assert processor.plan(2000, 1000).num_tokens <= 20
    assert Qwen2VLProcessor.from_config(QWEN, {"min_pixels": 28 * 28 * 100}).plan(28, 28).num_tokens >= 100


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"max_pixel": 1000}, "'max_pixel': did you mean max_pixels"),
        ({"do_image_splitting": True}, "takes max_pixels and min_pixels"),
        ({"max_pixels": 0}, "positive whole number"),
        ({"max_pixels": "large"}, "positive whole number"),
        ({"max_pixels": True}, "positive whole number"),
        ({"max_pixels": 3000}, r"below min_pixels \(3136\)"),
        ({"max_pixels": 500, "min_pixels": 100}, "one token's 784 pixels"),
        ({"max_pixels": 1000, "min_pixels": 2000}, r"min_pixels \(2000\)"),
    ],
)
def test_qwen_overrides_that_are_wrong(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(PromptError, match=message):
        Qwen2VLProcessor.from_config(QWEN, overrides)


@pytest.mark.parametrize(
    "change",
    [
        {"patch_size": 0},
        {"merge_size": "2"},
        {"min_pixels": 10, "max_pixels": 5},
        {"size": [1, 2]},
        {"do_resize": False},
        {"resample": 17},
        {"image_mean": [0.5, 0.5]},
        {"image_std": [0.5, 0.0, 0.5]},
        {"rescale_factor": "x"},
    ],
)
def test_configs_that_cannot_be_used_name_the_file(change: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match=r"preprocessor_config\.json: "):
        Qwen2VLProcessor.from_config({**QWEN, **change}, {})


# --- Idefics3 and SmolVLM ------------------------------------------------------------------------------------------


def reference_tiles(processor: Any, image: PIL.Image.Image) -> tuple[np.ndarray, tuple[int, int]]:
    out = processor(image, return_tensors="np", return_row_col_info=True)
    return out["pixel_values"][0], (out["rows"][0][0], out["cols"][0][0])


@pytest.mark.parametrize("reference", [Idefics3ImageProcessorPil, SmolVLMImageProcessorPil])
@pytest.mark.parametrize("size", [*SIZES, (20, 5000), (5000, 1), (3000, 100)])
@pytest.mark.parametrize(
    "config", [{**SMOLVLM, "max_image_size": {"longest_edge": 98}, "size": {"longest_edge": 392}}, EMBEDDED]
)
def test_idefics3_equals_the_reference(config: dict[str, Any], size: tuple[int, int], reference: Any) -> None:
    image = noise(*size)
    tiles, grid = reference_tiles(reference(**config), image)
    processor = Idefics3Processor.from_config(config, {}, tokens_per_tile=7)
    got = processor(image)
    assert got.plan == processor.plan(*size)
    assert got.plan.grid == grid
    assert got.plan.num_tokens == 7 * len(tiles) > 0
    assert_same_pixels(got.pixels, tiles)


def test_a_thread_of_pixels_is_still_a_picture() -> None:
    """The reference resizes it to a width of 0 and fails."""
    processor = Idefics3Processor.from_config(EMBEDDED, {}, tokens_per_tile=7)
    got = processor(noise(1, 5000))
    assert got.plan.num_tokens == 7
    assert got.pixels.shape == (1, 3, 192, 192)


@pytest.mark.parametrize("config", [{}, SMOLVLM], ids=["Idefics3", "SmolVLM"])
def test_full_size_configs(config: dict[str, Any]) -> None:
    image = noise(700, 500)
    tiles, grid = reference_tiles(Idefics3ImageProcessorPil(**config), image)
    got = Idefics3Processor.from_config(config, {}, tokens_per_tile=169)(image)
    assert got.plan.grid == grid == (3, 4)
    assert_same_pixels(got.pixels, tiles)


@settings(max_examples=300, deadline=None)
@given(
    width=st.integers(1, 6000),
    height=st.integers(1, 6000),
    edges=st.sampled_from([(1456, 364), (2048, 512), (1536, 384), (365, 365), (6000, 512), (100, 364), (1000, 300)]),
)
def test_idefics3_sizes_equal_the_reference(width: int, height: int, edges: tuple[int, int]) -> None:
    """The reference's own steps, without its pixels: an array of shape only stands for the picture."""
    sizes: list[tuple[int, int]] = []

    class Sizes(Idefics3ImageProcessorPil):
        def resize(self, image: Any, size: Any, *args: Any, **kwargs: Any) -> Any:
            from transformers.models.idefics3 import image_processing_pil_idefics3 as module

            if size.longest_edge:
                new = module.get_resize_output_image_size(image, resolution_max_side=size.longest_edge)
            else:
                new = (size.height, size.width)
            sizes.append((new[1], new[0]))
            return np.broadcast_to(np.uint8(0), (3, *new))

    from transformers.image_utils import SizeDict

    edge, tile = edges
    reference = Sizes()
    fitted = reference.resize(np.broadcast_to(np.uint8(0), (3, height, width)), SizeDict(longest_edge=edge))
    tiled = reference.resize_for_vision_encoder(fitted, tile)
    _, rows, columns = reference.split_images(tiled, {"longest_edge": tile})
    config = {"size": {"longest_edge": edge}, "max_image_size": {"longest_edge": tile}}
    processor = Idefics3Processor.from_config(config, {}, tokens_per_tile=1)
    assert processor._sizes(width, height) == sizes[:2]
    assert processor.plan(width, height).grid == (rows, columns)


@settings(max_examples=200, deadline=None)
@given(
    width=st.integers(1, 6000),
    height=st.integers(1, 6000),
    tiles=st.floats(1, 20),
    tile=st.sampled_from([364, 365, 512]),
)
def test_max_pixels_caps_the_tiled_area(width: int, height: int, tiles: float, tile: int) -> None:
    config = {"max_image_size": {"longest_edge": tile}, "size": {"longest_edge": 4 * tile}}
    cap = int(tiles * tile * tile)
    capped = Idefics3Processor.from_config(config, {"max_pixels": cap}, tokens_per_tile=1).plan(width, height)
    free = Idefics3Processor.from_config(config, {}, tokens_per_tile=1).plan(width, height)
    assert capped.size[0] * capped.size[1] <= cap
    if free.size[0] * free.size[1] <= cap:
        assert capped == free


def test_idefics3_overrides() -> None:
    def plan(**overrides: Any) -> tuple[int, ...]:
        return Idefics3Processor.from_config(SMOLVLM, overrides, tokens_per_tile=64).plan(1000, 1000).grid

    assert plan() == (4, 4)
    assert plan(size=1024) == plan(size={"longest_edge": 1024}) == (2, 2)
    assert plan(max_pixels=512 * 512 * 4) == (2, 2)
    assert plan(do_image_splitting=False) == plan(max_pixels=512 * 512) == (0, 0)
    assert plan(size=None, max_pixels=None) == (4, 4)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"min_pixels": 100}, "unknown image setting 'min_pixels'"),
        ({"max_pixel": 100}, "did you mean max_pixels"),
        ({"max_pixels": 1000}, "below one tile"),
        ({"max_pixels": -1}, "positive whole number"),
        ({"size": 0}, "positive whole number"),
        ({"size": {"height": 3}}, "longest_edge"),
        ({"do_image_splitting": "no"}, "true or false"),
    ],
)
def test_idefics3_overrides_that_are_wrong(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(PromptError, match=message):
        Idefics3Processor.from_config(SMOLVLM, overrides, tokens_per_tile=64)


def test_tokens_of_a_tile_come_from_the_caller_or_the_config() -> None:
    assert Idefics3Processor.from_config({**SMOLVLM, "image_seq_len": 81}, {}).tokens_per_tile == 81
    assert Idefics3Processor.from_config({**SMOLVLM, "image_seq_len": 81}, {}, tokens_per_tile=64).tokens_per_tile == 64
    with pytest.raises(CheckpointError, match="image_seq_len"):
        Idefics3Processor.from_config(SMOLVLM, {})
    with pytest.raises(CheckpointError, match="max_image_size"):
        Idefics3Processor.from_config({"max_image_size": 3}, {}, tokens_per_tile=1)
    with pytest.raises(CheckpointError, match="true or false"):
        Idefics3Processor.from_config({"do_image_splitting": 1}, {}, tokens_per_tile=1)


# --- all -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["L", "1", "P", "CMYK", "I;16", "RGBA", "LA"])
def test_every_mode_reaches_the_processors_as_rgb(mode: str) -> None:
    image = noise(40, 30).convert("L").convert(mode) if mode == "I;16" else noise(40, 30).convert(mode)
    rgb = load_image(image).image
    want = Qwen2VLImageProcessorPil(**QWEN)(rgb, return_tensors="np")
    assert_same_pixels(Qwen2VLProcessor.from_config(QWEN, {})(rgb).pixels, want["pixel_values"])


@pytest.mark.parametrize("size", [(0, 10), (10, 0), (0, 0)])
def test_no_size_gives_success_without_image_tokens(size: tuple[int, int]) -> None:
    for processor in (
        Qwen2VLProcessor.from_config(QWEN, {}),
        Idefics3Processor.from_config(SMOLVLM, {}, tokens_per_tile=64),
    ):
        with pytest.raises(ImageDecodeError, match="nothing to see"):
            processor.plan(*size)
