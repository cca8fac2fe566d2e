"""Downloads: what is fetched, what is refused, and that nothing outlasts its limits."""

from __future__ import annotations

import http.server
import io
import ipaddress
import socket
import threading
import time
from collections.abc import Iterator

import httpcore
import PIL.Image
import pytest

from vlm.errors import FetchError, ImageDecodeError
from vlm.images import FetchPolicy, load_image, read_size
from vlm.images.fetch import CheckedBackend, DeadlineStream, checked_addresses, fetch, is_public

LOCAL = FetchPolicy(allow_private=True, timeout_s=5)


def png_bytes() -> bytes:
    out = io.BytesIO()
    PIL.Image.new("RGB", (6, 4), (1, 2, 3)).save(out, "PNG")
    return out.getvalue()


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        route, _, rest = self.path[1:].partition("/")
        getattr(self, f"route_{route}", self.route_missing)(rest)

    def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def route_picture(self, _rest: str) -> None:
        self.answer(200, png_bytes(), Content_Type="image/png")

    def route_host(self, _rest: str) -> None:
        self.answer(200, f"{self.headers['Host']} {self.path} {self.headers.get('Authorization')}".encode())

    def route_missing(self, _rest: str) -> None:
        self.answer(404)

    def route_hops(self, rest: str) -> None:
        self.answer(302, Location=f"/hops/{int(rest) - 1}" if int(rest) else "/picture")

    def route_away(self, rest: str) -> None:
        self.answer(307, Location={"file": "file:///etc/passwd", "metadata": "http://169.254.169.254/latest"}[rest])

    def route_gzip(self, _rest: str) -> None:
        self.answer(200, b"\x1f\x8b", Content_Encoding="gzip")

    def route_large(self, _rest: str) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(10**12))
        self.end_headers()

    def route_endless(self, _rest: str) -> None:
        self.send_response(200)
        self.end_headers()
        try:
            while True:
                self.wfile.write(b"x" * 65536)
        except OSError:
            self.close_connection = True

    def route_slow(self, rest: str) -> None:
        """A byte now and then: in the body, or in the headers."""
        self.wfile.write(b"HTTP/1.1 200 OK\r\n" + (b"\r\n" if rest == "body" else b"X-Pad: "))
        try:
            for _ in range(100):
                self.wfile.write(b"x")
                self.wfile.flush()
                time.sleep(0.05)
        except OSError:
            pass
        self.close_connection = True

    def log_message(self, *_args: object) -> None:
        pass


class Server(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_args: object) -> None:
        """Clients that hang up on purpose are no news."""


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with Server(("127.0.0.1", 0), Handler) as httpd:
        thread = threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield f"http://127.0.0.1:{httpd.server_address[1]}"
        httpd.shutdown()
        thread.join()


def test_picture_is_fetched(server: str) -> None:
    loaded = load_image(f"{server}/picture", fetch_policy=LOCAL)
    assert loaded.image.size == (6, 4)
    assert loaded.source_name == f"{server}/picture"
    assert read_size(f"{server}/picture", fetch_policy=LOCAL) == (6, 4)


def test_request_keeps_the_name_and_drops_fragment_and_password(server: str) -> None:
    port = server.rsplit(":", 1)[1]
    body = fetch(f"http://user:secret@localhost:{port}/host/ä b#part", LOCAL)
    assert body.decode() == f"localhost:{port} /host/%C3%A4%20b None"


def test_redirects_are_followed_up_to_the_limit(server: str) -> None:
    assert fetch(f"{server}/hops/4", LOCAL) == png_bytes()
    with pytest.raises(FetchError, match="more than 5 redirects"):
        fetch(f"{server}/hops/9", LOCAL)


def test_redirect_is_checked_again(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        FetchError, match=r"only http and https URLs are fetched \(it redirects to file:///etc/passwd\)"
    ):
        fetch(f"{server}/away/file", LOCAL)
    real = ipaddress.ip_address
    allowed = {"127.0.0.1"}  # the test server stands for a public one
    monkeypatch.setattr("vlm.images.fetch.is_public", lambda a: str(a) in allowed or is_public(real(str(a))))
    with pytest.raises(FetchError, match=r"169\.254\.169\.254, which is not a public address"):
        fetch(f"{server}/away/metadata", FetchPolicy(timeout_s=5))


@pytest.mark.parametrize(
    ("route", "message"),
    [
        ("nothing", "answered 404 Not Found"),
        ("gzip", r"compressed \(gzip\)"),
        ("large", "larger than the limit of 1,000,000 bytes"),
        ("endless", "larger than the limit of 1,000,000 bytes"),
    ],
)
def test_answers_that_are_refused(server: str, route: str, message: str) -> None:
    with pytest.raises(FetchError, match=rf"{server}/{route}: .*{message}"):
        fetch(f"{server}/{route}", FetchPolicy(allow_private=True, timeout_s=5, max_bytes=1_000_000))


