"""What the figures were measured on."""

from __future__ import annotations

import os
import platform
import time
from importlib import metadata
from typing import Any


def describe() -> dict[str, Any]:
    return {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "python": platform.python_version(),
        "ray": _version("ray"),
        "heliostat": _version("heliostat"),
    }


def load() -> list[float]:
    """Of the last 1, 5 and 15 minutes."""
    return [round(value, 2) for value in os.getloadavg()]


class Quiet:
    """Waits for a machine that others leave alone, but not for ever: the patience is for the whole run."""

    BUSY = 0.25  # an idle Ray cluster alone uses about a tenth of two cores

    def __init__(self, patience_s: float) -> None:
        self.patience_s = patience_s
        self.seen: list[float] = []  # the share of the CPUs that was busy when a measurement began

    def wait(self) -> None:
        while (share := busy()) > self.BUSY and self.patience_s > 0:
            self.patience_s -= LOOK_S
        self.seen.append(share)


LOOK_S = 0.2


def busy() -> float:
    """The share of all CPUs that was in use for a moment: 0 to 1."""
    before = _ticks()
    time.sleep(LOOK_S)
    after = _ticks()
    return 1 - (after[1] - before[1]) / max(1, after[0] - before[0])


def _ticks() -> tuple[int, int]:
    """(all, idle) since the machine began."""
    with open("/proc/stat") as stream:
        fields = [int(word) for word in stream.readline().split()[1:9]]
    return sum(fields), fields[3] + fields[4]


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
