"""Is anybody using the cluster? Asked of a small server that answers as Ray 2.60 did."""

from __future__ import annotations

import asyncio
import json
import os
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from heliostat.agent import idle


def actor(name: str, namespace: str) -> dict[str, Any]:
    """As /api/v0/actors has it."""
    return {"actor_id": "4f" * 16, "class_name": name, "state": "ALIVE", "job_id": "01000000", "name": "", "node_id": "ab",
            "pid": 4711, "ray_namespace": namespace, "is_detached": None}  # fmt: skip


def actors(*found: dict[str, Any]) -> dict[str, Any]:
    listing = {"total": len(found), "num_after_truncation": len(found), "num_filtered": len(found), "result": list(found),
               "partial_failure_warning": "", "warnings": None}  # fmt: skip
    return {"result": True, "msg": "", "data": {"result": listing}}


def driver(active: str) -> dict[str, Any]:
    return {"driver": {"is_active": active, "reason": "Number of active drivers: 1", "timestamp": 1_700_000_000.0,
                       "last_activity_at": 1_700_000_000.0}}  # fmt: skip


SUPERVISOR = actor("JobSupervisor", "SUPERVISOR_ACTOR_RAY_NAMESPACE")
QUIET: dict[str, Any] = {
    "/api/jobs/": [],
    "/api/component_activities": driver("INACTIVE"),
    "/api/v0/actors": actors(),
}


class Handler(BaseHTTPRequestHandler):
    answers: dict[str, Any]
    token = "t0ken"

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        answer = self.answers[urlsplit(self.path).path]
        if self.headers.get("Authorization") != f"Bearer {self.token}":
            answer = 401
        self.send_response(answer if isinstance(answer, int) else 200)
        self.end_headers()
        if not isinstance(answer, int):
            self.wfile.write(answer.encode() if isinstance(answer, str) else json.dumps(answer).encode())


@pytest.fixture
def ray() -> Iterator[tuple[int, dict[str, Any]]]:
    answers = dict(QUIET)
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Handler,), {"answers": answers}))
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield server.server_port, answers
    server.shutdown()
    server.server_close()


def job(status: str, **more: Any) -> dict[str, Any]:
    return {
        "type": "SUBMISSION",
        "submission_id": "j1",
        "job_id": None,
        "status": status,
        "end_time": None,
        **more,
    }


ACTIVITY: dict[str, tuple[dict[str, Any], str | None]] = {
    "nothing": ({}, None),
    "a job runs": ({"/api/jobs/": [job("RUNNING")]}, "job j1"),
    "a job waits": ({"/api/jobs/": [job("SUCCEEDED"), job("PENDING", submission_id="j2")]}, "job j2"),
    "a driver's job": ({"/api/jobs/": [job("RUNNING", submission_id=None, job_id="02000000")]}, "job 02000000"),
    "jobs have ended": ({"/api/jobs/": [job("SUCCEEDED", end_time=1000), job("FAILED"), job("STOPPED")]}, None),
    "a driver is there": ({"/api/component_activities": driver("ACTIVE")}, "a driver is connected"),
    "no word of drivers": ({"/api/component_activities": {}}, None),
    "an actor": ({"/api/v0/actors": actors(actor("Trainer", "default"))}, "actor Trainer"),
    "a detached actor": ({"/api/v0/actors": actors(actor("Counter", "6d2c-4b"))}, "actor Counter"),
    "only the supervisor": ({"/api/v0/actors": actors(SUPERVISOR)}, None),
    "Ray's own": ({"/api/v0/actors": actors(actor("_StatsActor", "_dataset_stats_actor"), actor("X", "_ray_internal_dashboard"))}, None),
    "one among Ray's own": ({"/api/v0/actors": actors(SUPERVISOR, actor("X", "_y"), actor("Mine", ""))}, "actor Mine"),
}  # fmt: skip


@pytest.mark.parametrize("name", ACTIVITY)
def test_what_counts_as_activity(ray: tuple[int, dict[str, Any]], name: str) -> None:
    port, answers = ray
    change, expected = ACTIVITY[name]
    answers.update(change)
    assert asyncio.run(idle.find_activity(idle.Dashboard(port, "t0ken"))) == expected


def test_what_began_and_ended_between_two_looks_counts(ray: tuple[int, dict[str, Any]]) -> None:
    port, answers = ray
    answers["/api/jobs/"] = [job("SUCCEEDED", end_time=50_000)]
    assert asyncio.run(idle.find_activity(idle.Dashboard(port, "t0ken"), 49.0)) == "job j1"
    assert asyncio.run(idle.find_activity(idle.Dashboard(port, "t0ken"), 51.0)) is None


