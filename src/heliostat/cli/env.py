"""`heliostat env`"""

from __future__ import annotations

import click

from heliostat.cli.options import CLUSTER, common
from heliostat.cli.output import Output
from heliostat.cluster.manager import ClusterManager
from heliostat.common.errors import Code, HeliostatError, UsageError
from heliostat.common.shell import CONNECTION_VARIABLES, export, unset


@click.command()
@click.argument("cluster", type=CLUSTER, required=False)
@click.option("--unset", "forget", is_flag=True, help="print the line that takes them away again")
@common
@click.pass_obj
def command(out: Output, /, cluster: str | None, forget: bool) -> None:
    """Prints export lines: eval "$(heliostat env NAME)", and ray.init() joins the cluster.

    eval "$(heliostat env --unset)" undoes it, whichever cluster it was."""
    if forget and cluster:
        raise UsageError("`--unset` takes no cluster", hint="heliostat env --unset")
    if forget:
        names = list(CONNECTION_VARIABLES)
        return out.document({"unset": names}) if out.json else out.exact(unset(names))
    if cluster is None:
        raise UsageError("missing argument `CLUSTER`", hint="heliostat env --help")
    manager = ClusterManager()
    view = manager.find(cluster)
    env = manager.environment(view)
    if env is None:
        raise HeliostatError(
            f"`{cluster}` is {view.state}, so there is nothing to connect to",
            hint=f"heliostat status {cluster}",
            code=Code.CLUSTER_NOT_READY,
        )
    out.document({"env": env}) if out.json else out.exact(export(env))
