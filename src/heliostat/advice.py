"""What the live figures of a cluster mean for who runs something on it. Pure: figures in, advice out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean

from heliostat.sizing import Shape, show
from heliostat.units import count, format_bytes

GPU_BUSY = 80.0  # percent: below it, something else than the GPU sets the pace
GPU_FULL = 0.9  # of its memory
GPU_HOT = 85.0  # °C: about here the makers' own limits begin to slow it down
CPU_BUSY = 90.0  # percent of all cores
STORE_FULL = 0.8  # of the object store: here Ray begins to write objects to disk
MEMORY_NEAR, MEMORY_LIMIT = 0.88, 0.95  # of the host's memory; above the limit Ray kills workers


@dataclass(frozen=True)
class Gpu:
    name: str
    use: float | None  # percent
    memory: tuple[float, float] | None  # used, total, in MiB
    temperature: float | None = None


@dataclass(frozen=True)
class Node:
    """One node at one moment. `resources`: used and total, as Ray counts. `at`: when the host was looked at."""

    name: str
    resources: Mapping[str, Sequence[float]]
    at: float | None = None
    cpu: float | None = None
    memory: tuple[float, float] | None = None  # used, total, in bytes
    gpus: Sequence[Gpu] = ()

    def used(self, what: str) -> float:
        return self.resources.get(what, (0.0, 0.0))[0]

    def total(self, what: str) -> float:
        return self.resources.get(what, (0.0, 0.0))[1]

    def could_take(self, shape: Shape) -> bool:
        """Were it empty."""
        return all(value <= self.total(name) for name, value in shape.items())


@dataclass(frozen=True)
class Demand:
    """Tasks and actors of one shape that wait for a place; `grouped` of them in a placement group's own."""

    shape: Shape
    count: int
    grouped: int = 0


@dataclass(frozen=True)
class Reading:
    """A cluster at one moment. `held`: what placement groups hold, used and held in all."""

    nodes: Sequence[Node]
    demands: Sequence[Demand] = ()
    held: Mapping[str, Sequence[float]] = field(default_factory=dict)


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
    """A placement group that waits."""

    bundles: Sequence[Shape]
    infeasible: bool
    job: str


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

    def used(self, what: str) -> float:
        return sum(node.used(what) for node in self.last.nodes)

    def total(self, what: str) -> float:
        return sum(node.total(what) for node in self.last.nodes)

    def lasting(self) -> list[Demand]:
        """What waited at every reading: whatever comes and goes in between is a queue that moves."""
        shapes = [{key(demand.shape) for demand in reading.demands} for reading in self.readings]
        return [d for d in self.last.demands if all(key(d.shape) in seen for seen in shapes)]

    def taken(self, shape: Shape) -> str:
        """`CPU 4 of 4`: how much of what a shape asks for is in use."""
        return ", ".join(f"{self.used(name):g} of {self.total(name):g} {name}" for name in shape)


@dataclass(frozen=True)
class Advice:
    """One thing. what: in a line; saw: the figures; means: for the run; do: what to change or to type."""

    kind: str
    what: str
    saw: str
    means: str
    do: str

    def fields(self) -> dict[str, str]:
        return asdict(self)


def advise(figures: Figures) -> list[Advice]:
    """The worst first: what can never go on, what waits, what is near its end, what is slow."""
    return [advice for rule in RULES for advice in rule(figures)]


def summary(figures: Figures) -> str:
    """How much is in use, in one line."""
    parts = [
        f"{figures.used(name):g}/{figures.total(name):g} {name}s asked for"
        for name in ("CPU", "GPU")
        if figures.total(name)
    ]
    uses = [use for node in figures.last.nodes if (use := mean_cpu(figures, node.name)) is not None]
    gpus = [use for _, _, use in gpu_use(figures)]
    parts += [f"CPUs {fmean(uses):.0f} % busy"] if uses else []
    parts += [f"GPUs {fmean(gpus):.0f} % busy"] if gpus else []
    store = "object_store_memory"
    parts.append(f"object store {format_bytes(figures.used(store))} of {format_bytes(figures.total(store))}")
    return ", ".join(parts)


# -- demands


