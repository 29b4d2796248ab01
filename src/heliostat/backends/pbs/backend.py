"""The PBS backend, for OpenPBS and PBS Professional: one job per cluster, more jobs that join it.

Torque's commands have the same names and other options (`nodes=…:ppn=…`, XML). They are used if `qstat --version` is Torque's.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
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
)
from heliostat.backends.batch import OBSERVE_S
from heliostat.backends.detection import ENVIRONMENT, IDLE, NODES, TIME, Detected, output_of
from heliostat.backends.pbs import queues
from heliostat.backends.pbs.checks import QUESTIONS, run_checks
from heliostat.backends.pbs.qstat import (
    REJECTIONS,
    QsubOptions,
    chunk_count,
    chunk_memory,
    not_pbs_error,
    parse_qsub_options,
    parse_walltime,
    render_select,
    to_observation,
)
from heliostat.backends.pbs.queues import check_fits, find_qstat, parse_json, split_sections
from heliostat.common.documents import JsonMapping, JsonObject
from heliostat.common.errors import Code, HeliostatError, UsageError
from heliostat.common.units import count
from heliostat.state.states import NodeState

if TYPE_CHECKING:
    from heliostat.config.members import Member
    from heliostat.config.spec import ClusterSpec
    from heliostat.remote.transport import Completed, Transport

N = NodeState
KILL_WAIT_S = 10  # from qdel's SIGTERM to its SIGKILL; PBS's default
UNKNOWN_ID, FINISHED = 153, 35  # exit codes of qstat: no such job; the job is only in the history
TRANSIENT = re.compile(
    r"connection refused|errno=15010|no route to host|timed out|end of file|too many requests|server (?:is )?shutting down",
    re.IGNORECASE,
)
# one qstat per job, because the JSON of some releases has only the first of several jobs
_QUERY_JOBS = """
for i; do
  text=$("$0" -f -F json "$i" 2>&1); c=$?
  [ $c = 35 ] && text=$("$0" -x -f -F json "$i" 2>&1)
  printf '%s\\n' "=== $c $i" "$text"
  case $c in 0|35|153) ;; *) break ;; esac
done
"""
_QUERY_JOBS_TORQUE = _QUERY_JOBS.replace('-f -F json "$i"', '-x "$i"', 1)
_QUERY_OWN_JOBS = """
b=${1:+$1/}
ids=$("${b}qselect" -u "$(id -un)") || exit
for i in $ids; do
  printf '%s\\n' "=== 0 $i" "$("${b}qstat" -f -F json "$i" 2>/dev/null)"
