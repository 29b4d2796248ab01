"""Programs of another user on the same host, for the attack tests. `python attacker.py UID PROGRAM ARGUMENTS…`

Everything is imported before the user changes: the interpreter may lie where only root can read.
"""

from __future__ import annotations

import json
import os
import re
import resource
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


def listen(port: int) -> socket.socket | None:
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(("0.0.0.0", port))
        listener.listen(16)
    except OSError:
        listener.close()
        return None
    return listener


class Listeners:
    """Ports that we listen on. Says what comes; closes a port after `hold` seconds, so that its owner can have it."""

    def __init__(self, hold: float) -> None:
        self.hold = hold
        self.open: dict[socket.socket, float] = {}
        self.clients: set[socket.socket] = set()

    def add(self, port: int) -> bool:
        listener = listen(port)
        if listener:
            self.open[listener] = time.monotonic()
            say(listens=port)
        return listener is not None

    def serve(self, seconds: float) -> None:
        ready, _, _ = select.select([*self.open, *self.clients], [], [], seconds)
        for one in ready:
            if one in self.open:
                client, _ = one.accept()
                client.settimeout(0.2)
                # an HTTP/2 server begins with its SETTINGS; then the client sends its headers
                client.sendall(b"\0\0\0\4\0\0\0\0\0")
                self.clients.add(client)
                continue
            try:
                data = one.recv(65536)
            except OSError:
                data = b""
            if data:
                say(port=one.getsockname()[1], received=data.decode("latin-1"))
            else:
                self.clients.discard(one)
                one.close()
        for one, since in list(self.open.items()):
            if time.monotonic() - since > self.hold:
                del self.open[one]
                one.close()


def snipe(program: str, directory: str, hold: str) -> None:
    """Listens on every port that the command line of this program names, as soon as it appears. `directory`: the victim's;
    other tests run beside this one."""
    seen: set[int] = set()
    listeners = Listeners(float(hold))
    say(ready=True)
    while True:
        for line in command_lines():
            for port in (
                map(int, re.findall(r"port[=-](\d+)", line)) if program in line and directory in line else ()
            ):
                if port and port not in seen and listeners.add(port):
                    seen.add(port)
        listeners.serve(0.002)


def inherit(port: str) -> None:
    """Listens on the port as soon as its owner is gone."""
    listeners = Listeners(1e9)
    say(ready=True)
    while not listeners.add(int(port)):
        time.sleep(0.002)
    while True:
        listeners.serve(1)


def flood(host: str, port: str, count: str) -> None:
    """Opens so many connections, from many addresses of loopback, and keeps them."""
    kept = []
    for number in range(int(count)):
        one = socket.socket()
        one.settimeout(5)
        try:
            one.bind((f"127.1.{number // 200 % 250}.{number % 200 + 1}", 0))
            one.connect((host, int(port)))
        except OSError:
            one.close()
            continue
        kept.append(one)
    say(open=len(kept))
    time.sleep(1e6)


def talk(host: str, port: str, count: str) -> None:
    """Sends what a server may fail on, so many times."""
    lines = [
        '{"proof":"é"}'.encode(),
        b"[" * 60_000,
        b"\xff\xfe\0",
        b"{}",
        b"[]",
        b"null",
        b'{"node": {"a": [1]}, "relay": [], "proof": {}, "challenge": null}',
        b'{"proof": "' + b"x" * 70_000 + b'"}',
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b'{"proof": "\\ud800"}',
    ]
    for number in range(int(count)):
        try:
            with socket.create_connection((host, int(port)), 5) as one:
                one.sendall(lines[number % len(lines)] + b"\n")
                one.shutdown(socket.SHUT_WR)
                while one.recv(65536):
                    pass
        except OSError:
            pass
    say(sent=int(count))


def name_sockets(prefix: str, first: str, last: str) -> None:
    """Takes the names of abstract sockets."""
    kept = []
    for number in range(int(first), int(last) + 1):
        for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_SEQPACKET):
            one = socket.socket(socket.AF_UNIX, kind)
            one.bind(f"\0{prefix}{number}")
            if number % 2 and kind != socket.SOCK_DGRAM:
                one.listen(8)
            kept.append(one)
    say(open=len(kept))
    time.sleep(1e6)


PROGRAMS: dict[str, Callable[..., None]] = {
    program.__name__: program for program in (snipe, inherit, flood, talk, name_sockets)
}

if __name__ == "__main__":
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    os.setgroups([])
    os.setgid(int(sys.argv[1]))
    os.setuid(int(sys.argv[1]))
    PROGRAMS[sys.argv[2]](*sys.argv[3:])
