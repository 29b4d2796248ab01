"""`heliostat logs`"""

from __future__ import annotations

import codecs
import time
from datetime import datetime
from pathlib import Path

import click

from heliostat import backends
from heliostat.cli.help import Command
from heliostat.cli.names import LOG, cluster_argument
from heliostat.cli.options import common
from heliostat.cli.output import Output, as_json
from heliostat.cluster.manager import ClusterManager
from heliostat.cluster.view import View
from heliostat.common.documents import EventRow
from heliostat.common.errors import Code, NotFoundError, UsageError, printable
from heliostat.remote.job_output import JobOutput
from heliostat.state.store import ClusterDirectory


@click.command(cls=Command)
@cluster_argument(ended=True)
@click.argument("source", metavar="[JOB|NODE]", type=LOG, required=False)
@click.option("-f", "--follow", is_flag=True, help="print new output as it is written")
@click.option(
    "--events", is_flag=True, help="show the events of the cluster: the states of its nodes, and warnings"
)
@common
@click.pass_obj
def command(out: Output, /, cluster: str, source: str | None, follow: bool, events: bool) -> int | None:
    """Show the output of a job or the agent and Ray logs of a node; without either, the output of the latest job.

    A cluster without a job has only events. Works for terminated clusters too, while their logs are kept."""
    if events and source:
        raise UsageError("`--events` takes no job or node", hint=f"heliostat logs {cluster} --events")
    manager = ClusterManager(emit=out.emit) if follow else ClusterManager()
    folder = (
        manager.store.find(cluster) or manager.store.last_archived(cluster) or manager.store.open(cluster)
    )
    record = folder.record()
    manager.refresh(folder, source if source in record.nodes else None)
    if source is None and not events:
        source = manager.jobs.latest(View.read(folder))
        out.info(f"the output of `{source}`:" if source else f"`{record.name}` has no job; its events:")
    if source is None:
        show_events(out, folder, follow)
        return None
    if source not in record.nodes:
        source = manager.jobs.expand_id(record.name, source)
    refusal = manager.refusal(folder, record) if source in record.nodes else None
    if refusal and follow:
        raise refusal
    with Sink(out, record.name, source, follow) as sink:
        show(sink, manager, folder, source)
    if refusal:  # the logs on this machine are printed, but are not complete
        raise refusal
    return None


class Sink:
    """Prints logs unchanged; with --json as one document or, with --follow, one line for each chunk."""

    def __init__(self, out: Output, cluster: str, source: str, follow: bool) -> None:
        self.out, self.follow = out, follow
        self._fields = {"cluster": cluster, "of": source}
        self._texts: dict[str, str] = {}
        self._decoders: dict[str, codecs.IncrementalDecoder] = {}
        self._file, self._last = "", b"\n"

    def stream(self, stream: str, chunk: bytes) -> None:
        """Prints a chunk of a job's output; stream: `out` or `err`."""
        self._print_json(stream, chunk) if self.out.json else self.out.raw(stream, chunk)

    def file(self, name: str, chunk: bytes) -> None:
        """Prints a chunk of a node's log file, under the file's name."""
        if self.out.json:
            return self._print_json(name, chunk)
        if name != self._file:
            self.out.raw("out", b"" if self._last.endswith(b"\n") else b"\n")
            self.out.raw("out", f"==> {printable(name)} <==\n".encode())
        self._file, self._last = name, chunk
        self.out.raw("out", chunk)

    def _print_json(self, name: str, chunk: bytes) -> None:
        """Prints the chunk with --follow; else keeps it for the document."""
        if name not in self._decoders:  # a chunk may end inside a character
            self._decoders[name] = codecs.getincrementaldecoder("utf-8")(errors="replace")
        text = self._decoders[name].decode(chunk)
        if self.follow:
            self.out.data(as_json({**self._fields, "log": name, "text": text}))
        else:
            self._texts[name] = self._texts.get(name, "") + text

    def __enter__(self) -> Sink:
        return self

    def __exit__(self, failed: object, *_: object) -> None:
        if self.out.json and not self.follow and not failed:
            self.out.document({**self._fields, "logs": self._texts})


def show(sink: Sink, manager: ClusterManager, folder: ClusterDirectory, source: str) -> None:
    record, has_ended = folder.record(), folder.path.parent == manager.store.ended
    has_output_files = backends.load(record.backend).starts_ray or has_ended
    is_recorded_job = (folder.logs / f"{source}.out").exists() or (record.command and source == "run")
    if has_output_files and is_recorded_job:
        if sink.follow:
            manager.follow(folder, sink.stream, source)
            return
        for stream in ("out", "err"):
            copy(sink, stream, folder.logs / f"{source}.{stream}")
    elif source in record.nodes or (folder.logs / source).is_dir():
        show_node(sink, manager, folder, source)
    elif has_ended:
        logs = sorted(folder.logs.glob(f"*/job-driver-{source}.log"))
        if not logs:
            pruned = "" if folder.logs.exists() else "the logs were removed: the history has a size limit"
            raise NotFoundError(
                f"the kept logs of `{record.name}` have no job or node `{source}`",
                cause=pruned,
                details=str(folder.logs),
                code=Code.NOT_FOUND_JOB,
            )
        ran = next((job.get("ran") for job in record.jobs if job["id"] == source), None)
        copy(sink, "out", logs[0], JobOutput(source, ran))
    else:
        try:
            for chunk in manager.ray_api(manager.observe(folder)).output(source, follow=sink.follow):
                sink.stream("out", chunk)
        except NotFoundError:
            raise NotFoundError(
                f"there is no job or node `{source}` on `{record.name}`",
                cause=f"its nodes: {', '.join(record.nodes)}",
                hint=f"heliostat jobs {record.name}",
                code=Code.NOT_FOUND_JOB,
            ) from None


def copy(sink: Sink, stream: str, path: Path, output_filter: JobOutput | None = None) -> None:
    try:
        with open(path, "rb") as source:
            while chunk := source.read(1 << 20):
                sink.stream(stream, output_filter.feed(chunk) if output_filter else chunk)
        if output_filter:
            sink.stream(stream, output_filter.close())
    except FileNotFoundError:
        pass


def show_events(out: Output, folder: ClusterDirectory, follow: bool) -> None:
    if out.json and not follow:
        return out.document({"cluster": folder.record().name, "events": list(folder.events())})
    printed = 0
    while True:
        events = list(folder.events())
        for event in events[printed:]:
            out.data(as_json(event)) if out.json else out.data(format_event(event))
        printed = len(events)
        if not follow or not folder.path.exists():
            return
        time.sleep(0.5)


def format_event(event: EventRow) -> str:
    time_text = datetime.fromtimestamp(event["at"]).isoformat(sep=" ", timespec="milliseconds")
    if event.get("kind") == "move":
        reason = f"  ({event['reason']})" if event.get("reason") else ""
        return f"{time_text}  {event['node']}: {event['from']} -> {event['to']}{reason}"
    return f"{time_text}  {event.get('text', '')}"


def show_node(sink: Sink, manager: ClusterManager, folder: ClusterDirectory, node: str) -> None:
    """Prints the log of the agent and the Ray logs that were collected."""
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
