"""What the history counts, from the times that the head's agent keeps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from heliostat.cli.history import make_rows
from heliostat.cluster.accounting import note_joins, note_ready
from heliostat.state.records import NodeRecord, Record
from heliostat.state.states import NodeState

T = 1_700_000_000.0


@pytest.mark.parametrize("live", [{"ready": T + 20}, {"job": {"started": T + 20}}])
def test_a_short_run_has_its_times_though_nobody_saw_it_ready(
    make_record: Callable[..., Record], live: dict[str, Any]
) -> None:
    """The same `run` twice gave `26s 0s 0.00`, then `- - -`: it counted from the moment of the client's look."""
    record = make_record(ended=T + 26)
    for node in record.nodes.values():
        node.state = NodeState.GONE
    note_ready(record, live)
    (row,) = make_rows(record)
    assert (row["waited_s"], row["ran_s"], row["node_hours"]) == (20.0, 6.0, round(12 / 3600, 4))


def test_one_that_never_was_ready_has_none(make_record: Callable[..., Record]) -> None:
    record = make_record(ended=T + 26)
    note_ready(record, {"ready": None, "job": {"started": None}})
    (row,) = make_rows(record)
    assert (row["waited_s"], row["ran_s"], row["node_hours"]) == (None, None, None)


def joined(make_record: Callable[..., Record], **more: Any) -> Record:
    record = make_record(jobs=[{"id": "j1", "entrypoint": "", "submitted": T, "nodes": 2}], **more)
    for name in ("j1-1", "j1-2"):
        record.nodes[name] = NodeRecord(name, "worker", state=NodeState.READY, since=T + 10, joined="j1")
    return record


def told(state: str, since: float, **more: Any) -> dict[str, Any]:
    return {"state": state, "since": since, "ready": T + 10, **more}


def test_a_join_whose_nodes_left(make_record: Callable[..., Record]) -> None:
    record = joined(make_record)
    job = {"status": "FAILED", "exit_code": 3, "started": T + 11, "ended": T + 41.5}
    note_joins(record, {"nodes": {"j1-1": told("READY", T + 10, job=job), "j1-2": told("GONE", T + 40)}})
    assert make_rows(record)[1]["node_hours"] is None, "one of its nodes is still there"
    note_joins(record, {"nodes": {"j1-1": told("GONE", T + 50, job=job), "j1-2": told("GONE", T + 40)}})
    cluster, join = make_rows(record)
    assert (cluster["nodes"], join["nodes"], join["kind"]) == (2, 2, "join")
    assert (join["waited_s"], join["ran_s"], join["node_hours"]) == (10.0, 30.5, round(70 / 3600, 4))
    assert (join["exit_code"], join["why"]) == (3, "failed")
    note_joins(record, {})  # another head knows nothing of it: what is known stays
    assert make_rows(record)[1] == join


def test_a_join_that_ends_with_its_cluster_or_is_killed(make_record: Callable[..., Record]) -> None:
    record = joined(make_record)
    record.nodes["j1-2"].state, record.nodes["j1-2"].since = NodeState.FAILED, T + 20
    live = {"nodes": {name: told("READY", T + 10) for name in ("j1-1", "j1-2")}, "ended": {"at": T + 110}}
    note_joins(record, live)
    assert record.jobs[0]["node_seconds"] == 110.0 and make_rows(record)[1]["ran_s"] == 100.0


def test_a_join_that_never_came(make_record: Callable[..., Record]) -> None:
    record = joined(make_record, ended=T + 60)
    note_joins(record, {"nodes": {"j1-1": {"state": "FAILED", "since": T + 5}}})
    join = make_rows(record)[1]
    assert (join["waited_s"], join["ran_s"], join["node_hours"], join["exit_code"]) == (
        None,
        None,
        None,
        None,
    )


def test_the_cost_is_node_hours_times_the_price(make_record: Callable[..., Record]) -> None:
    record = joined(make_record, ready=T, ended=T + 7200)
    record.jobs[0]["node_seconds"] = 1800.0
    assert [row["cost"] for row in make_rows(record)] == [None, None]
    record.spec["price_per_node_hour"] = 0.5
    assert [row["cost"] for row in make_rows(record)] == [2.0, 0.25]
    record.nodes["w1"].group = "gpu"
    record.spec["groups"] = {"gpu": {"price_per_node_hour": 3.0}}
    assert make_rows(record)[0]["cost"] == 7.0
    del record.spec["price_per_node_hour"]
    assert make_rows(record)[0]["cost"] is None, "the price of the head is unknown"
