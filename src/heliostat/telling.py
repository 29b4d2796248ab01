"""A cluster whose Ray the platform starts (Kubernetes, a cloud): what the platform tells of it is put where our own agents
write elsewhere. So nothing above knows the difference.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from heliostat.backends.base import Handle, Platform
from heliostat.errors import Code, NotFoundError, Refused
from heliostat.states import NodeState
from heliostat.store import ClusterFolder, NodeRecord, Record, write_atomic

if TYPE_CHECKING:
    from heliostat.transport import Transport

DEMAND = "demand"  # who brought a node that nobody asked for by name: it leaves without being missed
PULL_LOCK_S = 5.0  # what was told is told again
NOTE_LOCK_S = 30.0  # what is noted is known only once
N = NodeState


def handle_of(record: Record) -> Handle | None:
    """The one that is the whole cluster; None: nothing was asked of the platform yet."""
    return Handle.from_json(record.handles[-1]) if record.handles else None


class Telling:
    """The way from one platform to one cluster's folder."""

    def __init__(self, folder: ClusterFolder, platform: Platform, host: Transport) -> None:
        self.folder, self.platform, self.host = folder, platform, host
        self._next = 0.0
        self.refusal: Refused | None = None  # the platform's no to the last question

    def pull(self, record: Record, node: str | None = None) -> None:
        """What is true now, with the logs of this node. Raises HeliostatError when the platform is silent."""
        handle = handle_of(record)
        if handle is None:
            return
        if time.monotonic() >= self._next:
            try:
                self.refusal = None
                self._pull(record, handle)
            except Refused as error:
                self.refusal = error
                raise
            finally:
                self._next = time.monotonic() + self.platform.pace[0]
        if node:
            try:
                self.pull_logs(handle, node)
            except Refused as error:
                self.refusal = error
                raise

    def again(self) -> None:
        """We have just changed something: what was told is not true any more."""
        self._next = 0.0

    def _pull(self, record: Record, handle: Handle) -> None:
        state = self.folder.state()
        before = state.get("nodes") or {}
        own = [node for node in record.nodes.values() if not node.guest]
        told = self.platform.tell(handle, own, before, self.host)
        nodes = {name: _since(words, before.get(name)) for name, words in told.nodes.items()}
        for name in record.nodes.keys() - nodes.keys():  # came with demand, and left with it
            nodes[name] = _since({"state": "GONE", "role": "worker"}, before.get(name))
        warned = _warning(record, nodes) or state.get("warned")
        if nodes != before or warned != state.get("warned"):
            more = {"warned": warned} if warned else {}
            self._update({**more, "schema": 1, "nodes": nodes}, record.id, PULL_LOCK_S)
        if told.token and told.token != self.folder.read_token():
            write_atomic(self.folder.token, told.token)
        if told.connection is None:
            (self.folder.path / "connection.json").unlink(missing_ok=True)
        elif told.connection != self.folder.connection():
            self._write("connection.json", told.connection)

    def _update(self, words: Mapping[str, Any], cluster_id: str | None, seconds: float) -> None:
        """Changes these keys of `state.json`, which other commands change too: whatever else it holds by now stays.

        cluster_id: whose state it is; another cluster may have the directory by now."""
        with self.folder.lock(seconds):
            if cluster_id is not None and self.folder.record().id != cluster_id:
                raise NotFoundError(
                    f"another cluster has the name `{self.folder.name}` now", code=Code.NOT_FOUND_CLUSTER
                )
            self._write("state.json", {**self.folder.state(), **words})

    def _write(self, name: str, document: Mapping[str, Any]) -> None:
        write_atomic(self.folder.path / name, json.dumps(document, indent=1) + "\n")

    def pull_logs(self, handle: Handle, node: str, over: threading.Event | None = None) -> None:
        """over: set when nobody waits for them any more; then nothing is written."""
        told = (self.folder.state().get("nodes") or {}).get(node) or {}
        place = self.folder.logs / node
        place.mkdir(mode=0o700, exist_ok=True)
        known = {path.name: path.stat().st_size for path in place.iterdir() if path.is_file()}
        for name, data in self.platform.logs(handle, node, told, known, self.host).items():
            if over and over.is_set():
                return
            if data:
                with open(
                    os.open(place / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab"
                ) as stream:
                    stream.write(data)

    def note(self, **words: Any) -> None:
        """More for whoever looks: the jobs as they were, the command of a `run`."""
        self._update(words, None, NOTE_LOCK_S)


def believe(node: NodeRecord, told: Mapping[str, Any]) -> tuple[N, str, float] | None:
    """The platform's word for a node is all there is: (state, reason, since). None: it has none."""
    state = N.__members__.get(str(told.get("state")))
    if state is None:
        return None
    if state is N.ALLOCATED and node.state in (N.STARTING, N.READY, N.LOST, N.STOPPING):
        state = N.STARTING  # another machine in its place
    return state, str(told.get("reason") or ""), float(told.get("since") or time.time())


def newcomers(record: Record, told: Mapping[str, Mapping[str, Any]]) -> list[NodeRecord]:
    """Nodes that the platform has, and the record has not: they came with demand."""
    handle = handle_of(record)
    return [
        NodeRecord(
            name, str(words["role"]), words.get("group"), since=float(words["since"]), guest=DEMAND,
            handle=handle.native_id if handle else None,
        )
        for name, words in told.items()
        if name not in record.nodes and words["state"] != "GONE"
    ]  # fmt: skip


def _warning(record: Record, nodes: Mapping[str, Mapping[str, Any]]) -> dict[str, Any] | None:
    """Nodes of which something was restarted since the last that is on record: whoever looks makes an event of it, once."""
    fresh = {
        name: words for name, words in nodes.items() if float(words.get("restarted") or 0) > record.warned
    }
    if not fresh:
        return None
    at = max(float(words["restarted"]) for words in fresh.values())
    return {"at": at, "text": "; ".join(f"{name}: {words['restart']}" for name, words in fresh.items())}


def _since(words: Mapping[str, Any], before: Mapping[str, Any] | None) -> dict[str, Any]:
    """When it came to be so; another machine under the same name begins anew."""
    same = before is not None and all(before.get(key) == words.get(key) for key in ("state", "id"))
    return {**words, "since": before["since"] if same and before else time.time()}
