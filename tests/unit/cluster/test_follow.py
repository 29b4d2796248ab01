"""`logs -f`: says what it waits for until the command starts."""

from __future__ import annotations

import json
import time
from types import SimpleNamespace

from heliostat.cluster.follow import CommandFollower
from heliostat.cluster.view import View
from heliostat.common.events import Event
from heliostat.state.records import Record
from heliostat.state.states import NodeState
from heliostat.state.store import Store


def test_waits_for_a_queued_cluster(store: Store, make_record) -> None:
    record: Record = make_record("lab", kind="run")
    folder = store.create(record, {})
    record.nodes["head"].state, record.nodes["head"].reason = NodeState.QUEUED, "Resources"
    record.nodes["w1"].state = NodeState.READY
    told: list[Event] = []
    started = {"job": {"id": "run", "status": "SUCCEEDED", "started": 1.0, "exit_code": 7}}

    def observe(_folder: object) -> View:
        (folder.path / "state.json").write_text(json.dumps(started))  # it has ended meanwhile
        return View(folder, record, {})

    access = SimpleNamespace(transport=SimpleNamespace(read=lambda *_: b""))
    follower = CommandFollower(access, SimpleNamespace(observe_or_archived=observe), told.append, time)
    assert follower.follow(folder, follower.tail(folder, lambda *_: None)) == 7
    assert [event.text for event in told] == ["waiting for the command to start: head queued, Resources"]
