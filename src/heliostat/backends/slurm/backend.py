"""The Slurm backend: one job per cluster, more jobs that join it. Supports Slurm 20.11 and later, also without slurmdbd.

It parses only machine-readable output: explicit formats, `--parsable`.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
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
from heliostat.backends.batch import DAY_S, OBSERVE_S
from heliostat.backends.detection import (
    ENVIRONMENT,
    IDLE,
    NODES,
    TIME,
    Detected,
    output_of,
    spec_line,
    yaml_string,
)
from heliostat.backends.slurm.checks import QUESTIONS, run_checks
from heliostat.backends.slurm.options import (
    FLAGS,
    FREQUENT_OPTIONS,
    RESERVED_OPTIONS,
    Options,
    clusters_option,
    partition_option,
)
from heliostat.backends.slurm.partitions import check_fits, parse_partitions
from heliostat.backends.slurm.states import (
    HINTS,
    LONG_OPTIONS,
    QUEUE_REASONS,
    rejection_code,
    to_observation,
)
from heliostat.common.documents import JsonMapping, JsonObject
from heliostat.common.errors import Code, HeliostatError
from heliostat.common.shell import wrap_in_shell
from heliostat.common.units import count
from heliostat.state.states import NodeState

if TYPE_CHECKING:
    from heliostat.config.spec import ClusterSpec
    from heliostat.remote.transport import Completed, Transport

N = NodeState

AFTER_HEAD = "--dependency=after:HEAD"  # a group's nodes cannot join before the head's job starts
# a step gets all resources of its nodes, but not GPUs of `--gpus=N`: it requests those that are not on the first node
SRUN = 'exec srun ${SLURM_GPUS:+--gpus=$((${SLURM_GPUS##*:} - ${SLURM_GPUS_ON_NODE:-0}))} "$@"'
TRANSIENT = re.compile(
    r"socket timed out|unable to contact slurm controller|temporarily unable|resource temporarily|connection refused"
    r"|zero bytes were transmitted|try again",
    re.IGNORECASE,
)
UNKNOWN_JOB = re.compile(r"invalid job id", re.IGNORECASE)


class Slurm(batch.Batch):
    name: ClassVar[str] = "slurm"
    Options: ClassVar[type] = Options
    long_options: ClassVar[frozenset[str]] = LONG_OPTIONS
    # no heterogeneous job, because that would start only as a whole
    dependency_options: ClassVar[tuple[str, ...]] = (AFTER_HEAD,)
    can_force: ClassVar[bool] = False
    detection_priority: ClassVar[int] = 4
    not_detected: ClassVar[str] = "`sbatch` does not answer on this machine"
    programs: ClassVar[tuple[str, ...]] = ("sbatch", "squeue", "scancel")
    force_command: ClassVar[str] = "scancel"
    questions: ClassVar[Mapping[str, Question]] = QUESTIONS

    def detect(self, machine: Transport, home: Path, environ: Mapping[str, str]) -> Detected | None:
        version = output_of(machine, ["sbatch", "--version"])
        if not version:
            return None
        listed = output_of(machine, ["sinfo", "--noheader", "--format=%P"]).split()
        partitions = list(dict.fromkeys(name.rstrip("*") for name in listed))
        default = next((name.rstrip("*") for name in listed if name.endswith("*")), None)
        lines = [NODES]
        if default:
            others = ", ".join(name for name in partitions if name != default)
            comment = "Slurm's default" + (f"; others here: {others}" if others else "")
            lines += ["slurm:", spec_line(f"  partition: {yaml_string(default)}", comment)]
        return Detected(version, (*lines, TIME, *ENVIRONMENT, IDLE))

    def checks(self, spec: ClusterSpec | None, host: Transport) -> list[Check]:
        return run_checks(host)

    # -- planning

    def survey(self, options: Any, host: Transport) -> JsonObject:
        """{"partitions": see `parse_partitions`, "kill_wait_s", "partition": the default from the environment}"""
        argv = [
            "sinfo",
            "--noheader",
            "--format=%P|%a|%l|%D|%c|%m|%G|%s",
            *_cluster_option(clusters_option(options)),
        ]
        facts: JsonObject = {}
        try:
            done = host.run(argv, timeout=20)
            if done.code == 0:
                facts["partitions"] = parse_partitions(done.out)
            config = host.run(["scontrol", "show", "config"], timeout=20).out
        except HeliostatError:
            return facts
        kill_wait = re.search(r"^KillWait\s*=\s*(\d+)", config, re.MULTILINE)
        if kill_wait:
            facts["kill_wait_s"] = int(kill_wait[1])
        if os.environ.get("SBATCH_PARTITION") and not options.via:
            facts["partition"] = os.environ["SBATCH_PARTITION"]  # sbatch's default
        return facts

    def _plan_job(self, request: LaunchRequest) -> Plan:
        from heliostat.remote.start_script import agent_script

        spec, options = request.spec, request.options
        limit = batch.parse_time(options.time, "slurm.time")
        limit, grace = batch.resolve_times(request, limit, check_fits(request, spec.time or limit))
        more: dict[str, object] = {"grace_s": grace, "time_limit_s": limit, "enforce_time_limit": False}
        if "kill_wait_s" in request.facts:
            more["kill_wait_s"] = request.facts["kill_wait_s"]
        request = batch.with_config(request, {**more, **self._broadcast_config(request)})
        agent = agent_script(spec.environment, request.agent, "node", python=request.python).command
        suffix, config = batch.job_config(request, self._step_argv(request, agent), "SLURM_PROCID")
        script = agent_script(
            spec.environment,
            request.agent,
            "node",
            directives=[f"#SBATCH {line}" for line in self._directives(request, suffix, limit, grace)],
            comment=f"heliostat: {count(len(request.members), 'node')} of `{spec.cluster_name}`; this script is the first",
            config=config,
            python=request.python,
            checked=not request.config.get("standalone"),
        )
        path = request.folder / f"script{suffix}.sh"
        submit = ("sbatch", "--parsable", *_cluster_option(clusters_option(options)), path.as_posix())
        names = tuple(member.name for member in request.members)
        return Plan((File(path, script.render(), 0o700),), (Step(submit, names, {"grace_s": grace}),))

    def _step_argv(self, request: LaunchRequest, agent: Sequence[str]) -> list[str]:
        """Starts the agents of all nodes but the first in parallel, with options that 20.11 and 25 both accept."""
        others = len(request.members) - 1
        return [
            "bash", "-c", SRUN, "srun", "--overlap", "--mpi=none", "--relative=1", f"--nodes={others}", f"--ntasks={others}", "--ntasks-per-node=1",
            "--cpu-bind=none", "--kill-on-bad-exit=0", "--no-kill", "--wait=0", "--input=all", "--export=ALL", *agent,
        ]  # fmt: skip

    def _broadcast_config(self, request: LaunchRequest) -> dict[str, object]:
        """The commands that copy a file to all nodes of the job and delete it there; sbcast reads the file only once."""
        count = len(request.members)
        if not request.config.get("stage") or count == 1:
            return {}
        on_all_nodes = [
            "srun", "--overlap", "--mpi=none", f"--nodes={count}", f"--ntasks={count}", "--ntasks-per-node=1",
        ]  # fmt: skip
        return {"broadcast": {"copy": ["sbcast"], "remove": [*on_all_nodes, "rm", "-f"]}}

    def _directives(
        self, request: LaunchRequest, suffix: str, limit: int | None, grace: int
    ) -> Iterator[str]:
        from heliostat.common.shell import directive

        options, size = request.options, len(request.members)
        name = request.spec.cluster_name + suffix
        yield directive(f"--job-name={name}")
        yield directive(f"--comment={batch.job_tag(request.config['mark'], suffix)}")
        yield f"--nodes={size}"
        yield "--ntasks-per-node=1"
        logs = (request.folder / "logs").as_posix().replace("%", "%%")  # % begins a pattern
        output = f"{name}-%j.out" if request.config.get("standalone") else f"{logs}/slurm{suffix}-%j.out"
        yield directive(f"--output={output}")
        yield "--open-mode=append"
        if limit is not None:
            yield f"--time={_minutes(limit)}"
        yield f"--signal=B:USR1@{grace + batch.MARGIN_S}"
        yield "--requeue" if options.requeue else "--no-requeue"
        if size > 1:
            yield "--no-kill"  # Ray continues when a worker's host fails
        members = request.members
        cpus = {m.cpus for m in members if m.cpus is not None and m.cpus > 0}
        if cpus:
            yield f"--cpus-per-task={max(cpus)}"
        gpus = {m.gpus for m in members if m.gpus}
        if gpus and not options.gres:
            yield f"--gpus-per-node={max(gpus)}"
        memory = {m.memory for m in members if m.memory}
        if memory:
            yield f"--mem={-(-max(memory) // 2**20)}M"
        for key in ("partition", "account", "qos", "nodelist", "exclude", "constraint", "gres"):
            value = getattr(options, key)
            if value:
                yield directive(f"--{key}={value}")
        if options.exclusive:
            yield "--exclusive"
        for option in batch.parse_options(options.extra, RESERVED_OPTIONS, FLAGS):
            yield directive(option)

    # -- launch

    def _job_scope(self, request: LaunchRequest) -> JsonObject:
        return {"clusters": clusters_option(request.options)}

    def find_orphans(self, cluster_id: str | None, spec: ClusterSpec, host: Transport) -> list[Handle]:
        options = Options(**spec.backend_tables.get(self.name, {}))
        return self._find_orphans(cluster_id, {"clusters": clusters_option(options)}, host)

    def _list_tagged_jobs(self, scope: JsonMapping, host: Transport) -> list[tuple[str, str]]:
        argv = ["squeue", "--me", "--noheader", "--format=%i|%k", *_cluster_option(scope["clusters"])]
        done = batch.run_with_retries(argv, host, TRANSIENT)
        if done.code:
            raise batch.rejection_error(done, "cannot list the jobs of Slurm", Code.SLURM_UNREACHABLE)
        lines = [line.strip().partition("|") for line in done.out.splitlines()]
        return [(job, comment) for job, _, comment in lines]

    def _submit(self, argv: Sequence[str], request: LaunchRequest, host: Transport) -> str:
        done = batch.run_with_retries(argv, host, TRANSIENT)
        if done.code == 0:
            return done.out.strip().splitlines()[-1].partition(";")[0]
        raise _rejection_error(done, request, host)

    # -- observe and cancel

    def observe(self, handles: Sequence[Handle], host: Transport) -> dict[str, Observation]:
        try:
            done = host.run(_squeue(handles, "--format=%i|%T|%r|%S|%P"), timeout=OBSERVE_S)
            failure = (
                "" if not done.code or UNKNOWN_JOB.search(done.err) else done.err.strip() or done.describe()
            )
        except HeliostatError as error:
            failure = error.cause or error.message
        if failure:
            unknown = Observation(N.UNKNOWN, f"Slurm does not answer: {failure.splitlines()[-1]}")
            return {h.native_id: unknown for h in handles}
        seen = {h.native_id: Observation(N.GONE, "Slurm no longer lists the job") for h in handles}
        rows = [(line.strip().split("|", 4) + [""] * 5)[:5] for line in done.out.splitlines()]
        known = [row for row in rows if row[0] in seen]
        positions = self._queue_positions(handles, [row for row in known if row[2] in QUEUE_REASONS], host)
        for job, state, reason, start, _ in known:
            seen[job] = to_observation(state, reason, start, positions.get(job, ""))
        return seen

    def _queue_positions(
        self, handles: Sequence[Handle], rows: Sequence[Sequence[str]], host: Transport
    ) -> dict[str, str]:
        """A sentence with the position of each of these jobs in its queue, if Slurm answers."""
        found: dict[str, str] = {}
        for partition in sorted({row[4] for row in rows}):
            argv = ["squeue", "--noheader", "--states=PENDING", f"--partition={partition}", "--sort=-p,i"]
            try:
                done = host.run(
                    [*argv, "--format=%i", *_cluster_option(_clusters_of(handles))], timeout=OBSERVE_S
                )
            except HeliostatError:
                continue
            queue = [line.strip() for line in done.out.splitlines()]
            for row in rows:
                if row[4] == partition and row[0] in queue:
                    found[row[0]] = (
                        f"position {queue.index(row[0]) + 1} of {len(queue)} in the queue of `{partition}`"
                    )
        return found

    def _stop_jobs(self, handles: Sequence[Handle], host: Transport, method: str) -> None:
        options = ["--batch", "--signal=TERM"] if method == "request" else []
        argv = ["scancel", *_cluster_option(_clusters_of(handles)), *options, *(h.native_id for h in handles)]
        batch.run_with_retries(argv, host, TRANSIENT)

    def _controller_start(self, handles: Sequence[Handle], host: Transport) -> str | None:
        try:
            done = host.run(
                ["scontrol", *_cluster_option(_clusters_of(handles)), "show", "config"], timeout=OBSERVE_S
            )
        except HeliostatError:
            return None
        if done.code and TRANSIENT.search(done.err + done.out):
            return None
        return ",".join(re.findall(r"^BOOT_TIME\s*=\s*(\S+)", done.out, re.MULTILINE))

    def execute(self, node: str, handle: Handle, argv: Sequence[str], host: Transport) -> Completed:
        """Runs a step of the node's job on the node."""
        return host.run([*_step(node, handle), *wrap_in_shell(argv)], timeout=DAY_S)

    def attached(
        self, node: str, handle: Handle, argv: Sequence[str], host: Transport, *, terminal: bool
    ) -> list[str]:
        step = [*_step(node, handle), *(["--pty"] if terminal else []), "--quiet", *wrap_in_shell(argv)]
        return host.attached(step, terminal=terminal)


