"""A home on a disk that is full, or that may only be read: clusters go on, and machines are given back."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from real.faults import Node, fake_ray, fill, past, refused, small_disk, tell_tale
from shared import PATIENCE_S, document, heliostat, until

pytestmark = [pytest.mark.needs_linux, pytest.mark.needs_tmpfs]


INODES = 300


@pytest.fixture(scope="module")
def venv(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(fake_ray(tmp_path_factory.mktemp("venv") / "v"))


@pytest.fixture
def disk(home: Path, no_leaks: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The HELIOSTAT_HOME of this test, on a disk of its own."""
    with small_disk(home / "disk", f"1M,nr_inodes={INODES}") as place:
        monkeypatch.setenv("HELIOSTAT_HOME", str(place))
        yield place
        tell_tale(place)


def left(disk: Path) -> int:
    room = os.statvfs(disk)
    return room.f_bavail * room.f_frsize


def test_full_before_it_begins(disk: Path, venv: str) -> None:
    ballast = fill(disk)
    assert left(disk) == 0
    for words in (["up", "--name", "lab", "--venv", venv], ["run", "--name", "lab", "--", "true"]):
        said = refused(heliostat(*words, code=None), 1)
        assert said["error"].startswith(f"could not write `{disk}/clusters/")
        assert said["cause"] == "No space left on device" and "HELIOSTAT_HOME" in said["hint"]
        assert not list((disk / "clusters").iterdir())
    assert document("ls", "--all")["clusters"] == []
    ballast.unlink()
    heliostat("up", "--name", "lab", "--venv", venv)
    heliostat("down", "lab")


@pytest.fixture
def lab(disk: Path, venv: str) -> dict[str, Node]:
    """A cluster of two nodes, on whose disk nothing can be written any more."""
    heliostat("up", "--name", "lab", "--nodes", "2", "--venv", venv)
    fill(disk)
    assert left(disk) == 0
    return {name: Node(disk, "lab", name) for name in ("head", "w1")}


def test_full_while_it_runs(disk: Path, lab: dict[str, Node]) -> None:
    """It goes on; looking works and tells the truth, though it cannot be written down; `down` works, and is told."""
    assert document("status", "lab")["state"] == "ready"
    os.kill(lab["w1"].agent, signal.SIGKILL)
    lab["w1"].gone()
    until(lambda: document("status", "lab")["state"] == "partial", "the truth")
    (listed,) = document("ls")["clusters"]
    assert (listed["name"], listed["state"]) == ("lab", "partial")
    done = heliostat("down", "lab")
    assert "`lab` is terminated: 2 nodes released" in done.stderr
    for node in lab.values():
        node.gone()
    (record,) = past(disk)
    assert (record["target"], record["reason"]) == ("down", "taken down")
    assert {node["state"] for node in record["nodes"].values()} <= {"GONE", "FAILED"}
    assert (disk / "ballast").exists()


def test_no_room_for_a_name(disk: Path, lab: dict[str, Node]) -> None:
    """Not even a lock can be made: the number of files is used up too. What the agents remove makes room for it."""
    with contextlib.suppress(OSError):
        for number in range(INODES):
            (disk / f"file-{number}").touch()
    assert os.statvfs(disk).f_ffree == 0
    assert document("status", "lab")["state"] == "ready"
    assert "`lab` is terminated: 2 nodes released" in heliostat("down", "lab").stderr
    for node in lab.values():
        node.gone()
    assert [record["reason"] for record in past(disk)] == ["taken down"]


SCRIPT = """
import contextlib, os, sys
print("result", flush=True)
with open(sys.argv[1], "ab", buffering=0) as ballast, contextlib.suppress(OSError):
    while True:
        ballast.write(b"x" * 4096)
os._exit(3)
"""


def test_a_script_that_fills_it(disk: Path, tmp_path: Path, venv: str) -> None:
    """Its output and its exit code are its own."""
    (tmp_path / "script.py").write_text(SCRIPT)
    done = heliostat(
        "run", "--name", "lab", "--venv", venv, tmp_path / "script.py", disk / "ballast", code=None
    )
    assert (done.returncode, done.stdout) == (3, "result\n"), done.stderr
    (disk / "ballast").unlink()
    (row,) = document("history")["history"]
    assert row["exit_code"] == 3


def read_only(disk: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs commands that see the disk as one that may only be read; the agents still see it as it was."""
    line = 'mount --bind "$0" "$0" && mount -o remount,bind,ro "$0" && exec "$@"'

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        argv = [
            "unshare",
            "-m",
            "--propagation",
            "private",
            "sh",
            "-c",
            line,
            str(disk),
            sys.executable,
            "-m",
        ]
        return subprocess.run(
            [*argv, "heliostat", *words],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            env=os.environ.copy(),
        )

    return run


def test_read_only_while_it_runs(disk: Path, venv: str) -> None:
    """Everything is stopped; that it could not be written down is told, and a later `down` does it."""
    heliostat("up", "--name", "lab", "--venv", venv)
    node = Node(disk, "lab", "head")
    run = read_only(disk)
    for words in (["status", "lab"], ["ls"], ["ls", "--all", "--json"], ["history"]):
        assert run(*words).returncode == 0, words
    said = refused(run("down", "lab"), 3)
    assert said["error"] == "`lab` is stopped, but its record could not be written"
    assert said["cause"] == "Read-only file system" and said["hint"].endswith("heliostat down lab")
    node.gone()
    assert "lab" in run("ls").stdout
    assert "`lab` is terminated: 1 node released" in heliostat("down", "lab").stderr
    assert past(disk)[0]["nodes"]["head"]["state"] == "GONE"
