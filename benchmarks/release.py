"""From the end of the work to an empty machine."""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from pathlib import Path

from benchmarks.bare import Watcher, start_head
from benchmarks.figures import CannotMeasure, Figure, Turns
from benchmarks.lab import DEADLINE_S, HELIOSTAT, Lab, Program
from benchmarks.processes import Family

# The same work on both sides: a driver that ran a task, and has hung up.
SCRIPT = """
import sys, time
import ray

@ray.remote
def one():
    return 1

ray.init(log_to_driver=False)
assert ray.get(one.remote()) == 1
ray.shutdown()
with open(sys.argv[1] + ".part", "w") as stream:
    stream.write(str(time.time()))
import os
os.rename(sys.argv[1] + ".part", sys.argv[1])
"""


def release(lab: Lab, turns: Turns) -> list[Figure]:
    script = lab.path / "work.py"
    script.write_text(SCRIPT)
    returned: list[float] = []
    ours, other = turns.take(
        lambda: _ours(lab, script, returned), lambda: _bare(lab, script), warm=False
    )  # nothing here is quicker the second time
    late = sorted(returned)[len(returned) // 2]
    return [
        Figure(
            "release: script's end to no process left",
            "s",
            1.5,
            ours,
            other,
            "SIGTERM to `ray start --block`, same state",
            note=f"the `run` command itself returned {late:.2f} s after the script's end",
        )
    ]


def _ours(lab: Lab, script: Path, returned: list[float]) -> float:
    stamp = lab.path / f"{script.stem}.{time.monotonic_ns()}"
    with lab.family() as family:
        program = lab.start(HELIOSTAT, "run", "--name", "release", str(script), str(stamp), mark=family.mark)
        family.but.add(program.process.pid)  # it waits for the others, and then says so
        _until_there(stamp, program, family)
        gone = family.gone_at()
        program.succeed()
        over, ended = time.time(), float(stamp.read_text())
        if gone is None:
            raise CannotMeasure("`run` left processes")
        returned.append(over - ended)
        return gone - ended


def _until_there(stamp: Path, program: Program, family: Family) -> None:
    """Looks at the whole family now and then, so that all of it is known when its end is watched."""
    deadline, looked = time.monotonic() + DEADLINE_S, 0.0
    while not stamp.exists():
        if time.monotonic() > deadline or program.process.poll() is not None:
            raise CannotMeasure(f"{program.says()}: the script did not come to its end")
        if time.monotonic() - looked > 0.5:
            looked = time.monotonic()
            family.look()
        time.sleep(0.01)


def _bare(lab: Lab, script: Path) -> float:
    stamp = lab.path / f"{script.stem}.{time.monotonic_ns()}"
    with lab.family() as family:
        with contextlib.closing(Watcher(lab, family)) as watcher:
            program, port = start_head(lab, family, "--block")
            watcher.alive_at(port)
        more = {**lab.bare_environment(), "RAY_ADDRESS": f"127.0.0.1:{port}"}
        lab.run(sys.executable, str(script), str(stamp), more=more)
        family.look()
        told = time.time()
        program.process.send_signal(signal.SIGTERM)
        gone = family.gone_at()
        if gone is None:
            raise CannotMeasure("`ray start --block` left processes after SIGTERM")
        program.process.wait()
        return gone - told
