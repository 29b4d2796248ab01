"""Local proxy to a Service: forwards HTTP requests from a local port through the API server's service proxy.

The API server consumes `Authorization`, so Ray's token travels in `X-Ray-Authorization`. Each request opens a new connection,
so that a moved head is found. Other local users reach only Ray, which requires its token: each connection carries one plain
request, and no path leads out of the service.
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
from heliostat.remote.streams import copy_stream

CONNECT_TIMEOUT_S = 15.0
RESPONSE_TIMEOUT_S = 5.0  # for the rest of a response after the client closed its side
BLOCK = 64 * 1024
# no folded headers or bare line ends: the API server must parse the same headers as we do
HEAD = re.compile(rb"[A-Z]+ /[!-~]* HTTP/1\.[01]\r\n([-!#$%&'*+.^_`|~0-9A-Za-z]+:[^\r\n\0]*\r\n)*\r\n")
_listeners: dict[tuple[str, str | None, str], tuple[str, int]] = {}


def forward(api: Api, namespace: str, service: str, port: int) -> tuple[str, int]:
    """(host, port) of a local listener that forwards to the service while this process runs."""
    path = f"{api.prefix}/api/v1/namespaces/{namespace}/services/http:{service}:{port}/proxy"
    key = (api.server, api.context, path)
    if key not in _listeners:
        listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        _listeners[key] = ("127.0.0.1", listener.getsockname()[1])
        end: list[Callable[[], object]] = []
        thread = threading.Thread(
            target=asyncio.run, args=(_run_server(listener, api, path, end),), daemon=True
        )
        thread.start()
        atexit.register(_stop, end, thread)  # else the interpreter prints errors at exit
    return _listeners[key]


def _stop(end: list[Callable[[], object]], thread: threading.Thread) -> None:
    with contextlib.suppress(RuntimeError):  # the loop has ended
        for stop in end:
            stop()
    thread.join(5)


def proxy_error(
    api: Api, name: str, method: str, path: str, status: int, content: bytes
) -> HeliostatError | None:
    """The error for a response of the API server itself, which is a Status document; None for Ray's own response.

    The API server responds 404 if the Service is deleted and 503 if the Service has no pod."""
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
        return api.error_from_response(method, f"services/proxy{path}", status, content)
    from heliostat.remote.ray_client import NoResponse

    return NoResponse(
        f"the dashboard of `{name}` is not reachable",
        cause=" ".join(str(document.get("message") or "").split())[:300],
        details=f"the API server's proxy answered {status} to {method} {path}",
        hint=f"heliostat status {name.rpartition('/')[2]}",
    )


async def _run_server(listener: socket.socket, api: Api, path: str, end: list[Callable[[], object]]) -> None:
    """Serves until the function that it appends to `end` is called."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    clients: set[asyncio.Task[None] | None] = set()  # asyncio keeps only weak references to tasks
    end.append(lambda: loop.call_soon_threadsafe(stop.set))

    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        disconnected = (OSError, asyncio.TimeoutError, asyncio.IncompleteReadError)
        bad_request = (ValueError, asyncio.LimitOverrunError)
        exiting = (asyncio.CancelledError, RuntimeError)  # the interpreter starts no threads at exit
        clients.add(task := asyncio.current_task())
        with contextlib.suppress(*disconnected, *bad_request, *exiting, HeliostatError):
            if not stop.is_set():
                await _relay(reader, writer, api, path)
        writer.close()
        clients.discard(task)

    server = await asyncio.start_server(client, sock=listener, limit=BLOCK)
    await stop.wait()
    server.close()  # asyncio.run cancels the remaining connections


async def _relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, api: Api, path: str) -> None:
    head = await reader.readuntil(b"\r\n\r\n")
    credentials = await asyncio.to_thread(api.authorization)  # a credential plugin may block
    host, port = api.address
    request, name = (
        rewrite_request(head, path, f"{host}:{port}", credentials),
        (api.tls_name or host) if api.tls else None,
    )
    dial = asyncio.open_connection(host, port, ssl=api.tls, server_hostname=name)
    received, upstream = await asyncio.wait_for(dial, CONNECT_TIMEOUT_S)
    copies: list[asyncio.Task[None]] = []
    try:
        upstream.write(request)
        plain = not is_upgrade(head)
        if not plain:  # no client bytes before the server has switched protocols
            first = await received.readuntil(b"\r\n\r\n")
            writer.write(first)
        copies.append(asyncio.create_task(copy_stream(received, writer)))
        if plain or re.match(rb"HTTP/1\.\d 101 ", first):
            copies.append(asyncio.create_task(copy_stream(reader, upstream)))
            await asyncio.wait(copies, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.wait(copies[:1], timeout=RESPONSE_TIMEOUT_S)
    finally:
        for copy in copies:
            copy.cancel()
        upstream.close()
        if copies:
            await asyncio.wait(copies)


def rewrite_request(head: bytes, path: str, host: str, credentials: dict[str, str]) -> bytes:
    """The request for the service at `path`, with the credentials of the API server and of Ray, on its own connection.

    The API server may identify us by the connection's certificate, so other local users must not reach it. Raises ValueError
    for a malformed request or a path that leads out of the service."""
    if not HEAD.fullmatch(head):
        raise ValueError("not an HTTP/1 request")
    first, *lines = head.decode("latin-1").removesuffix("\r\n\r\n").split("\r\n")
    method, target, version = first.split(" ")
    if ".." in re.split(r"[/\\]", unquote(target.partition("?")[0])):
        raise ValueError("the path leads out of the service")
    upgrade, kept = is_upgrade(head), []
    for line in lines:
        name = line.partition(":")[0].lower()
        if name == "authorization":
            kept.append(f"X-Ray-{line}")
        elif name not in ("host", "x-ray-authorization", "connection") and (upgrade or name != "upgrade"):
            kept.append(line)
    ours = [f"Host: {host}", *(f"{key}: {value}" for key, value in credentials.items())]
    ours.append("Connection: Upgrade" if upgrade else "Connection: close")
    return "\r\n".join([f"{method} {path}{target} {version}", *ours, *kept, "", ""]).encode("latin-1")


def is_upgrade(head: bytes) -> bool:
    """Whether the request upgrades to another protocol, such as a websocket."""
    return bool(re.search(rb"(?im)^upgrade:", head) and re.search(rb"(?im)^connection:.*\bupgrade\b", head))
