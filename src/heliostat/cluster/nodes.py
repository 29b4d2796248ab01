"""Commands on the nodes of a running cluster: on all of them in parallel (`exec`), or on one with the caller's streams (`ssh`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from heliostat.backends.base import Handle
from heliostat.cluster.access import Access
from heliostat.cluster.observe import Observer
from heliostat.cluster.view import View, head_of
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
        ready = _ready_nodes(view, node)
        backend, host = self._access.backend(view.record), self._access.host_of(view.record)

        def execute(one: NodeRecord) -> Completed:
            try:
                return backend.execute(one.name, _handle_of(view, one), argv, host)
            except AccessDenied:
                raise
            except HeliostatError as error:
                return Completed(tuple(argv), 255, "", f"{error.message}: {error.cause}\n")

        return dict(zip([n.name for n in ready], map_concurrently(execute, ready), strict=True))

    def attached(
        self, name: str, node: str | None, argv: Sequence[str], *, terminal: bool = False
    ) -> Sequence[str]:
        """The command on this host that runs argv on the node with the caller's streams. None: on the head."""
        view = self._observer.find(name)
        (one,) = _ready_nodes(view, node or head_of(view.record).name)
        backend, host = self._access.backend(view.record), self._access.host_of(view.record)
        return backend.attached(one.name, _handle_of(view, one), argv, host, terminal=terminal)


def _ready_nodes(view: View, node: str | None) -> list[NodeRecord]:
    """The nodes that can run a command; only the one of this name, if one is given. Raises HeliostatError if there is none."""
    view.require_running()
    record = view.record
    if node is not None:
        record.require_node(node)
    ready = [n for n in record.nodes.values() if n.state is NodeState.READY and node in (None, n.name)]
    if not ready:
        raise HeliostatError(
            f"`{node}` is not ready" if node else f"no node of `{record.name}` is ready",
            hint=f"heliostat status {record.name}",
            code=Code.CLUSTER_NOT_READY,
        )
    return ready


def _handle_of(view: View, node: NodeRecord) -> Handle:
    """The node's handle; `status` in its detail is the node's last report: of several nodes of a handle, which one it is."""
    handle = next(Handle.from_json(h) for h in view.record.handles if h["native_id"] == node.handle)
    status = (view.live.get("nodes") or {}).get(node.name) or {}
    return replace(handle, detail={**handle.detail, "status": status})
