"""Weights that do not fit, are cut, or are missing: one error from the headers, before any memory is filled."""

import json
import shutil
import struct

import pytest
import torch
from safetensors.torch import load_file, save_file

from vlm.attention.platform import Platform
from vlm.errors import CheckpointError, UnsupportedModelError
from vlm.loading import model as loading
from vlm.loading.folder import ModelFolder
from vlm.testing import tiny_checkpoint

CPU = Platform.fake("cpu")


def load(path, **options):
    return loading.load_model(ModelFolder(path), CPU, progress=False, **options)


@pytest.fixture
def copy(vlm_tiny_checkpoints, tmp_path):
    """A SmolVLM folder to damage."""
    shutil.copytree(vlm_tiny_checkpoints("smolvlm"), tmp_path / "m")
    return tmp_path / "m"


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    return tiny_checkpoint("qwen2_5_vl", tmp_path_factory.mktemp("shards"), max_shard_size="100KB")


@pytest.fixture
def sharded(shards, tmp_path):
    shutil.copytree(shards, tmp_path / "m")
    return tmp_path / "m"


@pytest.fixture(autouse=True)
def no_memory_before_the_check(monkeypatch):
    """Wherever a load fails here, it fails before parameters get memory."""
    reached = []
    original = loading._materialise
    monkeypatch.setattr(loading, "_materialise", lambda *a: (reached.append(1), original(*a)))
    return reached


