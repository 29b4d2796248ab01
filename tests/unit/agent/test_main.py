"""The agent as it is on a node: one zip, JSON in, one JSON answer out on every path."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from heliostat.agent import processes
from heliostat.cluster.planner import agent_archive


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., subprocess.CompletedProcess[bytes]]:
    path = tmp_path_factory.mktemp("a b") / "agent.pyz"
    path.write_bytes(agent_archive())

    def run(
        *words: str, given: bytes | dict[str, Any] = b"", **env: str
    ) -> subprocess.CompletedProcess[bytes]:
        data = given if isinstance(given, bytes) else json.dumps(given).encode()
        # -I: nothing of ours can be imported but what the zip holds
        argv = [sys.executable, "-I", str(path), *words]
        return subprocess.run(
            argv, input=data, capture_output=True, timeout=120, env={**os.environ, **env}, cwd="/"
        )

    return run


def answer(done: subprocess.CompletedProcess[bytes]) -> dict[str, Any]:
    lines = done.stdout.splitlines()
    assert len(lines) == 1, done
    return dict(json.loads(lines[0]))


def test_the_archive_is_the_same_every_time_and_small() -> None:
    assert agent_archive() == agent_archive() and len(agent_archive()) < 100_000


@pytest.mark.parametrize(
    ("words", "given", "says"),
    [
        ([], b"{}", "usage: one of the subcommands probe, node, stop"),
        (["dance"], b"{}", "usage: one of the subcommands probe, node, stop"),
        (["node", "extra"], b"{}", "usage: one of the subcommands probe, node, stop"),
        (["node"], b"", "nothing on standard input"),
        (["node"], b" \n ", "nothing on standard input"),
        (["stop"], b"", "nothing on standard input"),
        (["probe"], b"", "nothing on standard input"),
        (["node"], b"{", "JSONDecodeError"),
        (["node"], b"\xff\xfe", "DecodeError"),
        (["node"], b"[]", "TypeError"),
        (["node"], b"{}", "KeyError"),
        (["stop"], b"{}", "KeyError"),
        (["stop"], b'{"nodes": [{}]}', "KeyError"),
        (["setup"], b"{}", "KeyError"),
    ],
)
def test_wrong_input_is_answered_in_json(agent, words: list[str], given: bytes, says: str) -> None:
    done = agent(*words, given=given)
    found = answer(done)
    assert found["ok"] is False and says in found["error"] and done.returncode == 1
    assert b"Traceback" in done.stderr, "the whole story goes to the log"


def test_probe(agent) -> None:
    done = agent("probe", given={})
    found = answer(done)
    assert found["ok"] and done.returncode == 0
    assert {
        "host",
        "python",
        "ray",
        "cpus",
        "memory",
        "gpus",
        "shm",
        "disk",
        "limits",
        "clock",
        "interfaces",
    } <= set(found)


# -- a node that cannot start


def config(tmp_path: Path, **more: Any) -> dict[str, Any]:
    folder = tmp_path / "lab"
    (folder / "logs").mkdir(parents=True)
    (folder / "token").write_text("secret")
    return {
        "schema": 1, "cluster": "lab", "mark": f"test-{os.getpid()}-head", "id": "1", "launch": 1, "folder": str(folder),
        "auth": "token", "token_path": str(folder / "token"), "ray": None, "env": {}, "ports": {"window": None, "offset": 0},
        "min_nodes": 1, "command": None, "idle": {}, "time_limit_s": None, "node": "head", "role": "head",
        "address": {"interface": None, "default": "loopback"}, "share": [0, 1],
        "resources": {"cpus": 1, "gpus": 0, "memory": None, "object_store": None, "custom": {}, "labels": {}}, **more,
    }  # fmt: skip


@pytest.mark.parametrize("role", ["head", "worker"])
@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"ray": "0.0.1"}, "0.0.1 is asked for|no Ray in"),
        (
            {"address": {"interface": "no-such-0", "default": "loopback"}},
            "no interface that is up matches `no-such-0`",
        ),
        ({"token_path": "/nowhere/token"}, "No such file"),
    ],
)
def test_a_node_that_cannot_start_says_why_and_leaves_nothing(
    agent, tmp_path: Path, role: str, more: dict[str, Any], reason: str
) -> None:
    said = config(tmp_path, role=role, **more)
    done = agent("node", given=said, TMPDIR="/tmp")
    found = answer(done)
    assert (found["ok"], found["state"], done.returncode) == (False, "FAILED", 1)
    assert any(words in found["reason"] for words in reason.split("|")), found
    assert processes.marked(said["mark"]) == []
    words = json.loads((Path(said["folder"]) / "nodes" / "head.json").read_text())
    assert words["state"] == "FAILED" and words["reason"] == found["reason"] and words["launch"] == 1
    assert not words.get("temp") or not os.path.exists(words["temp"])
    if role == "head":
        state = json.loads((Path(said["folder"]) / "state.json").read_text())
        assert state["nodes"]["head"]["state"] == "FAILED" and state["ended"]["reason"]


@pytest.mark.needs_openssl
def test_a_script_by_hand_leaves_neither_token_nor_keys(agent, tmp_path: Path) -> None:
    said = config(tmp_path, ray="0.0.1", standalone=True, tls=True)
    folder = Path(said["folder"])
    (folder / "token").unlink()
    assert answer(agent("node", given=said, TMPDIR="/tmp"))["state"] == "FAILED"
    assert not (folder / "token").exists() and not (folder / "tls").exists()


# -- stopping


def sleeper(mark: str) -> tuple[subprocess.Popen[bytes], dict[str, Any]]:
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(600)"
    env = {**os.environ, processes.MARK: mark}
    child = subprocess.Popen([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE)
    assert child.stdout
    child.stdout.readline()
    return child, {"pid": child.pid, "start": processes.start_time(child.pid), "mark": mark}


@pytest.mark.parametrize("how", [{"now": True}, {"seconds": 0.2}])
def test_stop_ends_also_one_that_will_not(agent, how: dict[str, Any]) -> None:
    child, node = sleeper(f"test-{os.getpid()}-stop")
    try:
        found = answer(agent("stop", given={"nodes": [node], **how}))
        assert found == {"ok": True, "left": [], "killed": [child.pid]}
        assert child.wait(60) == -9
    finally:
        child.kill()
        child.communicate()
    assert answer(agent("stop", given={"nodes": [node]}))["ok"], "a second time is as good"


def test_stop_spares_another_process_that_has_the_pid_now(agent) -> None:
    child, node = sleeper(f"test-{os.getpid()}-other")
    try:
        request = {"nodes": [{**node, "start": "1", "mark": "another"}], "now": True}
        assert answer(agent("stop", given=request))["ok"] and child.poll() is None
    finally:
        child.kill()
        child.communicate()


def test_stop_removes_only_folders_that_an_agent_made(agent, tmp_path: Path) -> None:
    ours, theirs = tmp_path / "hs-12345678", tmp_path / "home"
    for folder in (ours, theirs):
        folder.mkdir()
        (folder / "x").write_text("")
    node = {"pid": 2**22 + 1, "start": "1", "mark": "none"}
    temps = [str(ours), str(theirs), str(tmp_path / "none"), None, ""]
    assert answer(agent("stop", given={"nodes": [{**node, "temp": temp} for temp in temps]}))["ok"]
    assert not ours.exists() and theirs.exists()
