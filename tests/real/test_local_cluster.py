"""One real cluster of two nodes on this computer, looked at from every side."""

from __future__ import annotations

import contextlib
import http.client
import ipaddress
import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from shared import (
    COMMAND,
    PATIENCE_S,
    document,
    driver_words,
    family,
    heliostat,
    nothing_left,
    private_home,
    processes,
    until,
)

pytestmark = [pytest.mark.needs_ray, pytest.mark.needs_linux]

NAME = "pair"
ASK = ["--name", NAME, "--nodes", "2", "--cpus-per-node", "1", "--object-store", "100M", "--time", "2h"]

# --- what CONTRACT promises of JSON: key -> the types that its value may have

NUMBER = (int, float)
STATUS = {
    "schema": int, "name": str, "backend": str, "state": str, "ray_version": str, "address": str, "dashboard_port": int,
    "started": NUMBER, "time_left_s": NUMBER, "idle_s": NUMBER, "nodes": list, "jobs": list,
}  # fmt: skip
NODE = {
    "name": str, "role": str, "state": str, "reason": str, "ip": str, "native_id": str, "resources": dict, "gpus": list,
}  # fmt: skip
JOB = {"id": str, "status": str, "entrypoint": str, "started": NUMBER, "seconds": NUMBER}
LISTED_HOSTS_BACKEND = {
    "name": str,
    "backend": str,
    "state": str,
    "nodes": int,
    "native_ids": list,
    "started": NUMBER,
}
CONNECTION = {
    "RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH", "HELIOSTAT_CLUSTER", "HELIOSTAT_RAY_PORT", "HELIOSTAT_HEAD_NODE",
    "HELIOSTAT_HEAD_IP", "HELIOSTAT_PORT_OFFSET", "HELIOSTAT_STARTED", "HELIOSTAT_DASHBOARD_PORT",
}  # fmt: skip


def has(table: dict[str, Any], shape: dict[str, Any]) -> None:
    for key, kind in shape.items():
        assert isinstance(table[key], kind) and not isinstance(table[key], bool), (key, table[key])


# --- the cluster


@dataclass(frozen=True)
class Pair:
    folder: Path
    said: subprocess.CompletedProcess[str]

    @property
    def token(self) -> str:
        return (self.folder / "token").read_text()

    @property
    def connection(self) -> dict[str, Any]:
        return dict(json.loads((self.folder / "connection.json").read_text()))

    def agent(self, node: str) -> dict[str, Any]:
        """What the node's agent wrote of itself: its pid, its folder, its ports."""
        return dict(json.loads((self.folder / "nodes" / f"{node}.json").read_text()))

    def http(self, path: str, token: str | None = None) -> int:
        """The status that the dashboard answers with."""
        connection = http.client.HTTPConnection("127.0.0.1", self.connection["dashboard_port"], timeout=60)
        connection.request("GET", path, headers={"Authorization": f"Bearer {token}"} if token else {})
        code = connection.getresponse().status
        connection.close()
        return code


@pytest.fixture(scope="module")
def home() -> Iterator[Path]:
    with private_home() as path:
        yield path


@pytest.fixture(scope="module", autouse=True)
def no_leaks(home: Path) -> Iterator[None]:
    with nothing_left(home):
        yield


@pytest.fixture(scope="module")
def pair(home: Path, no_leaks: None) -> Iterator[Pair]:
    said = heliostat("up", *ASK)
    try:
        yield Pair(home / "clusters" / NAME, said)
    finally:
        done = heliostat("down", NAME)
    assert "is terminated" in done.stderr and not done.stdout
    assert not (home / "clusters" / NAME).exists()


def node_table(pair: Pair, tmp_path: Path) -> dict[str, dict[str, Any]]:
    """Ray's own node table, by name, dead nodes too; asked by a program that has only `heliostat env`."""
    program = tmp_path / "table.py"
    program.write_text(
        "import json, os\n"
        "from ray._raylet import GcsClient\n"
        "nodes = GcsClient(address=os.environ['RAY_ADDRESS']).get_all_node_info(timeout=60).values()\n"
        "print(json.dumps({n.node_name: {'alive': n.state == 0, 'head': n.is_head_node, 'cpus': "
        "n.resources_total['CPU'], 'end': n.death_info.reason_message} for n in nodes}))\n"
    )
    done = subprocess.run(
        driver_words(NAME, program), capture_output=True, text=True, timeout=PATIENCE_S, check=True
    )
    return dict(json.loads(done.stdout.splitlines()[-1]))


