"""The Python environment that a user expects: the active one, else the `.venv` of the project, else that of Heliostat itself.

Heliostat may be installed apart from the user's work, by `uv tool install` or pipx. Nodes that see the user's directories use
the user's environment all the same.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from heliostat.common.errors import Code, HeliostatError
from heliostat.state.ownership import find_unsafe

VENV, CONDA = "venv", "conda"  # keys of the table `environment`
_BASE = ("base", "root")  # conda's own environment, which many shells activate without being asked
_PRIVATE = ("/tmp", "/var/tmp", "/dev/shm", "/run")  # other hosts have their own


@dataclass(frozen=True)
class Found:
    """An environment, and where it was found. kind: VENV or CONDA."""

    kind: str
    path: Path
    origin: str

    def has_ray(self) -> bool:
        """Whether Ray is installed in it, or may be installed in the Python that it is based on."""
        if any(self.path.glob("lib*/python3*/site-packages/ray/__init__.py")):
            return True
        try:
            settings = (self.path / "pyvenv.cfg").read_text(encoding="utf-8").replace(" ", "").lower()
        except (OSError, UnicodeDecodeError):
            return False
        return "include-system-site-packages=true" in settings


@dataclass(frozen=True)
class Choice:
    """found None: Heliostat's own environment. notes: for the user, about environments that cannot be used."""

    found: Found | None
    notes: tuple[str, ...] = ()


def choose(start: Path, environ: Mapping[str, str], own: Path, own_has_ray: bool) -> Choice:
    """The environment for a script in `start`. own: the prefix of the Python that runs Heliostat.

    The first environment with Ray is used. Raises HeliostatError if none has Ray."""
    without: list[Found] = []
    for found in _candidates(start, environ):
        if os.path.realpath(found.path) == os.path.realpath(own):
            break
        if found.has_ray():
            return Choice(found, tuple(_note(one, str(found.path)) for one in without))
        without.append(found)
    if own_has_ray:
        return Choice(None, tuple(_note(one, f"that of Heliostat, {own}") for one in without))
    raise _no_ray(without[0] if without else None, own)


def check_visible(found: Found, backend: str) -> None:
    """Raises HeliostatError for an environment that only this host has, on a backend with other hosts."""
    path = os.path.realpath(found.path)
    if any(path.startswith(f"{folder}/") for folder in _PRIVATE):
        raise HeliostatError(
            f"the nodes on `{backend}` do not see the environment `{found.path}`",
            cause=f"it is a directory of this host only ({found.origin})",
            hint="make it on a shared file system, for example in your home directory, or name another one: --venv DIRECTORY",
            code=Code.ENVIRONMENT_BROKEN,
        )


def _candidates(start: Path, environ: Mapping[str, str]) -> list[Found]:
    found = []
    if environ.get("VIRTUAL_ENV"):
        found.append(Found(VENV, Path(environ["VIRTUAL_ENV"]), "$VIRTUAL_ENV"))
    if environ.get("CONDA_PREFIX") and environ.get("CONDA_DEFAULT_ENV") not in _BASE:
        found.append(Found(CONDA, Path(environ["CONDA_PREFIX"]), "$CONDA_PREFIX"))
    found += _of_project(start.absolute())
    return [one for one in found if one.kind == CONDA or (one.path / "bin" / "activate").is_file()]


def _of_project(start: Path) -> list[Found]:
    """The nearest `.venv` at or above this directory, up to the home directory. Others must not be able to change it."""
    for folder in (start, *start.parents):
        path = folder / ".venv"
        if (path / "bin" / "activate").is_file():
            return [] if find_unsafe(path) else [Found(VENV, path, f".venv of {folder}")]
        if folder == Path.home():
            break
    return []


def _note(found: Found, instead: str) -> str:
    return f"the environment {found.path} ({found.origin}) has no Ray; using {instead}"


def _no_ray(found: Found | None, own: Path) -> HeliostatError:
    if found:
        program = "conda run -p" if found.kind == CONDA else "uv pip install --python"
        hint = f"{program} {found.path} " + (
            "pip install 'ray[default]'" if found.kind == CONDA else "'ray[default]'"
        )
        return HeliostatError(
            f"Ray is not installed in `{found.path}`",
            cause=f"it is the environment that the nodes would use ({found.origin})",
            hint=f"{hint}; or name another one: --venv DIRECTORY",
            code=Code.ENVIRONMENT_NO_RAY,
        )
    return HeliostatError(
        "Ray is not installed",
        cause=f"no environment is active, and that of Heliostat, `{own}`, has no Ray",
        hint="activate your environment; or name one: --venv DIRECTORY; or pip install 'heliostat[ray]'",
        code=Code.ENVIRONMENT_NO_RAY,
    )
