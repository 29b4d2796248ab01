"""What PBS says, in our words, and a person's own words for qsub. OpenPBS and PBS Professional; a word that is not here is
kept and told."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from heliostat.backends import batch
from heliostat.backends.base import Observation
from heliostat.common.errors import Code, UsageError
from heliostat.common.limits import MAX_NODES
from heliostat.state.states import NodeState

N = NodeState

# every letter that a job can be in; an unlisted one is UNKNOWN with the letter kept. C is Torque's
STATES = {
    **dict.fromkeys("QHWT", N.QUEUED),
    "R": N.ALLOCATED,
    "E": N.STOPPING,
    **dict.fromkeys("FXMC", N.GONE),
}
SUSPENDED = {"S": "is suspended", "U": "is suspended: its machine's owner is at work"}
WAITING = {
    "W": "its time has not come yet",
    "T": "is on its way to another queue",
    "Hu": "is held; qrls lets it go",
    "Ho": "is held by an operator",
    "Hs": "is held by the system",
    "Hp": "is held: a password is wrong",
}
NEVER, NOT_YET = "Can Never Run", "Not Running"  # how the scheduler's comment begins; the rest is its reason
DEPENDS = 22  # the substate of a job that waits for another
DELETING = re.compile(r"and (?:terminated|deleted) by (\S+)")
ENDED = {-29: "the time limit was reached", 271: "the job was deleted"}
OVER_TIME = "exceeded resource walltime"

# a command's exit code is the server's error number modulo 256: our code, the meaning, a hint
REFUSALS = {
    159: (Code.PBS_ACCESS_DENIED, "you may not do that here", ""),
    160: (Code.PBS_UNREACHABLE, "the server's name is not known", "PBS_SERVER in /etc/pbs.conf, or in your environment"),
    162: (Code.PBS_UNREACHABLE, "the server does not answer", ""),
    166: (Code.PBS_INVALID_VALUE, "a value cannot be used", "qstat -Qf shows the queues' limits, pbsnodes -a what the machines have"),
    170: (Code.PBS_INVALID_QUEUE, "there is no such queue", ""),
    173: (Code.PBS_QUEUE_DISABLED, "the queue takes no jobs now", ""),
    174: (Code.PBS_ACCESS_DENIED, "you may not use this queue", ""),
    175: (Code.PBS_ACCESS_DENIED, "this user may not submit from this host", "not as root; from a login node"),
    187: (Code.PBS_UNKNOWN_RESOURCE, "the site has no such resource", ""),
    188: (Code.PBS_RESOURCE_LIMIT, "more is asked for than the queue or the server allows", "qstat -Qf shows the queues' limits"),
    193: (Code.PBS_REJECTED, "the machine refused the job", ""),
    197: (Code.PBS_INVALID_GROUP, "the group may not be used", ""),
    198: (Code.PBS_JOB_LIMIT, "you have as many jobs as the queue allows", "qstat -u $USER"),
    201: (Code.PBS_INVALID_ACCOUNT, "the account is not valid", "-A ACCOUNT, or pbs.account in the file"),
    241: (Code.PBS_INVALID_SELECT, "the select statement cannot be used", ""),
    4: (Code.PBS_INVALID_SELECT, "a resource of the whole job stands in a select statement", "--time TIME for the walltime"),
    5: (Code.PBS_INVALID_SELECT, "a resource of a chunk stands beside a select statement", "-l select=N:ncpus=…:mem=…"),
}  # fmt: skip

# what answers to `qstat --version`
KINDS = (("pbs", re.compile(r"pbs_version\s*=")), ("torque", re.compile(r"^version:\s*\d", re.I | re.M)))
STRANGERS = (
    (re.compile(r"slurm", re.I), "these are SLURM's commands under PBS's names", "--on slurm"),
    (re.compile(r"\b(?:SGE|OGS|UGE|GE \d|Grid ?Engine|SGE_ROOT|qmaster)", re.I),
     "these are Grid Engine's commands of the same names", "Grid Engine is no site of Heliostat"),
)  # fmt: skip


def kind(answers: Sequence[str]) -> tuple[int, str]:
    """Which of these answers to `qstat --version` is PBS's: (its number, `pbs` or `torque`); (-1, "") for none."""
    for name, pattern in KINDS:
        for number, text in enumerate(answers):
            if pattern.search(text):
                return number, name
    return -1, ""


