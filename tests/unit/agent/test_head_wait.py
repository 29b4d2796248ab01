"""A worker that has not met its head: when it stops waiting."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from heliostat.agent.head_wait import (
    CHECK_S,
    CONFIRM_S,
    LIMIT_S,
    SAME_ALLOCATION_S,
    Evidence,
    HeadWait,
    make,
    observe,
)

HEAD, WORKER = {"node": "head", "role": "head"}, {"node": "w1"}
STARTING = Evidence(head="STARTING")


class Waits:
    """A worker's wait, on a clock that only `until_stop` moves."""

    def __init__(self, **config: Any) -> None:
        self.now = 0.0
        self.wait: HeadWait = make(config, lambda: self.now)

    def check(self, seen: Evidence, after_s: float = CHECK_S) -> str:
        self.now += after_s
        return self.wait.stop_reason(seen)

    def until_stop(self, seen: Evidence, most_s: float = 7200) -> tuple[float, str]:
        """(seconds, reason); the reason is empty where it waits that long."""
        began = self.now
        while self.now - began < most_s:
            if reason := self.check(seen):
                return self.now - began, reason
        return self.now - began, ""


def test_the_directory_is_gone() -> None:
    assert Waits(members=[WORKER]).check(Evidence(directory=False)) == "the cluster's directory is gone"


def test_the_cluster_has_ended() -> None:
    assert Waits(members=[WORKER]).check(Evidence(ended=True)) == "the cluster has ended"


@pytest.mark.parametrize("state", ["GONE", "FAILED"])
@pytest.mark.parametrize("members", [[HEAD, WORKER], [WORKER], []])
def test_the_agent_of_the_head_has_ended(state: str, members: list[dict[str, str]]) -> None:
    seconds, reason = Waits(members=members).until_stop(Evidence(head=state, reason="no Ray in /venv"))
    assert reason == "the head ended before this node reached it: no Ray in /venv"
    assert CONFIRM_S < seconds <= CONFIRM_S + CHECK_S


def test_a_head_that_starts_again_replaces_its_report() -> None:
    waits = Waits(members=[WORKER])
    for seen in (Evidence(head="GONE"), Evidence(head="GONE"), STARTING, Evidence(head="GONE")):
        assert waits.check(seen) == ""


@pytest.mark.parametrize("seen", [Evidence(), STARTING])
def test_the_same_allocation(seen: Evidence) -> None:
    seconds, reason = Waits(members=[HEAD, WORKER]).until_stop(seen)
    assert SAME_ALLOCATION_S < seconds <= SAME_ALLOCATION_S + CHECK_S
    assert reason == "the head could not be reached for 125 s"


def test_the_same_allocation_while_an_environment_is_copied() -> None:
    seconds, _ = Waits(members=[HEAD, WORKER], stage={"id": "x"}).until_stop(STARTING)
    assert LIMIT_S < seconds <= LIMIT_S + CHECK_S


def test_a_head_that_is_queued_in_another_allocation() -> None:
    waits = Waits(members=[WORKER])
    assert waits.until_stop(Evidence()) == (7200, "")
    seconds, reason = waits.until_stop(STARTING)  # the time counts from the start of its agent
    assert LIMIT_S < seconds <= LIMIT_S + CHECK_S and reason


def test_a_head_without_an_allocation() -> None:
    """On one computer there is no queue."""
    assert LIMIT_S < Waits().until_stop(Evidence())[0] <= LIMIT_S + CHECK_S


def test_a_worker_that_was_suspended() -> None:
    waits = Waits(members=[HEAD, WORKER])
    assert waits.check(STARTING, after_s=3600) == ""
    assert waits.until_stop(STARTING)[0] > SAME_ALLOCATION_S - 2 * CHECK_S


# -- what the directory shows


def cluster(
    folder: Path, record: dict[str, Any] | None = None, head: dict[str, Any] | None = None
) -> Evidence:
    (folder / "nodes").mkdir(exist_ok=True)
    for name, value in (("record.json", record), ("nodes/head.json", head)):
        if value is not None:
            (folder / name).write_text(json.dumps(value))
    return observe({"folder": str(folder), "id": "abc"})


def test_a_directory_that_is_gone(tmp_path: Path) -> None:
    assert observe({"folder": str(tmp_path / "lab"), "id": "abc"}) == Evidence(directory=False)


def test_a_directory_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stat(_: str) -> os.stat_result:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "stat", stat)
    assert observe({"folder": str(tmp_path), "id": "abc"}) == Evidence()


def test_a_directory_without_a_record(tmp_path: Path) -> None:
    assert cluster(tmp_path) == Evidence()
    assert cluster(tmp_path, head={"state": "STARTING", "since": 5.0}) == STARTING


@pytest.mark.parametrize(
    "record, ended",
    [
        ({"id": "abc", "target": "up"}, False),
        ({"id": "abc", "target": "down"}, True),
        ({"id": "other", "target": "up"}, True),
    ],
)
def test_the_record(tmp_path: Path, record: dict[str, Any], ended: bool) -> None:
    assert cluster(tmp_path, record) == Evidence(ended=ended)


@pytest.mark.parametrize("since, state", [(9.0, None), (3.0, "GONE")])
def test_a_job_that_is_queued_again(tmp_path: Path, since: float, state: str | None) -> None:
    """Only where Slurm queued it after the head's last report."""
    record = {"id": "abc", "target": "up", "nodes": {"head": {"state": "QUEUED", "since": since}}}
    assert cluster(tmp_path, record, {"state": "GONE", "since": 5.0}).head == state
