"""`heliostat ARGS…` as far as it can be had here as on Windows: without what only Unix has, and paths written with `\\`.

The standard library and click have chosen their way when they were imported, so they come first. With CONTRACT_STUB the
agent is the fake of the contract suite.
"""

from __future__ import annotations

import asyncio
import concurrent.futures.thread
import getpass
import importlib.abc
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import webbrowser
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import click._termui_impl
import pydantic.dataclasses
import pydantic.main
import yaml

LOADED = (
    asyncio,
    concurrent.futures.thread,
    getpass,
    shutil,
    subprocess,
    tarfile,
    tempfile,
    webbrowser,
    click,
    pydantic,
    yaml,
)
MODULES = {"fcntl", "grp", "pty", "pwd", "resource", "syslog", "termios", "tty", "curses", "readline"}
# fmt: off
OF_OS = [
    "fork", "forkpty", "setsid", "getsid", "killpg", "getpgid", "getpgrp", "setpgid", "getuid", "geteuid", "getgid", "getegid",
    "getgroups", "setuid", "seteuid", "uname", "mkfifo", "mknod", "chown", "lchown", "fchown", "nice", "wait3", "wait4",
    "sched_getaffinity", "sysconf", "getloadavg", "statvfs", "ttyname", "openpty", "O_NONBLOCK", "O_CLOEXEC", "O_NOFOLLOW",
    "O_DIRECTORY",
]
OF_SIGNAL = [
    "SIGKILL", "SIGUSR1", "SIGUSR2", "SIGHUP", "SIGCONT", "SIGSTOP", "SIGCHLD", "SIGPIPE", "SIGALRM", "SIGQUIT", "SIGWINCH",
    "pthread_sigmask", "sigwait", "pause", "alarm", "setitimer",
]
# fmt: on

SHARED = {"heliostat.agent.protocol", "heliostat.agent.proofs"}  # the client uses them too


class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> None:
        if name.partition(".")[0] in MODULES or (name.startswith("heliostat.agent.") and name not in SHARED):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def leave_unix() -> None:
    # the standard library's own ways go on working
    kill, look = signal.SIGKILL, os.statvfs
    subprocess.Popen.kill = lambda self: self.send_signal(kill)  # type: ignore[method-assign]
    shutil.disk_usage = lambda path: SimpleNamespace(free=look(path).f_bavail * look(path).f_frsize)  # type: ignore
    for name in MODULES:
        sys.modules.pop(name, None)
    sys.meta_path.insert(0, Absent())
    for owner, names in ((os, OF_OS), (signal, OF_SIGNAL)):
        for name in names:
            if hasattr(owner, name):
                delattr(owner, name)
    del asyncio.AbstractEventLoop.add_signal_handler
    text, of = pathlib.PurePath.__str__, pathlib.PurePath

    def written(path: pathlib.PurePath) -> str:
        """A path that begins at the root is left alone: it must be found here."""
        return text(path) if path.is_absolute() else text(path).replace("/", "\\")

    of.__str__ = written  # type: ignore[method-assign, assignment]
    of.__fspath__ = of.as_posix = text  # type: ignore[method-assign, assignment]
    sys.platform = "win32"


if __name__ == "__main__":
    leave_unix()
    from heliostat.cli import app

    if stub := os.environ.get("CONTRACT_STUB"):
        from heliostat.cluster import planner

        planner.agent_archive = pathlib.Path(stub).read_bytes
    if sys.argv[1:2] == ["import"]:
        import importlib

        for module in sys.argv[2:]:
            importlib.import_module(module)
        print("imported", len(sys.argv[2:]))
    else:
        sys.exit(app.run(sys.argv[1:]))
