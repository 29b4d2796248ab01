"""Is anybody using the cluster? Submitted jobs, connected drivers and the actors of jobs count; Ray's own do not."""

from __future__ import annotations

import json
import math
import os
import time
from typing import Any, Dict, List, Optional, Tuple

from . import ports
from .raynode import http_get

_ACTORS = "/api/v0/actors?filter_keys=state&filter_predicates=%3D&filter_values=ALIVE&limit=1000"
_OWN = "SUPERVISOR_ACTOR_RAY_NAMESPACE"  # the actor that runs a submitted job, which is counted as a job


class Dashboard:
    """Ray's dashboard on this host's loopback. `owned`: it runs as this user, and the token goes to nobody else."""

    def __init__(self, port: int, token: str, owned: bool = True) -> None:
        self.port, self.token, self.owned = port, token, owned

    async def get(self, path: str, timeout: float = 30) -> Any:
        """What it answers. Raises OSError when it does not."""
        if self.token and self.owned and not ports.is_ours(self.port):
            raise OSError("no process of this user listens on port %d" % self.port)
        status, body = await http_get("127.0.0.1", self.port, path, self.token, timeout=timeout)
        if status != 200:
            raise OSError("%s answers %d" % (path, status))
        try:
            return json.loads(body)
        except ValueError:
            raise OSError("%s answers no JSON" % path) from None


async def activity(dashboard: Dashboard, since: float = math.inf) -> Optional[str]:
    """What is going on, in a few words, or ended after `since` (seconds of the epoch); None: nothing.
    Raises OSError when Ray's dashboard does not answer."""
    ask = dashboard.get
    for job in await ask("/api/jobs/"):
        if job.get("status") in ("PENDING", "RUNNING") or (job.get("end_time") or 0) / 1000 >= since:
            return "job %s" % (job.get("submission_id") or job.get("job_id"))
    driver = (await ask("/api/component_activities")).get("driver") or {}
    if driver.get("is_active") == "ACTIVE":
        return "a driver is connected"
    for actor in (await ask(_ACTORS))["data"]["result"]["result"]:
        namespace = str(actor.get("ray_namespace") or "")
        if namespace != _OWN and not namespace.startswith("_"):
            return "actor %s" % actor.get("class_name")
    return None


async def last_jobs(dashboard: Dashboard) -> List[Dict[str, Any]]:
    """What became of the submitted jobs: id, status, exit_code, seconds."""
    found = []
    for job in await dashboard.get("/api/jobs/", 3):
        if job.get("submission_id"):
            seconds = ((job.get("end_time") or time.time() * 1000) - (job.get("start_time") or 0)) / 1000
            code = job.get("driver_exit_code")
            found.append({"id": job["submission_id"], "status": job.get("status"), "seconds": round(seconds, 3),
                          "exit_code": 128 - code if code is not None and code < 0 else code})  # fmt: skip
    return found


class IdleClock:
    """How long nothing has happened. Touching the `keepalive` file of the cluster's folder counts as something."""

    def __init__(self, idle: Dict[str, Any], keepalive: str) -> None:
        self.timeout: Optional[float] = idle.get("timeout_s")
        self.window: Optional[Tuple[int, int]] = tuple(idle["window"]) if idle.get("window") else None
        self.keepalive, self._touched = keepalive, self._stamp(keepalive)
        self.since = time.monotonic()
        self.active = False  # the last look found something
        # six looks a timeout are enough; without one, somebody may still ask `status` how long it has been quiet
        self.every_s = min(15.0, max(0.5, self.timeout / 6)) if self.timeout else 30.0

    @staticmethod
    def _stamp(path: str) -> Optional[int]:
        try:
            return os.stat(path).st_mtime_ns
        except OSError:
            return None

    def note(self, active: bool, known: bool = True) -> None:
        """known: False where Ray did not answer, and work is only assumed."""
        touched = self._stamp(self.keepalive)
        # only whether it changed: the clock of a file server is not ours
        if active or self.active or touched != self._touched:  # it may have gone on until this look
            self.since, self._touched = time.monotonic(), touched
        self.active = active and known

    def seconds(self) -> float:
        """0 while the last look found something: it is taken to go on until a look finds nothing."""
        return 0.0 if self.active else time.monotonic() - self.since

    def is_over(self) -> bool:
        if self.timeout is None or self.seconds() < self.timeout:
            return False
        if self.window is None:
            return True
        now = time.localtime()
        minute, (start, end) = now.tm_hour * 60 + now.tm_min, self.window
        return start <= minute < end if start < end else minute >= start or minute < end
