"""The states of a node, the moves between them, and the cluster's state, which is computed and never stored."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum


class NodeState(str, Enum):
    REQUESTED = "REQUESTED"  # written in the record; nothing has been asked of anybody yet
    QUEUED = "QUEUED"  # the other party has it and makes it wait
    ALLOCATED = "ALLOCATED"  # there is a machine; our agent has not spoken yet
    STARTING = "STARTING"  # our agent is there and starts Ray
    READY = "READY"  # Ray's node table has it
    LOST = "LOST"  # was READY; nobody hears from it now
    STOPPING = "STOPPING"  # told to end
    GONE = "GONE"  # ended, and nothing of it is left
    FAILED = "FAILED"  # ended without being asked to
    SUSPENDED = "SUSPENDED"  # put away by `down --keep`: nothing of it runs, and `up` brings it back
    UNKNOWN = "UNKNOWN"  # the other party does not answer, or says a word that we do not know

    def __str__(self) -> str:
        return self.value


N = NodeState

TRANSITIONS: dict[NodeState, frozenset[NodeState]] = {
    # a request is answered with a place in the queue, a machine, or a refusal; `local` skips the queue
    N.REQUESTED: frozenset(
        {
            *(N.QUEUED, N.ALLOCATED, N.STARTING, N.READY, N.LOST),
            *(N.STOPPING, N.SUSPENDED, N.FAILED, N.GONE, N.UNKNOWN),
        }
    ),
    # the agent, or Ray, may have started, and even fallen silent, between two looks
    N.QUEUED: frozenset(
        {N.ALLOCATED, N.STARTING, N.READY, N.LOST, N.STOPPING, N.SUSPENDED, N.FAILED, N.GONE, N.UNKNOWN}
    ),
    # a scheduler may take a machine back and queue the job again
    N.ALLOCATED: frozenset(
        {N.QUEUED, N.STARTING, N.READY, N.LOST, N.STOPPING, N.SUSPENDED, N.FAILED, N.GONE, N.UNKNOWN}
    ),
    N.STARTING: frozenset({N.QUEUED, N.READY, N.LOST, N.STOPPING, N.SUSPENDED, N.FAILED, N.GONE, N.UNKNOWN}),
    # READY -> QUEUED is a requeue; READY -> STARTING is a node that was started anew under its name
    N.READY: frozenset({N.QUEUED, N.STARTING, N.LOST, N.STOPPING, N.SUSPENDED, N.FAILED, N.GONE, N.UNKNOWN}),
    # a cable that is plugged in again, a requeue after a power failure, or the end
    N.LOST: frozenset({N.QUEUED, N.STARTING, N.READY, N.STOPPING, N.SUSPENDED, N.FAILED, N.GONE, N.UNKNOWN}),
    # ended for a while: a scheduler that took the machines back queues the job again under its name
    N.STOPPING: frozenset(
        {N.QUEUED, N.ALLOCATED, N.STARTING, N.READY, N.SUSPENDED, N.GONE, N.FAILED, N.UNKNOWN}
    ),
    # brought back, it begins anew
    N.SUSPENDED: frozenset(
        {N.QUEUED, N.ALLOCATED, N.STARTING, N.READY, N.STOPPING, N.FAILED, N.GONE, N.UNKNOWN}
    ),
    # silence ends with whatever is true by then
    N.UNKNOWN: frozenset(s for s in N if s not in (N.UNKNOWN, N.REQUESTED)),
    N.GONE: frozenset(),
    N.FAILED: frozenset(),
}

TERMINAL = frozenset(state for state, following in TRANSITIONS.items() if not following)


class IllegalMove(ValueError):
    """A move that the table does not have: a defect of ours, never of the user."""


def check_move(old: NodeState, new: NodeState) -> None:
    """Raises IllegalMove unless the table has `old` -> `new`. Staying is not a move."""
    if new not in TRANSITIONS[old]:
        raise IllegalMove(f"a node cannot go from {old} to {new}")


class ClusterState(str, Enum):
    QUEUED = "queued"
    STARTING = "starting"
    READY = "ready"
    PARTIAL = "partial"  # usable, with fewer nodes than asked for
    STOPPING = "stopping"
    SUSPENDED = "suspended"
    ENDED = "ended"
    FAILED = "failed"
    UNKNOWN = "unknown"

    def __str__(self) -> str:
        return self.value


def summary(nodes: Iterable[tuple[bool, NodeState]]) -> ClusterState:
    """The cluster's state from (is it the head?, its state) of each node."""
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
        return ClusterState.FAILED  # without a head there is no cluster, whatever still runs
    if N.READY in heads:
        if all(state is N.READY for state in states):
            return ClusterState.READY
        # nodes on their way make it "starting" only until the cluster was whole once; here: what is true now
        settled = all(state in TERMINAL or state in (N.READY, N.LOST, N.UNKNOWN) for state in states)
        return ClusterState.PARTIAL if settled else ClusterState.STARTING
    if N.UNKNOWN in heads:
        return ClusterState.UNKNOWN
    if all(state in (N.REQUESTED, N.QUEUED) for state in live):
        return ClusterState.QUEUED
    return ClusterState.STARTING
