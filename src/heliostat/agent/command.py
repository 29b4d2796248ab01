"""The user's own command on a node: start it where and as the user would, stop it in order, tell of it."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from typing import Any, Callable, Dict, Optional

from . import files, processes
from .runtime import Own

Json = Dict[str, Any]


class Command:
    """`job` is what others see of it; `changed` is called when that changed."""

    def __init__(self, runtime: Own, changed: Callable[[], None]) -> None:
        self.runtime, self.config, self.changed = runtime, runtime.config, changed
        self.words: Json = self.config["command"]
        self.process: Optional[asyncio.subprocess.Process] = None
        self.job: Json = {"id": self.words.get("id", "run"), "status": "PENDING", "entrypoint": self.words["text"],
                          "started": None, "ended": None, "exit_code": None}  # fmt: skip

    @property
    def waits_or_runs(self) -> bool:
        return self.job["status"] in ("PENDING", "RUNNING")

    async def run(self, address: str) -> int:
        """Runs it to its end; its exit code as a shell would tell it."""
        argv = list(self.words["argv"])
        if argv[0] in ("python", "python3"):
            argv[0] = self.runtime.python  # a system may have only one of the two names
        env = {k: v for k, v in os.environ.items() if k != "RAY_AUTH_TOKEN"}
        env.update(self.config.get("env") or {})
        env.update(self.runtime.client_environment())
        env.update(RAY_ADDRESS=address, PYTHONUNBUFFERED="1")
        if self.words.get("package") and not os.path.isdir(self.words["cwd"]):
            files.unzip(self.words["package"], self.words["cwd"])
        argv, env = self.runtime.wrap(argv, env, self.words["cwd"])
        self.job.update(status="RUNNING", started=time.time())
        by_hand = self.config.get("standalone")  # then the job's own log is where a person looks
        base = os.path.join(self.config["folder"], "logs", self.job["id"])
        try:
            # appended to: a job that a scheduler runs again goes on where it was
            with open(base + ".out", "ab") as out, open(base + ".err", "ab") as err:
                self.process = await asyncio.create_subprocess_exec(
                    *argv, cwd=self.words["cwd"], env=env, stdin=asyncio.subprocess.DEVNULL,
                    stdout=None if by_hand else out, stderr=None if by_hand else err,
                    start_new_session=True, preexec_fn=self.in_the_child,
                )  # fmt: skip
            self.job["pid"] = self.process.pid
            self.changed()
            code = await self.process.wait()
        except OSError as error:
            code = 127 if isinstance(error, FileNotFoundError) else 126
            files.write(base + ".err", "%s\n" % error)
        code = 128 - code if code < 0 else code
        stopped = self.job["status"] == "STOPPING"
        self._over("STOPPED" if stopped else "SUCCEEDED" if code == 0 else "FAILED", code)
        return code

    def in_the_child(self) -> None:
        processes.die_with_parent(signal.SIGKILL)
        os.umask(self.config.get("umask", 0o077))

    async def end(self, grace: float, at_once: asyncio.Event) -> None:
        """SIGTERM to it and what it started, time to save its work, then SIGKILL."""
        if self.process is None or self.process.returncode is not None or self.job["status"] != "RUNNING":
            return
        self.job["status"] = "STOPPING"
        self.send(signal.SIGTERM)
        over = asyncio.ensure_future(self.process.wait())
        hurry = asyncio.ensure_future(at_once.wait())
        await asyncio.wait([over, hurry], timeout=grace, return_when=asyncio.FIRST_COMPLETED)
        hurry.cancel()
        if not over.done():
            self.send(signal.SIGKILL)
            await over

    def close(self) -> None:
        """The node ends: whatever became of the command is final now."""
        if self.job["exit_code"] is None and self.job["ended"] is None:
            code = self.process.returncode if self.process else None
            self._over("STOPPED", code if code is None or code >= 0 else 128 - code)

    def send(self, number: int) -> None:
        try:
            if self.process and self.config.get("container") and number != signal.SIGKILL:
                # apptainer passes it on to the command; in its group there may be the process that mounts the image
                self.process.send_signal(number)
            elif self.process:
                os.killpg(self.process.pid, number)
        except (ProcessLookupError, PermissionError):
            pass

    def _over(self, status: str, code: Optional[int]) -> None:
        self.job.update(status=status, exit_code=code, ended=time.time())
        self.changed()
