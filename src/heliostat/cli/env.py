"""`heliostat env`"""

from __future__ import annotations

import click

from heliostat.cli.options import CLUSTER, common
from heliostat.cli.output import Output
from heliostat.errors import HeliostatError
from heliostat.lifecycle import Lifecycle
from heliostat.script import export


@click.command()
@click.argument("cluster", type=CLUSTER)
@common
@click.pass_obj
def command(out: Output, /, cluster: str) -> None:
    """Prints export lines: eval "$(heliostat env NAME)", and ray.init() joins the cluster."""
    life = Lifecycle()
    view = life.find(cluster)
    env = life.environment(view)
    if env is None:
        raise HeliostatError(
            f"`{cluster}` is {view.state}, so there is nothing to connect to",
            hint=f"heliostat status {cluster}",
        )
    out.document({"env": env}) if out.json else out.exact(export(env))
