"""What the unit tests share: files of one cluster, made by hand, and being nobody for a moment."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from heliostat.state.records import NodeRecord, Record
from heliostat.state.states import NodeState
from heliostat.state.store import ClusterDirectory, Store

NOBODY = 65534


@contextlib.contextmanager
def nobody() -> Iterator[None]:
    """Root may read and write everything; inside this, we may not."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def as_nobody() -> Callable[[], contextlib.AbstractContextManager[None]]:
    return nobody


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "home")


def record(name: str = "lab", **more: Any) -> Record:
    """A cluster of a head and a worker that was asked for a while ago."""
    values: dict[str, Any] = {
        "id": "0123456789abcdef",
        "backend": "local",
        "kind": "up",
        "created": 1_700_000_000.0,
        "spec": {"on": "local", "name": name, "nodes": 2},
        "nodes": {
            "head": NodeRecord("head", "head", since=1_700_000_000.0),
            "w1": NodeRecord("w1", "worker", since=1_700_000_000.0),
        },
    }
    return Record(**{"name": name, **values, **more})


@pytest.fixture
def make_record() -> Callable[..., Record]:
    return record


@pytest.fixture
def make_past(store: Store) -> Callable[..., ClusterDirectory]:
    """An ended cluster in the history."""

    def make(name: str = "old", **more: Any) -> ClusterDirectory:
        ended = record(name, ended=1_700_003_600.0, ready=1_700_000_060.0, reason="taken down", **more)
        for node in ended.nodes.values():
            node.state = NodeState.GONE
        folder = store.create(ended, {"token": "secret", "agent.pyz": b"", "events.jsonl": ""})
        return store.archive(folder, ended)

    return make
