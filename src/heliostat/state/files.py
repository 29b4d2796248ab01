"""Atomic writes and reads of small files on shared file systems."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
from pathlib import Path
from typing import Any

from heliostat.common.errors import DiskError, disk_code


def write_atomic(path: Path, data: str | bytes, mode: int = 0o600) -> None:
    """The file appears whole or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with open(descriptor, "wb") as stream:
            stream.write(data.encode() if isinstance(data, str) else data)
        os.replace(temporary, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise _disk_error(path, error) from error


def _disk_error(path: Path, error: OSError) -> DiskError:
    hint = {
        errno.ENOSPC: "free some space there, or set HELIOSTAT_HOME to a folder on another disk",
        errno.EDQUOT: "free some space there, or set HELIOSTAT_HOME to a folder on another disk",
        errno.EACCES: "set HELIOSTAT_HOME to a folder that you may write to",
        errno.EROFS: "set HELIOSTAT_HOME to a folder that you may write to",
    }.get(error.errno or 0, "set HELIOSTAT_HOME to another folder")
    return DiskError(
        f"could not write `{path}`", cause=error.strerror or str(error), hint=hint, code=disk_code(error)
    )


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in the file; None when it is not there or not whole."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None
