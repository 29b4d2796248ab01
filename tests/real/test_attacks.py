"""Another user of the same host attacks a cluster through its ports. The attacker is a real user without rights.

docs/security.md lists every attack with its test.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pwd
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from heliostat.agent import hub
from heliostat.agent.ray_start import listening_ports, sockets_of
from heliostat.remote import relay
from heliostat.remote.ray_client import NoResponse, RayApi
from real.faults import Node
from shared import COMMAND, PATIENCE_S, document, heliostat, until

pytestmark = [pytest.mark.needs_ray, pytest.mark.needs_linux, pytest.mark.needs_two_users]
ASK = ("--cpus-per-node", 1, "--object-store", "100M")
OFFSET = 9200


class Attacker:
    """One program of `attacker.py`, as another user. `said`: its lines so far."""

    def __init__(self, uid: int, *words: object) -> None:
        program = Path(__file__).parents[1] / "attacker.py"
        argv = [sys.executable, str(program), str(uid), *map(str, words)]
        self.process = subprocess.Popen(argv, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True)
        self.said: list[dict[str, Any]] = []
        self.thread = threading.Thread(target=self._read, daemon=True)
        self.thread.start()

    def _read(self) -> None:
        assert self.process.stdout
        for line in self.process.stdout:
            self.said.append(json.loads(line))

    def says(self, key: str) -> Any:
        return until(lambda: [line for line in self.said if key in line], f"the attacker's `{key}`")[0][key]

    def received(self) -> str:
        return "".join(line["received"] for line in self.said if "received" in line)

    def end(self) -> None:
        self.process.kill()
        self.process.wait(PATIENCE_S)
        self.thread.join(PATIENCE_S)


@pytest.fixture(scope="module")
def uid() -> Iterator[int]:
    name = f"hs-evil-{os.getpid()}"
    subprocess.run(["useradd", "--no-create-home", name], check=True)
    yield pwd.getpwnam(name).pw_uid
    subprocess.run(["userdel", name], check=True)


@pytest.fixture
def attack(uid: int) -> Iterator[Callable[..., Attacker]]:
    started: list[Attacker] = []

    def start(*words: object) -> Attacker:
        started.append(Attacker(uid, *words))
        return started[-1]

    yield start
    for one in started:
        one.end()


@pytest.fixture
def temp(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A directory for temporary files, of this test alone: its name is in the command lines of its cluster."""
    with tempfile.TemporaryDirectory(prefix="ht-", dir="/tmp") as path:
        monkeypatch.setenv("TMPDIR", path)
        yield path


def token_of(home: Path, cluster: str) -> str:
    return (home / "clusters" / cluster / "token").read_text().strip()


@contextlib.contextmanager
def cluster(*words: object, **env: str) -> Iterator[None]:
    heliostat("up", "--name", "lab", *ASK, *words, **env)
    try:
        yield
    finally:
        heliostat("down", "lab")


@pytest.mark.parametrize("words", [(), ("--port-offset", OFFSET)], ids=["any port", "fixed ports"])
def test_a_port_is_taken_before_its_service_listens(
    home: Path, attack: Callable[..., Attacker], temp: str, words: tuple[object, ...]
) -> None:
    """The attacker reads the GCS's port from its command line, listens there first, and closes the port after a moment: that
    way the GCS still starts, and `up` succeeds. Whoever connects meanwhile sends its token."""
    sniper = attack("snipe", "/gcs_server ", temp, 0.15)
    sniper.says("ready")
    with cluster(*words):
        token = token_of(home, "lab")
        assert "hello\n" in heliostat("submit", "lab", "--wait", "--", "echo", "hello").stdout
    assert words == () or sniper.says("listens"), "there was something to take"
    stolen = [line for line in sniper.said if token in str(line)]
    assert not stolen and "earer" not in sniper.received(), sniper.said


