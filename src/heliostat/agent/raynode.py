"""One Ray node on this machine: its command line, its environment, is it alive, ending it."""

from __future__ import annotations

import asyncio
import json
import os
import pkgutil
import re
import signal
import time
from typing import Any, Callable, Dict, List, Optional, Tuple

from . import files, ports, processes
from .guard import MOST, PortGuard
from .hub import more_files
from .runtime import Own

# what is worth keeping of Ray's own logs, and how much of each
LOGS = re.compile(
    r"^(raylet|gcs_server|dashboard|dashboard_agent|monitor|runtime_env_agent|ray_process_exit|job-driver-.*)\."
)
LOG_BYTES = 1 << 20
LIVE_LOGS = ("raylet.out", "raylet.err", "gcs_server.out", "gcs_server.err", "dashboard.log", "monitor.log")
IN_USE = re.compile(
    r"address already in use|port[^\n]*(already|is) (in use|used|occupied)|failed to bind|before it listened on its port",
    re.IGNORECASE,
)
# Ray gives a node half a minute to start, whatever the machine has to do besides
SLOW = re.compile(r"timed out during startup")
# variables of a Ray that the user may be inside of: they would send ours to that one
FOREIGN = (
    "RAY_ADDRESS",
    "RAY_AUTH_TOKEN",
    "RAY_JOB_CONFIG_JSON_ENV_VAR",
    "RAY_RAYLET_PID",
    "RAY_NODE_IP_ADDRESS",
)


async def http_get(
    host: str, port: int, path: str, token: str = "", timeout: float = 5.0
) -> Tuple[int, bytes]:
    """(status, body). HTTP/1.0, so that the answer ends where the connection ends."""

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


# what listens on every node, and what on a head besides; the rest are metrics that nobody misses
ON_EVERY_NODE = ("node_manager", "object_manager", "runtime_env_agent", "agent_http", "agent_grpc", "metrics")
ON_A_HEAD = ("gcs", "dashboard")
PROGRAM = "ray_start.py"  # runs in Ray's own Python
UNEXPECTED = "Some Ray subprocesses exited unexpectedly:"
LATE_S = 120.0  # some of Ray's services come after the node is alive


class PortTaken(RuntimeError):
    """Another program listens on a port of ours: another block may do."""