def rewrite(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def refused(folder, says, reached, error=CheckpointError):
    with pytest.raises(error, match=says) as raised:
        load(folder)
    assert reached == []
    return str(raised.value)


def alone(message):
    """What is wrong with a file is told without what follows from it."""
    assert "\n" not in message
    assert "missing tensor" not in message


def test_every_weight_arrives_where_it_belongs(copy):
    """Merged projections hold their sources in order, and nothing keeps what memory held before."""
    stored = load_file(copy / "model.safetensors")
    model = load(copy).model
    layer = "model.text_model.layers.1."
    qkv = torch.cat([stored[f"{layer}self_attn.{n}_proj.weight"] for n in "qkv"])
    assert torch.equal(model.text.layers[1].attn.qkv.weight, qkv)
    gate_up = torch.cat([stored[f"{layer}mlp.{n}_proj.weight"] for n in ("gate", "up")])
    assert torch.equal(model.text.layers[1].mlp.gate_up.weight, gate_up)
    assert sum(p.double().sum().item() for p in model.parameters()) == pytest.approx(
        sum(t.double().sum().item() for t in stored.values())
    )


def test_shards_give_the_same_model(sharded, tmp_path):
    whole = tiny_checkpoint("qwen2_5_vl", tmp_path / "whole")
    assert len(list(sharded.glob("*.safetensors"))) > 3
    first, second = load(sharded).model.state_dict(), load(whole).model.state_dict()
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_missing_extra_and_misshapen_tensors_are_listed_together(copy, no_memory_before_the_check):
    def change(tensors):
        del tensors["model.text_model.norm.weight"]
        tensors["model.text_model.layers.0.mlp.down_proj.weight"] = torch.zeros(60, 95)
        tensors["model.text_model.layers.0.self_attn.k_proj.weight"] = torch.zeros(21, 60)
        tensors["model.text_model.layers.9.input_layernorm.weight"] = torch.zeros(60)

    rewrite(copy, change)
    message = refused(copy, "do not fit its config.json: 4 problems", no_memory_before_the_check)
    assert "missing tensor model.text_model.norm.weight" in message
    assert "model.text_model.layers.0.mlp.down_proj.weight has shape [60, 95], expected [60, 96]" in message
    assert "self_attn.k_proj.weight [21, 60]" in message
    assert "unexpected tensor model.text_model.layers.9.input_layernorm.weight in model.safetensors" in message
    assert str(copy) in message


def test_only_the_first_ten_problems_are_listed(copy, no_memory_before_the_check):
    rewrite(copy, lambda tensors: [tensors.pop(name) for name in sorted(tensors)[:25]])
    message = refused(copy, "25 problems", no_memory_before_the_check)
    assert message.count("missing tensor") == 10
    assert "... and 15 more" in message


def test_a_truncated_file_is_named(copy, no_memory_before_the_check):
    file = copy / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    alone(refused(copy, "model.safetensors is truncated", no_memory_before_the_check))


@pytest.mark.parametrize("content", [b"", b"abc", struct.pack("<Q", 1 << 40) + b"{}", struct.pack("<Q", 4) + b"nope"])
def test_files_that_are_no_safetensors_are_named(content, copy, no_memory_before_the_check):
    (copy / "model.safetensors").write_bytes(content)
    alone(refused(copy, "model.safetensors (is truncated|has a damaged header)", no_memory_before_the_check))


def test_a_git_lfs_pointer_is_recognised(copy, no_memory_before_the_check):
    (copy / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 123\n")
    alone(refused(copy, "git lfs pull", no_memory_before_the_check))


def test_a_missing_shard_is_named_with_what_it_held(sharded, no_memory_before_the_check):
    gone = sorted(sharded.glob("*.safetensors"))[2]
    gone.unlink()
    alone(refused(sharded, rf"{gone.name} is missing; .* lists \d+ tensors in it", no_memory_before_the_check))


def test_a_truncated_shard_is_named(sharded, no_memory_before_the_check):
    cut = sorted(sharded.glob("*.safetensors"))[1]
    cut.write_bytes(cut.read_bytes()[:-8])
    alone(refused(sharded, rf"{cut.name} is truncated", no_memory_before_the_check))


def test_all_shards_that_cannot_be_used_are_listed(sharded, no_memory_before_the_check):
    first, second, *_ = sorted(sharded.glob("*.safetensors"))
    first.unlink()
    second.write_bytes(b"")
    message = refused(sharded, "cannot be read: 2 problems", no_memory_before_the_check)
    assert f"\n  {first.name} is missing" in message
    assert f"\n  {second.name} is truncated" in message
    assert "missing tensor" not in message


def test_a_tensor_that_the_index_promises_must_be_there(sharded, no_memory_before_the_check):
    index = json.loads((sharded / "model.safetensors.index.json").read_text())
    index["weight_map"]["model.norm.weight"] = sorted(set(index["weight_map"].values()))[0]
    index["weight_map"]["model.ghost.weight"] = sorted(set(index["weight_map"].values()))[0]
    (sharded / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(sharded, "model.ghost.weight is not in model-00001", no_memory_before_the_check)


@pytest.mark.parametrize("content", ["{", "[]", '{"weight_map": 3}'])
def test_a_broken_index_is_named(content, sharded, no_memory_before_the_check):
    (sharded / "model.safetensors.index.json").write_text(content)
    refused(sharded, "index.json is no valid index", no_memory_before_the_check)


def test_an_index_cannot_lead_out_of_the_folder(sharded, no_memory_before_the_check):
    index = json.loads((sharded / "model.safetensors.index.json").read_text())
    index["weight_map"]["model.norm.weight"] = "../other.safetensors"
    (sharded / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(sharded, "no file of the folder", no_memory_before_the_check)


def test_shards_without_their_index_say_so(sharded, no_memory_before_the_check):
    (sharded / "model.safetensors.index.json").unlink()
    refused(sharded, "neither model.safetensors nor model.safetensors.index.json", no_memory_before_the_check)


def test_pickled_weights_are_refused_with_the_remedy(copy, no_memory_before_the_check):
    (copy / "model.safetensors").rename(copy / "pytorch_model.bin")
    refused(copy, r"only as pytorch_model.bin.*save_pretrained", no_memory_before_the_check)


def test_no_weights_at_all(copy, no_memory_before_the_check):
    (copy / "model.safetensors").unlink()
    refused(copy, "has no weights", no_memory_before_the_check)


def test_integer_weights_are_refused(copy, no_memory_before_the_check):
    rewrite(copy, lambda t: t.update({"model.text_model.norm.weight": torch.zeros(60, dtype=torch.int8)}))
    refused(copy, "model.text_model.norm.weight is stored as I8", no_memory_before_the_check)


def edit_config(folder, **fields):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | fields))


@pytest.mark.parametrize("part", ["", "text_config", "vision_config"])
def test_quantised_checkpoints_are_refused_by_method(part, copy, no_memory_before_the_check):
    entry = {"quantization_config": {"quant_method": "awq"}}
    inside = json.loads((copy / "config.json").read_text()).get(part, {})
    edit_config(copy, **({part: inside | entry} if part else entry))
    refused(copy, "quantised .awq.", no_memory_before_the_check, UnsupportedModelError)


def test_an_unknown_architecture_is_refused(copy, no_memory_before_the_check):
    edit_config(copy, model_type="llava")
    refused(copy, "'llava' is not supported", no_memory_before_the_check, UnsupportedModelError)


def test_a_tied_head_that_is_stored_as_a_copy_is_dropped(copy):
    rewrite(copy, lambda t: t.update({"lm_head.weight": t["model.text_model.embed_tokens.weight"].clone()}))
    assert load(copy).model.text.lm_head is None


def test_a_head_that_differs_is_kept_whatever_the_config_says(copy):
    head = torch.randn_like(load_file(copy / "model.safetensors")["model.text_model.embed_tokens.weight"])
    rewrite(copy, lambda t: t.update({"lm_head.weight": head}))
    loaded = load(copy)
    assert torch.equal(loaded.model.text.lm_head.weight, head)
    hidden = torch.randn(2, 60)
    torch.testing.assert_close(loaded.model.logits(hidden), hidden @ head.T)
