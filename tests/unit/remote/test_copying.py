"""`cp`: a tar stream through a command. Here the command runs on this host; the lab's tests use other hosts."""

from __future__ import annotations

import io
import os
import shlex
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from heliostat.common.errors import HeliostatError, UsageError
from heliostat.remote import copying
from heliostat.remote.transport import Local


def attach(argv: Sequence[str]) -> list[str]:
    return Local().attached(argv, terminal=False)


def no_progress(done: int, total: int | None) -> None:
    pass


def send(source: Path, target: object) -> copying.Copied:
    return copying.send(source, str(target), attach, no_progress)


def fetch(source: object, target: Path) -> copying.Copied:
    return copying.fetch(str(source), target, attach, no_progress)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    tree = tmp_path / "tree"
    (tree / "read only" / "deep").mkdir(parents=True)
    (tree / "read only" / "deep" / "ünï\tcode").write_text("text")
    (tree / "empty").write_text("")
    (tree / "program").write_text("#!/bin/sh\n")
    (tree / "program").chmod(0o755)
    (tree / ("long" * 50)).write_bytes(os.urandom(1_000_001))
    (tree / "link").symlink_to("/nowhere/else")
    os.utime(tree / "empty", (1_000_000_000, 1_000_000_000))
    (tree / "read only").chmod(0o555)
    return tree


def content(folder: Path) -> dict[str, object]:
    def describe(path: Path) -> object:
        if path.is_symlink():
            return os.readlink(path)
        status = path.stat()
        return (status.st_mode, None if path.is_dir() else (path.read_bytes(), int(status.st_mtime)))

    return {str(path.relative_to(folder)): describe(path) for path in sorted(folder.rglob("*"))}


@pytest.mark.parametrize("copy", [send, fetch])
def test_a_directory(tree: Path, tmp_path: Path, copy: object) -> None:
    copied = copy(tree, tmp_path / "copy")  # type: ignore[operator]
    assert content(tmp_path / "copy") == content(tree)
    assert copied == copying.Copied(5, 1_000_001 + 4 + 10)
    (tmp_path / "inside").mkdir()
    copy(tree, tmp_path / "inside")  # type: ignore[operator]
    assert content(tmp_path / "inside" / "tree") == content(tree), "into a directory that exists"
    (tmp_path / "inside" / "tree" / "empty").write_text("old")
    (tmp_path / "inside" / "tree" / "other").write_text("stays")
    copy(tree, tmp_path / "inside")  # type: ignore[operator]
    merged = content(tmp_path / "inside" / "tree")
    assert merged.pop("other") and merged == content(tree), "files are replaced, others stay"
    assert not [path for path in tmp_path.rglob(".heliostat-cp-*")]


@pytest.mark.parametrize("copy", [send, fetch])
def test_one_file(tmp_path: Path, copy: object) -> None:
    (tmp_path / "a").write_text("new")
    (tmp_path / "b").write_text("old")
    copy(tmp_path / "a", tmp_path / "b")  # type: ignore[operator]
    assert (tmp_path / "b").read_text() == "new"
    (tmp_path / "link").symlink_to("a")
    copy(tmp_path / "link", tmp_path / "c")  # type: ignore[operator]
    assert (tmp_path / "c").read_text() == "new" and not (tmp_path / "c").is_symlink(), "a link is followed"
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "a").mkdir()
    with pytest.raises(HeliostatError, match=r"directory|could not copy"):
        copy(tmp_path / "a", tmp_path / "d")  # type: ignore[operator]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "c", "d", "link"]


@pytest.mark.parametrize("text", ["~/there", "there"])
def test_relative_paths_start_at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "a").write_text("text")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    send(tmp_path / "a", text)
    assert (tmp_path / "home" / "there").read_text() == "text"
    fetch(text, tmp_path / "back")
    assert (tmp_path / "back").read_text() == "text"


def test_what_cannot_be_copied(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("")
    with pytest.raises(UsageError, match="no file or directory"):
        send(tmp_path / "missing", "x")
    with pytest.raises(HeliostatError) as refused:
        send(tmp_path / "a", tmp_path / "missing" / "a")
    assert refused.value.cause == f"no such directory: {tmp_path / 'missing'}"
    with pytest.raises(HeliostatError) as refused:
        send(tmp_path / "a", f"{tmp_path / 'missing'}/")
    assert refused.value.cause.startswith("no such directory: ")
    with pytest.raises(HeliostatError) as refused:
        fetch(tmp_path / "missing", tmp_path / "b")
    assert refused.value.cause == f"no such file or directory: {tmp_path / 'missing'}"
    with pytest.raises(UsageError, match="there is no directory"):
        fetch(tmp_path / "a", tmp_path / "missing" / "b")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_file_that_becomes_shorter(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(bytes(5_000_000))

    def shorten(done: int, total: int | None) -> None:
        os.truncate(tmp_path / "log", 3_000_000)

    with pytest.raises(HeliostatError, match="became shorter"):
        copying.send(tmp_path / "log", str(tmp_path / "copy"), attach, shorten)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log"], "no incomplete copy"


@pytest.mark.parametrize("cut", [True, False])
def test_a_stream_that_is_cut(tmp_path: Path, cut: bool) -> None:
    """A connection that ends, or a host that sends a name outside the destination, leaves nothing."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        for name in ("good", "good/../../outside"):
            info = tarfile.TarInfo(name)
            info.size = 100_000
            archive.addfile(info, io.BytesIO(bytes(100_000)))
    data = stream.getvalue()[: 50_000 if cut else None]
    (tmp_path / "stream").write_bytes(data)
    target = tmp_path / "target"
    target.mkdir()

    def answer(argv: Sequence[str]) -> list[str]:
        return ["sh", "-c", f"echo {argv[-1]}; cat {shlex.quote(str(tmp_path / 'stream'))}"]

    with pytest.raises(HeliostatError, match="the copy is incomplete"):
        copying.fetch("good", target, answer, no_progress)
    assert list(target.iterdir()) == [] and not (tmp_path / "outside").exists()


def test_ctrl_c(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(bytes(5_000_000))

    def interrupt(done: int, total: int | None) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        copying.send(tmp_path / "log", str(tmp_path / "copy"), attach, interrupt)
    with pytest.raises(KeyboardInterrupt):
        copying.fetch(str(tmp_path / "log"), tmp_path / "copy", attach, interrupt)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log"]


def test_output_of_start_files_is_skipped(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("text")

    def noisy(argv: Sequence[str]) -> list[str]:
        return ["sh", "-c", 'echo "Welcome!"; printf "no line end"; echo; exec "$@"', "sh", *argv]

    copying.fetch(str(tmp_path / "a"), tmp_path / "b", noisy, no_progress)
    assert (tmp_path / "b").read_text() == "text"


def test_a_host_that_cannot_be_reached(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("text")

    def unreachable(argv: Sequence[str]) -> list[str]:
        return [
            sys.executable,
            "-c",
            "import sys; sys.exit('ssh: connect to host x port 22: Connection refused')",
        ]

    with pytest.raises(HeliostatError) as refused:
        copying.send(tmp_path / "a", "b", unreachable, no_progress)
    assert "Connection refused" in refused.value.cause
