"""`python -m benchmarks`: measures, prints each measure's figures as it ends, and a table of all. It judges nothing: its exit
code is 0 unless a measure could not run."""

from __future__ import annotations

import argparse
import functools
import json
import signal
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import batch, commands, events, machine, memory, release, scale, slurm, ssh, start, table, tls
from benchmarks.figures import CannotMeasure, Figure, Turns
from benchmarks.lab import HELIOSTAT, RAY, Lab
from benchmarks.processes import adopt_orphans

PATIENCE_S = 180.0  # so long in all for others on this machine to finish


@dataclass(frozen=True)
class Measure:
    what: Callable[[Lab, Turns], list[Figure]]
    rounds: int
    quick: int
    shared: bool  # uses the shared cluster; the others want an idle machine
    named: bool = False  # only when it is asked for by name: it needs root, or very long
    nodes: tuple[int, ...] = ()  # clusters of so many, where it starts several; the first alone when quick


# in this order, so that the shared cluster is started once
MEASURES = {
    "ls": Measure(commands.ls, 15, 5, True),
    "help": Measure(commands.help, 15, 5, True),
    "status": Measure(commands.status, 15, 5, True),
    "submit": Measure(commands.submit, 5, 2, True),
    "agent-memory": Measure(memory.agent_memory, 5, 3, True),
    "ls-memory": Measure(memory.ls_memory, 3, 2, True),
    "up": Measure(start.up, 7, 3, False),
    "release": Measure(release.release, 7, 3, False),
    "tls": Measure(tls.tls, 5, 3, False),
    "events": Measure(events.events, 1, 1, False),
    "scale": Measure(scale.scale, 3, 1, False),
    "slurm": Measure(slurm.slurm, 3, 1, False, named=True, nodes=(2, 4, 8)),
    "ssh": Measure(ssh.ssh, 3, 1, False, named=True, nodes=(2, 8)),
}
BESIDE = (*batch.OTHERS, "ray-up", "counts")


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds: a first impression, noisier")
    parser.add_argument("--smoke", action="store_true",
                        help="one round of every measure, small: to see that they run; the figures mean nothing")  # fmt: skip
    parser.add_argument("--only", metavar="NAME", action="append", choices=list(MEASURES),
                        help=f"only this measure (repeatable): {', '.join(MEASURES)}")  # fmt: skip
    parser.add_argument("--nodes", type=int, metavar="N", action="append",
                        help="slurm, ssh: clusters of so many nodes (repeatable) [2, 4, 8; ssh: 2, 8]")  # fmt: skip
    parser.add_argument("--beside", metavar="WHAT", action="append", choices=BESIDE,
                        help=f"slurm, ssh: beside this only (repeatable): {', '.join(BESIDE)}")  # fmt: skip
    parser.add_argument("--rounds", type=int, help="so many rounds of every measure")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write every sample there")
    return parser.parse_args(words)


def measure(lab: Lab, asked: argparse.Namespace, quiet: machine.Quiet) -> tuple[list[Figure], dict[str, str]]:
    """The figures, and why there is none where there is none."""
    figures: list[Figure] = []
    failed: dict[str, str] = {}
    for name in [n for n in MEASURES if (n in asked.only if asked.only else not MEASURES[n].named)]:
        rounds = asked.rounds or (MEASURES[name].quick if asked.quick else MEASURES[name].rounds)
        rounds = 1 if asked.smoke else rounds
        nodes = MEASURES[name].nodes
        lab.nodes = sorted({*(asked.nodes or (nodes[:1] if asked.quick or asked.smoke else nodes))})
        say(f"{name} …")
        turns = Turns(rounds, functools.partial(_progress, name), quiet.wait, asked.smoke)
        try:
            found = _with_cluster_again(lab, MEASURES[name], turns)
        except Exception as error:  # one that fails does not take the others with it
            failed[name] = str(error) or type(error).__name__
            say(f"  {name}: {failed[name]}")
            if not isinstance(error, (CannotMeasure, OSError)):
                failed[name] = f"{type(error).__name__}: {error}"
                say(traceback.format_exc())
            continue
        figures += found
        print(f"{table.render(found)}\n", flush=True)
    return figures, failed


def _progress(name: str, text: str) -> None:
    say(f"  {name}: {text}")


def _with_cluster_again(lab: Lab, one: Measure, turns: Turns) -> list[Figure]:
    """A shared cluster that somebody ended costs a second try with a new one, not the rest of the run."""
    if not one.shared:
        lab.no_shared()
        return one.what(lab, turns)
    try:
        return one.what(lab, turns)
    except CannotMeasure as error:
        turns.tell(f"{error}; once more with a new cluster")
        lab.no_shared()
        return one.what(lab, turns)


def report(figures: list[Figure], failed: dict[str, str], about: dict[str, Any]) -> None:
    print(", ".join(f"{key} {value}" for key, value in about.items()))
    print()
    print(table.render(figures))
    for name, why in failed.items():
        print(f"{name}: could not be measured: {why}")


def main(words: Sequence[str] | None = None) -> int:
    asked = arguments(words)
    if missing := [path for path in (HELIOSTAT, RAY) if not Path(path).exists()]:
        say(f"error: not beside {sys.executable}: {', '.join(missing)}")
        return 1
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    adopt_orphans()
    about = machine.describe()
    about["load_before"], began = machine.load(), time.monotonic()
    lab, quiet = (
        Lab(asked.beside or BESIDE),
        machine.Quiet(0.0 if asked.smoke else 30.0 if asked.quick else PATIENCE_S),
    )
    try:
        figures, failed = measure(lab, asked, quiet)
    except KeyboardInterrupt:
        say("interrupted: taking everything down")
        return 130
    finally:
        lab.close()
    about["load_after"], about["seconds"] = machine.load(), round(time.monotonic() - began)
    about["busy_before_rounds"] = round(statistics.median(quiet.seen), 2) if quiet.seen else None
    report(figures, failed, about)
    if asked.json:
        found = [figure.to_json() for figure in figures]
        asked.json.write_text(
            json.dumps({"schema": 1, "machine": about, "figures": found, "failed": failed}, indent=1) + "\n"
        )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
