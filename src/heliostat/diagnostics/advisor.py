"""Rules that find why a workload is slow or blocked. Pure: figures in, advice out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean

from heliostat.common.units import count, format_bytes
from heliostat.diagnostics.figures import (
    Demand,
    Figures,
    Node,
    count_measurements,
    mean_cpu,
    mean_gpu_use,
    shape_key,
)
from heliostat.diagnostics.sizing import Shape, show

GPU_BUSY_PERCENT = 80.0  # below it, the GPU is not the bottleneck
GPU_FULL = 0.9  # of its memory
GPU_HOT_CELSIUS = 85.0  # about here GPUs reduce their clock
CPU_BUSY_PERCENT = 90.0  # of all cores
STORE_FULL = 0.8  # of the object store: from here on Ray spills objects to disk
MEMORY_NEAR, MEMORY_LIMIT = 0.88, 0.95  # of the host's memory; above the limit Ray kills workers


@dataclass(frozen=True)
class Advice:
    """One finding in a line, its evidence in figures, its effect on the workload, and a remedy."""

    kind: str
    finding: str
    evidence: str
    effect: str
    remedy: str

    def fields(self) -> dict[str, str]:
        """The keys of `heliostat advise --json`."""
        return {
            "kind": self.kind,
            "what": self.finding,
            "saw": self.evidence,
            "means": self.effect,
            "do": self.remedy,
        }


def advise(figures: Figures) -> list[Advice]:
    """The findings, worst first: demands that can never run, that wait, nearly full resources, slow ones."""
    return [advice for rule in RULES for advice in rule(figures)]


def summarize(figures: Figures) -> str:
    """The use of CPUs, GPUs and object store in one line."""
    parts = [
        f"{figures.taken(name):g}/{figures.total(name):g} {name}s requested"
        for name in ("CPU", "GPU")
        if figures.total(name)
    ]
    uses = [use for node in figures.last.nodes if (use := mean_cpu(figures, node.name)) is not None]
    gpus = [use for _, _, use in mean_gpu_use(figures)]
    parts += [f"CPUs {fmean(uses):.0f} % busy"] if uses else []
    parts += [f"GPUs {fmean(gpus):.0f} % busy"] if gpus else []
    store = "object_store_memory"
    parts.append(f"object store {format_bytes(figures.taken(store))} of {format_bytes(figures.total(store))}")
    return ", ".join(parts)


# -- demands


def find_infeasible(figures: Figures) -> Iterator[Advice]:
    """Tasks, actors and placement groups that do not fit even on empty nodes."""
    nodes, reported = figures.last.nodes, {shape_key(demand.shape) for demand in figures.last.demands}
    # without an autoscaler's status (KubeRay without autoscaling), pending actors are known from Ray's state API
    unreported = [
        Demand(a.shape, a.waiting) for a in figures.actors if a.waiting and shape_key(a.shape) not in reported
    ]
    for demand in [*figures.last.demands, *unreported]:
        if demand.grouped == demand.count or any(node.fits_when_empty(demand.shape) for node in nodes):
            continue
        most = {name: max((node.total(name) for node in nodes), default=0.0) for name in demand.shape}
        lacking = [name for name, value in demand.shape.items() if value > most[name]]
        # if none is lacking, no single node has all of them
        evidence = ", ".join(
            f"the largest node has {show({name: most[name]})}" if most[name] else f"no node has {name}"
            for name in lacking or demand.shape
        )
        yield Advice(
            "infeasible",
            f"{_requests(demand)} {show(demand.shape)}, and no {'current ' if figures.elastic else ''}node has that",
            evidence + ("" if lacking else ", not on the same node") + _requesters(figures, demand.shape),
            _effect_of_infeasible(figures),
            _suggest_less(figures.cluster, demand.shape),
        )
    for group in figures.groups:
        if not group.fits(nodes):
            yield Advice(
                "infeasible",
                f"a placement group of job {group.job} requests {_bundles(group.bundles)}, which does not fit on these nodes even if empty",
                f"{count(len(nodes), 'node')}: {_nodes(nodes)}",
                _effect_of_infeasible(figures),
                f"request fewer or smaller bundles (heliostat plan train {figures.cluster} prints what fits), or add nodes: "
                f"heliostat scale {figures.cluster} N",
            )


def find_starved(figures: Figures) -> Iterator[Advice]:
    """Demands that would fit if other work did not use the resources."""
    feasible = [
        d for d in figures.lasting_demands() if any(n.fits_when_empty(d.shape) for n in figures.last.nodes)
    ]
    for demand in feasible:
        if blocked := _find_blocked(figures, demand):
            yield blocked
            continue
        pools = [a for a in figures.actors if a.waiting and shape_key(a.shape) == shape_key(demand.shape)]
        for pool in pools:
            yield Advice(
                "starved",
                f"{pool.waiting} of {pool.alive + pool.waiting} `{pool.name}` of job {pool.job} wait for {show(pool.shape)}",
                figures.describe_use(pool.shape),
                "the program waits for all of them or continues with fewer; other work must end first",
                f"request {pool.alive} (num_env_runners, num_workers, …), wait for other work (heliostat jobs {figures.cluster}), "
                f"or add nodes: heliostat scale {figures.cluster} N",
            )
        tasks = demand.count - sum(pool.waiting for pool in pools)
        if tasks > 0:
            yield Advice(
                "waiting",
                f"{count(tasks, 'task')} {'waits' if tasks == 1 else 'wait'} for {show(demand.shape)}",
                figures.describe_use(demand.shape),
                "none, if a queue is expected: they run when other tasks have ended",
                f"to run more of them in parallel, add nodes: heliostat scale {figures.cluster} N",
            )
    for group in figures.groups:
        if group.fits(figures.last.nodes):
            yield Advice(
                "starved",
                f"a placement group of job {group.job} waits for {_bundles(group.bundles)}",
                figures.describe_use({name: 0.0 for bundle in group.bundles for name in bundle}),
                "all bundles must be free at the same time; until then nothing that needs the group runs",
                f"wait for other work (heliostat jobs {figures.cluster}), request fewer workers, or add nodes: "
                f"heliostat scale {figures.cluster} N",
            )


def _find_blocked(figures: Figures, demand: Demand) -> Advice | None:
    """The finding for a demand that does not wait for other work: a placement group holds the resources, or they are free."""
    nodes, requests = figures.last.nodes, f"{_requests(demand)} {show(demand.shape)}"
    held = {name: amount for name in demand.shape if (amount := sum(n.held.get(name, 0.0) for n in nodes))}
    if demand.grouped == demand.count:
        fits_in_held = all(value <= held.get(name, 0.0) for name, value in demand.shape.items())
        return Advice(
            "deadlock" if fits_in_held else "waiting",
            f"{requests} inside a placement group, and no bundle has that much free",
            f"idle in placement groups: {show(held)}",
            "a task or actor in a group must fit into one bundle, beside the others there"
            + ("" if fits_in_held else "; if those wait for it, neither can continue"),
            "use larger bundles (one more CPU for nested tasks), or fewer tasks and actors in each",
        )
    fits = [any(node.fits_now(demand.shape) for node in reading.nodes) for reading in figures.readings]
    if all(fits):
        return Advice(
            "stuck",
            f"{requests}, and wait{'s' if demand.count == 1 else ''} although a node has it free",
            figures.describe_use(demand.shape),
            "it waits for a specific node (affinity, labels), or for its runtime environment (pip, working_dir)",
            f"check that the node is ready (heliostat status {figures.cluster}), and the runtime_env_setup logs (heliostat logs "
            f"{figures.cluster} NODE)",
        )
    if any(fits):
        return None  # the queue moves
    if any(node.fits_now(demand.shape, ignore_held=True) for node in nodes):
        return Advice(
            "deadlock",
            f"{requests}, which placement groups hold and do not use",
            f"{show(held)} held and idle",
            "a program that created the group and waits for a task or actor outside of it waits forever",
            "run the task inside the group (PlacementGroupSchedulingStrategy, placement_group_capture_child_tasks=True), or leave "
            "a CPU out of the group (one worker less)",
        )
    return None


# -- nearly full resources


def find_full_memory(figures: Figures) -> Iterator[Advice]:
    for node in figures.last.nodes:
        if node.memory and node.memory[0] >= MEMORY_NEAR * node.memory[1]:
            used, total = node.memory
            yield Advice(
                "memory",
                f"the memory of {node.name} is nearly full",
                f"{format_bytes(used)} of {format_bytes(total)}, {used / total:.0%}",
                f"above {MEMORY_LIMIT:.0%} Ray kills workers of that node, newest first, and restarts them",
                "use fewer workers per node (more CPUs for each), smaller batches and buffers, or nodes with more memory "
                "(--memory-per-node)",
            )


def find_full_store(figures: Figures) -> Iterator[Advice]:
    """Object stores that spill to disk or are nearly full. Objects that earlier programs spilled are ignored."""
    for node in figures.last.nodes:
        before, spilled = figures.spilled.get(node.name, (0, 0))
        used, total = node.used("object_store_memory"), node.total("object_store_memory")
        evidence = f"{format_bytes(used)} of {format_bytes(total)} in the object store"
        remedy = (
            "use a larger object store (up --object-store 20G), or keep fewer objects: smaller blocks and batches, `del` unused "
            "references"
        )
        if spilled > before or (spilled and used >= total / 2):
            growth = (
                f", {format_bytes(spilled - before)} of it during the observation" if spilled > before else ""
            )
            yield Advice(
                "spilling",
                f"the object store of {node.name} spills to disk",
                f"{format_bytes(spilled)} written{growth}; {evidence}",
                "access to spilled objects is as slow as the disk",
                remedy,
            )
        elif total and used >= STORE_FULL * total:
            yield Advice(
                "store",
                f"the object store of {node.name} is nearly full",
                evidence,
                "Ray starts to spill objects to disk",
                remedy,
            )


def find_full_gpu_memory(figures: Figures) -> Iterator[Advice]:
    for node in figures.last.nodes:
        for index, gpu in enumerate(node.gpus):
            if gpu.memory and gpu.memory[1] and gpu.memory[0] >= GPU_FULL * gpu.memory[1]:
                used, total = (format_bytes(value * 2**20) for value in gpu.memory)
                yield Advice(
                    "gpu-memory",
                    f"the memory of GPU {index} of {node.name} is nearly full",
                    f"{used} of {total} ({gpu.name})",
                    "a larger batch fails with `CUDA out of memory`",
                    "use smaller batches (minibatch_size, batch_size), fewer processes per GPU (a larger num_gpus for each), or a "
                    "smaller model (half precision, gradient checkpointing)",
                )


def find_hot_gpus(figures: Figures) -> Iterator[Advice]:
    for node in figures.last.nodes:
        for index, gpu in enumerate(node.gpus):
            if gpu.temperature is not None and gpu.temperature >= GPU_HOT_CELSIUS:
                yield Advice(
                    "gpu-hot",
                    f"GPU {index} of {node.name} is hot",
                    f"{gpu.temperature:g} °C ({gpu.name})",
                    "the GPU reduces its clock, and switches off at its limit",
                    f"check the host's cooling; heliostat exec {figures.cluster} --node {node.name} -- nvidia-smi -q -d TEMPERATURE,PERFORMANCE",
                )


# -- idle resources


def find_idle_gpus(figures: Figures) -> Iterator[Advice]:
    """GPUs that no task requests while CPUs are in use, and requested GPUs with a low utilization."""
    total = figures.total("GPU")
    if total and not figures.taken("GPU") and figures.taken("CPU"):
        yield Advice(
            "gpu-unused",
            f"no task or actor requests the {count(int(total), 'GPU')} of this cluster",
            f"0 of {total:g} GPU taken, while {figures.describe_use({'CPU': 0.0})}",
            "Ray hides GPUs from tasks and actors that do not request them",
            f"set num_gpus=1 for a task or an actor, use_gpu=True for Train, num_gpus_per_learner=1 for RLlib: heliostat plan rllib {figures.cluster}",
        )
    idle = [
        (node, index, use)
        for node, index, use in mean_gpu_use(figures)
        if use < GPU_BUSY_PERCENT and node.taken("GPU")
    ]
    if not idle:
        return
    effect, remedy = _explain_idle_gpus(figures, {node.name for node, _, _ in idle})
    shown = ", ".join(f"{node.name} GPU {index} {use:.0f} %" for node, index, use in idle[:6])
    yield Advice(
        "gpu-idle",
        f"{count(len(idle), 'GPU')} {'is' if len(idle) == 1 else 'are'} less than {GPU_BUSY_PERCENT:.0f} % busy",
        shown
        + (f" and {len(idle) - 6} more" if len(idle) > 6 else "")
        + f" (mean of {count(count_measurements(figures), 'measurement')})",
        effect,
        remedy,
    )


def _explain_idle_gpus(figures: Figures, names: set[str]) -> tuple[str, str]:
    """(why the GPUs of these nodes wait, the remedy)"""
    plan = f"heliostat plan rllib {figures.cluster} --strategy rollouts"
    free = figures.total("CPU") - figures.taken("CPU")
    busy = [use for name in names if (use := mean_cpu(figures, name)) is not None and use >= CPU_BUSY_PERCENT]
    if busy:
        return (
            f"the CPU cores of these nodes are {fmean(busy):.0f} % busy: env runners or data loaders are the bottleneck",
            f"use more CPUs per GPU: runners on other nodes, more nodes (heliostat scale {figures.cluster} N), fewer GPUs; {plan}",
        )
    if free >= 1:
        return (
            f"{free:g} of {figures.total('CPU'):g} CPUs are free: the GPUs wait for samples or data, or the batches are too small",
            f"use more env runners or data workers ({plan}), or larger batches (train_batch_size_per_learner, minibatch_size)",
        )
    return (
        "all CPUs are requested, but their cores are not busy: the tasks on them wait, or the batches are too small for the GPU",
        "use larger batches, several environments per runner (num_envs_per_env_runner), or share the GPU (num_gpus_per_learner=0.5, twice)",
    )


def find_uneven_load(figures: Figures) -> Iterator[Advice]:
    """Nodes that are fully used while others are idle."""
    nodes = [node for node in figures.last.nodes if node.total("CPU")]
    idle = [node for node in nodes if not node.taken("CPU") and not node.taken("GPU")]
    full = [
        node
        for node in nodes
        if node.taken("CPU") >= node.total("CPU")
        and (mean_cpu(figures, node.name) or 0.0) >= CPU_BUSY_PERCENT
    ]
    if idle and full:
        yield Advice(
            "uneven",
            f"{_names(idle)} {'is' if len(idle) == 1 else 'are'} idle while {_names(full)} {'is' if len(full) == 1 else 'are'} full",
            f"{_nodes(full)}; idle: {_nodes(idle)}",
            "Ray packs tasks onto few nodes by default (PACK), and their threads share the cores there",
            'use placement_strategy="SPREAD" (Train), scheduling_strategy="SPREAD" (tasks, actors) or more workers; or release the idle '
            f"nodes: heliostat scale {figures.cluster} {max(0, len(figures.last.nodes) - 1 - len(idle))}",
        )


RULES: Sequence[Callable[[Figures], Iterable[Advice]]] = (
    find_infeasible,
    find_starved,
    find_full_memory,
    find_full_store,
    find_full_gpu_memory,
    find_hot_gpus,
    find_idle_gpus,
    find_uneven_load,
)


# -- figures


# -- text


def _requests(demand: Demand) -> str:
    return f"{demand.count} {'task or actor requests' if demand.count == 1 else 'tasks or actors request'}"


def _bundles(bundles: Sequence[Shape]) -> str:
    shapes: dict[object, tuple[int, Shape]] = {}
    for bundle in bundles:
        shapes[shape_key(bundle)] = (shapes.get(shape_key(bundle), (0, bundle))[0] + 1, bundle)
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


def _requesters(figures: Figures, shape: Shape) -> str:
    """The waiting actors of this shape, e.g. "; requested by `A` of job lab-1"."""
    names = [
        f"`{a.name}` of job {a.job}"
        for a in figures.actors
        if a.waiting and shape_key(a.shape) == shape_key(shape)
    ]
    return f"; requested by {', '.join(names)}" if names else ""


def _effect_of_infeasible(figures: Figures) -> str:
    if figures.elastic:
        return "Ray waits until the autoscaler adds a node; if no node group has that, it waits forever"
    return "Ray waits for such a node forever and reports no error: the program hangs"


def _suggest_less(cluster: str, shape: Shape) -> str:
    options = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}
    names = ", ".join(options.get(name, f"resources={{{name!r}: …}}") for name in shape)
    return (
        f"request less ({names}), add a node that has it (heliostat join {cluster}), or use another cluster"
    )
