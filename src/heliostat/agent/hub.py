"""Messages between the agents of one cluster: the head's agent listens, each worker keeps one connection to it.

One JSON object per line. Both sides prove that they know the cluster's secret by an HMAC over the other's random
challenge; the secret is never sent. Workers send reports; the head answers, and sends requests such as `stop`. A client
that has proved itself is connected to the head's dashboard, and the head adds the token to its request.

Any process can open a connection. The number of connections without a proof is limited, and their content is not logged.
"""

from __future__ import annotations

import asyncio
import json
import re
import resource
import secrets
import ssl
import sys
import time
from typing import Any, Awaitable, Callable, Dict, Optional, Tuple, Union

from . import ports
from .proofs import is_equal, proof
from .protocol import HeadAddress, HeadMessage, ProofMessage, WorkerMessage

HEARTBEAT_TIMEOUT_S = 30.0  # mark a node LOST after this long without a message
HEARTBEATS = 6  # messages of a worker within that time
MAX_OPEN_FILES = 16384  # one connection per node; the usual limit is 1,024
PROVE_S = 10.0  # for the proof of a new connection
UNPROVED = 2048  # connections without a proof; for one more, the oldest of them is closed
UNPROVED_PER_ADDRESS = 512
LOG_EVERY_S = 60.0  # between two log lines about refused connections
_HEADER = re.compile(rb"[-!#$%&'*+.^_`|~0-9A-Za-z]+:[^\r\n\0]*")
_REPLACED = (b"authorization", b"x-ray-authorization", b"connection", b"keep-alive")
Message = Union[HeadMessage, ProofMessage, WorkerMessage]


async def receive(reader: asyncio.StreamReader, timeout: float) -> Any:
    """The next JSON object. Raises OSError, ValueError or asyncio.TimeoutError."""
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


def send(writer: asyncio.StreamWriter, message: Message) -> None:
    writer.write(json.dumps(message).encode() + b"\n")


