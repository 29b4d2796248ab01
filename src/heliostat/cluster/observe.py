"""Observes clusters: asks the backend, reads what the agents wrote, derives the state of each node, refreshes the record.

Nothing here starts or stops anything.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from heliostat.agent.protocol import ClusterReport, NodeReport, StopReason, Warned
from heliostat.backends.base import Handle, Observation
from heliostat.cluster.access import Access
from heliostat.cluster.accounting import note_joins, note_ready
from heliostat.cluster.platform_sync import DEMAND, PlatformSync, handle_of, new_nodes
from heliostat.cluster.resolve import find_cause, needs_report, resolve_platform_state, resolve_state
from heliostat.cluster.view import View, group_alike, make_move
from heliostat.common.documents import EventRow
from heliostat.common.errors import DeadlineError, DiskError, HeliostatError, NotFoundError
from heliostat.common.events import Emit, Event
from heliostat.state.records import NodeRecord, Record
from heliostat.state.states import TERMINAL, NodeState
from heliostat.state.store import ClusterDirectory

if TYPE_CHECKING:
    from heliostat.cluster.clock import Clock

N = NodeState
OBSERVE_LOCK_S = 5.0  # the next command that observes the cluster writes what this one could not
_RUNS = Observation(N.ALLOCATED)


@dataclass(frozen=True)
class _Answer:
    """The backend's last answer: the facts known at that time, when to ask again, the observations."""

    facts: list[Any]
    next_at: float
    pause: float
    seen: dict[str, Observation]


@dataclass(frozen=True)
class _Evidence:
    """What is known of a cluster at one moment."""

    folder: ClusterDirectory
    record: Record
    seen: dict[str, Observation]  # by native id
    live: ClusterReport  # what the head wrote
    shared: set[str]  # native ids of handles with several nodes
    on_platform: bool


