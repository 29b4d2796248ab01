"""How long a worker waits for a head that it has not met yet, and why it stops waiting."""

from __future__ import annotations

import os
from typing import Callable, NamedTuple, Optional

from . import files
from .protocol import AgentConfig

SAME_ALLOCATION_S = 120.0  # the head's agent started before ours
LIMIT_S = 600.0  # from the start of the head's agent: it runs elsewhere, or copies an environment first
CONFIRM_S = 10.0  # a head that starts again replaces the report of its last end within this time
CHECK_S = 5.0  # between two checks: the record of a thousand nodes is large, and each of them reads it
ENDED = ("GONE", "FAILED")


class Evidence(NamedTuple):
    """What the cluster's directory shows."""

    directory: bool = True  # it exists
    ended: bool = False  # the record shows the cluster as ended, or belongs to another cluster
    head: Optional[str] = None  # the last state that the head's agent reported; None: it has not started
    reason: str = ""  # of that state


class HeadWait:
    """Decides when a worker stops waiting. limit_s: for a head whose agent has started. queues: the head has an allocation of its own,
    which may be queued, so there is no limit before its agent starts."""

    def __init__(self, clock: Callable[[], float], limit_s: float, queues: bool) -> None:
        self.clock, self.limit_s, self.queues = clock, limit_s, queues
        self.last = clock()
        self.waited = self.head_ended = 0.0

    def stop_reason(self, seen: Evidence) -> str:
        """Why the wait is over; "": it is not."""
        now = self.clock()
        step, self.last = min(2 * CHECK_S, now - self.last), now  # a worker may have been suspended
        self.waited = 0.0 if self.queues and seen.head is None else self.waited + step
        self.head_ended = self.head_ended + step if seen.head in ENDED else 0.0
        if not seen.directory:
            return "the cluster's directory is gone"
        if seen.ended:
            return "the cluster has ended"
        if self.head_ended > CONFIRM_S:
            return "the head ended before this node reached it" + (seen.reason and ": " + seen.reason)
        if self.waited > self.limit_s:
            return "the head could not be reached for %d s" % self.waited
        return ""


def make(config: AgentConfig, clock: Callable[[], float]) -> HeadWait:
    """For the worker with this config. Only the nodes of a batch job have `members`."""
    members = config.get("members") or ()
    together = any(member.get("role") == "head" for member in members)
    # the nodes of a job copy a staged environment at the same time, and the head may be the slowest
    short = together and not config.get("stage")
    return HeadWait(clock, SAME_ALLOCATION_S if short else LIMIT_S, queues=bool(members) and not together)


def observe(config: AgentConfig) -> Evidence:
    """Reads the cluster's directory. A directory that another machine has, or a script submitted by hand, has no record."""
    folder = config["folder"]
    try:
        os.stat(folder)
    except FileNotFoundError:
        return Evidence(directory=False)
    except OSError:
        return Evidence()  # a file server that does not answer
    record = files.read_json(os.path.join(folder, "record.json")) or {}
    agent = files.read_json(os.path.join(folder, "nodes", "head.json")) or {}
    node = (record.get("nodes") or {}).get("head") or {}
    # a job that Slurm has queued again: the report is of its first run
    again = node.get("state") == "QUEUED" and node.get("since", 0) > agent.get("since", 0)
    return Evidence(
        ended=bool(record) and (record.get("id") != config["id"] or record.get("target") != "up"),
        head=None if again else agent.get("state"),
        reason=str(agent.get("reason") or ""),
    )
