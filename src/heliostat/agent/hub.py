"""Messages between the agents of one cluster: the head's agent listens, the others keep one connection to it.

One JSON object a line. Both sides prove that they know the cluster's secret by an HMAC over the other's random challenge;
the secret itself never travels. Workers report their state; the head answers, and tells them to stop. A client that has
proved itself is connected to the head's dashboard, and the head adds the token to its request.

Anybody can open a connection. Until its proof, a connection costs one of a bounded number of places, and nothing that it
sends is logged.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import re
import resource
import secrets
import ssl
import sys
import time
from typing import Any, Awaitable, Callable, Dict, Optional, Tuple

from . import ports

SILENT_S = 30.0  # so long without a word, and a node is lost
BEATS = 6  # a word that often in that time
FILES = 16384  # open at once, where the system lets us: a connection a node, and 1,024 is the usual limit
PROVE_S = 10.0  # for the proof of a new connection
UNPROVED = 2048  # connections without a proof at a time; one more, and the oldest of them is closed
UNPROVED_PER_ADDRESS = 512
LOG_EVERY_S = 60.0  # at most one line about refused connections in that time
_HEADER = re.compile(rb"[-!#$%&'*+.^_`|~0-9A-Za-z]+:[^\r\n\0]*")
_REPLACED = (b"authorization", b"x-ray-authorization", b"connection", b"keep-alive")
Message = Dict[str, Any]


def proof(secret: str, side: str, challenge: str, name: str) -> str:
    return hmac.new(
        secret.encode(), ("%s %s %s" % (side, challenge, name)).encode(), hashlib.sha256
    ).hexdigest()


async def receive(reader: asyncio.StreamReader, timeout: float) -> Message:
    line = await asyncio.wait_for(reader.readline(), timeout)
    if not line:
        raise ConnectionError("closed")
    try:
        message = json.loads(line)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(message, dict):
        raise ValueError("not an object")
    return message


def same(one: object, other: str) -> bool:
    """In a time that does not depend on where they differ. What a stranger sent may be anything."""
    return hmac.compare_digest(str(one).encode("utf-8", "backslashreplace"), other.encode())


def send(writer: asyncio.StreamWriter, message: Message) -> None:
    writer.write(json.dumps(message).encode() + b"\n")


async def pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Bytes as they come, to the end."""
    try:
        while True:
            chunk = await reader.read(1 << 16)
            if not chunk:
                break
            writer.write(chunk)
            await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()
        else:  # TLS cannot end one direction alone
            writer.close()
    except OSError:
        writer.close()


