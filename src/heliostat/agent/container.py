"""Ray in a container: by Apptainer or Singularity, or by enroot, which sites with Slurm's plugin Pyxis have.

The container's processes stay children of the agent, so that it can signal and count them. A step of `srun
--container-image`, which starts enroot too, would make them children of Slurm's daemon.
"""

from __future__ import annotations

import os
import re
import shutil
from typing import Dict, List, Tuple

from . import probe, processes
from .protocol import AgentConfig, ContainerConfig, RefusalCause, Refused, Versions
from .runtime import QUERY_S, HostRuntime, query_versions, run
from .setup import VERSIONS_PROGRAM

APPTAINER = ("apptainer", "singularity")  # the second is the first's old name
ENROOT = ("enroot",)
SQUASHFS = (".sqsh", ".squashfs", ".sqfs")  # images of enroot
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")  # a shell exports functions under other names
# variables that describe the host's programs; enroot passes only the variables that it is given
OF_HOST = re.compile(
    r"(PATH|PWD|OLDPWD|HOME|SHELL|HOSTNAME|VIRTUAL_ENV|PYTHON(PATH|HOME)|(CONDA|ENROOT|LD)_.*)$"
)
PULL_S = 1800.0  # for an image that is pulled from a registry first


def make(config: AgentConfig, temp: str) -> ContainerRuntime:
    """Enroot for its own images, and where it is the only program; else Apptainer."""
    container = config["container"]
    assert container is not None
    has_apptainer = any(map(shutil.which, APPTAINER))
    if container["image"].endswith(SQUASHFS) or (not has_apptainer and shutil.which(ENROOT[0])):
        return EnrootRuntime(config, temp)
    return ContainerRuntime(config, temp)


class ContainerRuntime(HostRuntime):
    """Apptainer or Singularity. The image has its own PATH, so its Python is `python3`."""

    missing_ray = RefusalCause.RAY_MISSING_IN_IMAGE
    programs: Tuple[str, ...] = APPTAINER
    missing_program = "no apptainer, singularity or enroot is on this node"

    def __init__(self, config: AgentConfig, temp: str) -> None:
        super().__init__(config, temp)
        container = config["container"]
        assert container is not None
        self.container: ContainerConfig = container
        self.python = "python3"
        self.description = "the image %s" % self.container["image"]
        self.program = ""
        self.gpus: List[str] = []

    async def prepare(self) -> None:
        self.program = self.find_program()
        image = self.container["image"]
        if "://" not in image and not os.path.exists(image):
            raise Refused(RefusalCause.IMAGE_MISSING, "there is no image %s on this node" % image)
        self.gpus = gpu_option()

    def find_program(self) -> str:
        found = [path for path in map(shutil.which, self.programs) if path]
        if not found:
            raise Refused(RefusalCause.CONTAINER_PROGRAM_MISSING, self.missing_program)
        return found[0]

    async def versions(self) -> Versions:
        argv = [self.python, "-c", VERSIONS_PROGRAM]
        argv, env = self.wrap(argv, {**os.environ, **self.client_environment()})
        seconds = PULL_S if "://" in self.container["image"] else QUERY_S
        return await query_versions(argv, env, self.description, seconds)

    def binds(self, cwd: str) -> List[str]:
        """Paths that the container needs. Ray's workers import from the command's directory, on every node."""
        command = self.config.get("command")
        needed = [self.config["folder"], self.temp, command.get("cwd", "") if command else "", cwd]
        own = [path for path in needed if path not in ("", "/") and os.path.isdir(path)]
        return list(dict.fromkeys([*own, *self.container["binds"]]))

    def wrap(self, argv: List[str], env: Dict[str, str], cwd: str = "/") -> Tuple[List[str], Dict[str, str]]:
        wrapped = [self.program, "exec", *self.gpus]
        for bind in self.binds(cwd):
            wrapped += ["--bind", bind]
        wrapped += ["--pwd", cwd, *self.container["options"], self.container["image"], *argv]
        # with this prefix they are set also with `--cleanenv` or `--containall`
        prefix = "%sENV_" % os.path.basename(self.program).upper()
        passed = {k: v for k, v in env.items() if k == processes.MARK or os.environ.get(k) != v}
        return wrapped, {**env, **{prefix + k: v for k, v in passed.items() if k != "PATH"}}

    def client_environment(self) -> Dict[str, str]:
        env = super().client_environment()
        del env["PATH"]  # the host's PATH finds apptainer; the image has its own
        return env