done
"""
_RUN_IN_DIRECTORY = 'cd -- "$0" && exec "$@"'
EXPORT_START_TIME = "export HELIOSTAT_BEGAN=$(date +%s)"  # PBS does not report when the walltime ends


@dataclass(frozen=True)
class Options:
    """The `pbs:` table of the file."""

    queue: str | None = field(default=None, metadata={"help": "queue"})
    account: str | None = field(default=None, metadata={"help": "account to charge (-A)"})
    project: str | None = field(default=None, metadata={"help": "project (-P)"})
    time: str | int | None = field(default=None, metadata={"help": "walltime; the same as the spec's `time`"})
    select: str | None = field(
        default=None,
        metadata={"help": "select statement, instead of nodes, CPUs, GPUs and memory; each chunk is a node"},
    )
    place: str | None = field(default=None, metadata={"help": "placement [scatter: one node per host]"})
    chunk: str | None = field(
        default=None, metadata={"help": "further resources of every chunk, e.g. gpu_model=a100"}
    )
    gpu: str = field(default="ngpus", metadata={"help": "name of the resource for GPUs"})
    via: str | None = field(default=None, metadata={"help": "user@login: run PBS's commands there, over ssh"})
    grace: str | int = field(
        default="60s", metadata={"help": "time from the warning to the job until the walltime"}
    )
    requeue: bool = field(default=False, metadata={"help": "let PBS rerun the job (-r y)"})
    exclusive: bool = field(default=False, metadata={"help": "allocate whole hosts"})
    umask: str = field(default="022", metadata={"help": "umask of the jobs; PBS's default is 077"})
    extra: tuple[str, ...] = field(default=(), metadata={"help": "other options of qsub, unchanged"})


class Pbs(batch.Batch):
    name: ClassVar[str] = "pbs"
    Options: ClassVar[type] = Options
    reserved_short_options: ClassVar[tuple[str, ...]] = ("-q",)
    dependency_options: ClassVar[tuple[str, ...]] = ("-W", "depend=after:HEAD")
    can_force: ClassVar[bool] = True
    detection_priority: ClassVar[int] = 3
    not_detected: ClassVar[str] = "`qstat` of PBS does not answer on this machine"
    programs: ClassVar[tuple[str, ...]] = ("qsub", "qstat", "qdel")
    force_command: ClassVar[str] = "qdel -W force"
    questions: ClassVar[Mapping[str, Question]] = QUESTIONS

    def detect(self, machine: Transport, home: Path, environ: Mapping[str, str]) -> Detected | None:
        version = output_of(machine, ["qstat", "--version"])  # Grid Engine has a `qstat`, too
        if "pbs_version" not in version.lower():
            return None
        return Detected(version, (NODES, TIME, *ENVIRONMENT, IDLE))

    def checks(self, spec: ClusterSpec | None, host: Transport) -> list[Check]:
        return run_checks(host)

    def nodes_of(self, table: JsonMapping) -> int | None:
        options = parse_qsub_options(table.get("select"), None, table.get("extra") or ())
        return len(options.chunks) or None

    def require(self, spec: ClusterSpec, host: Transport) -> None:
        """PBS's commands need not be on the PATH: /etc/pbs.conf has their directory."""
        if not find_qstat(host):
            super().require(spec, host)

    # -- planning

    def survey(self, options: Any, host: Transport) -> JsonObject:
        try:
            return queues.survey(host)
        except HeliostatError:
            return {}

    def _plan_job(self, request: LaunchRequest) -> Plan:
        from heliostat.remote.start_script import agent_script

        if "not_pbs" in request.facts:
            raise not_pbs_error(request.facts["not_pbs"])
        qsub_options = _resolve_options(request)
        request = _with_chunk_sizes(request, qsub_options)
        limit = _walltime_option(qsub_options) or batch.parse_time(request.options.time, "pbs.time")
        queue_limit = check_fits(request, request.spec.time or limit)
        limit, grace = batch.resolve_times(request, limit, queue_limit)
        limit = limit or check_fits(request, None, default=True)
        config: dict[str, object] = {
            "grace_s": grace,
            "time_limit_s": limit,
            "enforce_time_limit": False,
            "margin_s": batch.MARGIN_S,
        }
        config |= {"kill_follows_signal": True, "kill_wait_s": KILL_WAIT_S, "hosts_variable": "PBS_NODEFILE"}
        request = batch.with_config(request, config)
        others = [_program("pbsdsh", request.facts), "-n", "{line}", "--"]
        suffix, agent_config = batch.job_config(request, others, "HELIOSTAT_RANK")
        log = f"pbs{suffix}.out"
        script = agent_script(
            request.spec.environment,
            request.agent,
            "node",
            directives=[f"#PBS {line}" for line in _directives(request, qsub_options, suffix, limit, log)],
            comment=f"heliostat: {count(len(request.members), 'node')} of `{request.spec.cluster_name}`; this script is the first",
            first=[EXPORT_START_TIME],
            config=agent_config,
            python=request.python,
            checked=not request.config.get("standalone"),
        )
        path = request.folder / f"script{suffix}.sh"
        submit: tuple[str, ...] = ("qsub", path.as_posix())
        if not request.config.get("standalone"):
            # the log's path is relative to this directory: in an absolute path, PBS takes text before a colon for a host
            logs = (request.folder / "logs").as_posix()
            submit = ("sh", "-c", _RUN_IN_DIRECTORY, logs, _program("qsub", request.facts), path.as_posix())
        names = tuple(member.name for member in request.members)
        step = Step(submit, names, {"grace_s": grace, "log": log})
        return Plan((File(path, script.render(), 0o700),), (step,))

    # -- launch

    def _job_scope(self, request: LaunchRequest) -> JsonObject:
        return {"bin": request.facts.get("bin", ""), "dialect": request.facts.get("dialect", "pbs")}

    def find_orphans(self, cluster_id: str | None, spec: ClusterSpec, host: Transport) -> list[Handle]:
        if cluster_id is None:
            return []  # the record is in the shared home
        facts = self.survey(None, host)
        if "bin" not in facts:
            raise HeliostatError(
                "cannot list the jobs of PBS",
                cause="PBS's commands are missing on this host or do not answer",
                code=Code.PBS_NOT_INSTALLED,
            )
        scope = {"bin": facts["bin"], "dialect": facts.get("dialect", "pbs")}
        return self._find_orphans(cluster_id, scope, host)

    def _list_tagged_jobs(self, scope: JsonMapping, host: Transport) -> list[tuple[str, str]]:
        argv = ["sh", "-c", _QUERY_OWN_JOBS, "sh", scope["bin"]]
        done = batch.run_with_retries(argv, host, TRANSIENT)
        if done.code and not done.out.strip():
            raise batch.rejection_error(done, "cannot list the jobs of PBS", Code.PBS_UNREACHABLE)
        found = []
        for title, text in split_sections(done.out):
            for job_id, job in _parse_jobs(text).items():
                tag = (job.get("Variable_List") or {}).get("HELIOSTAT_JOB")
                found += [(job_id, str(tag))] if tag and title else []
        return found

    def _submit(self, argv: Sequence[str], request: LaunchRequest, host: Transport) -> str:
        done = batch.run_with_retries(argv, host, TRANSIENT)
        if done.code == 0 and done.out.strip():
            return done.out.strip().splitlines()[-1]
        raise not_pbs_error([]) if done.code == 127 else _rejection_error(done, request)

    # -- observe and cancel

    def observe(self, handles: Sequence[Handle], host: Transport) -> dict[str, Observation]:
        ids = list(dict.fromkeys(h.native_id for h in handles))
        torque = any(h.detail.get("dialect") == "torque" for h in handles)
        script = _QUERY_JOBS_TORQUE if torque else _QUERY_JOBS
        failure, answers = "", list[tuple[str, str]]()
        try:
            done = host.run(["sh", "-c", script, _program_of("qstat", handles), *ids], timeout=OBSERVE_S)
            answers, failure = split_sections(done.out), done.err.strip()
        except HeliostatError as error:
            failure = error.cause or error.message
        seen: dict[str, Observation] = {}
        for title, text in answers:
            code, _, job = title.partition(" ")
            seen[job] = _parse_answer(int(code), text, torque)
            failure = seen[job].reason if seen[job].state is N.UNKNOWN else failure
        reason = failure if failure.startswith("PBS") else f"PBS does not answer: {failure}"
        return {job: seen.get(job, Observation(N.UNKNOWN, reason)) for job in ids}

    def _stop_jobs(self, handles: Sequence[Handle], host: Transport, method: str) -> None:
        """qsig and qdel signal every process on the job's first host, Ray's too. Only our agent handles SIGURG."""
        commands = {"request": ["qsig", "-s", "URG"], "kill": ["qdel"], "force": ["qdel", "-W", "force"]}
        program, *options = commands[method]
        argv = [_program_of(program, handles), *options, *(h.native_id for h in handles)]
        batch.run_with_retries(argv, host, TRANSIENT)


