"""The seam: what a site must promise. The rest of Heliostat knows no site by name.

Light on purpose: `ls` imports it, so nothing here needs pydantic. A site's options are a plain frozen dataclass, which
pydantic checks where a file or a flag is read.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from heliostat.common.errors import Code, HeliostatError
from heliostat.state.states import NodeState

if TYPE_CHECKING:
    from heliostat.config.members import Member
    from heliostat.config.spec import ClusterSpec
    from heliostat.remote.transport import Completed, Transport
    from heliostat.state.records import NodeRecord


FIND_S = 20.0  # to find programs on a machine
RUN_S = 24 * 3600.0  # for a command on a node: a person ends it with Ctrl-C


@dataclass(frozen=True)
class File:
    """A file that the plan writes into the cluster's folder before anything starts."""

    path: Path
    text: str
    mode: int = 0o600


@dataclass(frozen=True)
class Step:
    """One thing that is started or submitted, and the nodes that come with it. `config` goes to the agents."""

    argv: tuple[str, ...]
    nodes: tuple[str, ...]
    config: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Plan:
    """Exactly what will be written and run; `--dry-run` prints it."""

    files: tuple[File, ...]
    steps: tuple[Step, ...]
    notes: tuple[str, ...] = ()  # what a person should know before: what it costs


@dataclass(frozen=True)
class LaunchRequest:
    """What to plan: these members of this cluster, below this folder. `config` is what every agent of it is told."""

    spec: ClusterSpec
    options: Any
    members: Sequence[Member]
    folder: Path
    agent: Path
    config: Mapping[str, Any]
    python: str = sys.executable  # what runs the agent where the environment names nothing else
    group_options: Mapping[str, Any] = field(default_factory=dict)  # a group's own, in place of `options`
    facts: Mapping[str, Any] = field(
        default_factory=dict
    )  # what `survey` saw; of a running cluster also its head
    files: Mapping[str, bytes] = field(
        default_factory=dict
    )  # what the agents need where they do not see our folder


@dataclass(frozen=True)
class Handle:
    """Something that was started, by the other party's name for it; remembered in the record."""

    native_id: str
    nodes: tuple[str, ...]
    detail: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {"native_id": self.native_id, "nodes": list(self.nodes), "detail": dict(self.detail)}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Handle:
        return Handle(data["native_id"], tuple(data["nodes"]), data["detail"])


@dataclass(frozen=True)
class Observation:
    """What the other party says of a handle: QUEUED, ALLOCATED (it runs), STOPPING, GONE, UNKNOWN, or FAILED (it can never
    run), with its own word."""

    state: NodeState
    reason: str = ""
    native_state: str = ""
    report: Mapping[str, Any] = field(default_factory=dict)  # the node's own last, where its file is not here


@dataclass(frozen=True)
class Check:
    """One finding of `doctor`."""

    name: str
    verdict: str  # "ok", "warn" or "fail"
    found: str
    hint: str = ""
    attachment: str = ""  # a whole file that the hint refers to


@dataclass(frozen=True)
class Question:
    """One thing that `doctor` asks: what is well, and what a person types where it is not. docs/troubleshooting.md lists them.

    Names and hints may have fields in braces, which the answer fills in."""

    name: str
    expected: str
    hint: str = ""
    severity: str = "fail"  # the verdict where it is not well; "": it is only told

    def answer(
        self,
        good: bool,
        found: str,
        *,
        severity: str | None = None,
        hint: str | None = None,
        attachment: str = "",
        **fields: Any,
    ) -> Check:
        """`bad`, `hint`: in place of ours, where the answer itself knows better."""
        name = self.name.format(**fields)
        if good:
            return Check(name, "ok", found)
        said = self.hint.format(**fields) if hint is None else hint
        return Check(name, severity or self.severity, found, said, attachment)


_MISSING = 'for p; do command -v -- "$p" >/dev/null 2>&1 || printf "%s\\n" "$p"; done'


def require_programs(programs: Sequence[str], hint: str, host: Transport) -> None:
    """Raises HeliostatError when one of these programs is not on that machine."""
    missing = host.run(["sh", "-c", _MISSING, "sh", *programs], timeout=FIND_S).out.split()
    if missing:
        names = ", ".join(f"`{name}`" for name in missing)
        raise HeliostatError(
            "a program that is needed is missing",
            cause=f"not found: {names}",
            hint=hint,
            code=Code.PROGRAM_NOT_FOUND,
        )


def by_name(*asked: Question) -> dict[str, Question]:
    """By name."""
    return {question.name: question for question in asked}


@dataclass(frozen=True)
class PlatformStatus:
    """What is known of a cluster whose Ray the platform starts: what our own agents write into its folder elsewhere.

    nodes: by our name for it, {"state", "reason", "role", "group", "ip", "host", "id": its machine's own name}; more than were asked for where they come
    with demand. Where something of a node was restarted in place: "restarts" (how often), "restarted" (when), "restart" (a sentence). connection: as `connection.json`, once Ray's dashboard can be asked. token: where the platform made it."""

    nodes: Mapping[str, Mapping[str, Any]]
    connection: Mapping[str, Any] | None = None
    token: str | None = None


