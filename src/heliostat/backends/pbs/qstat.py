"""PBS's job states and exit codes, and the user's own options for qsub. For OpenPBS, PBS Professional and Torque."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from heliostat.backends import batch
from heliostat.backends.base import Observation
from heliostat.common.documents import JsonMapping
from heliostat.common.errors import Code, UsageError
from heliostat.common.limits import MAX_NODES
from heliostat.state.states import NodeState

N = NodeState

# all states of a job; others are UNKNOWN with the raw value. C is Torque's
STATES = {
    **dict.fromkeys("QHWT", N.QUEUED),
    "R": N.ALLOCATED,
    "E": N.STOPPING,
    **dict.fromkeys("FXMC", N.GONE),
}
SUSPENDED = {"S": "is suspended", "U": "is suspended while its workstation is in use"}
WAITING = {
    "W": "waits for its start time",
    "T": "is being moved to another queue",
    "Hu": "is held; qrls releases it",
    "Ho": "is held by an operator",
    "Hs": "is held by the system",
    "Hp": "is held because of a wrong password",
}
NEVER, NOT_YET = "Can Never Run", "Not Running"  # prefixes of the scheduler's comment; the reason follows
DEPENDS = 22  # substate of a job that waits for another job
DELETED_BY = re.compile(r"and (?:terminated|deleted) by (\S+)")
ENDED = {-29: "the time limit was reached", 271: "the job was deleted"}
WALLTIME_EXCEEDED = "exceeded resource walltime"

# by exit code, which is the server's error number modulo 256: error code, meaning, hint
REJECTIONS = {
    159: (Code.PBS_ACCESS_DENIED, "permission denied", ""),
    160: (Code.PBS_UNREACHABLE, "unknown server name", "set PBS_SERVER in /etc/pbs.conf or in the environment"),
    162: (Code.PBS_UNREACHABLE, "the server does not answer", ""),
    166: (Code.PBS_INVALID_VALUE, "invalid value", "qstat -Qf shows the limits of the queues, pbsnodes -a the resources of the hosts"),
    170: (Code.PBS_INVALID_QUEUE, "no such queue", ""),
    173: (Code.PBS_QUEUE_DISABLED, "the queue is disabled", ""),
    174: (Code.PBS_ACCESS_DENIED, "no permission to use this queue", ""),
    175: (Code.PBS_ACCESS_DENIED, "no permission to submit from this host", "submit from a login node, not as root"),
    187: (Code.PBS_UNKNOWN_RESOURCE, "no such resource", ""),
    188: (Code.PBS_RESOURCE_LIMIT, "the request exceeds a limit of the queue or server", "qstat -Qf shows the limits of the queues"),
    193: (Code.PBS_REJECTED, "the host rejected the job", ""),
    197: (Code.PBS_INVALID_GROUP, "invalid group", ""),
    198: (Code.PBS_JOB_LIMIT, "you have reached the queue's job limit", "qstat -u $USER"),
    201: (Code.PBS_INVALID_ACCOUNT, "invalid account", "-A ACCOUNT, or set pbs.account in the file"),
    241: (Code.PBS_INVALID_SELECT, "invalid select statement", ""),
    4: (Code.PBS_INVALID_SELECT, "a job-wide resource is in the select statement", "--time TIME for the walltime"),
    5: (Code.PBS_INVALID_SELECT, "a chunk resource is outside the select statement", "-l select=N:ncpus=…:mem=…"),
}  # fmt: skip

# output of `qstat --version`, by dialect
VERSIONS = (("pbs", re.compile(r"pbs_version\s*=")), ("torque", re.compile(r"^version:\s*\d", re.I | re.M)))
OTHER_SCHEDULERS = (
    (re.compile(r"slurm", re.I), "these are Slurm's commands with PBS's names", "--on slurm"),
    (re.compile(r"\b(?:SGE|OGS|UGE|GE \d|Grid ?Engine|SGE_ROOT|qmaster)", re.I),
     "these are Grid Engine's commands with the same names", "Heliostat has no backend for Grid Engine"),
)  # fmt: skip


def identify_qstat(answers: Sequence[str]) -> tuple[int, str]:
    """Which of these outputs of `qstat --version` is PBS's: (index, `pbs` or `torque`); (-1, "") if none is."""
    for dialect, pattern in VERSIONS:
        for index, text in enumerate(answers):
            if pattern.search(text):
                return index, dialect
    return -1, ""


