"""The head's table of nodes: what it counts, and what it costs when there are many."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import pytest

from heliostat.agent import head as head_module
from heliostat.agent.head import Head
from heliostat.agent.ports import Block


def config(folder: Path, **more: Any) -> dict[str, Any]:
    (folder / "logs" / "head").mkdir(parents=True)
    base = {"node": "head", "folder": str(folder), "auth": "none", "id": "x", "mark": "x", "min_nodes": 3}
    return {**base, "command": None, **more}


def test_enough_ready_is_set_when_min_nodes_are_ready(tmp_path: Path) -> None:
    async def story() -> None:
        head = Head(config(tmp_path), str(tmp_path))
        for name in ("head", "w1", "w2"):
            head.update_node(name, {"state": "STARTING"})
        head.update_node("w1", {"state": "READY"})
        for _ in range(5):  # beats count for nothing
            head.on_message("w1", {"state": "READY"})
        head.update_node("head", {"state": "READY"})
        head.on_node_lost("w1")
        head.update_node("w2", {"state": "READY"})
        assert not head.enough_ready.is_set()
        head.update_node("w1", {"state": "READY"})
        assert head.enough_ready.is_set()

    asyncio.run(story())


def test_ready_count_matches_the_table(tmp_path: Path) -> None:
    async def story() -> None:
        head, chance = Head(config(tmp_path), str(tmp_path)), random.Random(7)
        for _ in range(500):
            name = f"w{chance.randrange(8)}"
            if chance.random() < 0.2:
                head.on_node_lost(name)
            else:
                head.on_message(name, {"state": chance.choice(["STARTING", "READY", "STOPPING", "GONE"])})
            assert head.ready_count == sum(node["state"] == "READY" for node in head.nodes.values())

    asyncio.run(story())


def test_the_state_file_is_one_line(tmp_path: Path) -> None:
    """Indenting takes Python's own encoder: ten times as long, in the loop that answers every node."""

    async def story() -> None:
        head = Head(config(tmp_path), str(tmp_path))
        head.update_node("w1", {"state": "READY"})
        head.write_state()

    asyncio.run(story())
    (line,) = (tmp_path / "state.json").read_text().splitlines()
    assert json.loads(line)["nodes"] == {"w1": {"state": "READY"}}


@pytest.mark.parametrize(
    ("looks", "joined", "ends"),
    [
        ([None, None], None, True),
        ([None, "job j1"], None, False),  # it began between the two looks
        ([None, OSError("no answer")], None, False),
        ([None, None], "RUNNING", False),  # the script of a join, which may not use Ray
        ([None, None], "SUCCEEDED", True),
    ],
)
def test_it_looks_again_before_it_ends_an_idle_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, looks: list[Any], joined: str | None, ends: bool
) -> None:
    answers = iter(looks)

    async def activity(*_: object) -> Any:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def story() -> str:
        head = Head(config(tmp_path, idle={"timeout_s": 0}), str(tmp_path))
        head.block = Block()
        if joined:
            head.update_node("j1-1", {"state": "READY", "job": {"status": joined}})
        await head.check_idle()
        return head.stop_reason

    monkeypatch.setattr(head_module, "find_activity", activity)
    assert asyncio.run(story()).startswith("idle for ") is ends


def test_a_command_waits_for_queued_nodes_without_end(tmp_path: Path) -> None:
    """Nodes of other allocations may be queued for hours. The limit counts from the node that came last."""

    async def story() -> None:
        head = Head(config(tmp_path, queued=["gpu-1", "gpu-2"], gather_s=600), str(tmp_path))
        head.update_node("head", {"state": "READY"})
        day_s = 86400.0
        assert head.gather_timeout(head.last_new + day_s) == ""
        head.on_message("gpu-1", {"state": "STARTING"})
        assert head.gather_timeout(head.last_new + day_s) == "", "gpu-2 is still queued"
        head.on_message("gpu-2", {"state": "STARTING"})
        came = head.last_new
        head.on_message("gpu-2", {"state": "STARTING"})
        assert head.last_new == came, "a node is new only once"
        assert head.gather_timeout(came + 599) == ""
        assert head.gather_timeout(came + 601) == "fewer than 3 nodes were ready within 600 s"

    asyncio.run(story())


def test_a_command_whose_nodes_are_in_one_allocation_does_not_wait_for_ever(tmp_path: Path) -> None:
    async def story() -> None:
        head = Head(config(tmp_path, gather_s=600), str(tmp_path))
        head.update_node("head", {"state": "READY"})
        assert head.gather_timeout(head.last_new + 601)

    asyncio.run(story())


def test_a_joined_node_learns_when_its_nodes_are_ready(tmp_path: Path) -> None:
    async def story() -> None:
        head = Head(config(tmp_path), str(tmp_path))
        asked = {"state": "READY", "wait_for": ["j1-1", "j1-2"]}
        assert head.on_message("j1-1", {**asked}) == {"gcs": 0, "nodes_ready": False}
        head.on_message("j1-2", {"state": "READY"})
        assert head.on_message("j1-1", {**asked}) == {"gcs": 0, "nodes_ready": True}
        assert "wait_for" not in head.nodes["j1-1"], "a question is not part of the report"

    asyncio.run(story())


def test_a_lost_node_has_a_code(tmp_path: Path) -> None:
    async def story() -> None:
        head = Head(config(tmp_path), str(tmp_path))
        head.on_message("w1", {"state": "READY"})
        head.on_node_lost("w1")
        assert (head.nodes["w1"]["state"], head.nodes["w1"]["cause"]) == ("LOST", "agent_silent")

    asyncio.run(story())
