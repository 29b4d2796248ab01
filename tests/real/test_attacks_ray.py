"""Another user of the same host calls everything that Ray serves. The attacker is a real user without rights.

What Ray answers without a token is listed here, with the reason; docs/security.md has the same list.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from real.faults import Node
from shared import PATIENCE_S, document, heliostat, nothing_left, private_home, until
from users import User, make_user

pytestmark = [pytest.mark.needs_ray, pytest.mark.needs_linux, pytest.mark.needs_two_users]

ASK = ("--cpus-per-node", 1, "--object-store", "100M")
IP = "127.0.0.2"
PROGRAM = Path(__file__).with_name("ray_services.py")
LEAST_ROUTES, LEAST_METHODS = 44, 146

# Open by Ray's design: route -> why. Ray's servers name them in `public_exact_paths` (head) and `PUBLIC_EXACT_PATHS` (agent).
OPEN_ROUTES = {
    "head": {
        "GET /": "the page that asks for the token; no data of the cluster",
        "GET /favicon.ico": "an image of the page",
        "GET /api/authentication_mode": "says that a token is needed",
        "GET /api/gcs_healthz": "says whether the GCS answers",
        "GET /api/healthz": "a health check; 404 here",
        "GET /api/local_raylet_healthz": "a health check; 404 here",
    },
    "agent": {
        "GET /api/healthz": "says whether the raylet and the GCS answer",
        "GET /api/local_raylet_healthz": "says whether the raylet answers",
    },
    "runtime_env_agent": {},
}
# Services of gRPC's own that Ray's C++ servers have without a token.
OPEN_SERVICES = {
    "grpc.health.v1.Health": "says whether the server answers",
    "grpc.reflection.v1alpha.ServerReflection": "lists the services, which are public anyway",
    "grpc.channelz.v1.Channelz": "lists connections with their addresses and counters, as `ss` does",
}
REFUSED = {"UNAUTHENTICATED", "PERMISSION_DENIED"}
# Services that are in Ray's package, and that no port of a node serves.
NOT_SERVED = {
    "ray.rpc.autoscaler.im.InstanceManagerService": "never started",
    "ray.rpc.SubscriberService": "served by workers of some versions only",
    "ray.rpc.RayletDriver": "Ray Client, off unless `network: {ray_client: true}`",
    "ray.rpc.RayletDataStreamer": "Ray Client",
    "ray.rpc.RayletLogStreamer": "Ray Client",
}
BUSY = """
import ray, time
ray.init(log_to_driver=False)

@ray.remote(num_cpus=0)
class Holder:
    def ready(self):
        return True

