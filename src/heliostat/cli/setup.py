"""`heliostat setup`"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import click

from heliostat.cli.help import Command
from heliostat.cli.names import BACKEND
from heliostat.cli.options import common, read_config
from heliostat.cli.output import Output, table
from heliostat.cluster import environment
from heliostat.cluster.environment import Target
from heliostat.common.units import count, format_bytes


@click.command(cls=Command)
@click.argument("path", metavar="[FILE]", required=False, type=click.Path(path_type=Path, readable=False))
@click.option("--on", type=BACKEND, help="backend that provides the hosts [local]")
@click.option("--dry-run", is_flag=True, help="print the files and commands without running anything")
@common
@click.pass_obj
def command(out: Output, /, path: Path | None, on: str | None, dry_run: bool) -> int:
    """Install or upgrade the Python environment on all hosts of the spec file in parallel.

    Checks that all hosts have the same Ray and Python versions."""
    from heliostat.cluster.manager import ClusterManager

    manager = ClusterManager(emit=out.emit)
    config = manager.declared_environment.apply(read_config({"on": on}, path), install=not dry_run)
    installer = manager.environments
    targets = installer.targets(config.spec)
    if dry_run:
        show(out, targets)
        return 0
    outcomes = installer.install(targets)
    problem = environment.find_problem(outcomes)
    if out.json:
        error = {"error": problem.fields()} if problem else {}
        out.document({"hosts": [outcome.to_json() for outcome in outcomes], **error})
        return problem.exit_code if problem else 0
    rows = [
        (host.name, host.python or "-", host.ray or "-", "failed" if host.error else host.summary)
        for host in outcomes
    ]
    out.info(table(rows, ("HOST", "PYTHON", "RAY", "RESULT")))
    return out.error(problem) if problem else 0


def show(out: Output, targets: Sequence[Target]) -> None:
    """Prints what `setup` would send to each host and run there."""
    hosts = []
    for target in targets:
        environment.check(target.environment)
        request = environment.request(target)
        sent = environment.files(target, request)
        script = sent["setup.sh"].decode()
        if out.json:
            sizes = {name: len(data) for name, data in sent.items()}
            hosts.append({"name": target.name, "files": sizes, "script": script, "request": request})
            continue
        wheel_sizes = [len(data) for name, data in sent.items() if name.startswith("wheels/")]
        names = [name for name in sent if not name.startswith("wheels/")]
        if wheel_sizes:
            names.append(f"{count(len(wheel_sizes), 'wheel')} if missing ({format_bytes(sum(wheel_sizes))})")
        host = f"{target.name}{' over ssh' if target.is_remote else ''}"
        out.data(f"# {host}: receives {', '.join(names)}; runs setup.sh:")
        out.data("".join(f"    {line}\n" for line in script.splitlines()))
        out.data(f"# with request.json: {json.dumps(request)}")
    if out.json:
        out.document({"hosts": hosts})
