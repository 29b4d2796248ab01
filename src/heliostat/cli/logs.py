"""`heliostat logs`"""

from __future__ import annotations

import json
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import click

from heliostat import backends
from heliostat.cli.options import CLUSTER, common
from heliostat.cli.output import Output
from heliostat.errors import NotFoundError
from heliostat.jobs import Jobs
from heliostat.lifecycle import Lifecycle
from heliostat.store import ClusterFolder


@click.command()
@click.argument("cluster", type=CLUSTER)
@click.argument("what", metavar="[JOB|NODE]", required=False)
@click.option("-f", "--follow", is_flag=True, help="go on as it grows")
@common
@click.pass_obj
def command(out: Output, /, cluster: str, what: str | None, follow: bool) -> int | None:
    """Shows the output of a job, the agent and Ray logs of a node, or, with neither, the events of the cluster.

    The logs of an ended cluster are kept and shown too."""
    life = Lifecycle()
    folder = life.store.find(cluster) or life.store.last_past(cluster) or life.store.open(cluster)
    record = folder.record()
    life.refresh(folder, what if what in record.nodes else None)
    if what is None:
        show_events(out, folder, follow)
        return None
    ours = backends.load(record.site).starts_ray or folder.path.parent == life.store.ended
    if ours and ((folder.logs / f"{what}.out").exists() or (record.command and what == "run")):
        if follow:
            Jobs(life).follow(folder, out.raw, what)
            return None
        for stream in ("out", "err"):
            copy(out, stream, folder.logs / f"{what}.{stream}")
        return None
    if what in record.nodes or (folder.logs / what).is_dir():
        show_node(out, life, folder, what, follow)
        return None
    if folder.path.parent == life.store.ended:
        kept = sorted(folder.logs.glob(f"*/job-driver-{what}.log"))
        if not kept:
            raise NotFoundError(
                f"there is no job or node `{what}` in what is kept of `{cluster}`", saw=str(folder.logs)
            )
        copy(out, "out", kept[0])
        return None
    for chunk in life.api(life.look(folder)).output(what, follow=follow):
        out.raw("out", chunk)
    return None


def copy(out: Output, stream: str, path: Path) -> None:
    try:
        with open(path, "rb") as source:
            while chunk := source.read(1 << 20):
                out.raw(stream, chunk)
    except FileNotFoundError:
        pass


def show_events(out: Output, folder: ClusterFolder, follow: bool) -> None:
    if out.json and not follow:
        return out.document({"cluster": folder.record().name, "events": list(folder.events())})
    shown = 0
    while True:
        events = list(folder.events())
        for event in events[shown:]:
            out.data(json.dumps(event)) if out.json else out.data(event_line(event))
        shown = len(events)
        if not follow or not folder.path.exists():
            return
        time.sleep(0.5)


def event_line(event: dict[str, Any]) -> str:
    when = datetime.fromtimestamp(event["at"]).isoformat(sep=" ", timespec="milliseconds")
    if event.get("kind") == "move":
        reason = f"  ({event['reason']})" if event.get("reason") else ""
        return f"{when}  {event['node']}: {event['from']} -> {event['to']}{reason}"
    return f"{when}  {event.get('text', '')}"


def show_node(out: Output, life: Lifecycle, folder: ClusterFolder, node: str, follow: bool) -> None:
    """The agent's log, `ray start`'s, and Ray's own that were kept; each under its name."""
    sizes: dict[Path, int] = {}
    last = b"\n"
    while True:
        for path in sorted(p for p in (folder.logs / node).glob("*") if p.is_file()):
            size = path.stat().st_size
            if size <= sizes.get(path, 0):
                continue
            out.raw("out", b"" if last.endswith(b"\n") else b"\n")
            out.raw("out", f"==> {path.name} <==\n".encode())
            with open(path, "rb") as stream:
                stream.seek(sizes.get(path, 0))
                while chunk := stream.read(1 << 20):
                    out.raw("out", last := chunk)
            sizes[path] = size
        if not follow or not folder.path.exists():
            return
        time.sleep(0.5)
        life.refresh(folder, node)
