"""`heliostat up`"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from heliostat import backends
from heliostat.cli.native import BackendCommand
from heliostat.cli.options import cluster_options, common, read_config, refuse_wait_timeout, wait_timeout
from heliostat.cli.output import Output, table
from heliostat.cluster.manager import ClusterManager
from heliostat.common.errors import PartialFailure, StillStarting, UsageError
from heliostat.common.units import count, format_bytes
from heliostat.state.states import NodeState

if TYPE_CHECKING:
    from heliostat.cluster.view import View


@click.command(cls=BackendCommand)
@click.argument("path", metavar="[FILE]", required=False, type=click.Path(path_type=Path, readable=False))
@click.option("--no-wait", is_flag=True, help="return once it is asked for")
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
    """Starts a cluster and returns when it is ready. Prints the Ray address."""
    if path and file:
        raise UsageError(f"two files are given: `{path}` and `{file}`", hint="keep one of them")
    if no_wait:
        refuse_wait_timeout(wait_timeout, "--no-wait", "`up --no-wait` waits for nothing")
    config = read_config(values, path or file)
    manager = ClusterManager(emit=out.emit)
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
            machines(out, manager.find(name))
        raise
    if out.json:
        return out.document(summary(view))
    if no_wait:
        return out.say(f"`{name}` is asked for; heliostat status {name}")
    if was_ready:
        out.say(f"`{name}` is up already, with {count(view.alive(), 'node')}")
    else:
        banner(out, view)
    out.data(view.address or "")


def summary(view: View) -> dict[str, Any]:
    connection = view.folder.connection() or {}
    return {
        "name": view.record.name,
        "backend": view.record.backend,
        "state": str(view.state),
        "address": view.address,
        "dashboard_port": connection.get("dashboard_port"),
        "nodes": len(view.record.nodes),
        "alive": view.alive(),
        "folder": str(view.folder.path),
    }


def machines(out: Output, view: View) -> None:
    """Where the machines are the person's own: what each brings, or why it is not there."""
    if not view.record.spec.get("hosts"):
        return
    rows, cpus, gpus, memory = [], 0, 0, 0
    for node in view.record.nodes.values():
        told: dict[str, Any] = (view.live.get("nodes") or {}).get(node.name) or {}
        there = node.state is NodeState.READY
        size = (told.get("resources") or {}) if there else {}
        cards = (told.get("gpus") or []) if there else []
        kinds = Counter((card["name"], card["memory"]) for card in cards)
        words = [f"{n} × {name} {format_bytes(each)}" for (name, each), n in kinds.items()]
        cpus, gpus = cpus + (size.get("cpus") or 0), gpus + (size.get("gpus") or 0)
        memory += sum(card["memory"] for card in cards)
        rows.append(
            (
                node.name,
                node.role,
                str(node.state).lower(),
                told.get("ip") or "-",
                size.get("cpus", "-"),
                ", ".join(words) or size.get("gpus", "-"),
                node.reason,
            )
        )
    out.say(table(rows, ("HOST", "ROLE", "STATE", "IP", "CPUS", "GPUS", "WHY")))
    cards_in_all = f"{count(gpus, 'GPU')} with {format_bytes(memory)}" if memory else count(gpus, "GPU")
    out.say(f"{view.alive()} of {count(len(rows), 'machine')}: {count(cpus, 'CPU')}, {cards_in_all}")


def banner(out: Output, view: View) -> None:
    """What next, in commands that work as they stand."""
    name = view.record.name
    machines(out, view)
    out.say(f"`{name}` is {out.state(str(view.state))}: {count(view.alive(), 'node')}")
    # a driver must be on a node: from elsewhere work goes there as a job
    apart = view.record.remote_dir or not backends.load(view.record.backend).shares_files
    here = [] if apart else [("use it here", f'eval "$(heliostat env {name})"')]
    for what, line in (
        ("run a job", f"heliostat submit {name} --wait -- python script.py"),
        *here,
        ("dashboard", f"heliostat dashboard {name}"),
        ("give it back", f"heliostat down {name}"),
    ):
        out.say(f"  {what + ':':<13} {line}")
