"""The persisted state of one cluster and its nodes."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from heliostat.common.errors import Code, NotFoundError
from heliostat.state.states import TERMINAL, ClusterState, NodeState, summary

SCHEMA = 2


@dataclass
class NodeRecord:
    """One node as last known. `since` is when it came into its state, in seconds of the epoch."""

    name: str
    role: str
    group: str | None = None
    state: NodeState = NodeState.REQUESTED
    reason: str = ""
    cause: str = ""  # code of the reason: a StopReason or RefusalCause of agent/protocol.py
    since: float = 0.0
    handle: str | None = None  # the native id that it came with
    launch: int = 0  # which of the cluster's launches it came with; words of an earlier life mean nothing
    joined: str | None = None  # the `join` that it came with: it leaves without being missed


@dataclass
class Record:
    """All that a later command, on any host that sees the folder, needs to act on the cluster."""

    name: str
    id: str  # unique for ever; marks the cluster's processes
    backend: str
    kind: str  # "up": lives until it is ended; "run": lives as long as its command
    created: float
    spec: dict[str, Any]
    target: str = "up"  # what the last command wanted: "up" or "down"
    nodes: dict[str, NodeRecord] = field(default_factory=dict)
    handles: list[dict[str, Any]] = field(default_factory=list)
    launches: int = 0  # never counts back: the name of a node that left may come back
    jobs: list[dict[str, Any]] = field(default_factory=list)
    joins: int = 0  # how many there have been
    warned: float = 0.0  # when the head last warned of something that is on record
    remote_dir: str | None = (
        None  # its folder on the machine that it is reached through, where that is another
    )
    command: dict[str, Any] | None = None
    ready: float | None = None  # when it could be used for the first time
    ended: float | None = None
    reason: str = ""
    exit_code: int | None = None

    def state(self) -> ClusterState:
        return summary((node.role == "head", node.state) for node in self.nodes.values())

    def is_over(self) -> bool:
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
    def from_json(data: dict[str, Any]) -> Record:
        if data.get("schema") == 1:
            data = _upgrade(data)
        known = {key: value for key, value in data.items() if key in Record.__dataclass_fields__}
        nodes = {
            name: NodeRecord(**{**node, "state": NodeState(node["state"])})
            for name, node in known["nodes"].items()
        }
        return Record(**{**known, "nodes": nodes})

    def to_json(self) -> dict[str, Any]:
        return {"schema": SCHEMA, **asdict(self)}


def _upgrade(data: dict[str, Any]) -> dict[str, Any]:
    """A record of schema 1 in the names of schema 2."""

    def rename(table: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
        return {names.get(key, key): value for key, value in table.items()}

    nodes = {name: rename(node, {"guest": "joined"}) for name, node in data["nodes"].items()}
    return {**rename(data, {"site": "backend", "place": "remote_dir"}), "nodes": nodes}
