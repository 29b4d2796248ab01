"""What Ray may use on a node: CPUs, GPUs, memory and the object store."""

from __future__ import annotations

import os
import re
from typing import Any, Dict

from . import probe
from .runtime import Refused

Json = Dict[str, Any]
MEMORY = "gpu_memory_gb"
LEAST_STORE = 80 << 20  # Ray refuses a smaller object store


def settle(config: Json, info: Json) -> None:
    """Settles what Ray may use here: what was asked for, else our share of this node's allocation."""
    want: Json = config["resources"]
    share, of = config.get("share") or (0, 1)
    if want.get("cpus") is None:
        total = max(1, int(probe.cpus()["count"]) - int(want.get("leave_cpus") or 0))
        want["cpus"] = max(1, total // of + (1 if share < total % of else 0))
    if want.get("gpus") != 0:
        _settle_gpus(want, share, of, info)
    memory = probe.memory()
    whole = int(memory["total_bytes"]) // of
    shm = probe.shm()
    if want.get("object_store"):
        if want["object_store"] > shm["free_bytes"]:
            raise Refused("an object store of %d MiB does not fit in /dev/shm, which has %d MiB free"
                          % (want["object_store"] >> 20, shm["free_bytes"] >> 20))  # fmt: skip
    elif of > 1 or memory["why"] != "machine" or want.get("memory") or 0.3 * whole > 0.9 * shm["free_bytes"]:
        # Ray would size itself by the whole machine, and go to a slow disk where that does not fit
        store = min(int(0.3 * (want.get("memory") or whole)), int(0.9 * shm["free_bytes"] / of))
        want["object_store"] = max(LEAST_STORE, store)
    if shm["free_bytes"] < LEAST_STORE:
        raise Refused(
            "/dev/shm has %d MiB free; Ray needs %d at least" % (shm["free_bytes"] >> 20, LEAST_STORE >> 20)
        )
    if want.get("object_store") and not want.get("memory"):
        want["memory"] = max(LEAST_STORE, int(0.95 * whole) - want["object_store"])


def _settle_gpus(want: Json, share: int, of: int, info: Json) -> None:
    """Our share of the GPUs; several nodes on one machine must not see the same one. Their model and memory become
    labels and a resource, so that work finds the machine it needs among unlike ones."""
    seen = probe.gpus()
    found, cards = int(seen["gpu_count"]), seen["gpus"]
    if of > 1 and want.get("gpus") is None:
        visible = [word for word in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if word]
        part = slice(share * found // of, (share + 1) * found // of)
        mine, cards = (visible or [str(i) for i in range(found)])[part], cards[part]
        if found:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(mine)
        found = len(mine)
    if want.get("gpus") is None:
        want["gpus"] = found
    cards = [card for card in cards if card["memory_total"]][: want["gpus"]]
    info["gpus"] = [{"name": card["name"], "memory": card["memory_total"]} for card in cards]
    if cards:
        models = {re.sub(r"[^A-Za-z0-9]+", "-", card["name"]).strip("-")[:63] for card in cards}
        labels = {"gpu": models.pop()} if len(models) == 1 else {}
        labels["gpu-memory-gb"] = str(min(card["memory_total"] for card in cards) >> 30)
        want["labels"] = {**labels, **(want.get("labels") or {})}
        total = sum(card["memory_total"] for card in cards) >> 30
        want["custom"] = {MEMORY: total, **(want.get("custom") or {})}
