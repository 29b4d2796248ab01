"""The partitions of a Slurm cluster and their limits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from heliostat.backends.slurm.options import partition_option
from heliostat.common.documents import JsonMapping, JsonObject
from heliostat.common.errors import Code, UsageError
from heliostat.common.units import count, format_duration

if TYPE_CHECKING:
    from heliostat.backends.base import LaunchRequest


def parse_partitions(text: str) -> dict[str, JsonObject]:
    """{name: {"default", "up", "time_s", "nodes", "most": nodes per job, "kinds": node configurations}} from sinfo's output.

    sinfo prints one line per partition and node configuration."""
    found: dict[str, JsonObject] = {}
    for line in text.splitlines():
        fields = line.strip().split("|")
        if len(fields) != 8:
            continue
        name, up, limit, nodes, cpus, memory, gres, sizes = fields
        most = sizes.rpartition("-")[2]
        node_kind = f"{nodes} x {cpus} CPUs, {memory} MB" + (
            f", {gres}" if gres not in ("(null)", "") else ""
        )
        entry = found.setdefault(
            name.rstrip("*"),
            {
                "default": name.endswith("*"),
                "up": up == "up",
                "time_s": _parse_limit(limit),
                "nodes": 0,
                "most": int(most) if most.isdigit() else None,
                "kinds": [],
            },
        )
        entry["nodes"] += int(nodes) if nodes.isdigit() else 0
        entry["kinds"].append(node_kind)
    return found


def _parse_limit(text: str) -> int | None:
    from heliostat.common.units import parse_duration

    try:
        return parse_duration(text)
    except ValueError:
        return None  # infinite


def check_fits(request: LaunchRequest, limit: int | None) -> int | None:
    """Raise UsageError if the partition can never run the request. Returns its time limit in seconds, if it has one."""
    partitions = request.facts.get("partitions")
    if not partitions:
        return None
    wanted = partition_option(request.options) or request.facts.get("partition")
    if wanted is None:
        wanted = next((name for name, entry in partitions.items() if entry["default"]), None)
    if wanted is None or "," in wanted:
        return None
    if wanted not in partitions:
        raise UsageError(
            f"there is no partition `{wanted}`",
            cause=f"available partitions: {', '.join(partitions)}",
            code=Code.SLURM_INVALID_PARTITION,
        )
    partition, nodes = partitions[wanted], len(request.members)
    most = _nodes_per_job(partition)
    large_enough = [name for name, e in partitions.items() if e["up"] and _nodes_per_job(e) >= nodes]
    if not partition["up"]:
        raise UsageError(
            f"the partition `{wanted}` is down",
            hint=f"partitions that are up: {', '.join(large_enough)}",
            code=Code.SLURM_PARTITION_DOWN,
        )
    if nodes > most:
        limits = f"has {count(most, 'node')}"
        if most != partition["nodes"]:
            limits = f"allows {count(most, 'node')} per job"
        raise UsageError(
            f"the partition `{wanted}` {limits}, {nodes} are requested",
            cause="; ".join(partition["kinds"]),
            hint=f"--nodes {most}" + (f", or --partition={large_enough[0]}" if large_enough else ""),
            code=Code.SLURM_NODE_COUNT,
        )
    most_s: int | None = partition["time_s"]
    if limit is not None and most_s is not None and limit > most_s:
        longer = [name for name in large_enough if (partitions[name]["time_s"] or limit) >= limit]
        raise UsageError(
            f"the partition `{wanted}` allows jobs of at most {format_duration(most_s)}",
            cause=f"{format_duration(limit)} are requested",
            hint=f"--time {most_s // 60}m" + (f", or --partition={longer[0]}" if longer else ""),
            code=Code.SLURM_TIME_LIMIT,
        )
    return most_s


def _nodes_per_job(partition: JsonMapping) -> int:
    """How many nodes of the partition one job can have."""
    nodes, most = int(partition["nodes"]), partition["most"]
    return nodes if most is None else min(nodes, most)
