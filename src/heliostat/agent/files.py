"""Small files: atomic writes, tolerant reads, and the text of an error."""

from __future__ import annotations

import json
import os
import zipfile
from typing import Any, Dict, Mapping, Optional

from .protocol import Refused

TLS = "tls"  # the directory beside the token with keys and certificates
HEAD_FILES = ("head.json", "connection.json", "connection.env")  # removed when the head ends


def write(path: str, text: str) -> None:
    """Write a file atomically, readable by its owner only."""
    temporary = "%s.%d.tmp" % (path, os.getpid())
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with open(descriptor, "w", encoding="utf-8", errors="surrogateescape") as stream:
            stream.write(text)  # bytes of the environment that are not UTF-8 stay as they are
        os.replace(temporary, path)
    except OSError:
        try:
            os.unlink(temporary)
        except OSError:
            pass
        raise


def write_json(path: str, value: Mapping[str, Any]) -> None:
    write(path, json.dumps(value, indent=1, sort_keys=True) + "\n")


def read_json(path: str) -> Optional[Dict[str, Any]]:
    """The object in the file; None if the file is missing or incomplete (as on a slow shared disk)."""
    try:
        with open(path) as stream:
            value = json.load(stream)
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def unzip(archive: str, directory: str) -> None:
    """Extract with file modes, which `ZipFile.extractall` drops."""
    with zipfile.ZipFile(archive) as source:
        for entry in source.infolist():
            path = source.extract(entry, directory)
            if entry.external_attr >> 16:
                os.chmod(path, entry.external_attr >> 16 & 0o777 | 0o600)


def tail(path: str, limit: int = 4096) -> str:
    """The last `limit` bytes of a text file; "" if it cannot be read."""
    try:
        with open(path, "rb") as stream:
            stream.seek(0, os.SEEK_END)
            stream.seek(max(0, stream.tell() - limit))
            return stream.read().decode("utf-8", "replace")
    except OSError:
        return ""


def describe(error: BaseException) -> str:
    """One sentence about the error, for a report."""
    if isinstance(error, OSError):
        text = error.strerror or str(error) or type(error).__name__
        return "cannot use %s: %s" % (error.filename, text) if error.filename else text
    if isinstance(error, Refused) or type(error) is ValueError:
        return str(error)
    return "the agent failed with %s (%s); its log has the traceback" % (type(error).__name__, error)
