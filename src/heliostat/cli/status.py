"""`heliostat status`"""

from __future__ import annotations

import time
from collections.abc import Callable

import click

from heliostat.cli.help import Command
from heliostat.cli.names import cluster_argument
from heliostat.cli.options import common
from heliostat.cli.output import Output, ago, table
from heliostat.cluster.manager import ClusterManager
from heliostat.common.documents import ClusterStatus, GpuStatus, NodeStatus
from heliostat.common.units import format_bytes, format_duration


@click.command(cls=Command)
@cluster_argument()
@click.option("--watch", is_flag=True, help="refresh every two seconds, until Ctrl-C")
@common
@click.pass_obj
def command(out: Output, /, cluster: str, watch: bool) -> None:
    """Show the state, resources (used/total) and GPUs of each node, jobs, remaining time and idle time."""
    manager = ClusterManager()
    if watch and not out.json:
        return show_updates(manager, cluster, out)
    document = manager.status(cluster)
    out.document(document) if out.json else out.data(render(document, out))


def render(status: ClusterStatus, out: Output) -> str:
    lines = [headline(status)]
    if status["problem"]:
        lines.append(f"warning: {status['problem']}")
    if status.get("remedy"):
        lines.append(f"hint: {status['remedy'].rstrip()}")
    rows = [
        (n["name"], n["role"], n["state"].lower(), n["ip"] or "-", *_resources(n), n["reason"] or "")
        for n in status["nodes"]
    ]
    lines += [
        "",
        table(rows, ("NODE", "ROLE", "STATE", "IP", "CPU", "GPU", "MEMORY", "OBJECT STORE", "REASON")),
    ]
    gpus = [(n["name"], i, *_gpu(gpu)) for n in status["nodes"] for i, gpu in enumerate(n["gpus"])]
    if gpus:
        lines += ["", table(gpus, ("NODE", "GPU", "MODEL", "UTILIZATION", "MEMORY", "TEMPERATURE"))]
    jobs = [
        (
            j["id"],
            j["status"].lower(),
            "-" if j["seconds"] is None else format_duration(j["seconds"]),
            (j["entrypoint"] or "")[:60],
        )
        for j in status["jobs"]
    ]
    if jobs:
        lines += ["", table(jobs, ("JOB", "STATUS", "RAN", "COMMAND"))]
    return "\n".join(lines)


def headline(status: ClusterStatus) -> str:
    parts = [f"{status['name']} on {status['backend']}: {status['state']}", f"up {ago(status['started'])}"]
    if status["ray_version"]:
        parts.append(f"Ray {status['ray_version']} at {status['address']}")
    if status["time_left_s"] is not None:
        parts.append(f"{format_duration(max(0, status['time_left_s']))} left")
    if status["idle_s"] is not None and status["idle_s"] >= 1:
        parts.append(f"idle for {format_duration(status['idle_s'])}")
    return ", ".join(parts)


def _resources(node: NodeStatus) -> tuple[str, str, str, str]:
    """used/total of CPU, GPU, memory and object store."""

    def pair(name: str, format_amount: Callable[[float], str]) -> str:
        amounts = node["resources"].get(name)
        return f"{format_amount(amounts[0])}/{format_amount(amounts[1])}" if amounts else "-"

    def number(value: float) -> str:
        return f"{value:g}"

    def size(value: float) -> str:
        return format_bytes(value).replace(" ", "")

    return pair("CPU", number), pair("GPU", number), pair("memory", size), pair("object_store_memory", size)


def _gpu(gpu: GpuStatus) -> tuple[str, str, str, str]:
    def format_value(value: float | None, unit: str) -> str:
        return "-" if value is None else f"{value:g} {unit}"

    memory = "-" if gpu["memory_total"] is None else f"{gpu['memory_used']}/{gpu['memory_total']} MiB"
    return (
        gpu["name"] or "-",
        format_value(gpu["utilization"], "%"),
        memory,
        format_value(gpu["temperature"], "°C"),
    )


def show_updates(manager: ClusterManager, name: str, out: Output) -> None:
    """Refreshes the status in place on a terminal; elsewhere prints one after the other."""
    import sys

    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    if not sys.stdout.isatty():
        while True:
            out.data(render(manager.status(name), out) + "\n")
            time.sleep(2)
    with Live(console=Console(), screen=True, auto_refresh=False) as live:
        while True:
            live.update(Text(out.escape(render(manager.status(name), out))), refresh=True)
            time.sleep(2)
