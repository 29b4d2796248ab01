"""The way to a service of a Kubernetes cluster: a local port whose HTTP requests go through the API server's service proxy.

The API server takes `Authorization` for itself, so Ray's token goes in `X-Ray-Authorization`. Each connection is made anew:
a head that has moved is found again. Whoever else reaches the local port gets no further than Ray, which wants its token:
one plain request a connection, and no path that leads out of the service.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import json
import re
import socket
import threading
from collections.abc import Callable
from urllib.parse import unquote

from heliostat.backends.kubernetes.api import Api
from heliostat.common.errors import HeliostatError

CONNECT_S = 15.0
LINGER_S = 5.0  # for the rest of an answer, once whoever asked has said their last
BLOCK = 64 * 1024
# nothing folded, no bare line ends: what we read as one header must be one for the API server too
HEAD = re.compile(rb"[A-Z]+ /[!-~]* HTTP/1\.[01]\r\n([-!#$%&'*+.^_`|~0-9A-Za-z]+:[^\r\n\0]*\r\n)*\r\n")
_open: dict[tuple[str, str | None, str], tuple[str, int]] = {}


def forward(api: Api, namespace: str, service: str, port: int) -> tuple[str, int]:
    """(host, port) here that leads to the service, for as long as this process lives."""
    path = f"{api.prefix}/api/v1/namespaces/{namespace}/services/http:{service}:{port}/proxy"
    key = (api.server, api.context, path)
    if key not in _open:
        listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        _open[key] = ("127.0.0.1", listener.getsockname()[1])
        end: list[Callable[[], object]] = []
        thread = threading.Thread(target=asyncio.run, args=(_serve(listener, api, path, end),), daemon=True)
        thread.start()
        atexit.register(_stop, end, thread)  # else Python's end tears it apart, and says so
    return _open[key]


def _stop(end: list[Callable[[], object]], thread: threading.Thread) -> None:
    with contextlib.suppress(RuntimeError):  # it has ended
        for tell in end:
            tell()
    thread.join(5)


def proxy_error(
    api: Api, name: str, method: str, path: str, status: int, content: bytes
) -> HeliostatError | None:
    """The error for an answer of the API server itself, which is a Status document; None: it is Ray's own answer.

    The proxy answers 404 where the Service is gone and 503 where no pod is behind it: nothing of that is known to Ray."""
    try:
        document = json.loads(content)
    except ValueError:
        return None
    if not isinstance(document, dict) or (document.get("kind"), document.get("apiVersion")) != (
        "Status",
        "v1",
    ):
        return None
    if status in (401, 403):
        return api.said_no(method, f"services/proxy{path}", status, content)
    from heliostat.remote.ray_client import NoResponse

    return NoResponse(
        f"the dashboard of `{name}` is not reached",
        cause=" ".join(str(document.get("message") or "").split())[:300],
        details=f"the API server's proxy answered {status} to {method} {path}",
        hint=f"heliostat status {name.rpartition('/')[2]}",
    )


async def _serve(listener: socket.socket, api: Api, path: str, end: list[Callable[[], object]]) -> None:
    """Until whoever finds a way to end it in `end` takes it."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    clients: set[asyncio.Task[None] | None] = set()  # nobody else holds on to a task whose client has left
    end.append(lambda: loop.call_soon_threadsafe(stop.set))

    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        gone = (OSError, asyncio.TimeoutError, asyncio.IncompleteReadError)
        no_http = (ValueError, asyncio.LimitOverrunError)
        ends = (asyncio.CancelledError, RuntimeError)  # this process: Python starts no threads any more
        clients.add(task := asyncio.current_task())
        with contextlib.suppress(*gone, *no_http, *ends, HeliostatError):
            if not stop.is_set():
                await _join(reader, writer, api, path)
        writer.close()
        clients.discard(task)

    server = await asyncio.start_server(client, sock=listener, limit=BLOCK)
    await stop.wait()
    server.close()  # and asyncio.run cancels what is still connected


async def _join(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, api: Api, path: str) -> None:
    head = await reader.readuntil(b"\r\n\r\n")
    credentials = await asyncio.to_thread(api.authorization)  # a plugin may have to make them
    host, port = api.address
    request, name = (
        rewrite(head, path, f"{host}:{port}", credentials),
        (api.tls_name or host) if api.tls else None,
    )
    dial = asyncio.open_connection(host, port, ssl=api.tls, server_hostname=name)
    near, far = await asyncio.wait_for(dial, CONNECT_S)
    copies: list[asyncio.Task[None]] = []
    try:
        far.write(request)
        plain = not upgrades(head)
        if not plain:  # until it is another protocol, what comes after the request is none of ours
            first = await near.readuntil(b"\r\n\r\n")
            writer.write(first)
        copies.append(asyncio.create_task(_copy(near, writer)))
        if plain or re.match(rb"HTTP/1\.\d 101 ", first):
            copies.append(asyncio.create_task(_copy(reader, far)))
            await asyncio.wait(copies, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.wait(copies[:1], timeout=LINGER_S)
    finally:
        for copy in copies:
            copy.cancel()
        far.close()
        if copies:
            await asyncio.wait(copies)


async def _copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await source.read(BLOCK):
            sink.write(data)
            await sink.drain()


def rewrite(head: bytes, path: str, host: str, credentials: dict[str, str]) -> bytes:
    """The same request for the service behind `path`, with both sides' credentials, alone on its connection: whoever else
    reaches our port must not get at the API server itself, which knows us by the connection's certificate. ValueError for
    what is no plain request, or leads out of the service."""
    if not HEAD.fullmatch(head):
        raise ValueError("not a request of HTTP/1")
    first, *lines = head.decode("latin-1").removesuffix("\r\n\r\n").split("\r\n")
    method, target, version = first.split(" ")
    if ".." in re.split(r"[/\\]", unquote(target.partition("?")[0])):
        raise ValueError("a path that leads out of the service")
    upgrade, kept = upgrades(head), []
    for line in lines:
        name = line.partition(":")[0].lower()
        if name == "authorization":
            kept.append(f"X-Ray-{line}")
        elif name not in ("host", "x-ray-authorization", "connection") and (upgrade or name != "upgrade"):
            kept.append(line)
    ours = [f"Host: {host}", *(f"{key}: {value}" for key, value in credentials.items())]
    ours.append("Connection: Upgrade" if upgrade else "Connection: close")
    return "\r\n".join([f"{method} {path}{target} {version}", *ours, *kept, "", ""]).encode("latin-1")


def upgrades(head: bytes) -> bool:
    """Whether the request asks for another protocol: a websocket."""
    return bool(re.search(rb"(?im)^upgrade:", head) and re.search(rb"(?im)^connection:.*\bupgrade\b", head))
