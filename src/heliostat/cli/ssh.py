"""`heliostat ssh`"""

from __future__ import annotations

import sys

import click

from heliostat.cli.help import Command
from heliostat.cli.names import NODE, cluster_argument
from heliostat.cli.options import common
from heliostat.cli.output import Output
from heliostat.cluster.manager import ClusterManager
from heliostat.common.errors import UsageError
from heliostat.remote.transport import replace_process

SHELL = ("sh", "-c", 'exec "${SHELL:-bash}" -l')


@click.command(cls=Command, context_settings={"ignore_unknown_options": True})
@cluster_argument()
@click.argument("node", type=NODE, required=False)
@common
@click.argument("arguments", metavar="[-- COMMAND…]", nargs=-1, type=click.UNPROCESSED)
@click.pass_obj
def command(out: Output, /, cluster: str, node: str | None, arguments: tuple[str, ...]) -> int:
    """Open a shell on a node, by default on the head, or run a command there with your terminal.

    Uses ssh, a step of the Slurm job, or the API server of Kubernetes. On PBS, the site must admit you to the hosts of your
    jobs over ssh. The exit code is the shell's or the command's."""
    if out.json:
        raise UsageError(
            "`ssh` has no JSON output",
            hint=f"heliostat exec {cluster}{f' --node {node}' if node else ''} --json -- COMMAND",
        )
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    argv = ClusterManager().nodes.attached(cluster, node, arguments or SHELL, terminal=is_terminal)
    out.flush()
    return replace_process(argv)
