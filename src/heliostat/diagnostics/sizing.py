"""How much of a cluster a program may ask for. Pure arithmetic over what each node has; nobody is asked.

What fits is decided node by node, never by the sum: a bundle lies on one node, and a share of a GPU on one GPU.
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
LEARNER_SHARE = 0.25  # of a GPU: a small model, on a GPU that others may use too
RUNNER_SHARES = (0.5, 0.25, 0.125)
CPU_LEARNERS = 4  # more of them spend their time with averaging
FEW, MANY = 2, 8  # runners a learner


@dataclass(frozen=True)
class Node:
    """What Ray may use on one node."""

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
    """What to ask for. `calls`: function -> its arguments, as `config.env_runners(**sizing.calls["env_runners"])`;
    `why`: argument -> one line; `bundles`: what Ray is then asked for, each on one node; `notes`: what else to know."""

    strategy: str
    calls: Mapping[str, Mapping[str, Any]]
    why: Mapping[str, str]
    bundles: Sequence[Shape]
    notes: Sequence[str] = ()

    def noting(self, notes: Sequence[str]) -> Sizing:
        return replace(self, notes=[*self.notes, *notes])

    def text(self) -> str:
        """The lines to paste, each with its reason."""
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

    Under Tune the algorithm is an actor with one CPU, and all is one placement group; without Tune it is the driver, which takes
    none, and its actors come one by one, the runners first. The answer fits in both cases: runners are one CPU each, so
    that they fill any node; a learner with a GPU asks for no CPU, so that no runner can be in its way; and only GPUs of
    one single node are shared with runners, for these could else take a piece of every GPU before a learner comes.
    """
    if strategy not in STRATEGIES:
        raise UsageError(f"there is no strategy `{strategy}`", hint=f"one of {', '.join(STRATEGIES)}")
    cores, devices = sum(node.cores for node in nodes), sum(node.devices for node in nodes)
    if cores < 1:
        raise _nothing("RLlib's algorithm takes one CPU", nodes)
    room = cores - 1
    learners, gpus, cpus = (
        (*_gpu_learners(strategy, devices, room), 0) if devices else (_cpu_learners(strategy, room), 0, 1)
    )
    most = max(room - learners, min(room, 1))
    wanted = {"rollouts": most, "gpu": FEW * max(1, learners), "balanced": MANY * max(1, learners)}[strategy]
    runners = min(most, wanted)
    share = _share(nodes, runners, devices - learners) if strategy == "balanced" else 0
    notes = []
    if not devices:
        notes.append("no node has a GPU: what learns, learns on CPUs")
    if not runners:
        notes.append("there is no CPU for a runner: the algorithm's own process samples, too")
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
            "num_cpus_per_env_runner": "an environment steps on one core",
            "num_gpus_per_env_runner": f"the {count(devices - learners, 'GPU')} that no learner has, shared"
            if share
            else "runners on CPUs: each computes one small step at a time",
            **_why_learners(strategy, learners, devices),
        },
        [
            {"CPU": 1.0},
            *[_bundle(1, share)] * runners,
            *[_bundle(cpus, gpus)] * learners,
        ],
        notes,
    )


def _gpu_learners(strategy: str, devices: int, room: int) -> tuple[int, float]:
    """How many, and what each has of a GPU. They ask for no core, but there is one for each, and one for a runner."""
    if strategy == "rollouts":
        return 1, LEARNER_SHARE
    wanted = devices if strategy == "gpu" else devices // 2
    return max(1, min(wanted, room - 1)), 1