def stranger(answers: Sequence[str]) -> UsageError:
    for pattern, who, hint in STRANGERS:
        if any(pattern.search(text) for text in answers):
            return UsageError("this is not PBS", cause=who, hint=hint, code=Code.PBS_NOT_INSTALLED)
    words = next((line for text in answers for line in text.strip().splitlines() if line.strip()), "")
    return UsageError(
        "PBS's commands are not here",
        cause=f"qstat --version: {words[:200] or 'no answer'}",
        hint="run heliostat on a login node, or say `pbs: {via: user@login}` in the file",
        code=Code.PBS_NOT_INSTALLED,
    )


def observation(job: Mapping[str, Any]) -> Observation:
    """What one job of `qstat -f -F json` means."""
    state, comment = str(job.get("job_state", "")), str(job.get("comment") or "")
    known = STATES.get(state)
    if state in SUSPENDED:
        return Observation(N.UNKNOWN, SUSPENDED[state], state)
    if known is None:
        return Observation(N.UNKNOWN, f"PBS says {state}", state)
    if known is N.QUEUED:
        return _waiting(job, state, comment)
    told = DELETING.search(comment)
    if known is N.GONE:
        return Observation(N.GONE, _ended(job.get("Exit_status"), comment, told), state)
    if known is N.ALLOCATED and told:  # qdel leaves it in R until its processes are gone
        return Observation(N.STOPPING, f"deleted by {told[1]}", state)
    return Observation(known, "" if known is N.ALLOCATED else "PBS says that it is exiting", state)


def _waiting(job: Mapping[str, Any], state: str, comment: str) -> Observation:
    said, _, reason = comment.partition(": ")
    if said == NEVER:
        return Observation(N.FAILED, f"it can never run: {reason}", comment)
    if job.get("substate") == DEPENDS:
        return Observation(N.QUEUED, "waits for another job", comment)
    if said == NOT_YET:
        return Observation(N.QUEUED, f"waits: {reason}", comment)
    hold = str(job.get("Hold_Types") or "n")[0] if state == "H" else ""
    words = WAITING.get(state + hold) or comment or "has just been submitted"
    return Observation(N.QUEUED, words, comment or state)


def _ended(code: object, comment: str, told: re.Match[str] | None) -> str:
    if OVER_TIME in comment:
        return ENDED[-29]
    if told:
        return f"the job was deleted by {told[1]}"
    if isinstance(code, int) and code in ENDED:
        return ENDED[code]
    if isinstance(code, int) and code < 0:
        return f"PBS could not run it (Exit_status {code}){': ' + comment if comment else ''}"
    if isinstance(code, int) and code > 256:
        return f"it was killed by signal {code - 256}"
    return f"it ended with code {code}" if isinstance(code, int) else "PBS has forgotten the job"


# -- a person's own words

OWNED = {
    "-N": "--name NAME", "-o": "heliostat logs", "-e": "heliostat logs", "-j": "heliostat logs", "-k": "heliostat logs",
    "-R": "heliostat logs", "-J": "one `heliostat join` a task", "-r": "pbs.requeue in the file", "-v": "environment.env in the file",
    "-V": "environment.env in the file; --setup LINE", "-I": "heliostat exec NAME -- COMMAND", "-X": "", "-S": "scripts are bash",
    "-z": "", "-C": "", "-c": "", "-u": "", "--": "heliostat run -- COMMAND",
}  # fmt: skip
FLAGS = frozenset(("-h", "-f"))
OF_A_CHUNK = {"ncpus": "--cpus-per-node N", "mem": "--memory-per-node SIZE", "ngpus": "--gpus-per-node N", "mpiprocs": "one agent a host is ours",
              "vmem": "-l select=N:vmem=…", "host": "-l select=N:host=…", "arch": "-l select=N:arch=…"}  # fmt: skip
_SIZE = re.compile(r"(\d+)([kmgtp]?)([bw]?)", re.IGNORECASE)


@dataclass(frozen=True)
class Said:
    """What a person asked of PBS in its own words. chunks: one a node, without its count."""

    chunks: tuple[str, ...] = ()
    place: str | None = None
    walltime: str | None = None
    rest: tuple[str, ...] = ()  # options for qsub, one a word


