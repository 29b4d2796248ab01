"""How long a command waits for nodes: a queue without end, an allocation that has started for ten minutes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import cast

import pytest

from contract.worlds import BatchWorld, World
from heliostat.cluster.manager import ClusterManager
from heliostat.cluster.view import View
from heliostat.common.errors import DeadlineError
from heliostat.common.events import Event
from heliostat.state.states import NodeState

pytestmark = [pytest.mark.needs_linux, pytest.mark.parametrize("world", ["slurm", "pbs"], indirect=True)]

GROUP = {"groups": {"gpu": {"nodes": 1}}}  # a head, and a worker with an allocation of its own
FIRST, SECOND = 1, 2  # the head's job, the group's
BEHAVES_AS_RUN = {"argv": ["true"], "text": "true", "cwd": "/"}


class Clock:
    """The clock of the manager: each of its pauses takes `step` seconds more than it really does."""

    def __init__(self) -> None:
        self.step = self.ahead = 0.0
        self.at: dict[float, Callable[[], object]] = {}  # what happens when it is so far ahead

    def monotonic(self) -> float:
        return time.monotonic() + self.ahead

    def sleep(self, seconds: float) -> None:
        self.ahead += self.step
        for due in [due for due in self.at if due <= self.ahead]:
            self.at.pop(due)()
        time.sleep(seconds)


@pytest.fixture
def batch(world: World) -> BatchWorld:
    return cast(BatchWorld, world)


@pytest.fixture
def clock(batch: BatchWorld) -> Clock:
    batch.clock = made = Clock()
    return made


def when(node: str, state: str, then: Callable[[], object]) -> Callable[[Event], None]:
    """Does something when a node comes into a state."""

    def emit(event: Event) -> None:
        if event.kind == "move" and (event.node, event.text) == (node, state):
            then()

    return emit


def hurry(clock: Clock) -> Callable[[], None]:
    return lambda: setattr(clock, "step", 200.0)


def calm(clock: Clock, then: Callable[[], object]) -> Callable[[], None]:
    def act() -> None:
        clock.step = 0.0
        then()

    return act


def test_a_queued_group_is_waited_for_without_end(batch: BatchWorld, clock: Clock) -> None:
    """The head is ready, the group waits in the queue for an hour and twenty minutes: the cluster becomes whole."""
    batch.queue_job(SECOND)
    clock.at[4800.0] = calm(clock, batch.start_queued)
    view = batch.life(when("head", "READY", hurry(clock))).up(batch.spec(**GROUP))
    assert {node.state for node in view.record.nodes.values()} == {NodeState.READY}
    assert clock.ahead >= 4800.0 and sorted(batch.starts()) == ["gpu-1", "head"]


def test_a_queued_head_is_waited_for_without_end(batch: BatchWorld, clock: Clock) -> None:
    batch.queue_job(FIRST)
    clock.at[4800.0] = calm(clock, batch.start_queued)
    hurry(clock)()
    assert batch.life().up(batch.spec(nodes=1)).alive() == 1


def test_scale_waits_for_a_queue_without_end(batch: BatchWorld, clock: Clock) -> None:
    life = batch.life()
    life.up(batch.spec(nodes=1))
    batch.queue_job(SECOND)
    clock.at[4800.0] = calm(clock, batch.start_queued)
    hurry(clock)()
    assert life.scaling.scale("lab", 1).alive() == 2


def test_the_time_counts_from_the_start_of_an_allocation(batch: BatchWorld, clock: Clock) -> None:
    """The group leaves the queue late and then hangs: ten minutes after its start `up` ends. The head goes on."""
    batch.behave(**{"gpu-1": "hold"})
    batch.queue_job(SECOND)
    clock.at[4800.0] = calm(clock, batch.start_queued)
    started: list[float] = []

    def emit(event: Event) -> None:
        when("head", "READY", hurry(clock))(event)
        if event.kind == "move" and event.node == "gpu-1" and event.text in ("ALLOCATED", "STARTING"):
            started.append(clock.ahead)
            clock.step = 200.0

    with pytest.raises(DeadlineError, match="`lab` has 1 of the 2 requested nodes") as caught:
        batch.life(emit).up(batch.spec(**GROUP))
    assert "after 600 s: gpu-1" in caught.value.cause and caught.value.exit_code == 4
    assert clock.ahead - started[0] >= 600.0
    assert kept(batch.life()).record.nodes["head"].state is NodeState.READY


def kept(life: ClusterManager) -> View:
    view = life.find("lab")
    assert view.address and view.record.target == "up"
    return view


def test_a_limit_for_the_wait(batch: BatchWorld, clock: Clock) -> None:
    """A cluster whose head is ready is kept, and the same `up` goes on with it."""
    batch.queue_job(SECOND)
    with pytest.raises(DeadlineError, match="`lab` has 1 of the 2 requested nodes") as caught:
        batch.life(when("head", "READY", hurry(clock))).up(batch.spec(**GROUP), wait_timeout_s=1800)
    assert caught.value.cause.startswith("the limit of 30m has passed: gpu-1 QUEUED")
    assert caught.value.exit_code == 4 and "heliostat down lab" in caught.value.hint
    kept(batch.life())
    calm(clock, batch.start_queued)()
    assert batch.life().up(batch.spec(**GROUP)).alive() == 2


def test_a_limit_for_the_wait_of_a_queued_head(batch: BatchWorld, clock: Clock) -> None:
    """Nothing has started that anybody could use: everything is released."""
    batch.queue_job(FIRST)
    hurry(clock)()
    with pytest.raises(DeadlineError, match="`lab` did not become ready"):
        batch.life().up(batch.spec(nodes=1), wait_timeout_s=1800)
    assert batch.store.names() == [] and batch.running() == [] and batch.starts() == []


def test_a_limit_for_the_wait_of_a_run(batch: BatchWorld, clock: Clock) -> None:
    """The command was not started, so nothing stays."""
    batch.queue_job(SECOND)
    with pytest.raises(DeadlineError, match="`lab` did not become ready"):
        batch.life(when("head", "READY", hurry(clock))).up(
            batch.spec(**GROUP), command=BEHAVES_AS_RUN, wait_timeout_s=1800
        )
    assert batch.store.names() == [] and batch.running() == []


@pytest.mark.parametrize("command", [None, {"argv": ["true"], "text": "true", "cwd": "/"}])
def test_a_limit_for_the_wait_of_a_join(batch: BatchWorld, command: dict[str, object] | None) -> None:
    """The queued job is cancelled; the cluster has what it had before, and the next join gets its nodes."""
    batch.life().up(batch.spec(nodes=1))
    batch.queue_job(SECOND)
    with pytest.raises(DeadlineError, match="the nodes of `j1` did not join `lab`") as caught:
        batch.life().join("lab", batch.spec(), command, lambda *_: None, wait_timeout_s=1)
    assert caught.value.cause.startswith("the limit of 1s has passed: j1-1 QUEUED")
    assert caught.value.exit_code == 4
    view = kept(batch.life())
    assert list(view.record.nodes) == ["head"] and len(view.record.handles) == len(batch.running()) == 1
    assert batch.life().join("lab", batch.spec(nodes=1), None, lambda *_: None) == ("j2", 0)