def _cpu_learners(strategy: str, room: int) -> int:
    """0: the algorithm's own process learns."""
    a_learner_with_its_runners = 1 + (FEW if strategy == "gpu" else MANY)
    least = 1 if strategy == "balanced" and room >= 3 else 0
    found = max(least, min(CPU_LEARNERS, room // a_learner_with_its_runners))
    return 0 if strategy == "rollouts" else found


def _share(nodes: Sequence[Node], runners: int, devices: int) -> float:
    """What each of the runners may have of the GPUs that no learner has; 0: nothing."""
    having = [node for node in nodes if node.devices]
    if len(having) != 1 or not 0 < runners <= having[0].cores:
        return 0
    return next((share for share in RUNNER_SHARES if runners <= devices / share), 0)


def _why_runners(runners: int, wanted: int, cores: int, learners: int, strategy: str) -> str:
    kept = "one for the algorithm" + (" and one for each learner" if learners else "")
    if runners < wanted or strategy == "rollouts":
        return f"all of the {count(cores, 'CPU')}, but for {kept}"
    return f"{FEW if strategy == 'gpu' else MANY} a learner, of {count(cores, 'CPU')}"


def _why_learners(strategy: str, learners: int, devices: int) -> dict[str, str]:
    if not devices:
        few = "the algorithm's own process learns" if not learners else "each learns from its part of a batch"
        return {
            "num_learners": few,
            "num_gpus_per_learner": "no node has a GPU",
            "num_cpus_per_learner": "one core" + ("" if learners else ", the algorithm's own"),
        }
    number = {
        "rollouts": "one is enough where sampling takes the time",
        "gpu": f"every GPU learns: {count(devices, 'GPU')} on the nodes",
        "balanced": f"half of the {count(devices, 'GPU')}, one at least",
    }[strategy]
    if learners < (devices if strategy == "gpu" else devices // 2):
        number = f"there are {count(devices, 'GPU')}, and CPUs for so many learners"
    return {
        "num_learners": number,
        "num_gpus_per_learner": "the rest of this GPU is free for other work"
        if strategy == "rollouts"
        else "a whole one",
        "num_cpus_per_learner": "asks for none, so that no runner can be in its way; runners leave a core for it",
    }


# -- Ray Train


def train(
    nodes: Sequence[Node],
    cpus_per_worker: int | None = None,
    gpus_per_worker: float | None = None,
    placement: str = "PACK",
) -> Sizing:
    """As many workers as fit. Train's own controller takes no CPU."""
    placement = placement.upper()
    if placement not in PLACEMENTS:
        raise UsageError(f"there is no placement `{placement}`", hint=f"one of {', '.join(PLACEMENTS)}")
    devices = sum(node.devices for node in nodes)
    gpus = gpus_per_worker if gpus_per_worker is not None else (1.0 if devices else 0.0)
    _check_amounts(cpus_per_worker, gpus)
    alone = placement == "STRICT_SPREAD"
    cpus = cpus_per_worker if cpus_per_worker is not None else _cpus_for(nodes, gpus, alone)
    slots = {node.name: _slots(node, cpus, gpus, alone) for node in nodes}
    workers = sum(slots.values())
    asked = _bundle(cpus, gpus)
    if not workers:
        raise _nothing(f"a worker asks for {show(asked)}", nodes)
    used = sum(slot > 0 for slot in slots.values())
    free = sum(node.cores for node in nodes) - workers * cpus
    return Sizing(
        placement,
        {
            "ScalingConfig": {
                "num_workers": workers,
                "use_gpu": gpus > 0,
                "resources_per_worker": {key: int(v) if v == int(v) else v for key, v in asked.items()},
                "placement_strategy": placement,
            }
        },
        {
            "num_workers": f"as many as fit, on {used} of {count(len(nodes), 'node')}"
            + (", one on each" if alone else ""),
            "use_gpu": _why_gpu(gpus, gpus_per_worker, devices),
            "resources_per_worker": _why_cpus(cpus, cpus_per_worker),
            "placement_strategy": {
                "PACK": "workers close together: the least traffic between nodes",
                "SPREAD": "over all nodes, as far as it goes",
                "STRICT_SPREAD": "never two on one node",
            }[placement],
        },
        [asked] * workers,
        _train_notes(gpus, devices, free),
    )


def _why_gpu(gpus: float, asked: float | None, devices: int) -> str:
    if asked is not None:
        return "as you said"
    return f"{count(devices, 'GPU')} on the nodes" if gpus else "no node has a GPU"


def _why_cpus(cpus: int, asked: int | None) -> str:
    if asked is not None:
        return "as you said"
    return (
        "the node with the fewest CPUs for its workers has so many for each"
        if cpus
        else "no CPU: a node has fewer of them than workers"
    )


def _check_amounts(cpus: int | None, gpus: float) -> None:
    if (cpus is not None and cpus < 0) or gpus < 0 or (cpus == 0 and gpus == 0):
        raise UsageError("a worker needs a CPU or a GPU", hint="--cpus-per-worker 1")
    if gpus > 1 and gpus != int(gpus):
        raise UsageError(
            f"a worker cannot have {gpus:g} GPUs",
            cause="above one, Ray gives whole GPUs only",
            hint=f"--gpus-per-worker {floor(gpus)}",
        )


def _cpus_for(nodes: Sequence[Node], gpus: float, alone: bool) -> int:
    """CPUs of a worker with which every node that can take one is used as far as its GPUs go, or as a whole."""
    if gpus:
        each = [node.cores // slots for node in nodes if (slots := _slots(node, 0, gpus, alone))]
        return min(each, default=0)
    return min((node.cores for node in nodes if node.cores), default=1)


def _slots(node: Node, cpus: int, gpus: float, alone: bool) -> int:
    """How many workers fit on this node."""
    found = [1] if alone else []
    if cpus:
        found.append(node.cores // cpus)
    if gpus >= 1:
        found.append(node.devices // int(gpus))
    elif gpus > 0:
        found.append(node.devices * floor(1 / gpus + 1e-9))
    return min(found)


def _train_notes(gpus: float, devices: int, free: int) -> list[str]:
    notes = []
    if devices and not gpus:
        notes.append(f"the {count(devices, 'GPU')} of the cluster stay unused")
    if 0 < gpus < 1:
        notes.append("workers that share a GPU cannot talk over NCCL: TorchConfig(backend='gloo')")
    left = f"{count(free, 'CPU')} left for Ray Data and others" if free else ""
    notes.append(left or "no CPU is left for Ray Data: where you use it, --cpus-per-worker less")
    return notes


def _bundle(cpus: float, gpus: float) -> dict[str, float]:
    return {name: float(value) for name, value in (("CPU", cpus), ("GPU", gpus)) if value}


def _nothing(cause: str, nodes: Sequence[Node]) -> HeliostatError:
    return HeliostatError(
        "nothing fits on this cluster",
        cause=cause,
        details="; ".join(map(str, nodes[:8])) + (" …" if len(nodes) > 8 else "") or "no node",
        hint="ask for less, or add a larger node",
        code=Code.RAY_NO_CAPACITY,
    )
