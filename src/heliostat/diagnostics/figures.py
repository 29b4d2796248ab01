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
    """One node at one moment. `resources`: used and total, as Ray counts. `held`: what placement groups hold and nobody
    uses. `at`: when the host was looked at."""

    name: str
    resources: Mapping[str, Sequence[float]]
    held: Mapping[str, float] = field(default_factory=dict)
    at: float | None = None
    cpu: float | None = None
    memory: tuple[float, float] | None = None  # used, total, in bytes
    gpus: Sequence[Gpu] = ()

    def used(self, what: str) -> float:
        return self.resources.get(what, (0.0, 0.0))[0]

    def total(self, what: str) -> float:
        return self.resources.get(what, (0.0, 0.0))[1]

    def taken(self, what: str) -> float:
        return self.used(what) + self.held.get(what, 0.0)

    def could_take(self, shape: Shape) -> bool:
        """Were it empty."""
        return all(value <= self.total(name) for name, value in shape.items())

    def has_room(self, shape: Shape, *, held: bool = False) -> bool:
        """Now. held: were that free, too, which placement groups hold for nobody."""
        taken = self.used if held else self.taken
        return all(value <= self.total(name) - taken(name) for name, value in shape.items())


@dataclass(frozen=True)
class Demand:
    """Tasks and actors of one shape that wait for a place; `grouped` of them in a placement group's own."""

    shape: Shape
    count: int
    grouped: int = 0


@dataclass(frozen=True)
class Reading:
    """A cluster at one moment."""

    nodes: Sequence[Node]
    demands: Sequence[Demand] = ()


@dataclass(frozen=True)
class Actors:
    """Those of one class, shape and job that live, and that wait for a place."""

    name: str
    shape: Shape
    job: str
    alive: int
    waiting: int


@dataclass(frozen=True)
class Group:
    """A placement group that waits. `infeasible`: Ray's own word; of PACK and SPREAD it never says it."""

    bundles: Sequence[Shape]
    infeasible: bool
    job: str

    def fits(self, nodes: Sequence[Node]) -> bool:
        """False: these nodes could not hold it were they empty. True may be wrong for bundles of several shapes."""
        if self.infeasible:
            return False

        def slots(node: Node, shape: Shape) -> int:
            return min(
                (floor(node.total(name) / value) for name, value in shape.items() if value),
                default=len(self.bundles),
            )

        def as_large(shape: Shape) -> int:
            return sum(all(b.get(name, 0.0) >= value for name, value in shape.items()) for b in self.bundles)

        wanted: dict[str, float] = {}
        for name, value in (item for bundle in self.bundles for item in bundle.items()):
            wanted[name] = wanted.get(name, 0.0) + value
        return all(
            amount <= sum(node.total(name) for node in nodes) for name, amount in wanted.items()
        ) and all(as_large(shape) <= sum(slots(node, shape) for node in nodes) for shape in self.bundles)


@dataclass(frozen=True)
class Figures:
    """What was seen: several readings, oldest first, and at their end who runs what. `spilled`: node -> bytes, first and last."""

    readings: Sequence[Reading]
    actors: Sequence[Actors] = ()
    groups: Sequence[Group] = ()
    spilled: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    cluster: str = "NAME"
    elastic: bool = False

    @property
    def last(self) -> Reading:
        return self.readings[-1]

    def taken(self, what: str) -> float:
        return sum(node.taken(what) for node in self.last.nodes)

    def total(self, what: str) -> float:
        return sum(node.total(what) for node in self.last.nodes)

    def lasting(self) -> list[Demand]:
        """What waited at every reading: whatever comes and goes in between is a queue that moves."""
        shapes = [{key(demand.shape) for demand in reading.demands} for reading in self.readings]
        return [d for d in self.last.demands if all(key(d.shape) in seen for seen in shapes)]

    def use_of(self, shape: Shape) -> str:
        """How much of what a shape asks for is taken, and by whom."""
        parts = [f"{self.taken(name):g} of {self.total(name):g} {name} taken" for name in shape]
        holders = sorted(
            (
                (actors.alive * max((actors.shape.get(name, 0.0) for name in shape), default=0.0), actors)
                for actors in self.actors
            ),
            key=lambda holder: -holder[0],
        )
        parts += [f"{a:g} by {who.alive} × `{who.name}` of job {who.job}" for a, who in holders[:2] if a]
        return ", ".join(parts)


def key(shape: Shape) -> tuple[tuple[str, float], ...]:
    return tuple(sorted((name, value) for name, value in shape.items() if value))


def moments(figures: Figures, name: str) -> list[Node]:
    """A node as its host was looked at, each look once: it looks less often than we ask."""
    seen = {}
    for reading in figures.readings:
        for node in reading.nodes:
            if node.name == name and node.at is not None:
                seen[node.at] = node
    return list(seen.values())


def mean_cpu(figures: Figures, name: str) -> float | None:
    uses = [node.cpu for node in moments(figures, name) if node.cpu is not None]
    return fmean(uses) if uses else None


def gpu_use(figures: Figures) -> list[tuple[Node, int, float]]:
    """(node, index, mean use in percent) of every GPU that tells."""
    found = []
    for node in figures.last.nodes:
        looks = moments(figures, node.name)
        for index in range(len(node.gpus)):
            uses = [u for look in looks if index < len(look.gpus) and (u := look.gpus[index].use) is not None]
            if uses:
                found.append((node, index, fmean(uses)))
    return found


def _looks(figures: Figures) -> int:
    return max(len(moments(figures, node.name)) for node in figures.last.nodes)
