"""Refuses files and directories that another user can change, before anything in them is trusted or executed."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from heliostat.common.errors import Code, HeliostatError

if TYPE_CHECKING:
    from heliostat.agent.ownership import Unsafe

HOME, TEMP = "HELIOSTAT_HOME", "TMPDIR"


class UnsafePathError(HeliostatError):
    """Another user can change what the path leads to."""

    code = Code.STORE_UNSAFE_DIRECTORY


def find_unsafe(
    path: str | os.PathLike[str], *, shared: bool = False, checked: set[str] | None = None
) -> Unsafe | None:
    """As the agent's function of this name. Windows has neither owners nor modes of this kind: nothing is found there."""
    if sys.platform == "win32":
        return None
    from heliostat.agent.ownership import find_unsafe

    return find_unsafe(os.fspath(path), shared=shared, checked=checked)


def require_safe(
    path: str | os.PathLike[str],
    variable: str = HOME,
    *,
    shared: bool = False,
    checked: set[str] | None = None,
) -> None:
    """Raises unless only this user and root can change what the path leads to. variable: what names it in the environment."""
    found = find_unsafe(path, shared=shared, checked=checked)
    if found:
        raise UnsafePathError(
            f"`{os.fspath(path)}` is not safe to use",
            cause=f"`{found.path}` {found.why}",
            hint=remedy(found, variable),
        )


def require_safe_file(path: Path, descriptor: int) -> None:
    """Raises unless only this user and root can change the open file and replace it at this path. For a file that the user has
    not named: in a directory where others can create entries, the file must be this user's own."""
    if sys.platform == "win32":
        return
    from heliostat.agent.ownership import Unsafe, check

    # the open file first: another user can remove and create an entry between a check of the path and open()
    found = check(str(path), os.fstat(descriptor)) or find_unsafe(path)
    mode = os.stat(path.parent).st_mode
    if not found and mode & stat.S_ISVTX and mode & 0o022 and os.lstat(path).st_uid != os.getuid():
        found = Unsafe(str(path), "belongs to root in a directory where others can create files", "")
    if found:
        raise UnsafePathError(
            f"`{path}` is not safe to use",
            cause=f"`{found.path}` {found.why}; commands in the file run as you",
            hint=f"to use it anyway, name it: -f {path.name}",
        )


def remedy(found: Unsafe, variable: str, user: str | None = None) -> str:
    """What to type. user: whose directory it should be, where that is not this process's."""
    from heliostat.common.shell import quote  # `ls` does without

    other = f"set {variable} to a directory that only you can change"
    if not found.fix:
        return other
    words = ["chown", user or _name()] if found.fix == "chown" else ["chmod", found.bits]
    command = quote([*([] if found.mine else ["sudo"]), *words, found.path])
    return f"{command}; or {other}"


def _name() -> str:
    import pwd

    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # a container's made-up uid
        return str(os.getuid())


def temp_directory() -> Path:
    """The directory for temporary files, where nobody else can replace ours."""
    import tempfile  # `ls` does without

    path = tempfile.gettempdir()
    require_safe(path, TEMP, shared=True)
    return Path(path)
