"""Example of a backend: Grid Engine (Son of Grid Engine, Open Grid Scheduler, Altair Grid Engine).

One job per cluster, in a parallel environment whose allocation rule is a number: the slots per host. The job's script is the
agent of the first host; it starts the other agents with `qrsh -inherit`.
"""

from __future__ import annotations

import json
import re
import secrets
import xml.etree.ElementTree as Xml
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
from heliostat.common.errors import HeliostatError, UsageError
from heliostat.common.units import count
from heliostat.state.states import NodeState

if TYPE_CHECKING:
    from heliostat.config.spec import ClusterSpec
    from heliostat.remote.transport import Transport

N = NodeState
TRANSIENT = re.compile(
    r"unable to (?:send message to|contact) qmaster|got timeout|can't get ack", re.IGNORECASE
)
RESERVED_OPTIONS = {
    "-t": "a cluster is one job, not an array",
    "-o": "heliostat logs NAME shows the output",
    "-N": "--name NAME",
    "-pe": "gridengine.pe and gridengine.slots in the file",
    "-sync": "heliostat run waits for the job",
}
# the first column of Grid Engine's host list, which has one line per host
HOSTS = (
    "export HELIOSTAT_BEGAN=$(date +%s) HELIOSTAT_HOSTS=$TMPDIR/heliostat-hosts",
    """awk '{print $1}' "$PE_HOSTFILE" >"$HELIOSTAT_HOSTS" || exit 1""",
)
# LINE COMMAND…: run the command on the host in that line, counted from 0
RUN_ON_HOST = (
    'host=$(sed -n "$(($1 + 1))p" "$HELIOSTAT_HOSTS"); shift; exec qrsh -inherit -nostdin "$host" "$@"'
)
QUERY_OWN_JOBS = 'qstat -xml -u "$(id -un)"'
QUERY_TAGS = """
for i in $(qstat -u "$(id -un)" | awk 'NR > 2 {print $1}' | sort -u); do echo "=== $i"; qstat -j "$i" | grep '^context:'; done
"""
# Grid Engine signals all processes of a job or none, so the stop request is a file in a directory that the agent watches
WRITE_REQUEST = 'mkdir -p -- "$1/requests" && cat >"$1/requests/$2.new" && mv -- "$1/requests/$2.new" "$1/requests/$2.json"'


@dataclass(frozen=True)
class Options:
    """The `gridengine:` table of the file."""

    pe: str = field(default="ray", metadata={"help": "parallel environment; its allocation rule is a number"})
    slots: int = field(
        default=1, metadata={"help": "that number: slots per host, and the CPUs of a Ray node"}
    )
    queue: str | None = field(default=None, metadata={"help": "queue"})
    project: str | None = field(default=None, metadata={"help": "project (-P)"})
    time: str | int | None = field(default=None, metadata={"help": "run time; the same as the spec's `time`"})
    grace: str | int = field(
        default="60s", metadata={"help": "time from the warning to the job until the limit"}
    )
    extra: tuple[str, ...] = field(default=(), metadata={"help": "other options of qsub, unchanged"})