# --- starting


def test_up_prints_the_address_and_talks_on_stderr(pair: Pair) -> None:
    assert pair.said.stdout == pair.connection["address"] + "\n"
    assert f"`{NAME}` is ready: 2 nodes" in pair.said.stderr
    assert "head: ready" in pair.said.stderr and "w1: ready" in pair.said.stderr


def test_ready_means_that_rays_node_table_has_them(pair: Pair, tmp_path: Path) -> None:
    table = node_table(pair, tmp_path)
    assert {name: node["alive"] for name, node in table.items()} == {"head": True, "w1": True}
    assert table["head"]["head"] and not table["w1"]["head"]
    assert {node["cpus"] for node in table.values()} == {1}
    events = [json.loads(line) for line in (pair.folder / "events.jsonl").read_text().splitlines()]
    for name in table:
        path = [event["to"] for event in events if event.get("node") == name]
        assert path == sorted(path, key=["ALLOCATED", "STARTING", "READY"].index) and path[-1] == "READY"


def test_up_again_changes_nothing_and_says_so(pair: Pair) -> None:
    before = (pair.folder / "record.json").read_bytes()
    done = heliostat("up", *ASK)
    assert done.stdout == pair.said.stdout
    assert f"`{NAME}` is already running, with 2 nodes" in done.stderr
    assert (pair.folder / "record.json").read_bytes() == before


@pytest.mark.parametrize("words", [["up", "--nodes", "1"], ["run", "--", "true"]], ids=["up", "run"])
def test_a_taken_name_is_refused_by_name(pair: Pair, words: list[str]) -> None:
    done = heliostat(words[0], "--name", NAME, *words[1:], code=1)
    assert done.stdout == ""
    first, second, third = done.stderr.splitlines()
    assert first == f"error: the name `{NAME}` is in use"
    assert second.startswith("  cause: a cluster of that name on `local` is ready")
    assert third.startswith("  hint: ") and f"heliostat down {NAME}" in third
    error = json.loads(heliostat(words[0], "--json", "--name", NAME, *words[1:], code=1).stdout)["error"]
    assert error["exit_code"] == 1 and NAME in error["message"]


# --- looking


def test_status_as_text(pair: Pair) -> None:
    for words in (["status", NAME], ["status"]):
        lines = heliostat(*words).stdout.splitlines()
        assert re.match(
            rf"{NAME} on local: ready, up .+, Ray [\d.]+ at {pair.connection['address']}, 1h \d+m left",
            lines[0],
        )
        assert lines[2].split() == [
            "NODE",
            "ROLE",
            "STATE",
            "IP",
            "CPU",
            "GPU",
            "MEMORY",
            "OBJECT",
            "STORE",
            "REASON",
        ]
        head, worker = (line.split() for line in lines[3:5])
        assert head[:3] == ["head", "head", "ready"] and worker[:3] == ["w1", "worker", "ready"]


def test_status_as_json(pair: Pair) -> None:
    status = document("status", NAME)
    has(status, STATUS)
    assert (status["name"], status["backend"], status["state"]) == (NAME, "local", "ready")
    assert status["address"] == pair.connection["address"] and status["problem"] == ""
    assert status["dashboard_port"] == pair.connection["dashboard_port"]
    assert 0 < status["time_left_s"] <= 7200 and status["idle_s"] >= 0
    assert [(node["name"], node["role"], node["state"]) for node in status["nodes"]] == [
        ("head", "head", "READY"),
        ("w1", "worker", "READY"),
    ]
    for node in status["nodes"]:
        has(node, NODE)
        assert node["native_id"].startswith(f"{pair.agent(node['name'])['pid']}.")
        assert node["ports"] == pair.agent(node["name"])["ports"]
        assert ipaddress.ip_address(node["ip"]).is_loopback
        for used, total in node["resources"].values():
            assert 0 <= used <= total


def test_ls(pair: Pair) -> None:
    header, line = heliostat("ls").stdout.splitlines()
    assert header.split() == ["NAME", "BACKEND", "STATE", "NODES", "AGE", "REASON"]
    assert line.split()[:4] == [NAME, "local", "ready", "2/2"]
    (listed,) = document("ls")["clusters"]
    has(listed, LISTED_HOSTS_BACKEND)
    assert (listed["name"], listed["state"], listed["nodes"]) == (NAME, "ready", 2)
    assert len(listed["native_ids"]) == 2


