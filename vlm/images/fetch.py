"""One picture over http or https, within limits of time, size and reach.

A URL in a request may come from anybody, so an address of the machine's own network is refused unless allowed. The
check is made on the addresses that the name resolves to, and the connection goes to a checked address, not to the name
again: a name that changes its answer between check and use gains nothing. Every redirect passes through the same check.
Proxies of the environment are not used, because they would resolve the name themselves.
"""

from __future__ import annotations

import ipaddress
import socket
import ssl
import time
from typing import Any
from urllib.parse import urljoin, urlsplit

import httpcore
import httpx

from vlm.errors import FetchError
from vlm.images.source import FetchPolicy, display_url

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

_REDIRECTS = (301, 302, 303, 307, 308)
# Compressed answers could unpack to any size, and pictures gain nothing from them.
_HEADERS: dict[bytes | str, bytes | str] = {
    "user-agent": "vlm-runtime",
    "accept": "image/*,*/*;q=0.5",
    "accept-encoding": "identity",
}
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")


def fetch(url: str, policy: FetchPolicy | None = None) -> bytes:
    """The body behind an http(s) URL.

    Raises:
        FetchError: another scheme, a refused address, a status other than 200, a limit passed, or a network failure.
    """
    policy = policy or FetchPolicy()
    name = display_url(url)
    backend = CheckedBackend(policy.allow_private, time.monotonic() + policy.timeout_s)
    try:
        with httpcore.ConnectionPool(network_backend=backend) as pool:
            for _ in range(policy.max_redirects + 1):
                with pool.stream("GET", _request_url(url, name), headers=_HEADERS) as response:
                    if response.status not in _REDIRECTS:
                        return _read_body(response, name, policy.max_bytes)
                    url = urljoin(url, _header(response, b"location"))
    except httpcore.TimeoutException as e:
        raise FetchError(f"{name}: not complete after {policy.timeout_s:g} s") from e
    except (httpcore.NetworkError, httpcore.ProtocolError, httpcore.UnsupportedProtocol, OSError, ValueError) as e:
        raise FetchError(f"{name}: could not be fetched: {str(e) or type(e).__name__}") from e
    raise FetchError(f"{name}: more than {policy.max_redirects} redirects")


def _request_url(url: str, name: str) -> str:
    """The URL in ASCII: host names by IDNA, the rest percent-encoded."""
    if urlsplit(url).scheme.lower() not in ("http", "https"):
        to = "" if display_url(url) == name else f" (it redirects to {display_url(url)})"
        raise FetchError(f"{name}: only http and https URLs are fetched{to}; download it and pass the file's path")
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as e:
        raise FetchError(f"{name}: not a valid URL: {e}") from e
    if not parsed.host:
        raise FetchError(f"{name}: not a valid URL: it names no host")
    return str(parsed.copy_with(fragment=None))


def _read_body(response: httpcore.Response, name: str, max_bytes: int) -> bytes:
    if response.status != 200:
        reason = bytes(response.extensions.get("reason_phrase", b"")).decode("ascii", "replace")
        raise FetchError(f"{name}: the server answered {response.status} {reason}".rstrip())
    if (encoding := _header(response, b"content-encoding")) not in ("", "identity"):
        raise FetchError(f"{name}: the server sent it compressed ({encoding}) although it was asked not to")
    too_large = f"{name}: larger than the limit of {max_bytes:,} bytes for a download"
    length = _header(response, b"content-length")
    if length.isdigit() and int(length) > max_bytes:
        raise FetchError(too_large)
    body = bytearray()
    for chunk in response.iter_stream():
        body += chunk
        if len(body) > max_bytes:
            raise FetchError(too_large)
    return bytes(body)


def _header(response: httpcore.Response, name: bytes) -> str:
    return next((value.decode("latin-1") for key, value in response.headers if key.lower() == name), "")


class CheckedBackend(httpcore.NetworkBackend):
    """Connects only to checked addresses; all that happens on a connection ends at one deadline (time.monotonic)."""

    def __init__(self, allow_private: bool, deadline: float) -> None:
        self._inner = httpcore.SyncBackend()
        self._allow_private = allow_private
        self._deadline = deadline

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Any = None,
    ) -> httpcore.NetworkStream:
        failure: Exception | None = None
        for address in checked_addresses(host, port, self._allow_private):
            try:
                stream = self._inner.connect_tcp(
                    address, port, _remaining(self._deadline), local_address, socket_options
                )
                return DeadlineStream(stream, self._deadline)
            except httpcore.ConnectError as e:
                failure = e
        raise failure or httpcore.ConnectError(f"{host} has no address")


class DeadlineStream(httpcore.NetworkStream):
    """A connection on which a peer that sends a byte now and then cannot outlast the deadline."""

    def __init__(self, inner: httpcore.NetworkStream, deadline: float) -> None:
        self._inner = inner
        self._deadline = deadline

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        return self._inner.read(max_bytes, _remaining(self._deadline))

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._inner.write(buffer, _remaining(self._deadline))

    def close(self) -> None:
        self._inner.close()

    def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.NetworkStream:
        stream = self._inner.start_tls(ssl_context, server_hostname, _remaining(self._deadline))
        return DeadlineStream(stream, self._deadline)

    def get_extra_info(self, info: str) -> Any:
        return self._inner.get_extra_info(info)


def _remaining(deadline: float) -> float:
    seconds = deadline - time.monotonic()
    if seconds <= 0:
        raise httpcore.ReadTimeout("the deadline has passed")
    return seconds


def checked_addresses(host: str, port: int, allow_private: bool) -> list[str]:
    """The addresses of a host, every one of them checked. Raises FetchError where one is refused or there is none."""
    try:
        answers = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as e:
        raise FetchError(f"{host}: the name cannot be resolved: {e}") from e
    addresses = list(dict.fromkeys(str(answer[4][0]) for answer in answers))
    refused = [] if allow_private else [a for a in addresses if not is_public(ipaddress.ip_address(a))]
    if refused or not addresses:
        raise FetchError(
            f"{host}: refused: it resolves to {', '.join(refused) or 'nothing'}, which is not a public address; "
            "vlm.Image.open(url, allow_private=True) allows it"
        )
    return addresses


def is_public(address: Address) -> bool:
    """Whether an address is on the public internet, also where an IPv6 address carries an IPv4 one inside."""
    if isinstance(address, ipaddress.IPv6Address):
        nat64 = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF) if address in _NAT64 else None
        if (same := address.ipv4_mapped or nat64) is not None:
            return is_public(same)
        if any(a is not None and not is_public(a) for a in (address.sixtofour, *(address.teredo or ()))):
            return False
    return address.is_global and not address.is_multicast and not address.is_reserved
