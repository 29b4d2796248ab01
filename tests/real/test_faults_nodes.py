"""Processes of a real cluster are killed, held, robbed of their files: what is left goes, and everybody tells the truth."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from heliostat.agent.ports import KERNEL_CHOOSES
from real.faults import Command, Node, alive, listening, make_venv, past, refused, state_of, tell_tale
from shared import PATIENCE_S, document, heliostat, nothing_left, private_home, until

pytestmark = [pytest.mark.needs_ray, pytest.mark.needs_linux]

NAME = "pair"
OFFSET = 9000
ASK = ["--cpus-per-node", "1", "--object-store", "100M"]
# agents that lose patience sooner than those of a person's cluster
IMPATIENT = """
from heliostat.cluster import planner
plain = planner.agent_config
planner.agent_config = lambda *words: {**plain(*words), "heartbeat_timeout_s": 10, "head_lost_timeout_s": 10}
from heliostat.cli import main
main()
"""
DAEMON = """
import os, sys
if os.fork():
    os.wait()
    sys.exit(0)
os.setsid()
if os.fork():
    os._exit(0)
with open(sys.argv[1] + ".new", "w") as place:
    place.write(str(os.getpid()))
os.rename(sys.argv[1] + ".new", sys.argv[1])
os.closerange(0, 1000)
os.execve("/bin/sleep", ["sleep", "100000"], {})
"""


@pytest.fixture(scope="module")
def home() -> Iterator[Path]:
    with private_home() as path:
        yield path


@pytest.fixture(scope="module", autouse=True)
def no_leaks(home: Path) -> Iterator[None]:
    with nothing_left(home):
        yield


@pytest.fixture(autouse=True)
def tidy(home: Path, no_leaks: None) -> Iterator[None]:
    yield
    tell_tale(home)


@pytest.fixture(scope="module")
def own_ray(no_leaks: None) -> Iterator[int]:
    """The user's own Ray on this machine, started by hand. Nothing that we do may touch it."""
    ray = Path(sys.executable).with_name("ray")
    with tempfile.TemporaryDirectory(prefix="own-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        words = [ray, "start", "--head", "--block", "--port=0", "--dashboard-port=0", "--num-cpus=1"]
        words += ["--dashboard-agent-listen-port=0", "--ray-client-server-port=24999", f"--temp-dir={folder}"]
        words += [
            "--include-dashboard=false",
            "--object-store-memory=100000000",
            "--min-worker-port=0",
            "--max-worker-port=0",
        ]
        with open(f"{folder}/out", "w") as out:
            own = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True, cwd="/"
            )
        try:
            until(lambda: "Ray runtime started" in Path(f"{folder}/out").read_text(), "the user's own Ray")
            yield own.pid
        finally:
            own.send_signal(signal.SIGTERM)
            own.wait(PATIENCE_S)


def family_of(root: int) -> set[int]:
    """A session and all that it has started, by the sessions' number."""
    found = set()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if int((entry / "stat").read_bytes().rpartition(b")")[2].split()[3]) == root:
                found.add(int(entry.name))
        except (OSError, IndexError):
            continue
    return {pid for pid in found if alive(pid)}


def up() -> None:
    done = Command("up", "--name", NAME, "--nodes", 2, *ASK, program=[sys.executable, "-c", IMPATIENT]).end()
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def pair(home: Path, own_ray: int) -> Iterator[None]:
    before = family_of(own_ray)
    assert len(before) > 3
    up()
    yield
    heliostat("down", NAME)
    assert before <= family_of(own_ray)


# --- a worker