def test_doctor_finds_nothing_wrong(pair: Pair) -> None:
    lines = heliostat("doctor", NAME).stdout.splitlines()
    assert lines and all(line.startswith("ok ") for line in lines)
    said = document("doctor", NAME)
    assert said["ok"] is True
    assert {"state", "node head", "node w1", "token", "Ray"} <= {check["name"] for check in said["checks"]}


def test_logs_of_events_and_nodes(pair: Pair) -> None:
    events = heliostat("logs", NAME, "--events").stdout
    assert "requested on local" in events and "head: STARTING -> READY" in events
    move = {"kind": "move", "node": "w1", "to": "READY"}
    assert any(move.items() <= event.items() for event in document("logs", NAME, "--events")["events"])
    for node, heading in (("head", "gcs_server.out"), ("w1", "raylet.out")):
        text = heliostat("logs", NAME, node).stdout
        assert "==> ray.log <==" in text and f"==> {heading} <==" in text
        assert "Ray runtime started" in text
    assert "no job or node `nobody`" in heliostat("logs", NAME, "nobody", code=5).stderr


# --- a driver that holds both CPUs

HOLD = """
import json, pathlib, sys, time
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

release = pathlib.Path(sys.argv[1])
ray.init(logging_level="error", log_to_driver=False)
nodes = [node for node in ray.nodes() if node["NodeName"] in sys.argv[2:]]


@ray.remote(num_cpus=1)
def hold(name):
    release.with_name(f"held-{name}").touch()
    while not release.exists():
        time.sleep(0.05)
    return name


def on(node):
    return NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)


held = [hold.options(scheduling_strategy=on(n)).remote(n["NodeName"]) for n in nodes]
print(json.dumps(sorted(ray.get(held))), flush=True)
"""


@contextlib.contextmanager
def holding(folder: Path, *nodes: str) -> Iterator[Callable[[], None]]:
    """A driver whose tasks hold the CPU of these nodes until the call of what this gives, and then end well."""
    (folder / "hold.py").write_text(HOLD)
    words = driver_words(NAME, folder / "hold.py", folder / "release", *nodes)
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    try:
        until(
            lambda: process.poll() is not None or len(list(folder.glob("held-*"))) == len(nodes), "the tasks"
        )
        yield (folder / "release").touch
    finally:
        (folder / "release").touch()
        out, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0 and json.loads(out) == sorted(nodes)


