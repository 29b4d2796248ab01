"""The interface of a backend: the base classes `Backend` and `Platform`, and the types that they exchange with the core.

`ls` imports this module, so it must import quickly: no pydantic. A backend's options are a plain frozen dataclass;
pydantic validates them when a file or an option is read.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from heliostat.agent.protocol import NodeReport
from heliostat.common.documents import JsonMapping, JsonObject
from heliostat.common.errors import Code, HeliostatError, UsageError
from heliostat.common.limits import MAX_NODES
from heliostat.state.states import NodeState

if TYPE_CHECKING:
    from heliostat.backends.detection import Detected
    from heliostat.config.members import Member
    from heliostat.config.spec import ClusterSpec
    from heliostat.config.tables import Host
    from heliostat.remote.ssh import Ssh
    from heliostat.remote.transport import Completed, Transport
    from heliostat.state.records import NodeRecord


FIND_PROGRAMS_S = 20.0  # time limit of the search for programs on a host
RUN_S = 24 * 3600.0  # time limit of a command on a node; the user stops it with Ctrl-C


@dataclass(frozen=True)
class File:
    """A file that the core writes into the cluster's directory before `launch`."""

    path: Path
    text: str
    mode: int = 0o600


@dataclass(frozen=True)
class Step:
    """One command that `launch` runs, and the nodes that it starts. `config` is the config of their agents."""

    argv: tuple[str, ...]
    nodes: tuple[str, ...]
    config: JsonMapping = field(default_factory=dict)


@dataclass(frozen=True)
class Plan:
    """The files that are written and the commands that are run; `--dry-run` prints them."""

    files: tuple[File, ...]
    steps: tuple[Step, ...]
    notes: tuple[str, ...] = ()  # printed before the launch, e.g. the cost


@dataclass(frozen=True)
class LaunchRequest:
    """The input of `plan`: members of a cluster, their options, and the cluster's directory."""

    spec: ClusterSpec
    options: Any
    members: Sequence[Member]
    folder: Path
    agent: Path
    config: JsonMapping  # the part of the config that all agents of the cluster share
    python: str = sys.executable  # runs the agent if the environment does not define a Python
    group_options: JsonMapping = field(default_factory=dict)  # replace `options` for these groups
    facts: JsonMapping = field(default_factory=dict)  # from `survey`; of a running cluster also "head"
    files: Mapping[str, bytes] = field(default_factory=dict)  # to copy to nodes that do not see `folder`


@dataclass(frozen=True)
class Handle:
    """What `launch` started, by the backend's own id for it (a job, a process, an object). The record stores it."""

    native_id: str
    nodes: tuple[str, ...]
    detail: JsonMapping = field(default_factory=dict)

    def to_json(self) -> JsonObject:
        return {"native_id": self.native_id, "nodes": list(self.nodes), "detail": dict(self.detail)}

    @staticmethod
    def from_json(data: JsonMapping) -> Handle:
        return Handle(data["native_id"], tuple(data["nodes"]), data["detail"])


@dataclass(frozen=True)
class Observation:
    """The state of a handle as the backend reports it.

    QUEUED, ALLOCATED (it runs), STOPPING, GONE, UNKNOWN (no answer, or an unknown native state), or FAILED (it can never run).
    """

    state: NodeState
    reason: str = ""
    native_state: str = ""
    report: NodeReport = field(
        default_factory=lambda: NodeReport()
    )  # the agent's last report, if its file is remote


@dataclass(frozen=True)
class Check:
    """One result of `doctor`."""

    name: str
    verdict: str  # "ok", "warn" or "fail"
    found: str
    hint: str = ""
    attachment: str = ""  # the text of a file that the hint refers to


@dataclass(frozen=True)
class Question:
    """One check of `doctor` as data: the expected result, and the remedy. docs/troubleshooting.md lists them.

    `name` and `hint` may contain fields in braces, which `answer` fills in."""

    name: str
    expected: str
    hint: str = ""
    severity: str = "fail"  # the verdict of a failed check; "": the result is only printed

    def answer(
        self,
        good: bool,
        found: str,
        *,
        severity: str | None = None,
        hint: str | None = None,
        attachment: str = "",
        **fields: object,
    ) -> Check:
        """The result of this check. `severity` and `hint` replace the defaults of the question."""
        name = self.name.format(**fields)
        if good:
            return Check(name, "ok", found)
        remedy = self.hint.format(**fields) if hint is None else hint
        return Check(name, severity or self.severity, found, remedy, attachment)


_PRINT_MISSING = 'for p; do command -v -- "$p" >/dev/null 2>&1 || printf "%s\\n" "$p"; done'


