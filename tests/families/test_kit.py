"""The test kit itself: it passes what is right, and finds and names what is wrong."""

import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from vlm.families import get_family
from vlm.families.base import ImageInputs
from vlm.loading.folder import ModelFolder
from vlm.testing import tiny_checkpoint
from vlm.testing.parity import ParityChecker, assert_parity
from vlm.testing.reference import reference_pixels


def checker_with_changed_weight(family, name, vlm_tiny_checkpoints) -> ParityChecker:
    """Ours as it is, the reference with one weight changed."""
    good = vlm_tiny_checkpoints(family)
    folder = ModelFolder(good)
    config = get_family(folder.model_type).parse(folder.config)
    checker = ParityChecker(good, process=reference_pixels(good, folder.model_type, config))
    parameter = checker.theirs.model.get_parameter(name)
    with torch.no_grad():
        parameter.mul_(1.5)
    return checker


@pytest.mark.parametrize(
    ("family", "name", "says"),
    [
        (
            "qwen2_5_vl",
            "model.language_model.layers.1.mlp.down_proj.weight",
            r"first layer that departs is text\.layers\.1 ",
        ),
        (
            "smolvlm",
            "model.text_model.layers.2.self_attn.o_proj.weight",
            r"first layer that departs is text\.layers\.2 ",
        ),
        ("idefics3", "model.text_model.norm.weight", r"all 3 layers text\.layers\.\* agree"),
    ],
)
def test_a_wrong_decoder_layer_is_named(family, name, says, vlm_tiny_checkpoints):
    checker = checker_with_changed_weight(family, name, vlm_tiny_checkpoints)
    with pytest.raises(AssertionError, match=says):
        checker.check_logits("text", checker.prompts()["text only"], 1e-4)


@pytest.mark.parametrize(
    ("family", "name", "says"),
    [
        ("qwen2_5_vl", "model.visual.blocks.2.attn.proj.weight", r"first layer that departs is vision\.blocks\.2 "),
        (
            "smolvlm",
            "model.vision_model.encoder.layers.0.mlp.fc1.weight",
            r"first layer that departs is vision\.blocks\.0 ",
        ),
        ("idefics3", "model.connector.modality_projection.proj.weight", r"all 3 layers vision\.blocks\.\* agree"),
    ],
)
def test_a_wrong_vision_layer_is_named(family, name, says, vlm_tiny_checkpoints):
    checker = checker_with_changed_weight(family, name, vlm_tiny_checkpoints)
    with pytest.raises(AssertionError, match=says):
        checker.check_features(checker.images([(64, 64)]), 1e-4)


def test_departing_tokens_are_shown(vlm_tiny_checkpoints):
    name = "model.text_model.layers.0.mlp.up_proj.weight"
    checker = checker_with_changed_weight("smolvlm", name, vlm_tiny_checkpoints)
    with pytest.raises(AssertionError, match=r"greedy tokens .* depart at token"):
        checker.check_greedy(checker.prompts(), 8)


def test_wrong_pixels_are_found(vlm_tiny_checkpoints):
    checker = ParityChecker(vlm_tiny_checkpoints("smolvlm"))
    checker.check_pixels([(70, 50)])
    right = checker.process

    def two_steps_off(image):
        made = right(image)
        return ImageInputs(made.pixels + 4 / 255, made.plan)

    checker.process = two_steps_off
    with pytest.raises(AssertionError, match=r"pixels of a 70x50 image: 2\.0 8-bit steps off"):
        checker.check_pixels([(70, 50)])


def test_an_unknown_reference_or_recipe_is_refused(tmp_path):
    with pytest.raises(ValueError, match="expected 'transformers'"):
        assert_parity(tmp_path, reference="jax")
    with pytest.raises(ValueError, match="qwen2_5_vl"):
        tiny_checkpoint("bert", tmp_path)


def test_the_same_seed_writes_the_same_checkpoint(tmp_path, vlm_tiny_checkpoints):
    first = load_file(vlm_tiny_checkpoints("smolvlm") / "model.safetensors")
    again = load_file(tiny_checkpoint("smolvlm", tmp_path / "a") / "model.safetensors")
    other = load_file(tiny_checkpoint("smolvlm", tmp_path / "b", seed=1) / "model.safetensors")
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "smolvlm", "idefics3"])
def test_tokenizer_and_template_are_usable(family, vlm_tiny_checkpoints):
    from transformers import AutoTokenizer

    folder = vlm_tiny_checkpoints(family)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    messages = [
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is this?"}]},
        {"role": "assistant", "content": "A circle."},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    parsed = get_family(family).parse(ModelFolder(folder).config)
    placeholder = get_family(family).placeholder(parsed)
    assert text.count(placeholder) == 1
    assert text.index(placeholder) < text.index("What is this?") < text.index("A circle.")
    assert tokenizer.convert_tokens_to_ids(placeholder) == parsed.image_token_id
    assert tokenizer.decode(tokenizer("héllo 日本 🙂\n\n")["input_ids"]) == "héllo 日本 🙂\n\n"


def test_the_pytest_plugin_gives_a_model(tmp_path):
    test = tmp_path / "test_it.py"
    test.write_text(
        "import pytest\n"
        "def test_default(vlm_tiny_model):\n"
        "    assert (vlm_tiny_model / 'config.json').is_file()\n"
        "@pytest.mark.parametrize('vlm_tiny_model', ['idefics3'], indirect=True)\n"
        "def test_chosen(vlm_tiny_model):\n"
        "    assert 'idefics3' in (vlm_tiny_model / 'config.json').read_text()\n"
    )
    command = [
        sys.executable,
        "-P",
        "-m",
        "pytest",
        "-q",
        "-p",
        "vlm.testing.plugin",
        "-p",
        "no:cacheprovider",
        str(test),
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert "2 passed" in done.stdout, done.stdout + done.stderr


def test_a_checkpoint_in_bf16_loads_as_float32_on_a_cpu(tmp_path):
    folder = tiny_checkpoint("smolvlm", tmp_path, dtype="bfloat16")
    config = get_family("smolvlm").parse(ModelFolder(folder).config)
    assert_parity(folder, process=reference_pixels(folder, "smolvlm", config), sizes=[(40, 60)], max_tokens=4)


def test_names_of_hub_and_of_transformers_load_alike(vlm_tiny_checkpoints, tmp_path):
    """The same weights under the names that transformers 5 uses in memory."""
    good = vlm_tiny_checkpoints("qwen2_5_vl")
    shutil.copytree(good, tmp_path, dirs_exist_ok=True)
    renamed = {}
    for name, tensor in load_file(good / "model.safetensors").items():
        name = f"model.{name}" if name.startswith("visual.") else name.replace("model.", "model.language_model.", 1)
        renamed[name] = tensor
    save_file(renamed, tmp_path / "model.safetensors")
    config = get_family("qwen2_5_vl").parse(ModelFolder(good).config)
    process = reference_pixels(good, "qwen2_5_vl", config)
    assert_parity(tmp_path, process=process, sizes=[(60, 90)], max_tokens=4)
