"""Reads a cluster's resources from Ray's head, and its figures over several seconds."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

from heliostat.cluster.manager import ClusterManager
from heliostat.common.documents import JsonObject, RayNode
from heliostat.diagnostics import sizing
from heliostat.diagnostics.figures import Actors, Demand, Figures, Gpu, Group, Node, Reading
from heliostat.remote.ray_client import RayApi

READ_INTERVAL_S = 2.5  # Ray measures a host every five seconds
MAX_SPILL_QUERIES = 64  # one query for each node; those with the fullest object stores first
WAITING_STATES = ("PENDING_CREATION", "DEPENDENCIES_UNREADY", "RESTARTING")


def read_capacity(manager: ClusterManager, name: str) -> tuple[list[sizing.Node], list[str]]:
    """(the resources that Ray has on each node, notes for the user)"""
    view = manager.find(name)
    nodes = manager.ray_api(view).nodes()
    found = [
        sizing.Node(
            str(n["name"]), n["resources"].get("CPU", [0, 0])[1], n["resources"].get("GPU", [0, 0])[1]
        )
        for n in nodes
    ]
    notes = []
    for resource in ("CPU", "GPU"):
        used, total = (sum(n["resources"].get(resource, [0, 0])[i] for n in nodes) for i in (0, 1))
        used += sum(n["held"].get(resource, 0) for n in nodes)
        if used:
            notes.append(f"{used:g} of {total:g} {resource}s are in use now; the plan is for an idle cluster")
    if _is_elastic(view.record.spec):
        notes.append("the cluster has autoscaling; the plan is for the current nodes")
    return found, notes


def collect(
    manager: ClusterManager, name: str, seconds: float, report: Callable[[str], None] = lambda text: None
) -> Figures:
    """Reads the cluster's figures repeatedly for this long, at least twice."""
    view = manager.find(name)
    api = manager.ray_api(view)
    end, readings, first = time.monotonic() + seconds, [_reading(api)], _spilled(api)
    while True:
        left = end - time.monotonic()
        time.sleep(min(READ_INTERVAL_S, max(0.1, left)))
        readings.append(_reading(api))
        report(f"observing `{name}`, {len(readings)} readings")
        if time.monotonic() >= end:
            break
    last = _spilled(api)
    jobs = {job["ray_id"]: job["id"] for job in api.jobs() if job["ray_id"]}
    return Figures(
        readings,
        _actors(api, jobs),
        [
            Group(group["bundles"], group["infeasible"], jobs.get(group["job"], str(group["job"])))
            for group in api.groups()
            if group["state"] in ("PENDING", "RESCHEDULING")
        ],
        {node: (first.get(node, 0), spilled) for node, spilled in last.items()},
        cluster=name,
        elastic=_is_elastic(view.record.spec),
    )


def _reading(api: RayApi) -> Reading:
    return Reading(
        [_node(node) for node in api.nodes()],
        [Demand(one["shape"], one["count"], one["grouped"]) for one in api.demands()],
    )


def _node(node: RayNode) -> Node:
    host = node["host"]
    return Node(
        str(node["name"]),
        node["resources"],
        node["held"],
        host["at"],
        host["cpu"],
        (host["memory"][0], host["memory"][1]) if host["memory"] else None,
        [
            Gpu(
                str(gpu["name"] or "GPU"),
                gpu["utilization"],
                (gpu["memory_used"] or 0.0, gpu["memory_total"]) if gpu["memory_total"] else None,
                gpu["temperature"],
            )
            for gpu in node["gpus"]
        ],
    )


def _spilled(api: RayApi) -> dict[str, int]:
    """node -> spilled bytes, if any."""

    def fullness(node: RayNode) -> float:
        used, total = node["resources"].get("object_store_memory", (0.0, 0.0))
        return float(used / total) if total else 0.0

    fullest = sorted(api.nodes(), key=fullness, reverse=True)[:MAX_SPILL_QUERIES]
    found = {str(node["name"]): api.spilled(node["id"]) for node in fullest}
    return {name: spilled for name, spilled in found.items() if spilled}


def _actors(api: RayApi, jobs: dict[str, str]) -> list[Actors]:
    kinds: Counter[tuple[str, tuple[tuple[str, float], ...], str, bool]] = Counter()
    for actor in api.actors():
        shape = tuple(sorted(actor["shape"].items()))
        kinds[
            actor["class"], shape, jobs.get(actor["job"], str(actor["job"])), actor["state"] in WAITING_STATES
        ] += 1
    groups = dict.fromkeys((name, shape, job) for name, shape, job, _ in kinds)
    return [
        Actors(name, dict(shape), job, kinds[name, shape, job, False], kinds[name, shape, job, True])
        for name, shape, job in groups
    ]


def _is_elastic(spec: JsonObject) -> bool:
    """`ClusterSpec.elastic` for the spec of a record."""
    return bool(spec.get("autoscale")) or any(
        group.get("max") for group in (spec.get("groups") or {}).values()
    )
