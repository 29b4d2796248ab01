"""Derives the state of a node from the evidence: the backend, the head's agent, and the node's own last report."""

from __future__ import annotations

import time

from heliostat.agent.protocol import NodeReport
from heliostat.backends.base import Observation
from heliostat.state.records import NodeRecord
from heliostat.state.states import TERMINAL, NodeState

N = NodeState


def resolve_state(
    node: NodeRecord,
    seen: Observation,
    live: NodeReport,
    report: NodeReport,
    wanted: bool,
    alone: bool = True,
) -> tuple[N, str, float]:
    """A node's (state, reason, since) where our agents start Ray.

    seen: the backend's answer for the node's handle. live: the node in the head's table. report: the last that the node's
    own agent wrote. wanted: no command has asked for its end. alone: no other node has its handle, so that both end together.
    """
    live, report = _of_launch(live, node), _of_launch(report, node)
    reported = N.__members__.get(str(report.get("state")))
    if seen.state is N.GONE:
        if reported in TERMINAL and reported is not None:
            return reported, str(report.get("reason", "")), float(report.get("since") or time.time())
        if wanted:
            return N.FAILED, seen.reason or "its agent is gone", time.time()
        return N.GONE, seen.reason, time.time()
    if seen.state is not N.ALLOCATED:
        return seen.state, seen.reason, time.time()
    # the head's table is the best evidence, except for a node that ended
    in_table = N.__members__.get(str(live.get("state")))
    ended = in_table in (None, *TERMINAL) or (in_table is N.LOST and reported in TERMINAL)
    evidence = report if ended and report else live  # a node that never started has no report
    state = N.__members__.get(str(evidence.get("state")), N.ALLOCATED)
    since, reason = float(evidence.get("since") or time.time()), str(evidence.get("reason", ""))
    if state in TERMINAL and (alone or (wanted and state is N.GONE)):
        # its agent still cleans up; or it ended with the job, which the scheduler may queue again
        return N.STOPPING, reason, since
    return state, reason, since


def _of_launch(report: NodeReport, node: NodeRecord) -> NodeReport:
    """The report, if it is of the node's current launch."""
    return report if int(report.get("launch") or 0) == node.launch else {}


def find_cause(node: NodeRecord, *evidence: NodeReport) -> str:
    """The code of the reason in the first document of this launch of the node that has one."""
    current = (one for one in evidence if int(one.get("launch") or 0) == node.launch)
    return next((str(one["cause"]) for one in current if one.get("cause")), "")


def needs_report(node: NodeRecord, seen: Observation, live: NodeReport) -> bool:
    """Whether the node's own report can change the result of `resolve_state`: reading a file per node is slow on a shared
    file system."""
    if seen.state in (N.QUEUED, N.UNKNOWN):
        return False
    is_same = int(live.get("launch") or 0) == node.launch
    state = N.__members__.get(str(live.get("state"))) if is_same else None
    return seen.state is not N.ALLOCATED or state in (None, N.LOST, *TERMINAL)


def resolve_platform_state(node: NodeRecord, status: NodeReport) -> tuple[N, str, float] | None:
    """A node's (state, reason, since) where the platform starts Ray: its status is the only evidence. None: it has no status."""
    state = N.__members__.get(str(status.get("state")))
    if state is None:
        return None
    if state is N.ALLOCATED and node.state in (N.STARTING, N.READY, N.LOST, N.STOPPING):
        state = N.STARTING  # another machine replaces it
    return state, str(status.get("reason") or ""), float(status.get("since") or time.time())
