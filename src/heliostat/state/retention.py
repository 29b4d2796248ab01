"""Limits the disk usage of ended clusters: deletes the logs of the oldest ones and keeps their rows in the history."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from heliostat.common.errors import HeliostatError, UsageError
from heliostat.common.units import parse_bytes
from heliostat.state.records import Record
from heliostat.state.store import ClusterDirectory, Store

VARIABLE = "HELIOSTAT_HISTORY_SIZE"
LIMIT_BYTES = 2**30
KEPT = frozenset({"record.json", "events.jsonl", "spec.yaml"})  # read by `history` and `logs NAME`


@dataclass(frozen=True)
class Ended:
    """An ended cluster: its directory, its record, and the bytes that pruning would free."""

    folder: ClusterDirectory
    record: Record
    size_bytes: int


def limit_bytes(environ: Mapping[str, str] = os.environ) -> int:
    """The limit for the logs of ended clusters."""
    text = environ.get(VARIABLE)
    if not text:
        return LIMIT_BYTES
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise UsageError(f"`${VARIABLE}` cannot be used", cause=str(error), hint=f"{VARIABLE}=1G") from None


def ended_clusters(store: Store) -> list[Ended]:
    """Every ended cluster with a readable record, in the order of their ends."""
    store.check()
    try:
        entries = [entry for entry in os.scandir(store.ended) if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return []
    found = []
    for entry in entries:
        folder = ClusterDirectory(Path(entry.path))
        with contextlib.suppress(HeliostatError, KeyError, ValueError, TypeError):
            found.append(Ended(folder, folder.record(), _size(folder.path)))
    return sorted(found, key=lambda one: one.record.ended or one.record.created)


def _size(path: Path) -> int:
    """The bytes in files. Directories are not counted: their size depends on the file system."""
    total = 0
    for entry in _entries(path):
        paths = [entry.path]
        if entry.is_dir(follow_symlinks=False):
            paths = [os.path.join(folder, name) for folder, _, names in os.walk(entry.path) for name in names]
        for one in paths:
            with contextlib.suppress(OSError):
                total += os.lstat(one).st_size
    return total


def _entries(path: Path) -> list[os.DirEntry[str]]:
    """The entries of an ended cluster that pruning removes."""
    try:
        return [entry for entry in os.scandir(path) if entry.name not in KEPT]
    except OSError:
        return []


def choose(clusters: list[Ended], limit: int, older_than_s: float | None, now: float) -> list[Ended]:
    """The clusters to prune: those that ended more than older_than_s ago, then the oldest until the others fit the limit."""
    old = [one for one in clusters if older_than_s is not None and now - _end(one) > older_than_s]
    left = [one for one in clusters if one not in old]
    total = sum(one.size_bytes for one in left)
    chosen = [one for one in old if one.size_bytes]
    for one in left:
        if total <= limit:
            break
        total -= one.size_bytes
        chosen += [one] if one.size_bytes else []
    return chosen


def _end(one: Ended) -> float:
    return one.record.ended or one.record.created


def prune(chosen: list[Ended]) -> int:
    """Removes the logs of these clusters and returns the freed bytes. Ignores files that cannot be removed."""
    freed = 0
    for one in chosen:
        for entry in _entries(one.folder.path):
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path, ignore_errors=True)
            else:
                with contextlib.suppress(OSError):
                    os.unlink(entry.path)
        freed += one.size_bytes - _size(one.folder.path)
    return freed


def enforce(store: Store, newest: ClusterDirectory) -> tuple[int, int]:
    """Enforces the limit after a cluster has ended: (clusters pruned, bytes freed). The logs of `newest` are always kept."""
    clusters = ended_clusters(store)
    newest_bytes = sum(one.size_bytes for one in clusters if one.folder.path == newest.path)
    others = [one for one in clusters if one.folder.path != newest.path]
    chosen = choose(others, max(0, limit_bytes() - newest_bytes), None, time.time())
    return len(chosen), prune(chosen)