async def pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy bytes until the end of the stream."""
    try:
        while True:
            chunk = await reader.read(1 << 16)
            if not chunk:
                break
            writer.write(chunk)
            await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()
        else:  # TLS cannot close one direction only
            writer.close()
    except OSError:
        writer.close()


def raise_file_limit() -> int:
    """Raise the limit of open files of this process and its children as far as allowed and needed. Returns the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(MAX_OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        return wanted
    return soft if soft != resource.RLIM_INFINITY else MAX_OPEN_FILES


def add_token(head: bytes, secret: str) -> bytes:
    """The head of an HTTP request with the token as its only credential and `Connection: close`.

    Raises ValueError for a malformed head: the hub and the dashboard must see the same headers."""
    first, *lines = head[: -len(b"\r\n\r\n")].split(b"\r\n")
    if not all(map(_HEADER.fullmatch, lines)):
        raise ValueError("not an HTTP/1 request")
    names = [line.partition(b":")[0].lower() for line in lines]
    upgrade = b"upgrade" in names
    kept = [line for name, line in zip(names, lines) if name not in _REPLACED]
    kept += [b"Authorization: Bearer " + secret.encode()] if secret else []
    return b"\r\n".join([first, *kept, b"Connection: %s" % (b"Upgrade" if upgrade else b"close"), b"", b""])


class UnprovedConnections:
    """A limited number of connections without a proof. Above the limit, the oldest one of the same address, or of all, is
    closed: a proof takes milliseconds, so old connections have none."""

    def __init__(self, total: int = UNPROVED, per_address: int = UNPROVED_PER_ADDRESS) -> None:
        self.total, self.per_address = total, per_address
        self.open: Dict[asyncio.StreamWriter, str] = {}  # connection -> address, oldest first
        self.refused, self.logged_at = 0, float("-inf")

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
        """Count a refused connection, and log the number at most once a minute."""
        self.refused += 1
        if time.monotonic() - self.logged_at > LOG_EVERY_S:
            sys.stderr.write("the hub has closed %d connections without a valid proof\n" % self.refused)
            self.logged_at = time.monotonic()


class Hub:
    """The head's side. `on_message(node, message)` returns the answer to each message of a worker, which shows that the head
    is alive; `on_lost(node)` is called when a worker is silent or its connection is closed."""

    def __init__(
        self,
        secret: str,
        on_message: Callable[[str, WorkerMessage], Optional[HeadMessage]],
        on_lost: Callable[[str], None],
        heartbeat_timeout_s: float = HEARTBEAT_TIMEOUT_S,
        token: str = "",
    ):
        self.secret, self.on_message, self.on_lost, self.heartbeat_timeout_s = (
            secret,
            on_message,
            on_lost,
            heartbeat_timeout_s,
        )
        self.token = token  # of Ray; "" without authentication
        self.dashboard = 0  # its port on loopback; 0: not known yet
        self.writers: Dict[str, asyncio.StreamWriter] = {}
        self.unproved = UnprovedConnections()
        self.server: Optional[asyncio.AbstractServer] = None

    async def start(self, host: str, port: int, context: Optional[ssl.SSLContext] = None) -> int:
        """Listen, with TLS if there is a context. Returns the port, which the kernel chooses for 0."""
        limit = raise_file_limit()
        self.unproved.total = max(16, min(UNPROVED, limit // 4))
        self.server = await asyncio.start_server(
            self._serve, host, port, limit=1 << 16, backlog=1024, ssl=context
        )
        return int(self.server.sockets[0].getsockname()[1])

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection. Invalid input closes it and has no other effect."""
        node = None
        self.unproved.add(writer)
        try:
            name, is_client = await self._prove(reader, writer)
            if is_client:
                return await self._relay(reader, writer)
            old = self.writers.pop(name, None)
            if old:
                old.close()
            node, self.writers[name] = name, writer
            while True:
                send(writer, self.on_message(name, await receive(reader, self.heartbeat_timeout_s)) or {})
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
            if self.unproved.open.pop(writer, None) is not None:
                self.unproved.count()
            writer.close()
            if node is not None and self.writers.get(node) is writer:
                del self.writers[node]
                self.on_lost(node)

    async def _prove(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Tuple[str, bool]:
        """(name, whether it is a client) of a peer that proves to know the secret. Raises ValueError otherwise."""
        challenge = secrets.token_hex(16)
        send(writer, {"challenge": challenge})
        hello = await receive(reader, PROVE_S)
        name, side = str(hello.get("node")), "client" if hello.get("relay") else "worker"
        if not is_equal(hello.get("proof"), proof(self.secret, side, challenge, name)):
            raise ValueError("no proof")
        self.unproved.open.pop(writer, None)
        send(writer, {"proof": proof(self.secret, "head", str(hello.get("challenge")), name)})
        return name, side == "client"

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward one HTTP request to the dashboard on this host's loopback, and add the token. The token is sent to a process
        of this user only."""
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), self.heartbeat_timeout_s)
        if not self.dashboard or not ports.is_ours(self.dashboard):
            writer.write(b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            return
        request = add_token(head, self.token)
        from_dashboard, to_dashboard = await asyncio.open_connection("127.0.0.1", self.dashboard)
        try:
            to_dashboard.write(request)
            await asyncio.gather(pipe(reader, to_dashboard), pipe(from_dashboard, writer))
        finally:
            to_dashboard.close()

    def send(self, message: HeadMessage, node: Optional[str] = None) -> None:
        """Send to this worker, or to all."""
        for name, writer in list(self.writers.items()):
            if node in (None, name):
                send(writer, message)

    async def close(self, seconds: float) -> None:
        """Wait until every worker has disconnected, at most this long; then close."""
        end = asyncio.get_running_loop().time() + seconds
        while self.writers and asyncio.get_running_loop().time() < end:
            await asyncio.sleep(0.02)
        if self.server:
            self.server.close()
        for writer in self.writers.values():
            writer.close()


class HubClient:
    """A worker's side: keeps one connection to the hub and reconnects when it breaks.

    `find_head()` returns the head's address, or None while it is unknown. `report()` returns the message of a heartbeat."""

    def __init__(
        self,
        secret: str,
        node: str,
        find_head: Callable[[], Optional[HeadAddress]],
        report: Callable[[], WorkerMessage],
        on_message: Callable[[HeadMessage], Awaitable[None]],
        heartbeat_timeout_s: float = HEARTBEAT_TIMEOUT_S,
        context: Optional[ssl.SSLContext] = None,
    ):
        self.context = context
        self.secret, self.node, self.heartbeat_timeout_s = secret, node, heartbeat_timeout_s
        self.find_head, self.report, self.on_message = find_head, report, on_message
        self.writer: Optional[asyncio.StreamWriter] = None
        self.was_connected = False
        self.error = ""  # why the last connection failed
        self.last_contact = asyncio.get_running_loop().time()

    def send_report(self) -> None:
        if self.writer is not None:
            send(self.writer, self.report())

    async def run(self) -> None:
        while True:
            try:
                await self._connect()
            except (OSError, ValueError, asyncio.TimeoutError, asyncio.LimitOverrunError) as error:
                self.error = str(error) or type(error).__name__
            self.writer = None
            await asyncio.sleep(0.25)

    async def _connect(self) -> None:
        head = self.find_head()
        if head is None:
            return
        connect = asyncio.open_connection(
            head["ip"], head["hub"], ssl=self.context, server_hostname=head["ip"] if self.context else None
        )
        reader, writer = await asyncio.wait_for(connect, 5)
        heartbeats = None
        try:
            own_challenge = secrets.token_hex(16)
            challenge = str((await receive(reader, 10)).get("challenge"))
            answer = proof(self.secret, "worker", challenge, self.node)
            send(writer, {"node": self.node, "proof": answer, "challenge": own_challenge})
            head_proof = str((await receive(reader, 10)).get("proof"))
            if not is_equal(head_proof, proof(self.secret, "head", own_challenge, self.node)):
                raise ConnectionError("another cluster answers at this address")
            self.writer, self.was_connected = writer, True
            heartbeats = asyncio.ensure_future(self._send_heartbeats())
            while True:
                self.last_contact = asyncio.get_running_loop().time()
                await self.on_message(await receive(reader, self.heartbeat_timeout_s))
        finally:
            if heartbeats:
                heartbeats.cancel()
            writer.close()

    async def _send_heartbeats(self) -> None:
        while True:
            self.send_report()
            await asyncio.sleep(self.heartbeat_timeout_s / HEARTBEATS)
