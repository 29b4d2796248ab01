"""The Python face: a cluster as a context manager, jobs as objects. The same lifecycle as the command line."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from heliostat import backends
from heliostat.cluster.manager import ClusterManager
from heliostat.common.errors import Code, HeliostatError, UsageError
from heliostat.common.events import Emit
from heliostat.common.limits import MAX_WORKERS
from heliostat.config import loader
from heliostat.config.spec import ClusterSpec
from heliostat.remote.ray_client import FINAL

if TYPE_CHECKING:
    from heliostat.diagnostics.advisor import Advice
    from heliostat.diagnostics.sizing import Sizing


class Job:
    """One command on a cluster, through Ray's Jobs API."""

    def __init__(self, cluster: Cluster, job_id: str) -> None:
        self.cluster, self.id = cluster, job_id

    def __repr__(self) -> str:
        return f"Job({self.id!r} on {self.cluster.name!r})"

    def _api(self) -> Any:
        manager = self.cluster._manager
        return manager.ray_api(manager.find(self.cluster.name))

    def info(self) -> dict[str, Any]:
        """id, status, entrypoint, started, seconds, exit_code, message."""
        return dict(self._api().job(self.id))

    @property
    def status(self) -> str:
        """Ray's word: PENDING, RUNNING, STOPPED, SUCCEEDED or FAILED."""
        return str(self.info()["status"])

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self.status in FINAL

    def logs(self, follow: bool = False) -> Iterator[str]:
        """Lines of the output, without their ends; `follow`: until the job has ended."""
        rest = b""
        for chunk in self._api().output(self.id, follow=follow):
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                yield line.decode("utf-8", "replace")
        if rest:
            yield rest.decode("utf-8", "replace")

    def wait(self) -> int:
        """Until it has ended; its exit code."""
        return self.cluster._manager.jobs.wait(self.cluster.name, self.id, lambda chunk: None)

    def stop(self) -> bool:
        """Tells it to stop; False where it had ended already."""
        return self.cluster._manager.jobs.stop(self.cluster.name, self.id)


class Cluster:
    """A running cluster. As a context manager it is ended at the end of the block; `connect` leaves it running."""

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
        """Ends what this object opened here (dashboard tunnels); the cluster goes on."""
        while self._proxies:
            self._proxies.pop().close()

    @property
    def address(self) -> str:
        """What `ray.init` takes."""
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
        """The variables that a Ray program needs to join: address, token file, certificates."""
        env = self._manager.environment(self._manager.find(self.name)) or {}
        return {key: str(value) for key, value in env.items()}

    def status(self) -> dict[str, Any]:
        """The document of `heliostat status --json`."""
        return self._manager.status(self.name)

    def plan_rllib(self, strategy: str = "balanced") -> Sizing:
        """Env runners and learners that fit: `config.env_runners(**plan.calls["env_runners"])`, `.learners(…)` likewise."""
        from heliostat.diagnostics import metrics, sizing

        nodes, notes = metrics.machines(self._manager, self.name)
        return sizing.rllib(nodes, strategy).noting(notes)

    def plan_train(
        self,
        cpus_per_worker: int | None = None,
        gpus_per_worker: float | None = None,
        placement: str = "PACK",
    ) -> Sizing:
        """Workers that fit: `ScalingConfig(**plan.calls["ScalingConfig"])`."""
        from heliostat.diagnostics import metrics, sizing

        nodes, notes = metrics.machines(self._manager, self.name)
        return sizing.train(nodes, cpus_per_worker, gpus_per_worker, placement).noting(notes)

    def advise(self, seconds: float = 15.0) -> list[Advice]:
        """Looks for so long; what keeps the cluster from going faster, or at all. Empty: nothing."""
        from heliostat.diagnostics import advisor, metrics

        return advisor.advise(metrics.collect(self._manager, self.name, seconds))

    def scale(self, workers: int) -> None:
        """So many workers besides the head. New ones come; of the old ones the last go, after their work is drained."""
        if isinstance(workers, bool) or not isinstance(workers, int) or not 0 <= workers <= MAX_WORKERS:
            raise UsageError(
                "`workers` cannot be used", cause=f"`{workers!r}` is not between 0 and {MAX_WORKERS}"
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
        """A string goes to a shell on the head as it is; a list is taken word by word."""
        words = [command] if isinstance(command, str) else list(command)
        folder = Path(working_dir) if working_dir is not None else None
        submitted = self._manager.jobs.submit(
            self.name,
            words,
            working_dir=folder,
            env=dict(env or {}),
            runtime_env=dict(runtime_env or {}),
            job_id=job_id,
        )
        return Job(self, submitted)

    def job(self, job_id: str) -> Job:
        """A job that was submitted before, here or elsewhere."""
        return Job(self, job_id)

    def jobs(self) -> list[Job]:
        """Every job that Ray remembers."""
        return [Job(self, job["id"]) for job in self._manager.jobs.list(self.name) if job["kind"] == "job"]

    def dashboard(self, port: int = 0) -> str:
        """Starts a local proxy to the dashboard and returns its URL, which admits one browser; it works until `close`."""
        from heliostat.remote.dashboard_proxy import DashboardProxy

        proxy = DashboardProxy(self._manager.dashboard_api(self.name), port=port)
        proxy.start()
        self._proxies.append(proxy)
        return proxy.url

    def down(self) -> None:
        """Ends the cluster and checks that nothing is left."""
        self._manager.down(self.name)


def up(
    file: str | Path | ClusterSpec | None = None,
    *,
    emit: Emit = lambda event: None,
    keep: bool = False,
    wait_timeout: float | None = None,
    **values: Any,
) -> Cluster:
    """Starts a cluster and returns when it is ready: from a file, a ClusterSpec, or keys of the file as arguments.

    `keep`: leave it running at the end of a `with` block. `wait_timeout`: stop waiting for nodes after this many seconds
    and raise DeadlineError; without it, a queue is waited for without end.
    """
    manager = ClusterManager(emit=emit)
    if wait_timeout is not None and not wait_timeout > 0:
        raise UsageError("`wait_timeout` cannot be used", cause=f"`{wait_timeout}` is no number of seconds")
    backend_names, flat = backends.names(), {key: value for key, value in values.items() if value is not None}
    if isinstance(file, ClusterSpec):  # it may have been copied or made without a check
        base, own = _as_file(file), dict[str, str]()
        spec = loader.load(backend_names, base=base, environ=own, flags=flat, nodes_of=backends.nodes_of).spec
    else:
        path = Path(file) if file else None
        spec = loader.load(backend_names, file=path, flags=flat, nodes_of=backends.nodes_of).spec
    view = manager.up(spec, wait_timeout_s=wait_timeout)
    return Cluster(view.record.name, manager, owned=not keep)


def _as_file(spec: ClusterSpec) -> dict[str, Any]:
    """The spec as its file would have it: what was said, and the tables of the backends."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a value of a wrong type is refused by the check that follows
        said = spec.model_dump(mode="json", exclude_unset=True, exclude={"backend_tables"})
    return {**said, **spec.backend_tables}


def connect(name: str) -> Cluster:
    """A cluster that runs already, by its name."""
    manager = ClusterManager()
    manager.find(name)
    return Cluster(name, manager, owned=False)
