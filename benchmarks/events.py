"""How large a day's `events.jsonl` gets at 1,000 nodes: written by Heliostat's own lifecycle over a simulated site."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from typing import Any
from unittest import mock

from benchmarks.figures import CannotMeasure, Figure, Turns
from benchmarks.lab import Lab
from heliostat import backends
from heliostat.backends.base import Handle, Observation
from heliostat.cluster.manager import ClusterManager
from heliostat.state.records import NodeRecord, Record
from heliostat.state.states import NodeState
from heliostat.state.store import ClusterDirectory, Store

NODES, SMOKE_NODES, FLAPPING, FLAPS = 1000, 40, 0.05, 10
N = NodeState


class Site:
    """The backend `slurm`, except that its scheduler says of every node what we want it to say."""

    def __init__(self) -> None:
        self.answer = Observation(N.QUEUED, "Priority")
        self.backend = backends.load("slurm")

    def observe(self, handles: Sequence[Handle], host: object) -> dict[str, Observation]:
        return {handle.native_id: self.answer for handle in handles}


class Day:
    """One cluster, and the hand of its head's agent."""

    def __init__(self, lab: Lab, nodes: int) -> None:
        self.nodes = nodes
        self.names = ["head", *(f"w{i}" for i in range(1, nodes))]
        record = Record(
            name="day",
            id="0123456789abcdef",
            backend="slurm",
            kind="up",
            created=time.time(),
            spec={"on": "slurm", "name": "day", "nodes": nodes},
            nodes={
                name: NodeRecord(name, "worker" if i else "head", since=time.time(), handle=f"1234567_{i}")
                for i, name in enumerate(self.names)
            },
            handles=[Handle(f"1234567_{i}", (name,), {}).to_json() for i, name in enumerate(self.names)],
        )
        store = Store(lab.path / "events")
        self.folder: ClusterDirectory = store.create(record, {"events.jsonl": ""})
        self.life, self.site = ClusterManager(store), Site()
        self.told: dict[str, dict[str, Any]] = {}

    def tell(self, names: Iterable[str], state: NodeState, reason: str = "") -> None:
        """What the head's agent would write into state.json."""
        for name in names:
            self.told[name] = {
                "state": str(state),
                "reason": reason,
                "since": time.time(),
                "ip": "10.20.30.40",
            }
        (self.folder.path / "state.json").write_text(json.dumps({"schema": 1, "nodes": self.told}))

    def look(self) -> float:
        began = time.monotonic()
        # asked every time: else it waits for seconds between two questions to the scheduler
        backend = mock.patch.multiple(self.site.backend, observe=self.site.observe, poll_interval=(0.0, 0.0))
        with backend, mock.patch.object(backends, "load", return_value=self.site.backend):
            self.life.observe(self.folder)
        return time.monotonic() - began

    def live(self) -> float:
        """Every node from the queue to its end, some of them in bad company. Returns the seconds of an idle look."""
        self.look()
        self.site.answer = Observation(N.ALLOCATED)
        self.look()
        for state in (N.STARTING, N.READY):
            self.tell(self.names, state)
            self.look()
        idle = self.look()
        bad = self.names[-int(self.nodes * FLAPPING) :]
        for _ in range(FLAPS):
            self.tell(bad, N.LOST, "no heartbeat from its agent")
            self.look()
            self.tell(bad, N.READY)
            self.look()
        self.tell(self.names, N.STOPPING, "taken down")
        self.look()
        self.tell(self.names, N.GONE, "taken down")
        self.site.answer = Observation(N.GONE)
        self.look()
        return idle


def events(lab: Lab, turns: Turns) -> list[Figure]:
    """Bytes are bytes: one round is enough."""
    nodes = SMOKE_NODES if turns.smoke else NODES
    day = Day(lab, nodes)
    idle = day.live()
    written = list(day.folder.events())
    least = nodes * 6 + int(nodes * FLAPPING) * FLAPS * 2
    if len(written) < least:
        raise CannotMeasure(f"only {len(written)} of at least {least} events were written")
    size = day.folder.events_file.stat().st_size
    note = f"{len(written)} events of {size / max(1, len(written)):.0f} bytes; a look at {nodes} nodes where nothing moved: {idle * 1000:.0f} ms"
    return [
        Figure(f"events.jsonl, a day of {nodes:,} nodes", "MB", 10, [size / 1e6], absolute=True, note=note)
    ]