class RayNode:
    """`ray start --block` as our child, and the raylet below it."""

    def __init__(self, runtime: Own, ip: str, block: ports.Block, log: str) -> None:
        self.runtime, self.ip, self.block, self.log = runtime, ip, block, log
        self.config, self.temp = runtime.config, runtime.temp
        # one below our private folder: Ray opens its own to everybody (0777), ours stays 0700
        self.ray_temp = os.path.join(self.temp, "ray")
        self.ports = dict(block.ports)  # 0 until Ray has told which port the kernel chose
        self.on_gcs: Callable[[int], None] = lambda port: None  # called when the GCS listens
        self._report = os.path.join(self.temp, "ray_ports.json")
        self._gcs_listens = False
        self.guard = PortGuard(block.workers, min(MOST, more_files() // 4))
        self.process: Optional[asyncio.subprocess.Process] = None
        self._log_from = os.path.getsize(log) if os.path.exists(log) else 0  # earlier tries wrote before it
        self.vital: Dict[
            str, Tuple[int, Optional[str]]
        ] = {}  # without these there is no node: name -> process
        self.services: Dict[int, str] = {}  # port -> name, of the ports that we hold for Ray
        self.port_conflict = ""
        self.first: List[str] = []  # what fell before anything else did
        self.ended = asyncio.Event()  # set when the raylet or `ray start` is gone

    def environment(self, gcs: str) -> Dict[str, str]:
        """Of `ray start`, and so of every worker. `gcs` is empty on a head, whose port is not known yet."""
        env = {key: value for key, value in os.environ.items() if key not in FOREIGN}
        env.update(self.config.get("env") or {})
        env.update(self.runtime.client_environment())
        env.update(
            HELIOSTAT_RAY_REPORT=self._report,
            AUTOSCALER_METRIC_PORT=str(self.block.ports["autoscaler_metrics"]),
            DASHBOARD_METRIC_PORT=str(self.block.ports["dashboard_metrics"]),
            RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S=str(self.config.get("drain_s", 20)),
            # `ray status` answers without a monitor process only in the second version of the autoscaler
            RAY_enable_autoscaler_v2="1",
            RAY_USAGE_STATS_ENABLED="0",
        )
        if gcs:  # workers inherit it: Ray's state API connects to any Ray of the host without it
            env["RAY_ADDRESS"] = gcs
        below = self.temp.startswith(os.path.join(os.environ.get("TMPDIR") or "/", ""))
        if below or self.config.get("container"):
            # Ray's processes leave folders in /tmp when they are ended; there they go with ours. (Slurm always names one.)
            env["TMPDIR"] = os.path.join(self.temp, "tmp")
            os.makedirs(env["TMPDIR"], mode=0o700, exist_ok=True)
        return env

    def command(self, head: Optional[Dict[str, Any]]) -> List[str]:
        """argv of `ray start`; `head` is the head to join, None: this is the head."""
        port, want = self.block.ports, self.config["resources"]
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
            # nothing scales this cluster, so nothing has to watch its demand
            argv += [] if self.config.get("monitor") else ["--no-monitor"]
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
            # 0: each worker asks the kernel, so two clusters on one host can never want the same port
            "--min-worker-port=%d" % (self.block.workers or (0, 0))[0],
            "--max-worker-port=%d" % (self.block.workers or (0, 0))[1],
            "--num-cpus=%d" % want["cpus"],
            "--num-gpus=%d" % want["gpus"],
        ]
        if want.get("memory"):
            argv.append("--memory=%d" % want["memory"])
        if want.get("object_store"):
            argv.append("--object-store-memory=%d" % want["object_store"])
        if want.get("custom"):
            argv.append("--resources=" + json.dumps(want["custom"]))
        if want.get("labels"):
            argv.append("--labels=" + ",".join("%s=%s" % item for item in sorted(want["labels"].items())))
        return argv

    async def start(self, head: Optional[Dict[str, Any]]) -> None:
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
        """Returns when Ray's node table lists this node. Raises RuntimeError with the end of Ray's output."""
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
                    "`ray start` ended with code %s: %s" % (exited.result(), self.last_words())
                )
            if await self._is_alive():
                break
            if asyncio.get_running_loop().time() > end:
                exited.cancel()
                raise RuntimeError("Ray did not become alive within %d s: %s" % (seconds, self.last_words()))
        self.check_ports()
        for pid in processes.family([self.process.pid]):  # not its children: a container may be in between
            name = os.path.basename(processes.executable(pid))
            if name in ("raylet", "gcs_server"):
                self.vital[name] = (pid, processes.start_time(pid))
        self.guard_ports()
        self.watch = asyncio.ensure_future(self._watch(exited))

    async def _is_alive(self) -> bool:
        """Whether Ray's node table lists this node. Reads the ports from Ray's report on the way."""
        report = files.read_json(self._report) or {}
        self.ports.update({name: int(port) for name, port in report.items() if name in self.ports and port})
        if report.get("gcs") and not self._gcs_listens:
            self._gcs_listens = True
            self.on_gcs(self.ports["gcs"])
        if not report.get("alive"):
            return False
        try:
            # the node's own dashboard agent asks the head whether this raylet is alive in the node table
            answer = await http_get(self.ip, self.ports["agent_http"], "/api/local_raylet_healthz")
        except (OSError, asyncio.TimeoutError):
            return False
        return answer[0] == 200

    async def _watch(self, exited: asyncio.Future[int]) -> None:
        """After a drain the raylet ends and `ray start --block` goes on for ever; and before it has come so far as to
        watch its children itself, it may wait half a minute for one that is gone."""
        late = asyncio.get_running_loop().time() + LATE_S
        held = bool(self.services)
        while not exited.done() and not self.fallen():
            await asyncio.wait([exited], timeout=0.5)
            self.guard_ports()
            if held:
                try:
                    held = not self.check_ports() and asyncio.get_running_loop().time() < late
                except PortTaken as error:
                    self.port_conflict = "" if self.fallen() else str(error)
                    break
                if not held:
                    self.block.seal(ports.listeners(self.services))
        self.first = [] if exited.done() else self.fallen()
        self.ended.set()

    def guard_ports(self) -> None:
        """Reserves the ports on which Ray's processes have started to listen."""
        self.guard.services = {port for name, port in self.ports.items() if port and name != "hub"}
        try:
            self.guard.scan([os.getppid()])
        except OSError:
            pass  # without a free descriptor, for instance; the next scan is soon

    def fallen(self) -> List[str]:
        return [name for name, process in self.vital.items() if not processes.alive(*process)]

    def check_ports(self) -> bool:
        """Whether Ray listens on every port that we hold for it. Raises PortTaken when another process does."""
        taken: List[int] = []
        for _ in range(5):  # a process that is ending: its sockets are there longer than its list of them
            listening = ports.listeners(self.services)
            try:
                own = processes.sockets(processes.family([os.getppid()])) if listening else set()
            except OSError:
                return False  # it cannot be known now
            taken = [p for p, found in listening.items() if not {one.inode for one in found} <= own]
            if not taken:
                return len(listening) == len(self.services)
            time.sleep(0.05)
        names = ", ".join("%d (%s)" % (port, self.services[port]) for port in sorted(taken))
        raise PortTaken("another program listens on port %s" % names)

    def said(self) -> str:
        """The end of what this `ray start` wrote, without colours."""
        try:
            size = os.path.getsize(self.log) - self._log_from
        except OSError:
            return ""
        return re.sub(r"\x1b\[[0-9;]*m", "", files.tail(self.log, min(size, 1 << 16))) if size > 0 else ""

    def last_words(self) -> str:
        """The lines of Ray's output that say why, in one line."""
        said = self.said()
        fallen = re.search(UNEXPECTED + r".*\n((?:.*\[exit code=.*\n)+)", said)
        if fallen:
            names = [line.rpartition(" -- ")[2].strip() for line in fallen[1].splitlines()]
            return "%s %s" % (UNEXPECTED, ", ".join(names))
        lines = [line.strip() for line in said.splitlines() if line.strip() and "[state-dump]" not in line]
        telling = [
            line for line in lines if re.search(r"error|exception|mismatch|refus|fail|unable", line, re.I)
        ]
        return " | ".join((telling or lines)[-3:])[-600:]

    async def why(self) -> str:
        """Why Ray ended by itself. `ray start` finds out a little after us, and says which process fell."""
        if self.port_conflict:
            return self.port_conflict
        if self.process is not None:
            try:
                await asyncio.wait_for(self.process.wait(), 5)
            except asyncio.TimeoutError:
                pass
        words = self.last_words()
        if self.first and not words.startswith(UNEXPECTED):
            return "%s was killed or ended by itself" % self.first[0]
        return words

    async def drain(self) -> None:
        """Lets running work go elsewhere, as far as Ray does that, then Ray ends by itself."""
        if self.process is not None and self.process.returncode is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                await asyncio.wait_for(self.process.wait(), float(self.config.get("drain_s", 20)) + 5)
            except asyncio.TimeoutError:
                pass

    async def end(self) -> None:
        """Ends the raylet in order (it ends its workers), then all that is left, at once."""
        raylet = self.vital.get("raylet")
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

    def show_logs(self, folder: str) -> None:
        """Those that people look at while it runs, where they look for them."""
        for name in LIVE_LOGS:
            try:
                if os.path.exists(os.path.join(self.logs, name)):
                    os.symlink(os.path.join(self.logs, name), os.path.join(folder, name))
            except OSError:
                pass  # it is there already, or nothing can be

    def keep_logs(self, folder: str) -> None:
        """The Ray logs that matter, the end of each, into the record."""
        logs = self.logs
        try:
            for name in os.listdir(folder):
                if os.path.islink(os.path.join(folder, name)):
                    os.unlink(os.path.join(folder, name))
            names = sorted(name for name in os.listdir(logs) if LOGS.match(name))
            for name in names:
                text = files.tail(os.path.join(logs, name), LOG_BYTES)
                if text:
                    files.write(os.path.join(folder, name), text)
        except OSError:
            pass  # a full disk must not keep the machines from being given back


def join(ip: str, port: int) -> str:
    return "[%s]:%d" % (ip, port) if ":" in ip else "%s:%d" % (ip, port)
