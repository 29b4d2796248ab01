"""Makes or upgrades the environment of this host, a virtual or a conda one. Without either it only reports versions.

While it works, a directory beside the environment (`venv.unfinished`) exists; it is removed last. So an environment that
was left incomplete is detected, by the next setup and by a node that would start in it. Hosts that share a home take turns.
"""

from __future__ import annotations

import hashlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from typing import Any, Callable, Dict, List, NoReturn, Optional

from . import files, processes
from .protocol import (
    AgentConfig,
    Answer,
    ContainerConfig,
    RefusalCause,
    Refused,
    SetupRequest,
    Versions,
    cause_of,
)

UNFINISHED = ".unfinished"
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
STAMP = "heliostat.json"  # in the environment: its Ray version and the digest of its requirements
HEARTBEAT_S = 2.0
HEARTBEAT_TIMEOUT_S = 90.0  # a shared disk may show another host's heartbeat a minute late
QUERY_S = 120.0
ISOLATED = ("-I", "-m")  # do not import from the current directory, which another user may control
# ray[default] installs these three; other libraries install two of them, without a dashboard
VERSIONS_PROGRAM = """
import json, platform
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
try:
    ray = version("ray")
except PackageNotFoundError:
    ray = None
whole = all(map(find_spec, ("aiohttp", "aiohttp_cors", "grpc")))
print(json.dumps({"ray": ray, "python": platform.python_version(), "whole": whole}))
"""
# what pip and uv print -> its code
INSTALLER_CAUSES = (
    ("ensurepip", RefusalCause.VENV_MODULE_MISSING),
    ("No matching distribution found for ray", RefusalCause.PACKAGE_NOT_FOUND),
)


class Interrupted(Exception):
    """A signal, a closed connection or the deadline ended the work; the environment may be incomplete."""


def make(request: SetupRequest) -> Answer:
    """Make, upgrade or check the environment. The answer has `done`, or `reason` and `cause` of a failure."""
    for number in SIGNALS:
        signal.signal(number, _interrupt)
    try:
        container = request.get("container")
        if container:
            return _answer("nothing", _query_container(container))
        if not request["venv"] and not request.get("conda"):
            return _answer("nothing", _query_own(request.get("ray")))
        return _Environment(request).make()
    except Interrupted as error:
        return {"ok": False, "reason": str(error), "cause": RefusalCause.INTERRUPTED, "exit_code": 1}
    except (OSError, Refused) as error:
        return {"ok": False, "reason": str(error), "cause": cause_of(error), "exit_code": 1}


def _answer(done: str, found: Versions) -> Answer:
    ray, python, whole = found["ray"], found["python"], found["whole"]
    return {"ok": True, "done": done, "ray": ray, "python": python, "whole": whole}


def _interrupt(number: int, _: object) -> NoReturn:
    for other in SIGNALS:
        signal.signal(other, signal.SIG_IGN)  # do not interrupt the cleanup
    raise Interrupted("interrupted by signal %d" % number)


def _query_own(wanted: Optional[str]) -> Versions:
    """The versions of the user's own Python, which is never changed."""
    found = query(sys.executable) or Versions()
    if not found.get("ray"):
        raise Refused(RefusalCause.RAY_MISSING, "no Ray in the environment of %s" % sys.executable)
    if wanted and found["ray"] != wanted:
        raise Refused(
            RefusalCause.RAY_VERSION_DIFFERS,
            "%s has Ray %s, %s is asked for" % (sys.executable, found["ray"], wanted),
        )
    return found


def _query_container(container: ContainerConfig) -> Versions:
    import asyncio

    from . import container as containers

    with tempfile.TemporaryDirectory() as temp:  # enroot unpacks the image there
        config: AgentConfig = {
            "container": container,
            "folder": "",
            "auth": "none",
            "mark": "",
            "cluster": "",
        }
        image = containers.make(config, temp)
        asyncio.run(image.prepare())
        found = asyncio.run(image.versions())
    if not found["ray"]:
        raise Refused(RefusalCause.RAY_MISSING_IN_IMAGE, "no Ray in %s" % image.description)
    return found


def query(python: str) -> Optional[Versions]:
    """The versions of this Python; None if it does not start."""
    try:
        done = subprocess.run(
            [python, "-c", VERSIONS_PROGRAM], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, timeout=QUERY_S, cwd="/",
        )  # fmt: skip
        found: Versions = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return None
    return found