def require_programs(programs: Sequence[str], hint: str, host: Transport) -> None:
    """Raise HeliostatError if one of these programs is not installed on the host."""
    missing = host.run(["sh", "-c", _PRINT_MISSING, "sh", *programs], timeout=FIND_PROGRAMS_S).out.split()
    if missing:
        names = ", ".join(f"`{name}`" for name in missing)
        raise HeliostatError(
            "a required program is missing",
            cause=f"not found: {names}",
            hint=hint,
            code=Code.PROGRAM_NOT_FOUND,
        )


def by_name(*questions: Question) -> dict[str, Question]:
    """The questions as a dictionary with their names as keys."""
    return {question.name: question for question in questions}


@dataclass(frozen=True)
class PlatformStatus:
    """The status of a cluster whose platform starts Ray. Other backends' agents write the same into the cluster's directory.

    `nodes`: by node name, {"state", "reason", "role", "group", "ip", "host", "id": the instance's or pod's name}. It includes
    nodes that the autoscaler added. After a restart of the node: "restarts" (how many), "restarted" (when), "restart" (a sentence).
    `connection`: the content of `connection.json`, if Ray's dashboard is available. `token`: set if the platform generated it.
    """

    nodes: Mapping[str, JsonMapping]
    connection: JsonMapping | None = None
    token: str | None = None


class Backend(ABC):
    """Where nodes come from. A backend builds argv lists and parses text; the core decides what happens to a cluster.

    `host` is the transport to the host where the backend's commands run: this one, or the login node of `via`.
    Subclasses set `name` and `Options`, and implement the abstract methods. Everything else has a default.
    """

    name: ClassVar[str]
    Options: ClassVar[type]  # frozen dataclass: the backend's table of the spec file
    starts_ray: ClassVar[bool] = True  # Heliostat's agent runs `ray start`; False: see `Platform`
    shares_files: ClassVar[bool] = True  # the head sees the caller's directories under the same paths
    lists_hosts: ClassVar[bool] = False  # its nodes are the spec's `hosts`
    is_this_host: ClassVar[bool] = False  # all nodes are on the caller's host
    autoscales: ClassVar[bool] = False  # the number of nodes can follow Ray's demand (`autoscale`)
    most_nodes: ClassVar[int] = MAX_NODES  # limit for one cluster
    takes_options: ClassVar[bool] = False  # a scheduler accepts its own options from the command line
    long_options: ClassVar[frozenset[str]] = frozenset()  # the scheduler's known long options, without dashes
    reserved_short_options: ClassVar[tuple[str, ...]] = ()  # the scheduler's options that Heliostat also has
    poll_interval: ClassVar[tuple[float, float]] = (0.5, 10.0)  # seconds: after a change, and at most
    questions: ClassVar[Mapping[str, Question]] = {}  # the checks of `doctor`, by name
    detection_priority: ClassVar[int] = 0  # `init` prefers the backend with the highest
    not_detected: ClassVar[str] = ""  # why `detect` found nothing
    first_step: ClassVar[tuple[str, str]] = ("check Ray", "heliostat setup")  # after `init`: purpose, command

    def detect(self, machine: Transport, home: Path, environ: Mapping[str, str]) -> Detected | None:
        """What `init` finds of this backend on this machine, without a connection to another one. Default: nothing."""
        return None

    def checks(self, spec: ClusterSpec | None, host: Transport) -> list[Check]:
        """Run the checks in `questions`. Never raises. Default: no checks."""
        return []

    def nodes_of(self, table: JsonMapping) -> int | None:
        """The number of nodes that the backend's own options request, e.g. a select statement of PBS.

        None (the default): the options do not determine it, and the spec's `nodes` applies."""
        return None

    def require(self, spec: ClusterSpec, host: Transport) -> None:
        """Raise HeliostatError if a program or package that `launch` needs is missing.

        Called before anything of a new cluster is recorded. Default: nothing is required."""
        return

    def survey(self, options: Any, host: Transport) -> JsonMapping:
        """Facts that planning needs, such as queues and their limits. They become `LaunchRequest.facts`.

        One quick query; {} if the backend does not answer. Never raises HeliostatError. Default: {}."""
        return {}

    @abstractmethod
    def plan(self, request: LaunchRequest) -> Plan:
        """The files and commands that start these members. Pure: no I/O, and the same request gives the same plan.

        Raises UsageError if the backend cannot run the request."""

    @abstractmethod
    def launch(self, plan: Plan, request: LaunchRequest, host: Transport) -> Iterator[Handle]:
        """Run the steps of the plan. Yield each handle as soon as it exists; the caller records it before the next step.

        Must not start a node twice if an earlier launch was interrupted. Raises HeliostatError if a step is rejected."""

    def find_orphans(self, cluster_id: str | None, spec: ClusterSpec, host: Transport) -> Sequence[Handle]:
        """Handles that were launched for this cluster and may not be recorded, because `launch` was interrupted.

        `cluster_id` None: there is no record here. Return the handles of clusters with the spec's name, if the backend's hosts
        store them, with "id" and "launch" in `detail`. Raises HeliostatError if the backend does not answer.
        Default: none, for backends where a process without a record exits."""
        return ()

    @abstractmethod
    def observe(self, handles: Sequence[Handle], host: Transport) -> dict[str, Observation]:
        """The observation of every handle, by `native_id`. Uses one query for all handles where possible.

        Does not raise HeliostatError: a handle that the backend does not know is GONE; without an answer it is UNKNOWN."""

    @abstractmethod
    def cancel(self, handles: Sequence[Handle], host: Transport, *, now: bool = False) -> None:
        """Stop everything of these handles. Idempotent; returns when the backend confirms that they are gone.

        Jobs get their grace period unless `now`. Raises HeliostatError if something still runs. With `now`, raises
        PartialFailure if the only remaining hosts are unreachable."""

    @abstractmethod
    def execute(self, node: str, handle: Handle, argv: Sequence[str], host: Transport) -> Completed:
        """Run a command on the node until it exits. Returns its output and exit code."""

    def attached(
        self, node: str, handle: Handle, argv: Sequence[str], host: Transport, *, terminal: bool
    ) -> Sequence[str]:
        """The command on this host that runs argv on the node with the caller's streams, for `ssh` and `cp`.

        terminal: argv gets the caller's terminal. The command's exit code is that of argv. Default: through `reach`."""
        return self.reach(handle, host).attached(argv, terminal=terminal)

    def collect_logs(self, handles: Sequence[Handle], folder: Path) -> Sequence[str]:
        """After the end of the cluster: copy remote logs into `folder`, and delete the cluster's remote files.

        Returns notes for the user. Does not raise HeliostatError. Default: the logs are in `folder` already."""
        return ()

    def reach(self, handle: Handle, host: Transport) -> Transport:
        """A transport to the handle's host, for logs, `exec` and tunnels. Default: `host`."""
        return host

    def remote_dir(self, handle: Handle) -> tuple[Ssh, Path] | None:
        """The host of the handle's node, and the node's own directory there.

        None (the default): the node uses the cluster's directory, or it was not started."""
        return None

    def environment_hosts(self, spec: ClusterSpec, options: Any) -> Sequence[tuple[Host, Transport, str]]:
        """The hosts that each need an environment of their own, with a transport and the command of their Python.

        Raises UsageError if the spec names none. Default: none, because the nodes share the files of one host."""
        return ()


