"""The common part of the schedulers Slurm and PBS: one job starts many nodes.

The agent of the first node is the batch script itself, so it receives the scheduler's signals for the script. It starts the
agents of the other nodes in parallel. Tables map the scheduler's states to node states.
"""

from __future__ import annotations

import json
import re
import secrets
import time
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from heliostat.backends.base import Backend, Handle, LaunchRequest, Plan, require_programs
from heliostat.common.documents import JsonMapping, JsonObject
from heliostat.common.errors import Code, HeliostatError, UsageError
from heliostat.remote.ssh import connect_to
from heliostat.state.states import NodeState

if TYPE_CHECKING:
    from heliostat.config.members import Member
    from heliostat.config.spec import ClusterSpec
    from heliostat.remote.transport import Completed, Transport

N = NodeState
DAY_S = 86400
STOP_TIMEOUT_S = 60.0  # for the agents to stop a job in order, in addition to the grace period
CANCEL_TIMEOUT_S = 120.0  # for the scheduler to stop it after that
REPEAT_STOP_S = 3.0  # between two stop requests: the agent may not handle signals yet
OBSERVE_S = 20.0  # for a query; short, because queries are repeated
COMMAND_S = 60.0  # for any other scheduler command; a busy controller is slow
MARGIN_S = 30  # from the end of the grace period to the scheduler's SIGKILL, to stop Ray and clean up


def split_by_group(request: LaunchRequest) -> list[LaunchRequest]:
    """One request per job, the head's first, each with the options of its group."""
    groups: dict[str | None, list[Member]] = {}
    for member in request.members:
        groups.setdefault(member.group, []).append(member)
    return [
        replace(request, members=part, options=request.group_options.get(group or "", request.options))
        for group, part in groups.items()
    ]


def job_suffix(first_node: str) -> str:
    """The suffix of a job's name and files; empty for the first job of a cluster."""
    return "" if first_node == "head" else f"-{first_node}"


def job_tag(cluster_id: str, suffix: str) -> str:
    """The tag of a job in the scheduler, which finds the job if its id was not recorded."""
    return f"heliostat:{cluster_id}{suffix}"


