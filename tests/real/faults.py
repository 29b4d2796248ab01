"""What the tests of faults share: our four lines, who is who among a node's processes, a Ray that starts at once."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pwd
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from heliostat.cli import app
from shared import PATIENCE_S, document, until

LABELS = ("error", "cause", "details", "hint")
LISTEN = "0A"

# --- what is said


@dataclass(frozen=True)
class Said:
    returncode: int
    stdout: str
    stderr: str


def say(*words: object) -> Said:
    """`heliostat WORDS…` in this process: for commands that start nothing, where only the words are looked at."""
    out, err = io.StringIO(), io.StringIO()
    numbers = (signal.SIGTERM, signal.SIGHUP)
    handlers = [signal.getsignal(number) for number in numbers]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = app.run([*map(str, words)])
    finally:
        for number, handler in zip(numbers, handlers, strict=True):
            signal.signal(number, handler)
    return Said(code, out.getvalue(), err.getvalue())


def four_lines(stderr: str) -> dict[str, str]:
    """label -> words of the error that ends this text: at most four lines, in our order, and no traceback."""
    assert "Traceback" not in stderr, stderr
    lines = stderr.splitlines()
    starts = [i for i, line in enumerate(lines) if line.startswith("error: ")]
    assert len(starts) == 1, stderr
    said = [line.partition(": ") for line in lines[starts[0] :]]
    labels = [label.strip() for label, _, _ in said]
    assert labels == [label for label in LABELS if label in labels], stderr
    assert all(words.strip() for _, _, words in said), stderr
    assert "heliostat failed unexpectedly" not in said[0][2], stderr
    return {label.strip(): words for label, _, words in said}


def refused(done: Said | subprocess.CompletedProcess[str], code: int) -> dict[str, str]:
    """The error of a command that must end with this code; nothing is on stdout."""
    assert done.returncode == code, f"ended with {done.returncode}, not {code}\n{done.stdout}\n{done.stderr}"
    assert not done.stdout, done.stdout
    return four_lines(done.stderr)


def tell_tale(home: Path) -> None:
    """Whatever happened: the record can be read, and no token is left of a cluster that has ended."""
    said = [say("ls", "--all", "--json"), say("history", "--json")]
    assert all(one.returncode == 0 and not one.stderr for one in said), said
    listed, rows = json.loads(said[0].stdout)["clusters"], json.loads(said[1].stdout)["history"]
    assert {row["name"] for row in listed} <= {row["name"] for row in rows}
    living = {row["name"] for row in listed if row["ended"] is None}
    for place in home.rglob("token"):
        assert place.parent.name in living, f"a token is left: {place}"
    drafts = [path for path in (home / "clusters").glob(".*")] if (home / "clusters").is_dir() else []
    assert not drafts, drafts


def past(home: Path) -> list[dict[str, Any]]:
    """The records of the ended clusters, oldest first."""
    found = [json.loads(path.read_text()) for path in (home / "history").glob("*/record.json")]
    return sorted(found, key=lambda record: record["created"])


# --- who is who


class Node:
    """One node of a cluster that lives in this home, by what its agent wrote of itself."""

    def __init__(self, home: Path, cluster: str, node: str) -> None:
        self.folder, self.name = home / "clusters" / cluster, node
        words = self.words()
        self.supervisor: int = words["pid"]
        self.temp = Path(words["temp"])
        self.ports: dict[str, int] = {
            k: v for k, v in (words.get("ports") or {}).items() if isinstance(v, int)
        }
        self.mark = f"HELIOSTAT_NODE={words['mark']}\0"

    def words(self) -> dict[str, Any]:
        return dict(json.loads((self.folder / "nodes" / f"{self.name}.json").read_text()))

    @property
    def agent(self) -> int:
        (pid,) = [pid for pid in children(self.supervisor) if "agent.pyz" in command(pid)]
        return pid

    def processes(self) -> dict[int, str]:
        """pid -> command line of all that carries this node's mark, or uses its folder."""
        found = {}
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                line = command(int(entry.name))
                environ = (entry / "environ").read_bytes().decode(errors="replace") + "\0"
                files = " ".join(os.readlink(fd) for fd in (entry / "fd").iterdir())
                if self.mark in environ or str(self.temp) in f"{line} {files}":
                    found[int(entry.name)] = line
            except OSError:
                continue  # it ended while we looked
        return {pid: line for pid, line in found.items() if alive(pid) and pid != os.getpid()}

    def pid_of(self, program: str) -> int:
        """The process of this node whose program has that name."""
        (pid,) = [pid for pid, line in self.processes().items() if line.split(" ")[0].endswith(f"/{program}")]
        return pid

    def kill(self, *pids: int) -> None:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)

    def gone(self, *, folder: bool = True) -> None:
        """Waits until no process of it is left, nobody listens on its ports, and its folder is gone."""
        until(lambda: not self.processes() or time.sleep(0.2), f"the end of {self.name}")
        if folder:
            until(lambda: not self.temp.exists(), f"the removal of {self.temp}")
        until(lambda: not listening() & set(self.ports.values()), "free ports")


