"""Status of a cluster whose platform starts Ray (Kubernetes, a cloud): written to the files that agents write elsewhere, so
that the rest of the code reads both kinds of clusters in the same way.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from heliostat.backends.base import Handle, Platform
from heliostat.common.documents import JsonMapping, JsonObject
from heliostat.common.errors import Code, NotFoundError, Refused
from heliostat.state.files import write_atomic
from heliostat.state.records import NodeRecord, Record
from heliostat.state.store import ClusterDirectory

if TYPE_CHECKING:
    from heliostat.remote.transport import Transport

DEMAND = "demand"  # `joined` of a node that the autoscaler added; it can leave at any time
PULL_LOCK_S = 5.0  # the next pull writes the same again
NOTE_LOCK_S = 30.0  # a note is written only once


def handle_of(record: Record) -> Handle | None:
    """The handle of the whole cluster on a platform; None: it was not launched yet."""
    return Handle.from_json(record.handles[-1]) if record.handles else None


class PlatformSync:
    """Copies the status of one cluster from its platform into the cluster's directory."""

    def __init__(self, folder: ClusterDirectory, platform: Platform, host: Transport) -> None:
        self.folder, self.platform, self.host = folder, platform, host
        self._next = 0.0
        self.refusal: Refused | None = None  # if the platform refused the last request

    def pull(self, record: Record, node: str | None = None) -> None:
        """Writes the current status, with the logs of this node. Raises HeliostatError when the platform does not answer."""
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
                self._next = time.monotonic() + self.platform.poll_interval[0]
        if node:
            try:
                self.pull_logs(handle, node)
            except Refused as error:
                self.refusal = error
                raise

    def invalidate(self) -> None:
        """The next `pull` asks the platform, however short ago the last one was."""
        self._next = 0.0

    def _pull(self, record: Record, handle: Handle) -> None:
        state = self.folder.state()
        before = state.get("nodes") or {}
        own = [node for node in record.nodes.values() if not node.joined]
        status = self.platform.platform_status(handle, own, before, self.host)
        nodes = {name: _with_since(row, before.get(name)) for name, row in status.nodes.items()}
        for name in record.nodes.keys() - nodes.keys():  # the autoscaler added it and removed it
            nodes[name] = _with_since({"state": "GONE", "role": "worker"}, before.get(name))
        warned = _restart_warning(record, nodes) or state.get("warned")
        if nodes != before or warned != state.get("warned"):
            more = {"warned": warned} if warned else {}
            self._update({**more, "schema": 1, "nodes": nodes}, record.id, PULL_LOCK_S)
        if status.token and status.token != self.folder.read_token():
            write_atomic(self.folder.token, status.token)
        if status.connection is None:
            (self.folder.path / "connection.json").unlink(missing_ok=True)
        elif status.connection != self.folder.connection():
            self._write("connection.json", status.connection)

    def _update(self, changes: JsonMapping, cluster_id: str | None, timeout_s: float) -> None:
        """Changes these keys of `state.json`, which other commands change too: all other keys stay.

        cluster_id: the cluster of this state; another cluster may use the directory by now."""
        with self.folder.lock(timeout_s):
            if cluster_id is not None and self.folder.record().id != cluster_id:
                raise NotFoundError(
                    f"another cluster has the name `{self.folder.name}` now", code=Code.NOT_FOUND_CLUSTER
                )
            self._write("state.json", {**self.folder.state(), **changes})

    def _write(self, name: str, document: JsonMapping) -> None:
        write_atomic(self.folder.path / name, json.dumps(document, indent=1) + "\n")

    def pull_logs(self, handle: Handle, node: str, over: threading.Event | None = None) -> None:
        """Appends what is new in the logs of a node. over: when it is set, nothing more is written."""
        status = (self.folder.state().get("nodes") or {}).get(node) or {}
        directory = self.folder.logs / node
        directory.mkdir(mode=0o700, exist_ok=True)
        known = {path.name: path.stat().st_size for path in directory.iterdir() if path.is_file()}
        for name, data in self.platform.logs(handle, node, status, known, self.host).items():
            if over and over.is_set():
                return
            if data:
                flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
                with open(os.open(directory / name, flags, 0o600), "ab") as stream:
                    stream.write(data)

    def note(self, **keys: object) -> None:
        """Adds these keys to `state.json`: the jobs at the end, the command of a `run`."""
        self._update(keys, None, NOTE_LOCK_S)


def new_nodes(record: Record, table: Mapping[str, JsonMapping]) -> list[NodeRecord]:
    """Nodes that the platform has and the record has not: the autoscaler added them."""
    handle = handle_of(record)
    return [
        NodeRecord(
            name, str(row["role"]), row.get("group"), since=float(row["since"]), joined=DEMAND,
            handle=handle.native_id if handle else None,
        )
        for name, row in table.items()
        if name not in record.nodes and row["state"] != "GONE"
    ]  # fmt: skip


def _restart_warning(record: Record, nodes: Mapping[str, JsonMapping]) -> JsonObject | None:
    """The warning of nodes that were restarted in place since the last recorded warning."""
    fresh = {name: row for name, row in nodes.items() if float(row.get("restarted") or 0) > record.warned}
    if not fresh:
        return None
    at = max(float(row["restarted"]) for row in fresh.values())
    return {"at": at, "text": "; ".join(f"{name}: {row['restart']}" for name, row in fresh.items())}


def _with_since(row: JsonMapping, before: JsonMapping | None) -> JsonObject:
    """The row with the time of its last change; a new machine under the same name is a change."""
    same = before is not None and all(before.get(key) == row.get(key) for key in ("state", "id"))
    return {**row, "since": before["since"] if same and before else time.time()}
