"""Free ports for one Ray node, all from one block, kept from other agents and other programs until Ray has them.

A block is held in two ways. Against other agents (any user's) by an abstract socket a 16 ports, which the kernel frees
when we die. Against other programs by binding each port without listening, with SO_REUSEADDR: Ray, which sets that
option too, can bind beside us, a program that does not can't.
"""

from __future__ import annotations

import os
import random
import re
import socket
import sys
import tempfile
from typing import Dict, Iterable, List, Optional, Set, Tuple

# Ray's own services, then ours (the hub)
SERVICES = (
    "gcs", "client", "dashboard", "node_manager", "object_manager", "runtime_env_agent", "agent_http", "agent_grpc",
    "metrics", "autoscaler_metrics", "dashboard_metrics", "hub",
)  # fmt: skip
UNIT = 16
DEFAULT = (20000, 32767)
_RANGE = "/proc/sys/net/ipv4/ip_local_port_range"


class NoPorts(Exception):
    """No block is free; the text says where we looked."""


class Block:
    """ports: name -> number. workers: (first, last) for Ray's workers, or None: the kernel chooses for them."""

    def __init__(self, first: int, size: int, with_workers: bool) -> None:
        self.ports = {name: first + i for i, name in enumerate(SERVICES)}
        self.workers = (first + UNIT, first + size - 1) if with_workers else None
        self._locks: List[socket.socket] = []
        self._held: List[socket.socket] = []
        try:
            for unit in range(first // UNIT, (first + size - 1) // UNIT + 1):
                self._locks.append(_lock(unit))
            for port in self.ports.values():
                self._held.append(_bind(port))
        except OSError:
            self.close()
            raise

    def hand_over(self) -> None:
        """Ray has bound its ports: stop holding them. Other agents still keep out of the block."""
        while self._held:
            self._held.pop().close()

    def close(self) -> None:
        self.hand_over()
        while self._locks:
            self._locks.pop().close()


def take(window: Optional[Tuple[int, int]] = None) -> Block:
    """A free block: of 16 ports anywhere below the kernel's own range, or within the window that the user named,
    where Ray's workers must find theirs too."""
    low, high = window or _default()
    size = UNIT if window is None else min(512, high - low + 1)
    # but for the first, each begins where a unit does: two that touch must not want the same lock
    starts = [low, *range(-(-(low + size) // UNIT) * UNIT, high - size + 2, size)]
    first = 0 if window else random.randrange(len(starts))  # agents that start together begin apart
    for start in starts[first:] + starts[:first]:
        try:
            return Block(start, size, with_workers=window is not None)
        except OSError:
            continue
    raise NoPorts("no block of %d free ports between %d and %d" % (size, low, high))


def listeners(wanted: Iterable[int]) -> Dict[int, Set[str]]:
    """port -> the inodes of the sockets, anybody's, that listen on it. Empty where there is no /proc."""
    ports = frozenset(wanted)
    found: Dict[int, Set[str]] = {}
    for path in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            with open(path) as stream:
                rows = [line.split() for line in stream]
        except OSError:
            continue
        for row in rows:
            if row[3] == "0A" and int(row[1].rpartition(":")[2], 16) in ports:
                found.setdefault(int(row[1].rpartition(":")[2], 16), set()).add(row[9])
    return found


def _default() -> Tuple[int, int]:
    low, high = DEFAULT
    try:
        with open(_RANGE) as stream:
            ephemeral = int(re.split(r"\s+", stream.read().strip())[0])
    except (OSError, ValueError):
        return low, high
    # a port of the kernel's own range may be taken by anybody's outgoing connection at any moment
    return (low, ephemeral - 1) if low + 64 * UNIT < ephemeral <= high else (low, high)


def _lock(unit: int) -> socket.socket:
    lock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        if sys.platform == "linux":
            lock.bind("\0heliostat-ports-%d" % unit)
        else:  # no abstract sockets: a plain one, whose stale file is replaced when nobody answers
            path = os.path.join(tempfile.gettempdir(), "heliostat-ports-%d" % unit)
            try:
                lock.connect(path)
            except OSError:
                if os.path.exists(path):
                    os.unlink(path)
                lock.bind(path)
            else:
                raise OSError("taken")
    except OSError:
        lock.close()
        raise
    return lock


def _bind(port: int) -> socket.socket:
    held = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("0.0.0.0", port))
    except OSError:
        held.close()
        raise
    return held


def as_json(block: Block) -> Dict[str, object]:
    return {**block.ports, "workers": list(block.workers) if block.workers else None}
