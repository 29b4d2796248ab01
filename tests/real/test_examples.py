"""The examples, as a person runs them: each through `heliostat run` on one cluster, three hosts of a real Slurm; its result is right."""

from __future__ import annotations

import json
import re
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lab import Done, Lab, wait_for
from real.onlab import nothing_on_hosts, ok

pytestmark = [pytest.mark.needs_slurm, pytest.mark.needs_ray, pytest.mark.needs_torch]

EXAMPLES = Path(__file__).parents[2] / "examples"
NAME = "examples"
NODES = ["head", "w1", "w2"]
PATIENCE_S = 240.0
CLEARLY = ["env", "RAY_DEDUP_LOGS=0", "python"]  # else Ray prints one of several lines that look alike


@pytest.fixture(scope="module", autouse=True)
def no_leaks() -> None:
    """In place of a look after each test: nodes come and go while the cluster lives. `cluster` looks when it is down."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Lab]:
    """Three hosts, each with its own network, processes and /tmp; the home, where results go, is shared."""
    size = ["--nodes", "3", "--cpus-per-node", "2", "--object-store", "150M", "--time", "60m"]
    with Lab(3) as lab:
        ok(lab.heliostat("up", "--on", "slurm", "--name", NAME, *size))
        yield lab
        ok(lab.heliostat("down", NAME))
        wait_for("an empty queue", lambda: not lab.queue())
        nothing_on_hosts(lab)


def says(cluster: Lab, name: str, *words: object, code: int = 0) -> Done:
    """Runs an example in the person's home."""
    done = cluster.heliostat("run", "--cluster", NAME, str(EXAMPLES / name), *map(str, words))
    assert done.rc == code, f"rc {done.rc}\n{done.out[-8000:]}\n{done.err[-8000:]}"
    return done


def result(said: str) -> dict[str, Any]:
    """The document after `result `. Ray's thread for the output of the workers may write after it on the same line."""
    (start,) = (match.end() for match in re.finditer(r"^result (?={)", said, re.MULTILINE))
    return dict(json.JSONDecoder().raw_decode(said, start)[0])


def run(cluster: Lab, name: str, *words: object) -> dict[str, Any]:
    """What the example says in the end."""
    return result(says(cluster, name, *words).out)


