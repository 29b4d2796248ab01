"""Connections to a head's dashboard through the hub of the head's agent, on every backend whose nodes run our agent.

Both sides prove that they know the cluster's secret before a request is sent (`agent/hub.py` is the other end). The secret
does not travel: the head's agent adds the token to the request, on its own host. No local port is opened, so no other user of
this computer can use the connection.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import socket
from collections.abc import Callable, Mapping
from typing import Any

from heliostat.errors import HeliostatError

NAME = "client"


def dialer(
    forward: Callable[[str, int], tuple[str, int]], hub: Mapping[str, Any], secret: str
) -> Callable[[float], socket.socket]:
    """Opens connections through that hub. `forward` says where a port of the head's network is reached from here."""
    return lambda timeout: dial(*forward(hub["ip"], int(hub["port"])), secret, timeout)


def dial(ip: str, port: int, secret: str, timeout: float = 15.0) -> socket.socket:
    """A connection to the dashboard behind the hub at ip:port, for one request."""
    connection = socket.create_connection((ip, port), timeout=timeout)
    try:
        mine = secrets.token_hex(16)
        challenge = str(_line(connection)["challenge"])
        hello = {"node": NAME, "relay": True, "challenge": mine, "proof": _proof(secret, "client", challenge)}
        connection.sendall(json.dumps(hello).encode() + b"\n")
        proof = str(_line(connection).get("proof")).encode("utf-8", "backslashreplace")
        if not hmac.compare_digest(proof, _proof(secret, "head", mine).encode()):
            raise HeliostatError("another cluster answers at the head's address", saw=f"{ip}:{port}")
    except (OSError, ValueError, KeyError, RecursionError) as error:
        connection.close()
        raise ConnectionError(f"no agent of this cluster answers at {ip}:{port}: {error}") from None
    except BaseException:
        connection.close()
        raise
    return connection


def _proof(secret: str, side: str, challenge: str) -> str:
    return hmac.new(secret.encode(), f"{side} {challenge} {NAME}".encode(), hashlib.sha256).hexdigest()


def _line(connection: socket.socket) -> dict[str, Any]:
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
