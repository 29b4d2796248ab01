"""The door to a cluster's dashboard: a reverse proxy on loopback that adds the token.

Ray's dashboard wants a bearer token. The person's browser must get in without pasting it, and the other users
of the same machine, who can all reach 127.0.0.1, must stay out. So the URL we give holds a key that works
once; it buys a session cookie, and every later request needs that cookie. Only the head of a request is read;
the rest is bytes.
"""

from __future__ import annotations

import asyncio
import hmac
import html
import re
import secrets
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from urllib.parse import parse_qs

from heliostat.errors import HeliostatError

_HEAD_LIMIT = 64 * 1024
_HEAD_DEADLINE_S = 30.0
_CONNECT_DEADLINE_S = 10.0
_LINGER_S = 5.0
_COOKIE_PREFIX = "heliostat-session-"

_NAME = rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
_REQUEST_LINE = re.compile(rb"(" + _NAME + rb") (/[\x21-\x7e\x80-\xff]*) HTTP/1\.[01]")
_HEADER = re.compile(rb"(" + _NAME + rb"):([\t\x20-\x7e\x80-\xff]*)")


@dataclass(frozen=True)
class _Head:
    """The head of one request; `line` and the headers are as they were sent."""

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


class DashboardProxy:
    """Forwards 127.0.0.1:`port` to the dashboard at `target()`, with the bearer token that `token()` gives.

    Both are asked anew, in a thread, for each connection: a tunnel may move and a token may change. When one
    raises, the browser gets a page that tries again, without its words, which could hold a secret.
    `port` 0 takes a free one. `url` holds the key: show it to the person, keep it out of logs.
    `proxied`: a web proxy stands before us and logs people in. It gives us a name and a path of its own, and one link to
    every browser of that person: so any name will do, and the key works more than once.
    """

    def __init__(
        self,
        target: Callable[[], tuple[str, int]],
        token: Callable[[], str],
        port: int = 0,
        *,
        proxied: bool = False,
    ) -> None:
        self.port = port
        self._proxied = proxied
        self._target = target
        self._token = token
        self._key = secrets.token_urlsafe(32)
        self._session = secrets.token_urlsafe(32)
        self._key_used = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop = asyncio.Event()
        self._serving = threading.Event()
        self._thread: threading.Thread | None = None
        self._clients: set[asyncio.Task[None] | None] = set()

    @property
    def url(self) -> str:
        """Good for one browser, once; whole after `start`."""
        return f"http://127.0.0.1:{self.port}/?key={self._key}"

    def start(self) -> None:
        """Listens; returns when connections are accepted."""
        try:
            listener = socket.create_server(("127.0.0.1", self.port))
        except OSError as error:
            what = f"the dashboard cannot be offered on port {self.port} of this computer"
            raise HeliostatError(what, because=error.strerror or str(error)) from error
        self.port = listener.getsockname()[1]
        self._thread = threading.Thread(target=asyncio.run, args=(self._serve(listener),), daemon=True)
        self._thread.start()
        self._serving.wait()

    def close(self) -> None:
        """Stops listening and ends every connection. A second call does nothing."""
        loop, thread, self._loop, self._thread = self._loop, self._thread, None, None
        if loop is not None and thread is not None:
            with suppress(RuntimeError):  # the loop has ended already
                loop.call_soon_threadsafe(self._stop.set)
            thread.join(timeout=10)

    async def _serve(self, listener: socket.socket) -> None:
        self._loop = asyncio.get_running_loop()
        try:
            server = await asyncio.start_server(self._client, sock=listener, limit=_HEAD_LIMIT)
        finally:
            self._serving.set()
        await self._stop.wait()
        server.close()  # and asyncio.run cancels what is still connected

    async def _client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        self._clients.add(task)  # asyncio holds it weakly once the browser is gone
        try:
            writer.write(await self._respond(reader, writer))
            await asyncio.wait_for(_linger(reader, writer), _LINGER_S)
        except (OSError, asyncio.TimeoutError, asyncio.CancelledError):
            pass  # the browser went away or stays too long, or `close` was called: the connection is over
        finally:
            self._clients.discard(task)
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
        head = _parse(raw)
        if head is None:
            return _answer("400 Bad Request", "This is not a request that can be forwarded.\n")
        refusal = self._gate(head)
        return await self._forward(head, reader, writer) if refusal is None else refusal

    def _gate(self, head: _Head) -> bytes | None:
        """None: it may pass. Otherwise the answer. Never waits, so a key cannot be used twice at once."""
        hosts = (f"127.0.0.1:{self.port}", f"localhost:{self.port}")
        asked = head.values("host")
        if not self._proxied and (
            len(asked) != 1 or asked[0].lower() not in hosts
        ):  # a rebound DNS name, for one
            return _answer("403 Forbidden", "This is not the address that `heliostat dashboard` printed.\n")
        # A page on another port of 127.0.0.1 is "the same site": its requests carry our cookie.
        foreign = any(site not in ("same-origin", "none") for site in head.values("sec-fetch-site"))
        if not self._proxied:
            foreign |= any(origin.removeprefix("http://") not in hosts for origin in head.values("origin"))
        session = f"{_COOKIE_PREFIX}{self.port}={self._session}"
        known = any(hmac.compare_digest(c.encode(), session.encode()) for c in head.words("cookie", ";"))
        method, target, _ = head.line.split(" ")
        path, _, query = target.partition("?")
        keys = parse_qs(query).get("key") if (method, path) == ("GET", "/") else None
        if keys and known:
            return _answer("303 See Other", "", "Location: ./")
        if keys and hmac.compare_digest(keys[0].encode(), self._key.encode()):
            if self._key_used:
                text = "This URL was used already: start `heliostat dashboard` again for a new one.\n"
                return _answer("403 Forbidden", text)
            self._key_used = not self._proxied
            # no Path, and no absolute Location: both are then below the path that a proxy before us has given us
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
        try:
            token = (await asyncio.to_thread(self._token)).strip()
        except Exception:  # whatever it is, the browser gets the page and asks again
            token = ""
        if not re.fullmatch(r"[\x21-\x7e]+", token):
            return _retry_page("The token of this cluster cannot be read; is the cluster down?")
        no_answer = _retry_page("The cluster's dashboard does not answer.")
        try:
            host, port = await asyncio.to_thread(self._target)
            near, far = await asyncio.wait_for(asyncio.open_connection(host, port), _CONNECT_DEADLINE_S)
        except Exception:  # the same: refused, unreachable, no tunnel yet
            return no_answer
        far.write(_upstream_head(head, token))
        upload = asyncio.create_task(_upload(reader, far))
        try:
            answered = await _copy(near, writer)
        finally:
            upload.cancel()
            await asyncio.wait([upload])
            far.close()
        # An ssh forward accepts, then hangs up when nobody listens behind it: that is "does not answer" too.
        return b"" if answered else no_answer


