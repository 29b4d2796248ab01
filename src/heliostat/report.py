"""The status document: what the record, the head's agent and Ray know of a cluster, side by side."""

from __future__ import annotations

import time
from typing import Any

from heliostat.errors import JSON_SCHEMA, HeliostatError
from heliostat.lifecycle import Lifecycle
from heliostat.rayapi import FINAL
from heliostat.store import NodeRecord


def status(life: Lifecycle, name: str) -> dict[str, Any]:
    """As CONTRACT has it. A head that does not answer is told in `problem`; the rest is still true."""
    view = life.find(name)
    record, connection, pulse = view.record, view.folder.connection() or {}, view.folder.pulse()
    told = view.live.get("nodes") or {}
    ray_nodes: dict[str, dict[str, Any]] = {}
    jobs = [run_job(view.run)] if view.run else []
    telling = life.telling(view.folder, record)
    error: HeliostatError | None = telling.refusal if telling else None
    if view.address and not record.is_over():
        try:
            api = life.api(view)
            for node in api.nodes():  # one that a platform started has no name of ours
                ray_nodes[node["name"]] = ray_nodes[node["ip"]] = node
            jobs += [
                job
                for job in without_driver(api.jobs(), view.run)
                if job["kind"] == "job" or job["status"] not in FINAL
            ]
        except HeliostatError as found:
            error = error or found
    idle_s = pulse.get("idle_s")
    if idle_s is not None and any(job["status"] not in FINAL for job in jobs):
        idle_s = 0.0  # the head looks for work every few seconds only
    keys = ("id", "status", "entrypoint", "started", "seconds", "exit_code")
    return {
        "schema": JSON_SCHEMA,
        "name": record.name,
        "site": record.site,
        "state": str(view.state),
        "ray_version": connection.get("ray"),
        "address": view.address,
        "dashboard_port": connection.get("dashboard_port"),
        "started": record.created,
        "time_left_s": pulse.get("time_left_s"),
        "idle_s": idle_s,
        "problem": str(error or ""),
        **({"remedy": f"{error.hint}\n{error.attachment}"} if error and error.attachment else {}),
        "nodes": [
            _node(node, words, ray_nodes.get(node.name) or ray_nodes.get(str(words.get("ip"))) or {})
            for node in record.nodes.values()
            for words in [told.get(node.name, {})]
        ],
        "jobs": [{key: job[key] for key in keys} for job in jobs],
    }


def run_job(job: dict[str, Any]) -> dict[str, Any]:
    """The command of a `run`, in the shape of Ray's jobs."""
    started = job.get("started")
    seconds = (job.get("ended") or time.time()) - started if started else None
    return {**job, "kind": "run", "seconds": None if seconds is None else round(seconds, 3), "message": ""}


def without_driver(jobs: list[dict[str, Any]], run: dict[str, Any]) -> list[dict[str, Any]]:
    """Ray's jobs without the driver that is the command of a `run`: that has a row of its own."""
    pid = run.get("pid")
    return [job for job in jobs if pid is None or job["kind"] != "driver" or str(job["pid"]) != str(pid)]


def _node(node: NodeRecord, told: dict[str, Any], ray: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": node.name,
        "role": node.role,
        "group": node.group,
        "state": str(node.state),
        "reason": node.reason,
        "since": node.since,
        "ip": told.get("ip"),
        "host": told.get("host"),
        "native_id": node.handle,
        "ports": told.get("ports"),
        "resources": ray.get("resources", {}),
        "gpus": ray.get("gpus", []),
        **({"restarts": told["restarts"]} if told.get("restarts") else {}),
    }
