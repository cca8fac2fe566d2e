"""What a caller may pass as an image -> a named stream of bytes, or a PIL picture. Nothing is decoded here.

Kinds: PIL picture; path (str or Path); http(s) URL; data: URI; bytes; binary file object; array or tensor; `vlm.Image`.
"""

from __future__ import annotations

import base64
import binascii
import io
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import unquote_to_bytes, urlsplit

import PIL.Image as pil

from vlm.errors import FetchError, ImageDecodeError
from vlm.images.array import array_to_picture, as_numpy, is_array
from vlm.images.image import Image

KINDS = "a path, an http(s) URL, a data: URI, bytes, a binary file object, a PIL image, an array or a tensor"


@dataclass(frozen=True)
class FetchPolicy:
    """What a download may do.

    Attributes:
        allow_private: whether loopback, link-local, private and reserved addresses may be reached.
        timeout_s: seconds for the whole download, redirects included; name resolution is bounded by the system's
            resolver.
        max_bytes: size of the answer at most.
        max_redirects: redirects followed at most.
    """

    allow_private: bool = False
    timeout_s: float = 30.0
    max_bytes: int = 64 * 1024 * 1024
    max_redirects: int = 5


@dataclass(frozen=True)
class Opened:
    """An image source, ready to be read: exactly one of `stream` (at its start, seekable) and `picture` is set."""

    name: str
    stream: BinaryIO | None = None
    picture: pil.Image | None = None


@contextmanager
def open_source(source: Any, fetch_policy: FetchPolicy | None = None) -> Iterator[Opened]:
    """Open any kind of image source; files are closed at the end of the block.

    Raises:
        FileNotFoundError: a path that names nothing. ImageDecodeError: a source of no known kind, a folder, a pipe, an
        unreadable file, a malformed data: URI. FetchError: a URL that could not be had.
    """
    if isinstance(source, str):
        source = _parse_string(source)
    if isinstance(source, os.PathLike):
        with _open_file(source) as stream:
            yield Opened(display_path(source), stream)
    elif isinstance(source, Url):
        from vlm.images.fetch import fetch

        yield Opened(display_url(source.url), io.BytesIO(fetch(source.url, fetch_policy)))
    else:
        yield _open_in_memory(source)


def source_name(source: Any) -> str:
    """How a source is called in results and messages."""
    if isinstance(source, Image):
        return source_name(source.source)
    if isinstance(source, str):
        return display_url(source) if _scheme(source) else display_path(source)
    if isinstance(source, os.PathLike):
        return display_path(source)
    return _memory_name(source)


@dataclass(frozen=True)
class Url:
    url: str


@dataclass(frozen=True)
class DataUri:
    uri: str


def _parse_string(text: str) -> Path | Url | DataUri:
    scheme = _scheme(text)
    if scheme == "data":
        return DataUri(text)
    if scheme in ("http", "https"):
        return Url(text)
    if scheme == "file":
        raise ImageDecodeError(f"{display_url(text)}: pass the path itself instead of a file: URL")
    if scheme:
        raise FetchError(
            f"{display_url(text)}: only http and https URLs are fetched; download it and pass the file's path"
        )
    if not text:
        raise ImageDecodeError(f"an empty string is no image: pass {KINDS}")
    return Path(text)


def _scheme(text: str) -> str:
    """The scheme of a string that is a URL, else "". A colon alone does not make one: file names may hold it."""
    match = re.match(r"\s*(data):|\s*([A-Za-z][A-Za-z0-9+.-]*)://", text, re.IGNORECASE)
    return (match[1] or match[2]).lower() if match else ""


def display_url(url: str) -> str:
    """A URL for messages: shortened, without a user name or password, and without the payload of a data: URI."""
    if _scheme(url) == "data":
        return f"{url.split(',')[0][:60]},... ({len(url)} characters)"
    try:
        parts = urlsplit(url)
        if "@" in parts.netloc:
            url = parts._replace(netloc="***@" + parts.netloc.rsplit("@", 1)[1]).geturl()
    except ValueError:
        pass
    return url if len(url) <= 200 else url[:197] + "..."


def display_path(path: str | os.PathLike[str]) -> str:
    """A path for messages on one line: unprintable characters escaped, a very long one shortened."""
    text = os.fspath(path)
    text = text if isinstance(text, str) else os.fsdecode(text)
    text = text if text.isprintable() else repr(text)[1:-1]
    return text if len(text) <= 400 else f"{text[:200]}... ({len(text)} characters)"


