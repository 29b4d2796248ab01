"""What `heliostat init` asks of a backend: whether it can be used from this machine, and the first spec file for it."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from heliostat.common.errors import HeliostatError

if TYPE_CHECKING:
    from heliostat.remote.transport import Transport

PROBE_S = 10.0  # time limit of a command


@dataclass(frozen=True)
class Detected:
    """What was found of a backend: one line for the user, and the lines of the spec file that follow `on`."""

    description: str
    lines: tuple[str, ...]


def output_of(machine: Transport, argv: list[str]) -> str:
    """The command's output; "": it does not exist on the machine, or fails."""
    try:
        done = machine.run(argv, timeout=PROBE_S)
    except HeliostatError:
        return ""
    return done.out.strip() if done.code == 0 else ""


def spec_line(text: str, comment: str) -> str:
    """A line of the spec file, with its comment in a column."""
    return f"{text:<34} # {' '.join(comment.split())}" if comment else text


def yaml_string(text: str) -> str:
    """The text as a YAML string: quoted where YAML would read another type (`no`, `12`)."""
    is_plain = re.fullmatch(r"[A-Za-z][\w.@-]{3,}", text) and text.lower() not in ("true", "false", "null")
    return text if is_plain else json.dumps(text)


NODES = spec_line("nodes: 2", "in all, the head included")
TIME = spec_line('# time: "4:00:00"', "maximum lifetime [the scheduler's limit]")
ENVIRONMENT = (
    "# environment:",
    spec_line("#   venv: ~/venvs/ray", "created if it does not exist [the environment of heliostat]"),
    spec_line('#   setup: ["module load cuda"]', "shell commands to run on every node before Ray"),
)
IDLE = spec_line("# idle: {timeout: 60m}", "terminate after this long without work")
