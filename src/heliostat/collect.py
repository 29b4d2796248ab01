"""What a cluster leaves behind where the platform starts Ray: its logs and its jobs go with its machines, so what can be had
of them in a short time is copied here before the end."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from heliostat.errors import AccessDenied, HeliostatError
from heliostat.store import ClusterFolder, Record

if TYPE_CHECKING:
    from heliostat.backends.base import Handle
    from heliostat.rayapi import RayApi
    from heliostat.telling import Telling

COLLECT_S = 15.0  # a machine that does not answer must not keep the others from being released
AT_ONCE = 32  # nodes that are asked at a time
MOST_JOBS = 100  # whose output is copied
KEYS = ("id", "status", "exit_code", "seconds")


class Collector:
    """Copies in threads of its own, which write nothing once the time is over."""

    def __init__(self, folder: ClusterFolder, record: Record, telling: Telling, handle: Handle) -> None:
        self.folder, self.record, self.telling, self.handle = folder, record, telling, handle
        self.over = threading.Event()
        self._errors: list[HeliostatError] = []
        self._slots = threading.Semaphore(AT_ONCE)

    def run(self, api: Callable[[], RayApi], seconds: float) -> list[str]:
        """Returns when all of it is here or the time is over: what is missing, in sentences."""
        tasks: dict[str, Callable[[], None]] = {"the output of its jobs": lambda: self._jobs(api())}
        for node in self.record.nodes:
            tasks[f"the logs of {node}"] = lambda node=node: self._logs(node)  # type: ignore[misc]
        threads = {what: self._start(task) for what, task in tasks.items()}
        deadline = time.monotonic() + seconds
        for thread in threads.values():
            thread.join(max(0.0, deadline - time.monotonic()))
        self.over.set()
        late = [what for what, thread in threads.items() if thread.is_alive()]
        notes = [f"not copied within {seconds:.0f} s: {', '.join(late)}"] if late else []
        denied = dict.fromkeys(error.message for error in self._errors if isinstance(error, AccessDenied))
        return [*notes, *(f"not copied: {what}" for what in denied)]

    def _start(self, task: Callable[[], None]) -> threading.Thread:
        thread = threading.Thread(target=self._guarded, args=(task,), daemon=True)
        thread.start()
        return thread

    def _guarded(self, task: Callable[[], None]) -> None:
        with self._slots, contextlib.suppress(OSError):
            try:
                if not self.over.is_set():
                    task()
            except HeliostatError as error:
                self._errors.append(error)

    def _logs(self, node: str) -> None:
        self.telling.pull_logs(self.handle, node, self.over)

    def _jobs(self, api: RayApi) -> None:
        jobs = [job for job in api.jobs() if job["kind"] == "job"]
        if self.over.is_set():
            return
        self.telling.note(jobs=[{key: job[key] for key in KEYS} for job in jobs])
        head = next(node.name for node in self.record.nodes.values() if node.role == "head")
        (self.folder.logs / head).mkdir(mode=0o700, exist_ok=True)
        for job in jobs[:MOST_JOBS]:
            self._output(api, head, job)

    def _output(self, api: RayApi, head: str, job: dict[str, Any]) -> None:
        with open(self.folder.logs / head / f"job-driver-{job['id']}.log", "wb") as stream:
            for chunk in api.output(job["id"], follow=False):
                if self.over.is_set():
                    return
                stream.write(chunk)