def _step(node: str, handle: Handle) -> list[str]:
    """The srun command of a step beside the node's Ray."""
    index = handle.nodes.index(node)
    return ["srun", f"--jobid={handle.native_id}", *_cluster_option(_clusters_of([handle])), "--overlap", "--mpi=none", f"--relative={index}",
            "--nodes=1", "--ntasks=1", "--cpu-bind=none"]  # fmt: skip


def _clusters_of(handles: Sequence[Handle]) -> str | None:
    """The names of the Slurm clusters of these jobs, with commas; None: the default cluster."""
    return ",".join(sorted({str(h.detail["clusters"]) for h in handles if h.detail.get("clusters")})) or None


def _cluster_option(clusters: str | None) -> list[str]:
    return [f"--clusters={clusters}"] if clusters else []


def _minutes(seconds: int) -> str:
    """Slurm's time limits are whole minutes: rounded up."""
    return str(-(-seconds // 60))


def _squeue(handles: Sequence[Handle], *more: str) -> list[str]:
    jobs = ",".join(dict.fromkeys(h.native_id for h in handles))
    return [
        "squeue",
        "--noheader",
        "--states=all",
        *_cluster_option(_clusters_of(handles)),
        f"--jobs={jobs}",
        *more,
    ]


def _rejection_error(done: Completed, request: LaunchRequest, host: Transport) -> HeliostatError:
    """The error for a job that sbatch rejected, with a hint to valid values."""
    code = rejection_code(done.err)
    message = f"Slurm rejected the job of `{request.spec.cluster_name}`"
    return batch.rejection_error(done, message, code, _hint(code, request, host))


def _hint(code: Code, request: LaunchRequest, host: Transport) -> str:
    sacctmgr = ["sacctmgr", "--noheader", "--parsable2", "show"]
    if code is Code.SLURM_INVALID_PARTITION:
        return f"available partitions: {_list_names(host, ['sinfo', '--noheader', '--format=%R'])}"
    if code is Code.SLURM_INVALID_ACCOUNT:
        argv = [*sacctmgr, "associations", "format=account", "where", f"user={_user_name(host)}"]
        return f"your accounts: {_list_names(host, argv)}"
    if code is Code.SLURM_TIME_LIMIT:
        return f"limits: {_list_names(host, ['sinfo', '--noheader', '--format=%R %l'])}"
    if code in (Code.SLURM_NODE_CONFIGURATION, Code.SLURM_NODE_COUNT):
        wanted, known = partition_option(request.options), request.facts.get("partitions") or {}
        entries = {n: e for n, e in known.items() if n == wanted or (wanted is None and e["default"])}
        kinds = "; ".join(f"`{n}` has {', '.join(e['kinds'])}" for n, e in entries.items())
        return kinds or "sinfo -o '%P %D %c %m %G'"
    if code is Code.SLURM_INVALID_OPTION:
        given = next(iter(request.options.extra), "").partition("=")[0]
        near = difflib.get_close_matches(given, [*FREQUENT_OPTIONS, *RESERVED_OPTIONS, *FLAGS], n=1)
        return f"did you mean `{near[0]}`?" if near else "heliostat run --help; sbatch --help"
    if code is Code.SLURM_INVALID_QOS:
        return f"available QOS: {_list_names(host, [*sacctmgr, 'qos', 'format=name'])}"
    return HINTS.get(code, "heliostat up --dry-run prints the script")


def _user_name(host: Transport) -> str:
    return host.run(["id", "-un"], timeout=10).out.strip()


def _list_names(host: Transport, argv: Sequence[str]) -> str:
    try:
        done = host.run(list(argv), timeout=20)
    except HeliostatError:
        return "unknown"
    names = dict.fromkeys(line.strip() for line in done.out.splitlines() if line.strip())
    return "; ".join(names)[:300] or "none visible to you"


BACKEND = Slurm()
