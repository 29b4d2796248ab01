"""Logs of a pod."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from heliostat.backends.kubernetes import api as kube
from heliostat.common.documents import JsonMapping
from heliostat.common.errors import AccessDenied, HeliostatError

if TYPE_CHECKING:
    from heliostat.remote.ray_client import RayApi

RAY_LOGS = ("raylet.out", "raylet.err")
HEAD_LOGS = ("gcs_server.out", "gcs_server.err", "monitor.log", "dashboard.log")
TIMESTAMP = re.compile(rb"\d{4}-\d\d-\d\dT[\d:.]+(Z|[+-]\d\d:\d\d)")
_last_timestamps: dict[
    tuple[str, str, int], bytes
] = {}  # (pod, container, restart): time of the last line read
_complete_lives: set[tuple[str, str, int]] = set()  # ended containers whose log was read


def read_pod_logs(
    api: kube.Api,
    namespace: str,
    node_status: JsonMapping,
    known: Mapping[str, int],
    ray: RayApi | None,
) -> dict[str, bytes]:
    """New bytes of the logs of the pod's containers and of Ray in it, by file name. known: bytes read of each file."""
    pod_path = f"/api/v1/namespaces/{namespace}/pods/{node_status['id']}"
    found: dict[str, bytes] = {}
    try:
        status = api.call("GET", pod_path).get("status") or {}
    except kube.ObjectNotFound:
        return found
    for container in (*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())):
        name, life = container["name"], int(container.get("restartCount") or 0)
        now = log_name(name, life)
        found[now] = _read_container_log(api, pod_path, (node_status["id"], name, life), known.get(now, 0))
        running = (container.get("state") or {}).get("running")
        if (
            life and running and (node_status["id"], name, life - 1) not in _complete_lives
        ):  # else `previous` is the current container
            before = log_name(name, life - 1)
            lines = _split_timestamps(
                _request_log(api, pod_path, {"container": name, "previous": "true", "timestamps": "true"})
            )
            found[before] = b"".join(text for _, text in lines)[known.get(before, 0) :]
            _complete_lives.add((node_status["id"], name, life - 1))
    if ray:
        for name in (*RAY_LOGS, *(HEAD_LOGS if node_status.get("role") == "head" else ())):
            whole = ray.log(str(node_status["ip"]), name)
            found[name] = whole[known.get(name, 0) :]
    return found


def log_name(container: str, life: int) -> str:
    """File name of a container's log; each restart has its own file."""
    return f"{container}.restart-{life}.log" if life else f"{container}.log"


def _read_container_log(api: kube.Api, pod_path: str, key: tuple[str, str, int], known: int) -> bytes:
    """New lines since the last read by this process, else all bytes after `known`."""
    since = _last_timestamps.get(key)
    query = {"container": key[1], "timestamps": "true", **({"sinceTime": since.decode()} if since else {})}
    lines = _split_timestamps(_request_log(api, pod_path, query))
    if lines:
        _last_timestamps[key] = max(stamp for stamp, _ in lines)
    if since:
        return b"".join(text for stamp, text in lines if stamp > since)
    return b"".join(text for _, text in lines)[known:]


def _split_timestamps(data: bytes) -> list[tuple[bytes, bytes]]:
    """(time, line) of each line of the container. The kubelet's own error messages have no time and are skipped."""
    parts = (line.partition(b" ") for line in data.splitlines(keepends=True))
    return [(stamp, text) for stamp, _, text in parts if TIMESTAMP.fullmatch(stamp)]


def _request_log(api: kube.Api, pod_path: str, query: Mapping[str, str]) -> bytes:
    try:
        return api.raw("GET", f"{pod_path}/log", query=query, seconds=120.0)
    except (kube.Unreachable, AccessDenied):
        raise
    except HeliostatError:  # a container that has not started has no log
        return b""
