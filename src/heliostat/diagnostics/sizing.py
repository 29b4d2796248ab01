"""Computes how many workers a program can request on a cluster. Pure arithmetic over the nodes' resources.

What fits is decided for each node, not for the sum: a bundle is on one node, and a fraction of a GPU on one GPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import floor
from typing import Any

from heliostat.common.errors import Code, HeliostatError, UsageError
from heliostat.common.units import count, format_bytes

Shape = Mapping[str, float]

STRATEGIES = ("rollouts", "gpu", "balanced")
PLACEMENTS = ("PACK", "SPREAD", "STRICT_SPREAD")
LEARNER_SHARE = 0.25  # of a GPU, for a small model on a shared GPU
RUNNER_SHARES = (0.5, 0.25, 0.125)
MAX_CPU_LEARNERS = 4  # with more, gradient averaging dominates
FEW_RUNNERS, MANY_RUNNERS = 2, 8  # for each learner


@dataclass(frozen=True)
class Node:
    """The resources that Ray has on one node."""

    name: str
    cpus: float
    gpus: float = 0.0

    @property
    def cores(self) -> int:
        return floor(self.cpus)

    @property
    def devices(self) -> int:
        return floor(self.gpus)

    def __str__(self) -> str:
        return f"{self.name}: {show({'CPU': self.cpus, 'GPU': self.gpus})}"


@dataclass(frozen=True)
class Sizing:
    """Settings that fit a cluster. `calls`: function -> its arguments, as `config.env_runners(**sizing.calls["env_runners"])`;
    `why`: argument -> its reason; `bundles`: the resource requests that follow, each on one node; `notes`: for the user."""

    strategy: str
    calls: Mapping[str, Mapping[str, Any]]
    why: Mapping[str, str]
    bundles: Sequence[Shape]
    notes: Sequence[str] = ()

    def with_notes(self, notes: Sequence[str]) -> Sizing:
        return replace(self, notes=[*self.notes, *notes])

    def text(self) -> str:
        """The settings as Python code, each with its reason in a comment."""
        lines = []
        for name, arguments in self.calls.items():
            lines.append(f"{'' if name[0].isupper() else '.'}{name}(")
            lines += [f"    {key}={value!r},  # {self.why[key]}" for key, value in arguments.items()]
            lines.append(")")
        return "\n".join(lines)


def show(shape: Shape) -> str:
    """{'CPU': 2.0, 'GPU': 0.0} -> `2 CPU`."""

    def amount(name: str, value: float) -> str:
        return format_bytes(value) if name in ("memory", "object_store_memory") else f"{value:g}"

    return " + ".join(f"{amount(name, value)} {name}" for name, value in shape.items() if value) or "nothing"


# -- RLlib


def rllib(nodes: Sequence[Node], strategy: str) -> Sizing:
    """Env runners and learners for RLlib's new API stack.

    Under Tune the algorithm is an actor with one CPU, and everything is in one placement group. Without Tune it is the driver,
    which takes no CPU, and Ray starts its actors one by one, runners first. The result fits both cases. A runner takes one CPU,
    so that runners fill any node. A learner with a GPU requests no CPU, so that runners cannot block it. Runners share GPUs only
    if one node has all GPUs; else they could take a fraction of every GPU before the learners start.
    """
    if strategy not in STRATEGIES:
        raise UsageError(f"unknown strategy `{strategy}`", hint=f"one of {', '.join(STRATEGIES)}")
    cores, devices = sum(node.cores for node in nodes), sum(node.devices for node in nodes)
    if cores < 1:
        raise _no_capacity("RLlib's algorithm takes one CPU", nodes)
    free_cores = cores - 1
    learners, gpus, cpus = (
        (*_gpu_learners(strategy, devices, free_cores), 0)
        if devices
        else (_cpu_learners(strategy, free_cores), 0, 1)
    )
    max_runners = max(free_cores - learners, min(free_cores, 1))
    wanted = {
        "rollouts": max_runners,
        "gpu": FEW_RUNNERS * max(1, learners),
        "balanced": MANY_RUNNERS * max(1, learners),
    }[strategy]
    runners = min(max_runners, wanted)
    share = _runner_gpu_share(nodes, runners, devices - learners) if strategy == "balanced" else 0
    notes = []
    if not devices:
        notes.append("no node has a GPU: learners use CPUs")
    if not runners:
        notes.append("no CPU is left for a runner: the algorithm's process samples too")
    return Sizing(
        strategy,
        {
            "env_runners": {
                "num_env_runners": runners,
                "num_cpus_per_env_runner": 1,
                "num_gpus_per_env_runner": share,
            },
            "learners": {
                "num_learners": learners,
                "num_gpus_per_learner": gpus,
                "num_cpus_per_learner": cpus,
            },
        },
        {
            "num_env_runners": _why_runners(runners, wanted, cores, learners, strategy),
            "num_cpus_per_env_runner": "an environment uses one core",
            "num_gpus_per_env_runner": f"runners share the {count(devices - learners, 'GPU')} without a learner"
            if share
            else "runners use CPUs: each computes one small step at a time",
            **_why_learners(strategy, learners, devices),
        },
        [{"CPU": 1.0}, *[_bundle(1, share)] * runners, *[_bundle(cpus, gpus)] * learners],
        notes,
    )


def _gpu_learners(strategy: str, devices: int, free_cores: int) -> tuple[int, float]:
    """(number of learners, GPUs of each). They request no core, but one core for each and one for a runner stay free."""
    if strategy == "rollouts":
        return 1, LEARNER_SHARE
    wanted = devices if strategy == "gpu" else devices // 2
    return max(1, min(wanted, free_cores - 1)), 1


def _cpu_learners(strategy: str, free_cores: int) -> int:
    """The number of learners without GPUs; 0: the algorithm's process learns."""
    cores_per_learner = 1 + (FEW_RUNNERS if strategy == "gpu" else MANY_RUNNERS)
    minimum = 1 if strategy == "balanced" and free_cores >= 3 else 0
    learners = max(minimum, min(MAX_CPU_LEARNERS, free_cores // cores_per_learner))
    return 0 if strategy == "rollouts" else learners


def _runner_gpu_share(nodes: Sequence[Node], runners: int, devices: int) -> float:
    """The fraction of a GPU for each runner; devices: GPUs without a learner. 0: runners use no GPU."""
    gpu_nodes = [node for node in nodes if node.devices]
    if len(gpu_nodes) != 1 or not 0 < runners <= gpu_nodes[0].cores:
        return 0
    return next((share for share in RUNNER_SHARES if runners <= devices / share), 0)


def _why_runners(runners: int, wanted: int, cores: int, learners: int, strategy: str) -> str:
    reserved = "one for the algorithm" + (" and one for each learner" if learners else "")
    if runners < wanted or strategy == "rollouts":
        return f"all of the {count(cores, 'CPU')} except {reserved}"
    return f"{FEW_RUNNERS if strategy == 'gpu' else MANY_RUNNERS} for each learner, of {count(cores, 'CPU')}"


def _why_learners(strategy: str, learners: int, devices: int) -> dict[str, str]:
    if not devices:
        reason = "the algorithm's process learns" if not learners else "each learns from its part of a batch"
        return {
            "num_learners": reason,
            "num_gpus_per_learner": "no node has a GPU",
            "num_cpus_per_learner": "one core" + ("" if learners else ", that of the algorithm"),
        }
    number = {
        "rollouts": "one is enough where sampling dominates",
        "gpu": f"one for each GPU: {count(devices, 'GPU')} on the nodes",
        "balanced": f"half of the {count(devices, 'GPU')}, at least one",
    }[strategy]
    if learners < (devices if strategy == "gpu" else devices // 2):
        number = f"limited by the CPUs; the nodes have {count(devices, 'GPU')}"
    return {
        "num_learners": number,
        "num_gpus_per_learner": "the remainder of this GPU is free for other work"
        if strategy == "rollouts"
        else "a whole GPU",
        "num_cpus_per_learner": "none requested, so that runners cannot block it; the runners leave a core free",
    }


# -- Ray Train


def train(
    nodes: Sequence[Node],
    cpus_per_worker: int | None = None,
    gpus_per_worker: float | None = None,
    placement: str = "PACK",
) -> Sizing:
    """As many workers as fit. Train's controller takes no CPU."""
    placement = placement.upper()
    if placement not in PLACEMENTS:
        raise UsageError(f"unknown placement `{placement}`", hint=f"one of {', '.join(PLACEMENTS)}")
    devices = sum(node.devices for node in nodes)
    gpus = gpus_per_worker if gpus_per_worker is not None else (1.0 if devices else 0.0)
    _check_amounts(cpus_per_worker, gpus)
    one_per_node = placement == "STRICT_SPREAD"
    cpus = cpus_per_worker if cpus_per_worker is not None else _cpus_per_worker(nodes, gpus, one_per_node)
    slots = {node.name: _count_slots(node, cpus, gpus, one_per_node) for node in nodes}
    workers = sum(slots.values())
    bundle = _bundle(cpus, gpus)
    if not workers:
        raise _no_capacity(f"a worker requests {show(bundle)}", nodes)
    used = sum(slot > 0 for slot in slots.values())
    free = sum(node.cores for node in nodes) - workers * cpus
    return Sizing(
        placement,
        {
            "ScalingConfig": {
                "num_workers": workers,
                "use_gpu": gpus > 0,
                "resources_per_worker": {key: int(v) if v == int(v) else v for key, v in bundle.items()},
                "placement_strategy": placement,
            }
        },
        {
            "num_workers": f"as many as fit, on {used} of {count(len(nodes), 'node')}"
            + (", one on each" if one_per_node else ""),
            "use_gpu": _why_gpu(gpus, gpus_per_worker, devices),
            "resources_per_worker": _why_cpus(cpus, cpus_per_worker),
            "placement_strategy": {
                "PACK": "on few nodes: least traffic between nodes",
                "SPREAD": "on all nodes where possible",
                "STRICT_SPREAD": "never two on one node",
            }[placement],
        },
        [bundle] * workers,
        _train_notes(gpus, devices, free),
    )


def _why_gpu(gpus: float, given: float | None, devices: int) -> str:
    if given is not None:
        return "as requested"
    return f"{count(devices, 'GPU')} on the nodes" if gpus else "no node has a GPU"


def _why_cpus(cpus: int, given: int | None) -> str:
    if given is not None:
        return "as requested"
    return (
        "limited by the node with the fewest CPUs per worker"
        if cpus
        else "no CPU: a node has fewer CPUs than workers"
    )


def _check_amounts(cpus: int | None, gpus: float) -> None:
    if (cpus is not None and cpus < 0) or gpus < 0 or (cpus == 0 and gpus == 0):
        raise UsageError("a worker needs a CPU or a GPU", hint="--cpus-per-worker 1")
    if gpus > 1 and gpus != int(gpus):
        raise UsageError(
            f"a worker cannot have {gpus:g} GPUs",
            cause="above one, Ray assigns whole GPUs only",
            hint=f"--gpus-per-worker {floor(gpus)}",
        )


def _cpus_per_worker(nodes: Sequence[Node], gpus: float, one_per_node: bool) -> int:
    """The CPUs of a worker with which all GPUs are used or, without GPUs, all nodes."""
    if gpus:
        per_slot = [
            node.cores // slots for node in nodes if (slots := _count_slots(node, 0, gpus, one_per_node))
        ]
        return min(per_slot, default=0)
    return min((node.cores for node in nodes if node.cores), default=1)


def _count_slots(node: Node, cpus: int, gpus: float, one_per_node: bool) -> int:
    """How many workers fit on this node."""
    limits = [1] if one_per_node else []
    if cpus:
        limits.append(node.cores // cpus)
    if gpus >= 1:
        limits.append(node.devices // int(gpus))
    elif gpus > 0:
        limits.append(node.devices * floor(1 / gpus + 1e-9))
    return min(limits)


def _train_notes(gpus: float, devices: int, free: int) -> list[str]:
    notes = []
    if devices and not gpus:
        notes.append(f"the {count(devices, 'GPU')} of the cluster stay unused")
    if 0 < gpus < 1:
        notes.append("workers that share a GPU cannot use NCCL: set TorchConfig(backend='gloo')")
    left = f"{count(free, 'CPU')} left for Ray Data and others" if free else ""
    notes.append(left or "no CPU is left for Ray Data: if you use it, lower --cpus-per-worker")
    return notes


def _bundle(cpus: float, gpus: float) -> dict[str, float]:
    return {name: float(value) for name, value in (("CPU", cpus), ("GPU", gpus)) if value}


def _no_capacity(cause: str, nodes: Sequence[Node]) -> HeliostatError:
    return HeliostatError(
        "nothing fits on this cluster",
        cause=cause,
        details="; ".join(map(str, nodes[:8])) + (" …" if len(nodes) > 8 else "") or "no node",
        hint="request less, or add a larger node",
        code=Code.RAY_NO_CAPACITY,
    )
