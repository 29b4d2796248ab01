"""Connections to a head's dashboard through the hub of the head's agent, on every backend whose nodes run the agent.

Both sides prove that they know the cluster's secret before a request is sent (`agent/hub.py` is the server). The secret is
not sent: the head's agent adds the token to the request on its host. No local port is opened, so no other user of this host
can use the connection.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import socket
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from heliostat.agent.proofs import is_equal, proof
from heliostat.common.documents import JsonMapping, JsonObject
from heliostat.common.errors import HeliostatError
from heliostat.remote.streams import CHUNK, copy

if TYPE_CHECKING:
    import ssl

NAME = "client"


class Connection(Protocol):
    """The methods of a socket that this module uses."""

    def recv(self, size: int, /) -> bytes: ...
    def sendall(self, data: bytes, /) -> None: ...
    def shutdown(self, how: int, /) -> None: ...
    def settimeout(self, seconds: float | None, /) -> None: ...
    def close(self) -> None: ...


def dialer(
    forward: Callable[[str, int], tuple[str, int]],
    hub: JsonMapping,
    secret: str,
    context: Callable[[], ssl.SSLContext] | None = None,
) -> Callable[[float], socket.socket]:
    """A function that opens connections through that hub. forward: maps an address of the head's network to a local one.

    context: for a hub with TLS. Its certificate must be for the hub's own address, not for the forwarded one."""

    def dial_hub(timeout: float) -> socket.socket:
        address = forward(hub["ip"], int(hub["port"]))
        return dial(*address, secret, timeout, context() if context else None, hub["ip"])

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
        own_challenge = secrets.token_hex(16)
        challenge = str(_read_line(connection)["challenge"])
        hello = {
            "node": NAME,
            "relay": True,
            "challenge": own_challenge,
            "proof": proof(secret, "client", challenge, NAME),
        }
        connection.sendall(json.dumps(hello).encode() + b"\n")
        received = _read_line(connection).get("proof")
        if not is_equal(received, proof(secret, "head", own_challenge, NAME)):
            raise HeliostatError("another cluster answers at the head's address", details=f"{ip}:{port}")
    except (OSError, ValueError, KeyError, RecursionError) as error:
        plain.close()
        raise ConnectionError(f"no agent of this cluster answers at {ip}:{port}: {error}") from None
    except BaseException:
        plain.close()
        raise
    return plain if connection is plain else _bridge(connection)


def _read_line(connection: Connection) -> JsonObject:
    """One JSON line, read byte by byte: the bytes after it belong to the HTTP connection."""
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
    """TLS over a connected socket. One thread may read while another one writes, unlike with `SSLSocket`."""

    def __init__(self, plain: Connection, context: ssl.SSLContext, name: str) -> None:
        import ssl

        self._plain, self._wants_more = plain, ssl.SSLWantReadError
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_hostname=name)
        self._state, self._writing = threading.Lock(), threading.Lock()
        self.settimeout, self.close = plain.settimeout, plain.close
        while not self._step(self._tls.do_handshake):
            self._fill()

    def _step(self, operation: Callable[[], object]) -> bool:
        """Runs a TLS operation and sends its output. False: it needs more data from the peer."""
        with self._writing:  # records must be sent in the order of their encryption
            try:
                with self._state:
                    operation()
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
        unsent = memoryview(data)

        def write_some() -> None:
            nonlocal unsent
            unsent = unsent[self._tls.write(unsent) :]

        while unsent:
            self._step(write_some)

    def shutdown(self, how: int, /) -> None:
        """Ends the connection in both directions: the peer treats the end of one as the end of both."""
        with contextlib.suppress(OSError):
            self._step(self._tls.unwrap)
        self._plain.shutdown(how)


def _bridge(encrypted: Connection) -> socket.socket:
    """A socket that is connected to the encrypted connection, in both directions, until both sides have ended."""
    returned, ours = socket.socketpair()
    encrypted.settimeout(None)

    def copy_both_ways() -> None:
        incoming = threading.Thread(
            target=copy,
            args=(encrypted.recv, ours.sendall, lambda: ours.shutdown(socket.SHUT_WR)),
            daemon=True,
        )
        incoming.start()
        copy(ours.recv, encrypted.sendall, lambda: encrypted.shutdown(socket.SHUT_WR))
        incoming.join()
        ours.close()
        encrypted.close()

    threading.Thread(target=copy_both_ways, daemon=True).start()
    return returned
