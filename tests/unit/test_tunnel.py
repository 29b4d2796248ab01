"""The dashboard's proxy, with real sockets on loopback: who gets in, and what reaches the other side."""

from __future__ import annotations

import gc
import hashlib
import logging
import re
import socket
import socketserver
import struct
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from heliostat import tunnel
from heliostat.errors import HeliostatError
from heliostat.tunnel import DashboardProxy, redirect_page

DEADLINE_S = 60.0  # a net: nothing here waits that long unless it is broken
TOKEN = "a1b2" * 16


# --- the other side -------------------------------------------------------------------------------------------


class Upstream(socketserver.ThreadingTCPServer):
    """A small HTTP server of the test's own; it keeps the head of every request."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.heads: list[bytes] = []
        self.together = threading.Barrier(50)
        self.saw_the_end, self.may_go = threading.Event(), threading.Event()
        self.port: int = self.server_address[1]
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()

    def header(self, name: str) -> list[str]:
        """The values of one header of the last request."""
        lines = self.heads[-1].decode("latin-1").split("\r\n")
        return [line.partition(": ")[2] for line in lines if line.lower().startswith(name.lower() + ":")]


class Handler(socketserver.StreamRequestHandler):
    server: Upstream

    def handle(self) -> None:
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            if not (line := self.rfile.readline()):
                return
            head += line
        self.server.heads.append(head)
        path = head.split(b" ")[1]
        if path == b"/hangup":
            return
        if path == b"/silent":
            self.rfile.read()
            self.server.saw_the_end.set()
            self.server.may_go.wait(DEADLINE_S)
            return
        if path == b"/ws":
            self.wfile.write(b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\n\r\n")
            while data := self.request.recv(65536):
                self.wfile.write(data.upper())
            return
        if path == b"/together":
            self.server.together.wait(DEADLINE_S)
        self.wfile.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n")
        if path == b"/echo":
            left = int(self.server.header("content-length")[0])
            while left and (data := self.rfile.read(min(left, 100_000))):
                self.wfile.write(data)
                left -= len(data)
        else:
            self.wfile.write(b"hello from " + path)


@pytest.fixture
def upstream() -> Iterator[Upstream]:
    with Upstream() as server:
        yield server
        server.shutdown()


# --- this side ------------------------------------------------------------------------------------------------


class Site:
    """A proxy with a target that can move and a token in a file."""

    def __init__(self, port: int, token_file: Path, **options: bool) -> None:
        self.upstream_port = port
        self.token_file = token_file
        token_file.write_text(TOKEN + "\n")
        self.proxy = DashboardProxy(
            lambda: ("127.0.0.1", self.upstream_port), token_file.read_text, **options
        )
        self.proxy.start()
        self.host = f"127.0.0.1:{self.proxy.port}"
        self.cookie = ""

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.proxy.port), timeout=DEADLINE_S)

    def send(self, raw: bytes) -> tuple[int, str, str]:
        """Status, head, body of the answer to these bytes."""
        with self.connect() as client:
            client.sendall(raw)
            answer = read_all(client)
        head, _, body = answer.partition(b"\r\n\r\n")
        return int(head.split(b" ")[1]), head.decode(), body.decode()

    def ask(
        self, target: str, *headers: str, method: str = "GET", cookie: bool = True
    ) -> tuple[int, str, str]:
        return self.send(self.head(target, *headers, method=method, cookie=cookie))

    def head(self, target: str, *headers: str, method: str = "GET", cookie: bool = True) -> bytes:
        lines = [f"{method} {target} HTTP/1.1"]
        lines += [] if any(line.lower().startswith("host:") for line in headers) else [f"Host: {self.host}"]
        lines += [f"Cookie: {self.cookie}"] if cookie and self.cookie else []
        return "\r\n".join([*lines, *headers, "", ""]).encode("latin-1")

    @property
    def key_target(self) -> str:
        return "/" + self.proxy.url.rpartition("/")[2]

    def log_in(self) -> Site:
        status, head, _ = self.ask(self.key_target)
        assert status == 303
        found = re.search(r"Set-Cookie: ([^;]+);", head)
        assert found is not None
        self.cookie = found[1]
        return self


def read_all(client: socket.socket) -> bytes:
    parts = []
    while data := client.recv(65536):
        parts.append(data)
    return b"".join(parts)


def read_exactly(client: socket.socket, count: int) -> bytes:
    return client.recv(count, socket.MSG_WAITALL)


@pytest.fixture
def site(upstream: Upstream, tmp_path: Path) -> Iterator[Site]:
    site = Site(upstream.port, tmp_path / "token")
    yield site
    site.proxy.close()


# --- who gets in ----------------------------------------------------------------------------------------------


def test_the_url_gets_a_browser_in(site: Site, upstream: Upstream) -> None:
    assert site.proxy.url.startswith(f"http://127.0.0.1:{site.proxy.port}/?key=")
    status, head, _ = site.ask(site.key_target)
    assert status == 303
    assert "\r\nLocation: ./\r\n" in head
    cookie = re.search(r"Set-Cookie: (.*)\r\n", head)
    assert cookie is not None
    assert cookie[1].startswith(f"heliostat-session-{site.proxy.port}=")
    # no Path: a browser then keeps it to where the URL was, which is `/` here, and a proxy's own path behind one
    assert set(cookie[1].split("; ")[1:]) == {"HttpOnly", "SameSite=Strict"}
    assert not upstream.heads

    site.cookie = cookie[1].split(";")[0]
    assert site.ask("/")[::2] == (200, "hello from /")
    assert site.ask("/api/jobs/?key=1")[::2] == (200, "hello from /api/jobs/?key=1")


def test_the_key_works_once(site: Site, upstream: Upstream) -> None:
    site.log_in()
    status, head, body = site.ask(site.key_target, cookie=False)
    assert status == 403
    assert body == "This URL was used already: start `heliostat dashboard` again for a new one.\n"
    assert "Set-Cookie" not in head
    status, head, _ = site.ask(site.key_target)  # a reload, or a second tab, of the same browser
    assert status == 303
    assert "\r\nLocation: ./\r\n" in head
    assert "Set-Cookie" not in head
    assert not upstream.heads


def test_the_key_works_once_for_many_at_the_same_time(site: Site) -> None:
    with ThreadPoolExecutor(20) as pool:
        statuses = list(pool.map(lambda _: site.ask(site.key_target, cookie=False)[0], range(20)))
    assert sorted(statuses) == [303] + 19 * [403]


@pytest.mark.parametrize("method", ["HEAD", "POST", "OPTIONS"])
def test_only_a_get_uses_the_key_up(site: Site, method: str) -> None:
    assert site.ask(site.key_target, method=method)[0] == 403
    site.log_in()


@pytest.mark.parametrize(
    "target", ["/", "/?key=", "/?key=wrong", "/?key=%FF%00", "/api/version", "/x?key={key}"]
)
def test_without_cookie_nothing_passes(site: Site, upstream: Upstream, target: str) -> None:
    status, head, body = site.ask(target.replace("{key}", site.key_target.partition("=")[2]))
    assert (status, body) == (403, "Open the URL that `heliostat dashboard` printed.\n")
    assert "Set-Cookie" not in head
    assert not upstream.heads
    site.log_in()  # and nothing of it used the key up


def test_a_wrong_cookie_does_not_pass(site: Site, upstream: Upstream) -> None:
    good = site.log_in().cookie
    name, _, value = good.partition("=")
    for bad in (
        f"{name}=",
        f"{name}={value[:-1]}",
        f"{name}={value}x",
        f"x{good}",
        f"{name}1={value}",
        "é",
        ";",
        name,
    ):
        site.cookie = bad
        assert site.ask("/")[0] == 403, bad
    assert not upstream.heads
    for fine in (f"a=b; {good}", f"{good};c=d", f"{name}=stale; {good}"):
        site.cookie = fine
        assert site.ask("/")[0] == 200, fine


@pytest.mark.parametrize(
    "host",
    [
        "evil.example:{port}",
        "127.0.0.1",
        "127.0.0.1:1",
        "0.0.0.0:{port}",
        "127.0.0.1:{port}.evil.example",
        "",
    ],
)
def test_a_wrong_host_does_not_pass(site: Site, upstream: Upstream, host: str) -> None:
    line = "Host: " + host.format(port=site.proxy.port)
    assert site.ask(site.key_target, line)[0] == 403
    site.log_in()
    assert site.ask("/", line)[0] == 403
    assert not upstream.heads


def test_host_is_there_exactly_once(site: Site, upstream: Upstream) -> None:
    site.log_in()
    assert site.ask("/", f"Host: {site.host}", f"Host: {site.host}")[0] == 403
    assert site.ask("/", f"Host: {site.host}", "Host: evil.example")[0] == 403
    assert site.send(f"GET / HTTP/1.1\r\nCookie: {site.cookie}\r\n\r\n".encode())[0] == 403
    assert not upstream.heads
    assert site.ask("/", f"hOST:  LocalHost:{site.proxy.port} ")[0] == 200


FOREIGN = [
    "Origin: http://127.0.0.1:9999",
    "Origin: https://evil.example",
    "Origin: null",
    "Sec-Fetch-Site: same-site",
    "Sec-Fetch-Site: cross-site",
]


@pytest.mark.parametrize("line", FOREIGN)
def test_another_page_cannot_use_the_cookie(site: Site, upstream: Upstream, line: str) -> None:
    site.log_in()
    assert site.ask("/api/jobs/", line)[0] == 403
    assert site.ask("/", line, method="POST")[0] == 403
    assert site.ask("/ws", line, "Upgrade: websocket", "Connection: Upgrade")[0] == 403
    assert not upstream.heads


def test_our_own_page_can(site: Site) -> None:
    site.log_in()
    for host in (site.host, f"localhost:{site.proxy.port}"):
        lines = (f"Host: {host}", f"Origin: http://{host}", "Sec-Fetch-Site: same-origin")
        assert site.ask("/api/jobs/", *lines, method="POST")[0] == 200
    assert site.ask("/", "Sec-Fetch-Site: none")[0] == 200


def test_a_browser_sent_by_a_file_gets_in(site: Site, upstream: Upstream) -> None:
    """It holds the Strict cookie back on the redirect; a page of ours then makes it ask again by itself."""
    status, head, _ = site.ask(site.key_target, "Sec-Fetch-Site: cross-site", "Sec-Fetch-Mode: navigate")
    assert (status, "Set-Cookie" in head) == (303, True)
    status, head, body = site.ask("/", "Sec-Fetch-Site: cross-site", "Sec-Fetch-Mode: navigate", cookie=False)
    assert status == 200
    assert 'http-equiv="refresh" content="0;url=./"' in body
    assert "X-Frame-Options: DENY" in head
    assert "Set-Cookie" not in head
    assert site.ask("/", "Sec-Fetch-Site: same-origin", cookie=False)[0] == 403  # no cookie at all: no loop
    assert not upstream.heads


def test_behind_a_proxy_that_logs_people_in(upstream: Upstream, tmp_path: Path) -> None:
    """Its name, not ours; several browsers of the person with one link. Without the key still nobody."""
    site = Site(upstream.port, tmp_path / "token", proxied=True)
    theirs = ("Host: platform.example", "Origin: https://platform.example", "Sec-Fetch-Site: same-origin")
    try:
        assert site.ask("/", *theirs)[0] == 403
        for _ in range(2):
            site.cookie = ""  # another browser
            site.log_in()
            assert site.ask("/api/jobs/", *theirs, method="POST")[0] == 200
        assert site.ask("/api/jobs/", *theirs, cookie=False)[0] == 403
        assert site.ask("/api/jobs/", "Sec-Fetch-Site: cross-site", method="POST")[0] == 403
    finally:
        site.proxy.close()


# --- what reaches the other side ------------------------------------------------------------------------------


def test_the_token_is_the_only_credential(site: Site, upstream: Upstream) -> None:
    site.log_in()
    ours = site.cookie
    site.cookie = f"a=1; {ours}; heliostat-session-1=other; b=2"
    site.ask("/x", "authorization: Bearer theirs", "X-Ray-AUTHORIZATION: Bearer theirs", "X-Kept: é yes")
    assert upstream.header("authorization") == [f"Bearer {TOKEN}"]
    assert upstream.header("x-ray-authorization") == []
    assert upstream.header("cookie") == ["a=1; b=2"]
    assert upstream.header("x-kept") == ["é yes"]
    assert upstream.header("host") == [site.host]
    site.cookie = ours
    site.ask("/x")
    assert upstream.header("cookie") == []


def test_one_request_a_connection(site: Site, upstream: Upstream) -> None:
    site.log_in()
    site.ask("/x", "Connection: keep-alive, Upgrade", "Keep-Alive: 5", "Upgrade: h2c")
    assert upstream.header("connection") == ["close"]
    assert upstream.header("keep-alive") == upstream.header("upgrade") == []
    raw = site.head("/first") + site.head("/second")
    assert site.send(raw)[::2] == (200, "hello from /first")
    assert len(upstream.heads) == 2  # the one above, and the first


@pytest.mark.parametrize(
    "lines",
    [
        "X: a\nAuthorization: Bearer theirs",
        "X: a\rAuthorization: Bearer theirs",
        "X: a\n\nGET /smuggled HTTP/1.1",
        "X: a\r\n Authorization: folded",
        "X: a\r\n\tfolded",
        "X : space before the colon",
        "X: nul\0",
        "no colon",
        ": no name",
        "",
    ],
)
def test_a_malformed_head_is_refused(site: Site, upstream: Upstream, lines: str) -> None:
    site.log_in()
    raw = site.head("/x").removesuffix(b"\r\n") + lines.encode() + b"\r\nZ: z\r\n\r\n"
    if lines:  # an empty line ends the head: what follows is a body
        assert site.send(raw)[0] == 400
        assert not upstream.heads
    else:
        assert site.send(raw)[0] == 200
        assert upstream.header("z") == []


@pytest.mark.parametrize(
    "line",
    [
        "GET http://127.0.0.1:{port}/ HTTP/1.1",
        "CONNECT evil.example:443 HTTP/1.1",
        "OPTIONS * HTTP/1.1",
        "GET / HTTP/2.0",
        "GET /",
        "GET  / HTTP/1.1",
        "GET /a b HTTP/1.1",
        "GET /\nX: y HTTP/1.1",
        "G\tT / HTTP/1.1",
        "",
    ],
)
def test_a_malformed_request_line_is_refused(site: Site, upstream: Upstream, line: str) -> None:
    site.log_in()
    first = line.format(port=site.proxy.port).encode()
    raw = first + site.head("/").removeprefix(b"GET / HTTP/1.1")
    assert site.send(raw)[0] == 400
    assert not upstream.heads


def test_a_head_over_the_limit_is_refused(site: Site, upstream: Upstream) -> None:
    site.log_in()
    assert site.ask("/x", "X: " + 60_000 * "a")[0] == 200
    assert site.ask("/x", "X: " + 66_000 * "a")[0] == 431
    assert site.send(b"GET /" + 300_000 * b"a")[0] == 431
    assert len(upstream.heads) == 1


def test_a_head_that_does_not_end_is_given_up(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tunnel, "_HEAD_DEADLINE_S", 0.05)
    assert site.send(b"GET / HTTP/1.1\r\n")[0] == 408


def test_a_client_that_says_nothing_harms_nobody(site: Site) -> None:
    site.connect().close()
    with site.connect() as client:
        client.sendall(b"GET")
        client.shutdown(socket.SHUT_WR)
        assert read_all(client) == b""
    site.log_in()


def test_a_websocket_is_passed_through(site: Site, upstream: Upstream) -> None:
    site.log_in()
    with site.connect() as client:
        client.sendall(
            site.head("/ws", "Connection: keep-alive, Upgrade", "Upgrade: WebSocket", "Sec-WebSocket-Key: k")
        )
        answer = b""
        while not answer.endswith(b"\r\n\r\n"):
            answer += client.recv(1)
        assert answer.startswith(b"HTTP/1.1 101 ")
        for word in (b"one", b"two", b"\0\xff\r\n\r\n"):  # each answered before the next is sent
            client.sendall(word)
            assert read_exactly(client, len(word)) == word.upper()
        client.shutdown(socket.SHUT_WR)
        assert read_all(client) == b""
    assert upstream.header("connection") == ["keep-alive, Upgrade"]
    assert upstream.header("upgrade") == ["WebSocket"]
    assert upstream.header("authorization") == [f"Bearer {TOKEN}"]


def test_a_large_body_streams_both_ways(site: Site) -> None:
    """The other side answers while it still reads, so neither direction may wait for the other."""
    site.log_in()
    block, count = bytes(range(256)) * 4096, 32
    with site.connect() as client:
        client.sendall(site.head("/echo", f"Content-Length: {len(block) * count}", method="POST"))
        sender = threading.Thread(target=lambda: [client.sendall(block) for _ in range(count)], daemon=True)
        sender.start()
        head, _, body = read_all(client).partition(b"\r\n\r\n")
        sender.join(DEADLINE_S)
    assert head.startswith(b"HTTP/1.1 200 ")
    assert hashlib.sha256(body).digest() == hashlib.sha256(block * count).digest()


def test_a_refused_upload_can_read_why(site: Site) -> None:
    with site.connect() as client:
        client.sendall(site.head("/echo", "Content-Length: 4000000", method="POST") + bytes(4_000_000))
        assert read_all(client).startswith(b"HTTP/1.1 403 ")


def test_fifty_connections_at_once(site: Site, upstream: Upstream) -> None:
    """The other side answers none of them before all fifty are there."""
    site.log_in()
    with ThreadPoolExecutor(50) as pool:
        answers = list(pool.map(lambda _: site.ask("/together")[::2], range(50)))
    assert answers == 50 * [(200, "hello from /together")]
    assert len(upstream.heads) == 50


# --- when the other side is away ------------------------------------------------------------------------------


def test_the_dashboard_goes_and_comes_back_elsewhere(site: Site, upstream: Upstream) -> None:
    site.log_in()
    with socket.socket() as nobody:  # bound and not listening: a connection is refused
        nobody.bind(("127.0.0.1", 0))
        site.upstream_port = nobody.getsockname()[1]
        status, head, body = site.ask("/x")
    assert status == 502
    assert "Content-Type: text/html" in head
    assert "The cluster's dashboard does not answer." in body
    assert 'http-equiv="refresh" content="3"' in body
    site.upstream_port = upstream.port
    assert site.ask("/x")[0] == 200


def test_a_tunnel_with_nobody_behind_it_is_away_too(site: Site) -> None:
    """An ssh forward accepts the connection and closes it."""
    site.log_in()
    status, _, body = site.ask("/hangup")
    assert status == 502
    assert "does not answer" in body


def test_no_tunnel_yet(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def target() -> tuple[str, int]:
        raise HeliostatError("no tunnel", because="secret words")

    site = Site(1, tmp_path / "token")
    site.proxy._target = target
    try:
        status, _, body = site.log_in().ask("/")
        assert status == 502
        assert "does not answer" in body
        assert "secret" not in body + caplog.text
    finally:
        site.proxy.close()


def test_the_token_is_read_anew(site: Site, upstream: Upstream) -> None:
    site.log_in()
    site.ask("/")
    assert upstream.header("authorization") == [f"Bearer {TOKEN}"]
    site.token_file.write_text("rotated")
    site.ask("/")
    assert upstream.header("authorization") == ["Bearer rotated"]


@pytest.mark.parametrize("text", [None, "", "\n", "two\r\nX-Injected: yes", "two words", "é"])
def test_without_a_good_token_nothing_is_sent(site: Site, upstream: Upstream, text: str | None) -> None:
    site.log_in()
    if text is None:
        site.token_file.unlink()
    else:
        site.token_file.write_bytes(text.encode())
    status, _, body = site.ask("/")
    assert status == 502
    assert "The token of this cluster cannot be read" in body
    assert 'http-equiv="refresh"' in body
    assert not upstream.heads
    site.token_file.write_text(TOKEN)
    assert site.ask("/")[0] == 200


def test_a_browser_that_breaks_off_is_forgotten_quietly(
    site: Site, upstream: Upstream, caplog: pytest.LogCaptureFixture
) -> None:
    """The other side hears of it; and asyncio, which holds its tasks weakly, does not lose ours meanwhile."""
    site.log_in()
    client = site.connect()
    client.sendall(site.head("/silent"))
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # close is a reset
    client.close()
    assert upstream.saw_the_end.wait(DEADLINE_S)
    site.ask("/")  # the loop has turned since
    gc.collect()
    upstream.may_go.set()
    assert site.ask("/")[0] == 200
    assert [record for record in caplog.records if record.name == "asyncio"] == []


# --- the proxy itself -----------------------------------------------------------------------------------------


def test_it_listens_on_loopback_only(site: Site) -> None:
    with socket.socket() as other:
        # The same port on another loopback address is still free: we are not on 0.0.0.0.
        other.bind(("127.0.0.2", site.proxy.port))


def test_a_taken_port_is_an_error_with_its_number(site: Site) -> None:
    second = DashboardProxy(lambda: ("127.0.0.1", 1), lambda: TOKEN, site.proxy.port)
    with pytest.raises(HeliostatError, match=str(site.proxy.port)) as caught:
        second.start()
    assert caught.value.because.startswith("Address already in use")
    assert second._key not in str(caught.value.fields())
    second.close()


def test_close_ends_connections_and_frees_the_port(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    site.log_in()
    with site.connect() as client, site.connect() as silent:
        client.sendall(site.head("/ws", "Connection: Upgrade", "Upgrade: websocket"))
        assert client.recv(12) == b"HTTP/1.1 101"
        site.proxy.close()
        read_all(client)
        assert read_all(silent) == b""
    assert caplog.text == ""  # it would be on the terminal after Ctrl-C
    with pytest.raises(ConnectionRefusedError):
        site.connect()
    site.proxy.close()
    again = DashboardProxy(lambda: ("127.0.0.1", 1), lambda: TOKEN, site.proxy.port)
    again.start()
    again.close()


def test_close_before_start() -> None:
    DashboardProxy(lambda: ("127.0.0.1", 1), lambda: TOKEN).close()


def test_each_proxy_has_secrets_of_its_own(site: Site, tmp_path: Path, upstream: Upstream) -> None:
    other = Site(upstream.port, tmp_path / "other")
    try:
        assert other.proxy.url.partition("=")[2] != site.proxy.url.partition("=")[2]
        value = site.log_in().cookie.partition("=")[2]
        other.cookie = f"heliostat-session-{other.proxy.port}={value}"
        assert other.ask("/")[0] == 403
    finally:
        other.proxy.close()


def test_secrets_are_in_no_answer_and_no_log(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    key = site.key_target.partition("=")[2]
    site.log_in()
    said = [
        site.ask(target, cookie=cookie)
        for target in ("/", site.key_target, "/hangup")
        for cookie in (True, False)
    ]
    site.token_file.unlink()
    said.append(site.ask("/"))
    text = repr(said) + caplog.text + repr(site.proxy)
    for secret in (TOKEN, key, site.cookie.partition("=")[2]):
        assert secret not in text


def test_redirect_page_escapes_its_url() -> None:
    page = redirect_page('http://127.0.0.1:1/?key=a&b="><script>')
    assert "<script>" not in page
    assert 'content="0;url=http://127.0.0.1:1/?key=a&amp;b=&quot;&gt;&lt;script&gt;"' in page