def _program(name: str, scope: JsonMapping) -> str:
    """The path of a PBS command; its name alone if the directory is unknown."""
    return f"{scope['bin']}/{name}" if scope.get("bin") else name


def _program_of(name: str, handles: Sequence[Handle]) -> str:
    return _program(name, next((h.detail for h in handles if h.detail.get("bin")), {}))


# -- options


def _resolve_options(request: LaunchRequest) -> QsubOptions:
    """The qsub options of this job, with its placement. Raises UsageError if they contradict the spec."""
    options = request.options
    given = parse_qsub_options(options.select, options.place, options.extra)
    groups, name = request.spec.kinds, request.members[0].group
    if name and len(given.chunks) > 1 and len(given.chunks) != groups[name].nodes:
        raise UsageError(
            f"the group `{name}` has {count(groups[name].nodes, 'node')}, its select statement {len(given.chunks)}",
            hint="use one chunk for all nodes, or one chunk per node",
            code=Code.PBS_INVALID_SELECT,
        )
    place = given.place or ("scatter:excl" if options.exclusive else "scatter")
    if len(request.members) > 1 and "scatter" not in place:
        raise UsageError(
            f"`place={place}` cannot be used",
            cause="a host can run only one Ray node of a cluster",
            hint="-l place=scatter:excl",
            code=Code.PBS_INVALID_SELECT,
        )
    return replace(given, place=place)


def _walltime_option(options: QsubOptions) -> int | None:
    if options.walltime is None:
        return None
    found = parse_walltime(options.walltime)
    if not found:
        raise UsageError(
            f"`-l walltime={options.walltime}` cannot be used",
            hint="-l walltime=HH:MM:SS",
            code=Code.PBS_INVALID_OPTION,
        )
    return found


def _chunk_index(member: Member) -> int:
    """Which chunk of a select statement is this node's. head, w1, w2 … count from 0; names of groups and joins from 1."""
    digits = re.search(r"(\d+)$", member.name)
    if member.role == "head" or not digits:
        return 0
    return int(digits[1]) - (0 if re.fullmatch(r"w\d+", member.name) else 1)


def _chunk(member: Member, qsub_options: QsubOptions, options: Options) -> str:
    if qsub_options.chunks:
        return qsub_options.chunks[min(_chunk_index(member), len(qsub_options.chunks) - 1)]
    parts = [f"ncpus={max(1, member.cpus)}"] if member.cpus is not None else []
    parts += [f"mem={-(-member.memory // 2**20)}mb"] if member.memory else []
    parts += [f"{options.gpu}={member.gpus}"] if member.gpus else []
    return ":".join([*parts, *([options.chunk] if options.chunk else [])])


