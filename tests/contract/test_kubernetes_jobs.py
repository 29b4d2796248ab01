"""A job, or the command of a `run`, whose cluster ends before it: by a deadline, or because somebody has deleted it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from contract.kube import CLUSTERS, JOBS, get
from contract.kube_life import kube, life, server, spec
from contract.worlds import until
from heliostat.errors import HeliostatError, NotFoundError
from heliostat.jobs import Jobs
from heliostat.lifecycle import Lifecycle
from heliostat.store import Store
from standins.kube import Kube

pytestmark = pytest.mark.needs_linux
__all__ = ["kube", "server"]  # fixtures


@pytest.fixture(autouse=True)
def small_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that goes along with a `run`."""
    place = tmp_path / "work"
    place.mkdir()
    monkeypatch.chdir(place)
    return place


def command(*argv: str) -> dict[str, Any]:
    return {"argv": list(argv), "cwd": os.getcwd(), "text": " ".join(argv)}


def begins(place: Path) -> list[str]:
    """A command that leaves its process id here, and goes on until somebody ends it."""
    return ["sh", "-c", f"echo $$ > {place}/pid; exec sleep 600"]


def begun(place: Path) -> int:
    def pid() -> int:
        text = (place / "pid").read_text() if (place / "pid").exists() else ""
        return int(text) if text.strip() else 0

    return int(until(pid, "the command has begun"))


def lives(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0]
    except OSError:
        return False
    return state != b"Z"


def meanwhile(do: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=do)
    thread.start()
    return thread


def plain(error: HeliostatError) -> None:
    """What is told is a sentence, never a document of the API server, and the exit code is that of a failure."""
    assert error.exit_code == 1 and not isinstance(error, NotFoundError)
    assert not [text for text in (error.what, error.because, error.hint) if "{" in text], vars(error)


# -- deleted by somebody else


def test_a_job_whose_cluster_is_deleted(kube: Kube, home: Path, tmp_path: Path) -> None:
    life(home).up(spec(nodes=2))
    looker = life(home)
    job = Jobs(looker).submit("lab", begins(tmp_path))
    begun(tmp_path)
    kube.request("DELETE", f"{CLUSTERS}/lab")
    with pytest.raises(HeliostatError, match=f"`lab` ended before the job `{job}` did") as caught:
        Jobs(looker).wait("lab", job, lambda chunk: None)
    plain(caught.value)
    assert "somebody has deleted it" in caught.value.because


def test_a_job_whose_cluster_is_deleted_and_archived_by_another_command(
    kube: Kube, home: Path, tmp_path: Path
) -> None:
    """`ls` in another shell has put the ended cluster into the history before the one that waits looks."""
    life(home).up(spec(nodes=2))
    looker = life(home)
    job = Jobs(looker).submit("lab", begins(tmp_path))

    def elsewhere() -> None:
        begun(tmp_path)
        kube.request("DELETE", f"{CLUSTERS}/lab")
        until(lambda: Lifecycle(Store(home)).all() is None or not Store(home).names(), "it is in the history")

    thread = meanwhile(elsewhere)
    with pytest.raises(HeliostatError, match=f"`lab` ended before the job `{job}` did") as caught:
        Jobs(looker).wait("lab", job, lambda chunk: None)
    thread.join()
    plain(caught.value)
    assert "somebody has deleted it" in caught.value.because


@pytest.mark.parametrize("what", ["the RayJob", "its RayCluster"])
def test_a_run_that_is_deleted(
    kube: Kube, home: Path, tmp_path: Path, what: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """KubeRay makes a RayCluster of a RayJob anew when somebody deletes it: with another head, which knows no job."""

    def delete() -> None:
        begun(tmp_path)
        name = get(kube, "lab", JOBS)["status"]["rayClusterName"]
        kube.request("DELETE", f"{JOBS}/lab" if what == "the RayJob" else f"{CLUSTERS}/{name}")

    thread = meanwhile(delete)
    with pytest.raises(HeliostatError) as caught:
        Jobs(life(home)).run(spec(nodes=2), command(*begins(tmp_path)), lambda *_: None)
    thread.join()
    plain(caught.value)
    assert "`lab`" in caught.value.what and "`run`" in caught.value.what
    assert caught.value.because and (
        what != "the RayJob" or "somebody has deleted it" in caught.value.because
    )
    assert kube.names("rayjobs") == [] and Store(home).names() == []
    until(lambda: not lives(begun(tmp_path)), "the command has ended")


def test_a_cluster_that_is_being_deleted_is_stopping(kube: Kube, home: Path) -> None:
    """A finalizer (of Redis, say) may hold it for minutes: it is there, and it ends."""
    life(home).up(spec(nodes=2))
    hold = {"metadata": {"finalizers": ["ray.io/gcs-ft-redis-cleanup-finalizer"]}}
    kube.control("merge", kind="rayclusters", name="lab", patch=hold)
    kube.request("DELETE", f"{CLUSTERS}/lab")
    view = life(home).find("lab")
    assert str(view.state) == "stopping" and "somebody has deleted it" in view.record.nodes["head"].reason
    kube.control("merge", kind="rayclusters", name="lab", patch={"metadata": {"finalizers": None}})
    kube.request("DELETE", f"{CLUSTERS}/lab")
