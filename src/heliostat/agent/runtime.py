"""How Ray and Python run on this node: in the agent's environment, in a copy of it on the local disk, or in a container.

The agent itself always runs in the host's Python: it must call the scheduler and see every process.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import secrets
import shutil
import sys
import tempfile
from typing import Dict, List, Optional, Tuple

from . import ownership, probe, processes, tls
from .protocol import AgentConfig, RefusalCause, Refused, StageConfig, Versions
from .setup import UNFINISHED, VERSIONS_PROGRAM

QUERY_S = 120.0  # for the first start of Python from a slow disk


def make(config: AgentConfig, temp: str) -> HostRuntime:
    if config.get("container"):
        from . import container

        return container.make(config, temp)
    return StagedRuntime(config, temp) if config.get("stage") else HostRuntime(config, temp)


def without_space(python: str, temp: str) -> str:
    """A path without spaces to this Python, by a link in the private directory. Ray writes the path into shell commands
    without quotes, so that workers with a runtime environment and Ray Client's server would not start."""
    if not any(character.isspace() for character in python):
        return python
    home, link = os.path.dirname(os.path.dirname(python)), os.path.join(temp, "env")
    if not os.path.islink(link):
        os.symlink(home, link)
    return os.path.join(link, "bin", os.path.basename(python))


class HostRuntime:
    """The Python that runs the agent, and its Ray."""

    missing_ray = RefusalCause.RAY_MISSING

    def __init__(self, config: AgentConfig, temp: str) -> None:
        self.config, self.temp = config, temp
        self.python = sys.executable
        self.description = "the environment of %s" % sys.executable

    async def broadcast(self) -> None:
        """Copy what the other nodes of the allocation need to their hosts, before they are started."""

    async def remove_broadcast(self) -> None:
        """Remove these copies if the other nodes were never started."""

    async def prepare(self) -> None:
        """Make the environment usable on this node. Raises Refused."""
        if os.path.isdir(sys.prefix + UNFINISHED):
            raise Refused(
                RefusalCause.ENVIRONMENT_INCOMPLETE,
                "the environment %s is incomplete: `heliostat setup` finishes it" % sys.prefix,
            )
        self.python = without_space(self.python, self.temp)

    async def versions(self) -> Versions:
        return {"ray": probe.ray_version(), "python": probe.python_version()}

    def wrap(self, argv: List[str], env: Dict[str, str], cwd: str = "/") -> Tuple[List[str], Dict[str, str]]:
        """The command line and the environment that run this command in the runtime."""
        return argv, env

    def client_environment(self) -> Dict[str, str]:
        """Variables that any Ray program on this node needs to connect. They name the token's copy in the private
        directory, which works if the shared directory is slow or its token file was removed."""
        env = {processes.MARK: self.config["mark"], "HELIOSTAT_CLUSTER": self.config["cluster"]}
        # by default Ray requires equal patch versions of Python, which often differ between hosts
        env["RAY_DEFAULT_PYTHON_VERSION_MATCH_LEVEL"] = "minor"
        # `python` is the Python that has this Ray, whatever PATH the agent inherited
        env["PATH"] = os.pathsep.join([os.path.dirname(self.python), os.environ.get("PATH", os.defpath)])
        env.update(tls.environment(self.config, self.temp))
        if self.config["auth"] == "token":
            return {
                **env,
                "RAY_AUTH_MODE": "token",
                "RAY_AUTH_TOKEN_PATH": os.path.join(self.temp, "token"),
            }
        return {**env, "RAY_AUTH_MODE": "disabled"}


