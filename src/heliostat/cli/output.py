"""The voice: events become lines, JSON, or a live line on a terminal. stderr talks, stdout is data.

Control characters in what is printed are written out here, whoever the text is from; only `raw`, the output of a person's own
program, is not changed. Colours are put in as marks that nobody else can write, and become escape sequences last."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

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
PROGRESS_AFTER_S = 1.0  # what takes less needs no words
TOLD = {"QUEUED", "READY", "LOST", "FAILED", "UNKNOWN"}  # the moves that a person waits for, or must know of
PLAIN_EVERY_S = 10.0  # without a terminal, a waiting line that often


class Output:
    """One command's way to the person. Made from the raw arguments, since a wrong option must be told in JSON too."""

    def __init__(self, arguments: Sequence[str] = ()) -> None:
        own = _own(list(arguments))
        self.json = "--json" in own
        self.quiet = "-q" in own or "--quiet" in own
        self.verbose = "-v" in own or "--verbose" in own
        self.debug = "--debug" in own or bool(os.environ.get("HELIOSTAT_DEBUG"))
        self.live = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
        self.unread = False  # nobody reads stdout any more
        self.began = time.monotonic()
        self._line = ""
        self._mark = f"\0{os.urandom(8).hex()}"
        self._told = time.monotonic()
        self._last: tuple[str, float] = ("", time.monotonic())

    # -- words

    def colour(self, text: str, role: str, stream: Any = None) -> str:
        stream = stream or sys.stderr
        if os.environ.get("NO_COLOR") or not stream.isatty() or role not in _COLOURS:
            return text
        return f"{self._mark}[{_COLOURS[role]}m{text}{self._mark}[0m"

    def shown(self, text: str) -> str:
        """The text as the terminal gets it."""
        return "\x1b".join(map(printable, text.split(self._mark)))

    def state(self, state: str, stream: Any = None) -> str:
        return self.colour(state, _STATE_COLOURS.get(state.lower(), ""), stream)

    def say(self, text: str) -> None:
        """One line to the person."""
        if not self.quiet:
            self._clear()
            self._talk(text + "\n")

    def _talk(self, text: str, clear: str = "") -> None:
        with contextlib.suppress(OSError):  # a terminal that is gone must not keep us from our work
            sys.stderr.write(clear + self.shown(text))
            sys.stderr.flush()

    def data(self, text: str) -> None:
        """What the command is for, to stdout."""
        self._write(self.shown(text))

    def exact(self, text: str) -> None:
        """The same for another program, which gets it as it is; a terminal does not."""
        self._write(self.shown(text) if sys.stdout.isatty() else text)

    def _write(self, text: str) -> None:
        self._clear()
        with self._reader():
            sys.stdout.write(text if text.endswith("\n") else text + "\n")
            sys.stdout.flush()

    def raw(self, stream: str, chunk: bytes) -> None:
        """Output of the user's own program, byte for byte. With --json, stdout is ours: it goes to stderr."""
        self._clear()
        target = sys.stdout if stream == "out" and not self.json else sys.stderr
        with self._reader():
            target.buffer.write(chunk)
            target.buffer.flush()

    @contextlib.contextmanager
    def _reader(self) -> Iterator[None]:
        """Remembers when whoever reads our output has left."""
        try:
            yield
        except BrokenPipeError:
            self.unread = True
            raise

    def document(self, value: dict[str, Any]) -> None:
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
                self._talk(f"{indent}{self.colour(label + ':', label)} {text}\n")
            if error.attachment:
                self._talk(f"\n{error.attachment.rstrip()}\n")
        return error.exit_code

    # -- events

    def emit(self, event: Event) -> None:
        if event.kind == "progress":
            self._progress(event)
        elif event.kind == "move":
            reason = event.detail.get("reason") or ""
            names = event.detail.get("names", event.node)
            if not names or (event.text not in TOLD and not self.verbose):
                return
            self.say(
                f"{names}: {self.state(event.text.lower())}" + (f", {reason}" if reason else "") + self._age()
            )
        elif event.kind == "note" or self.verbose:
            self.say(event.text)

    def _age(self) -> str:
        return self.colour(f"  {time.monotonic() - self.began:.1f} s", "dim")

    def _progress(self, event: Event) -> None:
        """A line that is rewritten on a terminal, and said now and then elsewhere; only after a second of waiting."""
        if self.quiet or time.monotonic() - self.began < PROGRESS_AFTER_S:
            return
        text = " ".join(self.shown(_amounts(event)).split())
        if text != self._last[0]:
            self._last = (text, time.monotonic())
        age = time.monotonic() - self.began
        if self.live and not self.json:
            self._clear()
            width = max(20, _width() - 1)
            self._line = f"{text} … {age:.0f} s"[:width]
            self._talk(self._line)
        elif time.monotonic() - self._told > PLAIN_EVERY_S:
            self._told = time.monotonic()
            self._talk(f"{text} … {age:.0f} s\n")

    def _clear(self) -> None:
        if self._line:
            self._talk("", "\r\x1b[K")
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


def as_json(value: Any, indent: int | None = None) -> str:
    """One JSON document in plain ASCII, without any control character but its own line ends."""
    return json.dumps(value, indent=indent, default=str).replace("\x7f", "\\u007f")


def _own(words: list[str]) -> list[str]:
    """The words that are ours: what follows `--`, or the script of a `run`, is meant for somebody else."""
    end = words.index("--") if "--" in words else len(words)
    if "run" in words[:end]:
        first = words.index("run") + 1
        end = next((i for i in range(first, end) if words[i].endswith(".py")), end)
    return words[:end]


def _width() -> int:
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns or 80
    except OSError:
        return 80


def _amounts(event: Event) -> str:
    if "bytes" not in event.detail:
        return event.text
    from heliostat.common.units import format_bytes

    total = event.detail.get("of_bytes")
    return f"{event.text} {format_bytes(event.detail['bytes'])}" + (
        f" of {format_bytes(total)}" if total else ""
    )


def table(rows: Sequence[Sequence[object]], header: Sequence[str]) -> str:
    """Plain columns, for people and for `awk`; no borders, no colour needed to read it. A cell is one line."""
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
