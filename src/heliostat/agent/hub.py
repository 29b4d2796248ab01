"""How the agents of one cluster speak: the head's agent listens, the others keep one connection to it.

A client that proves itself is joined to the head's dashboard. One JSON object a line. Both sides prove that they know the cluster's secret by an HMAC over the other's random
challenge; the secret itself never travels. Workers say what state they are in and that they live; the head says `stop`.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import resource
import secrets
from typing import Any, Awaitable, Callable, Dict, Optional

SILENT_S = 30.0  # so long without a word, and a node is lost
BEATS = 6  # a word that often in that time
FILES = 16384  # open at once, where the system lets us: a connection a node, and 1,024 is the usual limit
Message = Dict[str, Any]


def proof(secret: str, side: str, challenge: str, name: str) -> str:
    return hmac.new(
        secret.encode(), ("%s %s %s" % (side, challenge, name)).encode(), hashlib.sha256
    ).hexdigest()


async def receive(reader: asyncio.StreamReader, timeout: float) -> Message:
    line = await asyncio.wait_for(reader.readline(), timeout)
    if not line:
        raise ConnectionError("closed")
    message = json.loads(line)
    if not isinstance(message, dict):
        raise ValueError("not an object")
    return message


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
    except OSError:
        writer.close()


def more_files() -> None:
    """Raises our limit of open files as far as we may and need; what we start inherits it, and Ray wants it too."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES if hard == resource.RLIM_INFINITY else min(FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class Hub:
    """The head's side. `on_message(node, message)` gives the answer to each word of a worker (so that it knows that its
    head lives), `on_lost(node)` is called when it is silent or its connection is gone."""

    def __init__(
        self,
        secret: str,
        on_message: Callable[[str, Message], Optional[Message]],
        on_lost: Callable[[str], None],
        silent_s: float = SILENT_S,
        relay_port: int = 0,
    ):
        self.secret, self.on_message, self.on_lost, self.silent_s = secret, on_message, on_lost, silent_s
        self.relay_port = relay_port
        self.writers: Dict[str, asyncio.StreamWriter] = {}
        self.server: Optional[asyncio.AbstractServer] = None

    async def start(self, host: str, port: int) -> None:
        more_files()
        self.server = await asyncio.start_server(self._serve, host, port, limit=1 << 16, backlog=1024)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        node = None
        try:
            challenge = secrets.token_hex(16)
            send(writer, {"challenge": challenge})
            hello = await receive(reader, 10)
            name, side = str(hello.get("node")), "client" if hello.get("relay") else "worker"
            if not hmac.compare_digest(str(hello.get("proof")), proof(self.secret, side, challenge, name)):
                return
            send(writer, {"proof": proof(self.secret, "head", str(hello.get("challenge")), name)})
            if side == "client":
                return await self._relay(reader, writer)
            old = self.writers.pop(name, None)
            if old:
                old.close()
            node, self.writers[name] = name, writer
            while True:
                send(writer, self.on_message(name, await receive(reader, self.silent_s)) or {})
        except (OSError, ValueError, asyncio.TimeoutError, asyncio.LimitOverrunError, asyncio.CancelledError):
            pass
        finally:
            writer.close()
            if node is not None and self.writers.get(node) is writer:
                del self.writers[node]
                self.on_lost(node)

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Joins a client that may come in to the dashboard, which listens on this host's loopback only."""
        there, back = await asyncio.open_connection("127.0.0.1", self.relay_port)
        try:
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
    ):
        self.secret, self.node, self.silent_s = secret, node, silent_s
        self.find, self.status, self.on_message = find, status, on_message
        self.writer: Optional[asyncio.StreamWriter] = None
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
        reader, writer = await asyncio.wait_for(asyncio.open_connection(head["ip"], head["hub"]), 5)
        beats = None
        try:
            mine = secrets.token_hex(16)
            challenge = str((await receive(reader, 10)).get("challenge"))
            answer = proof(self.secret, "worker", challenge, self.node)
            send(writer, {"node": self.node, "proof": answer, "challenge": mine})
            theirs = str((await receive(reader, 10)).get("proof"))
            if not hmac.compare_digest(theirs, proof(self.secret, "head", mine, self.node)):
                raise ConnectionError("another cluster answers there")
            self.writer = writer
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
