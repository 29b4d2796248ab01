"""`heliostat schema`"""

from __future__ import annotations

import json

import click

from heliostat.cli.help import Command
from heliostat.cli.options import common
from heliostat.cli.output import Output


@click.command(cls=Command)
@common
@click.pass_obj
def command(out: Output, /) -> None:
    """Print the JSON Schema of heliostat.yaml, for editors and validators."""
    out.exact(schema_text())


def schema_text() -> str:
    from heliostat import backends
    from heliostat.cluster import planner
    from heliostat.config import loader

    tables = {backend: planner.backend_schema(backend).json_schema() for backend in backends.names()}
    return json.dumps(loader.schema(tables), indent=2)
