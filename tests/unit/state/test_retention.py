"""Logs of ended clusters have a size limit; the rows of the history stay."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from heliostat.cluster.manager import ClusterManager
from heliostat.cluster.view import View
from heliostat.common.errors import UsageError
from heliostat.common.events import Event
from heliostat.diagnostics import doctor
from heliostat.state import retention
from heliostat.state.records import Record
from heliostat.state.states import NodeState
from heliostat.state.store import ClusterDirectory, Store

KIB = 1024
Past = Callable[..., ClusterDirectory]


def fill(folder: ClusterDirectory, size: int = KIB) -> ClusterDirectory:
    (folder.logs / "head").mkdir(parents=True, exist_ok=True)
    (folder.logs / "head" / "agent.log").write_bytes(b"x" * size)
    return folder


@pytest.fixture
def three(make_past: Past) -> list[ClusterDirectory]:
    """They ended one after another, in the order of their names; each keeps a few KiB of logs."""
    return [
        fill(make_past(name, id=f"{i}123", created=1_700_000_000.0 + i), 10 * KIB)
        for i, name in enumerate("abc")
    ]


def kept(folders: list[ClusterDirectory]) -> list[str]:
    return [folder.record().name for folder in folders if folder.logs.exists()]


def test_the_logs_of_the_oldest_go_and_the_rows_stay(store: Store, three: list[ClusterDirectory]) -> None:
    clusters = retention.ended_clusters(store)
    each = clusters[0].size_bytes
    assert [one.record.name for one in clusters] == ["a", "b", "c"] and each >= 10 * KIB
    chosen = retention.choose(clusters, 2 * each, None, 0)
    assert [one.record.name for one in chosen] == ["a"]
    assert retention.prune(chosen) == each and kept(three) == ["b", "c"]
    assert [record.name for record in store.archived_records()] == ["a", "b", "c"]
    assert sorted(os.listdir(three[0].path)) == ["events.jsonl", "record.json"]
    assert retention.choose(retention.ended_clusters(store), 2 * each, None, 0) == []


def test_by_age(store: Store, three: list[ClusterDirectory], make_past: Past) -> None:
    fresh = fill(make_past("d", id="9123"))
    record = fresh.record()
    record.ended = 1_800_000_000.0
    fresh.save(record)
    chosen = retention.choose(retention.ended_clusters(store), 2**30, 86400.0, 1_800_000_060.0)
    assert [one.record.name for one in chosen] == ["a", "b", "c"]


def test_links_are_not_followed(store: Store, make_past: Past, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    folder = fill(make_past("a"))
    (folder.logs / "out").symlink_to(tmp_path)
    (folder.path / "link").symlink_to(tmp_path)
    (store.ended / "elsewhere").symlink_to(tmp_path)
    retention.prune(retention.choose(retention.ended_clusters(store), 0, None, 0))
    assert not folder.logs.exists() and (tmp_path / "mine").read_text() == "mine"


@pytest.mark.parametrize(("text", "limit"), [("", 2**30), ("5M", 5 * 2**20), ("0", 0)])
def test_the_limit(text: str, limit: int) -> None:
    assert retention.limit_bytes({retention.VARIABLE: text}) == limit


def test_a_limit_that_is_no_size() -> None:
    with pytest.raises(UsageError, match="HISTORY_SIZE"):
        retention.limit_bytes({retention.VARIABLE: "much"})


def end(store: Store, record: Record) -> list[str]:
    """Puts a cluster with logs into the history; the notes of that."""
    said: list[Event] = []
    for node in record.nodes.values():
        node.state = NodeState.GONE
    folder = fill(store.create(record, {"agent.pyz": b"", "events.jsonl": ""}), 20 * KIB)
    life = ClusterManager(store, said.append)
    life.access.mark_collected(record)
    life.archiver.archive(View(folder, record, {}))
    return [event.text for event in said if event.kind == "note"]


def test_every_end_keeps_the_limit(
    store: Store,
    three: list[ClusterDirectory],
    make_record: Callable[..., Record],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(retention.VARIABLE, "35K")
    (note,) = end(store, make_record("new", id="8123"))
    assert note.startswith("the history is over its limit: removed the logs of 2 clusters, ")
    assert kept(three) == ["c"] and (store.last_archived("new") or three[0]).logs.exists()
    monkeypatch.setenv(retention.VARIABLE, "1K")
    end(store, make_record("large", id="7123"))
    assert (store.last_archived("large") or three[0]).logs.exists(), "the logs of what has just ended stay"
    monkeypatch.setenv(retention.VARIABLE, "much")
    (note,) = end(store, make_record("last", id="6123"))
    assert note.startswith("the history was not pruned: ") and store.last_archived("last")


def test_doctor_says_how_much_is_used(
    store: Store, three: list[ClusterDirectory], monkeypatch: pytest.MonkeyPatch
) -> None:
    check = next(check for check in doctor._check_home(ClusterManager(store)) if check.name == "history")
    assert check.verdict == "ok" and check.found.endswith(" of 1.0 GiB, 3 terminated clusters")
    monkeypatch.setenv(retention.VARIABLE, "1K")
    check = next(check for check in doctor._check_home(ClusterManager(store)) if check.name == "history")
    assert (check.verdict, check.hint) == ("warn", "heliostat history --prune")
