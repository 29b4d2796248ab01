"""Runs one command on a cluster of its own (`run`): launches the cluster, follows the command, releases the cluster."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from heliostat.agent.protocol import CommandConfig
from heliostat.cluster.platform_sync import handle_of
from heliostat.cluster.view import View, head_of
from heliostat.common.errors import DiskError, HeliostatError, NotFoundError
from heliostat.common.events import Emit, Event
from heliostat.common.units import format_duration
from heliostat.remote import upload_limit
from heliostat.state.records import RUN
from heliostat.state.store import ClusterDirectory

if TYPE_CHECKING:
    from heliostat.cluster.access import Access
    from heliostat.cluster.create import Creator
    from heliostat.cluster.follow import CommandFollower, Write
    from heliostat.cluster.jobs import Jobs
    from heliostat.cluster.start import Starter
    from heliostat.cluster.terminate import Terminator
    from heliostat.config.spec import ClusterSpec

TIMED_OUT = 124  # the exit code of `timeout` when it ended the command
NO_READER = "the reader of its output has ended"


class Runs:
    def __init__(
        self,
        access: Access,
        starter: Starter,
        creator: Creator,
        terminator: Terminator,
        jobs: Jobs,
        follower: CommandFollower,
        emit: Emit,
    ) -> None:
        self._access, self._starter, self._creator = access, starter, creator
        self._terminator, self._jobs, self._follower = terminator, jobs, follower
        self._emit = emit

    def run(
        self,
        spec: ClusterSpec,
        command: CommandConfig,
        write: Write,
        *,
        detach: bool = False,
        wait_timeout_s: float | None = None,
    ) -> int:
        """Launches a cluster for one command, writes the command's output, releases the cluster; the exit code."""
        if not self._access.registry.load(spec.on).starts_ray:
            return self._run_as_job(spec, command, write, detach, wait_timeout_s)
        store = self._access.store
        folder = ClusterDirectory(store.clusters / spec.cluster_name)
        tail = self._follower.tail(folder, write)
        view = None
        try:
            view = self._starter.up(
                spec,
                command=command,
                wait=not detach,
                wait_timeout_s=wait_timeout_s,
                before_archive=tail.drain,
            )
            if detach:
                return 0
            code = self._follower.follow(view.folder, tail)
            self._emit_stop_reason(view.folder)
            self._terminator.release(view.folder)
            return code
        except (
            KeyboardInterrupt
        ):  # `up` releases the cluster itself, but Ctrl-C may come just before or after it
            made = store.find(folder.name)
            if made and self._creator.is_own(made):
                self._terminator.terminate_interrupted(made, tail.drain)
            raise
        except HeliostatError:
            if view:
                self._terminator.terminate_failed(view.folder, "given up")
            raise
        except OSError:
            if view:
                self._terminator.terminate_failed(view.folder, NO_READER)
            raise

    def _run_as_job(
        self,
        spec: ClusterSpec,
        command: CommandConfig,
        write: Write,
        detach: bool,
        wait_timeout_s: float | None,
    ) -> int:
        """Where no agent runs, the command is a Ray job, in an uploaded copy of the current directory."""
        name = spec.cluster_name
        _check_package_size(spec)
        view = self._starter.up(spec, command={**command, "detached": detach}, wait_timeout_s=wait_timeout_s)
        folder = view.folder
        kept = folder.logs / f"{RUN}.out"

        def tee(chunk: bytes) -> None:
            with contextlib.suppress(OSError), open(kept, "ab") as stream:
                stream.write(chunk)
            write("out", chunk)

        try:
            argv, job = self._submit_limited(view, command["argv"])
            if detach:
                return 0
            code = self._jobs.wait(name, job, tee)
            if code == TIMED_OUT and spec.time and argv != command["argv"]:
                limit = format_duration(spec.time)
                self._emit(Event("note", f"the command was stopped: its time limit of {limit} has passed"))
            _record_exit_code(folder, code)
            self._terminator.release(folder)
            return code
        except KeyboardInterrupt:
            stop = partial(self._stop_job, name, kept, tee)
            self._terminator.terminate_interrupted(folder, first=stop)
            raise
        except (HeliostatError, OSError) as error:
            why = (error.cause or "given up") if isinstance(error, HeliostatError) else ""
            self._terminator.terminate_failed(folder, why or NO_READER)
            raise

    def _submit_limited(self, view: View, argv: list[str]) -> tuple[list[str], str]:
        """Submits the command with the cluster's time limit: (the command as submitted, the job's id)."""
        record = view.record
        platform, handle = self._access.platform(record), handle_of(record)
        assert platform and handle
        host = self._access.host_of(record)
        limited = list(platform.limited_command(handle, argv, host))
        job = self._jobs.submit(record.name, limited, here=True, job_id=RUN)
        platform.started_job(handle, job, host)
        return limited, job

    def _stop_job(self, name: str, kept: Path, tee: Callable[[bytes], None]) -> None:
        with contextlib.suppress(HeliostatError):
            self._jobs.stop_and_drain(name, RUN, tee, kept.stat().st_size if kept.exists() else 0)

    def _emit_stop_reason(self, folder: ClusterDirectory) -> None:
        """Emits why a command was stopped (the time limit, `stop`), since its exit code does not differ from a failure's."""
        live = folder.state()
        if (live.get("job") or {}).get("status") == "STOPPED":
            head = head_of(folder.record()).name
            reason = ((live.get("nodes") or {}).get(head) or {}).get("reason")
            self._emit(Event("note", "the command was stopped" + (f": {reason}" if reason else "")))


def _check_package_size(spec: ClusterSpec) -> None:
    """Raises UsageError if the current directory is too large for the head, before the head is launched."""
    from heliostat.config.members import head_member
    from heliostat.remote.working_dir import measure, pack

    memory, directory = head_member(spec).memory, Path.cwd()
    if memory is None or measure(directory, ()) <= upload_limit.limit(memory - upload_limit.RAY_BYTES):
        return
    with pack(directory, ()) as package:
        size = package.data_path.stat().st_size
    if size > upload_limit.limit(memory - upload_limit.RAY_BYTES):
        raise upload_limit.refuse(directory, size, memory - upload_limit.RAY_BYTES)


def _record_exit_code(folder: ClusterDirectory, code: int) -> None:
    with contextlib.suppress(DiskError, NotFoundError), folder.lock():
        record = folder.record()
        record.exit_code = code
        folder.save(record)
