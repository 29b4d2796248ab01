"""The user's command on a node: starts it, stops it, and reports its state."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from typing import Callable, Optional

from . import files, processes
from .protocol import AgentConfig, CommandConfig, JobReport
from .runtime import HostRuntime


def runs_here(config: AgentConfig) -> bool:
    """Whether the user's command runs on this node."""
    command = config.get("command")
    if command is None:
        return False
    return command["on"] == config["node"] if "on" in command else config["role"] == "head"


class Command:
    """`job` is its reported state; `on_change` is called when that changed."""

    def __init__(self, runtime: HostRuntime, on_change: Callable[[], None]) -> None:
        self.runtime, self.config, self.on_change = runtime, runtime.config, on_change
        command = self.config["command"]
        assert command is not None
        self.command: CommandConfig = command
        self.process: Optional[asyncio.subprocess.Process] = None
        self.job: JobReport = {"id": command.get("id", "run"), "status": "PENDING", "entrypoint": command["text"],
                               "started": None, "ended": None, "exit_code": None}  # fmt: skip

    @property
    def is_active(self) -> bool:
        return self.job["status"] in ("PENDING", "RUNNING")

    async def run(self, address: str) -> int:
        """Run the command to its end. Returns the exit code that a shell would report."""
        argv = list(self.command["argv"])
        if argv[0] in ("python", "python3"):
            argv[0] = self.runtime.python  # a system may have only one of the two names
        env = {k: v for k, v in os.environ.items() if k != "RAY_AUTH_TOKEN"}
        env.update(self.config.get("env") or {})
        env.update(self.runtime.client_environment())
        env.update(RAY_ADDRESS=address, PYTHONUNBUFFERED="1")
        cwd = self.command["cwd"]
        if self.command.get("package") and not os.path.isdir(cwd):
            files.unzip(self.command["package"], cwd)
        argv, env = self.runtime.wrap(argv, env, cwd)
        self.job.update({"status": "RUNNING", "started": time.time()})
        inherit = self.config.get("standalone")  # the output belongs in the batch job's own log
        base = os.path.join(self.config["folder"], "logs", self.job["id"])
        try:
            # append: a batch job that is requeued continues its logs
            with open(base + ".out", "ab") as out, open(base + ".err", "ab") as err:
                self.process = await asyncio.create_subprocess_exec(
                    *argv, cwd=cwd, env=env, stdin=asyncio.subprocess.DEVNULL,
                    stdout=None if inherit else out, stderr=None if inherit else err,
                    start_new_session=True, preexec_fn=self.prepare_child,
                )  # fmt: skip
            self.job["pid"] = self.process.pid
            self.on_change()
            code = await self.process.wait()
        except OSError as error:
            code = 127 if isinstance(error, FileNotFoundError) else 126
            files.write(base + ".err", "%s\n" % error)
        code = 128 - code if code < 0 else code
        stopped = self.job["status"] == "STOPPING"
        self._set_ended("STOPPED" if stopped else "SUCCEEDED" if code == 0 else "FAILED", code)
        return code

    def prepare_child(self) -> None:
        processes.die_with_parent(signal.SIGKILL)
        os.umask(self.config.get("umask", 0o077))

    async def stop(self, grace_s: float, now: asyncio.Event) -> None:
        """Send SIGTERM to the command and its children; send SIGKILL after the grace period, or when `now` is set."""
        if self.process is None or self.process.returncode is not None or self.job["status"] != "RUNNING":
            return
        self.job["status"] = "STOPPING"
        self.send(signal.SIGTERM)
        ended = asyncio.ensure_future(self.process.wait())
        hurry = asyncio.ensure_future(now.wait())
        await asyncio.wait([ended, hurry], timeout=grace_s, return_when=asyncio.FIRST_COMPLETED)
        hurry.cancel()
        if not ended.done():
            self.send(signal.SIGKILL)
            await ended

    def close(self) -> None:
        """The node ends: make the reported state final."""
        if self.job["exit_code"] is None and self.job["ended"] is None:
            code = self.process.returncode if self.process else None
            self._set_ended("STOPPED", code if code is None or code >= 0 else 128 - code)

    def send(self, number: int) -> None:
        try:
            if self.process and self.config.get("container") and number != signal.SIGKILL:
                # apptainer forwards it to the command; its process group may contain the process that mounts the image
                self.process.send_signal(number)
            elif self.process:
                os.killpg(self.process.pid, number)
        except (ProcessLookupError, PermissionError):
            pass

    def _set_ended(self, status: str, code: Optional[int]) -> None:
        self.job.update({"status": status, "exit_code": code, "ended": time.time()})
        self.on_change()