class Backend(Protocol):
    name: ClassVar[str]
    Options: ClassVar[type]  # a frozen dataclass: the site's own table of the file
    starts_ray: ClassVar[bool]  # True: our agent runs `ray start`; False: the platform does
    shares_files: ClassVar[bool]  # True: the head sees the caller's folders under the same paths
    autoscales: ClassVar[bool]  # True: nodes come and go with Ray's demand (`autoscale`)
    most_nodes: ClassVar[int]  # that one cluster may have
    takes_options: ClassVar[bool]  # True: there is a scheduler whose own options a person may give
    reserved_short_options: ClassVar[
        tuple[str, ...]
    ]  # its scheduler's options that are flags of ours elsewhere (-q)
    poll_interval: ClassVar[
        tuple[float, float]
    ]  # seconds between two questions to the site: after news, and at most

    questions: ClassVar[Mapping[str, Question]]  # what `checks` answers

    def checks(self, spec: ClusterSpec | None, host: Transport) -> list[Check]:
        """For `doctor`; never raises."""
        ...

    def nodes_of(self, table: Mapping[str, Any]) -> int | None:
        """How many nodes the site's own table asks for, in its own words (a select statement); None: the spec says."""
        ...

    def require(self, spec: ClusterSpec, host: Transport) -> None:
        """Raises HeliostatError when a program or a package that `launch` needs is missing. Called before anything of a new
        cluster is recorded."""
        ...

    def survey(self, options: Any, host: Transport) -> Mapping[str, Any]:
        """What the site has, as far as planning needs it; one quick look, {} where it does not answer."""
        ...

    def plan(self, request: LaunchRequest) -> Plan:
        """Pure. Raises UsageError for what the site cannot do."""
        ...

    def launch(self, plan: Plan, request: LaunchRequest, host: Transport) -> Iterator[Handle]:
        """Yields each handle the moment it exists, and goes on only when the caller has put it on record."""
        ...

    def find_orphans(self, mark: str | None, spec: ClusterSpec, host: Transport) -> Sequence[Handle]:
        """What was launched for this cluster and may not be on record, because the one who launched it died. Empty where
        such a thing ends by itself. Raises HeliostatError where the backend does not say. mark None: nobody has the record; whatever has the cluster's name, where the site's
        machines remember it: "id" and "launch" of each in its detail."""
        ...

    def observe(self, handles: Sequence[Handle], host: Transport) -> dict[str, Observation]:
        """One question for all of them. A handle that nobody knows is GONE; silence is UNKNOWN."""
        ...

    def cancel(self, handles: Sequence[Handle], host: Transport, *, now: bool = False) -> None:
        """Idempotent; returns when they are gone. Raises HeliostatError when something could not be stopped; PartialFailure
        with `now` when machines that cannot be reached are given up."""
        ...

    def execute(self, node: str, handle: Handle, argv: Sequence[str], host: Transport) -> Completed:
        """The command on that node, to its end."""
        ...

    def collect_logs(self, handles: Sequence[Handle], folder: Path) -> Sequence[str]:
        """The end: logs that lie elsewhere come into this folder, and what was written there goes. What a person should know."""
        ...

    def reach(self, handle: Handle, host: Transport) -> Transport:
        """The way to the node: for logs, exec and tunnels."""
        ...


class Platform(Backend, Protocol):
    """A site that starts Ray itself (`starts_ray` False): one handle is the whole cluster, and no agent of ours is there.
    Work goes through Ray's Jobs API, that of a `run` too."""

    def platform_status(
        self, handle: Handle, nodes: Sequence[NodeRecord], before: Mapping[str, Any], host: Transport
    ) -> PlatformStatus:
        """How it is: of every one of these nodes, and of those that came with demand. before: what was told last, by node,
        so that each keeps its name. Raises HeliostatError when the platform does not answer."""
        ...

    def resize(self, handle: Handle, workers: Mapping[str | None, int], host: Transport) -> None:
        """So many workers of each of these groups; None: of the one that has no name."""
        ...

    def logs(
        self, handle: Handle, node: str, status: Mapping[str, Any], known: Mapping[str, int], host: Transport
    ) -> Mapping[str, bytes]:
        """What the node's logs have beyond the bytes that are known of each, by file name. told: of `tell`."""
        ...

    def limited_command(self, handle: Handle, argv: Sequence[str], host: Transport) -> Sequence[str]:
        """The command of a `run`, so that it ends at the cluster's time limit; as it is where the platform sees to that."""
        ...

    def started_job(self, handle: Handle, job: str, host: Transport) -> None:
        """The command of a `run` was handed to Ray under this id: a platform that can, ends the cluster after it."""
        ...

    def suspend(self, handle: Handle, host: Transport) -> None:
        """Stops every node of the cluster; `resume` starts them again. Raises UsageError where the platform cannot."""
        ...

    def resume(self, handle: Handle, host: Transport) -> None:
        """Starts the nodes of a suspended cluster again."""
        ...

    def replace_node(self, handle: Handle, node: str, status: Mapping[str, Any], host: Transport) -> None:
        """This node ends, and the platform puts another in its place. UsageError where it does not."""
        ...
