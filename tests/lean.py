"""A virtual environment with Ray and nothing else, for tests that copy one: the tests' own has a gigabyte of other things."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
import venv
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


def prefix() -> str:
    """Made once of what is installed here, by links, beside it: hosts that see the tests' own environment see it too."""
    made = Path(sys.prefix, f"lean-{metadata.version('ray')}")
    if not made.exists():
        half = Path(tempfile.mkdtemp(prefix="lean-", dir=sys.prefix))
        half.chmod(0o755)
        _fill(half, made)
        try:
            half.rename(made)
        except OSError:  # another process was faster
            shutil.rmtree(half)
    return str(made)


def _fill(half: Path, made: Path) -> None:
    venv.EnvBuilder(symlinks=True).create(half)
    for dist in _with_needs("ray", {"default"}, {}).values():
        for file in dist.files or ():
            source = Path(os.path.abspath(dist.locate_file(file)))
            if not source.is_relative_to(sys.prefix) or not source.is_file():
                continue
            target = half / source.relative_to(sys.prefix)
            target.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileExistsError):  # two packages may list the same file
                if target.parent.name == "bin" and (text := source.read_bytes()).startswith(b"#!"):
                    target.write_bytes(text.replace(os.fsencode(sys.prefix), os.fsencode(made), 1))
                    target.chmod(0o755)
                else:
                    target.hardlink_to(source)


def _with_needs(
    name: str, extras: set[str], found: dict[str, metadata.Distribution]
) -> dict[str, metadata.Distribution]:
    """The package and all that it needs, as far as it is installed."""
    key = canonicalize_name(name)
    try:
        dist = found.setdefault(key, metadata.distribution(name))
    except metadata.PackageNotFoundError:
        return found
    for need in map(Requirement, dist.requires or ()):
        marker = need.marker
        asked = marker is None or any(marker.evaluate({"extra": extra}) for extra in extras | {""})
        if asked and canonicalize_name(need.name) not in found:
            _with_needs(need.name, set(need.extras), found)
    return found
