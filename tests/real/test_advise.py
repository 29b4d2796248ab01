"""`plan` and `advise` on one real cluster of two nodes: what is planned is given by Ray, what goes wrong is named.

The GPUs are numbers only, to Ray as well: it gives them out without looking at them.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import heliostat as api
from heliostat.diagnostics.advisor import Advice
from heliostat.diagnostics.sizing import STRATEGIES, Node, rllib
from shared import document, driver_words, heliostat, nothing_left, private_home, until

pytestmark = pytest.mark.needs_ray

NAME = "advised"

# does what it is told, a line each, and says when it is done; keeps what it made until it is told to `drop` it
PROGRAM = """
import json, os, sys, time
import ray
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group

ray.init(log_to_driver=False)

@ray.remote
def work(): pass

@ray.remote
class Runner: pass

kept, tasks, actors, groups = [], [], [], []

def group(bundles, strategy):
    total = ray.cluster_resources()
    while any(ray.available_resources().get(name) != total[name] for name in ("CPU", "GPU")):
        time.sleep(0.05)  # what was dropped before is on its way back
    made = placement_group(bundles, strategy=strategy)
    groups.append(made)
    while True:
        table = placement_group_table(made)
        if table["state"] == "CREATED" or table["stats"]["scheduling_state"] in ("INFEASIBLE", "NO_RESOURCES"):
            return table["state"]
        time.sleep(0.05)

def drop():
    kept.clear()
    while tasks: ray.cancel(tasks.pop())
    while actors: ray.kill(actors.pop())
    while groups: remove_placement_group(groups.pop())

for line in sys.stdin:
    verb, *words = json.loads(line)
    said = None
    if verb == "place": said = group(*words); drop()
    elif verb == "hold": said = group(*words)
    elif verb == "work": tasks.append(work.options(**words[0]).remote())
    elif verb == "runners": actors.extend(Runner.options(**words[1]).remote() for _ in range(words[0]))
    elif verb == "put": kept.extend(ray.put(os.urandom(words[1])) for _ in range(words[0]))
    elif verb == "drop": drop()
    print(json.dumps(said), flush=True)
