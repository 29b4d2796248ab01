"""Something done on the nodes of a running cluster, all at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from heliostat import backends
from heliostat.backends.base import Handle
from heliostat.errors import AccessDenied, Code, HeliostatError, NotFoundError
from heliostat.states import NodeState
from heliostat.transport import Completed, at_once

if TYPE_CHECKING:
    from heliostat.lifecycle import Lifecycle
    from heliostat.store import NodeRecord


def run(life: Lifecycle, name: str, argv: Sequence[str], node: str | None = None) -> dict[str, Completed]:
    """What the command said on each node that is there (or on this one), by the node's name."""
    view = life.find(name)
    life.must_be_up(view)
    record = view.record
    if node is not None and node not in record.nodes:
        raise NotFoundError(
            f"`{name}` has no node `{node}`",
            cause=f"it has {', '.join(record.nodes)}",
            code=Code.NOT_FOUND_NODE,
        )
    handles = {h["native_id"]: Handle.from_json(h) for h in record.handles}
    there = [n for n in record.nodes.values() if n.state is NodeState.READY and node in (None, n.name)]
    if not there:
        raise HeliostatError(
            f"no node of `{name}` is ready",
            hint=f"heliostat status {name}",
            code=Code.CLUSTER_NOT_READY,
        )
    backend, host = backends.load(record.site), life.host_of(record)

    def one(names: str, handle: Handle) -> Completed:
        try:
            return backend.execute(names, handle, argv, host)
        except AccessDenied:
            raise
        except HeliostatError as error:
            return Completed(tuple(argv), 255, "", f"{error.message}: {error.cause}\n")

    def way(n: NodeRecord) -> Handle:
        handle = handles[str(n.handle)]
        if backend.starts_ray:
            return handle
        told = (view.live.get("nodes") or {}).get(n.name) or {}
        return replace(handle, detail={**handle.detail, "told": told})  # which of its machines it is

    done = at_once(lambda n: one(n.name, way(n)), there)
    return dict(zip([n.name for n in there], done, strict=True))
