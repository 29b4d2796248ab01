"""From the command to a node that Ray's node table has."""

from __future__ import annotations

import contextlib
import statistics

from benchmarks.bare import Watcher, start_head
from benchmarks.figures import Figure, Turns
from benchmarks.lab import HELIOSTAT, Lab


def up(lab: Lab, turns: Turns) -> list[Figure]:
    cpu: dict[str, list[float]] = {"ours": [], "bare": []}
    ours, other = turns.take(lambda: _ours(lab, cpu["ours"]), lambda: _bare(lab, cpu["bare"]))
    mine, theirs = (
        statistics.median(values[-turns.rounds :]) for values in cpu.values()
    )  # the first warmed up
    note = f"CPU time spent by then, which load hardly moves: {mine:.2f} s and {theirs:.2f} s, ratio {mine / theirs:.2f}"
    name = "up, one node on local, to ready"
    return [Figure(name, "s", 1.15, ours, other, "ray start --head to alive", note=note)]


def _ours(lab: Lab, cpu: list[float]) -> float:
    with lab.family() as family:
        try:
            program = lab.start(HELIOSTAT, "up", "--name", "up", mark=family.mark)
            took = program.succeed()
            cpu.append(program.cpu + family.cpu_seconds())
            return took
        finally:
            lab.take_down("up", family)


def _bare(lab: Lab, cpu: list[float]) -> float:
    with lab.family() as family, contextlib.closing(Watcher(lab, family)) as watcher:
        program, port = start_head(lab, family)
        alive = watcher.alive_at(port)
        cpu.append(family.cpu_seconds())
        return alive - program.began
