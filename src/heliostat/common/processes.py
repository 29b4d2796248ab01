"""Identity of processes on this host."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path


def process_start(pid: int) -> str | None:
    """The start time of the process in the system's own format; None: it has ended. Pid and start time identify a process.

    The agent has its own copy of this function, because it runs without this package."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].decode().split()
        return fields[19] if fields[0] != "Z" else None
    except (OSError, IndexError):
        pass
    if os.path.isdir("/proc/self"):
        return None
    argv = ["ps", "-o", "stat=,lstart=", "-p", str(pid)]
    try:
        listing = subprocess.run(argv, capture_output=True, text=True, timeout=10)
    except FileNotFoundError:
        return None  # Windows: no nodes run there, and locks expire by age
    state, _, start = listing.stdout.strip().partition(" ")
    return start.strip() if state and not state.startswith("Z") else None
