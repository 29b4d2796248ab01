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
from fakes.kube import Kube
from heliostat.backends.kubernetes import backend as site
from heliostat.cluster import readiness
from heliostat.cluster.manager import ClusterManager
from heliostat.common.errors import HeliostatError, NotFoundError, UsageError
from heliostat.state.store import Store

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
    assert not [text for text in (error.message, error.cause, error.hint) if "{" in text], vars(error)


# -- deleted by somebody else


def test_a_job_whose_cluster_is_deleted(kube: Kube, home: Path, tmp_path: Path) -> None:
    life(home).up(spec(nodes=2))
    looker = life(home)
    job = looker.jobs.submit("lab", begins(tmp_path))
    begun(tmp_path)
    kube.request("DELETE", f"{CLUSTERS}/lab")
    with pytest.raises(HeliostatError, match=f"`lab` ended before the job `{job}` did") as caught:
        looker.jobs.wait("lab", job, lambda chunk: None)
    plain(caught.value)
    assert "was deleted" in caught.value.cause


def test_a_job_whose_cluster_is_deleted_and_archived_by_another_command(
    kube: Kube, home: Path, tmp_path: Path
) -> None:
    """`ls` in another shell has put the ended cluster into the history before the one that waits looks."""
    life(home).up(spec(nodes=2))
    looker = life(home)
    job = looker.jobs.submit("lab", begins(tmp_path))

    def elsewhere() -> None:
        begun(tmp_path)
        kube.request("DELETE", f"{CLUSTERS}/lab")
        until(
            lambda: ClusterManager(Store(home)).clusters() is None or not Store(home).names(),
            "it is in the history",
        )

    thread = meanwhile(elsewhere)
    with pytest.raises(HeliostatError, match=f"`lab` ended before the job `{job}` did") as caught:
        looker.jobs.wait("lab", job, lambda chunk: None)
    thread.join()
    plain(caught.value)
    assert "was deleted" in caught.value.cause
    until(lambda: not kube.names("pods", namespace="ml"), "its pods have ended after their grace period")


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
        life(home).run(spec(nodes=2), command(*begins(tmp_path)), lambda *_: None)
    thread.join()
    plain(caught.value)
    assert "`lab`" in caught.value.message and "`run`" in caught.value.message
    assert caught.value.cause and (what != "the RayJob" or "was deleted" in caught.value.cause)
    assert kube.names("rayjobs") == [] and Store(home).names() == []
    until(lambda: not lives(begun(tmp_path)), "the command has ended")


def test_a_cluster_that_is_being_deleted_is_stopping(kube: Kube, home: Path) -> None:
    """A finalizer (of Redis, say) may hold it for minutes: it is there, and it ends."""
    life(home).up(spec(nodes=2))
    hold = {"metadata": {"finalizers": ["ray.io/gcs-ft-redis-cleanup-finalizer"]}}
    kube.control("merge", kind="rayclusters", name="lab", patch=hold)
    kube.request("DELETE", f"{CLUSTERS}/lab")
    view = life(home).find("lab")
    assert str(view.state) == "stopping" and "was deleted" in view.record.nodes["head"].reason
    kube.control("merge", kind="rayclusters", name="lab", patch={"metadata": {"finalizers": None}})
    kube.request("DELETE", f"{CLUSTERS}/lab")


# -- the time limit of a `run`


def test_the_time_limit_ends_the_command(kube: Kube, home: Path, tmp_path: Path) -> None:
    told: list[str] = []
    limited = spec(nodes=2, time="8s")
    code = life(home, told).run(limited, command(*begins(tmp_path)), lambda *_: None)
    assert code == 124 and not lives(begun(tmp_path))
    assert [line for line in told if "its time limit of 8s has passed" in line], told
    assert kube.names("rayjobs") == [] and kube.names("pods") == []


def test_a_command_within_its_limit_is_not_touched(kube: Kube, home: Path) -> None:
    for argv, code in ((["sh", "-c", "exit 7"], 7), (["exit 6"], 6)):  # one word is a shell line
        assert life(home).run(spec(time="10m"), command(*argv), lambda *_: None) == code


