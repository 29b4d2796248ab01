"""Ctrl-C in each phase of `up` and `run`, the other signals, and a command that is killed in the middle."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from real.faults import Command, Node, alive, commands, fake_ray, four_lines, past, refused, tell_tale
from shared import PATIENCE_S, document, heliostat, until

pytestmark = pytest.mark.needs_linux

Start = Callable[..., Command]


@pytest.fixture(scope="module")
def venv(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Ray as far as our agent can tell; it starts at once, so that every phase can be met where the test wants it."""
    return str(fake_ray(tmp_path_factory.mktemp("venv") / "v"))


@pytest.fixture(autouse=True)
def tidy(home: Path, no_leaks: None) -> Iterator[None]:
    yield
    tell_tale(home)


@pytest.fixture
def start(tidy: None) -> Iterator[Start]:
    with commands() as start:
        yield start


def folder_of(home: Path) -> Path:
    return home / "clusters" / "lab"


def node_state(home: Path, node: str = "head") -> str:
    """What the node's agent says of itself, or nothing."""
    with contextlib.suppress(OSError, ValueError):
        return str(json.loads((folder_of(home) / "nodes" / f"{node}.json").read_text())["state"])
    return ""


def run_state(home: Path) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError):
        return dict(json.loads((folder_of(home) / "state.json").read_text())["job"] or {})
    return {}


def released(home: Path, done: subprocess.CompletedProcess[str]) -> None:
    """The command says that it was interrupted, and the history says the same."""
    said = refused(done, 130) if not done.stdout else four_lines(done.stderr)
    assert done.returncode == 130 and said["error"] == "interrupted; `lab` is released"
    assert not folder_of(home).exists()
    (record,) = past(home)
    assert record["reason"].startswith("interrupted") and record["ended"]
    assert {node["state"] for node in record["nodes"].values()} <= {"GONE", "FAILED"}


VERBS = {"up": ["up", "--name", "lab"], "run": ["run", "--name", "lab"]}
COMMAND = {"up": [], "run": ["--", "true"]}


# --- before anything, and while it starts


@pytest.mark.parametrize("verb", VERBS)
def test_before_anything_is_launched(home: Path, tmp_path: Path, start: Start, verb: str) -> None:
    os.mkfifo(tmp_path / "heliostat.yaml")
    one = start(*VERBS[verb], "-f", tmp_path / "heliostat.yaml", *COMMAND[verb])
    gate: list[int] = []

    def reads() -> bool:
        with contextlib.suppress(OSError):
            gate.append(os.open(tmp_path / "heliostat.yaml", os.O_WRONLY | os.O_NONBLOCK))
        return bool(gate)

    until(reads, "a command that reads its file")
    one.send(signal.SIGINT)
    assert refused(one.end(), 130)["error"] == "interrupted"
    os.close(gate[0])
    assert not (home / "clusters").exists()


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_while_the_setup_lines_run(home: Path, tmp_path: Path, start: Start, verb: str, number: int) -> None:
    """Our agent is not there yet, and what a line has started must go all the same."""
    line = f"sleep 1000 & (setsid sleep 1001; true) & echo $! > {tmp_path}/pid; sleep 1002"
    one = start(*VERBS[verb], "--setup", line, *COMMAND[verb])
    until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text(), "the set-up line")
    one.send(number)
    released(home, one.end())


@pytest.mark.parametrize("verb", VERBS)
def test_while_ray_starts(home: Path, tmp_path: Path, start: Start, venv: str, verb: str) -> None:
    one = start(*VERBS[verb], "--nodes", 2, "--venv", venv, *COMMAND[verb], GATE=str(tmp_path / "never"))
    until(lambda: node_state(home) == "STARTING" and (folder_of(home) / "head.json").exists(), "a start")
    node = Node(home, "lab", "head")
    until(lambda: any("ray_start.py start" in line for line in node.processes().values()), "`ray start`")
    one.send(signal.SIGINT)
    released(home, one.end())
    node.gone()
    assert not [path for path in home.rglob("run.out")]


def test_the_second_up_leaves_the_cluster_to_the_first(
    home: Path, tmp_path: Path, start: Start, venv: str
) -> None:
    words = [*VERBS["up"], "--venv", venv]
    first = start(*words, GATE=str(tmp_path / "gate"))
    until(lambda: node_state(home) == "STARTING", "a start")
    second = start(*words, program=touching("readiness.ReadinessWaiter.wait", tmp_path / "waits"))
    until((tmp_path / "waits").exists, "the second")
    second.send(signal.SIGINT)
    said = refused(second.end(), 130)
    assert said["error"] == "interrupted while waiting for `lab`" and said["hint"] == "heliostat down lab"
    (tmp_path / "gate").touch()
    assert first.end().returncode == 0
    heliostat("down", "lab")