class Watched:
    """An example that runs, and all that it has said so far."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process, self.said = process, ""
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        assert self.process.stdout
        for line in self.process.stdout:
            self.said += line

    def until(self, what: str, look: Callable[[str], object]) -> None:
        def found() -> bool:
            there = bool(look(self.said))
            assert there or self.reader.is_alive(), f"ended before {what}\n{self.said[-8000:]}"
            return there

        wait_for(what, found, PATIENCE_S)

    def end(self) -> int:
        code = self.process.wait(PATIENCE_S)
        self.reader.join(PATIENCE_S)
        return code


def watch(cluster: Lab, name: str, *words: object) -> Watched:
    command = [*CLEARLY, str(EXAMPLES / name), *map(str, words)]
    return Watched(cluster.start("run", "--cluster", NAME, "--", *command, stderr=subprocess.STDOUT))


def host_of(cluster: Lab, node: str) -> str:
    nodes = json.loads(ok(cluster.heliostat("status", NAME, "--json")).out)["nodes"]
    return next("n" + n["ip"].rpartition(".")[2] for n in nodes if n["name"] == node)


def test_hello_names_every_node(cluster: Lab) -> None:
    said = says(cluster, "hello_ray.py").out
    assert [line.partition(":")[0] for line in said.splitlines() if "(host " in line] == NODES
    assert sorted(re.findall(r"\(host (\w+)", said)) == ["n1", "n2", "n3"]
    assert said.endswith("hello from 3 nodes\n")


def test_work_is_spread(cluster: Lab) -> None:
    said = run(cluster, "distributed_compute.py", "--limit", 200_000)
    assert said["primes"] == 17984 and said["speedup"] > 0
    assert sorted(said["chunks"]) == NODES and sum(said["chunks"].values()) == 48
    assert all(said["chunks"].values()), said


def test_without_a_gpu_each_node_works_on_its_cpu(cluster: Lab) -> None:
    said = run(cluster, "gpu_workload.py", "--size", 256)
    assert said["gpus"] == 0
    assert [(w["node"], w["device"]) for w in said["workers"]] == [(node, "CPU") for node in NODES]
    assert all(w["gflops"] > 0 and w["error"] < 1e-3 for w in said["workers"])


def test_data(cluster: Lab) -> None:
    said = run(cluster, "data_pipeline.py", "--rows", 30_000)
    assert said["rows"] == 20_000
    assert said["sums"] == {"1": sum(range(1, 30_000, 3)), "2": sum(range(2, 30_000, 3))}
    import pyarrow.parquet

    table = pyarrow.parquet.read_table(said["path"])
    assert sorted(table["id"].to_pylist()) == [n for n in range(30_000) if n % 3]
    assert all(s == n * n for s, n in zip(table["square"].to_pylist(), table["id"].to_pylist(), strict=True))


def test_serve(cluster: Lab) -> None:
    said = run(cluster, "serve_model.py")
    assert said["handle"] == [2 * i + 1 for i in range(20)] and said["http"] == [3, 5, 7]
    assert 1 <= said["replicas"] <= 2


# --- Ray Train


def trained_alone(epochs: int) -> float:
    """The loss after so many epochs, with all the data in one process: what two workers must come to, too."""
    import torch

    x = torch.rand(1024, 2, generator=torch.Generator().manual_seed(0)) * 4 - 2
    y = x[:, :1].sin() * x[:, 1:]
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(2, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(epochs):
        loss = torch.nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return torch.nn.functional.mse_loss(model(x), y).item()


def begun(said: str) -> list[tuple[int, str, int, int]]:
    """(rank, node, pid, first epoch) of each worker that has begun, in order."""
    found = re.findall(r"worker (\d)/2 on (\w+) pid (\d+): begins with epoch (\d+)", said)
    return [(int(rank), node, int(pid), int(first)) for rank, node, pid, first in found]


def test_training_survives_a_killed_worker_and_a_drained_node(cluster: Lab) -> None:
    epochs = 16  # the drain takes 20 s, and then some must be left
    words = ["--epochs", epochs, "--pause", "2", "--name", "survivor", "--placement", "STRICT_SPREAD"]
    training = watch(cluster, "train_torch.py", *words)

    training.until("the second epoch", lambda said: re.search(r"worker 1/2 .*: epoch 1,", said))
    first = begun(training.said)
    assert sorted((rank, epoch) for rank, _, _, epoch in first) == [(0, 0), (1, 0)]
    assert len({node for _, node, _, _ in first}) == 2
    node, pid = next((node, pid) for rank, node, pid, _ in first if rank == 1)
    ok(cluster.root(host_of(cluster, node), "kill", "-KILL", str(pid)))

    training.until("two new workers", lambda said: len(begun(said)) == 4)
    second = begun(training.said)[2:]
    assert {epoch for _, _, _, epoch in second} <= set(range(1, epochs))
    assert not {pid for _, _, pid, _ in first} & {pid for _, _, pid, _ in second}
    ok(cluster.heliostat("restart", NAME, "--node", next(node for _, node, _, _ in second if node != "head")))

    training.until("two more", lambda said: len(begun(said)) == 6)
    third = begun(training.said)[4:]
    assert min(epoch for _, _, _, epoch in third) > max(epoch for _, _, _, epoch in second)
    assert training.end() == 0, training.said[-8000:]
    said = result(training.said)
    assert said["epochs"] == epochs
    assert said["loss"] == pytest.approx(trained_alone(epochs), rel=1e-3)
    assert said["loss"] != pytest.approx(
        trained_alone(epochs - 1), rel=1e-3
    )  # an epoch more or less would show


# --- Ray Tune


def trials(folder: Path) -> dict[str, tuple[str, int]]:
    """Trial -> (its status, its last step that has a checkpoint), as Tune has last written it down."""
    states = sorted(folder.glob("experiment_state-*.json"))
    if not states:
        return {}
    try:
        rows = [[*map(json.loads, row)] for row in json.loads(states[-1].read_text())["trial_data"]]
    except ValueError:  # it is being written
        return {}
    return {one["trial_id"]: (one["status"], more["last_result"].get("step", 0)) for one, more in rows}


def test_a_sweep_goes_on_after_an_interruption(cluster: Lab) -> None:
    words = ["--trials", 8, "--steps", 6]
    sweep = watch(cluster, "tune_sweep.py", *words, "--pause", 6)
    folder = cluster.home / "results" / "sweep"

    def ended() -> set[str]:
        return {trial for trial, (status, _) in trials(folder).items() if status == "TERMINATED"}

    def begun() -> dict[str, int]:
        return {trial: step for trial, (_, step) in trials(folder).items() if step and trial not in ended()}

    def midway(said: str) -> bool:
        completed = set(re.findall(r"Trial trainable_(\w+) completed after", said))
        saved = dict(re.findall(r"/trainable_(\w+?_\d+)_[^/]*/checkpoint_(\d+)", said))  # the last of each
        others = {int(number) for trial, number in saved.items() if trial not in completed}
        return bool(completed and others & {2, 3})

    # by what it says: Tune writes its state down every ten seconds or less often, and when it is cut off
    sweep.until("one trial has ended while another is in the middle", midway)
    ok(cluster.root("ctl", "kill", "-INT", *cluster.find("ctl", "-m", "heliostat", "run")))  # Ctrl-C
    assert sweep.end() == 130, sweep.said[-8000:]
    assert "cut off: go on with --resume" in sweep.said, "its last words are shown"
    done, cut = ended(), begun()
    assert done and cut, trials(folder)

    # the same words again do not begin anew over what is there
    refused = says(cluster, "tune_sweep.py", *words, code=1)
    assert "go on with --resume" in refused.out + refused.err
    resumed = watch(cluster, "tune_sweep.py", *words, "--resume")
    assert resumed.end() == 0, resumed.said[-8000:]
    said = resumed.said
    first = {trial: int(step) for trial, step in re.findall(r"trial (\w+) begins with step (\d+)", said)}
    steps = result(said)["steps"]
    # what has ended is not run again, what was cut off goes on, and the rest begins
    assert first.keys() == steps.keys() - done
    # Tune puts a step on record before its checkpoint: that one may be done again
    for trial, step in first.items():
        assert max(1, cut.get(trial, 0)) <= step <= cut.get(trial, 0) + 1, (first, cut)
    assert max(first.values()) > 1, (first, cut)
    assert len(steps) == 8
    assert min(steps.values()) < 6 <= max(steps.values()), "some are stopped early, the best is not"
    assert result(said)["best"]["loss"] < 0.2


# --- RLlib


def test_cartpole_is_learned(cluster: Lab) -> None:
    said = run(cluster, "rllib_cartpole.py", "--target", 60, "--runners", 1)
    assert said["return"] >= 60 and said["steps"] >= 2000 * said["iterations"]
    assert (Path(said["checkpoint"]) / "learner_group").is_dir()


def test_cartpole_says_that_it_is_not_learned(cluster: Lab) -> None:
    words = ["--target", 499, "--iterations", 1, "--runners", 1]
    done = says(cluster, "rllib_cartpole.py", *words, code=1)
    assert "not learned: the best mean return was" in done.out + done.err


def test_self_play(cluster: Lab) -> None:
    first = run(cluster, "rllib_selfplay_ipd.py", "--iterations", 4)
    assert first["iterations"] == 4 and 0 <= first["pay"] <= 5
    words = ["--iterations", 8, "--restore", first["checkpoint"]]
    said = says(cluster, "rllib_selfplay_ipd.py", *words).out
    restored = re.search(r"restored iteration (\d+), strategy (.*)", said)
    assert restored and restored[1] == "4" and json.loads(restored[2]) == first["defects"]
    assert re.findall(r"^iteration (\d+):", said, re.M) == ["5", "6", "7", "8"]
    defects = result(said)["defects"]
    assert all(chance > 0.5 for chance in defects.values()), (
        defects
    )  # the dominant move, whatever it has seen
    assert defects["start"] > 0.75, defects


def test_tune_over_rllib(cluster: Lab) -> None:
    said = run(cluster, "rllib_tune.py", "--lr", "1e-6", "1e-3", "--iterations", 3)
    assert set(said["returns"]) == {"1e-06", "0.001"}
    assert said["best"] == 0.001 and said["returns"]["0.001"] > said["returns"]["1e-06"]
    assert Path(said["checkpoint"]).is_dir()