def said(select: str | None, place: str | None, extra: Sequence[str]) -> Said:
    """From the file's table and the options of the command line; the last word counts."""
    walltime, rest, nodes = None, [], None
    for word in batch.options_of([str(word) for word in extra], OWNED, FLAGS):
        if word.startswith("--"):
            name, _, value = word.partition("=")
            hint = {"--partition": "-q", "--account": "-A", "--qos": "-l qos="}.get(name)
            raise UsageError(
                f"`{name}` is no option of qsub",
                hint=f"{hint} {value}" if hint else "qsub has only short ones",
                code=Code.PBS_INVALID_OPTION,
            )
        if word.startswith("-W") and "block=" in word:
            raise UsageError(
                "`-W block` is set by Heliostat",
                hint="heliostat run waits, --detach does not",
                code=Code.SCHEDULER_INVALID_OPTION,
            )
        if not word.startswith("-l"):
            rest.append(word)
            continue
        for item in word[2:].strip().split(","):
            name, sign, value = item.partition("=")
            if not sign:
                raise UsageError(
                    f"`-l {item}` is no resource", hint="-l name=value", code=Code.PBS_INVALID_OPTION
                )
            if name == "select":
                select, nodes = value, None
            elif name == "nodes":
                select, nodes = None, value
            elif name == "place":
                place = value
            elif name == "walltime":
                walltime = value
            elif name in OF_A_CHUNK:
                raise UsageError(
                    f"`-l {name}` cannot stand beside a select",
                    hint=OF_A_CHUNK[name],
                    code=Code.PBS_INVALID_SELECT,
                )
            else:
                rest.append(f"-l{item}")
    chunks = parse_nodes(nodes) if nodes else parse_select(select) if select else ()
    return Said(chunks, place, walltime, tuple(rest))


def parse_select(text: str) -> tuple[str, ...]:
    """`2:ncpus=4:mem=8gb+1:ncpus=1` -> one chunk a node."""
    chunks: list[str] = []
    for part in text.split("+"):
        count, _, rest = part.partition(":")
        if "=" in count:  # a chunk without a count is one
            count, rest = "1", part
        if not count.isdigit() or not 0 < int(count) <= MAX_NODES:
            raise UsageError(
                f"`select={text[:80]}` cannot be used",
                hint="select=4:ncpus=16:mem=64gb",
                code=Code.PBS_INVALID_SELECT,
            )
        chunks += [rest] * int(count)
    return tuple(chunks)


def parse_nodes(text: str) -> tuple[str, ...]:
    """Torque's `2:ppn=4` as chunks. PBS itself does the same with it."""
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


def number(chunk: str, name: str) -> int | None:
    value = _values(chunk).get(name, "")
    return int(value) if value.isdigit() else None


def memory(chunk: str) -> int | None:
    """Bytes of `mem=64gb`; PBS's units are powers of 1024, and `w` is a word of eight bytes."""
    match = _SIZE.fullmatch(_values(chunk).get("mem", ""))
    if not match:
        return None
    power = " kmgtp".index(match[2].lower() or " ")
    return int(match[1]) * int(1024**power) * (8 if match[3].lower() == "w" else 1)


def seconds(text: object) -> int | None:
    """PBS's own `HH:MM:SS`, `MM:SS` or seconds; None where it is neither."""
    parts = str(text or "").split(":")
    good = len(parts) <= 3 and all(map(str.isdigit, parts))
    return sum(int(part) * 60**i for i, part in enumerate(reversed(parts))) if good else None


def _values(chunk: str) -> dict[str, str]:
    return {name: value for name, _, value in (part.partition("=") for part in chunk.split(":"))}


def render(chunks: Sequence[str], joint: str = ":") -> str:
    """One chunk a node -> `2:ncpus=4+1:ncpus=1`; neighbours that are alike are one."""
    counted: list[tuple[int, str]] = []
    for chunk in chunks:
        if counted and counted[-1][1] == chunk:
            counted[-1] = (counted[-1][0] + 1, chunk)
        else:
            counted.append((1, chunk))
    return "+".join(f"{count}{joint}{chunk}" if chunk else str(count) for count, chunk in counted)