def touching(step: str, place: Path) -> list[str]:
    """The command, but that it makes this file when it comes to this step."""
    text = f"""
import pathlib
import heliostat.cluster.{step.partition(".")[0]}
plain = heliostat.cluster.{step}
def step(*words, **more):
    pathlib.Path({str(place)!r}).touch()
    return plain(*words, **more)
heliostat.cluster.{step} = step
from heliostat.cli import main
main()
"""
    return [sys.executable, "-c", text]


# --- while the script runs

CAREFUL = """
import pathlib, signal, sys, time

place = pathlib.Path(sys.argv[1])


def save(number, frame):
    print("saving", flush=True)
    time.sleep(0.5)
    (place / "saved").write_text("all of it")
    print("saved")
    sys.exit(0)


signal.signal(signal.SIGTERM, save)
(place / "runs").touch()
time.sleep(1000)
"""

STUBBORN = """
import pathlib, signal, sys, time

place = pathlib.Path(sys.argv[1])
signal.signal(signal.SIGTERM, lambda number, frame: (place / "told").touch())
signal.signal(signal.SIGHUP, signal.SIG_IGN)
(place / "runs").touch()
while True:
    time.sleep(1000)
"""


def runs(start: Start, tmp_path: Path, venv: str, text: str, *options: str, **more: Any) -> Command:
    (tmp_path / "script.py").write_text(text)
    one = start(*VERBS["run"], "--venv", venv, *options, tmp_path / "script.py", tmp_path, **more)
    until((tmp_path / "runs").exists, "the script")
    return one


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_script_has_time_to_save(
    home: Path, tmp_path: Path, start: Start, venv: str, number: int
) -> None:
    one = runs(start, tmp_path, venv, CAREFUL)
    node = Node(home, "lab", "head")
    one.send(number)
    done = one.end()
    released(home, done)
    assert done.stdout == "saving\nsaved\n"
    assert (tmp_path / "saved").read_text() == "all of it"
    node.gone()


@pytest.mark.parametrize("how", ["when the script was told", "when it is heard", "three times"])
def test_twice_ends_a_script_that_will_not(
    home: Path, tmp_path: Path, start: Start, venv: str, how: str
) -> None:
    one = runs(start, tmp_path, venv, STUBBORN)
    node = Node(home, "lab", "head")
    one.send(signal.SIGINT)
    if how == "when it is heard":
        assert one.process.stderr
        until(lambda: "interrupted" in one.process.stderr.readline(), "a word")
    else:
        until((tmp_path / "told").exists, "SIGTERM to the script")
    one.send(signal.SIGINT)
    if how == "three times":
        until((tmp_path / "told").exists, "SIGTERM to the script")
        one.send(signal.SIGINT)
    done = one.end()
    released(home, done)
    node.gone()


def test_a_terminal_that_is_closed(home: Path, tmp_path: Path, venv: str) -> None:
    """The kernel says SIGHUP, and whatever we say from then on is an error: the machines are given back all the same."""
    (tmp_path / "script.py").write_text(CAREFUL)
    child, master = pty.fork()
    if child == 0:
        words = ["run", "--name", "lab", "--venv", venv, str(tmp_path / "script.py"), str(tmp_path)]
        os.execv(sys.executable, [sys.executable, "-m", "heliostat", *words])
    try:
        until((tmp_path / "runs").exists, "the script")
        node = Node(home, "lab", "head")
        os.close(master)
        until(lambda: os.waitpid(child, os.WNOHANG)[0], "the end of the command")
    finally:
        with contextlib.suppress(OSError):
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    node.gone()
    assert (tmp_path / "saved").read_text() == "all of it"
    (record,) = past(home)
    assert record["reason"] == "interrupted"


def test_a_reader_that_leaves(home: Path, tmp_path: Path, start: Start, venv: str) -> None:
    """`heliostat run … | head -1`: nobody reads on, so the script is told to end, as by any other pipe."""
    text = CAREFUL.replace(
        "time.sleep(1000)", "while True:\n    print('more', flush=True)\n    time.sleep(0.05)"
    )
    one = runs(start, tmp_path, venv, text)
    assert one.process.stdout and one.process.stderr
    assert one.process.stdout.readline() == "more\n"
    one.process.stdout.close()
    assert one.process.wait(PATIENCE_S) == 141
    assert "error:" not in one.process.stderr.read()
    assert (tmp_path / "saved").exists()
    assert past(home)[0]["reason"] == "the reader of its output has ended"


def test_nohup_is_honoured(home: Path, tmp_path: Path, start: Start, venv: str) -> None:
    (tmp_path / "script.py").write_text(
        "import pathlib, sys, time\nplace = pathlib.Path(sys.argv[1])\n(place / 'runs').touch()\n"
        "while not (place / 'gate').exists():\n    time.sleep(0.02)\nsys.exit(7)"
    )
    one = runs(
        start,
        tmp_path,
        venv,
        (tmp_path / "script.py").read_text(),
        program=["nohup", sys.executable, "-m", "heliostat"],
    )
    one.send(signal.SIGHUP)
    (tmp_path / "gate").touch()
    assert one.end().returncode == 7