@pytest.fixture(scope="class")
def busy(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with holding(tmp_path_factory.mktemp("busy"), "head", "w1"):
        yield


@pytest.mark.usefixtures("busy")
class TestWhileBusy:
    def test_status_tells_what_is_used(self, pair: Pair) -> None:
        def busy() -> bool:
            nodes = document("status", NAME)["nodes"]
            return all(node["resources"]["CPU"] == [1.0, 1.0] for node in nodes)

        until(busy, "1 of 1 CPUs used on both nodes")
        text = heliostat("status", NAME).stdout.splitlines()
        assert [line.split()[4] for line in text[3:5]] == ["1/1", "1/1"]

    def test_status_lists_the_driver(self, pair: Pair) -> None:
        (job,) = document("status", NAME)["jobs"]
        has(job, JOB)
        assert job["status"] == "RUNNING" and "hold.py" in job["entrypoint"]

    def test_every_port_has_one_owner_and_is_where_the_record_says(self, pair: Pair) -> None:
        """The agent keeps a duplicate of the GCS's socket: it does not count as an owner."""
        owners: dict[int, int] = {}
        for node in ("head", "w1"):
            agent = pair.agent(node)
            found = family(agent["pid"])
            places = listening(found)
            for pid in [pid for pid in places if not re.search(r"agent\.pyz", found[pid])]:
                for _, port in places[pid]:
                    assert owners.setdefault(port, pid) == pid, (
                        f"{port} is shared by {pid} and {owners[port]}"
                    )
            here = {port for pairs in places.values() for _, port in pairs}
            assert set(agent["ports"].values()) <= here, (agent["ports"], here)
            assert {"gcs", "dashboard", "hub"} <= set(agent["ports"]) if node == "head" else True
        assert not any("ray.util.client.server" in words for words in found.values()), "Ray Client is off"
        assert pair.agent("head")["ports"]["gcs"] == pair.connection["env"]["HELIOSTAT_RAY_PORT"]

    def test_the_dashboard_listens_on_loopback_only(self, pair: Pair) -> None:
        port = pair.connection["dashboard_port"]
        places = {place for found in listening(family(pair.agent("head")["pid"])).values() for place in found}
        assert {address for address, at in places if at == port} == {ipaddress.ip_address("127.0.0.1")}


def listening(pids: dict[int, str]) -> dict[int, set[tuple[Any, int]]]:
    """pid -> the (address, port) pairs that it listens on."""
    sockets: dict[str, tuple[Any, int]] = {}
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            if state == "0A":
                address, port = local.split(":")
                words = [bytes.fromhex(address[i : i + 8])[::-1] for i in range(0, len(address), 8)]
                place = ipaddress.ip_address(b"".join(words))
                sockets[rest[5]] = (getattr(place, "ipv4_mapped", None) or place, int(port, 16))
    found: dict[int, set[tuple[Any, int]]] = {}
    for pid in pids:
        try:
            links = [os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir()]
        except OSError:
            continue
        inodes = {link[8:-1] for link in links if link.startswith("socket:[")}
        found[pid] = {sockets[inode] for inode in inodes if inode in sockets}
    return found


# --- connecting


def test_the_connection_files_have_exactly_what_was_promised(pair: Pair) -> None:
    variables = {name: str(value) for name, value in pair.connection["env"].items()}
    assert variables.keys() == CONNECTION
    ip, port = variables["HELIOSTAT_HEAD_IP"], variables["HELIOSTAT_RAY_PORT"]
    assert variables["RAY_ADDRESS"] == f"{ip}:{port}" == pair.connection["address"]
    assert variables["HELIOSTAT_HEAD_NODE"] == socket.gethostname()
    assert (variables["RAY_AUTH_MODE"], variables["RAY_AUTH_TOKEN_PATH"]) == (
        "token",
        str(pair.folder / "token"),
    )
    line = 'set -eu; before=$(compgen -e); source "$0"; comm -13 <(sort <<<"$before") <(compgen -e | sort)'
    empty = {"PATH": os.environ["PATH"]}
    source = ["bash", "-c", line, str(pair.folder / "connection.env")]
    done = subprocess.run(source, env=empty, capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) == CONNECTION  # all of them, each exported
    source[2] = 'source "$0"; env -0'
    done = subprocess.run(source, env=empty, capture_output=True, text=True, check=True)
    assert variables.items() <= dict(item.partition("=")[::2] for item in done.stdout.split("\0")).items()


def test_env_leaves_nothing_in_the_shell(pair: Pair) -> None:
    """Not even what another `up` from that shell would read."""
    line = (
        'set -e; before=$(compgen -e | sort); eval "$("$0" env "$1")"; [ "$RAY_ADDRESS" ]; "$0" up --name other --dry-run -q'
        ' >/dev/null; eval "$("$0" env --unset)"; [ "$(compgen -e | sort)" = "$before" ]'
    )
    done = subprocess.run(
        ["bash", "-c", line, COMMAND, NAME], capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_env_lets_rays_own_command_in(pair: Pair) -> None:
    assert document("env", NAME)["env"] == pair.connection["env"]
    line = 'eval "$("$0" env "$1")" && exec "$2" status'
    ray = str(Path(sys.executable).with_name("ray"))
    done = subprocess.run(
        ["bash", "-c", line, COMMAND, NAME, ray], capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == 0, done.stderr
    assert "/2.0 CPU" in done.stdout


# --- safe


def test_nobody_else_can_read_any_of_it(pair: Pair, home: Path) -> None:
    for path in [home, *home.rglob("*")]:
        if path.is_symlink():  # to Ray's own logs, in a folder that nobody else may enter
            private = [Path(pair.agent(node)["temp"]) for node in ("head", "w1")]
            assert any(place in path.resolve().parents for place in private), path
            continue
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == 0o700 if path.is_dir() else not mode & 0o077, f"{path} has mode {mode:o}"
    assert stat.S_IMODE((pair.folder / "token").stat().st_mode) == 0o600
    for node in ("head", "w1"):
        agent = pair.agent(node)
        temp = Path(agent["temp"])
        assert temp.parent == Path(os.environ["TMPDIR"]) and stat.S_IMODE(temp.stat().st_mode) == 0o700
        assert stat.S_IMODE((temp / "token").stat().st_mode) == 0o600
        (of_ray,) = {
            word.partition("=")[2]
            for line in family(agent["pid"]).values()
            for word in line.split()
            if word.startswith("--temp-dir=")
        }
        assert temp in Path(of_ray).parents and len(of_ray.encode()) <= 40


def test_the_token_is_in_its_files_only(pair: Pair, home: Path) -> None:
    token = pair.token
    assert re.fullmatch("[0-9a-f]{64}", token)
    assert not [line for _, line in processes().values() if token in line]
    temps = [Path(pair.agent(node)["temp"]) for node in ("head", "w1")]
    allowed = {pair.folder / "token", *(temp / "token" for temp in temps)}
    searched = [path for root in (home, *temps) for path in root.rglob("*") if path.is_file()]
    assert len(searched) > 50
    assert {path for path in searched if token.encode() in path.read_bytes()} == allowed
    for words in (
        ["status", NAME, "--json"], ["ls", "--json"], ["env", NAME], ["doctor", NAME, "--json"], ["logs", NAME],
        ["logs", NAME, "head"], ["up", *ASK, "--json", "-v"], ["up", *ASK, "--dry-run", "-v"], ["history", "--json"],
    ):  # fmt: skip
        done = heliostat(*words, HELIOSTAT_DEBUG="1")
        assert token not in done.stdout + done.stderr, words


INTRUDE = """
import os, sys
from ray._raylet import GcsClient
try:
    GcsClient(address=os.environ["RAY_ADDRESS"]).get_all_node_info(timeout=60)
except Exception as error:
    sys.exit(f"refused: {error}")
"""


@pytest.mark.parametrize("how", ["no token", "authentication off", "a wrong token"])
def test_who_has_not_the_token_stays_out(pair: Pair, tmp_path: Path, how: str) -> None:
    wrong = tmp_path / "token"
    wrong.write_text("0" * 64)
    env = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    env |= {"RAY_ADDRESS": pair.connection["address"], "HOME": str(tmp_path)}
    env |= {
        "no token": {},
        "authentication off": {"RAY_AUTH_MODE": "disabled"},
        "a wrong token": {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(wrong)},
    }[how]
    words = [sys.executable, "-c", INTRUDE]
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 1 and "refused:" in done.stderr, done.stderr
    assert re.search("[Aa]uth|token", done.stderr.partition("refused:")[2])


def test_the_http_api_wants_the_token(pair: Pair) -> None:
    for path in ("/api/version", "/api/jobs/", "/nodes?view=summary"):
        assert pair.http(path) == 401
        assert pair.http(path, "0" * 64) == 403
        assert pair.http(path, pair.token) == 200


def get(url: str, cookie: str = "") -> tuple[int, http.client.HTTPMessage, bytes]:
    """As a browser does, which resolves every name under `localhost` to loopback by itself."""
    place, _, path = url.removeprefix("http://").partition("/")
    connection = http.client.HTTPConnection("127.0.0.1", int(place.partition(":")[2]), timeout=60)
    connection.request("GET", "/" + path, headers={"Host": place} | ({"Cookie": cookie} if cookie else {}))
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer.status, answer.headers, body


def test_the_dashboard_proxy_lets_in_one_browser(pair: Pair, spawn_cli) -> None:
    proxy = spawn_cli("dashboard", NAME)
    url = proxy.stdout.readline().strip()
    root = url.partition("?")[0]
    assert re.fullmatch(r"http://[0-9a-f]{32}\.localhost:\d+/[0-9a-f]{32}/\?key=[\w-]+", url)
    assert get(root)[0] == get(root + "api/version")[0] == 403
    code, headers, _ = get(url)
    assert (code, headers["Location"]) == (303, "./")
    cookie = headers["Set-Cookie"].partition(";")[0]
    assert get(url)[0] == 403  # once
    code, _, page = get(root, cookie)
    assert code == 200 and b"<html" in page.lower()
    code, _, body = get(root + "api/version", cookie)
    assert code == 200 and json.loads(body)["ray_version"] == document("status", NAME)["ray_version"]
    assert pair.token not in url + cookie + page.decode(errors="replace")
    os.killpg(proxy.pid, signal.SIGINT)
    assert proxy.wait(PATIENCE_S) == 0
    with pytest.raises(OSError):
        get(root, cookie)


# --- small


def test_agents_and_ls_are_small(pair: Pair, record_property) -> None:
    for node in ("head", "w1"):
        supervisor = pair.agent(node)["pid"]
        table = processes()
        inner = [pid for pid, (parent, line) in table.items() if parent == supervisor and "agent.pyz" in line]
        for pid in (supervisor, *inner):
            status = Path(f"/proc/{pid}/status").read_text()
            resident = int(status.partition("VmRSS:")[2].split()[0])
            record_property(f"{node} {'supervisor' if pid == supervisor else 'agent'} resident kB", resident)
            print(f"{node} {pid}: {resident} kB")
            assert resident < 30_000
        assert len(inner) == 1
    # a child of ours would begin with our own size on its account, so a small one between us starts it
    measure = (
        "import resource, subprocess, sys; subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL); "
        "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
    )
    words = [sys.executable, "-S", "-c", measure, COMMAND, "ls"]
    most = int(subprocess.run(words, capture_output=True, text=True, check=True, timeout=PATIENCE_S).stdout)
    record_property("ls most resident kB", most)
    print(f"ls: {most} kB")
    assert most < 60_000


# --- growing and shrinking: last, since it changes the cluster


def test_scale_up_and_down(pair: Pair, tmp_path: Path, spawn_cli) -> None:
    done = heliostat("scale", NAME, 2)
    assert f"`{NAME}` has 3 nodes" in done.stderr
    table = node_table(pair, tmp_path)
    assert {name for name, node in table.items() if node["alive"]} == {"head", "w1", "w2"}
    agent = pair.agent("w2")
    family_of_w2 = family(agent["pid"])
    assert any("raylet" in line for line in family_of_w2.values()) and Path(agent["temp"]).is_dir()
    ports = [set(pair.agent(node)["ports"].values()) - {None} for node in ("head", "w1", "w2")]
    assert len(set.union(*ports)) == sum(map(len, ports))

    # a task that runs on the node that must go may end first
    with holding(tmp_path, "w2") as release:
        scaling = spawn_cli("scale", NAME, "1")
        until(lambda: pair.agent("w2")["state"] == "STOPPING", "the drain of w2")
        assert scaling.poll() is None
        release()
    _, words = scaling.communicate(timeout=PATIENCE_S)
    assert scaling.returncode == 0 and "draining 1 node" in words and f"`{NAME}` has 2 nodes" in words
    assert not family_of_w2.keys() & processes().keys()
    assert not Path(agent["temp"]).exists()
    table = node_table(pair, tmp_path)
    assert {name for name, node in table.items() if node["alive"]} == {"head", "w1"}
    assert "draining before shutdown" in table["w2"]["end"]
    assert [node["name"] for node in document("status", NAME)["nodes"]] == ["head", "w1"]
    events = [json.loads(line) for line in (pair.folder / "events.jsonl").read_text().splitlines()]
    assert [event["to"] for event in events if event.get("node") == "w2"][-1] == "GONE"
    assert f"`{NAME}` has 2 nodes" in heliostat("scale", NAME, 1).stderr


def test_nodes_that_join_with_a_script_leave_with_it(pair: Pair, tmp_path: Path) -> None:
    script = tmp_path / "who.py"
    script.write_text(
        "import sys, ray\nray.init(logging_level='ERROR')\n"
        "print(sorted(n['NodeName'] for n in ray.nodes() if n['Alive']))\nsys.exit(7)\n"
    )
    done = heliostat("join", NAME, "--nodes", 2, "--cpus-per-node", 1, script, code=7)
    assert "['head', 'j1-1', 'j1-2', 'w1']" in done.stdout, "it runs when all that came with it are there"
    assert [node["name"] for node in document("status", NAME)["nodes"]] == ["head", "w1"]


def test_the_history_has_what_joins_used(pair: Pair) -> None:
    small = ("--cpus-per-node", 1, "--object-store", "100M")
    detached = heliostat("join", NAME, "--detach", *small, "--", "sh", "-c", "exit 3").stdout.strip()
    until(lambda: joined(detached)["exit_code"] == 3, "the exit code of a join that nobody follows")
    row = until(lambda: joined(detached)["node_hours"] and joined(detached), "its node-hours")
    assert (row["kind"], row["nodes"], row["why"], row["what"]) == ("join", 1, "failed", "sh -c 'exit 3'")
    assert row["waited_s"] > 0 and row["ran_s"] >= 0
    plain = heliostat("join", NAME, *small).stdout.strip()
    row = joined(plain)
    assert (row["kind"], row["nodes"], row["what"], row["exit_code"]) == ("join", 1, "join", None)
    assert row["waited_s"] > 0 and row["node_hours"] is None, "it is still there"
    (cluster,) = [row for row in document("history")["history"] if row["name"] == NAME]
    assert cluster["nodes"] == 2, "the nodes of joins are in rows of their own"


def joined(join: str) -> dict[str, Any]:
    return next(row for row in document("history")["history"] if row["name"] == f"{NAME}/{join}")
