"""Quoting for a shell, and shell text that several modules use. No other module quotes."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence

# all variables that `heliostat env` may export, for Ray and for other programs
CONNECTION_VARIABLES = (
    "RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH", "RAY_USE_TLS", "RAY_TLS_SERVER_CERT", "RAY_TLS_SERVER_KEY",
    "RAY_TLS_CA_CERT", "HELIOSTAT_CLUSTER", "HELIOSTAT_RAY_PORT", "HELIOSTAT_HEAD_NODE", "HELIOSTAT_HEAD_IP", "HELIOSTAT_JOB_ID",
    "HELIOSTAT_PORT_OFFSET", "HELIOSTAT_STARTED", "HELIOSTAT_DASHBOARD_PORT",
)  # fmt: skip

# A shell function for a host where the agent must be checked before it is executed. `safe DIRECTORY FILE…` prints the physical
# path of the directory. It fails with the cause if another user can replace that directory, a parent, or one of these files.
# The rule is that of `agent/ownership.py`, except that a group with the user's name counts as private, whatever its members.
# `stat` prints the mode as `drwxr-xr-x`: the sixth letter is the group's write permission, the ninth that of others.
SAFE = r"""
safe() ( cd -P -- "$1" && shift || exit 1; p=$PWD; until [ -z "$p" ]; do set -- "$p" "$@"; p=${p%/*}; done;
me=$(id -u) name=$(id -un); all=$(stat -c '%u %A %G %n' -- / "$@") || exit 1;
bad=$(printf '%s\n' "$all" | while read -r owner mode rest; do case $owner in "$me"|0) case "$mode $rest" in
?????-??-?\ *|????????-?" $name "*|d????????[tT]\ *) continue ;; esac ;; esac; printf '%s, ' "${rest#* } (owner $owner, $mode)"; done);
[ -z "$bad" ] || { echo "another user can change ${bad%, }" >&2; exit 1; }; printf '%s\n' "$PWD" )
""".strip()


def wrap_in_shell(argv: Sequence[str]) -> list[str]:
    """An argv that runs the command through `sh`: the exit code is 127 if the program does not exist."""
    return ["sh", "-c", 'exec "$@"', "sh", *argv]


def quote(argv: Sequence[str]) -> str:
    """One shell line with exactly these arguments."""
    return shlex.join(argv)


def unset(names: Sequence[str]) -> str:
    """An `unset` line for `eval`."""
    return f"unset {' '.join(names)}\n"


def export(variables: Mapping[str, object]) -> str:
    """`export` lines for `eval`."""
    return "".join(f"export {name}={shlex.quote(str(value))}\n" for name, value in variables.items())


def directive(option: str) -> str:
    """One option for a scheduler's directive line, quoted only if necessary. Schedulers interpret \" and \\."""
    if not re.search(r"[\s\"'\\#]", option):
        return option
    name, sign, value = option.partition("=")
    inner = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'{name}{sign}"{inner}"'


def split(text: str) -> list[str]:
    """The arguments of one shell line. Raises ValueError if a quote is not closed."""
    return shlex.split(text)
