"""The text of a script that starts the agent: directives, the user's setup lines, one exec."""

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
    verb: str,
    *,
    python: str = sys.executable,
    **more: Any,
) -> BatchScript:
    """The script that calls the agent by the Python of this environment (`python`: where it names none)."""
    if environment is None:
        return BatchScript([python, agent.as_posix(), verb], **more)
    special = environment.venv or environment.conda
    venv = environment.venv
    if venv and not venv.startswith("~/"):  # that one is for the machine where the script runs
        venv = str(Path(venv).expanduser())
    return BatchScript(
        ["python3" if special else python, agent.as_posix(), verb],
        setup=environment.setup,
        venv=venv,
        conda=environment.conda,
        **more,
    )


@dataclass(frozen=True)
class BatchScript:
    """command: the agent, as words. setup: shell lines of the user, run first and verbatim. directives: lines such as
    `#SBATCH …`, rendered by the site."""

    command: Sequence[str]
    setup: Sequence[str] = ()
    directives: Sequence[str] = ()
    first: Sequence[str] = ()  # shell lines of ours, before the user's
    comment: str = ""
    venv: str | None = None
    conda: str | None = None
    config: str = ""  # one line of JSON for the agent; where there is none, it comes on standard input
    checked: bool = (
        False  # with `config`: before the agent is executed, whether another user could have replaced it
    )

    def render(self) -> str:
        lines = ["#!/bin/bash", *self.directives]
        if self.comment:
            lines.append(f"# {self.comment}")
        first = [*self.first, *self.setup]
        if self.venv:
            tilde, path = ("~/", self.venv[2:]) if self.venv.startswith("~/") else ("", self.venv)
            first.append(f"source {tilde}{quote([path.rstrip('/') + '/bin/activate'])} || exit 1")
        if self.conda:
            # a batch shell has no `conda activate` until its hook has run, and may have no conda on its PATH either:
            # `conda init` exports where it is
            first.append('eval "$("${CONDA_EXE:-conda}" shell.bash hook)" || exit 1')
            first.append(f"conda activate {quote([self.conda])} || exit 1")
        if self.config:
            # a file that was just written may come late to another machine's view of a shared disk
            python, agent, verb = self.command
            first.append(f"for _ in {{1..300}}; do [ -e {quote([agent])} ] && break; sleep 0.2; done")
            words = quote(self.command)
            if self.checked:
                folder, _, name = agent.rpartition("/")
                first.append(f"{SAFE.replace(chr(10), ' ')}; d=$(safe {quote([folder, name])}) || exit 1")
                words = f'{quote([python])} "$d"/{quote([name, verb])}'  # no link on the way to it any more
            return "\n".join([*lines, *first, f"exec {words} <<<{quote([self.config])}"]) + "\n"
        if not first:
            return "\n".join([*lines, f"exec {quote(self.command)}"]) + "\n"
        # what comes on standard input is the agent's: a set-up line that reads must not swallow it
        return (
            "\n".join([*lines, "exec 3<&0 </dev/null", *first, f"exec {quote(self.command)} <&3 3<&-"]) + "\n"
        )
