"""`heliostat doctor`"""

from __future__ import annotations

from pathlib import Path

import click

from heliostat.cli.options import CLUSTER, common, read_config
from heliostat.cli.output import Output
from heliostat.diagnostics.doctor import examine


@click.command()
@click.argument("what", metavar="[CLUSTER|FILE]", type=CLUSTER, required=False)
@click.option("--on", metavar="SITE", help="check this site")
@common
@click.pass_obj
def command(out: Output, /, what: str | None, on: str | None) -> int:
    """Says what is wrong with this machine, a file or a cluster, and what to type."""
    from heliostat.cluster.manager import ClusterManager

    manager = ClusterManager()
    file = Path(what) if what and (what.endswith((".yaml", ".yml")) or "/" in what) else None
    spec = None if what and not file else read_config({"on": on}, file).spec
    checks = examine(manager, spec, what if what and not file else None)
    worst = 1 if any(check.verdict == "fail" for check in checks) else 0
    if out.json:
        rows = [
            {key: value for key, value in vars(check).items() if key != "attachment" or value}
            for check in checks
        ]
        out.document({"checks": rows, "ok": not worst})
        return worst
    for check in checks:
        out.data(f"{out.colour(check.verdict, check.verdict, None):<4}  {check.name}: {check.found}")
        if check.hint and check.verdict != "ok":
            out.data(f"      hint: {check.hint}")
            if check.attachment:
                out.data(f"\n{check.attachment}\n")
    return worst
