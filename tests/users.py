"""Other users of this computer, who can run what we run. Only root can make them."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import heliostat as package
import leaks
from shared import PATIENCE_S


@dataclass(frozen=True)
class User:
    """Another user of this computer. `before`: the words that make a command theirs."""

    name: str
    uid: int
    home: Path
    before: list[str]

    def words(self, *words: object, **env: object) -> list[str]:
        home = str(self.home)
        merged = {"HOME": home, "TMPDIR": home, "PATH": os.environ["PATH"], leaks.TAG: leaks.RUN, **env}
        return [*self.before, "env", "-i", *(f"{k}={v}" for k, v in merged.items()), *map(str, words)]

    def run(
        self, *words: object, cwd: Path | str = "/", input: str = "", **env: object
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.words(*words, **env), capture_output=True, text=True, timeout=PATIENCE_S, cwd=cwd, input=input,
            check=False,
        )  # fmt: skip


@contextlib.contextmanager
def make_user(role: str = "") -> Iterator[User]:
    """Makes a user, and takes every trace of it away again. role: part of the name."""
    name = f"hs{role}-{os.getpid()}"
    with tempfile.TemporaryDirectory(prefix="hn-", dir="/tmp") as folder:
        home = Path(folder) / "home"
        stage = Path(folder) / "stage"
        stage.mkdir()
        subprocess.run(["useradd", "--no-create-home", "--home-dir", str(home), name], check=True)
        try:
            home.mkdir(mode=0o700)
            shutil.chown(home, name, name)
            Path(folder).chmod(0o711)
            before = [*_in_sight(stage), "runuser", "-u", name, "--"]
            yield User(name, home.stat().st_uid, home, before)
        finally:
            subprocess.run(["userdel", name], check=True)


def _in_sight(stage: Path) -> list[str]:
    """The words before a command that needs the interpreter, its packages and ours, as somebody who is not root.

    Where these lie in a folder that is closed to others (a Python under /root), the command gets a view of the disk of
    its own, in which that folder is empty but for them. The view ends with the command; the disk is not touched."""
    source = Path(str(package.__file__)).parents[1]
    binary = Path(sys.executable).resolve().parents[1]
    needed = {Path(sys.prefix), Path(sys.base_prefix), binary, source}
    closed = {path: _closed_above(path) for path in needed}
    hidden = sorted(path for path, above in closed.items() if above)
    if not hidden:
        return []
    lines = ["set -e", shlex.join(["mount", "-t", "tmpfs", "tmpfs", str(stage)])]
    for number, path in enumerate(hidden):
        aside = stage / str(number)
        lines += [shlex.join(["mkdir", str(aside)]), shlex.join(["mount", "--bind", str(path), str(aside)])]
    for above in sorted({str(above) for above in closed.values() if above}):
        lines.append(shlex.join(["mount", "-t", "tmpfs", "-o", "mode=755", "tmpfs", above]))
    for number, path in enumerate(hidden):
        lines.append(shlex.join(["mkdir", "-p", str(path)]))
        lines.append(shlex.join(["mount", "--bind", str(stage / str(number)), str(path)]))
    script = "\n".join([*lines, 'exec "$@"'])
    return ["unshare", "--mount", "--propagation", "private", "bash", "-c", script, "bash"]


def _closed_above(path: Path) -> Path | None:
    """The first folder on the way to `path` that others may not enter."""
    above = [*reversed(path.parents), path]
    return next((folder for folder in above if not folder.stat().st_mode & stat.S_IXOTH), None)
