"""A client's connection to the dashboard through the hub: only with the secret, without the token on the way."""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from heliostat.agent import hub
from heliostat.agent.proofs import proof
from heliostat.common.errors import HeliostatError
from heliostat.remote import relay
from heliostat.remote.ray_client import NoResponse, RayApi

SECRET, TOKEN = "the-secret", "the-token-of-ray"


@pytest.fixture
def dashboard() -> Iterator[tuple[int, list[bytes]]]:
    """A server that records each request, and answers with its body in capitals."""
    requests: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    client, _ = server.accept()
                except OSError:
                    return
                with client, client.makefile("rb") as stream:
                    head = b"".join(itertools.takewhile(lambda line: line not in (b"", b"\r\n"), stream))
                    length = [
                        line for line in head.split(b"\r\n") if line.lower().startswith(b"content-length")
                    ]
                    body = stream.read(int(length[0].partition(b":")[2])) if length else b""
                    requests.append(head)
                    client.sendall(
                        b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body.upper()
                    )

        threading.Thread(target=serve, daemon=True).start()
        yield server.getsockname()[1], requests
        server.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def head(dashboard: tuple[int, list[bytes]]) -> Iterator[hub.Hub]:
    """A hub in a loop of its own."""
    loop = asyncio.new_event_loop()
    made = hub.Hub(SECRET, lambda node, message: None, lambda node: None, token=TOKEN)
    made.dashboard = dashboard[0]
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    asyncio.run_coroutine_threadsafe(made.start("127.0.0.1", 0), loop).result(30)
    yield made
    asyncio.run_coroutine_threadsafe(made.close(0), loop).result(30)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(30)


def port_of(head: hub.Hub) -> int:
    assert head.server
    return int(head.server.sockets[0].getsockname()[1])  # type: ignore[attr-defined]


def api(port: int, secret: str = SECRET) -> RayApi:
    dial = relay.dialer(lambda host, port: (host, port), {"ip": "127.0.0.1", "port": port}, secret)
    return RayApi("127.0.0.1", port, None, name="lab", dial=dial)


@pytest.fixture
def wire(head: hub.Hub) -> Iterator[tuple[int, bytearray]]:
    """A listener on the way to the hub that records every byte of both directions."""
    seen = bytearray()

    def pump(source: socket.socket, target: socket.socket) -> None:
        try:
            while data := source.recv(1 << 16):
                seen.extend(data)
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)
        except OSError:
            pass

    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    client, _ = server.accept()
                except OSError:
                    return
                there = socket.create_connection(("127.0.0.1", port_of(head)), 30)
                for pair in ((client, there), (there, client)):
                    threading.Thread(target=pump, args=pair, daemon=True).start()

        threading.Thread(target=serve, daemon=True).start()
        yield server.getsockname()[1], seen
        server.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("size", [0, 5, 3_000_000])
def test_a_request_and_its_answer(
    dashboard: tuple[int, list[bytes]], wire: tuple[int, bytearray], size: int
) -> None:
    """The head adds the token; neither it nor the secret is on the way."""
    body = b"x" * size
    for _ in range(2):
        assert api(wire[0])._call("POST", "/api/jobs/", body) == (200, body.upper())
    assert all(f"Authorization: Bearer {TOKEN}".encode() in one for one in dashboard[1])
    assert b"/api/jobs/" in wire[1]
    assert TOKEN.encode() not in wire[1] and SECRET.encode() not in wire[1] and b"Bearer" not in wire[1]


def test_a_client_cannot_choose_the_credentials(dashboard: tuple[int, list[bytes]], head: hub.Hub) -> None:
    request = (
        b"GET / HTTP/1.1\r\nHost: x\r\nauthorization: Bearer mine\r\nX-Ray-Authorization: Bearer mine\r\n"
    )
    with relay.dial("127.0.0.1", port_of(head), SECRET) as connection:
        connection.sendall(request + b"Connection: keep-alive\r\n\r\n")
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200 OK")
    (said,) = dashboard[1]
    assert said.count(b"Bearer") == 1 and b"mine" not in said and b"Connection: close\r\n" in said


@pytest.mark.parametrize(
    "lines", [b"no colon", b"Name : x", b" folded: x", b"a: b\nc: d", b"a: b\rc: d", b"a: \0"], ids=repr
)
def test_what_is_no_plain_request_is_not_passed_on(
    dashboard: tuple[int, list[bytes]], head: hub.Hub, lines: bytes
) -> None:
    with relay.dial("127.0.0.1", port_of(head), SECRET) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\n" + lines + b"\r\n\r\n")
        assert connection.recv(1) == b""
    assert dashboard[1] == []


@pytest.mark.parametrize("secret", ["wrong", "", SECRET.upper()])
def test_who_does_not_know_the_secret_is_refused(
    dashboard: tuple[int, list[bytes]], head: hub.Hub, secret: str
) -> None:
    with pytest.raises(ConnectionError, match="no agent of this cluster answers"):
        relay.dial("127.0.0.1", port_of(head), secret, timeout=30)
    with pytest.raises(NoResponse, match="does not answer"):
        api(port_of(head), secret).jobs()
    assert dashboard[1] == []


@pytest.mark.parametrize("answer", [{"proof": "0" * 64}, {"proof": "é"}, {}, [], "[" * 4000], ids=str)
def test_a_hub_of_another_cluster_gets_nothing(answer: Any) -> None:
    """One that accepts everybody, but cannot prove that it knows our secret."""
    heard = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            client, _ = server.accept()
            with client, client.makefile("rwb") as stream:
                stream.write(b'{"challenge": "00"}\n')
                stream.flush()
                heard.append(stream.readline())
                stream.write((answer if isinstance(answer, str) else json.dumps(answer)).encode() + b"\n")
                stream.flush()
                heard.append(stream.read())

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        with pytest.raises((HeliostatError, ConnectionError), match="cluster answers"):
            relay.dial("127.0.0.1", server.getsockname()[1], SECRET, timeout=30)
        thread.join(30)
    assert len(heard) == 2 and heard[1] == b"" and SECRET.encode() not in heard[0]


def test_a_dashboard_that_nobody_of_us_runs_gets_no_token(
    dashboard: tuple[int, list[bytes]], head: hub.Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """tests/real/test_attacks.py does it with another user's process."""
    monkeypatch.setattr(hub.ports, "is_ours", lambda port: False)
    with pytest.raises(NoResponse, match="does not answer"):
        api(port_of(head)).jobs()
    assert dashboard[1] == []


def test_a_worker_cannot_come_in_as_a_client() -> None:
    """The proofs of the two differ, so that one cannot be taken for the other."""
    assert proof("s", "client", "c", relay.NAME) != proof("s", "worker", "c", relay.NAME)
