"""Machines over ssh: the plan (words, scripts, config), what is said of a host that does not answer, who is asked."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from heliostat.backends.base import Handle, LaunchRequest, Plan
from heliostat.backends.ssh import backend as over_ssh
from heliostat.backends.ssh.backend import BACKEND, ssh_command
from heliostat.cluster import planner
from heliostat.cluster.manager import ClusterManager
from heliostat.common.errors import HeliostatError, UsageError
from heliostat.config.members import members
from heliostat.config.spec import ClusterSpec
from heliostat.config.tables import Host
from heliostat.remote.transport import Completed
from heliostat.state.records import NodeRecord, Record
from heliostat.state.states import NodeState
from heliostat.state.store import ClusterDirectory, Store

PLACE = Path(".heliostat/via/abc")


def plan(*machines: Any, **values: Any) -> tuple[LaunchRequest, Plan]:
    spec = ClusterSpec.model_validate({"on": "ssh", "name": "lab", "hosts": list(machines), **values})
    folder = ClusterDirectory(PLACE / (members(spec)[0].name))
    return planner.plan(folder, spec, cluster_id="abc")


@pytest.mark.parametrize(
    ("host", "words"),
    [
        ({}, ["ssh", "zinc"]),
        ({"host": "ann@zinc.lab.edu"}, ["ssh", "ann@zinc.lab.edu"]),
        ({"host": "2001:db8::7"}, ["ssh", "2001:db8::7"]),
        ({"port": 2222}, ["ssh", "-p", "2222", "zinc"]),
        ({"key": "~/.ssh/a key"}, ["ssh", "-i", "~/.ssh/a key", "zinc"]),
        ({"jump": "ann@gate:22,b"}, ["ssh", "-J", "ann@gate:22,b", "zinc"]),
        ({"user": "ann"}, ["ssh", "-l", "ann", "zinc"]),
        ({"user": "-x"}, ["ssh", "-l", "-x", "zinc"]),
        (
            {"port": 7, "key": "k", "jump": "j", "user": "u"},
            ["ssh", "-p", "7", "-i", "k", "-J", "j", "-l", "u", "zinc"],
        ),
        ({"host": "this machine"}, []),
        ({"host": "localhost"}, []),
    ],
)
def test_what_one_would_type(host: dict[str, Any], words: list[str]) -> None:
    assert list(ssh_command(Host(**{"host": "zinc", **host}))) == words


def test_one_script_a_node_in_a_folder_of_its_own() -> None:
    request, made = plan("gold", {"host": "ann@10.0.0.7", "port": 2222})
    assert request.folder == PLACE / "gold"
    assert [str(file.path) for file in made.files] == [
        f"{PLACE}/gold/start-gold.sh",
        f"{PLACE}/10.0.0.7/start-10.0.0.7.sh",
    ]
    assert {file.mode for file in made.files} == {0o700}
    assert [step.argv for step in made.steps] == [
        ("ssh", "gold", "bash", f"{PLACE}/gold/start-gold.sh"),
        ("ssh", "-p", "2222", "ann@10.0.0.7", "bash", f"{PLACE}/10.0.0.7/start-10.0.0.7.sh"),
    ]
    assert [step.nodes for step in made.steps] == [("gold",), ("10.0.0.7",)]


def test_what_each_agent_is_told() -> None:
    _, made = plan(
        {"host": "gold", "gpus": 2, "labels": {"kind": "big"}},
        {"host": "zinc", "leave_cpus": 3, "cpus": 5},
        network={"interface": "ib0"}, object_store="1G", head={"work": False},
    )  # fmt: skip
    gold, zinc = (step.config for step in made.steps)
    assert (gold["node"], gold["role"], gold["mark"]) == ("gold", "head", "abc-gold")
    assert (zinc["node"], zinc["role"], zinc["mark"]) == ("zinc", "worker", "abc-zinc")
    assert (gold["id"], zinc["id"]) == ("abc", "abc")
    assert zinc["folder"] == f"{PLACE}/zinc" and zinc["token_path"] == f"{PLACE}/zinc/token"
    assert gold["address"] == {"interface": "ib0", "default": "connection"}
    assert gold["resources"] == {
        "cpus": 0, "leave_cpus": 0, "gpus": 0, "memory": None, "object_store": 1 << 30, "custom": {},
        "labels": {"kind": "big"},
    }  # fmt: skip
    assert (zinc["resources"]["cpus"], zinc["resources"]["leave_cpus"]) == (5, 3)


def test_each_has_its_environment() -> None:
    _, made = plan(
        "gold",
        {"host": "zinc", "environment": {"conda": "ray", "env": {"B": "zinc"}}, "env": {"C": "host"}},
        {"host": "tin", "env": {"A": "host"}},
        environment={"venv": "/venv", "setup": ["module load cuda"], "env": {"A": "all"}},
    )
    gold, zinc, tin = (file.text for file in made.files)
    for text in (gold, tin):
        assert "source /venv/bin/activate" in text and "module load cuda" in text and "conda" not in text
    assert "conda activate ray" in zinc and "/venv" not in zinc and "module load" not in zinc
    assert all("agent.pyz node" in text for text in (gold, zinc, tin))
    told = [step.config["env"] for step in made.steps]
    assert told == [{"A": "all"}, {"A": "all", "B": "zinc", "C": "host"}, {"A": "host"}]


def test_a_home_is_that_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/of-the-client")
    _, made = plan("gold", environment={"venv": "~/my venvs/ray/"})
    assert "source ~/'my venvs/ray/bin/activate' || exit 1\n" in made.files[0].text


def test_the_python_of_hosts_whose_environment_names_none() -> None:
    _, made = plan(
        "gold",
        {"host": "zinc", "environment": {"venv": "/v"}},
        backend_tables={"ssh": {"python": "/opt/my python"}},
    )
    gold, zinc = (file.text for file in made.files)
    assert "exec '/opt/my python' agent.pyz node" in gold and "exec python3 agent.pyz node" in zinc


def test_what_the_site_cannot_do() -> None:
    with pytest.raises(UsageError, match="no `hosts`") as caught:
        plan()
    assert "hosts: [" in caught.value.hint


# -- asking


class Far:
    """A machine that gives these answers, or cannot be reached."""

    def __init__(self, *answers: str | HeliostatError) -> None:
        self.target, self.answers, self.asked = "zinc", list(answers), 0

    def run(self, argv: Sequence[str], *, input: bytes = b"", timeout: float) -> Completed:
        self.asked += 1
        answer = self.answers.pop(0)
        if isinstance(answer, HeliostatError):
            raise answer
        return Completed(tuple(argv), 0, answer, "")


DOWN = HeliostatError("could not reach `zinc` over ssh", cause="Connection refused")


@pytest.fixture
def machines(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Far]]:
    def make(**found: Far) -> dict[str, Far]:
        monkeypatch.setattr(over_ssh, "connect", lambda words: found[words[-1]])
        return found

    return make


def handle(node: str, role: str = "worker", **more: Any) -> Handle:
    detail = {"ssh": ["ssh", node], "folder": f"{PLACE}/{node}", "mark": f"abc-{node}", "role": role}
    who = {"pid": 7, "start": "100", "temp": None, "executable": "python3"}
    return Handle(f"{node}.7.100", (node,), {**detail, **who, **more})


@pytest.mark.parametrize(
    ("answer", "state"),
    [
        ('100\n{"state": "READY"}', NodeState.ALLOCATED),
        ("100\n", NodeState.ALLOCATED),
        ('200\n{"state": "GONE"}', NodeState.GONE),  # the number was given to another process
        ("gone\n", NodeState.GONE),
        ("100\nno json", NodeState.UNKNOWN),
        (DOWN, NodeState.UNKNOWN),
    ],
)
def test_an_answer(machines: Any, answer: Any, state: NodeState) -> None:
    machines(zinc=Far(answer))
    seen = BACKEND.observe([handle("zinc", "head")], None)["zinc.7.100"]  # type: ignore[arg-type]
    assert seen.state is state and (state is not NodeState.UNKNOWN or seen.reason)
    assert seen.report == (json.loads(answer.partition("\n")[2]) if "{" in str(answer) else {})


def test_whoever_is_silent_is_unknown(machines: Any) -> None:
    machines(gold=Far(DOWN), zinc=Far("100\n"))
    seen = BACKEND.observe([handle("gold", "head"), handle("zinc")], None)  # type: ignore[arg-type]
    assert [one.state for one in seen.values()] == [NodeState.UNKNOWN, NodeState.ALLOCATED]
    assert "Connection refused" in seen["gold.7.100"].reason


@pytest.mark.parametrize("zinc, asked", [("READY", 0), ("STARTING", 0), ("LOST", 1), (None, 1)])
def test_a_worker_that_the_head_hears_is_not_asked(
    machines: Any, tmp_path: Path, zinc: str | None, asked: int
) -> None:
    """And one that is silent to us too is the head's to judge."""
    found = machines(gold=Far(DOWN), zinc=Far(DOWN))
    life = ClusterManager(Store(tmp_path))
    life.access._mirrors["abc"] = SimpleNamespace(head=(NodeState.ALLOCATED, ""))  # type: ignore[assignment]
    nodes = {name: NodeRecord(name, "worker", launch=1) for name in ("gold", "zinc")}
    record = Record("lab", "abc", "ssh", "up", 0.0, {}, nodes=nodes)
    live = {"nodes": {"gold": {"state": "READY", "launch": 1}}}
    if zinc:
        live["nodes"]["zinc"] = {"state": zinc, "launch": 1}
    handles = [handle("gold", "head"), handle("zinc")]
    seen = life.observer._ask_backend(ClusterDirectory(tmp_path), record, handles, live)
    assert {one.state for one in seen.values()} == {NodeState.ALLOCATED}
    assert (found["gold"].asked, found["zinc"].asked) == (0, asked)