holder = Holder.remote()
ray.get(holder.ready.remote())
print("holds", flush=True)
time.sleep(10_000)
"""


@pytest.fixture(scope="module")
def attacker() -> Iterator[User]:
    with make_user("r") as user:
        yield user


@pytest.fixture(scope="module")
def home() -> Iterator[Path]:
    with private_home() as path:
        yield path


@pytest.fixture(scope="module", autouse=True)
def no_leaks(home: Path) -> Iterator[None]:
    with nothing_left(home):
        yield


@pytest.fixture(scope="module")
def node(home: Path, no_leaks: None) -> Iterator[Node]:
    """The head of a cluster whose job holds a driver and an actor: they have gRPC servers, too."""
    heliostat("up", "--name", "lab", *ASK)
    try:
        job = heliostat("submit", "lab", "--", sys.executable, "-c", BUSY).stdout.strip()
        until(lambda: "holds" in heliostat("logs", "lab", job, code=None).stdout, "the actor")
        yield Node(home, "lab", "head")
    finally:
        heliostat("down", "lab")


def own_ports(node: Node) -> dict[int, tuple[str, str]]:
    """Port -> (address, program) of all on which processes of this node listen. Other clusters run beside this one."""
    inodes = {}
    for pid in node.processes():
        try:
            for fd in Path(f"/proc/{pid}/fd").iterdir():
                inodes[os.readlink(fd)] = Path(f"/proc/{pid}/comm").read_text().strip()
        except OSError:
            continue  # it ended while we looked
    found = {}
    for line in [
        line for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]
    ]:
        row = line.split()
        address, _, port = row[1].rpartition(":")
        if row[3] == "0A" and (program := inodes.get(f"socket:[{row[9]}]")):
            found[int(port, 16)] = ("127.0.0.1" if address == "0100007F" else IP, program)
    return found


def probe(uid: int, asked: dict[str, Any]) -> Any:
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(uid)],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        env={**os.environ, "HOME": "/nonexistent"},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def ports(node: Node) -> dict[int, tuple[str, str]]:
    return own_ports(node)


@pytest.fixture(scope="module")
def answers(node: Node, attacker: User, ports: dict[int, tuple[str, str]]) -> Any:
    token = (node.folder / "token").read_text().strip()
    wrong = "0" * len(token)
    credentials = {
        "nothing": {},
        "a wrong token": {"Authorization": f"Bearer {wrong}"},
        "a part of the token": {"Authorization": f"Bearer {token[:-1]}"},
        "an empty token": {"Authorization": "Bearer "},
        "a wrong token in Ray's own header": {"X-Ray-Authorization": f"Bearer {wrong}"},
        "a wrong token in a cookie": {"Cookie": f"ray-authentication-token={wrong}"},
    }
    asked = {"ports": [[ip, port] for port, (ip, _) in ports.items()], "credentials": credentials}
    return probe(attacker.uid, asked)


def servers(node: Node, answers: Any) -> dict[int, str]:
    """Port of an HTTP server with routes -> which. The dashboard agent has one on each of two addresses."""
    named = {node.ports["dashboard"]: "head", node.ports["runtime_env_agent"]: "runtime_env_agent"}
    return {int(port): named.get(int(port), "agent") for port in answers["http"]}


def test_every_http_route_asks_for_the_token(node: Node, answers: Any) -> None:
    routes = answers["routes"]
    assert sum(map(len, routes.values())) >= LEAST_ROUTES, routes
    assert all(routes.values()), "each server has routes"
    found = servers(node, answers)
    assert {*found.values()} == {*routes}
    for port, server in found.items():
        for name, said in answers["http"][str(port)].items():
            passed = {route: status for route, status in said.items() if status not in (401, 403)}
            assert not passed.keys() - OPEN_ROUTES[server].keys(), (server, name, passed)


def test_what_is_open_over_http_has_nothing_of_the_cluster(
    node: Node, attacker: User, ports: dict[int, tuple[str, str]], answers: Any
) -> None:
    """Health checks, the page that asks for the token, and metrics: no token, no id of the cluster, no name of ours."""
    record = json.loads((node.folder / "record.json").read_text())
    secrets = [(node.folder / "token").read_text().strip(), record["id"]]
    places = [
        (port, route.split(" ")[1]) for port, s in servers(node, answers).items() for route in OPEN_ROUTES[s]
    ]
    places += [(port, "/metrics") for port in answers["open"]]
    for port, path in places:
        url = f"http://{ports[port][0]}:{port}{path}"
        done = attacker.run("sh", "-c", 'curl -sS --max-time 60 "$0" | tr -cd "[:print:]"', url)
        assert done.returncode == 0 and not any(secret in done.stdout for secret in secrets), (port, path)


def test_metrics_ports_answer_with_metrics_only(node: Node, answers: Any) -> None:
    """Prometheus's servers answer every path alike. Ray has one for the node, and one for the dashboard itself."""
    found = answers["open"]
    assert node.ports["metrics"] in found and len(found) == 2, found
    for port in found:
        with urllib.request.urlopen(f"http://{IP}:{port}/api/jobs/", timeout=PATIENCE_S) as answer:
            assert answer.read().startswith(b"# HELP "), port


def test_static_files_lead_nowhere_else(
    node: Node, attacker: User, ports: dict[int, tuple[str, str]]
) -> None:
    """Paths below /static/ need no token: whatever leads out of it is refused."""
    base = f"http://127.0.0.1:{node.ports['dashboard']}"
    token = (node.folder / "token").read_text().strip()
    up = "/..".join([""] * 30)
    for path in (
        "/static/../api/jobs/",
        "/static/%2e%2e/api/jobs/",
        "/static/..%2fapi%2fjobs%2f",
        "//static/../api/jobs/",
        "/static//api/jobs/",
        f"/static{up}{node.folder}/token",
        f"/static{up.replace('..', '%2e%2e')}{node.folder}/token",
        f"/static/{node.folder}/token",
        "/API/JOBS/",
        "//api/jobs/",
        "/api/healthz/../jobs/",
        "/api/healthz%2f..%2fjobs%2f",
        "/api/gcs_healthz;/api/jobs/",
    ):
        words = ["curl", "-sS", "--path-as-is", "--max-time", 60, "-w", "\n%{http_code}", base + path]
        body, _, status = attacker.run(*words).stdout.rpartition("\n")
        assert status in ("401", "403", "404") and token not in body and "submission_id" not in body, (
            path,
            status,
        )


