"""Grid Engine (Son of Grid Engine, Open Grid Scheduler, Altair's): a sketch of a backend, whole but small.

One job a cluster, through a parallel environment whose allocation rule is a number: so many slots on each host. The job's
script is the first host's agent; it starts the others by `qrsh -inherit`.
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
    require_programs,
)
from heliostat.common.errors import HeliostatError, UsageError
from heliostat.common.units import count
from heliostat.state.states import NodeState

if TYPE_CHECKING:
    from heliostat.config.spec import ClusterSpec
    from heliostat.remote.transport import Completed, Transport

N = NodeState
PASSING = re.compile(
    r"unable to (?:send message to|contact) qmaster|got timeout|can't get ack", re.IGNORECASE
)
OWNED = {
    "-t": "a cluster is one job, not an array",
    "-o": "heliostat logs NAME shows the output",
    "-N": "--name NAME",
    "-pe": "gridengine.pe and gridengine.slots in the file",
    "-sync": "heliostat run waits",
}
# Ray's nodes are hosts: the first word of each line of Grid Engine's own list, which names every host once
HOSTS = (
    "export HELIOSTAT_BEGAN=$(date +%s) HELIOSTAT_HOSTS=$TMPDIR/heliostat-hosts",
    """awk '{print $1}' "$PE_HOSTFILE" >"$HELIOSTAT_HOSTS" || exit 1""",
)
# LINE COMMAND…: on the host in that line, counted from 0
THERE = 'host=$(sed -n "$(($1 + 1))p" "$HELIOSTAT_HOSTS"); shift; exec qrsh -inherit -nostdin "$host" "$@"'
MINE = 'qstat -xml -u "$(id -un)"'
MARKS = """
for i in $(qstat -u "$(id -un)" | awk 'NR > 2 {print $1}' | sort -u); do echo "=== $i"; qstat -j "$i" | grep '^context:'; done
"""
# Grid Engine signals every process of a job or none: the agent is asked through the folder that it looks into, to tell itself
ASK = 'mkdir -p -- "$1/requests" && cat >"$1/requests/$2.new" && mv -- "$1/requests/$2.new" "$1/requests/$2.json"'


@dataclass(frozen=True)
class Options:
    """The `gridengine:` table of the file."""

    pe: str = field(default="ray", metadata={"help": "parallel environment; its allocation rule is a number"})
    slots: int = field(default=1, metadata={"help": "that number: slots on each host, Ray's CPUs there"})
    queue: str | None = field(default=None, metadata={"help": "queue"})
    project: str | None = field(default=None, metadata={"help": "project (-P)"})
    time: str | int | None = field(default=None, metadata={"help": "run time; the same as the spec's `time`"})
    grace: str | int = field(default="60s", metadata={"help": "how long before the limit the work is told"})
    extra: tuple[str, ...] = field(default=(), metadata={"help": "any other options of qsub, verbatim"})


class GridEngine(batch.Batch):
    name: ClassVar[str] = "gridengine"
    Options: ClassVar[type] = Options
    reserved_short_options: ClassVar[tuple[str, ...]] = ("-q",)
    insists: ClassVar[bool] = True
    last_resort: ClassVar[str] = "qdel -f"

    questions: ClassVar[Mapping[str, Question]] = by_name(
        Question(
            "qconf",
            "Grid Engine's commands are here, and answer",
            "run heliostat where Grid Engine's commands are",
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

    def nodes_of(self, table: Mapping[str, Any]) -> int | None:
        return None

    def require(self, spec: ClusterSpec, host: Transport) -> None:
        require_programs(("qsub", "qstat", "qdel"), "run heliostat where Grid Engine's commands are", host)

    def survey(self, options: Any, host: Transport) -> dict[str, Any]:
        return {}

    # -- planning

    def plan(self, request: LaunchRequest) -> Plan:
        if request.spec.kinds:
            cause = "Grid Engine can hold a job until another has ended, not until it has begun"
            raise UsageError("`groups` cannot be used on `gridengine`", cause=cause)
        return self._job(request)

    def _job(self, request: LaunchRequest) -> Plan:
        from heliostat.remote.start_script import agent_script

        said = batch.parse_time(request.options.time, "gridengine.time")
        limit, grace = batch.times(request, said, None)
        sized = [
            m.model_copy(update={"cpus": request.options.slots}) if m.cpus is None else m
            for m in request.members
        ]
        told = {"grace_s": grace, "time_limit_s": limit, "own_clock": False, "margin_s": batch.MARGIN_S}
        request = replace(batch.with_config(request, {**told, "hosts": "HELIOSTAT_HOSTS"}), members=sized)
        suffix, config = batch.job_config(request, ["sh", "-c", THERE, "sh", "{line}"], "HELIOSTAT_RANK")
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

    # -- starting

    def launch(self, plan: Plan, request: LaunchRequest, host: Transport) -> Iterator[Handle]:
        for step in plan.steps:
            job = self._find(request, step.nodes, host) or self._submit(step.argv, request, host)
            yield Handle(job, step.nodes, {"folder": request.folder.as_posix(), **step.config})

    def _place(self, request: LaunchRequest) -> dict[str, Any]:
        return {}

    def find_orphans(self, mark: str | None, spec: ClusterSpec, host: Transport) -> list[Handle]:
        return self._strays(mark, {}, host)

    def _marked(self, place: Mapping[str, Any], host: Transport) -> list[tuple[str, str]]:
        done = batch.retry(lambda: batch.ask(host, ["sh", "-c", MARKS]), PASSING)
        found = re.findall(r"^=== (\d+)\ncontext:.*?HELIOSTAT=([^,\s]+)", done.out, re.MULTILINE)
        return [(job, mark) for job, mark in found]

    def _submit(self, argv: Sequence[str], request: LaunchRequest, host: Transport) -> str:
        done = batch.retry(lambda: batch.ask(host, argv), PASSING)
        if done.code == 0 and done.out.strip():
            return done.out.split()[-1]
        what = f"Grid Engine did not take the job of `{request.spec.cluster_name}`"
        raise batch.refused(
            done, what, "gridengine.rejected", "heliostat up --dry-run shows the script; heliostat doctor"
        )

    # -- looking

    def observe(self, handles: Sequence[Handle], host: Transport) -> dict[str, Observation]:
        ids = dict.fromkeys(handle.native_id for handle in handles)
        try:
            done = host.run(["sh", "-c", MINE], timeout=batch.OBSERVE_S)
            silent = done.err.strip() or done.describe() if done.code else ""
            seen = {} if silent else jobs(done.out)
        except (HeliostatError, Xml.ParseError) as error:
            silent = str(error)
        if silent:
            return dict.fromkeys(ids, Observation(N.UNKNOWN, f"Grid Engine does not answer: {silent[:200]}"))
        gone = Observation(N.GONE, "Grid Engine has forgotten the job")
        return {job: observation(seen[job]) if job in seen else gone for job in ids}

    # -- ending

    def _end(self, handles: Sequence[Handle], host: Transport, how: str) -> None:
        if how == "ask":
            for handle in handles:
                self._ask(handle, host)
            return
        argv = ["qdel", *(["-f"] if how == "force" else []), *(handle.native_id for handle in handles)]
        batch.retry(lambda: batch.ask(host, argv), PASSING)

    def _ask(self, handle: Handle, host: Transport) -> None:
        """A job that is not on record has no agent that we know: it is not asked, and ended by the next word."""
        for first in handle.nodes[:1]:
            name = f"stop-{secrets.token_hex(8)}"
            tell = {"do": "exec", "node": first, "argv": ["sh", "-c", "kill -URG $PPID"], "answer": name}
            argv = ["sh", "-c", ASK, "sh", str(handle.detail["folder"]), name]
            host.run(argv, input=json.dumps(tell).encode(), timeout=batch.OBSERVE_S)

    def execute(self, node: str, handle: Handle, argv: Sequence[str], host: Transport) -> Completed:
        return batch.through_agent(node, str(handle.detail["folder"]), argv, host)


def _directives(request: LaunchRequest, suffix: str, limit: int | None) -> Iterator[str]:
    from heliostat.common.shell import quote

    options, by_hand = request.options, bool(request.config.get("standalone"))
    yield f"-N ray-{request.spec.cluster_name}{suffix}"  # a name must begin with a letter
    if not by_hand:
        yield f"-ac HELIOSTAT={batch.mark_of(request.config['mark'], suffix)}"
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
    for word in options.extra:
        if word in OWNED:
            raise UsageError(f"`{word}` is set by Heliostat", hint=OWNED[word])
    if options.extra:
        yield quote(options.extra)


def jobs(text: str) -> dict[str, str]:
    """From `qstat -xml`: id -> state letters."""
    rows = Xml.fromstring(text).iter("job_list")
    return {row.findtext("JB_job_number", ""): row.findtext("state", "") for row in rows}


def observation(reserved_short_options: str) -> Observation:
    """Grid Engine's letters become one of our words: Eqw, hqw, qw, t, r, Rr, s, dr …"""
    if "d" in reserved_short_options:
        return Observation(N.STOPPING, "it is being deleted", reserved_short_options)
    if "E" in reserved_short_options:
        return Observation(N.FAILED, "it can never run: qstat -j tells why", reserved_short_options)
    if "q" in reserved_short_options or "w" in reserved_short_options:
        return Observation(
            N.QUEUED,
            "it is on hold" if "h" in reserved_short_options else "it waits for its turn",
            reserved_short_options,
        )
    if set(reserved_short_options) & set("rtsST"):
        return Observation(N.ALLOCATED, "", reserved_short_options)
    return Observation(N.UNKNOWN, f"Grid Engine says `{reserved_short_options}`", reserved_short_options)


BACKEND = GridEngine()