def redirect_page(url: str) -> str:
    """A page that goes to `url`: a browser opened on it has no key on its command line."""
    to = html.escape(url, quote=True)
    return (
        '<!doctype html><meta charset="utf-8"><meta name="referrer" content="no-referrer">'
        f'<meta http-equiv="refresh" content="0;url={to}"><a href="{to}">Ray dashboard</a>\n'
    )


def _parse(raw: bytes) -> _Head | None:
    """None unless every line is well formed: a bare CR or LF, a NUL, a folded line, a full URL are not."""
    first, *rest = raw.removesuffix(b"\r\n\r\n").split(b"\r\n")
    found = [match for match in map(_HEADER.fullmatch, rest) if match is not None]
    if not _REQUEST_LINE.fullmatch(first) or len(found) < len(rest):
        return None
    headers = ((match[1].decode("latin-1"), match[2].decode("latin-1").strip(" \t")) for match in found)
    return _Head(first.decode("latin-1"), tuple(headers))


def _upstream_head(head: _Head, token: str) -> bytes:
    """The same request, with our token as its only credential, and alone on its connection."""
    drop = {"authorization", "x-ray-authorization", "cookie"}
    if not head.is_websocket:
        drop |= {"connection", "keep-alive", "proxy-connection", "upgrade"}
    lines = [f"{name}: {value}" for name, value in head.headers if name.lower() not in drop]
    # Cookies know no ports: those of our other proxies come along, and are none of this cluster's business.
    cookies = [cookie for cookie in head.words("cookie", ";") if not cookie.startswith(_COOKIE_PREFIX)]
    lines += [f"Cookie: {'; '.join(cookies)}"] if cookies else []
    lines += [] if head.is_websocket else ["Connection: close"]
    return "\r\n".join([head.line, *lines, f"Authorization: Bearer {token}", "", ""]).encode("latin-1")


def _answer(status: str, body: str, *extra: str, kind: str = "text/plain") -> bytes:
    about = (f"Content-Type: {kind}; charset=utf-8", f"Content-Length: {len(body.encode())}")
    safe = ("Cache-Control: no-store", "Referrer-Policy: no-referrer", "X-Frame-Options: DENY")
    return "\r\n".join([f"HTTP/1.1 {status}", *about, *safe, *extra, "Connection: close", "", body]).encode()


def _retry_page(text: str) -> bytes:
    page = (
        '<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="3">'
        f"<title>Ray dashboard</title><p>{text} This page tries again every 3 seconds.</p>\n"
    )
    return _answer("502 Bad Gateway", page, kind="text/html")


async def _copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> bool:
    """Passes bytes on until the source ends or either side breaks; says whether there were any."""
    moved = False
    with suppress(OSError):
        while data := await source.read(_HEAD_LIMIT):
            moved = True
            sink.write(data)
            await sink.drain()
    return moved


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
