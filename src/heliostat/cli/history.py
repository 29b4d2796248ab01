"""`heliostat history`"""

from __future__ import annotations

import csv
import io
from datetime import datetime
from pathlib import Path

import click

from heliostat.cli.help import Command
from heliostat.cli.options import common, refuse_options
from heliostat.cli.output import Output, table
from heliostat.cluster.accounting import cost_of
from heliostat.cluster.manager import ClusterManager
from heliostat.common.documents import HistoryRow, JobRecord
from heliostat.common.errors import DiskError, UsageError, disk_code
from heliostat.common.units import count, format_bytes, format_duration, parse_bytes, parse_duration
from heliostat.state.records import Record

COLUMNS = (
    "name",
    "kind",
    "what",
    "backend",
    "nodes",
    "started",
    "waited_s",
    "ran_s",
    "node_hours",
    "cost",
    "exit_code",
    "why",
)


@click.command(cls=Command)
@click.option("--csv", "path", type=click.Path(path_type=Path), help="write CSV to this file; `-` for stdout")
@click.option(
    "--prune", is_flag=True, help="remove the oldest logs of terminated clusters beyond the size limit"
)
@click.option(
    "--older-than",
    metavar="TIME",
    help="with --prune: also remove logs of clusters that ended before, e.g. 30d",
)
@click.option("--max-size", metavar="SIZE", help="with --prune: size limit [HELIOSTAT_HISTORY_SIZE, else 1G]")
@click.option("--dry-run", is_flag=True, help="with --prune: print what would be removed without removing it")
@common
@click.pass_obj
def command(
    out: Output,
    /,
    path: Path | None,
    prune: bool,
    older_than: str | None,
    max_size: str | None,
    dry_run: bool,
) -> None:
    """List all clusters and jobs with command, backend, waiting time, run time, node-hours and exit code.

    Logs of terminated clusters are kept up to a size limit; then the oldest are removed. Their rows stay."""
    if prune:
        if path is not None:
            raise UsageError("`--prune` and `--csv` exclude each other", hint="heliostat history --prune")
        return prune_logs(out, older_than, max_size, dry_run)
    refuse_options(
        {"older_than": older_than, "max_size": max_size, "dry_run": dry_run},
        "`history` without `--prune`",
        "the option applies to `--prune`",
        "heliostat history --prune",
    )
    manager = ClusterManager()
    rows = [row for record in sorted(manager.history(), key=lambda r: r.created) for row in make_rows(record)]
    if path is not None:
        return write_csv(out, rows, path)
    if out.json:
        return out.document({"history": rows})
    if not rows:
        return out.info("no clusters yet")
    has_cost = any(row["cost"] is not None for row in rows)
    cells = [
        (r["name"], r["what"][:40], r["backend"], r["nodes"], r["started"][:16].replace("T", " "), _duration(r["waited_s"]),
         _duration(r["ran_s"]), _decimal(r["node_hours"]), *((_decimal(r["cost"]),) if has_cost else ()),
         "-" if r["exit_code"] is None else r["exit_code"], r["why"][:40])
        for r in rows
    ]  # fmt: skip
    cost = ("COST",) if has_cost else ()
    columns = (
        "NAME",
        "COMMAND",
        "BACKEND",
        "NODES",
        "STARTED",
        "WAITED",
        "RAN",
        "NODE-H",
        *cost,
        "EXIT",
        "REASON",
    )
    out.data(table(cells, columns))


def prune_logs(out: Output, older_than: str | None, max_size: str | None, dry_run: bool) -> None:
    import time

    from heliostat.state import retention

    try:
        limit = retention.limit_bytes() if max_size is None else parse_bytes(max_size)
        age = None if older_than is None else float(parse_duration(older_than))
    except ValueError as error:
        raise UsageError(
            str(error), hint="heliostat history --prune --older-than 30d --max-size 500M"
        ) from None
    clusters = retention.ended_clusters(ClusterManager().store)
    chosen = retention.choose(clusters, limit, age, time.time())
    used, freed = sum(one.size_bytes for one in clusters), sum(one.size_bytes for one in chosen)
    freed = freed if dry_run else retention.prune(chosen)
    names = [one.folder.path.name for one in chosen]
    if out.json:
        return out.document(
            {"pruned": names, "freed_bytes": freed, "used_bytes": used - freed, "limit_bytes": limit, "dry_run": dry_run}
        )  # fmt: skip
    for name in names:
        out.data(name)
    action = "would remove" if dry_run else "removed"
    out.info(
        f"{action} the logs of {count(len(names), 'cluster')}, {format_bytes(freed)}; {format_bytes(used - freed)} of "
        f"{format_bytes(limit)} are used"
    )


