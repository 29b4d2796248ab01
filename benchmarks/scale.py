"""More nodes than one machine can start Ray on, by simulation: stub agents, a stand-in scheduler, records of many nodes."""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.figures import CannotMeasure, Figure, Turns
from benchmarks.lab import HELIOSTAT, Lab, free_ports
from benchmarks.memory import PEAK
from heliostat.backends.base import Handle
from heliostat.cluster.manager import ClusterManager
from heliostat.state.records import NodeRecord, Record
from heliostat.state.states import NodeState
from heliostat.state.store import ClusterDirectory, Store

STUBS = Path(__file__).with_name("stubs.py")
PROCESSES = 2  # that play the workers
COUNTS, QUICK_COUNTS, SMOKE_COUNTS = (10, 100, 1000, 3000), (10, 1000), (10,)
JUDGED, SMOKE_JUDGED = 1000, 10  # the bars are about so many nodes
JOBS, SMOKE_JOBS = 5000, 50
BARS = {"met_s": 5.0, "ready_s": 2.0, "stop_s": 2.0, "memory_mb": 60.0}
WORDS = {
    "met_s": ("all agents met the head", "s"),
    "ready_s": ("READY of all at once to the readiness event", "s"),
    "stop_s": ("stop to all hung up", "s"),
    "memory_mb": ("the head's resident memory", "MB"),
}


def scale(lab: Lab, turns: Turns) -> list[Figure]:
    return [*_agents(lab, turns), *_looks(lab, turns), *_queue(lab, turns)]


# -- one head, many agents


def _agents(lab: Lab, turns: Turns) -> list[Figure]:
    seen: dict[int, list[dict[str, float]]] = {}
    counts = SMOKE_COUNTS if turns.smoke else COUNTS if turns.rounds > 1 else QUICK_COUNTS
    judged = SMOKE_JUDGED if turns.smoke else JUDGED
    for number in range(1, turns.rounds + 1):
        for count in counts:
            turns.quiet()
            seen.setdefault(count, []).append(_one(lab, count))
            turns.tell(f"round {number} of {turns.rounds}, {story(seen[count][-1])}")
    notes = {key: "" for key in WORDS}
    notes["met_s"] = "; ".join(story(found[-1]) for found in seen.values())
    return [
        Figure(
            f"scale, {judged} agents: {WORDS[key][0]}",
            WORDS[key][1],
            bar,
            [found[key] for found in seen[judged]],
            absolute=True,
            note=notes[key],
        )
        for key, bar in BARS.items()
    ]


def story(found: dict[str, float]) -> str:
    """One line of what the head of so many agents said."""
    return (
        "{count:.0f} agents: met {met_s:.2f} s (CPU {met_cpu_s:.2f}, {met_writes:.0f} writes of state.json), "
        "ready {ready_s:.2f} s (CPU {ready_cpu_s:.2f}), stop {stop_s:.2f} s (CPU {stop_cpu_s:.2f}), "
        "beats {beats:.1f} % of a core, {memory_mb:.0f} MB ({empty_mb:.0f} without agents), "
        "state.json {kb:.0f} kB in {write_ms:.1f} ms, {writes:.0f} writes took {writes_s:.2f} s"
    ).format(beats=found["beats_cpu"] * 100, kb=found["state_bytes"] / 1e3, write_ms=found["write_s"] * 1e3, **found)  # fmt: skip


