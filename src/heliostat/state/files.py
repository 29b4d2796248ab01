"""Atomic writes and reads of small files on shared file systems."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
from pathlib import Path

from heliostat.common.documents import JsonObject
from heliostat.common.errors import DiskError, disk_code


def write_atomic(path: Path, data: str | bytes, mode: int = 0o600) -> None:
    """Writes the file completely or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with open(descriptor, "wb") as stream:
            stream.write(data.encode() if isinstance(data, str) else data)
        os.replace(temporary, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise disk_error(path, error) from error


def disk_error(path: Path, error: OSError) -> DiskError:
    """The error of a failed write, with a remedy."""
    hint = {
        errno.ENOSPC: "free some space there, or set HELIOSTAT_HOME to a directory on another disk",
        errno.EDQUOT: "free some space there, or set HELIOSTAT_HOME to a directory on another disk",
        errno.EACCES: "set HELIOSTAT_HOME to a directory that you may write to",
        errno.EROFS: "set HELIOSTAT_HOME to a directory that you may write to",
    }.get(error.errno or 0, "set HELIOSTAT_HOME to another directory")
    return DiskError(
        f"could not write `{path}`", cause=error.strerror or str(error), hint=hint, code=disk_code(error)
    )


def read_json(path: Path) -> JsonObject | None:
    """The object in the file; None if the file is missing or incomplete."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None
