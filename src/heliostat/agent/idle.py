"""Whether a cluster is in use: submitted jobs, connected drivers and the actors of jobs count; Ray's own actors do not."""

from __future__ import annotations

import json
import math
import os
import time
from typing import Any, List, Optional, Tuple

from . import ports
from .protocol import IdleConfig, RayJob
from .raynode import http_get

_ACTORS = "/api/v0/actors?filter_keys=state&filter_predicates=%3D&filter_values=ALIVE&limit=1000"
_JOB_SUPERVISOR = "SUPERVISOR_ACTOR_RAY_NAMESPACE"  # its job is counted as a job


class Dashboard:
    """Ray's dashboard on this host's loopback. `owned`: it runs as this user, and no other process gets the token."""

    def __init__(self, port: int, token: str, owned: bool = True) -> None:
        self.port, self.token, self.owned = port, token, owned

    async def get(self, path: str, timeout: float = 30) -> Any:
        """The decoded JSON answer. Raises OSError if there is none."""
        if self.token and self.owned and not ports.is_ours(self.port):
            raise OSError("no process of this user listens on port %d" % self.port)
        status, body = await http_get("127.0.0.1", self.port, path, self.token, timeout=timeout)
        if status != 200:
            raise OSError("%s answers %d" % (path, status))
        try:
            return json.loads(body)
        except ValueError:
            raise OSError("%s answers no JSON" % path) from None


async def find_activity(dashboard: Dashboard, since: float = math.inf) -> Optional[str]:
    """What uses the cluster, or a job that ended after `since` (seconds of the epoch); None if nothing does.

    Raises OSError when the dashboard does not answer."""
    for job in await dashboard.get("/api/jobs/"):
        if job.get("status") in ("PENDING", "RUNNING") or (job.get("end_time") or 0) / 1000 >= since:
            return "job %s" % (job.get("submission_id") or job.get("job_id"))
    driver = (await dashboard.get("/api/component_activities")).get("driver") or {}
    if driver.get("is_active") == "ACTIVE":
        return "a driver is connected"
    for actor in (await dashboard.get(_ACTORS))["data"]["result"]["result"]:
        namespace = str(actor.get("ray_namespace") or "")
        if namespace != _JOB_SUPERVISOR and not namespace.startswith("_"):
            return "actor %s" % actor.get("class_name")
    return None


async def list_jobs(dashboard: Dashboard) -> List[RayJob]:
    """The submitted jobs with their status and exit code."""
    found: List[RayJob] = []
    for job in await dashboard.get("/api/jobs/", 3):
        if job.get("submission_id"):
            seconds = ((job.get("end_time") or time.time() * 1000) - (job.get("start_time") or 0)) / 1000
            code = job.get("driver_exit_code")
            found.append({"id": job["submission_id"], "status": job.get("status"), "seconds": round(seconds, 3),
                          "exit_code": 128 - code if code is not None and code < 0 else code})  # fmt: skip
    return found


class IdleClock:
    """Measures how long a cluster has been idle. Touching the file `keepalive` counts as activity."""

    def __init__(self, idle: IdleConfig, keepalive: str) -> None:
        self.timeout = idle.get("timeout_s")
        window = idle.get("window")
        self.window: Optional[Tuple[int, int]] = (window[0], window[1]) if window else None
        self.keepalive, self._touched = keepalive, self._mtime(keepalive)
        self.since = time.monotonic()
        self.active = False  # the last check found activity
        # six checks per timeout are enough; without a timeout, `status` still shows the idle time
        self.interval_s = min(15.0, max(0.5, self.timeout / 6)) if self.timeout else 30.0

    @staticmethod
    def _mtime(path: str) -> Optional[int]:
        try:
            return os.stat(path).st_mtime_ns
        except OSError:
            return None

    def update(self, active: bool, known: bool = True) -> None:
        """Record a check. known: False if Ray did not answer and activity is only assumed."""
        touched = self._mtime(self.keepalive)
        # compare for change only: the clock of a file server may differ
        if active or self.active or touched != self._touched:  # activity may have lasted until this check
            self.since, self._touched = time.monotonic(), touched
        self.active = active and known

    def seconds(self) -> float:
        """The idle time; 0 while the last check found activity."""
        return 0.0 if self.active else time.monotonic() - self.since

    def is_expired(self) -> bool:
        if self.timeout is None or self.seconds() < self.timeout:
            return False
        if self.window is None:
            return True
        now = time.localtime()
        minute, (start, end) = now.tm_hour * 60 + now.tm_min, self.window
        return start <= minute < end if start < end else minute >= start or minute < end