def never(figures: Figures) -> Iterator[Advice]:
    """Tasks and actors that no node could take, were it empty."""
    nodes = figures.last.nodes
    for demand in figures.last.demands:
        if demand.grouped == demand.count or any(node.could_take(demand.shape) for node in nodes):
            continue
        most = {name: max((node.total(name) for node in nodes), default=0.0) for name in demand.shape}
        lacking = [name for name, value in demand.shape.items() if value > most[name]]
        what = lacking or list(demand.shape)  # each is somewhere, all together are nowhere
        saw = ", ".join(
            f"the most that one node has is {show({name: most[name]})}"
            if most[name]
            else f"no node has any {name}"
            for name in what
        )
        yield Advice(
            "infeasible",
            f"{_number(demand)} {show(demand.shape)}, and no node{' that is here' if figures.elastic else ''} has that",
            saw + ("" if lacking else ", not on the same node") + _who(figures, demand.shape),
            _waits_for_ever(figures),
            _ask_for_less(figures.cluster, demand.shape),
        )
    for group in figures.groups:
        if group.infeasible:
            yield Advice(
                "infeasible",
                f"a placement group asks for {_bundles(group.bundles)}, which these nodes could not hold if they were empty",
                f"{count(len(nodes), 'node')}: {_nodes(nodes)}" + _of_job(group.job),
                _waits_for_ever(figures),
                f"fewer or smaller bundles (heliostat plan train {figures.cluster} says what fits), or more nodes: "
                f"heliostat scale {figures.cluster} N",
            )


def starved(figures: Figures) -> Iterator[Advice]:
    """What would fit, were others not there."""
    fits = [d for d in figures.lasting() if any(n.could_take(d.shape) for n in figures.last.nodes)]
    for demand in fits:
        waiting = [a for a in figures.actors if a.waiting and key(a.shape) == key(demand.shape)]
        if deadlock := _held_by_nobody(figures, demand):
            yield deadlock
            continue
        for pool in waiting:
            yield Advice(
                "starved",
                f"{pool.waiting} of {pool.alive + pool.waiting} `{pool.name}` wait for {show(pool.shape)}",
                f"{figures.taken(pool.shape)} in use{_holders(figures, pool.shape)}" + _of_job(pool.job),
                "the program waits for all of them, or goes on with fewer than it was told; other work must end first",
                f"ask for {pool.alive} (num_env_runners, num_workers, …), let the other work end (heliostat jobs {figures.cluster}), "
                f"or add nodes: heliostat scale {figures.cluster} N",
            )
        rest = demand.count - sum(pool.waiting for pool in waiting)
        if rest > 0:
            yield Advice(
                "waiting",
                f"{count(rest, 'task')} {'waits' if rest == 1 else 'wait'} for {show(demand.shape)}",
                f"{figures.taken(demand.shape)} in use{_holders(figures, demand.shape)}",
                "a queue is no fault: they run when others have ended",
                f"more nodes would run more of them at once: heliostat scale {figures.cluster} N",
            )
    for group in figures.groups:
        if not group.infeasible:
            wanted = {name: 0.0 for bundle in group.bundles for name in bundle}
            yield Advice(
                "starved",
                f"a placement group waits for {_bundles(group.bundles)}",
                f"{figures.taken(wanted)} in use{_holders(figures, wanted)}" + _of_job(group.job),
                "all of its bundles must be free at once; until then nothing of that program runs",
                f"let the other work end (heliostat jobs {figures.cluster}), ask for fewer workers, or add nodes: "
                f"heliostat scale {figures.cluster} N",
            )


def _held_by_nobody(figures: Figures, demand: Demand) -> Advice | None:
    """A deadlock: placement groups hold what waits outside of them, and do not use it; or what waits in one cannot fit."""
    idle = {name: held - used for name, (used, held) in figures.last.held.items()}
    if demand.grouped:
        return Advice(
            "deadlock",
            f"{_number(demand)} {show(demand.shape)} inside a placement group whose bundles have no such room",
            f"groups hold {show({n: h for n, (_, h) in figures.last.held.items()})}, of which {show(idle)} are idle",
            "a bundle must hold all that runs in it; what is free elsewhere does not count, and Ray waits without an error",
            "larger bundles, or fewer tasks and actors in each of them",
        )
    free = {name: figures.total(name) - figures.used(name) for name in demand.shape}
    if all(free[n] + idle.get(n, 0.0) >= value for n, value in demand.shape.items()) and any(
        free[n] < value <= idle.get(n, 0.0) for n, value in demand.shape.items()
    ):
        return Advice(
            "deadlock",
            f"{_number(demand)} {show(demand.shape)}, which placement groups hold and do not use",
            f"{show(idle)} held by groups and idle, {show(free)} free outside of them",
            "where the same program has made that group and waits for this task or actor, it waits for itself",
            "run it inside the group (PlacementGroupSchedulingStrategy, placement_group_capture_child_tasks=True), or let the group "
            "leave a CPU free: one worker less",
        )
    return None


# -- what is near its end