class _Environment:
    def __init__(self, request: SetupRequest) -> None:
        self.request = request
        self.deadline = time.monotonic() + float(request["seconds"])
        self.requirements = self._find(request.get("requirements"))
        self.wheels = self._find(request.get("wheels"))
        self.path = self._path()
        self.python = os.path.join(self.path, "bin", "python")
        self.digest = ""
        if self.requirements:
            with open(self.requirements, "rb") as stream:
                self.digest = hashlib.sha256(stream.read()).hexdigest()

    @staticmethod
    def _find(name: Optional[str]) -> Optional[str]:
        """The path of a file of the request, which is relative to the agent."""
        return os.path.join(os.path.dirname(os.path.abspath(sys.argv[0])), name) if name else None

    def _path(self) -> str:
        if not self.request.get("conda"):
            named = os.path.expanduser(self.request["venv"] or "").rstrip("/")
            return os.path.join(os.path.expanduser("~"), named)
        active = os.environ.get("CONDA_PREFIX") or ""
        if os.path.realpath(active) != os.path.realpath(sys.prefix):  # `python3` is not from this environment
            raise Refused(
                RefusalCause.ENVIRONMENT_INVALID,
                "the conda environment `%s` has no Python" % self.request["conda"],
            )
        return active

    def make(self) -> Answer:
        found = query(self.python) if not os.path.isdir(self.path + UNFINISHED) else None
        if found and self.is_sufficient(found):
            return _answer("nothing", found)
        if self.request.get("look"):
            return {"ok": True, "needed": True}
        claim = Claim(self.path + UNFINISHED, self.deadline)
        claim.take(lambda: not os.path.lexists(self.path))
        found = query(self.python) if not claim.creating else None
        if not claim.creating and not claim.resumed:
            if found and self.is_sufficient(found):  # another setup finished it meanwhile
                claim.release()
                return _answer("nothing", found)
            if not found:  # checked only now: before, another setup could have been creating it
                claim.release()
                why = "its Python does not start" if os.path.lexists(self.python) else "it has no bin/python"
                reason = "%s is not a virtual environment: %s" % (self.path, why)
                raise Refused(RefusalCause.NOT_A_VENV, reason)
        now = self._install_claimed(claim)
        claim.release()
        was = found.get("ray") if found else None
        done = "made" if claim.creating else "upgraded" if was not in (None, now["ray"]) else "installed"
        return {**_answer(done, now), "was": was}

    def _install_claimed(self, claim: Claim) -> Versions:
        """Install, and verify the version. After a failure an environment that did not exist before is removed."""
        try:
            self.install(claim)
            now = query(self.python) or Versions(ray=None)
            if now["ray"] != self.request["ray"]:
                reason = "%s has Ray %s after the installation" % (self.path, now["ray"])
                raise Refused(RefusalCause.RAY_VERSION_DIFFERS, reason)
            stamp = {"ray": now["ray"], "requirements": self.digest}
            files.write_json(os.path.join(self.path, STAMP), stamp)
            return now
        except BaseException as error:
            if claim.is_current():
                if claim.creating:
                    shutil.rmtree(self.path, ignore_errors=True)
                if claim.creating or isinstance(error, Refused):
                    claim.release()
                else:
                    claim.write(left=True)  # incomplete; the next setup need not wait
            raise

    def is_sufficient(self, found: Versions) -> bool:
        if not self.request.get("upgrade"):
            return True
        if found["ray"] != self.request["ray"] or not found["whole"]:
            return False
        stamp = files.read_json(os.path.join(self.path, STAMP)) or {}
        return not self.digest or self.digest == stamp.get("requirements")

    def install(self, claim: Claim) -> None:
        uv = shutil.which("uv")
        if claim.creating:
            shutil.rmtree(self.path, ignore_errors=True)  # what an interrupted setup left
            self.run(
                [uv, "venv", "--quiet", "--python", sys.executable, self.path]
                if uv
                else [sys.executable, *ISOLATED, "venv", self.path],
                claim,
            )
        elif os.path.exists(os.path.join(self.path, STAMP)):
            os.unlink(os.path.join(self.path, STAMP))
        # without bytecode every Ray process of every start would compile Ray again
        argv = (
            [uv, "pip", "install", "--quiet", "--compile-bytecode", "--python", self.python]
            if uv
            else [self.python, *ISOLATED, "pip", "install", "-q", "--compile", "--disable-pip-version-check"]
        )
        if claim.resumed and not claim.creating:  # a package may be installed in part
            argv.append("--reinstall" if uv else "--force-reinstall")
        if self.wheels:
            argv += ["--no-index", "--find-links", self.wheels]
        argv.append("ray[default]==%s" % self.request["ray"])
        if self.requirements:
            argv += ["-r", self.requirements]
        self.run(argv, claim)

    def run(self, argv: List[str], claim: Claim) -> None:
        """Run an installer to its end. Kill it when the client is gone, at the deadline, or on a signal."""
        with tempfile.TemporaryFile() as out:
            child = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True,
                cwd=os.path.expanduser(self.request.get("cwd") or "~"), preexec_fn=processes.die_with_parent,
            )  # fmt: skip
            try:
                while child.poll() is None:
                    claim.heartbeat()
                    time.sleep(0.1)
            except BaseException:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
                raise
            if child.returncode:
                out.seek(0)
                lines = [line for line in out.read().decode("utf-8", "replace").splitlines() if line.strip()]
                errors = [line for line in lines if "error" in line.lower() or "ensurepip" in line]
                line = (errors or lines or ["no output"])[-1].strip()[:300]
                found = [cause for text, cause in INSTALLER_CAUSES if text in line]
                cause = found[0] if found else RefusalCause.INSTALLER_FAILED
                raise Refused(cause, "`%s` failed: %s" % (" ".join(argv[:5]), line))


