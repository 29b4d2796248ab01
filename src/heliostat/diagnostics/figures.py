"""The measurements that the advisor's rules read: nodes, demands, actors and placement groups over several readings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import floor
from statistics import fmean

from heliostat.diagnostics.sizing import Shape


@dataclass(frozen=True)
class Gpu:
    name: str
    use: float | None  # percent
    memory: tuple[float, float] | None  # used, total, in MiB
    temperature: float | None = None


@dataclass(frozen=True)
class Node:
    """One node at one time. `resources`: used and total, as Ray counts. `held`: reserved by placement groups, but unused.
    `at`: when Ray measured the host."""

    name: str
    resources: Mapping[str, Sequence[float]]
    held: Mapping[str, float] = field(default_factory=dict)
    at: float | None = None
    cpu: float | None = None
    memory: tuple[float, float] | None = None  # used, total, in bytes
    gpus: Sequence[Gpu] = ()

    def used(self, resource: str) -> float:
        return self.resources.get(resource, (0.0, 0.0))[0]

    def total(self, resource: str) -> float:
        return self.resources.get(resource, (0.0, 0.0))[1]

    def taken(self, resource: str) -> float:
        return self.used(resource) + self.held.get(resource, 0.0)

    def fits_when_empty(self, shape: Shape) -> bool:
        """Whether the node's total resources suffice."""
        return all(value <= self.total(name) for name, value in shape.items())

    def fits_now(self, shape: Shape, *, ignore_held: bool = False) -> bool:
        """Whether the free resources suffice. ignore_held: count unused resources of placement groups as free."""
        taken = self.used if ignore_held else self.taken
        return all(value <= self.total(name) - taken(name) for name, value in shape.items())


@dataclass(frozen=True)
class Demand:
    """Pending tasks and actors of one shape; `grouped` of them are inside a placement group."""

    shape: Shape
    count: int
    grouped: int = 0


@dataclass(frozen=True)
class Reading:
    """A cluster at one time."""

    nodes: Sequence[Node]
    demands: Sequence[Demand] = ()


@dataclass(frozen=True)
class Actors:
    """Actors of one class, shape and job: how many are alive, and how many wait for resources."""

    name: str
    shape: Shape
    job: str
    alive: int
    waiting: int


@dataclass(frozen=True)
class Group:
    """A pending placement group. `infeasible`: as Ray reports it, which it never does for PACK and SPREAD."""

    bundles: Sequence[Shape]
    infeasible: bool
    job: str

    def fits(self, nodes: Sequence[Node]) -> bool:
        """False: the nodes cannot hold the group even when empty. True may be wrong for bundles of several shapes."""
        if self.infeasible:
            return False

        def slots(node: Node, shape: Shape) -> int:
            return min(
                (floor(node.total(name) / value) for name, value in shape.items() if value),
                default=len(self.bundles),
            )

        def count_at_least(shape: Shape) -> int:
            return sum(all(b.get(name, 0.0) >= value for name, value in shape.items()) for b in self.bundles)

        totals: dict[str, float] = {}
        for name, value in (item for bundle in self.bundles for item in bundle.items()):
            totals[name] = totals.get(name, 0.0) + value
        return all(
            amount <= sum(node.total(name) for node in nodes) for name, amount in totals.items()
        ) and all(
            count_at_least(shape) <= sum(slots(node, shape) for node in nodes) for shape in self.bundles
        )


@dataclass(frozen=True)
class Figures:
    """Several readings, oldest first, and the actors and placement groups at their end. `spilled`: node -> bytes at the first
    and at the last reading."""

    readings: Sequence[Reading]
    actors: Sequence[Actors] = ()
    groups: Sequence[Group] = ()
    spilled: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    cluster: str = "NAME"
    elastic: bool = False

    @property
    def last(self) -> Reading:
        return self.readings[-1]

    def taken(self, resource: str) -> float:
        return sum(node.taken(resource) for node in self.last.nodes)

    def total(self, resource: str) -> float:
        return sum(node.total(resource) for node in self.last.nodes)

    def lasting_demands(self) -> list[Demand]:
        """The demands that were pending at every reading; others belong to a queue that moves."""
        shapes = [{shape_key(demand.shape) for demand in reading.demands} for reading in self.readings]
        return [d for d in self.last.demands if all(shape_key(d.shape) in keys for keys in shapes)]

    def describe_use(self, shape: Shape) -> str:
        """How much of the shape's resources is taken, and by which actors."""
        parts = [f"{self.taken(name):g} of {self.total(name):g} {name} taken" for name in shape]
        holders = sorted(
            (
                (actors.alive * max((actors.shape.get(name, 0.0) for name in shape), default=0.0), actors)
                for actors in self.actors
            ),
            key=lambda holder: -holder[0],
        )
        parts += [f"{n:g} by {a.alive} × `{a.name}` of job {a.job}" for n, a in holders[:2] if n]
        return ", ".join(parts)


def shape_key(shape: Shape) -> tuple[tuple[str, float], ...]:
    return tuple(sorted((name, value) for name, value in shape.items() if value))


def measurements(figures: Figures, name: str) -> list[Node]:
    """Each measurement of a node's host once: Ray measures less often than we read."""
    by_time = {}
    for reading in figures.readings:
        for node in reading.nodes:
            if node.name == name and node.at is not None:
                by_time[node.at] = node
    return list(by_time.values())


def mean_cpu(figures: Figures, name: str) -> float | None:
    """The mean CPU utilization of a node in percent."""
    uses = [node.cpu for node in measurements(figures, name) if node.cpu is not None]
    return fmean(uses) if uses else None


def mean_gpu_use(figures: Figures) -> list[tuple[Node, int, float]]:
    """(node, index, mean utilization in percent) of every GPU that reports its utilization."""
    found = []
    for node in figures.last.nodes:
        measured = measurements(figures, node.name)
        for index in range(len(node.gpus)):
            uses = [u for at in measured if index < len(at.gpus) and (u := at.gpus[index].use) is not None]
            if uses:
                found.append((node, index, fmean(uses)))
    return found


def count_measurements(figures: Figures) -> int:
    return max(len(measurements(figures, node.name)) for node in figures.last.nodes)