class Observer:
    """Observes the clusters of one store. Remembers answers, so that a backend is not asked too often."""

    def __init__(self, access: Access, emit: Emit, clock: Clock) -> None:
        self._access, self._emit, self._clock = access, emit, clock
        self._store = access.store
        self._answers: dict[Path, _Answer] = {}
        self._syncs: dict[str, PlatformSync] = {}  # by cluster id
        self._ended: set[str] = set()  # native ids of handles that were observed to end

    # -- one cluster

    def find(self, name: str) -> View:
        """The cluster of this name, observed. Raises NotFoundError."""
        return self.observe(self._store.open(name))

    def observe(self, folder: ClusterDirectory, *, record: Record | None = None) -> View:
        """The cluster as it is now. Every change of state is emitted and recorded.

        record: what is known where the disk could not take it; then nothing is written."""
        save = record is None
        record = record or folder.record()
        evidence = self._gather(folder, record)
        resolved = (self._resolve_node(evidence, node) for node in record.nodes.values())
        moves = [move for move in resolved if move]
        live = evidence.live
        note_joins(record, live)
        _remove_left_nodes(record)
        over = bool(moves) and record.has_ended()
        note_ready(record, live)
        if over:
            _note_end(evidence)
        if moves and save:
            self._write_moves(folder, record, moves)
        if warned := live.get("warned"):
            self._emit_warning(folder, record, warned)
        return View(folder, record, live)

    def find_or_archived(self, name: str) -> View:
        """The cluster of this name, observed; if it has ended, as it was when it was archived."""
        try:
            return self.find(name)
        except NotFoundError:
            past = self._store.last_archived(name)
            if past is None:
                raise
            return View.read(past)

    def observe_or_archived(self, folder: ClusterDirectory) -> View:
        """The cluster as it is now, or as it was when another command archived it."""
        try:
            return self.observe(folder)
        except NotFoundError:
            past = self._store.last_archived(folder.name)
            if past is None:
                raise
            return View.read(past)

    def refresh(
        self,
        folder: ClusterDirectory,
        node: str | None = None,
        record: Record | None = None,
        now: bool = False,
    ) -> None:
        """Updates the local copy of a remote cluster's files, with the logs of this node. Errors are left to `observe`.
        now: even if the last update was a moment ago."""
        with contextlib.suppress(HeliostatError, OSError, ValueError):
            record = record or folder.record()
            mirror, sync = self._access.mirror(folder, record, node), self.platform_sync(folder, record)
            if mirror:
                mirror.pull(node, now)
            if sync:
                sync.pull(record, node)

    def platform_sync(self, folder: ClusterDirectory, record: Record) -> PlatformSync | None:
        """The status source of a cluster whose platform starts Ray. None: our agents start it, or the cluster has ended."""
        platform, handle = self._access.platform(record), handle_of(record)
        ended = self._access.is_archived(folder) or (handle and handle.native_id in self._ended)
        if platform is None or ended:
            return None
        if record.id not in self._syncs:
            self._syncs[record.id] = PlatformSync(folder, platform, self._access.host_of(record))
        return self._syncs[record.id]

    def invalidate(self, folder: ClusterDirectory, ended: Iterable[Handle] = ()) -> None:
        """Drops the backend's last answers after this process changed something. ended: handles that are verified to be gone."""
        self._answers.pop(folder.path, None)
        for sync in list(self._syncs.values()):
            sync.invalidate()
        self._ended.update(handle.native_id for handle in ended)

    def note_launched(self, handle: Handle) -> None:
        """A handle of this native id exists again, even if one was observed to end before."""
        self._ended.discard(handle.native_id)

    # -- evidence

    def _gather(self, folder: ClusterDirectory, record: Record) -> _Evidence:
        handles = [Handle.from_json(data) for data in record.handles]
        open_handles = [
            h
            for h in handles
            if any(record.nodes[n].state not in TERMINAL for n in h.nodes if n in record.nodes)
        ]
        self.refresh(folder, record=record)
        live = folder.state()
        on_platform = self._access.platform(record) is not None
        if on_platform and record.target == "up":
            record.nodes.update({node.name: node for node in new_nodes(record, live.get("nodes") or {})})
        seen = self._ask_backend(folder, record, open_handles, live)
        if any(one.state is N.GONE for one in seen.values()):
            # the node may have ended after its report was copied: read the last report
            self.refresh(folder, record=record, now=True)
            live = folder.state()
        shared = {h.native_id for h in handles if len(h.nodes) > 1}
        return _Evidence(folder, record, seen, live, shared, on_platform)

    def _ask_backend(
        self, folder: ClusterDirectory, record: Record, handles: list[Handle], live: ClusterReport
    ) -> dict[str, Observation]:
        """The backend's observations of the handles. A scheduler is asked when the head's state changed, and else at growing
        intervals, even if the caller polls ten times a second."""
        known = self._known_observations(record, handles, live)
        asked = [h for h in handles if h.native_id not in known]
        if not asked:
            return known
        # the start and the end of the head are news of the job; what its nodes do is not
        facts = [[h.native_id for h in handles], bool(live.get("nodes")), bool(live.get("ended"))]
        last, now = self._answers.get(folder.path), self._clock.monotonic()
        is_new = last is None or any(h.native_id not in last.seen for h in asked)
        if last is None or is_new or last.facts != facts or now >= last.next_at:
            backend = self._access.backend(record)
            first, most = backend.poll_interval
            pause = first if last is None or last.facts != facts else min(most, last.pause * 1.5)
            seen = backend.observe(asked, self._access.host_of(record))
            last = _Answer(facts, self._clock.monotonic() + pause, pause, seen)
            self._answers[folder.path] = last
        head_runs = any(one.state is N.ALLOCATED for one in known.values())
        silent = {job for job, one in last.seen.items() if one.state is N.UNKNOWN and head_runs}
        return {**{job: _RUNS if job in silent else one for job, one in last.seen.items()}, **known}

    def _known_observations(
        self, record: Record, handles: list[Handle], live: ClusterReport
    ) -> dict[str, Observation]:
        """Observations that need no question: handles that were observed to end; and, where the copied directory shows that
        the head lives, the head and the nodes that it has contact with."""
        known = {h.native_id: Observation(N.GONE) for h in handles if h.native_id in self._ended}
        mirror = self._access.open_mirror(record)
        head = next((h for h in handles if h.detail.get("role") == "head"), None)
        if mirror is None or mirror.head is None or head is None:
            return known
        known.setdefault(head.native_id, Observation(*mirror.head))
        if known[head.native_id].state is N.ALLOCATED:
            for handle in handles:
                pairs = [(record.nodes.get(n), (live.get("nodes") or {}).get(n) or {}) for n in handle.nodes]
                if all(
                    node and row.get("launch") == node.launch and row.get("state") in ("STARTING", "READY")
                    for node, row in pairs
                ):
                    known.setdefault(handle.native_id, _RUNS)
        return known

    # -- states

    def _resolve_node(self, evidence: _Evidence, node: NodeRecord) -> EventRow | None:
        """Updates the node; the event of its change of state, if it changed."""
        if node.state in TERMINAL or node.handle is None:
            return None
        record, live = evidence.record, evidence.live
        seen = evidence.seen.get(node.handle, Observation(N.UNKNOWN, "the backend did not report it"))
        # a node that ends by itself is still wanted: the scheduler may queue its job again
        was_stopped = node.state is N.STOPPING and node.cause in (StopReason.SCALED, StopReason.RESTARTED)
        wanted = record.target == "up" and not was_stopped
        # after the head's end its table is out of date
        table = {} if live.get("ended") else live.get("nodes") or {}
        row = table.get(node.name) or {}
        report: NodeReport = seen.report
        if not report and needs_report(node, seen, row) and not evidence.on_platform:
            report = evidence.folder.node_report(node.name)
        from_platform = (
            resolve_platform_state(node, row) if evidence.on_platform and seen.state is N.ALLOCATED else None
        )
        alone = node.handle not in evidence.shared
        state, reason, since = from_platform or resolve_state(node, seen, row, report, wanted, alone)
        cause = find_cause(node, report, row)
        if state is N.FAILED and not report:  # the failure was before the start of our agent
            reason = self._reason_from_logs(evidence, node) or reason
        is_early = node.state in (N.REQUESTED, N.QUEUED, N.UNKNOWN)
        if state is N.ALLOCATED and not from_platform and not is_early:
            return None  # it runs, and nothing more is known at this moment
        if node.state is N.STOPPING and state not in TERMINAL and state is not N.UNKNOWN:
            is_requeued = record.target == "up" and (state is N.QUEUED or since > node.since)
            if not is_requeued:
                return None  # evidence from before the order to stop does not count
        if state is node.state:
            node.reason, node.cause = reason, cause  # not a change of state: no event, and `since` stays
            return None
        return make_move(node, state, reason, since, cause)

    def _reason_from_logs(self, evidence: _Evidence, node: NodeRecord) -> str:
        """The last line of a log that was written before our agent started. A batch job's log is named by its id, or in its
        handle."""
        logs, handles = evidence.folder.logs, evidence.record.handles
        named = [h["detail"].get("log") for h in handles if h["native_id"] == node.handle]
        of_job = [*logs.glob(f"*-{node.handle}.out"), *(logs / log for log in named if log)]
        return next(filter(None, map(self._last_line, (logs / node.name / "agent.log", *of_job))), "")

    def _last_line(self, log: Path) -> str:
        """The last line of a log that is not an answer of the agent."""
        lines = self._access.transport.read(log).decode("utf-8", "replace").splitlines()
        return next((line.strip()[:300] for line in reversed(lines) if line.strip() and line[0] != "{"), "")

    # -- the record

    def _write_moves(self, folder: ClusterDirectory, record: Record, moves: list[EventRow]) -> None:
        try:
            with folder.lock(OBSERVE_LOCK_S):
                _merge_moves(folder, record, moves)
        except NotFoundError:
            return  # another command archived it at this moment
        except (DiskError, DeadlineError):
            pass  # observing works on a full disk, in a read-only home, and while another command writes
        groups = group_alike(moves, lambda move: move["node"], lambda move: (move["to"], move["reason"]))
        names_of = {id(move): names for names, move in groups}
        for move in moves:  # "names", on the first move of a group: all nodes of the group
            data = {**move, "names": names_of.get(id(move), "")}
            self._emit(Event("move", f"{move['to']}", move["node"], data))

    def _emit_warning(self, folder: ClusterDirectory, record: Record, warned: Warned) -> None:
        """Emits a warning of the head's agent (the time limit is near) once."""
        at = float(warned.get("at") or 0)
        if at <= record.warned:
            return
        record.warned = at
        with contextlib.suppress(DiskError, NotFoundError, DeadlineError), folder.lock(OBSERVE_LOCK_S):
            fresh = folder.record()
            if at > fresh.warned:
                fresh.warned = at
                folder.append({"at": at, "kind": "note", "text": str(warned.get("text", ""))})
                folder.save(fresh)
        self._emit(Event("note", f"`{record.name}`: {warned.get('text', '')}"))