class Claim:
    """The right to change an environment: the highest number in the directory has it.

    A setup that stopped is replaced by creating the next number, which only one process can do on any file system. A
    setup that was only slow detects the higher number and ends."""

    def __init__(self, directory: str, deadline: float) -> None:
        self.directory, self.deadline = directory, deadline
        self.number = 0
        self.resumed = False  # an earlier setup did not finish
        self.creating = False  # the environment did not exist when the first setup started
        self.next_heartbeat = 0.0
        boot = files.tail("/proc/sys/kernel/random/boot_id").strip()
        self.host = "%s %s" % (socket.gethostname(), boot)

    def take(self, is_absent: Callable[[], bool]) -> None:
        """Wait for the claim. Raises Interrupted when the client is gone, or at the deadline."""
        seen: Optional[Dict[str, Any]] = None
        since = time.monotonic()
        while True:
            os.makedirs(self.directory, 0o700, exist_ok=True)
            last = self.last_number()
            owner = files.read_json(os.path.join(self.directory, str(last))) or {}
            if last and not self.is_over(owner):
                if owner != seen:
                    seen, since = owner, time.monotonic()
                elif time.monotonic() - since > HEARTBEAT_TIMEOUT_S:
                    owner["left"] = True
            if not last or self.is_over(owner):
                try:
                    path = os.path.join(self.directory, str(last + 1))
                    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
                    break
                except (FileExistsError, FileNotFoundError):
                    continue  # another setup was faster, or has just finished
            self.check_wanted()
            time.sleep(0.2)
        self.number, self.resumed = last + 1, bool(last)
        self.creating = bool(owner["making"]) if "making" in owner else is_absent()
        self.write()

    def last_number(self) -> int:
        try:
            return max([int(name) for name in os.listdir(self.directory) if name.isdigit()], default=0)
        except FileNotFoundError:
            return 0

    def is_current(self) -> bool:
        return self.last_number() == self.number

    def is_over(self, owner: Dict[str, Any]) -> bool:
        if owner.get("left"):
            return True
        return owner.get("machine") == self.host and not processes.alive(owner["pid"], owner["start"])

    def check_wanted(self) -> None:
        if time.monotonic() > self.deadline:
            raise Interrupted("the deadline has passed")
        poll = select.poll()  # the other end of standard output: the client
        poll.register(1, 0)
        if any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0)):
            raise Interrupted("the client closed the connection")

    def heartbeat(self) -> None:
        self.check_wanted()
        if time.monotonic() >= self.next_heartbeat:
            if not self.is_current():
                raise Interrupted("another setup has taken over")
            self.write()

    def write(self, left: bool = False) -> None:
        """Write the claim's file. left: the work has stopped, and the environment is incomplete."""
        self.next_heartbeat = time.monotonic() + HEARTBEAT_S
        owner = {"machine": self.host, "pid": os.getpid(), "start": processes.start_time(os.getpid())}
        owner.update(making=self.creating, beat=time.monotonic(), **({"left": True} if left else {}))
        files.write_json(os.path.join(self.directory, str(self.number)), owner)

    def release(self) -> None:
        if self.is_current():
            shutil.rmtree(self.directory, ignore_errors=True)
