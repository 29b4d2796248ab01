"""Launches the nodes of a recorded cluster: writes the plan's files, runs its steps, records each handle."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from heliostat.backends.base import Handle, LaunchRequest, Plan
from heliostat.cluster import planner
from heliostat.cluster.access import Access
from heliostat.cluster.observe import Observer
from heliostat.cluster.platform_sync import handle_of
from heliostat.common.documents import JsonMapping, JsonObject
from heliostat.common.errors import HeliostatError, NotFoundError, PartialFailure
from heliostat.common.events import Emit, Event
from heliostat.remote import tls
from heliostat.state.files import read_json, write_atomic
from heliostat.state.records import NodeRecord, Record
from heliostat.state.states import TERMINAL, NodeState
from heliostat.state.store import ClusterDirectory

N = NodeState


class Launcher:
    def __init__(self, access: Access, observer: Observer, plans: planner.Planner, emit: Emit) -> None:
        self._access, self._observer, self._planner, self._emit = access, observer, plans, emit

    def launch_missing(self, folder: ClusterDirectory, facts: JsonMapping | None = None) -> None:
        """Launches the recorded nodes that were never launched, have ended, or are lost. If a lost node comes back, the head
        rejects it. facts: of a survey that this command has made."""
        if not any(_is_missing(node) for node in folder.record().nodes.values()):
            return
        with folder.lease():
            record = folder.record()
            if record.target != "up" or self._is_left_to_platform(folder, record):
                return
            missing = [m for m in planner.members_of(record) if _is_missing(record.nodes[m.name])]
            if not missing:
                return
            record.launches += 1
            request, plan = self._planner.plan(
                planner.spec_of(record), missing, record.id, record.command, record.launches, facts=facts
            )
            relaunched = {m.name for m in missing if record.nodes[m.name].handle is not None}
            old = [h for h in record.handles if set(h["nodes"]) <= relaunched]
            # processes of an earlier launch must not run beside the new ones; the head rejects those that cannot be reached
            with contextlib.suppress(PartialFailure):
                old_handles = [Handle.from_json(h) for h in old]
                self._access.backend(record).cancel(old_handles, self._access.host_of(record), now=True)
            record.handles = [h for h in record.handles if h not in old]
            for member in missing:
                record.nodes[member.name] = NodeRecord(
                    member.name, member.role, member.group, since=time.time(), launch=record.launches
                )
            if relaunched:  # the others may run already: an interrupted `up` submitted them
                _forget_reports(folder, [member.name for member in missing if member.name in relaunched])
            self.launch(folder, record, request, plan, old)

    def launch(
        self,
        folder: ClusterDirectory,
        record: Record,
        request: LaunchRequest,
        plan: Plan,
        replaced: Sequence[JsonObject] = (),
    ) -> None:
        """Writes the plan's files and runs its steps; records each handle as soon as it exists. The caller holds the lease;
        the record is locked only while a handle is written. replaced: handles that the new ones replace."""
        backend, mirror = self._access.backend(record), self._access.mirror(folder, record)
        for file in plan.files:
            write_atomic(folder.path / file.path.name, file.text, file.mode)
        if not backend.shares_files and record.remote_dir:  # the backend writes the files on each host
            remote_dir = Path(record.remote_dir)
            sent = self._files_to_send(folder, remote_dir, request)
            files = {path.relative_to(remote_dir).as_posix(): data for path, data, _ in sent}
            facts = {**request.facts, "head": read_json(folder.path / "head.json")}
            request = replace(request, files=files, facts=facts)
        elif mirror:
            scripts = [(file.path, file.text.encode(), file.mode) for file in plan.files]
            mirror.push([*scripts, *self._files_to_send(folder, mirror.path, request)])
        host = self._access.host_of(record)
        for handle in backend.launch(plan, request, host):
            self._observer.note_launched(handle)
            record.handles.append(handle.to_json())
            for node in handle.nodes:
                record.nodes[node].handle = handle.native_id
            try:
                _record_launched(folder, record, [m.name for m in request.members], replaced)
            except NotFoundError:
                # another command terminates the cluster, and does not know of this handle
                backend.cancel([handle], host, now=True)
                raise was_terminated(record) from None

    def _is_left_to_platform(self, folder: ClusterDirectory, record: Record) -> bool:
        """Whether a platform manages the nodes: after the launch it replaces nodes that end. Here a suspended cluster is
        resumed, and nodes that had failed are observed again."""
        platform, handle = self._access.platform(record), handle_of(record)
        if platform is None or handle is None:
            return False
        if any(node.state is N.SUSPENDED for node in record.nodes.values()):
            self._emit(Event("note", f"bringing `{record.name}` back"))
            platform.resume(handle, self._access.host_of(record))
        with folder.lock():
            known = folder.record()
            for node in [node for node in known.nodes.values() if node.state in TERMINAL]:
                known.nodes[node.name] = replace(node, state=N.REQUESTED, reason="", since=time.time())
            folder.save(known)
        self._observer.invalidate(folder)
        return True

    def _files_to_send(
        self, folder: ClusterDirectory, remote_dir: Path, request: LaunchRequest
    ) -> Iterator[tuple[Path, bytes, int]]:
        """The files that agents need in a remote directory: (path there, data, mode)."""
        for name in ("agent.pyz", "token", *tls.FILES):
            if (folder.path / name).exists():
                yield remote_dir / name, (folder.path / name).read_bytes(), 0o600
        command = request.config.get("command")
        if command and command.get("package"):
            from heliostat.remote.working_dir import pack

            self._emit(Event("note", "copying the current directory to the cluster"))
            with pack(Path.cwd(), ()) as package:
                if left_out := package.describe_left_out():
                    self._emit(Event("note", left_out))
                yield Path(command["package"]), package.data_path.read_bytes(), 0o600


def was_terminated(record: Record) -> HeliostatError:
    return HeliostatError(
        f"`{record.name}` was taken down while it was starting",
        cause=record.reason,
        hint="heliostat ls --all",
    )


def _is_missing(node: NodeRecord) -> bool:
    is_lost = node.state is N.LOST and node.role != "head"
    return node.handle is None or node.state in (*TERMINAL, N.SUSPENDED) or is_lost


def _forget_reports(folder: ClusterDirectory, names: Sequence[str]) -> None:
    """Removes the reports that earlier launches of these nodes wrote."""
    with folder.lock():
        for name in names:
            folder.append({"at": time.time(), "kind": "note", "text": f"{name} is started again"})
            (folder.path / "nodes" / f"{name}.json").unlink(missing_ok=True)


def _record_launched(
    folder: ClusterDirectory, record: Record, names: Sequence[str], replaced: Sequence[JsonObject]
) -> None:
    """Records the last handle and the launched nodes; what other commands wrote meanwhile stays. Raises NotFoundError if
    the cluster has ended, or is to be terminated."""
    handle = record.handles[-1]
    with folder.lock():
        known = folder.record()
        if known.id != record.id or known.target != "up":
            raise NotFoundError(f"`{record.name}` is being terminated")
        known.launches = max(known.launches, record.launches)
        known.handles = [*(h for h in known.handles if h not in replaced), handle]
        for name in names:
            old = known.nodes.get(name)
            if name in handle["nodes"] or (old and old.launch < record.nodes[name].launch):
                known.nodes[name] = record.nodes[name]
        folder.save(known)
