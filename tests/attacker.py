"""Programs of another user on the same host, for the attack tests. `python attacker.py UID PROGRAM ARGUMENTS…`

Everything is imported before the user changes: the interpreter may lie where only root can read.
"""

from __future__ import annotations

import json
import os
import re
import select
import socket
import sys
import time
from collections.abc import Callable

# import what the calls below load late, while we still may read it
"".encode("idna")


def say(**facts: object) -> None:
    print(json.dumps(facts), flush=True)


def command_lines() -> list[str]:
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/cmdline", "rb") as stream:
                    found.append(stream.read().replace(b"\0", b" ").decode("latin-1"))
            except OSError:
                continue
    return found


def snipe(marker: str, seconds: str, hold: str) -> None:
    """Listens on every port that appears in a command line with this marker, as soon as it appears; closes it again after
    `hold` seconds, so that its owner can have it; says what it was sent."""
    seen: set[int] = set()
    listening: dict[socket.socket, float] = {}
    clients: dict[socket.socket, bytes] = {}
    say(ready=True)
    end = time.monotonic() + float(seconds)
    while time.monotonic() < end:
        for line in command_lines():
            if marker not in line:
                continue
            for port in map(int, re.findall(r"port[=-](\d+)", line)):
                if port and port not in seen:
                    listener = socket.socket()
                    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    try:
                        listener.bind(("0.0.0.0", port))
                        listener.listen(16)
                    except OSError:
                        listener.close()
                        continue
                    seen.add(port)
                    listening[listener] = time.monotonic()
                    say(listens=port)
        ready, _, _ = select.select([*listening, *clients], [], [], 0.002)
        for one in ready:
            if one in listening:
                client, _ = one.accept()
                client.settimeout(0.2)
                # an HTTP/2 server speaks first: its SETTINGS, so that the client sends its headers
                client.sendall(b"\0\0\0\4\0\0\0\0\0")
                clients[client] = b""
            else:
                try:
                    data = one.recv(65536)
                except OSError:
                    data = b""
                if data:
                    clients[one] += data
                    say(port=one.getsockname()[1], received=data.decode("latin-1"))
                else:
                    del clients[one]
                    one.close()
        for one, since in list(listening.items()):
            if time.monotonic() - since > float(hold):
                del listening[one]
                one.close()


PROGRAMS: dict[str, Callable[..., None]] = {"snipe": snipe}

if __name__ == "__main__":
    os.setgroups([])
    os.setgid(int(sys.argv[1]))
    os.setuid(int(sys.argv[1]))
    PROGRAMS[sys.argv[2]](*sys.argv[3:])
