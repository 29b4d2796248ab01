"""What tests with real clusters share: a home of their own, a look for leaks, the installed command, waiting.

Starting a cluster takes seconds, so the tests of a module share one where they can. Ray starts and ends workers as it
likes while a cluster lives, so such a module looks for leaks once, after its cluster is down: it has its own `home` and
`no_leaks`, with these here inside.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

import leaks

PATIENCE_S = 180.0  # for whatever must come; a machine that is slow is not wrong
COMMAND = str(Path(sys.executable).with_name("heliostat"))
T = TypeVar("T")


@contextlib.contextmanager
def private_home() -> Iterator[Path]:
    """As the `home` fixture, for as long as one likes. The person's own home (Ray keeps a token there), and the folder
    for temporary files (several test runs may share a machine) are private too."""
    with (
        tempfile.TemporaryDirectory(prefix="hh-", dir="/tmp", ignore_cleanup_errors=True) as home,
        tempfile.TemporaryDirectory(prefix="ht-", dir="/tmp", ignore_cleanup_errors=True) as temp,
        pytest.MonkeyPatch.context() as patch,
    ):
        for name in [*os.environ]:
            if name.startswith(("RAY_", "HELIOSTAT_")) or name in ("COLUMNS", "FORCE_COLOR"):
                patch.delenv(name)
        patch.setenv("HELIOSTAT_HOME", home)
        patch.setenv("HOME", temp)
        patch.setenv("TMPDIR", temp)
        patch.setenv(leaks.TAG, leaks.RUN)
        yield Path(home)


@contextlib.contextmanager
def nothing_left(home: Path) -> Iterator[None]:
    """As the `no_leaks` fixture, within a `private_home`."""
    temp = Path(os.environ["TMPDIR"])
    before = leaks.look(temp)
    yield
    left, lines = leaks.settle(before, home, temp=temp)
    if lines:
        story = leaks.story(home)
        leaks.kill(left)
        pytest.fail("left behind (processes are killed now):\n" + "\n".join([*lines, story]), pytrace=False)


def heliostat(
    *words: object, code: int | None = 0, cwd: Path | None = None, **env: str
) -> subprocess.CompletedProcess[str]:
    """Runs the installed command to its end, and fails unless it ends with `code` (None: any).

    Its output is as it was written: no line end is changed, and bytes that are not UTF-8 survive `encode`."""
    raw = subprocess.run(
        [COMMAND, *map(str, words)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=PATIENCE_S,
        cwd=cwd,
        env={**os.environ, **env},
    )
    out, err = (stream.decode("utf-8", "surrogateescape") for stream in (raw.stdout, raw.stderr))
    if code is not None and raw.returncode != code:
        pytest.fail(f"{raw.args} ended with {raw.returncode}, not {code}\n{out[-5000:]}\n{err[-5000:]}")
    return subprocess.CompletedProcess(raw.args, raw.returncode, out, err)


def document(*words: object, code: int = 0) -> dict[str, Any]:
    """What the command says with --json."""
    said = json.loads(heliostat(*words, "--json", code=code).stdout)
    assert said["schema"] == 2
    return dict(said)


def until(look: Callable[[], T], what: str) -> T:
    """The first true answer of `look`."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        found = look()
        if found:
            return found
        if time.monotonic() > deadline:
            pytest.fail(f"never came: {what}")
        time.sleep(0.05)


def driver_words(cluster: str, program: str | Path, *args: object) -> list[str]:
    """The words of a command that runs a Python file as a person would, who has said eval "$(heliostat env NAME)"."""
    line = 'set -e; eval "$("$0" env "$1")"; shift; exec "$@"'
    return ["bash", "-c", line, COMMAND, cluster, sys.executable, str(program), *map(str, args)]


def processes() -> dict[int, tuple[int, str]]:
    """pid -> (parent, command line) of everything that runs here. What has ended and is not yet buried does not run."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            state, parent = (entry / "stat").read_bytes().rpartition(b")")[2].split()[:2]
            words = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except (OSError, ValueError):
            continue  # it ended while we looked
        if state not in (b"Z", b"X"):
            found[int(entry.name)] = (int(parent), words)
    return found


def family(root: int) -> dict[int, str]:
    """pid -> command line of a process and of all below it."""
    table = processes()
    found = {root: table[root][1]} if root in table else {}
    while more := {pid for pid, (parent, _) in table.items() if parent in found} - found.keys():
        found.update({pid: table[pid][1] for pid in more})
    return found
