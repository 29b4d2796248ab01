"""Reverse proxy to a cluster's Ray dashboard, on loopback; adds the cluster's token.

Ray's dashboard requires a bearer token. The user's browser needs access without it. Other users of the same host, who can
connect to this port and listen on others, must not have access. So each proxy has its own address:

    http://NAME.localhost:PORT/PATH/?key=KEY

KEY works once and sets a session cookie; every later request needs the cookie. NAME and PATH are random. A browser sends
a cookie to every port of its host name, so the cookie must not belong to 127.0.0.1 or `localhost`. NAME also makes the
origin unique: a service worker of another program at 127.0.0.1:PORT does not control it. But a page can learn NAME
(`Origin` of a request, `ancestorOrigins` of a frame). So the cookie is limited to PATH, which browsers do not send to other
origins. The proxy parses only the heads of requests and responses, and forwards the bodies as bytes.
"""

from __future__ import annotations

import asyncio
import errno
import hmac
import html
import re
import secrets
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Protocol
from urllib.parse import parse_qs

from heliostat.common.errors import Code, HeliostatError
from heliostat.remote.streams import copy_stream

_HEAD_LIMIT = 64 * 1024
_HEAD_DEADLINE_S = 30.0
_CONNECT_DEADLINE_S = 10.0
_LINGER_S = 5.0
_PORT_ATTEMPTS = 100
_MAX_UNAUTHENTICATED = 256  # concurrent connections without a session; a further one closes the oldest
_NO_IPV6 = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
# headers of the proxy's responses, and of Ray's unless a web proxy is in front, which may show the dashboard in a frame
_HARDENING = (
    "Referrer-Policy: no-referrer",
    "X-Frame-Options: DENY",
    "Content-Security-Policy: frame-ancestors 'none'",
    "Cross-Origin-Opener-Policy: same-origin",
    "Cross-Origin-Resource-Policy: same-origin",
)
_REPLACED = ("referrer-policy", "x-frame-options", "cross-origin-", "access-control-", "location")

_NAME = rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
_REQUEST_LINE = re.compile(rb"(" + _NAME + rb") (/[\x21-\x7e\x80-\xff]*) HTTP/1\.[01]")
_STATUS_LINE = re.compile(rb"HTTP/1\.[01] [1-5][0-9]{2}(?: [\t\x20-\x7e\x80-\xff]*)?")
_INTERIM = re.compile(rb"HTTP/1\.[01] 1(?!01)")
_HEADER = re.compile(rb"(" + _NAME + rb"):([\t\x20-\x7e\x80-\xff]*)")


@dataclass(frozen=True)
class _Head:
    """The head of one request or response, with its line and headers as received."""

    line: str
    headers: tuple[tuple[str, str], ...]

    def values(self, name: str) -> list[str]:
        return [value for key, value in self.headers if key.lower() == name]

    def items(self, name: str, separator: str = ",") -> list[str]:
        return [
            item.strip() for value in self.values(name) for item in value.split(separator) if item.strip()
        ]

    @property
    def is_websocket(self) -> bool:
        upgrade, connection = (
            [item.lower() for item in self.items(name)] for name in ("upgrade", "connection")
        )
        return self.line.startswith("GET ") and "websocket" in upgrade and "upgrade" in connection


class Target(Protocol):
    """A dashboard. token None: it needs none, or a relay behind `dial` adds it."""

    host: str
    port: int
    token: str | None
    dial: Callable[[float], socket.socket]


