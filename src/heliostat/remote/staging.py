"""A virtual environment as one archive, which the nodes unpack on their own disks.

Importing Ray opens thousands of small files: from one shared disk, on a hundred nodes at once, that takes minutes. One
large file is read quickly, or broadcast. It is packed once and used until something in the environment changes.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import socket
import stat
import tarfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from heliostat.common.errors import Code, HeliostatError, disk_code
from heliostat.common.events import Emit, Event
from heliostat.common.processes import process_start
from heliostat.state.ownership import require_safe
from heliostat.state.store import ClusterDirectory, Store

BLOCK = 4096  # what a disk gives a file in
PROGRESS_INTERVAL_S = 0.5


@dataclass(frozen=True)
class Archive:
    """Where the archive of this environment lies, or will. room: bytes that its copy needs on a node's disk."""

    path: Path
    venv: Path
    room: int

    def to_json(self) -> dict[str, Any]:
        # programs in bin/ name their Python by the path that it was made under
        paths = sorted({str(self.venv), os.path.realpath(self.venv)})
        return {"archive": str(self.path), "venv": str(self.venv), "paths": paths, "room": self.room}


def describe_archive(venv: Path, cache: Path) -> Archive:
    """By the names, sizes and times of all its files: one that was changed has another name."""
    digest, room = hashlib.sha256(), 0
    for name, about in _walk(venv):
        digest.update(
            f"{name}\0{about.st_mode}\0{about.st_size}\0{about.st_mtime_ns}\n".encode(
                "utf-8", "surrogateescape"
            )
        )
        room += -(-about.st_size // BLOCK) * BLOCK
    return Archive(cache / f"{_prefix(venv)}{digest.hexdigest()[:16]}.tar", venv, room)


def pack(archive: Archive, store: Store, emit: Emit) -> None:
    """Makes it unless it is there; then takes away what it replaces. Two clients at once make the same file twice."""
    cache = archive.path.parent
    try:
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        require_safe(archive.path)
        if not archive.path.exists():
            _write(archive, emit)
        _sweep(archive, store)
    except (OSError, tarfile.TarError) as error:
        raise HeliostatError(
            f"could not pack the environment `{archive.venv}`",
            cause=str(error),
            details=str(cache),
            hint="free some space there, or leave out `environment.stage`",
            code=Code.DISK_FULL if disk_code(error) is Code.DISK_FULL else Code.ENVIRONMENT_PACK,
        ) from error


def _write(archive: Archive, emit: Emit) -> None:
    me = f"{secrets.token_hex(4)}.{os.getpid()}.{process_start(os.getpid())}.{socket.gethostname()}"
    draft = archive.path.with_name(f".{archive.path.stem}.{me}")
    emit(Event("note", f"packing {archive.venv}"))
    done, told = 0, time.monotonic()
    try:
        # not compressed: unpacking on every node would cost more than reading it
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as stream:
            with tarfile.open(fileobj=stream, mode="w", format=tarfile.GNU_FORMAT) as tar:
                for name, about in _walk(archive.venv):
                    with contextlib.suppress(FileNotFoundError):  # gone since we looked
                        tar.add(archive.venv / name, name, recursive=False)
                    done += about.st_size
                    if time.monotonic() - told > PROGRESS_INTERVAL_S:
                        told = time.monotonic()
                        emit(Event("progress", "packing", None, {"bytes": done, "of_bytes": archive.room}))
        os.replace(draft, archive.path)
    finally:
        draft.unlink(missing_ok=True)


def _walk(venv: Path) -> list[tuple[str, os.stat_result]]:
    """(path below it, what it is) of all that an archive can hold; a folder is before what is in it."""
    found = []
    for place, folders, files in os.walk(venv):
        for name in [*folders, *files]:
            path = os.path.join(place, name)
            with contextlib.suppress(FileNotFoundError):
                about = os.lstat(path)
                if stat.S_ISREG(about.st_mode) or stat.S_ISDIR(about.st_mode) or stat.S_ISLNK(about.st_mode):
                    found.append((os.path.relpath(path, venv), about))
    return sorted(found)


def _prefix(venv: Path) -> str:
    return f"venv-{hashlib.sha256(os.fsencode(venv)).hexdigest()[:12]}-"


def _sweep(archive: Archive, store: Store) -> None:
    """Older archives of the same environment that no cluster waits for, and drafts whose maker was killed."""
    for old in archive.path.parent.glob(f"{_prefix(archive.venv)}*.tar"):
        if old != archive.path and not any(_names(store, old.name)):
            old.unlink(missing_ok=True)
    for draft in archive.path.parent.glob(".*.*.*.*.*"):
        _, _, _, pid, start, host = draft.name.split(".", 5)
        if host == socket.gethostname() and pid.isdecimal() and process_start(int(pid)) != start:
            draft.unlink(missing_ok=True)


def _names(store: Store, archive: str) -> list[ClusterDirectory]:
    """The clusters whose agents are told of this archive: a job may wait in a queue for a day."""
    found = []
    for name in store.names():
        folder = ClusterDirectory(store.clusters / name)
        with contextlib.suppress(OSError):
            if any(archive.encode() in path.read_bytes() for path in folder.path.glob("script*.sh")):
                found.append(folder)
    return found
