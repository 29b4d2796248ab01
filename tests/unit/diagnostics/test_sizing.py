"""What is planned fits: checked by placing it, bundle by bundle and GPU by GPU, in every order that Ray may choose."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heliostat.common.errors import HeliostatError, UsageError
from heliostat.diagnostics.sizing import PLACEMENTS, STRATEGIES, Node, Sizing, rllib, show, train

NODES = st.lists(st.tuples(st.integers(0, 12) | st.just(2.5), st.integers(0, 4)), min_size=1, max_size=5).map(
    lambda sizes: [Node(f"n{i}", float(cpus), float(gpus)) for i, (cpus, gpus) in enumerate(sizes)]
)
Choose = Callable[[Sequence[int]], int]


class Placed:
    """Nodes that fill up. A share of a GPU lies on one GPU, the fullest that has room, as Ray 2.60 was seen to choose."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self.cpus = [node.cpus for node in nodes]
        self.gpus = [[1.0] * int(node.gpus) for node in nodes]
        self.many = [0] * len(nodes)

    def fits(self, bundle: dict[str, float], i: int) -> bool:
        gpu = bundle.get("GPU", 0.0)
        whole = sum(free == 1.0 for free in self.gpus[i])
        enough = whole >= gpu if gpu >= 1 else not gpu or any(free >= gpu for free in self.gpus[i])
        return self.cpus[i] >= bundle.get("CPU", 0.0) and enough

    def put(self, bundle: dict[str, float], choose: Choose, alone: bool = False) -> bool:
        able = [i for i in range(len(self.cpus)) if self.fits(bundle, i) and not (alone and self.many[i])]
        if not able:
            return False
        i = choose(able)
        self.many[i] += 1
        self.cpus[i] -= bundle.get("CPU", 0.0)
        gpu = bundle.get("GPU", 0.0)
        while gpu > 0:
            device = min(g for g in self.gpus[i] if g >= min(gpu, 1.0))
            self.gpus[i][self.gpus[i].index(device)] -= min(gpu, 1.0)
            gpu -= 1.0
        return True


def choosing(data: st.DataObject) -> Choose:
    return lambda able: data.draw(st.sampled_from(list(able)))


def runners(plan: Sizing) -> int:
    return int(plan.calls["env_runners"]["num_env_runners"])


@given(NODES, st.sampled_from(STRATEGIES), st.data())
def test_rllib_fits_wherever_ray_puts_it(nodes: list[Node], strategy: str, data: st.DataObject) -> None:
    """As one placement group, which takes GPUs first; and one by one, runners first, on any node that has room."""
    try:
        plan = rllib(nodes, strategy)
    except HeliostatError as error:
        assert sum(int(node.cpus) for node in nodes) == 0 and error.exit_code == 1
        return
    first = sorted(plan.bundles, key=lambda bundle: -bundle.get("GPU", 0.0))
    algorithm, *rest = plan.bundles
    number = runners(plan)
    for order in (first, [*rest[:number], *rest[number:], algorithm]):
        placed = Placed(nodes)
        assert all(placed.put(dict(bundle), choosing(data)) for bundle in order)


@pytest.mark.parametrize(
    "sizes", [[(12, 1), (4, 1)], [(32, 4), (32, 4)], [(16, 2), (16, 3), (64, 0)], [(40, 8)]]
)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_runners_that_come_first_leave_gpus_whole(sizes: list[tuple[int, int]], strategy: str) -> None:
    """Each goes to the emptiest node that has room, which is the worst for who comes after them."""
    nodes = [Node(f"n{i}", cpus, gpus) for i, (cpus, gpus) in enumerate(sizes)]
    placed = Placed(nodes)
    assert all(
        placed.put(dict(bundle), lambda able: min(able, key=lambda i: placed.many[i]))
        for bundle in rllib(nodes, strategy).bundles[1:]
    )


@given(NODES, st.sampled_from(STRATEGIES))
def test_rllib_asks_for_what_its_lines_say(nodes: list[Node], strategy: str) -> None:
    """The bundles are those of RLlib's own `default_resource_request` for these lines."""
    nodes = [*nodes, Node("last", 4.0)]
    plan = rllib(nodes, strategy)
    run, learn = plan.calls["env_runners"], plan.calls["learners"]

    def bundle(cpus: float, gpus: float) -> dict[str, float]:
        return {name: float(value) for name, value in (("CPU", cpus), ("GPU", gpus)) if value}

    main = bundle(1, 0 if learn["num_learners"] else learn["num_gpus_per_learner"])
    each = bundle(run["num_cpus_per_env_runner"], run["num_gpus_per_env_runner"])
    learner = bundle(learn["num_cpus_per_learner"], learn["num_gpus_per_learner"])
    assert list(plan.bundles) == [main, *[each] * runners(plan), *[learner] * learn["num_learners"]]
    assert runners(plan) >= 1


@given(NODES, st.sampled_from(PLACEMENTS), st.none() | st.integers(1, 5),
       st.sampled_from([None, 0.0, 0.25, 0.3, 0.5, 1.0, 2.0, 3.0]), st.data())  # fmt: skip