class DashboardProxy:
    """Forwards a port of 127.0.0.1 and ::1 to the dashboard that `target()` returns, with its bearer token.

    A thread calls `target` for each connection, because the head's address and token may change. If it raises, the
    browser gets a page that retries, without the error's text, which could contain a secret.
    port 0: a free port. url: contains the key; show it to the user and keep it out of logs.
    proxied: a web proxy with its own host name and path is in front and authenticates users; it gives the same link
    to every browser of a user. So any host name is accepted, and the key works more than once.
    """

    def __init__(
        self,
        target: Callable[[], Target],
        port: int = 0,
        *,
        proxied: bool = False,
    ) -> None:
        self.port = port
        self._proxied = proxied
        self._target = target
        self._name = "127.0.0.1" if proxied else f"{secrets.token_hex(16)}.localhost"
        self._root = "/" if proxied else f"/{secrets.token_hex(16)}/"
        self._key = secrets.token_urlsafe(32)
        self._session = secrets.token_urlsafe(32)
        self._key_used = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop = asyncio.Event()
        self._serving = threading.Event()
        self._thread: threading.Thread | None = None
        self._clients: set[asyncio.Task[None] | None] = set()
        # connections without a session, oldest first: any user of this host can open them
        self._unauthenticated: dict[asyncio.StreamWriter, None] = {}
        self._max_unauthenticated = _max_unauthenticated()

    @property
    def url(self) -> str:
        """The URL for one browser, which works once; complete after `start`."""
        return f"http://{self._name}:{self.port}{self._root}?key={self._key}"

    def start(self) -> None:
        """Starts to listen; returns when connections are accepted."""
        try:
            listeners = _listen(self.port)
        except OSError as error:
            message = f"could not listen on port {self.port} of this host for the dashboard"
            hint = "choose another port, or 0 for a free one" if self.port else ""
            code = Code.PROXY_PORT_IN_USE if error.errno == errno.EADDRINUSE else None
            raise HeliostatError(message, cause=error.strerror or str(error), hint=hint, code=code) from error
        self.port = listeners[0].getsockname()[1]
        self._thread = threading.Thread(target=asyncio.run, args=(self._serve(listeners),), daemon=True)
        self._thread.start()
        self._serving.wait()

    def close(self) -> None:
        """Stops listening and closes every connection. A second call does nothing."""
        loop, thread, self._loop, self._thread = self._loop, self._thread, None, None
        if loop is not None and thread is not None:
            with suppress(RuntimeError):  # the loop has ended already
                loop.call_soon_threadsafe(self._stop.set)
            thread.join(timeout=10)

    async def _serve(self, listeners: list[socket.socket]) -> None:
        self._loop = asyncio.get_running_loop()
        try:
            servers = [
                # a backlog below the limit, so that no connection is closed before its request was read
                await asyncio.start_server(
                    self._client, sock=listener, limit=_HEAD_LIMIT, backlog=self._max_unauthenticated // 2
                )
                for listener in listeners
            ]
        finally:
            self._serving.set()
        await self._stop.wait()
        for server in servers:
            server.close()  # asyncio.run cancels the tasks of open connections

    async def _client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        self._clients.add(task)  # asyncio keeps only a weak reference
        if len(self._unauthenticated) >= self._max_unauthenticated:
            oldest = next(iter(self._unauthenticated))
            del self._unauthenticated[oldest]
            oldest.transport.abort()
        self._unauthenticated[writer] = None
        try:
            writer.write(await self._respond(reader, writer))
            await asyncio.wait_for(_linger(reader, writer), _LINGER_S)
        except (OSError, asyncio.TimeoutError, asyncio.CancelledError):
            pass  # the browser closed the connection or kept it too long, or `close` was called
        finally:
            self._clients.discard(task)
            self._unauthenticated.pop(writer, None)
            writer.close()

    async def _respond(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        """The proxy's own response; empty if the dashboard's response was forwarded."""
        try:
            raw = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), _HEAD_DEADLINE_S)
        except asyncio.LimitOverrunError:
            return _answer("431 Request Header Fields Too Large", "The head of the request is over 64 KiB.\n")
        except asyncio.TimeoutError:
            return _answer("408 Request Timeout", "The request is incomplete.\n")
        except asyncio.IncompleteReadError:
            return b""
        head = _parse(raw, _REQUEST_LINE)
        if head is None:
            return _answer("400 Bad Request", "The request cannot be forwarded.\n")
        if not self._proxied and not self._is_own_host(head):
            return _answer("403 Forbidden", "This is not the address that `heliostat dashboard` printed.\n")
        method, target, version = head.line.split(" ")
        if not _same(target[: len(self._root)], self._root):
            return _answer("403 Forbidden", "Open the URL that `heliostat dashboard` printed.\n")
        head = replace(head, line=f"{method} /{target[len(self._root) :]} {version}")
        refusal = self._refusal(head)
        if refusal is not None:
            return refusal
        self._unauthenticated.pop(writer, None)
        return await self._forward(head, reader, writer)

    def _is_own_host(self, head: _Head) -> bool:
        """False for 127.0.0.1, `localhost`, and any DNS name that resolves to loopback."""
        hosts = head.values("host")
        return len(hosts) == 1 and _same(hosts[0].lower(), f"{self._name}:{self.port}")

    def _refusal(self, head: _Head) -> bytes | None:
        """The response that refuses or redirects the request; None: forward it. Never awaits, so a key works only once."""
        # Browsers treat a page on another port of our host name as same-site: its requests carry our cookie.
        is_foreign = any(value not in ("same-origin", "none") for value in head.values("sec-fetch-site"))
        if not self._proxied:
            own_origin = f"http://{self._name}:{self.port}"
            is_foreign |= any(not _same(origin, own_origin) for origin in head.values("origin"))
        session = f"heliostat-session-{self.port}={self._session}"
        has_session = any(_same(cookie, session) for cookie in head.items("cookie", ";"))
        method, target, _ = head.line.split(" ")
        path, _, query = target.partition("?")
        keys = parse_qs(query).get("key") if (method, path) == ("GET", "/") else None
        if keys and has_session:
            return _answer("303 See Other", "", "Location: ./")
        if keys and _same(keys[0], self._key):
            if self._key_used:
                text = "This URL was used already: start `heliostat dashboard` again for a new one.\n"
                return _answer("403 Forbidden", text)
            self._key_used = not self._proxied
            # No Path: a browser then sends it only below the URL's own path. That is our random one, or that of a
            # web proxy in front; the Location is relative for the same reason.
            cookie = f"Set-Cookie: {session}; HttpOnly; SameSite=Strict"
            return _answer("303 See Other", "", "Location: ./", cookie)
        if is_foreign and (method, target) == ("GET", "/"):
            # A browser does not send a Strict cookie after a link on another page, but does after our own page.
            return _answer("200 OK", redirect_page("./"), kind="text/html")
        if is_foreign or not has_session:
            return _answer("403 Forbidden", "Open the URL that `heliostat dashboard` printed.\n")
        return None

    async def _forward(
        self, head: _Head, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bytes:
        no_response = _retry_page("The cluster's dashboard does not answer.")
        try:
            target = await asyncio.to_thread(self._target)
            connection = await asyncio.to_thread(target.dial, _CONNECT_DEADLINE_S)
            connection.setblocking(False)
            received, upstream = await asyncio.open_connection(sock=connection)
        except Exception:  # refused, unreachable, no tunnel yet: the page retries
            return no_response
        host, port, token = target.host, target.port, (target.token or "").strip()
        if target.token is not None and not re.fullmatch(r"[\x21-\x7e]+", token):
            upstream.close()
            return _retry_page("The token of this cluster cannot be read; is the cluster down?")
        address = "" if self._proxied else f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        upstream.write(_upstream_head(head, token, address))
        upload = asyncio.create_task(_upload(reader, upstream))
        try:
            response = await _final_head(received, writer)
            if response is not None:
                writer.write(_response_head(response, address, self._root))
                await copy_stream(received, writer)
        finally:
            upload.cancel()
            await asyncio.wait([upload])
            upstream.close()
        # An ssh forward accepts and then closes if nothing listens behind it: no response either.
        return no_response if response is None else b""


def _listen(port: int) -> list[socket.socket]:
    """Sockets that listen on the same port of 127.0.0.1 and ::1; only the first on a host without ::1.

    A browser resolves a name under `localhost` to both addresses and may try either first. Another user could listen on
    the other one and get the key. So both must be free; otherwise OSError is raised.
    """
    unusable: list[socket.socket] = []  # held until the end, so that no port is tried twice
    try:
        while len(unusable) < _PORT_ATTEMPTS:
            unusable.append(socket.create_server(("127.0.0.1", port)))
            address = ("::1", unusable[-1].getsockname()[1])
            try:
                second = socket.create_server(address, family=socket.AF_INET6)
            except OSError as error:
                if error.errno in _NO_IPV6:
                    return [unusable.pop()]
                if port or error.errno != errno.EADDRINUSE:
                    raise
            else:
                return [unusable.pop(), second]
        raise OSError(errno.EADDRINUSE, "no port is free on both 127.0.0.1 and ::1")
    finally:
        for listener in unusable:
            listener.close()


def _max_unauthenticated() -> int:
    """At most a quarter of the limit of open files: the others are for browsers with a session."""
    try:
        import resource  # not on Windows
    except ImportError:
        return _MAX_UNAUTHENTICATED
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return _MAX_UNAUTHENTICATED
    return max(8, min(_MAX_UNAUTHENTICATED, soft // 4))


def redirect_page(url: str) -> str:
    """A page that redirects to `url`: so the key is not on the browser's command line."""
    to = html.escape(url, quote=True)
    return (
        '<!doctype html><meta charset="utf-8"><meta name="referrer" content="no-referrer">'
        f'<meta http-equiv="refresh" content="0;url={to}"><a href="{to}">Ray dashboard</a>\n'
    )


def _same(given: str, secret: str) -> bool:
    return hmac.compare_digest(given.encode(), secret.encode())


def _parse(raw: bytes, first_line: re.Pattern[bytes]) -> _Head | None:
    """The head; None unless every line is well formed, without a bare CR or LF, a NUL, a folded line, or a full URL."""
    first, *others = raw.removesuffix(b"\r\n\r\n").split(b"\r\n")
    found = [match for match in map(_HEADER.fullmatch, others) if match is not None]
    if not first_line.fullmatch(first) or len(found) < len(others):
        return None
    headers = ((match[1].decode("latin-1"), match[2].decode("latin-1").strip(" \t")) for match in found)
    return _Head(first.decode("latin-1"), tuple(headers))


def _upstream_head(head: _Head, token: str, host: str) -> bytes:
    """The same request for the dashboard at `host`, the only one on its connection, with the token as its only credential.

    The proxy's host name is removed. host empty: the name is that of a web proxy in front, and is kept.
    """
    drop = {"authorization", "x-ray-authorization", "cookie"}
    drop |= {"host", "origin", "referer"} if host else set()
    if not head.is_websocket:
        drop |= {"connection", "keep-alive", "proxy-connection", "upgrade"}
    lines = [f"Host: {host}"] if host else []
    lines += [f"Origin: http://{host}"] if host and head.values("origin") else []
    lines += [f"{name}: {value}" for name, value in head.headers if name.lower() not in drop]
    lines += [] if head.is_websocket else ["Connection: close"]
    lines += [f"Authorization: Bearer {token}"] if token else []
    return "\r\n".join([head.line, *lines, "", ""]).encode("latin-1")


async def _final_head(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> _Head | None:
    """The head of the dashboard's final response; forwards interim ones (100 Continue). None: it is missing or invalid."""
    try:
        while _INTERIM.match(raw := await source.readuntil(b"\r\n\r\n")):
            sink.write(raw)
    except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
        return None
    return _parse(raw, _STATUS_LINE)


def _response_head(head: _Head, host: str, root: str) -> bytes:
    """The head of the dashboard's response for the browser; host: as for `_upstream_head`; root: the proxy's path.

    Removes Ray's cookies: POST /api/authenticate would set one with the cluster's token.
    """
    headers = [(name, value) for name, value in head.headers if name.lower() != "set-cookie"]
    lines = [
        f"{name}: {value}" for name, value in headers if not host or not name.lower().startswith(_REPLACED)
    ]
    if host:
        for to in head.values("location"):
            to = re.sub(f"^http://{re.escape(host)}/", "/", to)
            lines.append(f"Location: {root + to[1:] if re.match('/(?!/)', to) else to}")
        lines += _HARDENING
    return "\r\n".join([head.line, *lines, "", ""]).encode("latin-1")


def _answer(status: str, body: str, *extra: str, kind: str = "text/plain") -> bytes:
    about = (f"Content-Type: {kind}; charset=utf-8", f"Content-Length: {len(body.encode())}")
    lines = [
        f"HTTP/1.1 {status}",
        *about,
        "Cache-Control: no-store",
        *_HARDENING,
        *extra,
        "Connection: close",
    ]
    return "\r\n".join([*lines, "", body]).encode()


def _retry_page(text: str) -> bytes:
    page = (
        '<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="3">'
        f"<title>Ray dashboard</title><p>{text} This page retries every 3 seconds.</p>\n"
    )
    return _answer("502 Bad Gateway", page, kind="text/html")


async def _upload(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    await copy_stream(source, sink)
    with suppress(OSError):
        sink.write_eof()


async def _linger(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Reads the client's input to its end: a close with unread input would reset the connection."""
    await writer.drain()
    writer.write_eof()
    while await reader.read(_HEAD_LIMIT):
        pass
