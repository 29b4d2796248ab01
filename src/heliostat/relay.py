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
from typing import Any

from heliostat.errors import HeliostatError

NAME = "client"
_open: dict[tuple[str, int, str], tuple[str, int]] = {}


def forward(ip: str, port: int, secret: str) -> tuple[str, int]:
    """(host, port) here that leads to the dashboard behind the hub at ip:port, for as long as this process lives."""
    key = (ip, port, secret)
    if key not in _open:
        listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        threading.Thread(target=_accept, args=(listener, key), daemon=True).start()
        _open[key] = ("127.0.0.1", listener.getsockname()[1])
    return _open[key]


def dial(ip: str, port: int, secret: str, timeout: float = 15.0) -> socket.socket:
    """A connection to the dashboard, after the mutual proof."""
    connection = socket.create_connection((ip, port), timeout=timeout)
    try:
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


def _line(connection: socket.socket) -> dict[str, Any]:
    """One line, byte by byte: what follows it is not ours."""
    data = b""
    while not data.endswith(b"\n"):
        byte = connection.recv(1)
        if not byte or len(data) > 4096:
            raise ConnectionError("the head's agent hung up")
        data += byte
    value: dict[str, Any] = json.loads(data)
    return value


def _accept(listener: socket.socket, key: tuple[str, int, str]) -> None:
    while True:
        with contextlib.suppress(OSError):
            client, _ = listener.accept()
            threading.Thread(target=_join, args=(client, key), daemon=True).start()


def _join(client: socket.socket, key: tuple[str, int, str]) -> None:
    try:
        head = dial(*key)
    except (OSError, ValueError, KeyError, HeliostatError):
        client.close()
        return
    back = threading.Thread(target=_pipe, args=(head, client), daemon=True)
    back.start()
    _pipe(client, head)
    back.join()
    client.close()
    head.close()


def _pipe(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while chunk := source.recv(1 << 16):
            target.sendall(chunk)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)