class GridEngine(batch.Batch):
    name: ClassVar[str] = "gridengine"
    Options: ClassVar[type] = Options
    reserved_short_options: ClassVar[tuple[str, ...]] = ("-q",)
    can_force: ClassVar[bool] = True
    programs: ClassVar[tuple[str, ...]] = ("qsub", "qstat", "qdel")
    force_command: ClassVar[str] = "qdel -f"
    questions: ClassVar[Mapping[str, Question]] = by_name(
        Question(
            "qconf",
            "Grid Engine's commands are installed and answer",
            "run heliostat where Grid Engine's commands are installed",
        ),
    )

    def checks(self, spec: ClusterSpec | None, host: Transport) -> list[Check]:
        try:
            done = host.run(["qconf", "-spl"], timeout=batch.OBSERVE_S)
        except HeliostatError as error:
            return [self.questions["qconf"].answer(False, str(error))]
        if done.code:
            return [self.questions["qconf"].answer(False, done.err.strip()[:200], hint="qconf -spl")]
        return [self.questions["qconf"].answer(True, f"parallel environments: {', '.join(done.out.split())}")]

    # -- planning

    def plan(self, request: LaunchRequest) -> Plan:
        if request.spec.kinds:
            cause = "Grid Engine can hold a job until another has ended, not until it has started"
            raise UsageError("`groups` cannot be used on `gridengine`", cause=cause)
        return super().plan(request)

    def _plan_job(self, request: LaunchRequest) -> Plan:
        from heliostat.remote.start_script import agent_script

        limit = batch.parse_time(request.options.time, "gridengine.time")
        limit, grace = batch.resolve_times(request, limit, None)
        sized = [
            m.model_copy(update={"cpus": request.options.slots}) if m.cpus is None else m
            for m in request.members
        ]
        more = {
            "grace_s": grace,
            "time_limit_s": limit,
            "enforce_time_limit": False,
            "margin_s": batch.MARGIN_S,
        }
        request = replace(
            batch.with_config(request, {**more, "hosts_variable": "HELIOSTAT_HOSTS"}), members=sized
        )
        suffix, config = batch.job_config(
            request, ["sh", "-c", RUN_ON_HOST, "sh", "{line}"], "HELIOSTAT_RANK"
        )
        script = agent_script(
            request.spec.environment,
            request.agent,
            "node",
            directives=[f"#$ {line}" for line in _directives(request, suffix, limit)],
            comment=f"heliostat: {count(len(sized), 'node')} of `{request.spec.cluster_name}`; this script is the first",
            first=HOSTS,
            config=config,
            python=request.python,
        )
        path = request.folder / f"script{suffix}.sh"
        names = tuple(member.name for member in sized)
        submit = Step(("qsub", "-terse", path.as_posix()), names, {"grace_s": grace})
        return Plan((File(path, script.render(), 0o700),), (submit,))

    # -- launch

    def _list_tagged_jobs(self, scope: Mapping[str, Any], host: Transport) -> list[tuple[str, str]]:
        done = batch.run_with_retries(["sh", "-c", QUERY_TAGS], host, TRANSIENT)
        found = re.findall(r"^=== (\d+)\ncontext:.*?HELIOSTAT=([^,\s]+)", done.out, re.MULTILINE)
        return [(job, tag) for job, tag in found]

    def _submit(self, argv: Sequence[str], request: LaunchRequest, host: Transport) -> str:
        done = batch.run_with_retries(argv, host, TRANSIENT)
        if done.code == 0 and done.out.strip():
            return done.out.split()[-1]
        message = f"Grid Engine rejected the job of `{request.spec.cluster_name}`"
        hint = "heliostat up --dry-run prints the script; heliostat doctor"
        raise batch.rejection_error(done, message, "gridengine.rejected", hint)

    # -- observe and cancel

    def observe(self, handles: Sequence[Handle], host: Transport) -> dict[str, Observation]:
        ids = dict.fromkeys(handle.native_id for handle in handles)
        try:
            done = host.run(["sh", "-c", QUERY_OWN_JOBS], timeout=batch.OBSERVE_S)
            failure = done.err.strip() or done.describe() if done.code else ""
            states = {} if failure else parse_jobs(done.out)
        except (HeliostatError, Xml.ParseError) as error:
            failure = str(error)
        if failure:
            return dict.fromkeys(ids, Observation(N.UNKNOWN, f"Grid Engine does not answer: {failure[:200]}"))
        gone = Observation(N.GONE, "Grid Engine no longer lists the job")
        return {job: to_observation(states[job]) if job in states else gone for job in ids}

    def _stop_jobs(self, handles: Sequence[Handle], host: Transport, method: str) -> None:
        if method == "request":
            for handle in handles:
                self._request_stop(handle, host)
            return
        argv = ["qdel", *(["-f"] if method == "force" else []), *(handle.native_id for handle in handles)]
        batch.run_with_retries(argv, host, TRANSIENT)

    def _request_stop(self, handle: Handle, host: Transport) -> None:
        """The agent sends itself the signal. An orphan has no nodes on record, so only `qdel` stops it."""
        for first in handle.nodes[:1]:
            name = f"stop-{secrets.token_hex(8)}"
            request = {"do": "exec", "node": first, "argv": ["sh", "-c", "kill -URG $PPID"], "answer": name}
            argv = ["sh", "-c", WRITE_REQUEST, "sh", str(handle.detail["folder"]), name]
            host.run(argv, input=json.dumps(request).encode(), timeout=batch.OBSERVE_S)


def _directives(request: LaunchRequest, suffix: str, limit: int | None) -> Iterator[str]:
    from heliostat.common.shell import quote

    options, standalone = request.options, bool(request.config.get("standalone"))
    yield f"-N ray-{request.spec.cluster_name}{suffix}"  # a job name must begin with a letter
    if not standalone:
        yield f"-ac HELIOSTAT={batch.job_tag(request.config['mark'], suffix)}"
        yield quote(["-o", (request.folder / "logs" / f"gridengine{suffix}.out").as_posix()])
    yield "-j y"
    yield "-r n"
    yield "-S /bin/bash"
    yield f"-pe {options.pe} {options.slots * len(request.members)}"
    if limit is not None:
        yield f"-l h_rt={limit}"
    for letter, key in (("-q", "queue"), ("-P", "project")):
        if getattr(options, key):
            yield quote([letter, getattr(options, key)])
    for option in options.extra:
        if option in RESERVED_OPTIONS:
            raise UsageError(f"`{option}` is set by Heliostat", hint=RESERVED_OPTIONS[option])
    if options.extra:
        yield quote(options.extra)


def parse_jobs(text: str) -> dict[str, str]:
    """{job id: state letters} from `qstat -xml`."""
    rows = Xml.fromstring(text).iter("job_list")
    return {row.findtext("JB_job_number", ""): row.findtext("state", "") for row in rows}


def to_observation(letters: str) -> Observation:
    """The observation for Grid Engine's state letters: Eqw, hqw, qw, t, r, Rr, s, dr …"""
    if "d" in letters:
        return Observation(N.STOPPING, "it is being deleted", letters)
    if "E" in letters:
        return Observation(N.FAILED, "it can never run; qstat -j shows the reason", letters)
    if "q" in letters or "w" in letters:
        return Observation(N.QUEUED, "it is on hold" if "h" in letters else "it waits in the queue", letters)
    if set(letters) & set("rtsST"):
        return Observation(N.ALLOCATED, "", letters)
    return Observation(N.UNKNOWN, f"unknown Grid Engine job state `{letters}`", letters)


BACKEND = GridEngine()
