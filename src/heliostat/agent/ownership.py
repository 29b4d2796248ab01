"""Whether another user can change what a path leads to. The client uses this file as well: it imports nothing but `os` and
`stat` until something is found.

Only owners and mode bits count; access control lists are not read. root is trusted, because root can change everything."""

from __future__ import annotations

import os
import stat
from typing import List, NamedTuple, Optional, Set

MOST_LINKS = 40  # as the kernel


class Unsafe(NamedTuple):
    """A file, directory or link that another user can change."""

    path: str
    why: str  # after the path: "belongs to mallory"
    fix: str  # what makes it safe: "chown", "chmod" or "" (for a link: use another path)
    bits: str = ""  # for chmod: "o-w", "g-w", "go-w" or "+t"
    mine: bool = False  # the current user may do that

    def __str__(self) -> str:
        return "%s %s" % (self.path, self.why)


def find_unsafe(path: str, *, shared: bool = False, checked: Optional[Set[str]] = None) -> Optional[Unsafe]:
    """The first file or directory on the way from / to `path` that another user can change or replace; None: there is none.

    Symbolic links are followed: a link must belong to us or to root, and its target is checked from its own root on. A part of
    the path that does not exist is not checked, because whoever creates it below a safe directory owns it.

    shared: `path` may be a directory like /tmp, where everybody can create entries but not replace those of others (the sticky
    bit). Above `path` that is always accepted. checked: directories that need no second look; this call adds to them."""
    checked = set() if checked is None else checked
    parts = _parts(os.path.join(os.getcwd(), path) if not path.startswith("/") else path)
    here, links = "/", 0
    if "/" not in checked:
        found = check(here, os.lstat(here), shared or bool(parts))
        if found:
            return found
        checked.add("/")
    while parts:
        part = parts.pop()
        if part == "..":
            here = os.path.dirname(here)
            if not parts:
                return check(here, os.lstat(here), shared)
            continue
        place = os.path.join(here, part)
        if place in checked and parts:
            here = place
            continue
        try:
            about = os.lstat(place)
            target = os.readlink(place) if stat.S_ISLNK(about.st_mode) else None
        except OSError:
            return None  # it does not exist, or we cannot use it either
        if target is not None:
            links += 1
            if about.st_uid not in (os.getuid(), 0):
                return Unsafe(place, "is a symbolic link of %s" % _user(about.st_uid), "")
            if links > MOST_LINKS:
                return Unsafe(path, "has too many symbolic links", "")
            here = "/" if target.startswith("/") else here
            parts += _parts(target)
            continue
        found = check(place, about, shared or bool(parts))
        if found:
            return found
        checked.add(place)
        here = place
    return None


def _parts(path: str) -> List[str]:
    """The names in the path, the first one last."""
    return [part for part in reversed(path.split("/")) if part not in ("", ".")]


def check(place: str, about: os.stat_result, shared: bool = False) -> Optional[Unsafe]:
    """As find_unsafe, for one entry whose owner and mode are known. shared: a sticky directory is accepted."""
    me, mode = os.getuid(), about.st_mode
    if about.st_uid not in (me, 0):
        return Unsafe(place, "belongs to %s" % _user(about.st_uid), "chown", mine=me == 0)
    others = mode & 0o022
    if not others or (shared and stat.S_ISDIR(mode) and mode & stat.S_ISVTX):
        return None
    if others & 0o020 and _is_private_group(about.st_gid):
        others &= ~0o020
    if not others:
        return None
    who = "everybody" if others & 0o002 else "its group %s" % _group(about.st_gid)
    why = "can be changed by %s (mode %o)" % (who, stat.S_IMODE(mode))
    bits = {0o002: "o-w", 0o020: "g-w", 0o022: "go-w"}[others]
    if shared and stat.S_ISDIR(mode) and about.st_uid == 0:
        bits = "+t"  # users share it: the sticky bit is enough
    return Unsafe(place, why, "chmod", bits, about.st_uid == me or me == 0)


def _is_private_group(gid: int) -> bool:
    """Whether this is our user private group: the primary group of our account, with its name, and nobody else in it.

    Where the umask is 002 all that a user makes can be written by that group, which is then the user alone."""
    import grp
    import pwd

    try:
        me, group = pwd.getpwuid(os.getuid()), grp.getgrgid(gid)
    except KeyError:
        return False
    if gid != me.pw_gid or group.gr_name != me.pw_name or set(group.gr_mem) - {me.pw_name}:
        return False
    return all(user.pw_uid == me.pw_uid for user in pwd.getpwall() if user.pw_gid == gid)


def _user(uid: int) -> str:
    import pwd

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return "user %d" % uid


def _group(gid: int) -> str:
    import grp

    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)