def _with_chunk_sizes(request: LaunchRequest, qsub_options: QsubOptions) -> LaunchRequest:
    """The request with Ray's resources taken from the user's select statement, where the spec does not set them."""
    if not qsub_options.chunks:
        return request
    members = []
    for member in request.members:
        chunk = _chunk(member, qsub_options, request.options)
        sizes = {
            "cpus": chunk_count(chunk, "ncpus"),
            "gpus": chunk_count(chunk, request.options.gpu),
            "memory": chunk_memory(chunk),
        }
        unset = {key: value for key, value in sizes.items() if getattr(member, key) is None}
        members.append(member.model_copy(update=unset))
    return replace(request, members=members)


def _directives(
    request: LaunchRequest, qsub_options: QsubOptions, suffix: str, limit: int | None, log: str
) -> Iterator[str]:
    from heliostat.common.shell import quote

    options, standalone = request.options, bool(request.config.get("standalone"))
    chunks = [_chunk(member, qsub_options, options) for member in request.members]
    yield quote(["-N", request.spec.cluster_name + suffix])
    if not standalone:
        yield f"-v HELIOSTAT_JOB={batch.job_tag(request.config['mark'], suffix)}"
    if request.facts.get("dialect") == "torque":
        yield f"-l nodes={render_select([c.replace('ncpus=', 'ppn=') for c in chunks])}"
    else:
        yield quote(["-l", f"select={render_select(chunks)}"])
        yield quote(["-l", f"place={qsub_options.place}"])
    if limit is not None:
        yield f"-l walltime={limit // 3600:02d}:{limit // 60 % 60:02d}:{limit % 60:02d}"
    yield "-j oe"
    if request.facts.get("dialect") != "torque":
        yield "-k oed"  # write the log directly instead of copying it from the spool after the job
    if not standalone:
        yield f"-o {log}"
    yield "-r y" if options.requeue else "-r n"  # PBS's default is to rerun a job
    if not any(option.startswith("-W") and "umask=" in option for option in qsub_options.others):
        yield quote(["-W", f"umask={options.umask}"])
    for letter, key in (("-q", "queue"), ("-A", "account"), ("-P", "project")):
        if getattr(options, key) and not any(option.startswith(letter) for option in qsub_options.others):
            yield quote([letter, getattr(options, key)])
    for option in qsub_options.others:
        yield quote([option[:2], option[2:]] if len(option) > 2 else [option])


# -- output of PBS


def _parse_jobs(text: str) -> dict[str, JsonObject]:
    return dict(parse_json(text).get("Jobs") or {})  # without jobs the key is absent


def _parse_torque_jobs(text: str) -> dict[str, JsonObject]:
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


def _parse_answer(code: int, text: str, torque: bool) -> Observation:
    """The observation from qstat's output for one job. A job that PBS does not know has ended."""
    jobs = _parse_torque_jobs(text) if torque else _parse_jobs(text)
    if jobs:
        return to_observation(next(iter(jobs.values())))
    if code in (UNKNOWN_ID, FINISHED):
        return Observation(N.GONE, "PBS no longer lists the job")
    lines = [line.strip() for line in text.splitlines() if re.match(r"[\w<]", line.strip())]
    last = lines[-1] if lines else f"qstat ended with code {code}"
    return Observation(N.UNKNOWN, f"PBS does not answer: {last}")


def _rejection_error(done: Completed, request: LaunchRequest) -> HeliostatError:
    """The error for a job that qsub rejected, with a hint to valid values."""
    code, meaning, hint = REJECTIONS.get(done.code, (Code.PBS_REJECTED, "", ""))
    unknown = re.search(r"Unknown resource:? *(\S+)", done.err)
    if done.code == 170 and request.facts.get("queues"):
        hint = f"available queues: {', '.join(request.facts['queues'])}"
    elif unknown and unknown[1] == request.options.gpu:
        hint = f"the resource for GPUs is not `{unknown[1]}` here: set pbs.gpu in the file"
    elif unknown:
        hint = f"there is no resource `{unknown[1]}` here: qmgr -c 'list resource'"
    elif done.code == 2:
        code = Code.PBS_INVALID_OPTION
        hint = "heliostat run --help; man qsub"
    message = f"PBS rejected the job of `{request.spec.cluster_name}`"
    error = batch.rejection_error(done, message, code, hint or "heliostat up --dry-run prints the script")
    error.cause = f"{error.cause} ({meaning})" if meaning and error.cause else error.cause or meaning
    return error


BACKEND = Pbs()
