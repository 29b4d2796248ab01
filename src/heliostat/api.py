"""The Python API: a cluster as a context manager, jobs as objects. Uses the same manager as the command line."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from heliostat import backends
from heliostat.cluster.manager import ClusterManager
from heliostat.cluster.wait import ENDED
from heliostat.common.documents import ClusterStatus, JobInfo, JsonObject
from heliostat.common.errors import Code, HeliostatError, UsageError
from heliostat.common.events import Emit
from heliostat.common.limits import MAX_WORKERS
from heliostat.config import loader
from heliostat.config.files import find_personal_file
from heliostat.config.spec import ClusterSpec
from heliostat.remote.ray_client import FINAL

if TYPE_CHECKING:
    from heliostat.diagnostics.advisor import Advice
    from heliostat.diagnostics.sizing import Sizing
    from heliostat.remote.ray_client import RayApi


class Job:
    """One command on a cluster, through Ray's Jobs API."""

    def __init__(self, cluster: Cluster, job_id: str) -> None:
        self.cluster, self.id = cluster, job_id

    def __repr__(self) -> str:
        return f"Job({self.id!r} on {self.cluster.name!r})"

    def _api(self) -> RayApi:
        manager = self.cluster._manager
        return manager.ray_api(manager.find(self.cluster.name))

    def info(self) -> JobInfo:
        """id, status, entrypoint, started, seconds, exit_code, message."""
        return self._api().job(self.id)

    @property
    def status(self) -> str:
        """Ray's job status: PENDING, RUNNING, STOPPED, SUCCEEDED or FAILED."""
        return str(self.info()["status"])

    def done(self) -> bool:
        """Whether the job has ended, successfully or not."""
        return self.status in FINAL

    def logs(self, follow: bool = False) -> Iterator[str]:
        """The lines of the output, without line ends; `follow`: until the job has ended."""
        partial = b""
        for chunk in self._api().output(self.id, follow=follow):
            *lines, partial = (partial + chunk).split(b"\n")
            for line in lines:
                yield line.decode("utf-8", "replace")
        if partial:
            yield partial.decode("utf-8", "replace")

    def wait(self, timeout: float | None = None) -> int:
        """Waits until the job has ended and returns its exit code. Raises DeadlineError after `timeout` seconds."""
        if timeout is not None:
            self.cluster._manager.state_waiter.wait(self.cluster.name, self.id, ENDED, timeout)
        return self.cluster._manager.jobs.wait(self.cluster.name, self.id, lambda chunk: None)

    def stop(self) -> bool:
        """Stops the job. False: it had already ended."""
        return self.cluster._manager.jobs.stop(self.cluster.name, self.id)


