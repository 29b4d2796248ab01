"""`heliostat down`"""

from __future__ import annotations

from pathlib import Path

import click

from heliostat.cli.options import CLUSTER, common
from heliostat.cli.output import Output
from heliostat.cluster.manager import ClusterManager
from heliostat.common.errors import Code, HeliostatError, NotFoundError, PartialFailure, UsageError
from heliostat.common.units import count


@click.command()
@click.argument("clusters", type=CLUSTER, nargs=-1)
@click.option(
    "--on", "backend", metavar="SITE", help="clusters are named by their files; found on the site's machines"
)
@click.option("--all", "every", is_flag=True, help="all my clusters")
@click.option("--keep", is_flag=True, help="put it away where the site can; `up` brings it back")
@click.option("--now", is_flag=True, help="kill at once, without time to save anything")
@click.option("--dry-run", is_flag=True, help="say what would be stopped, stop nothing")
@common
@click.pass_obj
def command(
    out: Output,
    /,
    clusters: tuple[str, ...],
    backend: str | None,
    every: bool,
    keep: bool,
    now: bool,
    dry_run: bool,
) -> None:
    """Ends exactly these clusters, verifies that nothing is left, and says what it removed.

    `down --on ssh lab.yaml` ends one whose record is not on this machine."""
    manager = ClusterManager(emit=out.emit)
    if keep and now:
        raise UsageError("`--keep` and `--now` exclude each other", hint="keep one of them")
    if backend:
        clusters = tuple(find(manager, file, backend) for file in clusters)
    names = manager.store.names() if every else list(dict.fromkeys(clusters))
    if not names and not every:
        raise UsageError(
            "which cluster?",
            cause=f"clusters here: {', '.join(manager.store.names()) or 'none'}",
            hint="heliostat down NAME",
        )
    if dry_run:
        return show_dry(out, manager, names)
    done, failed = [], []
    for name in names:
        try:
            found = manager.store.find(name)
            before = len(found.record().nodes) if found else 0  # what has joined is forgotten when it ends
            if keep:
                done.append({"name": manager.suspend(name).record.name, "kept": True})
                out.say(f"`{name}` is put away; heliostat up brings it back")
                continue
            record = manager.down(name, now=now).record
            nodes = max(before, len(record.nodes))
            done.append({"name": record.name, "nodes": nodes, "was_up": found is not None})
            out.say(
                f"`{record.name}` is down: {count(nodes, 'node')} ended"
                if found
                else f"`{record.name}` had ended already"
            )
        except HeliostatError as error:
            if len(names) == 1:
                raise
            failed.append((name, error))
            out.error(error) if not out.json else None
    if out.json and not failed:
        return out.document({"down": done})
    if failed:
        raise PartialFailure(
            f"{len(failed)} of {len(names)} clusters could not be ended",
            cause="; ".join(f"{name}: {error.message}" for name, error in failed),
            hint=f"heliostat doctor {failed[0][0]}",
            exit_code=3 if done else failed[0][1].exit_code,
        )
    if not names:
        out.say("no clusters")


def find(manager: ClusterManager, file: str, backend: str) -> str:
    """The name of the cluster that this file describes; what runs of it without a record here is taken over."""
    from heliostat.cli.options import read_config

    spec = read_config({"on": backend}, Path(file)).spec
    name = spec.cluster_name
    if (
        manager.store.find(name) is None
        and manager.adopt(spec) is None
        and manager.store.last_archived(name) is None
    ):
        raise NotFoundError(
            f"no cluster `{name}` runs on the machines of `{file}`",
            hint="heliostat ls --all",
            code=Code.NOT_FOUND_CLUSTER,
        )
    return name


def show_dry(out: Output, manager: ClusterManager, names: list[str]) -> None:
    views = [manager.find(name) for name in names]
    if out.json:
        return out.document(
            {
                "down": [
                    {"name": v.record.name, "native_ids": [h["native_id"] for h in v.record.handles]}
                    for v in views
                ]
            }
        )
    for view in views:
        for handle in view.record.handles:
            out.data(f"# stops {', '.join(handle['nodes'])} of `{view.record.name}`: {handle['native_id']}")
