"""The maximum size of an uploaded working directory.

Ray's dashboard, its job process and the GCS each hold several copies in memory. On a head with too little memory the kernel
kills one of them, and the job fails."""

from __future__ import annotations

from pathlib import Path

from heliostat.common.errors import Code, UsageError
from heliostat.common.units import format_bytes

COPIES = 10  # peak copies in memory: 3 in the dashboard, 4 in its job process, 3 in the GCS (measured with Ray 2.60)
RAY_BYTES = 768 * 2**20  # memory of Ray's processes on an idle head


def limit(free: int) -> int:
    """The maximum package size in bytes for a head with `free` bytes of memory."""
    return max(0, free) // COPIES


def refuse(folder: Path, size: int, free: int) -> UsageError:
    """The error for a package of `size` bytes. free: the head's free memory, now or after its start."""
    return UsageError(
        f"the working directory `{folder}` is too big for this head: {format_bytes(size)} packed, over "
        f"{format_bytes(limit(free))}",
        cause=f"Ray holds an upload {COPIES} times in memory, and its head has {format_bytes(max(0, free))} free",
        hint="give the head more memory (`head: {memory: 8G}`), exclude files with `.gitignore`, or put data on a volume",
        code=Code.WORKING_DIR_TOO_LARGE,
    )