def test_the_port_of_a_gcs_that_was_killed(home: Path, attack: Callable[..., Attacker]) -> None:
    """The worker's raylet connects again, with its token."""
    heliostat("up", "--name", "lab", "--nodes", 2, *ASK)
    token = token_of(home, "lab")
    head, worker = Node(home, "lab", "head"), Node(home, "lab", "w1")
    heir = attack("inherit", head.ports["gcs"])
    heir.says("ready")
    head.kill(head.pid_of("gcs_server"))
    for node in (head, worker):  # after that the port is anybody's, and nobody connects to it any more
        until(lambda node=node: not node.processes(), f"the end of {node.name}")  # type: ignore[misc]
    assert document("status", "lab")["state"] == "failed"
    heliostat("down", "lab")
    assert token not in heir.received() and "earer" not in heir.received()


CALLS = """
import os, ray, sys, time
ray.init(log_to_driver=False)

@ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)
class Callee:
    def pid(self):
        return os.getpid()
    def leave(self):
        ray.actor.exit_actor()

callee = Callee.options(name="callee", namespace="attack", lifetime="detached").remote()

@ray.remote(num_cpus=0)
class Caller:
    def __init__(self, callee):
        self.callee = callee
    def call(self):
        return ray.get(self.callee.pid.remote())

callers = [Caller.remote(callee) for _ in range(2)]
print("pid", ray.get(callee.pid.remote()), flush=True)
while True:
    for one in [*callers, None]:
        try:
            ray.get((one.call if one else callee.pid).remote(), timeout=5)
        except ray.exceptions.RayError:
            pass
    if len(sys.argv) > 1 and os.path.exists(sys.argv[1]):
        callee.leave.remote()
        os.unlink(sys.argv[1])
    time.sleep(0.05)
"""


def own_ports(pid: int) -> list[int]:
    """The ports on which the process listens."""
    owned = sockets_of(pid)
    return [port for port, inodes in listening_ports(pid).items() if inodes & owned]


@pytest.mark.parametrize("end", ["killed", "exits"])
def test_the_port_of_a_worker_process_that_has_ended(
    home: Path, attack: Callable[..., Attacker], tmp_path: Path, end: str
) -> None:
    """The processes that call an actor connect again to its port, with the token. gRPC shuts its listening socket down where
    the process exits in order."""
    with cluster():
        token = token_of(home, "lab")
        leave = tmp_path / "leave"
        job = heliostat("submit", "lab", "--", sys.executable, "-c", CALLS, leave).stdout.strip()
        found = until(
            lambda: re.search(r"pid (\d+)", heliostat("logs", "lab", job, code=None).stdout), "the actor"
        )
        pid = int(found[1])
        (port,) = own_ports(pid)
        time.sleep(3)  # the agent looks for new ports twice a second
        heir = attack("inherit", port)
        heir.says("ready")
        if end == "killed":
            os.kill(pid, signal.SIGKILL)
        else:
            leave.touch()
        until(lambda: not own_ports(pid), "the end of the actor's process")
        time.sleep(20)  # for the callers to connect again
        assert token not in heir.received() and "earer" not in heir.received(), "the attacker has the token"
        assert not [line for line in heir.said if "listens" in line], "the attacker has the port"
        assert document("status", "lab")["state"] == "ready"
    assert token not in heir.received() and "earer" not in heir.received()


def test_a_flood_of_connections(home: Path, attack: Callable[..., Attacker]) -> None:
    """More than the agent may have open. The cluster and its job go on."""
    argv = ["prlimit", "--nofile=2048:2048", COMMAND, "up", "--name", "lab", "--nodes", 2, *ASK]
    subprocess.run([*map(str, argv)], check=True, timeout=PATIENCE_S)
    try:
        job = heliostat("submit", "lab", "--", "sleep", 1000).stdout.strip()
        connection = json.loads((home / "clusters" / "lab" / "connection.json").read_text())
        place = connection["hub"]
        for _ in range(3):
            assert attack("flood", place["ip"], place["port"], 3000).says("open")
            time.sleep(2)
            status = document("status", "lab")
            assert (status["state"], [node["state"] for node in status["nodes"]]) == (
                "ready",
                ["READY", "READY"],
            )
        assert "more\n" in heliostat("submit", "lab", "--wait", "--", "echo", "more").stdout
        (found,) = [one for one in document("jobs", "lab")["jobs"] if one["id"] == job]
        assert found["status"] == "RUNNING"
    finally:
        heliostat("down", "lab")


