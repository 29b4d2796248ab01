"""The ports of one Ray node, and which user's process listens on a port.

By default every service binds port 0: the kernel chooses a free port, and no other program can take it before the service
does. With a port range (`network.ports`), a node takes a block of the range and holds it until Ray has bound it.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
import sys
from typing import Dict, Iterable, List, NamedTuple, Optional, Set, Tuple

# Ray's services, then the hub
SERVICES = (
    "gcs", "client", "dashboard", "node_manager", "object_manager", "runtime_env_agent", "agent_http", "agent_grpc",
    "metrics", "autoscaler_metrics", "dashboard_metrics", "hub",
)  # fmt: skip
# Ray connects to these with its token before they listen, so their ports must be unpredictable, also with a range
KERNEL_CHOOSES = ("runtime_env_agent", "agent_grpc")
UNIT = 16  # ports of a block that are not for workers
LOCK = UNIT - 1  # the agent listens on this port of its block, so that no other user's agent takes the block


class NoPorts(Exception):
    """No block of the range is free."""


class Block:
    """ports: name -> number, 0 if the kernel chooses. workers: (first, last) port for Ray's workers, or None."""

    def __init__(self, window: Optional[Tuple[int, int]] = None, with_client: bool = False) -> None:
        self.ports = dict.fromkeys(SERVICES, 0)
        self.workers: Optional[Tuple[int, int]] = None
        self._locks: List[socket.socket] = []
        self._held: Dict[int, socket.socket] = {}
        try:
            if window:
                first, last = window
                for unit in range(first // UNIT, last // UNIT + 1):
                    self._locks += _lock(unit)
                self._locks.append(_listen(first + LOCK))
                self.ports = {name: first + i for i, name in enumerate(SERVICES)}
                self.workers = (first + UNIT, last)
                self.ports.update(dict.fromkeys(KERNEL_CHOOSES, 0))
                for name, port in self.ports.items():
                    if port:
                        self._held[port] = _hold(port, name == "client")
            elif with_client:
                self.ports["client"] = self._hold_for_this_user()
        except OSError:
            self.close()
            raise

    def _hold_for_this_user(self) -> int:
        """A free port that only processes of this user can bind, if they set SO_REUSEPORT as gRPC's servers in Python do."""
        held = _bound(0)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)  # after bind(): no other holder shares it
        port = int(held.getsockname()[1])
        self._held[port] = held
        return port

    def seal(self, ports: Iterable[int]) -> None:
        """Ray listens on these ports. From now on no other process can bind them, also after Ray has ended."""
        for port in ports:
            if port in self._held:
                self._held[port].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
                self._held[port].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 0)

    def close(self) -> None:
        for held in [*self._held.values(), *self._locks]:
            held.close()
        self._held, self._locks = {}, []


def take(window: Optional[Tuple[int, int]] = None, with_client: bool = False) -> Block:
    """Ports that the kernel chooses, or a free block of the range. Raises NoPorts."""
    if window is None:
        return Block(None, with_client)
    low, high = window
    size = min(512, high - low + 1)
    # all but the first start at a unit, so that adjacent blocks do not need the same lock
    for start in (low, *range(-(-(low + size) // UNIT) * UNIT, high - size + 2, size)):
        try:
            return Block((start, start + size - 1))
        except OSError:
            continue
    raise NoPorts("no block of %d free ports between %d and %d" % (size, low, high))


class Listener(NamedTuple):
    inode: str
    uid: int


def listeners(wanted: Iterable[int]) -> Dict[int, Set[Listener]]:
    """port -> the sockets of all users that listen on it. Empty without /proc."""
    ports = frozenset(wanted)
    found: Dict[int, Set[Listener]] = {}
    for path in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            with open(path) as stream:
                rows = [line.split() for line in stream]
        except OSError:
            continue
        for row in rows:
            if row[3] == "0A" and int(row[1].rpartition(":")[2], 16) in ports:
                port = int(row[1].rpartition(":")[2], 16)
                found.setdefault(port, set()).add(Listener(row[9], int(row[7])))
    return found


def is_ours(port: int) -> bool:
    """Whether only processes of this user listen on the port. Checked before a secret is sent there."""
    if sys.platform != "linux":
        return True  # not known on this platform
    found = listeners([port]).get(port, set())
    return bool(found) and all(listener.uid == os.getuid() for listener in found)


def _bound(port: int) -> socket.socket:
    """A socket that owns the port on all IPv4 addresses, and on all IPv6 addresses if the host has IPv6."""
    try:
        bound = socket.socket(socket.AF_INET6, socket.SOCK_STREAM)
        bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        address: Tuple[str, int] = ("::", port)
    except OSError:
        bound, address = socket.socket(socket.AF_INET, socket.SOCK_STREAM), ("0.0.0.0", port)
    try:
        bound.bind(address)
    except OSError:
        bound.close()
        raise
    return bound


def _lock(unit: int) -> List[socket.socket]:
    """Lock these ports against other agents of this user. Raises OSError if one of them has the lock.

    Any user can take the name of an abstract socket: a name that another user has taken does not count."""
    if sys.platform != "linux":
        return []
    name = "\0heliostat-ports-%d" % unit
    lock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        lock.bind(name)
        lock.listen(128)
        return [lock]
    except OSError:
        lock.close()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(name)
        except BlockingIOError:
            pass  # its queue is full: a process listens
        except OSError:
            return []  # it does not listen, so it is not an agent's
        peer = probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    if struct.unpack("3i", peer)[1] in (os.getuid(), -1):
        raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
    return []


def _hold(port: int, only_this_user: bool = False) -> socket.socket:
    """Bind the port so that only a program that sets the same option can bind it, too.

    Ray's services set SO_REUSEADDR. gRPC in Python sets SO_REUSEPORT, which works among processes of one user only."""
    held = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT if only_this_user else socket.SO_REUSEADDR, 1)
        held.bind(("0.0.0.0", port))
    except OSError:
        held.close()
        raise
    return held


def _listen(port: int) -> socket.socket:
    held = _hold(port)
    try:
        held.listen(0)
    except OSError:
        held.close()
        raise
    return held
