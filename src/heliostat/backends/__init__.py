"""The backends. Each is a module or package here with a `BACKEND`, found by its name; adding one adds a file."""

from __future__ import annotations

import importlib
import pkgutil
from typing import TYPE_CHECKING

from heliostat.common.documents import JsonMapping
from heliostat.common.errors import Code, UsageError
from heliostat.common.suggestions import BACKENDS, nearest

if TYPE_CHECKING:
    from heliostat.backends.base import Backend

_SHARED = {
    "base",
    "batch",
    "cloud",
    "detection",
    "overrides",
    "ssh_config",
}  # modules that several backends use
_CLOUDS = {"aws", "azure", "gcp"}  # modules of the package `cloud`


def names() -> list[str]:
    """The names of all backends, without importing any."""
    return sorted({module.name for module in pkgutil.iter_modules(__path__)} - _SHARED | _CLOUDS)


def load(name: str) -> Backend:
    """The backend of this name. Raises UsageError where there is none."""
    if name not in names():
        raise UsageError(
            f"there is no backend `{name}`",
            cause=f"backends: {', '.join(names())}",
            hint=f"--on {near}" if (near := nearest(name, names(), BACKENDS)) else "",
            code=Code.USAGE_UNKNOWN_BACKEND,
        )
    module = f"cloud.{name}" if name in _CLOUDS else name
    backend: Backend = importlib.import_module(f"heliostat.backends.{module}").BACKEND
    return backend


def nodes_of(name: str, table: JsonMapping) -> int | None:
    """How many nodes this table of a backend's options requests; None: the table does not determine it."""
    return load(name).nodes_of(table) if name in names() else None


def shares_files(name: str) -> bool:
    """Whether the nodes of this backend see the caller's directories under the same paths."""
    return name in names() and load(name).shares_files


def lists_hosts(name: str) -> bool:
    """Whether the nodes of this backend are the spec's `hosts`."""
    return name in names() and load(name).lists_hosts
