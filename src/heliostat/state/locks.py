"""Locks for shared file systems: directories with an owner. One protects a record, another the launch of nodes."""

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

LOCK_S = 120.0  # a lock of another host that was not renewed for this long is stale
RENEW_S = LOCK_S / 4  # between two renewals of a lease


def describe_owner() -> str:
    """This process as the owner of a lock, with the time of the last renewal, as JSON."""
    pid = os.getpid()
    return json.dumps(
        {"host": socket.gethostname(), "pid": pid, "start": process_start(pid), "since": time.time()}
    )


def renew(mine: Path) -> bool:
    """Renews a lock. False: another process has removed it."""
    if not mine.exists():
        return False
    # outside the lock's directory, so that no reader of the lock finds an incomplete file
    temporary = mine.parent.with_name(f".{mine.parent.name}.{secrets.token_hex(4)}")
    try:
        temporary.write_text(describe_owner())
        os.replace(temporary, mine)
    except OSError:  # the disk is full, or the directory was archived
        temporary.unlink(missing_ok=True)
    return True


def keep_renewing(mine: Path, released: threading.Event) -> None:
    """Renews the lock until it is released or lost."""
    while not released.wait(RENEW_S) and renew(mine):
        pass


def block_interrupts() -> Callable[[], object]:
    """Blocks SIGINT, SIGTERM and SIGHUP until the returned function is called. Does nothing on Windows."""
    if not hasattr(signal, "pthread_sigmask"):
        return bool
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
    return lambda: signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def list_owners(lock: Path) -> list[Path]:
    """The owner files of a lock: one, or none while it is made or removed."""
    try:
        return [lock / name for name in os.listdir(lock)]
    except OSError:
        return []


def find_stale(lock: Path) -> list[Path] | None:
    """The files of a lock whose owner has ended; None: it is held or was just released."""
    files = list_owners(lock)
    owner = read_json(files[0]) if files else None
    if owner is None:  # the lock is being made, or its owner was killed meanwhile
        try:
            since = lock.stat().st_mtime
        except OSError:
            return None
    elif owner["host"] == socket.gethostname() and owner.get("start"):
        # without a clock: a clock that is set must not break a lock that is held
        return files if process_start(owner["pid"]) != owner["start"] else None
    else:
        since = owner["since"]
    return files if abs(time.time() - since) > LOCK_S else None


def remove_lock(lock: Path, files: list[Path] | None) -> None:
    """Removes the lock only if it has no other files: a lock that another process took meanwhile is kept."""
    if files is not None:
        for path in files:
            path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            lock.rmdir()
