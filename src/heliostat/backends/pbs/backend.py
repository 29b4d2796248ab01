"""PBS (OpenPBS and PBS Professional): one job a cluster, more jobs that join it. What answers to PBS's names is asked what it is.

Torque's commands have the same names and another language (`nodes=…:ppn=…`, XML): spoken only where `qstat --version` is its.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

from heliostat.backends import batch
from heliostat.backends.base import (
    Check,
    File,
    Handle,
    LaunchRequest,
    Observation,
    Plan,
    Question,
    Step,
    by_name,
)
from heliostat.backends.batch import OBSERVE_S
from heliostat.backends.pbs import qstat as pbs_qstat
from heliostat.backends.pbs.qstat import REFUSALS, Said, observation
from heliostat.common.errors import Code, HeliostatError, UsageError
from heliostat.common.units import count, format_duration
from heliostat.state.states import NodeState

if TYPE_CHECKING:
    from heliostat.config.members import Member
    from heliostat.config.spec import ClusterSpec
    from heliostat.remote.transport import Completed, Transport

N = NodeState
KILL_S = 10  # from qdel's TERM to its KILL, where the site has not said otherwise
UNKNOWN_ID, FINISHED = 153, 35  # exit codes: nobody knows the job; it is only in the history
PASSING = re.compile(
    r"connection refused|errno=15010|no route to host|timed out|end of file|too many requests|server (?:is )?shutting down",
    re.IGNORECASE,
)
# the sure path first: others' commands of the same names may come before PBS's on the PATH
_FIND = """
for q in "$(sed -n 's/^PBS_EXEC=//p' "${PBS_CONF_FILE:-/etc/pbs.conf}" 2>/dev/null)/bin/qstat" "$(command -v qstat)"; do
  [ -x "$q" ] && echo "=== ${q%/*}" && "$q" --version 2>&1 </dev/null
done
:
"""
# several ids in one question: the JSON of some releases has only the first of them
_ASK = """
for i; do
  said=$("$0" -f -F json "$i" 2>&1); c=$?
  [ $c = 35 ] && said=$("$0" -x -f -F json "$i" 2>&1)
  printf '%s\\n' "=== $c $i" "$said"
  case $c in 0|35|153) ;; *) break ;; esac
done
"""
_ASK_TORQUE = _ASK.replace('-f -F json "$i"', '-x "$i"', 1)
_MINE = """
b=${1:+$1/}
ids=$("${b}qselect" -u "$(id -un)") || exit
for i in $ids; do
  printf '%s\\n' "=== 0 $i" "$("${b}qstat" -f -F json "$i" 2>/dev/null)"
