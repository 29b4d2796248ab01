"""`heliostat cp`"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from heliostat.cli.help import Command
from heliostat.cli.names import find_only_cluster
from heliostat.cli.options import common
from heliostat.cli.output import Output
from heliostat.cluster.manager import ClusterManager
from heliostat.common.errors import UsageError
from heliostat.common.events import Event
from heliostat.common.units import count, format_bytes
from heliostat.remote import copying
from heliostat.state.store import Store

USAGE = "heliostat cp results.csv lab:head:results.csv"


@dataclass(frozen=True)
class Place:
    """A path on a node. node None: on the head."""

    cluster: str
    node: str | None
    path: str

    def __str__(self) -> str:
        return f"{self.cluster}:{self.node or 'head'}:{self.path}"


@click.command(cls=Command)
@click.argument("source", metavar="SRC")
@click.argument("target", metavar="DST")
@common
@click.pass_obj
def command(out: Output, /, source: str, target: str) -> None:
    """Copy a file or a directory to or from a node. The path on a node is CLUSTER:NODE:PATH, CLUSTER:PATH on the head, or
    NODE:PATH where one cluster runs.

    A relative path on a node starts at your home directory. A directory that exists gets the copy inside it."""
    origin, destination = parse_place(source), parse_place(target)
    place = origin or destination
    if place is None:
        raise UsageError(f"neither `{source}` nor `{target}` is on a node", hint=USAGE)
    if origin and destination:
        raise UsageError("cannot copy from one node to another", hint="copy to this computer first")
    manager = ClusterManager(emit=out.emit)

    def attach(argv: Sequence[str]) -> Sequence[str]:
        return manager.nodes.attached(place.cluster, place.node, argv)

    def progress(done: int, total: int | None) -> None:
        out.emit(Event("progress", "copying", None, {"bytes": done, "of_bytes": total}))

    if origin:
        copied = copying.fetch(origin.path, Path(target).expanduser(), attach, progress)
    else:
        copied = copying.send(Path(source).expanduser(), place.path, attach, progress)
    if out.json:
        fields = {"cluster": place.cluster, "node": place.node or "head", "from": source, "to": target}
        return out.document({**fields, "files": copied.files, "bytes": copied.bytes})
    out.info(f"copied {count(copied.files, 'file')}, {format_bytes(copied.bytes)}, to `{target}`")


def parse_place(text: str) -> Place | None:
    """The place on a node; None: it is a path on this computer."""
    first, sign, rest = text.partition(":")
    is_drive = os.name == "nt" and len(first) == 1
    if not sign or not first or "/" in first or os.sep in first or is_drive:
        return None
    second, sign, path = rest.partition(":")
    store = Store()
    if sign and "/" not in second:
        return Place(store.expand_name(first), second or None, path or ".")
    if store.is_known(first):
        return Place(store.expand_name(first), None, rest or ".")
    return Place(find_only_cluster(), first, rest or ".")
