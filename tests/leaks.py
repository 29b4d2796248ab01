"""What a cluster of ours can leave behind on this machine: processes, temp folders, records.

Several test runs may share a machine. Each run puts its own tag into the environment of what it starts; a process
with another run's tag, and a folder that such a process uses, is not ours to report or to kill.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path

TAG = "HS_TEST_RUN"
RUN = f"{os.getpid()}.{time.time_ns()}"
PROC = Path("/proc")
TEMP = Path("/tmp")
FOLDERS = "hs-*"


@dataclass(frozen=True)
class Process:
    pid: int
    start: str  # the kernel's start time: with the pid it names one process for good
    command: str = field(compare=False)

    def __str__(self) -> str:
        return f"process {self.pid}: {self.command}"


@dataclass(frozen=True)
class Found:
    processes: frozenset[Process]
    folders: frozenset[Path]

    def since(self, before: Found) -> Found:
        return Found(self.processes - before.processes, self.folders - before.folders)

    def lines(self) -> list[str]:
        processes = sorted(self.processes, key=lambda process: process.pid)
        return [str(process) for process in processes] + [f"folder {path}" for path in sorted(self.folders)]


def look(temp: Path = TEMP) -> Found:
    """Our agents, what they started, and their folders in `temp`, as they are now. Empty where there is no /proc."""
    ours: set[Process] = set()
    workers: list[tuple[Process, set[Path]]] = []
    other_runs = ""
    for entry in PROC.glob("[0-9]*"):
        environ, command = _read(entry / "environ"), _read(entry / "cmdline")
        ours_at_all = "HELIOSTAT_NODE=" in environ or "KUBE_STANDIN_POD=" in environ or "agent.pyz" in command
        # whatever a test starts has this run's tag: with another, or with none, it is somebody else's cluster
        if f"{TAG}={RUN}\0" not in environ and (f"{TAG}=" in environ or ours_at_all):
            other_runs += f"{command}\n{environ}\n"
            continue
        process = Process(int(entry.name), _start(entry), command.replace("\0", " ").strip()[:200])
        if not process.start:
            continue  # it ended while we looked
        if command.startswith("ray::"):
            # Ray's workers overwrite their environ with their title, but write their logs in the temp folder.
            workers.append((process, _open_folders(entry, temp)))
        elif ours_at_all:
            ours.add(process)
    folders = {path for path in temp.glob(FOLDERS) if str(path) not in other_runs}
    ours |= {
        process for process, used in workers if used and any(str(path) not in other_runs for path in used)
    }
    return Found(frozenset(ours), frozenset(folders))


def records(home: Path) -> list[str]:
    """The clusters that are still on record in a HELIOSTAT_HOME."""
    clusters = home / "clusters"
    return [f"record {path}" for path in sorted(clusters.iterdir())] if clusters.is_dir() else []


def settle(before: Found, home: Path, seconds: float = 20.0, temp: Path = TEMP) -> tuple[Found, list[str]]:
    """What appeared after `before` and is still there when nothing is left or the time is over, and it in words."""
    deadline = time.monotonic() + seconds
    while True:
        left = look(temp).since(before)
        lines = left.lines() + records(home)
        if not lines or time.monotonic() > deadline:
            return left, lines
        time.sleep(0.25)


def kill(found: Found, seconds: float = 5.0) -> None:
    """Kills exactly these processes and waits until they are gone. Folders stay: they hold the logs."""
    for process in found.processes:
        if _start(PROC / str(process.pid)) == process.start:  # not a later process with the same pid
            try:
                os.kill(process.pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                pass
    deadline = time.monotonic() + seconds
    while look().processes & found.processes and time.monotonic() < deadline:
        time.sleep(0.05)


def story(home: Path, lines: int = 40) -> str:
    """The ends of the events and logs under a HELIOSTAT_HOME, for the report of a test that failed."""
    parts = []
    for path in sorted([*home.rglob("events.jsonl"), *home.rglob("logs/**/*")]):
        if not path.is_file():
            continue
        tail = path.read_text(errors="replace").splitlines()[-lines:]
        parts.append("\n".join([f"==> {path.relative_to(home)}", *tail]))
    return "\n".join(parts)


def _read(path: Path) -> str:
    try:
        return path.read_bytes().decode(errors="replace")
    except OSError:  # it ended, or belongs to somebody else
        return ""


def _start(entry: Path) -> str:
    """The start time of a process, empty when it has ended. The name before it may hold spaces and brackets."""
    fields = _read(entry / "stat").rpartition(")")[2].split()
    return fields[19] if len(fields) > 19 and fields[0] not in "ZX" else ""


def _open_folders(entry: Path, temp: Path) -> set[Path]:
    """The folders of ours in `temp` in which a process has a file open."""
    found = set()
    try:
        for fd in (entry / "fd").iterdir():
            target = Path(os.readlink(fd))
            for parent in target.parents:
                if parent.parent == temp and parent.match(FOLDERS):
                    found.add(parent)
    except OSError:
        pass
    return found