class StagedRuntime(HostRuntime):
    """A copy of the virtual environment in the private directory: a hundred nodes that import Ray from one shared disk
    take minutes. The client packs the archive. The first node broadcasts it if the scheduler can; otherwise every node
    reads it from the shared directory."""

    def __init__(self, config: AgentConfig, temp: str) -> None:
        super().__init__(config, temp)
        stage = config["stage"]
        assert stage is not None
        self.stage: StageConfig = stage
        self.home = os.path.join(temp, "venv")
        self.python = os.path.join(self.home, "bin", "python3")
        self.description = "the copy of %s" % self.stage["venv"]
        self.remove_command: List[str] = []  # removes the broadcast copies

    def client_environment(self) -> Dict[str, str]:
        return {**super().client_environment(), "VIRTUAL_ENV": self.home}

    async def broadcast(self) -> None:
        commands = self.config.get("broadcast")
        if not commands or not shutil.which(commands["copy"][0]):
            return
        if ownership.find_unsafe(tempfile.gettempdir(), shared=True):
            return  # another user could replace the copy
        # an unpredictable name: another user could have created a file with a known name in /tmp
        copy = os.path.join(tempfile.gettempdir(), "hs-%s.tar" % secrets.token_hex(8))
        self.remove_command = [*commands["remove"], copy]
        code, output = await run([*commands["copy"], self.stage["archive"], copy])
        if code == 0:
            self.stage["copy"] = copy  # part of the config of the other nodes
            return
        sys.stderr.write("the broadcast failed; every node reads the shared archive: %s\n" % output)
        await self.remove_broadcast()

    async def remove_broadcast(self) -> None:
        if self.remove_command:
            await run(self.remove_command, seconds=20)
            self.remove_command = []

    async def prepare(self) -> None:
        archive, copy = self.stage["archive"], os.path.join(self.temp, "venv.tar")
        try:
            # in the private directory it is removed with this node
            os.rename(self.stage.get("copy") or "", copy)
            if ownership.find_unsafe(copy) is None:
                archive = copy
        except OSError:
            pass  # there is no copy, or it is on another disk
        unsafe = ownership.find_unsafe(archive)
        if unsafe:
            raise Refused(RefusalCause.STAGE_FAILED, "the archive %s is not safe: %s" % (archive, unsafe))
        disk = os.statvfs(self.temp)
        free, room = disk.f_bavail * disk.f_frsize, int(self.stage["room"])
        if free < room:
            raise Refused(
                RefusalCause.STAGE_DISK_FULL,
                "%s has %d MiB free, the copy of %s needs %d"
                % (os.path.dirname(self.temp), free >> 20, self.stage["venv"], room >> 20),
            )
        os.mkdir(self.home, 0o700)
        code, output = await run(["tar", "--no-same-owner", "-xf", archive, "-C", self.home])
        if code:
            raise Refused(RefusalCause.STAGE_FAILED, "could not unpack %s: %s" % (archive, output))
        if archive == copy:
            os.unlink(copy)
        relocate(self.home, self.stage["paths"])

    async def versions(self) -> Versions:
        argv = [self.python, "-c", VERSIONS_PROGRAM]
        return await query_versions(argv, dict(os.environ), self.description, QUERY_S)


def relocate(home: str, paths: List[str]) -> None:
    """Rewrite the interpreter path in the first lines of the environment's programs; `paths` are its old locations.

    Python itself finds `pyvenv.cfg` relative to its own path."""
    old = re.compile(b"|".join(re.escape(os.fsencode(path + "/bin/")) for path in paths))
    new = os.fsencode(home + "/bin/")
    for entry in os.scandir(os.path.join(home, "bin")):
        if entry.is_symlink() or not entry.is_file():
            continue
        with open(entry.path, "rb") as stream:
            if stream.read(2) != b"#!":
                continue
            head, rest = stream.read(1022), stream.read()
        if old.search(head):
            mode = os.stat(entry.path).st_mode
            with open(entry.path, "wb") as stream:
                stream.write(b"#!" + old.sub(lambda _: new, head) + rest)
            os.chmod(entry.path, mode)


async def run(
    argv: List[str], env: Optional[Dict[str, str]] = None, seconds: Optional[float] = None
) -> Tuple[int, str]:
    """(exit code, output). After a timeout the process keeps running; the supervisor ends it."""
    pipe, null = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
    try:
        child = await asyncio.create_subprocess_exec(
            *argv, env=env, cwd="/", stdin=null, stdout=pipe, stderr=asyncio.subprocess.STDOUT
        )
        output, _ = await asyncio.wait_for(child.communicate(), seconds)
    except OSError as error:
        return 127, str(error)
    except asyncio.TimeoutError:
        return 124, "no answer within %d s" % (seconds or 0)
    return int(child.returncode or 0), output.decode("utf-8", "replace").strip()


async def query_versions(argv: List[str], env: Dict[str, str], description: str, seconds: float) -> Versions:
    code, output = await run(argv, env, seconds)
    try:
        answer: Versions = json.loads(output.splitlines()[-1]) if code == 0 else {}
    except (ValueError, IndexError):
        answer = {}
    if "ray" not in answer:
        lines = " | ".join(line.strip() for line in output.splitlines()[-3:] if line.strip())
        reason = "Python does not start in %s (code %d): %s" % (description, code, lines[-400:])
        raise Refused(RefusalCause.ENVIRONMENT_INVALID, reason)
    return answer