def memory(figures: Figures) -> Iterator[Advice]:
    for node in figures.last.nodes:
        if node.memory and node.memory[0] >= MEMORY_NEAR * node.memory[1]:
            used, total = node.memory
            yield Advice(
                "memory",
                f"the memory of {node.name} is nearly used up",
                f"{format_bytes(used)} of {format_bytes(total)}, {used / total:.0%}",
                f"above {MEMORY_LIMIT:.0%} Ray kills workers of that node, the newest first, and starts them again",
                "fewer workers a node (more CPUs for each), smaller batches and buffers, or nodes with more memory "
                "(--memory-per-node)",
            )


def store(figures: Figures) -> Iterator[Advice]:
    """Objects on disk, or nearly."""
    for node in figures.last.nodes:
        before, spilled = figures.spilled.get(node.name, (0, 0))
        used, total = node.used("object_store_memory"), node.total("object_store_memory")
        saw = f"{format_bytes(used)} of {format_bytes(total)} in the object store"
        larger = "a larger store (up --object-store 20G); fewer objects at once: drop references, smaller blocks and batches, del what is not needed"
        if spilled:
            more = f", {format_bytes(spilled - before)} of it while we looked" if spilled > before else ""
            yield Advice(
                "spilling",
                f"the object store of {node.name} writes to disk"
                if more
                else f"the object store of {node.name} has written to disk",
                f"{format_bytes(spilled)} written{more}; {saw}",
                "what does not fit is written and read again: everything that uses these objects goes at the speed of the disk",
                larger,
            )
        elif total and used >= STORE_FULL * total:
            yield Advice(
                "store",
                f"the object store of {node.name} is nearly full",
                saw,
                "Ray begins to write objects to disk",
                larger,
            )


def gpu_memory(figures: Figures) -> Iterator[Advice]:
    for node in figures.last.nodes:
        for index, gpu in enumerate(node.gpus):
            if gpu.memory and gpu.memory[1] and gpu.memory[0] >= GPU_FULL * gpu.memory[1]:
                used, total = (format_bytes(value * 2**20) for value in gpu.memory)
                yield Advice(
                    "gpu-memory",
                    f"the memory of GPU {index} of {node.name} is nearly full",
                    f"{used} of {total} ({gpu.name})",
                    "the next larger batch ends with `CUDA out of memory`",
                    "smaller batches (minibatch_size, batch_size), fewer processes on one GPU (a larger num_gpus for each), or a smaller model "
                    "(half precision, gradient checkpointing)",
                )


def gpu_hot(figures: Figures) -> Iterator[Advice]:
    for node in figures.last.nodes:
        for index, gpu in enumerate(node.gpus):
            if gpu.temperature is not None and gpu.temperature >= GPU_HOT:
                yield Advice(
                    "gpu-hot",
                    f"GPU {index} of {node.name} is hot",
                    f"{gpu.temperature:g} °C ({gpu.name})",
                    "it slows itself down, and at its limit it switches off",
                    f"look at the machine's cooling; heliostat exec {figures.cluster} --node {node.name} -- nvidia-smi -q -d TEMPERATURE,PERFORMANCE",
                )


# -- what is slow


def gpu_idle(figures: Figures) -> Iterator[Advice]:
    """GPUs that nobody asks for while there is work, and GPUs that are asked for and wait."""
    asked, total = figures.used("GPU"), figures.total("GPU")
    if total and not asked and figures.used("CPU"):
        yield Advice(
            "gpu-unused",
            f"nobody asks for the {count(int(total), 'GPU')} of this cluster",
            f"0 of {total:g} GPU asked for, while {figures.taken({'CPU': 0})} are in use",
            "Ray shows a GPU only to who asks for one: for all others there is none",
            f"num_gpus=1 for a task or an actor, use_gpu=True for Train, num_gpus_per_learner=1 for RLlib: heliostat plan rllib {figures.cluster}",
        )
    slow = [
        (node, index, use) for node, index, use in gpu_use(figures) if use < GPU_BUSY and node.used("GPU")
    ]
    if not slow:
        return
    means, do = _why_slow(figures, {node.name for node, _, _ in slow})
    few = ", ".join(f"{node.name} GPU {index} {use:.0f} %" for node, index, use in slow[:6])
    yield Advice(
        "gpu-idle",
        f"{count(len(slow), 'GPU')} {'is' if len(slow) == 1 else 'are'} less than {GPU_BUSY:.0f} % busy",
        few
        + (f" and {len(slow) - 6} more" if len(slow) > 6 else "")
        + f" (mean of {count(_looks(figures), 'reading')})",
        means,
        do,
    )


