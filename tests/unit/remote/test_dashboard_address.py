"""The dashboard's proxy: its host name, its path, its two addresses, and what it changes in requests and responses."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from heliostat.common.errors import HeliostatError
from heliostat.remote.dashboard_proxy import DashboardProxy
from heliostat.remote.ray_client import RayApi
from unit.tunnel_site import TOKEN, Site, Upstream, a_site, an_upstream, read_all


@pytest.fixture
def upstream() -> Iterator[Upstream]:
    with an_upstream() as server:
        yield server


@pytest.fixture
def site(upstream: Upstream, tmp_path: Path) -> Iterator[Site]:
    with a_site(upstream, tmp_path) as site:
        yield site


# --- the host name and the path -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "host",
    [
        "evil.example:{port}",
        "127.0.0.1",
        "127.0.0.1:{port}",
        "127.0.0.1:1",
        "[::1]:{port}",
        "0.0.0.0:{port}",
        "localhost:{port}",
        "0123456789abcdef0123456789abcdef.localhost:{port}",
        "{name}",
        "{name}:1",
        "{name}.:{port}",
        "x.{name}:{port}",
        "{name}:{port}.evil.example",
        "{name}:{port}, {name}:{port}",
        "é",
        "",
    ],
)
def test_a_wrong_host_does_not_pass(site: Site, upstream: Upstream, host: str) -> None:
    """The key does not work there, and is not used up."""
    line = "Host: " + host.format(port=site.proxy.port, name=site.host.partition(":")[0])
    sentence = "This is not the address that `heliostat dashboard` printed.\n"
    status, head, body = site.ask(site.key_target, line)
    assert (status, body) == (403, sentence)
    assert "Set-Cookie" not in head and site.host not in head
    site.log_in()
    assert site.ask("/", line)[::2] == (403, sentence)
    assert not upstream.heads


@pytest.mark.parametrize(
    "target",
    [
        "/{key}",
        "/0123456789abcdef0123456789abcdef/{key}",
        "{path}{key}",
        "{path}x/{key}",
        "/x{path}/{key}",
        "/{path}/{key}",
    ],
)
def test_a_wrong_path_does_not_pass(site: Site, upstream: Upstream, target: str) -> None:
    """With the right host name: a page of another origin can learn that."""
    path = site.root.rstrip("/")
    line = "GET " + target.format(path=path, key=site.key_target[1:])
    status, head, body = site.send(f"{line} HTTP/1.1\r\nHost: {site.host}\r\n\r\n".encode())
    assert (status, body) == (403, "Open the URL that `heliostat dashboard` printed.\n")
    assert "Set-Cookie" not in head and path not in head
    site.log_in()
    assert not upstream.heads


def test_host_is_there_exactly_once(site: Site, upstream: Upstream) -> None:
    site.log_in()
    assert site.ask("/", f"Host: {site.host}", f"Host: {site.host}")[0] == 403
    assert site.ask("/", f"Host: {site.host}", "Host: evil.example")[0] == 403
    assert site.send(f"GET / HTTP/1.1\r\nCookie: {site.cookie}\r\n\r\n".encode())[0] == 403
    assert not upstream.heads
    assert site.ask("/", f"hOST:  {site.host.upper()} ")[0] == 200


# --- what reaches the other side ------------------------------------------------------------------------------


def test_our_address_does_not_reach_the_other_side(site: Site, upstream: Upstream) -> None:
    """It would be in the logs there. What says that a browser asks stays: Ray refuses some things to browsers."""
    site.log_in()
    own = f"http://{site.host}"
    browser = ("Sec-Fetch-Site: same-origin", "User-Agent: Mozilla/5.0")
    site.ask("/api/x?y=/", f"Origin: {own}", f"Referer: {own}{site.root}", *browser, method="POST")
    sent = upstream.heads[-1].decode()
    assert sent.startswith("POST /api/x?y=/ HTTP/1.1\r\n")
    assert upstream.header("host") == [f"127.0.0.1:{upstream.port}"]
    assert upstream.header("origin") == [f"http://127.0.0.1:{upstream.port}"]
    assert upstream.header("referer") == []
    assert site.host not in sent and site.root not in sent
    assert all(line in sent for line in browser)


# --- what reaches the browser ---------------------------------------------------------------------------------

HARDENING = {
    "referrer-policy": "no-referrer",
    "x-frame-options": "DENY",
    "content-security-policy": "frame-ancestors 'none'",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}


def parsed(head: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in head.split("\r\n")[1:]:
        name, _, value = line.partition(": ")
        found.setdefault(name.lower(), []).append(value)
    return found


def test_every_answer_forbids_referrers_frames_and_sharing(site: Site, upstream: Upstream) -> None:
    """Ours, whatever they say, and those of the other side, whatever it allows."""
    loose = (
        b"HTTP/1.1 200 OK\r\nreferrer-policy: unsafe-url\r\nX-Frame-Options: ALLOWALL\r\nX-Kept: \xe9 yes\r\n"
        b"Access-Control-Allow-Origin: *\r\nAccess-Control-Allow-Credentials: true\r\n"
        b"Content-Security-Policy: default-src *\r\nCross-Origin-Opener-Policy: unsafe-none\r\n"
        b"Cross-Origin-Resource-Policy: cross-origin\r\nSet-Cookie: ray-authentication-token=t; Path=/\r\n\r\nbody"
    )
    answers = [site.ask("/"), site.ask(site.key_target, "Host: x"), site.send(b"x\r\n\r\n")]
    site.log_in()
    answers += [site.ask(site.key_target), site.ask("/"), site.ask("/hangup")]
    answers += [
        site.ask(upstream.answer(loose.replace(b"\xe9", b"e"))),
        site.ask("/ws", "Upgrade: websocket", "Connection: upgrade", "Origin: null"),
    ]
    assert [status for status, _, _ in answers] == [403, 403, 400, 303, 200, 502, 200, 403]
    for _, head, _ in answers:
        found = parsed(head)
        for name, value in HARDENING.items():
            assert found[name][-1] == value
            assert len(found[name]) == 1 or name == "content-security-policy"  # each of these counts
        assert not [name for name in found if name.startswith("access-control-")]
        assert "set-cookie" not in found
    assert parsed(answers[6][1])["x-kept"] == ["e yes"]
    assert answers[6][2] == "body"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("/x?y", "{root}x?y"),
        ("http://{upstream}/x", "{root}x"),
        ("x", "x"),
        ("./", "./"),
        ("//evil.example/x", "//evil.example/x"),
        ("http://{upstream}.evil.example/x", "http://{upstream}.evil.example/x"),
        ("https://docs.example/", "https://docs.example/"),
    ],
)
def test_a_redirect_stays_below_our_path(site: Site, upstream: Upstream, given: str, expected: str) -> None:
    words = {"root": site.root, "upstream": f"127.0.0.1:{upstream.port}"}
    raw = f"HTTP/1.1 302 Found\r\nLocation: {given.format(**words)}\r\n\r\n".encode()
    status, head, _ = site.log_in().ask(upstream.answer(raw))
    assert (status, parsed(head)["location"]) == (302, [expected.format(**words)])


def test_an_interim_answer_is_passed_on(site: Site, upstream: Upstream) -> None:
    first = b"HTTP/1.1 100 Continue\r\n\r\n"
    path = upstream.answer(first + b"HTTP/1.1 204 No Content\r\nSet-Cookie: a=b\r\n\r\n")
    site.log_in()
    with site.connect() as client:
        client.sendall(site.head(path))
        found = read_all(client)
    assert found.startswith(first + b"HTTP/1.1 204 No Content\r\n")
    assert b"Set-Cookie" not in found


@pytest.mark.parametrize(
    "raw",
    [
        b"no HTTP\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n",
        b"HTTP/1.1 200 OK\r\nX: a\r\n folded\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: a\nSet-Cookie: b\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + 70_000 * b"a" + b"\r\n\r\n",
    ],
)
def test_a_malformed_answer_is_none(site: Site, upstream: Upstream, raw: bytes) -> None:
    status, head, body = site.log_in().ask(upstream.answer(raw))
    assert status == 502 and "does not answer" in body and "Set-Cookie" not in head


# --- the addresses --------------------------------------------------------------------------------------------


@pytest.mark.needs_ipv6
def test_it_answers_on_both_loopback_addresses(site: Site) -> None:
    """A browser resolves a name under `localhost` to both, and may try either first."""
    site.log_in()
    for address in ("127.0.0.1", "::1"):
        with site.connect(address) as client:
            client.sendall(site.head("/"))
            assert read_all(client).startswith(b"HTTP/1.1 200 ")


@pytest.mark.needs_ipv6
@pytest.mark.parametrize("address", ["127.0.0.1", "::1", "0.0.0.0", "::"])
def test_a_port_that_is_taken_on_one_address_is_refused(address: str) -> None:
    """Whoever listens on the other address would get the key. `::` stands for both, and only for IPv6."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    for dual in {False, address == "::"}:
        with socket.create_server((address, 0), family=family, dualstack_ipv6=dual) as other:
            port = other.getsockname()[1]
            proxy = DashboardProxy(lambda: RayApi("127.0.0.1", 1, TOKEN), port)
            with pytest.raises(HeliostatError, match=str(port)) as caught:
                proxy.start()
            assert caught.value.cause.startswith("Address already in use")
            assert caught.value.hint == "choose another port, or 0 for a free one"
            proxy.close()
            other.close()
            with (
                socket.create_server(("127.0.0.1", port)),
                socket.create_server(("::1", port), family=socket.AF_INET6),
            ):
                pass  # neither half was kept