def test_the_time_limit_holds_where_nobody_waits(kube: Kube, home: Path, tmp_path: Path) -> None:
    """KubeRay only calls the RayJob Failed at its deadline and deletes the cluster ten minutes later: until then the command
    went on, and its output must stay available."""
    life(home).run(spec(time="8s"), command(*begins(tmp_path)), lambda *_: None, detach=True)
    pid = begun(tmp_path)
    until(lambda: not lives(pid), "the command has ended")
    until(lambda: get(kube, "lab", JOBS)["status"].get("jobStatus") == "FAILED", "KubeRay has seen that")
    assert len(kube.names("pods")) == 1  # whoever looks now can still have its output


@pytest.fixture
def no_timeout_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in an image without it: then only KubeRay's own deadline is left."""
    monkeypatch.setattr(
        site.Kubernetes, "limited_command", lambda self, handle, argv, host: argv, raising=False
    )


@pytest.mark.usefixtures("no_timeout_program")
def test_the_operators_deadline_ends_a_run(kube: Kube, home: Path, tmp_path: Path) -> None:
    with pytest.raises(HeliostatError, match="`lab` ended before the job `run` did") as caught:
        life(home).run(spec(time="5s"), command(*begins(tmp_path)), lambda *_: None)
    plain(caught.value)
    assert "its time limit has passed" in caught.value.cause
    assert not lives(begun(tmp_path)) and kube.names("rayjobs") == []
    past = Store(home).last_archived("lab")
    assert past is not None and "its time limit has passed" in past.record().reason


@pytest.mark.usefixtures("no_timeout_program")
def test_after_the_operators_deadline_a_detached_run_is_stopping(
    kube: Kube, home: Path, tmp_path: Path
) -> None:
    life(home).run(spec(time="5s"), command(*begins(tmp_path)), lambda *_: None, detach=True)
    until(lambda: get(kube, "lab", JOBS)["status"].get("reason") == "DeadlineExceeded", "the deadline")
    view = life(home).find("lab")
    assert str(view.state) == "stopping" and "its time limit has passed" in view.record.nodes["head"].reason
    life(home).down("lab")
    until(lambda: not lives(begun(tmp_path)), "the command has ended")


def test_the_deadline_passes_in_the_queue(kube: Kube, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readiness, "UP_S", 60.0)
    kube.set(schedule_delay=3600.0)
    with pytest.raises(HeliostatError, match="`lab` did not start") as caught:
        life(home).run(spec(time="2s"), command("true"), lambda *_: None)
    assert "its time limit has passed" in caught.value.cause and kube.names("rayjobs") == []


# -- a folder that is too big for the head


def uploads(kube: Kube) -> list[str]:
    return [
        r["path"]
        for r in kube.control("requests")
        if (r["verb"], r["resource"]) == ("update", "services/proxy")
    ]


def test_an_upload_that_the_head_cannot_hold(kube: Kube, home: Path, small_folder: Path) -> None:
    """A package of 60 MB ended the dashboard's job process of a head with 1 GiB: it is refused before it is sent."""
    life(home).up(spec(memory_per_node="1G"))
    kube.set(memory_used=800 * 2**20)
    (small_folder / "model.bin").write_bytes(os.urandom(60 * 2**20))
    with pytest.raises(
        UsageError, match=r"is too big for this head: 60\.0 MiB packed, over 22\.4 MiB"
    ) as caught:
        life(home).jobs.submit("lab", ["true"], working_dir=small_folder)
    assert "Ray holds an upload 10 times in memory" in caught.value.cause
    assert "`head: {memory: 8G}`" in caught.value.hint and uploads(kube) == []
    (small_folder / "model.bin").write_bytes(bytes(60 * 2**20))  # as many bytes, and a small package
    job = life(home).jobs.submit("lab", ["true"], working_dir=small_folder)
    assert life(home).jobs.wait("lab", job, lambda chunk: None) == 0 and len(uploads(kube)) == 1


def test_a_run_whose_folder_is_too_big_starts_nothing(kube: Kube, home: Path, small_folder: Path) -> None:
    (small_folder / "model.bin").write_bytes(os.urandom(60 * 2**20))
    with pytest.raises(UsageError, match=r"is too big for this head: 60\.0 MiB packed, over 25\.6 MiB"):
        life(home).run(spec(memory_per_node="1G"), command("true"), lambda *_: None)
    assert not [r for r in kube.control("requests") if r["verb"] == "create" and r["resource"] == "rayjobs"]
    assert Store(home).names() == []
    assert life(home).run(spec(memory_per_node="4G"), command("true"), lambda *_: None) == 0
