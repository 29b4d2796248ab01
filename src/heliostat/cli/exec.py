"""`heliostat exec`"""

from __future__ import annotations

import click

from heliostat.cli.help import Command
from heliostat.cli.names import NODE, cluster_argument
from heliostat.cli.options import common
from heliostat.cli.output import Output
from heliostat.cluster.manager import ClusterManager
from heliostat.common.errors import UsageError


@click.command(cls=Command, context_settings={"ignore_unknown_options": True})
@cluster_argument()
@click.option("--node", type=NODE, help="run on this node only")
@common
@click.argument("arguments", metavar="-- COMMAND…", nargs=-1, type=click.UNPROCESSED)
@click.pass_obj
def command(out: Output, /, cluster: str, node: str | None, arguments: tuple[str, ...]) -> int:
    """Run a command on all nodes in parallel, and prefix each output line with the node's name.

    The exit code is the highest exit code of the nodes."""
    argv = list(arguments[1:] if arguments[:1] == ("--",) else arguments)
    if not argv:
        raise UsageError("missing argument `COMMAND`", hint=f"heliostat exec {cluster} -- nvidia-smi")
    results = ClusterManager(emit=out.emit).nodes.run(cluster, argv, node)
    if out.json:
        out.document(
            {
                "cluster": cluster,
                "nodes": {n: {"exit_code": r.code, "out": r.out, "err": r.err} for n, r in results.items()},
            }
        )
    else:
        width = max(map(len, results))
        for name, result in results.items():
            for stream, text in (("out", result.out), ("err", result.err)):
                lines = "".join(f"{name:<{width}} | {line}\n" for line in text.splitlines())
                out.raw(stream, lines.encode())
    return max(result.code for result in results.values())
