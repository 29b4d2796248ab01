"""What Heliostat holds in memory while a cluster runs, and while `ls` answers."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence

from benchmarks.figures import CannotMeasure, Figure, Turns
from benchmarks.lab import HELIOSTAT, RAY, Lab

# A program's peak counts the process that forked it, so a small one forks it, not this large one.
PEAK = """
import resource, subprocess, sys
subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""


def ls_memory(lab: Lab, turns: Turns) -> list[Figure]:
    connection = lab.connection(lab.shared())

    def peak(*argv: str) -> float:
        said = lab.output(sys.executable, "-I", "-S", "-c", PEAK, *argv, more=connection)
        return int(said.split()[-1]) * 1024 / 1e6

    ours, other = turns.take(lambda: peak(HELIOSTAT, "ls"), lambda: peak(RAY, "status"))
    return [Figure("ls, peak resident", "MB", 60, ours, other, "ray status", absolute=True)]


def agent_memory(lab: Lab, turns: Turns) -> list[Figure]:
    """Head's and worker's, each the supervisor and the agent below it, beside the `ray start --block` that it watches."""
    name = lab.shared()
    lab.run(HELIOSTAT, "submit", name, "--wait", "--", "true")  # after work, not fresh from the start
    found = _agents(lab, name)
    samples: dict[str, list[float]] = {}
    together: dict[str, float] = {}
    for _ in range(turns.rounds):
        for node, pids in found.items():
            for part, pid in pids.items():
                samples.setdefault(f"{node} {part}", []).append(_status(pid, "VmRSS"))
            together[node] = _proportional(pids["supervisor"]) + _proportional(pids["agent"])
        time.sleep(0.2)
    return [
        Figure(
            f"agent's memory: {node}, {part}",
            "MB",
            30,
            samples[f"{node} {part}"],
            samples[f"{node} ray"],
            "its `ray start --block`",
            absolute=True,
            note=f"supervisor and agent of {node} together, shared pages once: {together[node]:.1f} MB"
            if part == "agent"
            else "",
        )
        for node in found
        for part in ("supervisor", "agent")
    ]


def _agents(lab: Lab, name: str) -> dict[str, dict[str, int]]:
    """node -> pids of its supervisor, its agent and its `ray start`."""
    found: dict[str, dict[str, int]] = {}
    assert lab.shared_family
    words = {pid: _command(pid) for pid, _ in lab.shared_family.look()}
    folder = lab.home / "clusters" / name
    for path in sorted((folder / "nodes").glob("*.json")):
        supervisor = int(json.loads(path.read_bytes())["pid"])
        agent = _child(supervisor, words, "agent.pyz")
        found[path.stem] = {"supervisor": supervisor, "agent": agent, "ray": _child(agent, words, "start")}
    if not found:
        raise CannotMeasure(f"no agent wrote its words in {folder / 'nodes'}")
    return found


def _child(parent: int, words: dict[int, Sequence[str]], word: str) -> int:
    for pid, argv in words.items():
        if _status(pid, "PPid") == parent and any(part.endswith(word) for part in argv):
            return pid
    raise CannotMeasure(f"process {parent} has no child with `{word}` in its command line")


def _command(pid: int) -> Sequence[str]:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as stream:
            return stream.read().decode(errors="replace").split("\0")
    except OSError:
        return []


def _status(pid: int, key: str) -> float:
    """A number of /proc/PID/status; sizes in MB."""
    return _field(f"/proc/{pid}/status", key)


def _proportional(pid: int) -> float:
    return _field(f"/proc/{pid}/smaps_rollup", "Pss")


def _field(path: str, key: str) -> float:
    try:
        with open(path) as stream:
            for line in stream:
                words = line.split()
                if words[0] == f"{key}:":
                    return int(words[1]) * 1024 / 1e6 if words[-1] == "kB" else int(words[1])
    except OSError:
        pass
    return 0.0