done
"""
_QUEUES = 'echo "=== queues"; "$1/qstat" -Q -f -F json; echo "=== server"; "$1/qstat" -B -f -F json'
_IN_FOLDER = 'cd -- "$0" && exec "$@"'
BEGAN = "export HELIOSTAT_BEGAN=$(date +%s)"  # walltime runs from here: nobody tells us when it ends


PROGRAMS = ("qsub", "qdel", "qsig", "qselect", "pbsdsh")
QUESTIONS = by_name(
    Question("qstat", "`qstat` is here, and is PBS's own", "run heliostat where PBS's commands are"),
    *(Question(name, f"`{name}` is beside it", "ask who installed PBS") for name in PROGRAMS),
    Question("PATH", "no other party's commands have the same names", "nothing: PBS's own are used", "warn"),
    Question("dialect", "it is no Torque", "nothing: its own language is spoken", "warn"),
    Question("server", "the server answers, with its queues", "qstat -B"),
)


@dataclass(frozen=True)
class Options:
    """The `pbs:` table of the file."""

    queue: str | None = field(default=None, metadata={"help": "queue"})
    account: str | None = field(default=None, metadata={"help": "account to charge (-A)"})
    project: str | None = field(default=None, metadata={"help": "project (-P)"})
    time: str | int | None = field(default=None, metadata={"help": "walltime; the same as the spec's `time`"})
    select: str | None = field(
        default=None,
        metadata={"help": "select statement, instead of nodes, CPUs, GPUs, memory; each chunk is a node"},
    )
    place: str | None = field(default=None, metadata={"help": "placement; default: scatter, one node a host"})
    chunk: str | None = field(default=None, metadata={"help": "more for every chunk, e.g. gpu_model=a100"})
    gpu: str = field(default="ngpus", metadata={"help": "what the site calls the resource for GPUs"})
    via: str | None = field(default=None, metadata={"help": "user@login: PBS's commands run there, over ssh"})
    grace: str | int = field(
        default="60s", metadata={"help": "how long before the walltime the work is told"}
    )
    requeue: bool = field(default=False, metadata={"help": "PBS may run the job again (-r y)"})
    exclusive: bool = field(default=False, metadata={"help": "whole hosts"})
    umask: str = field(default="022", metadata={"help": "of the files that the work makes; PBS's own is 077"})
    extra: tuple[str, ...] = field(default=(), metadata={"help": "any other options of qsub, verbatim"})


class Pbs(batch.Batch):
    name: ClassVar[str] = "pbs"
    Options: ClassVar[type] = Options
    reserved_short_options: ClassVar[tuple[str, ...]] = ("-q",)
    after: ClassVar[tuple[str, ...]] = ("-W", "depend=after:HEAD")
    insists: ClassVar[bool] = True
    programs: ClassVar[tuple[str, ...]] = ("qsub", "qstat", "qdel")
    last_resort: ClassVar[str] = "qdel -W force"
    questions: ClassVar[Mapping[str, Question]] = QUESTIONS

    def checks(self, spec: ClusterSpec | None, host: Transport) -> list[Check]:
        return checks(host)

    def nodes_of(self, table: Mapping[str, Any]) -> int | None:
        asked = pbs_qstat.said(table.get("select"), None, table.get("extra") or ())
        return len(asked.chunks) or None

    def require(self, spec: ClusterSpec, host: Transport) -> None:
        """PBS's commands may be beside its configuration only, and not on the PATH."""
        if not host.run(["sh", "-c", _FIND], timeout=OBSERVE_S).out.strip():
            super().require(spec, host)

    # -- planning

    def survey(self, options: Any, host: Transport) -> dict[str, Any]:
        """{"bin", "dialect", "queues": {name: {"enabled", "route", "time_s", "nodes"}}, "queue": the default}; or {"stranger"}:
        what answered is not PBS."""
        try:
            answers = _sections(host.run(["sh", "-c", _FIND], timeout=OBSERVE_S).out)
            which, dialect = pbs_qstat.kind([text for _, text in answers])
            if not answers:
                return {}  # nothing of that name is here: a plan can be made, and whoever submits it says so
            if which < 0:
                return {"stranger": [text for _, text in answers]}
            place = answers[which][0]
            facts: dict[str, Any] = {"bin": place, "dialect": dialect}
            if dialect == "pbs":
                said = dict(_sections(host.run(["sh", "-c", _QUEUES, "sh", place], timeout=OBSERVE_S).out))
                facts |= queues(said.get("queues", ""), said.get("server", ""))
            return facts
        except HeliostatError:
            return {}

    def _job(self, request: LaunchRequest) -> Plan:
        from heliostat.remote.start_script import agent_script

        if "stranger" in request.facts:
            raise pbs_qstat.stranger(request.facts["stranger"])
        options, asked = request.options, _asked(request)
        request = _sized(request, asked)
        written = _walltime(asked) or batch.parse_time(options.time, "pbs.time")
        limit, grace = batch.times(request, written, check_fits(request, request.spec.time or written))
        limit = limit or check_fits(request, None, default=True)
        told = {"grace_s": grace, "time_limit_s": limit, "own_clock": False, "margin_s": batch.MARGIN_S}
        request = batch.with_config(
            request, {**told, "hasty": True, "kill_wait_s": KILL_S, "hosts": "PBS_NODEFILE"}
        )
        others = [
            f"{request.facts['bin']}/pbsdsh" if "bin" in request.facts else "pbsdsh",
            "-n",
            "{line}",
            "--",
        ]
        suffix, config = batch.job_config(request, others, "HELIOSTAT_RANK")
        log = f"pbs{suffix}.out"
        script = agent_script(
            request.spec.environment,
            request.agent,
            "node",
            directives=[f"#PBS {line}" for line in _directives(request, asked, suffix, limit, log)],
            comment=f"heliostat: {count(len(request.members), 'node')} of `{request.spec.cluster_name}`; this script is the first",
            first=[BEGAN],
            config=config,
            python=request.python,
            checked=not request.config.get("standalone"),
        )
        path = request.folder / f"script{suffix}.sh"
        qsub = f"{request.facts['bin']}/qsub" if "bin" in request.facts else "qsub"
        # a relative path for the log: PBS takes what is before a colon for a host, and the folder is there before the job
        there = ("sh", "-c", _IN_FOLDER, (request.folder / "logs").as_posix())
        submit = (
            ("qsub", path.as_posix()) if request.config.get("standalone") else (*there, qsub, path.as_posix())
        )
        names = tuple(member.name for member in request.members)
        return Plan(
            (File(path, script.render(), 0o700),), (Step(submit, names, {"grace_s": grace, "log": log}),)
        )

    # -- starting

    def _place(self, request: LaunchRequest) -> dict[str, Any]:
        return {"bin": request.facts.get("bin", ""), "dialect": request.facts.get("dialect", "pbs")}

    def find_orphans(self, mark: str | None, spec: ClusterSpec, host: Transport) -> list[Handle]:
        if mark is None:
            return self._strays(mark, {}, host)
        facts = self.survey(None, host)
        if "bin" not in facts:
            raise HeliostatError(
                "PBS does not list its jobs",
                cause="its commands do not answer on this machine",
                code=Code.PBS_NOT_INSTALLED,
            )
        return self._strays(mark, {"bin": facts["bin"], "dialect": facts.get("dialect", "pbs")}, host)

    def _marked(self, place: Mapping[str, Any], host: Transport) -> list[tuple[str, str]]:
        argv = ["sh", "-c", _MINE, "sh", place["bin"]]
        done = batch.retry(lambda: batch.ask(host, argv), PASSING)
        if done.code and not done.out.strip():
            raise batch.refused(done, "PBS does not list its jobs", Code.PBS_UNREACHABLE)
        found = []
        for head, text in _sections(done.out):
            for job, about in _jobs(text).items():
                mark = (about.get("Variable_List") or {}).get("HELIOSTAT_JOB")
                found += [(job, str(mark))] if mark and head else []
        return found

    def _submit(self, argv: Sequence[str], request: LaunchRequest, host: Transport) -> str:
        done = batch.retry(lambda: batch.ask(host, argv), PASSING)
        if done.code == 0 and done.out.strip():
            return done.out.strip().splitlines()[-1]
        raise pbs_qstat.stranger([]) if done.code == 127 else _explained(done, request)

    # -- looking

    def observe(self, handles: Sequence[Handle], host: Transport) -> dict[str, Observation]:
        ids = list(dict.fromkeys(h.native_id for h in handles))
        torque = any(h.detail.get("dialect") == "torque" for h in handles)
        place = next((h.detail["bin"] for h in handles if h.detail.get("bin")), "")
        qstat = f"{place}/qstat" if place else "qstat"
        silent, answers = "", list[tuple[str, str]]()
        try:
            done = host.run(["sh", "-c", _ASK_TORQUE if torque else _ASK, qstat, *ids], timeout=OBSERVE_S)
            answers, silent = _sections(done.out), done.err.strip()
        except HeliostatError as error:
            silent = error.cause or error.message
        seen: dict[str, Observation] = {}
        for head, text in answers:
            code, _, job = head.partition(" ")
            seen[job] = _answer(int(code), text, torque)
            silent = seen[job].reason if seen[job].state is N.UNKNOWN else silent
        rest = Observation(
            N.UNKNOWN, silent if silent.startswith("PBS") else f"PBS does not answer: {silent}"
        )
        return {job: seen.get(job, rest) for job in ids}

    def _end(self, handles: Sequence[Handle], host: Transport, how: str) -> None:
        """qsig and qdel go to every process of the job's first host, Ray's too. SIGURG is heeded by none but our agent."""
        words = {"ask": ["qsig", "-s", "URG"], "kill": ["qdel"], "force": ["qdel", "-W", "force"]}[how]
        place = next((h.detail["bin"] for h in handles if h.detail.get("bin")), "")
        program = f"{place}/{words[0]}" if place else words[0]
        argv = [program, *words[1:], *(h.native_id for h in handles)]
        batch.retry(lambda: batch.ask(host, argv), PASSING)

    def execute(self, node: str, handle: Handle, argv: Sequence[str], host: Transport) -> Completed:
        return batch.through_agent(node, str(handle.detail["folder"]), argv, host)


