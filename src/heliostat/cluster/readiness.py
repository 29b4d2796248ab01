"""Waits until the nodes of a cluster are ready, and explains why they did not become ready."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from heliostat.agent.protocol import RefusalCause
from heliostat.cluster import planner
from heliostat.cluster.access import Access
from heliostat.cluster.launch import was_terminated
from heliostat.cluster.observe import Observer
from heliostat.cluster.view import View, describe_waiting, group_nodes, head_of
from heliostat.common.errors import DeadlineError, HeliostatError, PartialFailure, StillStarting
from heliostat.common.events import Emit, Event
from heliostat.common.units import format_duration
from heliostat.state.records import NodeRecord, Record
from heliostat.state.states import TERMINAL, NodeState
from heliostat.state.store import ClusterDirectory

if TYPE_CHECKING:
    from heliostat.cluster.clock import Clock

POLL_S = 0.1
UP_S = 600.0  # time for a node whose allocation has started; the wait in a queue has no limit
N = NodeState
_SETTLED = (*TERMINAL, N.READY, N.LOST)

# what helps against a refusal of the head's agent
HINTS: dict[str, str] = {
    RefusalCause.ENVIRONMENT_INCOMPLETE: "heliostat setup, with the same file",
    RefusalCause.TEMP_DIRECTORY: "set TMPDIR, by --setup on other hosts, to a directory that only you can change; heliostat doctor",
    RefusalCause.RAY_MISSING_IN_IMAGE: "build the image on docker://rayproject/ray, or install 'ray[default]' in it",
    RefusalCause.CONTAINER_PROGRAM_MISSING: "load one by --setup, for example 'module load apptainer'",
    RefusalCause.STAGE_DISK_FULL: "set TMPDIR to a larger disk by --setup, or leave out `environment.stage`",
    RefusalCause.RAY_MISSING: "pip install 'ray[default]==2.60.0' in that environment; `heliostat setup` installs it in an "
    "environment of the file",
    RefusalCause.RAY_VERSION_DIFFERS: "take `ray` out of the file's environment, or install that version",
    RefusalCause.RAY_TOO_OLD: "install Ray 2.52 or newer, or set `security: {auth: none}` in the file",
    RefusalCause.OPENSSL_MISSING: "install openssl on that host, or take `tls` out of the file",
    RefusalCause.SHARED_MEMORY: "--object-store 100M, or a larger /dev/shm",
    RefusalCause.PORTS_TAKEN: "widen network.ports in the file, or take it out",
}


class ReadinessDeadline:
    """Decides how long to wait: UP_S from the start of an allocation; a queued one has no limit.

    limit_s: a limit for the whole wait, from now on."""

    def __init__(self, clock: Clock, limit_s: float | None = None) -> None:
        self._clock, self.limit_s = clock, limit_s
        self._began = clock.monotonic()
        self._started: dict[str, float] = {}  # when each node was first seen to have its allocation

    def overdue(self, nodes: Sequence[NodeRecord], *, news: bool = False) -> str:
        """Why the wait is over; "": it is not. news: a platform makes progress, so every count starts again."""
        now = self._clock.monotonic()
        if news:
            self._started.clear()
        for node in nodes:
            if node.state is N.QUEUED:
                self._started.pop(node.name, None)
            else:
                self._started.setdefault(node.name, now)
        if self.limit_s is not None and now - self._began > self.limit_s:
            return f"the limit of {format_duration(self.limit_s)} has passed"
        waiting = [node for node in nodes if node.state not in _SETTLED]
        # without a head nothing becomes ready; with a ready head, one queued node is enough to continue the wait
        decisive = [node for node in waiting if node.role == "head"] or waiting or nodes
        if any(node.state is N.QUEUED for node in decisive):
            return ""
        latest = max(self._started[node.name] for node in decisive)
        return f"after {UP_S:.0f} s" if now - latest > UP_S else ""


class ReadinessWaiter:
    def __init__(self, access: Access, observer: Observer, emit: Emit, clock: Clock) -> None:
        self._access, self._observer, self._emit, self._clock = access, observer, emit, clock

    def wait(self, folder: ClusterDirectory, timeout_s: float | None = None) -> View:
        """Waits until the cluster has the nodes that its spec asks for. Raises HeliostatError when it cannot get them.

        timeout_s: a limit for the wait, queues included."""
        deadline, last = ReadinessDeadline(self._clock, timeout_s), ""
        need: int | None = None
        while True:
            view = self._observer.observe_or_archived(folder)
            record = view.record
            if record.target != "up":
                raise was_terminated(record)
            need = need or (planner.spec_of(record).min_nodes or len(planner.members_of(record)))
            if self._is_ready(view, need):
                return view
            text = describe_waiting(record.nodes.values())
            news = text != last and self._access.platform(record) is not None
            overdue = deadline.overdue(_own_nodes(record), news=news)
            last = text
            if overdue:
                raise self._timeout_error(view, overdue)
            done = {"alive": view.alive(), "of": len(record.nodes)}
            self._emit(Event("progress", f"{view.alive()} of {need} nodes alive; {text}", None, done))
            self._clock.sleep(POLL_S)

    def _is_ready(self, view: View, need: int) -> bool:
        """Whether enough nodes are ready. Raises HeliostatError if that can no longer happen."""
        head, sync = head_of(view.record), self._observer.platform_sync(view.folder, view.record)
        if sync and sync.refusal:
            raise sync.refusal
        if view.run and view.run.get("started"):
            return True  # a short command may have ended since the last observation
        if head.state in TERMINAL:
            raise self._head_error(view, head)
        own = _own_nodes(view.record)
        if head.state is N.READY and view.address:
            if sum(node.state is N.READY for node in own) >= need:
                return True
            if all(node.state in _SETTLED for node in own):
                raise _partial_error(view, need)
        return False

    def _timeout_error(self, view: View, overdue: str) -> DeadlineError:
        """A cluster whose head is ready is kept: it can be used, and its other nodes may become ready later."""
        record = view.record
        groups = group_nodes(n for n in _own_nodes(record) if n.state not in _SETTLED)
        names = ", ".join(f"{names} {node.state} {node.reason}".strip() for names, node in groups)
        cause = f"{overdue}: {names}" if names else overdue
        if record.kind == "up" and view.address and not view.headless:
            ready = f"{view.alive()} of the {len(record.nodes)} requested nodes"
            hint = (
                f"heliostat status {record.name}; repeat `up` to wait again, or heliostat down {record.name}"
            )
            return StillStarting(f"`{record.name}` has {ready}", cause=cause, hint=hint)
        logs = self._access.store.archive_path(record) / "logs"
        return DeadlineError(f"`{record.name}` did not become ready", cause=cause, details=str(logs))

    def _head_error(self, view: View, head: NodeRecord) -> HeliostatError:
        logs = self._access.store.archive_path(view.record) / "logs"
        return HeliostatError(
            f"the cluster `{view.record.name}` did not start",
            cause=head.reason or "its head ended",
            details=f"log: {logs / head.name if (view.folder.logs / head.name).is_dir() else logs}",
            hint=startup_hint(head.cause, view.record),
        )


def _own_nodes(record: Record) -> list[NodeRecord]:
    """The nodes of the spec: joined nodes do not count."""
    return [node for node in record.nodes.values() if not node.joined]


def _partial_error(view: View, need: int) -> HeliostatError:
    record = view.record
    bad = [node for node in record.nodes.values() if node.state in (*TERMINAL, N.LOST)]
    cause = "; ".join(f"{node.name}: {node.reason}" for node in bad)[:400]
    log = view.folder.logs / bad[0].name if bad else view.folder.logs
    if record.kind == "run":
        return HeliostatError(
            f"the command was not started: only {view.alive()} of the {need} nodes became ready",
            cause=cause,
            details=f"log: {log}",
        )
    return PartialFailure(
        f"`{record.name}` has {view.alive()} of the {len(record.nodes)} requested nodes",
        cause=cause,
        details=f"log: {log}",
        hint="repeat the command to start the missing nodes",
    )


def startup_hint(cause: str, record: Record) -> str:
    """The command or setting that helps against this cause; else the command that shows the head's log."""
    head = next((node.name for node in record.nodes.values() if node.role == "head"), "head")
    return HINTS.get(cause) or f"heliostat logs {record.name} {head}"
