"""One Ray node on this host: its command line, environment, readiness, monitoring and end."""

from __future__ import annotations

import asyncio
import json
import os
import pkgutil
import re
import signal
import time
from typing import Callable, Dict, List, Optional, Tuple

from . import files, ports, processes
from .guard import MOST, PortGuard
from .hub import raise_file_limit
from .protocol import HeadAddress, StopReason
from .runtime import HostRuntime

# Ray's logs that are kept, and how much of each
LOGS = re.compile(
    r"^(raylet|gcs_server|dashboard|dashboard_agent|monitor|runtime_env_agent|ray_process_exit|job-driver-.*)\."
)
LOG_BYTES = 1 << 20
LIVE_LOGS = ("raylet.out", "raylet.err", "gcs_server.out", "gcs_server.err", "dashboard.log", "monitor.log")
IN_USE = re.compile(
    r"address already in use|port[^\n]*(already|is) (in use|used|occupied)|failed to bind|before it listened on its port",
    re.IGNORECASE,
)
# Ray gives a node half a minute to start, also on a busy host
SLOW = re.compile(r"timed out during startup")
# variables of a Ray that the agent may have been started from: with them Ray would connect to that one
INHERITED_RAY_VARIABLES = (
    "RAY_ADDRESS",
    "RAY_AUTH_TOKEN",
    "RAY_JOB_CONFIG_JSON_ENV_VAR",
    "RAY_RAYLET_PID",
    "RAY_NODE_IP_ADDRESS",
)


async def http_get(
    host: str, port: int, path: str, token: str = "", timeout: float = 5.0
) -> Tuple[int, bytes]:
    """(status, body). HTTP/1.0, so that the end of the connection ends the answer."""

    async def exchange() -> bytes:
        reader, writer = await asyncio.open_connection(host, port)
        try:
            head = "GET %s HTTP/1.0\r\nHost: %s:%d\r\n" % (path, host, port)
            writer.write((head + ("Authorization: Bearer %s\r\n" % token if token else "") + "\r\n").encode())
            return await reader.read()
        finally:
            writer.close()

    answer = await asyncio.wait_for(exchange(), timeout)
    head, _, body = answer.partition(b"\r\n\r\n")
    try:
        return int(head.split(b" ", 2)[1]), body
    except (IndexError, ValueError):
        raise OSError("not an HTTP answer") from None


# services that must listen on every node, and on a head; the other ports are for metrics
ON_EVERY_NODE = ("node_manager", "object_manager", "runtime_env_agent", "agent_http", "agent_grpc", "metrics")
ON_A_HEAD = ("gcs", "dashboard")
PROGRAM = "ray_start.py"  # runs in Ray's own Python
UNEXPECTED = "Some Ray subprocesses exited unexpectedly:"
LATE_S = 120.0  # some of Ray's services start after the node is alive
DRAIN_S = 20  # for running work to move to other nodes


class PortTaken(RuntimeError):
    """Another program listens on a port of this node; another block may be free."""


