"""`heliostat wait`: which states end the wait, with which result."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from heliostat.cluster.view import View
from heliostat.cluster.wait import Outcome, StateWaiter
from heliostat.common.documents import JobRecord
from heliostat.common.errors import DeadlineError, NotFoundError, UsageError
from heliostat.remote.ray_client import NoResponse
from heliostat.state.records import NodeRecord, Record
from heliostat.state.states import NodeState
from heliostat.state.store import ClusterDirectory

N = NodeState


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float, /) -> None:
        self.now += seconds


def view(
    state: NodeState, *, kind: str = "up", code: int | None = None, cluster_id: str = "1", **more: Any
) -> View:
    record = Record(
        "lab", cluster_id, "local", kind, 0.0, {}, nodes={"head": NodeRecord("head", "head", state=state)}
    )
    for key, value in more.items():
        setattr(record, key, value)
    live: Any = {"job": {"id": "run", "status": "RUNNING", "exit_code": code}} if kind == "run" else {}
    return View(ClusterDirectory(Path("/nothing")), record, live)


class Observer:
    """The cluster in these states, one after the other; the last one stays."""

    def __init__(self, *views: View) -> None:
        self.views = list(views)

    def find_or_archived(self, name: str) -> View:
        return self.views.pop(0) if len(self.views) > 1 else self.views[0]


class Connector:
    def __init__(self, *statuses: str) -> None:
        self.statuses = list(statuses)

    def ray_api(self, view: View) -> Connector:
        return self

    def job(self, job_id: str) -> dict[str, str]:
        status = self.statuses.pop(0) if len(self.statuses) > 1 else self.statuses[0]
        if status == "silent":
            raise NoResponse("no answer")
        return {"status": status}


def wait(observer: Observer, *arguments: Any, jobs: Connector | None = None, **options: Any) -> Outcome:
    waiter = StateWaiter(cast("Any", observer), cast("Any", jobs or Connector("")), Clock())
    return waiter.wait("lab", *arguments, **options)


def test_a_cluster_becomes_ready() -> None:
    assert wait(Observer(view(N.QUEUED), view(N.STARTING), view(N.READY))) == Outcome(True, "READY")


def test_a_cluster_that_fails_is_never_ready() -> None:
    failed = view(N.FAILED, reason="no Ray")
    assert wait(Observer(view(N.QUEUED), failed)) == Outcome(False, "ENDED", "no Ray")
    assert wait(Observer(view(N.READY), failed), None, "ended").is_reached


def test_a_name_that_was_used_again() -> None:
    again = view(N.READY, cluster_id="2")
    assert not wait(Observer(view(N.QUEUED), again)).is_reached
    assert wait(Observer(view(N.QUEUED), again), None, "ended").is_reached


@pytest.mark.parametrize(("code", "is_reached"), [(0, True), (3, False)])
def test_a_run(code: int, is_reached: bool) -> None:
    runs = Observer(view(N.STARTING, kind="run"), view(N.READY, kind="run", code=code))
    assert wait(runs).is_reached == is_reached
    ended = view(N.GONE, kind="run", exit_code=code)
    assert wait(Observer(view(N.READY, kind="run"), ended)).is_reached == is_reached
    assert wait(Observer(ended), None, "ended").is_reached


@pytest.mark.parametrize("status", ["SUCCEEDED", "FAILED", "STOPPED"])
def test_a_job(status: str) -> None:
    jobs = ("PENDING", "RUNNING", "silent", status)
    running = Observer(view(N.READY))
    assert wait(running, "job-1", jobs=Connector(*jobs)).is_reached == (status == "SUCCEEDED")
    assert wait(running, "job-1", "ended", jobs=Connector(*jobs)) == Outcome(True, status)


def test_a_job_whose_cluster_has_ended() -> None:
    jobs: list[JobRecord] = [{"id": "job-1", "status": "SUCCEEDED"}, {"id": "job-2"}]
    ended = Observer(view(N.GONE, jobs=jobs))
    assert wait(ended, "job-1").is_reached
    assert wait(ended, "job-2").state == "STOPPED"
    with pytest.raises(NotFoundError, match="has no job `job-3`"):
        wait(ended, "job-3")


def test_a_timeout() -> None:
    with pytest.raises(DeadlineError, match="`lab` is not ready after 1m") as caught:
        wait(Observer(view(N.QUEUED)), timeout_s=60)
    assert caught.value.exit_code == 4 and "queued" in caught.value.cause


def test_goals_that_make_no_sense() -> None:
    with pytest.raises(UsageError, match="never `ready`"):
        wait(Observer(view(N.READY)), "job-1", "ready")
    with pytest.raises(UsageError, match="never `done`"):
        wait(Observer(view(N.READY)), None, "done")
