"""The Slurm step of an agent: who its slurmstepd is, and what goes first when the supervisor is killed."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from heliostat.agent import step, tempdirs
from heliostat.agent.node import Node
from heliostat.agent.protocol import StopReason

# a parent that starts a task, says its pid, and ends when it is told to; the task goes on
DAEMON = """
import subprocess, sys
task = subprocess.Popen(["sleep", "600"])
print(task.pid, flush=True)
sys.stdin.read()
"""


def test_a_step_is_gone_when_its_daemon_is(monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", DAEMON], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as daemon:
        assert daemon.stdin and daemon.stdout
        task = int(daemon.stdout.readline())
        try:
            assert step.find_daemon(task) is None, "no step started it"
            monkeypatch.setenv("SLURM_TASK_PID", str(task))
            assert step.find_daemon(task) == daemon.pid
            assert not step.is_gone(task, daemon.pid) and not step.is_gone(task, None)
            daemon.kill()
            daemon.wait()
            assert step.is_gone(task, daemon.pid)
        finally:
            os.kill(task, 9)


def test_a_task_that_has_ended_tells_nothing_of_its_step() -> None:
    with subprocess.Popen(["true"]) as task:
        task.wait()
    assert not step.is_gone(task.pid, os.getpid())


def test_the_secrets_go_first_when_the_supervisor_is_killed(tmp_path: Path) -> None:
    """slurmstepd kills the agent too, in the same moment."""
    for name in tempdirs.SECRETS:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("secret")
    (tmp_path / "log").write_text("kept until later")

    async def main(daemon: int | None, supervisor: int) -> None:
        node = Node.__new__(Node)
        node.config, node.temp, node.supervisor = {"slurmstepd": daemon}, str(tmp_path), supervisor
        node.stopping, node.stop_now, node.stop_reason = asyncio.Event(), asyncio.Event(), ""
        node.stop_requested_at = node.sigcont_at = float("-inf")
        node.stop(StopReason.REQUESTED, "stop requested")

    def left() -> list[str]:
        return sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file())

    asyncio.run(main(7, os.getppid()))
    asyncio.run(main(None, -1))
    assert left() == sorted(["log", *tempdirs.SECRETS])
    asyncio.run(main(7, -1))
    assert left() == ["log"]
