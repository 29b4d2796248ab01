"""`heliostat join`"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from heliostat.agent.protocol import CommandConfig
from heliostat.cli.names import cluster_argument
from heliostat.cli.native import BackendCommand, command_line, native_options
from heliostat.cli.options import (
    JOIN_REFUSES,
    common,
    join_options,
    read_config,
    refuse_options,
    refuse_wait_timeout,
    wait_timeout,
)
from heliostat.cli.output import Output
from heliostat.cli.run import script_command
from heliostat.cluster.manager import ClusterManager
from heliostat.common.documents import JsonObject
from heliostat.common.errors import UsageError
from heliostat.common.shell import quote
from heliostat.common.units import count

# keys of the cluster's spec that do not apply to joining nodes
NOT_FOR_JOINS = ("name", "nodes", "min_nodes", "groups", "time", "head", "hosts", "idle", "autoscale")


@click.command(cls=BackendCommand)
@cluster_argument()
@click.option("--detach", is_flag=True, help="return as soon as the nodes are requested")
@click.option("--host", "hosts", multiple=True, metavar="HOST", help="add this ssh host; repeatable")
@wait_timeout
@join_options
@common
@click.argument("arguments", metavar="[SCRIPT.py [ARGS…]]", nargs=-1, type=click.UNPROCESSED)
@click.pass_obj
def command(
    out: Output,
    /,
    cluster: str,
    arguments: tuple[str, ...],
    detach: bool,
    hosts: tuple[str, ...],
    wait_timeout: float | None,
    file: Path | None,
    dry_run: bool,
    **values: Any,
) -> int | None:
    """Add nodes to a running cluster as a separate scheduler job, or ssh hosts. CLUSTER may be the head's job id.

    A script runs on the first new node when all new nodes are ready. They leave when the script ends."""
    if detach and not hosts:
        refuse_wait_timeout(wait_timeout, "--detach", "`join --detach` does not wait for nodes")
    manager = ClusterManager(emit=out.emit)
    record = manager.store.open(cluster).record()
    name = record.name
    if hosts:
        options = {**values, "file": file, "detach": detach, "wait_timeout": wait_timeout, "dry_run": dry_run}
        add_hosts(out, manager, name, hosts, options)
        return None
    refuse_options(
        {key: values[key] for key in JOIN_REFUSES},
        "`join`",
        f"`{name}` runs on `{record.backend}` already; a join cannot change these settings",
        f"heliostat join {name} --nodes 2",
    )
    script = command_line()
    argv = script_command(tuple(script)) if script else None
    base = {key: value for key, value in record.spec.items() if key not in NOT_FOR_JOINS}
    config = read_config({**values, "on": record.backend, "name": name}, file, base=base)
    job: CommandConfig | None = {"argv": argv, "cwd": os.getcwd(), "text": quote(argv)} if argv else None
    if dry_run:
        from heliostat.cli.dryrun import show

        show(out, manager, config, job)
        return None
    join_id, code = manager.join(
        name, config.spec, job, out.raw, wait=not detach, wait_timeout_s=wait_timeout
    )
    nodes = config.spec.nodes
    if out.json:
        exit_code = code if argv else None
        out.document({"cluster": name, "join": join_id, "nodes": nodes, "exit_code": exit_code})
    elif detach:
        out.data(join_id)
        out.info(f"heliostat logs {name} {join_id} -f") if argv else None
    elif not argv:
        out.info(f"{count(nodes, 'node')} joined `{name}` as `{join_id}`")
        out.data(join_id)
    return code


def add_hosts(
    out: Output, manager: ClusterManager, name: str, hosts: tuple[str, ...], options: JsonObject
) -> None:
    """`join --host`: takes no other option, and no script."""
    usage = f"heliostat join {name} --host {hosts[0]}"
    cause = "a host joins with the cluster's settings, for as long as the cluster runs"
    refuse_options(options, "`--host`", cause, usage)
    if extra := native_options() or command_line():
        raise UsageError(
            f"`{extra[0]}` cannot be used with `--host`",
            cause="a host joins without a script",
            hint=f"{usage}, then heliostat run --cluster {name} SCRIPT.py",
        )
    view = manager.scaling.add_hosts(name, hosts)
    if out.json:
        return out.document({"cluster": name, "hosts": list(hosts), "nodes": len(view.record.nodes)})
    out.info(f"{', '.join(hosts)} joined `{name}`, which now has {count(view.alive(), 'node')}")
