"""What Ray may use on a node: CPUs, GPUs, memory and the object store."""

from __future__ import annotations

import os
import re

from . import probe
from .protocol import AgentConfig, NodeReport, RefusalCause, Refused, Resources

GPU_MEMORY = "gpu_memory_gb"
MIN_STORE = 80 << 20  # Ray rejects a smaller object store


def resolve(config: AgentConfig, info: NodeReport) -> None:
    """Fill in `config["resources"]`: the requested values, else this node's share of the allocation. Raises Refused."""
    want = config["resources"]
    share, of = config.get("share") or (0, 1)
    if want.get("cpus") is None:
        total = max(1, int(probe.cpus()["count"]) - int(want.get("leave_cpus") or 0))
        want["cpus"] = max(1, total // of + (1 if share < total % of else 0))
    if want.get("gpus") != 0:
        _resolve_gpus(want, share, of, info)
    memory = probe.memory()
    whole = int(memory["total_bytes"]) // of
    shm = probe.shm()
    requested = want.get("object_store")
    if requested:
        if requested > shm["free_bytes"]:
            raise Refused(RefusalCause.SHARED_MEMORY, "an object store of %d MiB does not fit in /dev/shm, which has %d MiB free"
                          % (requested >> 20, shm["free_bytes"] >> 20))  # fmt: skip
    elif of > 1 or memory["why"] != "machine" or want.get("memory") or 0.3 * whole > 0.9 * shm["free_bytes"]:
        # Ray would use the size of the whole host, and a slow disk if that does not fit
        store = min(int(0.3 * (want.get("memory") or whole)), int(0.9 * shm["free_bytes"] / of))
        want["object_store"] = max(MIN_STORE, store)
    if shm["free_bytes"] < MIN_STORE:
        raise Refused(
            RefusalCause.SHARED_MEMORY,
            "/dev/shm has %d MiB free; Ray needs %d at least" % (shm["free_bytes"] >> 20, MIN_STORE >> 20),
        )
    used = want.get("object_store")
    if used and not want.get("memory"):
        want["memory"] = max(MIN_STORE, int(0.95 * whole) - used)


def _resolve_gpus(want: Resources, share: int, of: int, info: NodeReport) -> None:
    """This node's share of the GPUs: several nodes on one host must not see the same one. Model and memory become labels
    and a resource, so that tasks can select a node."""
    probed = probe.gpus()
    found, cards = int(probed["gpu_count"]), probed["gpus"]
    if of > 1 and want.get("gpus") is None:
        visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
        part = slice(share * found // of, (share + 1) * found // of)
        own, cards = (visible or [str(i) for i in range(found)])[part], cards[part]
        if found:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(own)
        found = len(own)
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
        want["custom"] = {GPU_MEMORY: total, **(want.get("custom") or {})}
