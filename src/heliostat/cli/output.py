"""Prints events as lines, JSON, or one live line on a terminal. Messages go to stderr, data to stdout.

Control characters in printed text are escaped; only `raw`, the output of the user's program, is not changed. Colours are
inserted with a random marker, which becomes an escape sequence last, so that printed text cannot contain one."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import time
from collections.abc import Iterator, Sequence
from typing import IO, TYPE_CHECKING

from heliostat.common.documents import JsonMapping
from heliostat.common.errors import JSON_SCHEMA, HeliostatError, printable

if TYPE_CHECKING:
    from heliostat.common.events import Event

_COLOURS = {"error": "31", "hint": "36", "ok": "32", "warn": "33", "fail": "31", "dim": "2", "bold": "1"}
_STATE_COLOURS = {
    "ready": "ok",
    "failed": "fail",
    "lost": "fail",
    "partial": "warn",
    "stopping": "dim",
    "unknown": "warn",
}
PROGRESS_AFTER_S = 1.0  # shorter operations need no progress line
ANNOUNCED_STATES = {"QUEUED", "READY", "LOST", "FAILED", "UNKNOWN"}  # others are printed with -v only
PLAIN_INTERVAL_S = 10.0  # between progress lines without a terminal


class Output:
    """The output of one command. Made from the raw arguments, since a wrong option must be reported in JSON too."""

    def __init__(self, arguments: Sequence[str] = ()) -> None:
        ours = _own_arguments(list(arguments))
        self.json = "--json" in ours
        self.quiet = "-q" in ours or "--quiet" in ours
        self.verbose = "-v" in ours or "--verbose" in ours
        self.debug = "--debug" in ours or bool(os.environ.get("HELIOSTAT_DEBUG"))
        self.live = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
        self.stdout_closed = False  # the reader of stdout has closed the pipe
        self.started_at = time.monotonic()
        self._line = ""
        self._escape_marker = f"\0{os.urandom(8).hex()}"
        self._last_line_at = time.monotonic()

    # -- text

    def colour(self, text: str, role: str, stream: IO[str] | None = None) -> str:
        stream = stream or sys.stderr
        if os.environ.get("NO_COLOR") or not stream.isatty() or role not in _COLOURS:
            return text
        return f"{self._escape_marker}[{_COLOURS[role]}m{text}{self._escape_marker}[0m"

    def escape(self, text: str) -> str:
        """The text for the terminal: control characters escaped, colour markers replaced."""
        return "\x1b".join(map(printable, text.split(self._escape_marker)))

    def state(self, state: str, stream: IO[str] | None = None) -> str:
        return self.colour(state, _STATE_COLOURS.get(state.lower(), ""), stream)

    def info(self, text: str) -> None:
        """Prints a message to stderr, unless --quiet."""
        if not self.quiet:
            self._clear()
            self._write_stderr(text + "\n")

    def _write_stderr(self, text: str, clear: str = "") -> None:
        with contextlib.suppress(OSError):  # a closed terminal must not stop the command
            sys.stderr.write(clear + self.escape(text))
            sys.stderr.flush()

    def data(self, text: str) -> None:
        """Prints the command's result to stdout."""
        self._write(self.escape(text))

    def exact(self, text: str) -> None:
        """Prints a result for another program to stdout: escaped on a terminal only."""
        self._write(self.escape(text) if sys.stdout.isatty() else text)

    def _write(self, text: str) -> None:
        self._clear()
        with self._detect_closed_pipe():
            sys.stdout.write(text if text.endswith("\n") else text + "\n")
            sys.stdout.flush()

    def raw(self, stream: str, chunk: bytes) -> None:
        """Writes output of the user's program unchanged. With --json it goes to stderr: stdout is for the document."""
        self._clear()
        target = sys.stdout if stream == "out" and not self.json else sys.stderr
        with self._detect_closed_pipe():
            target.buffer.write(chunk)
            target.buffer.flush()

    @contextlib.contextmanager
    def _detect_closed_pipe(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:
            self.stdout_closed = True
            raise

    def document(self, value: JsonMapping) -> None:
        self._write(as_json({"schema": JSON_SCHEMA, **value}, indent=2))

    def flush(self) -> None:
        self._clear()
        sys.stdout.flush()

    def error(self, error: HeliostatError) -> int:
        self._clear()
        if self.json:
            self.document({"error": error.fields()})
        else:
            for label, text in _lines(error):
                indent = "" if label == "error" else "  "
                self._write_stderr(f"{indent}{self.colour(label + ':', label)} {text}\n")
            if error.attachment:
                self._write_stderr(f"\n{error.attachment.rstrip()}\n")
        return error.exit_code

    # -- events

    def emit(self, event: Event) -> None:
        if event.kind == "progress":
            self._progress(event)
        elif event.kind == "move":
            reason = event.detail.get("reason") or ""
            names = event.detail.get("names", event.node)
            if not names or (event.text not in ANNOUNCED_STATES and not self.verbose):
                return
            self.info(
                f"{names}: {self.state(event.text.lower())}" + (f", {reason}" if reason else "") + self._age()
            )
        elif event.kind == "note" or self.verbose:
            self.info(event.text)

    def _age(self) -> str:
        return self.colour(f"  {time.monotonic() - self.started_at:.1f} s", "dim")

    def _progress(self, event: Event) -> None:
        """Prints a progress line after a second of waiting: rewritten on a terminal, repeated at intervals elsewhere."""
        if self.quiet or time.monotonic() - self.started_at < PROGRESS_AFTER_S:
            return
        text = " ".join(self.escape(_progress_text(event)).split())
        age = time.monotonic() - self.started_at
        if self.live and not self.json:
            self._clear()
            width = max(20, _width() - 1)
            self._line = f"{text} … {age:.0f} s"[:width]
            self._write_stderr(self._line)
        elif time.monotonic() - self._last_line_at > PLAIN_INTERVAL_S:
            self._last_line_at = time.monotonic()
            self._write_stderr(f"{text} … {age:.0f} s\n")

    def _clear(self) -> None:
        if self._line:
            self._write_stderr("", "\r\x1b[K")
            self._line = ""


def _lines(error: HeliostatError) -> list[tuple[str, str]]:
    """The label and text of each line. A cause or details that an earlier line already contains are left out."""
    lines: list[tuple[str, str]] = []
    for label in ("error", "cause", "details", "hint"):
        text = " ".join((error.message if label == "error" else getattr(error, label)).split())
        repeated = label != "hint" and any(
            re.search(rf"(?<!\w){re.escape(text)}(?!\w)", earlier) for _, earlier in lines
        )
        if text and not repeated:
            lines.append((label, text))
    return lines


def as_json(value: object, indent: int | None = None) -> str:
    """One JSON document in ASCII, without control characters other than line ends."""
    return json.dumps(value, indent=indent, default=str).replace("\x7f", "\\u007f")


def _own_arguments(arguments: list[str]) -> list[str]:
    """The arguments before `--` or before the script of `run`: later ones belong to the user's program."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    if "run" in arguments[:end]:
        first = arguments.index("run") + 1
        end = next((i for i in range(first, end) if arguments[i].endswith(".py")), end)
    return arguments[:end]


def _width() -> int:
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns or 80
    except OSError:
        return 80


def _progress_text(event: Event) -> str:
    if "bytes" not in event.detail:
        return event.text
    from heliostat.common.units import format_bytes

    total = event.detail.get("of_bytes")
    return f"{event.text} {format_bytes(event.detail['bytes'])}" + (
        f" of {format_bytes(total)}" if total else ""
    )


def table(rows: Sequence[Sequence[object]], header: Sequence[str]) -> str:
    """Aligned columns without borders, which `awk` can split. A cell is one line."""
    cells = [list(header), *[[_cell(cell) for cell in row] for row in rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in cells
    )


def _cell(value: object) -> str:
    return printable(str(value)).replace("\n", "\\n").replace("\t", "\\t")


def ago(moment: float | None) -> str:
    from heliostat.common.units import format_duration

    return format_duration(max(0.0, time.time() - moment)) if moment else "-"
