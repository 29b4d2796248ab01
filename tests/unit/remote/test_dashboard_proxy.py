"""The dashboard's proxy, with real sockets on loopback: who gets in, and what reaches the other side."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import logging
import re
import socket
import struct
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from heliostat.common.errors import HeliostatError
from heliostat.remote import dashboard_proxy
from heliostat.remote.dashboard_proxy import DashboardProxy, redirect_page
from heliostat.remote.ray_client import RayApi
from unit.tunnel_site import (
    DEADLINE_S,
    TOKEN,
    Site,
    Upstream,
    a_site,
    an_upstream,
    read_all,
    read_exactly,
)


@pytest.fixture
def upstream() -> Iterator[Upstream]:
    with an_upstream() as server:
        yield server


@pytest.fixture
def site(upstream: Upstream, tmp_path: Path) -> Iterator[Site]:
    with a_site(upstream, tmp_path) as site:
        yield site


# --- who gets in ----------------------------------------------------------------------------------------------


def test_the_url_gets_a_browser_in(site: Site, upstream: Upstream) -> None:
    url = rf"http://[0-9a-f]{{32}}\.localhost:{site.proxy.port}/[0-9a-f]{{32}}/\?key=[\w-]{{43}}"
    assert re.fullmatch(url, site.proxy.url)
    status, head, _ = site.ask(site.key_target)
    assert status == 303
    assert "\r\nLocation: ./\r\n" in head
    cookie = re.search(r"Set-Cookie: (.*)\r\n", head)
    assert cookie is not None
    assert cookie[1].startswith(f"heliostat-session-{site.proxy.port}=")
    # no Domain: only this host name gets it. No Path: only the URL's own path, or that of a web proxy in front, gets it
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


FOREIGN = [
    "Origin: http://127.0.0.1:9999",
    "Origin: https://evil.example",
    "Origin: null",
    "Origin: http://localhost:{port}",
    "Origin: http://127.0.0.1:{port}",
    "Origin: https://{name}:{port}",
    "Origin: http://{name}:9999",
    "Origin: http://{name}",
    "Sec-Fetch-Site: same-site",
    "Sec-Fetch-Site: cross-site",
]


@pytest.mark.parametrize("line", FOREIGN)
def test_another_page_cannot_use_the_cookie(site: Site, upstream: Upstream, line: str) -> None:
    site.log_in()
    line = line.format(port=site.proxy.port, name=site.host.partition(":")[0])
    assert site.ask("/api/jobs/", line)[0] == 403
    assert site.ask("/", line, method="POST")[0] == 403
    assert site.ask("/ws", line, "Upgrade: websocket", "Connection: Upgrade")[0] == 403
    assert not upstream.heads


def test_our_own_page_can(site: Site) -> None:
    site.log_in()
    lines = (f"Origin: http://{site.host}", "Sec-Fetch-Site: same-origin")
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
    assert site.proxy.url.startswith(f"http://127.0.0.1:{site.proxy.port}/?key=")
    theirs = ("Host: platform.example", "Origin: https://platform.example", "Sec-Fetch-Site: same-origin")
    try:
        assert site.ask("/", *theirs)[0] == 403
        for _ in range(2):
            site.cookie = ""  # another browser
            site.log_in()
            assert site.ask("/api/jobs/", *theirs, method="POST")[0] == 200
        assert site.ask("/api/jobs/", *theirs, cookie=False)[0] == 403
        assert site.ask("/api/jobs/", "Sec-Fetch-Site: cross-site", method="POST")[0] == 403
        # what the web proxy says of itself reaches Ray, and Ray's headers reach the web proxy; but no cookie of Ray's
        ours = b"Location: /x\r\nX-Frame-Options: SAMEORIGIN\r\nAccess-Control-Allow-Origin: *\r\n"
        raw = b"HTTP/1.1 200 OK\r\n" + ours + b"Set-Cookie: ray-authentication-token=t; Path=/\r\n\r\n"
        _, head, _ = site.ask(upstream.answer(raw), *theirs)
        assert head.encode() + b"\r\n" == b"HTTP/1.1 200 OK\r\n" + ours
        assert upstream.header("host") == ["platform.example"]
        assert upstream.header("origin") == ["https://platform.example"]
    finally:
        site.proxy.close()


# --- what reaches the other side ------------------------------------------------------------------------------


def test_the_token_is_the_only_credential(site: Site, upstream: Upstream) -> None:
    site.log_in()
    site.cookie = f"a=1; {site.cookie}; heliostat-session-1=other; ray-authentication-token=theirs"
    site.ask("/x", "authorization: Bearer theirs", "X-Ray-AUTHORIZATION: Bearer theirs", "X-Kept: é yes")
    assert upstream.header("authorization") == [f"Bearer {TOKEN}"]
    assert upstream.header("x-ray-authorization") == upstream.header("cookie") == []
    assert upstream.header("x-kept") == ["é yes"]


# --- requests as bytes ----------------------------------------------------------------------------------------


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
    raw = first + b"\r\n" + site.head("/").partition(b"\r\n")[2]
    assert site.send(raw)[0] == 400
    assert not upstream.heads


def test_a_head_over_the_limit_is_refused(site: Site, upstream: Upstream) -> None:
    site.log_in()
    assert site.ask("/x", "X: " + 60_000 * "a")[0] == 200
    assert site.ask("/x", "X: " + 66_000 * "a")[0] == 431
    assert site.send(b"GET /" + 300_000 * b"a")[0] == 431
    assert len(upstream.heads) == 1


def test_a_head_that_does_not_end_is_given_up(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dashboard_proxy, "_HEAD_DEADLINE_S", 0.05)
    assert site.send(b"GET / HTTP/1.1\r\n")[0] == 408


def test_a_client_that_says_nothing_harms_nobody(site: Site) -> None:
    site.connect().close()
    with site.connect() as client:
        client.sendall(b"GET")
        client.shutdown(socket.SHUT_WR)
        assert read_all(client) == b""
    site.log_in()


def test_connections_without_a_session_make_room_for_new_ones(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    """Anybody on this computer can open them. The oldest are closed without an answer, and the browser is served."""
    most = site.proxy._max_unauthenticated
    with contextlib.ExitStack() as stack:
        idle = [stack.enter_context(site.connect()) for _ in range(most + 5)]
        for client in idle:
            client.sendall(b"GET")
        for client in idle[:5]:
            with contextlib.suppress(ConnectionError):
                assert client.recv(100) == b""
        site.log_in()
        assert site.ask("/")[0] == 200
    assert not caplog.records


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
        raise HeliostatError("no tunnel", cause="secret words")

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
    wanted = (
        "The cluster's dashboard does not answer"
        if text is None
        else "The token of this cluster cannot be read"
    )
    assert wanted in body
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


def test_a_taken_port_is_an_error_with_its_number(site: Site) -> None:
    second = DashboardProxy(lambda: RayApi("127.0.0.1", 1, TOKEN), site.proxy.port)
    with pytest.raises(HeliostatError, match=str(site.proxy.port)) as caught:
        second.start()
    assert caught.value.cause.startswith("Address already in use")
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
    for address in ("127.0.0.1", "::1"):
        with pytest.raises(OSError):
            site.connect(address)
    site.proxy.close()
    again = DashboardProxy(lambda: RayApi("127.0.0.1", 1, TOKEN), site.proxy.port)
    again.start()
    again.close()


def test_close_before_start() -> None:
    DashboardProxy(lambda: RayApi("127.0.0.1", 1, TOKEN)).close()


def test_each_proxy_has_secrets_of_its_own(site: Site, tmp_path: Path, upstream: Upstream) -> None:
    other = Site(upstream.port, tmp_path / "other")
    try:
        assert not set(re.findall(r"[\w-]{32,}", site.proxy.url)) & set(
            re.findall(r"[\w-]{32,}", other.proxy.url)
        )
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
    for secret in (TOKEN, key, site.cookie.partition("=")[2], site.host, site.root):
        assert secret not in text


def test_redirect_page_escapes_its_url() -> None:
    page = redirect_page('http://127.0.0.1:1/?key=a&b="><script>')
    assert "<script>" not in page
    assert 'content="0;url=http://127.0.0.1:1/?key=a&amp;b=&quot;&gt;&lt;script&gt;"' in page
