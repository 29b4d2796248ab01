"""While a command starts nodes, which takes minutes, other commands read the record, write it and end the cluster."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from contract.worlds import World, until
from heliostat import backends
from heliostat.backends.base import Handle, LaunchRequest, Plan
from heliostat.cluster import terminate
from heliostat.common.errors import HeliostatError
from heliostat.remote.transport import Transport
from heliostat.state.states import NodeState

pytestmark = [pytest.mark.needs_linux, pytest.mark.parametrize("world", ["slurm", "pbs"], indirect=True)]
GROUP = {"groups": {"gpu": {"nodes": 1}}}  # two allocations, one after the other


class Gate:
    """Holds a launch: before it hands over the handle with this number, or after (`after`)."""

    def __init__(self, world: World, monkeypatch: pytest.MonkeyPatch, number: int, after: bool) -> None:
        self.reached, self.go = threading.Event(), threading.Event()
        backend = backends.load(world.site)
        launch = backend.launch

        def held(plan: Plan, request: LaunchRequest, host: Transport) -> Iterator[Handle]:
            for i, handle in enumerate(launch(plan, request, host)):
                if i == number and not after:
                    self.wait()
                yield handle
                if i == number and after:
                    self.wait()

        monkeypatch.setattr(backend, "launch", held)

    def wait(self) -> None:
        self.reached.set()
        assert self.go.wait(120)


class Started:
    """Something that goes on in another thread; `end` gives what it returned or raised."""

    def __init__(self, act: Callable[[], Any]) -> None:
        self.result: Any = None
        self.thread = threading.Thread(target=self._run, args=(act,))
        self.thread.start()

    def _run(self, act: Callable[[], Any]) -> None:
        try:
            self.result = act()
        except Exception as error:
            self.result = error

    def end(self) -> Any:
        self.thread.join(120)
        assert not self.thread.is_alive()
        return self.result


def test_a_cluster_is_seen_and_written_while_it_is_launched(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(world, monkeypatch, 0, after=True)
    going = Started(lambda: world.life().up(world.spec(**GROUP)))
    try:
        assert gate.reached.wait(60)

        def seen() -> bool:
            views = world.life().clusters()
            return [view.record.nodes["head"].state for view in views] == [NodeState.READY]

        until(seen, "`ls` shows that the head is ready")
        folder = world.store.open("lab")
        assert folder.record().nodes["head"].state is NodeState.READY, "and has written it"
        assert folder.is_leased()
    finally:
        gate.go.set()
    view = going.end()
    assert not isinstance(view, Exception), view
    assert view.alive() == 2 and not folder.is_leased()


def test_a_cluster_is_ended_while_it_is_launched(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """`down` writes its wish at once; the launch starts nothing more."""
    gate = Gate(world, monkeypatch, 0, after=True)
    going = Started(lambda: world.life().up(world.spec(**GROUP)))
    assert gate.reached.wait(60)
    folder = world.store.open("lab")
    ended = Started(lambda: world.life().down("lab"))
    try:
        until(lambda: folder.record().target == "down", "the wish is on record")
    finally:
        gate.go.set()
    error, view = going.end(), ended.end()
    assert isinstance(error, HeliostatError) and "was taken down while it was starting" in error.message
    assert not isinstance(view, Exception) and view.record.has_ended()
    assert world.store.names() == [] and world.running() == []


def test_what_can_no_longer_be_recorded_is_cancelled(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """`down` does not wait for ever for the launch, and does not know of the job that it submits."""
    monkeypatch.setattr(terminate, "LAUNCHER_S", 0.0)
    monkeypatch.setattr(backends.load(world.site), "find_orphans", lambda *_: [])
    gate = Gate(world, monkeypatch, 1, after=False)
    going = Started(lambda: world.life().up(world.spec(**GROUP)))
    try:
        assert gate.reached.wait(60)
        world.life().down("lab", now=True)
        assert world.store.names() == [] and world.running(), "the second job runs"
    finally:
        gate.go.set()
    error = going.end()
    assert isinstance(error, HeliostatError) and "was taken down while it was starting" in error.message
    assert world.running() == []


def test_nodes_join_while_the_record_is_written(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.life().up(world.spec())
    gate = Gate(world, monkeypatch, 0, after=False)
    going = Started(lambda: world.life().joins.join("lab", world.spec(), None))
    try:
        assert gate.reached.wait(60)
        folder = world.store.open("lab")
        with folder.lock(0):
            record = folder.record()
            record.jobs.append({"id": "mine", "entrypoint": "true", "submitted": 1.0})
            folder.save(record)
    finally:
        gate.go.set()
    assert not isinstance(going.end(), Exception)
    record = folder.record()
    assert [job["id"] for job in record.jobs] == ["j1", "mine"], "it was not overwritten"
    assert record.nodes["j1-1"].handle in [handle["native_id"] for handle in record.handles]
