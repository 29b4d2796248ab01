"""The head's agent: a node that also gathers the others, runs the command, keeps the clocks, and ends the cluster."""

from __future__ import annotations

import asyncio
import datetime
import json
import os
import sys
import time
from typing import Any, Dict, List, Optional

from . import files, hub, ports
from .command import Command
from .idle import IdleClock, activity, last_jobs
from .node import Json, Node, mine
from .raynode import client_environment, join

WARN_S = 15 * 60
STEP_S = 5.0  # for the step of the other nodes to end by itself, once their agents have hung up
# never the head: Ray would end it while its GCS lives on
DRAIN = """
import json, sys
from ray._raylet import GcsClient
from ray.core.generated import autoscaler_pb2
ask = json.load(sys.stdin)
client = GcsClient(address=ask["address"])
for node in client.get_all_node_info(timeout=10).values():
    if node.state == 0 and not node.is_head_node:
        reason = autoscaler_pb2.DRAIN_NODE_REASON_PREEMPTION
        print(client.drain_node(node.node_id.hex(), reason, ask["reason"], ask["deadline_ms"]))
"""


class Head(Node):
    def __init__(self, config: Json, temp: str) -> None:
        super().__init__(config, temp)
        self.hub: Optional[hub.Hub] = None
        self.nodes: Dict[str, Json] = {}
        self.alive = (
            0  # how many of them are READY: counted as they move, for each beat of each node comes by here
        )
        self.work = Command(config, temp, self.flush) if mine(config) else None
        self.enough = asyncio.Event()
        self.started = self.looked = time.time()
        self.began = time.monotonic()
        self.ended: Optional[Json] = None
        self.idle = IdleClock(config.get("idle") or {}, self._path("keepalive"))
        self.winding_down = False
        self.look: Optional[asyncio.Future[None]] = None
        self.jobs: List[Json] = []  # what had become of the submitted jobs when the cluster ended
        self._flush_due = False

    def _path(self, name: str) -> str:
        return os.path.join(self.folder, name)

    # -- the table of nodes, and the files that the client reads

    def changed(self) -> None:
        self.learn(self.name, self.status())

    def learn(self, node: str, status: Json) -> None:
        old = self.nodes.get(node, {})
        self.nodes[node] = status
        if any(old.get(key) != status.get(key) for key in ("state", "reason", "job")):
            self.note({"node": node, "state": status.get("state"), "reason": status.get("reason")})
            self.flush_soon()
        self.alive += (status.get("state") == "READY") - (old.get("state") == "READY")
        if self.alive >= self.config["min_nodes"]:
            self.enough.set()

    def heard(self, node: str, message: Json) -> Json:
        """A worker speaks; the answer tells it that we live, and whether the nodes that it waits for are there."""
        awaited = message.pop("await", None)
        for name in message.pop("release", ()):
            self.hub.tell({"do": "leave", "reason": "its job ends"}, name)  # type: ignore[union-attr]
        self.learn(node, message)
        if not awaited:
            return {}
        return {"there": all(self.nodes.get(name, {}).get("state") == "READY" for name in awaited)}

    def lost(self, node: str) -> None:
        status = self.nodes.get(node, {})
        if status.get("state") in ("READY", "STARTING"):
            since = max(time.time(), float(status.get("since") or 0))
            self.learn(node, {**status, "state": "LOST", "reason": "its agent is silent", "since": since})

    def note(self, event: Json) -> None:
        """One line a transition in the head's own log."""
        try:
            with open(os.path.join(self.logs, "agent.jsonl"), "a") as stream:
                stream.write(json.dumps({"at": time.time(), **event}) + "\n")
        except OSError:
            pass

    def flush_soon(self) -> None:
        if not self._flush_due:  # many nodes that move at once cost one write
            self._flush_due = True
            asyncio.get_running_loop().call_later(0.02, self.flush)

    def flush(self) -> None:
        self._flush_due = False
        job = self.work.job if self.work else None
        state = {"schema": 1, "nodes": self.nodes, "job": job, "started": self.started}
        try:
            # on one line: indenting takes Python's slow encoder, and this is written while everybody calls
            text = json.dumps({**state, "jobs": self.jobs, "ended": self.ended})
            files.write(self._path("state.json"), text + "\n")
        except OSError:
            pass  # a full disk must not end a running cluster; the next change tries again

    def pulse(self, beat: int) -> None:
        limit = self.config.get("time_limit_s")
        left = limit - (time.monotonic() - self.began) if limit else None
        idle = round(self.idle.seconds(), 1)
        said = {"beat": beat, "at": time.time(), "idle_s": idle, "time_left_s": left}
        try:
            files.write_json(self._path("pulse.json"), said)
            if self.config["auth"] == "token" and not os.path.exists(self.config["token_path"]):
                files.write(self.config["token_path"], self.secret)  # somebody removed it: clients need it
                self.note({"event": "the token file was gone, and is written again"})
        except OSError:
            pass

    # -- starting

    async def prepare(self, block: ports.Block) -> None:
        if self.hub:
            await self.hub.close(0)
        self.hub = hub.Hub(self.secret, self.heard, self.lost, self.silent_s, block.ports["dashboard"])
        await self.hub.start(self.ip, block.ports["hub"])
        place = {"id": self.config["id"], "ip": self.ip, "gcs": block.ports["gcs"], "hub": block.ports["hub"]}
        files.write_json(self._path("head.json"), place)

    def publish(self) -> None:
        """The connection files: what a person sources and a program reads."""
        assert self.block
        port = self.block.ports
        job = {k: os.environ[k] for k in ("SLURM_JOB_ID", "PBS_JOBID") if k in os.environ}
        started = datetime.datetime.fromtimestamp(self.started).astimezone().isoformat(timespec="seconds")
        variables: Dict[str, Any] = {
            "RAY_ADDRESS": join(self.ip, port["gcs"]),
            "RAY_PORT": port["gcs"],
            "HEAD_NODE": self.info["host"],
            "HEAD_IP": self.ip,
            **job,
            "USER_PORT_OFFSET": self.config["ports"].get("offset", 0),
            "STARTED": started,
            "DASHBOARD_PORT": port["dashboard"],
            "RAY_AUTH_MODE": "token" if self.config["auth"] == "token" else "disabled",
        }
        if self.config["auth"] == "token":
            variables["RAY_AUTH_TOKEN_PATH"] = self.config["token_path"]
        files.write_json(
            self._path("connection.json"),
            {"schema": 1, "address": variables["RAY_ADDRESS"], "dashboard_port": port["dashboard"], "ray": self.info["ray"],
             "python": self.info["python"], "client_port": port["client"], "env": variables},
        )  # fmt: skip
        lines = ["export %s='%s'\n" % (k, str(v).replace("'", "'\\''")) for k, v in variables.items()]
        files.write(self._path("connection.env"), "".join(lines))

    # -- while it runs

    async def live(self) -> None:
        assert self.ray
        self.publish()
        self.idle.note(True)  # until now there was nothing that anybody could have used
        work = [self.ray.ended.wait(), self.clocks()]
        if self.work:
            work.append(self.command())
        tasks = [asyncio.ensure_future(coroutine) for coroutine in work]
        gather = asyncio.ensure_future(asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED))
        await self.unless_stopped(gather)
        for task in tasks:
            task.result() if task.done() else task.cancel()

    async def clocks(self) -> None:
        """Beats, idle time, the time limit. Returns when the cluster should end."""
        assert self.block
        limit, grace, warned = self.config.get("time_limit_s"), float(self.config.get("grace_s", 10)), False
        looked = -1e9
        for beat in range(1 << 62):
            if limit:
                left = limit - (time.monotonic() - self.began)
                if left <= WARN_S and not warned:
                    warned = True
                    self.note({"event": "the time limit is %d s away" % left})
                if left <= grace and self.config.get("own_clock", True):
                    return self.stop("the time limit of %d s is reached" % limit)
            if time.monotonic() - looked >= self.idle.every_s:
                looked = time.monotonic()
                if self.look is None or self.look.done():  # a dashboard that hangs must not stop the clocks
                    self.look = asyncio.ensure_future(self.look_for_activity())
            self.read_requests()
            if beat % 5 == 0:
                self.pulse(beat)
            await asyncio.sleep(min(1.0, self.idle.every_s))

    def read_requests(self) -> None:
        """What clients ask of a running cluster: one small file each, removed when it is read."""
        folder = self._path("requests")
        try:
            names = sorted(name for name in os.listdir(folder) if name.endswith(".json"))
        except OSError:
            return
        for name in names:
            request = files.read_json(os.path.join(folder, name)) or {}
            os.unlink(os.path.join(folder, name))
            self.note({"request": request})
            if request.get("do") == "stop-job" and self.work and request.get("job") == self.work.job["id"]:
                grace = float(self.config.get("grace_s", 10))
                self.background.append(asyncio.ensure_future(self.work.end(grace, self.at_once)))
            elif self.hub and request.get("node"):
                self.hub.tell(request, request["node"])

    async def look_for_activity(self) -> None:
        assert self.block
        if self.work and self.work.waits_or_runs:
            return self.idle.note(True)
        since, self.looked = self.looked, time.time()  # what began and ended between two looks counts
        try:
            self.idle.note(await activity(self.block.ports["dashboard"], self.secret, since) is not None)
        except (OSError, KeyError, TypeError, asyncio.TimeoutError):
            self.idle.note(True)  # we do not know, so nobody's work is ended
        if self.idle.is_over():
            self.stop("idle for %d s" % self.idle.seconds())

    async def command(self) -> None:
        """Runs the user's command here when enough nodes are there. Its end is the cluster's end."""
        assert self.work and self.block
        patience = float(self.config.get("gather_s", 600))
        try:
            await asyncio.wait_for(self.enough.wait(), patience)
        except asyncio.TimeoutError:
            self.stop_reason = "fewer than %d nodes came within %d s" % (self.config["min_nodes"], patience)
            return
        code = await self.work.run(join(self.ip, self.block.ports["gcs"]))
        self.stop_reason = self.stop_reason or "the command ended with code %d" % code

    def others_failed(self, reason: str) -> None:
        for name in self.others:
            if self.nodes.get(name, {}).get("state") != "READY":
                which = {"launch": self.config.get("launch", 0)}
                self.learn(name, {"state": "FAILED", "reason": reason, "since": time.time(), **which})

    def time_is_up(self) -> None:
        self.background.append(asyncio.ensure_future(self.wind_down("the time limit is near")))

    async def wind_down(self, reason: str) -> None:
        """Tells everybody that the end is near: Ray drains the workers with the true deadline (Ray Train sees that as a
        preemption), the command gets SIGTERM; then the end comes when the work is done, or the grace is over."""
        if self.winding_down:
            return
        self.winding_down = True
        grace = float(self.config.get("grace_s", 60))
        end = time.monotonic() + grace
        self.note({"event": "%s: %d s to finish" % (reason, grace)})
        self.background.append(asyncio.ensure_future(self.drain_workers(reason, grace)))
        if self.work:
            await self.work.end(grace, self.at_once)
        while time.monotonic() < end and not self.work:
            try:
                if await activity(self.block.ports["dashboard"], self.secret) is None:  # type: ignore[union-attr]
                    break
            except (OSError, KeyError, TypeError, asyncio.TimeoutError):
                pass
            await asyncio.sleep(1)
        self.stop(reason)

    async def drain_workers(self, reason: str, seconds: float) -> None:
        """Through Ray itself, in a child: the agent never imports it."""
        assert self.block
        request = {"address": join(self.ip, self.block.ports["gcs"]), "reason": reason,
                   "deadline_ms": int((time.time() + seconds) * 1000)}  # fmt: skip
        env = {**os.environ, **client_environment(self.config, self.temp)}
        with open(os.path.join(self.logs, "drain.log"), "ab") as log:
            child = await asyncio.create_subprocess_exec(
                sys.executable, "-c", DRAIN, stdin=asyncio.subprocess.PIPE, stdout=log, stderr=log, env=env
            )
            await child.communicate(json.dumps(request).encode())

    # -- ending

    async def leave(self) -> None:
        if self.work:
            await self.work.end(float(self.config.get("grace_s", 10)), self.at_once)
            self.work.close()
        elif self.block:
            try:
                self.jobs = await last_jobs(self.block.ports["dashboard"], self.secret)
            except (OSError, KeyError, TypeError, asyncio.TimeoutError):
                pass  # Ray is gone already
        if self.hub:
            self.hub.tell({"do": "stop", "reason": self.stop_reason or self.reason})
        if self.ray:
            await self.ray.end()
        if self.hub:
            await self.hub.close(15)
        if (
            self.step
        ):  # its end is the end of their cleaning up; one that we cut short takes Slurm seconds to cancel
            await asyncio.wait([self.step], timeout=STEP_S)

    async def run(self) -> Json:
        self.flush_soon()
        answer = await super().run()
        self.ended = {"at": time.time(), "reason": self.reason, "exit_code": self.exit_code()}
        for name in files.OF_A_HEAD:
            try:
                os.unlink(self._path(name))
            except OSError:
                pass
        self.last_words()  # once more: on a full disk there is room for it only now
        self.flush()
        return answer

    def exit_code(self) -> int:
        if self.work and self.work.job["exit_code"] is not None:
            return int(self.work.job["exit_code"])
        return super().exit_code()
