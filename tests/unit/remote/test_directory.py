"""A cluster's folder on another machine, and its copy here. The other machine is this one, by the same words."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from heliostat import backends
from heliostat.agent import processes
from heliostat.backends.base import Handle, Observation
from heliostat.cluster import planner
from heliostat.cluster.manager import ClusterManager
from heliostat.common.errors import HeliostatError
from heliostat.remote import directory
from heliostat.remote.directory import Follower, RemoteDirectory
from heliostat.remote.ssh import ThisHost
from heliostat.state.records import NodeRecord, Record
from heliostat.state.states import NodeState
from heliostat.state.store import ClusterDirectory, Store
from shared import until

pytestmark = pytest.mark.needs_linux
PLACE = Path(".heliostat/via/abc/zinc")


@pytest.fixture
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder, as an agent has made it."""
    monkeypatch.setenv("HOME", str(tmp_path / "a home"))
    place = tmp_path / "a home" / PLACE
    (place / "logs/zinc").mkdir(parents=True)
    (place / "nodes").mkdir()
    (place / "agent.pyz").write_bytes(planner.agent_archive())
    (place / "token").write_text("secret")
    (place / "state.json").write_text('{"a": 1}')
    (place / "nodes/zinc.json").write_text("{}")
    (place / "logs/run.out").write_bytes(b"one\n\xff")
    (place / "logs/zinc/agent.log").write_text("hello\n")
    return place


@pytest.fixture
def here(tmp_path: Path) -> ClusterDirectory:
    folder = ClusterDirectory(tmp_path / "here")
    folder.path.mkdir()
    folder.logs.mkdir()
    return folder


@pytest.fixture
def head() -> Iterator[subprocess.Popen[bytes]]:
    """The head's process."""
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process
        process.kill()


@pytest.fixture
def copy(here: ClusterDirectory, head: subprocess.Popen[bytes]) -> Iterator[RemoteDirectory]:
    words = {"pid": head.pid, "start": processes.start_time(head.pid), "executable": sys.executable}
    made = RemoteDirectory(here, ThisHost(), PLACE, words)
    yield made
    made.close()


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_one_look(there: Path, copy: RemoteDirectory, here: ClusterDirectory) -> None:
    (here.path / "pulse.json").write_text("gone there")
    copy.pull("zinc")
    assert files(here.path) == ["logs/run.out", "logs/zinc/agent.log", "nodes/zinc.json", "state.json"]
    assert (here.logs / "run.out").read_bytes() == b"one\n\xff", (
        "the token stays, what is gone there is gone here"
    )
    assert copy.head == (NodeState.ALLOCATED, "")


