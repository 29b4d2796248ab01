"""Every edge of the table of moves, and the cluster's state from those of its nodes."""

from __future__ import annotations

import itertools

import pytest

from heliostat.state.states import (
    TERMINAL,
    TRANSITIONS,
    ClusterState,
    IllegalTransition,
    NodeState,
    check_transition,
    summary,
)

N, C = NodeState, ClusterState

# the same table, written down once more by hand: a change of the one must be meant
LEGAL = {
    "REQUESTED": "QUEUED ALLOCATED STARTING READY LOST STOPPING SUSPENDED FAILED GONE UNKNOWN",
    "QUEUED": "ALLOCATED STARTING READY LOST STOPPING SUSPENDED FAILED GONE UNKNOWN",
    "ALLOCATED": "QUEUED STARTING READY LOST STOPPING SUSPENDED FAILED GONE UNKNOWN",
    "STARTING": "QUEUED READY LOST STOPPING SUSPENDED FAILED GONE UNKNOWN",
    "READY": "QUEUED STARTING LOST STOPPING SUSPENDED FAILED GONE UNKNOWN",
    "LOST": "QUEUED STARTING READY STOPPING SUSPENDED FAILED GONE UNKNOWN",
    "STOPPING": "QUEUED ALLOCATED STARTING READY SUSPENDED GONE FAILED UNKNOWN",
    "SUSPENDED": "QUEUED ALLOCATED STARTING READY STOPPING GONE FAILED UNKNOWN",
    "GONE": "",
    "FAILED": "",
    "UNKNOWN": "QUEUED ALLOCATED STARTING READY LOST STOPPING SUSPENDED GONE FAILED",
}


@pytest.mark.parametrize(("old", "new"), list(itertools.product(N, N)), ids=str)
def test_every_edge(old: NodeState, new: NodeState) -> None:
    if new in LEGAL[old].split():
        check_transition(old, new)
    else:
        with pytest.raises(IllegalTransition, match=f"from {old} to {new}"):
            check_transition(old, new)


def test_terminal_states_are_those_without_a_way_out() -> None:
    assert (
        TERMINAL == {state for state, following in TRANSITIONS.items() if not following} == {N.GONE, N.FAILED}
    )
    assert set(TRANSITIONS) == set(N)


def test_every_state_that_is_not_over_can_be_ended() -> None:
    for state in set(N) - TERMINAL - {N.STOPPING}:
        assert N.STOPPING in TRANSITIONS[state]
    assert TRANSITIONS[N.STOPPING] >= TERMINAL


# "head worker worker" -> the cluster's state
SUMMARY = {
    "": C.ENDED,
    "REQUESTED": C.QUEUED,
    "QUEUED QUEUED": C.QUEUED,
    "QUEUED REQUESTED": C.QUEUED,
    "ALLOCATED QUEUED": C.STARTING,
    "STARTING": C.STARTING,
    "READY": C.READY,
    "READY READY": C.READY,
    "READY STARTING": C.STARTING,
    "SUSPENDED SUSPENDED": C.SUSPENDED,
    "SUSPENDED STOPPING": C.STOPPING,
    "READY QUEUED": C.STARTING,
    "READY READY FAILED": C.PARTIAL,
    "READY GONE": C.PARTIAL,
    "READY LOST": C.PARTIAL,
    "READY UNKNOWN": C.PARTIAL,
    "READY FAILED STARTING": C.STARTING,
    "LOST READY": C.FAILED,
    "FAILED READY": C.FAILED,
    "GONE READY": C.FAILED,
    "FAILED FAILED": C.FAILED,
    "GONE FAILED": C.FAILED,
    "GONE GONE": C.ENDED,
    "STOPPING READY": C.STOPPING,
    "READY STOPPING": C.STOPPING,
    "FAILED STOPPING": C.STOPPING,
    "UNKNOWN UNKNOWN": C.UNKNOWN,
    "UNKNOWN READY": C.UNKNOWN,
}


@pytest.mark.parametrize(("nodes", "state"), SUMMARY.items())
def test_summary(nodes: str, state: ClusterState) -> None:
    assert summary((i == 0, N(word)) for i, word in enumerate(nodes.split())) is state


def test_summary_knows_every_mix_of_three() -> None:
    for states in itertools.product(N, repeat=3):
        found = summary((i == 0, state) for i, state in enumerate(states))
        assert found in C
        assert (found in (C.ENDED, C.FAILED)) >= all(state in TERMINAL for state in states)


def test_words_are_plain() -> None:
    assert str(N.READY) == "READY" and str(C.READY) == "ready"
