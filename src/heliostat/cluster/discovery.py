"""Finds the backends that can be used from this machine, without a connection to another host, and renders the first
`heliostat.yaml` for one of them. Each backend searches for its own programs and files (`Backend.detect`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from heliostat import backends
from heliostat.backends.detection import Detected, spec_line, yaml_string
from heliostat.common.errors import UsageError
from heliostat.config.tables import NAME
from heliostat.remote.transport import Transport


def discover(machine: Transport, home: Path, environ: Mapping[str, str] = os.environ) -> dict[str, Detected]:
    """What was found, by the backend's name; the most capable backend first."""
    found = {}
    for backend in sorted(map(backends.load, backends.names()), key=lambda one: -one.detection_priority):
        if detected := backend.detect(machine, home, environ):
            found[backend.name] = detected
    return found


def choose(found: Mapping[str, Detected], wanted: str | None) -> str:
    """The backend of the file: the wanted one, else the most capable. Raises UsageError if it was not found."""
    if wanted is None:
        return next(iter(found))
    backend = backends.load(wanted)
    if wanted not in found:
        raise UsageError(
            f"nothing of `{wanted}` is found here",
            cause=backend.not_detected,
            hint=f"heliostat init --on {next(iter(found))}",
        )
    return wanted


def render_spec_file(found: Mapping[str, Detected], backend: str, directory: str) -> str:
    """The text of the first `heliostat.yaml`. The cluster's name is that of the directory."""
    name = re.sub(r"[^A-Za-z0-9]+", "-", directory).strip("-")[:40].strip("-")
    name = name.lower().lstrip("-0123456789")  # on some backends it becomes part of host names
    name = name if NAME.fullmatch(name) else backend
    others = [other for other in found if other != backend]
    also = f"; also found here: {', '.join(others)}" if others else ""
    lines = [
        "# What `heliostat up` starts, and `heliostat run SCRIPT.py` for one script. All keys: heliostat schema",
        spec_line(f"name: {yaml_string(name)}", f"heliostat status {name}"),
        spec_line(f"on: {backend}", f"the backend{also}"),
        *found[backend].lines,
    ]
    return "\n".join(lines) + "\n"
