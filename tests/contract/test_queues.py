"""How long a command waits for nodes: a queue without end, an allocation that has started for ten minutes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import cast

import pytest

from contract.worlds import BatchWorld, World
from heliostat import growth, lifecycle
from heliostat.errors import DeadlineError
from heliostat.events import Event
from heliostat.lifecycle import Lifecycle
from heliostat.looking import View
from heliostat.states import NodeState

pytestmark = [pytest.mark.needs_linux, pytest.mark.parametrize("world", ["slurm", "pbs"], indirect=True)]

GROUP = {"groups": {"gpu": {"nodes": 1}}}  # a head, and a worker with an allocation of its own
FIRST, SECOND = 1, 2  # the head's job, the group's
BEHAVES_AS_RUN = {"argv": ["true"], "text": "true", "cwd": "/"}


class Clock:
    """The time that `lifecycle` sees: each of its pauses takes `step` seconds more than it really does."""

    def __init__(self) -> None:
        self.step = self.ahead = 0.0
        self.at: dict[float, Callable[[], object]] = {}  # what happens when it is so far ahead

    def monotonic(self) -> float:
        return time.monotonic() + self.ahead

    def time(self) -> float:
        return time.time()

    def sleep(self, seconds: float) -> None:
        self.ahead += self.step
        for due in [due for due in self.at if due <= self.ahead]:
            self.at.pop(due)()
        time.sleep(seconds)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(lifecycle, "time", made)
    return made


@pytest.fixture
def batch(world: World) -> BatchWorld:
    return cast(BatchWorld, world)


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
    assert growth.scale(life, "lab", 1).alive() == 2


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

    with pytest.raises(DeadlineError, match="`lab` has 1 of the 2 nodes asked for") as caught:
        batch.life(emit).up(batch.spec(**GROUP))
    assert "after 600 s: gpu-1" in caught.value.cause and caught.value.exit_code == 4
    assert clock.ahead - started[0] >= 600.0
    assert kept(batch.life()).record.nodes["head"].state is NodeState.READY


def kept(life: Lifecycle) -> View:
    view = life.find("lab")
    assert view.address and view.record.target == "up"
    return view


def test_a_limit_for_the_wait(batch: BatchWorld, clock: Clock) -> None:
    """A cluster whose head is ready is kept, and the same `up` goes on with it."""
    batch.queue_job(SECOND)
    with pytest.raises(DeadlineError, match="`lab` has 1 of the 2 nodes asked for") as caught:
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
