"""The client on Windows and macOS: nothing of it needs what only Linux has. The nodes' own part, the agent, may."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import heliostat
from contract.worlds import FAKE_SSH, STUB, put_on_path
from heliostat.state import locks, store
from heliostat.state.store import Store

WINDOWS = Path(__file__).parent / "windows.py"
PACKAGE = Path(heliostat.__file__).parent
MODULES = [
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")
    for path in sorted(PACKAGE.rglob("*.py"))
    if path.relative_to(PACKAGE).parts[0] not in ("agent", "__main__.py")
]
Client = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def client(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Client:
    """`heliostat ARGS…` without what only Unix has, in a folder of its own; `ssh` leads to machines below it."""
    for name, value in (
        ("CONTRACT_WORLD", str(tmp_path)),
        ("CONTRACT_STUB", str(STUB)),
        ("PATH", os.environ["PATH"]),
        ("PYTHONPATH", str(PACKAGE.parent)),
    ):
        monkeypatch.setenv(name, value)
    put_on_path(tmp_path, FAKE_SSH, "ssh")
    lab = {"on": "ssh", "name": "lab", "hosts": ["gold", "ann@zinc"], "ssh": {"python": sys.executable}}
    (tmp_path / "lab.yaml").write_text(json.dumps(lab))

    def run(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, str(WINDOWS), *words], cwd=tmp_path, env={**os.environ, **env},
            capture_output=True, text=True, errors="replace", timeout=120,
        )  # fmt: skip

    return run


def ok(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("module", ["fcntl", "pwd", "heliostat.agent.main"])
def test_what_is_taken_away_is_gone(client: Client, module: str) -> None:
    done = client("import", module)
    assert done.returncode and f"No module named '{module.rpartition('.main')[0] or module}" in done.stderr


def test_every_file_of_the_client_can_be_imported(client: Client) -> None:
    assert ok(client("import", *MODULES)) == f"imported {len(MODULES)}\n"


def test_before_there_is_anything(client: Client, home: Path) -> None:
    for reserved_short_options in ("utf-8", "cp437", "ascii"):  # what a file or a pipe takes there
        said = ok(client("--help", PYTHONIOENCODING=reserved_short_options)) + ok(
            client("up", "--help", PYTHONIOENCODING=reserved_short_options)
        )
        assert "start a cluster" in said
    assert json.loads(ok(client("ls", "--json")))["clusters"] == []


def test_a_plan_has_no_path_of_windows(client: Client) -> None:
    said = ok(client("up", "lab.yaml", "--dry-run"))
    assert "\\" not in said and ".heliostat/via/0000000000000000/zinc/start-zinc.sh" in said
    said = ok(client("up", "--on", "ssh", "-f", "lab.yaml", "--dry-run", "--json"))
    assert "\\\\" not in said and len(json.loads(said)["steps"]) == 2


@pytest.mark.needs_linux  # the machines of the fake
def test_a_day_over_ssh(client: Client, tmp_path: Path) -> None:
    try:
        assert ok(client("up", "lab.yaml")) == "127.0.0.2:6379\n"
        said = json.loads(ok(client("status", "lab", "--json")))
        assert {node["name"]: node["state"] for node in said["nodes"]} == {"gold": "READY", "zinc": "READY"}
        assert ok(client("exec", "lab", "--", "sh", "-c", "echo $HOME")).splitlines() == [
            f"gold | {tmp_path}/hosts/gold",
            f"zinc | {tmp_path}/hosts/zinc",
        ]
        assert "READY" in ok(client("logs", "lab", "--events"))
        ok(client("scale", "lab", "0"))
        ok(client("scale", "lab", "1"))
        assert "ok    node zinc: ready" in client("doctor", "lab").stdout
    finally:
        ok(client("down", "lab", "--now"))
    assert json.loads(ok(client("ls", "--json")))["clusters"] == []
    assert not list(tmp_path.glob("hosts/*/.heliostat/via/*"))
    calls = (tmp_path / "calls").read_text()
    assert "Control" not in calls, "ssh cannot share a connection there"
    assert "crash" not in " ".join(os.listdir(os.environ["HELIOSTAT_HOME"]))


def test_doctor(client: Client) -> None:
    said = client("doctor", "lab.yaml").stdout
    assert "a check failed" not in said and "gold: Ray 2.60.0" in said and "ok    ssh: " in said


# -- nobody can say when a process started


@pytest.fixture
def nobody_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (store, locks):
        monkeypatch.setattr(module, "process_start", lambda pid: None)


def test_a_draft_of_a_process_of_which_nothing_is_known_stays(tmp_path: Path, nobody_knows: None) -> None:
    kept = Store(tmp_path)
    kept.prepare()
    draft = kept.clusters / f".lab.abcd.{os.getpid()}.None.{store.socket.gethostname()}"
    draft.mkdir()
    kept._sweep()
    assert draft.exists()


def test_a_lock_is_judged_by_its_age(
    tmp_path: Path, nobody_knows: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = store.ClusterDirectory(tmp_path)
    with folder.lock():
        with pytest.raises(heliostat.HeliostatError, match="another command"), folder.lock(0):
            pass
        monkeypatch.setattr(locks, "LOCK_S", -1.0)
        with folder.lock():
            pass