def children(pid: int) -> list[int]:
    try:
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    except OSError:
        return []
    return [int(word) for word in text.split()]


def command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except (OSError, IndexError):
        return False


def listening() -> set[int]:
    """Every TCP port of this machine that somebody listens on."""
    rows = [
        line.split()
        for name in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]
    ]
    return {int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == LISTEN}


def state_of(cluster: str, node: str) -> tuple[str, str]:
    """(state, reason) of a node, as `status` tells."""
    nodes = document("status", cluster)["nodes"]
    return next((n["state"], n["reason"]) for n in nodes if n["name"] == node)


# --- commands that are caught in the middle


class Command:
    """`heliostat WORDS…` in a process group of its own, as in a terminal's foreground."""

    def __init__(self, *words: object, program: list[str] | None = None, **env: str) -> None:
        argv = program or [sys.executable, "-m", "heliostat"]
        self.process = subprocess.Popen(
            [*argv, *map(str, words)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **env},
            start_new_session=True,
        )

    def send(self, number: int) -> None:
        os.killpg(self.process.pid, number)

    def end(self) -> subprocess.CompletedProcess[str]:
        out, err = self.process.communicate(timeout=PATIENCE_S)
        return subprocess.CompletedProcess(self.process.args, self.process.returncode, out, err)


@contextlib.contextmanager
def commands() -> Iterator[Callable[..., Command]]:
    """Starts commands; none of them outlives the test."""
    started: list[Command] = []

    def start(*words: object, **more: Any) -> Command:
        started.append(Command(*words, **more))
        return started[-1]

    yield start
    for one in started:
        if one.process.poll() is None:
            one.send(signal.SIGKILL)
        one.process.communicate(timeout=PATIENCE_S)


# --- environments


def make_venv(folder: Path, ray: str | None = None, package: dict[str, str] | None = None) -> Path:
    """A virtual environment with nothing in it but, as far as anybody can see from outside, this version of Ray.

    `package`: files of its site-packages."""
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=PATIENCE_S
    )
    (site,) = folder.glob("lib/python*/site-packages")
    if ray:
        (site / f"ray-{ray}.dist-info").mkdir()
    for name, text in (package or {}).items():
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_text(text)
    return folder


