"""The sites. One file a backend, found by its name; adding a site is adding a file."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from heliostat.errors import Code, UsageError

if TYPE_CHECKING:
    from heliostat.backends.base import Backend


def names() -> list[str]:
    """The sites that are here, without importing any."""
    found = (module.name for module in pkgutil.iter_modules(__path__))
    return sorted(name for name in found if name != "base" and not name.startswith("_"))


def load(site: str) -> Backend:
    if site not in names():
        raise UsageError(
            f"there is no site `{site}`",
            cause=f"sites here: {', '.join(names())}",
            code=Code.USAGE_UNKNOWN_BACKEND,
        )
    backend: Backend = importlib.import_module(f"heliostat.backends.{site}").BACKEND
    return backend


def nodes_of(site: str, table: Mapping[str, Any]) -> int | None:
    """How many nodes the site's own words ask for; None: they say nothing of it."""
    return load(site).nodes_of(table) if site in names() else None