def resolve_times(
    request: LaunchRequest, limit: int | None, queue_limit: int | None
) -> tuple[int | None, int]:
    """(the job's time limit or None for the queue's default, the grace period before it), in seconds.

    limit: from the scheduler's own options; the spec's `time` takes precedence. queue_limit: the maximum of the queue."""
    from heliostat.common.units import parse_duration

    limit = request.spec.time or limit
    if limit is None and not request.config["command"]:
        limit = min(DAY_S, queue_limit or DAY_S)  # the default of a persistent cluster
    grace = parse_duration(request.options.grace)
    if limit is not None:
        # without this, the grace period of a short job would begin at its start
        grace = max(10, min(grace, limit // 4))
    return limit, grace


def parse_time(text: str | int | None, key: str) -> int | None:
    """The time limit in seconds. Raises UsageError with the option's key."""
    from heliostat.common.units import parse_walltime

    try:
        return None if text is None else parse_walltime(text)
    except ValueError as error:
        raise UsageError(f"`{key}` cannot be used", cause=str(error)) from None


def with_config(request: LaunchRequest, more: Mapping[str, object]) -> LaunchRequest:
    """The request with keys added to the agents' config."""
    return replace(request, config={**request.config, **more})


def job_config(request: LaunchRequest, others: Sequence[str], rank: str) -> tuple[str, str]:
    """(suffix of the job's files, the agents' config).

    others: the command that starts the agents of the other nodes; rank: the variable with the node's index there, from 0."""
    suffix = job_suffix(request.members[0].name)
    members = [_member_config(request, member) for member in request.members]
    common = members[-1]["resources"]  # written once, because most of a thousand nodes have the same
    for member in members:
        if member["resources"] == common:
            del member["resources"]
    config = {
        **request.config,
        "address": {"interface": request.spec.network.interface, "default": "route"},
        "role": "worker",
        "resources": common,
        "members": members,
        "launch_command": list(others) if len(request.members) > 1 else None,
        "rank_variable": rank,
    }
    return suffix, json.dumps(config)


def _member_config(request: LaunchRequest, member: Member) -> JsonObject:
    from heliostat.config.members import members

    head: JsonObject = {}
    if member.role == "head":
        in_job = {other.name for other in request.members}
        in_other_jobs = [other.name for other in members(request.spec) if other.name not in in_job]
        # groups have their own allocations, which may be queued while the head waits for their nodes
        head = {"role": "head", **({"queued": in_other_jobs} if in_other_jobs else {})}
    return {
        "node": member.name,
        **head,
        "resources": {
            "cpus": member.cpus,
            "gpus": member.gpus,
            "memory": member.memory,
            "object_store": request.spec.object_store,
            "custom": member.resources,
            "labels": member.labels,
        },
    }


class Batch(Backend):
    """A backend whose nodes are jobs of a scheduler. Subclasses implement `observe` and the abstract methods below."""

    takes_options: ClassVar[bool] = True
    programs: ClassVar[tuple[str, ...]] = ()  # required to submit, list and cancel jobs
    dependency_options: ClassVar[tuple[str, ...]] = ()  # submit options: start after the job HEAD has started
    can_force: ClassVar[bool]  # a stop request may be lost, and `_stop_jobs` knows the method "force"
    force_command: ClassVar[str]  # shown to the user if a job cannot be stopped

    @abstractmethod
    def _plan_job(self, request: LaunchRequest) -> Plan:
        """The plan of one job that starts these members."""

    @abstractmethod
    def _list_tagged_jobs(self, scope: JsonMapping, host: Transport) -> list[tuple[str, str]]:
        """The user's jobs in the queue: (id, tag). Raises HeliostatError if the scheduler does not answer."""

    @abstractmethod
    def _submit(self, argv: Sequence[str], request: LaunchRequest, host: Transport) -> str:
        """Submit a job and return its id. Raises HeliostatError if the scheduler rejects it."""

    @abstractmethod
    def _stop_jobs(self, handles: Sequence[Handle], host: Transport, method: str) -> None:
        """method: "request" (the agent stops all nodes in order), "kill" (the scheduler does), "force" (it drops the job)."""

    def _job_scope(self, request: LaunchRequest) -> JsonObject:
        """What the scheduler's commands need besides the job's id, e.g. the Slurm cluster. Stored in the handle's detail."""
        return {}

    def _controller_start(self, handles: Sequence[Handle], host: Transport) -> str | None:
        """When the controller of these jobs started, in its own format; None if it does not answer.

        Default: a constant, for schedulers that write the end of a job to disk before they report it."""
        return ""

    def require(self, spec: ClusterSpec, host: Transport) -> None:
        hint = f"run heliostat on a login node, or set `{self.name}: {{via: user@login}}` in the file"
        require_programs(self.programs, hint, host)

    def plan(self, request: LaunchRequest) -> Plan:
        """One job for the head and the workers without a group, and one job per group: each waits in its own queue."""
        jobs = [self._plan_job(part) for part in split_by_group(request)]
        first, *others = (step for job in jobs for step in job.steps)
        if request.members[0].role == "head":
            others = [
                replace(step, argv=(*step.argv[:-1], *self.dependency_options, step.argv[-1]))
                for step in others
            ]
        return Plan(tuple(file for job in jobs for file in job.files), (first, *others))

    def launch(self, plan: Plan, request: LaunchRequest, host: Transport) -> Iterator[Handle]:
        scope, head = self._job_scope(request), ""
        for step in plan.steps:
            dependency = self.dependency_options[-1:]
            argv = [arg.replace("HEAD", head) if arg in dependency else arg for arg in step.argv]
            job = self._find_submitted(request, step.nodes, host) or self._submit(argv, request, host)
            head = head or job
            yield Handle(job, step.nodes, {**scope, "folder": request.folder.as_posix(), **step.config})

    def _find_submitted(self, request: LaunchRequest, nodes: Sequence[str], host: Transport) -> str | None:
        """The id of a job that an interrupted `up` submitted and did not record."""
        wanted = job_tag(request.config["mark"], job_suffix(nodes[0]))
        try:
            jobs = self._list_tagged_jobs(self._job_scope(request), host)
        except HeliostatError:
            return None  # the submit command reports the cause
        return next((job for job, tag in jobs if tag == wanted), None)

    def find_orphans(self, cluster_id: str | None, spec: ClusterSpec, host: Transport) -> list[Handle]:
        return self._find_orphans(cluster_id, {}, host)

    def _find_orphans(self, cluster_id: str | None, scope: JsonMapping, host: Transport) -> list[Handle]:
        if cluster_id is None:
            return []  # the record is in the shared home
        wanted = job_tag(cluster_id, "")
        jobs = self._list_tagged_jobs(scope, host)
        return [Handle(job, (), scope) for job, tag in jobs if tag == wanted or tag.startswith(wanted + "-")]

    def cancel(self, handles: Sequence[Handle], host: Transport, *, now: bool = False) -> None:
        """Requests a stop from the first node's agent, which stops all nodes in order; then kills the jobs that remain."""
        seen = self.observe(handles, host) if handles else {}
        states = [(h, seen[h.native_id].state) for h in _deduplicate(handles)]
        if all(state is N.GONE for _, state in states):
            return
        pending = [h for h, state in states if state in (N.QUEUED, N.FAILED)]
        running = [h for h, state in states if state in (N.ALLOCATED, N.UNKNOWN)]
        grace = max([float(h.detail.get("grace_s") or 0) for h in handles], default=0.0)
        methods = [("request", STOP_TIMEOUT_S + grace)] if running and not now else []
        methods += [("kill", CANCEL_TIMEOUT_S), *([("force", CANCEL_TIMEOUT_S)] if self.can_force else [])]
        started = self._controller_start(handles, host)
        if pending:
            self._stop_jobs(pending, host, "kill")
        for method, timeout_s in methods:
            if running:
                self._stop_jobs(running, host, method)
            repeat = self.can_force and bool(running) and method == "request"
            if self._wait_until_gone(handles, host, timeout_s, repeat, started):
                return
        left = [h.native_id for h in self._remaining(handles, host)]
        raise HeliostatError(
            "some jobs could not be stopped",
            cause=f"still in the queue: {', '.join(left)}",
            hint=f"{self.force_command} {' '.join(left)}",
            code=Code.SCHEDULER_JOBS_LEFT,
        )

    def _remaining(self, handles: Sequence[Handle], host: Transport) -> list[Handle]:
        seen = self.observe(handles, host) if handles else {}
        return [h for h in _deduplicate(handles) if seen[h.native_id].state is not N.GONE]

    def _wait_until_gone(
        self, handles: Sequence[Handle], host: Transport, timeout_s: float, repeat: bool, started: str | None
    ) -> bool:
        """Whether the jobs are gone before the timeout. `repeat`: send the stop request again at intervals.

        `started`: the start of the controller before the first command. A controller that crashed and restarted may have lost
        the end of a job, or a command: its answer is verified, and jobs that run again are killed."""
        now = time.monotonic()
        deadline, last_stop, pause = now + timeout_s, now, 0.2
        while True:
            left = self._remaining(handles, host)
            current = self._controller_start(handles, host) if not left else started
            if not left and current is not None and current == started:
                return True
            if time.monotonic() > deadline:
                return False
            if not left and current is not None:
                started = current
                left = self._remaining(handles, host)
                if left:
                    self._stop_jobs(left, host, "kill")
                    last_stop = time.monotonic()
            if repeat and time.monotonic() - last_stop > REPEAT_STOP_S:
                last_stop = time.monotonic()
                self._stop_jobs(left, host, "request")
            time.sleep(pause)
            pause = min(2.0, pause * 1.3)

    def execute(self, node: str, handle: Handle, argv: Sequence[str], host: Transport) -> Completed:
        return execute_through_agent(node, str(handle.detail["folder"]), argv, host)

    def attached(
        self, node: str, handle: Handle, argv: Sequence[str], host: Transport, *, terminal: bool
    ) -> list[str]:
        """Over ssh from the login host: PBS has no job steps, and its sites admit users to the hosts of their jobs."""
        target = connect_to(str(handle.detail["status"]["host"]))
        return host.attached(target.attached(argv, terminal=terminal), terminal=terminal)


def _deduplicate(handles: Sequence[Handle]) -> list[Handle]:
    return list({h.native_id: h for h in handles}.values())


def run_with_retries(
    argv: Sequence[str], host: Transport, transient: re.Pattern[str], timeout_s: float = 120.0
) -> Completed:
    """Run a scheduler command. While its output matches a transient error, repeat it with increasing pauses."""
    deadline, pause = time.monotonic() + timeout_s, 1.0
    while True:
        done = host.run(list(argv), timeout=COMMAND_S)
        if done.code == 0 or not transient.search(done.err + done.out) or time.monotonic() + pause > deadline:
            return done
        time.sleep(pause)
        pause = min(15.0, pause * 2)


def rejection_error(done: Completed, message: str, code: str, hint: str = "") -> HeliostatError:
    """The error for a scheduler command that failed; its last two lines are the cause."""
    lines = [line.strip() for line in (done.err or done.out).splitlines() if line.strip()]
    return HeliostatError(
        message, cause=" | ".join(lines[-2:])[:400], details=done.describe(), hint=hint, code=code
    )


def parse_options(args: Sequence[str], reserved: Mapping[str, str], flags: frozenset[str]) -> list[str]:
    """The user's scheduler options, each as one argument: `--name=value`, or an option without a value (`flags`).

    Raises UsageError for options that Heliostat sets; `reserved` has a hint for each."""
    found: list[str] = []
    without_value: str | None = None
    for arg in args:
        if without_value is not None:
            found.append(f"{without_value}={arg}" if without_value.startswith("--") else without_value + arg)
            without_value = None
            continue
        if not arg.startswith("-"):
            raise UsageError(f"`{arg}` is not an option of the scheduler", code=Code.SCHEDULER_INVALID_OPTION)
        name = arg.partition("=")[0] if arg.startswith("--") else arg[:2]
        if name in reserved:
            raise UsageError(
                f"`{name}` is set by Heliostat", hint=reserved[name], code=Code.SCHEDULER_INVALID_OPTION
            )
        if name != arg or name in flags:
            found.append(arg)
        else:
            without_value = name
    if without_value is not None:
        found.append(without_value)
    return found


# writes a request for the head's agent, which forwards it; waits for the answer: both streams and the exit code
_REQUEST = """
d=$1/requests b=$1/requests/$2; umask 077; mkdir -p -- "$d" && cat >"$b.new" && mv -- "$b.new" "$b.json" || exit 255
until [ -e "$b.code" ]; do [ -d "$d" ] || exit 255; sleep 0.2; done
cat -- "$b.out"; cat -- "$b.err" >&2; c=$(cat -- "$b.code"); rm -f -- "$b".*; exit "$c"
"""


def execute_through_agent(node: str, folder: str, argv: Sequence[str], host: Transport) -> Completed:
    """Run a command on a node through its agent, for schedulers without job steps."""
    answer = f"exec-{secrets.token_hex(8)}"
    request = {"do": "exec", "node": node, "argv": list(argv), "answer": answer}
    script = ["sh", "-c", _REQUEST, "sh", folder, answer]
    return host.run(script, input=json.dumps(request).encode(), timeout=DAY_S)
