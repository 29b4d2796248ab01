"""What a cluster and its joins used, for the history: from the times that the head's agent keeps."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from heliostat.agent.protocol import ClusterReport, JobReport, NodeReport
from heliostat.common.documents import JobRecord
from heliostat.state.records import Record
from heliostat.state.states import TERMINAL, ClusterState, NodeState

Json = dict[str, Any]
_LEFT = {*map(str, TERMINAL), str(NodeState.STOPPING), str(NodeState.LOST)}


def price_of_node(record: Record, group: str | None) -> float | None:
    """`price_per_node_hour` of a node's group, else of the cluster; None where the spec has neither."""
    table = (record.spec.get("groups") or {}).get(group) or {}
    price = table.get("price_per_node_hour") or record.spec.get("price_per_node_hour")
    return None if price is None else float(price)


def cost_of(record: Record, node_hours: float | None, groups: Sequence[str | None]) -> float | None:
    """The cost of these node-hours, spent evenly by nodes of these groups; None where a price is unknown."""
    prices = [price for group in groups if (price := price_of_node(record, group)) is not None]
    if node_hours is None or not groups or len(prices) < len(groups):
        return None
    return round(node_hours * sum(prices) / len(prices), 4)


def note_ready(record: Record, live: ClusterReport) -> None:
    """Records when the cluster became ready: the head's time, since commands may observe it later."""
    if record.ready is None:
        ready = live.get("ready") or (live.get("job") or {}).get("started")
        if ready or record.state() is ClusterState.READY:
            record.ready = float(ready or time.time())


def note_joins(record: Record, live: ClusterReport) -> None:
    """Records ready, ended, seconds, node_seconds, status and exit_code of each join. Called before its nodes are removed
    from the record, and again when the cluster has ended."""
    table = live.get("nodes") or {}
    over = record.ended or (live.get("ended") or {}).get("at")
    for join in record.jobs:
        if "nodes" not in join:
            continue  # a Ray job
        names = [f"{join['id']}-{i}" for i in range(1, join["nodes"] + 1)]
        spans = [span for name in names if (span := _span(record, table.get(name) or {}, name, over))]
        if spans:
            join["ready"] = max(ready for ready, _ in spans)
        ends = [end for _, end in spans if end is not None]
        if ends and len(ends) == len(spans):
            join["ended"] = max(ends)
            join["node_seconds"] = round(sum(max(0.0, (end or 0.0) - ready) for ready, end in spans), 3)
        _note_command(join, (table.get(names[0]) or {}).get("job") or {})


def _span(
    record: Record, status: NodeReport, name: str, end: float | None
) -> tuple[float, float | None] | None:
    """(when the node became ready, when it ended); None: it was never ready. end: of the cluster."""
    if not status.get("ready"):
        return None
    known = record.nodes.get(name)
    if status.get("state") in _LEFT:
        return float(status["ready"]), float(status["since"])
    if known and known.state in TERMINAL:
        return float(status["ready"]), known.since
    return float(status["ready"]), end


def _note_command(join: JobRecord, job: JobReport) -> None:
    started, ended = job.get("started"), job.get("ended")
    if started and ended:
        join["seconds"] = round(max(0.0, ended - started), 3)
    if job.get("exit_code") is not None:
        join["exit_code"], join["status"] = job["exit_code"], job["status"]
