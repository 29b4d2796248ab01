"""`heliostat completion`"""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from heliostat.cli.help import Command
from heliostat.cli.options import common
from heliostat.cli.output import Output


@click.command(cls=Command)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@common
@click.pass_obj
def command(out: Output, /, shell: str) -> None:
    """Print the shell completion script. Usage: eval "$(heliostat completion bash)"."""
    from heliostat.cli.app import cli

    found = get_completion_class(shell)
    assert found is not None
    script = found(cli, {}, "heliostat", "_HELIOSTAT_COMPLETE").source()
    out.document({"shell": shell, "script": script}) if out.json else out.exact(script)