def test_whoever_looks_again_is_told(
    there: Path,
    copy: RemoteDirectory,
    here: ClusterDirectory,
    head: subprocess.Popen[bytes],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(directory, "PULL_S", 0.0)
    copy.pull()
    copy.pull()
    assert copy._follower and not (here.logs / "zinc").exists()
    monkeypatch.setattr(copy.host, "run", None)  # from here on no other connection is made

    def comes(path: str, data: bytes) -> bool:
        copy.pull()
        return (here.path / path).exists() and (here.path / path).read_bytes() == data

    with open(there / "logs/run.out", "ab") as log:
        log.write(b"two" * 1_000_000)
    (there / "state.json").write_text('{"a": 2}')
    until(lambda: comes("state.json", b'{"a": 2}'), "the news")
    assert (here.logs / "run.out").read_bytes() == b"one\n\xff" + b"two" * 1_000_000, (
        "logs come before the state"
    )
    copy.pull("zinc")
    until(lambda: comes("logs/zinc/agent.log", b"hello\n"), "the logs of a node that is asked for")
    (there / "nodes/zinc.json").unlink()
    until(lambda: copy.pull() or not (here.path / "nodes/zinc.json").exists(), "what is gone there")
    head.kill()
    head.wait()
    until(lambda: copy.head == (NodeState.GONE, ""), "the head's end")
    follower = copy._follower
    (there / "agent.pyz").unlink()
    until(lambda: not follower.is_alive(), "the follower ends with the folder")


def test_a_follower_that_cannot_be_had(
    there: Path, copy: RemoteDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory, "PULL_S", 0.0)
    (there / "agent.pyz").write_text("no program")
    copy.pull()
    copy.pull()
    follower = copy._follower
    assert follower
    follower.join(60)
    for content in ("1", "2"):
        (there / "state.json").write_text(content)
        copy.pull()
        assert (copy.folder.path / "state.json").read_text() == content and copy._follower is None


def test_nothing_is_written_after_the_end(there: Path, copy: RemoteDirectory, here: ClusterDirectory) -> None:
    copy.pull()
    assert copy.process
    follower = Follower(copy, copy.process, None)
    until(lambda: follower.has_reported, "it speaks")
    follower.stop()
    (there / "state.json").write_text("late")
    follower.join(60)
    assert not follower.is_alive() and (here.path / "state.json").read_text() == '{"a": 1}'


def test_the_end(there: Path, copy: RemoteDirectory, here: ClusterDirectory) -> None:
    assert copy.collect_and_remove() is None
    assert files(here.path) == ["logs/run.out", "logs/zinc/agent.log", "nodes/zinc.json", "state.json"]
    assert not there.exists() and there.parents[1].exists()
    assert copy.collect_and_remove() is None, "it is gone already"


def test_results_stay(there: Path, copy: RemoteDirectory) -> None:
    (there / "work/run").mkdir(parents=True)
    (there / "work/run/model.pt").write_text("weights")
    assert copy.collect_and_remove() == f"{PLACE}/work"
    assert files(there) == ["work/run/model.pt"]


def test_what_has_not_arrived_is_not_removed(
    there: Path, copy: RemoteDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = files(there)

    def full(*_: object) -> None:
        raise HeliostatError("the disk is full")

    monkeypatch.setattr(copy, "_unpack", full)
    with pytest.raises(HeliostatError, match="full"):
        copy.collect_and_remove()
    assert files(there) == before


@pytest.mark.parametrize("name", ["../evil", "a/../../evil", "a/b/c", "/evil", ""])
def test_names_from_elsewhere_stay_inside(
    copy: RemoteDirectory, here: ClusterDirectory, tmp_path: Path, name: str
) -> None:
    before = files(tmp_path)
    copy.append_log(name, 0, b"x")
    assert [path for path in files(tmp_path) if path not in before] in ([], ["here/logs/a/b"])
    follower = Follower.__new__(Follower)
    follower.remote = copy
    follower._apply({"alive": True, "files": {name: "x", f"nodes/{name}": "x" if ".." in name else None}})
    assert [path for path in files(tmp_path) if path not in before] in ([], ["here/logs/a/b"])


def test_a_stranger_in_the_tar(copy: RemoteDirectory, here: ClusterDirectory, tmp_path: Path) -> None:
    copy._unpack(directory.pack({"../evil": b"x", "logs/fine": b"x"}))
    assert files(tmp_path) == ["here/logs/fine"]


def test_last_words_that_have_not_come_yet(
    there: Path, here: ClusterDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The site says that a node has ended, which was after the copy was made: it is judged by what it said last."""
    node = NodeRecord("zinc", "worker", state=NodeState.READY, launch=1, handle="7", joined="j1")
    handle = Handle("7", ("zinc",), {}).to_json()
    here.save(Record("lab", "abc", "pbs", "up", 0.0, {}, nodes={"zinc": node}, handles=[handle]))

    class Site(type(backends.load("pbs"))):  # type: ignore[misc]
        def observe(self, *_: object) -> dict[str, Observation]:
            words = {"state": "GONE", "launch": 1, "since": 1.0, "reason": "the command ended with code 0"}
            (there / "nodes/zinc.json").write_text(json.dumps(words))
            (there / "state.json").write_text(json.dumps({"nodes": {"zinc": {"job": {"exit_code": 0}}}}))
            return {"7": Observation(NodeState.GONE, "PBS has forgotten the job")}

    monkeypatch.setattr(backends, "load", lambda _: Site())
    life, copy = ClusterManager(Store(tmp_path)), RemoteDirectory(here, ThisHost(), PLACE)
    monkeypatch.setattr(life.access, "mirror", lambda *_: copy)
    view = life.observe(here)
    assert "zinc" not in view.record.nodes, "it came with a join, and has left in order"
    assert view.live["nodes"]["zinc"]["job"] == {"exit_code": 0}
