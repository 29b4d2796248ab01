"""Which processes are ours, and ending exactly those."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from typing import Dict, Iterable, List, Optional, Set, Tuple

MARK = "HELIOSTAT_NODE"  # in the environment of every process of a node: finds what left its family
ENDINGS = {signal.SIGTERM: "told to stop", signal.SIGINT: "interrupted", signal.SIGHUP: "hang-up"}
SIGNALS = (*ENDINGS, signal.SIGUSR1)  # the last is a scheduler's word that the time limit is near
_PDEATHSIG, _SUBREAPER = 1, 36


def _table() -> Dict[int, Tuple[int, str, str]]:
    """pid -> (parent, state letter, start time) of every process that can be seen."""
    table: Dict[int, Tuple[int, str, str]] = {}
    if sys.platform != "linux":
        listing = subprocess.run(
            ["ps", "-axo", "pid=,ppid=,stat=,lstart="], stdout=subprocess.PIPE, timeout=10
        )
        for line in listing.stdout.decode("utf-8", "replace").splitlines():
            pid, parent, state, start = line.split(None, 3)
            table[int(pid)] = (int(parent), state[0], start)
        return table
    for name in os.listdir("/proc"):
        entry = _stat(int(name)) if name.isdigit() else None
        if entry:
            table[int(name)] = entry
    return table


def _stat(pid: int) -> Optional[Tuple[int, str, str]]:
    """None: there is no such process. Raises OSError where that cannot be known, as without a free file descriptor."""
    try:
        with open("/proc/%d/stat" % pid, "rb") as stream:
            # the name in brackets may hold anything, a closing bracket too
            fields = stream.read().rpartition(b")")[2].decode().split()
        return int(fields[1]), fields[0], fields[19]
    except (FileNotFoundError, ProcessLookupError, IndexError, ValueError):
        return None


def start_time(pid: int) -> Optional[str]:
    """When the process started, in words of this machine; with the pid it names one process for ever. None: gone."""
    entry = _stat(pid) if sys.platform == "linux" else _table().get(pid)
    return entry[2] if entry and entry[1] != "Z" else None


def alive(pid: int, start: Optional[str]) -> bool:
    """Whether that process still runs. Where it cannot be known, it does: nothing is ended by mistake."""
    try:
        return start is not None and start_time(pid) == start
    except OSError:
        return True


def parent(pid: int) -> Optional[int]:
    """None: there is no such process."""
    entry = _stat(pid) if sys.platform == "linux" else _table().get(pid)
    return entry[0] if entry else None


def children(pid: int) -> List[int]:
    return [child for child, (parent, _, _) in _table().items() if parent == pid]


def family(roots: Iterable[int]) -> List[int]:
    """Every living descendant of these processes, and the roots themselves where they live."""
    table = _table()
    below: Dict[int, List[int]] = {}
    for pid, (parent, _, _) in table.items():
        below.setdefault(parent, []).append(pid)
    found: List[int] = []
    waiting = list(roots)
    while waiting:
        pid = waiting.pop()
        if pid in table and pid not in found:
            found.append(pid)
            waiting.extend(below.get(pid, []))
    return [pid for pid in found if table[pid][1] != "Z"]


def marked(mark: str) -> List[int]:
    """Every living process of this user whose environment has our mark."""
    wanted = ("%s=%s" % (MARK, mark)).encode()
    found = []
    for name in os.listdir("/proc") if sys.platform == "linux" else []:
        try:
            if name.isdigit() and int(name) != os.getpid():
                with open("/proc/%s/environ" % name, "rb") as stream:
                    if wanted in stream.read().split(b"\0"):
                        found.append(int(name))
        except OSError:
            pass  # not ours, or gone
    return [pid for pid in found if start_time(pid)]


def sockets(pids: Iterable[int]) -> Set[str]:
    """The inodes of the sockets that these processes have open. Raises OSError where that cannot be known."""
    found = set()
    for pid in pids:
        try:
            for name in os.listdir("/proc/%d/fd" % pid):
                link = os.readlink("/proc/%d/fd/%s" % (pid, name))
                if link.startswith("socket:["):
                    found.add(link[8:-1])
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            pass  # it has ended
    return found


def send(pids: Iterable[int], number: int) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except (ProcessLookupError, PermissionError):
            pass


def executable(pid: int) -> str:
    """The first word of the process's command line, or nothing."""
    try:
        with open("/proc/%d/cmdline" % pid, "rb") as stream:
            return stream.read().split(b"\0")[0].decode("utf-8", "replace")
    except OSError:
        return ""


def end_all(roots: Iterable[int], mark: str, seconds: float = 10.0, but: Iterable[int] = ()) -> List[int]:
    """SIGKILL to these families and to whatever carries the mark, until none is left. Returns what would not go.

    The roots go last: what is born in this moment comes to them, and is found in the next round. But not for ever:
    a root may itself be the one that goes on starting others. Children go before their parents: srun has one that waits
    for its death, and would have the agents on the other hosts killed before they have cleaned up."""
    roots, spared = list(roots), {os.getpid(), *but}
    deadline = time.monotonic() + seconds
    while True:
        found = dict.fromkeys([*reversed(family(roots)), *marked(mark)])
        left = [pid for pid in found if pid not in spared]
        if not left or time.monotonic() > deadline:
            return left
        below = [pid for pid in left if pid not in roots]
        send(below if below and time.monotonic() < deadline - 0.9 * seconds else left, signal.SIGKILL)
        reap()
        time.sleep(0.02)


def reap() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def adopt_orphans() -> None:
    """From now on, descendants whose parent dies become our children, so that none can slip away."""
    _prctl(_SUBREAPER, 1)


def die_with_parent(number: int = signal.SIGTERM) -> None:
    """In a child after fork: the kernel sends this signal when the parent dies, also when it is killed -9."""
    _prctl(_PDEATHSIG, number)
