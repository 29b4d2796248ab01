"""The checks of `doctor` for Slurm."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from heliostat.backends.base import Check, Question, by_name
from heliostat.common.errors import HeliostatError
from heliostat.common.units import format_duration

if TYPE_CHECKING:
    from heliostat.remote.transport import Transport

PROGRAMS = ("sbatch", "squeue", "scancel", "srun", "sinfo")
QUESTIONS = by_name(
    *(
        Question(name, f"`{name}` is installed", "run heliostat where Slurm's commands are installed")
        for name in PROGRAMS
    ),
    Question(
        "slurmctld",
        "the controller answers and lists its partitions",
        "Heliostat waits for a slow controller; if it is down, ask the administrator",
    ),
)


def run_checks(host: Transport) -> list[Check]:
    """The results of QUESTIONS. Never raises."""
    results = []
    for program in PROGRAMS:
        try:
            done = host.run([program, "--version"], timeout=20)
            results.append(QUESTIONS[program].answer(done.code == 0, (done.out or done.err).strip()[:100]))
        except HeliostatError as error:
            results.append(QUESTIONS[program].answer(False, str(error)))
    controller = QUESTIONS["slurmctld"]
    try:
        began = time.monotonic()
        done = host.run(["sinfo", "--noheader", "--format=%R %a %l %D %t"], timeout=60)
        took = format_duration(time.monotonic() - began)
        lines = "; ".join(done.out.strip().splitlines())[:300]
        results.append(controller.answer(done.code == 0, lines or f"{done.err.strip()[:200]} after {took}"))
    except HeliostatError as error:
        results.append(controller.answer(False, str(error), severity="warn"))
    return results
