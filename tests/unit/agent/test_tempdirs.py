"""The private directory of a node: nobody else's, held while the node lives, removed when it is dead, and never before."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from heliostat.agent import tempdirs
from heliostat.agent.protocol import Refused

MARK = f"tempdirs-{os.getpid()}"
PACKAGE = str(Path(tempdirs.__file__).parents[1])
# another agent on this host; the first argument is where the agent's package is
OTHER = "import sys; sys.path.insert(0, sys.argv[1]); from agent import tempdirs; "


@pytest.fixture
def parent(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The directory for temporary files, for this process and those that it starts."""
    with tempfile.TemporaryDirectory(prefix="t", dir="/tmp") as place:
        monkeypatch.setattr(tempfile, "tempdir", place)
        monkeypatch.setenv("TMPDIR", place)
        yield Path(place)
        for descriptor in tempdirs._held:
            os.close(descriptor)
        tempdirs._held.clear()


def other(code: str, *words: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", OTHER + code, PACKAGE, *map(str, words)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def sweep_elsewhere(parent: Path) -> list[str]:
    out, _ = other("print(*tempdirs.sweep(sys.argv[2]), sep='\\n')", parent).communicate(timeout=60)
    return out.split()


def test_it_is_private_and_short(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    long = tmp_path / ("x" * 60)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    made = tempdirs.make(MARK)
    try:
        assert len(made) <= tempdirs.LONGEST and os.stat(made).st_mode & 0o777 == 0o700
        assert made.startswith("/tmp/hs-") and not os.listdir(long)
        assert json.loads((Path(made) / "owner.json").read_text())["pid"] == os.getpid()
    finally:
        shutil.rmtree(made)
        os.close(tempdirs._held.pop())


def test_nowhere_to_put_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(tempdirs.os, "mkdir", refuse)
    with pytest.raises(Refused, match="no directory for temporary files"):
        tempdirs.make(MARK)


def test_what_a_killed_node_left_is_swept_by_the_next(parent: Path) -> None:
    """A scheduler whose patience ends kills everything -9: nobody is there to remove the folder."""
    dead = other("print(tempdirs.make('none-1'), flush=True); input()")
    alive = other("print(tempdirs.make('none-2'), flush=True); input()")
    assert dead.stdout and alive.stdout
    left, kept = Path(dead.stdout.readline().strip()), Path(alive.stdout.readline().strip())
    (left / "token").write_text("secret")
    dead.kill()
    dead.communicate(timeout=60)
    foreign = parent / "hs-notours"
    foreign.mkdir()
    assert tempdirs.dead(str(parent)) == [str(left)]
    mine = Path(tempdirs.make(MARK))
    assert not left.exists() and kept.exists() and mine.exists() and foreign.exists()
    alive.communicate("\n", timeout=60)
    tempdirs.remove(str(mine))
    assert sweep_elsewhere(parent) == [str(kept)] and os.listdir(parent) == ["hs-notours"]


def test_a_node_whose_ray_still_runs_is_not_dead(parent: Path) -> None:
    """Its agent was killed; what it started has its mark in the environment."""
    node = other(f"print(tempdirs.make('{MARK}-ray'), flush=True); input()")
    assert node.stdout
    left = Path(node.stdout.readline().strip())
    ray = subprocess.Popen(
        [sys.executable, "-c", "print(flush=True); input()"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        env={**os.environ, "HELIOSTAT_NODE": f"{MARK}-ray"},
    )  # fmt: skip
    assert ray.stdout
    ray.stdout.readline()
    node.kill()
    node.communicate(timeout=60)
    assert sweep_elsewhere(parent) == [] and left.exists() and tempdirs.ending(str(parent))
    ray.communicate(b"\n", timeout=60)
    assert sweep_elsewhere(parent) == [str(left)] and not tempdirs.ending(str(parent))


# --- two agents that start in the same moment


@pytest.mark.parametrize("at", ["mkdir", "open", "lock", "locked", "rename", "renamed"])
def test_another_agent_that_sweeps_in_this_moment_removes_nothing(
    parent: Path, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    """Between any two steps of one agent that makes its directory, another one removes what is left of dead ones."""
    swept: list[list[str]] = []

    def between(name: str, real: Callable[..., Any], after: bool = False) -> Callable[..., Any]:
        def call(*words: Any, **more: Any) -> Any:
            if at == name and not after:
                swept.append(sweep_elsewhere(parent))
            result = real(*words, **more)
            if at == name and after:
                swept.append(sweep_elsewhere(parent))
            return result

        return call

    real_mkdir, real_open, real_rename, real_flock = os.mkdir, os.open, os.rename, fcntl.flock
    with monkeypatch.context() as patch:
        patch.setattr(os, "mkdir", between("mkdir", real_mkdir, after=True))
        patch.setattr(
            os,
            "open",
            lambda *w, **m: between("open" if str(w[0]).endswith("/lock") else "", real_open)(*w, **m),
        )
        flock = between("lock", between("locked", real_flock, after=True))
        patch.setattr(fcntl, "flock", flock)
        patch.setattr(os, "rename", between("rename", between("renamed", real_rename, after=True)))
        made = Path(tempdirs._make(str(parent), MARK))
    assert swept and swept[0] == [] and (made / "lock").is_file() and (made / "owner.json").is_file()
    assert sweep_elsewhere(parent) == [], "it is held"


def test_a_directory_that_was_removed_while_it_was_made_is_made_again(
    parent: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An agent in another container shares /tmp and cannot see our process."""
    real, removed = os.rename, []

    def rename(source: str, target: str) -> None:
        if not removed:
            removed.append(source)
            shutil.rmtree(source)
        real(source, target)

    monkeypatch.setattr(os, "rename", rename)
    made = tempdirs._make(str(parent), MARK)
    assert removed and os.listdir(parent) == [os.path.basename(made)]


def test_a_lock_counts_only_while_its_file_is_the_one_on_disk(
    parent: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two who sweep: the second opened the lock before the first removed it, and gets it after that."""
    place = parent / "hs-12345678"
    place.mkdir()
    lock = place / "lock"
    lock.write_text("")
    real = fcntl.flock

    def flock(descriptor: int, how: int) -> None:
        lock.unlink()
        lock.write_text("another's")
        real(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    assert tempdirs.sweep(str(parent)) == [] and lock.exists()


def test_what_one_who_sweeps_and_is_killed_leaves_is_removed_by_the_next(
    parent: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = (
        "tempdirs.shutil.rmtree = lambda *_, **__: tempdirs.os._exit(9); print(tempdirs.sweep(sys.argv[2]))"
    )
    place = parent / "hs-12345678"
    place.mkdir()
    for name in ("lock", "token"):
        (place / name).write_text("")
    other(code, parent).communicate(timeout=60)
    (half,) = parent.iterdir()
    assert half.name.startswith(".hs-") and (half / "token").exists()
    sweep_elsewhere(parent)
    assert os.listdir(parent) == []


# --- names that are not ours


def test_nothing_else_is_followed_or_waited_for(parent: Path, tmp_path: Path) -> None:
    target = tmp_path / "precious"
    target.mkdir()
    (target / "lock").write_text("")
    os.mkfifo(parent / "hs-fifo")
    (parent / "hs-link").symlink_to(target)
    (parent / "hs-file").write_text("")
    (parent / "hs-pipe").mkdir()
    os.mkfifo(parent / "hs-pipe" / "lock")
    (parent / "hs-to").mkdir()
    (parent / "hs-to" / "lock").symlink_to(target / "lock")
    (parent / ".hs-1-x").mkdir()  # process 1 lives
    (parent / ".hs-x").mkdir()
    names = sorted(os.listdir(parent))
    assert tempdirs.sweep(str(parent)) == [] == tempdirs.dead(str(parent))
    for name in names:
        if name != "hs-pipe" and name != "hs-to":
            tempdirs.remove(str(parent / name))
    assert sorted(os.listdir(parent)) == names and (target / "lock").exists()
    assert tempdirs.sweep(str(parent / "none")) == []


def test_a_directory_that_others_can_write_to_is_refused(parent: Path) -> None:
    parent.chmod(0o777)
    with pytest.raises(Refused, match=r"is not safe: .* can be changed by everybody"):
        tempdirs.make(MARK)
    left = parent / "hs-12345678"
    left.mkdir()
    (left / "lock").write_text("")
    tempdirs.remove(str(left))
    assert str(left) not in tempdirs.sweep_all([str(left)]) and left.exists(), "it may be anybody's by now"
    parent.chmod(0o1777)
    tempdirs.remove(str(left))
    assert not left.exists()
