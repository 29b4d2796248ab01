"""`heliostat join`"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from heliostat.cli.native import BackendCommand, command_line, native_options
from heliostat.cli.options import (
    CLUSTER,
    cluster_options,
    common,
    read_config,
    refuse_options,
    refuse_wait_timeout,
    wait_timeout,
)
from heliostat.cli.output import Output
from heliostat.cli.run import script_command
from heliostat.cluster.manager import ClusterManager
from heliostat.common.errors import UsageError
from heliostat.common.shell import quote
from heliostat.common.units import count

# of the cluster itself, not of nodes that join it
NOT_FOR_JOINS = ("name", "nodes", "min_nodes", "groups", "time", "head", "hosts", "idle", "autoscale")

# options of the cluster that nodes which join cannot change
OF_THE_CLUSTER = ("on", "name", "min_nodes", "max_nodes", "idle_timeout")


@click.command(cls=BackendCommand)
@click.argument("cluster", type=CLUSTER)
@click.option("--detach", is_flag=True, help="return once it is asked for")
@click.option("--host", "hosts", multiple=True, metavar="HOST", help="a machine over ssh; again for more")
@wait_timeout
@cluster_options
@common
@click.argument("words", metavar="[SCRIPT.py [ARGS…]]", nargs=-1, type=click.UNPROCESSED)
@click.pass_obj
def command(
    out: Output,
    /,
    cluster: str,
    words: tuple[str, ...],
    detach: bool,
    hosts: tuple[str, ...],
    wait_timeout: float | None,
    file: Path | None,
    dry_run: bool,
    **values: Any,
) -> int | None:
    """Adds nodes to a running cluster as a job of their own, or machines over ssh. CLUSTER may be the head's job id.

    With a script: it runs on the first of them when all are there, and they leave when it ends."""
    if detach and not hosts:
        refuse_wait_timeout(wait_timeout, "--detach", "`join --detach` waits for nothing")
    manager = ClusterManager(emit=out.emit)
    record = manager.store.open(cluster).record()
    name = record.name
    work = command_line()
    if hosts:
        refuse_options(
            {**values, "file": file, "detach": detach, "wait_timeout": wait_timeout, "dry_run": dry_run},
            "`--host`",
            "a machine joins as it is, for as long as the cluster lives",
            f"heliostat join {name} --host {hosts[0]}",
        )
        if work or native_options():
            raise UsageError(
                f"`{(native_options() or work)[0]}` cannot be used with `--host`",
                cause="a machine joins without a script",
                hint=f"heliostat join {name} --host {hosts[0]}, then heliostat run --cluster {name} SCRIPT.py",
            )
        add_hosts(out, manager, name, hosts)
        return None
    refuse_options(
        {key: values[key] for key in OF_THE_CLUSTER},
        "`join`",
        f"`{name}` runs on `{record.backend}` already, and has these of its own",
        f"heliostat join {name} --nodes 2",
    )
    argv = script_command(tuple(work)) if work else None
    base = {key: value for key, value in record.spec.items() if key not in NOT_FOR_JOINS}
    config = read_config({**values, "on": record.backend, "name": name}, file, base=base)
    what = {"argv": argv, "cwd": os.getcwd(), "text": quote(argv)} if argv else None
    if dry_run:
        from heliostat.cli.dryrun import show

        show(out, manager, config, what)
        return None
    join_id, code = manager.join(
        name, config.spec, what, out.raw, wait=not detach, wait_timeout_s=wait_timeout
    )
    nodes = count(config.spec.nodes, "node")
    if out.json:
        out.document(
            {
                "cluster": name,
                "join": join_id,
                "nodes": config.spec.nodes,
                "exit_code": code if argv else None,
            }
        )
    elif detach:
        out.data(join_id)
        out.say(f"heliostat logs {name} {join_id} -f") if argv else None
    elif not argv:
        out.say(f"{nodes} joined `{name}` as `{join_id}`")
        out.data(join_id)
    return code


def add_hosts(out: Output, manager: ClusterManager, name: str, hosts: tuple[str, ...]) -> None:
    view = manager.scaling.add_hosts(name, hosts)
    if out.json:
        return out.document({"cluster": name, "hosts": list(hosts), "nodes": len(view.record.nodes)})
    out.say(f"{', '.join(hosts)} joined `{name}`, which has {count(view.alive(), 'node')} now")
