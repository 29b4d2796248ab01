"""Whole jobs on a real Slurm in the lab of tests/lab: ours beside the least that Ray's commands can do, and beside what
Ray's documentation shows. Needs root; everything is taken down at the end."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks import batch, hosts
from benchmarks.batch import Times
from benchmarks.figures import CannotMeasure, Figure, Turns
from benchmarks.lab import DEADLINE_S, Lab

QUEUE_S = 0.2
COUNT_S = 15.0  # so long commands are counted while waiting, and as long while running
ONCE = "classic"  # its pauses are its own: one run tells all
ONCE_AT = (2, 4)
WHOLE_BAR = {2: 0.25, 4: 0.25}
COMMANDS = ("squeue", "sbatch", "scancel", "sinfo", "srun", "scontrol")
WRAPPER = """#!/bin/bash
echo "$EPOCHREALTIME {name}" >> {log}
exec {program} "$@"
"""


def slurm(lab: Lab, turns: Turns) -> list[Figure]:
    site = Site(lab, max(lab.nodes))
    figures: list[Figure] = []
    rendered: dict[int, int] = {}
    if turns.rounds > 1:
        site.ours(min(lab.nodes))  # files are in memory after it
    for nodes in lab.nodes:
        seen = _rounds(site, turns, nodes, [kind for kind in batch.OTHERS if kind in lab.beside])
        rendered[nodes] = site.script_lines
        figures += _figures(nodes, seen, site.phases)
        site.phases = []
    if "counts" in lab.beside:
        figures += _commands(site, turns, lab.nodes)
    most = max(rendered.values())
    same = "the same" if len({*rendered.values()}) == 1 else "NOT the same"
    note = f"{same} at {', '.join(map(str, rendered))} nodes"
    figures.append(Figure("rendered script", "lines", 29, [most], absolute=True, note=note))
    lab.no_shared()
    return figures


def _rounds(site: Site, turns: Turns, nodes: int, others: Sequence[str]) -> dict[str, list[Times]]:
    """Ours, then the others, round by round."""
    seen: dict[str, list[Times]] = {}
    for number in range(1, turns.rounds + 1):
        for kind in ("ours", *others):
            if kind == ONCE and (number > 1 or nodes not in ONCE_AT):
                continue
            turns.quiet()
            times = site.ours(nodes) if kind == "ours" else site.other(kind, nodes)
            seen.setdefault(kind, []).append(times)
            turns.tell(
                f"{nodes} nodes, round {number} of {turns.rounds}, {kind}: alive after {times.start:.1f} s, "
                f"released {times.release:.1f} s after the script, {times.whole:.1f} s in all"
            )
    return seen


def _figures(nodes: int, seen: Mapping[str, list[Times]], phases: Sequence[str]) -> list[Figure]:
    def beside(what: str, part: Callable[[Times], float], bar: float, kind: str, note: str = "") -> None:
        if kind in seen:
            ours, other = ([part(times) for times in seen[which]] for which in ("ours", kind))
            figures.append(Figure(f"slurm, {nodes} nodes: {what}", "s", bar, ours, other, kind, note=note))

    figures: list[Figure] = []
    beside("batch start to all alive", _start, 1.1, "floor", phases[-1] if phases else "")
    beside("batch start to all alive", _start, 1.0, "symmetric")
    beside("script's end to no job", _release, 0.1, "symmetric")
    ours = [times.release for times in seen["ours"]]
    figures.append(Figure(f"slurm, {nodes} nodes: script's end to no job", "s", 5, ours, absolute=True))
    beside("whole job", _whole, WHOLE_BAR.get(nodes, 0.33), "symmetric")
    beside("whole job", _whole, 0.5, "classic")
    return figures


def _start(times: Times) -> float:
    return times.start


def _release(times: Times) -> float:
    return times.release


def _whole(times: Times) -> float:
    return times.whole


def _commands(site: Site, turns: Turns, sizes: Sequence[int]) -> list[Figure]:
    """How often ours asks the scheduler, at the least and at the most nodes: that must not grow."""
    least, most = min(sizes), max(sizes)
    rates = {nodes: site.count(nodes) for nodes in dict.fromkeys((least, most))}
    for nodes, (waiting, running, said) in rates.items():
        turns.tell(f"{nodes} nodes: {waiting:.0f} commands a minute waiting, {running:.0f} running; {said}")
    figures = []
    for place, when in enumerate(("waiting", "running")):
        name = f"slurm: commands a minute while {when}"
        ours = float(rates[most][place])
        if most == least:
            figures.append(Figure(f"{name}, {most} nodes", "/min", 60, [ours], absolute=True))
        else:
            other = [float(rates[least][place])]
            note = f"{rates[most][2]}" if place else ""
            figures.append(
                Figure(f"{name}, {most} nodes", "/min", 1.1, [ours], other, f"at {least} nodes", note=note)
            )
    return figures


class Site(hosts.Site):
    """The lab's Slurm, and one job after the other on it."""

    def __init__(self, lab: Lab, size: int) -> None:
        super().__init__(lab, size, LAB_CPUS="1", LAB_SSHD="0")
        self.script_lines = 0
        self.phases: list[str] = []
        self.work = self.hosts.put("bench/work.py", batch.WORK)

    def _folder(self, kind: str) -> tuple[str, Path]:
        """The name of a job, and the folder of its stamps."""
        name = f"{kind}-{next(self.numbers)}"
        folder: Path = self.hosts.put(f"bench/{name}/token", self.token.read_text()).parent
        shutil.chown(folder, self.module.USER, self.module.USER)
        return name, folder

    # -- one job

    def ours(self, nodes: int) -> Times:
        name, folder = self._folder("ours")
        cluster = self.home / ".heliostat" / "clusters" / name
        with self.watcher(cluster / "token") as watcher, self._ours(name, folder, nodes, 0) as program:
            head = self.until("where the head is", lambda: hosts.read_json(cluster / "head.json"), program)
            alive = watcher.alive_at(head["ip"], head["gcs"], nodes)
            self.until("the script's end", (folder / "ended").exists, program)
            gone = self._gone(name)
            _, said = program.communicate(timeout=DEADLINE_S)
        if program.returncode:
            raise CannotMeasure(f"`heliostat run` ended with {program.returncode}: {said[-300:]}")
        times = self._times(folder, nodes, alive, gone)
        past = next((self.home / ".heliostat" / "history").glob(f"{name}-*"))
        self.script_lines = batch.lines((past / "script.sh").read_text())
        self.phases.append(phases(past, times, batch.stamp(folder / "worked")))
        return times

    @contextlib.contextmanager
    def _ours(
        self, name: str, folder: Path, nodes: int, seconds: float, env: dict[str, str] | None = None
    ) -> Iterator[subprocess.Popen[str]]:
        program: subprocess.Popen[str] = self.hosts.start(
            "run", "--on", "slurm", "--name", name, "--nodes", str(nodes), "--cpus-per-node", "1",
            "--setup", f"echo $EPOCHREALTIME > {folder}/begun", str(self.work), str(folder), str(seconds), env=env,
        )  # fmt: skip
        try:
            yield program
        finally:
            if program.poll() is None:
                program.kill()  # the lab goes, and its jobs with it
                program.communicate()

    def other(self, kind: str, nodes: int) -> Times:
        name, folder = self._folder(kind)
        text = batch.render(kind, name=name, nodes=nodes, folder=folder, token=self.token, work=self.work)
        script = self.hosts.put(f"bench/{name}/job.sh", text)
        with self.watcher(self.token) as watcher:
            job = self.ask("sbatch", "--parsable", str(script))
            self.until("the batch script's first line", (folder / "begun").exists)
            # nobody else is here, so that the first node is the first that there is
            alive = watcher.alive_at(self.address(1), batch.PORT, nodes)
        self.until(f"the script's end of {kind} (job {job})", (folder / "ended").exists)
        return self._times(folder, nodes, alive, self._gone(name))

    def _times(self, folder: Path, nodes: int, alive: float, gone: float) -> Times:
        seen = batch.stamp(folder / "nodes")
        if seen != nodes:
            raise CannotMeasure(f"the script of {folder.name} saw {seen:.0f} nodes alive, not {nodes}")
        return Times(batch.stamp(folder / "begun"), alive, batch.stamp(folder / "ended"), gone)

    def _gone(self, name: str) -> float:
        while True:
            at = time.time()
            if name not in self.ask("squeue", "--noheader", "--format=%j").split():
                return at
            time.sleep(QUEUE_S)

    # -- how often the scheduler is asked

    def count(self, nodes: int) -> tuple[float, float, str]:
        """Commands a minute while the job waits and while it runs; and how many of what there were in all."""
        name, folder = self._folder("count")
        log = self.hosts.put(f"bench/{name}/log", "")
        for command in COMMANDS:
            text = WRAPPER.format(name=command, log=log, program=shutil.which(command))
            self.hosts.put(f"bench/{name}/bin/{command}", text).chmod(0o755)
        env = {"PATH": f"{folder}/bin:/usr/local/bin:/usr/bin:/bin"}
        held = self.ask(
            "sbatch", "--parsable", f"--nodes={self.size}", "--output=/dev/null", "--wrap=sleep 600"
        )
        self.until("a full cluster", lambda: self.ask("squeue", "-h", "-j", held, "-o", "%T") == "RUNNING")
        with self._ours(name, folder, nodes, COUNT_S, env) as program:
            self.until("our job in the queue", lambda: name in self.ask("squeue", "-h", "-o", "%j"), program)
            waits = time.time() + 1
            time.sleep(COUNT_S + 1)
            free = time.time()
            self.ask("scancel", held)
            self.until("the script's end", (folder / "ended").exists, program)
            program.communicate(timeout=DEADLINE_S)
        noted = batch.commands(log.read_text())
        worked, ended = (batch.stamp(folder / which) for which in ("worked", "ended"))
        begun = batch.stamp(folder / "begun")
        kinds = {kind: sum(which == kind for _, which in noted) for kind in sorted({k for _, k in noted})}
        parts = {"starting": (begun, worked), "after the script's end": (ended, time.time())}
        said = ", ".join(
            f"{sum(a <= at < b for at, _ in noted)} {what} ({b - a:.0f} s)" for what, (a, b) in parts.items()
        )
        return (
            batch.per_minute(noted, waits, free),
            batch.per_minute(noted, worked + 1, ended),
            f"{nodes} nodes, in all {kinds}; {said}",
        )


def phases(past: Path, times: Times, worked: float) -> str:
    """Where our job spent its time, by the log of the head's agent."""
    first, last = hosts.states(past / "logs" / "head" / "agent.jsonl", "head")
    start = {
        "agents of all workers met the head's": last.get((False, "STARTING")),
        "head ready": first.get((True, "READY")),
        "last worker ready": last.get((False, "READY")),
        "node table whole": times.alive,
        "script's first line": worked,
    }
    end = {
        "agent knows": first.get((True, "STOPPING")),
        "workers told": first.get((False, "STOPPING")),
        "last worker gone": last.get((False, "GONE")),
        "head gone": last.get((True, "GONE")),
        "job gone": times.gone,
    }
    said = hosts.told(start, times.begun), hosts.told(end, times.ended)
    return f"ours, the last run, after the batch start: {said[0]}; after the script's end: {said[1]}"
