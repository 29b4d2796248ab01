"""`heliostat init`"""

from __future__ import annotations

from pathlib import Path

import click

from heliostat.cli.options import common
from heliostat.cli.output import Output
from heliostat.errors import HeliostatError, UsageError


@click.command()
@click.option("--on", metavar="SITE", help="for this site [the most capable that is found]")
@click.option("--force", is_flag=True, help="in place of the file that is there")
@common
@click.pass_obj
def command(out: Output, /, on: str | None, force: bool) -> None:
    """Writes a first heliostat.yaml for what it finds here: a scheduler, a kubeconfig, hosts of ~/.ssh/config, GPUs. Asks no
    other machine."""
    from heliostat import backends, config
    from heliostat.cluster import discovery
    from heliostat.transport import Local

    path = Path.cwd() / config.FILE
    if path.exists() and not force:
        raise UsageError(
            f"there is a `{config.FILE}` here already", saw=str(path), hint="heliostat init --force"
        )
    found = discovery.discover(Local(), Path.home())
    site = discovery.choose(found, on)
    text = discovery.render_spec_file(found, site, path.parent.name)
    try:
        with open(path, "w" if force else "x") as stream:
            stream.write(text)
    except OSError as error:
        raise HeliostatError(f"could not write `{path}`", because=error.strerror or str(error)) from None
    name = config.load(backends.names(), file=path, environ={}).spec.cluster_name
    first = {
        "ssh": ("make Ray ready on every host", "heliostat setup"),
        "kubernetes": ("ask the cluster what you may", "heliostat doctor heliostat.yaml"),
    }
    after = {
        "first": first.get(site, ("check Ray", "heliostat setup")),
        "up": ("start it", "heliostat up"),
        "run": ("or run one script", "heliostat run script.py"),
    }
    if out.json:
        return out.document(
            {
                "file": str(path),
                "site": site,
                "name": name,
                "found": dict(found.available),
                "next": [line for _, line in after.values()],
            }
        )
    for where, words in found.available.items():
        out.say(f"found {where}: {words}")
    out.say(f"wrote {config.FILE} for `{site}`; read it, then:")
    for what, line in after.values():
        out.say(f"  {what + ':':<29} {line}")
    out.data(str(path))
