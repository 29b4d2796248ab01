"""The script that starts the agent: directives, the user's setup lines, one exec."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from heliostat.config.tables import Environment
from heliostat.common.shell import SAFE, quote


def agent_script(
    environment: Environment | None,
    agent: Path,
    command: str,
    *,
    python: str = sys.executable,
    **more: Any,
) -> BatchScript:
    """The script that runs the agent with the Python of this environment, or with `python` if it names none."""
    if environment is None:
        return BatchScript([python, agent.as_posix(), command], **more)
    has_own_python = environment.venv or environment.conda
    venv = environment.venv
    if venv and not venv.startswith("~/"):  # the host of the script expands `~/`
        venv = str(Path(venv).expanduser())
    return BatchScript(
        ["python3" if has_own_python else python, agent.as_posix(), command],
        setup=environment.setup,
        venv=venv,
        conda=environment.conda,
        **more,
    )


@dataclass(frozen=True)
class BatchScript:
    """A batch script.

    command: argv of the agent. setup: the user's shell lines, which run first, verbatim. directives: lines such as
    `#SBATCH …` of the backend."""

    command: Sequence[str]
    setup: Sequence[str] = ()
    directives: Sequence[str] = ()
    first: Sequence[str] = ()  # shell lines of the backend, before the user's
    comment: str = ""
    venv: str | None = None
    conda: str | None = None
    config: str = ""  # one line of JSON for the agent; if empty, the agent reads it from standard input
    checked: bool = False  # with `config`: check first that no other user can replace the agent

    def render(self) -> str:
        lines = ["#!/bin/bash", *self.directives]
        if self.comment:
            lines.append(f"# {self.comment}")
        first = [*self.first, *self.setup]
        if self.venv:
            tilde, path = ("~/", self.venv[2:]) if self.venv.startswith("~/") else ("", self.venv)
            first.append(f"source {tilde}{quote([path.rstrip('/') + '/bin/activate'])} || exit 1")
        if self.conda:
            # a batch shell needs the hook before `conda activate`, and may not have conda on its PATH: `conda init` exports
            # CONDA_EXE
            first.append('eval "$("${CONDA_EXE:-conda}" shell.bash hook)" || exit 1')
            first.append(f"conda activate {quote([self.conda])} || exit 1")
        if self.config:
            # on a shared file system, another host may see a new file only after a while
            python, agent, command = self.command
            first.append(f"for _ in {{1..300}}; do [ -e {quote([agent])} ] && break; sleep 0.2; done")
            line = quote(self.command)
            if self.checked:
                directory, _, name = agent.rpartition("/")
                first.append(f"{SAFE.replace(chr(10), ' ')}; d=$(safe {quote([directory, name])}) || exit 1")
                line = f'{quote([python])} "$d"/{quote([name, command])}'  # the physical path, without links
            return "\n".join([*lines, *first, f"exec {line} <<<{quote([self.config])}"]) + "\n"
        if not first:
            return "\n".join([*lines, f"exec {quote(self.command)}"]) + "\n"
        # standard input is for the agent: setup lines must not read it
        return (
            "\n".join([*lines, "exec 3<&0 </dev/null", *first, f"exec {quote(self.command)} <&3 3<&-"]) + "\n"
        )
