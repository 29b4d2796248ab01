"""How a cluster ends: everything that was started is stopped, that is verified, and the record goes to the history."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from heliostat import backends, retention
from heliostat.accounting import note_joins
from heliostat.backends.base import Handle
from heliostat.errors import (
    DeadlineError,
    DiskError,
    HeliostatError,
    Interrupted,
    NotFoundError,
    PartialFailure,
    UsageError,
)
from heliostat.events import Event
from heliostat.looking import LOOK_LOCK_S, Looking, View, make_move
from heliostat.states import TERMINAL, NodeState
from heliostat.store import ClusterFolder, Record
from heliostat.telling import handle_of
from heliostat.transport import at_once
from heliostat.units import count, format_bytes

if TYPE_CHECKING:
    from heliostat.backends.base import Backend
    from heliostat.mirror import Mirror

N = NodeState
KEEP_S = 180.0
# `down` of an ended cluster asks the scheduler again for this long; later another job may have the same id
CAME_BACK_S = 86400.0
LAUNCHER_S = 30.0  # for another command to notice that the cluster is to end


class Ending(Looking):
    def all(self) -> list[View]:
        """Every cluster that is not over, and those that ended since somebody last looked: they go to the history now, so
        this is the one time that they are told of."""
        folders = [folder for name in self.store.names() if (folder := self.store.find(name))]
        views = at_once(self._look_and_archive, folders)  # one that does not answer keeps nobody else waiting
        return [view for view in views if view]

    def _look_and_archive(self, folder: ClusterFolder) -> View | None:
        """The cluster as it is now; one that is over goes to the history. None: its record cannot be read."""
        try:
            view = self.look(folder)
        except (HeliostatError, KeyError, ValueError, TypeError):
            return None  # `doctor` tells of records that cannot be read
        if view.record.is_over():
            with contextlib.suppress(DiskError, DeadlineError):  # it stays where it is
                self._archive(view, LOOK_LOCK_S)
        return view

    def ever(self) -> list[Record]:
        """Every cluster that there is or was, those that ended last, first."""
        present = [view.record for view in self.all()]
        known = {record.id for record in present}
        return [*present, *(record for record in reversed(self.store.past()) if record.id not in known)]

    def down(self, name: str, *, now: bool = False) -> View:
        """Ends the cluster and verifies that nothing is left of it. Ended already: says so."""
        folder = self.store.find(name) or self._open_or_past(name)
        if folder.path.parent == self.store.ended:
            self._end_jobs_that_came_back(folder.record())
            return View(folder, folder.record(), folder.state())
        return self._end(folder, "taken down", now=now)

    def _open_or_past(self, name: str) -> ClusterFolder:
        try:
            return self.store.open(name)
        except NotFoundError:
            past = self.store.last_past(name)
            if past is None:
                raise
            return past

    def interrupted(
        self,
        folder: ClusterFolder,
        last_look: Callable[[], object] = bool,
        first: Callable[[], object] = bool,
    ) -> None:
        """Ctrl-C: release everything; once more: at once. `first` is for whoever must be told to stop; `last_look` sees the
        files before they go to the history."""
        name = folder.name
        for reason, now in (("interrupted", False), ("interrupted twice", True), ("interrupted twice", True)):
            try:
                if not now:
                    self.emit(Event("note", f"interrupted: releasing `{name}` (Ctrl-C again: at once)"))
                    first()
                self._end(folder, reason, now=now, last_look=last_look)
                raise Interrupted(
                    f"interrupted; `{name}` is released", hint=f"heliostat logs {name}"
                ) from None
            except KeyboardInterrupt:
                continue
        raise Interrupted(
            f"interrupted while releasing `{name}`", hint=f"heliostat down {name} --now"
        ) from None

    def give_up(self, folder: ClusterFolder, reason: str = "it did not start") -> None:
        """What a failed `up` had started goes, so that nothing lingers; its logs stay in the history."""
        try:
            self._end(folder, reason)
        except (NotFoundError, PartialFailure):
            pass  # what failed first is what a person must know
        except HeliostatError as error:
            text = f"`{folder.name}` could not be released: {error}; heliostat down {folder.name} --now"
            self.emit(Event("note", text))

    def _end(
        self, folder: ClusterFolder, reason: str, *, now: bool = False, last_look: Callable[[], object] = bool
    ) -> View:
        """Stopping comes first: a disk that cannot take the record keeps nobody's machines."""
        try:
            record, written = self._ask_for_end(folder, reason)
            if folder.is_leased() and written:
                record = self._wait_for_launcher(folder, record)
            if started := sum(node.handle is not None for node in record.nodes.values()):
                self.emit(Event("note", f"stopping {count(started, 'node')} of `{record.name}`"))
            backend = backends.load(record.site)
            handles = [Handle.from_json(h) for h in record.handles]
            if any(node.handle is None for node in record.nodes.values()):
                known = {h.native_id for h in handles}
                strays = [h for h in self._find_strays(record, now) if h.native_id not in known]
                handles += strays
                record.handles += [handle.to_json() for handle in strays]
                self._put_on_record(folder, strays)
            given_up = None
            if not now:
                self._take_leave(folder, record)
            try:
                backend.cancel(handles, self.host_of(record), now=now)
            except PartialFailure as error:
                given_up = error
            except HeliostatError:
                folder.record()  # raises when another command has put it into the history meanwhile
                raise
            with contextlib.suppress(OSError):  # nobody may be there to be shown it
                last_look()
            self.forget_answers(folder, handles)
            self._bring_home(folder, record)
            view = self.look(folder, record=None if written else record)
            self._check_it_is(folder, record)
        except NotFoundError:
            past = self.store.last_past(folder.name)  # another `down` was faster
            if past is None:
                raise
            return View(past, past.record(), past.state())
        for node in view.record.nodes.values():  # asked for, never started
            if node.handle is None:
                node.state = N.GONE
        left = [node.name for node in view.record.nodes.values() if node.state not in TERMINAL]
        if left:
            raise HeliostatError(
                f"`{view.record.name}` could not be ended whole",
                cause=f"still there: {', '.join(left)}",
                hint=f"heliostat down {view.record.name} --now",
            )
        self._report_unreached(folder, view.record)
        try:
            ended = self._archive(view)
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

    def _wait_for_launcher(self, folder: ClusterFolder, record: Record) -> Record:
        """Another command starts nodes: it sees that the end is asked for before it starts the next ones. The record, with what
        it has started. One that takes too long cancels by itself what it can no longer put on record."""
        with contextlib.suppress(DeadlineError), folder.lease(LAUNCHER_S):
            pass
        known = folder.record()
        return known if known.id == record.id else record

    def _find_strays(self, record: Record, now: bool) -> Sequence[Handle]:
        """What was launched and is not on record. A backend that cannot be asked keeps no record of which nothing is known to
        have been launched, when the person says `--now`."""
        from heliostat import planning

        backend, name = backends.load(record.site), record.name
        try:
            return backend.strays(record.id, planning.spec_of(record), self.host_of(record))
        except HeliostatError as error:
            if record.handles:
                raise
            unchecked = f"whether `{record.site}` runs anything of `{name}`"
            if not now:
                hint = f"heliostat down {name} --now forgets it"
                raise HeliostatError(f"could not check {unchecked}", cause=str(error), hint=hint) from None
            self._at_home.add(record.id)  # nothing is on record that could be fetched
            self.emit(Event("note", f"warning: could not check {unchecked}: {error}"))
            return []

    def _take_leave(self, folder: ClusterFolder, record: Record) -> None:
        """Where the platform starts Ray, its logs and its jobs go with its machines: what can be had of them comes here."""
        telling, handle = self.telling(folder, record), handle_of(record)
        if telling is None or handle is None:
            return
        from heliostat import collect

        view = View(folder, record, folder.state())
        collector = collect.Collector(folder, record, telling, handle)
        for note in collector.run(lambda: self.api(view), collect.COLLECT_S):
            self.emit(Event("note", note))

    def put_away(self, name: str) -> View:
        """Nothing of it runs any more, and `up` brings it back."""
        folder = self.store.open(name)
        record = self.look(folder).record
        platform, handle = self.platform(record), handle_of(record)
        if platform is None or handle is None:
            raise UsageError(
                f"`{name}` cannot be kept",
                cause=f"`{record.site}` has nothing that could be brought back",
                hint=f"heliostat down {name}",
            )
        if record.kind != "up":
            raise UsageError(f"`{name}` runs one command and ends with it", hint=f"heliostat down {name}")
        self.emit(Event("note", f"putting `{name}` away"))
        platform.keep(handle, self.host_of(record), away=True)
        self.forget_answers(folder)
        deadline = time.monotonic() + KEEP_S
        while True:
            view = self.look(folder)
            own = [node for node in view.record.nodes.values() if not node.guest]
            if all(node.state is N.SUSPENDED for node in own):
                return view
            if time.monotonic() > deadline:
                left = ", ".join(node.name for node in own if node.state is not N.SUSPENDED)
                raise DeadlineError(
                    f"`{name}` was not put away within {KEEP_S:.0f} s",
                    cause=f"still there: {left}",
                    hint=f"heliostat status {name}",
                )
            time.sleep(0.1)

    def _ask_for_end(self, folder: ClusterFolder, reason: str) -> tuple[Record, bool]:
        """Puts the wish on record: (the record, could it be written?)."""

        def ask() -> tuple[Record, list[dict[str, Any]]]:
            record = folder.record()
            record.target, record.reason = "down", record.reason or reason
            told = (N.STOPPING, *TERMINAL)
            asked = [n for n in record.nodes.values() if n.handle is not None and n.state not in told]
            return record, [make_move(node, N.STOPPING, reason) for node in asked]

        try:
            with folder.lock():
                record, moves = ask()
                for move in moves:
                    folder.append(move)
                folder.save(record)
            return record, True
        except DiskError:
            return ask()[0], False

    def _put_on_record(self, folder: ClusterFolder, handles: Sequence[Handle]) -> None:
        """What lies where these were comes home with the rest."""
        if handles:
            with contextlib.suppress(DiskError), folder.lock():
                record = folder.record()
                record.handles += [handle.to_json() for handle in handles]
                folder.save(record)

    def release(self, folder: ClusterFolder) -> None:
        """The work is done, and our agents end by themselves: wait for that, and see that nothing is left."""
        self.emit(Event("note", f"releasing `{folder.name}`"))
        try:
            deadline = time.monotonic() + (30 if self.platform(folder.record()) is None else 0)
            while time.monotonic() < deadline:
                view = self.look(folder)
                if view.record.is_over():
                    self._archive(view)
                    return
                time.sleep(0.05)
            self._end(folder, "released")
        except NotFoundError:
            return  # whoever looked first has put it into the history
        except (DiskError, PartialFailure) as error:
            self.emit(Event("note", f"{error.message}: {error.cause}"))

    def _check_it_is(self, folder: ClusterFolder, record: Record) -> None:
        """Another command may have put it into the history, and a third one started a cluster of that name there."""
        if folder.record().id != record.id:
            raise NotFoundError(f"`{record.name}` has ended, and another cluster has its name")

    def _archive(self, view: View, seconds: float = 30.0) -> View:
        """Puts an ended cluster into the history. seconds: how long to wait for another command that writes its record."""
        record = view.record
        record.ended = record.ended or time.time()
        record.exit_code = (view.live.get("job") or {}).get("exit_code", record.exit_code)
        last = {job["id"]: job for job in view.live.get("jobs") or ()}
        for job in record.jobs:
            if job["id"] in last and not job.get("status"):
                over = last[job["id"]]["status"] in ("SUCCEEDED", "FAILED", "STOPPED")
                job.update(
                    last[job["id"]], **({} if over else {"status": "STOPPED"})
                )  # it ended with the cluster
        note_joins(record, view.live)
        if record.id not in self._at_home:  # nobody has called `cancel`: it ended by itself
            self._remove_left(view.folder, record)
        self._bring_home(view.folder, record)
        try:
            with view.folder.lock(seconds):
                self._check_it_is(view.folder, record)
                folder = self.store.archive(view.folder, record)
        except NotFoundError:
            folder = self.store.last_past(record.name) or view.folder
        self.emit(Event("done", f"`{record.name}` has ended", None, {"reason": record.reason}))
        self._prune_history(folder)
        return View(folder, record, view.live)

    def _prune_history(self, newest: ClusterFolder) -> None:
        try:
            pruned, freed = retention.enforce(self.store, newest)
        except HeliostatError as error:
            return self.emit(Event("note", f"the history was not pruned: {error}"))
        if pruned:
            text = f"the history is over its limit: removed the logs of {count(pruned, 'cluster')}, {format_bytes(freed)}"
            self.emit(Event("note", text))

    def _remove_left(self, folder: ClusterFolder, record: Record) -> None:
        """A node whose every process was killed leaves its private directory, with a copy of the token. Where hosts have files of
        their own, `bring_home` removes it; a scheduler's host cannot be reached after the job."""
        backend = backends.load(record.site)
        if not backend.starts_ray or not backend.shares_files or _is_batch(backend):
            return
        killed = {name for name in record.nodes if folder.last_words(name).get("state") not in TERMINAL}
        handles = [Handle.from_json(h) for h in record.handles if killed & set(h["nodes"])]
        with contextlib.suppress(HeliostatError):  # the next agent here removes it
            backend.cancel(handles, self.host_of(record), now=True)

    def _report_unreached(self, folder: ClusterFolder, record: Record) -> None:
        """Says on which hosts of a batch job a node ended without a report: its private directory may still be there. No scheduler gives us
        a host after the job; the next agent of this user there removes the directory."""
        if not _is_batch(backends.load(record.site)):
            return
        for name in record.nodes:
            last = folder.last_words(name)
            if last.get("temp") and last.get("state") not in TERMINAL:
                self.emit(
                    Event(
                        "note",
                        f"`{name}` did not report its end: {last.get('host')} could not be reached, and {last['temp']} may still be"
                        " there; it is removed when its agent ends, or when your next node starts on that host",
                    )
                )

    def _end_jobs_that_came_back(self, record: Record) -> None:
        """A controller that was killed just after `down` may have forgotten that the job ended."""
        backend = backends.load(record.site)
        if not _is_batch(backend) or not record.ended or time.time() - record.ended > CAME_BACK_S:
            return
        host, handles = self.host_of(record), [Handle.from_json(h) for h in record.handles]
        seen = backend.observe(handles, host) if handles else {}
        back = [h for h in handles if seen[h.native_id].state not in (*TERMINAL, N.UNKNOWN)]
        if back:
            self.emit(
                Event(
                    "note",
                    f"the scheduler still has {', '.join(h.native_id for h in back)} of `{record.name}`: ending it",
                )
            )
            backend.cancel(back, host, now=True)

    def _bring_home(self, folder: ClusterFolder, record: Record) -> None:
        """What lies elsewhere of a cluster that has ended: its logs come here, and what we wrote there goes."""
        backend, mirror = backends.load(record.site), self.mirror(folder, record)
        if record.id in self._at_home:
            return
        if mirror:
            mirror.close()
        notes: Sequence[str] = ()
        if not backend.shares_files:
            notes = backend.bring_home([Handle.from_json(h) for h in record.handles], folder.path)
        elif mirror:
            notes = _finish(mirror)
        self._at_home.add(record.id)
        for note in notes:
            self.emit(Event("note", note))


def _is_batch(backend: Backend) -> bool:
    """Whether its nodes come by jobs of a scheduler, whose hosts cannot be reached after the job."""
    return backend.starts_ray and backend.shares_files and backend.takes_options


def _finish(mirror: Mirror) -> list[str]:
    try:
        work = mirror.finish()
    except (HeliostatError, ValueError, OSError) as error:
        return [f"its logs stay on {mirror.host.target} in {mirror.place}: {error}"]
    return [f"what the command wrote is on {mirror.host.target} in {work}"] if work else []
