"""`heliostat logs`"""

from __future__ import annotations

import codecs
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import click

from heliostat import backends
from heliostat.cli.options import CLUSTER, common
from heliostat.cli.output import Output, as_json
from heliostat.cluster.manager import ClusterManager
from heliostat.common.errors import Code, NotFoundError, printable
from heliostat.remote.job_output import JobOutput
from heliostat.state.store import ClusterDirectory


@click.command()
@click.argument("cluster", type=CLUSTER)
@click.argument("what", metavar="[JOB|NODE]", required=False)
@click.option("-f", "--follow", is_flag=True, help="go on as it grows")
@common
@click.pass_obj
def command(out: Output, /, cluster: str, what: str | None, follow: bool) -> int | None:
    """Shows the output of a job, the agent and Ray logs of a node, or, with neither, the events of the cluster.

    The logs of an ended cluster are kept and shown too."""
    manager = ClusterManager()
    folder = (
        manager.store.find(cluster) or manager.store.last_archived(cluster) or manager.store.open(cluster)
    )
    record = folder.record()
    manager.refresh(folder, what if what in record.nodes else None)
    if what is None:
        show_events(out, folder, follow)
        return None
    refusal = manager.refusal(folder, record) if what in record.nodes else None
    if refusal and follow:
        raise refusal
    with Sink(out, record.name, what, follow) as sink:
        show(sink, manager, folder, what)
    if refusal:  # what is kept here is shown, and is not all
        raise refusal
    return None


class Sink:
    """Where what was written goes: as it is; with --json into one document or, followed, a line for each piece."""

    def __init__(self, out: Output, cluster: str, what: str, follow: bool) -> None:
        self.out, self.follow = out, follow
        self._of = {"cluster": cluster, "of": what}
        self._texts: dict[str, str] = {}
        self._decoders: dict[str, codecs.IncrementalDecoder] = {}
        self._file, self._last = "", b"\n"

    def stream(self, stream: str, chunk: bytes) -> None:
        """Of a job: `out` or `err`."""
        self._keep(stream, chunk) if self.out.json else self.out.raw(stream, chunk)

    def file(self, name: str, chunk: bytes) -> None:
        """Of a node, each under its name."""
        if self.out.json:
            return self._keep(name, chunk)
        if name != self._file:
            self.out.raw("out", b"" if self._last.endswith(b"\n") else b"\n")
            self.out.raw("out", f"==> {printable(name)} <==\n".encode())
        self._file, self._last = name, chunk
        self.out.raw("out", chunk)

    def _keep(self, name: str, chunk: bytes) -> None:
        if name not in self._decoders:  # a piece may end inside a character
            self._decoders[name] = codecs.getincrementaldecoder("utf-8")(errors="replace")
        text = self._decoders[name].decode(chunk)
        if self.follow:
            self.out.data(as_json({**self._of, "log": name, "text": text}))
        else:
            self._texts[name] = self._texts.get(name, "") + text

    def __enter__(self) -> Sink:
        return self

    def __exit__(self, failed: object, *_: object) -> None:
        if self.out.json and not self.follow and not failed:
            self.out.document({**self._of, "logs": self._texts})


def show(sink: Sink, manager: ClusterManager, folder: ClusterDirectory, what: str) -> None:
    record, ended = folder.record(), folder.path.parent == manager.store.ended
    ours = backends.load(record.backend).starts_ray or ended
    if ours and ((folder.logs / f"{what}.out").exists() or (record.command and what == "run")):
        if sink.follow:
            manager.follow(folder, sink.stream, what)
            return
        for stream in ("out", "err"):
            copy(sink, stream, folder.logs / f"{what}.{stream}")
    elif what in record.nodes or (folder.logs / what).is_dir():
        show_node(sink, manager, folder, what)
    elif ended:
        kept = sorted(folder.logs.glob(f"*/job-driver-{what}.log"))
        if not kept:
            gone = "" if folder.logs.exists() else "its logs were removed: the history has a size limit"
            raise NotFoundError(
                f"there is no job or node `{what}` in what is kept of `{record.name}`",
                cause=gone,
                details=str(folder.logs),
                code=Code.NOT_FOUND_JOB,
            )
        ran = next((job.get("ran") for job in record.jobs if job["id"] == what), None)
        copy(sink, "out", kept[0], JobOutput(what, ran))
    else:
        try:
            for chunk in manager.ray_api(manager.observe(folder)).output(what, follow=sink.follow):
                sink.stream("out", chunk)
        except NotFoundError:
            raise NotFoundError(
                f"there is no job or node `{what}` on `{record.name}`",
                cause=f"its nodes: {', '.join(record.nodes)}",
                hint=f"heliostat jobs {record.name}",
                code=Code.NOT_FOUND_JOB,
            ) from None


def copy(sink: Sink, stream: str, path: Path, own: JobOutput | None = None) -> None:
    try:
        with open(path, "rb") as source:
            while chunk := source.read(1 << 20):
                sink.stream(stream, own.feed(chunk) if own else chunk)
        if own:
            sink.stream(stream, own.close())
    except FileNotFoundError:
        pass


def show_events(out: Output, folder: ClusterDirectory, follow: bool) -> None:
    if out.json and not follow:
        return out.document({"cluster": folder.record().name, "events": list(folder.events())})
    shown = 0
    while True:
        events = list(folder.events())
        for event in events[shown:]:
            out.data(as_json(event)) if out.json else out.data(event_line(event))
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


def show_node(sink: Sink, manager: ClusterManager, folder: ClusterDirectory, node: str) -> None:
    """The agent's log, `ray start`'s, and Ray's own that were kept."""
    sizes: dict[Path, int] = {}
    while True:
        for path in sorted(p for p in (folder.logs / node).glob("*") if p.is_file()):
            size = path.stat().st_size
            if size <= sizes.get(path, 0):
                continue
            with open(path, "rb") as stream:
                stream.seek(sizes.get(path, 0))
                while chunk := stream.read(1 << 20):
                    sink.file(path.name, chunk)
            sizes[path] = size
        if not sink.follow or not folder.path.exists():
            return
        time.sleep(0.5)
        manager.refresh(folder, node)