# -- what is asked for


def _asked(request: LaunchRequest) -> Said:
    options = request.options
    asked = pbs_qstat.said(options.select, options.place, options.extra)
    groups, name = request.spec.kinds, request.members[0].group
    if name and len(asked.chunks) > 1 and len(asked.chunks) != groups[name].nodes:
        raise UsageError(
            f"the group `{name}` has {count(groups[name].nodes, 'node')}, its select {len(asked.chunks)}",
            hint="one chunk for all of them, or one for each",
            code=Code.PBS_INVALID_SELECT,
        )
    place = asked.place or ("scatter:excl" if options.exclusive else "scatter")
    if len(request.members) > 1 and "scatter" not in place:
        raise UsageError(
            f"`place={place}` cannot be used",
            cause="there is one Ray node a host",
            hint="-l place=scatter:excl",
            code=Code.PBS_INVALID_SELECT,
        )
    return Said(asked.chunks, place, asked.walltime, asked.rest)


def _walltime(asked: Said) -> int | None:
    """In PBS's own words a plain number is seconds."""
    if asked.walltime is None:
        return None
    found = pbs_qstat.seconds(asked.walltime)
    if not found:
        raise UsageError(
            f"`-l walltime={asked.walltime}` cannot be used",
            hint="-l walltime=HH:MM:SS",
            code=Code.PBS_INVALID_OPTION,
        )
    return found


