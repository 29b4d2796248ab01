"""The head's agent: a node that also keeps the table of nodes, runs the command, applies timeouts and ends the cluster."""

from __future__ import annotations

import asyncio
import datetime
import json
import os
import time
from typing import Any, Dict, List, Optional

from . import files, hub, ports, tls
from .command import Command, runs_here
from .drain import drain_workers
from .idle import Dashboard, IdleClock, find_activity, list_jobs
from .node import Node, check_port
from .protocol import (
    SCHEMA,
    AgentConfig,
    Answer,
    ClusterReport,
    Connection,
    Ended,
    HeadAddress,
    HeadMessage,
    NodeReport,
    Pulse,
    RayJob,
    RefusalCause,
    Request,
    StopReason,
    Warned,
    WorkerMessage,
)
from .raynode import join

WARN_S = 15 * 60  # before the time limit
FIRST_HEARTBEAT_S = 90.0  # a step of many nodes takes a while to start; after that a silent node is LOST
GATHER_S = 600.0  # for nodes to become ready before the command is given up
GATHER_POLL_S = 1.0
CLEAN_S = 10.0  # for the other nodes of the allocation to remove their private directories
UNKNOWN_ACTIVITY = (OSError, KeyError, TypeError, asyncio.TimeoutError)  # the dashboard did not answer


