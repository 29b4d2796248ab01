"""`heliostat ls`"""

from __future__ import annotations

import click

from heliostat.cli.help import Command
from heliostat.cli.options import common
from heliostat.cli.output import Output, ago, table
from heliostat.cluster.manager import ClusterManager
from heliostat.common.documents import JsonObject
from heliostat.state.records import Record


@click.command(cls=Command)
@click.option("--all", "every", is_flag=True, help="include terminated clusters")
@common
@click.pass_obj
def command(out: Output, /, every: bool) -> None:
    """List your clusters on all backends: running ones, and those that ended since the last `ls`."""
    manager = ClusterManager()
    records = manager.history() if every else [view.record for view in manager.clusters()]
    if out.json:
        return out.document({"clusters": [make_row(record) for record in records]})
    if not records:
        return out.info("no clusters; to start one: heliostat up")
    lines = [
        (
            r.name,
            r.backend,
            str(r.state()),
            _format_ready(r),
            ago(r.created),
            (r.reason if r.ended else "") or "",
        )
        for r in records
    ]
    out.data(table(lines, ("NAME", "BACKEND", "STATE", "NODES", "AGE", "REASON")))


def _format_ready(record: Record) -> str:
    ready = sum(str(node.state) == "READY" for node in record.nodes.values())
    return f"{ready}/{len(record.nodes)}"


def make_row(record: Record) -> JsonObject:
    return {
        "name": record.name,
        "backend": record.backend,
        "state": str(record.state()),
        "nodes": len(record.nodes),
        "native_ids": [handle["native_id"] for handle in record.handles],
        "started": record.created,
        "ended": record.ended,
        "reason": record.reason,
    }
