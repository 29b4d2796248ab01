"""What another user of the host tries against files, sockets, processes and ports of a node. Standard library only.

Reads `{"paths": […], "pids": […], "places": [[address, port], …], "own": DIRECTORY}` from standard input, prints what succeeded.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import signal
import socket
import stat
import sys
from collections.abc import Callable
from typing import Any

PTRACE_ATTACH, PTRACE_SEIZE = 16, 0x4206
REFUSALS = {errno.EACCES, errno.EPERM, errno.ENOENT, errno.EXDEV, errno.ESRCH, errno.EISDIR}
PRIVATE = ("environ", "mem", "maps", "auxv", "io", "stack", "syscall", "wchan", "pagemap", "personality")
LIBC = ctypes.CDLL(None, use_errno=True)


def tried(name: str, act: Callable[[], Any], wins: list[str]) -> None:
    """Notes the name of what succeeded, and of what failed for another reason than rights."""
    try:
        if act() is not False:
            wins.append(name)
    except OSError as error:
        if error.errno not in REFUSALS:
            wins.append(f"{name}: {error}")


def connect(path: str) -> None:
    """Through a relative name, as a path of a socket has 107 characters at most."""
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
        with contextlib.closing(socket.socket(socket.AF_UNIX, kind)) as one:
            folder = os.open(os.path.dirname(path), os.O_PATH)
            try:
                one.connect(f"/proc/self/fd/{folder}/{os.path.basename(path)}")
            finally:
                os.close(folder)


def lock(path: str) -> None:
    fcntl.flock(os.open(path, os.O_RDONLY | os.O_NONBLOCK), fcntl.LOCK_EX | fcntl.LOCK_NB)


def on_path(path: str, own: str, wins: list[str]) -> None:
    target = os.path.join(own, "stolen")
    acts: dict[str, Callable[[], Any]] = {
        "read": lambda: os.open(path, os.O_RDONLY | os.O_NONBLOCK),
        "write": lambda: os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK),
        "list": lambda: os.listdir(path),
        "lock": lambda: lock(path),
        "connect": lambda: connect(path),
        "hard link": lambda: os.link(path, target, follow_symlinks=False),
        "rename": lambda: os.rename(path, target),
        "replace by a link": lambda: os.replace(decoy(own), path),
        "create below": lambda: os.close(os.open(f"{path}/planted", os.O_CREAT | os.O_WRONLY, 0o666)),
        "remove": lambda: os.rmdir(path) if stat.S_ISDIR(os.lstat(path).st_mode) else os.unlink(path),
        "chmod": lambda: os.chmod(path, 0o777),
    }
    for name, act in acts.items():
        tried(f"{name} {path}", act, wins)


def decoy(own: str) -> str:
    path = os.path.join(own, "decoy")
    with contextlib.suppress(FileExistsError):
        os.symlink("/etc/passwd", path)
    return path


def ptrace(request: int, pid: int) -> None:
    if LIBC.ptrace(request, pid, None, None) < 0:
        raise OSError(ctypes.get_errno(), "ptrace")


def on_process(pid: int, wins: list[str]) -> None:
    for name in PRIVATE:
        # some files can be opened by everybody, and then say nothing
        tried(f"read /proc/{pid}/{name}", lambda name=name: len(read(f"/proc/{pid}/{name}")) > 1, wins)  # type: ignore[misc]
    for name in ("fd", "map_files", "fdinfo"):
        tried(f"list /proc/{pid}/{name}", lambda name=name: os.listdir(f"/proc/{pid}/{name}"), wins)  # type: ignore[misc]
    for name in ("cwd", "root", "exe"):
        tried(f"follow /proc/{pid}/{name}", lambda name=name: os.readlink(f"/proc/{pid}/{name}"), wins)  # type: ignore[misc]
    for number in range(64):
        tried(
            f"open /proc/{pid}/fd/{number}",
            lambda number=number: os.open(f"/proc/{pid}/fd/{number}", os.O_RDONLY),
            wins,
        )  # type: ignore[misc]
    for number in (0, signal.SIGTERM, signal.SIGKILL, signal.SIGUSR1, signal.SIGCONT):
        tried(f"signal {number} to {pid}", lambda number=number: os.kill(pid, number), wins)  # type: ignore[misc]
    for request in (PTRACE_SEIZE, PTRACE_ATTACH):
        tried(f"ptrace {request} {pid}", lambda request=request: ptrace(request, pid), wins)  # type: ignore[misc]


def read(path: str) -> bytes:
    with open(path, "rb") as stream:
        return stream.read(64)


def listen(address: str, port: int, options: tuple[int, ...]) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with contextlib.closing(socket.socket(family)) as one:
        for option in options:
            one.setsockopt(socket.SOL_SOCKET, option, 1)
        try:
            one.bind((address, port))
            one.listen(1)
        except OSError:
            return False
    return True


def main() -> None:
    asked = json.load(sys.stdin)
    wins: list[str] = []
    for path in asked.get("paths", ()):
        on_path(path, asked["own"], wins)
    for pid in asked.get("pids", ()):
        on_process(pid, wins)
    for address, port in asked.get("places", ()):
        for options in (
            (),
            (socket.SO_REUSEADDR,),
            (socket.SO_REUSEPORT,),
            (socket.SO_REUSEADDR, socket.SO_REUSEPORT),
        ):
            if listen(address, port, options):
                wins.append(f"listen on {address}:{port} with {options}")
    print(json.dumps({"wins": wins, "uid": os.getuid()}))


if __name__ == "__main__":
    main()
