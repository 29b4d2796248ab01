"""A worker node: joins the head, and ends with it or with the command that it brought along."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from typing import Any, List, Optional, cast

from . import files, head_wait, hub, ports, processes, tls
from .command import Command, runs_here
from .node import START_S, Node, check_port, version_tuple
from .protocol import (
    AgentConfig,
    HeadAddress,
    HeadMessage,
    RefusalCause,
    Refused,
    StopReason,
    WorkerMessage,
)
from .raynode import join

REACH_S = 20.0  # for a head that is known to be up to answer
HEAD_LOST_S = 30.0  # default time without contact after which a worker ends
FORCED_EXIT_S = 30.0  # for an orphaned node to stop in order


class Worker(Node):
    client: Optional[hub.HubClient] = None
    port_checked: Optional[asyncio.Future[str]] = None  # the head's answer to `check_port`
    gcs = 0  # the port of the head's GCS, received from the hub after its proof

    def __init__(self, config: AgentConfig, temp: str) -> None:
        super().__init__(config, temp)
        self.nodes_ready = asyncio.Event()  # the nodes that joined with this one are READY
        self.command = Command(self.runtime, self.on_state_change) if runs_here(config) else None

    def message(self) -> WorkerMessage:
        message = cast("WorkerMessage", self.report())
        if self.command:
            message["job"] = self.command.job
            if self.state == "READY" and not self.nodes_ready.is_set():
                message["wait_for"] = self.command.command["nodes"]
        return message

    def find_head(self) -> Optional[HeadAddress]:
        found: Any = self.config.get("head") or files.read_json(os.path.join(self.folder, "head.json"))
        head: Optional[HeadAddress] = found
        return head

    def on_state_change(self) -> None:
        if self.client:
            self.client.send_report()

    async def on_message(self, message: HeadMessage) -> None:
        do, cause = message.get("do"), message.get("cause", "")
        if "gcs" in message:
            self.gcs = int(message["gcs"])
        if message.get("nodes_ready"):
            self.nodes_ready.set()
        elif do == "port_checked" and self.port_checked and not self.port_checked.done():
            self.port_checked.set_result(str(message.get("error", "")))
        elif do == "leave":
            self.stop(cause or StopReason.LEAVE, str(message.get("reason", "asked to leave")))
        elif do == "drain":  # from now on Ray may end on this node by itself
            self.drain_cause = cause or StopReason.CLUSTER_ENDED
            self.drain_reason = str(message.get("reason", "drained"))
        elif do == "warn" and self.command:
            grace_s = float(message.get("seconds", self.grace_s))
            self.background.append(asyncio.ensure_future(self.command.stop(grace_s, self.stop_now)))
        elif do == "exec":
            self.background.append(asyncio.ensure_future(self.run_exec(message)))
        elif do == "stop":
            self.stop_now.set()
            self.stop(cause or StopReason.CLUSTER_ENDED, str(message.get("reason", "the cluster ends")))

    # -- joining the head

    async def wait_for_head(self) -> Optional[HeadAddress]:
        if self.client is None:
            self.client = hub.HubClient(
                self.secret,
                self.name,
                self.find_head,
                self.message,
                self.on_message,
                self.heartbeat_timeout_s,
                tls.client_context(self.config, self.temp),
            )
            self.background += [
                asyncio.ensure_future(self.client.run()),
                asyncio.ensure_future(self.watch_head()),
            ]
        began = time.monotonic()
        while True:  # an open port is not readiness, but Ray cannot join before
            head = self.find_head()
            if head and self.client.writer and self.gcs and not await check_port(head["ip"], self.gcs):
                self.check_versions(head)
                return {**head, "gcs": self.gcs}
            known = head if self.config.get("head") else None
            if known and time.monotonic() - began > (START_S if self.client.writer else REACH_S):
                port, why = (self.gcs, "") if self.client.writer else (known["hub"], self.client.error)
                raise Refused(
                    RefusalCause.HEAD_UNREACHABLE,
                    "the head at %s cannot be reached from %s (%s); on the head's host: sudo ufw allow from %s"
                    % (join(known["ip"], port), self.ip, why or "no answer", self.ip),
                )
            await asyncio.sleep(0.1)

    def check_versions(self, head: HeadAddress) -> None:
        """Ray rejects a node whose versions differ, with a message that names no host."""
        own, other = self.info["python"], str(head.get("python") or self.info["python"])
        if head.get("ray") and head["ray"] != self.info["ray"]:
            reason = "this node has Ray %s, the head has %s: they must be equal" % (
                self.info["ray"],
                head["ray"],
            )
            raise Refused(RefusalCause.HEAD_VERSION_DIFFERS, reason)
        if version_tuple(own) != version_tuple(other):
            reason = "this node has Python %s, the head has %s: major and minor version must be equal"
            raise Refused(RefusalCause.HEAD_VERSION_DIFFERS, reason % (own, other))

    async def before_ray(self, block: ports.Block) -> None:
        """Over ssh, check that the head can connect to this node: behind a firewall Ray would give the node up half a
        minute later without a reason. The hub's port is free on a worker."""
        head = self.config.get("head")
        if not head or not self.client or not self.client.writer:
            return
        server = await asyncio.start_server(lambda _, writer: writer.close(), self.ip, block.ports["hub"])
        port = int(server.sockets[0].getsockname()[1])
        self.port_checked = asyncio.get_running_loop().create_future()
        question: WorkerMessage = {**self.message(), "check_port": (self.ip, port)}
        hub.send(self.client.writer, question)
        try:
            error = await asyncio.wait_for(self.port_checked, REACH_S)
        except asyncio.TimeoutError:
            error = ""  # the head is busy; unknown
        finally:
            server.close()
        if error:
            raise Refused(
                RefusalCause.NODE_UNREACHABLE,
                "the head cannot reach this machine at %s (%s); here: sudo ufw allow from %s"
                % (join(self.ip, port), error, head["ip"]),
            )

    async def watch_head(self) -> None:
        """Stop this node when there is no contact with the head for too long."""
        assert self.client
        timeout_s = float(self.config.get("head_lost_timeout_s", HEAD_LOST_S))
        contact, silent_s, last = self.client.last_contact, 0.0, time.monotonic()
        wait = head_wait.make(self.config, time.monotonic)
        while True:
            waits = self.state == "STARTING" and not self.client.was_connected
            await asyncio.sleep(head_wait.CHECK_S if waits else 1)
            now = time.monotonic()
            # count at most two seconds per step: a suspended node could not receive anything
            silent_s = silent_s + min(2.0, now - last) if self.client.last_contact == contact else 0.0
            contact, last = self.client.last_contact, now
            if self.state == "STARTING" and not self.client.was_connected:
                reason = wait.stop_reason(head_wait.observe(self.config))
            else:
                reason = "no contact with the head for %d s" % silent_s if silent_s > timeout_s else ""
            if reason:
                self.stop_now.set()
                self.orphaned = True
                self.force_exit_later()
                self.stop(StopReason.HEAD_LOST, reason)
                return

    def force_exit_later(self) -> None:
        """End all processes of this node after FORCED_EXIT_S. If the network is lost, the shared directory may be, too, and
        a write there blocks for ever."""

        def force_exit() -> None:
            processes.end_all([os.getpid()], self.config["mark"], exclude=[self.supervisor])
            os._exit(1)  # the supervisor removes the private directory

        timer = threading.Timer(FORCED_EXIT_S, force_exit)
        timer.daemon = True
        timer.start()

    # -- running and stopping

    async def run_until_stop(self) -> None:
        assert self.ray
        tasks: List[asyncio.Future[Any]] = [asyncio.ensure_future(self.ray.ended.wait())]
        if self.command:
            tasks.append(asyncio.ensure_future(self.run_command(self.command)))
        done = asyncio.ensure_future(asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED))
        await self.wait_unless_stopped(done)

    async def run_command(self, command: Command) -> None:
        """Run the command of a `join` as a driver when its nodes are ready; then leave the cluster."""
        assert self.client
        while not self.nodes_ready.is_set():
            self.client.send_report()
            try:
                await asyncio.wait_for(self.nodes_ready.wait(), 0.5)
            except asyncio.TimeoutError:
                pass
        head = self.find_head() or HeadAddress()
        if head.get("job"):
            command.config["env"] = {
                **(command.config.get("env") or {}),
                "RAY_HEAD_JOB_ID": str(head["job"]),
            }
        code = await command.run(join(head["ip"], self.gcs))
        self.stop(StopReason.COMMAND_ENDED, "the command ended with code %d" % code)

    async def shut_down(self) -> None:
        if self.command:
            await self.command.stop(self.grace_s, self.stop_now)
            self.command.close()
        if self.ray is None:
            return
        if self.stopping.is_set() and not self.stop_now.is_set() and self.client and self.client.writer:
            others = self.command.command["nodes"] if self.command else self.other_nodes
            if others:  # the other nodes of the allocation leave with this one
                others = [name for name in others if name != self.name]
                release: WorkerMessage = {**self.message(), "release": others}
                hub.send(self.client.writer, release)
            drained = asyncio.ensure_future(self.ray.drain(self.drain_s))
            stop_now = asyncio.ensure_future(self.stop_now.wait())
            await asyncio.wait([drained, stop_now], return_when=asyncio.FIRST_COMPLETED)
        await self.ray.stop()
        if self.launch_task:  # the allocation ends with this node: let the others drain
            await asyncio.wait([self.launch_task], timeout=self.drain_s + 10)

    def exit_code(self) -> int:
        if self.command and self.command.job["exit_code"] is not None:
            return int(self.command.job["exit_code"])
        return super().exit_code()