def test_train_fits_and_one_more_does_not(nodes, placement, cpus, gpus, data) -> None:
    alone = placement == "STRICT_SPREAD"
    try:
        plan = train(nodes, cpus, gpus, placement)
    except HeliostatError:
        asked = {
            "CPU": float(cpus or 1),
            "GPU": gpus if gpus is not None else float(any(n.gpus for n in nodes)),
        }
        assert not Placed(nodes).put(asked, choosing(data))
        return
    placed = Placed(nodes)
    assert all(placed.put(dict(bundle), choosing(data), alone) for bundle in plan.bundles)
    assert not placed.put(dict(plan.bundles[0]), choosing(data), alone)
    call = plan.calls["ScalingConfig"]
    assert call["num_workers"] == len(plan.bundles) and call["resources_per_worker"] == plan.bundles[0]
    assert call["use_gpu"] is ("GPU" in plan.bundles[0])


LAB = [Node("head", 16, 0), Node("w1", 32, 4), Node("w2", 32, 4)]


@pytest.mark.parametrize(
    ("nodes", "strategy", "expected"),
    [  # runners, GPU of each, learners, GPU and CPU of each
        ([Node("head", 18, 1)], "rollouts", (16, 0, 1, 0.25, 0)),
        ([Node("head", 16, 2)], "gpu", (4, 0, 2, 1, 0)),
        ([Node("head", 16, 5)], "balanced", (13, 0.125, 2, 1, 0)),
        ([Node("head", 32, 3)], "balanced", (8, 0.25, 1, 1, 0)),
        ([Node("head", 32, 8)], "balanced", (27, 0.125, 4, 1, 0)),
        (LAB, "rollouts", (78, 0, 1, 0.25, 0)),
        (LAB, "gpu", (16, 0, 8, 1, 0)),
        (LAB, "balanced", (32, 0, 4, 1, 0)),  # GPUs on two nodes are not shared with runners
        ([Node("head", 4, 8)], "gpu", (1, 0, 2, 1, 0)),  # a GPU needs a core beside it
        ([Node("head", 1, 1)], "gpu", (0, 0, 1, 1, 0)),
        ([Node("head", 8)], "rollouts", (7, 0, 0, 0, 1)),
        ([Node("head", 8)], "gpu", (4, 0, 2, 0, 1)),
        ([Node("head", 8)], "balanced", (6, 0, 1, 0, 1)),
        ([Node("head", 64)], "balanced", (32, 0, 4, 0, 1)),
        ([Node("head", 1)], "balanced", (0, 0, 0, 0, 1)),
    ],
)  # fmt: skip
def test_the_three_strategies(nodes: list[Node], strategy: str, expected: tuple[float, ...]) -> None:
    run, learn = rllib(nodes, strategy).calls.values()
    names = ("num_learners", "num_gpus_per_learner", "num_cpus_per_learner")
    assert (
        runners(rllib(nodes, strategy)),
        run["num_gpus_per_env_runner"],
        *(learn[n] for n in names),
    ) == expected


def test_a_cluster_without_gpus_says_so() -> None:
    for strategy in STRATEGIES:
        plan = rllib([Node("head", 8)], strategy)
        assert plan.notes == ["no node has a GPU: learners use CPUs"]
        assert "num_gpus_per_learner=0,  # no node has a GPU" in plan.text()


def test_workers_of_a_real_size() -> None:
    """Four nodes of eight GPUs: 32 workers."""
    nodes = [Node(f"n{i}", 64, 8) for i in range(4)]
    call = train(nodes).calls["ScalingConfig"]
    assert (call["num_workers"], call["resources_per_worker"]) == (32, {"CPU": 8, "GPU": 1})
    call = train(nodes, placement="strict_spread").calls["ScalingConfig"]
    assert (call["num_workers"], call["resources_per_worker"]) == (4, {"CPU": 64, "GPU": 1})
    plan = train(nodes, 8, 0.5)
    assert plan.calls["ScalingConfig"]["num_workers"] == 32 and any("gloo" in note for note in plan.notes)


def test_the_lines_are_python() -> None:
    plan = train(LAB, 4)
    scope: dict[str, object] = {"ScalingConfig": dict}
    assert eval(plan.text(), scope) == plan.calls["ScalingConfig"]
    lines = rllib(LAB, "gpu").text()
    assert all("  # " in line for line in lines.splitlines() if "=" in line)
    said: dict[str, dict[str, object]] = {}

    class Config:
        def __getattr__(self, name: str) -> Callable[..., Config]:
            return lambda **given: said.update({name: given}) or self

    eval("(config\n" + lines + "\n)", {"config": Config()})
    assert said == rllib(LAB, "gpu").calls


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda: rllib(LAB, "fast"), "unknown strategy `fast`"),
        (lambda: train(LAB, placement="NEAR"), "unknown placement `NEAR`"),
        (lambda: train(LAB, 0, 0), "needs a CPU or a GPU"),
        (lambda: train(LAB, 1, 1.5), "cannot have 1.5 GPUs"),
    ],
)
def test_wrong_words(wrong: Callable[[], Sizing], words: str) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        wrong()
    assert caught.value.hint and caught.value.exit_code == 2


def test_nothing_fits() -> None:
    with pytest.raises(HeliostatError, match="nothing fits") as caught:
        train(LAB, 48)
    assert (caught.value.cause, caught.value.exit_code) == ("a worker requests 48 CPU + 1 GPU", 1)
    assert caught.value.details == "head: 16 CPU; w1: 32 CPU + 4 GPU; w2: 32 CPU + 4 GPU"
    with pytest.raises(HeliostatError, match="nothing fits"):
        rllib([], "gpu")


def test_shapes_in_words() -> None:
    assert (
        show({"CPU": 1.0, "GPU": 0.0, "memory": 2.0**30}) == "1 CPU + 1.0 GiB memory"
        and show({}) == "nothing"
    )
