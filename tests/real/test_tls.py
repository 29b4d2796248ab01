"""`security.tls` on real hosts: who listens on their network sees neither the token nor what a job sends.

Each test is run without TLS, too: what is listened for can be heard there."""

from __future__ import annotations

import json
import os
import selectors
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lab import NAME, NET, ROOT, USER, Done, Lab, wait_for
from real.onlab import living, nothing_on_hosts, ok

pytestmark = [pytest.mark.needs_slurm, pytest.mark.needs_ray, pytest.mark.needs_openssl]
HOSTS = ("ctl", "n1", "n2")
MARKER = "a-payload-that-nobody-else-sends"
# a task on each node, with an argument and a result that are seen on the network, and a large object
JOB = f"""
import ray
ray.init(logging_level="ERROR")
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as On

@ray.remote(num_cpus=0)
def where(argument):
    print("{MARKER}")
    return ray.util.get_node_ip_address(), argument, b"{MARKER}" * 100_000

alive = [n for n in ray.nodes() if n["Alive"]]
found = ray.get([where.options(scheduling_strategy=On(n["NodeID"], soft=False)).remote("{MARKER}") for n in alive])
print("ips", sorted(ip for ip, _, _ in found))
"""


class Wire:
    """Everything that the lab's hosts send one another by TCP."""

    def __init__(self) -> None:
        self.flows: dict[tuple[bytes, bytes], bytearray] = {}
        self.over = False
        self.sockets = selectors.DefaultSelector()
        for host in HOSTS:
            one = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
            one.setsockopt(socket.SOL_SOCKET, 33, 64 << 20)  # SO_RCVBUFFORCE: nothing may be missed
            one.bind((f"{NAME}{host}", 0))
            self.sockets.register(one, selectors.EVENT_READ)
        self.thread = threading.Thread(target=self._listen, daemon=True)

    def __enter__(self) -> Wire:
        self.thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.over = True
        self.thread.join(60)
        for key in list(self.sockets.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]

    def _listen(self) -> None:
        while not self.over:
            for key, _ in self.sockets.select(0.2):
                self._take(key.fileobj.recv(1 << 17))  # type: ignore[union-attr]

    def _take(self, packet: bytes) -> None:
        if packet[12:14] == b"\x08\x00" and packet[23] == socket.IPPROTO_TCP:
            at = 14 + (packet[14] & 15) * 4
            data = packet[at + (packet[at + 12] >> 4) * 4 :]
            key = packet[26:30] + packet[at : at + 2], packet[30:34] + packet[at + 2 : at + 4]
            self.flows.setdefault(key, bytearray()).extend(data)

    def with_text(self, text: str) -> list[str]:
        """`10.77.0.1:1234 > 10.77.0.2:5678` of the flows that have it."""
        flows = [flow for flow, data in self.flows.items() if text.encode() in data]
        return sorted(f"{_shown(source)} > {_shown(target)}" for source, target in flows)


def _shown(end: bytes) -> str:
    return f"{socket.inet_ntoa(end[:4])}:{struct.unpack('!H', end[4:])[0]}"


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with Lab(3) as made:
        made.put("job.py", JOB)
        yield made


@pytest.fixture(autouse=True)
def nothing_left(lab: Lab) -> Iterator[None]:
    """After each test: no cluster, no process, and no token or key anywhere."""
    yield
    for name in living(lab):
        lab.heliostat("down", name, "--now")
    wait_for("an empty queue", lambda: not lab.queue())
    nothing_on_hosts(lab)
    assert not [p for word in ("token", "*.key") for p in (lab.home / ".heliostat").rglob(word)]


def write(lab: Lab, site: str, secure: bool) -> None:
    path = f"export PATH={Path(sys.executable).parent}:$PATH"
    nodes = {"hosts": ["n1", "n2"]} if site == "ssh" else {"nodes": 2, "time": "20m"}
    spec: dict[str, Any] = {
        "on": site, "name": "lab", **nodes, "cpus_per_node": 1, "object_store": "100M",
        "environment": {"setup": [path]}, "security": {"tls": secure},
    }  # fmt: skip
    lab.put("lab.yaml", json.dumps(spec))


