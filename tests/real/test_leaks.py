"""The check for leaks sees what it must see. A guard that never barks is worse than none."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import leaks

pytestmark = pytest.mark.needs_linux

WAIT = [sys.executable, "-c", "print(flush=True); input()"]


@pytest.fixture
def start() -> Iterator:
    """Starts a process that waits, and has come as far as running Python."""
    started = []

    def run(*args: str, **env: str) -> int:
        process = subprocess.Popen(
            [*WAIT, *args], env={**os.environ, **env}, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        started.append(process)
        process.stdout.readline()
        return process.pid

    yield run
    for process in started:
        process.kill()
        process.communicate()


def pids(found: leaks.Found) -> set[int]:
    return {process.pid for process in found.processes}


def test_sees_and_kills_what_appeared(start, home: Path) -> None:
    old = start(HELIOSTAT_NODE="old")
    before = leaks.look()
    node, agent, stranger = start(HELIOSTAT_NODE="n1"), start("agent.pyz"), start()
    left, lines = leaks.settle(before, home, seconds=0)
    assert pids(left) == {node, agent}
    assert len(lines) == 2 and str(node) in lines[0] + lines[1]
    leaks.kill(left)
    assert not pids(leaks.look()) & {node, agent}
    for pid in (old, stranger):
        os.kill(pid, 0)  # raises when it is gone


def test_sees_a_folder_and_a_record(home: Path) -> None:
    before = leaks.look()
    with tempfile.TemporaryDirectory(prefix="hs-", dir="/tmp") as folder:
        (home / "clusters" / "lab").mkdir(parents=True)
        assert leaks.settle(before, home, seconds=0)[1] == [f"folder {folder}", f"record {home}/clusters/lab"]
    (home / "clusters" / "lab").rmdir()
    assert leaks.settle(before, home)[1] == []


def test_leaves_another_run_alone(start, home: Path) -> None:
    before = leaks.look()
    with tempfile.TemporaryDirectory(prefix="hs-", dir="/tmp") as folder:
        start(f"--temp-dir={folder}", **{"HELIOSTAT_NODE": "n1", leaks.TAG: "another"})
        assert leaks.settle(before, home, seconds=0)[1] == []


@pytest.mark.needs_ray
def test_sees_every_process_of_a_real_ray(home: Path) -> None:
    """Ray's workers lose their environment when they take their title; they must be seen all the same."""
    program = (
        "import ray, sys; ray.init(address='local', num_cpus=1, include_dashboard=False, _temp_dir=sys.argv[1]);"
        "f = ray.remote(lambda: 0); ray.get(f.remote()); print(flush=True); input()"
    )
    before = leaks.look()
    with tempfile.TemporaryDirectory(prefix="hs-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        process = subprocess.Popen(
            [sys.executable, "-c", program, folder],
            env={**os.environ, "HELIOSTAT_NODE": "n1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        try:
            process.stdout.readline()
            commands = " ".join(str(found) for found in leaks.look().since(before).processes)
        finally:
            process.communicate(b"\n", timeout=60)
            leaks.kill(leaks.settle(before, home, seconds=5)[0])
    assert "gcs_server" in commands and "raylet" in commands and "ray::" in commands
