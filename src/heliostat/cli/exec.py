"""`heliostat exec`"""

from __future__ import annotations

import click

from heliostat.cli.options import CLUSTER, common
from heliostat.cli.output import Output
from heliostat.cluster.manager import ClusterManager
from heliostat.common.errors import UsageError


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("cluster", type=CLUSTER)
@click.option("--node", metavar="NAME", help="only on this node")
@common
@click.argument("words", metavar="-- COMMAND…", nargs=-1, type=click.UNPROCESSED)
@click.pass_obj
def command(out: Output, /, cluster: str, node: str | None, words: tuple[str, ...]) -> int:
    """Runs a command on every node at once; each line has the node's name before it. Exits with the worst of their codes."""
    argv = list(words[1:] if words[:1] == ("--",) else words)
    if not argv:
        raise UsageError("there is no command to run", hint=f"heliostat exec {cluster} -- nvidia-smi")
    done = ClusterManager(emit=out.emit).nodes.run(cluster, argv, node)
    if out.json:
        out.document(
            {
                "cluster": cluster,
                "nodes": {n: {"exit_code": d.code, "out": d.out, "err": d.err} for n, d in done.items()},
            }
        )
    else:
        width = max(map(len, done))
        for name, one in done.items():
            for stream, text in (("out", one.out), ("err", one.err)):
                lines = "".join(f"{name:<{width}} | {line}\n" for line in text.splitlines())
                out.raw(stream, lines.encode())
    return max(one.code for one in done.values())
