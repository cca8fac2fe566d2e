"""Whole models against transformers: features, logits, greedy tokens; and each way of running one against the
others."""

import json

import pytest
import torch

from vlm.attention.platform import Platform
from vlm.attention.spec import Preference
from vlm.errors import AttentionBackendError
from vlm.families import FAMILIES, get_family
from vlm.loading.folder import EMBEDDED, ModelFolder
from vlm.loading.model import load_model
from vlm.testing import tiny_checkpoint
from vlm.testing.greedy import greedy, prompt_logits
from vlm.testing.parity import SIZES, ParityChecker, assert_parity, relative_error
from vlm.testing.reference import Reference, reference_pixels

TOLERANCE = 1e-4
AS_CLOSE, FLOOR = 1.25, 1e-4  # what 16 bits of ours may be away, in distances of the reference's, and beside that


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request, vlm_tiny_checkpoints):
    return vlm_tiny_checkpoints(request.param)


def reference_process(path):
    folder = ModelFolder(path)
    config = get_family(folder.model_type).parse(folder.config)
    return reference_pixels(path, folder.model_type, config)


@pytest.fixture(scope="module")
def checker(folder):
    return ParityChecker(folder, process=reference_process(folder))


def test_features_logits_and_greedy_tokens_match_transformers(folder, device):
    assert_parity(folder, device=device, process=reference_process(folder), tolerance=TOLERANCE, max_tokens=32)


def test_with_our_own_image_processing_it_matches_too(folder):
    assert_parity(folder, tolerance=TOLERANCE, max_tokens=4)


def test_greedy_text_is_varied_enough_to_show_errors(checker):
    prompts = checker.prompts()
    for tokens in greedy(checker.ours, list(prompts.values()), 32):
        assert len(set(tokens)) >= 16


def test_batched_is_single(checker):
    prompts = list(checker.prompts().values())
    batched = prompt_logits(checker.ours, prompts)
    for prompt, expected in zip(prompts, batched, strict=True):
        (alone,) = prompt_logits(checker.ours, [prompt])
        assert relative_error(alone, expected) <= 1e-5
        assert greedy(checker.ours, [prompt], 8) == [greedy(checker.ours, prompts, 8)[prompts.index(prompt)]]


@pytest.mark.parametrize("chunk", [1, 7, 16])
def test_chunked_is_whole(checker, chunk):
    prompt = checker.prompts()["two images"]
    (whole,), (chunked,) = prompt_logits(checker.ours, [prompt]), prompt_logits(checker.ours, [prompt], chunk=chunk)
    assert relative_error(chunked, whole) <= 1e-5


def test_no_images_are_no_features(checker):
    assert checker.ours.model.encode_images([]) == []


def test_features_are_those_of_each_image(checker):
    """Order is kept, and every image gets as many rows as its plan says."""
    images = checker.images(SIZES)
    with torch.inference_mode():
        forward = checker.ours.model.encode_images(images)
        backward = checker.ours.model.encode_images(images[::-1])[::-1]
    for image, a, b in zip(images, forward, backward, strict=True):
        assert a.shape == (image.plan.num_tokens, checker.ours.config.text.hidden_size)
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_geometry_is_what_the_cache_needs(checker):
    text, model = checker.ours.config.text, checker.ours.model
    assert (model.kv.num_layers, model.kv.num_kv_heads, model.kv.head_dim) == (
        text.num_layers,
        text.num_kv_heads,
        text.head_dim,
    )
    assert model.vocab_size == text.vocab_size


def rms_error(logits, truths):
    """Root mean square of the differences over that of the truths, of all prompts together.

    A maximum differs by up to a factor 2 between two runs that are equally exact; this differs by less than a tenth.
    """
    away = torch.cat([(got.float().cpu() - truth).flatten() for got, truth in zip(logits, truths, strict=True)])
    return float(away.norm() / torch.cat([truth.flatten() for truth in truths]).norm())


def allowed(exact, prompts, truths, dtype, device):
    """How far ours may be from the truths: little more than transformers is in that dtype on that device."""
    theirs = Reference(exact.folder.path, exact.folder.model_type, dtype=dtype, device=device)
    return AS_CLOSE * rms_error([theirs.logits(prompt) for prompt in prompts], truths) + FLOOR


def in_16_bit(exact, dtype, device):
    platform = Platform.fake("cpu", bf16=True) if device == "cpu" else Platform.detect(device)
    return load_model(exact.folder, platform, dtype=dtype, progress=False)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bit_is_as_close_as_the_reference_in_16_bit(checker, dtype, device):
    ours, kind = in_16_bit(checker, dtype, device), getattr(torch, dtype)
    prompts = list(checker.prompts().values())
    truths = [checker.theirs.logits(prompt) for prompt in prompts]
    logits = [prompt_logits(ours, [prompt])[0] for prompt in prompts]
    assert {got.dtype for got in logits} == {kind}
    assert rms_error(logits, truths) <= allowed(checker, prompts, truths, kind, device)