"""


@pytest.fixture(scope="module")
def home() -> Iterator[Path]:
    with private_home() as path:
        yield path


@pytest.fixture(scope="module", autouse=True)
def no_leaks(home: Path) -> Iterator[None]:
    with nothing_left(home):
        yield


@pytest.fixture(scope="module", autouse=True)
def cluster(home: Path, no_leaks: None) -> Iterator[api.Cluster]:
    words = ["--nodes", 2, "--cpus-per-node", 2, "--gpus-per-node", 1, "--object-store", "100M"]
    heliostat("up", "--name", NAME, *words)
    with api.connect(NAME) as found:
        yield found
    heliostat("down", NAME)


@pytest.fixture(scope="module")
def tell(cluster: api.Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Any]]:
    """A driver that does what it is told."""
    path = tmp_path_factory.mktemp("driver") / "driver.py"
    path.write_text(PROGRAM)
    with subprocess.Popen(
        driver_words(NAME, path), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as driver:
        assert driver.stdin and driver.stdout
        lines, answers = driver.stdin, driver.stdout

        def order(*words: object) -> Any:
            lines.write(json.dumps(words) + "\n")
            lines.flush()
            return json.loads(answers.readline())

        yield order
        lines.close()


def advised(
    cluster: api.Cluster, kind: str, what: str, evidence: str, first: Callable[[], object] = lambda: None
) -> Advice:
    """The advice of this kind with these words in it. It comes when Ray has noticed: its figures follow one another.

    first: before each look."""

    def look() -> Advice | None:
        first()
        found = (
            one
            for one in cluster.advise(0.5)
            if one.kind == kind and what in one.finding and evidence in one.evidence
        )
        return next(found, None)

    return until(look, f"{kind}: {what}: {evidence}")


def test_a_quiet_cluster(cluster: api.Cluster) -> None:
    said = heliostat("advise", NAME, "--for", "1s")
    assert said.stdout.startswith(f"`{NAME}`: no findings (0/4 CPUs requested, 0/2 GPUs requested")
    assert said.stdout.count("\n") == 1
    assert cluster.advise(0.5) == []


def test_what_is_planned_is_given(cluster: api.Cluster, tell: Callable[..., Any]) -> None:
    plans = {name: document("plan", "rllib", NAME, "--strategy", name) for name in STRATEGIES}
    for plan in plans.values():  # made before anything is taken, so there is nothing to note
        assert tell("place", plan["bundles"], "PACK") == "CREATED", plan
        assert plan["calls"]["learners"]["num_gpus_per_learner"] and plan["notes"] == []
    plan = plans["rollouts"]
    spare = plan["calls"]["learners"]["num_learners"]  # it leaves a core for each
    assert tell("place", plan["bundles"] + [{"CPU": 1}] * spare, "PACK") == "CREATED"
    assert tell("place", plan["bundles"] + [{"CPU": 1}] * (spare + 1), "PACK") == "PENDING"
    for gpus, workers in ((None, 2), (0.5, 4), (0, 2)):
        for placement in ("PACK", "SPREAD", "STRICT_SPREAD"):
            made = cluster.plan_train(gpus_per_worker=gpus, placement=placement)
            number = 2 if placement == "STRICT_SPREAD" else workers
            assert len(made.bundles) == made.calls["ScalingConfig"]["num_workers"] == number
            assert tell("place", list(made.bundles), placement) == "CREATED", made
            assert tell("place", [*made.bundles, made.bundles[0]], placement) == "PENDING", made


@pytest.mark.skipif(importlib.util.find_spec("gymnasium") is None, reason="RLlib is not installed")
def test_rllib_asks_for_what_is_planned() -> None:
    from ray.rllib.algorithms.ppo import PPO, PPOConfig

    for nodes in ([Node("head", 32, 3)], [Node("head", 8)], [Node("head", 4, 2), Node("w1", 8, 2)]):
        for strategy in STRATEGIES:
            plan = rllib(nodes, strategy)
            config = PPOConfig().environment("CartPole-v1")
            eval(f"(config\n{plan.text()}\n)", {"config": config})
            assert PPO.default_resource_request(config).bundles == list(plan.bundles)


def test_what_does_not_fit_is_an_error() -> None:
    said = heliostat("plan", "train", NAME, "--cpus-per-worker", 3, code=1)
    assert said.stderr.splitlines()[:3] == [
        "error: nothing fits on this cluster",
        "  cause: a worker requests 3 CPU + 1 GPU",
        "  details: head: 2 CPU + 1 GPU; w1: 2 CPU + 1 GPU",
    ]


def test_a_demand_that_can_never_be_met(cluster: api.Cluster, tell: Callable[..., Any]) -> None:
    tell("work", {"num_cpus": 16})
    asks = "1 task or actor requests 16 CPU, and no node has that"
    advised(cluster, "infeasible", asks, "the largest node has 2 CPU")
    tell("runners", 3, {"num_cpus": 1, "resources": {"special": 2}})
    asks = "3 tasks or actors request 1 CPU + 2 special"
    advised(cluster, "infeasible", asks, "no node has special; requested by `Runner` of job ")
    for placement in ("STRICT_SPREAD", "PACK"):  # Ray calls only the first one infeasible
        assert tell("hold", [{"CPU": 2}] * 3, placement) == "PENDING"
    until(
        lambda: [
            one.finding
            for one in cluster.advise(0.5)
            if "3 × 2 CPU" in one.finding and one.kind == "infeasible"
        ][1:],
        "advice on both groups",
    )
    said = heliostat("advise", NAME, "--for", "1s").stdout
    assert (
        "16 CPU" in said
        and "  effect:   Ray waits for such a node forever" in said
        and "  remedy:   " in said
    )
    tell("drop")


def test_runners_that_starve(cluster: api.Cluster, tell: Callable[..., Any]) -> None:
    tell("runners", 7, {"num_cpus": 1})
    advised(cluster, "starved", "3 of 7 `Runner` of job ", "4 of 4 CPU taken, 4 by 4 × `Runner`")
    until(lambda: [one.kind for one in cluster.advise(0.5)] == ["starved", "gpu-unused"], "these two alone")
    tell("drop")


def test_a_group_that_holds_what_its_program_waits_for(
    cluster: api.Cluster, tell: Callable[..., Any]
) -> None:
    assert tell("hold", [{"CPU": 2}] * 2, "PACK") == "CREATED"
    tell("work", {"num_cpus": 1})
    asks = "1 task or actor requests 1 CPU, which placement groups hold"
    advised(cluster, "deadlock", asks, "4 CPU held and idle")
    tell("drop")


def test_objects_that_go_to_disk(cluster: api.Cluster, tell: Callable[..., Any]) -> None:
    tell("put", 10, 20 << 20)
    # it goes on: Ray may have written all of it to disk at once, and a store that is empty now is nobody's trouble
    saw = "of 100.0 MiB in the object store"
    found = advised(cluster, "spilling", "spills to disk", saw, lambda: tell("put", 1, 20 << 20))
    assert " MiB written" in found.evidence
    tell("drop")