class RayNode:
    """`ray start --block` as a child process, and the raylet that it starts."""

    def __init__(self, runtime: HostRuntime, ip: str, block: ports.Block, log: str) -> None:
        self.runtime, self.ip, self.block, self.log = runtime, ip, block, log
        self.config, self.temp = runtime.config, runtime.temp
        # below the private directory, which stays 0700: Ray makes its own directory accessible to everybody (0777)
        self.ray_temp = os.path.join(self.temp, "ray")
        self.ports = dict(block.ports)  # 0 until Ray reports the port that the kernel chose
        self.on_gcs_listening: Callable[[int], None] = lambda port: None  # called with the GCS port
        self._report = os.path.join(self.temp, "ray_ports.json")
        self._gcs_listens = False
        self.guard = PortGuard(block.workers, min(MOST, raise_file_limit() // 4))
        self.process: Optional[asyncio.subprocess.Process] = None
        self._log_from = (
            os.path.getsize(log) if os.path.exists(log) else 0
        )  # earlier attempts wrote the part before it
        # raylet and, on a head, gcs_server: name -> pid and start time. The node ends with them.
        self.core_processes: Dict[str, Tuple[int, Optional[str]]] = {}
        self.services: Dict[int, str] = {}  # port -> name, of the ports that are held for Ray
        self.port_conflict = ""
        self.first_dead: List[str] = []  # core processes that ended before `ray start` did
        self.ended = asyncio.Event()  # set when a core process or `ray start` has ended

    def environment(self, gcs: str) -> Dict[str, str]:
        """The environment of `ray start` and of every Ray worker. `gcs` is "" on a head: its port is not known yet."""
        env = {key: value for key, value in os.environ.items() if key not in INHERITED_RAY_VARIABLES}
        env.update(self.config.get("env") or {})
        env.update(self.runtime.client_environment())
        env.update(
            HELIOSTAT_RAY_REPORT=self._report,
            AUTOSCALER_METRIC_PORT=str(self.block.ports["autoscaler_metrics"]),
            DASHBOARD_METRIC_PORT=str(self.block.ports["dashboard_metrics"]),
            RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S=str(DRAIN_S),
            # without a monitor process, `ray status` works in version 2 of the autoscaler only
            RAY_enable_autoscaler_v2="1",
            RAY_USAGE_STATS_ENABLED="0",
        )
        if gcs:  # for Ray's workers: without it, the state API connects to any Ray on the host
            env["RAY_ADDRESS"] = gcs
        below = self.temp.startswith(os.path.join(os.environ.get("TMPDIR") or "/", ""))
        if below or self.config.get("container"):
            # Ray's processes leave directories in TMPDIR; below the private directory they are removed with it.
            env["TMPDIR"] = os.path.join(self.temp, "tmp")
            os.makedirs(env["TMPDIR"], mode=0o700, exist_ok=True)
        return env

    def command(self, head: Optional[HeadAddress]) -> List[str]:
        """argv of `ray start`; `head` is the head to join, None on the head itself."""
        port = self.block.ports
        argv = [
            self.runtime.python,
            os.path.join(self.temp, PROGRAM),
            "start",
            "--block",
            "--disable-usage-stats",
        ]
        argv += ["--node-ip-address=" + self.ip]
        if head is None:
            argv += ["--head", "--port=%d" % port["gcs"]]
            argv += (
                ["--ray-client-server-port=%d" % port["client"]] if self.config["ports"].get("client") else []
            )
            argv += ["--dashboard-host=127.0.0.1", "--dashboard-port=%d" % port["dashboard"]]
            argv += ["--no-monitor"]  # nothing scales this cluster by demand
        else:
            argv += ["--address=%s" % join(head["ip"], head["gcs"])]
        argv += [
            "--node-name=" + self.config["node"],
            "--temp-dir=" + self.ray_temp,
            "--node-manager-port=%d" % port["node_manager"],
            "--object-manager-port=%d" % port["object_manager"],
            "--runtime-env-agent-port=%d" % port["runtime_env_agent"],
            "--dashboard-agent-listen-port=%d" % port["agent_http"],
            "--dashboard-agent-grpc-port=%d" % port["agent_grpc"],
            "--metrics-export-port=%d" % port["metrics"],
            # 0: the kernel chooses, so that two clusters on one host never use the same port
            "--min-worker-port=%d" % (self.block.workers or (0, 0))[0],
            "--max-worker-port=%d" % (self.block.workers or (0, 0))[1],
        ]
        return argv + self._resource_options()

    def _resource_options(self) -> List[str]:
        want = self.config["resources"]
        argv = ["--num-cpus=%d" % (want["cpus"] or 0), "--num-gpus=%d" % (want["gpus"] or 0)]
        memory, object_store = want.get("memory"), want.get("object_store")
        argv += ["--memory=%d" % memory] if memory else []
        argv += ["--object-store-memory=%d" % object_store] if object_store else []
        if want.get("custom"):
            argv.append("--resources=" + json.dumps(want["custom"]))
        if want.get("labels"):
            argv.append("--labels=" + ",".join("%s=%s" % item for item in sorted(want["labels"].items())))
        return argv

    async def start(self, head: Optional[HeadAddress]) -> None:
        names = ON_EVERY_NODE + (ON_A_HEAD if head is None else ())
        names += ("client",) if head is None and self.config["ports"].get("client") else ()
        self.services = {port: name for name, port in self.block.ports.items() if port and name in names}
        gcs = join(head["ip"], head["gcs"]) if head else ""
        program = pkgutil.get_data(__package__, PROGRAM)
        files.write(os.path.join(self.temp, PROGRAM), (program or b"").decode())
        if os.path.exists(self._report):
            os.unlink(self._report)  # of an earlier attempt
        argv, env = self.runtime.wrap(self.command(head), self.environment(gcs))
        with open(self.log, "ab") as out:
            self.process = await asyncio.create_subprocess_exec(
                *argv,
                env=env,
                cwd="/",
                stdin=asyncio.subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                preexec_fn=processes.die_with_parent,
            )

    async def wait_ready(self, seconds: float) -> None:
        """Wait until Ray's node table lists this node. Raises RuntimeError with the end of Ray's output."""
        assert self.process is not None
        exited = asyncio.ensure_future(self.process.wait())
        end = asyncio.get_running_loop().time() + seconds
        checked = end - seconds
        while True:
            await asyncio.wait([exited], timeout=0.1)
            if asyncio.get_running_loop().time() - checked > 1:
                self.check_ports()
                self.guard_ports()
                checked = asyncio.get_running_loop().time()
            if exited.done():
                raise RuntimeError(
                    "`ray start` ended with code %s: %s" % (exited.result(), self.error_lines())
                )
            if await self._is_alive():
                break
            if asyncio.get_running_loop().time() > end:
                exited.cancel()
                raise RuntimeError("Ray did not become alive within %d s: %s" % (seconds, self.error_lines()))
        self.check_ports()
        for pid in processes.family([self.process.pid]):  # a container runtime may be in between
            name = os.path.basename(processes.executable(pid))
            if name in ("raylet", "gcs_server"):
                self.core_processes[name] = (pid, processes.start_time(pid))
        self.guard_ports()
        self.watch = asyncio.ensure_future(self._watch(exited))

    async def _is_alive(self) -> bool:
        """Whether Ray's node table lists this node. Also reads the ports from Ray's report."""
        report = files.read_json(self._report) or {}
        self.ports.update({name: int(port) for name, port in report.items() if name in self.ports and port})
        if report.get("gcs") and not self._gcs_listens:
            self._gcs_listens = True
            self.on_gcs_listening(self.ports["gcs"])
        if not report.get("alive"):
            return False
        try:
            # the node's dashboard agent asks the GCS whether this raylet is alive in the node table
            answer = await http_get(self.ip, self.ports["agent_http"], "/api/local_raylet_healthz")
        except (OSError, asyncio.TimeoutError):
            return False
        return answer[0] == 200

    async def _watch(self, exited: asyncio.Future[int]) -> None:
        """Set `ended` when a core process or `ray start` ends, or when another program takes a port.

        `ray start --block` does not end after a drain, and while it starts it notices a dead child half a minute late."""
        late = asyncio.get_running_loop().time() + LATE_S
        held = bool(self.services)
        while not exited.done() and not self.dead_processes():
            await asyncio.wait([exited], timeout=0.5)
            self.guard_ports()
            if held:
                try:
                    held = not self.check_ports() and asyncio.get_running_loop().time() < late
                except PortTaken as error:
                    self.port_conflict = "" if self.dead_processes() else str(error)
                    break
                if not held:
                    self.block.seal(ports.listeners(self.services))
        self.first_dead = [] if exited.done() else self.dead_processes()
        self.ended.set()

    def guard_ports(self) -> None:
        """Reserves the ports on which Ray's processes have started to listen."""
        self.guard.services = {port for name, port in self.ports.items() if port and name != "hub"}
        try:
            self.guard.scan([os.getppid()])
        except OSError:
            pass  # without a free descriptor, for instance; the next scan is soon

    def dead_processes(self) -> List[str]:
        return [name for name, process in self.core_processes.items() if not processes.alive(*process)]

    def check_ports(self) -> bool:
        """Whether Ray listens on every port that is held for it. Raises PortTaken if another process does."""
        taken: List[int] = []
        for _ in range(5):  # the sockets of a process that ends exist a little longer than its descriptors
            listening = ports.listeners(self.services)
            try:
                own = processes.sockets(processes.family([os.getppid()])) if listening else set()
            except OSError:
                return False  # unknown at this moment
            taken = [p for p, found in listening.items() if not {one.inode for one in found} <= own]
            if not taken:
                return len(listening) == len(self.services)
            time.sleep(0.05)
        names = ", ".join("%d (%s)" % (port, self.services[port]) for port in sorted(taken))
        raise PortTaken("another program listens on port %s" % names)

    def output(self) -> str:
        """The end of this `ray start`'s output, without colours."""
        try:
            size = os.path.getsize(self.log) - self._log_from
        except OSError:
            return ""
        return re.sub(r"\x1b\[[0-9;]*m", "", files.tail(self.log, min(size, 1 << 16))) if size > 0 else ""

    def error_lines(self) -> str:
        """The lines of Ray's output that contain the cause, in one line."""
        output = self.output()
        exited = re.search(UNEXPECTED + r".*\n((?:.*\[exit code=.*\n)+)", output)
        if exited:
            names = [line.rpartition(" -- ")[2].strip() for line in exited[1].splitlines()]
            return "%s %s" % (UNEXPECTED, ", ".join(names))
        lines = [line.strip() for line in output.splitlines() if line.strip() and "[state-dump]" not in line]
        errors = [
            line for line in lines if re.search(r"error|exception|mismatch|refus|fail|unable", line, re.I)
        ]
        return " | ".join((errors or lines)[-3:])[-600:]

    async def exit_reason(self) -> Tuple[StopReason, str]:
        """Why Ray ended by itself. Waits a little: `ray start` reports which of its processes ended."""
        if self.port_conflict:
            return StopReason.PORT_CONFLICT, self.port_conflict
        if self.process is not None:
            try:
                await asyncio.wait_for(self.process.wait(), 5)
            except asyncio.TimeoutError:
                pass
        reason = self.error_lines()
        if self.first_dead and not reason.startswith(UNEXPECTED):
            reason = "%s was killed or ended by itself" % self.first_dead[0]
        return StopReason.RAY_ENDED, reason

    async def drain(self, seconds: float) -> None:
        """Let Ray move running work to other nodes, as far as it can; then Ray ends by itself."""
        if self.process is not None and self.process.returncode is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                await asyncio.wait_for(self.process.wait(), seconds + 5)
            except asyncio.TimeoutError:
                pass

    async def stop(self) -> None:
        """Stop the raylet, which stops its workers, then kill what is left."""
        raylet = self.core_processes.get("raylet")
        if raylet and processes.alive(*raylet):
            processes.send([raylet[0]], signal.SIGTERM)
            for _ in range(50):
                if not processes.alive(*raylet):
                    break
                await asyncio.sleep(0.02)
        if self.process is not None and self.process.returncode is None:
            processes.send(processes.family([self.process.pid]), signal.SIGKILL)

    @property
    def logs(self) -> str:
        return os.path.join(self.ray_temp, "session_latest", "logs")

    def link_logs(self, directory: str) -> None:
        """Link the logs of the running Ray in the cluster's directory."""
        for name in LIVE_LOGS:
            try:
                if os.path.exists(os.path.join(self.logs, name)):
                    os.symlink(os.path.join(self.logs, name), os.path.join(directory, name))
            except OSError:
                pass  # it exists, or the disk is full

    def save_logs(self, directory: str) -> None:
        """Copy the end of each of Ray's important logs to the cluster's directory."""
        logs = self.logs
        try:
            for name in os.listdir(directory):
                if os.path.islink(os.path.join(directory, name)):
                    os.unlink(os.path.join(directory, name))
            names = sorted(name for name in os.listdir(logs) if LOGS.match(name))
            for name in names:
                text = files.tail(os.path.join(logs, name), LOG_BYTES)
                if text:
                    files.write(os.path.join(directory, name), text)
        except OSError:
            pass  # a full disk must not delay the release of the host


def join(ip: str, port: int) -> str:
    return "[%s]:%d" % (ip, port) if ":" in ip else "%s:%d" % (ip, port)
