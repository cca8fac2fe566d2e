"""Every error that users meet, one tree.

VLMError
 ├─ ImageDecodeError          bytes that are no picture, a truncated file, an unsupported format
 │   └─ ImageTooLargeError    refused from the header by a pixel limit
 ├─ PromptError               messages, placeholders or parameters that make no valid prompt
 │   └─ ContextLengthError    a prompt that can never fit the model's context
 ├─ AttentionBackendError     a configured backend that cannot do the job
 ├─ CheckpointError           missing, truncated or mis-shaped weights; unreadable configs
 ├─ UnsupportedModelError     an architecture or a setting that this version does not serve
 └─ FetchError                a URL or a hub file that could not be had
"""

from __future__ import annotations

from vlm.attention.errors import AttentionBackendError, VLMError

__all__ = [
    "AttentionBackendError",
    "CheckpointError",
    "ContextLengthError",
    "FetchError",
    "ImageDecodeError",
    "ImageTooLargeError",
    "PromptError",
    "UnsupportedModelError",
    "VLMError",
]


class ImageDecodeError(VLMError):
    """An input that cannot be read as a picture; the message names the input."""


class ImageTooLargeError(ImageDecodeError):
    """A picture refused from its header, before decoding, by the pixel limit."""


class PromptError(VLMError):
    """Messages, placeholders or sampling parameters that do not make a valid request."""


class ContextLengthError(PromptError):
    """A prompt that can never fit the context of the model."""


class CheckpointError(VLMError):
    """A model folder that cannot be loaded: the message names the file and the remedy."""


class UnsupportedModelError(VLMError):
    """An architecture, quantisation or option that this version does not serve."""


class FetchError(VLMError):
    """Something that had to come over the network and did not."""