class Platform(Backend):
    """A backend that starts Ray itself. One handle is the whole cluster, and no agent runs on its nodes.

    Heliostat submits every job through Ray's Jobs API, the command of `run` too. In these methods, `status` is the
    node's entry in the last `PlatformStatus.nodes`.
    """

    starts_ray: ClassVar[bool] = False
    shares_files: ClassVar[bool] = False
    autoscales: ClassVar[bool] = True

    @abstractmethod
    def platform_status(
        self, handle: Handle, nodes: Sequence[NodeRecord], before: JsonMapping, host: Transport
    ) -> PlatformStatus:
        """The status of each of these nodes, and of nodes that the autoscaler added.

        `before`: the previous `PlatformStatus.nodes`, so that every node keeps its name. Raises HeliostatError if the platform
        does not answer."""

    @abstractmethod
    def resize(self, handle: Handle, workers: Mapping[str | None, int], host: Transport) -> None:
        """Set the number of workers of these groups. The key None is the group without a name."""

    @abstractmethod
    def logs(
        self, handle: Handle, node: str, status: JsonMapping, known: Mapping[str, int], host: Transport
    ) -> Mapping[str, bytes]:
        """New content of the node's logs, by file name. `known`: how many bytes of each file the caller has."""

    def limited_command(self, handle: Handle, argv: Sequence[str], host: Transport) -> Sequence[str]:
        """The command of `run` with the cluster's time limit added. Default: unchanged; the platform enforces the limit."""
        return argv

    def started_job(self, handle: Handle, job: str, host: Transport) -> None:
        """Called after the command of `run` was submitted to Ray with this job id.

        A platform that can, terminates the cluster after the job. Default: nothing."""
        return

    def suspend(self, handle: Handle, host: Transport) -> None:
        """Stop all nodes of the cluster; `resume` starts them again. Default: raises UsageError."""
        raise UsageError(
            f"a cluster on `{self.name}` cannot be suspended", hint="heliostat down, then heliostat up"
        )

    def resume(self, handle: Handle, host: Transport) -> None:
        """Start the nodes of a suspended cluster. Default: nothing, because no cluster can be suspended."""
        return

    @abstractmethod
    def replace_node(self, handle: Handle, node: str, status: JsonMapping, host: Transport) -> None:
        """Terminate this node; the platform starts another one for it. Raises UsageError if it cannot."""
