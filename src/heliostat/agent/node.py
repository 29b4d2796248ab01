"""A node from its config to its last report: chooses an address and ports, starts Ray, monitors it and stops it."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
import sys
import time
import traceback
from typing import Any, Callable, Dict, List, Optional

from . import files, hub, ports, probe, processes, runtime, sizes, step, tempdirs, tls, worker_launch
from .files import describe
from .protocol import (
    AgentConfig,
    Answer,
    HeadAddress,
    HeadMessage,
    NodeFile,
    NodeReport,
    RefusalCause,
    Refused,
    Request,
    StopReason,
    cause_of,
)
from .raynode import DRAIN_S, IN_USE, SLOW, PortTaken, RayNode, join

FIRST_RAY_WITH_TOKENS = (2, 52)
START_S = 180.0  # for Ray to start
START_ATTEMPTS = 3
GRACE_S = 10.0  # default time for a command to end
REPEATED_SIGNAL_S = 1.0  # a scheduler signals supervisor and agent alike: within this time it is one request


def version_tuple(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2] if part.isdigit())


class Node:
    """What a head and a worker share. `config` is the client's; `temp` is the node's private directory."""

    ip = ""

    def __init__(self, config: AgentConfig, temp: str) -> None:
        self.config, self.temp = config, temp
        self.name: str = config["node"]
        self.folder: str = config["folder"]
        self.logs = os.path.join(self.folder, "logs", self.name)
        self.state, self.reason, self.cause, self.since = "STARTING", "", "", time.time()
        self.supervisor = os.getppid()
        self.supervisor_start = processes.start_time(self.supervisor)
        self.heartbeat_timeout_s = float(config.get("heartbeat_timeout_s", hub.HEARTBEAT_TIMEOUT_S))
        self.info: NodeReport = {}  # facts that become known while the node starts
        self.ray: Optional[RayNode] = None
        self.block: Optional[ports.Block] = None
        self.stop_reason, self.stop_cause = "", ""
        self.orphaned = False  # the head or the Slurm step of this node is lost
        self.drain_reason, self.drain_cause = "", ""  # why the head drains this node
        self.stop_requested_at = self.sigcont_at = float("-inf")
        self.grace_s, self.drain_s = float(config.get("grace_s", GRACE_S)), float(DRAIN_S)
        # the time limit counts from the first line of the batch script, not from the start of the agent
        late = time.time() - float(os.environ.get("HELIOSTAT_BEGAN") or time.time())
        self.began = time.monotonic() - max(0.0, late)
        self.stopping = asyncio.Event()
        self.stop_now = asyncio.Event()  # a second request, or the whole cluster ends: do not drain
        self.launch_task: Optional[asyncio.Future[None]] = None  # runs the agents of the other nodes
        self.background: List[asyncio.Future[None]] = []  # the event loop keeps no strong references to tasks
        self.secret = self._read_secret()
        self.token = self.secret if config["auth"] == "token" else ""
        self.runtime = runtime.make(config, temp)

    def _read_secret(self) -> str:
        """The secret of the hub; copies the token to the private directory."""
        if self.config["auth"] != "token":
            return str(self.config["id"])  # not secret: there is no authentication
        with open(self.config["token_path"]) as stream:
            secret = stream.read().strip()
        files.write(os.path.join(self.temp, "token"), secret)
        return secret

    # -- the node's report

    def set_state(self, state: str, reason: str = "", cause: str = "") -> None:
        # a clock that is set back must not make an older state the newer one
        self.state, self.reason, self.cause, self.since = state, reason, cause, max(time.time(), self.since)
        self.write_report()
        self.on_state_change()

    def report(self) -> NodeReport:
        report: NodeReport = {
            "state": self.state,
            "reason": self.reason,
            "cause": self.cause,
            "since": self.since,
            "launch": self.config.get("launch", 0),
        }
        report.update(self.info)
        return report

    def write_report(self) -> None:
        """Write `nodes/NAME.json`: the report, and what `stop` needs to find the processes."""
        identity: NodeFile = {
            "node": self.name,
            "mark": self.config["mark"],
            "temp": self.temp,
            "pid": self.supervisor,
            "start": self.supervisor_start,
            "executable": sys.executable,
            "host": socket.gethostname(),
        }
        path = os.path.join(self.folder, "nodes", self.name + ".json")
        try:
            files.write_json(path, {**identity, **self.report()})
        except OSError:
            pass  # a full disk must not end a running cluster

    def on_state_change(self) -> None:
        """Called after each change of the report."""

    # -- requests to stop

    @property
    def supervisor_died(self) -> bool:
        return os.getppid() != self.supervisor

    def stop(self, cause: str, reason: str) -> None:
        """Request the end of this node; a second request ends it without draining."""
        if self.supervisor_died:
            cause, reason = StopReason.SUPERVISOR_KILLED, "its supervisor process was killed"
            if self.config.get("slurmstepd"):  # it kills this process, too: remove the secrets first
                tempdirs.remove_secrets(self.temp)
        if self.stopping.is_set() and time.monotonic() - self.stop_requested_at > REPEATED_SIGNAL_S:
            self.stop_now.set()
        elif not self.stopping.is_set():
            self.stop_requested_at = time.monotonic()
            self.shorten_grace()
        if not self.stop_reason:
            self.stop_cause, self.stop_reason = cause, reason
        self.stopping.set()

    def on_stop_signal(self, cause: str, reason: str) -> None:
        """SIGTERM, SIGINT or SIGHUP. With `kill_follows_signal`, the scheduler sends it only when it kills soon after."""
        if self.config.get("kill_follows_signal"):
            self.sigcont_at = time.monotonic()
        self.stop(cause, reason)

    def on_sigurg(self) -> None:
        """`qsig` of PBS signals every process of a job, again and again; other programs ignore SIGURG."""
        if not self.stopping.is_set():
            self.stop(StopReason.REQUESTED, "stop requested")

    def on_sigcont(self) -> None:
        self.sigcont_at = time.monotonic()
        self.shorten_grace()

    def on_time_limit(self) -> None:
        """The time limit is near."""
        self.stop(StopReason.TIME_LIMIT, "the time limit is near")

    def shorten_grace(self) -> None:
        """Slurm sends SIGCONT with the SIGTERM that precedes SIGKILL: then there is less time than configured."""
        if abs(self.sigcont_at - self.stop_requested_at) < 2:
            self.grace_s = min(self.grace_s, float(self.config.get("kill_wait_s", 30)) / 2)
            self.drain_s = min(self.drain_s, self.grace_s)

    def start_time_limit_timer(self) -> None:
        """If the scheduler sends no warning before the time limit, the first node of the allocation has a timer."""
        limit, margin = self.config.get("time_limit_s"), self.config.get("margin_s")
        if limit and margin is not None and self.config.get("member_index") == 0:
            left = limit - (time.monotonic() - self.began) - self.grace_s - margin
            asyncio.get_running_loop().call_later(max(0.0, left), self.on_time_limit)

    async def watch_slurm_step(self) -> None:
        """Stop this node when the slurmstepd of its step was killed."""
        daemon = self.config.get("slurmstepd")
        while daemon is not None and not step.is_gone(self.supervisor, daemon):
            await asyncio.sleep(step.CHECK_S)
        if daemon is not None:
            self.orphaned = True
            self.stop(StopReason.SLURM_STEP_LOST, "its Slurm step is lost: slurmstepd was killed")

    async def run_exec(self, request: Request | HeadMessage) -> None:
        """Run a command of `exec`. Output goes to files beside the request; the exit code is written last."""
        base = os.path.join(self.folder, "requests", request["answer"])
        with open(base + ".out", "wb") as out, open(base + ".err", "wb") as err:
            try:
                child = await asyncio.create_subprocess_exec(
                    *request["argv"], stdin=asyncio.subprocess.DEVNULL, stdout=out, stderr=err
                )
                code = await child.wait()
            except OSError as error:
                code = 127
                err.write(("%s\n" % error).encode())
        files.write(base + ".code", "%d" % (128 - code if code < 0 else code))

    # -- the other nodes of the allocation

    @property
    def other_nodes(self) -> List[str]:
        """The nodes of the allocation whose agents this node starts."""
        return (
            [member["node"] for member in self.config["members"][1:]]
            if self.config.get("launch_command")
            else []
        )

    def launch_others(self) -> None:
        if self.config.get("launch_command"):
            self.launch_task = asyncio.ensure_future(self._launch_others())

    async def _launch_others(self) -> None:
        """If this fails, its error is the reason of every other node."""
        try:
            await worker_launch.launch(self)
        except Exception as error:
            traceback.print_exc()
            self.on_launch_failure("its agent could not be started: %s" % describe(error), self.other_nodes)

    def on_launch_failure(self, reason: str, names: List[str]) -> None:
        """The agents of these nodes did not start. Only a head has a table to record it in."""

    # -- starting Ray

    async def start(self) -> None:
        """Prepare the environment, start the other nodes of the allocation, and start Ray."""
        if self.config.get("stage") and self.other_nodes:  # staging takes long: let all nodes do it at once
            await self.runtime.broadcast()
            self.launch_others()
        await self.runtime.prepare()
        await self.check_ray()
        sizes.resolve(self.config, self.info)
        if not self.launch_task:
            self.launch_others()
        await self.start_ray()

    async def check_ray(self) -> None:
        found, wanted = await self.runtime.versions(), self.config.get("ray")
        version = found["ray"]
        if version is None:
            raise Refused(self.runtime.missing_ray, "no Ray in %s" % self.runtime.description)
        if wanted and version != wanted:
            reason = "Ray %s is installed, %s is asked for" % (version, wanted)
            raise Refused(RefusalCause.RAY_VERSION_DIFFERS, reason)
        if self.config["auth"] == "token" and version_tuple(version) < FIRST_RAY_WITH_TOKENS:
            reason = "Ray %s has no authentication (2.52 is the first that does)" % version
            raise Refused(RefusalCause.RAY_TOO_OLD, reason)
        self.info.update({"ray": version, "python": found["python"], "host": socket.gethostname()})

    def choose_address(self) -> None:
        address = self.config["address"]
        try:
            self.ip = probe.address(address.get("interface"), address["default"])
        except ValueError as error:
            raise Refused(RefusalCause.NETWORK_INTERFACE, str(error)) from None
        if address.get("interface"):
            # the interface is meant for NCCL and Gloo, too, unless the user set their variables
            name, env = probe.interface_of(self.ip), self.config.setdefault("env", {})
            for key in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
                if name and key not in os.environ:
                    env.setdefault(key, name)

    async def wait_for_head(self) -> Optional[HeadAddress]:
        """Wait until the head can be joined; None on the head itself."""
        return None

    async def before_ray(self, block: ports.Block) -> None:
        """Called when the ports are chosen, before Ray starts."""

    def on_gcs_listening(self, port: int) -> None:
        """Ray's GCS on this node listens on that port."""

    async def start_ray(self) -> None:
        """Start Ray and wait until its node table lists this node. Repeats if a port was taken or the host was busy."""
        window = self.config["ports"].get("window")
        for attempt in range(START_ATTEMPTS):
            head = await self.wait_for_head()  # first: in a narrow range the head's ports have priority
            try:
                self.block = ports.take(
                    (window[0], window[1]) if window else None, bool(self.config["ports"].get("client"))
                )
            except ports.NoPorts as error:
                raise Refused(RefusalCause.PORTS_TAKEN, str(error)) from None
            self.info.update({"ip": self.ip, "resources": self.config["resources"]})
            self.ray = RayNode(self.runtime, self.ip, self.block, os.path.join(self.logs, "ray.log"))
            self.ray.on_gcs_listening = self.on_gcs_listening
            try:
                await self.before_ray(self.block)
                await self.ray.start(head)
                await self.ray.wait_ready(START_S)
                self.info["ports"] = self.known_ports()
                self.ray.link_logs(self.logs)
                return
            except (RuntimeError, OSError) as error:
                await self.ray.stop()
                taken = isinstance(error, PortTaken) or getattr(error, "errno", None) == errno.EADDRINUSE
                output = self.ray.output()
                taken = taken or bool(IN_USE.search(output))
                retry = taken or SLOW.search(output)
                if attempt == START_ATTEMPTS - 1 or self.stopping.is_set() or not retry:
                    cause = RefusalCause.PORTS_TAKEN if taken else RefusalCause.RAY_START_FAILED
                    raise Refused(cause, str(error)) from None
                self.block.close()

    def known_ports(self) -> Dict[str, Any]:
        """The ports that are known; Ray does not report all ports that the kernel chose."""
        assert self.ray and self.block
        known = {**self.ray.ports, "hub": self.info.get("hub", 0)}
        workers = {"workers": list(self.block.workers)} if self.block.workers else {}
        return {**{name: port for name, port in known.items() if port}, **workers}

    async def wait_unless_stopped(self, work: asyncio.Future[Any]) -> bool:
        """Wait for the work; False if this node must stop first (the work is then cancelled)."""
        stop = asyncio.ensure_future(self.stopping.wait())
        await asyncio.wait([work, stop], return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        if work.done():
            work.result()
            return True
        work.cancel()
        return False

    # -- from start to end

    async def run_until_stop(self) -> None:
        """Return when this node must end."""
        raise NotImplementedError

    async def shut_down(self) -> None:
        """Stop Ray on this node, and what depends on it."""
        raise NotImplementedError

    def _make_directories(self) -> None:
        for path in (self.logs, os.path.join(self.folder, "nodes")):
            try:
                os.mkdir(
                    path, 0o700
                )  # never its parents: the directory of an ended cluster must not reappear
            except FileExistsError:
                pass

    async def _start_and_run(self) -> Optional[Refused]:
        """Run the node until it must end. Returns why it failed."""
        try:
            self.choose_address()
            tls.prepare(self.config, self.ip, self.temp)
            if await self.wait_unless_stopped(asyncio.ensure_future(self.start())):
                self.set_state("READY")
                await self.run_until_stop()
        except Refused as error:
            return error
        except Exception as error:  # stop Ray after any error
            traceback.print_exc()
            text = str(error) if type(error) is ValueError else "%s: %s" % (type(error).__name__, error)
            return Refused(cause_of(error), text)
        return None

    async def run(self) -> Answer:
        """Run the node to its end. Returns the answer of `agent node`."""
        self._make_directories()
        self.write_report()
        self.start_time_limit_timer()
        self.background.append(asyncio.ensure_future(self.watch_slurm_step()))
        refused = await self._start_and_run()
        ray_ended = self.ray is not None and self.ray.ended.is_set()
        if self.drain_reason and not self.stopping.is_set():
            self.stop(self.drain_cause, self.drain_reason)
        if self.config.get("kill_follows_signal") and ray_ended:
            # PBS signals all processes of the job, children first: the agent's signal may arrive after Ray's end
            await asyncio.wait([asyncio.ensure_future(self.stopping.wait())], timeout=1)
        end, cause, reason = "GONE", "", ""
        if refused is not None:
            end, cause, reason = "FAILED", refused.cause, str(refused)
        elif self.ray and ray_ended and not self.stopping.is_set():
            cause, text = await self.ray.exit_reason()
            end, reason = "FAILED", "Ray ended: %s" % text
        elif self.supervisor_died or self.orphaned:
            end = "FAILED"
        self.set_state("STOPPING", reason or self.stop_reason, cause or self.stop_cause)
        if "kill_wait_s" in self.config:
            await asyncio.sleep(0.05)  # a second signal may shorten the grace period
        await self.shut_down()
        if self.launch_task is None:
            await self.runtime.remove_broadcast()
        if self.ray:
            self.ray.save_logs(self.logs)
        self.set_state(end, reason or self.stop_reason, cause or self.stop_cause)
        return {
            "ok": end == "GONE",
            "node": self.name,
            "state": end,
            "reason": self.reason,
            "cause": self.cause,
            "exit_code": self.exit_code(),
        }

    def exit_code(self) -> int:
        return 0 if self.state == "GONE" else 1


async def check_port(ip: str, port: int) -> str:
    """Why a connection to the port fails; "" if it succeeds."""
    try:
        _, writer = await asyncio.wait_for(asyncio.open_connection(ip, port), 5)
    except asyncio.TimeoutError:
        return "no answer"
    except OSError as error:
        return error.strerror or str(error)
    writer.close()
    return ""


def serve(config: AgentConfig, temp: str, make: Callable[[AgentConfig, str], Node]) -> Answer:
    """Run the node in this process, to its end."""

    async def main() -> Answer:
        node = make(config, temp)
        loop = asyncio.get_running_loop()
        for number, (cause, reason) in processes.STOP_SIGNALS.items():
            loop.add_signal_handler(number, node.on_stop_signal, cause, reason)
        loop.add_signal_handler(signal.SIGURG, node.on_sigurg)
        loop.add_signal_handler(signal.SIGUSR1, node.on_time_limit)
        loop.add_signal_handler(signal.SIGCONT, node.on_sigcont)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, processes.FORWARDED)
        return await node.run()

    # not asyncio.run: it waits for every task, and wait_for of Python 3.11 and older may swallow the cancellation of
    # one; the caller ends with os._exit
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    return loop.run_until_complete(main())


__all__ = ["Node", "check_port", "join", "serve", "version_tuple"]
