"""What Ray's head tells of a cluster in figures: what its nodes have, and, over a few seconds, how it goes."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from heliostat.cluster.manager import ClusterManager
from heliostat.diagnostics import sizing
from heliostat.diagnostics.figures import Actors, Demand, Figures, Gpu, Group, Node, Reading
from heliostat.remote.ray_client import RayApi

EVERY_S = 2.5  # a host is looked at every five seconds
STORES = 64  # whose objects on disk are asked for, one by one: those with the fullest stores
WAIT = ("PENDING_CREATION", "DEPENDENCIES_UNREADY", "RESTARTING")


def machines(manager: ClusterManager, name: str) -> tuple[list[sizing.Node], list[str]]:
    """(what Ray may use on each node, what to know besides)"""
    view = manager.find(name)
    nodes = manager.ray_api(view).nodes()
    found = [
        sizing.Node(
            str(n["name"]), n["resources"].get("CPU", [0, 0])[1], n["resources"].get("GPU", [0, 0])[1]
        )
        for n in nodes
    ]
    notes = []
    for what in ("CPU", "GPU"):
        used, total = (sum(n["resources"].get(what, [0, 0])[i] for n in nodes) for i in (0, 1))
        used += sum(n["held"].get(what, 0) for n in nodes)
        if used:
            notes.append(
                f"{used:g} of {total:g} {what}s are in use now: the plan is for the cluster without that"
            )
    if _elastic(view.record.spec):
        notes.append("the cluster grows with demand: this is for the nodes that are here now")
    return found, notes


def collect(
    manager: ClusterManager, name: str, seconds: float, tell: Callable[[str], None] = lambda text: None
) -> Figures:
    """Looks again and again for so long, twice at least."""
    view = manager.find(name)
    api = manager.ray_api(view)
    end, readings, first = time.monotonic() + seconds, [_reading(api)], _spilled(api)
    while True:
        left = end - time.monotonic()
        time.sleep(min(EVERY_S, max(0.1, left)))
        readings.append(_reading(api))
        tell(f"looking at `{name}`, {len(readings)} readings")
        if time.monotonic() >= end:
            break
    last = _spilled(api)
    jobs = {job["ray_id"]: str(job["id"]) for job in api.jobs()}
    return Figures(
        readings,
        _actors(api, jobs),
        [
            Group(group["bundles"], group["infeasible"], jobs.get(group["job"], group["job"]))
            for group in api.groups()
            if group["state"] in ("PENDING", "RESCHEDULING")
        ],
        {node: (first.get(node, 0), spilled) for node, spilled in last.items()},
        cluster=name,
        elastic=_elastic(view.record.spec),
    )


def _reading(api: RayApi) -> Reading:
    return Reading(
        [_node(node) for node in api.nodes()],
        [Demand(one["shape"], one["count"], one["grouped"]) for one in api.demands()],
    )


def _node(node: dict[str, Any]) -> Node:
    host = node["host"]
    return Node(
        str(node["name"]),
        node["resources"],
        node["held"],
        host["at"],
        host["cpu"],
        tuple(host["memory"]) if host["memory"] else None,
        [
            Gpu(
                str(gpu["name"] or "GPU"),
                gpu["utilization"],
                (gpu["memory_used"], gpu["memory_total"]) if gpu["memory_total"] else None,
                gpu["temperature"],
            )
            for gpu in node["gpus"]
        ],
    )


def _spilled(api: RayApi) -> dict[str, int]:
    """node -> bytes on disk, where there are any."""

    def fullness(node: dict[str, Any]) -> float:
        used, total = node["resources"].get("object_store_memory", (0.0, 0.0))
        return float(used / total) if total else 0.0

    fullest = sorted(api.nodes(), key=fullness, reverse=True)[:STORES]
    found = {str(node["name"]): api.spilled(node["id"]) for node in fullest}
    return {name: spilled for name, spilled in found.items() if spilled}


def _actors(api: RayApi, jobs: dict[str, str]) -> list[Actors]:
    kinds: Counter[tuple[str, tuple[tuple[str, float], ...], str, bool]] = Counter()
    for actor in api.actors():
        shape = tuple(sorted(actor["shape"].items()))
        kinds[actor["class"], shape, jobs.get(actor["job"], actor["job"]), actor["state"] in WAIT] += 1
    groups = dict.fromkeys((name, shape, job) for name, shape, job, _ in kinds)
    return [
        Actors(name, dict(shape), job, kinds[name, shape, job, False], kinds[name, shape, job, True])
        for name, shape, job in groups
    ]


def _elastic(spec: dict[str, Any]) -> bool:
    """As `ClusterSpec.elastic`, of the record's plain form."""
    return bool(spec.get("autoscale")) or any(
        group.get("max") for group in (spec.get("groups") or {}).values()
    )
