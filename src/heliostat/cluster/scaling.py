"""Changes the nodes of a running cluster: `scale`, `restart --node`, and hosts that are added with `join --host`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from heliostat import backends
from heliostat.agent.protocol import Request, StopReason
from heliostat.backends.base import Handle
from heliostat.cluster import planner
from heliostat.cluster.platform_sync import DEMAND, handle_of
from heliostat.cluster.readiness import POLL_S
from heliostat.cluster.view import View, make_move
from heliostat.common.errors import HeliostatError, UsageError
from heliostat.common.events import Emit, Event
from heliostat.common.units import count
from heliostat.config import loader
from heliostat.config.members import hosts as all_hosts
from heliostat.config.members import members, worker_members
from heliostat.config.spec import ClusterSpec
from heliostat.state.records import NodeRecord, Record
from heliostat.state.states import TERMINAL, NodeState
from heliostat.state.store import ClusterDirectory

if TYPE_CHECKING:
    from heliostat.cluster.access import Access
    from heliostat.cluster.clock import Clock
    from heliostat.cluster.create import Creator
    from heliostat.cluster.environment import EnvironmentInstaller
    from heliostat.cluster.launch import Launcher
    from heliostat.cluster.observe import Observer
    from heliostat.cluster.readiness import ReadinessWaiter

N = NodeState
LEAVE: Request = {"do": "leave", "reason": "scaled down", "cause": StopReason.SCALED}
LEAVE_S = 120.0  # a drain takes up to 20 s, a slow scheduler somewhat longer


class Scaling:
    def __init__(
        self,
        access: Access,
        observer: Observer,
        creator: Creator,
        environments: EnvironmentInstaller,
        launcher: Launcher,
        waiter: ReadinessWaiter,
        emit: Emit,
        clock: Clock,
    ) -> None:
        self._access, self._observer, self._creator = access, observer, creator
        self._environments, self._launcher, self._waiter = environments, launcher, waiter
        self._emit, self._clock = emit, clock

    def scale(
        self, name: str, workers: int, group: str | None = None, *, wait_timeout_s: float | None = None
    ) -> View:
        """Gives the cluster this many workers. Workers beyond that are drained and removed, the last ones first."""
        view = self._observer.find(name)
        view.require_running()
        folder, spec = view.folder, planner.spec_of(view.record)
        check_total(self._access, view.record, workers + 1)
        if self._access.platform(view.record):
            return self._resize_on_platform(view, spec, workers, group, wait_timeout_s)
        _check_single_kind(name, spec, workers, group)
        self._environments.pack(spec)
        wanted = [member.name for member in worker_members(spec, workers)]
        if len(wanted) < workers:
            raise UsageError(
                f"`{name}` cannot have {count(workers, 'worker')}",
                cause=f"its file lists {count(len(wanted), 'host')} beside the head",
            )
        record, leaving = _record_workers(folder, wanted)
        if leaving:
            self._emit(Event("note", f"draining {count(len(leaving), 'node')}"))
            self.remove_nodes(folder, record, leaving)
        self._launcher.launch_missing(folder)
        return self._waiter.wait(folder, wait_timeout_s)

    def restart_node(self, name: str, node: str, wait_timeout_s: float | None = None) -> View:
        """Drains one worker if possible, terminates it and launches it again."""
        view = self._observer.find(name)
        view.require_running()
        folder = view.folder
        _check_restartable(view.record, name, node)
        with folder.lock():
            record = folder.record()
            if record.nodes[node].state not in (*TERMINAL, N.STOPPING):
                folder.append(
                    make_move(record.nodes[node], N.STOPPING, "restarted", cause=StopReason.RESTARTED)
                )
                folder.save(record)
        kept = record.nodes[node]
        platform, handle = self._access.platform(record), handle_of(record)
        if platform and handle:
            status = (view.live.get("nodes") or {}).get(node) or {}
            platform.replace_node(handle, node, status, self._access.host_of(record))
            self._observer.invalidate(folder)
            return self._waiter.wait(folder, wait_timeout_s)
        self.remove_nodes(folder, record, [node])
        with folder.lock():
            record = folder.record()
            record.nodes[node] = NodeRecord(node, kept.role, kept.group, since=time.time())
            folder.save(record)
        self._launcher.launch_missing(folder)
        return self._waiter.wait(folder, wait_timeout_s)

    def add_hosts(self, name: str, hosts: Sequence[str]) -> View:
        """Adds hosts to a cluster that lists its hosts, for as long as the cluster runs."""
        view = self._observer.find(name)
        view.require_running()
        old = planner.spec_of(view.record)
        if not old.hosts:
            raise UsageError(
                f"`{name}` takes no hosts",
                cause=f"`{view.record.backend}` provides its nodes",
                hint="--nodes 2",
            )
        listed = [host.model_dump(mode="json", exclude_unset=True) for host in all_hosts(old)]
        more = [{"host": host} for host in hosts]
        # listed hosts that are not in use stay at the end
        keys = {"hosts": [*listed[: old.nodes], *more, *listed[old.nodes :]], "nodes": old.nodes + len(more)}
        spec = loader.check({**view.record.spec, **keys}, {}, backends)
        self._creator.record_hosts(view.folder, spec)
        self._launcher.launch_missing(view.folder)
        return self._waiter.wait(view.folder)

    def remove_nodes(self, folder: ClusterDirectory, record: Record, names: Sequence[str]) -> None:
        """Drains and terminates these nodes. A scheduler job with other nodes is not cancelled: the head stops its nodes."""
        mine = [Handle.from_json(h) for h in record.handles if set(h["nodes"]) & set(names)]
        whole = [h for h in mine if set(h.nodes) <= set(names)]
        backend = self._access.backend(record)
        for node in names:
            if not any(node in h.nodes for h in whole):
                self._access.send_request(folder, {**LEAVE, "node": node})
        if whole:
            backend.cancel(whole, self._access.host_of(record))
            self._observer.invalidate(folder, whole)
        deadline = self._clock.monotonic() + LEAVE_S
        while True:
            nodes = self._observer.observe(folder).record.nodes
            left = [n for n in names if n in nodes and nodes[n].state not in TERMINAL]
            if not left:
                break
            if self._clock.monotonic() > deadline:
                raise HeliostatError(
                    f"`{record.name}` could not remove all nodes",
                    cause=f"still running: {', '.join(left)}",
                )
            self._clock.sleep(POLL_S)
        backend.collect_logs(whole, folder.path)
        with folder.lock():
            record = folder.record()
            for node in names:
                record.nodes.pop(node, None)
            ended = {h.native_id for h in whole}
            record.handles = [h for h in record.handles if h["native_id"] not in ended]
            folder.save(record)

    def _resize_on_platform(
        self, view: View, spec: ClusterSpec, workers: int, group: str | None, wait_timeout_s: float | None
    ) -> View:
        """Changes the number of workers on the platform, which chooses the nodes to remove."""
        folder, record = view.folder, view.record
        platform, handle = self._access.platform(record), handle_of(record)
        _check_resizable(record, spec, workers, group)
        assert platform and handle
        platform.resize(handle, {group: workers}, self._access.host_of(record))
        _record_resize(folder, handle, workers, group)
        self._observer.invalidate(folder)
        view = self._waiter.wait(folder, wait_timeout_s)
        deadline = self._clock.monotonic() + LEAVE_S
        while any(node.joined for node in view.record.nodes.values()) and self._clock.monotonic() < deadline:
            self._clock.sleep(POLL_S)
            view = self._observer.observe(folder)
        return view


def check_total(access: Access, record: Record, nodes: int) -> None:
    """Raises UsageError where the backend cannot have this many nodes, before anything is recorded."""
    most = access.registry.load(record.backend).most_nodes
    if nodes > most:
        raise UsageError(
            f"`{record.name}` cannot have {nodes} nodes", cause=f"`{record.backend}` allows at most {most}"
        )


def _check_single_kind(name: str, spec: ClusterSpec, workers: int, group: str | None) -> None:
    """Raises UsageError for a group that does not exist, and for a cluster with groups: `up` changes those."""
    if group and not spec.kinds:
        raise UsageError(
            f"`{name}` has no group `{group}`",
            cause="its workers are all of one kind",
            hint=f"heliostat scale {name} {workers}",
        )
    if spec.kinds:
        raise UsageError(
            f"`{name}` has groups of nodes", cause="change the group's `nodes` in the file, then repeat `up`"
        )


def _check_resizable(record: Record, spec: ClusterSpec, workers: int, group: str | None) -> None:
    kinds: Sequence[str | None] = [*spec.kinds] if spec.kinds else [None]
    if group not in kinds:
        raise UsageError(
            f"`{record.name}` has no group `{group}`" if group else f"no group of `{record.name}` is named",
            cause=f"it has {', '.join(spec.kinds)}" if spec.kinds else "its workers are all of one kind",
            hint=f"heliostat scale {record.name} {workers}" + (f" --group {kinds[0]}" if spec.kinds else ""),
        )
    if spec.has_autoscaling:
        raise UsageError(
            f"the autoscaler sets the number of nodes of `{record.name}`",
            cause="its file has `autoscale`",
            hint=f"change `min` and `max` in the file, then heliostat down {record.name} and heliostat up",
        )


def _check_restartable(record: Record, name: str, node: str) -> None:
    record.require_node(node)
    if record.nodes[node].role == "head":
        raise UsageError(f"`{node}` is the head of `{name}`", hint=f"heliostat restart {name}")
    if record.nodes[node].joined:
        raise UsageError(f"`{node}` belongs to a `join` and cannot be restarted separately")


def _record_workers(folder: ClusterDirectory, wanted: Sequence[str]) -> tuple[Record, list[str]]:
    """Records exactly these workers: (the record, the names of running nodes that must leave)."""
    with folder.lock():
        record = folder.record()
        own = [n for n in record.nodes.values() if n.role == "worker" and not n.joined]
        leaving = [n for n in own if n.name not in wanted and n.state not in TERMINAL]
        for node in leaving:
            folder.append(make_move(node, N.STOPPING, "scaled down", cause=StopReason.SCALED))
        for node in own:
            if node.name not in wanted and node not in leaving:
                del record.nodes[node.name]
        for name in wanted:
            record.nodes.setdefault(name, NodeRecord(name, "worker", since=time.time()))
        size = len(wanted) + 1
        record.spec = {**record.spec, "nodes": size}
        if (record.spec.get("min_nodes") or 0) > size:
            record.spec["min_nodes"] = size
        folder.append({"at": time.time(), "kind": "note", "text": f"scaled to {len(wanted)} workers"})
        folder.save(record)
    return record, [node.name for node in leaving]


def _record_resize(folder: ClusterDirectory, handle: Handle, workers: int, group: str | None) -> None:
    """Records the new number of workers. The platform may remove any node, so nodes beyond it may leave at any time."""
    with folder.lock():
        record = folder.record()
        if group:
            groups = record.spec["groups"]
            record.spec = {**record.spec, "groups": {**groups, group: {**groups[group], "nodes": workers}}}
        else:
            record.spec = {**record.spec, "nodes": workers + 1}
        if record.spec.get("min_nodes"):
            total = len(members(planner.spec_of(replace(record, spec={**record.spec, "min_nodes": None}))))
            record.spec["min_nodes"] = min(record.spec["min_nodes"], total)
        wanted = members(planner.spec_of(record))
        names = {member.name for member in wanted}
        for node in record.nodes.values():
            node.joined = node.joined if node.name in names else DEMAND
        for member in wanted:
            fresh = NodeRecord(
                member.name, member.role, member.group, since=time.time(), handle=handle.native_id
            )
            record.nodes.setdefault(member.name, fresh).joined = None
        folder.append({"at": time.time(), "kind": "note", "text": f"scaled to {workers} workers"})
        folder.save(record)
