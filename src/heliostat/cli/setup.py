"""`heliostat setup`"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import click

from heliostat import environment
from heliostat.cli.options import common, read_config
from heliostat.cli.output import Output, table
from heliostat.environment import Place
from heliostat.units import count, format_bytes


@click.command()
@click.argument("path", metavar="[FILE]", required=False, type=click.Path(path_type=Path, readable=False))
@click.option("--on", metavar="SITE", help="where the machines come from [local]")
@click.option("--dry-run", is_flag=True, help="print the files and commands, run nothing")
@common
@click.pass_obj
def command(out: Output, /, path: Path | None, on: str | None, dry_run: bool) -> int:
    """Makes or upgrades the environment on all machines of the file at once, and checks that Ray and Python agree."""
    from heliostat.lifecycle import Lifecycle

    spec = read_config({"on": on}, path).spec
    host = Lifecycle().host_for(spec.sites.get(spec.on, {}))
    places = environment.places(spec, host)
    if dry_run:
        show(out, places)
        return 0
    outcomes = environment.settle(places, out.emit)
    problem = environment.problem(outcomes)
    if out.json:
        more = {"error": problem.fields()} if problem else {}
        out.document({"hosts": [one.to_json() for one in outcomes], **more})
        return problem.exit_code if problem else 0
    rows = [
        (one.name, one.python or "-", one.ray or "-", "failed" if one.error else one.words)
        for one in outcomes
    ]
    out.say(table(rows, ("HOST", "PYTHON", "RAY", "DONE")))
    return out.error(problem) if problem else 0


def show(out: Output, places: Sequence[Place]) -> None:
    """What would be sent where, and be run there."""
    hosts = []
    for place in places:
        environment.check(place.environment)
        asked = environment.request(place)
        sent = environment.files(place, asked)
        script = sent["setup.sh"].decode()
        if out.json:
            sizes = {name: len(data) for name, data in sent.items()}
            hosts.append({"name": place.name, "files": sizes, "script": script, "request": asked})
            continue
        heavy = [len(data) for name, data in sent.items() if name.startswith("wheels/")]
        names = [name for name in sent if not name.startswith("wheels/")]
        if heavy:
            names.append(f"{count(len(heavy), 'wheel')} where needed ({format_bytes(sum(heavy))})")
        out.data(
            f"# {place.name}{' over ssh' if place.is_far else ''}: gets {', '.join(names)}; runs setup.sh:"
        )
        out.data("".join(f"    {line}\n" for line in script.splitlines()))
        out.data(f"# with request.json: {json.dumps(asked)}")
    if out.json:
        out.document({"hosts": hosts})
