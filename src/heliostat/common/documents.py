"""The JSON documents of the client: status, jobs, events and history. `agent/protocol.py` has those of the agent."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypedDict

# An object whose keys another program or the user defines: Kubernetes, Ray, a cloud, a file before its validation.
JsonObject = dict[str, Any]
JsonMapping = Mapping[str, Any]


def select(document: JsonMapping, keys: Iterable[str]) -> JsonObject:
    """The document with these keys only."""
    return {key: document[key] for key in keys}


EventRow = TypedDict(
    "EventRow",
    {
        "at": float,
        "kind": str,  # "note" or "move"
        "text": str,  # of a note
        "node": str,  # of a move, as all that follow
        "from": str,
        "to": str,
        "reason": str,
        "cause": str,
        "names": str,  # of the first move of several: all their nodes
    },
    total=False,
)


class JobInfo(TypedDict, total=False):
    """A job of Ray, or the command of a `run`."""

    id: str
    kind: str  # "job", "driver" or "run"
    status: str
    entrypoint: str | None
    started: float | None
    ended: float | None
    seconds: float | None
    exit_code: int | None
    message: str
    node_id: str | None
    ran: str  # Ray's entrypoint; `entrypoint` is the user's command
    pid: str | int | None
    ray_id: str  # the id in its actors and tasks


class JobRecord(TypedDict, total=False):
    """A job or a join in the record of a cluster. Only a join has `nodes`."""

    id: str
    entrypoint: str
    ran: str  # Ray's entrypoint; `entrypoint` is the user's command
    submitted: float
    status: str | None
    seconds: float | None
    exit_code: int | None
    nodes: int
    ready: float
    ended: float
    node_seconds: float


class GpuStatus(TypedDict):
    name: str | None
    utilization: float | None
    memory_used: float | None
    memory_total: float | None
    temperature: float | None


class HostMetrics(TypedDict):
    at: float | None
    cpu: float | None  # percent of all cores
    memory: list[float] | None  # used and total, of the container or the host


class RayNode(TypedDict):
    """A node of Ray that is alive."""

    name: str
    id: str
    ip: str
    is_head: bool
    resources: dict[str, list[float]]  # name -> used, total
    held: dict[str, float]  # idle in placement groups, not part of `used`
    gpus: list[GpuStatus]
    host: HostMetrics


class NodeStatus(TypedDict, total=False):
    """A node in `heliostat status --json`."""

    name: str
    role: str
    group: str | None
    state: str
    reason: str
    since: float
    ip: str | None
    host: str | None
    native_id: str | None
    ports: dict[str, Any] | None
    resources: dict[str, list[float]]
    gpus: list[GpuStatus]
    restarts: int


class ClusterStatus(TypedDict, total=False):
    """`heliostat status --json`"""

    schema: int
    name: str
    backend: str
    state: str
    ray_version: str | None
    address: str | None
    dashboard_port: int | None
    started: float
    time_left_s: float | None
    idle_s: float | None
    problem: str
    remedy: str
    nodes: list[NodeStatus]
    jobs: list[JobInfo]


class HistoryRow(TypedDict):
    """A row of `heliostat history`: a cluster, a join or a job."""

    name: str
    kind: str
    what: str
    backend: str
    nodes: int
    started: str
    waited_s: float | None
    ran_s: float | None
    node_hours: float | None
    cost: float | None
    exit_code: int | None
    why: str
