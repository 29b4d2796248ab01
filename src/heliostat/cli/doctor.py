"""`heliostat doctor`"""

from __future__ import annotations

import contextlib
from pathlib import Path

import click

from heliostat.cli.help import Command
from heliostat.cli.names import BACKEND, CLUSTER
from heliostat.cli.options import common, read_config
from heliostat.cli.output import Output
from heliostat.common.errors import HeliostatError
from heliostat.diagnostics.doctor import examine


@click.command(cls=Command)
@click.argument("subject", metavar="[CLUSTER|FILE]", type=CLUSTER, required=False)
@click.option("--on", type=BACKEND, help="backend to check [local]")
@common
@click.pass_obj
def command(out: Output, /, subject: str | None, on: str | None) -> int:
    """Check this machine, a spec file or a cluster, and print a hint for each problem."""
    from heliostat.cluster.manager import ClusterManager

    manager = ClusterManager()
    file = Path(subject) if subject and (subject.endswith((".yaml", ".yml")) or "/" in subject) else None
    spec = None
    if file or not subject:
        config = read_config({"on": on}, file)
        with contextlib.suppress(HeliostatError):  # without Ray: the checks report it
            config = manager.active_environment.apply(config, Path.cwd())
        spec = config.spec
    checks = examine(manager, spec, subject if subject and not file else None)
    exit_code = 1 if any(check.verdict == "fail" for check in checks) else 0
    if out.json:
        rows = [
            {key: value for key, value in vars(check).items() if key != "attachment" or value}
            for check in checks
        ]
        out.document({"checks": rows, "ok": not exit_code})
        return exit_code
    for check in checks:
        out.data(f"{out.colour(check.verdict, check.verdict, None):<4}  {check.name}: {check.found}")
        if check.hint and check.verdict != "ok":
            out.data(f"      hint: {check.hint}")
            if check.attachment:
                out.data(f"\n{check.attachment}\n")
    return exit_code
