"""`heliostat down`"""

from __future__ import annotations

from pathlib import Path

import click

from heliostat.cli.help import Command
from heliostat.cli.names import BACKEND, CLUSTER, find_only_cluster
from heliostat.cli.options import common
from heliostat.cli.output import Output
from heliostat.cluster.manager import ClusterManager
from heliostat.common.documents import JsonObject
from heliostat.common.errors import Code, HeliostatError, NotFoundError, PartialFailure, UsageError
from heliostat.common.units import count


@click.command(cls=Command)
@click.argument("clusters", type=CLUSTER, nargs=-1)
@click.option(
    "--on",
    "backend",
    type=BACKEND,
    help="treat arguments as spec files and find their clusters on the hosts",
)
@click.option("--all", "every", is_flag=True, help="all your clusters")
@click.option("--keep", is_flag=True, help="suspend the cluster (where supported); `up` resumes it")
@click.option("--now", is_flag=True, help="kill processes at once, without a grace period")
@click.option("--dry-run", is_flag=True, help="print what would be stopped without stopping it")
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
    """Terminate these clusters and verify that nothing of them is left.

    `down --on ssh lab.yaml` terminates a cluster whose record is not on this machine."""
    manager = ClusterManager(emit=out.emit)
    if keep and now:
        raise UsageError("`--keep` and `--now` exclude each other", hint="use one of them")
    if every and clusters:
        raise UsageError("`--all` and names exclude each other", hint="heliostat down --all")
    if backend and not clusters and not every:
        raise UsageError("missing argument `FILE`", hint=f"heliostat down --on {backend} heliostat.yaml")
    if backend:
        clusters = tuple(find_by_file(manager, file, backend) for file in clusters)
    names = manager.store.names() if every else list(dict.fromkeys(clusters))
    if not names and not every:
        names = [find_only_cluster()]
    if dry_run:
        return show_dry_run(out, manager, names)
    done: list[JsonObject] = []
    failed: list[tuple[str, HeliostatError]] = []
    for name in names:
        try:
            done.append(terminate(out, manager, name, keep, now))
        except HeliostatError as error:
            if len(names) == 1:
                raise
            failed.append((name, error))
            out.error(error) if not out.json else None
    if out.json and not failed:
        return out.document({"down": done})
    if failed:
        raise PartialFailure(
            f"{len(failed)} of {len(names)} clusters could not be terminated",
            cause="; ".join(f"{name}: {error.message}" for name, error in failed),
            hint=f"heliostat doctor {failed[0][0]}",
            exit_code=3 if done else failed[0][1].exit_code,
        )
    if not names:
        out.info("no clusters")


def terminate(out: Output, manager: ClusterManager, name: str, keep: bool, now: bool) -> JsonObject:
    """Terminates or suspends one cluster; the JSON row of it."""
    if keep:
        suspended = manager.suspend(name).record.name
        out.info(f"`{name}` is suspended; heliostat up resumes it")
        return {"name": suspended, "kept": True}
    found = manager.store.find(name)
    before = len(found.record().nodes) if found else 0  # termination removes joined nodes from the record
    record = manager.down(name, now=now).record
    nodes = max(before, len(record.nodes))
    out.info(
        f"`{record.name}` is terminated: {count(nodes, 'node')} released"
        if found
        else f"`{record.name}` was already terminated"
    )
    return {"name": record.name, "nodes": nodes, "was_up": found is not None}


def find_by_file(manager: ClusterManager, file: str, backend: str) -> str:
    """The name of the cluster that this spec file describes. Adopts a running cluster without a record."""
    from heliostat.cli.options import read_config

    spec = read_config({"on": backend}, Path(file)).spec
    name = spec.cluster_name
    if (
        manager.store.find(name) is None
        and manager.adopt(spec) is None
        and manager.store.last_archived(name) is None
    ):
        raise NotFoundError(
            f"no cluster `{name}` runs on the hosts of `{file}`",
            hint="heliostat ls --all",
            code=Code.NOT_FOUND_CLUSTER,
        )
    return name


def show_dry_run(out: Output, manager: ClusterManager, names: list[str]) -> None:
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
