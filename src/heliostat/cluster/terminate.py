"""Terminates clusters: stops everything that was started, verifies that, and archives the record. Suspends them, too."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from heliostat.backends.base import Handle
from heliostat.cluster.access import Access
from heliostat.cluster.archive import Archiver, check_same_cluster, is_batch
from heliostat.cluster.observe import Observer
from heliostat.cluster.platform_sync import handle_of
from heliostat.cluster.view import View, make_move
from heliostat.common.documents import EventRow
from heliostat.common.errors import (
    DeadlineError,
    DiskError,
    HeliostatError,
    Interrupted,
    NotFoundError,
    PartialFailure,
    UsageError,
)
from heliostat.common.events import Emit, Event
from heliostat.common.units import count
from heliostat.state.records import Record
from heliostat.state.states import TERMINAL, NodeState
from heliostat.state.store import ClusterDirectory

if TYPE_CHECKING:
    from heliostat.cluster.clock import Clock
    from heliostat.cluster.connection import Connector

N = NodeState
SUSPEND_S = 180.0
RELEASE_S = 30.0  # for agents to end by themselves after the command of a `run`
POLL_S = 0.05
# `down` of an ended cluster asks the scheduler again for this long; later another job may have the same id
CAME_BACK_S = 86400.0
LAUNCHER_S = 30.0  # for another command to see that the cluster is to be terminated


class Terminator:
    def __init__(
        self,
        access: Access,
        observer: Observer,
        archiver: Archiver,
        connector: Connector,
        emit: Emit,
        clock: Clock,
    ) -> None:
        self._access, self._observer, self._archiver = access, observer, archiver
        self._connector, self._emit, self._clock = connector, emit, clock
        self._store = access.store

    # -- commands

    def down(self, name: str, *, now: bool = False) -> View:
        """Terminates the cluster and verifies that nothing is left. An archived cluster is returned as it was.

        now: kill at once, without time to save anything."""
        folder = self._store.find(name) or self._open_or_archived(name)
        if self._access.is_archived(folder):
            self._cancel_requeued_jobs(folder.record())
            return View.read(folder)
        return self.terminate(folder, "taken down", now=now)

    def suspend(self, name: str) -> View:
        """Stops all nodes; `up` resumes the cluster. Raises UsageError where the backend cannot."""
        folder = self._store.open(name)
        record = self._observer.observe(folder).record
        platform, handle = self._access.platform(record), handle_of(record)
        if platform is None or handle is None:
            raise UsageError(
                f"`{name}` cannot be suspended",
                cause=f"`{record.backend}` does not support it",
                hint=f"heliostat down {name}",
            )
        if record.kind != "up":
            raise UsageError(f"`{name}` runs one command and ends with it", hint=f"heliostat down {name}")
        self._emit(Event("note", f"suspending `{name}`"))
        platform.suspend(handle, self._access.host_of(record))
        self._observer.invalidate(folder)
        deadline = self._clock.monotonic() + SUSPEND_S
        while True:
            view = self._observer.observe(folder)
            active = [
                node.name
                for node in view.record.nodes.values()
                if not node.joined and node.state is not N.SUSPENDED
            ]
            if not active:
                return view
            if self._clock.monotonic() > deadline:
                raise DeadlineError(
                    f"`{name}` was not suspended within {SUSPEND_S:.0f} s",
                    cause=f"still running: {', '.join(active)}",
                    hint=f"heliostat status {name}",
                )
            self._clock.sleep(2 * POLL_S)

    # -- the end of other operations

    def terminate_interrupted(
        self,
        folder: ClusterDirectory,
        before_archive: Callable[[], object] = bool,
        first: Callable[[], object] = bool,
    ) -> None:
        """Terminates the cluster after Ctrl-C; a second Ctrl-C kills it at once. Raises Interrupted.

        first: called before, to stop a job. before_archive: called while the files are still in the cluster's directory."""
        name = folder.name
        for reason, now in (("interrupted", False), ("interrupted twice", True), ("interrupted twice", True)):
            try:
                if not now:
                    self._emit(Event("note", f"interrupted: releasing `{name}` (Ctrl-C again: at once)"))
                    first()
                self.terminate(folder, reason, now=now, before_archive=before_archive)
                raise Interrupted(
                    f"interrupted; `{name}` is released", hint=f"heliostat logs {name}"
                ) from None
            except KeyboardInterrupt:
                continue
        raise Interrupted(
            f"interrupted while releasing `{name}`", hint=f"heliostat down {name} --now"
        ) from None

    def terminate_failed(self, folder: ClusterDirectory, reason: str = "it did not start") -> None:
        """Terminates a cluster after an error, which the caller raises; its logs stay in the history."""
        try:
            self.terminate(folder, reason)
        except (NotFoundError, PartialFailure):
            pass  # the first error is the one to report
        except HeliostatError as error:
            text = f"`{folder.name}` could not be released: {error}; heliostat down {folder.name} --now"
            self._emit(Event("note", text))

    def release(self, folder: ClusterDirectory) -> None:
        """Waits for the agents, which end by themselves after the command of a `run`; terminates what is left."""
        self._emit(Event("note", f"releasing `{folder.name}`"))
        try:
            wait_s = RELEASE_S if self._access.platform(folder.record()) is None else 0
            deadline = self._clock.monotonic() + wait_s
            while self._clock.monotonic() < deadline:
                view = self._observer.observe(folder)
                if view.record.has_ended():
                    self._archiver.archive(view)
                    return
                self._clock.sleep(POLL_S)
            self.terminate(folder, "released")
        except NotFoundError:
            return  # another command archived it
        except (DiskError, PartialFailure) as error:
            self._emit(Event("note", f"{error.message}: {error.cause}"))

    def terminate(
        self,
        folder: ClusterDirectory,
        reason: str,
        *,
        now: bool = False,
        before_archive: Callable[[], object] = bool,
    ) -> View:
        """Stops all nodes, verifies that, and archives the record. Stops them even if the disk cannot take the record."""
        try:
            view, given_up = self._stop(folder, reason, now, before_archive)
        except NotFoundError:
            past = self._store.last_archived(folder.name)  # another `down` archived it
            if past is None:
                raise
            return View.read(past)
        for node in view.record.nodes.values():
            if node.handle is None:  # it was never started
                node.state = N.GONE
        left = [node.name for node in view.record.nodes.values() if node.state not in TERMINAL]
        if left:
            raise HeliostatError(
                f"`{view.record.name}` could not be ended whole",
                cause=f"still there: {', '.join(left)}",
                hint=f"heliostat down {view.record.name} --now",
            )
        self._report_unreachable(folder, view.record)
        try:
            ended = self._archiver.archive(view)
            if given_up:
                raise given_up
            return ended
        except DiskError as error:
            raise PartialFailure(
                f"`{view.record.name}` is stopped, but its record could not be written",
                cause=error.cause,
                details=error.message,
                hint=f"free some space there, then heliostat down {view.record.name}",
            ) from None

    # -- steps of `terminate`

    def _stop(
        self, folder: ClusterDirectory, reason: str, now: bool, before_archive: Callable[[], object]
    ) -> tuple[View, PartialFailure | None]:
        """Cancels every handle: (the cluster after that, the error about hosts that could not be reached)."""
        record, written = self._request_end(folder, reason)
        if folder.is_leased() and written:
            record = self._wait_for_launcher(folder, record)
        if started := sum(node.handle is not None for node in record.nodes.values()):
            self._emit(Event("note", f"stopping {count(started, 'node')} of `{record.name}`"))
        handles = [Handle.from_json(h) for h in record.handles]
        if any(node.handle is None for node in record.nodes.values()):
            known = {h.native_id for h in handles}
            orphans = [h for h in self._find_orphans(record, now) if h.native_id not in known]
            handles += orphans
            record.handles += [handle.to_json() for handle in orphans]
            self._record_orphans(folder, orphans)
        given_up = None
        if not now:
            self._collect_platform_logs(folder, record)
        try:
            self._access.backend(record).cancel(handles, self._access.host_of(record), now=now)
        except PartialFailure as error:
            given_up = error
        except HeliostatError:
            folder.record()  # raises NotFoundError if another command archived it meanwhile
            raise
        with contextlib.suppress(OSError):  # the output may have no reader
            before_archive()
        self._observer.invalidate(folder, handles)
        self._archiver.collect_logs(folder, record)
        view = self._observer.observe(folder, record=None if written else record)
        check_same_cluster(folder, record)
        return view, given_up

    def _request_end(self, folder: ClusterDirectory, reason: str) -> tuple[Record, bool]:
        """Sets the target to "down": (the record, whether it could be written)."""

        def request() -> tuple[Record, list[EventRow]]:
            record = folder.record()
            record.target, record.reason = "down", record.reason or reason
            done = (N.STOPPING, *TERMINAL)
            running = [n for n in record.nodes.values() if n.handle is not None and n.state not in done]
            return record, [make_move(node, N.STOPPING, reason) for node in running]

        try:
            with folder.lock():
                record, moves = request()
                for move in moves:
                    folder.append(move)
                folder.save(record)
            return record, True
        except DiskError:
            return request()[0], False

    def _wait_for_launcher(self, folder: ClusterDirectory, record: Record) -> Record:
        """Waits for another command that launches nodes: it sees the target before it launches the next ones. Returns the
        record with what it launched. If it takes too long, it cancels itself what it can no longer record."""
        with contextlib.suppress(DeadlineError), folder.lease(LAUNCHER_S):
            pass
        known = folder.record()
        return known if known.id == record.id else record

    def _find_orphans(self, record: Record, now: bool) -> Sequence[Handle]:
        """Handles that were launched and are not recorded. With `now`, a backend that does not answer is ignored if no launch
        is recorded."""
        from heliostat.cluster import planner  # only here `down` needs the whole spec

        backend, name = self._access.backend(record), record.name
        try:
            return backend.find_orphans(record.id, planner.spec_of(record), self._access.host_of(record))
        except HeliostatError as error:
            if record.handles:
                raise
            unchecked = f"whether `{record.backend}` runs anything of `{name}`"
            if not now:
                hint = f"heliostat down {name} --now forgets it"
                raise HeliostatError(f"could not check {unchecked}", cause=str(error), hint=hint) from None
            self._access.mark_collected(record)  # no recorded handle has remote files
            self._emit(Event("note", f"warning: could not check {unchecked}: {error}"))
            return []

    def _record_orphans(self, folder: ClusterDirectory, handles: Sequence[Handle]) -> None:
        """Records the handles, so that their remote files are collected too."""
        if handles:
            with contextlib.suppress(DiskError), folder.lock():
                record = folder.record()
                record.handles += [handle.to_json() for handle in handles]
                folder.save(record)

    def _collect_platform_logs(self, folder: ClusterDirectory, record: Record) -> None:
        """Copies logs and job output from a platform, whose machines are deleted with them."""
        sync, handle = self._observer.platform_sync(folder, record), handle_of(record)
        if sync is None or handle is None:
            return
        from heliostat.cluster import log_collector

        view = View(folder, record, folder.state())
        collector = log_collector.LogCollector(folder, record, sync, handle)
        for note in collector.run(lambda: self._connector.ray_api(view), log_collector.COLLECT_S):
            self._emit(Event("note", note))

    def _report_unreachable(self, folder: ClusterDirectory, record: Record) -> None:
        """Names the hosts of a batch job on which a node ended without a report: its private directory may still exist. A
        scheduler gives no access to a host after the job; the next agent of this user there removes the directory."""
        if not is_batch(self._access.backend(record)):
            return
        for name in record.nodes:
            last = folder.node_report(name)
            if last.get("temp") and last.get("state") not in TERMINAL:
                self._emit(
                    Event(
                        "note",
                        f"`{name}` did not report its end: {last.get('host')} could not be reached, and {last['temp']} may still be"
                        " there; it is removed when its agent ends, or when your next node starts on that host",
                    )
                )

    # -- archived clusters

    def _open_or_archived(self, name: str) -> ClusterDirectory:
        try:
            return self._store.open(name)
        except NotFoundError:
            past = self._store.last_archived(name)
            if past is None:
                raise
            return past

    def _cancel_requeued_jobs(self, record: Record) -> None:
        """Cancels jobs that the scheduler still has: a controller that was killed after `down` may have lost their end."""
        backend = self._access.backend(record)
        if not is_batch(backend) or not record.ended or time.time() - record.ended > CAME_BACK_S:
            return
        host, handles = self._access.host_of(record), [Handle.from_json(h) for h in record.handles]
        seen = backend.observe(handles, host) if handles else {}
        back = [h for h in handles if seen[h.native_id].state not in (*TERMINAL, N.UNKNOWN)]
        if back:
            ids = ", ".join(h.native_id for h in back)
            self._emit(Event("note", f"the scheduler still has {ids} of `{record.name}`: ending it"))
            backend.cancel(back, host, now=True)
