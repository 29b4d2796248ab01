"""What `security.tls` costs: the same two nodes on this computer, with it and without."""

from __future__ import annotations

import json
import time
from pathlib import Path

from benchmarks.figures import CannotMeasure, Figure, Turns
from benchmarks.lab import HELIOSTAT, Lab

NODES = 2
# Runs on the head; everything it calls is on the worker. Times are of one call, and of one object of 100 MB.
SCRIPT = """
import json, statistics, sys, time
began = time.time()
import ray
ray.init(log_to_driver=False)
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as On

here = ray.get_runtime_context().get_node_id()
there = next(n["NodeID"] for n in ray.nodes() if n["Alive"] and n["NodeID"] != here)
on = {"scheduling_strategy": On(there, soft=False)}

@ray.remote(num_cpus=0)
class Worker:
    def echo(self, value):
        return value
    def make(self, size):
        return bytes(size)

@ray.remote(num_cpus=1)
def echo(value):
    return value

def timed(work, count):
    start = time.perf_counter()
    work(count)
    return (time.perf_counter() - start) / count

def transfer(_):
    made = worker.make.remote(100_000_000)
    ray.wait([made], fetch_local=False)
    return timed(lambda _: ray.get(made), 1)

worker = Worker.options(**on).remote()
ray.get([worker.echo.remote(1), *(echo.options(**on).remote(1) for _ in range(20))])
found = {
    "began": began,
    "call": timed(lambda count: [ray.get(worker.echo.remote(1)) for _ in range(count)], 500),
    "tasks": timed(lambda count: ray.get([echo.options(**on).remote(1) for _ in range(count)]), 1000),
    "transfer": statistics.median(map(transfer, range(4))),
}
with open(sys.argv[1], "w") as stream:
    json.dump(found, stream)
"""
Found = dict[str, float]


def tls(lab: Lab, turns: Turns) -> list[Figure]:
    script = lab.path / "calls.py"
    script.write_text(SCRIPT)
    found: dict[bool, list[Found]] = {True: [], False: []}

    def one(secure: bool) -> float:
        found[secure].append(_run(lab, script, secure))
        return found[secure][-1]["start"]

    turns.take(lambda: one(True), lambda: one(False))

    def figure(name: str, key: str, bar: float) -> Figure:
        ours, other = (
            [one[key] for one in found[secure][-turns.rounds :]] for secure in (True, False)
        )  # the first warmed up
        return Figure(f"tls: {name}", "s", bar, ours, other, "the same without `security.tls`")

    return [
        figure(f"`run` of {NODES} nodes on local, to the script's first line", "start", 1.2),
        figure("a call of an actor on the other node", "call", 1.25),
        figure("a task on the other node, 1,000 at once", "tasks", 1.5),
        figure("an object of 100 MB from the other node", "transfer", 4.0),
    ]


def _run(lab: Lab, script: Path, secure: bool) -> Found:
    name = f"tls-{str(secure).lower()}"
    file, answer = lab.path / f"{name}.yaml", lab.path / f"{name}.json"
    spec = {"on": "local", "cpus_per_node": 1, "object_store": "600M", "security": {"tls": secure}}
    file.write_text(json.dumps(spec))
    answer.unlink(missing_ok=True)
    with lab.family() as family:
        began = time.time()
        words = ("run", "-f", str(file), "--name", name, "--nodes", str(NODES), str(script), str(answer))
        program = lab.start(HELIOSTAT, *words, mark=family.mark)
        program.succeed()
        if not answer.exists():
            raise CannotMeasure(f"{program.says()}: the script left no figures")
        found: Found = json.loads(answer.read_text())
        return {**found, "start": found["began"] - began}