@pytest.mark.parametrize("secure", [True, False], ids=["tls", "clear"])
@pytest.mark.parametrize("site", ["slurm", "ssh"])
def test_nothing_is_read_on_the_network(lab: Lab, site: str, secure: bool) -> None:
    """up, status, a job, its log, doctor, down."""
    write(lab, site, secure)
    with Wire() as wire:
        ok(lab.heliostat("up", "lab.yaml"))
        token = (lab.home / ".heliostat/clusters/lab/token").read_text()
        ok(lab.heliostat("status", "lab"))
        done = ok(lab.heliostat("submit", "lab", "--wait", "--", "python", f"{lab.home}/job.py"))
        assert f"ips ['{NET}.1', '{NET}.2']" in done.out
        checks = json.loads(ok(lab.heliostat("doctor", "lab", "--json")).out)["checks"]
        assert ("tls" in [check["name"] for check in checks]) is secure
        ok(lab.heliostat("down", "lab"))
    assert sum(map(len, wire.flows.values())) > 2_000_000, "it was listened"
    assert bool(wire.with_text(token)) is not secure, wire.with_text(token)
    assert bool(wire.with_text(MARKER)) is not secure, wire.with_text(MARKER)


def test_drivers_that_a_person_starts(lab: Lab) -> None:
    """With what `env` says there: on both nodes' hosts, and `ray status` on a host that is no node."""
    write(lab, "slurm", True)
    ok(lab.heliostat("up", "lab.yaml"))
    mine = 'eval "$("$0" -m heliostat env lab)"; exec "$0" "$@"'
    for host in ("n1", "n2"):
        words = ("env", *lab.variables(), "bash", "-c", mine, sys.executable, "job.py")
        assert f"ips ['{NET}.1', '{NET}.2']" in ok(lab.run(*words, host=host)).out
    words = (
        "env",
        *lab.variables(),
        "bash",
        "-c",
        mine,
        sys.executable,
        "-m",
        "ray.scripts.scripts",
        "status",
    )
    assert ok(lab.run(*words)).out.count(" 1 node_") == 2
    ok(lab.heliostat("down", "lab"))


def test_nodes_that_come_later(lab: Lab) -> None:
    """scale, and a join with a command of its own."""
    write(lab, "slurm", True)
    ok(lab.heliostat("up", "lab.yaml", "--nodes", "1"))
    ok(lab.heliostat("scale", "lab", "1"))
    done = ok(lab.heliostat("join", "lab", "--nodes", "1", "--", "python", "job.py"))
    assert "ips" in done.out
    ok(lab.heliostat("down", "lab"))


def test_a_script_by_hand(lab: Lab) -> None:
    write(lab, "slurm", True)
    script = ok(lab.heliostat("run", "-f", "lab.yaml", "--name", "hand", "--dry-run", "job.py")).out
    lab.put("hand.sh", script)
    job = ok(lab.run("sbatch", "--parsable", "hand.sh")).out.strip()
    wait_for("its end", lambda: not lab.queue(), 180)
    said = (lab.home / f"hand-{job}.out").read_text()
    assert f"ips ['{NET}.1', '{NET}.2']" in said, said


def test_through_a_login_host(lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`via`: the way to the dashboard is ssh to the login host, and TLS from there to the head's hub."""
    ssh = tmp_path / "bin" / "ssh"
    ssh.parent.mkdir()
    ssh.write_text(f'#!/bin/sh\nexec /usr/bin/ssh -F {tmp_path}/config "$@"\n')
    ssh.chmod(0o755)
    known = "UserKnownHostsFile /dev/null\n StrictHostKeyChecking no\n LogLevel ERROR"
    (tmp_path / "config").write_text(
        f"Host login\n HostName {NET}.250\n User {USER}\n IdentityFile {ROOT}/ssh/id\n {known}\n"
    )
    monkeypatch.setenv("PATH", f"{ssh.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("HELIOSTAT_HOME", str(tmp_path / "home"))
    write(lab, "slurm", True)
    spec = json.loads((lab.home / "lab.yaml").read_text())
    (tmp_path / "lab.yaml").write_text(json.dumps({**spec, "slurm": {"via": "login"}}))

    def heliostat(*words: str) -> Done:
        done = subprocess.run(
            [sys.executable, "-m", "heliostat", *words],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=300,
        )
        return Done(done.returncode, done.stdout, done.stderr)

    with Wire() as wire:
        ok(heliostat("up", "lab.yaml"))
        token = (tmp_path / "home/clusters/lab/token").read_text()
        assert json.loads(ok(heliostat("status", "lab", "--json")).out)["problem"] == ""
        done = ok(heliostat("submit", "lab", "--wait", "--", "python", f"{lab.home}/job.py"))
        assert f"ips ['{NET}.1', '{NET}.2']" in done.out
        ok(heliostat("down", "lab"))
    assert not wire.with_text(token) and not wire.with_text(MARKER)
