"""Packs a virtual environment into one archive, which the nodes unpack on their own disks.

Importing Ray opens thousands of small files, which takes minutes from one shared disk on a hundred nodes. One large file is
read or broadcast quickly. It is packed once and reused until the environment changes.
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

from heliostat.common.documents import JsonObject
from heliostat.common.errors import Code, HeliostatError, disk_code
from heliostat.common.events import Emit, Event
from heliostat.common.processes import process_start
from heliostat.state.ownership import require_safe
from heliostat.state.store import ClusterDirectory, Store

BLOCK_BYTES = 4096  # disk space is allocated in blocks
PROGRESS_INTERVAL_S = 0.5


@dataclass(frozen=True)
class Archive:
    """The archive of an environment. path: its file, which may not exist yet. room: bytes of its copy on a node's disk."""

    path: Path
    venv: Path
    room: int

    def to_json(self) -> JsonObject:
        # scripts in bin/ contain the path that the environment was created with
        paths = sorted({str(self.venv), os.path.realpath(self.venv)})
        return {"archive": str(self.path), "venv": str(self.venv), "paths": paths, "room": self.room}


def describe_archive(venv: Path, cache: Path) -> Archive:
    """The archive of this environment. Its name depends on the names, sizes and times of all files."""
    digest, room = hashlib.sha256(), 0
    for name, status in _walk(venv):
        digest.update(
            f"{name}\0{status.st_mode}\0{status.st_size}\0{status.st_mtime_ns}\n".encode(
                "utf-8", "surrogateescape"
            )
        )
        room += -(-status.st_size // BLOCK_BYTES) * BLOCK_BYTES
    return Archive(cache / f"{_prefix(venv)}{digest.hexdigest()[:16]}.tar", venv, room)


def pack(archive: Archive, store: Store, emit: Emit) -> None:
    """Makes the archive unless it exists, then removes older ones. Two concurrent clients make the same file twice."""
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
            hint="free some space there, or remove `environment.stage`",
            code=Code.DISK_FULL if disk_code(error) is Code.DISK_FULL else Code.ENVIRONMENT_PACK,
        ) from error


def _write(archive: Archive, emit: Emit) -> None:
    me = f"{secrets.token_hex(4)}.{os.getpid()}.{process_start(os.getpid())}.{socket.gethostname()}"
    draft = archive.path.with_name(f".{archive.path.stem}.{me}")
    emit(Event("note", f"packing {archive.venv}"))
    done, last_event = 0, time.monotonic()
    try:
        # not compressed: decompression on every node would take longer than the read
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as stream:
            with tarfile.open(fileobj=stream, mode="w", format=tarfile.GNU_FORMAT) as tar:
                for name, status in _walk(archive.venv):
                    with contextlib.suppress(FileNotFoundError):  # deleted since the walk
                        tar.add(archive.venv / name, name, recursive=False)
                    done += status.st_size
                    if time.monotonic() - last_event > PROGRESS_INTERVAL_S:
                        last_event = time.monotonic()
                        emit(Event("progress", "packing", None, {"bytes": done, "of_bytes": archive.room}))
        os.replace(draft, archive.path)
    finally:
        draft.unlink(missing_ok=True)


def _walk(venv: Path) -> list[tuple[str, os.stat_result]]:
    """(relative path, status) of every file, directory and link, sorted: a directory comes before its entries."""
    found = []
    for parent, directories, files in os.walk(venv):
        for name in [*directories, *files]:
            path = os.path.join(parent, name)
            with contextlib.suppress(FileNotFoundError):
                status = os.lstat(path)
                if (
                    stat.S_ISREG(status.st_mode)
                    or stat.S_ISDIR(status.st_mode)
                    or stat.S_ISLNK(status.st_mode)
                ):
                    found.append((os.path.relpath(path, venv), status))
    return sorted(found)


def _prefix(venv: Path) -> str:
    return f"venv-{hashlib.sha256(os.fsencode(venv)).hexdigest()[:12]}-"


def _sweep(archive: Archive, store: Store) -> None:
    """Removes older archives of the environment that no cluster needs, and drafts of killed processes."""
    for old in archive.path.parent.glob(f"{_prefix(archive.venv)}*.tar"):
        if old != archive.path and not any(_users(store, old.name)):
            old.unlink(missing_ok=True)
    for draft in archive.path.parent.glob(".*.*.*.*.*"):
        _, _, _, pid, start, host = draft.name.split(".", 5)
        if host == socket.gethostname() and pid.isdecimal() and process_start(int(pid)) != start:
            draft.unlink(missing_ok=True)


def _users(store: Store, archive: str) -> list[ClusterDirectory]:
    """The clusters whose scripts name this archive: their jobs may still wait in a queue."""
    found = []
    for name in store.names():
        folder = ClusterDirectory(store.clusters / name)
        with contextlib.suppress(OSError):
            if any(archive.encode() in path.read_bytes() for path in folder.path.glob("script*.sh")):
                found.append(folder)
    return found
