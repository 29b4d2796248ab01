"""The watch on the head of a cluster whose machines a cloud makes: nobody else would ever end that head.

When nothing has happened for long enough, when the time is over, or when the command of a `run` has ended, it ends the workers
and then its own machine, through the same provider that Ray's autoscaler uses.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import subprocess
import sys
import time
from typing import Any, Dict, Optional

from .idle import Dashboard, IdleClock, activity, last_jobs

Json = Dict[str, Any]
AGAIN_S = 30.0
READ_S = 15.0  # the autoscaler reads its file every five seconds
# a dashboard that is silent for a while may be busy with somebody's work; one that is silent for longer has ended
SILENT_S = 900.0
OVER = ("SUCCEEDED", "FAILED", "STOPPED")

# Ray's autoscaler would make the workers anew: told to keep none, it reads that within its few seconds
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


def do_watch(config: Json) -> Json:
    """Goes into the background, once: whoever starts Ray anew on this head finds it there already."""
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
    os.setsid()  # the terminal that Ray's launcher has opened goes
    log = os.open(os.path.join(home, "watch.log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    try:
        asyncio.run(Watch(config, home).live())
    finally:
        os._exit(0)


class Watch:
    def __init__(self, config: Json, home: str) -> None:
        self.config, self.home = config, home
        self.clock = IdleClock(config.get("idle") or {}, os.path.join(home, "keepalive"))
        self.port, self.limit = int(config["dashboard"]), config.get("time_limit_s")
        self.began = self.heard = time.monotonic()
        self.looked = time.time()

    def _read(self, name: str) -> str:
        try:
            with open(os.path.join(self.home, name)) as stream:
                return stream.read().strip()
        except OSError:
            return ""

    async def live(self) -> None:
        _say("watching")
        while True:
            reason = await self.why()
            if reason:
                self.end(reason)
            await asyncio.sleep(min(5.0, self.clock.every_s))

    async def why(self) -> Optional[str]:
        """Why the cluster is to end now; None: it is not."""
        if self.limit and time.monotonic() - self.began > float(self.limit):
            return "its time of %d s is over" % float(self.limit)
        # a container of the person's may run Ray as another user
        secret = self._read("token") if self.config.get("token") else ""
        dashboard = Dashboard(self.port, secret, owned=False)
        job, since = self._read("job"), self.looked
        try:
            if job and await self._over(job, dashboard):
                return "its command has ended"
            self.looked = time.time()
            self.clock.note(await activity(dashboard, since) is not None)
            self.heard = time.monotonic()
        except (OSError, KeyError, TypeError, asyncio.TimeoutError):
            # we do not know, so nobody's work is ended, for a while
            self.clock.note(time.monotonic() - self.heard < SILENT_S, known=False)
        if not self.clock.is_over():
            return None
        try:
            if (
                await activity(dashboard, since) is not None
            ):  # look again: work may have begun while we looked
                self.clock.note(True)
                return None
        except (OSError, KeyError, TypeError, asyncio.TimeoutError):
            pass  # silent for longer than SILENT_S, or it has answered a moment ago
        return "idle for %d s" % self.clock.seconds()

    async def _over(self, job: str, dashboard: Dashboard) -> bool:
        return any(one["id"] == job and one["status"] in OVER for one in await last_jobs(dashboard))

    def end(self, reason: str) -> None:
        """Until it is done: then this machine is gone, and we with it."""
        _say(reason)
        python = rays_python()
        while True:
            done = subprocess.run([python, "-c", END, reason, str(READ_S)], stdin=subprocess.DEVNULL)
            _say("told the cloud" if done.returncode == 0 else "could not tell the cloud: again in a while")
            time.sleep(AGAIN_S)


def rays_python(proc: str = "/proc") -> str:
    """The Python that has Ray: that of its dashboard. Who wrote their own start commands may have put it anywhere."""
    for name in os.listdir(proc) if os.path.isdir(proc) else ():
        try:
            with open(os.path.join(proc, name, "cmdline"), "rb") as stream:
                words = stream.read().decode(errors="replace").split("\0")
        except OSError:
            continue
        if any(word.endswith("/ray/dashboard/dashboard.py") for word in words):
            return words[0]
    return sys.executable


def _say(text: str) -> None:
    sys.stderr.write(json.dumps({"at": time.time(), "event": text}) + "\n")
    sys.stderr.flush()