def gpu_option() -> List[str]:
    """The option for the GPUs of the allocation. Without a vendor's tool, the driver's device file identifies them."""
    found = probe.gpus()
    vendors = {gpu["vendor"] for gpu in found["gpus"]}
    if not found["gpu_count"]:
        return []
    if "amd" in vendors or (not vendors and os.path.exists("/dev/kfd")):
        return ["--rocm"]
    return ["--nv"] if "nvidia" in vendors or os.path.exists("/dev/nvidiactl") else []


class EnrootRuntime(ContainerRuntime):
    """Enroot. The image is unpacked once into the node's private directory, and removed with it."""

    programs = ENROOT
    missing_program = "enroot, which this image needs, is not on this node"

    def __init__(self, config: AgentConfig, temp: str) -> None:
        super().__init__(config, temp)
        self.data = os.path.join(temp, "enroot")
        self.command_script = os.path.join(self.data, "rc")
        # a batch job may have no XDG_RUNTIME_DIR, and a shared home may be slow
        paths = {"DATA": "data", "RUNTIME": "run", "TEMP": "tmp"}
        self.paths = {"ENROOT_%s_PATH" % key: os.path.join(self.data, name) for key, name in paths.items()}

    async def prepare(self) -> None:
        await super().prepare()
        for path in self.paths.values():
            os.makedirs(path, 0o700, exist_ok=True)
        with open(self.command_script, "w") as stream:
            stream.write('exec "$@"\n')  # instead of the image's own, which may print or change directory
        image, name = self.container["image"], os.path.join(self.data, "image.sqsh")
        if "://" in image:
            await self._run(["import", "--output", name, enroot_uri(image)], "pull %s" % image)
        else:
            name = image
        await self._run(["create", "--name", "ray", name], "unpack %s" % image)
        if name != image:
            os.unlink(name)

    async def _run(self, argv: List[str], purpose: str) -> None:
        code, output = await run([self.program, *argv], {**os.environ, **self.paths}, PULL_S)
        if code:
            line = (output.splitlines() or ["no output"])[-1].strip()
            raise Refused(
                RefusalCause.ENVIRONMENT_INVALID, "enroot could not %s: %s" % (purpose, line[-300:])
            )

    def wrap(self, argv: List[str], env: Dict[str, str], cwd: str = "/") -> Tuple[List[str], Dict[str, str]]:
        wrapped = [self.program, "start", "--rw", "--rc", self.command_script]
        for bind in self.binds(cwd):
            source, _, rest = bind.partition(":")
            target, _, mode = rest.partition(":")
            create = "dir" if os.path.isdir(source) else "file"
            fields = (source, target or source, "none", "x-create=%s,bind,%s" % (create, mode or "rw"))
            wrapped += ["--mount", ":".join(fields)]
        more = dict(self.paths)
        if self.gpus == ["--nv"]:  # enroot's hook reads it; the allocation limits the devices
            more["NVIDIA_VISIBLE_DEVICES"] = "all"
        for name in sorted({**env, **more}):
            if NAME.fullmatch(name) and not OF_HOST.match(name):
                wrapped += ["--env", name]  # without a value: a command line is public
        # the image's PATH finds the program; enroot has no option for the directory
        inside = ["sh", "-c", 'cd "$0" && exec "$@"', cwd, *argv]
        return [*wrapped, *self.container["options"], "ray", *inside], {**env, **more}


def enroot_uri(image: str) -> str:
    """The image with a `#` after the registry, as enroot writes it: docker://nvcr.io#nvidia/pytorch:25.09-py3."""
    scheme, _, rest = image.partition("://")
    registry, slash, path = rest.partition("/")
    if slash and "#" not in rest and ("." in registry or ":" in registry or registry == "localhost"):
        return "%s://%s#%s" % (scheme, registry, path)
    return image
