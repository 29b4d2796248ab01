"""Figures as Ray 2.60 gave them on a cluster of two small nodes, and GPUs as an H200 told of itself -> what is advised."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from heliostat.diagnostics.advisor import Advice, advise, summarize
from heliostat.diagnostics.figures import Actors, Demand, Figures, Gpu, Group, Node, Reading, mean_gpu_use

MIB, GIB = 2**20, 2**30
STORE = [0.0, 100.0 * MIB]


def node(name: str, taken: float = 0.0, /, gpu: float | None = None, **more: Any) -> Node:
    """2 CPUs, of which so many are taken; with `gpu`, one GPU of which so much is taken."""
    resources = {"CPU": [taken, 2.0], "memory": [0.0, 11.08 * GIB], "object_store_memory": STORE}
    if gpu is not None:
        resources["GPU"] = [gpu, 1.0]
    values: dict[str, Any] = {"at": 1.0, "cpu": 20.0, "memory": (2.3 * GIB, 23.5 * GIB), **more}
    return Node(name, {**resources, **values.pop("resources", {})}, **values)


def figures(*nodes: Node, demands: tuple[Demand, ...] = (), **more: Any) -> Figures:
    return Figures([Reading(nodes, demands)] * 2, cluster="lab", **more)


def kinds(found: list[Advice]) -> list[str]:
    return [advice.kind for advice in found]


def only(seen: Figures) -> Advice:
    (advice,) = advise(seen)
    assert all(advice.fields().values())
    return advice


# -- quiet


def test_nothing_to_say() -> None:
    for cpu in (0.0, 2.0):
        quiet = figures(node("head", cpu), node("w1", cpu))
        assert advise(quiet) == []
    assert summarize(quiet) == "4/4 CPUs requested, CPUs 20 % busy, object store 0 B of 200.0 MiB"


def test_before_the_hosts_have_told_anything() -> None:
    bare = Node("head", {"CPU": [0.0, 2.0]})
    assert advise(figures(bare)) == []
    assert summarize(figures(bare)) == "0/2 CPUs requested, object store 0 B of 0 B"


def test_no_node_at_all() -> None:
    seen = figures(demands=(Demand({"CPU": 1.0}, 1),))
    assert kinds(advise(seen)) == ["infeasible"] and summarize(seen)


# -- demands


def test_what_no_node_has() -> None:
    asked = Demand({"CPU": 1.0, "GPU": 4.0}, 1)
    advice = only(figures(node("head"), node("w1", gpu=0.0), demands=(asked,)))
    assert advice.kind == "infeasible"
    assert advice.finding == "1 task or actor requests 1 CPU + 4 GPU, and no node has that"
    assert advice.evidence == "the largest node has 1 GPU"
    assert "hangs" in advice.effect and "num_gpus" in advice.remedy


def test_what_no_node_has_any_of_and_who_asks_for_it() -> None:
    shape = {"CPU": 1.0, "special": 2.0}
    pool = Actors("A", shape, "lab-1", 0, 3)
    advice = only(figures(node("head"), demands=(Demand(shape, 3),), actors=[pool]))
    assert advice.finding.startswith("3 tasks or actors request 1 CPU + 2 special")
    assert advice.evidence == "no node has special; requested by `A` of job lab-1"


def test_actors_that_no_status_tells_of() -> None:
    never = Actors("Big", {"CPU": 16.0}, "lab-1", 0, 1)
    coming = Actors("Small", {"CPU": 1.0}, "lab-1", 0, 1)
    advice = only(figures(node("head"), actors=[never, coming]))
    assert advice.kind == "infeasible" and advice.evidence.endswith("requested by `Big` of job lab-1")


def test_what_is_there_but_not_on_one_node() -> None:
    big = node("big", resources={"CPU": [0.0, 16.0]})
    advice = only(figures(big, node("w1", gpu=0.0), demands=(Demand({"CPU": 8.0, "GPU": 1.0}, 1),)))
    assert advice.evidence.endswith("16 CPU, the largest node has 1 GPU, not on the same node")


def test_a_cluster_that_grows_may_get_what_is_not_here() -> None:
    advice = only(figures(node("head"), demands=(Demand({"GPU": 1.0}, 1),), elastic=True))
    assert "no current node has that" in advice.finding and "autoscaler" in advice.effect


def test_a_group_that_can_never_be() -> None:
    group = Group([{"CPU": 2.0}] * 3, True, "lab-1")
    advice = only(figures(node("head"), node("w1"), groups=[group]))
    assert advice.kind == "infeasible" and "3 × 2 CPU" in advice.finding
    assert advice.evidence == "2 nodes: head CPU 0/2, w1 CPU 0/2"


@pytest.mark.parametrize(
    ("bundles", "fits"),
    [
        ([{"CPU": 1.0}] * 4, True),
        ([{"CPU": 1.0}] * 5, False),  # more than there is in all
        ([{"CPU": 1.5}] * 2, True),
        ([{"CPU": 1.2}] * 3, False),  # there is enough in all, and not on the nodes
        ([{"CPU": 1.5}, {"CPU": 1.2}, {"CPU": 1.2}], False),
        ([{"CPU": 3.0}], False),
        ([{"CPU": 1.0}, {"GPU": 1.0}], True),
        ([{"CPU": 1.0}, {"GPU": 1.0}, {"GPU": 0.5}], False),
        ([{"special": 1.0}], False),
        ([{"CPU": 0.0}], True),
    ],
)
def test_what_ray_does_not_call_infeasible(bundles: list[dict[str, float]], fits: bool) -> None:
    """Of a group that is packed or spread Ray says NO_RESOURCES, whether they are taken or do not exist."""
    seen = figures(node("head"), node("w1", gpu=0.0), groups=[Group(bundles, False, "lab-1")])
    assert only(seen).kind == ("starved" if fits else "infeasible")


def test_runners_that_wait_for_cpus() -> None:
    """7 env runners of one CPU on 4 CPUs, and 5 tasks behind them."""
    shape = {"CPU": 1.0}
    pool = Actors("SingleAgentEnvRunner", shape, "lab-1", 4, 3)
    seen = figures(node("head", 2.0), node("w1", 2.0), demands=(Demand(shape, 8),), actors=[pool])
    runners, tasks = advise(seen)
    assert runners.kind == "starved"
    assert runners.finding == "3 of 7 `SingleAgentEnvRunner` of job lab-1 wait for 1 CPU"
    assert runners.evidence == "4 of 4 CPU taken, 4 by 4 × `SingleAgentEnvRunner` of job lab-1"
    assert "request 4 (num_env_runners" in runners.remedy
    assert (tasks.kind, tasks.finding) == ("waiting", "5 tasks wait for 1 CPU")


def test_a_queue_that_moves_is_no_news() -> None:
    full = (node("head", 2.0),)
    gone = Figures([Reading(full, [Demand({"CPU": 1.0}, 3)]), Reading(full)], cluster="lab")
    new = Figures([Reading(full), Reading(full, [Demand({"CPU": 1.0}, 3)])], cluster="lab")
    assert advise(gone) == advise(new) == []


def test_a_group_that_waits() -> None:
    group = Group([{"CPU": 1.0}] * 2, False, "lab-2")
    advice = only(figures(node("head", 2.0), groups=[group]))
    assert (advice.kind, advice.finding) == ("starved", "a placement group of job lab-2 waits for 2 × 1 CPU")


def test_a_group_that_holds_what_its_own_program_waits_for() -> None:
    held = [node(name, 0.0, held={"CPU": 2.0}) for name in ("head", "w1")]
    advice = only(figures(*held, demands=(Demand({"CPU": 1.0}, 1),)))
    assert advice.kind == "deadlock" and advice.evidence == "4 CPU held and idle"
    # what another uses is no deadlock
    used = [node(name, 2.0) for name in ("head", "w1")]
    assert kinds(advise(figures(*used, demands=(Demand({"CPU": 1.0}, 1),)))) == ["waiting"]


def test_a_task_that_does_not_fit_into_its_group() -> None:
    inside = (Demand({"CPU": 1.0}, 1, 1),)
    idle = [node(name, 1.5, held={"CPU": 0.5}) for name in ("head", "w1")]  # a CPU in all, in two bundles
    advice = only(figures(*idle, demands=inside))
    assert advice.kind == "deadlock" and "inside a placement group" in advice.finding
    # its bundle is in use: a queue, or an actor that waits for its own child
    advice = only(figures(node("head", 2.0), demands=inside))
    assert advice.kind == "waiting" and "neither can continue" in advice.effect


def test_waiting_beside_free_room_is_waiting_for_something_else() -> None:
    demand = Demand({"CPU": 1.0}, 2)
    assert only(figures(node("head", 0.0), demands=(demand,))).kind == "stuck"
    # room for a moment only: the queue moves
    full, free = Reading([node("head", 2.0)], [demand]), Reading([node("head", 1.0)], [demand])
    assert "stuck" not in kinds(advise(Figures([full, free, full], cluster="lab")))


# -- what is near its end


def test_memory_near_the_limit_where_ray_kills() -> None:
    advice = only(figures(node("head"), node("w1", memory=(22.0 * GIB, 23.5 * GIB))))
    assert (advice.kind, advice.finding) == ("memory", "the memory of w1 is nearly full")
    assert "94%" in advice.evidence and "95%" in advice.effect


def test_objects_on_disk() -> None:
    """As it was when ten arrays of 20 MiB were put into a store of 100 MiB."""
    used = node("head", resources={"object_store_memory": [60.0 * MIB, 100.0 * MIB]})
    advice = only(figures(used, node("w1"), spilled={"head": (0, 146802418)}))
    assert advice.kind == "spilling"
    assert (
        advice.evidence
        == "140.0 MiB written, 140.0 MiB of it during the observation; 60.0 MiB of 100.0 MiB in the object store"
    )
    before = only(figures(used, spilled={"head": (146802418, 146802418)}))
    assert before.evidence == "140.0 MiB written; 60.0 MiB of 100.0 MiB in the object store"
    # who wrote it has left
    assert advise(figures(node("head"), spilled={"head": (146802418, 146802418)})) == []


def test_a_store_that_is_nearly_full() -> None:
    full = node("head", resources={"object_store_memory": [85.0 * MIB, 100.0 * MIB]})
    assert only(figures(full)).kind == "store"


# -- GPUs: an H200 under a program that pauses, a busy one, and one that is nearly full


def h200(use: float | None, memory: float = 755.0, temperature: float | None = 42.0) -> Gpu:
    return Gpu("NVIDIA H200", use, (memory, 143771.0), temperature)


def watched(
    uses: list[float | None], cpu: float = 30.0, taken: float = 0.0, gpu: Gpu | None = None
) -> Figures:
    """One node with a GPU that somebody has asked for, looked at every 5 s; we ask twice as often as the host looks."""
    one = node("w1", taken, gpu=1.0, cpu=cpu)
    looks = [
        replace(one, at=float(i), gpus=[replace(gpu or h200(None), use=use)]) for i, use in enumerate(uses)
    ]
    return Figures([Reading([look]) for look in looks for _ in range(2)], cluster="lab")


STARVED: list[float | None] = [27.0, 27.0, 15.0, 27.0]
BUSY: list[float | None] = [100.0, 89.0, 100.0, 100.0]


def test_a_busy_gpu_needs_no_advice() -> None:
    assert advise(watched(BUSY)) == []
    assert "GPUs 97 % busy" in summarize(watched(BUSY))


def test_each_look_of_the_host_counts_once() -> None:
    odd = Figures(
        [
            Reading([node("w1", at=at, gpus=[h200(use)])])
            for at, use in ((1.0, 100.0), (1.0, 100.0), (2.0, 0.0))
        ]
    )
    assert [use for _, _, use in mean_gpu_use(odd)] == [50.0]


@pytest.mark.parametrize(
    ("cpu", "taken", "means", "do"),
    [
        (97.0, 2.0, "CPU cores of these nodes are 97 % busy", "more CPUs per GPU"),
        (30.0, 1.0, "1 of 2 CPUs are free", "more env runners"),
        (30.0, 2.0, "all CPUs are requested", "larger batches"),
    ],
)
def test_a_gpu_that_waits_and_why(cpu: float, taken: float, means: str, do: str) -> None:
    advice = only(watched(STARVED, cpu, taken))
    assert (advice.kind, advice.finding) == ("gpu-idle", "1 GPU is less than 80 % busy")
    assert advice.evidence == "w1 GPU 0 24 % (mean of 4 measurements)"
    assert means in advice.effect and do in advice.remedy


def test_a_gpu_that_tells_nothing() -> None:
    assert advise(watched([None, None])) == []


def test_gpus_that_nobody_asks_for() -> None:
    work = node("w1", 2.0, gpu=0.0, gpus=[h200(0.0, 0.0, 37.0)])
    advice = only(figures(work))
    assert advice.kind == "gpu-unused" and "num_gpus=1" in advice.remedy
    idle = node("w1", 0.0, gpu=0.0, gpus=[h200(0.0, 0.0, 37.0)])
    assert advise(figures(idle)) == []


def test_gpu_memory_nearly_full() -> None:
    assert advise(watched([99.0, 99.0], gpu=h200(99.0, 128107.0, 61.0))) == []  # 89 %
    advice = only(watched([99.0, 99.0], gpu=h200(99.0, 139000.0, 61.0)))
    assert advice.kind == "gpu-memory" and advice.evidence == "135.7 GiB of 140.4 GiB (NVIDIA H200)"
    assert all(word in advice.remedy for word in ("smaller batches", "fewer processes", "smaller model"))


def test_a_hot_gpu() -> None:
    advice = only(watched([99.0], gpu=h200(99.0, 755.0, 88.0)))
    assert advice.kind == "gpu-hot" and advice.evidence == "88 °C (NVIDIA H200)"


# -- placement


def test_idle_nodes_beside_full_ones() -> None:
    advice = only(figures(node("head", 2.0, cpu=99.0), node("w1"), node("w2")))
    assert advice.kind == "uneven"
    assert advice.finding == "w1, w2 are idle while head is full"
    assert advice.remedy.endswith("heliostat scale lab 0")
    assert advise(figures(node("head", 2.0, cpu=50.0), node("w1"))) == []  # nobody is slowed down


def test_the_worst_comes_first() -> None:
    seen = figures(
        node("head", 2.0, gpu=0.0, memory=(23.0 * GIB, 23.5 * GIB)),
        demands=(Demand({"CPU": 64.0}, 1), Demand({"CPU": 1.0}, 2)),
        spilled={"head": (0, 5)},
    )
    assert kinds(advise(seen)) == ["infeasible", "waiting", "memory", "spilling", "gpu-unused"]
