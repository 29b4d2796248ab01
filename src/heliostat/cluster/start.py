"""Starts a cluster (`up`), or terminates and starts it (`restart`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from heliostat.agent.protocol import CommandConfig
from heliostat.cluster import planner
from heliostat.cluster.create import check_same_spec
from heliostat.cluster.view import View
from heliostat.common.errors import (
    HeliostatError,
    Interrupted,
    NotFoundError,
    PartialFailure,
    StillStarting,
    UsageError,
)
from heliostat.common.events import Emit, Event
from heliostat.state.store import ClusterDirectory

if TYPE_CHECKING:
    from heliostat.cluster.access import Access
    from heliostat.cluster.archive import Archiver
    from heliostat.cluster.create import Creator
    from heliostat.cluster.environment import EnvironmentInstaller
    from heliostat.cluster.launch import Launcher
    from heliostat.cluster.observe import Observer
    from heliostat.cluster.readiness import ReadinessWaiter
    from heliostat.cluster.terminate import Terminator
    from heliostat.config.spec import ClusterSpec


class Starter:
    def __init__(
        self,
        access: Access,
        observer: Observer,
        archiver: Archiver,
        terminator: Terminator,
        plans: planner.Planner,
        creator: Creator,
        environments: EnvironmentInstaller,
        launcher: Launcher,
        waiter: ReadinessWaiter,
        emit: Emit,
    ) -> None:
        self._access, self._observer, self._planner = access, observer, plans
        self._archiver, self._terminator = archiver, terminator
        self._creator, self._environments = creator, environments
        self._launcher, self._waiter, self._emit = launcher, waiter, emit

    def up(
        self,
        spec: ClusterSpec,
        *,
        command: CommandConfig | None = None,
        wait: bool = True,
        wait_timeout_s: float | None = None,
        before_archive: Callable[[], object] = bool,
    ) -> View:
        """The cluster of the spec, ready to use. An unfinished `up` of the same spec is continued.

        wait_timeout_s: a limit for the wait, queues included. before_archive: as in `terminate_interrupted`; the command may
        have started before it was observed to."""
        name, host, backend = (
            spec.cluster_name,
            self._access.host_for(spec),
            self._access.registry.load(spec.on),
        )
        request, plan = self._planner.plan(spec, command=command)  # raises before anything is changed
        if self._access.store.find(name) is None:
            backend.require(spec, host)
        if backend.shares_files:
            self._environments.prepare(spec)
        folder, is_new = self._find_or_create(spec, command, plan.notes)
        try:
            self._launcher.launch_missing(folder, request.facts)
            return self._waiter.wait(folder, wait_timeout_s) if wait else self._observer.observe(folder)
        except KeyboardInterrupt:
            if is_new:
                self._terminator.terminate_interrupted(folder, before_archive)
            raise Interrupted(
                f"interrupted while waiting for `{name}`",
                cause="it continues to start",
                hint=f"heliostat down {name}",
            ) from None
        except (PartialFailure, StillStarting):
            raise
        except HeliostatError:
            if is_new and self._creator.is_own(folder):
                self._terminator.terminate_failed(folder)
            raise

    def restart(self, name: str, wait_timeout_s: float | None = None) -> View:
        """Terminates the cluster and starts it from its recorded spec."""
        record = self._access.store.open(name).record()
        spec = planner.spec_of(record)
        if record.kind != "up":
            raise UsageError(f"`{name}` runs one command and ends with it", hint="heliostat run …")
        self._terminator.down(name)
        return self.up(spec, wait_timeout_s=wait_timeout_s)

    def _find_or_create(
        self, spec: ClusterSpec, command: CommandConfig | None, notes: Sequence[str]
    ) -> tuple[ClusterDirectory, bool]:
        """(the directory of the spec's cluster, whether it was created here). Raises HeliostatError if the name is in use."""
        name = spec.cluster_name
        while True:
            folder = self._access.store.find(name)
            if folder is None:
                try:
                    folder = self._creator.adopt(spec)
                    if folder is None:
                        folder = self._creator.create(spec, command)
                        for note in notes:
                            self._emit(Event("note", note))
                        return folder, True
                except FileExistsError:
                    self._creator.check_name(name)
                    continue  # another command created it at this moment
            try:
                view = self._observer.observe(folder)
            except NotFoundError:
                continue  # another command archived it at this moment
            if view.record.has_ended():
                self._archiver.archive(view)
            elif view.headless:
                self._terminator.terminate(folder, "its head has ended")
            else:
                if command or not self._creator.record_hosts(folder, spec):
                    check_same_spec(view, spec, command)
                return folder, False
