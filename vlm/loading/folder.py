"""Where a model's files are, and its JSON configs. Knows no tensors and no model classes."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from vlm.errors import CheckpointError, FetchError

EMBEDDED = Path(__file__).resolve().parent.parent / "assets" / "embedded"
# What the runtime reads of a hub repository; the rest (other frameworks' weights, ONNX, GGUF) stays there.
_PATTERNS = ("*.json", "*.safetensors", "*.jinja", "*.txt", "tokenizer.model")
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_LOOKS_LOCAL = re.compile(r"^[./~]|\\|^[A-Za-z]:|/.*/")


def resolve_folder(model: str | Path | None, revision: str | None = None) -> Path:
    """The folder that holds a model.

    Args:
        model: a local folder, a hub id ("owner/name"), or None for the model that is embedded in this package.
        revision: branch, tag or commit of a hub repository.

    Raises:
        CheckpointError: the path is no folder, or no folder at all and no hub id either; or a folder with a revision.
        FetchError: the hub repository could not be had.
    """
    if model == "":
        raise CheckpointError("the model is an empty string; pass a folder or a hub id, or None for the embedded model")
    path = EMBEDDED if model is None else _expanded(model)
    if revision is not None and path.is_dir():
        raise CheckpointError(f"revision={revision!r} is for hub models, and {path} is a local folder; leave it out")
    if model is None:
        if not (EMBEDDED / "config.json").is_file():
            raise CheckpointError(
                f"the embedded model is missing from this installation ({EMBEDDED}); install the package again"
            )
        return EMBEDDED
    if path.is_dir():
        return path
    if path.exists():
        raise CheckpointError(f"{path} is a file; pass the folder that holds config.json and the weights")
    text = str(model)
    if isinstance(model, Path) or _LOOKS_LOCAL.search(text) or not _HUB_ID.fullmatch(text):
        raise CheckpointError(
            f"there is no folder {text!r}; pass a folder in Hugging Face layout or a hub id such as owner/name"
        )
    return _download(text, revision)


def _expanded(model: str | Path) -> Path:
    """With the home folder for ~; the path as it stands where there is no such user."""
    try:
        return Path(model).expanduser()
    except RuntimeError:
        return Path(model)


def _download(repo: str, revision: str | None) -> Path:
    """A snapshot of a hub repository; HF_HOME, HF_TOKEN and HF_HUB_OFFLINE mean what they mean everywhere."""
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub import errors as hub

    at = f"{repo!r}" + (f" at revision {revision!r}" if revision else "")
    try:
        return Path(snapshot_download(repo, revision=revision, allow_patterns=list(_PATTERNS)))
    except hub.GatedRepoError as error:
        raise FetchError(f"hub model {at} is gated: accept its terms on the hub and set HF_TOKEN") from error
    except hub.RevisionNotFoundError as error:
        raise FetchError(f"hub model {at}: there is no such revision") from error
    except hub.RepositoryNotFoundError as error:
        raise FetchError(
            f"hub model {at} does not exist or is private: check the spelling (no local folder has this name either), "
            "or set HF_TOKEN"
        ) from error
    except (hub.LocalEntryNotFoundError, hub.OfflineModeIsEnabled) as error:
        why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else "the hub cannot be reached"
        raise FetchError(
            f"hub model {at} is not in the local cache and {why}: download it once with a network "
            f"(hf download {repo}), or pass a local folder"
        ) from error
    except (hub.HfHubHTTPError, hub.HFValidationError, OSError) as error:
        raise FetchError(f"hub model {at} could not be downloaded: {error}") from error


class ModelFolder:
    """A folder in Hugging Face layout; its configs are read when asked for, each once.

    Args:
        path: the folder, as `resolve_folder` returns it.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        if not self.path.is_dir():
            raise CheckpointError(f"there is no folder {str(path)!r}")

    def __repr__(self) -> str:
        return f"ModelFolder({str(self.path)!r})"

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """config.json."""
        config = self._read("config.json")
        if config is None:
            raise CheckpointError(f"{self.path} has no config.json; it is no model folder in Hugging Face layout")
        return config

    @property
    def model_type(self) -> str:
        """`model_type` of config.json, which picks the family."""
        value = self.config.get("model_type")
        if not isinstance(value, str):
            raise CheckpointError(f"{self.path / 'config.json'} names no model_type")
        return value

    @cached_property
    def generation_config(self) -> Mapping[str, Any]:
        """generation_config.json; {} where there is none."""
        return self._read("generation_config.json") or {}

    @cached_property
    def processor_config(self) -> Mapping[str, Any]:
        """processor_config.json; {} where there is none."""
        return self._read("processor_config.json") or {}

    @cached_property
    def preprocessor_config(self) -> Mapping[str, Any]:
        """The image processor's settings: preprocessor_config.json, or what transformers 5 nests in
        processor_config.json."""
        own, nested = self._read("preprocessor_config.json"), self.processor_config.get("image_processor")
        if own is not None:
            return own
        if isinstance(nested, Mapping):
            return nested
        raise CheckpointError(
            f"{self.path} has neither preprocessor_config.json nor an image_processor in processor_config.json: "
            "copy the file from the original repository"
        )

    def _read(self, name: str) -> Mapping[str, Any] | None:
        """A JSON object, or None where the file does not exist."""
        path = self.path / name
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except json.JSONDecodeError as error:
            raise CheckpointError(
                f"{path} is not valid JSON: {error.msg} at line {error.lineno}, column {error.colno}"
            ) from error
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
        if not isinstance(value, dict):
            raise CheckpointError(f"{path} holds a JSON {type(value).__name__}, not an object")
        return value