def _number(member: Member) -> int:
    """Which chunk of a select is this node's: head, w1, w2 … count from 0; those of a group or a join from 1."""
    digits = re.search(r"(\d+)$", member.name)
    if member.role == "head" or not digits:
        return 0
    return int(digits[1]) - (0 if re.fullmatch(r"w\d+", member.name) else 1)


def _chunk(member: Member, asked: Said, options: Options) -> str:
    if asked.chunks:
        return asked.chunks[min(_number(member), len(asked.chunks) - 1)]
    parts = [f"ncpus={max(1, member.cpus)}"] if member.cpus is not None else []
    parts += [f"mem={-(-member.memory // 2**20)}mb"] if member.memory else []
    parts += [f"{options.gpu}={member.gpus}"] if member.gpus else []
    return ":".join([*parts, *([options.chunk] if options.chunk else [])])


def _sized(request: LaunchRequest, asked: Said) -> LaunchRequest:
    """A node of a person's own select has its chunk's size, unless they say what of it Ray may use."""
    if not asked.chunks:
        return request
    members = []
    for member in request.members:
        chunk = _chunk(member, asked, request.options)
        given = {
            "cpus": pbs_qstat.number(chunk, "ncpus"),
            "gpus": pbs_qstat.number(chunk, request.options.gpu),
            "memory": pbs_qstat.memory(chunk),
        }
        more = {key: value for key, value in given.items() if getattr(member, key) is None}
        members.append(member.model_copy(update=more))
    return replace(request, members=members)


def _directives(
    request: LaunchRequest, asked: Said, suffix: str, limit: int | None, log: str
) -> Iterator[str]:
    from heliostat.common.shell import quote

    options, by_hand = request.options, bool(request.config.get("standalone"))
    chunks = [_chunk(member, asked, options) for member in request.members]
    yield quote(["-N", request.spec.cluster_name + suffix])
    if not by_hand:
        yield f"-v HELIOSTAT_JOB={batch.mark_of(request.config['mark'], suffix)}"
    if request.facts.get("dialect") == "torque":
        yield f"-l nodes={pbs_qstat.render([c.replace('ncpus=', 'ppn=') for c in chunks])}"
    else:
        yield quote(["-l", f"select={pbs_qstat.render(chunks)}"])
        yield quote(["-l", f"place={asked.place}"])
    if limit is not None:
        yield f"-l walltime={limit // 3600:02d}:{limit // 60 % 60:02d}:{limit % 60:02d}"
    yield "-j oe"
    if request.facts.get("dialect") != "torque":
        yield "-k oed"  # written where it belongs while it runs: nothing is spooled, nothing copied at the end
    if not by_hand:
        yield f"-o {log}"
    yield "-r y" if options.requeue else "-r n"  # PBS would run a script again by itself
    if not any(word.startswith("-W") and "umask=" in word for word in asked.rest):
        yield quote(["-W", f"umask={options.umask}"])
    for letter, key in (("-q", "queue"), ("-A", "account"), ("-P", "project")):
        if getattr(options, key) and not any(word.startswith(letter) for word in asked.rest):
            yield quote([letter, getattr(options, key)])
    for word in asked.rest:
        yield quote([word[:2], word[2:]] if len(word) > 2 else [word])


