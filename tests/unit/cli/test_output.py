"""What is printed of text that is not ours: a terminal must not act on it, a program must get it as it is."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pty
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from heliostat.cli import app
from heliostat.cli.output import Output, as_json, table
from heliostat.common.errors import HeliostatError, printable
from heliostat.common.events import Event
from heliostat.state.states import NodeState
from heliostat.state.store import Store

ESC = "\x1b[31mred\x1b]0;title\x07"
# of every kind one: C0, DEL, C1 (here CSI in one character), direction marks and overrides, line separators, a byte that is no text
BAD = [
    "\x1b",
    "\x07",
    "\x08",
    "\r",
    "\0",
    "\x7f",
    "\x85",
    "\x9b",
    "\u061c",
    "\u200f",
    "\u202e",
    "\u2028",
    "\u2066",
    "\udc9b",
]
RAW = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


class Said:
    def __init__(self, *words: str) -> None:
        streams = [io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in range(2)]
        with contextlib.redirect_stdout(streams[0]), contextlib.redirect_stderr(streams[1]):
            self.code = app.run(words)
        self.out, self.err = (
            stream.buffer.getvalue().decode("utf-8", "surrogateescape") for stream in streams
        )

    @property
    def clean(self) -> bool:
        return not RAW.search(self.out + self.err)


def test_every_control_character_is_written_out() -> None:
    for character in BAD:
        said = printable(f"a{character}b")
        assert not RAW.search(said) and said.startswith("a\\") and said.endswith("b"), ascii(character)
        assert printable(said) == said
    plain = "tab\there\nline é日本🙂 \\x1b '\""
    assert printable(plain) == plain
    assert printable("\x1b\x9b\u202e\udc9b") == "\\x1b\\x9b\\u202e\\udc9b"


def test_an_exception_that_python_prints_is_clean_too() -> None:
    error = HeliostatError(f"no {ESC}", cause="\u202eevil")
    assert str(error) == "no \\x1b[31mred\\x1b]0;title\\x07 (\\u202eevil)"
    assert error.fields()["cause"] == "\u202eevil", "JSON has its own way to write it"


@pytest.mark.parametrize("bad", [*BAD[:4], *BAD[5:], ESC], ids=ascii)
def test_what_a_person_typed_or_wrote(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bad: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.yaml").write_text(json.dumps({f"n{bad}odes": 1, "name": f"l{bad}ab"}))
    (tmp_path / "name.yaml").write_text(json.dumps({"name": f"l{bad}ab", "nodes": f"x{bad}"}))
    for words in (
        ["status", f"l{bad}ab"],
        ["up", "--name", f"l{bad}ab"],
        ["up", "-f", "bad.yaml"],
        ["up", "-f", "name.yaml"],
        ["up", "-f", f"no{bad}.yaml"],
        ["up", "--on", f"no{bad}where"],
        [f"no{bad}verb"],
        ["ls", f"--no{bad}option"],
        ["run", f"no{bad}.py"],
        ["down", f"l{bad}ab", "--debug"],
    ):
        said = Said(*words)
        assert said.code in (2, 5) and said.err.startswith(("error: ", "Traceback")) and said.clean, (
            words,
            said.err,
        )
        document = Said(*words[:1], "--json", *words[1:])
        assert document.clean and isinstance(json.loads(document.out), dict), document.out


@pytest.fixture
def hostile(home: Path, make_record: Any) -> Store:
    """A cluster that has ended, and one that has failed: reasons, hosts and events come from other machines."""
    store = Store(home)
    over = make_record(
        name="over",
        id="0" * 16,
        ended=time.time(),
        reason=f"{ESC}\nsecond",
        command={"text": ESC, "argv": []},
    )
    over.jobs = [{"id": f"j{ESC}", "entrypoint": ESC, "submitted": 1.0, "status": ESC}]
    for node in over.nodes.values():
        node.state, node.reason = NodeState.FAILED, ESC
    folder = store.create(
        over, {"events.jsonl": json.dumps({"at": 1.0, "kind": "note", "text": f"{ESC}\x7f"}) + "\n"}
    )
    logs = folder.logs / "head"
    logs.mkdir()
    (logs / f"ray{chr(27)}.log").write_text(f"{ESC}\n")
    store.archive(folder, over)
    return store


@pytest.mark.parametrize(
    "words", [["ls", "--all"], ["history"], ["logs", "over", "--events"], ["down", "over"]], ids=" ".join
)
def test_what_other_machines_wrote_in_tables_and_events(hostile: Store, words: list[str]) -> None:
    said = Said(*words)
    assert said.code == 0 and said.clean, said.out + said.err
    if words[0] != "down":
        assert "\\x1b[31mred" in said.out
    document = Said(*words, "--json")
    assert document.clean and json.loads(document.out)


def test_a_row_is_one_line() -> None:
    assert table([("a\nb", "c\td")], ("X", "Y")) == "X     Y\na\\nb  c\\td"


def test_what_a_node_or_a_job_wrote_is_not_changed(hostile: Store) -> None:
    said = Said("logs", "over", "head")
    assert said.out == f"==> ray\\x1b.log <==\n{ESC}\n"


def test_what_is_for_another_program_is_exact(capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    out = Output()
    out.exact(f"export A='{ESC}'\n")
    out.raw("out", ESC.encode())
    assert capsysbinary.readouterr().out == f"export A='{ESC}'\n{ESC}".encode()
    assert (
        json.loads(as_json({"a": "\x7f\x9b\u202e"})) == {"a": "\x7f\x9b\u202e"}
        and as_json("\x7f") == '"\\u007f"'
    )


def test_events_and_the_line_that_is_rewritten(capsys: pytest.CaptureFixture[str]) -> None:
    out = Output(["-v"])
    out.live, out.started_at = True, -1e9
    out.emit(Event("progress", f"waits for {ESC}\nand \r more"))
    out.emit(Event("move", "FAILED", "w1", {"reason": ESC, "names": f"w{ESC}"}))
    out.emit(Event("note", ESC))
    said = capsys.readouterr().err.replace("\r\x1b[K", "")
    assert not RAW.search(said) and said.count("\\x1b[31mred") == 4, said


TERMINAL = """
import sys
from heliostat.cli.output import Output
from heliostat.common.errors import HeliostatError
out = Output()
out.info(f"is {out.state('ready')}, said \\x1b[32mgreen and \\0{'0' * 16}[31m")
out.error(HeliostatError("no \\x1b[31mred"))
out.exact("export A='\\x1b[31m'")
"""


def test_on_a_terminal_only_our_own_colours_are_colours() -> None:
    """Somebody else's text cannot have the marks that become colours: they differ from run to run."""
    ours, theirs = pty.openpty()
    env = {**os.environ, "TERM": "xterm"}
    env.pop("NO_COLOR", None)
    subprocess.run(
        [sys.executable, "-c", TERMINAL], stdout=theirs, stderr=theirs, check=True, timeout=60, env=env
    )
    os.close(theirs)
    text = b""
    with contextlib.suppress(OSError):
        while chunk := os.read(ours, 4096):
            text += chunk
    os.close(ours)
    lines = text.decode().replace("\r\n", "\n").splitlines()
    zeros = "0" * 16
    assert lines == [
        f"is \x1b[32mready\x1b[0m, said \\x1b[32mgreen and \\x00{zeros}[31m",
        "\x1b[31merror:\x1b[0m no \\x1b[31mred",
        "export A='\\x1b[31m'",
    ]
