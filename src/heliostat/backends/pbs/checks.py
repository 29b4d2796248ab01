"""The checks of `doctor` for PBS."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from heliostat.backends.base import Check, Question, by_name
from heliostat.backends.pbs.qstat import identify_qstat, not_pbs_error
from heliostat.backends.pbs.queues import QUERY_QUEUES, find_qstat, parse_queues
from heliostat.common.errors import HeliostatError
from heliostat.common.units import format_duration

if TYPE_CHECKING:
    from heliostat.remote.transport import Transport

PROGRAMS = ("qsub", "qdel", "qsig", "qselect", "pbsdsh")
QUESTIONS = by_name(
    Question(
        "qstat", "`qstat` is installed, and is PBS's", "run heliostat where PBS's commands are installed"
    ),
    *(Question(name, f"`{name}` is in the same directory", "ask the administrator") for name in PROGRAMS),
    Question(
        "PATH", "no other scheduler's commands have the same names", "none needed: PBS's are used", "warn"
    ),
    Question("dialect", "the scheduler is not Torque", "none needed: Torque's options are used", "warn"),
    Question("server", "the server answers and has queues", "qstat -B"),
)


def run_checks(host: Transport) -> list[Check]:
    """The results of QUESTIONS. Never raises."""
    qstat = QUESTIONS["qstat"]
    try:
        found = find_qstat(host)
    except HeliostatError as error:
        return [qstat.answer(False, str(error))]
    index, dialect = identify_qstat([text for _, text in found])
    if index < 0:
        wrong = not_pbs_error([text for _, text in found])
        return [qstat.answer(False, f"{wrong.message}: {wrong.cause}", hint=wrong.hint)]
    directory, version = found[index]
    results = [qstat.answer(True, f"{version.strip().splitlines()[0]} in {directory}")]
    for other, text in found:
        if identify_qstat([text])[0] < 0:
            results.append(
                QUESTIONS["PATH"].answer(False, f"commands of the same names in {other} are not PBS's")
            )
    if dialect == "torque":
        return [*results, QUESTIONS["dialect"].answer(False, "Torque: supported, but less tested")]
    for program in PROGRAMS:
        done = host.run(["sh", "-c", '[ -x "$1/$2" ]', "sh", directory, program], timeout=20)
        results.append(QUESTIONS[program].answer(not done.code, f"{directory}/{program}"))
    return [*results, _check_server(directory, host)]


def _check_server(directory: str, host: Transport) -> Check:
    server = QUESTIONS["server"]
    began = time.monotonic()
    try:
        done = host.run(["sh", "-c", QUERY_QUEUES, "sh", directory], timeout=60)
    except HeliostatError as error:
        hint = "Heliostat waits for a slow server; if it is down, ask the administrator"
        return server.answer(False, str(error), severity="warn", hint=hint)
    queues = parse_queues(done.out).get("queues") or {}
    took = format_duration(time.monotonic() - began)
    if not queues:
        return server.answer(False, f"{done.err.strip()[:200] or 'no queues'} after {took}")
    names = [name + ("" if queue["enabled"] else " (disabled)") for name, queue in queues.items()]
    return server.answer(True, f"queues: {', '.join(names)}"[:300])
