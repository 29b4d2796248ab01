"""Files that others read while they are written."""

from __future__ import annotations

import json
import os
import stat
import threading
from pathlib import Path

import pytest

from heliostat.agent import files


def test_a_file_appears_whole_and_private(tmp_path: Path) -> None:
    path = tmp_path / "a b'é"
    files.write_json(str(path), {"b": [1], "a": "é\n"})
    assert files.read_json(str(path)) == {"a": "é\n", "b": [1]}
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and os.listdir(tmp_path) == [path.name]


def test_whoever_reads_meanwhile_reads_a_whole_one(tmp_path: Path) -> None:
    path, over, seen = str(tmp_path / "x"), threading.Event(), set()
    files.write_json(path, {"i": -1, "fill": "-1" * 10_000})

    def read() -> None:
        while not over.is_set():
            found = json.loads(Path(path).read_text())
            assert found["fill"] == str(found["i"]) * 10_000
            seen.add(found["i"])

    reader = threading.Thread(target=read)
    reader.start()
    for i in range(200):
        files.write_json(path, {"i": i, "fill": str(i) * 10_000})
    over.set()
    reader.join()
    assert len(seen) > 1


def test_what_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    for path in (tmp_path / "folder", tmp_path / "none" / "x"):
        with pytest.raises(OSError):
            files.write(str(path), "text")
    assert os.listdir(tmp_path) == ["folder"]


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '"x"', "\0"])
def test_what_is_not_whole_is_not_there_yet(tmp_path: Path, text: str) -> None:
    (tmp_path / "x").write_text(text)
    assert files.read_json(str(tmp_path / "x")) is None
    assert files.read_json(str(tmp_path / "none")) is None and files.read_json(str(tmp_path)) is None


def test_the_end_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"0123456789\xff")
    assert files.tail(str(tmp_path / "x")) == "0123456789\ufffd"
    assert files.tail(str(tmp_path / "x"), 3) == "89\ufffd"
    assert files.tail(str(tmp_path / "none")) == ""