# What `ray start` does as our agent sees it, without the seconds: its node is alive as soon as the gate is open.
FAKE_SERVICES = """
import os, socket, types

def start_gcs_server(*args, node_ip_address, gcs_server_port, **more):
    listener = socket.create_server((node_ip_address, gcs_server_port))  # workers come when it listens
    process = types.SimpleNamespace(pid=os.getpid(), poll=lambda: None, listener=listener)
    return types.SimpleNamespace(process=process)
"""
FAKE_NODE = """
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
import ray._private.services as services


class Yes(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

    def log_message(self, *words):
        pass


class Node:
    node_manager_port = runtime_env_agent_port = metrics_agent_port = metrics_export_port = 0

    def __init__(self, ray_params, head=False):
        self.params, self.gcs_address, self.address_info = ray_params, ray_params.address, {"webui_url": None}
        if head:
            self.start_gcs_server()
        self.server = HTTPServer((ray_params.ip, ray_params.agent), Yes)
        self.dashboard_agent_listen_port = self.server.server_port
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def start_gcs_server(self):
        self.gcs = services.start_gcs_server(node_ip_address=self.params.ip, gcs_server_port=self.params.port)
        self.gcs_address = "%s:%d" % (self.params.ip, self.gcs.process.listener.getsockname()[1])
"""
FAKE_SCRIPTS = """
import os, sys, threading, time, types


def main():
    from ray._private.node import Node

    options = dict(word.partition("=")[::2] for word in sys.argv)
    while os.environ.get("GATE") and not os.path.exists(os.environ["GATE"]):
        time.sleep(0.02)
    slow = os.environ.get("SLOW")
    if slow and not os.path.exists(slow):  # as Ray 2.60 says it
        open(slow, "w").close()
        sys.exit("Exception: The current node timed out during startup. This could happen because the raylet failed to startup")
    params = types.SimpleNamespace(
        ip=options["--node-ip-address"], port=int(options.get("--port", 0)), address=options.get("--address"),
        agent=int(options["--dashboard-agent-listen-port"]), ray_client_server_port=10001,
    )
    node = Node(params, head="--head" in options)  # its sockets are open as long as it is referred to
    threading.Event().wait()
"""
FAKE_RAY = {
    "ray/__init__.py": "",
    "ray/_private/__init__.py": "",
    "ray/_private/services.py": FAKE_SERVICES,
    "ray/_private/node.py": FAKE_NODE,
    "ray/scripts/__init__.py": "",
    "ray/scripts/scripts.py": FAKE_SCRIPTS,
}


def fake_ray(folder: Path, version: str = "2.60.0") -> Path:
    return make_venv(folder, version, FAKE_RAY)


# --- an ordinary user


def ordinary(*words: object, **env: str) -> subprocess.CompletedProcess[str]:
    """Runs `heliostat WORDS…` as `nobody`. Needs root.

    The interpreter may lie below a folder that only root may enter: there, in a mount namespace of its own, only that
    interpreter is left, and anybody may enter."""
    nobody = pwd.getpwnam("nobody")
    argv = [
        "setpriv",
        f"--reuid={nobody.pw_uid}",
        f"--regid={nobody.pw_gid}",
        "--clear-groups",
        sys.executable,
    ]
    python = Path(sys.base_prefix).resolve()
    closed = next((path for path in reversed(python.parents) if not path.stat().st_mode & 0o001), None)
    if closed:
        inner = next(path for path in (python, *python.parents) if path.parent == closed)
        line = (
            'set -e; aside=$(mktemp -d); mount --bind "$2" "$aside"; mount -t tmpfs -o mode=755 none "$1"; '
        )
        line += 'mkdir "$2"; mount --move "$aside" "$2"; rmdir "$aside"; shift 2; exec "$@"'
        argv = [
            "unshare",
            "-m",
            "--propagation",
            "private",
            "sh",
            "-c",
            line,
            "sh",
            str(closed),
            str(inner),
            *argv,
        ]
    return subprocess.run(
        [*argv, "-m", "heliostat", *map(str, words)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        cwd="/",
        env={**os.environ, "HOME": "/", "PYTHONDONTWRITEBYTECODE": "1", **env},
    )


# --- small disks


@contextlib.contextmanager
def small_disk(place: Path, size: str = "1M") -> Iterator[Path]:
    """A tmpfs of that size at this place."""
    place.mkdir(exist_ok=True)
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size},mode=700", "tmpfs", str(place)], check=True, timeout=60
    )
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True, timeout=60)


def fill(folder: Path) -> Path:
    """Takes all the room that is left, to the last byte; the file that has it."""
    path = folder / "ballast"
    with open(path, "ab", buffering=0) as stream:
        for size in (1 << 16, 1 << 12, 1 << 8, 1):
            with contextlib.suppress(OSError):
                while True:
                    stream.write(b"\0" * size)
    return path
