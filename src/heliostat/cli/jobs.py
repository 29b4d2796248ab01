"""`heliostat jobs`"""

from __future__ import annotations

import click

from heliostat.cli.help import Command
from heliostat.cli.names import cluster_argument
from heliostat.cli.options import common
from heliostat.cli.output import Output, ago, table
from heliostat.cluster.manager import ClusterManager
from heliostat.common.documents import select
from heliostat.common.units import format_duration


@click.command(cls=Command)
@cluster_argument()
@common
@click.pass_obj
def command(out: Output, /, cluster: str) -> None:
    """List the jobs of a cluster, newest first."""
    jobs = ClusterManager().jobs.list(cluster)
    if out.json:
        keys = ("id", "kind", "status", "entrypoint", "started", "seconds", "exit_code", "message")
        return out.document({"cluster": cluster, "jobs": [select(job, keys) for job in jobs]})
    if not jobs:
        return out.info(f"no jobs on `{cluster}` yet")
    rows = [
        (
            job["id"],
            job["status"].lower(),
            "-" if job["exit_code"] is None else job["exit_code"],
            ago(job["started"]),
            "-" if job["seconds"] is None else format_duration(job["seconds"]),
            (job["entrypoint"] or "")[:60],
        )
        for job in jobs
    ]
    out.data(table(rows, ("JOB", "STATUS", "EXIT", "AGE", "RAN", "COMMAND")))