def test_every_grpc_method_asks_for_the_token(node: Node, answers: Any) -> None:
    assert len(answers["methods"]) >= LEAST_METHODS
    refused: set[str] = set()
    for port, said in answers["grpc"].items():
        if int(port) == node.ports["hub"]:
            continue
        for name in said.keys() - {"served"}:
            for method, status in said[name].items():
                service = method.split("/")[1]
                if service in OPEN_SERVICES:
                    continue
                assert status in REFUSED | {"UNIMPLEMENTED"}, (port, name, method, status)
                assert status in REFUSED or method not in said["served"], (port, name, method)
                refused |= {method} if status in REFUSED else set()
    silent = {method.split("/")[1] for method in answers["methods"] if method not in refused}
    assert silent <= NOT_SERVED.keys(), "each of the others was refused on some port"


def test_servers_have_no_service_that_was_not_called(node: Node, answers: Any) -> None:
    """Ray's C++ servers list more than its Python package knows: objects and the nodes' resources among them."""
    listed = {method for said in answers["grpc"].values() for method in said["served"]}
    for method in ("/ray.rpc.ObjectManagerService/Pull", "/ray.rpc.syncer.RaySyncer/StartSync"):
        assert method in listed
    assert {m.split("/")[1] for m in listed - {*answers["methods"]}} <= {
        *OPEN_SERVICES, "ray.rpc.ObjectManagerService", "ray.rpc.syncer.RaySyncer"
    }  # fmt: skip


def test_every_port_was_tried(node: Node, ports: dict[int, tuple[str, str]], answers: Any) -> None:
    """HTTP, gRPC, or the hub, which speaks neither. A driver and a worker of the job are among them."""
    serves = {int(port) for port, said in answers["grpc"].items() if "OK" in said["nothing"].values() or said["served"]
              or REFUSED & {*said["nothing"].values()}}  # fmt: skip
    assert {int(port) for port in answers["http"]} | {*answers["open"]} | serves | {
        node.ports["hub"]
    } == ports.keys()
    assert node.ports["hub"] not in serves
    worker = "/ray.rpc.CoreWorkerService/PushTask"
    found = [port for port, said in answers["grpc"].items() if said["nothing"].get(worker) in REFUSED]
    assert len(found) >= 2, "the driver and the actor"


def test_the_cluster_lives_on(answers: Any) -> None:
    """After all of that."""
    assert document("status", "lab")["state"] == "ready"
    assert "hello\n" in heliostat("submit", "lab", "--wait", "--", "echo", "hello").stdout


def test_a_job_can_read_the_token(node: Node) -> None:
    """Ray has no users: whoever may submit a job to a cluster is its owner there. docs/security.md says so."""
    program = "import os; print('read', open(os.environ['RAY_AUTH_TOKEN_PATH']).read().strip())"
    said = heliostat("submit", "lab", "--wait", "--", sys.executable, "-c", program).stdout
    assert f"read {(node.folder / 'token').read_text().strip()}\n" in said


CRASH = "/ray.rpc.syncer.RaySyncer/StartSync"


@pytest.mark.needs_openssl
@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
def test_one_call_ends_a_cluster_without_tls(home: Path, attacker: User, tmp_path: Path, tls: bool) -> None:
    """A defect of Ray 2.60: its resource syncer reads the caller's node id before it looks at the token, and ends the process
    where there is none. With TLS a caller without a certificate of the cluster does not get that far. When the plain cluster
    survives (a newer Ray), change docs/security.md."""
    (tmp_path / "spec.yaml").write_text(json.dumps({"security": {"tls": tls}}))
    heliostat("up", tmp_path / "spec.yaml", "--name", "crash", *ASK)
    try:
        ports = Node(home, "crash", "head").ports
        for service in ("gcs", "node_manager") if tls else ("gcs",):
            place = f"{IP}:{ports[service]}"
            assert probe(attacker.uid, {"place": place, "method": CRASH}) == "UNAVAILABLE", service
        if tls:
            assert "hello\n" in heliostat("submit", "crash", "--wait", "--", "echo", "hello").stdout
            assert document("status", "crash")["state"] == "ready"
        else:
            until(lambda: document("status", "crash")["state"] == "failed", "the end of the cluster")
    finally:
        heliostat("down", "crash", code=None)
