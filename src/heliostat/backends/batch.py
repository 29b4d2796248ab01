"""What SLURM and PBS share: one job starts many nodes, and its script is the first of them.

The agent of the first node runs in the batch script itself, so that the scheduler's signal for the script (and only for it)
is the agent's; it starts the agents of the other nodes, all at once. Native words become ours by table.
"""

from __future__ import annotations

import json
import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from heliostat.backends.base import Handle, LaunchRequest, Observation, Plan, require_programs
from heliostat.common.errors import Code, HeliostatError, UsageError
from heliostat.common.limits import MAX_NODES
from heliostat.state.states import NodeState

if TYPE_CHECKING:
    from heliostat.config.members import Member
    from heliostat.config.spec import ClusterSpec
    from heliostat.remote.transport import Completed, Transport

N = NodeState
DAY_S = 86400
END_S = 60.0  # for the agents to end a job in order, beside the grace that the work has
CANCEL_S = 120.0  # for the scheduler to end it after that
AGAIN_S = 3.0  # between two words to an agent that may not have begun to listen
OBSERVE_S = 20.0  # for a question that is asked again anyway

MARGIN_S = (
    30  # from the end of the grace to the scheduler's SIGKILL: what ending Ray and cleaning up may take
)
COMMAND_S = 60.0  # for one scheduler command; a slow controller is not a dead one


def by_group(request: LaunchRequest) -> list[LaunchRequest]:
    """The parts that become jobs of their own, the head's first: each with its group's own options."""
    groups: dict[str | None, list[Member]] = {}
    for member in request.members:
        groups.setdefault(member.group, []).append(member)
    return [
        replace(request, members=part, options=request.group_options.get(group or "", request.options))
        for group, part in groups.items()
    ]


def suffix_of(first: str) -> str:
    """Of a job's name and files: the first job of a cluster has none."""
    return "" if first == "head" else f"-{first}"


def mark_of(mark: str, suffix: str) -> str:
    """How a job is found again by whoever did not write its id down."""
    return f"heliostat:{mark}{suffix}"


