"""Arguments and model folders that cannot be used: one typed error that names the cause, before weights are read."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vlm import VLM, CheckpointError, ImageDecodeError, PromptError, SamplingParams
from vlm import start as starting


@pytest.fixture
def folder(tiny: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A SmolVLM folder to damage, whose weights nobody may read."""

    def read(*_args: object, **_options: object) -> None:
        raise AssertionError("the weights were read")

    monkeypatch.setattr(starting, "load_model", read)
    return Path(shutil.copytree(tiny("smolvlm"), tmp_path / "m"))


def edit(folder: Path, name: str, **entries: Any) -> None:
    file = folder / name
    file.write_text(json.dumps(json.loads(file.read_text()) | entries))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("device", 0),
        ("device", None),
        ("dtype", None),
        ("load_format", None),
        ("revision", 3),
        ("enable_prefix_cache", "x"),
        ("deterministic", 1),
        ("trust_remote_code", None),
        ("gpu_memory_fraction", "most"),
        ("kv_cache_gib", "2"),
        ("kv_cache_gib", float("inf")),
    ],
)
def test_arguments_of_the_wrong_type(name: str, value: Any, folder: Path) -> None:
    with pytest.raises(PromptError, match=f"^{name}="):
        VLM(folder, **{name: value})


@pytest.mark.parametrize("model", [3, b"x", ["a"]])
def test_a_model_is_a_folder_or_an_id(model: Any) -> None:
    with pytest.raises(PromptError, match="model must be a folder, a hub id or None"):
        VLM(model)


def test_an_empty_string_is_not_the_embedded_model() -> None:
    with pytest.raises(CheckpointError, match="an empty string"):
        VLM("")


def test_a_revision_of_a_local_folder(folder: Path) -> None:
    with pytest.raises(CheckpointError, match="revision='main'"):
        VLM(folder, revision="main")


def test_an_empty_folder_lacks_a_config_first_of_all(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        VLM(tmp_path)


def test_a_generation_config_that_cannot_be_used(folder: Path) -> None:
    edit(folder, "generation_config.json", do_sample=True, temperature="hot")
    with pytest.raises(CheckpointError, match=r"generation_config\.json: temperature is 'hot'"):
        VLM(folder)


def test_ids_that_come_from_config_json_are_checked_there(folder: Path) -> None:
    (folder / "generation_config.json").unlink()
    edit(folder, "config.json", eos_token_id="x")
    with pytest.raises(CheckpointError, match=r"m/config\.json: eos_token_id is 'x'"):
        VLM(folder)


def test_a_preprocessor_config_of_another_model(folder: Path) -> None:
    (folder / "preprocessor_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"^preprocessor_config\.json: .* but config\.json: "):
        VLM(folder)


def test_an_id_below_zero_is_named_before_the_tokenizer_meets_it(folder: Path) -> None:
    edit(folder, "config.json", vision_start_token_id=-1)
    with pytest.raises(CheckpointError, match="vision_start_token_id is -1"):
        VLM(folder)


def test_inputs_are_refused_in_the_words_of_the_caller(models: Callable[..., Any]) -> None:
    model = models()
    with pytest.raises(ImageDecodeError, match=r"^None is no image: pass a path"):
        model.caption(None)
    with pytest.raises(PromptError, match=r"^prompt must be a string or None, not a int"):
        model.caption("a.png", 5)
    with pytest.raises(PromptError, match=r"^stop_token_ids has 1000000000, but the model's ids end at "):
        model.caption("a.png", params=SamplingParams(stop_token_ids=[10**9]))
    with pytest.raises(PromptError, match=r"^ordered='no'"):
        model.caption_many([], ordered="no")
    assert [str(output.error)[:16] for output in model.caption_many([None])] == ["None is no image"]
