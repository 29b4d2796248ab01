"""What Ray may use on a node: what was asked for, else what is there, less what is left to others."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from heliostat.agent import probe, sizes
from heliostat.agent.worker import Worker

GIB = 2**30
A6000 = {"name": "NVIDIA RTX A6000", "memory_total": 48 * GIB}
RTX = {"name": "NVIDIA GeForce RTX 3090", "memory_total": 24 * GIB}


def sized(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cards: list[dict[str, Any]], **want: Any
) -> Worker:
    seen = {"gpus": cards, "gpu_count": len(cards), "gpu_why": "nvidia-smi"}
    monkeypatch.setattr(probe, "gpus", lambda: seen)
    monkeypatch.setattr(probe, "cpus", lambda: {"count": 8})
    monkeypatch.setattr(probe, "memory", lambda: {"total_bytes": 16 * GIB, "why": "machine"})
    monkeypatch.setattr(probe, "shm", lambda: {"free_bytes": 16 * GIB, "total_bytes": 16 * GIB})
    share = want.pop("share", None)
    config: dict[str, Any] = {
        "node": "zinc", "role": "worker", "folder": str(tmp_path), "auth": "none", "id": "abc", "mark": "abc-zinc",
        "resources": want, "share": share,
    }  # fmt: skip

    async def make() -> Worker:
        node = Worker(config, str(tmp_path))
        sizes.resolve(node.config, node.info)
        return node

    return asyncio.run(make())


def test_all_that_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node = sized(tmp_path, monkeypatch, [A6000, A6000])
    want = node.config["resources"]
    assert (want["cpus"], want["gpus"]) == (8, 2)
    assert want["labels"] == {"gpu": "NVIDIA-RTX-A6000", "gpu-memory-gb": "48"}
    assert want["custom"] == {"gpu_memory_gb": 96}
    assert node.info["gpus"] == [{"name": "NVIDIA RTX A6000", "memory": 48 * GIB}] * 2


def test_unlike_cards_have_no_common_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    want = sized(tmp_path, monkeypatch, [A6000, RTX]).config["resources"]
    assert want["labels"] == {"gpu-memory-gb": "24"} and want["custom"] == {"gpu_memory_gb": 72}


def test_what_the_person_says_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = {"gpus": 1, "cpus": 3, "labels": {"gpu": "mine"}, "custom": {"gpu_memory_gb": 5.0, "disk": 1.0}}
    want = sized(tmp_path, monkeypatch, [A6000, A6000], **said).config["resources"]
    assert (want["cpus"], want["gpus"]) == (3, 1)
    assert want["labels"] == {"gpu": "mine", "gpu-memory-gb": "48"}
    assert want["custom"] == {"gpu_memory_gb": 5.0, "disk": 1.0}


@pytest.mark.parametrize("leave, left", [(0, 8), (3, 5), (8, 1), (20, 1)])
def test_cpus_are_left_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, leave: int, left: int
) -> None:
    assert sized(tmp_path, monkeypatch, [], leave_cpus=leave).config["resources"]["cpus"] == left


def test_a_machine_that_does_no_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node = sized(tmp_path, monkeypatch, [A6000], cpus=0, gpus=0)
    want = node.config["resources"]
    assert (want["cpus"], want["gpus"]) == (0, 0) and "custom" not in want and "labels" not in want


def test_several_nodes_on_one_machine_see_different_cards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    for share in (0, 1):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
        node = sized(tmp_path, monkeypatch, [A6000, RTX, RTX], share=(share, 2))
        seen.append((os.environ["CUDA_VISIBLE_DEVICES"], node.config["resources"]["labels"].get("gpu")))
    assert seen == [("4", "NVIDIA-RTX-A6000"), ("5,6", "NVIDIA-GeForce-RTX-3090")]
