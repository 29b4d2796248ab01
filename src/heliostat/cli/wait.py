"""`heliostat wait`"""

from __future__ import annotations

import click

from heliostat.cli.help import Command
from heliostat.cli.names import JOB, cluster_argument
from heliostat.cli.options import common, parse_timeout
from heliostat.cli.output import Output
from heliostat.cluster.manager import ClusterManager
from heliostat.cluster.wait import GOALS


@click.command(cls=Command)
@cluster_argument(ended=True)
@click.argument("job", type=JOB, required=False)
@click.option(
    "--for",
    "goal",
    type=click.Choice(GOALS),
    help="ready: all nodes are; done: the job or `run` has succeeded; ended: in any way [done; of a cluster: ready]",
)
@click.option(
    "--timeout",
    metavar="DURATION",
    callback=parse_timeout,
    help="stop waiting after this long and exit with code 4, e.g. 30m",
)
@common
@click.pass_obj
def command(out: Output, /, cluster: str, job: str | None, goal: str | None, timeout: float | None) -> int:
    """Wait until a cluster is ready, or until a job or a `run` has ended.

    Exit code 0: it is; 1: it ended otherwise; 4: the timeout has passed; 5: there is no such cluster or job."""
    manager = ClusterManager()
    job = manager.jobs.expand_id(cluster, job) if job else None
    outcome = manager.state_waiter.wait(cluster, job, goal, timeout)
    name = f"{cluster}/{job}" if job else cluster
    if out.json:
        out.document(
            {
                "cluster": cluster,
                "job": job,
                "reached": outcome.is_reached,
                "state": outcome.state,
                "reason": outcome.reason,
            }
        )
    else:
        out.info(f"`{name}`: {outcome.state.lower()}" + (f", {outcome.reason}" if outcome.reason else ""))
    return 0 if outcome.is_reached else 1
