"""The private directory of a node, below the directory for temporary files: created, locked while the node lives, and
removed by a later agent or by `stop` if every process of the node was killed.

In a directory like /tmp other users can create any name: their entries are never followed, opened or waited for."""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import stat
import tempfile
from typing import List, Optional

from . import files, ownership, processes
from .protocol import RefusalCause, Refused

LONGEST = 40  # Ray's sockets are below it, and AF_UNIX paths have at most 107 bytes
PREFIX = "hs-"
DRAFT = ".hs-"  # then a process id: a directory that this process creates or removes
LOCK, OWNER = "lock", "owner.json"
SECRETS = ("token", "tls/member.key")
# do not follow a link, do not wait for a FIFO
_OPEN = os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_held: List[int] = []  # descriptors of locks: they close when supervisor and agent have ended


def parents() -> List[str]:
    """The directories that may contain private directories."""
    return list(dict.fromkeys([tempfile.gettempdir(), "/tmp"]))


def make(mark: str) -> str:
    """Create a private directory with a path that is short enough for Ray's sockets. Raises Refused.

    mark: the value in the environment of every process of the node."""
    sweep_all([])
    for parent in parents():
        if len(os.fsencode(parent)) + len("/hs-12345678/ray") > LONGEST:
            continue
        unsafe = ownership.find_unsafe(parent, shared=True)
        if unsafe:
            reason = "the directory for temporary files %s is not safe: %s" % (parent, unsafe)
            raise Refused(RefusalCause.TEMP_DIRECTORY, reason)
        try:
            return _make(parent, mark)
        except OSError:
            continue
    reason = "no directory for temporary files with a path of under %d bytes is writable" % (LONGEST - 16)
    raise Refused(RefusalCause.TEMP_DIRECTORY, reason)


def _make(parent: str, mark: str) -> str:
    """Create, lock, then rename: an agent that removes leftovers cannot see it without its lock."""
    owner = {"pid": os.getpid(), "start": processes.start_time(os.getpid()), "mark": mark}
    for _ in range(5):
        draft = os.path.join(parent, "%s%d-%s" % (DRAFT, os.getpid(), secrets.token_hex(4)))
        path = os.path.join(parent, PREFIX + secrets.token_hex(4))
        os.mkdir(draft, 0o700)
        held = -1
        try:
            held = os.open(os.path.join(draft, LOCK), _OPEN | os.O_CREAT | os.O_EXCL, 0o600)
            if _lock(held):
                files.write_json(os.path.join(draft, OWNER), owner)
                os.rename(draft, path)
                if _is_at(held, os.path.join(path, LOCK)):
                    _held.append(held)
                    return path
        except OSError:
            pass  # the name is taken, or an agent in another container, which cannot see this process, removed the draft
        if held >= 0:
            os.close(held)
        shutil.rmtree(draft, ignore_errors=True)
    raise OSError("could not create a directory in %s" % parent)


def _lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _is_at(descriptor: int, path: str) -> bool:
    """Whether the open file is still the one on disk."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    except OSError:
        return False


def sweep(parent: str) -> List[str]:
    """Remove the private directories of dead nodes of this user. Returns the removed paths."""
    removed = []
    for path in _drafts(parent):
        shutil.rmtree(path, ignore_errors=True)
    for path in _candidates(parent):
        descriptor = _take_dead(path)
        if descriptor is not None:
            if _remove(path):
                removed.append(path)
            os.close(descriptor)
    return removed


def sweep_all(temps: List[str]) -> List[str]:
    """`sweep` in all directories that may contain private ones, and in the parents of `temps`."""
    known = dict.fromkeys([*parents(), *(os.path.dirname(temp) for temp in temps if temp.startswith("/"))])
    safe = [parent for parent in known if ownership.find_unsafe(parent, shared=True) is None]
    return [path for parent in safe for path in sweep(parent)]


def dead(parent: str) -> List[str]:
    """The paths that `sweep` would remove."""
    found = []
    for path in _candidates(parent):
        descriptor = _take_dead(path)
        if descriptor is not None:
            found.append(path)
            os.close(descriptor)
    return found


def ending(parent: str) -> bool:
    """Whether the agent of a node here has ended, but not yet every process."""
    for path in _candidates(parent):
        descriptor = _take_lock(path)
        if descriptor is not None:
            os.close(descriptor)
            return True
    return False


def remove(path: str) -> None:
    """Remove the private directory of an ended node; any other path is ignored."""
    safe = ownership.find_unsafe(os.path.dirname(path) or ".", shared=True) is None
    if safe and os.path.basename(path).startswith(PREFIX) and _is_ours(path):
        _remove(path)


def remove_secrets(path: str) -> None:
    """Remove only the token and the keys of a private directory, which is fast."""
    for name in SECRETS:
        try:
            os.unlink(os.path.join(path, name))
        except OSError:
            pass


def _candidates(parent: str) -> List[str]:
    return [path for path in _named(parent, PREFIX) if _is_ours(path)]


def _drafts(parent: str) -> List[str]:
    """Drafts of dead processes."""
    found = []
    for path in _named(parent, DRAFT):
        pid = os.path.basename(path)[len(DRAFT) :].partition("-")[0]
        if pid.isdigit() and processes.start_time(int(pid)) is None and _is_ours(path):
            found.append(path)
    return found


def _named(parent: str, prefix: str) -> List[str]:
    try:
        return [os.path.join(parent, name) for name in os.listdir(parent) if name.startswith(prefix)]
    except OSError:
        return []


def _is_ours(path: str) -> bool:
    """Whether this is a directory of this user, not a link. In a safe parent no other user can replace it."""
    try:
        status = os.lstat(path)
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()


def _take_dead(path: str) -> Optional[int]:
    """The lock of a private directory whose node is dead; None if the node lives, or for any other path."""
    descriptor = _take_lock(path)
    if descriptor is None:
        return None
    owner = files.read_json(os.path.join(path, OWNER)) or {}
    pid, start, mark = owner.get("pid"), owner.get("start"), owner.get("mark")
    if (isinstance(pid, int) and processes.alive(pid, start)) or (mark and processes.marked(str(mark))):
        os.close(descriptor)
        return None
    return descriptor


def _take_lock(path: str) -> Optional[int]:
    """The lock of a private directory that no agent holds, if its file is still the one on disk."""
    lock = os.path.join(path, LOCK)
    try:
        descriptor = os.open(lock, _OPEN)
    except OSError:
        return None
    if stat.S_ISREG(os.fstat(descriptor).st_mode) and _lock(descriptor) and _is_at(descriptor, lock):
        return descriptor
    os.close(descriptor)
    return None


def _remove(path: str) -> bool:
    """Rename to a draft of this process first: if this process is killed, the next sweep removes the rest."""
    draft = os.path.join(os.path.dirname(path), "%s%d-%s" % (DRAFT, os.getpid(), secrets.token_hex(4)))
    try:
        os.rename(path, draft)
    except OSError:
        return False
    shutil.rmtree(draft, ignore_errors=True)
    return True
