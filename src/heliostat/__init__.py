"""Heliostat starts Ray clusters on hosts, schedulers and clouds, runs jobs on them, and releases the nodes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from heliostat._version import __version__
from heliostat.common.errors import HeliostatError

if TYPE_CHECKING:
    from heliostat.api import Cluster, Job, connect, up
    from heliostat.config.spec import ClusterSpec

__all__ = ["Cluster", "ClusterSpec", "HeliostatError", "Job", "__version__", "connect", "up"]


def __getattr__(name: str) -> Any:
    # keep `import heliostat` fast: load the API on first use
    if name in ("Cluster", "Job", "connect", "up"):
        from heliostat import api

        return getattr(api, name)
    if name == "ClusterSpec":
        from heliostat.config.spec import ClusterSpec

        return ClusterSpec
    raise AttributeError(f"module 'heliostat' has no attribute {name!r}")
