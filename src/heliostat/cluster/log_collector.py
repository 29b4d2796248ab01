"""Copies the logs and job output of a cluster whose platform starts Ray before it ends: its machines take them along."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from heliostat.cluster.view import head_of
from heliostat.common.documents import JobInfo, select
from heliostat.common.errors import AccessDenied, HeliostatError
from heliostat.state.records import Record
from heliostat.state.store import ClusterDirectory

if TYPE_CHECKING:
    from heliostat.backends.base import Handle
    from heliostat.cluster.platform_sync import PlatformSync
    from heliostat.remote.ray_client import RayApi

COLLECT_S = 15.0  # a machine that does not answer must not delay the release of the others
MAX_CONCURRENT_HOSTS = 32  # nodes that are read at a time
MAX_JOBS = 100  # jobs whose output is copied
KEYS = ("id", "status", "exit_code", "seconds")


class LogCollector:
    """Copies in threads, which write nothing after the time is over."""

    def __init__(self, folder: ClusterDirectory, record: Record, sync: PlatformSync, handle: Handle) -> None:
        self.folder, self.record, self.sync, self.handle = folder, record, sync, handle
        self.over = threading.Event()
        self._errors: list[HeliostatError] = []
        self._slots = threading.Semaphore(MAX_CONCURRENT_HOSTS)

    def run(self, api: Callable[[], RayApi], timeout_s: float) -> list[str]:
        """Returns when everything is copied or the time is over: a sentence for each part that is missing."""
        tasks: dict[str, Callable[[], None]] = {"the output of its jobs": lambda: self._copy_jobs(api())}
        for node in self.record.nodes:
            tasks[f"the logs of {node}"] = partial(self.sync.pull_logs, self.handle, node, self.over)
        threads = {what: self._start(task) for what, task in tasks.items()}
        deadline = time.monotonic() + timeout_s
        for thread in threads.values():
            thread.join(max(0.0, deadline - time.monotonic()))
        self.over.set()
        late = [what for what, thread in threads.items() if thread.is_alive()]
        notes = [f"not copied within {timeout_s:.0f} s: {', '.join(late)}"] if late else []
        denied = dict.fromkeys(error.message for error in self._errors if isinstance(error, AccessDenied))
        return [*notes, *(f"not copied: {what}" for what in denied)]

    def _start(self, task: Callable[[], None]) -> threading.Thread:
        thread = threading.Thread(target=self._run_guarded, args=(task,), daemon=True)
        thread.start()
        return thread

    def _run_guarded(self, task: Callable[[], None]) -> None:
        with self._slots, contextlib.suppress(OSError):
            try:
                if not self.over.is_set():
                    task()
            except HeliostatError as error:
                self._errors.append(error)

    def _copy_jobs(self, api: RayApi) -> None:
        jobs = [job for job in api.jobs() if job["kind"] == "job"]
        if self.over.is_set():
            return
        self.sync.note(jobs=[select(job, KEYS) for job in jobs])
        directory = self.folder.logs / head_of(self.record).name
        directory.mkdir(mode=0o700, exist_ok=True)
        for job in jobs[:MAX_JOBS]:
            with open(directory / f"job-driver-{job['id']}.log", "wb") as stream:
                self._copy_output(api, job, stream.write)

    def _copy_output(self, api: RayApi, job: JobInfo, write: Callable[[bytes], object]) -> None:
        for chunk in api.output(job["id"], follow=False):
            if self.over.is_set():
                return
            write(chunk)