def more_files() -> int:
    """Raises our limit of open files as far as we may and need, and returns it. What we start inherits it, and Ray needs it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES if hard == resource.RLIM_INFINITY else min(FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        return wanted
    return soft if soft != resource.RLIM_INFINITY else FILES


def add_token(head: bytes, secret: str) -> bytes:
    """The head of an HTTP request, with the token as its only credential, and alone on its connection. Raises ValueError
    for anything but a plain request: what we read as one header must be one header for the dashboard too."""
    first, *lines = head[: -len(b"\r\n\r\n")].split(b"\r\n")
    if not all(map(_HEADER.fullmatch, lines)):
        raise ValueError("not a request of HTTP/1")
    names = [line.partition(b":")[0].lower() for line in lines]
    upgrade = b"upgrade" in names
    kept = [line for name, line in zip(names, lines) if name not in _REPLACED]
    kept += [b"Authorization: Bearer " + secret.encode()] if secret else []
    return b"\r\n".join([first, *kept, b"Connection: %s" % (b"Upgrade" if upgrade else b"close"), b"", b""])


class Waiting:
    """Connections that have not proved themselves. There is room for so many; a new one takes the place of the oldest one
    of its address, or of all: a proof takes milliseconds, so those that are old have none to give."""

    def __init__(self, total: int = UNPROVED, per_address: int = UNPROVED_PER_ADDRESS) -> None:
        self.total, self.per_address = total, per_address
        self.open: Dict[asyncio.StreamWriter, str] = {}  # in the order in which they came
        self.refused, self.told_at = 0, float("-inf")

    def add(self, writer: asyncio.StreamWriter) -> None:
        address = str((writer.get_extra_info("peername") or ("",))[0])
        same_address = [one for one, other in self.open.items() if other == address]
        if len(same_address) >= self.per_address:
            self.close(same_address[0])
        elif len(self.open) >= self.total:
            self.close(next(iter(self.open)))
        self.open[writer] = address

    def close(self, writer: asyncio.StreamWriter) -> None:
        if self.open.pop(writer, None) is not None:
            self.count()
            writer.transport.abort()

    def count(self) -> None:
        """One line a minute says how many there were, whatever they sent."""
        self.refused += 1
        if time.monotonic() - self.told_at > LOG_EVERY_S:
            sys.stderr.write("the hub has closed %d connections without a valid proof\n" % self.refused)
            self.told_at = time.monotonic()


class Hub:
    """The head's side. `on_message(node, message)` gives the answer to each message of a worker (so that it knows that its
    head is alive), `on_lost(node)` is called when it is silent or its connection is gone."""

    def __init__(
        self,
        secret: str,
        on_message: Callable[[str, Message], Optional[Message]],
        on_lost: Callable[[str], None],
        silent_s: float = SILENT_S,
        token: str = "",
    ):
        self.secret, self.on_message, self.on_lost, self.silent_s = secret, on_message, on_lost, silent_s
        self.token = token  # of Ray; empty where the cluster has none
        self.dashboard = 0  # its port on loopback, once it is known
        self.writers: Dict[str, asyncio.StreamWriter] = {}
        self.waiting = Waiting()
        self.server: Optional[asyncio.AbstractServer] = None

    async def start(self, host: str, port: int, context: Optional[ssl.SSLContext] = None) -> int:
        """Listens, with TLS where there is a context. Returns the port, which the kernel chooses for 0."""
        limit = more_files()
        self.waiting.total = max(16, min(UNPROVED, limit // 4))
        self.server = await asyncio.start_server(
            self._serve, host, port, limit=1 << 16, backlog=1024, ssl=context
        )
        return int(self.server.sockets[0].getsockname()[1])

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Whatever a stranger sends ends the connection, and nothing else."""
        node = None
        self.waiting.add(writer)
        try:
            name, is_client = await self._prove(reader, writer)
            if is_client:
                return await self._relay(reader, writer)
            old = self.writers.pop(name, None)
            if old:
                old.close()
            node, self.writers[name] = name, writer
            while True:
                send(writer, self.on_message(name, await receive(reader, self.silent_s)) or {})
        except (
            OSError,
            EOFError,
            ValueError,
            asyncio.TimeoutError,
            asyncio.LimitOverrunError,
            asyncio.CancelledError,
        ):
            pass
        finally:
            if self.waiting.open.pop(writer, None) is not None:
                self.waiting.count()
            writer.close()
            if node is not None and self.writers.get(node) is writer:
                del self.writers[node]
                self.on_lost(node)

    async def _prove(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Tuple[str, bool]:
        """(name, whether it is a client) of whoever proves that they know the secret. Raises ValueError for others."""
        challenge = secrets.token_hex(16)
        send(writer, {"challenge": challenge})
        hello = await receive(reader, PROVE_S)
        name, side = str(hello.get("node")), "client" if hello.get("relay") else "worker"
        if not same(hello.get("proof"), proof(self.secret, side, challenge, name)):
            raise ValueError("no proof")
        self.waiting.open.pop(writer, None)
        send(writer, {"proof": proof(self.secret, "head", str(hello.get("challenge")), name)})
        return name, side == "client"

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Passes one HTTP request to the dashboard, which listens on this host's loopback only, and adds the token. The
        token goes to a process of this user, or nowhere."""
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), self.silent_s)
        if not self.dashboard or not ports.is_ours(self.dashboard):
            writer.write(b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            return
        request = add_token(head, self.token)
        there, back = await asyncio.open_connection("127.0.0.1", self.dashboard)
        try:
            back.write(request)
            await asyncio.gather(pipe(reader, back), pipe(there, writer))
        finally:
            back.close()

    def tell(self, message: Message, node: Optional[str] = None) -> None:
        for name, writer in list(self.writers.items()):
            if node in (None, name):
                send(writer, message)

    async def close(self, seconds: float) -> None:
        """Waits until every worker has hung up, for so long at most."""
        end = asyncio.get_running_loop().time() + seconds
        while self.writers and asyncio.get_running_loop().time() < end:
            await asyncio.sleep(0.02)
        if self.server:
            self.server.close()
        for writer in self.writers.values():
            writer.close()


class Link:
    """A worker's side: keeps one connection to the hub, comes back when it breaks.

    `find()` gives the hub's (host, port), or None while nobody knows it. `status()` is what we say of ourselves."""

    def __init__(
        self,
        secret: str,
        node: str,
        find: Callable[[], Optional[Message]],
        status: Callable[[], Message],
        on_message: Callable[[Message], Awaitable[None]],
        silent_s: float = SILENT_S,
        context: Optional[ssl.SSLContext] = None,
    ):
        self.context = context
        self.secret, self.node, self.silent_s = secret, node, silent_s
        self.find, self.status, self.on_message = find, status, on_message
        self.writer: Optional[asyncio.StreamWriter] = None
        self.met = False  # whether there has been a connection to this head
        self.error = ""  # why there is no connection
        self.heard = asyncio.get_running_loop().time()  # when the head was last there

    def say(self) -> None:
        if self.writer is not None:
            send(self.writer, self.status())

    async def run(self) -> None:
        while True:
            try:
                await self._talk()
            except (OSError, ValueError, asyncio.TimeoutError, asyncio.LimitOverrunError) as error:
                self.error = str(error) or type(error).__name__
            self.writer = None
            await asyncio.sleep(0.25)

    async def _talk(self) -> None:
        head = self.find()
        if head is None:
            return
        dial = asyncio.open_connection(
            head["ip"], head["hub"], ssl=self.context, server_hostname=head["ip"] if self.context else None
        )
        reader, writer = await asyncio.wait_for(dial, 5)
        beats = None
        try:
            mine = secrets.token_hex(16)
            challenge = str((await receive(reader, 10)).get("challenge"))
            answer = proof(self.secret, "worker", challenge, self.node)
            send(writer, {"node": self.node, "proof": answer, "challenge": mine})
            theirs = str((await receive(reader, 10)).get("proof"))
            if not same(theirs, proof(self.secret, "head", mine, self.node)):
                raise ConnectionError("another cluster answers there")
            self.writer, self.met = writer, True
            beats = asyncio.ensure_future(self._beat())
            while True:
                self.heard = asyncio.get_running_loop().time()
                await self.on_message(await receive(reader, self.silent_s))
        finally:
            if beats:
                beats.cancel()
            writer.close()

    async def _beat(self) -> None:
        while True:
            self.say()
            await asyncio.sleep(self.silent_s / BEATS)
