"""`heliostat advise`"""

from __future__ import annotations

import sys

import click

from heliostat.cli.help import Command
from heliostat.cli.names import cluster_argument
from heliostat.cli.options import common
from heliostat.cli.output import Output
from heliostat.cluster.manager import ClusterManager
from heliostat.common.errors import UsageError
from heliostat.common.events import Event
from heliostat.common.units import parse_duration
from heliostat.diagnostics import advisor, metrics


@click.command(cls=Command)
@cluster_argument()
@click.option("--for", "span", metavar="TIME", default="15s", show_default=True, help="how long to observe")
@common
@click.pass_obj
def command(out: Output, /, cluster: str, span: str) -> None:
    """Observe a cluster while a workload runs, and report why the workload is slow or blocked."""
    try:
        seconds = parse_duration(span)
    except ValueError as error:
        raise UsageError(f"--for: {error}", hint="--for 30s") from None
    manager = ClusterManager()
    figures = metrics.collect(manager, cluster, seconds, lambda text: out.emit(Event("progress", text)))
    findings, summary = advisor.advise(figures), advisor.summarize(figures)
    if out.json:
        fields = [finding.fields() for finding in findings]
        return out.document({"cluster": cluster, "summary": summary, "advice": fields})
    if not findings:
        return out.data(f"`{cluster}`: no findings ({summary})")
    blocks = [
        f"{out.colour(one.finding, 'bold', sys.stdout)}\n"
        f"  evidence: {one.evidence}\n  effect:   {one.effect}\n  remedy:   {one.remedy}"
        for one in findings
    ]
    out.data("\n\n".join([f"{cluster}: {summary}", *blocks]))