@pytest.mark.parametrize("victim", ["raylet", "agent", "supervisor", "agent and supervisor"])
def test_a_worker_dies(home: Path, pair: None, victim: str) -> None:
    node = Node(home, NAME, "w1")
    node.kill(
        *{
            "raylet": lambda: [node.pid_of("raylet")],
            "agent": lambda: [node.agent],
            "supervisor": lambda: [node.supervisor],
            "agent and supervisor": lambda: [node.agent, node.supervisor],
        }[victim]()
    )
    node.gone(folder=victim != "agent and supervisor")
    until(lambda: state_of(NAME, "w1")[0] == "FAILED", "the truth")
    reason = state_of(NAME, "w1")[1]
    assert {
        "raylet": "raylet [exit code=-9]" in reason or "raylet was killed" in reason,
        "agent": reason == "its agent was killed (signal 9)",
        "supervisor": reason in ("its agent is gone", "its supervisor process was killed"),
        "agent and supervisor": reason == "its agent is gone",
    }[victim], reason
    (listed,) = document("ls")["clusters"]
    assert (document("status", NAME)["state"], listed["state"]) == ("partial", "partial")
    assert state_of(NAME, "head")[0] == "READY"

    up()
    assert (document("status", NAME)["state"], state_of(NAME, "w1")) == ("ready", ("READY", ""))
    assert Node(home, NAME, "w1").supervisor != node.supervisor
    assert not node.temp.exists()  # at the latest now


def test_a_worker_is_suspended_and_comes_back(home: Path, pair: None) -> None:
    node = Node(home, NAME, "w1")
    agent = node.agent
    os.kill(agent, signal.SIGSTOP)
    try:
        until(lambda: state_of(NAME, "w1") == ("LOST", "no heartbeat from its agent"), "LOST")
        assert document("status", NAME)["state"] == "partial"
    finally:
        os.kill(agent, signal.SIGCONT)
    until(lambda: state_of(NAME, "w1") == ("READY", ""), "READY again")
    assert Node(home, NAME, "w1").agent == agent


# --- the cluster's files


def test_the_token_file_is_removed(home: Path, pair: None) -> None:
    path = home / "clusters" / NAME / "token"
    token = path.read_text()
    path.unlink()
    until(path.exists, "the token file")
    assert path.read_text() == token and stat.S_IMODE(path.stat().st_mode) == 0o600
    done = heliostat("submit", NAME, "--wait", "--", "echo", "let in")
    assert "let in\n" in done.stdout


# --- the end


def test_what_a_job_leaves_behind_goes_with_the_cluster(home: Path, pair: None, tmp_path: Path) -> None:
    """It has left its session, closed its files and cleared its environment; it is still a child of the node."""
    (tmp_path / "daemon.py").write_text(DAEMON)
    heliostat("submit", NAME, "--wait", "--", "python", tmp_path / "daemon.py", tmp_path / "pid")
    pid = int((tmp_path / "pid").read_text())
    assert alive(pid) and not Path(f"/proc/{pid}/environ").read_bytes()
    nodes = [Node(home, NAME, name) for name in ("head", "w1")]
    os.kill(nodes[1].agent, signal.SIGSTOP)  # and one that cannot hear it must be ended all the same
    heliostat("down", NAME)
    assert not alive(pid)
    for node in nodes:
        node.gone()


def test_the_head_dies_and_its_worker_goes_too(home: Path, pair: None) -> None:
    """Nobody is left who could tell the worker; it notices."""
    up()
    head, worker = Node(home, NAME, "head"), Node(home, NAME, "w1")
    head.kill(head.agent, head.supervisor)
    assert document("status", NAME)["state"] == "failed"
    assert state_of(NAME, "head") == ("FAILED", "its agent is gone")
    head.gone(folder=False)
    worker.gone()
    assert state_of(NAME, "w1")[0] != "READY"
    heliostat("down", NAME)
    head.gone()
    assert past(home)[-1]["nodes"]["head"]["state"] == "FAILED"


# --- a head alone


def at_their_ports(folder: Path, node: Node) -> None:
    """Every port is from the range that the offset stands for, is where the files say, and is listened on."""
    window = range(20000 + OFFSET, 20000 + OFFSET + 2420)
    words = node.words()["ports"]
    ranged = [port for name, port in node.ports.items() if name not in KERNEL_CHOOSES]
    assert all(port in window for port in [*ranged, *words["workers"]])
    env = json.loads((folder / "connection.json").read_text())["env"]
    assert (env["HELIOSTAT_RAY_PORT"], env["HELIOSTAT_DASHBOARD_PORT"]) == (words["gcs"], words["dashboard"])
    assert env["HELIOSTAT_PORT_OFFSET"] == OFFSET
    services = ("gcs", "dashboard", "node_manager", "object_manager", "agent_http", "hub")
    until(lambda: {words[name] for name in services} <= listening(), "every service at its port")


