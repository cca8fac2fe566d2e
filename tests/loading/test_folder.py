"""Where a model is, and its JSON files: every way that either can be wrong has one clear error."""

import json

import huggingface_hub
import pytest
from huggingface_hub import errors as hub

from vlm.errors import CheckpointError, FetchError
from vlm.loading.folder import EMBEDDED, ModelFolder, resolve_folder


def test_a_folder_is_itself(tmp_path):
    assert resolve_folder(tmp_path) == tmp_path
    assert resolve_folder(str(tmp_path)) == tmp_path


def test_none_is_the_embedded_model(monkeypatch, tmp_path):
    assert EMBEDDED.parts[-3:] == ("vlm", "assets", "embedded")
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr("vlm.loading.folder.EMBEDDED", tmp_path)
    assert resolve_folder(None) == tmp_path
    monkeypatch.setattr("vlm.loading.folder.EMBEDDED", tmp_path / "gone")
    with pytest.raises(CheckpointError, match="embedded model is missing"):
        resolve_folder(None)


@pytest.mark.parametrize(
    "model", ["./nowhere", "/nowhere/at/all", "~/nowhere-at-all", "a/b/c", "owner/na me", "~nobody-here/m"]
)
def test_what_is_neither_folder_nor_hub_id_is_refused_without_a_network(model, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *a, **k: pytest.fail("asked the hub"))
    with pytest.raises(CheckpointError, match="there is no folder"):
        resolve_folder(model)


def test_an_empty_string_is_neither_the_current_folder_nor_the_embedded_model():
    with pytest.raises(CheckpointError, match="an empty string"):
        resolve_folder("")


def test_a_folder_has_no_revisions(tmp_path):
    with pytest.raises(CheckpointError, match=r"revision='main' is for hub models"):
        resolve_folder(tmp_path, "main")
    with pytest.raises(CheckpointError, match=r"revision='main' is for hub models"):
        resolve_folder(None, "main")


def test_a_file_is_no_folder(tmp_path):
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"")
    with pytest.raises(CheckpointError, match="is a file; pass the folder"):
        resolve_folder(file)


def test_a_hub_id_is_downloaded_with_its_revision(monkeypatch, tmp_path):
    asked = {}

    def download(repo, **options):
        asked.update(options, repo=repo)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve_folder("owner/name", revision="v1") == tmp_path
    assert (asked["repo"], asked["revision"]) == ("owner/name", "v1")
    assert "*.safetensors" in asked["allow_patterns"]
    assert not any("bin" in pattern for pattern in asked["allow_patterns"])


def http_error(kind):
    import httpx

    response = httpx.Response(404, request=httpx.Request("GET", "https://hub.invalid"))
    return kind("no", response=response)


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (lambda: http_error(hub.RepositoryNotFoundError), "does not exist or is private"),
        (lambda: http_error(hub.GatedRepoError), "gated"),
        (lambda: http_error(hub.RevisionNotFoundError), "no such revision"),
        (lambda: hub.LocalEntryNotFoundError("not here"), "not in the local cache"),
        (lambda: hub.OfflineModeIsEnabled("offline"), "not in the local cache"),
        (lambda: OSError("disk full"), "disk full"),
    ],
)
def test_what_the_hub_answers_becomes_a_fetch_error(error, says, monkeypatch):
    def fail(*args, **options):
        raise error()

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(FetchError, match=says) as raised:
        resolve_folder("owner/name")
    assert "'owner/name'" in str(raised.value)


def test_offline_mode_is_honoured(monkeypatch, tmp_path):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(FetchError, match="HF_HUB_OFFLINE is set"):
        resolve_folder("owner/name-that-is-not-cached")


def write(folder, name, content):
    (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))


def test_configs_are_read(tmp_path):
    write(tmp_path, "config.json", {"model_type": "smolvlm"})
    write(tmp_path, "preprocessor_config.json", {"do_resize": True})
    folder = ModelFolder(tmp_path)
    assert folder.model_type == "smolvlm"
    assert folder.preprocessor_config == {"do_resize": True}
    assert folder.generation_config == {}
    assert folder.processor_config == {}


def test_the_image_processor_may_be_nested_in_the_processor(tmp_path):
    write(tmp_path, "processor_config.json", {"image_seq_len": 64, "image_processor": {"do_pad": True}})
    assert ModelFolder(tmp_path).preprocessor_config == {"do_pad": True}


def test_a_broken_processor_config_is_not_passed_over(tmp_path):
    write(tmp_path, "preprocessor_config.json", {"do_resize": True})
    write(tmp_path, "processor_config.json", "{")
    with pytest.raises(CheckpointError, match=r"processor_config\.json is not valid JSON"):
        _ = ModelFolder(tmp_path).preprocessor_config


@pytest.mark.parametrize(
    ("files", "read", "says"),
    [
        ({}, "config", "has no config.json"),
        ({"config.json": '{"a": 1,\n "b" 2}'}, "config", r"config.json is not valid JSON: .* at line 2, column 6"),
        ({"config.json": "[1]"}, "config", "holds a JSON list"),
        ({"config.json": "{}"}, "model_type", "names no model_type"),
        ({"generation_config.json": "{"}, "generation_config", "generation_config.json is not valid JSON"),
        ({}, "preprocessor_config", "neither preprocessor_config.json nor"),
    ],
)
def test_broken_configs_name_the_file_and_the_place(files, read, says, tmp_path):
    for name, content in files.items():
        write(tmp_path, name, content)
    with pytest.raises(CheckpointError, match=says):
        getattr(ModelFolder(tmp_path), read)


def test_bytes_that_are_no_text_are_refused(tmp_path):
    (tmp_path / "config.json").write_bytes(b"\xff\xfe\x00{")
    with pytest.raises(CheckpointError, match="cannot be read"):
        _ = ModelFolder(tmp_path).config


def test_a_missing_folder_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="there is no folder"):
        ModelFolder(tmp_path / "gone")