def not_pbs_error(answers: Sequence[str]) -> UsageError:
    """The error for a host without PBS. answers: the outputs of `qstat --version`."""
    for pattern, cause, hint in OTHER_SCHEDULERS:
        if any(pattern.search(text) for text in answers):
            return UsageError("`qstat` is not PBS's", cause=cause, hint=hint, code=Code.PBS_NOT_INSTALLED)
    line = next((line for text in answers for line in text.strip().splitlines() if line.strip()), "")
    return UsageError(
        "PBS's commands are not installed",
        cause=f"qstat --version: {line[:200] or 'no answer'}",
        hint="run heliostat on a login node, or set `pbs: {via: user@login}` in the file",
        code=Code.PBS_NOT_INSTALLED,
    )


def to_observation(job: JsonMapping) -> Observation:
    """The observation for one job of `qstat -f -F json`."""
    state, comment = str(job.get("job_state", "")), str(job.get("comment") or "")
    known = STATES.get(state)
    if state in SUSPENDED:
        return Observation(N.UNKNOWN, SUSPENDED[state], state)
    if known is None:
        return Observation(N.UNKNOWN, f"unknown PBS job state `{state}`", state)
    if known is N.QUEUED:
        return _pending_observation(job, state, comment)
    deleted_by = DELETED_BY.search(comment)
    if known is N.GONE:
        return Observation(N.GONE, _end_reason(job.get("Exit_status"), comment, deleted_by), state)
    if known is N.ALLOCATED and deleted_by:  # after qdel a job stays in R until its processes exit
        return Observation(N.STOPPING, f"deleted by {deleted_by[1]}", state)
    return Observation(known, "" if known is N.ALLOCATED else "the job is exiting", state)


def _pending_observation(job: JsonMapping, state: str, comment: str) -> Observation:
    prefix, _, reason = comment.partition(": ")
    if prefix == NEVER:
        return Observation(N.FAILED, f"it can never run: {reason}", comment)
    if job.get("substate") == DEPENDS:
        return Observation(N.QUEUED, "waits for another job", comment)
    if prefix == NOT_YET:
        return Observation(N.QUEUED, f"waits: {reason}", comment)
    hold = str(job.get("Hold_Types") or "n")[0] if state == "H" else ""
    reason = WAITING.get(state + hold) or comment or "has just been submitted"
    return Observation(N.QUEUED, reason, comment or state)


def _end_reason(code: object, comment: str, deleted_by: re.Match[str] | None) -> str:
    if WALLTIME_EXCEEDED in comment:
        return ENDED[-29]
    if deleted_by:
        return f"the job was deleted by {deleted_by[1]}"
    if isinstance(code, int) and code in ENDED:
        return ENDED[code]
    if isinstance(code, int) and code < 0:
        return f"PBS could not run it (Exit_status {code}){': ' + comment if comment else ''}"
    if isinstance(code, int) and code > 256:
        return f"it was killed by signal {code - 256}"
    return f"it ended with code {code}" if isinstance(code, int) else "PBS no longer lists the job"


# -- the user's options for qsub

# options that Heliostat sets, with a hint for each
RESERVED_OPTIONS = {
    "-N": "--name NAME", "-o": "heliostat logs", "-e": "heliostat logs", "-j": "heliostat logs", "-k": "heliostat logs",
    "-R": "heliostat logs", "-J": "use `heliostat join` once per task", "-r": "pbs.requeue in the file", "-v": "environment.env in the file",
    "-V": "environment.env in the file; --setup LINE", "-I": "heliostat exec NAME -- COMMAND", "-X": "", "-S": "scripts are bash",
    "-z": "", "-C": "", "-c": "", "-u": "", "--": "heliostat run -- COMMAND",
}  # fmt: skip
FLAGS = frozenset(("-h", "-f"))
CHUNK_RESOURCES = {"ncpus": "--cpus-per-node N", "mem": "--memory-per-node SIZE", "ngpus": "--gpus-per-node N", "mpiprocs": "Heliostat starts one agent per host",
              "vmem": "-l select=N:vmem=…", "host": "-l select=N:host=…", "arch": "-l select=N:arch=…"}  # fmt: skip
_SIZE = re.compile(r"(\d+)([kmgtp]?)([bw]?)", re.IGNORECASE)


@dataclass(frozen=True)
class QsubOptions:
    """The user's own options for qsub. chunks: one per node, without its count."""

    chunks: tuple[str, ...] = ()
    place: str | None = None
    walltime: str | None = None
    others: tuple[str, ...] = ()  # all other options, each as one argument


