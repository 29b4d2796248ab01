"""Follows the output of a command that an agent runs: the command of a `run`, or of a join."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from heliostat.cluster.access import Access
from heliostat.cluster.observe import Observer
from heliostat.cluster.view import command_status, describe_waiting, end_reason, head_of
from heliostat.common.errors import HeliostatError, NotFoundError
from heliostat.common.events import Emit, Event
from heliostat.state.records import RUN
from heliostat.state.states import TERMINAL
from heliostat.state.store import ClusterDirectory

if TYPE_CHECKING:
    from heliostat.cluster.clock import Clock
    from heliostat.remote.transport import Transport

OBSERVE_S = 1.0  # between two observations of the cluster
MIN_PAUSE_S, MAX_PAUSE_S = 0.02, 0.1  # between two reads of the output

Write = Callable[[str, bytes], None]  # (the stream's name, bytes)


class OutputTail:
    """The two output streams of a command, from their beginning."""

    def __init__(self, host: Transport, folder: ClusterDirectory, write: Write, job_id: str = RUN) -> None:
        self.job_id, self._host, self._write = job_id, host, write
        self.move_to(folder)
        self._read = dict.fromkeys(self._paths, 0)

    def move_to(self, folder: ClusterDirectory) -> None:
        """The files are in this directory from now on; the positions stay."""
        self._paths: dict[str, Path] = {
            stream: folder.logs / f"{self.job_id}.{stream}" for stream in ("out", "err")
        }

    def drain(self) -> bool:
        """Writes what is new since the last call; whether there was any."""
        before = sum(self._read.values())
        for stream, path in self._paths.items():
            while chunk := self._host.read(path, self._read[stream]):
                self._read[stream] += len(chunk)
                self._write(stream, chunk)
        return sum(self._read.values()) > before


class CommandFollower:
    def __init__(self, access: Access, observer: Observer, emit: Emit, clock: Clock) -> None:
        self._access, self._observer, self._emit, self._clock = access, observer, emit, clock

    def tail(self, folder: ClusterDirectory, write: Write, job_id: str = RUN) -> OutputTail:
        return OutputTail(self._access.transport, folder, write, job_id)

    def follow(self, folder: ClusterDirectory, tail: OutputTail) -> int:
        """Writes the output of a command until its end; its exit code. Raises HeliostatError if the cluster ends before it."""
        pause, observed = MIN_PAUSE_S, 0.0
        while True:
            job = command_status(folder.state(), tail.job_id)
            pause = MIN_PAUSE_S if tail.drain() else min(MAX_PAUSE_S, pause * 1.5)
            # a command that was stopped may run again: a scheduler that took the nodes back queues the job again
            code = job.get("exit_code")
            if code is not None and (job.get("status") != "STOPPED" or self._is_over(folder, tail.job_id)):
                return code
            if self._clock.monotonic() - observed > OBSERVE_S:
                observed = self._clock.monotonic()
                view = self._observer.observe_or_archived(folder)
                if view.folder.path != folder.path:  # another command archived the cluster
                    folder = view.folder
                    tail.move_to(folder)
                if not job.get("started"):
                    waiting = describe_waiting(view.record.nodes.values()) or "all nodes are ready"
                    self._emit(Event("progress", f"waiting for the command to start: {waiting}"))
                over = view.record.has_ended() or view.headless
                if over and command_status(folder.state(), tail.job_id).get("exit_code") is None:
                    tail.drain()
                    raise HeliostatError(
                        f"the cluster `{view.record.name}` ended before its command did",
                        cause=end_reason(view.record)[:300],
                        hint=f"heliostat logs {view.record.name} head",
                    )
            self._clock.sleep(pause)

    def _is_over(self, folder: ClusterDirectory, job_id: str) -> bool:
        """Whether the nodes that end with the command have ended: the head of a `run`, the nodes of a join."""
        try:
            view = self._observer.observe(folder)
        except NotFoundError:
            return True  # archived
        # joined nodes that left as planned are no longer recorded
        joined = [node for node in view.record.nodes.values() if node.joined == job_id]
        ended = job_id != RUN and all(node.state in TERMINAL for node in joined)
        return ended or head_of(view.record).state in TERMINAL or view.record.target != "up"
