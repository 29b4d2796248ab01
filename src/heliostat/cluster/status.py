"""The status document of a cluster: what the record, the head's agent and Ray report of it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, cast

from heliostat.agent.protocol import JobReport, NodeReport
from heliostat.common.documents import ClusterStatus, JobInfo, NodeStatus, RayNode, select
from heliostat.common.errors import JSON_SCHEMA, HeliostatError
from heliostat.remote.ray_client import FINAL
from heliostat.state.records import NodeRecord

if TYPE_CHECKING:
    from heliostat.cluster.connection import Connector
    from heliostat.cluster.observe import Observer


class StatusReporter:
    def __init__(self, observer: Observer, connector: Connector) -> None:
        self._observer, self._connector = observer, connector

    def status(self, name: str) -> ClusterStatus:
        """The document of `heliostat status --json`. If the head does not answer, `problem` has the reason."""
        view = self._observer.find(name)
        record, connection, pulse = view.record, view.folder.connection(), view.folder.heartbeat()
        table = view.live.get("nodes") or {}
        ray_nodes: dict[str, RayNode] = {}
        jobs = [run_job(view.run)] if view.run else []
        sync = self._observer.platform_sync(view.folder, record)
        error: HeliostatError | None = sync.refusal if sync else None
        if view.address and not record.has_ended():
            try:
                api = self._connector.ray_api(view)
                for node in api.nodes():  # a node that a platform started is found by its address
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
            idle_s = 0.0  # the head checks for work only every few seconds
        keys = ("id", "status", "entrypoint", "started", "seconds", "exit_code")
        return {
            "schema": JSON_SCHEMA,
            "name": record.name,
            "backend": record.backend,
            "state": str(view.state),
            "ray_version": connection["ray"] if connection else None,
            "address": view.address,
            "dashboard_port": connection["dashboard_port"] if connection else None,
            "started": record.created,
            "time_left_s": pulse.get("time_left_s"),
            "idle_s": idle_s,
            "problem": str(error or ""),
            **({"remedy": f"{error.hint}\n{error.attachment}"} if error and error.attachment else {}),
            "nodes": [
                _node(node, row, ray_nodes.get(node.name) or ray_nodes.get(str(row.get("ip"))))
                for node in record.nodes.values()
                for row in [table.get(node.name, {})]
            ],
            "jobs": [cast("JobInfo", select(job, keys)) for job in jobs],
        }


def run_job(job: JobReport) -> JobInfo:
    """The command of a `run`, in the shape of Ray's jobs."""
    started = job.get("started")
    seconds = (job.get("ended") or time.time()) - started if started else None
    more = {"kind": "run", "seconds": None if seconds is None else round(seconds, 3), "message": ""}
    return cast("JobInfo", {**job, **more})


def without_driver(jobs: list[JobInfo], run: JobReport) -> list[JobInfo]:
    """Ray's jobs without the driver of a `run`, which is listed separately."""
    pid = run.get("pid")
    return [job for job in jobs if pid is None or job["kind"] != "driver" or str(job["pid"]) != str(pid)]


def _node(node: NodeRecord, row: NodeReport, ray: RayNode | None) -> NodeStatus:
    return {
        "name": node.name,
        "role": node.role,
        "group": node.group,
        "state": str(node.state),
        "reason": node.reason,
        "since": node.since,
        "ip": row.get("ip"),
        "host": row.get("host"),
        "native_id": node.handle,
        "ports": row.get("ports"),
        "resources": ray["resources"] if ray else {},
        "gpus": ray["gpus"] if ray else [],
        **({"restarts": row["restarts"]} if row.get("restarts") else {}),
    }