def _one(lab: Lab, count: int) -> dict[str, float]:
    folder = lab.path / f"scale-{time.monotonic_ns()}"
    folder.mkdir()
    with lab.family() as family:
        share = -(-count // PROCESSES)
        players = []
        for first in range(1, count + 1, share):
            some = min(share, count + 1 - first)
            players.append(
                lab.start(
                    sys.executable, str(STUBS), "agents", str(folder), str(first), str(some), mark=family.mark
                )
            )
        deadline = time.monotonic() + 60
        while not all(player.log.read_text().startswith("there") for player in players):
            if time.monotonic() > deadline:
                raise CannotMeasure(players[0].says())
            time.sleep(0.02)
        port = {"STUB_PORT": str(free_ports(1)[0])}
        head = lab.start(
            sys.executable, str(STUBS), "head", str(folder), str(count), mark=family.mark, more=port
        )
        head.succeed()
        for player in players:
            player.wait()
        said: dict[str, float] = json.loads(head.log.read_text().splitlines()[-1])
        return said


# -- a client that looks


class Cluster:
    """A record of many nodes on SLURM that all run, with all that their agents would have written."""

    def __init__(self, lab: Lab, name: str, nodes: int, jobs: int) -> None:
        names = ["head", *(f"w{i}" for i in range(1, nodes))]
        ids = [str(1_000_000 + i * jobs // nodes) for i in range(nodes)]  # the job of each node
        record = Record(
            name=name,
            id="0123456789abcdef",
            backend="slurm",
            kind="up",
            created=time.time(),
            spec={"on": "slurm", "name": name, "nodes": nodes},
            nodes={
                one: NodeRecord(
                    one, "worker" if i else "head", state=NodeState.READY, handle=ids[i], launch=1
                )
                for i, one in enumerate(names)
            },
            handles=[
                Handle(
                    job, tuple(one for one, its in zip(names, ids, strict=True) if its == job), {}
                ).to_json()
                for job in dict.fromkeys(ids)
            ],
            ready=time.time(),
        )
        self.store = Store(lab.home)
        self.folder: ClusterDirectory = self.store.create(record, {"events.jsonl": "", "token": "0" * 64})
        words = {one: _words(i) for i, one in enumerate(names)}
        (self.folder.path / "nodes").mkdir()
        for one, said in words.items():
            (self.folder.path / "nodes" / f"{one}.json").write_text(json.dumps(said, indent=1))
        state = {"schema": 1, "nodes": words, "job": None, "started": time.time(), "jobs": [], "ended": None}
        (self.folder.path / "state.json").write_text(json.dumps(state, indent=1, sort_keys=True))


def _words(number: int) -> dict[str, Any]:
    return {
        "state": "READY", "reason": "", "since": time.time(), "launch": 1, "ray": "2.60.0", "python": "3.11.7",
        "host": f"node{number:05d}", "ip": f"10.20.{number >> 8}.{number & 255}",
        "ports": dict.fromkeys(("node_manager", "object_manager", "dashboard_agent_grpc", "metrics"), 20000),
        "resources": {"cpus": 64, "gpus": 4, "memory": 1 << 38, "object_store": 1 << 36, "custom": {}, "labels": {}},
    }  # fmt: skip


def squeue_lines(jobs: int) -> str:
    """What squeue prints for `%i|%T|%r|%S|%N`."""
    states = (
        "RUNNING|None|2026-01-05T10:00:00|node[00001-00016]",
        "PENDING|Priority|2026-01-06T03:12:45|",
        "PENDING|Resources|N/A|",
    )
    return "".join(f"{1_000_000 + i}|{states[0] if i < jobs // 2 else states[1 + i % 2]}\n" for i in range(jobs))  # fmt: skip


def _stand_in(lab: Lab, jobs: int) -> Path:
    """A folder with a squeue that knows so many jobs, whatever it is asked."""
    folder = lab.path / "bin"
    folder.mkdir(exist_ok=True)
    (folder / "queue").write_text(squeue_lines(jobs))
    (folder / "squeue").write_text(f"#!/bin/sh\nexec cat {folder}/queue\n")
    (folder / "squeue").chmod(0o755)
    return folder


def _looks(lab: Lab, turns: Turns) -> list[Figure]:
    """What `ClusterManager.look` costs, in this process, with a stand-in for squeue."""
    found = []
    path = os.environ["PATH"]
    judged = SMOKE_JUDGED if turns.smoke else JUDGED
    os.environ["PATH"] = f"{_stand_in(lab, JOBS)}{os.pathsep}{path}"
    try:
        for jobs, words in ((1, "one job"), (judged, "a job each")):
            cluster = Cluster(lab, f"look-{jobs}", judged, jobs)
            life = ClusterManager(cluster.store)
            took = []
            for _ in range(max(3, turns.rounds)):
                began = time.monotonic()
                view = life.observe(cluster.folder)
                took.append(time.monotonic() - began)
                if view.alive() != judged:
                    raise CannotMeasure(f"only {view.alive()} of {judged} nodes were judged to be ready")
            turns.tell(f"a look at {judged} nodes, {words}: {statistics.median(took) * 1e3:.0f} ms")
            name = f"scale, {judged} nodes, {words}: a look"
            found.append(Figure(name, "s", 0.25, took, absolute=True))
    finally:
        os.environ["PATH"] = path
    return found


def _queue(lab: Lab, turns: Turns) -> list[Figure]:
    """`status` of a cluster whose 5,000 nodes are 5,000 jobs in the queue."""
    jobs = SMOKE_JOBS if turns.smoke else JOBS
    Cluster(lab, "queue", jobs, jobs)
    more = {"PATH": f"{_stand_in(lab, jobs)}{os.pathsep}{os.environ['PATH']}"}
    took, peak = [], []
    for _ in range(max(2, turns.rounds)):
        turns.quiet()
        took.append(lab.run(HELIOSTAT, "status", "queue", "--json", more=more))
        said = lab.output(
            sys.executable, "-I", "-S", "-c", PEAK, HELIOSTAT, "status", "queue", "--json", more=more
        )
        peak.append(int(said.split()[-1]) * 1024 / 1e6)
    turns.tell(f"status of {jobs} jobs: {statistics.median(took):.2f} s, {statistics.median(peak):.0f} MB")
    return [
        Figure(f"scale, {jobs} jobs: status", "s", 2, took, absolute=True),
        Figure(f"scale, {jobs} jobs: status, peak resident", "MB", 100, peak, absolute=True),
    ]
