"""`heliostat env`"""

from __future__ import annotations

import click

from heliostat import backends
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
    view = Lifecycle().find(cluster)
    connection = view.folder.connection()
    if connection is None:
        raise HeliostatError(
            f"`{cluster}` is {view.state}, so there is nothing to connect to",
            hint=f"heliostat status {cluster}",
        )
    env = connection["env"]
    apart = view.record.place or not backends.load(view.record.site).shares_files
    if apart and "RAY_AUTH_TOKEN_PATH" in env:  # the head's own path is of another machine
        env = {**env, "RAY_AUTH_TOKEN_PATH": str(view.folder.token)}
    out.document({"env": env}) if out.json else out.exact(export(env))
