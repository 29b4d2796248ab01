"""What the live figures of a cluster mean for who runs something on it. Pure: figures in, advice out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean

from heliostat.common.units import count, format_bytes
from heliostat.diagnostics.figures import Demand, Figures, Node, _looks, gpu_use, key, mean_cpu
from heliostat.diagnostics.sizing import Shape, show

GPU_BUSY = 80.0  # percent: below it, something else than the GPU sets the pace
GPU_FULL = 0.9  # of its memory
GPU_HOT = 85.0  # °C: about here the makers' own limits begin to slow it down
CPU_BUSY = 90.0  # percent of all cores
STORE_FULL = 0.8  # of the object store: here Ray begins to write objects to disk
MEMORY_NEAR, MEMORY_LIMIT = 0.88, 0.95  # of the host's memory; above the limit Ray kills workers


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
        f"{figures.taken(name):g}/{figures.total(name):g} {name}s asked for"
        for name in ("CPU", "GPU")
        if figures.total(name)
    ]
    uses = [use for node in figures.last.nodes if (use := mean_cpu(figures, node.name)) is not None]
    gpus = [use for _, _, use in gpu_use(figures)]
    parts += [f"CPUs {fmean(uses):.0f} % busy"] if uses else []
    parts += [f"GPUs {fmean(gpus):.0f} % busy"] if gpus else []
    store = "object_store_memory"
    parts.append(f"object store {format_bytes(figures.taken(store))} of {format_bytes(figures.total(store))}")
    return ", ".join(parts)


# -- demands


def never(figures: Figures) -> Iterator[Advice]:
    """Tasks and actors that no node could take, were it empty."""
    nodes, told = figures.last.nodes, {key(demand.shape) for demand in figures.last.demands}
    # where no autoscaler's status is to be had (KubeRay without one), actors are known all the same
    untold = [Demand(a.shape, a.waiting) for a in figures.actors if a.waiting and key(a.shape) not in told]
    for demand in [*figures.last.demands, *untold]:
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
        if not group.fits(nodes):
            yield Advice(
                "infeasible",
                f"a placement group of job {group.job} asks for {_bundles(group.bundles)}, which these nodes could not hold were they empty",
                f"{count(len(nodes), 'node')}: {_nodes(nodes)}",
                _waits_for_ever(figures),
                f"fewer or smaller bundles (heliostat plan train {figures.cluster} says what fits), or more nodes: "
                f"heliostat scale {figures.cluster} N",
            )


def starved(figures: Figures) -> Iterator[Advice]:
    """What would fit, were others not there."""
    fits = [d for d in figures.lasting() if any(n.could_take(d.shape) for n in figures.last.nodes)]
    for demand in fits:
        if stuck := _stuck(figures, demand):
            yield stuck
            continue
        pools = [a for a in figures.actors if a.waiting and key(a.shape) == key(demand.shape)]
        for pool in pools:
            yield Advice(
                "starved",
                f"{pool.waiting} of {pool.alive + pool.waiting} `{pool.name}` of job {pool.job} wait for {show(pool.shape)}",
                figures.use_of(pool.shape),
                "the program waits for all of them, or goes on with fewer than it was told; other work must end first",
                f"ask for {pool.alive} (num_env_runners, num_workers, …), let other work end (heliostat jobs {figures.cluster}), "
                f"or add nodes: heliostat scale {figures.cluster} N",
            )
        rest = demand.count - sum(pool.waiting for pool in pools)
        if rest > 0:
            yield Advice(
                "waiting",
                f"{count(rest, 'task')} {'waits' if rest == 1 else 'wait'} for {show(demand.shape)}",
                figures.use_of(demand.shape),
                "a queue is no fault: they run when others have ended",
                f"more nodes would run more of them at once: heliostat scale {figures.cluster} N",
            )
    for group in figures.groups:
        if group.fits(figures.last.nodes):
            yield Advice(
                "starved",
                f"a placement group of job {group.job} waits for {_bundles(group.bundles)}",
                figures.use_of({name: 0.0 for bundle in group.bundles for name in bundle}),
                "all of its bundles must be free at once; until then nothing that needs the group runs",
                f"let other work end (heliostat jobs {figures.cluster}), ask for fewer workers, or add nodes: "
                f"heliostat scale {figures.cluster} N",
            )


def _stuck(figures: Figures, demand: Demand) -> Advice | None:
    """What waits for no other work: for room that a placement group holds, or for something that is no room."""
    nodes, asks = figures.last.nodes, f"{_number(demand)} {show(demand.shape)}"
    held = {name: amount for name in demand.shape if (amount := sum(n.held.get(name, 0.0) for n in nodes))}
    if demand.grouped == demand.count:
        room = all(value <= held.get(name, 0.0) for name, value in demand.shape.items())
        return Advice(
            "deadlock" if room else "waiting",
            f"{asks} inside a placement group, and no bundle has that room",
            f"idle in groups: {show(held)}",
            "what runs in a group must fit into one of its bundles, beside what is there"
            + ("" if room else "; if what is there waits for these, both wait for ever"),
            "larger bundles (a CPU more for what is started from inside), or fewer tasks and actors in each",
        )
    rooms = [any(node.has_room(demand.shape) for node in reading.nodes) for reading in figures.readings]
    if all(rooms):
        return Advice(
            "stuck",
            f"{asks}, and wait{'s' if demand.count == 1 else ''} though a node has it free",
            figures.use_of(demand.shape),
            "for one certain node (affinity, labels), or for an environment (pip, working_dir) that is being made",
            f"is the node that is named alive? heliostat status {figures.cluster}; the runtime_env_setup logs: heliostat logs "
            f"{figures.cluster} NODE",
        )
    if any(rooms):
        return None  # the queue moves
    if any(node.has_room(demand.shape, held=True) for node in nodes):
        return Advice(
            "deadlock",
            f"{asks}, which placement groups hold and do not use",
            f"{show(held)} held and idle",
            "where one program made the group and waits for this task or actor outside of it, it waits for itself",
            "run it inside (PlacementGroupSchedulingStrategy, placement_group_capture_child_tasks=True), or leave a CPU out of the "
            "group: one worker less",
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
    """Objects on disk, or nearly. What was written long ago, by who has left, is nobody's trouble."""
    for node in figures.last.nodes:
        before, spilled = figures.spilled.get(node.name, (0, 0))
        used, total = node.used("object_store_memory"), node.total("object_store_memory")
        saw = f"{format_bytes(used)} of {format_bytes(total)} in the object store"
        larger = (
            "a larger store (up --object-store 20G); fewer objects at once: smaller blocks and batches, `del` what is not "
            "needed any more"
        )
        if spilled > before or (spilled and used >= total / 2):
            more = f", {format_bytes(spilled - before)} of it while we looked" if spilled > before else ""
            yield Advice(
                "spilling",
                f"the object store of {node.name} writes to disk",
                f"{format_bytes(spilled)} written{more}; {saw}",
                "what does not fit is written and read again: whatever uses these objects goes at the speed of the disk",
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
    asked, total = figures.taken("GPU"), figures.total("GPU")
    if total and not asked and figures.taken("CPU"):
        yield Advice(
            "gpu-unused",
            f"nobody asks for the {count(int(total), 'GPU')} of this cluster",
            f"0 of {total:g} GPU taken, while {figures.use_of({'CPU': 0.0})}",
            "Ray shows a GPU only to who asks for one: for all others there is none",
            f"num_gpus=1 for a task or an actor, use_gpu=True for Train, num_gpus_per_learner=1 for RLlib: heliostat plan rllib {figures.cluster}",
        )
    slow = [
        (node, index, use) for node, index, use in gpu_use(figures) if use < GPU_BUSY and node.taken("GPU")
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
    free = figures.total("CPU") - figures.taken("CPU")
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
    idle = [node for node in nodes if not node.taken("CPU") and not node.taken("GPU")]
    full = [
        node
        for node in nodes
        if node.taken("CPU") >= node.total("CPU") and (mean_cpu(figures, node.name) or 0.0) >= CPU_BUSY
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
            f"{name} {node.taken(name):g}/{node.total(name):g}" for name in ("CPU", "GPU") if node.total(name)
        )
        for node in nodes[:4]
    ]
    return ", ".join(shown) + (" …" if len(nodes) > 4 else "")


def _who(figures: Figures, shape: Shape) -> str:
    """`; `A` of lab-1 ask for it`, where it is actors that wait."""
    names = [f"`{a.name}` of job {a.job}" for a in figures.actors if a.waiting and key(a.shape) == key(shape)]
    return f"; it is {', '.join(names)}" if names else ""


def _waits_for_ever(figures: Figures) -> str:
    if figures.elastic:
        return "Ray waits for a node that the cluster may grow by; where none of its kinds has that, it waits for ever"
    return "Ray waits for a node that will not come: no error, the program hangs"


def _ask_for_less(cluster: str, shape: Shape) -> str:
    options = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}
    words = ", ".join(options.get(name, f"resources={{{name!r}: …}}") for name in shape)
    return f"ask for less ({words}), or add a node that has it: heliostat join {cluster}, or another cluster"