@pytest.mark.parametrize("where", ["body", "headers"])
def test_trickling_server_cannot_outlast_the_deadline(server: str, where: str) -> None:
    start = time.monotonic()
    with pytest.raises(FetchError, match=r"not complete after 0\.4 s"):
        fetch(f"{server}/slow/{where}", FetchPolicy(allow_private=True, timeout_s=0.4))
    assert time.monotonic() - start < 2


def test_server_that_never_answers() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/"
        with pytest.raises(FetchError, match=r"not complete after 0\.2 s"):
            fetch(url, FetchPolicy(allow_private=True, timeout_s=0.2))


def test_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    with pytest.raises(FetchError, match="could not be fetched"):
        fetch(f"http://127.0.0.1:{port}/", LOCAL)


def test_picture_that_is_none_names_the_url(server: str) -> None:
    with pytest.raises(ImageDecodeError, match=rf"{server}/host: .*a text file"):
        load_image(f"{server}/host", fetch_policy=LOCAL)


@pytest.mark.parametrize(
    "url", ["http://", "http:///path", "https://[::1", "http://a b/", "http://\udc80/", "http://host:x/"]
)
def test_malformed_urls(url: str) -> None:
    with pytest.raises(FetchError):
        load_image(url, fetch_policy=LOCAL)


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "127.0.0.1",
        "127.1",
        "0.0.0.0",
        "10.1.2.3",
        "192.168.0.1",
        "169.254.169.254",
        "[::1]",
        "[::ffff:127.0.0.1]",
    ],
)
def test_private_addresses_are_refused_before_a_connection(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def connect(*_args: object) -> None:
        raise AssertionError("connected")

    monkeypatch.setattr(httpcore.SyncBackend, "connect_tcp", connect)
    with pytest.raises(FetchError, match=r"not a public address; vlm\.Image\.open\(url, allow_private=True\)"):
        load_image(f"http://{host}/picture.png")


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("8.8.8.8", True),
        ("2606:4700::1111", True),
        ("::ffff:8.8.8.8", True),
        ("100.64.0.1", False),  # carrier-grade NAT
        ("224.0.0.1", False),
        ("255.255.255.255", False),
        ("fe80::1%eth0", False),
        ("fc00::1", False),
        ("::", False),
        ("::ffff:10.0.0.1", False),
        ("2002:7f00:1::", False),  # 6to4 of 127.0.0.1
        ("64:ff9b::7f00:1", False),  # NAT64 of 127.0.0.1
        ("64:ff9b::808:808", True),
        ("ff02::1", False),
    ],
)
def test_which_addresses_are_public(address: str, public: bool) -> None:
    assert is_public(ipaddress.ip_address(address)) is public


def answers(*addresses: str) -> list[tuple[object, ...]]:
    return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 80)) for address in addresses]


def test_one_private_answer_among_public_ones_refuses_the_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_a, **_k: answers("8.8.8.8", "127.0.0.1"))
    with pytest.raises(FetchError, match=r"resolves to 127\.0\.0\.1"):
        checked_addresses("rebind.example", 80, False)


def test_connection_goes_to_the_address_that_was_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that answers differently the second time is never asked a second time."""
    asked: list[str] = []

    def resolve(host: str, *_args: object, **_options: object) -> list[tuple[object, ...]]:
        asked.append(host)
        return answers("8.8.8.8", "8.8.4.4") if len(asked) == 1 else answers("127.0.0.1")

    connected: list[str] = []

    def connect(_self: object, host: str, *_args: object) -> None:
        connected.append(host)
        raise httpcore.ConnectError("refused")

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    monkeypatch.setattr(httpcore.SyncBackend, "connect_tcp", connect)
    with pytest.raises(FetchError, match="could not be fetched: refused"):
        fetch("http://rebind.example/")
    assert (asked, connected) == (["rebind.example"], ["8.8.8.8", "8.8.4.4"])


def test_encrypted_connections_keep_the_name_and_the_deadline() -> None:
    class Inner(httpcore.NetworkStream):
        server_hostname: str | None = None

        def start_tls(
            self, ssl_context: object, server_hostname: str | None = None, timeout: float | None = None
        ) -> Inner:
            self.server_hostname = server_hostname
            assert timeout is not None
            assert timeout < 5
            return self

    inner = Inner()
    stream = DeadlineStream(inner, time.monotonic() + 5).start_tls(None, "example.org")  # type: ignore[arg-type]
    assert isinstance(stream, DeadlineStream)
    assert inner.server_hostname == "example.org"


def test_deadline_that_has_passed_stops_the_next_connection() -> None:
    with pytest.raises(httpcore.TimeoutException):
        CheckedBackend(True, time.monotonic() - 1).connect_tcp("127.0.0.1", 80)


def test_passwords_stay_out_of_messages() -> None:
    with pytest.raises(FetchError) as caught:
        load_image("http://user:hunter2@127.0.0.1/a.png")
    assert "hunter2" not in str(caught.value)
