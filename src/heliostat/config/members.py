"""The nodes that a spec requests: the head, the workers, the kinds of workers, the listed hosts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from heliostat.config.tables import Group, Host, Model

if TYPE_CHECKING:
    from heliostat.config.spec import ClusterSpec


class Member(Model):
    """One node as requested. None: all that the allocation has."""

    name: str
    role: Literal["head", "worker"]
    group: str | None = None
    cpus: int | None = None
    gpus: int | None = None
    memory: int | None = None
    labels: dict[str, str] = Field({})
    resources: dict[str, float] = Field({})
    host: Host | None = None


def members(spec: ClusterSpec) -> list[Member]:
    """The nodes of the cluster, head first, without those that the autoscaler adds."""
    return [
        head_member(spec),
        *worker_members(spec, spec.autoscale.min if spec.autoscale else spec.nodes - 1),
    ]


@dataclass(frozen=True)
class Kind:
    """Worker nodes of one kind: `first` at the start, `least` to `most` with autoscaling."""

    name: str | None  # of the group
    first: int
    least: int
    most: int
    member: Member  # the resources of each


def list_worker_kinds(spec: ClusterSpec) -> list[Kind]:
    """The workers by kind, for a backend that creates nodes by kind."""
    least, most = (spec.autoscale.min, spec.autoscale.max) if spec.autoscale else (None, None)
    if not spec.kinds:
        given = spec.nodes - 1 if "nodes" in spec.model_fields_set or least is None else least
        return [
            _make_kind(None, given, least, most, worker_members(spec.model_copy(update={"nodes": 2}), 1)[0])
        ]
    found = []
    for name, group in spec.kinds.items():
        one = spec.model_copy(update={"groups": {name: group.model_copy(update={"nodes": 1, "min": 1})}})
        low, high = _first(group.min, least), _first(group.max, most)
        found.append(_make_kind(name, group.nodes, low, high, worker_members(one, 1)[0]))
    return found


def _make_kind(name: str | None, given: int, least: int | None, most: int | None, member: Member) -> Kind:
    if most is None:
        return Kind(name, given, given, given, member)
    low = least or 0
    return Kind(name, max(low, min(given, most)), low, most, member)


def hosts(spec: ClusterSpec) -> list[Host]:
    """The listed hosts, the head's first: the one that `head` names, listed or not, otherwise the first."""
    wanted = spec.head.host
    found = [host for host in spec.hosts if wanted in (host.node, host.host)]
    head = found[0] if found else Host(host=wanted) if wanted else spec.hosts[0]
    return [head, *(host for host in spec.hosts if host is not head)]


def head_member(spec: ClusterSpec) -> Member:
    head = spec.head
    idle = {} if head.work else {"cpus": 0, "gpus": 0}
    host = hosts(spec)[0] if spec.hosts else None
    return Member(
        name=host.node if host else "head",
        role="head",
        memory=_first(head.memory, spec.memory_per_node),
        labels={**spec.labels, **(host.labels if host else {})},
        host=host,
        **{
            "cpus": _first(head.cpus, host.cpus if host else None, spec.cpus_per_node),
            "gpus": _first(head.gpus, host.gpus if host else None, spec.gpus_per_node),
            **idle,
        },
    )


def worker_members(spec: ClusterSpec, count: int) -> list[Member]:
    """`count` workers without a group; with groups or hosts in the spec, the workers of those."""
    if spec.hosts:
        return [
            Member(
                name=host.node,
                role="worker",
                cpus=_first(host.cpus, spec.cpus_per_node),
                gpus=_first(host.gpus, spec.gpus_per_node),
                memory=spec.memory_per_node,
                labels={**spec.labels, **host.labels},
                host=host,
            )
            for host in hosts(spec)[1 : count + 1]
        ]
    if not spec.kinds:
        resources = {"cpus": spec.cpus_per_node, "gpus": spec.gpus_per_node, "memory": spec.memory_per_node}
        return _replicate(Member(name="w", role="worker", labels=spec.labels, **resources), count)
    return [
        member
        for name, group in spec.kinds.items()
        for member in _replicate(
            Member(
                name=f"{name}-",
                role="worker",
                group=name,
                cpus=_first(group.cpus, spec.cpus_per_node),
                gpus=_first(group.gpus, spec.gpus_per_node),
                memory=_first(group.memory, spec.memory_per_node),
                labels={**spec.labels, **group.labels},
                resources=group.resources,
            ),
            _min_nodes(spec, group),
        )
    ]


def _replicate(one: Member, count: int) -> list[Member]:
    """`count` members of one kind, numbered from 1. Copies are not validated: that takes seconds for thousands."""
    return [one.model_copy(update={"name": f"{one.name}{i}"}) for i in range(1, count + 1)]


def count_members(spec: ClusterSpec) -> int:
    """The length of `members(spec)`."""
    if spec.hosts or not spec.kinds:
        return 1 + (spec.autoscale.min if spec.autoscale else spec.nodes - 1)
    return 1 + sum(_min_nodes(spec, group) for group in spec.kinds.values())


def _min_nodes(spec: ClusterSpec, group: Group) -> int:
    """The group's number of nodes without demand."""
    if spec.autoscale is None and group.max is None:
        return group.nodes
    return int(_first(group.min, spec.autoscale.min if spec.autoscale else 0))


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)