def _open_file(path: os.PathLike[str]) -> BinaryIO:
    """A regular file, opened. O_NONBLOCK keeps a FIFO from waiting for its writer; fstat then tells what was opened."""
    name = display_path(path)
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    except FileNotFoundError:
        if os.path.islink(path):
            target = display_path(os.readlink(path))
            raise FileNotFoundError(f"{name}: a link to {target}, which does not exist") from None
        raise FileNotFoundError(f"{name}: no such file; an image is {KINDS}") from None
    except PermissionError:
        what = "a folder" if os.path.isdir(path) else "no permission to read it"
        raise ImageDecodeError(f"{name}: {what}") from None
    except (OSError, ValueError) as e:
        raise ImageDecodeError(f"{name}: cannot be opened: {getattr(e, 'strerror', None) or e}") from e
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    kinds = {stat.S_ISDIR: "a folder", stat.S_ISFIFO: "a pipe", stat.S_ISSOCK: "a socket"}
    what = next((word for check, word in kinds.items() if check(mode)), "a device")
    raise ImageDecodeError(f"{name}: is {what}, not a picture file")


def _open_in_memory(source: Any) -> Opened:
    name = _memory_name(source)
    if isinstance(source, pil.Image):
        return Opened(name, picture=source)
    if isinstance(source, DataUri):
        return Opened(name, io.BytesIO(decode_data_uri(source.uri)))
    if isinstance(source, (bytes, bytearray, memoryview)):
        return Opened(name, io.BytesIO(source))
    if hasattr(source, "read"):
        return Opened(name, io.BytesIO(_read_object(source, name)))
    if is_array(source):
        return Opened(name, picture=array_to_picture(as_numpy(source)))
    raise ImageDecodeError(f"a {type(source).__name__} is no image: pass {KINDS}")


def _memory_name(source: Any) -> str:
    if isinstance(source, pil.Image):
        filename = getattr(source, "filename", "")
        return display_path(filename) if filename else f"PIL image {source.width}x{source.height}"
    if isinstance(source, DataUri):
        return display_url(source.uri)
    if isinstance(source, (bytes, bytearray, memoryview)):
        return f"{memoryview(source).nbytes} bytes"
    if hasattr(source, "read"):
        name = getattr(source, "name", None)
        return display_path(name) if isinstance(name, str) and name else f"file object {type(source).__name__}"
    if is_array(source):
        return f"an array of shape {tuple(source.shape)}" if hasattr(source, "shape") else type(source).__name__
    return f"a {type(source).__name__}"


def _read_object(source: Any, name: str) -> bytes:
    """All bytes from where the object stands. One that can seek is put back there, so that it can be read again."""
    try:
        start = source.tell() if hasattr(source, "seekable") and source.seekable() else None
        data = source.read()
        if start is not None:
            source.seek(start)
    except (OSError, ValueError) as e:
        raise ImageDecodeError(f"{name}: cannot be read: {e}") from e
    if not isinstance(data, (bytes, bytearray, memoryview)):
        raise ImageDecodeError(f'{name}: gives {type(data).__name__}, not bytes: open it in binary mode ("rb")')
    return bytes(data)


def decode_data_uri(uri: str) -> bytes:
    """The bytes of a `data:[type][;parameters][;base64],...` URI (RFC 2397), or ImageDecodeError."""
    name = display_url(uri)
    header, comma, payload = uri.strip()[len("data:") :].partition(",")
    if not comma:
        raise ImageDecodeError(f"{name}: malformed data: URI: no comma before the data")
    media_type, *parameters = (part.strip().lower() for part in header.split(";"))
    if not (media_type.startswith("image/") or media_type in ("", "application/octet-stream")):
        raise ImageDecodeError(f"{name}: a data: URI of type {media_type}, not of an image")
    data = unquote_to_bytes(payload)
    if "base64" not in parameters:
        return data
    compact = b"".join(data.split()).rstrip(b"=")
    try:
        return base64.b64decode(compact + b"=" * (-len(compact) % 4), validate=True)
    except (binascii.Error, ValueError) as e:
        raise ImageDecodeError(f"{name}: the data is not valid base64: {e}") from e
