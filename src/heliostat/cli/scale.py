"""`heliostat scale`"""

from __future__ import annotations

import click

from heliostat.cli.help import Command
from heliostat.cli.names import cluster_argument
from heliostat.cli.options import common, wait_timeout
from heliostat.cli.output import Output
from heliostat.cli.up import summary
from heliostat.cluster.manager import ClusterManager
from heliostat.common.limits import MAX_WORKERS
from heliostat.common.units import count


@click.command(cls=Command)
@cluster_argument()
@click.argument("workers", metavar="N", type=click.IntRange(0, MAX_WORKERS))
@click.option("--group", metavar="NAME", help="change this group, if the cluster has groups")
@wait_timeout
@click.option("--dry-run", is_flag=True, help="print what would change without changing it")
@common
@click.pass_obj
def command(
    out: Output, /, cluster: str, workers: int, group: str | None, wait_timeout: float | None, dry_run: bool
) -> None:
    """Set the number of workers, not counting the head. Nodes are drained before they are removed."""
    manager = ClusterManager(emit=out.emit)
    if dry_run:
        view = manager.find(cluster)
        nodes = view.record.nodes.values()
        current = sum(node.role == "worker" and (group is None or node.group == group) for node in nodes)
        if out.json:
            return out.document({"name": cluster, "workers": current, "wanted": workers})
        return out.data(f"# {cluster}: {count(current, 'worker')} now, {workers} requested")
    view = manager.scaling.scale(cluster, workers, group, wait_timeout_s=wait_timeout)
    out.document(summary(view)) if out.json else out.info(f"`{cluster}` has {count(view.alive(), 'node')}")
