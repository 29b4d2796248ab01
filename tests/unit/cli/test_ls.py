"""`ls` asks the backends of all clusters at once."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from heliostat.cluster import archive, observe
from heliostat.cluster.manager import ClusterManager
from heliostat.cluster.view import View
from heliostat.common.errors import HeliostatError
from heliostat.remote import transport
from heliostat.state.records import Record
from heliostat.state.store import ClusterDirectory, Store

NAMES = ["a", "b", "c"]


@pytest.fixture
def life(store: Store, make_record: Callable[..., Record]) -> ClusterManager:
    for name in NAMES:
        store.create(make_record(name), {})
    return ClusterManager(store)


def test_all_clusters_are_asked_at_once(life: ClusterManager, monkeypatch: pytest.MonkeyPatch) -> None:
    """No answer comes before all were asked."""
    asked = threading.Barrier(len(NAMES))

    def look(folder: ClusterDirectory) -> View:
        asked.wait(30)
        return View(folder, folder.record(), {})

    monkeypatch.setattr(life.observer, "observe", look)
    assert [view.record.name for view in life.clusters()] == NAMES, "in the order of their names"


def test_only_so_many_are_asked_at_once(life: ClusterManager, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "MAX_CONCURRENT_HOSTS", 2)
    now, most, lock, pair = 0, 0, threading.Lock(), threading.Barrier(2)

    def look(folder: ClusterDirectory) -> View:
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        if folder.name in ("a", "b"):
            pair.wait(30)
        with lock:
            now -= 1
        return View(folder, folder.record(), {})

    monkeypatch.setattr(life.observer, "observe", look)
    assert len(life.clusters()) == 3 and most == 2


def test_one_that_fails_keeps_no_other_from_being_listed(
    life: ClusterManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    def look(folder: ClusterDirectory) -> View:
        if folder.name == "b":
            raise HeliostatError("its login node does not answer")
        return View(folder, folder.record(), {})

    monkeypatch.setattr(life.observer, "observe", look)
    assert [view.record.name for view in life.clusters()] == ["a", "c"]


def test_a_lock_that_another_command_holds_omits_no_cluster(
    life: ClusterManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was seen is not written then; it is told all the same."""
    for module in (observe, archive):
        monkeypatch.setattr(module, "OBSERVE_LOCK_S", 0.0)
    folder = life.store.open("b")
    record = folder.record()
    for node in record.nodes.values():
        node.handle = "4194305.1"
    detail = {"pid": 2**22 + 1, "start": "1", "mark": "nobody", "folder": str(folder.path)}
    record.handles = [{"native_id": "4194305.1", "nodes": ["head", "w1"], "detail": detail}]
    folder.save(record)
    with folder.lock():
        assert [view.record.name for view in life.clusters()] == NAMES