def _merge_moves(folder: ClusterDirectory, record: Record, moves: list[EventRow]) -> None:
    """Writes the changes of state into the record on disk. What other commands wrote meanwhile stays."""
    fresh = folder.record()
    for move in moves:
        known, mine = fresh.nodes.get(move["node"]), record.nodes.get(move["node"])
        is_new = known is None and mine is not None and mine.joined == DEMAND
        if is_new or (known and known.state == move["from"]):
            folder.append(move)
            if mine is not None:
                fresh.nodes[move["node"]] = mine
            else:
                del fresh.nodes[move["node"]]
    fresh.ready, fresh.ended = record.ready, record.ended
    joins = {job["id"]: job for job in record.jobs if "nodes" in job}
    fresh.jobs = [{**job, **joins.get(job["id"], {})} for job in fresh.jobs]
    fresh.reason, fresh.exit_code = record.reason, record.exit_code
    folder.save(fresh)


def _remove_left_nodes(record: Record) -> None:
    """Removes joined nodes that left as planned."""
    for name in [n.name for n in record.nodes.values() if n.joined and n.state is N.GONE]:
        del record.nodes[name]


def _note_end(evidence: _Evidence) -> None:
    """Completes the record of a cluster that was observed to end."""
    record, live = evidence.record, evidence.live
    ended = live.get("ended") or {}
    record.ended = float(ended.get("at") or time.time())
    head_reason = next((n.reason for n in record.nodes.values() if n.role == "head"), "")
    record.reason = record.reason or str(ended.get("reason", "")) or head_reason
    codes = (one.report["exit_code"] for one in evidence.seen.values() if "exit_code" in one.report)
    reported = next(codes, None)
    default = reported if reported is not None else record.exit_code
    record.exit_code = (live.get("job") or {}).get("exit_code", default)
