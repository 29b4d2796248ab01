"""How the first node of a batch job starts the agents of the others."""

from __future__ import annotations

import asyncio
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from heliostat.agent import files, worker_launch
from heliostat.agent.node import Node

ODD = b"caf\xe9 \xff"  # Latin-1, and a byte that no encoding of text has


def config(folder: Path) -> dict[str, Any]:
    members = [{"node": "head"}, {"node": "w1"}]
    return {"folder": str(folder), "rank_variable": "RANK", "launch_command": ["pbsdsh", "-n", "{line}", "--"], "hosts_variable": "PBS_NODEFILE",
            "members": members, "allocation_config": "{}"}  # fmt: skip


def test_a_variable_that_is_not_utf8_reaches_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hosts").write_text("n1\nn2\n")
    monkeypatch.setenv("PBS_NODEFILE", str(tmp_path / "hosts"))
    monkeypatch.setenv("ODD", os.fsdecode(ODD))
    commands, made = worker_launch.prepare(config(tmp_path), {}, "head")
    assert [(name, host) for name, host, _ in commands] == [("w1", "n2")]
    script = Path(made[1])
    lines = [line for line in script.read_bytes().splitlines() if not line.startswith(b"exec ")]
    script.write_bytes(b"\n".join([*lines, b'printf %s "$ODD"', b""]))
    clean = {"PATH": os.environ["PATH"]}
    assert subprocess.run(["bash", script, "0", "w1"], env=clean, stdout=subprocess.PIPE).stdout == ODD


def test_a_failure_to_start_the_others_is_their_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody waits for the task that starts them: its exception would never be seen."""
    monkeypatch.setenv("PBS_NODEFILE", str(tmp_path / "nosuch"))
    told: list[tuple[str, list[str]]] = []

    async def main() -> None:
        node = Node.__new__(Node)
        node.config, node.name, node.temp, node.logs = config(tmp_path), "head", str(tmp_path), str(tmp_path)
        monkeypatch.setattr(node, "on_launch_failure", lambda reason, names: told.append((reason, names)))
        node.launch_others()
        assert node.launch_task
        await asyncio.wait([node.launch_task])
        assert node.launch_task.exception() is None

    asyncio.run(main())
    missing = f"its agent could not be started: cannot use {tmp_path}/nosuch: No such file or directory"
    assert told == [(missing, ["w1"])]


def test_bytes_of_the_environment_are_written_as_they_are(tmp_path: Path) -> None:
    files.write(str(tmp_path / "file"), os.fsdecode(ODD))
    assert (tmp_path / "file").read_bytes() == ODD
