"""Reverse proxy to a cluster's Ray dashboard, on loopback; adds the cluster's token.

Ray's dashboard requires a bearer token. The user's browser must get in without it. Other users of the same host, who can
connect to this port and listen on others, must not. So each proxy has an address of its own:

    http://NAME.localhost:PORT/PATH/?key=KEY

KEY works once and buys a session cookie; every later request needs the cookie. NAME and PATH are random. A browser sends
a cookie to every port of its host name, so the cookie must not belong to 127.0.0.1 or `localhost`. NAME also makes the
origin new: a service worker that another program left at 127.0.0.1:PORT does not control it. But a page can learn NAME
(`Origin` of a request, `ancestorOrigins` of a frame). So the cookie is limited to PATH, which no browser tells to another
origin. Only the heads of requests and responses are read; the rest is passed on as bytes.
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

_HEAD_LIMIT = 64 * 1024
_HEAD_DEADLINE_S = 30.0
_CONNECT_DEADLINE_S = 10.0
_LINGER_S = 5.0
_PORT_ATTEMPTS = 100
_STRANGERS = 256  # connections without a session at a time; one more, and the oldest of them is closed
_NO_IPV6 = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
# On our own responses, and on Ray's unless a web proxy is in front: that one may show the dashboard in a frame.
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
    """The head of one request or response; `line` and the headers are as they were sent."""

    line: str
    headers: tuple[tuple[str, str], ...]

    def values(self, name: str) -> list[str]:
        return [value for key, value in self.headers if key.lower() == name]

    def words(self, name: str, separator: str = ",") -> list[str]:
        return [
            word.strip() for value in self.values(name) for word in value.split(separator) if word.strip()
        ]

    @property
    def is_websocket(self) -> bool:
        upgrade, connection = (
            [word.lower() for word in self.words(name)] for name in ("upgrade", "connection")
        )
        return self.line.startswith("GET ") and "websocket" in upgrade and "upgrade" in connection


class Target(Protocol):
    """A dashboard. `token` None: it needs none, or whoever `dial` connects us to adds it."""

    host: str
    port: int
    token: str | None
    dial: Callable[[float], socket.socket]


class DashboardProxy:
    """Forwards a port of 127.0.0.1 and ::1 to the dashboard that `target()` returns, with its bearer token.

    It is called again, in a thread, for each connection: a head may move and a token may change. When it raises, the
    browser gets a page that tries again. The page does not have the error's text, which could hold a secret.
    `port` 0 takes a free one. `url` holds the key: show it to the user, keep it out of logs.
    `proxied`: a web proxy with a host name and a path of its own is in front and authenticates users; it gives one link
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
        # connections without a session so far, oldest first: everybody on this computer can open them
        self._strangers: dict[asyncio.StreamWriter, None] = {}
        self._most_strangers = _most_strangers()

    @property
    def url(self) -> str:
        """Admits one browser, once; complete after `start`."""
        return f"http://{self._name}:{self.port}{self._root}?key={self._key}"

    def start(self) -> None:
        """Listens; returns when connections are accepted."""
        try:
            listeners = _listen(self.port)
        except OSError as error:
            what = f"the dashboard cannot be offered on port {self.port} of this computer"
            hint = "choose another port, or 0 for a free one" if self.port else ""
            code = Code.PROXY_PORT_IN_USE if error.errno == errno.EADDRINUSE else None
            raise HeliostatError(what, cause=error.strerror or str(error), hint=hint, code=code) from error
        self.port = listeners[0].getsockname()[1]
        self._thread = threading.Thread(target=asyncio.run, args=(self._serve(listeners),), daemon=True)
        self._thread.start()
        self._serving.wait()

    def close(self) -> None:
        """Stops listening and ends every connection. A second call does nothing."""
        loop, thread, self._loop, self._thread = self._loop, self._thread, None, None
        if loop is not None and thread is not None:
            with suppress(RuntimeError):  # the loop has ended already
                loop.call_soon_threadsafe(self._stop.set)
            thread.join(timeout=10)

    async def _serve(self, listeners: list[socket.socket]) -> None:
        self._loop = asyncio.get_running_loop()
        try:
            servers = [
                # not more at a time than may wait without a session: none is closed before it was read
                await asyncio.start_server(
                    self._client, sock=listener, limit=_HEAD_LIMIT, backlog=self._most_strangers // 2
                )
                for listener in listeners
            ]
        finally:
            self._serving.set()
        await self._stop.wait()
        for server in servers:
            server.close()  # and asyncio.run cancels what is still connected

    async def _client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        self._clients.add(task)  # asyncio holds it weakly once the browser is gone
        if len(self._strangers) >= self._most_strangers:
            oldest = next(iter(self._strangers))
            del self._strangers[oldest]
            oldest.transport.abort()
        self._strangers[writer] = None
        try:
            writer.write(await self._respond(reader, writer))
            await asyncio.wait_for(_linger(reader, writer), _LINGER_S)
        except (OSError, asyncio.TimeoutError, asyncio.CancelledError):
            pass  # the browser went away or stays too long, or `close` was called: the connection is over
        finally:
            self._clients.discard(task)
            self._strangers.pop(writer, None)
            writer.close()

    async def _respond(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        """What is left to say to this client; nothing when the dashboard itself answered."""
        try:
            raw = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), _HEAD_DEADLINE_S)
        except asyncio.LimitOverrunError:
            return _answer("431 Request Header Fields Too Large", "The head of the request is over 64 KiB.\n")
        except asyncio.TimeoutError:
            return _answer("408 Request Timeout", "No whole request came.\n")
        except asyncio.IncompleteReadError:
            return b""
        head = _parse(raw, _REQUEST_LINE)
        if head is None:
            return _answer("400 Bad Request", "This is not a request that can be forwarded.\n")
        if not self._proxied and not self._is_own_host(head):
            return _answer("403 Forbidden", "This is not the address that `heliostat dashboard` printed.\n")
        method, target, version = head.line.split(" ")
        if not _same(target[: len(self._root)], self._root):
            return _answer("403 Forbidden", "Open the URL that `heliostat dashboard` printed.\n")
        head = replace(head, line=f"{method} /{target[len(self._root) :]} {version}")
        refusal = self._refusal(head)
        if refusal is not None:
            return refusal
        self._strangers.pop(writer, None)
        return await self._forward(head, reader, writer)

    def _is_own_host(self, head: _Head) -> bool:
        """False for 127.0.0.1, `localhost`, and a DNS name that somebody pointed at loopback, among others."""
        hosts = head.values("host")
        return len(hosts) == 1 and _same(hosts[0].lower(), f"{self._name}:{self.port}")

    def _refusal(self, head: _Head) -> bytes | None:
        """None: forward it. Otherwise the response. Never waits, so a key cannot be used twice at once."""
        # A page on another port of our host name is "the same site": its requests carry our cookie.
        foreign = any(backend not in ("same-origin", "none") for backend in head.values("sec-fetch-site"))
        if not self._proxied:
            own = f"http://{self._name}:{self.port}"
            foreign |= any(not _same(origin, own) for origin in head.values("origin"))
        session = f"heliostat-session-{self.port}={self._session}"
        known = any(_same(cookie, session) for cookie in head.words("cookie", ";"))
        method, target, _ = head.line.split(" ")
        path, _, query = target.partition("?")
        keys = parse_qs(query).get("key") if (method, path) == ("GET", "/") else None
        if keys and known:
            return _answer("303 See Other", "", "Location: ./")
        if keys and _same(keys[0], self._key):
            if self._key_used:
                text = "This URL was used already: start `heliostat dashboard` again for a new one.\n"
                return _answer("403 Forbidden", text)
            self._key_used = not self._proxied
            # No Path: a browser then sends it below the URL's own path only. That is our random one, or the one
            # that a web proxy before us uses; the Location is relative for the same reason.
            cookie = f"Set-Cookie: {session}; HttpOnly; SameSite=Strict"
            return _answer("303 See Other", "", "Location: ./", cookie)
        if foreign and (method, target) == ("GET", "/"):
            # Sent here by a file or another page, a browser holds a Strict cookie back; by our page, not.
            return _answer("200 OK", redirect_page("./"), kind="text/html")
        if foreign or not known:
            return _answer("403 Forbidden", "Open the URL that `heliostat dashboard` printed.\n")
        return None

    async def _forward(
        self, head: _Head, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bytes:
        no_answer = _retry_page("The cluster's dashboard does not answer.")
        try:
            target = await asyncio.to_thread(self._target)
            connection = await asyncio.to_thread(target.dial, _CONNECT_DEADLINE_S)
            connection.setblocking(False)
            near, far = await asyncio.open_connection(sock=connection)
        except Exception:  # refused, unreachable, no tunnel yet: the browser gets the page and asks again
            return no_answer
        host, port, token = target.host, target.port, (target.token or "").strip()
        if target.token is not None and not re.fullmatch(r"[\x21-\x7e]+", token):
            far.close()
            return _retry_page("The token of this cluster cannot be read; is the cluster down?")
        own = "" if self._proxied else f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        far.write(_upstream_head(head, token, own))
        upload = asyncio.create_task(_upload(reader, far))
        try:
            response = await _final_head(near, writer)
            if response is not None:
                writer.write(_response_head(response, own, self._root))
                await _copy(near, writer)
        finally:
            upload.cancel()
            await asyncio.wait([upload])
            far.close()
        # An ssh forward accepts, then closes when nothing listens behind it: that is "does not answer" too.
        return no_answer if response is None else b""


def _listen(port: int) -> list[socket.socket]:
    """Sockets that listen on 127.0.0.1 and ::1 with one port number; only the first on a host without ::1.

    A browser resolves a name under `localhost` to both addresses and may try either first. Another user could listen on
    the one that we have not, and get the key. So a port is used when both are ours, and else OSError is raised.
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


def _most_strangers() -> int:
    """A quarter of the files that we may have open, at most: the rest is for browsers with a session."""
    try:
        import resource  # not on Windows
    except ImportError:
        return _STRANGERS
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _STRANGERS if soft == resource.RLIM_INFINITY else max(8, min(_STRANGERS, soft // 4))


def redirect_page(url: str) -> str:
    """A page that goes to `url`: a browser opened on it has no key on its command line."""
    to = html.escape(url, quote=True)
    return (
        '<!doctype html><meta charset="utf-8"><meta name="referrer" content="no-referrer">'
        f'<meta http-equiv="refresh" content="0;url={to}"><a href="{to}">Ray dashboard</a>\n'
    )


def _same(given: str, secret: str) -> bool:
    return hmac.compare_digest(given.encode(), secret.encode())


def _parse(raw: bytes, first_line: re.Pattern[bytes]) -> _Head | None:
    """None unless every line is well formed: a bare CR or LF, a NUL, a folded line, a full URL are not."""
    first, *rest = raw.removesuffix(b"\r\n\r\n").split(b"\r\n")
    found = [match for match in map(_HEADER.fullmatch, rest) if match is not None]
    if not first_line.fullmatch(first) or len(found) < len(rest):
        return None
    headers = ((match[1].decode("latin-1"), match[2].decode("latin-1").strip(" \t")) for match in found)
    return _Head(first.decode("latin-1"), tuple(headers))


def _upstream_head(head: _Head, token: str, host: str) -> bytes:
    """The same request for the dashboard at `host`, alone on its connection, with our token as its only credential.

    Our host name stays here. `host` empty: the name is not ours, and is passed on.
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
    """The head of the dashboard's response; interim ones (100 Continue) are passed on. None: there is no valid one."""
    try:
        while _INTERIM.match(raw := await source.readuntil(b"\r\n\r\n")):
            sink.write(raw)
    except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
        return None
    return _parse(raw, _STATUS_LINE)


def _response_head(head: _Head, host: str, root: str) -> bytes:
    """The head of the dashboard's response as the browser gets it; `host` as for `_upstream_head`, `root` our path.

    No cookie of Ray's: POST /api/authenticate would put the cluster's token into one.
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
        f"<title>Ray dashboard</title><p>{text} This page tries again every 3 seconds.</p>\n"
    )
    return _answer("502 Bad Gateway", page, kind="text/html")


async def _copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    """Passes bytes on until the source ends or either side breaks."""
    with suppress(OSError):
        while data := await source.read(_HEAD_LIMIT):
            sink.write(data)
            await sink.drain()


async def _upload(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    await _copy(source, sink)
    with suppress(OSError):
        sink.write_eof()


async def _linger(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Lets the client read our last bytes: to close with its input unread would reset the connection."""
    await writer.drain()
    writer.write_eof()
    while await reader.read(_HEAD_LIMIT):
        pass
