"""The processes that a benchmark starts: found by a mark in their environment and by descent, and nobody else's."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Iterable

MARK = "HELIOSTAT_BENCH"
LOOK_S = 0.02
_SUBREAPER = 36

Process = tuple[int, str]  # pid and the kernel's start time: together they name one process for good


def adopt_orphans() -> None:
    """Daemons that leave their family become our children: none can slip away, and we can reap them."""
    ctypes.CDLL(None, use_errno=True).prctl(_SUBREAPER, 1, 0, 0, 0)


def _stat(pid: int) -> tuple[int, str] | None:
    """(parent, start time) of a living process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stream:
            # the name in brackets may hold anything, a closing bracket too
            fields = stream.read().rpartition(b")")[2].decode().split()
    except OSError:
        return None
    return (int(fields[1]), fields[19]) if fields[0] not in "ZX" else None


def alive(process: Process) -> bool:
    found = _stat(process[0])
    return found is not None and found[1] == process[1]


def of_user(uid: int, name: str) -> list[int]:
    """Living processes of a user, by the name that the kernel has for them, in namespaces below ours too."""
    found = []
    for pid in (int(entry) for entry in os.listdir("/proc") if entry.isdigit()):
        with contextlib.suppress(OSError):
            if os.stat(f"/proc/{pid}").st_uid == uid and _stat(pid):
                with open(f"/proc/{pid}/comm") as stream:
                    found += [pid] if stream.read().strip() == name else []
    return found


def _cpu(pid: int) -> float:
    try:
        with open(f"/proc/{pid}/stat", "rb") as stream:
            fields = stream.read().rpartition(b")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def _is_marked(pid: int, words: bytes) -> bool:
    try:
        with open(f"/proc/{pid}/environ", "rb") as stream:
            return words in stream.read().split(b"\0")
    except OSError:
        return False


def _with_descendants(roots: Iterable[int], table: dict[int, tuple[int, str]]) -> set[Process]:
    below: dict[int, list[int]] = {}
    for pid, (parent, _) in table.items():
        below.setdefault(parent, []).append(pid)
    found: set[Process] = set()
    waiting = list(roots)
    while waiting:
        pid = waiting.pop()
        if pid in table and (pid, table[pid][1]) not in found:
            found.add((pid, table[pid][1]))
            waiting.extend(below.get(pid, []))
    return found


def _table() -> dict[int, tuple[int, str]]:
    entries = ((int(name), _stat(int(name))) for name in os.listdir("/proc") if name.isdigit())
    return {pid: entry for pid, entry in entries if entry}


class Family:
    """All processes with one mark, and all below them: Ray's workers overwrite their environment with their title.

    but: pids that carry the mark and do not count (the command that we started, which waits for the others).
    """

    def __init__(self, mark: str) -> None:
        self.mark = mark
        self.but: set[int] = set()
        self.known: set[Process] = set()

    def look(self) -> set[Process]:
        """Reads the whole of /proc, and remembers who was there."""
        table, words = _table(), f"{MARK}={self.mark}".encode()
        found = _with_descendants([pid for pid in table if _is_marked(pid, words)], table)
        self.known |= {process for process in found if process[0] not in self.but}
        return self.left()

    def left(self) -> set[Process]:
        """Who of the known lives. Cheap: what is measured must not be slowed by the looking."""
        self.known = {process for process in self.known if alive(process)}
        return self.known

    def cpu_seconds(self) -> float:
        """What they, and their children that have ended, have computed so far: a figure that load hardly moves."""
        return sum(_cpu(pid) for pid, _ in self.look())

    def gone_at(self, seconds: float = 120.0) -> float | None:
        """time.time() when the last of the family was gone; None: some are still there after so long."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            now = time.time()
            if not self.left() and not self.look():
                return now
            time.sleep(LOOK_S)
        return None

    def end(self, seconds: float = 15.0) -> set[Process]:
        """SIGKILL to exactly these, until none is left. Returns what would not go."""
        deadline = time.monotonic() + seconds
        while (left := self.look()) and time.monotonic() < deadline:
            for process in left:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(process[0], signal.SIGKILL)
            time.sleep(LOOK_S)
        return left


def reap_adopted(but: Iterable[int] = ()) -> None:
    """Takes the dead that we adopted out of the table. but: children that somebody here still waits for."""
    spared = set(but)
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) not in spared:
            with contextlib.suppress(OSError):
                with open(f"/proc/{name}/stat", "rb") as stream:
                    fields = stream.read().rpartition(b")")[2].split()
                if fields[0] == b"Z" and int(fields[1]) == os.getpid():
                    os.waitpid(int(name), os.WNOHANG)
