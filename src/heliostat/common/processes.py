"""Identity of processes on this host."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path


def process_start(pid: int) -> str | None:
    """When the process started, in words of this machine: with the pid it names one process for ever. None: gone.

    The agent has the same knowledge for the nodes; it may not be imported from here."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].decode().split()
        return fields[19] if fields[0] != "Z" else None
    except (OSError, IndexError):
        pass
    if os.path.isdir("/proc/self"):
        return None
    words = ["ps", "-o", "stat=,lstart=", "-p", str(pid)]
    try:
        listing = subprocess.run(words, capture_output=True, text=True, timeout=10)
    except FileNotFoundError:
        return None  # Windows, where no node runs: whoever holds a lock is judged by its age
    state, _, start = listing.stdout.strip().partition(" ")
    return start.strip() if state and not state.startswith("Z") else None
