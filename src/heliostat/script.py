"""The text of a start script, and the only place that quotes for a shell.

A script is directives, the user's own set-up lines verbatim, and one `exec` of the agent: what happens on a node is
Python in the agent, never bash in a string.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from heliostat.spec import Environment

# all that `heliostat env` may export: what Ray reads, and what other programs may want to know
CONNECTION_VARIABLES = (
    "RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH", "RAY_USE_TLS", "RAY_TLS_SERVER_CERT", "RAY_TLS_SERVER_KEY",
    "RAY_TLS_CA_CERT", "HELIOSTAT_CLUSTER", "HELIOSTAT_RAY_PORT", "HELIOSTAT_HEAD_NODE", "HELIOSTAT_HEAD_IP", "HELIOSTAT_JOB_ID",
    "HELIOSTAT_PORT_OFFSET", "HELIOSTAT_STARTED", "HELIOSTAT_DASHBOARD_PORT",
)  # fmt: skip

# A shell function for a host where nothing of ours can be imported before it is checked. `safe DIRECTORY FILE…` prints the
# physical path of the directory. It fails and names the cause when another user can replace that directory, one above it, or
# one of these files in it: the rule of `agent/ownership.py`, except that a group with the user's own name counts as private
# whoever is in it. `stat` prints the mode as `drwxr-xr-x`: the sixth letter is the group's right to write, the ninth that of others.
SAFE = r"""
safe() ( cd -P -- "$1" && shift || exit 1; p=$PWD; until [ -z "$p" ]; do set -- "$p" "$@"; p=${p%/*}; done;
me=$(id -u) name=$(id -un); all=$(stat -c '%u %A %G %n' -- / "$@") || exit 1;
bad=$(printf '%s\n' "$all" | while read -r owner mode rest; do case $owner in "$me"|0) case "$mode $rest" in
?????-??-?\ *|????????-?" $name "*|d????????[tT]\ *) continue ;; esac ;; esac; printf '%s, ' "${rest#* } (owner $owner, $mode)"; done);
[ -z "$bad" ] || { echo "another user can change ${bad%, }" >&2; exit 1; }; printf '%s\n' "$PWD" )
""".strip()


def by_shell(argv: Sequence[str]) -> list[str]:
    """Words that run the command as it is, and end with 127 where there is none: the code of a shell."""
    return ["sh", "-c", 'exec "$@"', "sh", *argv]


def quote(words: Sequence[str]) -> str:
    """One shell line that means exactly these words."""
    return shlex.join(words)


def unset(names: Sequence[str]) -> str:
    """An `unset` line for `eval`."""
    return f"unset {' '.join(names)}\n"


def export(variables: Mapping[str, object]) -> str:
    """`export` lines for `eval`."""
    return "".join(f"export {name}={shlex.quote(str(value))}\n" for name, value in variables.items())


def directive(word: str) -> str:
    """One option as a scheduler's directive line takes it: quoted only where it must be. Schedulers know \" and \\."""
    if not re.search(r"[\s\"'\\#]", word):
        return word
    name, sign, value = word.partition("=")
    inner = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'{name}{sign}"{inner}"'


def split(text: str) -> list[str]:
    """The words of one shell line. Raises ValueError when a quote is not closed."""
    return shlex.split(text)


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
