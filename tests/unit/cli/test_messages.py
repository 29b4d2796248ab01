"""Every message, as a person sees it: what goes to stdout, what to stderr, and the exit code, against files in snapshots/.

UPDATE_SNAPSHOTS=1 writes them anew; read the difference before you keep it.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from heliostat import __version__
from heliostat.cli import app
from heliostat.cli.run import check_command
from heliostat.cluster.planner import agent_archive
from heliostat.common.errors import UsageError
from heliostat.common.processes import process_start
from heliostat.config.spec import ClusterSpec
from heliostat.state.records import NodeRecord, Record
from heliostat.state.states import NodeState
from heliostat.state.store import ClusterDirectory, Store
from unit.ray_server import NODE, TOKEN, Ray, job, serve

SNAPSHOTS = Path(__file__).parents[1] / "snapshots"


@dataclass(frozen=True)
class Said:
    code: int
    out: str
    err: str


class Person:
    """Somebody in a folder of their own, with a home of their own, who types commands."""

    def __init__(self, home: Path, place: Path) -> None:
        self.store = Store(home)
        self.home, self.place = home, place
        self.known: dict[str, str] = {}  # what differs from run to run -> what stands for it
        self.sleepers: list[subprocess.Popen[bytes]] = []  # what its clusters are made of

    def types(self, *words: str) -> Said:
        """In this process, with streams of its own: as the command does it, and in a hundredth of the time."""
        streams = [io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in range(2)]
        handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
        try:
            with contextlib.redirect_stdout(streams[0]), contextlib.redirect_stderr(streams[1]):
                code = app.run(words)
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
        return Said(code, *(stream.buffer.getvalue().decode() for stream in streams))

    def plain(self, text: str) -> str:
        """Without what differs from run to run and from machine to machine."""
        for found, shown in sorted(self.known.items(), key=lambda item: -len(item[0])):
            text = text.replace(found, shown)
        text = (
            text.replace(str(self.home), "HOME")
            .replace(str(self.place), "HERE")
            .replace(sys.executable, "PYTHON")
            .replace(sys.prefix, "PREFIX")
        )
        text = re.sub(r"run-\d{4}-\d{6}-[0-9a-f]{4}", "run-NAME", text)
        text = re.sub(r"crash-[-\d]+\.txt", "crash-TIME.txt", text)
        text = re.sub(r"\(the agent, [^)]*\)", "(the agent, SIZE)", text)
        text = re.sub(r"\b1[6-9]\d{8}\.\d+\b", "TIME", text)
        text = re.sub(r"(: ready)  \d+\.\d s", r"\1  SECONDS", text)
        text = re.sub(r"AGE +REASON", "AGE  REASON", re.sub(r"\b\d{3,}d( \d+[hms])? +", "AGE  ", text))
        return text.replace(__version__, "VERSION").replace("\r", "<CR>")

    def shown(self, words: tuple[str, ...], said: Said) -> str:
        typed = " ".join(ascii(word) if re.search(r"[^\w./=:,-]", word) else word for word in words)
        parts = [
            f"$ heliostat {typed}",
            f"exit {said.code}",
            "--- stdout",
            said.out.rstrip("\n"),
            "--- stderr",
            said.err,
        ]
        return self.plain("\n".join(parts)).rstrip("\n") + "\n"


@pytest.fixture
def person(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Person]:
    place = tmp_path / "here"
    place.mkdir()
    monkeypatch.chdir(place)
    for name, value in {"COLUMNS": "100", "TZ": "UTC", "HOME": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    for name in ("HELIOSTAT_DEBUG", "NO_COLOR", "USER_PORT_OFFSET", "KUBECONFIG", "KUBERNETES_SERVICE_HOST"):
        monkeypatch.delenv(name, raising=False)
    time.tzset()
    made = Person(home, place)
    yield made
    for process in made.sleepers:
        process.kill()
        process.wait()
    monkeypatch.undo()
    time.tzset()


def check(name: str, text: str) -> None:
    path = SNAPSHOTS / f"{name}.txt"
    if os.environ.get("UPDATE_SNAPSHOTS"):
        SNAPSHOTS.mkdir(exist_ok=True)
        path.write_text(text)
    assert path.exists(), f"there is no {path.name} yet: UPDATE_SNAPSHOTS=1 writes it"
    assert text == path.read_text()


# -- worlds


def bare(person: Person) -> None:
    pass


def scripts(person: Person) -> None:
    (person.place / "train.py").write_text("print('hello')\n")
    (person.place / "folder.py").mkdir()
    (person.place / "plain.txt").write_text("")


def with_file(text: str) -> Callable[[Person], None]:
    def make(person: Person) -> None:
        scripts(person)
        (person.place / "heliostat.yaml").write_text(text)

    return make


LAB = "name: lab\nnodes: 2\nidle: {timeout: 60m}\nenvironment:\n  setup: ['module load cuda/12.4']\n"


def past(person: Person) -> None:
    """Three ended clusters: one was taken down, one ran a script, one did not start."""
    at = 1_700_000_000.0

    def ended(name: str, state: NodeState, **more: Any) -> ClusterDirectory:
        nodes = {
            n: NodeRecord(n, "head" if n == "head" else "worker", None, state, "", at) for n in ("head", "w1")
        }
        record = Record(name, f"{name}0123", "local", more.pop("kind", "up"), at, {"on": "local", "name": name}, nodes=nodes, **more)  # fmt: skip
        events = [
            {"at": at, "kind": "note", "text": "requested on local"},
            {
                "at": at + 0.25,
                "kind": "move",
                "node": "head",
                "from": "REQUESTED",
                "to": "STARTING",
                "reason": "",
            },
            {
                "at": at + 9.5,
                "kind": "move",
                "node": "head",
                "from": "STARTING",
                "to": str(state),
                "reason": record.reason,
            },
        ]
        files: dict[str, str | bytes] = {
            "events.jsonl": "".join(json.dumps(event) + "\n" for event in events)
        }
        folder = person.store.create(record, {**files, "token": "secret", "agent.pyz": b""})
        return person.store.archive(folder, record)

    jobs = [{"id": "j1", "entrypoint": "python train.py", "submitted": at + 100, "status": "SUCCEEDED", "exit_code": 0, "seconds": 12.5},
            {"id": "j2", "entrypoint": "python other.py --with a very long line of arguments", "submitted": at + 200}]  # fmt: skip
    lab = ended("lab", NodeState.GONE, ready=at + 60, ended=at + 3660, reason="taken down", jobs=jobs)
    (lab.logs / "head").mkdir()
    (lab.logs / "head" / "agent.log").write_text("the agent's last line")
    (lab.logs / "head" / "job-driver-j1.log").write_text("output of j1\nno end")
    at += 86400
    text = {"argv": ["python3", "train.py"], "text": "python3 train.py", "cwd": "/"}
    ran = ended("run-x", NodeState.GONE, kind="run", command=text, ready=at + 5, ended=at + 65, reason="the command ended with code 137", exit_code=137)  # fmt: skip
    (ran.logs / "run.out").write_text("out of the script\n")
    (ran.logs / "run.err").write_text("err of the script\n")
    at += 86400
    ended("bad", NodeState.FAILED, ended=at + 3, reason="it did not start")


def live(person: Person, dashboard: int = 1, state: str = "READY") -> ClusterDirectory:
    """A cluster that looks alive: its nodes are two processes that sleep, its head says that they are ready."""
    started = time.time() - 5430
    sleepers = {node: subprocess.Popen(["sleep", "600"], start_new_session=True) for node in ("head", "w1")}
    person.sleepers += sleepers.values()
    nodes, handles = {}, []
    for node, process in sleepers.items():
        start = process_start(process.pid) or ""
        native = f"{process.pid}.{start}"
        person.known[native] = f"PID.START-{node}"
        detail = {
            "pid": process.pid,
            "start": start,
            "mark": f"voice-{process.pid}",
            "folder": str(person.store.clusters / "lab"),
        }
        handles.append({"native_id": native, "nodes": [node], "detail": detail})
        nodes[node] = NodeRecord(
            node,
            "head" if node == "head" else "worker",
            None,
            NodeState.READY,
            "",
            started + 9,
            native,
            launch=1,
        )
    spec = {"on": "local", "name": "lab", "nodes": 2}
    record = Record(
        "lab", "ab" * 8, "local", "up", started, spec, nodes=nodes, handles=handles, ready=started + 9
    )
    env = {"RAY_ADDRESS": "127.0.0.2:20000", "HELIOSTAT_RAY_PORT": 20000, "HELIOSTAT_HEAD_NODE": "it's here", "HELIOSTAT_HEAD_IP": "127.0.0.2",
           "HELIOSTAT_PORT_OFFSET": 0, "HELIOSTAT_STARTED": "2023-11-14T22:13:20+00:00", "HELIOSTAT_DASHBOARD_PORT": dashboard, "RAY_AUTH_MODE": "token",
           "RAY_AUTH_TOKEN_PATH": str(person.store.clusters / "lab" / "token")}  # fmt: skip
    connection = {"schema": 1, "address": "127.0.0.2:20000", "dashboard_port": dashboard, "ray": "2.60.0", "python": "3.11.7",
                  "client_port": 20001, "env": env}  # fmt: skip
    person.known[f"127.0.0.1:{dashboard}"] = "127.0.0.1:PORT"
    person.known[f'"dashboard_port": {dashboard},'] = '"dashboard_port": PORT,'
    person.known[f'_DASHBOARD_PORT": {dashboard},'] = '_DASHBOARD_PORT": PORT,'
    person.known[f"_DASHBOARD_PORT={dashboard}\n"] = "_DASHBOARD_PORT=PORT\n"
    said = {n: {"state": state if n == "w1" else "READY", "reason": "no heartbeat from its agent" if state == "LOST" else "", "launch": 1,
                "since": started + 9, "ip": "127.0.0.2", "host": "vm", "ports": {}} for n in nodes}  # fmt: skip
    event = {"at": 1_700_000_000.0, "kind": "note", "text": "requested on local"}
    return person.store.create(
        record,
        {
            "token": TOKEN, "agent.pyz": agent_archive(), "connection.json": json.dumps(connection), "spec.yaml": "",
            "events.jsonl": json.dumps(event) + "\n", "pulse.json": json.dumps({"idle_s": 75.2, "time_left_s": 5000.0, "at": time.time()}),
            "state.json": json.dumps({"schema": 1, "nodes": said, "job": None, "started": started, "ended": None}),
        },
    )  # fmt: skip


def silent(person: Person) -> None:
    live(person)


def lost(person: Person) -> None:
    live(person, state="LOST")


def rebooted(person: Person) -> None:
    """Nobody has looked since every process of it was killed."""
    live(person)
    for process in person.sleepers:
        process.kill()
        process.wait()


def damaged(person: Person) -> None:
    for name, text in (("torn", "{"), ("empty", "{}")):
        (person.store.clusters / name).mkdir(parents=True)
        (person.store.clusters / name / "record.json").write_text(text)
    (person.store.clusters / "stray").mkdir()
    (person.store.clusters / "stray" / "x").write_text("")


# stands for ssh: each host is a name, and its agent's answer is a file of that name
FAKE_SSH = """#!/bin/sh
for word; do [ "$word" = -G ] && exit 0; done
while [ "$1" != -- ]; do shift; done
[ -e "$(dirname "$0")/$2" ] || { echo "ssh: connect to host $2 port 22: Connection refused" >&2; exit 255; }
ANSWER=$PWD/$(dirname "$0")/$2 exec sh -c "$3"
"""


def machines(head: str = "zinc", **answers: dict[str, Any]) -> Callable[[Person], None]:
    """A file of the hosts `head` and copper, and what the agent answers on those that are there."""

    def make(person: Person) -> None:
        folder = person.place / "fake"
        folder.mkdir()
        for name, text in (("ssh", FAKE_SSH), ("python", '#!/bin/sh\ncat "$ANSWER"\n')):
            (folder / name).write_text(text)
            (folder / name).chmod(0o755)
        for name, answer in answers.items():
            (folder / name).write_text(json.dumps(answer) + "\n")
        hosts = [name for name in (head, "copper") if name in answers or name == "copper"]
        spec = {
            "on": "ssh",
            "hosts": hosts,
            "environment": {"venv": "~/v"},
            "ssh": {"python": str(folder / "python")},
        }
        (person.place / "heliostat.yaml").write_text(json.dumps(spec))

    return make


READY = {"ok": True, "done": "made", "ray": "2.60.0", "python": "3.11.2", "whole": True, "was": None}
FAR = {"PATH": "fake:/usr/bin:/bin"}


def configured(person: Person) -> None:
    """Somebody who has hosts in their ssh configuration."""
    (person.place.parent / ".ssh").mkdir()
    (person.place.parent / ".ssh" / "config").write_text("Host zinc copper\nHost *.edu\n")
    alone(person)


def with_kubeconfig(person: Person) -> None:
    (person.place.parent / ".kube").mkdir()
    text = "current-context: lab\ncontexts: [{name: lab, context: {cluster: c, user: u, namespace: ml}}]\n"
    (person.place.parent / ".kube" / "config").write_text(text)
    configured(person)


def alone(person: Person) -> None:
    cpus = os.cpu_count() or 1
    person.known[f"{cpus} CPU" + ("s" if cpus > 1 else "")] = "some CPUs"


# -- what is typed


@dataclass(frozen=True)
class Case:
    words: tuple[str, ...]
    world: Callable[[Person], Any] = bare
    env: dict[str, str] = field(default_factory=dict)


def case(line: str, world: Callable[[Person], Any] = bare, **env: str) -> Case:
    return Case(tuple(line.split()), world, env)


CASES: dict[str, Case] = {
    # help, and not knowing what to type
    "help": case("--help"),
    **{f"help-{verb}": case(f"{verb} --help") for verb in app.COMMANDS},
    "version": case("--version"),
    "nothing": case(""),
    "unknown-verb": case("stauts"),
    "unknown-verb-far": case("xyzzy"),
    "unknown-verb-json": case("stauts --json"),
    "unknown-option": case("up --nodse 2"),
    "unknown-option-far": case("ls --xyzzy"),
    "unknown-option-json": case("up --nodse 2 --json"),
    "unknown-option-before-the-verb": case("--nodes 2 up"),
    "option-without-value": case("up --nodes"),
    "option-of-the-wrong-kind": case("up --nodes many"),
    "option-of-the-wrong-kind-json": case("--json up --nodes many"),
    "too-many-words": case("ls a b"),
    "missing-words": case("stop lab", silent),
    "missing-words-json": case("stop lab --json", silent),
    "no-such-shell": case("completion csh"),
    **{f"help-plan-{what}": case(f"plan {what} --help") for what in ("rllib", "train")},
    "plan-nothing": case("plan"),
    "plan-something": case("plan tune lab"),
    "plan-no-strategy": case("plan rllib lab --strategy fast"),
    "plan-no-cluster": case("plan rllib"),
    "plan-no-such-cluster-json": case("plan train lab --json"),
    "plan-silent": case("plan train lab", silent),
    "advise-no-cluster": case("advise"),
    "advise-bad-time": case("advise lab --for soon"),
    "advise-silent": case("advise lab", silent),
    # scripts
    "run-nothing": case("run", scripts),
    "run-nothing-after-dashes": case("run --nodes 2 --", scripts),
    "run-missing-script": case("run tarin.py", scripts),
    "run-missing-script-far": case("run /nowhere/x.py", scripts),
    "run-folder": case("run folder.py", scripts),
    "run-not-python": case("run plain.txt", scripts),
    "run-no-such-command": case("run -- nosuchcommand --x"),
    "run-a-script-as-a-command": case("run -- train.py --lr 0.1", scripts),
    "run-a-script-as-a-command-elsewhere": case("run --on slurm -- train.py", scripts),
    "up-too-many": case("up --nodes 100000 --dry-run"),
    "up-too-many-for-a-computer": case("up --nodes 5000 --dry-run"),
    "up-too-many-in-groups": case("up --dry-run --on slurm", with_file("groups: {a: {nodes: 6000}, b: {nodes: 6000}}\n")),
    "scale-too-many": case("scale lab 10000", live),
    "scale-too-many-for-a-computer": case("scale lab 1000", live),
    "join-too-many-for-a-computer": case("join lab --nodes 1000", live),
    "scale-no-groups": case("scale lab 1 --group gpu", silent),
    "run-unknown-option": case("run --nodse 2 train.py", scripts),
    "run-slurm-misspelled": case("run --on slurm --nodez 4 --dry-run train.py", scripts),
    "run-slurm-misspelled-theirs": case("run --on slurm --partiton=gpu --dry-run train.py", scripts),
    "run-pbs-misspelled": case("run --on pbs --nodez=4 --dry-run train.py", scripts),
    "run-on-a-cluster-with-nodes": case("run --cluster lab --nodes 3 --time 1h train.py", lambda p: (scripts(p), live(p))),
    "run-on-a-cluster-with-a-file": case("run --cluster lab -f x.yaml train.py", lambda p: (scripts(p), live(p))),
    "run-on-a-cluster-unknown-option": case("run --cluster lab --nodez=3 train.py", lambda p: (scripts(p), live(p))),
    "join-on": case("join lab --on slurm --nodes 2", silent),
    "join-host-with-nodes": case("join lab --host tin --nodes 2", silent),
    "join-host-with-a-script": case("join lab --host tin train.py", lambda p: (scripts(p), live(p))),
    "unknown-variable": case("up --dry-run", HELIOSTAT_NODS="2"),
    "unknown-variable-far": case("up --dry-run", HELIOSTAT_XYZZY__A="2"),
    "run-scheduler-option": case("run --partition=gpu train.py", scripts),
    "up-wait-timeout-no-wait": case("up --no-wait --wait-timeout 30m", bare),
    "up-wait-timeout-unit": case("up --wait-timeout 30", bare),
    "up-wait-timeout-nothing": case("up --wait-timeout 0s", bare),
    "run-wait-timeout-detach": case("run --detach --wait-timeout 30m train.py", scripts),
    "run-wait-timeout-cluster": case("run --cluster lab --wait-timeout 30m train.py", scripts),
    "join-wait-timeout-detach": case("join lab --detach --wait-timeout 30m", silent),
    "join-wait-timeout-host": case("join lab --host tin --wait-timeout 30m", silent),
    "run-missing-script-json": case("run --json tarin.py", scripts),
    # what a cluster may be
    **{f"name-{i}": Case(("up", "--dry-run", "--name", name)) for i, name in enumerate(
        ["a b", "it's", 'a"b', "a;id", "$(id)", "a\\b", "a\nb", "-x", "ü", "a" * 41, ".", "..", ""])},
    "unknown-site": case("up --dry-run --on lcoal"),
    "unknown-site-json": case("up --dry-run --on mars --json"),
    "bad-size": case("up --dry-run --memory-per-node lots"),
    "bad-store": case("up --dry-run --object-store 1M"),
    "bad-time": case("up --dry-run --time soon"),
    "bad-idle": case("up --dry-run --idle-timeout 5x"),
    "bad-nodes": case("up --dry-run --nodes 0"),
    "bad-min-nodes": case("up --dry-run --nodes 2 --min-nodes 3"),
    "bad-port-offset": case("up --dry-run --port-offset 99999"),
    "bad-port-offset-variable": case("up --dry-run", USER_PORT_OFFSET="abc"),
    "bad-ports": case("up --dry-run", with_file("network: {ports: 80-90}\n")),
    "bad-labels": case("up --dry-run --labels nonsense"),
    "bad-label": case("up --dry-run --labels ray.io/x=1"),
    "bad-resource": case("up --dry-run", with_file("groups: {g: {resources: {half: 0.5}}}\n")),
    "two-environments": case("up --dry-run --venv a --conda b"),
    "container-without-image": case("up --dry-run --container x.sif"),
    "stage-without-venv": case("up --dry-run", with_file("environment: {stage: local}\n")),
    "binds-without-container": case("up --dry-run", with_file("environment: {binds: [/data]}\n")),
    "requirements-without-venv": case("up", with_file("environment: {requirements: r.txt}\n")),
    # environments
    "setup-no-hosts": case("setup --on ssh"),
    "setup-kubernetes": case("setup --on kubernetes"),
    "setup-no-requirements": case("setup", with_file("environment: {venv: v, requirements: r.txt}\n")),
    "setup-no-wheels": case("setup", with_file("environment: {venv: v, wheels: w}\n")),
    "wheels-without-venv": case("setup", with_file("environment: {wheels: w}\n")),
    "setup": case("setup", machines(copper=READY), **FAR),
    "setup-json": case("setup --json -q", machines(zinc=READY, copper={**READY, "done": "nothing"}), **FAR),
    "setup-partly": case("setup -q", machines(zinc=READY), **FAR),
    "setup-partly-json": case("setup --json -q", machines(zinc=READY), **FAR),
    "setup-refused": case("setup", machines(copper={"ok": False, "cause": "not_a_venv", "reason": "/h/v is not a virtual environment: it has no bin/python"}), **FAR),
    "setup-odd": case("setup -q", machines(zinc=READY, copper={**READY, "python": "3.9.1"}), **FAR),
    "setup-odd-json": case("setup -q --json", machines(zinc=READY, copper={**READY, "ray": "2.59.0"}), **FAR),
    "dry-setup": case("setup --dry-run", machines(zinc=READY), **FAR),
    "init": case("init", alone, PATH="/nowhere"),
    "init-hosts": case("init", configured, PATH="/nowhere"),
    "init-json": case("init --json --on ssh", configured, PATH="/nowhere"),
    "init-kubeconfig": case("init", with_kubeconfig, PATH="/nowhere"),
    "init-no-kubeconfig": case("init --on kubernetes", PATH="/nowhere"),
    "init-again": case("init", with_file("name: lab\n"), PATH="/nowhere"),
    "init-nothing-of-it": case("init --on slurm", PATH="/nowhere"),
    "init-unknown-site": case("init --on mars", PATH="/nowhere"),
    # files
    "file-missing": case("up --dry-run none.yaml"),
    "file-missing-by-flag": case("up --dry-run -f none.yaml"),
    "file-folder": case("up --dry-run folder.py", scripts),
    "file-twice": case("up a.yaml -f b.yaml"),
    "file-unknown-key": case("up --dry-run", with_file("name: a\nnodse: 2\n")),
    "file-unknown-key-nested": case("up --dry-run", with_file("idle:\n  timout: 60m\n")),
    "file-unknown-key-of-the-site": case("up --dry-run", with_file("local: {partition: gpu}\n")),
    "file-key-twice": case("up --dry-run", with_file("nodes: 1\nnodes: 2\n")),
    "file-not-yaml": case("up --dry-run", with_file("name: [\n")),
    "file-autoscale": case("up --dry-run", with_file("autoscale: {max: 3}\n")),
    "file-autoscale-slurm": case("up --dry-run --on slurm", with_file("groups: {gpu: {max: 3}}\n"), PATH="/nowhere"),
    "max-nodes": case("up --dry-run --max-nodes 4"),
    "max-nodes-few": case("up --dry-run --on kubernetes --min-nodes 5 --max-nodes 4"),
    "max-nodes-one": case("up --dry-run --max-nodes 1"),
    "file-hosts": case("up --dry-run", with_file("hosts: [a]\n")),
    "file-noise": case("up --dry-run", with_file("".join(f"k{i}: {i}\n" for i in range(10_000)))),
    # what would be done
    "dry-up": case("up --dry-run"),
    "dry-up-verbose": case("up --dry-run -v --nodes 3", with_file(LAB), HELIOSTAT_CPUS_PER_NODE="2"),
    "dry-up-json": case("up --dry-run --json --nodes 2"),
    "dry-up-groups": case("up --dry-run", with_file("groups: {gpu: {nodes: 1, gpus: 1, labels: {kind: gpu}}}\n")),
    "dry-up-tls": case("up --dry-run", with_file("security: {tls: true}\n")),
    "tls-without-token": case("up --dry-run", with_file("security: {auth: none, tls: true}\n")),
    "tls-on-a-platform": case("up --dry-run --on kubernetes", with_file("security: {tls: true}\n")),
    "dry-run": case("run --dry-run train.py --lr 0.1", scripts),
    "dry-run-verbose": case("-v run --dry-run train.py", with_file(LAB)),
    "dry-run-command": Case(("run", "--dry-run", "--name", "x", "--", "echo", "a b", "$HOME"), scripts),
    "dry-run-on-a-cluster": case("run --cluster lab --dry-run train.py", lambda p: (scripts(p), live(p))),
    "dry-run-on-a-cluster-json": case("run --json --cluster lab --dry-run -- echo hi", silent),
    "dry-run-on-no-cluster": case("run --cluster nosuch --dry-run -- true"),
    "nothing-json": case("--json"),
    "dry-submit": case("submit lab --dry-run --env A=b --working-dir . -- python train.py", silent),
    "dry-submit-json": case("submit lab --dry-run --json -- python train.py", silent),
    "dry-scale": case("scale lab 5 --dry-run", silent),
    "dry-scale-json": case("scale lab 5 --dry-run --json", silent),
    "dry-down": case("down lab --dry-run", silent),
    "dry-down-json": case("down lab --dry-run --json", silent),
    "dry-down-all": case("down --all --dry-run", silent),
    # nobody is there
    "ls-empty": case("ls"),
    "ls-empty-json": case("ls --json"),
    "history-empty": case("history"),
    "history-empty-json": case("history --json"),
    "history-empty-csv": case("history --csv -"),
    "status-empty": case("status"),
    "status-empty-json": case("status --json"),
    "down-nothing": case("down"),
    "down-all-nothing": case("down --all"),
    "down-all-nothing-json": case("down --all --json"),
    **{f"no-cluster-{verb}": case(f"{verb} nosuch {rest}") for verb, rest in (
        ("submit", "-- true"), ("jobs", ""), ("stop", "j1"), ("logs", ""), ("status", ""), ("scale", "2"), ("down", ""),
        ("restart", ""), ("dashboard", ""), ("env", ""), ("doctor", ""))},
    "no-cluster-run": case("run --cluster nosuch -- true"),
    "no-cluster-json": case("status nosuch --json"),
    "no-cluster-json-before-the-verb": case("--json status nosuch"),
    "no-cluster-quiet": case("-q status nosuch"),
    "no-cluster-among-others": case("status nosuch", silent),
    "no-cluster-down-json": case("down nosuch --json"),
    "no-cluster-down-two": case("down nosuch other"),
    "no-cluster-nasty": Case(("status", "../etc")),
    "no-cluster-long": Case(("status", "x" * 300), past),
    "submit-nothing": case("submit lab", silent),
    "submit-bad-env": case("submit lab --env A -- true", silent),
    "submit-bad-id": case("submit lab --job-id a/../b -- true", silent),
    "submit-two-directories": case("submit lab --working-dir . --no-working-dir -- true", silent),
    "dry-submit-no-working-dir": case("submit lab --dry-run --no-working-dir -- true", silent),
    "submit-no-folder": case("submit lab --working-dir none -- true", silent),
    "submit-no-runtime-env": case("submit lab --runtime-env none.yaml -- true", silent),
    "submit-bad-runtime-env": case("submit lab --runtime-env plain.txt -- true", lambda p: (scripts(p), live(p))),
    "scale-negative": case("scale lab -1", silent),
    "scale-words": case("scale lab many", silent),
    # what was
    "ls-all": case("ls --all", past),
    "ls-all-json": case("ls --all --json", past),
    "history": case("history", past),
    "history-json": case("history --json", past),
    "history-csv": case("history --csv -", past),
    "history-csv-file": case("history --csv out.csv", past),
    "history-prune": case("history --prune", past),
    "history-prune-size": case("history --prune --max-size 0", past),
    "history-prune-json": case("history --prune --older-than 30d --dry-run --json", past),
    "history-prune-bad-size": case("history --prune --max-size much", past),
    "history-prune-forgotten": case("history --older-than 30d", past),
    "history-prune-csv": case("history --prune --csv -", past),
    "history-csv-nowhere": case("history --csv none/out.csv", past),
    "logs-past": case("logs lab --events", past),
    "logs-past-json": case("logs lab --events --json", past),
    "logs-past-latest": case("logs lab", past),
    "logs-events-of-a-job": case("logs lab j1 --events", past),
    "logs-past-node": case("logs lab head", past),
    "logs-past-node-json": case("logs lab head --json", past),
    "logs-past-job-json": case("logs lab j1 --json", past),
    "logs-past-job": case("logs lab j1", past),
    "logs-past-run": case("logs run-x run", past),
    "logs-past-nobody": case("logs lab j9", past),
    "logs-past-nobody-json": case("logs lab j9 --json", past),
    "status-past": case("status lab", past),
    "down-past": case("down lab", past),
    "down-past-json": case("down lab --json", past),
    "restart-past": case("restart lab", past),
    # what is
    "ls": case("ls", silent),
    "ls-json": case("ls --json", silent),
    "status-silent": case("status", silent),
    "status-silent-json": case("status lab --json", silent),
    "status-lost": case("status lab", lost),
    "logs": case("logs lab", silent),
    "env": case("env lab", silent),
    "env-json": case("env lab --json", silent),
    "env-unset": case("env --unset"),
    "env-unset-json": case("env --unset --json"),
    "env-unset-cluster": case("env lab --unset", silent),
    "env-nothing": case("env"),
    "env-only": case("env", silent),
    "jobs-silent": case("jobs lab", silent),
    "submit-silent": case("submit lab -- true", silent),
    "up-again": case("up --name lab --nodes 2", silent),
    "up-again-json": case("up --name lab --nodes 2 --json", silent),
    "up-name-in-use": case("up --name lab --nodes 3", silent),
    "up-name-in-use-json": case("up --name lab --nodes 3 --json", silent),
    "run-name-in-use": case("run --name lab -- true", silent),
    "down": case("down lab", silent),
    "down-json": case("down lab --json", silent),
    "down-quiet": case("-q down lab", silent),
    "down-some": case("down lab nosuch", silent),
    # what is broken
    "ls-rebooted": case("ls", rebooted),
    "ls-all-rebooted": case("ls --all", rebooted),
    "ls-damaged": case("ls", damaged),
    "status-damaged": case("status torn", damaged),
    "status-damaged-json": case("status empty --json", damaged),
    "status-which": case("status", damaged),
    "down-damaged": case("down torn", damaged),
    "up-stray": case("up --name stray", damaged),
}  # fmt: skip


def test_what_ended_unseen_is_told_of_once(person: Person) -> None:
    rebooted(person)
    for words in (("history",), ("ls", "--all"), ("history",)):
        told = [line for line in person.types(*words).out.splitlines() if line.startswith("lab ")]
        assert len(told) == 1 and "its agent is gone" in told[0], words
    assert "no clusters" in person.types("ls").err


@pytest.mark.parametrize("name", CASES)
def test_what_is_said(person: Person, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    typed = CASES[name]
    for key, value in typed.env.items():
        monkeypatch.setenv(key, value)
    typed.world(person)
    said = person.types(*typed.words)
    assert "\x1b" not in said.out + said.err, "no colour where there is no terminal"
    assert TOKEN not in said.out + said.err and "Traceback" not in said.err
    if "--json" in typed.words and "--" not in typed.words:
        assert json.loads(said.out)["schema"] == 2
    if said.code:
        assert len(re.findall("^(error|because|saw|hint): ", said.err, re.M)) <= 4 or "down" in name
    check(name, person.shown(typed.words, said))


def test_every_snapshot_is_used() -> None:
    kept = {path.stem for path in SNAPSHOTS.glob("*.txt")}
    assert kept <= {*CASES, *RAY_CASES, "mistakes"}, "no longer said: remove them"


# -- with a head that answers


RAY_CASES: dict[str, tuple[str, ...]] = {
    "ray-status": ("status", "lab"),
    "ray-status-json": ("status", "lab", "--json"),
    "ray-jobs": ("jobs", "lab"),
    "ray-jobs-json": ("jobs", "lab", "--json"),
    "ray-submit": ("submit", "lab", "--job-id", "mine", "--", "python", "a b.py"),
    "ray-submit-json": ("submit", "lab", "--json", "--job-id", "mine", "--env", "A=b", "--", "true"),
    "ray-submit-wait": ("submit", "lab", "--wait", "--job-id", "j2", "--", "true"),
    "ray-submit-wait-json": ("submit", "lab", "--wait", "--json", "--job-id", "j2", "--", "true"),
    "ray-run-on-a-cluster": ("run", "--cluster", "lab", "--detach", "--json", "--", "true"),
    "ray-logs-job": ("logs", "lab", "j2"),
    "ray-logs-no-such-job": ("logs", "lab", "j9"),
    "ray-logs-no-such-node": ("logs", "lab", "w9"),
    "ray-stop": ("stop", "lab", "j1"),
    "ray-stop-ended": ("stop", "lab", "j2"),
    "ray-stop-json": ("stop", "lab", "j1", "--json"),
    "ray-stop-no-such-job": ("stop", "lab", "j9"),
    "ray-refuses": ("jobs", "lab"),
    "ray-no-token": ("jobs", "lab"),
    "ray-wrong-token": ("jobs", "lab"),
}


@pytest.mark.parametrize("name", RAY_CASES)
def test_what_is_said_with_a_head_that_answers(person: Person, name: str) -> None:
    ray = Ray()
    now = time.time()
    ray.jobs["j1"].update(start_time=(now - 100.5) * 1000)
    ray.jobs["j2"] = job(submission_id="j2", status="FAILED", driver_exit_code=3, start_time=(now - 5000.5) * 1000,
                         end_time=(now - 4000.5) * 1000, entrypoint="python " + "long " * 30)  # fmt: skip
    ray.log = b"first\nno end"
    gpu = {"name": "H200", "utilizationGpu": 7, "memoryUsed": 10, "memoryTotal": 143771, "temperatureC": 41}
    raylet = {
        "state": "ALIVE",
        "nodeManagerAddress": "127.0.0.2",
        "resourcesTotal": {"CPU": 2.0, "memory": 4e9, "GPU": 1.0},
    }
    ray.summary = {
        "summary": [{"gpus": [gpu] if n == "w1" else [], "raylet": {**raylet, "nodeId": NODE + n, "nodeName": n}} for n in ("head", "w1")],
        "nodeLogicalResources": {NODE + "head": "1.0/2.0 CPU\n0B/3.73GiB memory"},
    }  # fmt: skip
    with serve(ray) as port:
        folder = live(person, port)
        if name == "ray-refuses":
            ray.fail = [(500, "Traceback\nValueError: no room")]
        if name == "ray-no-token":
            folder.token.unlink()
        if name == "ray-wrong-token":
            folder.token.write_text("wrong")
        said = person.types(*RAY_CASES[name])
    text = re.sub(r"lab-\d{4}-\d{6}-[0-9a-f]{4}", "lab-JOB", person.shown(RAY_CASES[name], said))
    check(name, re.sub(r'"seconds": [\d.]+', '"seconds": SECONDS', text))


# -- the rest of the voice


@pytest.mark.parametrize(
    ("name", "about", "refused"),
    [
        ("nosuch", {}, True),
        ("sh", {}, False),
        ("python", {}, False),
        ("/no/such", {}, True),
        ("./nosuch.sh", {"on": "slurm"}, True),
        ("nosuch", {"on": "slurm"}, False),  # the nodes have a PATH of their own
        ("/no/such", {"on": "slurm"}, False),
        ("nosuch.py", {"on": "slurm"}, True),
        ("nosuch", {"environment": {"setup": ["module load x"]}}, False),
        ("nosuch", {"environment": {"env": {"PATH": "/opt/bin"}}}, False),
        ("nosuch", {"environment": {"conda": "x"}}, False),
    ],
)
def test_a_command_that_cannot_exist_is_refused_before_anything_starts(
    name: str, about: dict[str, Any], refused: bool
) -> None:
    spec = ClusterSpec.model_validate({"name": "x", **about})
    with pytest.raises(UsageError) if refused else contextlib.nullcontext() as caught:
        check_command([name], spec)
    assert not caught or caught.value.exit_code == 127


def test_a_script_that_may_not_be_read(person: Person, monkeypatch: pytest.MonkeyPatch) -> None:
    scripts(person)
    allowed = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: "train" not in str(path) and allowed(path, mode))
    said = person.types("run", "train.py")
    assert said.code == 2 and said.err.splitlines() == [
        "error: could not read `train.py`",
        "  cause: permission denied",
        "  hint: chmod u+r train.py",
    ]


def test_a_home_that_cannot_be_written(person: Person, monkeypatch: pytest.MonkeyPatch) -> None:
    (person.place / "file").write_text("")
    monkeypatch.setenv("HELIOSTAT_HOME", str(person.place / "file" / "home"))
    said = person.types("up")
    assert said.code == 1 and said.err.splitlines() == [
        f"error: could not write `{person.place}/file/home`",
        "  cause: Not a directory",
        "  hint: set HELIOSTAT_HOME to another directory",
    ]
    assert person.types("ls").code == 0, "looking works"


def test_a_defect_of_ours_is_no_traceback(person: Person, monkeypatch: pytest.MonkeyPatch) -> None:
    def break_it(store: Store) -> list[str]:
        raise RuntimeError("it's broken\nin two lines")

    monkeypatch.setattr(Store, "names", break_it)
    said = person.types("ls")
    (crash,) = person.home.glob("crash-*.txt")
    assert (
        said.code == 1
        and said.out == ""
        and person.plain(said.err).splitlines()
        == [
            "error: heliostat failed unexpectedly",
            "  cause: RuntimeError: it's broken in two lines",
            "  details: traceback: HOME/crash-TIME.txt",
            "  hint: repeat the command with --debug",
        ]
    )
    assert "in break_it" in crash.read_text() and crash.stat().st_mode & 0o077 == 0
    assert "Traceback" in person.types("ls", "--debug").err
    assert json.loads(person.types("ls", "--json").out)["error"]["message"] == "heliostat failed unexpectedly"


def test_debug_shows_where_an_error_comes_from(person: Person, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "Traceback" in person.types("status", "nosuch", "--debug").err
    monkeypatch.setenv("HELIOSTAT_DEBUG", "1")
    assert "Traceback" in person.types("status", "nosuch").err


def test_flags_of_a_script_are_not_ours(person: Person) -> None:
    scripts(person)
    for words in (["train.py", "--json", "-q"], ["--", "echo", "--json"], ["train.py", "--", "--json"]):
        said = person.types("run", "--dry-run", *words)
        assert said.code == 0 and said.out.startswith("# writes ")
        argv = json.loads(said.out.split("#   ", 1)[1].splitlines()[0])["command"]["argv"]
        assert argv[-len(words) + 1 :] == words[1:]


def test_the_schema_is_json(person: Person) -> None:
    said = person.types("schema")
    assert said.code == 0 and said.err == "" and json.loads(said.out)["title"] == "heliostat.yaml"


@pytest.mark.parametrize(
    ("shell", "syntax"),
    [("bash", ["bash", "-n"]), ("zsh", ["zsh", "-n"]), ("fish", ["fish", "--no-execute"])],
)
def test_completion_scripts(person: Person, shell: str, syntax: list[str]) -> None:
    said = person.types("completion", shell)
    assert said.code == 0 and said.err == "" and f"_HELIOSTAT_COMPLETE={shell}_complete" in said.out
    with contextlib.suppress(FileNotFoundError):  # not every machine has every shell
        assert subprocess.run(syntax, input=said.out, text=True, capture_output=True).stderr == ""
    assert json.loads(person.types("completion", shell, "--json").out)["script"] == said.out


# -- as a process


def command(
    *words: str, env: dict[str, str] | None = None, **options: Any
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "heliostat", *words], capture_output=True, text=True, timeout=120, env={**os.environ, **(env or {})},
        **options,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("line", "expected"), [("heliostat st", ["stop", "status"]), ("heliostat status l", ["lab", "lab2"])]
)
def test_completion_knows_verbs_and_clusters(
    person: Person, make_record: Callable[..., Record], line: str, expected: list[str]
) -> None:
    for name in ("lab", "lab2", "other"):
        person.store.create(make_record(name), {})
    words = line.split()
    env = {"_HELIOSTAT_COMPLETE": "bash_complete", "COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1)}
    done = command(env=env)
    assert [row.partition(",")[2] for row in done.stdout.split()] == expected and done.returncode == 0, done


def test_the_command_says_the_same_as_a_process(person: Person) -> None:
    for words in (("status", "nosuch"), ("--version",), ("up", "--dry-run", "--name", "a b", "--json")):
        done, said = command(*words), person.types(*words)
        assert (done.returncode, done.stdout, done.stderr) == (said.code, said.out, said.err)


def test_a_reader_that_leaves(person: Person) -> None:
    done = subprocess.run(
        ["bash", "-c", 'set -o pipefail; "$0" -m heliostat schema | head -c 1', sys.executable], capture_output=True, text=True
    )  # fmt: skip
    assert (done.stdout, done.stderr) == ("{", "") and done.returncode in (0, 141)


def at_a_terminal(*words: str, **env: str) -> str:
    """What a person sees who sits at a terminal."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "heliostat", *words], stdin=theirs, stdout=theirs, stderr=theirs, env={**os.environ, "TERM": "xterm", **env},
    )  # fmt: skip
    os.close(theirs)
    seen = b""
    with contextlib.suppress(OSError):  # the terminal is gone when the last who had it is
        while chunk := os.read(ours, 4096):
            seen += chunk
    os.close(ours)
    process.wait(60)
    return seen.decode().replace("\r\n", "\n")


def test_colour_at_a_terminal_unless_nobody_wants_it(person: Person) -> None:
    assert at_a_terminal("status", "nosuch").startswith("\x1b[31merror:\x1b[0m there is no cluster")
    assert "\x1b" not in at_a_terminal("status", "nosuch", NO_COLOR="1")
    assert "\x1b" not in at_a_terminal("status", "nosuch", "--json")