def parse_qsub_options(select: str | None, place: str | None, extra: Sequence[str]) -> QsubOptions:
    """From the file's table and the command line's options; the last value takes precedence."""
    walltime, nodes = None, None
    others: list[str] = []
    for option in batch.parse_options([str(arg) for arg in extra], RESERVED_OPTIONS, FLAGS):
        if option.startswith("--"):
            name, _, value = option.partition("=")
            hint = {"--partition": "-q", "--account": "-A", "--qos": "-l qos="}.get(name)
            raise UsageError(
                f"`{name}` is not an option of qsub",
                hint=f"{hint} {value}" if hint else "qsub has only short options",
                code=Code.PBS_INVALID_OPTION,
            )
        if option.startswith("-W") and "block=" in option:
            raise UsageError(
                "`-W block` is set by Heliostat",
                hint="heliostat run waits for the job; --detach does not",
                code=Code.SCHEDULER_INVALID_OPTION,
            )
        if not option.startswith("-l"):
            others.append(option)
            continue
        for item in option[2:].strip().split(","):
            name, sign, value = item.partition("=")
            if not sign:
                raise UsageError(
                    f"`-l {item}` is not a resource", hint="-l name=value", code=Code.PBS_INVALID_OPTION
                )
            if name == "select":
                select, nodes = value, None
            elif name == "nodes":
                select, nodes = None, value
            elif name == "place":
                place = value
            elif name == "walltime":
                walltime = value
            elif name in CHUNK_RESOURCES:
                raise UsageError(
                    f"`-l {name}` cannot be combined with a select statement",
                    hint=CHUNK_RESOURCES[name],
                    code=Code.PBS_INVALID_SELECT,
                )
            else:
                others.append(f"-l{item}")
    chunks = parse_nodes(nodes) if nodes else parse_select(select) if select else ()
    return QsubOptions(chunks, place, walltime, tuple(others))


def parse_select(text: str) -> tuple[str, ...]:
    """`2:ncpus=4:mem=8gb+1:ncpus=1` -> one chunk per node."""
    chunks: list[str] = []
    for part in text.split("+"):
        count, _, chunk = part.partition(":")
        if "=" in count:  # a chunk without a count
            count, chunk = "1", part
        if not count.isdigit() or not 0 < int(count) <= MAX_NODES:
            raise UsageError(
                f"`select={text[:80]}` cannot be used",
                hint="select=4:ncpus=16:mem=64gb",
                code=Code.PBS_INVALID_SELECT,
            )
        chunks += [chunk] * int(count)
    return tuple(chunks)


def parse_nodes(text: str) -> tuple[str, ...]:
    """Torque's `2:ppn=4` as chunks, as PBS itself converts it."""
    chunks: list[str] = []
    for part in text.split("+"):
        match = re.fullmatch(r"(\d+)(?::ppn=(\d+))?", part)
        if not match or int(match[1]) > MAX_NODES:
            raise UsageError(
                f"`nodes={text[:80]}` cannot be used",
                hint="-l nodes=2:ppn=4, or -l select=2:ncpus=4",
                code=Code.PBS_INVALID_SELECT,
            )
        chunks += [f"ncpus={match[2] or 1}"] * int(match[1])
    return tuple(chunks)


def chunk_count(chunk: str, name: str) -> int | None:
    """The value of a resource that is a number, e.g. `ncpus`."""
    value = _chunk_values(chunk).get(name, "")
    return int(value) if value.isdigit() else None


def chunk_memory(chunk: str) -> int | None:
    """`mem=64gb` in bytes. PBS's units are powers of 1024; the unit `w` is eight bytes."""
    match = _SIZE.fullmatch(_chunk_values(chunk).get("mem", ""))
    if not match:
        return None
    power = " kmgtp".index(match[2].lower() or " ")
    return int(match[1]) * int(1024**power) * (8 if match[3].lower() == "w" else 1)


def parse_walltime(text: object) -> int | None:
    """PBS's `HH:MM:SS`, `MM:SS` or seconds, in seconds; None for other text."""
    parts = str(text or "").split(":")
    is_valid = len(parts) <= 3 and all(map(str.isdigit, parts))
    return sum(int(part) * 60**i for i, part in enumerate(reversed(parts))) if is_valid else None


def _chunk_values(chunk: str) -> dict[str, str]:
    return {name: value for name, _, value in (part.partition("=") for part in chunk.split(":"))}


def render_select(chunks: Sequence[str]) -> str:
    """One chunk per node -> `2:ncpus=4+1:ncpus=1`; equal neighbours are combined."""
    counted: list[tuple[int, str]] = []
    for chunk in chunks:
        if counted and counted[-1][1] == chunk:
            counted[-1] = (counted[-1][0] + 1, chunk)
        else:
            counted.append((1, chunk))
    return "+".join(f"{count}:{chunk}" if chunk else str(count) for count, chunk in counted)
