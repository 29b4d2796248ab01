"""`heliostat up`"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from heliostat import backends
from heliostat.agent.protocol import NodeReport
from heliostat.cli.native import BackendCommand
from heliostat.cli.options import cluster_options, common, read_config, refuse_wait_timeout, wait_timeout
from heliostat.cli.output import Output, table
from heliostat.cluster.manager import ClusterManager
from heliostat.common.documents import JsonObject
from heliostat.common.errors import PartialFailure, StillStarting, UsageError
from heliostat.common.units import count, format_bytes
from heliostat.state.states import NodeState

if TYPE_CHECKING:
    from heliostat.cluster.view import View


@click.command(cls=BackendCommand)
@click.argument("path", metavar="[FILE]", required=False, type=click.Path(path_type=Path, readable=False))
@click.option("--no-wait", is_flag=True, help="return as soon as the nodes are requested")
@wait_timeout
@cluster_options
@common
@click.pass_obj
def command(
    out: Output,
    /,
    path: Path | None,
    file: Path | None,
    no_wait: bool,
    wait_timeout: float | None,
    dry_run: bool,
    **values: Any,
) -> None:
    """Start a cluster, wait until it is ready and print its Ray address."""
    if path and file:
        raise UsageError(f"two files are given: `{path}` and `{file}`", hint="use one of them")
    if no_wait:
        refuse_wait_timeout(wait_timeout, "--no-wait", "`up --no-wait` does not wait for nodes")
    config = read_config(values, path or file)
    manager = ClusterManager(emit=out.emit)
    config = manager.declared_environment.apply(config, install=not dry_run)
    config = manager.active_environment.apply(config, Path.cwd())
    if dry_run:
        from heliostat.cli.dryrun import show

        return show(out, manager, config)
    name = config.spec.cluster_name
    known = manager.store.find(name)
    was_ready = known is not None and manager.observe(known).address is not None
    try:
        view = manager.up(config.spec, wait=not no_wait, wait_timeout_s=wait_timeout)
    except (PartialFailure, StillStarting):
        if not out.json:
            show_hosts(out, manager.find(name))
        raise
    if out.json:
        return out.document(summary(view))
    if no_wait:
        return out.info(f"`{name}` is starting; to check it: heliostat status {name}")
    if was_ready:
        out.info(f"`{name}` is already running, with {count(view.alive(), 'node')}")
    else:
        show_next_steps(out, view)
    out.data(view.address or "")


def summary(view: View) -> JsonObject:
    connection = view.folder.connection()
    return {
        "name": view.record.name,
        "backend": view.record.backend,
        "state": str(view.state),
        "address": view.address,
        "dashboard_port": connection["dashboard_port"] if connection else None,
        "nodes": len(view.record.nodes),
        "alive": view.alive(),
        "folder": str(view.folder.path),
    }


def show_hosts(out: Output, view: View) -> None:
    """Prints the resources of each host that the spec lists, or why the host is not ready."""
    if not view.record.spec.get("hosts"):
        return
    rows, cpus, gpus, gpu_memory = [], 0, 0, 0
    for node in view.record.nodes.values():
        status: NodeReport = (view.live.get("nodes") or {}).get(node.name) or {}
        is_ready = node.state is NodeState.READY
        resources = (status.get("resources") or {}) if is_ready else {}
        devices = (status.get("gpus") or []) if is_ready else []
        models = Counter((device["name"], device["memory"]) for device in devices)
        gpu_texts = [f"{n} × {name} {format_bytes(size)}" for (name, size), n in models.items()]
        cpus, gpus = cpus + (resources.get("cpus") or 0), gpus + (resources.get("gpus") or 0)
        gpu_memory += sum(device["memory"] for device in devices)
        rows.append(
            (
                node.name,
                node.role,
                str(node.state).lower(),
                status.get("ip") or "-",
                resources.get("cpus", "-"),
                ", ".join(gpu_texts) or resources.get("gpus", "-"),
                node.reason,
            )
        )
    out.info(table(rows, ("HOST", "ROLE", "STATE", "IP", "CPUS", "GPUS", "REASON")))
    total = count(gpus, "GPU") + (f" with {format_bytes(gpu_memory)}" if gpu_memory else "")
    out.info(f"{view.alive()} of {count(len(rows), 'host')} ready: {count(cpus, 'CPU')}, {total}")


def show_next_steps(out: Output, view: View) -> None:
    """Prints the cluster's state and useful commands."""
    name = view.record.name
    show_hosts(out, view)
    out.info(f"`{name}` is {out.state(str(view.state))}: {count(view.alive(), 'node')}")
    # a driver must run on a node; from another host only jobs can be submitted
    is_remote = view.record.remote_dir or not backends.load(view.record.backend).shares_files
    connect = [] if is_remote else [("connect", f'eval "$(heliostat env {name})"')]
    for purpose, line in (
        ("run a job", f"heliostat submit {name} --wait -- python script.py"),
        *connect,
        ("dashboard", f"heliostat dashboard {name}"),
        ("terminate", f"heliostat down {name}"),
    ):
        out.info(f"  {purpose + ':':<11} {line}")
