"""The text of a start script, and the only place that quotes for a shell.

A script is directives, the user's own set-up lines verbatim, and one `exec` of the agent: what happens on a node is
Python in the agent, never bash in a string.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    pass

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
