"""Files that others read while we write: each is written under another name and renamed."""

from __future__ import annotations

import json
import os
import zipfile
from typing import Any, Dict, Optional

TLS = "tls"  # the directory beside the token with keys and certificates
OF_A_HEAD = ("head.json", "connection.json", "connection.env")  # nobody must find a head that is not there


def write(path: str, text: str) -> None:
    """The file appears whole or not at all; only its owner may read it."""
    temporary = "%s.%d.tmp" % (path, os.getpid())
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with open(descriptor, "w", encoding="utf-8", errors="surrogateescape") as stream:
            stream.write(text)  # what came as bytes from the environment is written as these bytes
        os.replace(temporary, path)
    except OSError:
        try:
            os.unlink(temporary)
        except OSError:
            pass
        raise


def write_json(path: str, value: Any) -> None:
    write(path, json.dumps(value, indent=1, sort_keys=True) + "\n")


def read_json(path: str) -> Optional[Dict[str, Any]]:
    """The object in the file; None while it is not there, or is not whole yet (a slow shared folder)."""
    try:
        with open(path) as stream:
            value = json.load(stream)
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def unzip(archive: str, folder: str) -> None:
    """With the files' modes, which Python's own does not keep."""
    with zipfile.ZipFile(archive) as source:
        for entry in source.infolist():
            made = source.extract(entry, folder)
            if entry.external_attr >> 16:
                os.chmod(made, entry.external_attr >> 16 & 0o777 | 0o600)


def tail(path: str, limit: int = 4096) -> str:
    """The last `limit` bytes of a text file, or nothing."""
    try:
        with open(path, "rb") as stream:
            stream.seek(0, os.SEEK_END)
            stream.seek(max(0, stream.tell() - limit))
            return stream.read().decode("utf-8", "replace")
    except OSError:
        return ""


def sentence(error: BaseException) -> str:
    """The error as a cause that a person can read."""
    if isinstance(error, OSError):
        why = error.strerror or str(error) or type(error).__name__
        return "cannot use %s: %s" % (error.filename, why) if error.filename else why
    if type(error) is ValueError:
        return str(error)
    return "the agent failed with %s (%s); its log has the traceback" % (type(error).__name__, error)