def test_one_that_never_started_is_not_asked_again(machines: Any) -> None:
    found = machines(zinc=Far())
    never = handle("zinc", refused="Connection refused; is it on?")
    (seen,) = BACKEND.observe([never], None).values()  # type: ignore[arg-type]
    assert seen.state is NodeState.FAILED and seen.reason == "Connection refused; is it on?"
    BACKEND.cancel([never], None)  # type: ignore[arg-type]
    assert found["zinc"].asked == 0


def test_whoever_cannot_be_stopped_is_named(machines: Any) -> None:
    machines(gold=Far('{"ok": true}'), zinc=Far(DOWN), tin=Far('{"ok": false, "left": [7]}'))
    with pytest.raises(HeliostatError, match="could not be stopped") as caught:
        BACKEND.cancel([handle("gold", "head"), handle("zinc"), handle("tin")], None)  # type: ignore[arg-type]
    assert caught.value.cause == "zinc: Connection refused; tin: still running: [7]"


def test_an_agent_that_nobody_knows_of(machines: Any) -> None:
    words = {"pid": 7, "start": "100", "temp": "/tmp/hs-1", "executable": "/v/bin/python3"}
    machines(gold=Far(json.dumps(words)), zinc=Far("{}"), tin=Far(DOWN), lead=Far(""))
    spec = ClusterSpec.model_validate({"on": "ssh", "name": "lab", "hosts": ["gold", "zinc", "tin", "lead"]})
    found = BACKEND.find_orphans("abc", spec, None)  # type: ignore[arg-type]
    assert [one.native_id for one in found] == ["gold.7.100", "zinc.none"]
    assert found[0].detail == {
        **words, "ssh": ["ssh", "gold"], "folder": f"{PLACE}/gold", "mark": "abc-gold", "role": "head",
    }  # fmt: skip
    assert "refused" in found[1].detail, "its folder is there, and nothing runs"
