"""The states of a node, the allowed transitions, and the state of a cluster, which is derived and never stored."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum


class NodeState(str, Enum):
    REQUESTED = "REQUESTED"  # in the record; nothing is submitted yet
    QUEUED = "QUEUED"  # submitted; waits for an allocation
    ALLOCATED = "ALLOCATED"  # has a host; no report of the agent yet
    STARTING = "STARTING"  # the agent runs and starts Ray
    READY = "READY"  # alive in Ray's node table
    LOST = "LOST"  # was READY; its heartbeats are missing
    STOPPING = "STOPPING"  # was asked to end
    GONE = "GONE"  # ended on request; nothing of it is left
    FAILED = "FAILED"  # ended without a request
    SUSPENDED = "SUSPENDED"  # ended by `down --keep`; `up` resumes it
    UNKNOWN = "UNKNOWN"  # the backend does not answer, or reports an unknown state

    def __str__(self) -> str:
        return self.value


N = NodeState

# A command observes a node now and then, so it may miss intermediate states: most edges also skip some.
TRANSITIONS: dict[NodeState, frozenset[NodeState]] = {
    N.REQUESTED: frozenset(
        {
            N.QUEUED,  # the scheduler accepted the job
            N.ALLOCATED,  # the backend has no queue, or granted a host at once
            N.STARTING,  # the agent started before the first observation
            N.READY,  # Ray started before the first observation
            N.LOST,  # it became ready and lost its heartbeats before the first observation
            N.STOPPING,  # `down` during the launch
            N.SUSPENDED,  # `down --keep` during the launch
            N.FAILED,  # the backend rejected the request
            N.GONE,  # cancelled before anything ran
            N.UNKNOWN,  # the backend does not answer
        }
    ),
    N.QUEUED: frozenset(
        {
            N.ALLOCATED,  # the scheduler granted a host
            N.STARTING,  # granted, and the agent reported
            N.READY,  # granted, and Ray started
            N.LOST,  # ready and lost between two observations
            N.STOPPING,  # `down`
            N.SUSPENDED,  # `down --keep`
            N.FAILED,  # the job ended without a request
            N.GONE,  # the job was cancelled
            N.UNKNOWN,  # the scheduler does not answer
        }
    ),
    N.ALLOCATED: frozenset(
        {
            N.QUEUED,  # preempted and requeued
            N.STARTING,  # the agent reported
            N.READY,  # the agent reported, and Ray started
            N.LOST,  # ready and lost between two observations
            N.STOPPING,  # `down`
            N.SUSPENDED,  # `down --keep`
            N.FAILED,  # the allocation ended before the agent ran
            N.GONE,  # cancelled
            N.UNKNOWN,  # the backend does not answer
        }
    ),
    N.STARTING: frozenset(
        {
            N.QUEUED,  # preempted and requeued
            N.READY,  # Ray's node table has it
            N.LOST,  # no more heartbeats of the agent
            N.STOPPING,  # `down`
            N.SUSPENDED,  # `down --keep`
            N.FAILED,  # Ray did not start
            N.GONE,  # cancelled
            N.UNKNOWN,  # the backend does not answer
        }
    ),
    N.READY: frozenset(
        {
            N.QUEUED,  # preempted and requeued
            N.STARTING,  # restarted under the same name
            N.LOST,  # no more heartbeats
            N.STOPPING,  # `down`, `scale` or the idle timeout
            N.SUSPENDED,  # `down --keep`
            N.FAILED,  # Ray or the agent ended without a request
            N.GONE,  # ended between two observations
            N.UNKNOWN,  # the backend does not answer
        }
    ),
    N.LOST: frozenset(
        {
            N.QUEUED,  # requeued after a failure of the host
            N.STARTING,  # restarted under the same name
            N.READY,  # the network works again
            N.STOPPING,  # `down`
            N.SUSPENDED,  # `down --keep`
            N.FAILED,  # the backend reports its end
            N.GONE,  # ended on request meanwhile
            N.UNKNOWN,  # the backend does not answer
        }
    ),
    N.STOPPING: frozenset(
        {
            N.QUEUED,  # preempted: the scheduler queues the job again under its name
            N.ALLOCATED,  # requeued and granted
            N.STARTING,  # requeued, and the agent reported
            N.READY,  # requeued, and Ray started
            N.SUSPENDED,  # suspended
            N.GONE,  # ended as requested
            N.FAILED,  # ended with an error
            N.UNKNOWN,  # the backend does not answer
        }
    ),
    N.SUSPENDED: frozenset(
        {
            N.QUEUED,  # resumed: it waits for a host
            N.ALLOCATED,  # resumed, and granted a host
            N.STARTING,  # resumed, and the agent reported
            N.READY,  # resumed, and Ray started
            N.STOPPING,  # `down`
            N.FAILED,  # the backend could not resume it
            N.GONE,  # removed
            N.UNKNOWN,  # the backend does not answer
        }
    ),
    # the backend answers again: any state but REQUESTED is possible
    N.UNKNOWN: frozenset(s for s in N if s not in (N.UNKNOWN, N.REQUESTED)),
    N.GONE: frozenset(),  # terminal
    N.FAILED: frozenset(),  # terminal
}

TERMINAL = frozenset(state for state, following in TRANSITIONS.items() if not following)


class IllegalTransition(ValueError):
    """A transition that the table does not allow: a defect of Heliostat."""


def check_transition(old: NodeState, new: NodeState) -> None:
    """Raises IllegalTransition unless the table has `old` -> `new`. It has no `old` -> `old`."""
    if new not in TRANSITIONS[old]:
        raise IllegalTransition(f"a node cannot go from {old} to {new}")


class ClusterState(str, Enum):
    QUEUED = "queued"
    STARTING = "starting"
    READY = "ready"
    PARTIAL = "partial"  # usable, with fewer nodes than requested
    STOPPING = "stopping"
    SUSPENDED = "suspended"
    ENDED = "ended"
    FAILED = "failed"
    UNKNOWN = "unknown"

    def __str__(self) -> str:
        return self.value


def summary(nodes: Iterable[tuple[bool, NodeState]]) -> ClusterState:
    """The cluster's state, derived from (is_head, state) of each node."""
    all_nodes = list(nodes)
    states = [state for _, state in all_nodes]
    heads = [state for is_head, state in all_nodes if is_head]
    live = [state for state in states if state not in TERMINAL]
    if not live:
        return ClusterState.FAILED if N.FAILED in states else ClusterState.ENDED
    if N.STOPPING in live:
        return ClusterState.STOPPING
    if N.SUSPENDED in heads:
        return ClusterState.SUSPENDED
    if any(state in TERMINAL or state is N.LOST for state in heads):
        return ClusterState.FAILED  # a cluster needs its head, even if workers still run
    if N.READY in heads:
        if all(state is N.READY for state in states):
            return ClusterState.READY
        # a node that is still on its way makes the cluster STARTING, otherwise it is PARTIAL
        settled = all(state in TERMINAL or state in (N.READY, N.LOST, N.UNKNOWN) for state in states)
        return ClusterState.PARTIAL if settled else ClusterState.STARTING
    if N.UNKNOWN in heads:
        return ClusterState.UNKNOWN
    if all(state in (N.REQUESTED, N.QUEUED) for state in live):
        return ClusterState.QUEUED
    return ClusterState.STARTING
