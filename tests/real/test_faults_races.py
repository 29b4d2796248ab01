"""Several commands at once on one cluster: each ends with a true word, and nothing is left between them."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from real.faults import Command, Node, alive, commands, fake_ray, four_lines, past, refused, tell_tale
from shared import document, heliostat, until

pytestmark = pytest.mark.needs_linux

Start = Callable[..., Command]


@pytest.fixture(scope="module")
def venv(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(fake_ray(tmp_path_factory.mktemp("venv") / "v"))


@pytest.fixture(autouse=True)
def tidy(home: Path, no_leaks: None) -> Iterator[None]:
    yield
    tell_tale(home)


@pytest.fixture
def start(tidy: None) -> Iterator[Start]:
    with commands() as start:
        yield start


@pytest.fixture
def up(venv: str) -> list[str]:
    return ["up", "--name", "lab", "--nodes", "2", "--venv", venv]


def is_starting(home: Path) -> bool:
    return (home / "clusters" / "lab" / "nodes" / "head.json").exists()


# --- down


@pytest.mark.parametrize("words", [["lab"], ["lab", "--now"], ["--all"]], ids=" ".join)
def test_down_three_times_at_once(home: Path, start: Start, up: list[str], words: list[str]) -> None:
    heliostat(*up)
    nodes = [Node(home, "lab", name) for name in ("head", "w1")]
    for done in [one.end() for one in [start("down", *words) for _ in range(3)]]:
        assert done.returncode == 0, done.stderr
        assert (
            "`lab` is terminated: 2 nodes released" in done.stderr
            or "`lab` was already terminated" in done.stderr
            or (words == ["--all"] and "no clusters" in done.stderr)
        )
    for node in nodes:
        node.gone()
    assert [record["reason"] for record in past(home)] == ["taken down"]


def test_down_while_up_waits(home: Path, tmp_path: Path, start: Start, up: list[str]) -> None:
    one = start(*up, GATE=str(tmp_path / "never"))
    until(lambda: is_starting(home), "a start")
    heliostat("down", "lab")
    said = refused(one.end(), 1)
    assert said["error"] == "`lab` was taken down while it was starting"
    assert "cause" not in said, "the message has it already"


def test_down_while_run_runs(home: Path, tmp_path: Path, start: Start, venv: str) -> None:
    line = f"touch {tmp_path}/runs; exec sleep 1000"
    one = start("run", "--name", "lab", "--venv", venv, "--", "bash", "-c", line)
    until((tmp_path / "runs").exists, "the command")
    heliostat("down", "lab")
    done = one.end()
    assert done.returncode in (1, 143), done.stderr  # it was told to end, and its own code is 143
    if done.returncode == 1:
        assert "ended before its command did" in four_lines(done.stderr)["error"]


# --- up


def test_up_three_times_at_once(home: Path, start: Start, up: list[str]) -> None:
    ends = [one.end() for one in [start(*up) for _ in range(3)]]
    assert [done.returncode for done in ends] == [0, 0, 0], [done.stderr for done in ends]
    assert len({done.stdout for done in ends}) == 1
    record = json.loads((home / "clusters" / "lab" / "record.json").read_text())
    assert len(record["handles"]) == 2 and all(alive(handle["detail"]["pid"]) for handle in record["handles"])
    assert [node["launch"] for node in record["nodes"].values()] == [1, 1]
    heliostat("down", "lab")


def test_up_of_two_kinds_at_once(home: Path, start: Start, up: list[str]) -> None:
    ends = [one.end() for one in [start(*up), start(*up, "--cpus-per-node", "1")]]
    assert sorted(done.returncode for done in ends) == [0, 1]
    said = refused(next(done for done in ends if done.returncode), 1)
    assert said["error"] == "the name `lab` is in use" and said["cause"].endswith("with another spec")
    heliostat("down", "lab")


@pytest.mark.parametrize("pause", ["none", "until it is on record", "until its agents run"])
def test_up_and_down_at_once(home: Path, start: Start, up: list[str], pause: str) -> None:
    one = start(*up)
    if pause != "none":
        place = home / "clusters" / "lab"
        until(place.exists if pause == "until it is on record" else lambda: is_starting(home), pause)
    other = start("down", "lab").end()
    done = one.end()
    assert (done.returncode, other.returncode) in ((0, 0), (1, 0), (0, 5)), (done.stderr, other.stderr)
    if done.returncode:
        assert four_lines(done.stderr)["error"] == "`lab` was taken down while it was starting"
    if other.returncode:
        assert four_lines(other.stderr)["error"] == "there is no cluster `lab`"
    if (home / "clusters" / "lab").exists():
        heliostat("down", "lab")


def test_up_after_the_head_was_killed(home: Path, up: list[str]) -> None:
    """Its worker does not know yet: what is left goes, and a new cluster comes."""
    heliostat(*up)
    nodes = [Node(home, "lab", name) for name in ("head", "w1")]
    for pid in (nodes[0].agent, nodes[0].supervisor):
        os.kill(pid, signal.SIGKILL)
    until(lambda: not alive(nodes[0].supervisor), "its end")
    assert document("status", "lab")["state"] == "failed"
    heliostat(*up)
    for node in nodes:
        node.gone()
    assert [record["reason"] for record in past(home)] == ["its head has ended"]
    assert document("status", "lab")["state"] == "ready"
    heliostat("down", "lab")


# --- run


def test_others_look_while_it_releases(home: Path, tmp_path: Path, start: Start, venv: str) -> None:
    """Whoever looks first puts an ended cluster into the history; the exit code is the script's all the same."""
    line = f"while ! test -e {tmp_path}/gate; do sleep 0.02; done; echo result; exit 7"
    one = start("run", "--name", "lab", "--venv", venv, "--", "bash", "-c", line)
    until(lambda: is_starting(home), "a start")
    (tmp_path / "gate").touch()
    while one.process.poll() is None:
        for other in [start("ls", "--all", "--json") for _ in range(2)]:
            assert other.end().returncode == 0
    done = one.end()
    assert (done.returncode, done.stdout) == (7, "result\n"), done.stderr
    assert past(home)[0]["exit_code"] == 7


DAEMON = """
import os, signal, sys, time
if os.fork():
    os.wait()
    print("done")
    sys.exit(3)
os.setsid()
if os.fork():
    os._exit(0)
with open(sys.argv[1] + ".new", "w") as place:
    place.write(str(os.getpid()))
os.rename(sys.argv[1] + ".new", sys.argv[1])
os.closerange(0, 1000)
os.execve("/bin/sh", ["sh", "-c", "trap '' TERM HUP INT; while :; do sleep 1; done"], {})
"""


def test_what_a_script_leaves_behind_goes(home: Path, tmp_path: Path, venv: str) -> None:
    (tmp_path / "script.py").write_text(DAEMON)
    done = heliostat("run", "--name", "lab", "--venv", venv, tmp_path / "script.py", tmp_path / "pid", code=3)
    assert done.stdout == "done\n"
    assert not alive(int((tmp_path / "pid").read_text()))
