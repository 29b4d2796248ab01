"""Runs a command on the nodes of a running cluster, in parallel (`exec`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from heliostat.backends.base import Handle
from heliostat.cluster.access import Access
from heliostat.cluster.observe import Observer
from heliostat.common.errors import AccessDenied, Code, HeliostatError
from heliostat.remote.transport import Completed, map_concurrently
from heliostat.state.records import NodeRecord
from heliostat.state.states import NodeState


class Nodes:
    def __init__(self, access: Access, observer: Observer) -> None:
        self._access, self._observer = access, observer

    def run(self, name: str, argv: Sequence[str], node: str | None = None) -> dict[str, Completed]:
        """The result of the command on each ready node (or on this one), by the node's name."""
        view = self._observer.find(name)
        view.require_running()
        record = view.record
        if node is not None:
            record.require_node(node)
        ready = [n for n in record.nodes.values() if n.state is NodeState.READY and node in (None, n.name)]
        if not ready:
            raise HeliostatError(
                f"no node of `{name}` is ready",
                hint=f"heliostat status {name}",
                code=Code.CLUSTER_NOT_READY,
            )
        handles = {h["native_id"]: Handle.from_json(h) for h in record.handles}
        backend, host = self._access.backend(record), self._access.host_of(record)

        def handle_of(one: NodeRecord) -> Handle:
            handle = handles[str(one.handle)]
            if backend.starts_ray:
                return handle
            status = (view.live.get("nodes") or {}).get(one.name) or {}
            return replace(handle, detail={**handle.detail, "told": status})  # which of its machines it is

        def execute(one: NodeRecord) -> Completed:
            try:
                return backend.execute(one.name, handle_of(one), argv, host)
            except AccessDenied:
                raise
            except HeliostatError as error:
                return Completed(tuple(argv), 255, "", f"{error.message}: {error.cause}\n")

        return dict(zip([n.name for n in ready], map_concurrently(execute, ready), strict=True))
