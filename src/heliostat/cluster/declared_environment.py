"""Environments that are declared beside the code: in a script's header (PEP 723), or in a project's uv.lock.

On nodes that see this host's directories, uv installs a project itself (`uv sync`). Elsewhere the packages go to the hosts as
requirements, with the versions of the lock file.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from heliostat.cluster.environment import EnvironmentInstaller, find_problem
from heliostat.common.errors import Code, HeliostatError, UsageError
from heliostat.common.events import Emit, Event
from heliostat.config.script_header import check_python, read_script_header
from heliostat.remote.transport import Local
from heliostat.state.files import write_atomic

if TYPE_CHECKING:
    from heliostat.cluster.access import Access
    from heliostat.config.loader import Config

FOLDER = "environments"  # in Heliostat's home directory, here and on ssh hosts
SYNC_S = 1800.0
EXPORT_S = 60.0
_RAY = re.compile(r"^ray==(\S+)", re.MULTILINE)


class DeclaredEnvironment:
    def __init__(self, access: Access, installer: EnvironmentInstaller, emit: Emit) -> None:
        self._access, self._installer, self._emit = access, installer, emit

    def apply(self, config: Config, script: Path | None = None, *, install: bool) -> Config:
        """The config with the declared environment; unchanged where none is declared.

        install: makes it, unless the start of the cluster does so anyway."""
        if config.spec.environment.project:
            return self._apply_project(config, install)
        return self._apply_header(config, script, install) if script else config

    def _apply_header(self, config: Config, script: Path, install: bool) -> Config:
        header = read_script_header(script)
        if header is None:
            return config
        environment = config.spec.environment
        if environment.venv or environment.conda or environment.container or environment.requirements:
            text = f"the packages in the header of {script.name} are not installed: the spec names an environment"
            self._emit(Event("note", text))
            return config
        check_python(header, script)
        text = "".join(f"{dependency}\n" for dependency in sorted(header.dependencies))
        origin = f"the header of {script.name}"
        return self._with_requirements(config, script.stem, text, header.ray_version(), origin, install)

    def _apply_project(self, config: Config, install: bool) -> Config:
        environment, spec = config.spec.environment, config.spec
        project = Path(environment.project or "").expanduser().absolute()
        for name, command in (("pyproject.toml", "uv init"), ("uv.lock", "uv lock")):
            if not (project / name).is_file():
                raise UsageError(
                    f"`environment.project` has no {name}",
                    details=str(project),
                    hint=f"in that directory: {command}",
                    code=Code.USAGE_UNREADABLE_FILE,
                )
        exported = _uv(
            project, ["export", "--frozen", "--no-emit-project", "--no-hashes", "--quiet"], EXPORT_S
        )
        packages = "".join(f"{line}\n" for line in exported.splitlines() if line.strip()[:1] not in ("", "#"))
        ray = _RAY.search(packages)
        if not ray:
            raise HeliostatError(
                f"the project `{project}` does not depend on Ray",
                cause="its uv.lock has no `ray`",
                hint="in that directory: uv add 'ray[default]'",
                code=Code.ENVIRONMENT_NO_RAY,
            )
        if environment.ray not in (None, ray[1]):
            raise UsageError(
                f"`environment.ray` ({environment.ray}) and the Ray {ray[1]} of uv.lock disagree",
                hint="take `ray` out of the file's environment",
            )
        if not self._sees_this_host(config):
            return self._with_requirements(config, project.name, packages, ray[1], "uv.lock", install)
        venv = Path(environment.venv).expanduser().absolute() if environment.venv else project / ".venv"
        if install:
            self._emit(Event("note", f"installing uv.lock into {venv}"))
            argv = ["sync", "--frozen", "--quiet", "--compile-bytecode"]
            _uv(project, argv, SYNC_S, UV_PROJECT_ENVIRONMENT=str(venv))
        values = {"venv": str(venv), "ray": ray[1]}
        found = spec.model_copy(update={"environment": environment.model_copy(update=values)})
        origins = {**config.origins, **{f"environment.{key}": "uv.lock" for key in values}}
        return replace(config, spec=found, origins=origins)

    def _with_requirements(
        self, config: Config, name: str, text: str, ray: str | None, origin: str, install: bool
    ) -> Config:
        """The config with an environment of these packages, whose directory depends on them."""
        spec, environment, store = config.spec, config.spec.environment, self._access.store
        digest = hashlib.sha256(f"{sys.version_info[:2]}\n{text}".encode()).hexdigest()[:12]
        name = f"{re.sub('[^A-Za-z0-9_-]+', '-', name)[:40]}-{digest}"
        store.prepare()
        folder = store.home / FOLDER
        folder.mkdir(mode=0o700, exist_ok=True)
        write_atomic(folder / f"{name}.txt", text)
        backend = self._access.registry.load(spec.on)
        values: dict[str, str | None] = {"requirements": str(folder / f"{name}.txt"), "project": None}
        if backend.starts_ray and not environment.venv:
            here, there = str(folder / name), f"~/.heliostat/{FOLDER}/{name}"
            values["venv"] = here if self._sees_this_host(config) else there
        if ray and not environment.ray:
            values["ray"] = ray
        origins = {**config.origins, **{f"environment.{key}": origin for key in values if values[key]}}
        found = spec.model_copy(update={"environment": environment.model_copy(update=values)})
        if install and backend.starts_ray and not backend.shares_files:
            outcomes = self._installer.install(self._installer.targets(found), upgrade=False)
            if problem := find_problem(outcomes):
                raise problem
        return replace(config, spec=found, origins=origins)

    def _sees_this_host(self, config: Config) -> bool:
        """Whether the nodes see this host's directories."""
        backend = self._access.registry.load(config.spec.on)
        table = config.spec.backend_tables.get(config.spec.on, {})
        return backend.starts_ray and backend.shares_files and not table.get("via")


def _uv(project: Path, argv: list[str], timeout_s: float, **environ: str) -> str:
    """Runs uv in the project; its output. Raises HeliostatError."""
    settings = [f"{name}={value}" for name, value in environ.items()]
    command = ["env", *settings, "uv", *argv, "--project", str(project)]
    if not any(os.access(Path(folder) / "uv", os.X_OK) for folder in os.get_exec_path()):
        raise HeliostatError(
            "`uv` is not installed on this computer",
            cause="`environment.project` needs it to read uv.lock",
            hint="pip install uv",
            code=Code.PROGRAM_NOT_FOUND,
        )
    done = Local().run(command, timeout=timeout_s)
    if done.code:
        lines = [line.strip() for line in done.err.splitlines() if line.strip()]
        raise HeliostatError(
            f"uv could not use the project `{project}`",
            cause=(lines or [done.describe()])[-1][:300],
            details=done.describe(),
            hint=f"uv {' '.join(argv)} --project {project}",
            code=Code.PROGRAM_FAILED,
        )
    return done.out
