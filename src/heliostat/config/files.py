"""Where spec files are found: in the working directory or a parent of it, and the user's personal file.

`-q` of a scheduler is found with it before pydantic is imported, so this module imports quickly.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from heliostat.state.ownership import find_unsafe

FILE = "heliostat.yaml"
SCHEMA_FILE = ".heliostat.schema.json"  # for editors; `init` writes it
PERSONAL_FILE = "heliostat/config.yaml"  # in $XDG_CONFIG_HOME


def find_spec_file(start: Path) -> Path | None:
    """`heliostat.yaml` in this directory or in the nearest parent that has one, up to the home directory.

    The search ends before a directory that another user can change: a file that another user placed in /tmp is not found
    from below it."""
    start = start.absolute()
    if (start / FILE).is_file():
        return start / FILE
    home, checked = Path.home(), set[str]()
    for folder in start.parents if start != home else ():
        if find_unsafe(folder, checked=checked) is not None:
            return None
        if (folder / FILE).is_file():
            return folder / FILE
        if folder == home:
            return None
    return None


def find_personal_file(environ: Mapping[str, str] = os.environ) -> Path | None:
    """The file with the user's defaults: `~/.config/heliostat/config.yaml`."""
    base = environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    path = Path(base) / PERSONAL_FILE
    return path if path.is_file() else None
