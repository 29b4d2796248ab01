"""A dashboard's proxy with real sockets, and a small HTTP server behind it that keeps what it gets."""

from __future__ import annotations

import re
import socket
import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from heliostat.remote.dashboard_proxy import DashboardProxy
from heliostat.remote.ray_client import RayApi

DEADLINE_S = 60.0  # a net: nothing here waits that long unless it is broken
TOKEN = "a1b2" * 16


# --- the other side -------------------------------------------------------------------------------------------


class Upstream(socketserver.ThreadingTCPServer):
    """A small HTTP server of the test's own; it keeps the head of every request."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.heads: list[bytes] = []
        self.answers: dict[bytes, bytes] = {}
        self.together = threading.Barrier(50)
        self.saw_the_end, self.may_go = threading.Event(), threading.Event()
        self.port: int = self.server_address[1]
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()

    def answer(self, raw: bytes) -> str:
        """The path at which the server sends these bytes."""
        path = f"/answer?{len(self.answers)}"
        self.answers[path.encode()] = raw
        return path

    def header(self, name: str) -> list[str]:
        """The values of one header of the last request."""
        lines = self.heads[-1].decode("latin-1").split("\r\n")
        return [line.partition(": ")[2] for line in lines if line.lower().startswith(name.lower() + ":")]


class Handler(socketserver.StreamRequestHandler):
    server: Upstream

    def handle(self) -> None:
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            if not (line := self.rfile.readline()):
                return
            head += line
        self.server.heads.append(head)
        path = head.split(b" ")[1]
        if path == b"/hangup":
            return
        if path == b"/silent":
            self.rfile.read()
            self.server.saw_the_end.set()
            self.server.may_go.wait(DEADLINE_S)
            return
        if path == b"/ws":
            self.wfile.write(b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\n\r\n")
            while data := self.request.recv(65536):
                self.wfile.write(data.upper())
            return
        if path.startswith(b"/answer?"):
            self.wfile.write(self.server.answers[path])
            return
        if path == b"/together":
            self.server.together.wait(DEADLINE_S)
        self.wfile.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n")
        if path == b"/echo":
            left = int(self.server.header("content-length")[0])
            while left and (data := self.rfile.read(min(left, 100_000))):
                self.wfile.write(data)
                left -= len(data)
        else:
            self.wfile.write(b"hello from " + path)


# --- this side ------------------------------------------------------------------------------------------------


class Site:
    """A proxy with a target that can move and a token in a file."""

    def __init__(self, port: int, token_file: Path, **options: bool) -> None:
        self.upstream_port = port
        self.token_file = token_file
        token_file.write_text(TOKEN + "\n")
        self.proxy = DashboardProxy(
            lambda: RayApi("127.0.0.1", self.upstream_port, token_file.read_text()), **options
        )
        self.proxy.start()
        self.host, self.root = urlsplit(self.proxy.url)[1:3]
        self.cookie = ""

    def connect(self, address: str = "127.0.0.1") -> socket.socket:
        return socket.create_connection((address, self.proxy.port), timeout=DEADLINE_S)

    def send(self, raw: bytes) -> tuple[int, str, str]:
        """Status, head, body of the answer to these bytes."""
        with self.connect() as client:
            client.sendall(raw)
            answer = read_all(client)
        head, _, body = answer.partition(b"\r\n\r\n")
        return int(head.split(b" ")[1]), head.decode(), body.decode()

    def ask(
        self, target: str, *headers: str, method: str = "GET", cookie: bool = True
    ) -> tuple[int, str, str]:
        return self.send(self.head(target, *headers, method=method, cookie=cookie))

    def head(self, target: str, *headers: str, method: str = "GET", cookie: bool = True) -> bytes:
        """A request for `target` of the dashboard, which is below the proxy's own path."""
        lines = [f"{method} {self.root[:-1]}{target} HTTP/1.1"]
        lines += [] if any(line.lower().startswith("host:") for line in headers) else [f"Host: {self.host}"]
        lines += [f"Cookie: {self.cookie}"] if cookie and self.cookie else []
        return "\r\n".join([*lines, *headers, "", ""]).encode("latin-1")

    @property
    def key_target(self) -> str:
        return "/" + self.proxy.url.rpartition("/")[2]

    def log_in(self) -> Site:
        status, head, _ = self.ask(self.key_target)
        assert status == 303
        found = re.search(r"Set-Cookie: ([^;]+);", head)
        assert found is not None
        self.cookie = found[1]
        return self


def read_all(client: socket.socket) -> bytes:
    parts = []
    while data := client.recv(65536):
        parts.append(data)
    return b"".join(parts)


def read_exactly(client: socket.socket, count: int) -> bytes:
    return client.recv(count, socket.MSG_WAITALL)


@contextmanager
def an_upstream() -> Iterator[Upstream]:
    with Upstream() as server:
        yield server
        server.shutdown()


@contextmanager
def a_site(upstream: Upstream, folder: Path, **options: bool) -> Iterator[Site]:
    site = Site(upstream.port, folder / "token", **options)
    yield site
    site.proxy.close()
