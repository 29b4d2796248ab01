"""Rejects files and directories that another user can change, before anything in them is trusted or executed."""

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
    """Another user can change the file or directory at the path."""

    code = Code.STORE_UNSAFE_DIRECTORY


def find_unsafe(
    path: str | os.PathLike[str], *, shared: bool = False, checked: set[str] | None = None
) -> Unsafe | None:
    """The agent's function of this name; None on Windows, which has no such owners and modes."""
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
    """Raises unless only this user and root can change the path's target. variable: the environment variable that sets it."""
    found = find_unsafe(path, shared=shared, checked=checked)
    if found:
        raise UnsafePathError(
            f"`{os.fspath(path)}` is not safe to use",
            cause=f"`{found.path}` {found.why}",
            hint=remedy(found, variable),
        )


def require_safe_file(path: Path, descriptor: int) -> None:
    """Raises unless only this user and root can change the open file, or replace it at this path.

    For a file that the user has not named: in a directory where others can create entries, this user must own it."""
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
    """A command that fixes the permissions. user: the directory's owner, if not the user of this process."""
    from heliostat.common.shell import quote  # not imported by `ls`

    other = f"set {variable} to a directory that only you can change"
    if not found.fix:
        return other
    argv = ["chown", user or _user_name()] if found.fix == "chown" else ["chmod", found.bits]
    command = quote([*([] if found.mine else ["sudo"]), *argv, found.path])
    return f"{command}; or {other}"


def _user_name() -> str:
    import pwd

    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # a container may use a uid without an account
        return str(os.getuid())


def temp_directory() -> Path:
    """The directory for temporary files. Raises if another user can replace our files there."""
    import tempfile  # not imported by `ls`

    path = tempfile.gettempdir()
    require_safe(path, TEMP, shared=True)
    return Path(path)