def times(request: LaunchRequest, said: int | None, most: int | None) -> tuple[int | None, int]:
    """(the job's time limit or None for the site's own, how long before it the work is told).

    said: by the scheduler's own words; most: what the queue allows."""
    from heliostat.common.units import parse_duration

    limit = request.spec.time or said
    if limit is None and not request.config["command"]:
        # what stays lives for a day unless somebody says otherwise, or the queue ends it sooner
        limit = min(DAY_S, most or DAY_S)
    grace = parse_duration(request.options.grace)
    if limit is not None:
        # a short job must not be told at its beginning that it ends
        grace = max(10, min(grace, limit // 4))
    return limit, grace


def parse_time(said: str | int | None, key: str) -> int | None:
    from heliostat.common.units import parse_walltime

    try:
        return None if said is None else parse_walltime(said)
    except ValueError as error:
        raise UsageError(f"`{key}` cannot be used", cause=str(error)) from None


def with_config(request: LaunchRequest, more: Mapping[str, object]) -> LaunchRequest:
    return replace(request, config={**request.config, **more})


def job_config(request: LaunchRequest, others: Sequence[str], rank: str) -> tuple[str, str]:
    """(suffix of the job's files, the agents' config).

    others: the command that starts the agents of the other nodes; rank: the variable that counts them there, from 0."""
    suffix = suffix_of(request.members[0].name)
    members = [_member_config(request, member) for member in request.members]
    common = members[-1]["resources"]  # said once: a thousand nodes are mostly alike
    for member in members:
        if member["resources"] == common:
            del member["resources"]
    config = {
        **request.config,
        "address": {"interface": request.spec.network.interface, "default": "route"},
        "role": "worker",
        "resources": common,
        "members": members,
        "others": list(others) if len(request.members) > 1 else None,
        "rank": rank,
    }
    return suffix, json.dumps(config)


def _member_config(request: LaunchRequest, member: Member) -> dict[str, Any]:
    from heliostat.config.members import members

    head: dict[str, Any] = {}
    if member.role == "head":
        own = {other.name for other in request.members}
        apart = [other.name for other in members(request.spec) if other.name not in own]
        # groups have allocations of their own, which may be queued while the head waits for their nodes
        head = {"role": "head", **({"queued": apart} if apart else {})}
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


class Batch:
    """A site whose machines come by jobs of a scheduler. What differs is below each `raise NotImplementedError`."""

    starts_ray: ClassVar[bool] = True
    shares_files: ClassVar[bool] = True
    autoscales: ClassVar[bool] = False
    most_nodes: ClassVar[int] = MAX_NODES
    takes_options: ClassVar[bool] = True
    reserved_short_options: ClassVar[tuple[str, ...]] = ()
    long_options: ClassVar[frozenset[str]] = frozenset()  # of the submit command, as far as they are known
    poll_interval: ClassVar[tuple[float, float]] = (0.5, 10.0)
    after: ClassVar[tuple[str, ...]]  # options: not before the job HEAD begins
    insists: ClassVar[
        bool
    ]  # a word that it should end may be lost, and there is a way to drop a job by force
    name: ClassVar[str]
    programs: ClassVar[tuple[str, ...]] = ()  # without these nothing is submitted, seen or ended
    last_resort: ClassVar[str]  # what a person may type for a job that does not go

    def _job(self, request: LaunchRequest) -> Plan:
        """One job for these members."""
        raise NotImplementedError

    def _place(self, request: LaunchRequest) -> dict[str, Any]:
        """What is needed to find a job of this order again, beside its id."""
        raise NotImplementedError

    def _marked(self, place: Mapping[str, Any], host: Transport) -> list[tuple[str, str]]:
        """My jobs in the queue: (id, mark). Raises HeliostatError when the scheduler does not say."""
        raise NotImplementedError

    def _submit(self, argv: Sequence[str], request: LaunchRequest, host: Transport) -> str:
        """The job's id."""
        raise NotImplementedError

    def observe(self, handles: Sequence[Handle], host: Transport) -> dict[str, Observation]:
        raise NotImplementedError

    def _end(self, handles: Sequence[Handle], host: Transport, how: str) -> None:
        """how: `ask` (its agent ends all in order), `kill` (the scheduler ends it), `force` (it forgets the job)."""
        raise NotImplementedError

    def _controller_start(self, handles: Sequence[Handle], host: Transport) -> str | None:
        """When the controller of these jobs started, in its own format; None: it does not answer. A scheduler that writes the end of a job
        to disk before it reports it has no need to tell."""
        return ""

    def require(self, spec: ClusterSpec, host: Transport) -> None:
        require_programs(
            self.programs,
            f"run heliostat where they are, or `{self.name}: {{via: user@login}}` in the file",
            host,
        )

    def plan(self, request: LaunchRequest) -> Plan:
        """One job for the head and the plain workers, one for each group of workers: a group has its own queue, its own
        place in it, and is not waited for by the rest."""
        jobs = [self._job(part) for part in by_group(request)]
        first, *rest = (step for job in jobs for step in job.steps)
        after = [replace(step, argv=(*step.argv[:-1], *self.after, step.argv[-1])) for step in rest]
        steps = (first, *(after if request.members[0].role == "head" else rest))
        return Plan(tuple(file for job in jobs for file in job.files), steps)

    def launch(self, plan: Plan, request: LaunchRequest, host: Transport) -> Iterator[Handle]:
        place, head = self._place(request), ""
        for step in plan.steps:
            argv = [word.replace("HEAD", head) if word == self.after[-1] else word for word in step.argv]
            job = self._find(request, step.nodes, host) or self._submit(argv, request, host)
            head = head or job
            yield Handle(job, step.nodes, {**place, "folder": request.folder.as_posix(), **step.config})

    def _find(self, request: LaunchRequest, nodes: Sequence[str], host: Transport) -> str | None:
        """A job of ours that an interrupted `up` submitted and could not write down."""
        wanted = mark_of(request.config["mark"], suffix_of(nodes[0]))
        try:
            jobs = self._marked(self._place(request), host)
        except HeliostatError:
            return None  # whoever submits is told why
        return next((job for job, mark in jobs if mark == wanted), None)

    def _strays(self, mark: str | None, place: Mapping[str, Any], host: Transport) -> list[Handle]:
        if mark is None:
            return []  # the record is in the home that the whole site shares
        wanted = mark_of(mark, "")
        found = [j for j, m in self._marked(place, host) if m == wanted or m.startswith(wanted + "-")]
        return [Handle(job, (), place) for job in found]

    def cancel(self, handles: Sequence[Handle], host: Transport, *, now: bool = False) -> None:
        """Tells the first node's agent, which ends all in order; what is still there after that is ended hard."""
        seen = self.observe(handles, host) if handles else {}
        states = [(h, seen[h.native_id].state) for h in _once(handles)]
        if all(state is N.GONE for _, state in states):
            return
        waiting = [h for h, state in states if state in (N.QUEUED, N.FAILED)]
        running = [h for h, state in states if state in (N.ALLOCATED, N.UNKNOWN)]
        grace = max([float(h.detail.get("grace_s") or 0) for h in handles], default=0.0)
        ways = [("ask", END_S + grace)] if running and not now else []
        ways += [("kill", CANCEL_S), *([("force", CANCEL_S)] if self.insists else [])]
        started = self._controller_start(handles, host)
        if waiting:
            self._end(waiting, host, "kill")
        for how, seconds in ways:
            if running:
                self._end(running, host, how)
            if self._gone(handles, host, seconds, how if self.insists and running else "", started):
                return
        left = [h.native_id for h in self._living(handles, host)]
        raise HeliostatError(
            "some jobs could not be ended",
            cause=f"still in the queue: {', '.join(left)}",
            hint=f"{self.last_resort} {' '.join(left)}",
            code=Code.SCHEDULER_JOBS_LEFT,
        )

    def _living(self, handles: Sequence[Handle], host: Transport) -> list[Handle]:
        seen = self.observe(handles, host) if handles else {}
        return [h for h in _once(handles) if seen[h.native_id].state is not N.GONE]

    def _gone(
        self, handles: Sequence[Handle], host: Transport, seconds: float, again: str, started: str | None
    ) -> bool:
        """again: how those that run are told once more now and then; started: when the controller did, before we told it
        anything. One that was killed may have forgotten the end of a job, and what it was told: it is asked again."""
        now = time.monotonic()
        deadline, told, pause = now + seconds, now, 0.2
        while True:
            left = self._living(handles, host)
            current = self._controller_start(handles, host) if not left else started
            if not left and current is not None and current == started:
                return True
            if time.monotonic() > deadline:
                return False
            if not left and current is not None:
                started = current
                left = self._living(handles, host)
                if left:
                    self._end(left, host, "kill")
                    told = time.monotonic()
            if again == "ask" and time.monotonic() - told > AGAIN_S:
                told = time.monotonic()
                self._end(left, host, again)
            time.sleep(pause)
            pause = min(2.0, pause * 1.3)

    def collect_logs(self, handles: Sequence[Handle], folder: Path) -> list[str]:
        return []  # it is here already

    def reach(self, handle: Handle, host: Transport) -> Transport:
        return host


def _once(handles: Sequence[Handle]) -> list[Handle]:
    return list({h.native_id: h for h in handles}.values())


def ask(host: Transport, argv: Sequence[str]) -> Completed:
    """One scheduler command."""
    return host.run(list(argv), timeout=COMMAND_S)


def retry(
    attempt: Callable[[], Completed], passing: re.Pattern[str], seconds: float = 120.0, pause: float = 1.0
) -> Completed:
    """Tries again, ever more patiently, while the scheduler says something that passes by itself."""
    deadline = time.monotonic() + seconds
    while True:
        done = attempt()
        if done.code == 0 or not passing.search(done.err + done.out) or time.monotonic() + pause > deadline:
            return done
        time.sleep(pause)
        pause = min(15.0, pause * 2)


def refused(done: Completed, message: str, code: str, hint: str = "") -> HeliostatError:
    words = [line.strip() for line in (done.err or done.out).splitlines() if line.strip()]
    return HeliostatError(
        message, cause=" | ".join(words[-2:])[:400], details=done.describe(), hint=hint, code=code
    )


def options_of(words: Sequence[str], owned: Mapping[str, str], flags: frozenset[str]) -> list[str]:
    """The user's own scheduler options, each as one word `--name=value` (or a flag); refuses those that we own by name."""
    found: list[str] = []
    waiting: str | None = None
    for word in words:
        if waiting is not None:
            found.append(f"{waiting}={word}" if waiting.startswith("--") else f"{waiting}{word}")
            waiting = None
            continue
        if not word.startswith("-"):
            raise UsageError(
                f"`{word}` is not an option of the scheduler", code=Code.SCHEDULER_INVALID_OPTION
            )
        name = word.partition("=")[0] if word.startswith("--") else word[:2]
        if name in owned:
            raise UsageError(
                f"`{name}` is set by Heliostat", hint=owned[name], code=Code.SCHEDULER_INVALID_OPTION
            )
        if name != word or name in flags:
            found.append(word)
        else:
            waiting = name
    if waiting is not None:
        found.append(waiting)
    return found


# a request for the head's agent, which passes it on; then its answer: both streams and the code
_THROUGH = """
d=$1/requests b=$1/requests/$2; umask 077; mkdir -p -- "$d" && cat >"$b.new" && mv -- "$b.new" "$b.json" || exit 255
until [ -e "$b.code" ]; do [ -d "$d" ] || exit 255; sleep 0.2; done
cat -- "$b.out"; cat -- "$b.err" >&2; c=$(cat -- "$b.code"); rm -f -- "$b".*; exit "$c"
"""


def through_agent(node: str, folder: str, argv: Sequence[str], host: Transport) -> Completed:
    """A command on a node that only its own agent can reach: no scheduler's step, no ssh."""
    answer = f"exec-{secrets.token_hex(8)}"
    request = {"do": "exec", "node": node, "argv": list(argv), "answer": answer}
    words = ["sh", "-c", _THROUGH, "sh", folder, answer]
    return host.run(words, input=json.dumps(request).encode(), timeout=DAY_S)
