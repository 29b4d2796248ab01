"""`heliostat restart`"""

from __future__ import annotations

import click

from heliostat.cli.help import Command
from heliostat.cli.names import NODE, cluster_argument
from heliostat.cli.options import common, wait_timeout
from heliostat.cli.output import Output
from heliostat.cli.up import show_next_steps, summary
from heliostat.cluster.manager import ClusterManager


@click.command(cls=Command)
@cluster_argument()
@click.option("--node", type=NODE, help="restart this worker only")
@wait_timeout
@common
@click.pass_obj
def command(out: Output, /, cluster: str, node: str | None, wait_timeout: float | None) -> None:
    """Terminate a cluster and start it again with the same spec. It gets a new token and new ports."""
    manager = ClusterManager(emit=out.emit)
    if node:
        view = manager.scaling.restart_node(cluster, node, wait_timeout)
    else:
        view = manager.restart(cluster, wait_timeout)
    if out.json:
        return out.document(summary(view))
    show_next_steps(out, view)
    out.data(view.address or "")
