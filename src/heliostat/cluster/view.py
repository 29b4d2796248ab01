"""A cluster at one moment, and small functions that read or describe its nodes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

from heliostat.agent.protocol import ClusterReport, JobReport
from heliostat.common.documents import EventRow
from heliostat.common.errors import HeliostatError
from heliostat.state.records import RUN, NodeRecord, Record
from heliostat.state.states import TERMINAL, ClusterState, NodeState, check_transition
from heliostat.state.store import ClusterDirectory

N = NodeState
T = TypeVar("T")
MAX_NAMES = 4  # a group of more nodes is abbreviated


@dataclass
class View:
    """A cluster at one moment: the refreshed record, and the last state that its head wrote."""

    folder: ClusterDirectory
    record: Record
    live: ClusterReport

    @staticmethod
    def read(folder: ClusterDirectory) -> View:
        """The cluster as it is on disk; the backend is not asked."""
        return View(folder, folder.record(), folder.state())

    @property
    def state(self) -> ClusterState:
        return self.record.state()

    @property
    def address(self) -> str | None:
        connection = self.folder.connection()
        return connection["address"] if connection and not self.headless else None

    @property
    def headless(self) -> bool:
        """The head has ended: the nodes that still run are no longer a cluster."""
        return any(node.role == "head" and node.state in TERMINAL for node in self.record.nodes.values())

    @property
    def run(self) -> JobReport:
        """The status of the command of a `run`, as the head's agent reports it."""
        return command_status(self.live, RUN)

    def alive(self) -> int:
        """The number of nodes that are READY."""
        return sum(node.state is N.READY for node in self.record.nodes.values())

    def require_running(self) -> None:
        """Raises HeliostatError unless the cluster can be used."""
        if self.address is None or self.record.has_ended():
            raise HeliostatError(
                f"`{self.record.name}` is {self.state}, so it cannot be used",
                cause=end_reason(self.record),
                hint=f"heliostat status {self.record.name}",
            )


def head_of(record: Record) -> NodeRecord:
    return next(node for node in record.nodes.values() if node.role == "head")


def end_reason(record: Record) -> str:
    """Why the cluster ended: its own reason, else the reasons of its nodes."""
    reasons = dict.fromkeys(node.reason for node in record.nodes.values() if node.reason)
    return record.reason or "; ".join(reasons)


def command_status(live: ClusterReport, name: str) -> JobReport:
    """What the head's agent reports of a command: that of the cluster, or that of a join."""
    owner = live if name == RUN else (live.get("nodes") or {}).get(f"{name}-1") or {}
    return owner.get("job") or {}


def group_alike(
    items: Iterable[T], name: Callable[[T], str], kind: Callable[[T], object]
) -> list[tuple[str, T]]:
    """(names, first item) of each kind; the names of a large group are abbreviated, so that it fits on one line."""
    groups: dict[object, list[T]] = {}
    for item in items:
        groups.setdefault(kind(item), []).append(item)
    found = []
    for group in groups.values():
        names = [name(item) for item in group]
        few = names if len(names) <= MAX_NAMES else [*names[:2], f"{len(names) - 2} more"]
        found.append((", ".join(few), group[0]))
    return found


def group_nodes(nodes: Iterable[NodeRecord]) -> list[tuple[str, NodeRecord]]:
    """(names, first node) of the nodes that have the same state and reason."""
    return group_alike(nodes, lambda node: node.name, lambda node: (node.state, node.reason))


def describe_waiting(nodes: Iterable[NodeRecord]) -> str:
    """`head, w1 queued, waits for nodes to become free (Resources)`"""
    groups = group_nodes(node for node in nodes if node.state is not N.READY)
    parts = [
        f"{names} {str(node.state).lower()}" + (f", {node.reason}" if node.reason else "")
        for names, node in groups
    ]
    return "; ".join(parts[:3]) + ("; …" if len(parts) > 3 else "")


def make_move(
    node: NodeRecord, state: NodeState, reason: str, at: float | None = None, cause: str = ""
) -> EventRow:
    """Changes the node's state, and returns the event of it. The caller holds the lock and saves the record."""
    check_transition(node.state, state)
    since, old = time.time() if at is None else at, node.state
    node.state, node.reason, node.since, node.cause = state, reason, since, cause
    event: EventRow = {
        "at": since,
        "kind": "move",
        "node": node.name,
        "from": old,
        "to": state,
        "reason": reason,
    }
    if cause:
        event["cause"] = cause
    return event
