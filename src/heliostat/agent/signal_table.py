"""The signals that the processes of a node receive: from whom, and what they mean."""

from __future__ import annotations

from typing import NamedTuple


class SignalUse(NamedTuple):
    signal: str
    process: str  # the receiver: "supervisor", "agent", "command", "ray start"
    sender: str
    meaning: str


# The supervisor forwards SIGTERM, SIGINT, SIGHUP and SIGUSR1 to the agent.
SIGNAL_TABLE = (
    SignalUse("SIGTERM", "supervisor", "`stop`, or the scheduler", "stop in order"),
    SignalUse("SIGINT", "supervisor", "a terminal", "stop in order"),
    SignalUse("SIGHUP", "supervisor", "a terminal that closes", "stop in order"),
    SignalUse("SIGUSR1", "supervisor", "Slurm, before the time limit", "warn, drain, then stop"),
    SignalUse("SIGTERM", "agent", "the supervisor; the kernel when the supervisor dies", "stop in order"),
    SignalUse("SIGURG", "agent", "`qsig` of PBS, to each process of the job", "stop in order, once"),
    SignalUse("SIGCONT", "agent", "Slurm, with the SIGTERM before it kills", "shorten the grace period"),
    SignalUse("SIGTERM", "command", "the agent", "save and exit within the grace period"),
    SignalUse("SIGKILL", "command", "the agent; the kernel when the agent dies", "end now"),
    SignalUse("SIGTERM", "ray start", "the agent", "drain the node"),
    SignalUse("SIGTERM", "ray start", "the kernel when the agent dies", "end"),
    SignalUse("SIGKILL", "every process of the node", "the supervisor, or `stop`", "end now"),
)