class Cluster:
    """A running cluster. The end of a `with` block terminates a cluster from `up`, but not one from `connect`."""

    def __init__(self, name: str, manager: ClusterManager, *, owned: bool) -> None:
        self.name, self._manager, self._owned = name, manager, owned
        self._proxies: list[Any] = []

    def __repr__(self) -> str:
        return f"Cluster({self.name!r})"

    def __enter__(self) -> Cluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
        if self._owned:
            self.down()

    def close(self) -> None:
        """Closes the dashboard proxies of this object. The cluster keeps running."""
        while self._proxies:
            self._proxies.pop().close()

    @property
    def address(self) -> str:
        """The address for `ray.init`."""
        address = self._manager.find(self.name).address
        if address is None:
            raise HeliostatError(
                f"`{self.name}` has no address now",
                hint=f"heliostat status {self.name}",
                code=Code.CLUSTER_NOT_READY,
            )
        return address

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables with which a Ray program connects: address, token file, certificates."""
        env = self._manager.environment(self._manager.find(self.name)) or {}
        return {key: str(value) for key, value in env.items()}

    def status(self) -> ClusterStatus:
        """The document of `heliostat status --json`."""
        return self._manager.status(self.name)

    def plan_rllib(self, strategy: str = "balanced") -> Sizing:
        """Env runners and learners that fit: `config.env_runners(**plan.calls["env_runners"])`, `.learners(…)` likewise."""
        from heliostat.diagnostics import metrics, sizing

        nodes, notes = metrics.read_capacity(self._manager, self.name)
        return sizing.rllib(nodes, strategy).with_notes(notes)

    def plan_train(
        self,
        cpus_per_worker: int | None = None,
        gpus_per_worker: float | None = None,
        placement: str = "PACK",
    ) -> Sizing:
        """Workers that fit: `ScalingConfig(**plan.calls["ScalingConfig"])`."""
        from heliostat.diagnostics import metrics, sizing

        nodes, notes = metrics.read_capacity(self._manager, self.name)
        return sizing.train(nodes, cpus_per_worker, gpus_per_worker, placement).with_notes(notes)

    def advise(self, seconds: float = 15.0) -> list[Advice]:
        """Observes the cluster for this long; the reasons why its workload is slow or blocked."""
        from heliostat.diagnostics import advisor, metrics

        return advisor.advise(metrics.collect(self._manager, self.name, seconds))

    def scale(self, workers: int) -> None:
        """Sets the number of workers, not counting the head. Nodes are drained before they are removed, the last ones first."""
        if isinstance(workers, bool) or not isinstance(workers, int) or not 0 <= workers <= MAX_WORKERS:
            raise UsageError(
                "`workers` is invalid", cause=f"`{workers!r}` is not between 0 and {MAX_WORKERS}"
            )
        self._manager.scaling.scale(self.name, workers)

    def submit(
        self,
        command: str | Sequence[str],
        *,
        working_dir: str | Path | None = None,
        env: Mapping[str, str] | None = None,
        runtime_env: Mapping[str, Any] | None = None,
        job_id: str | None = None,
    ) -> Job:
        """Submits a job. A shell on the head runs a string; a list is the program and its arguments."""
        submitted = self._manager.jobs.submit(
            self.name,
            [command] if isinstance(command, str) else list(command),
            working_dir=Path(working_dir) if working_dir is not None else None,
            env=dict(env or {}),
            runtime_env=dict(runtime_env or {}),
            job_id=job_id,
        )
        return Job(self, submitted)

    def job(self, job_id: str) -> Job:
        """A job that was submitted before, from this or another host."""
        return Job(self, job_id)

    def jobs(self) -> list[Job]:
        """Every job that Ray lists."""
        return [Job(self, job["id"]) for job in self._manager.jobs.list(self.name) if job["kind"] == "job"]

    def dashboard(self, port: int = 0) -> str:
        """Starts a local proxy to the dashboard and returns its URL, which accepts one browser. `close` stops the proxy."""
        from heliostat.remote.dashboard_proxy import DashboardProxy

        proxy = DashboardProxy(self._manager.dashboard_api(self.name), port=port)
        proxy.start()
        self._proxies.append(proxy)
        return proxy.url

    def down(self) -> None:
        """Terminates the cluster and verifies that nothing of it is left."""
        self._manager.down(self.name)


def up(
    file: str | Path | ClusterSpec | None = None,
    *,
    emit: Emit = lambda event: None,
    keep: bool = False,
    wait_timeout: float | None = None,
    **values: Any,
) -> Cluster:
    """Starts a cluster and returns when it is ready. It takes a file, a ClusterSpec, or keys of the file as arguments.

    `keep`: leave the cluster running at the end of a `with` block. `wait_timeout`: stop waiting for nodes after this many
    seconds and raise DeadlineError; by default, the wait in a queue has no limit.
    """
    manager = ClusterManager(emit=emit)
    if wait_timeout is not None and not wait_timeout > 0:
        raise UsageError(
            "`wait_timeout` is invalid", cause=f"`{wait_timeout}` is not a positive number of seconds"
        )
    flags = {key: value for key, value in values.items() if value is not None}
    if isinstance(file, ClusterSpec):  # validate again: the caller may have copied it without validation
        base = _to_file_keys(file)
        spec = loader.load(backends, base=base, environ={}, flags=flags).spec
    else:
        path = Path(file) if file else None
        config = loader.load(backends, file=path, flags=flags, personal=find_personal_file())
        config = manager.declared_environment.apply(config, install=True)
        spec = manager.active_environment.apply(config, Path.cwd()).spec
    view = manager.up(spec, wait_timeout_s=wait_timeout)
    return Cluster(view.record.name, manager, owned=not keep)


def _to_file_keys(spec: ClusterSpec) -> JsonObject:
    """The keys of the spec's file: the values that were set, and the tables of the backends."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the loader rejects a value of a wrong type
        given = spec.model_dump(mode="json", exclude_unset=True, exclude={"backend_tables"})
    return {**given, **spec.backend_tables}


def connect(name: str) -> Cluster:
    """The running cluster with this name."""
    manager = ClusterManager()
    manager.find(name)
    return Cluster(name, manager, owned=False)