# --- while it releases


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_while_it_releases(home: Path, tmp_path: Path, start: Start, venv: str, number: int) -> None:
    """The supervisor is held, so that the release hangs: Ctrl-C must end it, and the script's work is done."""
    text = (
        "import pathlib, sys, time\nplace = pathlib.Path(sys.argv[1])\n(place / 'runs').touch()\n"
        "while not (place / 'gate').exists():\n    time.sleep(0.02)\nprint('result')"
    )
    one = runs(
        start, tmp_path, venv, text, program=touching("terminate.Terminator.release", tmp_path / "releases")
    )
    node = Node(home, "lab", "head")
    os.kill(node.supervisor, signal.SIGSTOP)
    (tmp_path / "gate").touch()
    until(
        lambda: run_state(home).get("exit_code") == 0 and node_state(home) == "GONE", "the agent's last word"
    )
    until((tmp_path / "releases").exists, "the release")
    one.send(number)
    done = one.end()
    assert done.stdout == "result\n"
    released(home, done)
    assert past(home)[0]["exit_code"] == 0
    node.gone()


# --- a command that is killed -9


def test_run_goes_on_without_its_command(home: Path, tmp_path: Path, start: Start, venv: str) -> None:
    """The head runs the script, not the command: it finishes, releases, and whoever looks next finds it told."""
    text = (
        "import pathlib, sys, time\nplace = pathlib.Path(sys.argv[1])\n(place / 'runs').touch()\n"
        "while not (place / 'gate').exists():\n    time.sleep(0.02)\nprint('result'); sys.exit(5)"
    )
    one = runs(start, tmp_path, venv, text, "--nodes", "2")
    nodes = [Node(home, "lab", name) for name in ("head", "w1")]
    one.send(signal.SIGKILL)
    assert one.end().returncode == -signal.SIGKILL
    (row,) = document("ls")["clusters"]
    assert (row["name"], row["state"]) == ("lab", "ready")
    (tmp_path / "gate").touch()
    for node in nodes:
        node.gone()
    assert [row["state"] for row in document("ls")["clusters"]] == ["ended"]
    (row,) = document("history")["history"]
    assert (row["exit_code"], row["why"]) == (5, "the command ended with code 5")
    assert heliostat("logs", "lab", "run").stdout == "result\n"


AT = {
    # the folder is being written
    "in the draft": "heliostat.state.store.write_atomic = kill_at(heliostat.state.store.write_atomic, 3)",
    # the name is claimed, nothing is started
    "before the launch": "heliostat.cluster.launch.Launcher.launch_missing = kill_at(None, 1)",
    # a process waits for its config, and nobody has written down that it exists
    "before the id is on record": "heliostat.state.store.ClusterDirectory.save = kill_at(heliostat.state.store.ClusterDirectory.save, 2)",
    # it is on record, and never gets its config
    "before the agent is told": "heliostat.remote.transport._feed = kill_at(None, 1)",
    # the head has begun, the worker waits
    "between two nodes": "heliostat.remote.transport._feed = kill_at(heliostat.remote.transport._feed, 2)",
    "while it waits": "heliostat.cluster.readiness.ReadinessWaiter.wait = kill_at(None, 1)",
}
KILLED = """
import os, signal, sys
import heliostat.cluster.launch, heliostat.cluster.readiness, heliostat.remote.transport, heliostat.state.store


def kill_at(function, call):
    calls = []

    def counted(*args, **more):
        calls.append(1)
        if len(calls) == call:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args, **more)

    return counted


{at}
from heliostat.cli import main
main()
"""


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("at", AT)
def test_killed_between_two_steps(
    home: Path, tmp_path: Path, start: Start, venv: str, verb: str, at: str
) -> None:
    """`up` again takes it up where it was; of a `run`, `down` finds all there is. Nothing is orphaned."""
    words = [*VERBS[verb], "--nodes", "2", "--venv", venv, *COMMAND[verb]]
    gate = {"GATE": str(tmp_path / "gate")}
    program = [sys.executable, "-c", KILLED.format(at=AT[at])]
    assert start(*words, program=program, **gate).end().returncode == -signal.SIGKILL
    heliostat("ls")
    (tmp_path / "gate").touch()
    if verb == "up":
        heliostat(*words)
        assert document("status", "lab")["state"] == "ready"
        record = json.loads((folder_of(home) / "record.json").read_text())
        assert all(alive(handle["detail"]["pid"]) for handle in record["handles"])
        heliostat("down", "lab")
        *lives, last = [one["reason"] for one in past(home)]
        assert last == "taken down" and set(lives) <= {"its head has ended"}
    elif at == "in the draft":
        heliostat(*words)
    else:
        heliostat("down", "lab")
