"""Work on a cluster: jobs through Ray's Jobs API, and the one command of a `run`."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from heliostat import backends, upload
from heliostat.errors import DeadlineError, DiskError, HeliostatError, Interrupted, NotFoundError, UsageError
from heliostat.events import Event
from heliostat.lifecycle import Lifecycle
from heliostat.looking import RUN, View, command_of
from heliostat.rayapi import NoAnswer, NotLetIn, RayApi
from heliostat.report import run_job, without_driver
from heliostat.script import quote
from heliostat.states import TERMINAL, NodeState
from heliostat.store import ClusterFolder
from heliostat.telling import handle_of
from heliostat.units import format_duration

if TYPE_CHECKING:
    from heliostat.spec import ClusterSpec
    from heliostat.transport import Transport

STOP_S = 10  # from SIGTERM to SIGKILL, as for a `run`; Ray's own 3 s are too few for a sweep
PATIENCE_S = 30.0  # so long may a head be silent before a job that is waited for is given up
TIMED_OUT = 124  # the exit code of `timeout` where it ended the command
JOB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
LOOK_S = 1.0  # between two looks at a platform's cluster while a job is followed


def check_job_id(job_id: str) -> None:
    """Raises UsageError for an id that Ray cannot use: it becomes a file name and a part of a URL."""
    if not JOB_ID.fullmatch(job_id):
        raise UsageError(
            f"`{job_id[:80]}` cannot be the id of a job",
            cause="an id has 1 to 100 letters, digits, `.`, `_` and `-`, and begins with a letter or a digit",
            hint=f"--job-id {re.sub('[^A-Za-z0-9]+', '-', job_id).strip('-')[:100] or 'train-1'}",
        )


class ClusterEnds(Exception):
    """The cluster ends, or has ended, while one of its jobs is followed."""

    def __init__(self, view: View) -> None:
        super().__init__(view.record.name)
        self.view = view


class _Watched:
    """A cluster whose job is followed."""

    def __init__(self, life: Lifecycle, name: str) -> None:
        self.life, self.name = life, name
        self.view = life.find(name)
        self.polled = False  # the job was seen to run
        # elsewhere the head's agent ends with its cluster, and no scheduler is to be asked every second
        self.on_platform = life.platform(self.view.record) is not None
        self._next = time.monotonic()

    def poll(self) -> None:
        """Raises ClusterEnds; looks at most every second."""
        self.polled = True
        if self.on_platform and time.monotonic() >= self._next:
            self.check()

    def check(self, *, anew: bool = False) -> None:
        """Raises ClusterEnds where there is no cluster any more, or it is told to end. anew: what the platform said a moment
        ago does not count."""
        if anew and self.on_platform:
            self.life.forget_answers(self.view.folder)
        try:
            view = self.life.find(self.name)
        except NotFoundError:  # another command has put it into the history
            past = self.life.store.last_past(self.name)
            if past is None:
                raise
            view = View(past, past.record(), past.state())
        self.view, self._next = view, time.monotonic() + LOOK_S
        self.judge()

    def judge(self) -> None:
        view = self.view
        head = next(node for node in view.record.nodes.values() if node.role == "head")
        if view.record.is_over() or view.headless or head.state is NodeState.STOPPING:
            raise ClusterEnds(view)


class Jobs:
    def __init__(self, life: Lifecycle) -> None:
        self.life = life

    # -- through Ray's Jobs API

    def list(self, name: str) -> list[dict[str, Any]]:
        view = self.life.find(name)
        jobs = without_driver(self.life.api(view).jobs(), view.run)
        return ([run_job(view.run)] if view.run else []) + jobs

    def submit(
        self,
        name: str,
        command: Sequence[str],
        *,
        working_dir: Path | None = None,
        env: dict[str, str] | None = None,
        runtime_env: dict[str, Any] | None = None,
        job_id: str | None = None,
        here: bool = False,
    ) -> str:
        """Hands the command to Ray and returns the job's id. One word is a shell line, several are taken as they are.

        here: the caller's directory is the job's working directory, unless another one is given: in place where the head
        shares the file system, else as an uploaded copy."""
        if job_id is not None:
            check_job_id(job_id)
        view = self.life.find(name)
        api = self.life.api(view)
        shown = entrypoint = command[0] if len(command) == 1 else quote(list(command))
        runtime = dict(runtime_env or {})
        here = here and working_dir is None and not runtime.get("working_dir")
        if here and self.in_place(view):
            # `exec` takes words only; a shell line may begin with a keyword
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
        self._note(
            view.folder, {"id": submitted, "entrypoint": shown, "ran": entrypoint, "submitted": time.time()}
        )
        return submitted

    def in_place(self, view: View) -> bool:
        """Whether the head sees the caller's directory under the same path."""
        return view.record.place is None and backends.load(view.record.site).shares_files

    def _note(self, folder: ClusterFolder, job: dict[str, Any]) -> None:
        """What is known of a job, for the history. The job runs, whether that can be written or not."""
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
            self.life.emit(Event("note", f"the job goes on, but is not on record: {error}"))

    def _upload(self, api: RayApi, folder: Path, excludes: Sequence[str]) -> str:
        from heliostat.workdir import pack

        def told(verb: str) -> Callable[[int, int], None]:
            return lambda done, total: self.life.emit(
                Event("progress", verb, None, {"bytes": done, "of_bytes": total})
            )

        with pack(folder, excludes, progress=told("packing")) as package:
            if not api.has_package(package.name):
                self._check_room(api, folder, package.data_path.stat().st_size)
                api.upload(package.name, package.data_path, told("uploading"))
            return package.uri

    def _check_room(self, api: RayApi, folder: Path, size: int) -> None:
        """Refuses a package that the head cannot hold, as far as Ray tells of its memory."""
        head = next((node for node in api.nodes() if node["is_head"]), None)
        used, total = (head["host"]["memory"] if head else None) or (0, 0)
        if total and size > upload.limit(total - used):
            raise upload.refuse(folder, size, total - used)

    def _check_folder(self, spec: ClusterSpec) -> None:
        """The same for a head that is not there yet, before it is asked for."""
        from heliostat.spec import head_member
        from heliostat.workdir import measure, pack

        memory, here = head_member(spec).memory, Path.cwd()
        if memory is None or measure(here, ()) <= upload.limit(memory - upload.RAY_BYTES):
            return
        with pack(here, ()) as package:
            size = package.data_path.stat().st_size
        if size > upload.limit(memory - upload.RAY_BYTES):
            raise upload.refuse(here, size, memory - upload.RAY_BYTES)

    def wait(self, name: str, job_id: str, write: Callable[[bytes], None]) -> int:
        """Follows the job's output to its end; the job's exit code. Raises when its cluster ends before it."""
        cluster = _Watched(self.life, name)
        written = 0

        def tell(chunk: bytes) -> None:
            nonlocal written
            write(chunk)
            written += len(chunk)

        try:
            cluster.judge()
            job = self._follow_job(cluster, job_id, tell)
            if job["status"] != "SUCCEEDED" and cluster.on_platform:  # its cluster may be why
                cluster.check(anew=True)
        except ClusterEnds as ends:
            with contextlib.suppress(HeliostatError):  # where it can still be asked to save, it is
                self.end(name, job_id, tell, written)
            raise HeliostatError(
                f"`{name}` ended before the job `{job_id}` did",
                cause=_why(ends.view.record),
                hint=f"heliostat logs {name}",
            ) from None
        self._remember(name, job)
        return 0 if job["status"] == "SUCCEEDED" else int(job["exit_code"] or 1)

    def _follow_job(self, cluster: _Watched, job_id: str, write: Callable[[bytes], None]) -> dict[str, Any]:
        """The job as it was at its end. A head that does not answer for a while is asked again."""
        written, silent_since = 0, None  # type: int, float | None
        while True:
            try:
                api = self.life.api(cluster.view)
                position = 0
                for chunk in api.output(job_id, poll=cluster.poll):
                    fresh = chunk[max(0, written - position) :]  # after a break it begins anew
                    position += len(chunk)
                    written = max(written, position)
                    write(fresh)
                    silent_since = None
                return api.job(job_id)
            except (NoAnswer, NotLetIn, NotFoundError) as error:
                known = silent_since is not None or cluster.polled
                cluster.check(anew=True)  # says whether the cluster has ended, or its head is only slow
                if isinstance(error, NotFoundError) and not known:
                    raise
                silent_since = silent_since or time.monotonic()
                late = time.monotonic() - silent_since > PATIENCE_S
                replaced = isinstance(error, NotFoundError)
                if late or replaced or cluster.view.address is None:
                    gone = "its head is another one now, which does not know the job" if replaced else ""
                    raise HeliostatError(
                        f"the head of `{cluster.name}` was lost while the job `{job_id}` ran",
                        cause=gone or _why(cluster.view.record) or error.cause,
                        hint=f"heliostat logs {cluster.name}",
                    ) from None
                time.sleep(0.2)

    def _remember(self, name: str, job: dict[str, Any]) -> None:
        folder = self.life.store.find(name)
        if folder is not None:
            self._note(folder, {key: job[key] for key in ("id", "status", "exit_code", "seconds")})

    def stop(self, name: str, job_id: str) -> bool:
        """Tells the job to stop; False: it had ended already."""
        view = self.life.find(name)
        if view.run and job_id == view.run["id"]:
            if view.run.get("exit_code") is not None:
                return False
            self.life.ask(view.folder, {"do": "stop-job", "job": job_id})
            return True
        return self.life.api(view).stop(job_id)

    def end(self, name: str, job_id: str, write: Callable[[bytes], None], written: int) -> None:
        """Stops a job that was waited for. It has a few seconds after SIGTERM: what it says in that time is shown, behind
        what was `written`."""
        self.stop(name, job_id)
        for chunk in self.life.api(self.life.find(name)).output(job_id):
            if fresh := chunk[written:]:
                write(fresh)
            written = max(0, written - len(chunk))

    # -- the one command of a `run`

    def run(
        self,
        spec: ClusterSpec,
        command: dict[str, Any],
        write: Callable[[str, bytes], None],
        *,
        detach: bool = False,
        wait_timeout_s: float | None = None,
    ) -> int:
        """A cluster for one command: start it, run it when the nodes are there, stream, release; its exit code."""
        if not backends.load(spec.on).starts_ray:
            return self._run_as_job(spec, command, write, detach, wait_timeout_s)
        place = ClusterFolder(self.life.store.clusters / spec.cluster_name)
        tail = Tail(self.life.host, place, write)
        view = None
        try:
            view = self.life.up(
                spec,
                command=command,
                wait=not detach,
                wait_timeout_s=wait_timeout_s,
                last_look=tail.drain,
            )
            if detach:
                return 0
            code = self._follow(view.folder, tail)
            self._tell_who_ended_it(view.folder)
            self.life.release(view.folder)
            return code
        except (
            KeyboardInterrupt
        ):  # it may come between `up`, which lets go of what it began, and what follows
            made = self.life.store.find(place.name)
            if made and made.record().id == self.life.created:
                self.life.interrupted(made, last_look=tail.drain)
            raise
        except HeliostatError:
            if view:
                self.life.give_up(view.folder, "given up")
            raise
        except OSError:
            if view:
                self.life.give_up(view.folder, "nobody reads its output any more")
            raise

    def _run_as_job(
        self,
        spec: ClusterSpec,
        command: dict[str, Any],
        write: Callable[[str, bytes], None],
        detach: bool,
        wait_timeout_s: float | None,
    ) -> int:
        """Where no agent of ours runs, the command is a job of Ray's, in an uploaded copy of this folder."""
        name, life = spec.cluster_name, self.life
        self._check_folder(spec)
        view = life.up(spec, command={**command, "detached": detach}, wait_timeout_s=wait_timeout_s)
        folder, record = view.folder, view.record
        kept = folder.logs / f"{RUN}.out"

        def tee(chunk: bytes) -> None:
            with contextlib.suppress(OSError), open(kept, "ab") as stream:
                stream.write(chunk)
            write("out", chunk)

        try:
            platform, handle = life.platform(record), handle_of(record)
            assert platform and handle
            argv = platform.limited_command(handle, command["argv"], life.host_of(record))
            job = self.submit(name, argv, here=True, job_id=RUN)
            platform.started_job(handle, job, life.host_of(record))
            if detach:
                return 0
            code = self.wait(name, job, tee)
            if code == TIMED_OUT and spec.time and argv != command["argv"]:
                limit = format_duration(spec.time)
                life.emit(Event("note", f"the command was stopped: its time limit of {limit} has passed"))
            self._ended(folder, code)
            life.release(folder)
            return code
        except KeyboardInterrupt:
            life.interrupted(folder, last_look=bool, first=lambda: self._stop_run(name, kept, tee))
            raise
        except (HeliostatError, OSError) as error:
            why = (error.cause or "given up") if isinstance(error, HeliostatError) else ""
            life.give_up(folder, why or "nobody reads its output any more")
            raise

    def _ended(self, folder: ClusterFolder, code: int) -> None:
        with contextlib.suppress(DiskError, NotFoundError), folder.lock():
            record = folder.record()
            record.exit_code = code
            folder.save(record)

    def _stop_run(self, name: str, kept: Path, tee: Callable[[bytes], None]) -> None:
        with contextlib.suppress(HeliostatError):
            self.end(name, RUN, tee, kept.stat().st_size if kept.exists() else 0)

    def follow(self, folder: ClusterFolder, write: Callable[[str, bytes], None], job_id: str = RUN) -> int:
        """The output of a command as it comes (stream name, bytes), to its end; then its exit code."""
        return self._follow(folder, Tail(self.life.host, folder, write, job_id))

    def _tell_who_ended_it(self, folder: ClusterFolder) -> None:
        """A command that was ended (by the time limit, by `stop`) did not just fail: say so."""
        live = folder.state()
        if (live.get("job") or {}).get("status") == "STOPPED":
            head = next((n.name for n in folder.record().nodes.values() if n.role == "head"), "head")
            reason = ((live.get("nodes") or {}).get(head) or {}).get("reason")
            self.life.emit(Event("note", "the command was stopped" + (f": {reason}" if reason else "")))

    def _follow(self, folder: ClusterFolder, tail: Tail) -> int:
        pause, looked = 0.02, 0.0
        while True:
            job = command_of(folder.state(), tail.job_id)
            pause = 0.02 if tail.drain() else min(0.1, pause * 1.5)
            # one that was stopped may be run again: a scheduler that took the machines back queues the job anew
            if job.get("exit_code") is not None and (
                job.get("status") != "STOPPED" or self._is_over(folder, tail.job_id)
            ):
                return int(job["exit_code"])
            if time.monotonic() - looked > 1:
                looked = time.monotonic()
                try:
                    view = self.life.look(folder)
                except NotFoundError:  # somebody has put it into the history: all of it is there
                    folder = self.life.store.last_past(folder.name) or folder
                    tail.paths = tail.places(folder)
                    view = View(folder, folder.record(), folder.state())
                over = view.record.is_over() or view.headless
                if over and command_of(folder.state(), tail.job_id).get("exit_code") is None:
                    tail.drain()
                    raise HeliostatError(
                        f"the cluster `{view.record.name}` ended before its command did",
                        cause=_why(view.record),
                        hint=f"heliostat logs {view.record.name} head",
                    )
            time.sleep(pause)

    def _is_over(self, folder: ClusterFolder, job_id: str) -> bool:
        """The nodes whose end is the command's have ended: the head of a `run`, a join's own nodes."""
        try:
            view = self.life.look(folder)
        except NotFoundError:
            return True  # in the history
        nodes = view.record.nodes.values()
        guests = [node for node in nodes if node.guest == job_id]  # forgotten when they have left in order
        head = next(node for node in nodes if node.role == "head")
        ended = job_id != RUN and all(node.state in TERMINAL for node in guests)
        return ended or head.state in TERMINAL or view.record.target != "up"

    # -- nodes that join, with a command of their own or without

    def join(
        self,
        name: str,
        spec: ClusterSpec,
        command: dict[str, Any] | None,
        write: Callable[[str, bytes], None],
        *,
        wait: bool = True,
    ) -> tuple[str, int]:
        """Adds nodes to a running cluster: (the join's id, the exit code of its command, or 0)."""
        from heliostat import growth

        view, guest = growth.join(self.life, name, spec, command)
        if not wait:
            return guest, 0
        tail = Tail(self.life.host, view.folder, write, guest)
        try:
            growth.settle_join(self.life, view.folder, guest)
            if command is None:
                return guest, 0
            code = self._follow(view.folder, tail)
            status = "SUCCEEDED" if code == 0 else "FAILED"
            self._note(view.folder, {"id": guest, "status": status, "exit_code": code})
            growth.wait_gone(self.life, view.folder, guest)
            return guest, code
        except KeyboardInterrupt:
            self.life.emit(Event("note", f"interrupted: the nodes of `{guest}` leave"))
            growth.leave(self.life, view.folder, guest)
            tail.drain()
            raise Interrupted(f"interrupted; the nodes of `{guest}` have left `{name}`") from None


class Tail:
    """The two streams of a command, from their beginning."""

    def __init__(
        self, host: Transport, folder: ClusterFolder, write: Callable[[str, bytes], None], job_id: str = RUN
    ) -> None:
        self.host, self.write, self.job_id = host, write, job_id
        self.paths = self.places(folder)
        self.read = dict.fromkeys(self.paths, 0)

    def places(self, folder: ClusterFolder) -> dict[str, Path]:
        return {stream: folder.logs / f"{self.job_id}.{stream}" for stream in ("out", "err")}

    def drain(self) -> bool:
        """Writes what has come since the last time; whether there was any."""
        before = sum(self.read.values())
        for stream, path in self.paths.items():
            while chunk := self.host.read(path, self.read[stream]):
                self.read[stream] += len(chunk)
                self.write(stream, chunk)
        return sum(self.read.values()) > before


def _why(record: Any) -> str:
    reasons = dict.fromkeys(node.reason for node in record.nodes.values() if node.reason)
    return str(record.reason or "; ".join(reasons))[:300]
