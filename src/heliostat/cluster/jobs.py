"""Jobs on a cluster, through Ray's Jobs API."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from heliostat.cluster.status import run_job, without_driver
from heliostat.cluster.view import View, end_reason, head_of
from heliostat.common.documents import JobInfo, JobRecord, JsonObject
from heliostat.common.errors import DeadlineError, DiskError, HeliostatError, NotFoundError, UsageError
from heliostat.common.events import Emit, Event
from heliostat.common.shell import quote
from heliostat.common.suggestions import expand_prefix
from heliostat.remote import upload_limit
from heliostat.remote.ray_client import NoResponse, RayApi, TokenRejected
from heliostat.state.records import RUN
from heliostat.state.states import NodeState
from heliostat.state.store import ClusterDirectory

if TYPE_CHECKING:
    from heliostat.cluster.access import Access
    from heliostat.cluster.clock import Clock
    from heliostat.cluster.connection import Connector
    from heliostat.cluster.observe import Observer

STOP_S = 10  # from SIGTERM to SIGKILL, as for a `run`; Ray's default of 3 s is too short for a sweep
PATIENCE_S = 30.0  # a job is given up after its head did not answer for this long
JOB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
OBSERVE_S = 1.0  # between two observations of a platform's cluster while a job is followed


def check_job_id(job_id: str) -> None:
    """Raises UsageError for an id that Ray cannot use: it becomes a file name and a part of a URL."""
    if not JOB_ID.fullmatch(job_id):
        raise UsageError(
            f"`{job_id[:80]}` cannot be the id of a job",
            cause="an id has 1 to 100 letters, digits, `.`, `_` and `-`, and begins with a letter or a digit",
            hint=f"--job-id {re.sub('[^A-Za-z0-9]+', '-', job_id).strip('-')[:100] or 'train-1'}",
        )


class ClusterEnds(Exception):
    """The cluster stops, or has ended, while one of its jobs is followed."""

    def __init__(self, view: View) -> None:
        super().__init__(view.record.name)
        self.view = view


class _WatchedCluster:
    """A cluster whose job is followed."""

    def __init__(self, observer: Observer, clock: Clock, view: View, name: str, on_platform: bool) -> None:
        self.view, self.name = view, name
        self.polled = False  # whether the job was seen to run
        # with our agents, the head's agent ends with its cluster: no scheduler needs to be asked every second
        self.on_platform = on_platform
        self._observer, self._clock = observer, clock
        self._next = clock.monotonic()

    def poll(self) -> None:
        """Raises ClusterEnds. Observes the cluster at most once a second."""
        self.polled = True
        if self.on_platform and self._clock.monotonic() >= self._next:
            self.check()

    def check(self, *, fresh: bool = False) -> None:
        """Observes the cluster; raises ClusterEnds if it has ended or stops. fresh: asks the platform again."""
        if fresh and self.on_platform:
            self._observer.invalidate(self.view.folder)
        self.view = self._observer.find_or_archived(self.name)
        self._next = self._clock.monotonic() + OBSERVE_S
        self.raise_if_ended()

    def raise_if_ended(self) -> None:
        record = self.view.record
        if record.has_ended() or self.view.headless or head_of(record).state is NodeState.STOPPING:
            raise ClusterEnds(self.view)


class Jobs:
    def __init__(
        self, access: Access, observer: Observer, connector: Connector, emit: Emit, clock: Clock
    ) -> None:
        self._access, self._observer, self._connector = access, observer, connector
        self._emit, self._clock = emit, clock

    def list(self, name: str) -> list[JobInfo]:
        """The jobs of a cluster, newest first, with the command of a `run`."""
        view = self._observer.find(name)
        jobs = without_driver(self._connector.ray_api(view).jobs(), view.run)
        return ([run_job(view.run)] if view.run else []) + jobs

    def expand_id(self, name: str, prefix: str) -> str:
        """The id of the only job that begins with this prefix; a known id, and an unknown one, unchanged."""
        store = self._access.store
        view = View.read(store.find(name) or store.last_archived(name) or store.open(name))
        ids = view.record.job_ids()
        if prefix not in ids:
            ids += [job["id"] for job in self._jobs_of_ray(view)]
        return expand_prefix(prefix, list(dict.fromkeys(ids)), "job")

    def latest(self, view: View) -> str | None:
        """The id of the job that was submitted last, or of the command of a `run`; None: there is none."""
        jobs = [
            job for job in view.record.jobs if "nodes" not in job or job.get("entrypoint")
        ]  # no joins alone
        submitted = {job["id"]: job.get("submitted") or 0.0 for job in jobs}
        for job in self._jobs_of_ray(view):
            if job["kind"] != "driver":  # Ray keeps no output of a driver
                submitted.setdefault(job["id"], job["started"] or 0.0)
        return max(submitted, key=lambda job: submitted[job], default=RUN if view.record.command else None)

    def _jobs_of_ray(self, view: View) -> Sequence[JobInfo]:
        """The jobs that Ray knows; none if its head cannot be asked, which the command itself reports."""
        if view.address is None:
            return []
        try:
            return self._connector.ray_api(view).jobs()
        except HeliostatError:
            return []

    def submit(
        self,
        name: str,
        command: Sequence[str],
        *,
        working_dir: Path | None = None,
        env: dict[str, str] | None = None,
        runtime_env: JsonObject | None = None,
        job_id: str | None = None,
        here: bool = False,
    ) -> str:
        """Submits the command to Ray and returns the job's id. One argument is a shell line; several are quoted.

        here: the job runs in the caller's directory, unless another one is given. The directory is uploaded if the head does not
        share the file system."""
        if job_id is not None:
            check_job_id(job_id)
        view = self._observer.find(name)
        api = self._connector.ray_api(view)
        shown = entrypoint = command[0] if len(command) == 1 else quote(list(command))
        runtime = dict(runtime_env or {})
        here = here and working_dir is None and not runtime.get("working_dir")
        if here and self.in_place(view):
            # `exec` takes a program; a shell line may begin with a keyword
            entrypoint = f"cd {quote([os.getcwd()])} " + (
                f"|| exit; {shown}" if len(command) == 1 else f"&& exec {shown}"
            )
        elif here:
            working_dir = Path.cwd()
        given = runtime.get("working_dir")
        if working_dir is None and isinstance(given, str) and "://" not in given:
            working_dir = Path(given)
        if working_dir is not None:
            try:
                runtime["working_dir"] = self._upload(api, working_dir, runtime.pop("excludes", None) or ())
            except UsageError as error:
                if here:
                    error.hint += "; `submit --no-working-dir` uploads nothing"
                raise
        ours = {"PYTHONUNBUFFERED": "1", "RAY_JOB_STOP_WAIT_TIME_S": str(STOP_S)}
        runtime["env_vars"] = {**ours, **(runtime.get("env_vars") or {}), **(env or {})}
        job_id = job_id or f"{view.record.name}-{time.strftime('%m%d-%H%M%S')}-{secrets.token_hex(2)}"
        submitted = api.submit(entrypoint, job_id, runtime, shown)
        self.record(
            view.folder, {"id": submitted, "entrypoint": shown, "ran": entrypoint, "submitted": time.time()}
        )
        return submitted

    def in_place(self, view: View) -> bool:
        """Whether the head sees the caller's directory under the same path."""
        return view.record.remote_dir is None and self._access.backend(view.record).shares_files

    def record(self, folder: ClusterDirectory, job: JobRecord) -> None:
        """Records what is known of a job, for the history. A failure is only reported: the job runs all the same."""
        try:
            with folder.lock():
                record = folder.record()
                known = [old for old in record.jobs if old["id"] == job["id"]]
                for old in known:
                    old.update(job)
                record.jobs += [] if known else [job]
                folder.save(record)
        except NotFoundError:
            pass  # the cluster has ended meanwhile
        except (DiskError, DeadlineError) as error:
            self._emit(Event("note", f"the job runs, but could not be recorded: {error}"))

    def _upload(self, api: RayApi, folder: Path, excludes: Sequence[str]) -> str:
        from heliostat.remote.working_dir import pack

        def progress(verb: str) -> Callable[[int, int], None]:
            return lambda done, total: self._emit(
                Event("progress", verb, None, {"bytes": done, "of_bytes": total})
            )

        with pack(folder, excludes, progress=progress("packing")) as package:
            if left_out := package.describe_left_out():
                self._emit(Event("note", left_out))
            if not api.has_package(package.name):
                _check_head_memory(api, folder, package.data_path.stat().st_size)
                api.upload(package.name, package.data_path, progress("uploading"))
            return package.uri

    def wait(self, name: str, job_id: str, write: Callable[[bytes], None]) -> int:
        """Writes the job's output until its end; the job's exit code. Raises HeliostatError if its cluster ends before it."""
        view = self._observer.find(name)
        on_platform = self._access.platform(view.record) is not None
        cluster = _WatchedCluster(self._observer, self._clock, view, name, on_platform)
        written = 0

        def write_counted(chunk: bytes) -> None:
            nonlocal written
            write(chunk)
            written += len(chunk)

        try:
            cluster.raise_if_ended()
            job = self._follow_job(cluster, job_id, write_counted)
            if job["status"] != "SUCCEEDED" and on_platform:  # the end of its cluster may be the cause
                cluster.check(fresh=True)
        except ClusterEnds as ends:
            with contextlib.suppress(HeliostatError):  # if its head still answers, it can save its work
                self.stop_and_drain(name, job_id, write_counted, written)
            raise HeliostatError(
                f"`{name}` ended before the job `{job_id}` did",
                cause=end_reason(ends.view.record)[:300],
                hint=f"heliostat logs {name}",
            ) from None
        folder = self._access.store.find(name)
        if folder is not None:
            ended: JobRecord = {
                "id": job["id"],
                "status": job["status"],
                "exit_code": job["exit_code"],
                "seconds": job["seconds"],
            }
            self.record(folder, ended)
        return 0 if job["status"] == "SUCCEEDED" else int(job["exit_code"] or 1)

    def _follow_job(self, cluster: _WatchedCluster, job_id: str, write: Callable[[bytes], None]) -> JobInfo:
        """The job at its end. A head that does not answer is asked again for PATIENCE_S."""
        written, silent_since = 0, None  # type: int, float | None
        while True:
            try:
                if cluster.view.address is None:  # the answer about its nodes may be older: ask again
                    raise NoResponse(f"`{cluster.name}` has no connection")
                api = self._connector.ray_api(cluster.view)
                position = 0
                for chunk in api.output(job_id, poll=cluster.poll):
                    fresh = chunk[max(0, written - position) :]  # a new connection starts at the beginning
                    position += len(chunk)
                    written = max(written, position)
                    write(fresh)
                    silent_since = None
                return api.job(job_id)
            except (NoResponse, TokenRejected, NotFoundError) as error:
                known = silent_since is not None or cluster.polled
                cluster.check(fresh=True)  # raises if the cluster has ended; else its head is only slow
                if isinstance(error, NotFoundError) and not known:
                    raise
                silent_since = silent_since or self._clock.monotonic()
                late = self._clock.monotonic() - silent_since > PATIENCE_S
                replaced = isinstance(error, NotFoundError)
                if late or replaced or cluster.view.address is None:
                    lost = "its head was replaced, and the new head does not know the job" if replaced else ""
                    raise HeliostatError(
                        f"the head of `{cluster.name}` was lost while the job `{job_id}` ran",
                        cause=lost or end_reason(cluster.view.record)[:300] or error.cause,
                        hint=f"heliostat logs {cluster.name}",
                    ) from None
                self._clock.sleep(0.2)

    def stop(self, name: str, job_id: str) -> bool:
        """Stops the job; False: it had ended already."""
        view = self._observer.find(name)
        if view.run and job_id == view.run["id"]:
            if view.run.get("exit_code") is not None:
                return False
            self._access.send_request(view.folder, {"do": "stop-job", "job": job_id})
            return True
        return self._connector.ray_api(view).stop(job_id)

    def stop_and_drain(self, name: str, job_id: str, write: Callable[[bytes], None], written: int) -> None:
        """Stops a job, and writes its output between SIGTERM and its end. written: bytes that were written before."""
        self.stop(name, job_id)
        for chunk in self._connector.ray_api(self._observer.find(name)).output(job_id):
            if fresh := chunk[written:]:
                write(fresh)
            written = max(0, written - len(chunk))


def _check_head_memory(api: RayApi, directory: Path, size: int) -> None:
    """Raises UsageError for a package that is too large for the head's memory, if Ray reports it."""
    head = next((node for node in api.nodes() if node["is_head"]), None)
    used, total = (head["host"]["memory"] if head else None) or (0, 0)
    free = int(total - used)
    if total and size > upload_limit.limit(free):
        raise upload_limit.refuse(directory, size, free)
