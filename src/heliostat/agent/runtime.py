"""How Ray and Python are called on this node: in our own environment, in a copy of it on the local disk, or in a container.

The agent itself always runs in the host's Python, outside: it must call the scheduler, and see every process.
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
from typing import Any, Dict, List, Optional, Tuple

from . import ownership, probe, processes, tls
from .setup import LOOK, UNFINISHED

Json = Dict[str, Any]
PROGRAMS = ("apptainer", "singularity")  # the second is the first's old name
LOOK_S = 120.0  # a first look into an image on a slow disk
PULL_S = 1800.0  # an image that has to come from a registry first


class Refused(Exception):
    """This node cannot be started, and another try would end the same way."""


def make(config: Json, temp: str) -> Own:
    if config.get("container"):
        return Container(config, temp)
    return Staged(config, temp) if config.get("stage") else Own(config, temp)


def without_space(python: str, temp: str) -> str:
    """The same Python by a path without a space. Ray writes the path into shell commands without quoting it, so that workers
    with a runtime environment and the server of Ray Client would not start. A link in our private directory leads there."""
    if not any(letter.isspace() for letter in python):
        return python
    home, link = os.path.dirname(os.path.dirname(python)), os.path.join(temp, "env")
    if not os.path.islink(link):
        os.symlink(home, link)
    return os.path.join(link, "bin", os.path.basename(python))


class Own:
    """The Python that runs us, and the Ray beside it."""

    def __init__(self, config: Json, temp: str) -> None:
        self.config, self.temp = config, temp
        self.python = sys.executable
        self.place = "the environment of %s" % sys.executable

    async def share(self) -> None:
        """Before the other nodes of our job are started: what they need comes to them."""

    async def unshare(self) -> None:
        """The other nodes were never started: nobody there takes what was brought to them."""

    async def prepare(self) -> None:
        """Makes it usable here. Raises Refused."""
        if os.path.isdir(sys.prefix + UNFINISHED):
            raise Refused("%s is half made: `heliostat setup` finishes it" % sys.prefix)
        self.python = without_space(self.python, self.temp)

    async def versions(self) -> Json:
        """{"ray": version or None, "python": version}"""
        return {"ray": probe.ray_version(), "python": probe.python_version()}

    def wrap(self, argv: List[str], env: Dict[str, str], cwd: str = "/") -> Tuple[List[str], Dict[str, str]]:
        """The command line and the environment with which these words run in it."""
        return argv, env

    def client_environment(self) -> Dict[str, str]:
        """What any Ray program on this node needs to be let in. The token is our own copy, beside the sockets: it works
        when the record's folder is slow, or its token file was removed."""
        env = {processes.MARK: self.config["mark"], "HELIOSTAT_CLUSTER": self.config["cluster"]}
        # of Python, Ray asks all three numbers to be the same unless told; machines of a lab often differ in the third
        env["RAY_DEFAULT_PYTHON_VERSION_MATCH_LEVEL"] = "minor"
        # `python` means the Python that has this Ray, whatever shell we were started from
        env["PATH"] = os.pathsep.join([os.path.dirname(self.python), os.environ.get("PATH", os.defpath)])
        env.update(tls.environment(self.config, self.temp))
        if self.config["auth"] == "token":
            return {
                **env,
                "RAY_AUTH_MODE": "token",
                "RAY_AUTH_TOKEN_PATH": os.path.join(self.temp, "token"),
            }
        return {**env, "RAY_AUTH_MODE": "disabled"}


class Staged(Own):
    """A copy of the virtual environment below our private folder: a hundred nodes that import Ray from one shared disk
    wait for that disk for minutes. The client packed it once; the first node of a job broadcasts the archive where the
    scheduler can, else every node reads it from the shared folder."""

    def __init__(self, config: Json, temp: str) -> None:
        super().__init__(config, temp)
        self.stage: Json = config["stage"]
        self.home = os.path.join(temp, "venv")
        self.python = os.path.join(self.home, "bin", "python3")
        self.place = "the copy of %s" % self.stage["venv"]
        self.clean: List[str] = []  # the command that takes the broadcast copies away

    def client_environment(self) -> Dict[str, str]:
        return {**super().client_environment(), "VIRTUAL_ENV": self.home}

    async def share(self) -> None:
        cast: Optional[Json] = self.config.get("broadcast")
        if not cast or not shutil.which(cast["copy"][0]):
            return
        if ownership.find_unsafe(tempfile.gettempdir(), shared=True):
            return  # somebody could replace it
        # a name that nobody can guess: in /tmp somebody else could have put a file there before us
        copy = os.path.join(tempfile.gettempdir(), "hs-%s.tar" % secrets.token_hex(8))
        self.clean = [*cast["remove"], copy]
        code, said = await _run([*cast["copy"], self.stage["archive"], copy])
        if code == 0:
            self.stage["copy"] = copy  # the other nodes are told
            return
        sys.stderr.write("the archive was not broadcast, every node reads it: %s\n" % said)
        await self.unshare()

    async def unshare(self) -> None:
        if self.clean:
            await _run(self.clean, seconds=20)
            self.clean = []

    async def prepare(self) -> None:
        archive, copy = self.stage["archive"], os.path.join(self.temp, "venv.tar")
        try:
            # in our own folder it ends with us, whatever happens
            os.rename(self.stage.get("copy") or "", copy)
            if ownership.find_unsafe(copy) is None:
                archive = copy
        except OSError:
            pass  # there is none, or not on this disk
        unsafe = ownership.find_unsafe(archive)
        if unsafe:
            raise Refused("the archive %s is not safe: %s" % (archive, unsafe))
        disk = os.statvfs(self.temp)
        free, room = disk.f_bavail * disk.f_frsize, int(self.stage["room"])
        if free < room:
            raise Refused(
                "%s has %d MiB free, the copy of %s needs %d"
                % (os.path.dirname(self.temp), free >> 20, self.stage["venv"], room >> 20)
            )
        os.mkdir(self.home, 0o700)
        code, said = await _run(["tar", "--no-same-owner", "-xf", archive, "-C", self.home])
        if code:
            raise Refused("could not unpack %s: %s" % (archive, said))
        if archive == copy:
            os.unlink(copy)
        relocate(self.home, self.stage["paths"])

    async def versions(self) -> Json:
        return await _look([self.python, "-c", LOOK], dict(os.environ), self.place, LOOK_S)


