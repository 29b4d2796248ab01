"""The Slurm step that this agent is the task of: whether it still exists, and the end of a job that Slurm has lost sight of.

Slurm starts each task as a child of a slurmstepd. When that is killed, Slurm neither ends the task nor learns of its end:
the agent has to notice by itself, or it and its Ray outlive the allocation."""

from __future__ import annotations

import os
import shutil
import subprocess
from typing import Optional

from . import processes

CHECK_S = 1.0  # between two looks at the step
RELEASE_S = 30.0  # for Slurm to take the cancellation


def find_daemon(task: int) -> Optional[int]:
    """The pid of the slurmstepd that started this process; None: no step did, or it cannot be seen from here."""
    if os.environ.get("SLURM_TASK_PID") != str(task):
        return None  # started by a shell inside of a job, say
    return processes.parent(task) or None


def is_gone(task: int, daemon: Optional[int]) -> bool:
    """Whether the step of this process has lost its slurmstepd. A process that has ended tells nothing."""
    parent = processes.parent(task)
    return daemon is not None and parent is not None and (parent != daemon or parent == 1)


def release_job() -> None:
    """Cancels our job: without the slurmstepd of its batch step it would keep its nodes until its time limit."""
    job, scancel = os.environ.get("SLURM_JOB_ID"), shutil.which("scancel")
    if job and scancel:
        try:
            subprocess.run([scancel, job], stdin=subprocess.DEVNULL, timeout=RELEASE_S)
        except (OSError, subprocess.TimeoutExpired):
            pass  # whoever looks at the cluster sees the job, and `down` ends it
