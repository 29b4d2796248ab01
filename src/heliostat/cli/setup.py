"""`heliostat setup`"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import click

from heliostat.cli.options import common, read_config
from heliostat.cli.output import Output, table
from heliostat.cluster import environment
from heliostat.cluster.environment import Target
from heliostat.common.units import count, format_bytes


@click.command()
@click.argument("path", metavar="[FILE]", required=False, type=click.Path(path_type=Path, readable=False))
@click.option("--on", metavar="SITE", help="where the machines come from [local]")
@click.option("--dry-run", is_flag=True, help="print the files and commands, run nothing")
@common
@click.pass_obj
def command(out: Output, /, path: Path | None, on: str | None, dry_run: bool) -> int:
    """Makes or upgrades the environment on all machines of the file at once, and checks that Ray and Python agree."""
    from heliostat.cluster.manager import ClusterManager

    spec = read_config({"on": on}, path).spec
    installer = ClusterManager(emit=out.emit).environments
    targets = installer.targets(spec)
    if dry_run:
        show(out, targets)
        return 0
    outcomes = installer.install(targets)
    problem = environment.find_problem(outcomes)
    if out.json:
        more = {"error": problem.fields()} if problem else {}
        out.document({"hosts": [one.to_json() for one in outcomes], **more})
        return problem.exit_code if problem else 0
    rows = [
        (one.name, one.python or "-", one.ray or "-", "failed" if one.error else one.summary)
        for one in outcomes
    ]
    out.say(table(rows, ("HOST", "PYTHON", "RAY", "DONE")))
    return out.error(problem) if problem else 0


def show(out: Output, targets: Sequence[Target]) -> None:
    """What would be sent where, and be run there."""
    hosts = []
    for target in targets:
        environment.check(target.environment)
        asked = environment.request(target)
        sent = environment.files(target, asked)
        script = sent["setup.sh"].decode()
        if out.json:
            sizes = {name: len(data) for name, data in sent.items()}
            hosts.append({"name": target.name, "files": sizes, "script": script, "request": asked})
            continue
        heavy = [len(data) for name, data in sent.items() if name.startswith("wheels/")]
        names = [name for name in sent if not name.startswith("wheels/")]
        if heavy:
            names.append(f"{count(len(heavy), 'wheel')} where needed ({format_bytes(sum(heavy))})")
        out.data(
            f"# {target.name}{' over ssh' if target.is_remote else ''}: gets {', '.join(names)}; runs setup.sh:"
        )
        out.data("".join(f"    {line}\n" for line in script.splitlines()))
        out.data(f"# with request.json: {json.dumps(asked)}")
    if out.json:
        out.document({"hosts": hosts})
