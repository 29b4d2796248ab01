"""Moves ended clusters into the history: completes the record, collects remote logs, removes what killed nodes left."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from heliostat.backends.base import Backend, Handle
from heliostat.cluster.access import Access
from heliostat.cluster.accounting import note_joins
from heliostat.cluster.observe import OBSERVE_LOCK_S, Observer
from heliostat.cluster.view import View
from heliostat.common.errors import DeadlineError, DiskError, HeliostatError, NotFoundError
from heliostat.common.events import Emit, Event
from heliostat.remote.transport import map_concurrently
from heliostat.state.records import Record
from heliostat.state.states import TERMINAL
from heliostat.state.store import ClusterDirectory

if TYPE_CHECKING:
    from heliostat.remote.directory import RemoteDirectory

ARCHIVE_LOCK_S = 30.0  # how long to wait for another command that writes the record
FINAL = ("SUCCEEDED", "FAILED", "STOPPED")


class Archiver:
    def __init__(self, access: Access, observer: Observer, emit: Emit) -> None:
        self._access, self._observer, self._emit = access, observer, emit
        self._store = access.store

    def observe_all(self) -> list[View]:
        """Every cluster that is not over, and those that ended since the last command. The latter are archived, so the next
        call does not return them."""
        folders = [folder for name in self._store.names() if (folder := self._store.find(name))]
        views = map_concurrently(
            self._observe_and_archive, folders
        )  # in parallel: a silent backend delays no other
        return [view for view in views if view]

    def _observe_and_archive(self, folder: ClusterDirectory) -> View | None:
        """The cluster as it is now, archived if it is over. None: its record cannot be read."""
        try:
            view = self._observer.observe(folder)
        except (HeliostatError, KeyError, ValueError, TypeError):
            return None  # `doctor` reports unreadable records
        if view.record.has_ended():
            with contextlib.suppress(DiskError, DeadlineError):  # a later command archives it
                self.archive(view, OBSERVE_LOCK_S)
        return view

    def history(self) -> list[Record]:
        """The records of all clusters: the present ones, then the ended ones, latest end first."""
        present = [view.record for view in self.observe_all()]
        known = {record.id for record in present}
        return [
            *present,
            *(record for record in reversed(self._store.archived_records()) if record.id not in known),
        ]

    def archive(self, view: View, lock_timeout_s: float = ARCHIVE_LOCK_S) -> View:
        """Moves an ended cluster into the history."""
        record = view.record
        record.ended = record.ended or time.time()
        record.exit_code = (view.live.get("job") or {}).get("exit_code", record.exit_code)
        last = {job["id"]: job for job in view.live.get("jobs") or ()}
        for job in record.jobs:
            if job["id"] in last and not job.get("status"):
                # a job that was not final ended with the cluster
                ended = last[job["id"]]
                job["seconds"], job["exit_code"] = ended["seconds"], ended["exit_code"]
                job["status"] = ended["status"] if ended["status"] in FINAL else "STOPPED"
        note_joins(record, view.live)
        if not self._access.is_collected(record):  # it ended by itself: `cancel` was not called
            self._remove_leftovers(view.folder, record)
        self.collect_logs(view.folder, record)
        try:
            with view.folder.lock(lock_timeout_s):
                check_same_cluster(view.folder, record)
                folder = self._store.archive(view.folder, record)
        except NotFoundError:
            folder = self._store.last_archived(record.name) or view.folder
        self._emit(Event("done", f"`{record.name}` has ended", None, {"reason": record.reason}))
        self._prune_history(folder)
        return View(folder, record, view.live)

    def collect_logs(self, folder: ClusterDirectory, record: Record) -> None:
        """Copies the remote logs of an ended cluster here, and removes its remote files."""
        if self._access.is_collected(record):
            return
        backend, mirror = self._access.backend(record), self._access.mirror(folder, record)
        if mirror:
            mirror.close()
        notes: Sequence[str] = ()
        if not backend.shares_files:
            notes = backend.collect_logs([Handle.from_json(h) for h in record.handles], folder.path)
        elif mirror:
            notes = _finish(mirror)
        self._access.mark_collected(record)
        for note in notes:
            self._emit(Event("note", note))

    def _remove_leftovers(self, folder: ClusterDirectory, record: Record) -> None:
        """Removes the private directories of killed nodes, which hold a copy of the token. Where hosts have files of their
        own, `collect_logs` removes them; the hosts of a batch job cannot be reached after the job."""
        backend = self._access.backend(record)
        if not backend.starts_ray or not backend.shares_files or is_batch(backend):
            return
        killed = {name for name in record.nodes if folder.node_report(name).get("state") not in TERMINAL}
        handles = [Handle.from_json(h) for h in record.handles if killed & set(h["nodes"])]
        with contextlib.suppress(HeliostatError):  # the next agent on that host removes it
            backend.cancel(handles, self._access.host_of(record), now=True)

    def _prune_history(self, newest: ClusterDirectory) -> None:
        from heliostat.common.units import count, format_bytes
        from heliostat.state import retention  # most commands archive nothing

        try:
            pruned, freed = retention.enforce(self._store, newest)
        except HeliostatError as error:
            return self._emit(Event("note", f"the history was not pruned: {error}"))
        if pruned:
            removed = f"{count(pruned, 'cluster')}, {format_bytes(freed)}"
            self._emit(Event("note", f"the history is over its limit: removed the logs of {removed}"))


def check_same_cluster(folder: ClusterDirectory, record: Record) -> None:
    """Raises NotFoundError if another command archived the cluster and a new cluster has its name."""
    if folder.record().id != record.id:
        raise NotFoundError(f"`{record.name}` has ended, and another cluster has its name")


def is_batch(backend: Backend) -> bool:
    """Whether its nodes are jobs of a scheduler, whose hosts cannot be reached after the job."""
    return backend.starts_ray and backend.shares_files and backend.takes_options


def _finish(mirror: RemoteDirectory) -> list[str]:
    try:
        work = mirror.collect_and_remove()
    except (HeliostatError, ValueError, OSError) as error:
        return [f"its logs stay on {mirror.host.target} in {mirror.path}: {error}"]
    return [f"what the command wrote is on {mirror.host.target} in {work}"] if work else []
