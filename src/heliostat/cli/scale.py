"""`heliostat scale`"""

from __future__ import annotations

import click

from heliostat.cli.options import CLUSTER, common, wait_timeout
from heliostat.cli.output import Output
from heliostat.cli.up import summary
from heliostat.cluster.manager import ClusterManager
from heliostat.common.limits import MAX_WORKERS
from heliostat.common.units import count


@click.command()
@click.argument("cluster", type=CLUSTER)
@click.argument("workers", metavar="N", type=click.IntRange(0, MAX_WORKERS))
@click.option("--group", metavar="NAME", help="so many of this group, where the cluster has groups")
@wait_timeout
@click.option("--dry-run", is_flag=True, help="say what would change, change nothing")
@common
@click.pass_obj
def command(
    out: Output, /, cluster: str, workers: int, group: str | None, wait_timeout: float | None, dry_run: bool
) -> None:
    """So many worker nodes, besides the head, now. Nodes that leave are drained first."""
    manager = ClusterManager(emit=out.emit)
    if dry_run:
        view = manager.find(cluster)
        nodes = view.record.nodes.values()
        now = sum(node.role == "worker" and (group is None or node.group == group) for node in nodes)
        if out.json:
            return out.document({"name": cluster, "workers": now, "wanted": workers})
        return out.data(f"# {cluster}: {count(now, 'worker')} now, {workers} wanted")
    view = manager.scaling.scale(cluster, workers, group, wait_timeout_s=wait_timeout)
    out.document(summary(view)) if out.json else out.say(f"`{cluster}` has {count(view.alive(), 'node')}")
