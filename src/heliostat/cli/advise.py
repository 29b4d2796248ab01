"""`heliostat advise`"""

from __future__ import annotations

import sys

import click

from heliostat.cli.options import CLUSTER, common
from heliostat.cli.output import Output
from heliostat.cli.status import only_one
from heliostat.cluster.manager import ClusterManager
from heliostat.common.errors import UsageError
from heliostat.common.events import Event
from heliostat.common.units import parse_duration
from heliostat.diagnostics import advisor, metrics


@click.command()
@click.argument("cluster", type=CLUSTER, required=False)
@click.option("--for", "span", metavar="TIME", default="15s", show_default=True, help="how long to look")
@common
@click.pass_obj
def command(out: Output, /, cluster: str | None, span: str) -> None:
    """Looks at a cluster while something runs on it, and says what keeps it from going faster, or at all."""
    try:
        seconds = parse_duration(span)
    except ValueError as error:
        raise UsageError(f"--for: {error}", hint="--for 30s") from None
    manager = ClusterManager()
    name = cluster or only_one(manager)
    figures = metrics.collect(manager, name, seconds, lambda text: out.emit(Event("progress", text)))
    found, short = advisor.advise(figures), advisor.summary(figures)
    if out.json:
        fields = [one.fields() for one in found]
        return out.document({"cluster": name, "summary": short, "advice": fields})
    if not found:
        return out.data(f"`{name}`: nothing to advise ({short})")
    blocks = [
        f"{out.colour(one.what, 'bold', sys.stdout)}\n  saw:   {one.describe}\n  means: {one.means}\n  do:    {one.do}"
        for one in found
    ]
    out.data("\n\n".join([f"{name}: {short}", *blocks]))