def _duration(seconds: float | None) -> str:
    return "-" if seconds is None else format_duration(seconds)


def _decimal(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def make_rows(record: Record) -> list[HistoryRow]:
    """The row of the cluster, then the rows of its joins and jobs."""
    # never negative, even if the clock was set back
    waited = max(0.0, record.ready - record.created) if record.ready else None
    ran = max(0.0, record.ended - record.ready) if record.ready and record.ended else None
    title = record.command["text"] if record.command else "cluster"
    joins = {job["id"] for job in record.jobs if "nodes" in job}
    groups = [node.group for node in record.nodes.values() if node.joined not in joins]
    nodes = len(groups)
    node_hours = round(ran * nodes / 3600, 4) if ran is not None else None
    rows: list[HistoryRow] = [
        {
            "name": record.name,
            "kind": record.kind,
            "what": title,
            "backend": record.backend,
            "nodes": nodes,
            "started": _format_time(record.created),
            "waited_s": _round(waited),
            "ran_s": _round(ran),
            "node_hours": node_hours,
            "cost": cost_of(record, node_hours, groups),
            "exit_code": record.exit_code,
            "why": record.reason,
        }
    ]
    for job in record.jobs:
        if job["id"] in joins:
            rows.append(_make_join_row(record, job))
            continue
        rows.append(
            {
                "name": f"{record.name}/{job['id']}",
                "kind": "job",
                "what": job["entrypoint"],
                "backend": record.backend,
                "nodes": len(record.nodes),
                "started": _format_time(job["submitted"]),
                "waited_s": None,
                "ran_s": job.get("seconds"),
                "node_hours": None,
                "cost": None,
                "exit_code": job.get("exit_code"),
                "why": (job.get("status") or "").lower(),
            }
        )
    return rows


def _make_join_row(record: Record, join: JobRecord) -> HistoryRow:
    ready, node_seconds = join.get("ready"), join.get("node_seconds")
    node_hours = None if node_seconds is None else round(node_seconds / 3600, 4)
    ran = max(0.0, join["ended"] - ready) if ready and join.get("ended") else None
    return {
        "name": f"{record.name}/{join['id']}",
        "kind": "join",
        "what": join["entrypoint"] or "join",
        "backend": record.backend,
        "nodes": join["nodes"],
        "started": _format_time(join["submitted"]),
        "waited_s": _round(max(0.0, ready - join["submitted"])) if ready else None,
        "ran_s": _round(ran if join.get("seconds") is None else join["seconds"]),
        "node_hours": node_hours,
        "cost": cost_of(record, node_hours, [None]),
        "exit_code": join.get("exit_code"),
        "why": (join.get("status") or "").lower(),
    }


def _format_time(timestamp: float) -> str:
    return datetime.fromtimestamp(timestamp).astimezone().isoformat(timespec="seconds")


def _round(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 1)


def write_csv(out: Output, rows: list[HistoryRow], path: Path) -> None:
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS)
    writer.writeheader()
    writer.writerows(rows)
    if str(path) == "-":
        return out.exact(text.getvalue())
    try:
        path.write_text(text.getvalue(), encoding="utf-8", newline="")
    except OSError as error:
        raise DiskError(
            f"could not write `{path}`", cause=error.strerror or str(error), code=disk_code(error)
        ) from None
    out.document({"csv": str(path), "rows": len(rows)}) if out.json else out.info(
        f"wrote {count(len(rows), 'row')} to {path}"
    )