def test_a_stranger_cannot_fill_the_log(home: Path, attack: Callable[..., Attacker]) -> None:
    with cluster():
        connection = json.loads((home / "clusters" / "lab" / "connection.json").read_text())
        logs = home / "clusters" / "lab" / "logs"
        before = sum(path.stat().st_size for path in logs.rglob("agent*"))
        attack("talk", connection["hub"]["ip"], connection["hub"]["port"], 3000).says("sent")
        written = "".join(path.read_text() for path in logs.rglob("agent*"))
        assert "Traceback" not in written and len(written) - before < 2000, written[:5000]
        assert document("status", "lab")["state"] == "ready"


def test_names_of_sockets_that_somebody_else_has_taken(attack: Callable[..., Attacker]) -> None:
    """The locks of ports are abstract sockets, whose names anybody may take."""
    first, last = (20000 + OFFSET) // 16, (20000 + OFFSET + 2420) // 16
    assert attack("name_sockets", "heliostat-ports-", first, last).says("open") == 3 * (last - first + 1)
    with cluster("--port-offset", OFFSET):
        assert document("status", "lab")["state"] == "ready"


def test_a_dashboard_of_another_user_gets_no_token(attack: Callable[..., Attacker]) -> None:
    """The dashboard has ended, and somebody else listens on its port: the hub sends nothing there."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    thief = attack("inherit", port)
    assert thief.says("listens") == port
    loop = asyncio.new_event_loop()
    head = hub.Hub("secret", lambda node, message: None, lambda node: None, token="the-token")
    head.dashboard = port
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        hub_port = asyncio.run_coroutine_threadsafe(head.start("127.0.0.1", 0), loop).result(PATIENCE_S)
        dial = relay.dialer(lambda *place: place, {"ip": "127.0.0.1", "port": hub_port}, "secret")
        with pytest.raises(NoResponse):
            RayApi("127.0.0.1", hub_port, None, dial=dial).jobs()
    finally:
        asyncio.run_coroutine_threadsafe(head.close(0), loop).result(PATIENCE_S)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(PATIENCE_S)
    assert thief.received() == ""


CLIENT = """
import ray, sys
ray.init("ray://" + sys.argv[1], logging_level="ERROR")
print(ray.get(ray.remote(lambda: 6 * 7).remote()))
"""


def test_ray_client_only_where_it_is_asked_for(home: Path, tmp_path: Path) -> None:
    """Its server hands each client to a server of its own on a port of loopback that somebody else may take first."""
    # on a busy machine the server of a client takes longer than Ray's own 30 s
    patient = "environment: {env: {RAY_CLIENT_SERVER_CHECK_CHANNEL_TIMEOUT_S: '150'}}\n"
    (tmp_path / "client.yaml").write_text("network: {ray_client: true}\n" + patient)
    (tmp_path / "client.py").write_text(CLIENT)
    folder = home / "clusters" / "lab"
    with cluster(tmp_path / "client.yaml"):
        connection = json.loads((folder / "connection.json").read_text())
        address = f"{connection['env']['HELIOSTAT_HEAD_IP']}:{connection['client_port']}"
        env = {**os.environ, **{key: str(value) for key, value in connection["env"].items()}}
        done = subprocess.run(
            [sys.executable, str(tmp_path / "client.py"), address],
            env=env,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
        assert done.stdout == "42\n", done.stderr
