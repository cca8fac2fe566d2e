"""`vlm explain`, through the command function: the JSON contract, exit codes, faked machines, real models."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from vlm.cli.explain import explain

APP = typer.Typer()
APP.command()(explain)


def run(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(
        APP, list(arguments), env={"VLM_ATTENTION": "sdpa" if "--platform" in arguments else None}
    )
    assert result.exit_code == code, result.output
    return result.stdout if code == 0 or "--json" in arguments else result.stderr


def asked(*arguments: str, code: int = 0) -> dict[str, Any]:
    out: dict[str, Any] = json.loads(run(*arguments, "--json", code=code))
    return out


A100 = ("--platform", "cuda", "--capability", "8.0")
FA2 = ("--importable", "flash_attn==2.8.3")
VIT = ("--role", "encoder", "--head-dim", "80", "--heads", "16", "--dtype", "bfloat16")


def test_the_json_object() -> None:
    out = asked(*VIT, *A100, *FA2, "--upstream-fa")
    assert list(out) == ["backend", "provider", "source", "reasons", "rejected"]
    assert (out["backend"], out["provider"], out["source"]) == ("flash_attn", "flash_attn 2.8.3", "upgrade")
    assert out["rejected"] == []


def test_without_the_opt_in_the_default_row_stands() -> None:
    out = asked(*VIT, *A100, *FA2)
    assert (out["backend"], out["provider"], out["source"]) == ("torch_varlen", "torch 2.11.0", "default")


def test_a_faked_machine_has_a_faked_environment() -> None:
    """`run` sets VLM_ATTENTION in the real one."""
    assert asked(*VIT, *A100)["source"] == "default"
    assert asked(*VIT, *A100, "--env", "VLM_VISION_ATTENTION=sdpa")["source"] == "explicit"
    assert asked(*VIT, *A100, "--env", "VLM_TEXT_ATTENTION=sdpa")["source"] == "default"


@pytest.mark.parametrize(
    ("settings", "backend", "source"),
    [
        (("--set", "sdpa"), "sdpa", "explicit"),
        (("--set", "vision=sdpa"), "sdpa", "explicit"),
        (("--set", "text=sdpa"), "torch_varlen", "default"),
        (("--set", "triton", "--set", "vision=sdpa"), "sdpa", "explicit"),
        (("--set", "vision=auto", "--env", "VLM_ATTENTION=sdpa"), "sdpa", "explicit"),
    ],
)
def test_settings(settings: tuple[str, ...], backend: str, source: str) -> None:
    out = asked(*VIT, *A100, *settings)
    assert (out["backend"], out["source"]) == (backend, source)


def test_cross_attention_takes_the_setting_of_the_text_stack() -> None:
    assert asked("--role", "cross", *A100, "--set", "text=sdpa")["source"] == "explicit"
    assert asked("--role", "cross", *A100, "--set", "vision=sdpa")["source"] == "default"


def test_a_refused_setting_exits_2_with_the_error_as_json() -> None:
    out = asked(
        "--dtype", "fp16", "--platform", "cuda", "--capability", "7.5", *FA2, "--set", "vision=flash_attn", code=2
    )
    assert list(out) == ["error"]
    assert out["error"]["type"] == "AttentionBackendError"
    assert out["error"]["rejected"] == [{"backend": "flash_attn", "reason": "capability: 7.5 < 8.0"}]
    assert "These would work: torch_efficient, triton, sdpa" in out["error"]["message"]


def test_a_refused_setting_for_people_is_on_stderr() -> None:
    text = run("--dtype", "fp16", "--platform", "cuda", "--capability", "7.5", "--set", "flash_attn", code=2)
    assert text.startswith("error: attention backend 'flash_attn', set by argument attention=")


def test_fp8_kv_on_sm86_names_the_dtype_and_the_capability() -> None:
    out = asked("--role", "decoder", "--head-dim", "128", "--kv-heads", "4", "--dtype", "fp16", "--kv-dtype", "fp8",
                "--platform", "cuda", "--capability", "8.6", "--importable", "triton", code=2)  # fmt: skip
    reasons = [r["reason"] for r in out["error"]["rejected"] if r["backend"] == "triton"]
    assert reasons[0] == "kv_dtype: float8_e4m3fn needs compute capability 8.9, has 8.6"


@pytest.mark.parametrize(
    ("name", "capability", "provider"),
    [
        ("flash-attn==2.8.3", "8.6", "flash_attn 2.8.3"),
        ("flash-attn-4==4.0.0b36", "10.0", "flash_attn.cute 4.0.0b36"),
        ("fa3-fwd==0.0.3", "9.0", "fa3_fwd_interface 0.0.3"),
        ("fa3_fwd_interface==0.0.3", "sm90", "fa3_fwd_interface 0.0.3"),
        ("flash_attn_interface", "9.0", "flash_attn_interface"),
    ],
)
def test_packages_by_any_of_their_names(name: str, capability: str, provider: str) -> None:
    assert (
        asked(*VIT, "--capability", capability, "--platform", "cuda", "--importable", name, "--upstream-fa")["provider"]
        == provider
    )


def test_a_package_that_breaks_on_import() -> None:
    out = asked(*VIT, *A100, *FA2, "--broken", "flash_attn=OSError", "--upstream-fa")
    assert out["source"] == "default"
    assert out["rejected"][0]["reason"].startswith("import: OSError")


@pytest.mark.parametrize(
    "arguments", [("--platform", "xpu"), ("--platform", "rocm", "--capability", "gfx1100"), ("--capability", "gfx942")]
)
def test_the_opt_in_is_inert_elsewhere(arguments: tuple[str, ...]) -> None:
    out = asked(*VIT, *arguments, *FA2, "--upstream-fa")
    kind = "xpu" if "xpu" in arguments else "rocm"
    assert out["backend"] == ("sdpa" if kind == "xpu" else "triton")
    assert f"upstream_fa has no effect on {kind}" in out["reasons"]


def test_bf16_on_turing_becomes_fp16_and_says_so() -> None:
    out = asked(*VIT, "--platform", "cuda", "--capability", "7.5")
    assert out["backend"] == "torch_efficient"
    assert "using float16" in out["reasons"][0]


def test_needs_and_window() -> None:
    out = asked(*VIT, *A100, "--needs", "varlen,softcap")
    assert {"backend": "torch_varlen", "reason": "feature:softcap"} in out["rejected"]
    out = asked(
        *VIT, "--platform", "cuda", "--capability", "9.0", "--importable", "fa3-fwd", "--upstream-fa", "--window", "1"
    )
    assert {"backend": "flash_attn", "reason": "feature:sliding_window [FlashAttention-3 forward]"} in out["rejected"]


def test_for_people() -> None:
    text = run("--role", "decoder", "--kv-heads", "2", *A100)
    lines = [line.rstrip() for line in text.splitlines()]
    assert lines[0] == "decoder, bfloat16, head_dim 64, heads 16/2, on cuda 8.0"
    assert lines[1:4] == ["  backend   triton", "  provider  triton", "  source    default"]
    assert lines[-1] == "  because   default row for decoder on cuda 8.0: triton, torch_varlen, sdpa"
    text = run("--role", "encoder", "--needs", "varlen,softcap", *A100)
    assert text.splitlines()[-1].rstrip() == "  not taken torch_varlen  feature:softcap"


def test_a_decoder_on_turing_takes_triton() -> None:
    out = asked(
        "--platform", "cuda", "--capability", "7.5", "--role", "decoder", "--head-dim", "128", "--kv-heads", "4"
    )
    assert out["backend"] == "triton"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--role", "vision", *A100), "--role 'vision': use encoder, decoder, cross"),
        ((*A100, "--needs", "alibi"), "--needs 'alibi' is no feature"),
        ((*A100, "--dtype", "int3"), "unknown dtype 'int3'"),
        ((*A100, "--set", "vision=fa2"), "names 'fa2', which is no attention backend"),
        ((*A100, "--set", "audio=sdpa"), "no role 'audio'"),
        (("--capability", "8"), "expected one such as 8.0"),
        (("--platform", "tpu"), "unknown platform 'tpu'"),
        ((*A100, "--env", "X"), "expected NAME=VALUE"),
        (("--capability", "99.9"), "no such compute capability"),
        (("--platform", "cpu", "--capability", "8.0"), "leave it out for cpu"),
        (("--platform", "mps", "--capability", "8.0"), "leave it out for mps"),
        (("--platform", "rocm", "--capability", "gfx9999zz"), "an architecture such as gfx942"),
        ((*A100, "--scale", "nan"), "--scale nan"),
        ((*A100, "--scale", "0"), "--scale 0.0"),
        ((*A100, "--scale", "-1"), "--scale -1.0"),
        ((*A100, "--importable", "nonsense==1"), "'nonsense' is no package that a backend uses"),
        ((*A100, "--broken", "flash_attn"), "expected NAME=ERROR, such as flash_attn=OSError"),
        ((*A100, "--kv-dtype", "fp8"), "only a decoder has"),
        ((*A100, "--set", ""), "expected BACKEND"),
        ((*A100, "--set", "vision="), "expected BACKEND"),
        ((*A100, "--set", "vision=sdpa", "--set", "vision=triton"), "two backends for vision"),
        ((*A100, "--set", "sdpa", "--set", "triton"), "two backends for both stacks"),
        ((*A100, "--window", "0"), "at least 1"),
        ((*A100, "--heads", "0"), "at least 1"),
        (("--role", "encoder", *FA2), "name it with --platform"),
        (("some/model", "--heads", "3"), "--heads describes a layer"),
    ],
)
def test_what_is_wrong_with_the_question_exits_2(arguments: tuple[str, ...], message: str) -> None:
    assert message in run(*arguments, code=2)
    assert message in asked(*arguments, code=2)["error"]["message"]


def test_a_layer_on_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLM_ATTENTION", "")
    out = asked("--role", "encoder", "--set", "sdpa")
    assert out["source"] == "explicit"


def test_a_faked_machine_needs_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys, typer\n"
        "from vlm.cli.explain import explain\n"
        f"sys.argv = ['explain', *{[*VIT, *A100, *FA2, '--upstream-fa', '--json']!r}]\n"
        "try:\n    typer.run(explain)\nexcept SystemExit as end:\n    assert not end.code\n"
        "assert not {'torch', 'transformers', 'triton', 'numpy'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path, capture_output=True, text=True)
    assert json.loads(done.stdout)["backend"] == "flash_attn"


QWEN = {
    "model_type": "qwen2_5_vl",
    "dtype": "bfloat16",
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 256,
    "vocab_size": 1000,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "rope_scaling": {"type": "mrope", "mrope_section": [4, 6, 6]},
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "image_token_id": 900,
    "video_token_id": 901,
    "vision_start_token_id": 902,
    "vision_end_token_id": 903,
    "vision_config": {
        "depth": 4,
        "hidden_act": "silu",
        "hidden_size": 160,
        "intermediate_size": 320,
        "num_heads": 2,
        "in_chans": 3,
        "out_hidden_size": 128,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "window_size": 112,
        "fullatt_block_indexes": [3],
        "temporal_patch_size": 2,
    },
}


@pytest.fixture
def qwen(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(QWEN))
    return str(tmp_path)


def test_a_model_has_one_answer_a_layer_group(qwen: str) -> None:
    out = asked(qwen, "--platform", "cuda", "--capability", "9.0", "--importable", "fa3-fwd==0.0.3")
    got = {group["group"]: (group["backend"], group["source"]) for group in out["groups"]}
    assert got == {
        "vision.full": ("flash_attn", "upgrade"),
        "vision.window": ("torch_varlen", "default"),
        "text": ("triton", "default"),
    }


def test_a_model_on_this_machine(qwen: str) -> None:
    out = asked(qwen, "--set", "sdpa")
    assert {group["source"] for group in out["groups"]} == {"explicit"}


def test_a_refused_setting_of_a_model_names_the_group(qwen: str) -> None:
    out = asked(qwen, "--platform", "cpu", "--set", "vision=flash_attn", code=2)
    assert out["error"]["message"].startswith("vision.full: attention backend 'flash_attn'")


def test_a_model_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    assert asked(str(tmp_path / "none"), code=2)["error"]["type"] == "CheckpointError"


@pytest.mark.parametrize("where", ["top", "text_config"])
def test_a_model_that_is_not_served_is_not_explained(tmp_path: Path, where: str) -> None:
    quantised = {"quantization_config": {"quant_method": "fp8"}}
    config = {**QWEN, **(quantised if where == "top" else {"text_config": quantised})}
    (tmp_path / "config.json").write_text(json.dumps(config))
    error = asked(str(tmp_path), "--platform", "cpu", code=2)["error"]
    assert error["type"] == "UnsupportedModelError"
    assert "quantised (fp8)" in error["message"]


def test_without_arguments_it_is_about_the_model_that_would_run(monkeypatch: pytest.MonkeyPatch, tiny: Any) -> None:
    monkeypatch.delenv("VLM_MODEL", raising=False)
    embedded = asked("--set", "vision=sdpa")["groups"]
    assert [(group["group"], group["source"]) for group in embedded] == [("vision", "explicit"), ("text", "default")]
    monkeypatch.setenv("VLM_MODEL", str(tiny("qwen2_5_vl")))
    assert {group["group"] for group in asked()["groups"]} == {"vision.full", "vision.window", "text"}
