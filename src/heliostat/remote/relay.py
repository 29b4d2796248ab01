"""Connections to a head's dashboard through the hub of the head's agent, on every backend whose nodes run our agent.

Both sides prove that they know the cluster's secret before a request is sent (`agent/hub.py` is the other end). The secret
does not travel: the head's agent adds the token to the request, on its own host. No local port is opened, so no other user of
this computer can use the connection.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import secrets
import socket
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from heliostat.common.errors import HeliostatError

if TYPE_CHECKING:
    import ssl

NAME = "client"
CHUNK = 1 << 16


class Connection(Protocol):
    """What is used of a socket."""

    def recv(self, size: int, /) -> bytes: ...
    def sendall(self, data: bytes, /) -> None: ...
    def shutdown(self, how: int, /) -> None: ...
    def settimeout(self, seconds: float | None, /) -> None: ...
    def close(self) -> None: ...


def dialer(
    forward: Callable[[str, int], tuple[str, int]],
    hub: Mapping[str, Any],
    secret: str,
    context: Callable[[], ssl.SSLContext] | None = None,
) -> Callable[[float], socket.socket]:
    """Opens connections through that hub. `forward` says where a port of the head's network is reached from here.

    `context`: for a hub that speaks TLS, whose certificate must be for its own address, whatever address leads to it."""

    def dial_hub(timeout: float) -> socket.socket:
        place = forward(hub["ip"], int(hub["port"]))
        return dial(*place, secret, timeout, context() if context else None, hub["ip"])

    return dial_hub


def dial(
    ip: str,
    port: int,
    secret: str,
    timeout: float = 15.0,
    context: ssl.SSLContext | None = None,
    name: str = "",
) -> socket.socket:
    """A connection to the dashboard behind the hub at ip:port, for one request."""
    plain = socket.create_connection((ip, port), timeout=timeout)
    connection: Connection = plain
    try:
        if context:
            connection = Encrypted(plain, context, name)
        mine = secrets.token_hex(16)
        challenge = str(_line(connection)["challenge"])
        hello = {"node": NAME, "relay": True, "challenge": mine, "proof": _proof(secret, "client", challenge)}
        connection.sendall(json.dumps(hello).encode() + b"\n")
        proof = str(_line(connection).get("proof")).encode("utf-8", "backslashreplace")
        if not hmac.compare_digest(proof, _proof(secret, "head", mine).encode()):
            raise HeliostatError("another cluster answers at the head's address", details=f"{ip}:{port}")
    except (OSError, ValueError, KeyError, RecursionError) as error:
        plain.close()
        raise ConnectionError(f"no agent of this cluster answers at {ip}:{port}: {error}") from None
    except BaseException:
        plain.close()
        raise
    return plain if connection is plain else _bridge(connection)


def _proof(secret: str, side: str, challenge: str) -> str:
    return hmac.new(secret.encode(), f"{side} {challenge} {NAME}".encode(), hashlib.sha256).hexdigest()


def _line(connection: Connection) -> dict[str, Any]:
    """One line, byte by byte: what follows it is not part of the proof."""
    data = b""
    while not data.endswith(b"\n"):
        byte = connection.recv(1)
        if not byte or len(data) > 4096:
            raise ConnectionError("the connection was closed")
        data += byte
    value = json.loads(data)
    if not isinstance(value, dict):
        raise ValueError("not an object")
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


def _bridge(far: Connection) -> socket.socket:
    """A socket whose bytes go through the encrypted connection, both ways, until both sides have ended."""
    near, ours = socket.socketpair()
    far.settimeout(None)

    def carry() -> None:
        back = threading.Thread(target=_pipe, args=(far, ours), daemon=True)
        back.start()
        _pipe(ours, far)
        back.join()
        ours.close()
        far.close()

    threading.Thread(target=carry, daemon=True).start()
    return near


def _pipe(source: Connection, target: Connection) -> None:
    with contextlib.suppress(OSError):
        while chunk := source.recv(CHUNK):
            target.sendall(chunk)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)
