"""`heliostat stop`"""

from __future__ import annotations

import click

from heliostat.cli.help import Command
from heliostat.cli.names import JOB, cluster_argument
from heliostat.cli.options import common
from heliostat.cli.output import Output
from heliostat.cluster.manager import ClusterManager


@click.command(cls=Command)
@cluster_argument()
@click.argument("job", type=JOB)
@common
@click.pass_obj
def command(out: Output, /, cluster: str, job: str) -> None:
    """Stop a job with SIGTERM, and with SIGKILL after ten seconds."""
    jobs = ClusterManager().jobs
    job = jobs.expand_id(cluster, job)
    stopped = jobs.stop(cluster, job)
    if out.json:
        return out.document({"cluster": cluster, "job": job, "stopped": stopped})
    out.info(f"job `{job}` is stopping" if stopped else f"job `{job}` has already ended")
