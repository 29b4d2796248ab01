"""The head's agent: a node that also gathers the others, runs the command, keeps the clocks, and ends the cluster."""

from __future__ import annotations

import asyncio
import datetime
import json
import os
import signal
import sys
import time
from typing import Any, Dict, List, Optional

from . import files, hub, ports, processes
from .idle import IdleClock, activity, last_jobs
from .node import Json, Node
from .raynode import client_environment, join

WARN_S = 15 * 60


class Head(Node):
    def __init__(self, config: Json, temp: str) -> None:
        super().__init__(config, temp)
        self.hub: Optional[hub.Hub] = None
        self.nodes: Dict[str, Json] = {}
        self.job: Optional[Json] = None
        self.job_process: Optional[asyncio.subprocess.Process] = None
        self.enough = asyncio.Event()
        self.started = self.looked = time.time()
        self.began = time.monotonic()
        self.ended: Optional[Json] = None
        self.idle = IdleClock(config.get("idle") or {}, self._path("keepalive"))
        self.events: Any = None
        self.look: Optional[asyncio.Future[None]] = None
        self.jobs: List[Json] = []  # what had become of the submitted jobs when the cluster ended
        self._flush_due = False
        command = config.get("command")
        if command:
            self.job = {"id": "run", "status": "PENDING", "entrypoint": command["text"], "started": None, "ended": None,
                        "exit_code": None}  # fmt: skip

    def _path(self, name: str) -> str:
        return os.path.join(self.folder, name)

    # -- the table of nodes, and the files that the client reads

    def changed(self) -> None:
        self.learn(self.name, self.status())

    def learn(self, node: str, status: Json) -> None:
        old = self.nodes.get(node, {})
        self.nodes[node] = status
        if (old.get("state"), old.get("reason")) != (status.get("state"), status.get("reason")):
            self.note({"node": node, "state": status.get("state"), "reason": status.get("reason")})
            self.flush_soon()
        if sum(n.get("state") == "READY" for n in self.nodes.values()) >= self.config["min_nodes"]:
            self.enough.set()

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
        state = {"schema": 1, "nodes": self.nodes, "job": self.job, "started": self.started}
        try:
            files.write_json(self._path("state.json"), {**state, "jobs": self.jobs, "ended": self.ended})
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
        self.hub = hub.Hub(self.secret, self.learn, self.lost, self.silent_s)
        await self.hub.start(self.ip, block.ports["hub"])
        place = {"ip": self.ip, "gcs": block.ports["gcs"], "hub": block.ports["hub"]}
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
        if self.job:
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
                if left <= grace:
                    return self.stop("the time limit of %d s is reached" % limit)
            if time.monotonic() - looked >= self.idle.every_s:
                looked = time.monotonic()
                if self.look is None or self.look.done():  # a dashboard that hangs must not stop the clocks
                    self.look = asyncio.ensure_future(self.look_for_activity())
            if os.path.exists(self._path("stop-run")):
                self.background.append(asyncio.ensure_future(self.end_job()))
                os.unlink(self._path("stop-run"))
            if beat % 5 == 0:
                self.pulse(beat)
            await asyncio.sleep(min(1.0, self.idle.every_s))

    async def look_for_activity(self) -> None:
        assert self.block
        if self.job and self.job["status"] in ("PENDING", "RUNNING"):
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
        assert self.job and self.block
        patience = float(self.config.get("gather_s", 600))
        try:
            await asyncio.wait_for(self.enough.wait(), patience)
        except asyncio.TimeoutError:
            self.job.update(status="FAILED")
            self.stop_reason = "fewer than %d nodes came within %d s" % (self.config["min_nodes"], patience)
            return
        command = self.config["command"]
        argv = list(command["argv"])
        if argv[0] in ("python", "python3"):
            argv[0] = sys.executable  # a system may have only one of the two names
        env = {k: v for k, v in os.environ.items() if k != "RAY_AUTH_TOKEN"}
        env.update(self.config.get("env") or {})
        env.update(client_environment(self.config, self.temp))
        env.update(RAY_ADDRESS=join(self.ip, self.block.ports["gcs"]), PYTHONUNBUFFERED="1")
        self.job.update(status="RUNNING", started=time.time())
        try:
            with open(self._path("logs/run.out"), "wb") as out, open(self._path("logs/run.err"), "wb") as err:
                self.job_process = await asyncio.create_subprocess_exec(
                    *argv, cwd=command["cwd"], env=env, stdin=asyncio.subprocess.DEVNULL, stdout=out, stderr=err,
                    start_new_session=True, preexec_fn=lambda: processes.die_with_parent(signal.SIGKILL),
                )  # fmt: skip
            self.flush()
            code = await self.job_process.wait()
        except OSError as error:
            code = 127 if isinstance(error, FileNotFoundError) else 126
            files.write(self._path("logs/run.err"), "%s\n" % error)
        code = 128 - code if code < 0 else code
        status = "STOPPED" if self.job["status"] == "STOPPING" else "SUCCEEDED" if code == 0 else "FAILED"
        self.job.update(status=status, exit_code=code, ended=time.time())
        self.flush()
        self.stop_reason = self.stop_reason or "the command ended with code %d" % code

    async def end_job(self) -> None:
        """SIGTERM to the command and what it started, time to save its work, then SIGKILL."""
        process = self.job_process
        if not (self.job and process and process.returncode is None and self.job["status"] == "RUNNING"):
            return
        self.job["status"] = "STOPPING"
        self.signal_job(signal.SIGTERM)
        over = asyncio.ensure_future(process.wait())
        at_once = asyncio.ensure_future(self.at_once.wait())
        await asyncio.wait(
            [over, at_once], timeout=self.config.get("grace_s", 10), return_when=asyncio.FIRST_COMPLETED
        )
        at_once.cancel()
        if not over.done():
            self.signal_job(signal.SIGKILL)
            await over

    def signal_job(self, number: int) -> None:
        try:
            if self.job_process:
                os.killpg(self.job_process.pid, number)
        except (ProcessLookupError, PermissionError):
            pass

    # -- ending

    async def leave(self) -> None:
        await self.end_job()
        if self.job and self.job["exit_code"] is None:
            code = self.job_process.returncode if self.job_process else None
            code = 128 - code if code is not None and code < 0 else code
            self.job.update(status="STOPPED", ended=time.time(), exit_code=code)
        if self.block and not self.job:
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
        if self.job and self.job["exit_code"] is not None:
            return int(self.job["exit_code"])
        return super().exit_code()
