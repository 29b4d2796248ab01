"""The machine's clock is stepped by days, forth and back: who holds a lock, is idle or alive is no matter of the clock.

The real clock is nobody's to touch: every Python program of the test finds one that is offset by what a file says."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from heliostat.agent.idle import IdleClock
from heliostat.common.errors import DeadlineError
from heliostat.state.store import ClusterDirectory
from real.faults import Node, fake_ray, past, tell_tale
from shared import document, heliostat, until

pytestmark = pytest.mark.needs_linux

DAY = 86400.0
CLOCK = """
import os, time

real, zone = time.time, time.localtime


def stepped():
    with open(os.environ["CLOCK"]) as file:
        return real() + float(file.read())


time.time = stepped
time.localtime = lambda seconds=None: zone(stepped() if seconds is None else seconds)
"""


@pytest.fixture
def step(
    home: Path, no_leaks: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[float], None]]:
    """Steps the clock of every command and agent, also of those that run already, to so many seconds from the truth."""
    (tmp_path / "sitecustomize.py").write_text(CLOCK)

    def step(seconds: float) -> None:
        (tmp_path / "clock.new").write_text(str(seconds))
        (tmp_path / "clock.new").rename(tmp_path / "clock")

    step(0)
    monkeypatch.setenv("CLOCK", str(tmp_path / "clock"))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    yield step
    tell_tale(home)


@pytest.mark.parametrize("seconds", [3 * DAY, -3 * DAY], ids=["forth", "back"])
def test_a_step_while_a_cluster_runs(
    home: Path, tmp_path: Path, step: Callable[[float], None], seconds: float
) -> None:
    words = ["up", "--name", "lab", "--nodes", "2", "--venv", str(fake_ray(tmp_path / "v"))]
    words += ["--time", "1h", "--idle-timeout", "30m"]
    heliostat(*words)
    folder = home / "clusters" / "lab"
    step(seconds)

    def beat() -> int:
        return (
            int(json.loads((folder / "pulse.json").read_text())["beat"])
            if (folder / "pulse.json").exists()
            else 0
        )

    seen = beat()
    until(lambda: beat() > seen, "the next beat")
    pulse = json.loads((folder / "pulse.json").read_text())
    assert abs(pulse["at"] - time.time() - seconds) < DAY  # the step has reached the agent
    status = document("status", "lab")
    assert status["state"] == "ready" and {node["state"] for node in status["nodes"]} == {"READY"}
    assert 0 < status["time_left_s"] <= 3600 and 0 <= status["idle_s"] < 1800

    node = Node(home, "lab", "w1")
    os.kill(node.agent, signal.SIGKILL)
    node.gone()
    until(lambda: document("status", "lab")["state"] == "partial", "the truth")
    heliostat(*words)
    assert document("status", "lab")["state"] == "ready"
    heliostat("down", "lab")
    (record,) = past(home)
    assert {one["state"] for one in record["nodes"].values()} == {"GONE"}
    (row,) = document("history")["history"]
    assert row["ran_s"] >= 0 and row["waited_s"] >= 0 and row["node_hours"] >= 0


def test_a_step_while_a_run_runs(home: Path, tmp_path: Path, step: Callable[[float], None]) -> None:
    """The script itself sees the step, and its code is still its own."""
    program = f"import time; open({str(tmp_path / 'clock')!r}, 'w').write('{-30 * DAY}'); time.sleep(1); raise SystemExit(9)"
    venv = fake_ray(tmp_path / "v")
    heliostat("run", "--name", "lab", "--time", "1h", "--venv", venv, "--", "python3", "-c", program, code=9)
    assert past(home)[0]["exit_code"] == 9


@pytest.mark.parametrize("seconds", [DAY, -DAY], ids=["forth", "back"])
def test_a_lock_that_is_held_stays_held(home: Path, monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    (home / "lab").mkdir()
    folder, real = ClusterDirectory(home / "lab"), time.time
    with folder.lock():
        monkeypatch.setattr(time, "time", lambda: real() + seconds)
        with pytest.raises(DeadlineError, match="another command is changing"):
            with folder.lock(seconds=0.3):
                pass
    with folder.lock(seconds=0.3):
        pass


def test_idle_time_is_no_matter_of_the_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    idle, real = IdleClock({"timeout_s": 600.0}, str(tmp_path / "keepalive")), time.time
    for seconds in (DAY, -DAY):
        monkeypatch.setattr(time, "time", lambda seconds=seconds: real() + seconds)
        idle.update(False)
        assert not idle.is_expired() and 0 <= idle.seconds() < 600