def test_features_that_are_two_per_cent_off_are_not_as_close(checker, monkeypatch):
    """In float16: bfloat16 is too coarse to show them."""
    ours = in_16_bit(checker, "float16", "cpu")
    encode = ours.model.encode_images
    monkeypatch.setattr(ours.model, "encode_images", lambda images: [1.02 * rows for rows in encode(images)])
    prompts = list(checker.prompts().values())
    truths = [checker.theirs.logits(prompt) for prompt in prompts]
    logits = [prompt_logits(ours, [prompt])[0] for prompt in prompts]
    assert rms_error(logits, truths) > 2 * allowed(checker, prompts, truths, torch.float16, "cpu")


YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "mrope_section": [2, 3, 4],
}
VARIANTS = [
    ("qwen2_5_vl", {"text_config": {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}}),
    ("qwen2_5_vl", {"text_config": {"rope_parameters": YARN}, "tie_word_embeddings": False}),
    ("qwen2_5_vl", {"vision_config": {"fullatt_block_indexes": [0, 1, 2, 3], "window_size": 56}}),
    ("smolvlm", {"text_config": {"attention_bias": True, "mlp_bias": True}, "scale_factor": 2}),
    ("smolvlm", {"text_config": {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}}),
]


@pytest.mark.parametrize(("model_type", "change"), VARIANTS, ids=str)
def test_variants_of_the_config_match_transformers(model_type, change, tmp_path):
    folder = tiny_checkpoint(model_type, tmp_path, **change)
    assert_parity(folder, process=reference_process(folder), sizes=[(200, 90), (60, 60)], max_tokens=16)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("stack", "backend"),
    [
        ("vision", "sdpa"),
        ("vision", "torch_varlen"),
        ("vision", "flash_attn"),
        ("vision", "triton"),
        ("vision", "torch_efficient"),
        ("text", "sdpa"),
        ("text", "torch_varlen"),
        ("text", "triton"),
        ("text", "torch_efficient"),
    ],
)
@pytest.mark.parametrize("model_type", ["qwen2_5_vl", "smolvlm"])
def test_each_backend_is_as_close_as_the_reference_in_bf16(model_type, stack, backend, tmp_path):
    """Heads of a width that every backend serves: 80 or 64 in the vision stack, 32 in the text stack."""
    text = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    if model_type == "qwen2_5_vl":
        text["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 6, 6]}
        change = {"vision_config": {"hidden_size": 160, "out_hidden_size": 128}, "text_config": text}
    else:
        change = {"vision_config": {"hidden_size": 128}, "text_config": text}
    folder = tiny_checkpoint(model_type, tmp_path, **change)
    exact = ParityChecker(folder, process=reference_process(folder))
    preference = {stack: Preference(backend, "the test")}
    try:
        ours = load_model(
            exact.folder, Platform.detect("cuda"), dtype="bfloat16", preferences=preference, progress=False
        )
    except AttentionBackendError as error:
        if not any(r.reason.startswith("import:") for r in error.rejected):
            raise
        pytest.skip(f"{backend} does not import here")
    assert {d.backend for d in ours.decisions if d.group.startswith(stack)} == {backend}
    prompts = list(exact.prompts().values())
    truths = [exact.theirs.logits(prompt) for prompt in prompts]
    limit = allowed(exact, prompts, truths, torch.bfloat16, "cuda")
    for chunk in (None, 7):
        assert rms_error([prompt_logits(ours, [prompt], chunk)[0] for prompt in prompts], truths) <= limit


def test_one_tile_a_picture_matches_transformers(tmp_path):
    """The layout of the embedded model: 192 pixels in patches of 12, heads of 64, no image splitting."""
    vision = {"image_size": 192, "patch_size": 12, "hidden_size": 128, "num_hidden_layers": 2}
    text = {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1}
    folder = tiny_checkpoint("smolvlm", tmp_path, vision_config=vision, text_config=text, scale_factor=2)
    settings = json.loads((folder / "preprocessor_config.json").read_text())
    edge = {"longest_edge": 192}
    settings |= {"do_image_splitting": False, "size": edge, "max_image_size": edge}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    assert_parity(folder, sizes=[(300, 120), (64, 200)], max_tokens=8)
    assert ParityChecker(folder).images([(50, 50)])[0].plan.num_tokens == 64


def test_the_embedded_model_matches_transformers(device):
    assert_parity(EMBEDDED, device=device)
