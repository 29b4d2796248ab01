"""Processes that stand for containers: ports and addresses of their own, and an end that leaves nothing."""

from __future__ import annotations

import asyncio
import ctypes
import itertools
import os
import random
import signal
import socket
import time
from collections.abc import Iterable, Iterator

SERVICES = (
    "gcs", "client", "dashboard", "node_manager", "object_manager", "runtime_env_agent", "agent_http", "agent_grpc",
    "metrics", "autoscaler_metrics", "dashboard_metrics",
)  # fmt: skip
UNIT = 16


def addresses() -> Iterator[str]:
    """Loopback addresses, one a Pod. Not 127.0.0.1: Ray would replace it by the machine's own."""
    start = random.randrange(2, 250)
    for number in itertools.count(start):
        yield f"127.0.0.{2 + number % 250}"


class Block:
    """Free ports, kept from other programs that take theirs in the same way."""

    def __init__(self, unit: int) -> None:
        self.ports = {name: unit * UNIT + i for i, name in enumerate(SERVICES)}
        self._lock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            self._lock.bind(f"\0heliostat-ports-{unit}")
            for port in self.ports.values():
                with socket.socket() as probe:
                    probe.bind(("0.0.0.0", port))
        except OSError:
            self._lock.close()
            raise

    def close(self) -> None:
        self._lock.close()


def take_ports() -> Block:
    units = list(range(20000 // UNIT + 1, 32768 // UNIT - 1))
    random.shuffle(units)
    for unit in units:
        try:
            return Block(unit)
        except OSError:
            continue
    raise OSError("no free ports between 20000 and 32767")


_LIBC = ctypes.CDLL(None, use_errno=True)


def adopt_orphans() -> None:
    """What loses its parent below us becomes our child: nothing can slip away."""
    _LIBC.prctl(36, 1, 0, 0, 0)


def die_with_parent() -> None:
    """In a child after fork: even when we are killed with no time to end anything."""
    _LIBC.prctl(1, signal.SIGTERM, 0, 0, 0)


def _table() -> dict[int, tuple[int, str]]:
    """pid -> (parent, state letter)"""
    table = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as stream:
                    fields = stream.read().rpartition(b")")[2].split()
                table[int(name)] = (int(fields[1]), fields[0].decode())
            except (OSError, IndexError, ValueError):
                pass
    return table


def family(roots: Iterable[int]) -> set[int]:
    """The roots and all below them that live."""
    table, found, waiting = _table(), set(), list(roots)
    below: dict[int, list[int]] = {}
    for pid, (parent, _) in table.items():
        below.setdefault(parent, []).append(pid)
    while waiting:
        pid = waiting.pop()
        if pid in table and pid not in found:
            found.add(pid)
            waiting.extend(below.get(pid, []))
    return {pid for pid in found if table[pid][1] != "Z"}


def marked(mark: str) -> set[int]:
    """Who has NAME=VALUE in the environment, us excepted."""
    wanted, found = mark.encode(), set()
    for name in os.listdir("/proc"):
        try:
            if name.isdigit() and int(name) != os.getpid():
                with open(f"/proc/{name}/environ", "rb") as stream:
                    if wanted in stream.read().split(b"\0"):
                        found.add(int(name))
        except OSError:
            pass
    return found


def send(pids: Iterable[int], number: int) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except (ProcessLookupError, PermissionError):
            pass


async def end(root: int, mark: str, grace: float) -> None:
    await end_many([root], mark, grace)


async def end_many(roots: list[int], mark: str, grace: float) -> None:
    """SIGTERM to the first process of each, as kubelet does; after the grace SIGKILL to all that is left of them."""
    known = family(roots) | marked(mark)  # a worker of Ray's has no environment to be known by
    if grace > 0 and known:
        send(roots, signal.SIGTERM)
        send([pid for pid, (parent, _) in _table().items() if parent in roots], signal.SIGTERM)
        deadline = time.monotonic() + grace
        while time.monotonic() < deadline and family(roots):
            known |= family(roots)
            await asyncio.sleep(0.05)
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        known = (known & set(_living())) | family([pid for pid in known if pid in _living()]) | marked(mark)
        if not known:
            return
        send(known, signal.SIGKILL)
        await asyncio.sleep(0.05)


def _living() -> set[int]:
    return {pid for pid, (_, state) in _table().items() if state != "Z"}


def reap(but: set[int]) -> None:
    """Orphans that have ended. Those that somebody waits for by name are left to them."""
    for pid, (parent, state) in _table().items():
        if parent == os.getpid() and state == "Z" and pid not in but:
            try:
                os.waitpid(pid, os.WNOHANG)
            except ChildProcessError:
                pass


def end_children() -> None:
    """The last word: whatever still is below us ends now."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        left = family([os.getpid()]) - {os.getpid()}
        if not left:
            return
        send(left, signal.SIGKILL)
        time.sleep(0.05)