def queues(text: str, server: str) -> dict[str, Any]:
    """From `qstat -Q -f -F json` and `qstat -B -f -F json`."""
    found: dict[str, Any] = {}
    for name, about in _json(text).get("Queue", {}).items():
        most, usual = about.get("resources_max") or {}, about.get("resources_default") or {}
        found[name] = {
            "enabled": about.get("enabled") == "True",
            "route": about.get("queue_type") == "Route",
            "time_s": pbs_qstat.seconds(most.get("walltime")),
            "default_s": pbs_qstat.seconds(usual.get("walltime")),
            "nodes": most.get("nodect"),
        }
    servers: dict[str, Any] = _json(server).get("Server", {})
    names = [about.get("default_queue") for about in servers.values()]
    return {"queues": found, "queue": names[0] if names else None} if found else {}


def check_fits(request: LaunchRequest, limit: int | None, default: bool = False) -> int | None:
    """Refuses what the queue can never take, before anything is asked for. The queue's time limit, if any; `default`: what a
    job has there that names none."""
    known = request.facts.get("queues")
    said = [w[2:] for w in pbs_qstat.said(None, None, request.options.extra).rest if w.startswith("-q")]
    wanted = said[-1] if said else request.options.queue or request.facts.get("queue")
    if not known or wanted is None or "@" in wanted or wanted.startswith("R"):
        return None  # R123 is a reservation
    if wanted not in known:
        raise UsageError(
            f"there is no queue `{wanted}`",
            cause=f"queues here: {', '.join(known)}",
            code=Code.PBS_INVALID_QUEUE,
        )
    entry, others = known[wanted], [name for name, e in known.items() if e["enabled"]]
    if not entry["enabled"]:
        hint = f"queues that do: {', '.join(others)}"
        raise UsageError(f"the queue `{wanted}` takes no jobs now", hint=hint, code=Code.PBS_QUEUE_DISABLED)
    if entry["route"]:
        return None
    if isinstance(entry["nodes"], int) and len(request.members) > entry["nodes"]:
        raise UsageError(
            f"the queue `{wanted}` lets one job have {count(entry['nodes'], 'node')}, {len(request.members)} are asked for",
            hint=f"--nodes {entry['nodes']}",
            code=Code.PBS_NODE_COUNT,
        )
    most: int | None = entry["time_s"]
    if limit is not None and most is not None and limit > most:
        raise UsageError(
            f"the queue `{wanted}` lets a job run {format_duration(most)} at most",
            cause=f"{format_duration(limit)} are asked for",
            hint=f"--time {most // 60}m",
            code=Code.PBS_TIME_LIMIT,
        )
    return entry["default_s"] or most if default else most


# -- what is said


def _sections(text: str) -> list[tuple[str, str]]:
    """`=== HEAD` lines, each with what follows it."""
    parts = re.split(r"^=== (.*)$", text, flags=re.MULTILINE)[1:]
    return [(head.strip(), said.strip("\n")) for head, said in zip(parts[::2], parts[1::2], strict=True)]


def _json(text: str) -> dict[str, Any]:
    """The document in what PBS printed: an error may stand before or behind it."""
    try:
        value, _ = json.JSONDecoder(strict=False).raw_decode(text, text.index("{"))
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _jobs(text: str) -> dict[str, dict[str, Any]]:
    return dict(_json(text).get("Jobs") or {})  # where PBS knows none the key is absent


