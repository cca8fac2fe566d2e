"""From a folder to a model: dtypes, devices, decisions, made-up weights."""

import logging

import pytest
import torch

from vlm.attention.platform import Platform
from vlm.attention.spec import Preference
from vlm.errors import AttentionBackendError, UnsupportedModelError
from vlm.loading import weights
from vlm.loading.folder import ModelFolder
from vlm.loading.model import load_model, pad_odd_widths
from vlm.testing import tiny_checkpoint
from vlm.testing.greedy import make_prompt, prompt_logits

CPU = Platform.fake("cpu")


@pytest.fixture
def qwen(vlm_tiny_checkpoints):
    return ModelFolder(vlm_tiny_checkpoints("qwen2_5_vl"))


def test_what_is_reported(qwen):
    loaded = load_model(qwen, CPU, progress=False)
    assert [d.group for d in loaded.decisions] == ["vision.full", "vision.window", "text"]
    assert {d.backend for d in loaded.decisions} == {"sdpa"}
    assert (loaded.device, loaded.dtype) == (torch.device("cpu"), torch.float32)
    assert loaded.weight_bytes == 4 * sum(p.numel() for p in loaded.model.parameters())
    assert loaded.load_seconds > 0
    assert not loaded.model.training
    assert not any(p.requires_grad for p in loaded.model.parameters())


def test_a_configured_backend_is_used_or_refused(qwen):
    preferences = {"vision": Preference("sdpa", "argument attention=")}
    loaded = load_model(qwen, CPU, preferences=preferences, progress=False)
    assert [d.source for d in loaded.decisions] == ["explicit", "explicit", "default"]
    with pytest.raises(AttentionBackendError, match="flash_attn"):
        load_model(qwen, CPU, preferences={"text": Preference("flash_attn", "argument attention=")}, progress=False)


def test_bf16_on_a_machine_without_it_warns_once_and_computes(qwen, caplog):
    with caplog.at_level(logging.WARNING):
        loaded = load_model(qwen, Platform.fake("cpu", bf16=False), dtype="bfloat16", progress=False)
    assert loaded.dtype == torch.float32
    assert len([r for r in caplog.records if "bfloat16" in r.getMessage()]) == 1


def test_bf16_on_a_machine_with_it(qwen):
    loaded = load_model(qwen, Platform.fake("cpu", bf16=True), dtype="bfloat16", progress=False)
    assert {p.dtype for p in loaded.model.parameters()} == {torch.bfloat16}
    assert {b.dtype for b in loaded.model.buffers()} == {torch.float32, torch.int64}
    (logits,) = prompt_logits(loaded, [make_prompt(loaded, [1, 2, 3])])
    assert logits.dtype == torch.bfloat16
    assert logits.isfinite().all()


def test_an_unknown_load_format_is_refused(qwen):
    with pytest.raises(UnsupportedModelError, match="expected one of auto, safetensors, dummy"):
        load_model(qwen, CPU, load_format="gguf")


@pytest.mark.parametrize("model_type", ["qwen2_5_vl", "smolvlm", "idefics3"])
def test_dummy_weights_need_a_config_only_and_follow_the_seed(model_type, vlm_tiny_checkpoints, tmp_path):
    (tmp_path / "config.json").write_text((vlm_tiny_checkpoints(model_type) / "config.json").read_text())
    folder = ModelFolder(tmp_path)
    first, again, other = (load_model(folder, CPU, load_format="dummy", seed=s).model for s in (0, 0, 1))
    for name, parameter in first.named_parameters():
        assert torch.equal(parameter, again.get_parameter(name))
        if parameter.ndim > 1:
            assert not torch.equal(parameter, other.get_parameter(name))
            assert parameter.std() == pytest.approx(0.02, rel=0.2)
        else:
            assert set(parameter.unique().tolist()) == ({1.0} if name.endswith("weight") else {0.0})


def test_padding_odd_widths_keeps_what_the_model_says(qwen):
    plain, padded = load_model(qwen, CPU, progress=False), load_model(qwen, CPU, progress=False)
    pad_odd_widths(padded.model)
    assert padded.model.vision.blocks[0].mlp.down.in_features == 64
    patches = torch.randn(24, 1176)
    with torch.inference_mode():
        expected, got = (m.model.vision(patches, [(1, 4, 6)]) for m in (plain, padded))
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5 * expected.abs().max().item())


def test_progress_shows_on_a_terminal_only(qwen, monkeypatch, capsys):
    load_model(qwen, CPU, progress=True)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    load_model(qwen, CPU, progress=False)
    assert capsys.readouterr().err == ""
    load_model(qwen, CPU, progress=True)
    assert "loading weights" in capsys.readouterr().err


def test_the_stored_dtype_counts_where_the_config_is_silent(tmp_path):
    folder = tiny_checkpoint("smolvlm", tmp_path, dtype="float16")
    from vlm.families import get_family
    from vlm.loading.safetensors_files import read_checkpoint

    entries = weights.canonical(read_checkpoint(folder), get_family("smolvlm").canonical_name)
    assert weights.stored_dtype(entries) == "float16"
    assert weights.stored_dtype({}) == "float32"


@pytest.mark.gpu
def test_on_cuda_weights_are_in_the_checkpoints_dtype_and_odd_widths_are_padded(tmp_path):
    folder = ModelFolder(tiny_checkpoint("qwen2_5_vl", tmp_path, dtype="bfloat16"))
    loaded = load_model(folder, Platform.detect("cuda"), progress=False)
    assert loaded.dtype == torch.bfloat16
    assert loaded.device.type == "cuda"
    assert loaded.model.vision.blocks[0].mlp.down.in_features == 64