@pytest.mark.parametrize("path", QUIET)
@pytest.mark.parametrize("answer", [500, "no JSON", ""])
def test_a_head_that_does_not_know_is_not_idle(
    ray: tuple[int, dict[str, Any]], path: str, answer: Any
) -> None:
    port, answers = ray
    answers[path] = answer
    with pytest.raises(OSError):
        asyncio.run(idle.find_activity(idle.Dashboard(port, "t0ken")))


def test_a_head_that_does_not_let_us_in_or_is_gone(ray: tuple[int, dict[str, Any]]) -> None:
    for port, token in ((ray[0], "wrong"), (1, "t0ken")):
        with pytest.raises(OSError):
            asyncio.run(idle.find_activity(idle.Dashboard(port, token)))


# -- the clock


class Clock:
    """Both clocks of the machine, under our hand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.day = 1000.0, "00:00"
        monkeypatch.setattr(idle.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(idle.time, "localtime", lambda: time.strptime(self.day, "%H:%M"))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_the_time_is_over(clock: Clock, tmp_path: Path) -> None:
    watch = idle.IdleClock({"timeout_s": 60}, str(tmp_path / "keepalive"))
    clock.now += 59
    watch.update(False)
    assert not watch.is_expired() and watch.seconds() == 59
    clock.now += 1
    assert watch.is_expired()
    watch.update(True)
    assert not watch.is_expired() and watch.seconds() == 0


def test_what_the_last_look_found_goes_on_until_the_next_look(clock: Clock, tmp_path: Path) -> None:
    """`status` said "idle for 30s" while two jobs ran."""
    watch = idle.IdleClock({"timeout_s": 25}, str(tmp_path / "keepalive"))
    watch.update(True)
    clock.now += 29
    assert watch.seconds() == 0 and not watch.is_expired()
    watch.update(False)
    assert watch.seconds() == 0 and not watch.is_expired(), "it may have ended a moment ago"
    clock.now += 25
    watch.update(False)
    assert watch.seconds() == 25 and watch.is_expired()


def test_without_a_timeout_it_is_never_over(clock: Clock, tmp_path: Path) -> None:
    watch = idle.IdleClock({}, str(tmp_path / "keepalive"))
    clock.now += 1e9
    assert not watch.is_expired() and watch.seconds() == 1e9


@pytest.mark.parametrize(
    ("window", "inside", "outside"),
    [
        ([150, 540], ["02:30", "08:59"], ["02:29", "09:00", "23:59"]),
        ([1320, 360], ["22:00", "23:59", "00:00", "05:59"], ["06:00", "21:59", "12:00"]),
        ([1320, 1440], ["22:00", "23:59"], ["00:00", "21:59"]),
        ([0, 1440], ["00:00", "23:59"], []),
    ],
)
def test_only_at_this_time_of_day(
    clock: Clock, tmp_path: Path, window: list[int], inside: list[str], outside: list[str]
) -> None:
    watch = idle.IdleClock({"timeout_s": 60, "window": window}, str(tmp_path / "keepalive"))
    clock.now += 100
    for clock.day in inside:
        assert watch.is_expired(), clock.day
    for clock.day in outside:
        assert not watch.is_expired(), clock.day


def test_touching_the_file_keeps_it_alive(clock: Clock, tmp_path: Path) -> None:
    path = tmp_path / "keepalive"
    watch = idle.IdleClock({"timeout_s": 60}, str(path))
    clock.now += 100
    path.touch()
    watch.update(False)
    assert not watch.is_expired()
    clock.now += 100
    watch.update(False)
    assert watch.is_expired(), "once is once"
    os.utime(path, ns=(1, 1))  # the clock of a file server may be anywhere
    watch.update(False)
    assert not watch.is_expired()


def test_a_file_that_was_there_before_counts_only_when_it_changes(clock: Clock, tmp_path: Path) -> None:
    (tmp_path / "keepalive").touch()
    watch = idle.IdleClock({"timeout_s": 60}, str(tmp_path / "keepalive"))
    clock.now += 100
    watch.update(False)
    assert watch.is_expired()


@pytest.mark.parametrize(("timeout", "every"), [(None, 30.0), (1, 0.5), (60, 10.0), (3600, 15.0)])
def test_how_often_it_looks(tmp_path: Path, timeout: int | None, every: float) -> None:
    assert idle.IdleClock({"timeout_s": timeout}, str(tmp_path / "k")).interval_s == every
