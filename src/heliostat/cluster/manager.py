"""The entry point to all operations on clusters, for the CLI, the Python API and `doctor`.

`ClusterManager` wires the classes of this package. Each is made, and its module imported, when it is first used, so that
commands that only observe (`ls`, `status`) start quickly.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING

from heliostat import backends
from heliostat.agent.protocol import CommandConfig
from heliostat.cluster.access import Access, BackendRegistry
from heliostat.cluster.archive import Archiver
from heliostat.cluster.observe import Observer
from heliostat.common.documents import ClusterStatus, JsonObject
from heliostat.common.events import Emit
from heliostat.remote.transport import Local, Transport
from heliostat.state.records import Record
from heliostat.state.store import ClusterDirectory, Store

if TYPE_CHECKING:
    from heliostat.backends.base import LaunchRequest, Plan
    from heliostat.cluster.active_environment import ActiveEnvironment
    from heliostat.cluster.clock import Clock
    from heliostat.cluster.connection import Connector
    from heliostat.cluster.create import Creator
    from heliostat.cluster.declared_environment import DeclaredEnvironment
    from heliostat.cluster.environment import EnvironmentInstaller
    from heliostat.cluster.follow import CommandFollower, Write
    from heliostat.cluster.jobs import Jobs
    from heliostat.cluster.joins import Joins
    from heliostat.cluster.launch import Launcher
    from heliostat.cluster.nodes import Nodes
    from heliostat.cluster.planner import Planner
    from heliostat.cluster.readiness import ReadinessWaiter
    from heliostat.cluster.runs import Runs
    from heliostat.cluster.scaling import Scaling
    from heliostat.cluster.start import Starter
    from heliostat.cluster.terminate import Terminator
    from heliostat.cluster.view import View
    from heliostat.cluster.wait import StateWaiter
    from heliostat.common.errors import Refused
    from heliostat.config.spec import ClusterSpec
    from heliostat.remote.ray_client import RayApi


class ClusterManager:
    """All operations on the clusters of one store.

    emit: receives the events. transport: runs commands on this machine. registry: finds backends. clock: of all waits."""

    def __init__(
        self,
        store: Store | None = None,
        emit: Emit = lambda event: None,
        transport: Transport | None = None,
        *,
        registry: BackendRegistry = backends,
        clock: Clock = time,
    ) -> None:
        self.store = store or Store()
        self.transport: Transport = transport or Local()
        self._emit, self._clock = emit, clock
        self.access = Access(self.store, self.transport, registry)
        self.observer = Observer(self.access, emit, clock)
        self.archiver = Archiver(self.access, self.observer, emit)

    # -- observation

    def find(self, name: str) -> View:
        """The cluster of this name as it is now. Raises NotFoundError."""
        return self.observer.find(name)

    def observe(self, folder: ClusterDirectory) -> View:
        """The cluster in this directory as it is now."""
        return self.observer.observe(folder)

    def refresh(self, folder: ClusterDirectory, node: str | None = None) -> None:
        """Updates the local copy of a remote cluster's files, with the logs of this node."""
        self.observer.refresh(folder, node)

    def refusal(self, folder: ClusterDirectory, record: Record) -> Refused | None:
        """The error, if the cluster's platform refused the last request for its status or logs."""
        sync = self.observer.platform_sync(folder, record)
        return sync.refusal if sync else None

    def clusters(self) -> list[View]:
        """Every cluster that is not over, and those that ended since the last command."""
        return self.archiver.observe_all()

    def history(self) -> list[Record]:
        """The records of all clusters: the present ones, then the ended ones, latest end first."""
        return self.archiver.history()

    def status(self, name: str) -> ClusterStatus:
        """The document of `heliostat status --json`."""
        from heliostat.cluster.status import StatusReporter

        return StatusReporter(self.observer, self._connector).status(name)

    # -- connection

    def ray_api(self, view: View) -> RayApi:
        """The dashboard and Jobs API of the cluster."""
        return self._connector.ray_api(view)

    def environment(self, view: View) -> JsonObject | None:
        """The variables of a Ray program on this host that uses the cluster. None: the cluster has no connection yet."""
        return self._connector.environment(view)

    def host_for(self, spec: ClusterSpec) -> Transport:
        """The host on which the commands of the spec's backend run."""
        return self.access.host_for(spec)

    # -- life cycle

    def plan(
        self, spec: ClusterSpec, command: CommandConfig | None = None, *, standalone: bool = False
    ) -> tuple[LaunchRequest, Plan]:
        """The launch request and the plan for a new cluster. standalone: for a script that is submitted by hand."""
        return self.planner.plan(spec, command=command, standalone=standalone)

    def up(
        self,
        spec: ClusterSpec,
        *,
        command: CommandConfig | None = None,
        wait: bool = True,
        wait_timeout_s: float | None = None,
    ) -> View:
        """The cluster of the spec, ready to use. An unfinished `up` of the same spec is continued."""
        return self.starter.up(spec, command=command, wait=wait, wait_timeout_s=wait_timeout_s)

    def adopt(self, spec: ClusterSpec) -> ClusterDirectory | None:
        """Records a cluster that runs on the spec's hosts and has no record here. None: there is none."""
        return self.creator.adopt(spec)

    def restart(self, name: str, wait_timeout_s: float | None = None) -> View:
        """Terminates the cluster and starts it from its recorded spec."""
        return self.starter.restart(name, wait_timeout_s)

    def down(self, name: str, *, now: bool = False) -> View:
        """Terminates the cluster and verifies that nothing is left. now: without time to save anything."""
        return self.terminator.down(name, now=now)

    def suspend(self, name: str) -> View:
        """Stops all nodes; `up` resumes the cluster."""
        return self.terminator.suspend(name)

    def run(
        self,
        spec: ClusterSpec,
        command: CommandConfig,
        write: Write,
        *,
        detach: bool = False,
        wait_timeout_s: float | None = None,
    ) -> int:
        """Runs one command on a cluster of its own; its exit code."""
        return self.runs.run(spec, command, write, detach=detach, wait_timeout_s=wait_timeout_s)

    def join(
        self,
        name: str,
        spec: ClusterSpec,
        command: CommandConfig | None,
        write: Write,
        *,
        wait: bool = True,
        wait_timeout_s: float | None = None,
    ) -> tuple[str, int]:
        """Adds nodes to a running cluster, and runs the command on them: (the join's id, the exit code, or 0)."""
        return self.joins.run(name, spec, command, write, wait=wait, wait_timeout_s=wait_timeout_s)

    def follow(self, folder: ClusterDirectory, write: Write, job_id: str) -> int:
        """Writes the output of the command of a `run` or of a join until its end; its exit code."""
        return self.follower.follow(folder, self.follower.tail(folder, write, job_id))

    def dashboard_api(self, name: str) -> Callable[[], RayApi]:
        """Finds the dashboard for each connection, since the head may move."""
        return lambda: self.ray_api(self.find(name))

    # -- parts

    @cached_property
    def _connector(self) -> Connector:
        from heliostat.cluster.connection import Connector

        return Connector(self.access)

    @cached_property
    def terminator(self) -> Terminator:
        from heliostat.cluster.terminate import Terminator

        return Terminator(self.access, self.observer, self.archiver, self._connector, self._emit, self._clock)

    @cached_property
    def planner(self) -> Planner:
        from heliostat.cluster.planner import Planner

        return Planner(self.access)

    @cached_property
    def creator(self) -> Creator:
        from heliostat.cluster.create import Creator

        return Creator(self.access, self._emit)

    @cached_property
    def active_environment(self) -> ActiveEnvironment:
        from heliostat.cluster.active_environment import ActiveEnvironment

        return ActiveEnvironment(self.access, self._emit)

    @cached_property
    def declared_environment(self) -> DeclaredEnvironment:
        from heliostat.cluster.declared_environment import DeclaredEnvironment

        return DeclaredEnvironment(self.access, self.environments, self._emit)

    @cached_property
    def environments(self) -> EnvironmentInstaller:
        from heliostat.cluster.environment import EnvironmentInstaller

        return EnvironmentInstaller(self.access, self._emit)

    @cached_property
    def launcher(self) -> Launcher:
        from heliostat.cluster.launch import Launcher

        return Launcher(self.access, self.observer, self.planner, self._emit)

    @cached_property
    def waiter(self) -> ReadinessWaiter:
        from heliostat.cluster.readiness import ReadinessWaiter

        return ReadinessWaiter(self.access, self.observer, self._emit, self._clock)

    @cached_property
    def starter(self) -> Starter:
        from heliostat.cluster.start import Starter

        return Starter(
            self.access,
            self.observer,
            self.archiver,
            self.terminator,
            self.planner,
            self.creator,
            self.environments,
            self.launcher,
            self.waiter,
            self._emit,
        )

    @cached_property
    def scaling(self) -> Scaling:
        from heliostat.cluster.scaling import Scaling

        return Scaling(
            self.access,
            self.observer,
            self.creator,
            self.environments,
            self.launcher,
            self.waiter,
            self._emit,
            self._clock,
        )

    @cached_property
    def jobs(self) -> Jobs:
        from heliostat.cluster.jobs import Jobs

        return Jobs(self.access, self.observer, self._connector, self._emit, self._clock)

    @cached_property
    def state_waiter(self) -> StateWaiter:
        from heliostat.cluster.wait import StateWaiter

        return StateWaiter(self.observer, self._connector, self._clock)

    @cached_property
    def follower(self) -> CommandFollower:
        from heliostat.cluster.follow import CommandFollower

        return CommandFollower(self.access, self.observer, self._emit, self._clock)

    @cached_property
    def joins(self) -> Joins:
        from heliostat.cluster.joins import Joins

        return Joins(
            self.access,
            self.observer,
            self.planner,
            self.environments,
            self.launcher,
            self.scaling,
            self.jobs,
            self.follower,
            self._emit,
            self._clock,
        )

    @cached_property
    def runs(self) -> Runs:
        from heliostat.cluster.runs import Runs

        return Runs(
            self.access,
            self.starter,
            self.creator,
            self.terminator,
            self.jobs,
            self.follower,
            self._emit,
        )

    @cached_property
    def nodes(self) -> Nodes:
        from heliostat.cluster.nodes import Nodes

        return Nodes(self.access, self.observer)
