"""`heliostat init`"""

from __future__ import annotations

from pathlib import Path

import click

from heliostat.cli.help import Command
from heliostat.cli.names import BACKEND
from heliostat.cli.options import common
from heliostat.cli.output import Output
from heliostat.cli.schema import schema_text
from heliostat.common.errors import DiskError, UsageError, disk_code


@click.command(cls=Command)
@click.option("--on", type=BACKEND, help="backend of the file [the most capable one found]")
@click.option("--force", is_flag=True, help="overwrite an existing file")
@common
@click.pass_obj
def command(out: Output, /, on: str | None, force: bool) -> None:
    """Write a heliostat.yaml for what this machine has: a scheduler, a kubeconfig, hosts of ~/.ssh/config, GPUs.

    No other host is contacted."""
    from heliostat import backends
    from heliostat.cluster import discovery
    from heliostat.config import loader
    from heliostat.config.files import FILE, SCHEMA_FILE
    from heliostat.remote.transport import Local

    path = Path.cwd() / FILE
    if path.exists() and not force:
        raise UsageError(f"`{FILE}` exists already", details=str(path), hint="heliostat init --force")
    found = discovery.discover(Local(), Path.home())
    backend = discovery.choose(found, on)
    text = discovery.render_spec_file(found, backend, path.parent.name)
    # beside the file, so that its editor line is right on every computer
    _write(path.parent / SCHEMA_FILE, schema_text() + "\n", overwrite=True)
    _write(path, f"# yaml-language-server: $schema={SCHEMA_FILE}\n{text}", overwrite=force)
    cluster = loader.load(backends, file=path, environ={}).spec.cluster_name
    steps = [
        backends.load(backend).first_step,
        ("start a cluster", "heliostat up"),
        ("or run one script", "heliostat run script.py"),
    ]
    if out.json:
        return out.document(
            {
                "file": str(path),
                "schema_file": str(path.parent / SCHEMA_FILE),
                "backend": backend,
                "name": cluster,
                "found": {name: detected.description for name, detected in found.items()},
                "next": [line for _, line in steps],
            }
        )
    for name, detected in found.items():
        out.info(f"found {name}: {detected.description}")
    out.info(f"wrote {FILE} for `{backend}`; check it, then:")
    for purpose, line in steps:
        out.info(f"  {purpose + ':':<26} {line}")
    out.data(str(path))


def _write(path: Path, text: str, *, overwrite: bool) -> None:
    try:
        with open(path, "w" if overwrite else "x") as stream:
            stream.write(text)
    except OSError as error:
        raise DiskError(
            f"could not write `{path}`", cause=error.strerror or str(error), code=disk_code(error)
        ) from None