@pytest.mark.parametrize("victim", ["gcs_server", "raylet", "agent", "supervisor"])
def test_a_head_dies(home: Path, victim: str) -> None:
    heliostat("up", "--name", "alone", *ASK, "--port-offset", OFFSET)
    node = Node(home, "alone", "head")
    at_their_ports(home / "clusters" / "alone", node)
    pids = {"agent": lambda: node.agent, "supervisor": lambda: node.supervisor}
    node.kill(pids[victim]() if victim in pids else node.pid_of(victim))
    node.gone()
    status = document("status", "alone")
    assert (status["state"], status["address"]) == ("failed", None)
    (head,) = status["nodes"]
    assert head["state"] == "FAILED" and head["reason"]
    if victim not in pids:
        # Ray's own words, or, where its `ray start` has not come so far as to watch its children, ours
        ours = f"Ray ended: {victim} was killed or ended by itself"
        assert f"{victim} [exit code=-9]" in head["reason"] or head["reason"] == ours
    done = heliostat("submit", "alone", "--", "true", code=1)
    assert done.stderr.startswith("error: `alone` is failed, so it cannot be used\n")
    (told,) = document("ls")["clusters"]
    assert (told["name"], told["state"], told["reason"]) == ("alone", "failed", head["reason"])
    assert document("ls")["clusters"] == []
    assert (past(home)[-1]["name"], past(home)[-1]["nodes"]["head"]["state"]) == ("alone", "FAILED")
    assert "`alone` was already terminated" in heliostat("down", "alone").stderr


def test_ctrl_c_while_ray_starts(home: Path) -> None:
    one = Command("run", "--name", "early", *ASK, "--", "true")
    place = home / "clusters" / "early" / "nodes" / "head.json"
    until(place.exists, "its agent")
    node = Node(home, "early", "head")
    until(lambda: any("gcs_server" in line for line in node.processes().values()), "Ray's first process")
    one.send(signal.SIGINT)
    assert refused(one.end(), 130)["error"] == "interrupted; `early` is released"
    node.gone()


# --- ports

# loaded by every Python of the environment; what it does is for the one that runs `ray start`
THIEF = """
import os, pathlib, sys, time
if any(word.endswith("ray_start.py") for word in sys.orig_argv):
    place = pathlib.Path(os.environ["PLACE"])
    tries = sorted(place.glob("try-*"))
    taken = {0: "--dashboard-port", 1: "--dashboard-agent-listen-port"}.get(len(tries))
    mine = place / f"try-{len(tries)}"
    options = dict(word.partition("=")[::2] for word in sys.orig_argv)
    mine.with_suffix(".new").write_text(options[taken] if taken else "0")
    mine.with_suffix(".new").rename(mine)
    while taken and not (place / f"taken-{len(tries)}").exists():
        time.sleep(0.02)
"""


def test_ports_are_taken_in_the_last_moment(home: Path, tmp_path: Path) -> None:
    """Of a range that the user named, twice, by a program that is not ours, when Ray is about to bind them: other blocks
    are taken."""
    paths = "\n".join(path for path in sys.path if path.endswith("site-packages"))
    venv = make_venv(tmp_path / "v", package={"sitecustomize.py": THIEF, "here.pth": paths})
    up = Command("up", "--name", "robbed", *ASK, "--venv", venv, "--port-offset", OFFSET, PLACE=str(tmp_path))
    taken = []
    for number in range(2):
        place = tmp_path / f"try-{number}"
        until(place.exists, f"try {number}")
        taken.append(socket.create_server(("0.0.0.0", int(place.read_text()))))
        (tmp_path / f"taken-{number}").touch()
    done = up.end()
    assert done.returncode == 0, done.stderr
    robbed = {one.getsockname()[1] for one in taken}
    node = Node(home, "robbed", "head")
    assert not robbed & set(node.ports.values()) and (tmp_path / "try-2").exists()
    assert "in it\n" in heliostat("submit", "robbed", "--wait", "--", "echo", "in it").stdout
    heliostat("down", "robbed")
    for one in taken:
        one.close()
    node.gone()
