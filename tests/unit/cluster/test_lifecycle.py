"""A node's state from three witnesses: the site, the head's agent, and its own agent's last words."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from heliostat.agent.protocol import RefusalCause
from heliostat.backends.base import Observation
from heliostat.cluster.manager import ClusterManager
from heliostat.cluster.readiness import startup_hint
from heliostat.cluster.resolve import needs_report, resolve_state
from heliostat.common.events import Event
from heliostat.state.records import NodeRecord, Record
from heliostat.state.states import NodeState as N
from heliostat.state.states import check_transition
from heliostat.state.store import Store

NOTHING: dict[str, Any] = {}


def said(state: str, reason: str = "", since: float = 100.0, launch: int = 1) -> dict[str, Any]:
    return {"state": state, "reason": reason, "since": since, "launch": launch}


def verdict(
    seen: N, live: dict[str, Any] = NOTHING, words: dict[str, Any] = NOTHING, *, wanted: bool = True, now: N = N.REQUESTED,
    why: str = "", launch: int = 1, alone: bool = True,
) -> tuple[N, str]:  # fmt: skip
    node = NodeRecord("w1", "worker", state=now, launch=launch)
    state, reason, since = resolve_state(node, Observation(seen, why), live, words, wanted, alone)
    if not needs_report(node, Observation(seen, why), live):
        assert resolve_state(node, Observation(seen, why), live, {}, wanted, alone)[:2] == (state, reason)
    assert 0 < since <= time.time()
    if state is not now:
        check_transition(now, state)  # whatever the witnesses say, it is a move that there is
    return state, reason


RUNS = N.ALLOCATED
CASES = {
    # the site knows it, and no agent has spoken
    "queued": (verdict(N.QUEUED, why="Priority"), (N.QUEUED, "Priority")),
    "runs": (verdict(RUNS), (N.ALLOCATED, "")),
    "silent site": (verdict(N.UNKNOWN, said("READY"), said("READY"), now=N.READY, why="no answer"), (N.UNKNOWN, "no answer")),
    "requeued": (verdict(N.QUEUED, said("READY"), said("READY"), now=N.READY), (N.QUEUED, "")),
    # agents speak
    "its own words": (verdict(RUNS, NOTHING, said("STARTING", "x")), (N.STARTING, "x")),
    "the head's words": (verdict(RUNS, said("READY")), (N.READY, "")),
    "the head knows best": (verdict(RUNS, said("LOST", "silent"), said("READY")), (N.LOST, "silent")),
    "the head knows best, though later": (verdict(RUNS, said("LOST", "silent", 100), said("READY", "", 200)), (N.LOST, "silent")),
    "it gave its head up": (verdict(RUNS, said("LOST"), said("FAILED", "no head"), alone=False), (N.FAILED, "no head")),
    "it ended with its job, which may be queued again": (verdict(RUNS, NOTHING, said("GONE", "x"), alone=False), (N.STOPPING, "x")),
    "it was asked to leave its job": (verdict(RUNS, NOTHING, said("GONE", "x"), alone=False, wanted=False), (N.GONE, "x")),
    "one that never came": (verdict(RUNS, said("FAILED", "the step"), NOTHING, alone=False), (N.FAILED, "the step")),
    "back again": (verdict(RUNS, said("READY"), said("READY"), now=N.LOST), (N.READY, "")),
    "a word that nobody knows": (verdict(RUNS, said("DANCING"), NOTHING), (N.ALLOCATED, "")),
    "a word that the head does not know": (verdict(RUNS, said("DANCING"), said("READY")), (N.READY, "")),
    # last words, while it still runs: it is cleaning up
    "leaving": (verdict(RUNS, said("READY"), said("STOPPING", "told"), now=N.READY), (N.READY, "")),
    "said goodbye": (verdict(RUNS, NOTHING, said("GONE", "idle"), now=N.READY), (N.STOPPING, "idle")),
    "failed and cleans up": (verdict(RUNS, said("FAILED", "no Ray"), said("FAILED", "no Ray")), (N.STOPPING, "no Ray")),
    # it is gone
    "ended well": (verdict(N.GONE, said("READY"), said("GONE", "idle for 60 s"), now=N.READY), (N.GONE, "idle for 60 s")),
    "ended badly": (verdict(N.GONE, NOTHING, said("FAILED", "no Ray")), (N.FAILED, "no Ray")),
    "killed": (verdict(N.GONE, said("READY"), said("READY"), now=N.READY), (N.FAILED, "its agent is gone")),
    "killed, and the site says why": (verdict(N.GONE, why="NODE_FAIL", now=N.READY), (N.FAILED, "NODE_FAIL")),
    "killed before it spoke": (verdict(N.GONE), (N.FAILED, "its agent is gone")),
    "killed while it was told to end": (verdict(N.GONE, NOTHING, said("STOPPING"), wanted=False, now=N.STOPPING), (N.GONE, "")),
    "killed as asked": (verdict(N.GONE, wanted=False, now=N.READY), (N.GONE, "")),
    "failed though asked to end": (verdict(N.GONE, NOTHING, said("FAILED", "x"), wanted=False, now=N.STOPPING), (N.FAILED, "x")),
    # words of an earlier life under the same name
    "an earlier end": (verdict(RUNS, said("FAILED", "old"), said("FAILED", "old"), launch=2), (N.ALLOCATED, "")),
    "an earlier silence": (verdict(RUNS, said("LOST", "old"), NOTHING, launch=2), (N.ALLOCATED, "")),
    "an earlier start": (verdict(RUNS, said("READY"), said("STARTING", launch=2), launch=2), (N.STARTING, "")),
    "a new one": (verdict(RUNS, said("READY", launch=2), said("FAILED", "old"), launch=2), (N.READY, "")),
    "gone again": (verdict(N.GONE, said("FAILED", "old"), said("GONE", "old"), launch=2), (N.FAILED, "its agent is gone")),
}  # fmt: skip


def test_nothing_is_said_to_stop_where_nothing_had_started(
    store: Store, make_record: Callable[..., Record]
) -> None:
    said: list[Event] = []
    folder = store.create(make_record(), {"events.jsonl": ""})
    ClusterManager(store, said.append).terminator.terminate_failed(folder)
    assert not [event.text for event in said if event.text.startswith("stopping")]
    assert store.names() == [] and store.last_archived("lab")


def test_words_are_not_read_where_the_head_or_the_queue_knows() -> None:
    node = NodeRecord("w1", "worker", launch=1)
    assert not needs_report(node, Observation(N.QUEUED), {})
    assert not needs_report(node, Observation(RUNS), said("READY"))
    assert needs_report(node, Observation(RUNS), said("READY", launch=2))
    assert needs_report(node, Observation(RUNS), said("GONE"))
    assert needs_report(node, Observation(RUNS), {})
    assert needs_report(node, Observation(N.GONE), said("READY"))


@pytest.mark.parametrize("name", CASES)
def test_resolve_state(name: str) -> None:
    found, expected = CASES[name]
    assert found == expected


@pytest.mark.parametrize(
    "junk", [{"state": None}, {"state": 7}, {"state": "READY", "since": None, "launch": 1}, {"launch": None}]
)
def test_words_that_are_not_whole(junk: dict[str, Any]) -> None:
    for live, words in ((junk, NOTHING), (NOTHING, junk), (junk, junk)):
        assert verdict(RUNS, live, words)[0] in (N.ALLOCATED, N.READY)


@pytest.mark.parametrize(
    ("cause", "hint"),
    [
        (RefusalCause.RAY_MISSING, "pip install 'ray[default]==2.60.0'"),
        (RefusalCause.RAY_VERSION_DIFFERS, "take `ray` out"),
        (RefusalCause.RAY_TOO_OLD, "install Ray 2.52 or newer"),
        (RefusalCause.SHARED_MEMORY, "--object-store 100M"),
        ("ports_taken", "widen network.ports"),  # as JSON has it
        ("", "heliostat logs lab head"),
    ],
)
def test_startup_hint(cause: str, hint: str) -> None:
    record = Record("lab", "1", "local", "up", 0.0, {})
    assert startup_hint(cause, record).startswith(hint)