def _why_slow(figures: Figures, names: set[str]) -> tuple[str, str]:
    """(what keeps the GPUs waiting, what to do about it)"""
    plan = f"heliostat plan rllib {figures.cluster} --strategy rollouts"
    free = figures.total("CPU") - figures.used("CPU")
    busy = [use for name in names if (use := mean_cpu(figures, name)) is not None and use >= CPU_BUSY]
    if busy:
        return (
            f"the cores beside them are {fmean(busy):.0f} % busy: env runners or data loaders do not keep up",
            f"more CPUs for a GPU: runners on other nodes, more nodes (heliostat scale {figures.cluster} N), fewer GPUs; {plan}",
        )
    if free >= 1:
        return (
            f"{free:g} of {figures.total('CPU'):g} CPUs are asked for by nobody: the GPUs wait for samples or data, or for the next small batch",
            f"more env runners or data workers ({plan}), larger batches (train_batch_size_per_learner, minibatch_size)",
        )
    return (
        "all CPUs are asked for, and their cores are not busy: what runs on them waits, or the batches are too small for such a GPU",
        "larger batches, several environments a runner (num_envs_per_env_runner), or more work on one GPU (num_gpus_per_learner=0.5, twice)",
    )


def uneven(figures: Figures) -> Iterator[Advice]:
    """Some nodes are full and busy, others have nothing to do."""
    nodes = [node for node in figures.last.nodes if node.total("CPU")]
    idle = [node for node in nodes if not node.used("CPU") and not node.used("GPU")]
    full = [
        node
        for node in nodes
        if node.used("CPU") >= node.total("CPU") and (mean_cpu(figures, node.name) or 0.0) >= CPU_BUSY
    ]
    if idle and full:
        yield Advice(
            "uneven",
            f"{_names(idle)} {'has' if len(idle) == 1 else 'have'} nothing to do while {_names(full)} {'is' if len(full) == 1 else 'are'} full",
            f"{_nodes(full)}; idle: {_nodes(idle)}",
            "what runs was packed (PACK, Ray's default), and its threads share cores that are all taken",
            'placement_strategy="SPREAD" (Train), scheduling_strategy="SPREAD" (tasks, actors), more workers; or give the idle nodes back: '
            f"heliostat scale {figures.cluster} {max(0, len(figures.last.nodes) - 1 - len(idle))}",
        )


RULES: Sequence[Callable[[Figures], Iterable[Advice]]] = (
    never,
    starved,
    memory,
    store,
    gpu_memory,
    gpu_hot,
    gpu_idle,
    uneven,
)


# -- figures


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


# -- words


def _number(demand: Demand) -> str:
    return f"{demand.count} {'task or actor asks' if demand.count == 1 else 'tasks or actors ask'} for"


def _bundles(bundles: Sequence[Shape]) -> str:
    shapes: dict[object, tuple[int, Shape]] = {}
    for bundle in bundles:
        shapes[key(bundle)] = (shapes.get(key(bundle), (0, bundle))[0] + 1, bundle)
    return ", ".join(f"{number} × {show(shape)}" for number, shape in shapes.values())


def _names(nodes: Sequence[Node]) -> str:
    names = [node.name for node in nodes]
    return ", ".join(names if len(names) <= 4 else [*names[:3], f"{len(names) - 3} more"])


def _nodes(nodes: Sequence[Node]) -> str:
    shown = [
        f"{node.name} "
        + " ".join(
            f"{name} {node.used(name):g}/{node.total(name):g}" for name in ("CPU", "GPU") if node.total(name)
        )
        for node in nodes[:4]
    ]
    return ", ".join(shown) + (" …" if len(nodes) > 4 else "")


def _holders(figures: Figures, shape: Shape) -> str:
    """Who has the most of it: `, 4 by `A` (job 04000000)`."""
    held = [
        (actors.alive * max(actors.shape.get(name, 0.0) for name in shape), actors)
        for actors in figures.actors
        if actors.alive and shape
    ]
    best = [
        f"{amount:g} by {actors.alive} × `{actors.name}`{_of_job(actors.job)}"
        for amount, actors in sorted(held, key=lambda h: -h[0])[:2]
        if amount
    ]
    return "".join(f", {one}" for one in best)


def _who(figures: Figures, shape: Shape) -> str:
    """`; asked for by `A` (job …)`, where it is actors that wait."""
    names = [
        f"`{a.name}`{_of_job(a.job)}" for a in figures.actors if a.waiting and key(a.shape) == key(shape)
    ]
    return f"; asked for by {', '.join(names)}" if names else ""


def _of_job(job: str) -> str:
    return f" (job {job})" if job else ""


def _waits_for_ever(figures: Figures) -> str:
    if figures.elastic:
        return "Ray waits for a node that the cluster may grow by; where none of its kinds has that, it waits for ever"
    return "Ray waits for a node that will not come: no error, the program hangs"


def _ask_for_less(cluster: str, shape: Shape) -> str:
    options = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}
    words = ", ".join(options.get(name, f"resources={{{name!r}: …}}") for name in shape)
    return f"ask for less ({words}), or add a node that has it: heliostat join {cluster}, or another cluster"