@pytest.mark.needs_ipv6
def test_a_free_port_is_free_on_both_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first two that the kernel offers are taken on ::1; both halves of each are given back."""
    create, offered, given = socket.create_server, [], []
    taken = [create(("::1", 0), family=socket.AF_INET6) for _ in range(2)]
    offered += [listener.getsockname()[1] for listener in taken]

    def offers(address: tuple[str, int], **options: int) -> socket.socket:
        if address == ("127.0.0.1", 0) and offered:
            address = ("127.0.0.1", offered.pop(0))
            given.append(address)
        return create(address, **options)

    monkeypatch.setattr(socket, "create_server", offers)
    proxy = DashboardProxy(lambda: RayApi("127.0.0.1", 1, TOKEN))
    proxy.start()
    try:
        assert len(given) == 2 and proxy.port not in [port for _, port in given]
        for address in given:
            create(address).close()
        with pytest.raises(OSError):
            create(("::1", proxy.port), family=socket.AF_INET6)
    finally:
        proxy.close()
        for listener in taken:
            listener.close()


@pytest.mark.needs_ipv6
@pytest.mark.needs_linux
def test_a_port_that_is_only_bound_cannot_be_taken_over() -> None:
    """Linux lets two sockets bind one address before either listens. The second listener fails."""
    with socket.socket(socket.AF_INET6) as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("::1", 0))
        proxy = DashboardProxy(lambda: RayApi("127.0.0.1", 1, TOKEN), other.getsockname()[1])
        proxy.start()
        try:
            with pytest.raises(OSError, match="Address already in use"):
                other.listen()
        finally:
            proxy.close()


@pytest.mark.parametrize("number", [errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT])
def test_a_host_without_ipv6(
    monkeypatch: pytest.MonkeyPatch, number: int, upstream: Upstream, tmp_path: Path
) -> None:
    create = socket.create_server

    def no_ipv6(address: tuple[str, int], **options: int) -> socket.socket:
        if options.get("family") == socket.AF_INET6:
            raise OSError(number, "no IPv6 here")
        return create(address, **options)

    monkeypatch.setattr(socket, "create_server", no_ipv6)
    site = Site(upstream.port, tmp_path / "token")
    try:
        assert site.log_in().ask("/")[0] == 200
    finally:
        site.proxy.close()


def test_it_listens_on_loopback_only(site: Site) -> None:
    with socket.socket() as other:
        # The same port on another loopback address is still free: we are not on 0.0.0.0.
        other.bind(("127.0.0.2", site.proxy.port))
