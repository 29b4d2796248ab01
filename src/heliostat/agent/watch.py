"""`agent watch`: ends a cloud cluster from its head, which Ray's autoscaler never does.

After the idle timeout, the time limit or the command of a `run`, it terminates the workers and then its own instance, through
the node provider of Ray's autoscaler.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import subprocess
import sys
import time
from typing import Optional

from .idle import Dashboard, IdleClock, find_activity, list_jobs
from .protocol import Answer, WatchConfig

RETRY_S = 30.0
READ_S = 15.0  # the autoscaler reads its file every five seconds
# a dashboard that does not answer may be busy; after this long it has ended
SILENT_S = 900.0
FINAL = ("SUCCEEDED", "FAILED", "STOPPED")

# Ray's autoscaler would replace the workers, so it is first configured to keep none; it rereads its file
END = """
import json, os, sys, time
from ray.autoscaler._private.providers import _get_node_provider
path = os.path.expanduser("~/ray_bootstrap_config.yaml")
with open(path) as stream:
    config = json.load(stream)
provider = _get_node_provider(config["provider"], config["cluster_name"])
heads = provider.non_terminated_nodes({"ray-node-type": "head"})
for node in heads:
    provider.set_node_tags(node, {"heliostat-ended": sys.argv[1]})
config["max_workers"] = 0
for kind in config["available_node_types"].values():
    kind.update(min_workers=0, max_workers=0)
with open(os.open(path + ".new", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as stream:
    json.dump(config, stream)
os.replace(path + ".new", path)
time.sleep(float(sys.argv[2]))
workers = [node for node in provider.non_terminated_nodes({}) if node not in heads]
provider.terminate_nodes(workers)
provider.terminate_nodes(heads)
"""


def do_watch(config: WatchConfig) -> Answer:
    """Start the watch in the background, unless one runs already, as after a restart of Ray on this head."""
    home = os.path.join(os.path.expanduser("~"), config["home"])
    lock = os.open(os.path.join(home, "watch.lock"), os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        return {"ok": True, "already": True}
    child = os.fork()
    if child:
        os.close(lock)
        return {"ok": True, "pid": child}
    os.setsid()  # the terminal of Ray's launcher closes
    log = os.open(os.path.join(home, "watch.log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    try:
        asyncio.run(Watch(config, home).run())
    finally:
        os._exit(0)


class Watch:
    def __init__(self, config: WatchConfig, home: str) -> None:
        self.config, self.home = config, home
        self.clock = IdleClock(config.get("idle") or {}, os.path.join(home, "keepalive"))
        self.port, self.limit = int(config["dashboard"]), config.get("time_limit_s")
        self.began = self.answered_at = time.monotonic()
        self.checked_at = time.time()

    def _read(self, name: str) -> str:
        try:
            with open(os.path.join(self.home, name)) as stream:
                return stream.read().strip()
        except OSError:
            return ""

    async def run(self) -> None:
        _log("watching")
        while True:
            reason = await self.end_reason()
            if reason:
                self.end(reason)
            await asyncio.sleep(min(5.0, self.clock.interval_s))

    async def end_reason(self) -> Optional[str]:
        """Why the cluster must end now; None if it must not."""
        if self.limit and time.monotonic() - self.began > float(self.limit):
            return "the time limit of %d s is reached" % float(self.limit)
        # a container may run Ray as another user
        secret = self._read("token") if self.config.get("token") else ""
        dashboard = Dashboard(self.port, secret, owned=False)
        job, since = self._read("job"), self.checked_at
        try:
            if job and await self._is_final(job, dashboard):
                return "the command has ended"
            self.checked_at = time.time()
            self.clock.update(await find_activity(dashboard, since) is not None)
            self.answered_at = time.monotonic()
        except (OSError, KeyError, TypeError, asyncio.TimeoutError):
            # unknown: assume activity for a while
            self.clock.update(time.monotonic() - self.answered_at < SILENT_S, known=False)
        if not self.clock.is_expired():
            return None
        try:
            # check again: work may have started meanwhile
            if await find_activity(dashboard, since) is not None:
                self.clock.update(True)
                return None
        except (OSError, KeyError, TypeError, asyncio.TimeoutError):
            pass  # silent for longer than SILENT_S, or it has just answered
        return "idle for %d s" % self.clock.seconds()

    async def _is_final(self, job: str, dashboard: Dashboard) -> bool:
        return any(one["id"] == job and one["status"] in FINAL for one in await list_jobs(dashboard))

    def end(self, reason: str) -> None:
        """Terminate the cluster, with retries, until this instance ends."""
        _log(reason)
        python = find_ray_python()
        while True:
            done = subprocess.run([python, "-c", END, reason, str(READ_S)], stdin=subprocess.DEVNULL)
            _log("termination requested" if done.returncode == 0 else "termination failed; retrying")
            time.sleep(RETRY_S)


def find_ray_python(proc: str = "/proc") -> str:
    """The Python of Ray's dashboard process: custom start commands may use any environment."""
    for name in os.listdir(proc) if os.path.isdir(proc) else ():
        try:
            with open(os.path.join(proc, name, "cmdline"), "rb") as stream:
                argv = stream.read().decode(errors="replace").split("\0")
        except OSError:
            continue
        if any(argument.endswith("/ray/dashboard/dashboard.py") for argument in argv):
            return argv[0]
    return sys.executable


def _log(text: str) -> None:
    sys.stderr.write(json.dumps({"at": time.time(), "event": text}) + "\n")
    sys.stderr.flush()
