"""The persisted state of one cluster and its nodes."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from heliostat.agent.protocol import CommandConfig
from heliostat.common.documents import JobRecord, JsonObject
from heliostat.common.errors import Code, NotFoundError
from heliostat.state.states import TERMINAL, ClusterState, NodeState, summary

SCHEMA = 2
RUN = "run"  # the id of the command of a `run`


@dataclass
class NodeRecord:
    """The last known state of one node. `since`: when it entered the state, in seconds of the epoch."""

    name: str
    role: str
    group: str | None = None
    state: NodeState = NodeState.REQUESTED
    reason: str = ""
    since: float = 0.0
    handle: str | None = None  # native id of its allocation or process
    launch: int = 0  # number of the launch that started it; reports of earlier launches are ignored
    joined: str | None = None  # id of the `join` that added it; its end is not a failure
    cause: str = ""  # code of the reason: a StopReason or RefusalCause of agent/protocol.py


@dataclass
class Record:
    """The state that a later command needs to act on the cluster, on any host with the directory."""

    name: str
    id: str  # the cluster id, never reused; identifies the cluster's processes
    backend: str
    kind: str  # "up": runs until `down`; "run": ends with its command
    created: float
    spec: dict[str, Any]
    target: str = "up"  # requested by the last command: "up" or "down"
    nodes: dict[str, NodeRecord] = field(default_factory=dict)
    handles: list[dict[str, Any]] = field(default_factory=list)
    launches: int = 0  # only increases: a later node may reuse the name of an ended one
    jobs: list[JobRecord] = field(default_factory=list)
    joins: int = 0  # number of joins so far
    warned: float = 0.0  # time of the head's last recorded warning
    remote_dir: str | None = None  # its directory on the login host, if that is another host
    command: CommandConfig | None = None
    ready: float | None = None  # when it was first ready
    ended: float | None = None
    reason: str = ""
    exit_code: int | None = None

    def state(self) -> ClusterState:
        return summary((node.role == "head", node.state) for node in self.nodes.values())

    def job_ids(self) -> list[str]:
        """The ids of the command of a `run` and of the jobs that Heliostat submitted, oldest first."""
        return ([RUN] if self.command else []) + [job["id"] for job in self.jobs]

    def has_ended(self) -> bool:
        return all(node.state in TERMINAL for node in self.nodes.values())

    def require_node(self, name: str) -> NodeRecord:
        """The node of this name. Raises NotFoundError where there is none."""
        if name not in self.nodes:
            raise NotFoundError(
                f"`{self.name}` has no node `{name}`",
                cause=f"it has {', '.join(self.nodes)}",
                code=Code.NOT_FOUND_NODE,
            )
        return self.nodes[name]

    @staticmethod
    def from_json(data: JsonObject) -> Record:
        if data.get("schema") == 1:
            data = _upgrade(data)
        known = {key: value for key, value in data.items() if key in Record.__dataclass_fields__}
        nodes = {
            name: NodeRecord(**{**node, "state": NodeState(node["state"])})
            for name, node in known["nodes"].items()
        }
        return Record(**{**known, "nodes": nodes})

    def to_json(self) -> JsonObject:
        return {"schema": SCHEMA, **asdict(self)}


def _upgrade(data: JsonObject) -> JsonObject:
    """A record of schema 1 with the names of schema 2."""

    def rename(table: JsonObject, names: dict[str, str]) -> JsonObject:
        return {names.get(key, key): value for key, value in table.items()}

    nodes = {name: rename(node, {"guest": "joined"}) for name, node in data["nodes"].items()}
    return {**rename(data, {"site": "backend", "place": "remote_dir"}), "nodes": nodes}
