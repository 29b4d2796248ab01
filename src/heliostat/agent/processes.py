"""Finds the processes of a node, and ends exactly those."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from typing import Dict, Iterable, List, Optional, Set, Tuple

from .protocol import StopReason

MARK = "HELIOSTAT_NODE"  # in the environment of every process of a node: finds daemons that left its process tree
# signal_table.py lists who sends them
STOP_SIGNALS = {
    signal.SIGTERM: (StopReason.REQUESTED, "stop requested"),
    signal.SIGINT: (StopReason.INTERRUPTED, "interrupted"),
    signal.SIGHUP: (StopReason.HANGUP, "hang-up"),
}
FORWARDED = (*STOP_SIGNALS, signal.SIGUSR1)  # by the supervisor, to the agent
_PDEATHSIG, _SUBREAPER = 1, 36


def _table() -> Dict[int, Tuple[int, str, str]]:
    """pid -> (parent, state letter, start time) of every visible process."""
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
    """None if there is no such process. Raises OSError if that is unknown, as without a free file descriptor."""
    try:
        with open("/proc/%d/stat" % pid, "rb") as stream:
            # the name in brackets may contain any character, also a closing bracket
            fields = stream.read().rpartition(b")")[2].decode().split()
        return int(fields[1]), fields[0], fields[19]
    except (FileNotFoundError, ProcessLookupError, IndexError, ValueError):
        return None


def start_time(pid: int) -> Optional[str]:
    """The start time of the process, in units of this host; pid and start time identify a process. None if it has ended."""
    entry = _stat(pid) if sys.platform == "linux" else _table().get(pid)
    return entry[2] if entry and entry[1] != "Z" else None


def alive(pid: int, start: Optional[str]) -> bool:
    """Whether that process still runs; True if that is unknown, so that nothing is ended by mistake."""
    try:
        return start is not None and start_time(pid) == start
    except OSError:
        return True


def parent(pid: int) -> Optional[int]:
    """The parent's pid; None if there is no such process."""
    entry = _stat(pid) if sys.platform == "linux" else _table().get(pid)
    return entry[0] if entry else None


def children(pid: int) -> List[int]:
    return [child for child, (parent, _, _) in _table().items() if parent == pid]


def family(roots: Iterable[int]) -> List[int]:
    """The living processes among these roots and their descendants."""
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
    """Every living process of this user with this mark in its environment."""
    wanted = ("%s=%s" % (MARK, mark)).encode()
    found = []
    for name in os.listdir("/proc") if sys.platform == "linux" else []:
        try:
            if name.isdigit() and int(name) != os.getpid():
                with open("/proc/%s/environ" % name, "rb") as stream:
                    if wanted in stream.read().split(b"\0"):
                        found.append(int(name))
        except OSError:
            pass  # another user's, or ended
    return [pid for pid in found if start_time(pid)]


def sockets(pids: Iterable[int]) -> Set[str]:
    """The inodes of the open sockets of these processes. Raises OSError if they cannot be read."""
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
    """The first argument of the process's command line, or ""."""
    try:
        with open("/proc/%d/cmdline" % pid, "rb") as stream:
            return stream.read().split(b"\0")[0].decode("utf-8", "replace")
    except OSError:
        return ""


def end_all(roots: Iterable[int], mark: str, seconds: float = 10.0, exclude: Iterable[int] = ()) -> List[int]:
    """Kill these process trees and every process with the mark, until none is left. Returns the processes that remain.

    Kill the roots last: processes that are started meanwhile become their children and are found in the next round. Do
    not wait for that longer than a tenth of the time, because a root may be what starts them. Kill children before
    parents, so that srun does not kill the agents on other hosts before they clean up."""
    roots, excluded = list(roots), {os.getpid(), *exclude}
    deadline = time.monotonic() + seconds
    while True:
        found = dict.fromkeys([*reversed(family(roots)), *marked(mark)])
        left = [pid for pid in found if pid not in excluded]
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
    """Make this process the subreaper: descendants whose parent dies become its children."""
    _prctl(_SUBREAPER, 1)


def die_with_parent(number: int = signal.SIGTERM) -> None:
    """In a child after fork: let the kernel send this signal when the parent dies."""
    _prctl(_PDEATHSIG, number)