def relocate(home: str, paths: List[str]) -> None:
    """Programs of a virtual environment name its Python by a full path, in one of the first lines: `paths` are those
    where it lay. The Python itself finds `pyvenv.cfg` beside it, wherever that is."""
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


class Container(Own):
    """Apptainer, or Singularity. The image has its own PATH, so commands inside are plain `python3`."""

    def __init__(self, config: Json, temp: str) -> None:
        super().__init__(config, temp)
        self.wanted: Json = config["container"]
        self.python = "python3"
        self.place = "the image %s" % self.wanted["image"]
        self.program = ""
        self.gpus: List[str] = []

    async def prepare(self) -> None:
        found = [path for path in map(shutil.which, PROGRAMS) if path]
        if not found:
            raise Refused("neither apptainer nor singularity is on this node")
        self.program = found[0]
        image = self.wanted["image"]
        if "://" not in image and not os.path.exists(image):
            raise Refused("there is no image %s on this node" % image)
        self.gpus = gpu_option()

    async def versions(self) -> Json:
        argv, env = self.wrap([self.python, "-c", LOOK], {**os.environ, **self.client_environment()})
        return await _look(argv, env, self.place, PULL_S if "://" in self.wanted["image"] else LOOK_S)

    def binds(self, cwd: str) -> List[str]:
        """What must be seen inside. The command's folder on every node: Ray's workers import from there."""
        command = self.config.get("command") or {}
        folders = [self.config["folder"], self.temp, command.get("cwd") or "", cwd]
        own = [path for path in folders if path not in ("", "/") and os.path.isdir(path)]
        return list(dict.fromkeys([*own, *self.wanted["binds"]]))

    def wrap(self, argv: List[str], env: Dict[str, str], cwd: str = "/") -> Tuple[List[str], Dict[str, str]]:
        words = [self.program, "exec", *self.gpus]
        for bind in self.binds(cwd):
            words += ["--bind", bind]
        words += ["--pwd", cwd, *self.wanted["options"], self.wanted["image"], *argv]
        # with this prefix they arrive also where an option (`--cleanenv`, `--containall`) keeps the rest out
        prefix = "%sENV_" % os.path.basename(self.program).upper()
        ours = {k: v for k, v in env.items() if k == processes.MARK or os.environ.get(k) != v}
        return words, {**env, **{prefix + k: v for k, v in ours.items() if k != "PATH"}}

    def client_environment(self) -> Dict[str, str]:
        env = super().client_environment()
        del env["PATH"]  # outside it is for finding apptainer, inside the image has its own
        return env


def gpu_option() -> List[str]:
    """Lets the GPUs of our allocation in. Where no vendor's tool is, the driver's own device tells which they are."""
    found = probe.gpus()
    vendors = {gpu["vendor"] for gpu in found["gpus"]}
    if not found["gpu_count"]:
        return []
    if "amd" in vendors or (not vendors and os.path.exists("/dev/kfd")):
        return ["--rocm"]
    return ["--nv"] if "nvidia" in vendors or os.path.exists("/dev/nvidiactl") else []


async def _run(
    argv: List[str], env: Optional[Dict[str, str]] = None, seconds: Optional[float] = None
) -> Tuple[int, str]:
    """(exit code, what it said). Whoever gives up waiting leaves it to the keeper."""
    pipe, null = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
    try:
        child = await asyncio.create_subprocess_exec(
            *argv, env=env, cwd="/", stdin=null, stdout=pipe, stderr=asyncio.subprocess.STDOUT
        )
        said, _ = await asyncio.wait_for(child.communicate(), seconds)
    except OSError as error:
        return 127, str(error)
    except asyncio.TimeoutError:
        return 124, "no answer within %d s" % (seconds or 0)
    return int(child.returncode or 0), said.decode("utf-8", "replace").strip()


async def _look(argv: List[str], env: Dict[str, str], place: str, seconds: float) -> Json:
    code, said = await _run(argv, env, seconds)
    try:
        answer: Json = json.loads(said.splitlines()[-1]) if code == 0 else {}
    except (ValueError, IndexError):
        answer = {}
    if "ray" not in answer:
        words = " | ".join(line.strip() for line in said.splitlines()[-3:] if line.strip())
        raise Refused("Python does not start in %s (code %d): %s" % (place, code, words[-400:]))
    return answer
