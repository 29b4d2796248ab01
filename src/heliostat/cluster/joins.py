"""Adds nodes to a running cluster as an allocation of their own (`join`), with a command or without."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from heliostat.agent.protocol import CommandConfig
from heliostat.cluster import planner
from heliostat.cluster.readiness import POLL_S, ReadinessDeadline
from heliostat.cluster.scaling import LEAVE_S, check_total
from heliostat.cluster.view import View, command_status, describe_waiting
from heliostat.common.errors import DeadlineError, HeliostatError, Interrupted, UsageError
from heliostat.common.events import Emit, Event
from heliostat.common.units import count
from heliostat.config.members import Member, worker_members
from heliostat.config.spec import ClusterSpec
from heliostat.state.records import NodeRecord, Record
from heliostat.state.states import TERMINAL, NodeState
from heliostat.state.store import ClusterDirectory

if TYPE_CHECKING:
    from heliostat.cluster.access import Access
    from heliostat.cluster.clock import Clock
    from heliostat.cluster.environment import EnvironmentInstaller
    from heliostat.cluster.follow import CommandFollower, Write
    from heliostat.cluster.jobs import Jobs
    from heliostat.cluster.launch import Launcher
    from heliostat.cluster.observe import Observer
    from heliostat.cluster.scaling import Scaling

N = NodeState


class Joins:
    def __init__(
        self,
        access: Access,
        observer: Observer,
        plans: planner.Planner,
        environments: EnvironmentInstaller,
        launcher: Launcher,
        scaling: Scaling,
        jobs: Jobs,
        follower: CommandFollower,
        emit: Emit,
        clock: Clock,
    ) -> None:
        self._access, self._observer, self._planner = access, observer, plans
        self._environments, self._launcher, self._scaling = environments, launcher, scaling
        self._jobs, self._follower = jobs, follower
        self._emit, self._clock = emit, clock

    def run(
        self,
        name: str,
        spec: ClusterSpec,
        command: CommandConfig | None,
        write: Write,
        *,
        wait: bool = True,
        wait_timeout_s: float | None = None,
    ) -> tuple[str, int]:
        """Adds nodes, and runs the command on them: (the join's id, the exit code of its command, or 0).

        wait_timeout_s: a limit for the wait until the nodes are ready, queues included."""
        view, join_id = self.join(name, spec, command)
        if not wait:
            return join_id, 0
        tail = self._follower.tail(view.folder, write, join_id)
        try:
            self._wait_joined(view.folder, join_id, wait_timeout_s)
            if command is None:
                return join_id, 0
            code = self._follower.follow(view.folder, tail)
            status = "SUCCEEDED" if code == 0 else "FAILED"
            self._jobs.record(view.folder, {"id": join_id, "status": status, "exit_code": code})
            self._wait_left(view.folder, join_id)
            return join_id, code
        except KeyboardInterrupt:
            self._emit(Event("note", f"interrupted: the nodes of `{join_id}` leave"))
            self.leave(view.folder, join_id)
            tail.drain()
            raise Interrupted(f"interrupted; the nodes of `{join_id}` have left `{name}`") from None

    def join(self, name: str, spec: ClusterSpec, command: CommandConfig | None) -> tuple[View, str]:
        """Launches `spec.nodes` nodes for a running cluster: (the cluster, the join's id).

        The command runs on the first of them when all are ready; they leave when it ends."""
        view = self._observer.find(name)
        view.require_running()
        folder = view.folder
        self._check_joinable(view.record, name)
        self._environments.pack(spec)
        with folder.lease():
            record = folder.record()
            check_total(self._access, record, len(record.nodes) + spec.nodes)
            spec = spec.model_copy(update={"security": planner.spec_of(record).security})
            record.joins += 1
            record.launches += 1
            join_id = f"j{record.joins}"
            nodes = [
                member.model_copy(update={"name": f"{join_id}-{i}"})
                for i, member in enumerate(worker_members(spec, spec.nodes), 1)
            ]
            names = [node.name for node in nodes]
            work: CommandConfig | None = (
                {**command, "id": join_id, "on": names[0], "nodes": names} if command else None
            )
            request, plan = self._planner.plan(spec, nodes, record.id, work, record.launches)
            record = _record_join(folder, record, join_id, nodes, command)
            self._launcher.launch(folder, record, request, plan)
        return self._observer.observe(folder), join_id

    def leave(self, folder: ClusterDirectory, join_id: str) -> None:
        """Drains and terminates the nodes of this join."""
        record = folder.record()
        names = [n.name for n in record.nodes.values() if n.joined == join_id]
        if names:
            self._scaling.remove_nodes(folder, record, names)

    def _check_joinable(self, record: Record, name: str) -> None:
        if self._access.platform(record):
            raise UsageError(
                f"no node can join `{name}`",
                cause=f"`{record.backend}` creates its nodes",
                hint=f"heliostat scale {name} N; heliostat submit {name} -- python script.py runs a script",
            )
        if planner.spec_of(record).hosts:
            raise UsageError(
                f"no host is named to join `{name}`",
                cause="its file lists its hosts",
                hint=f"heliostat join {name} --host zinc; heliostat submit {name} -- python script.py runs a script",
            )

    def _wait_joined(self, folder: ClusterDirectory, join_id: str, timeout_s: float | None) -> View:
        """Waits until the nodes of this join are ready, or their command has started. After a timeout they leave."""
        deadline = ReadinessDeadline(self._clock, timeout_s)
        while True:
            view = self._observer.observe(folder)
            nodes = [n for n in view.record.nodes.values() if n.joined == join_id]
            job = command_status(view.live, join_id)
            if job.get("started") or (nodes and all(n.state is N.READY for n in nodes)):
                return view
            bad = [n for n in nodes if n.state in TERMINAL]
            if bad or not nodes or view.address is None:
                reason = "; ".join(f"{n.name}: {n.reason}" for n in bad) or "its nodes are gone"
                self.leave(folder, join_id)
                raise HeliostatError(
                    f"the nodes of `{join_id}` did not join `{view.record.name}`",
                    cause=reason[:400],
                    details=f"log: {folder.logs / (bad[0].name if bad else join_id)}",
                    hint=f"heliostat logs {view.record.name} {bad[0].name if bad else ''}".strip(),
                )
            if overdue := deadline.overdue(nodes):
                waiting = ", ".join(
                    f"{n.name} {n.state} {n.reason}".strip() for n in nodes if n.state is not N.READY
                )
                self.leave(folder, join_id)
                raise DeadlineError(
                    f"the nodes of `{join_id}` did not join `{view.record.name}`",
                    cause=f"{overdue}: {waiting}"[:400],
                    hint=f"the nodes were released; heliostat status {view.record.name}",
                )
            self._emit(Event("progress", describe_waiting(nodes)))
            self._clock.sleep(POLL_S)

    def _wait_left(self, folder: ClusterDirectory, join_id: str) -> None:
        """Waits for the nodes, which leave by themselves after their command; removes those that do not."""
        deadline = self._clock.monotonic() + LEAVE_S
        while left := [
            n for n in self._observer.observe(folder).record.nodes.values() if n.joined == join_id
        ]:
            if self._clock.monotonic() > deadline or all(n.state in TERMINAL for n in left):
                return self.leave(folder, join_id)
            self._clock.sleep(POLL_S)


def _record_join(
    folder: ClusterDirectory,
    planned: Record,
    join_id: str,
    nodes: list[Member],
    command: CommandConfig | None,
) -> Record:
    """Adds the nodes of a join to the record; what other commands wrote since the plan stays."""
    now, text = time.time(), f"{join_id} joins with {count(len(nodes), 'node')}"
    with folder.lock():
        record = folder.record()
        record.joins, record.launches = planned.joins, planned.launches
        for node in nodes:
            record.nodes[node.name] = NodeRecord(
                node.name, "worker", since=now, joined=join_id, launch=planned.launches
            )
        note = text + (f" to run {command['text']}" if command else "")
        folder.append({"at": now, "kind": "note", "text": note})
        entrypoint = command["text"] if command else ""
        record.jobs.append({"id": join_id, "entrypoint": entrypoint, "submitted": now, "nodes": len(nodes)})
        folder.save(record)
    return record
