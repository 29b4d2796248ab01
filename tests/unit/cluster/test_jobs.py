"""A job that is followed while its cluster ends."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from heliostat.cluster.jobs import Jobs
from heliostat.cluster.view import View
from heliostat.common.errors import HeliostatError
from heliostat.state.records import Record
from heliostat.state.states import NodeState
from heliostat.state.store import Store


def test_the_connection_is_gone_before_the_nodes_are(
    store: Store, make_record: Callable[..., Record]
) -> None:
    """The platform's answer about the nodes may be some seconds old: it is asked again before the job is given up."""
    record = make_record("lab", reason="the RayCluster was deleted")
    folder = store.create(record, {})  # without connection.json
    asked: list[str] = []

    def look(state: NodeState) -> View:
        seen = folder.record()
        for node in seen.nodes.values():
            node.state = state
        return View(folder, seen, {})

    def ray_api(view: View) -> None:
        view.require_running()

    observer = SimpleNamespace(
        find=lambda name: look(NodeState.READY),
        find_or_archived=lambda name: look(NodeState.GONE),
        invalidate=lambda folder: asked.append("again"),
    )
    access = SimpleNamespace(platform=lambda record: object())
    jobs = Jobs(access, observer, SimpleNamespace(ray_api=ray_api), lambda event: None, time)
    with pytest.raises(HeliostatError, match="`lab` ended before the job `train` did") as ended:
        jobs.wait("lab", "train", lambda chunk: None)
    assert ended.value.cause == "the RayCluster was deleted" and asked
