"""The head's agent: a node that also gathers the others, runs the command, keeps the clocks, and ends the cluster."""

from __future__ import annotations

import asyncio
import datetime
import json
import os
import time
from typing import Any, Dict, List, Optional

from . import files, hub, ports, tls
from .command import Command
from .idle import Dashboard, IdleClock, activity, last_jobs
from .node import Json, Node, mine, try_port
from .raynode import join

WARN_S = 15 * 60
SPEAK_S = 90.0  # a step of many nodes takes a while to start; after that one that never spoke is lost
GATHER_POLL_S = 1.0
CLEAN_S = 10.0  # for the other nodes of our job to remove what they have on their disks
# never the head: Ray would end it while its GCS lives on
DRAIN = """
import json, sys
from ray._raylet import GcsClient
from ray.core.generated import autoscaler_pb2
ask = json.load(sys.stdin)
client = GcsClient(address=ask["address"])
for node in client.get_all_node_info(timeout=10).values():
    if node.state == 0 and not node.is_head_node and node.node_name not in ask["but"]:
        reason = autoscaler_pb2.DRAIN_NODE_REASON_PREEMPTION
        print(client.drain_node(node.node_id.hex(), reason, ask["reason"], ask["deadline_ms"]))
"""


class Head(Node):
    def __init__(self, config: Json, temp: str) -> None:
        super().__init__(config, temp)
        self.hub: Optional[hub.Hub] = None
        self.gcs = 0  # the GCS's port, once the GCS listens there
        self.nodes: Dict[str, Json] = {}
        self.alive = (
            0  # how many of them are READY: counted as they move, for each beat of each node comes by here
        )
        self.work = Command(self.runtime, self.flush) if mine(config) else None
        self.enough = asyncio.Event()
        self.ready_since: Optional[float] = None
        self.started = self.looked = time.time()
        self.ended: Optional[Json] = None
        self.idle = IdleClock(config.get("idle") or {}, self._path("keepalive"))
        self.winding_down = False
        self.warned: Optional[Json] = None  # the last thing that whoever looks must be told
        self.look: Optional[asyncio.Future[None]] = None
        self.jobs: List[Json] = []  # what had become of the submitted jobs when the cluster ended
        self.last_new = time.monotonic()  # when a node was last heard for the first time
        self._flush_due = False

    def _path(self, name: str) -> str:
        return os.path.join(self.folder, name)

    # -- the table of nodes, and the files that the client reads

    def changed(self) -> None:
        self.learn(self.name, self.status())

    def learn(self, node: str, status: Json) -> None:
        old = self.nodes.get(node, {})
        since = old.get("ready") if old.get("launch") == status.get("launch") else None
        if since or (status.get("state") == "READY" and status.get("since")):
            status["ready"] = since or status["since"]  # the history counts from then on
        self.nodes[node] = status
        if not old:
            self.last_new = time.monotonic()
        if any(old.get(key) != status.get(key) for key in ("state", "reason", "job")):
            self.note({"node": node, "state": status.get("state"), "reason": status.get("reason")})
            self.flush_soon()
        self.alive += (status.get("state") == "READY") - (old.get("state") == "READY")
        if self.alive >= self.config["min_nodes"] and not self.enough.is_set():
            self.enough.set()
            self.ready_since = time.time()

    def heard(self, node: str, message: Json) -> Json:
        """A worker speaks; the answer tells it that we live, and whether the nodes that it waits for are there."""
        awaited = message.pop("await", None)
        if "try" in message:
            self.background.append(asyncio.ensure_future(self.try_it(node, *message.pop("try"))))
        for name in message.pop("release", ()):
            self.hub.tell({"do": "leave", "reason": "its job ends"}, name)  # type: ignore[union-attr]
        if int(message.get("launch") or 0) < int(self.nodes.get(node, {}).get("launch") or 0):
            return {
                "do": "stop",
                "reason": "another node has its name now",
            }  # it was given up, and comes back too late
        self.learn(node, message)
        if not awaited:
            return {"gcs": self.gcs}
        return {
            "gcs": self.gcs,
            "there": all(self.nodes.get(name, {}).get("state") == "READY" for name in awaited),
        }

    async def try_it(self, node: str, ip: str, port: int) -> None:
        """A worker asks whether we reach it."""
        error = await try_port(ip, port)
        self.hub.tell({"do": "tried", "error": error}, node)  # type: ignore[union-attr]

    def lost(self, node: str) -> None:
        status = self.nodes.get(node, {})
        if status.get("state") in ("READY", "STARTING"):
            since = max(time.time(), float(status.get("since") or 0))
            self.learn(node, {**status, "state": "LOST", "reason": "its agent is silent", "since": since})

    def miss(self) -> None:
        """Nodes of our job whose agents have never spoken, long after they were started."""
        silent = [name for name in self.others if name not in self.nodes]
        patience = float(self.config.get("speak_s", SPEAK_S))
        if silent and time.monotonic() - self.began > patience:
            step = files.tail(os.path.join(self.logs, "step.log"), 300).strip().rpartition("\n")[2]
            reason = "its agent has not been heard of for %d s%s" % (patience, step and ": " + step)
            which = {"launch": self.config.get("launch", 0), "since": time.time()}
            for name in silent:
                self.learn(name, {"state": "LOST", "reason": reason, **which})

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
        state = {"schema": 1, "nodes": self.nodes, "job": job, "started": self.started, "warned": self.warned,
                 "ready": self.ready_since}  # fmt: skip
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
        self.gcs = 0
        self.hub = hub.Hub(self.secret, self.heard, self.lost, self.silent_s, self.token)
        context = tls.server_context(self.config, self.temp)
        self.info["hub"] = await self.hub.start(self.ip, block.ports["hub"], context)
        place = {"id": self.config["id"], "ip": self.ip, "hub": self.info["hub"]}
        place.update(ray=self.info["ray"], python=self.info["python"])
        place["job"] = os.environ.get("SLURM_JOB_ID") or os.environ.get("PBS_JOBID")
        files.write_json(self._path("head.json"), place)

    def gcs_listens(self, port: int) -> None:
        """The workers learn the port from the hub, which has proved to them that it is this cluster's."""
        self.gcs = port
        if self.hub:
            self.hub.tell({"gcs": port})

    @property
    def dashboard(self) -> Dashboard:
        return Dashboard(self.ray.ports["dashboard"] if self.ray else 0, self.token)

    def publish(self) -> None:
        """The connection files: what a person sources and a program reads."""
        assert self.ray and self.hub
        port = self.ray.ports
        self.hub.dashboard = port["dashboard"]
        job = os.environ.get("SLURM_JOB_ID") or os.environ.get("PBS_JOBID")
        started = datetime.datetime.fromtimestamp(self.started).astimezone().isoformat(timespec="seconds")
        variables: Dict[str, Any] = {
            "RAY_ADDRESS": join(self.ip, port["gcs"]),
            "HELIOSTAT_CLUSTER": self.config["cluster"],
            "HELIOSTAT_RAY_PORT": port["gcs"],
            "HELIOSTAT_HEAD_NODE": self.info["host"],
            "HELIOSTAT_HEAD_IP": self.ip,
            **({"HELIOSTAT_JOB_ID": job} if job else {}),
            "HELIOSTAT_PORT_OFFSET": self.config["ports"].get("offset", 0),
            "HELIOSTAT_STARTED": started,
            "HELIOSTAT_DASHBOARD_PORT": port["dashboard"],
            "RAY_AUTH_MODE": "token" if self.config["auth"] == "token" else "disabled",
        }
        if self.config["auth"] == "token":
            variables["RAY_AUTH_TOKEN_PATH"] = self.config["token_path"]
        variables.update(tls.exports(self.config))
        files.write_json(
            self._path("connection.json"),
            {"schema": 1, "address": variables["RAY_ADDRESS"], "dashboard_port": port["dashboard"], "ray": self.info["ray"],
             "python": self.info["python"], "client_port": port["client"] or None,
             "hub": {"ip": self.ip, "port": self.info["hub"], "tls": bool(self.config.get("tls"))}, "env": variables},
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
        limit = self.config.get("time_limit_s")
        looked = -1e9
        for beat in range(1 << 62):
            if limit:
                left = limit - (time.monotonic() - self.began)
                if left <= WARN_S and not self.warned and limit > WARN_S:
                    self.warn("the time limit is %d minutes away" % (left // 60))
                if left <= self.grace_s and self.config.get("own_clock", True):
                    return self.stop("the time limit of %d s is reached" % limit)
            if time.monotonic() - looked >= self.idle.every_s:
                looked = time.monotonic()
                if self.look is None or self.look.done():  # a dashboard that hangs must not stop the clocks
                    self.look = asyncio.ensure_future(self.look_for_activity())
            self.read_requests()
            if beat % 5 == 0:
                self.pulse(beat)
                self.miss()
            await asyncio.sleep(min(1.0, self.idle.every_s))

    def warn(self, text: str) -> None:
        self.warned = {"at": time.time(), "text": text}
        self.note({"event": text})
        self.flush_soon()

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
                self.background.append(asyncio.ensure_future(self.work.end(self.grace_s, self.at_once)))
            elif request.get("do") == "exec" and request.get("node") == self.name:
                self.background.append(asyncio.ensure_future(self.execute(request)))
            elif self.hub and request.get("node"):
                self.hub.tell(request, request["node"])

    async def look_for_activity(self) -> None:
        assert self.block
        if self.guests_at_work() or (self.work and self.work.waits_or_runs):
            return self.idle.note(True)
        since, self.looked = self.looked, time.time()  # what began and ended between two looks counts
        try:
            self.idle.note(await activity(self.dashboard, since) is not None)
        except (OSError, KeyError, TypeError, asyncio.TimeoutError):
            self.idle.note(True, known=False)  # so nobody's work is ended
        if not self.idle.is_over():
            return
        if await self.busy():  # look again: work may have begun while we looked
            return self.idle.note(True)
        self.stop("idle for %d s" % self.idle.seconds())

    async def command(self) -> None:
        """Runs the user's command here when enough nodes are there. Its end is the cluster's end."""
        assert self.work and self.block
        self.last_new = time.monotonic()
        while not self.enough.is_set():
            late = self.overdue(time.monotonic())
            if late:
                self.stop_reason = late
                return
            try:
                await asyncio.wait_for(self.enough.wait(), GATHER_POLL_S)
            except asyncio.TimeoutError:
                pass
        code = await self.work.run(join(self.ip, self.gcs))
        self.stop_reason = self.stop_reason or "the command ended with code %d" % code

    def overdue(self, now: float) -> str:
        """Why the command waits no longer for nodes; "": it waits. Nodes of other allocations may be queued: as long as one of
        them was never heard, there is no limit. The time counts from the node that was heard last for the first time."""
        patience = float(self.config.get("gather_s", 600))
        queued = [name for name in self.config.get("queued", ()) if name not in self.nodes]
        if queued or now - self.last_new <= patience:
            return ""
        return "fewer than %d nodes came within %d s" % (self.config["min_nodes"], patience)

    def others_failed(self, reason: str, names: List[str]) -> None:
        for name in names:
            if self.nodes.get(name, {}).get("state") in (None, "STARTING"):
                which = {"launch": self.config.get("launch", 0)}
                self.learn(name, {"state": "FAILED", "reason": reason, "since": time.time(), **which})

    def time_is_up(self) -> None:
        self.background.append(asyncio.ensure_future(self.wind_down("the time limit is near")))

    async def wind_down(self, reason: str) -> None:
        """Tells everybody that the end is near. Half of the grace is Ray's: its workers drain with that deadline (Ray Train
        sees a preemption and saves). Then commands get SIGTERM, here and on nodes that joined with one, and have the other
        half. The end comes when the work is done, or the grace is over. A head alone has nothing to drain."""
        if self.winding_down:
            return
        self.winding_down = True
        end = time.monotonic() + self.grace_s
        self.warn("%s: %d s to finish" % (reason, self.grace_s))
        if any(node.get("state") == "READY" for name, node in self.nodes.items() if name != self.name):
            if self.hub:
                self.hub.tell({"do": "drain", "reason": reason})
            notice = asyncio.ensure_future(self.drain_workers(reason, self.grace_s / 2))
            self.background.append(notice)
            while time.monotonic() < end - self.grace_s / 2 and await self.busy():
                await asyncio.sleep(1)
        if self.hub:
            self.hub.tell({"do": "warn", "reason": reason, "seconds": end - time.monotonic()})
        if self.work:
            await self.work.end(end - time.monotonic(), self.at_once)
        while time.monotonic() < end and await self.busy():
            await asyncio.sleep(1)
        self.stop(reason)

    def guests_at_work(self) -> List[str]:
        """Nodes that joined with a command of their own, which has not ended."""
        jobs = ((name, node.get("job") or {}) for name, node in self.nodes.items())
        return [name for name, job in jobs if job.get("status") in ("PENDING", "RUNNING", "STOPPING")]

    async def busy(self) -> bool:
        """Is there work that somebody would miss? Where nobody can tell: yes."""
        if self.guests_at_work() or (self.work and self.work.waits_or_runs):
            return True
        try:
            return await activity(self.dashboard) is not None
        except (OSError, KeyError, TypeError, asyncio.TimeoutError):
            return True

    async def drain_workers(self, reason: str, seconds: float) -> None:
        """Through Ray itself, in a child: the agent never imports it. Where a command runs, its end is the node's: Ray
        would end a node whose only work is a driver."""
        assert self.block
        request = {"address": join(self.ip, self.gcs), "reason": reason, "but": self.guests_at_work(),
                   "deadline_ms": int((time.time() + seconds) * 1000)}  # fmt: skip
        argv, env = self.runtime.wrap(
            [self.runtime.python, "-c", DRAIN], {**os.environ, **self.runtime.client_environment()}
        )
        with open(os.path.join(self.logs, "drain.log"), "ab") as log:
            child = await asyncio.create_subprocess_exec(
                *argv, stdin=asyncio.subprocess.PIPE, stdout=log, stderr=log, env=env, cwd="/"
            )
            await child.communicate(json.dumps(request).encode())

    # -- ending

    async def leave(self) -> None:
        if self.work:
            await self.work.end(self.grace_s, self.at_once)
            self.work.close()
        elif self.block:
            try:
                self.jobs = await last_jobs(self.dashboard)
            except (OSError, KeyError, TypeError, asyncio.TimeoutError):
                pass  # Ray is gone already
        if self.hub:
            self.hub.tell({"do": "stop", "reason": self.stop_reason or self.reason})
        if self.ray:
            await self.ray.end()
        if self.hub:
            await self.hub.close(15)

    async def run(self) -> Json:
        self.flush_soon()
        answer = await super().run()
        self.ended = {"at": time.time(), "reason": self.reason, "exit_code": self.exit_code()}
        for name in (*files.OF_A_HEAD, *(["token"] if self.config.get("standalone") else [])):
            try:
                os.unlink(self._path(name))
            except OSError:
                pass
        self.last_words()  # once more: on a full disk there is room for it only now
        self.flush()
        # the job ends with us: what it ends hard cannot clean up, and takes Slurm seconds to cancel
        if self.step and self.hub:
            await asyncio.wait([self.step], timeout=CLEAN_S)
        return answer

    def exit_code(self) -> int:
        if self.work and self.work.job["exit_code"] is not None:
            return int(self.work.job["exit_code"])
        return super().exit_code()