def _torque_jobs(text: str) -> dict[str, dict[str, Any]]:
    import xml.etree.ElementTree as Xml

    try:
        root = Xml.fromstring(text[text.index("<") :])
    except (ValueError, Xml.ParseError):
        return {}
    found = [{child.tag: child.text or "" for child in job} for job in root.iter("Job")]
    for job in found:
        if job.get("exit_status", "").lstrip("-").isdigit():
            job["Exit_status"] = int(job["exit_status"])  # type: ignore[assignment]
    return {job["Job_Id"]: job for job in found if "Job_Id" in job}


def _answer(code: int, text: str, torque: bool) -> Observation:
    """What qstat said of one job. A job that PBS has forgotten has ended: its own files tell how."""
    jobs = _torque_jobs(text) if torque else _jobs(text)
    if jobs:
        return observation(next(iter(jobs.values())))
    if code in (UNKNOWN_ID, FINISHED):
        return Observation(N.GONE, "PBS has forgotten the job")
    words = [line.strip() for line in text.splitlines() if re.match(r"[\w<]", line.strip())]
    last = words[-1] if words else f"qstat ended with code {code}"
    return Observation(N.UNKNOWN, f"PBS does not answer: {last}")


def _explained(done: Completed, request: LaunchRequest) -> HeliostatError:
    """qsub's refusal in words, with what would have worked."""
    code, means, hint = REFUSALS.get(done.code, (Code.PBS_REJECTED, "", ""))
    unknown = re.search(r"Unknown resource:? *(\S+)", done.err)
    if done.code == 170 and request.facts.get("queues"):
        hint = f"queues here: {', '.join(request.facts['queues'])}"
    elif unknown and unknown[1] == request.options.gpu:
        hint = f"the site calls its GPUs something else than `{unknown[1]}`: pbs.gpu in the file"
    elif unknown:
        hint = f"this site has no resource `{unknown[1]}`: qmgr -c 'list resource'"
    elif done.code == 2:
        code = Code.PBS_INVALID_OPTION
        hint = "heliostat run --help; man qsub"
    what = f"PBS did not take the job of `{request.spec.cluster_name}`"
    error = batch.refused(done, what, code, hint or "heliostat up --dry-run shows the script")
    error.cause = f"{error.cause} ({means})" if means and error.cause else error.cause or means
    return error


def checks(host: Transport) -> list[Check]:
    """For `doctor`."""
    qstat = QUESTIONS["qstat"]
    try:
        answers = _sections(host.run(["sh", "-c", _FIND], timeout=OBSERVE_S).out)
    except HeliostatError as error:
        return [qstat.answer(False, str(error))]
    which, dialect = pbs_qstat.kind([text for _, text in answers])
    if which < 0:
        who = pbs_qstat.stranger([text for _, text in answers])
        return [qstat.answer(False, f"{who.message}: {who.cause}", hint=who.hint)]
    place = answers[which][0]
    found = [qstat.answer(True, f"{answers[which][1].strip().splitlines()[0]} in {place}")]
    for other, text in answers:
        if pbs_qstat.kind([text])[0] < 0:
            found.append(
                QUESTIONS["PATH"].answer(False, f"commands of the same names in {other} are not PBS's")
            )
    if dialect == "torque":
        said = "Torque: its own language is spoken, and less is known of it"
        return [*found, QUESTIONS["dialect"].answer(False, said)]
    for program in PROGRAMS:
        done = host.run(["sh", "-c", '[ -x "$1/$2" ]', "sh", place, program], timeout=20)
        found.append(QUESTIONS[program].answer(not done.code, f"{place}/{program}"))
    return [*found, _server(place, host)]


def _server(place: str, host: Transport) -> Check:
    ask = QUESTIONS["server"]
    began = time.monotonic()
    try:
        done = host.run(["sh", "-c", _QUEUES, "sh", place], timeout=60)
    except HeliostatError as error:
        hint = "a slow server is waited for; a dead one is the site's"
        return ask.answer(False, str(error), severity="warn", hint=hint)
    said = dict(_sections(done.out))
    known = queues(said.get("queues", ""), said.get("server", "")).get("queues") or {}
    took = format_duration(time.monotonic() - began)
    if not known:
        return ask.answer(False, f"{done.err.strip()[:200] or 'no queues'} after {took}")
    lines = [name + ("" if entry["enabled"] else " (takes no jobs)") for name, entry in known.items()]
    return ask.answer(True, f"queues: {', '.join(lines)}"[:300])


BACKEND = Pbs()
