"""A runtime for vision-language models: images and text in, text out.

    from vlm import VLM

    with VLM() as model:
        print(model.caption("picture.jpg").text)

Names load on first use: importing this package imports neither torch nor anything else that is slow.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vlm.api import VLM as VLM
    from vlm.errors import AttentionBackendError as AttentionBackendError
    from vlm.errors import CheckpointError as CheckpointError
    from vlm.errors import ContextLengthError as ContextLengthError
    from vlm.errors import FetchError as FetchError
    from vlm.errors import ImageDecodeError as ImageDecodeError
    from vlm.errors import ImageTooLargeError as ImageTooLargeError
    from vlm.errors import PromptError as PromptError
    from vlm.errors import UnsupportedModelError as UnsupportedModelError
    from vlm.errors import VLMError as VLMError
    from vlm.images import Image as Image
    from vlm.outputs import Chunk as Chunk
    from vlm.outputs import Metrics as Metrics
    from vlm.outputs import Output as Output
    from vlm.outputs import TokenLogprobs as TokenLogprobs
    from vlm.outputs import Usage as Usage
    from vlm.params import SamplingParams as SamplingParams

    __version__: str

_HOMES = {
    "VLM": "vlm.api",
    "SamplingParams": "vlm.params",
    "Image": "vlm.images",
    "Output": "vlm.outputs",
    "Chunk": "vlm.outputs",
    "Usage": "vlm.outputs",
    "Metrics": "vlm.outputs",
    "TokenLogprobs": "vlm.outputs",
    "VLMError": "vlm.errors",
    "AttentionBackendError": "vlm.errors",
    "CheckpointError": "vlm.errors",
    "ContextLengthError": "vlm.errors",
    "FetchError": "vlm.errors",
    "ImageDecodeError": "vlm.errors",
    "ImageTooLargeError": "vlm.errors",
    "PromptError": "vlm.errors",
    "UnsupportedModelError": "vlm.errors",
}
__all__ = [*_HOMES, "__version__"]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        value: Any = version("vlm-runtime")
    elif name in _HOMES:
        value = getattr(import_module(_HOMES[name]), name)
    else:
        raise AttributeError(f"module 'vlm' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
