"""How large an uploaded working directory may be for a head: Ray's dashboard, its job process and the GCS each hold it in
memory, several times. A head that is too small loses one of them, and the job with it."""

from __future__ import annotations

from pathlib import Path

from heliostat.common.errors import Code, UsageError
from heliostat.common.units import format_bytes

COPIES = 10  # of an upload in memory at its peak: 3 in the dashboard, 4 in its job process, 3 in the GCS (Ray 2.60, measured)
RAY_BYTES = 768 * 2**20  # what Ray itself takes on a head that is idle


def limit(free: int) -> int:
    """The largest package that a head with so much free memory can take."""
    return max(0, free) // COPIES


def refuse(folder: Path, size: int, free: int) -> UsageError:
    """size: of the package; free: what the head has, or will have, for it."""
    return UsageError(
        f"the working directory `{folder}` is too big for this head: {format_bytes(size)} packed, over "
        f"{format_bytes(limit(free))}",
        cause=f"Ray holds an upload {COPIES} times in memory, and its head has {format_bytes(max(0, free))} free",
        hint="give the head more memory (`head: {memory: 8G}`), leave files out by `.gitignore`, or put data on a volume",
        code=Code.WORKING_DIR_TOO_LARGE,
    )
