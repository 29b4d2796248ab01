"""`heliostat cp`"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import click

from heliostat.cli.help import Command
from heliostat.cli.names import find_only_cluster
from heliostat.cli.options import common
from heliostat.cli.output import Output
from heliostat.cluster.manager import ClusterManager
from heliostat.cluster.view import head_of
from heliostat.common.errors import UsageError
from heliostat.common.events import Event
from heliostat.common.units import count, format_bytes
from heliostat.remote import copying
from heliostat.state.store import Store

USAGE = "heliostat cp results.csv lab:head:results.csv"


@dataclass(frozen=True)
class NodePath:
    """A path on a node. node None: on the head."""

    cluster: str
    node: str | None
    path: str


@click.command(cls=Command)
@click.argument("source", metavar="SRC")
@click.argument("target", metavar="DST")
@common
@click.pass_obj
def command(out: Output, /, source: str, target: str) -> None:
    """Copy a file or a directory to or from a node. The path on a node is CLUSTER:NODE:PATH, CLUSTER:PATH on the head, or
    NODE:PATH where one cluster runs.

    A relative path on a node starts at your home directory. A directory that exists gets the copy inside it."""
    origin, destination = parse_node_path(source), parse_node_path(target)
    there = origin or destination
    if there is None:
        raise UsageError(f"neither `{source}` nor `{target}` is on a node", hint=USAGE)
    if origin and destination:
        raise UsageError("cannot copy from one node to another", hint="copy to this computer first")
    manager = ClusterManager(emit=out.emit)
    there = replace(there, node=there.node or head_of(manager.store.open(there.cluster).record()).name)

    def attach(argv: Sequence[str]) -> Sequence[str]:
        return manager.nodes.attached(there.cluster, there.node, argv)

    def progress(done: int, total: int | None) -> None:
        out.emit(Event("progress", "copying", None, {"bytes": done, "of_bytes": total}))

    if origin:
        copied = copying.fetch(origin.path, Path(target).expanduser(), attach, progress)
    else:
        copied = copying.send(Path(source).expanduser(), there.path, attach, progress)
    if out.json:
        fields = {"cluster": there.cluster, "node": there.node, "from": source, "to": target}
        return out.document({**fields, "files": copied.files, "bytes": copied.bytes})
    out.info(f"copied {count(copied.files, 'file')}, {format_bytes(copied.bytes)}, to `{target}`")


def parse_node_path(text: str) -> NodePath | None:
    """The path on a node; None: it is a path on this computer."""
    first, sign, rest = text.partition(":")
    is_drive = os.name == "nt" and len(first) == 1
    if not sign or not first or "/" in first or os.sep in first or is_drive:
        return None
    second, sign, path = rest.partition(":")
    store = Store()
    if sign and "/" not in second:
        return NodePath(store.expand_name(first), second or None, path or ".")
    if store.is_known(first):
        return NodePath(store.expand_name(first), None, rest or ".")
    return NodePath(find_only_cluster(), first, rest or ".")
