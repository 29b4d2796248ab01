"""`heliostat env`"""

from __future__ import annotations

import click

from heliostat.cli.help import Command
from heliostat.cli.names import CLUSTER, find_only_cluster
from heliostat.cli.options import common
from heliostat.cli.output import Output
from heliostat.cluster.manager import ClusterManager
from heliostat.common import shell
from heliostat.common.errors import Code, HeliostatError, UsageError
from heliostat.common.shell import CONNECTION_VARIABLES


@click.command(cls=Command)
@click.argument("cluster", type=CLUSTER, required=False)
@click.option("--unset", is_flag=True, help="print the command that unsets the variables")
@common
@click.pass_obj
def command(out: Output, /, cluster: str | None, unset: bool) -> None:
    """Print shell commands that set the variables with which ray.init() connects to a cluster.

    Usage: eval "$(heliostat env NAME)". To undo it: eval "$(heliostat env --unset)"."""
    if unset and cluster:
        raise UsageError("`--unset` takes no cluster", hint="heliostat env --unset")
    if unset:
        names = list(CONNECTION_VARIABLES)
        return out.document({"unset": names}) if out.json else out.exact(shell.unset(names))
    cluster = cluster or find_only_cluster()
    manager = ClusterManager()
    view = manager.find(cluster)
    env = manager.environment(view)
    if env is None:
        raise HeliostatError(
            f"cannot connect to `{cluster}`: its state is {view.state}",
            hint=f"heliostat status {cluster}",
            code=Code.CLUSTER_NOT_READY,
        )
    out.document({"env": env}) if out.json else out.exact(shell.export(env))
