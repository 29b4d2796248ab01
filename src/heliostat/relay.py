"""A way to a head's dashboard through the hub of its agent: a local port whose connections come out at the head's loopback.

Each side proves that it knows the cluster's secret before a byte goes through (`agent/hub.py` is the other end)."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import secrets
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from heliostat.errors import HeliostatError

if TYPE_CHECKING:
    import ssl

NAME = "client"
CHUNK = 1 << 16
_open: dict[tuple[str, int, str], tuple[str, int]] = {}


class Connection(Protocol):
    """What is used of a socket."""

    def recv(self, size: int, /) -> bytes: ...
    def sendall(self, data: bytes, /) -> None: ...
    def shutdown(self, how: int, /) -> None: ...
    def settimeout(self, seconds: float | None, /) -> None: ...
    def close(self) -> None: ...


@dataclass(frozen=True)
class Tls:
    """For a hub that speaks TLS. name: what its certificate must be for, whatever address leads to it."""

    context: Callable[[], ssl.SSLContext]
    name: str


def forward(ip: str, port: int, secret: str, tls: Tls | None = None) -> tuple[str, int]:
    """(host, port) here that leads to the dashboard behind the hub at ip:port, for as long as this process lives."""
    key = (ip, port, secret)
    if key not in _open:
        context = tls.context() if tls else None

        def head() -> Connection:
            return dial(ip, port, secret, context, tls.name if tls else "")

        listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        threading.Thread(target=_accept, args=(listener, head), daemon=True).start()
        _open[key] = ("127.0.0.1", listener.getsockname()[1])
    return _open[key]


def dial(
    ip: str,
    port: int,
    secret: str,
    context: ssl.SSLContext | None = None,
    name: str = "",
    timeout: float = 15.0,
) -> Connection:
    """A connection to the dashboard, after the mutual proof. context, name: as in Tls."""
    connection: Connection = socket.create_connection((ip, port), timeout=timeout)
    try:
        if context:
            connection = Encrypted(connection, context, name)
        mine = secrets.token_hex(16)
        challenge = str(_line(connection)["challenge"])
        hello = {"node": NAME, "relay": True, "challenge": mine, "proof": _proof(secret, "client", challenge)}
        connection.sendall(json.dumps(hello).encode() + b"\n")
        if not hmac.compare_digest(str(_line(connection).get("proof")), _proof(secret, "head", mine)):
            raise HeliostatError("another cluster answers at the head's address", saw=f"{ip}:{port}")
    except (OSError, ValueError, KeyError):
        connection.close()
        raise
    connection.settimeout(None)
    return connection


def _proof(secret: str, side: str, challenge: str) -> str:
    return hmac.new(secret.encode(), f"{side} {challenge} {NAME}".encode(), hashlib.sha256).hexdigest()


def _line(connection: Connection) -> dict[str, Any]:
    """One line, byte by byte: what follows it is not ours."""
    data = b""
    while not data.endswith(b"\n"):
        byte = connection.recv(1)
        if not byte or len(data) > 4096:
            raise ConnectionError("the head's agent hung up")
        data += byte
    value: dict[str, Any] = json.loads(data)
    return value


class Encrypted:
    """TLS over a connected socket. One thread may read while another writes, which an `SSLSocket` does not allow."""

    def __init__(self, plain: Connection, context: ssl.SSLContext, name: str) -> None:
        import ssl

        self._plain, self._wants_more = plain, ssl.SSLWantReadError
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_hostname=name)
        self._state, self._writing = threading.Lock(), threading.Lock()
        self.settimeout, self.close = plain.settimeout, plain.close
        while not self._step(self._tls.do_handshake):
            self._fill()

    def _step(self, do: Callable[[], object]) -> bool:
        """Does it and sends what comes of it. False: the other side has to send more first."""
        with self._writing:  # what is encrypted first is sent first
            try:
                with self._state:
                    do()
                return True
            except self._wants_more:
                return False
            finally:
                with self._state:
                    data = self._outgoing.read()
                self._plain.sendall(data)

    def _fill(self) -> None:
        data = self._plain.recv(CHUNK)
        with self._state:
            self._incoming.write(data) if data else self._incoming.write_eof()

    def recv(self, size: int, /) -> bytes:
        while True:
            try:
                with self._state:
                    return self._tls.read(size)
            except self._wants_more:
                self._fill()

    def sendall(self, data: bytes, /) -> None:
        rest = memoryview(data)

        def some() -> None:
            nonlocal rest
            rest = rest[self._tls.write(rest) :]

        while rest:
            self._step(some)

    def shutdown(self, how: int, /) -> None:
        """Ends the whole connection: the other side takes the end of one direction for the end of both."""
        with contextlib.suppress(OSError):
            self._step(self._tls.unwrap)
        self._plain.shutdown(how)


def _accept(listener: socket.socket, dial: Callable[[], Connection]) -> None:
    while True:
        with contextlib.suppress(OSError):
            client, _ = listener.accept()
            threading.Thread(target=_join, args=(client, dial), daemon=True).start()


def _join(client: socket.socket, dial: Callable[[], Connection]) -> None:
    try:
        head = dial()
    except (OSError, ValueError, KeyError, HeliostatError):
        client.close()
        return
    back = threading.Thread(target=_pipe, args=(head, client), daemon=True)
    back.start()
    _pipe(client, head)
    back.join()
    client.close()
    head.close()


def _pipe(source: Connection, target: Connection) -> None:
    with contextlib.suppress(OSError):
        while chunk := source.recv(CHUNK):
            target.sendall(chunk)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)
