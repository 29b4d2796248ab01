"""The Slurm step that runs this agent: whether it still exists, and how to end a job whose step was lost.

Slurm starts each task as a child of a slurmstepd. When that daemon is killed, Slurm neither ends the task nor notices its
end. The agent must detect this, or it and its Ray outlive the allocation."""

from __future__ import annotations

import os
import shutil
import subprocess
from typing import Optional

from . import processes

CHECK_S = 1.0  # between two checks of the step
RELEASE_S = 30.0  # for Slurm to accept the cancellation


def find_daemon(task: int) -> Optional[int]:
    """The pid of the slurmstepd that started this process; None if no step did, or if it is not visible."""
    if os.environ.get("SLURM_TASK_PID") != str(task):
        return None  # for example, a shell in a job started it
    return processes.parent(task) or None


def is_gone(task: int, daemon: Optional[int]) -> bool:
    """Whether the slurmstepd of this process was killed; False if the process itself has ended."""
    parent = processes.parent(task)
    return daemon is not None and parent is not None and (parent != daemon or parent == 1)


def release_job() -> None:
    """Cancel this job: without the slurmstepd of its batch step it would keep its hosts until its time limit."""
    job, scancel = os.environ.get("SLURM_JOB_ID"), shutil.which("scancel")
    if job and scancel:
        try:
            subprocess.run([scancel, job], stdin=subprocess.DEVNULL, timeout=RELEASE_S)
        except (OSError, subprocess.TimeoutExpired):
            pass  # `status` still shows the job, and `down` ends it
