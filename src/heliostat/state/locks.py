"""Locks as directories with an owner, for shared file systems: one writer of a record, one command that launches nodes."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

from heliostat.common.processes import process_start
from heliostat.state.files import read_json

LOCK_S = 120.0  # a lock that was not renewed for so long has lost its owner, whatever host that was on


RENEW_S = LOCK_S / 4  # between two renewals of a lease


def _owner() -> str:
    """Who holds a lock, and since when or renewed when."""
    pid = os.getpid()
    return json.dumps(
        {"host": socket.gethostname(), "pid": pid, "start": process_start(pid), "since": time.time()}
    )


def renew(mine: Path) -> bool:
    """Says anew that this lock is held. False: it was taken from us."""
    if not mine.exists():
        return False
    # beside the lock, not in it: whoever looks into the lock must never see half a file
    temporary = mine.parent.with_name(f".{mine.parent.name}.{secrets.token_hex(4)}")
    try:
        temporary.write_text(_owner())
        os.replace(temporary, mine)
    except OSError:  # a full disk, a directory that was archived
        temporary.unlink(missing_ok=True)
    return True


def _keep_renewing(mine: Path, over: threading.Event) -> None:
    while not over.wait(RENEW_S) and renew(mine):
        pass


def _hold_interrupts() -> Callable[[], object]:
    """Ctrl-C and its like wait until what this gives is called. Where signals cannot be held, they come as they come."""
    if not hasattr(signal, "pthread_sigmask"):
        return bool
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
    return lambda: signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _owners(lock: Path) -> list[Path]:
    try:
        return [lock / name for name in os.listdir(lock)]
    except OSError:
        return []


def _stale(lock: Path) -> list[Path] | None:
    """The files of a lock whose owner is gone; None: it is held, or was given back in this moment."""
    files = _owners(lock)
    owner = read_json(files[0]) if files else None
    if owner is None:  # being made, or its owner died between two steps
        try:
            since = lock.stat().st_mtime
        except OSError:
            return None
    elif owner["host"] == socket.gethostname() and owner.get("start"):
        # no clock is asked: one that is set anew must not break a lock that somebody holds
        return files if process_start(owner["pid"]) != owner["start"] else None
    else:
        since = owner["since"]
    return files if abs(time.time() - since) > LOCK_S else None


def _remove_lock(lock: Path, files: list[Path] | None) -> None:
    """Exactly the lock that holds these files: one that somebody has taken meanwhile holds another, and stays."""
    if files is not None:
        for path in files:
            path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            lock.rmdir()