class Head(Node):
    def __init__(self, config: AgentConfig, temp: str) -> None:
        super().__init__(config, temp)
        self.hub: Optional[hub.Hub] = None
        self.gcs = 0  # the GCS port, once the GCS listens there
        self.nodes: Dict[str, NodeReport] = {}
        self.ready_count = (
            0  # of the table; updated with each report, since each heartbeat of each node comes here
        )
        self.command = Command(self.runtime, self.write_state) if runs_here(config) else None
        self.enough_ready = asyncio.Event()
        self.ready_since: Optional[float] = None
        self.started = self.checked_at = time.time()
        self.ended: Optional[Ended] = None
        self.idle = IdleClock(config.get("idle") or {}, self._path("keepalive"))
        self.winding_down = False
        self.warned: Optional[Warned] = None  # the last warning for users
        self.idle_check: Optional[asyncio.Future[None]] = None
        self.jobs: List[RayJob] = []  # the submitted jobs when the cluster ended
        self.last_new = time.monotonic()  # when a node first sent a report
        self._write_due = False

    def _path(self, name: str) -> str:
        return os.path.join(self.folder, name)

    # -- the table of nodes, and the files for the client

    def on_state_change(self) -> None:
        self.update_node(self.name, self.report())

    def update_node(self, node: str, report: NodeReport) -> None:
        old = self.nodes.get(node, NodeReport())
        since = old.get("ready") if old.get("launch") == report.get("launch") else None
        if since or (report.get("state") == "READY" and report.get("since")):
            report["ready"] = since or report["since"]  # the history counts from then on
        self.nodes[node] = report
        if not old:
            self.last_new = time.monotonic()
        changed = (old.get("state"), old.get("reason"), old.get("job")) != (
            report.get("state"),
            report.get("reason"),
            report.get("job"),
        )
        if changed:
            self.log_event({"node": node, "state": report.get("state"), "reason": report.get("reason")})
            self.schedule_write()
        self.ready_count += (report.get("state") == "READY") - (old.get("state") == "READY")
        if self.ready_count >= self.config["min_nodes"] and not self.enough_ready.is_set():
            self.enough_ready.set()
            self.ready_since = time.time()

    def on_message(self, node: str, message: WorkerMessage) -> HeadMessage:
        """A worker's report. The answer shows that the head is alive, and whether the awaited nodes are ready."""
        assert self.hub or not message.get("release")
        wait_for = message.pop("wait_for", None)
        if "check_port" in message:
            ip, port = message.pop("check_port")
            self.background.append(asyncio.ensure_future(self.check_worker_port(node, ip, port)))
        for name in message.pop("release", ()):
            leave: HeadMessage = {"do": "leave", "reason": "its allocation ends"}
            self.hub.send({**leave, "cause": StopReason.ALLOCATION_ENDED}, name)  # type: ignore[union-attr]
        known = self.nodes.get(node, NodeReport())
        if int(message.get("launch") or 0) < int(known.get("launch") or 0):  # it was given up, and reconnects
            reason = "replaced by a newer launch of the same node"
            return {"do": "stop", "reason": reason, "cause": StopReason.REPLACED}
        self.update_node(node, message)
        if not wait_for:
            return {"gcs": self.gcs}
        states = [self.nodes.get(name, NodeReport()).get("state") for name in wait_for]
        return {"gcs": self.gcs, "nodes_ready": all(state == "READY" for state in states)}

    async def check_worker_port(self, node: str, ip: str, port: int) -> None:
        """Answer a worker's question whether the head can connect to it."""
        error = await check_port(ip, port)
        if self.hub:
            self.hub.send({"do": "port_checked", "error": error}, node)

    def on_node_lost(self, node: str) -> None:
        report = self.nodes.get(node, NodeReport())
        if report.get("state") in ("READY", "STARTING"):
            since = max(time.time(), float(report.get("since") or 0))
            cause, reason = StopReason.AGENT_SILENT, "no heartbeat from its agent"
            self.update_node(
                node, {**report, "state": "LOST", "since": since, "cause": cause, "reason": reason}
            )

    def mark_silent_nodes(self) -> None:
        """Mark nodes of the allocation LOST whose agents never sent a report."""
        silent = [name for name in self.other_nodes if name not in self.nodes]
        timeout_s = float(self.config.get("first_heartbeat_timeout_s", FIRST_HEARTBEAT_S))
        if silent and time.monotonic() - self.began > timeout_s:
            line = files.tail(os.path.join(self.logs, "step.log"), 300).strip().rpartition("\n")[2]
            reason = "no heartbeat from its agent for %d s%s" % (timeout_s, line and ": " + line)
            for name in silent:
                self._set_node_state(name, "LOST", reason, StopReason.AGENT_SILENT)

    def on_launch_failure(self, reason: str, names: List[str]) -> None:
        for name in names:
            if self.nodes.get(name, NodeReport()).get("state") in (None, "STARTING"):
                self._set_node_state(name, "FAILED", reason, RefusalCause.LAUNCH_FAILED)

    def _set_node_state(self, node: str, state: str, reason: str, cause: str) -> None:
        """Set the state of a node whose agent cannot report it."""
        report: NodeReport = {"state": state, "reason": reason, "cause": cause, "since": time.time()}
        self.update_node(node, {**report, "launch": self.config.get("launch", 0)})

    def log_event(self, event: Dict[str, Any]) -> None:
        """Append one line to the head's own log."""
        try:
            with open(os.path.join(self.logs, "agent.jsonl"), "a") as stream:
                stream.write(json.dumps({"at": time.time(), **event}) + "\n")
        except OSError:
            pass

    def schedule_write(self) -> None:
        if not self._write_due:  # many changes at once cost one write
            self._write_due = True
            asyncio.get_running_loop().call_later(0.02, self.write_state)

    def write_state(self) -> None:
        self._write_due = False
        state: ClusterReport = {
            "schema": SCHEMA,
            "nodes": self.nodes,
            "job": self.command.job if self.command else None,
            "started": self.started,
            "warned": self.warned,
            "ready": self.ready_since,
            "jobs": self.jobs,
            "ended": self.ended,
        }
        try:
            # on one line: indenting uses Python's slow encoder, and this runs between the heartbeats of all nodes
            files.write(self._path("state.json"), json.dumps(state) + "\n")
        except OSError:
            pass  # a full disk must not end a running cluster; the next change tries again

    def write_pulse(self, beat: int) -> None:
        pulse: Pulse = {
            "beat": beat,
            "at": time.time(),
            "idle_s": round(self.idle.seconds(), 1),
            "time_left_s": self.time_left(),
        }
        try:
            files.write_json(self._path("pulse.json"), pulse)
            if self.config["auth"] == "token" and not os.path.exists(self.config["token_path"]):
                files.write(self.config["token_path"], self.secret)  # clients need it
                self.log_event({"event": "the token file was removed; it is written again"})
        except OSError:
            pass

    # -- starting

    async def before_ray(self, block: ports.Block) -> None:
        if self.hub:
            await self.hub.close(0)
        self.gcs = 0
        self.hub = hub.Hub(
            self.secret, self.on_message, self.on_node_lost, self.heartbeat_timeout_s, self.token
        )
        context = tls.server_context(self.config, self.temp)
        self.info["hub"] = await self.hub.start(self.ip, block.ports["hub"], context)
        address: HeadAddress = {
            "id": self.config["id"],
            "ip": self.ip,
            "hub": self.info["hub"],
            "ray": self.info["ray"],
            "python": self.info["python"],
            "job": batch_job_id(),
        }
        files.write_json(self._path("head.json"), address)

    def on_gcs_listening(self, port: int) -> None:
        """Workers receive the port from the hub, which has proved to be this cluster's."""
        self.gcs = port
        if self.hub:
            self.hub.send({"gcs": port})

    @property
    def dashboard(self) -> Dashboard:
        return Dashboard(self.ray.ports["dashboard"] if self.ray else 0, self.token)

    def connection_variables(self) -> Dict[str, Any]:
        """The variables of `connection.env`."""
        assert self.ray
        port, job = self.ray.ports, batch_job_id()
        started = datetime.datetime.fromtimestamp(self.started).astimezone().isoformat(timespec="seconds")
        variables: Dict[str, Any] = {
            "RAY_ADDRESS": join(self.ip, port["gcs"]),
            "HELIOSTAT_CLUSTER": self.config["cluster"],
            "HELIOSTAT_RAY_PORT": port["gcs"],
            "HELIOSTAT_HEAD_NODE": self.info["host"],
            "HELIOSTAT_HEAD_IP": self.ip,
            **({"HELIOSTAT_JOB_ID": job} if job else {}),
            "HELIOSTAT_PORT_OFFSET": self.config["ports"].get("offset", 0),
            "HELIOSTAT_STARTED": started,
            "HELIOSTAT_DASHBOARD_PORT": port["dashboard"],
            "RAY_AUTH_MODE": "token" if self.config["auth"] == "token" else "disabled",
        }
        if self.config["auth"] == "token":
            variables["RAY_AUTH_TOKEN_PATH"] = self.config["token_path"]
        variables.update(tls.exports(self.config))
        return variables

    def write_connection(self) -> None:
        """Write the connection files: `connection.env` for shells, `connection.json` for programs."""
        assert self.ray and self.hub
        port, variables = self.ray.ports, self.connection_variables()
        self.hub.dashboard = port["dashboard"]
        connection: Connection = {
            "schema": SCHEMA,
            "address": variables["RAY_ADDRESS"],
            "dashboard_port": port["dashboard"],
            "ray": self.info["ray"],
            "python": self.info["python"],
            "client_port": port["client"] or None,
            "hub": {"ip": self.ip, "port": self.info["hub"], "tls": bool(self.config.get("tls"))},
            "env": variables,
        }
        files.write_json(self._path("connection.json"), connection)
        lines = ["export %s='%s'\n" % (k, str(v).replace("'", "'\\''")) for k, v in variables.items()]
        files.write(self._path("connection.env"), "".join(lines))

    # -- while it runs

    async def run_until_stop(self) -> None:
        assert self.ray
        self.write_connection()
        self.idle.update(True)  # the cluster could not be used before
        work = [self.ray.ended.wait(), self.run_timers()]
        if self.command:
            work.append(self.run_command(self.command))
        tasks = [asyncio.ensure_future(coroutine) for coroutine in work]
        first = asyncio.ensure_future(asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED))
        await self.wait_unless_stopped(first)
        for task in tasks:
            task.result() if task.done() else task.cancel()

    def time_left(self) -> Optional[float]:
        limit = self.config.get("time_limit_s")
        return limit - (time.monotonic() - self.began) if limit else None

    async def run_timers(self) -> None:
        """Heartbeats, requests, idle time and the time limit. Returns when the cluster must end."""
        limit = self.config.get("time_limit_s")
        checked = -1e9
        for beat in range(1 << 62):
            left = self.time_left()
            if limit and left is not None:
                if left <= WARN_S and not self.warned and limit > WARN_S:
                    self.warn("the time limit is %d minutes away" % (left // 60))
                if left <= self.grace_s and self.config.get("enforce_time_limit", True):
                    return self.stop(StopReason.TIME_LIMIT, "the time limit of %d s is reached" % limit)
            if time.monotonic() - checked >= self.idle.interval_s:
                checked = time.monotonic()
                if (
                    self.idle_check is None or self.idle_check.done()
                ):  # a slow dashboard must not stop the timers
                    self.idle_check = asyncio.ensure_future(self.check_idle())
            self.read_requests()
            if beat % 5 == 0:
                self.write_pulse(beat)
                self.mark_silent_nodes()
            await asyncio.sleep(min(1.0, self.idle.interval_s))

    def warn(self, text: str) -> None:
        self.warned = {"at": time.time(), "text": text}
        self.log_event({"event": text})
        self.schedule_write()

    def read_requests(self) -> None:
        """Execute and remove the request files of clients."""
        directory = self._path("requests")
        try:
            names = sorted(name for name in os.listdir(directory) if name.endswith(".json"))
        except OSError:
            return
        for name in names:
            content: Any = files.read_json(os.path.join(directory, name)) or {}
            os.unlink(os.path.join(directory, name))
            self.log_event({"request": content})
            self.execute(content)

    def execute(self, request: Request) -> None:
        do, node = request.get("do"), request.get("node")
        if do == "stop-job" and self.command and request.get("job") == self.command.job["id"]:
            stop = self.command.stop(self.grace_s, self.stop_now)
            self.background.append(asyncio.ensure_future(stop))
        elif do == "exec" and node == self.name:
            self.background.append(asyncio.ensure_future(self.run_exec(request)))
        elif self.hub and node:
            message: Any = request  # "exec" and "leave" have the same keys in both documents
            self.hub.send(message, node)

    async def check_idle(self) -> None:
        """Update the idle time, and stop the cluster when the idle timeout has passed."""
        if self.active_joins() or (self.command and self.command.is_active):
            return self.idle.update(True)
        since, self.checked_at = self.checked_at, time.time()  # jobs that ran between two checks count
        try:
            self.idle.update(await find_activity(self.dashboard, since) is not None)
        except UNKNOWN_ACTIVITY:
            self.idle.update(True, known=False)  # never end a cluster that may be in use
        if not self.idle.is_expired():
            return
        if await self.is_busy():  # check again: work may have started meanwhile
            return self.idle.update(True)
        self.stop(StopReason.IDLE, "idle for %d s" % self.idle.seconds())

    async def run_command(self, command: Command) -> None:
        """Run the user's command when enough nodes are ready. The cluster ends with it."""
        self.last_new = time.monotonic()
        while not self.enough_ready.is_set():
            reason = self.gather_timeout(time.monotonic())
            if reason:
                self.stop_cause, self.stop_reason = StopReason.NODES_MISSING, reason
                return
            try:
                await asyncio.wait_for(self.enough_ready.wait(), GATHER_POLL_S)
            except asyncio.TimeoutError:
                pass
        code = await command.run(join(self.ip, self.gcs))
        if not self.stop_reason:
            self.stop_cause, self.stop_reason = (
                StopReason.COMMAND_ENDED,
                "the command ended with code %d" % code,
            )

    def gather_timeout(self, now: float) -> str:
        """Why the command waits no longer for nodes; "" while it waits.

        Nodes of other allocations may be queued: until each has sent a report there is no limit. The time counts from the
        first report of the last new node."""
        timeout_s = float(self.config.get("gather_s", GATHER_S))
        queued = [name for name in self.config.get("queued", ()) if name not in self.nodes]
        if queued or now - self.last_new <= timeout_s:
            return ""
        return "fewer than %d nodes were ready within %d s" % (self.config["min_nodes"], timeout_s)

    def active_joins(self) -> List[str]:
        """Joined nodes whose own command has not ended."""
        found = []
        for name, report in self.nodes.items():
            job = report.get("job")
            if job and job.get("status") in ("PENDING", "RUNNING", "STOPPING"):
                found.append(name)
        return found

    async def is_busy(self) -> bool:
        """Whether there is unfinished work; True if that is unknown."""
        if self.active_joins() or (self.command and self.command.is_active):
            return True
        try:
            return await find_activity(self.dashboard) is not None
        except UNKNOWN_ACTIVITY:
            return True

    # -- ending

    def on_time_limit(self) -> None:
        wind_down = self.wind_down(StopReason.TIME_LIMIT, "the time limit is near")
        self.background.append(asyncio.ensure_future(wind_down))

    async def wind_down(self, cause: str, reason: str) -> None:
        """Stop the cluster within the grace period.

        In the first half Ray drains the workers with that deadline; Ray Train sees a preemption and saves. Then commands get
        SIGTERM, on the head and on joined nodes, and have the other half. The cluster stops when the work is done, or after the
        grace period. A head without workers has nothing to drain."""
        if self.winding_down:
            return
        self.winding_down = True
        end = time.monotonic() + self.grace_s
        self.warn("%s: %d s to finish" % (reason, self.grace_s))
        if any(node.get("state") == "READY" for name, node in self.nodes.items() if name != self.name):
            if self.hub:
                self.hub.send({"do": "drain", "reason": reason, "cause": cause})
            # not nodes with a running command: Ray would end a node whose only work is a driver
            drain = drain_workers(
                self.runtime,
                os.path.join(self.logs, "drain.log"),
                join(self.ip, self.gcs),
                reason,
                self.grace_s / 2,
                exclude=self.active_joins(),
            )
            self.background.append(asyncio.ensure_future(drain))
            while time.monotonic() < end - self.grace_s / 2 and await self.is_busy():
                await asyncio.sleep(1)
        if self.hub:
            left_s = end - time.monotonic()
            self.hub.send({"do": "warn", "reason": reason, "cause": cause, "seconds": left_s})
        if self.command:
            await self.command.stop(end - time.monotonic(), self.stop_now)
        while time.monotonic() < end and await self.is_busy():
            await asyncio.sleep(1)
        self.stop(cause, reason)

    async def shut_down(self) -> None:
        if self.command:
            await self.command.stop(self.grace_s, self.stop_now)
            self.command.close()
        elif self.block:
            try:
                self.jobs = await list_jobs(self.dashboard)
            except UNKNOWN_ACTIVITY:
                pass  # Ray has ended already
        if self.hub:
            reason, cause = self.stop_reason or self.reason, self.stop_cause or self.cause
            self.hub.send({"do": "stop", "reason": reason, "cause": cause})
        if self.ray:
            await self.ray.stop()
        if self.hub:
            await self.hub.close(15)

    async def run(self) -> Answer:
        self.schedule_write()
        answer = await super().run()
        self.ended = {"at": time.time(), "reason": self.reason, "cause": self.cause}
        self.ended["exit_code"] = self.exit_code()
        for name in (*files.HEAD_FILES, *(["token"] if self.config.get("standalone") else [])):
            try:
                os.unlink(self._path(name))
            except OSError:
                pass
        self.write_report()  # again: on a full disk there is space only now
        self.write_state()
        # the allocation ends with this process: wait for the other nodes, which could not clean up after a SIGKILL
        if self.launch_task and self.hub:
            await asyncio.wait([self.launch_task], timeout=CLEAN_S)
        return answer

    def exit_code(self) -> int:
        if self.command and self.command.job["exit_code"] is not None:
            return int(self.command.job["exit_code"])
        return super().exit_code()


def batch_job_id() -> Optional[str]:
    return os.environ.get("SLURM_JOB_ID") or os.environ.get("PBS_JOBID")
