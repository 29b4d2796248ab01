"""Packing a working directory: what goes in, what stays out, and that Ray unpacks it to the same tree."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import socket
import stat
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from heliostat.common.errors import HeliostatError
from heliostat.remote import working_dir
from heliostat.remote.working_dir import Package, pack

MIB = 2**20


@pytest.fixture(autouse=True)
def own_temp(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A temporary folder of its own, so that what is left in it is seen."""
    folder = tmp_path_factory.mktemp("temp")
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    for name in ("RAY_RUNTIME_ENV_IGNORE_GITIGNORE", "RAY_OVERRIDE_RUNTIME_ENV_DEFAULT_EXCLUDES"):
        monkeypatch.delenv(name, raising=False)
    yield folder
    assert list(folder.iterdir()) == []


def make(folder: Path, files: dict[str, str]) -> Path:
    """Files with their content; a name that ends in `/` is a folder."""
    for name, text in files.items():
        path = folder / name
        if name.endswith("/"):
            path.mkdir(parents=True, exist_ok=True)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    return folder


def names(folder: Path, excludes: Sequence[str] = ()) -> list[str]:
    with pack(folder, excludes) as package, zipfile.ZipFile(package.data_path) as archive:
        return archive.namelist()


def uri(folder: Path) -> str:
    with pack(folder) as package:
        return package.uri


def tree(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Mode and content of every file, and the empty folders."""
    found: dict[str, tuple[int, bytes]] = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            found[str(path.relative_to(folder))] = (stat.S_IMODE(path.stat().st_mode), path.read_bytes())
        elif not any(path.iterdir()):
            found[f"{path.relative_to(folder)}/"] = (0, b"")
    return found


# --- the package ----------------------------------------------------------------------------------------------


def test_a_package(tmp_path: Path) -> None:
    make(tmp_path, {"train.py": "import ray", "lib/a b.py": "x", "lib/é.txt": "é", "out/": ""})
    (tmp_path / "train.py").chmod(0o750)
    with pack(tmp_path) as package:
        assert re.fullmatch(r"gcs://_ray_pkg_[0-9a-f]{16}\.zip", package.uri)
        assert package.uri == f"gcs://{package.name}"
        assert (package.files, package.bytes, package.skipped) == (3, 10 + 1 + 2, ())
        assert stat.S_IMODE(package.data_path.stat().st_mode) == 0o600
        with zipfile.ZipFile(package.data_path) as archive:
            assert archive.testzip() is None
            assert archive.namelist() == ["lib/a b.py", "lib/é.txt", "out/", "train.py"]
            assert archive.read("train.py") == b"import ray"
            assert archive.getinfo("train.py").external_attr >> 16 == stat.S_IFREG | 0o750
            assert {info.date_time for info in archive.infolist()} == {(1980, 1, 1, 0, 0, 0)}
    assert not package.data_path.exists()


def test_the_file_may_be_gone_already(tmp_path: Path) -> None:
    with pack(make(tmp_path, {"a": ""})) as package:
        package.data_path.unlink()


def test_the_same_tree_gives_the_same_package(tmp_path: Path) -> None:
    files = {"b/c.py": "1", "a.py": "2", "z/": "", "b/a.py": "3"}
    one = make(tmp_path / "one", files)
    two = make(tmp_path / "two", dict(reversed(files.items())))
    os.utime(one / "a.py", (1, 1))
    with pack(one) as first, pack(two) as second:
        assert first.uri == second.uri
        assert first.data_path.read_bytes() == second.data_path.read_bytes()


@pytest.mark.parametrize(
    "change",
    [
        lambda root: (root / "a.py").write_text("3"),
        lambda root: (root / "a.py").chmod(0o755),
        lambda root: (root / "a.py").rename(root / "b.py"),
        lambda root: (root / "a.py").unlink(),
        lambda root: (root / "empty").rmdir(),
        lambda root: (root / "new").touch(),
        lambda root: (root / "d" / "x").rename(root / "x"),
    ],
)
def test_another_tree_gives_another_uri(tmp_path: Path, change: Callable[[Path], object]) -> None:
    make(tmp_path, {"a.py": "2", "empty/": "", "d/x": ""})
    before = uri(tmp_path)
    change(tmp_path)
    assert uri(tmp_path) != before


def test_what_is_left_out_does_not_count(tmp_path: Path) -> None:
    make(tmp_path, {"a.py": "2", ".git/HEAD": "x"})
    before = uri(tmp_path)
    make(tmp_path, {".git/HEAD": "y", "__pycache__/a.pyc": "z", ".heliostat/token": "secret"})
    assert uri(tmp_path) == before


def test_an_empty_folder(tmp_path: Path) -> None:
    with pack(tmp_path) as package:
        assert (package.files, package.bytes) == (0, 0)
        with zipfile.ZipFile(package.data_path) as archive:
            assert archive.namelist() == []
    assert uri(make(tmp_path, {".git/HEAD": ""})) == package.uri


def test_the_folder_may_be_a_link_or_relative(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path / "real", {"a": "1", "b/c": "2"})
    (tmp_path / "link").symlink_to("real")
    monkeypatch.chdir(tmp_path / "real")
    assert names(tmp_path / "link") == names(Path(".")) == ["a", "b/c"]


def test_progress_ends_at_the_total(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(working_dir, "_CHUNK", 10)
    make(tmp_path, {"a": 25 * "x", "b": 5 * "y", "c": ""})
    seen: list[tuple[int, int]] = []
    with pack(tmp_path, progress=lambda done, total: seen.append((done, total))):
        pass
    assert seen == [(10, 30), (20, 30), (25, 30), (30, 30)]


# --- what stays out -------------------------------------------------------------------------------------------


def test_always_left_out(tmp_path: Path) -> None:
    make(
        tmp_path,
        {
            "a.py": "",
            ".git/HEAD": "",
            "sub/.git": "gitdir: elsewhere",
            "sub/__pycache__/a.pyc": "",
            "sub/.venv/bin/python": "",
            ".heliostat/token": "",
            "venv/bin/python": "",
            ".gitignore": "",
            ".env": "",
        },
    )
    assert names(tmp_path, ["!.git", "!__pycache__"]) == [".env", ".gitignore", "a.py"]


def test_rays_own_switches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(
        tmp_path,
        {
            "a.py": "",
            "venv/x": "",
            ".venv/x": "",
            "log/x": "",
            ".gitignore": "a.py",
            "b": "",
            ".rayignore": "b",
        },
    )
    monkeypatch.setenv("RAY_OVERRIDE_RUNTIME_ENV_DEFAULT_EXCLUDES", " log ,")
    assert names(tmp_path) == [".gitignore", ".rayignore", "venv/x"]
    monkeypatch.setenv("RAY_RUNTIME_ENV_IGNORE_GITIGNORE", "1")
    assert names(tmp_path) == [".gitignore", ".rayignore", "a.py", "venv/x"]


IGNORED: list[tuple[str, dict[str, str], list[str]]] = [
    ("a folder", {".gitignore": "data/\n", "data/x": "", "sub/data/y": "", "sub/z": ""}, ["sub/z"]),
    ("anchored", {".gitignore": "/data\n", "data/x": "", "sub/data/y": ""}, ["sub/data/y"]),
    ("a glob", {".gitignore": "*.pt\n", "a.pt": "", "sub/b.pt": "", "sub/b.py": ""}, ["sub/b.py"]),
    ("nested", {"sub/.gitignore": "/x\n*.log", "x": "", "sub/x": "", "sub/y/x": "", "sub/a.log": ""}, ["sub/y/x", "x"]),
    ("both kinds", {".gitignore": "a", ".rayignore": "b", "a": "", "b": "", "c": ""}, ["c"]),
    ("negated", {".gitignore": "*.csv\n!keep.csv", "a.csv": "", "keep.csv": "", "s/keep.csv": ""}, ["keep.csv", "s/keep.csv"]),
    ("kept in an ignored folder", {".gitignore": "data/\n!data/keep", "data/keep": "", "data/x": ""}, ["data/keep"]),
    ("a list of what is wanted", {".gitignore": "*\n!*/\n!*.py", "a.py": "", "s/b.py": "", "s/c": "", "d": ""}, ["a.py", "s/b.py"]),
    ("a folder that hides itself", {"cache/.gitignore": "*\n", "cache/x": "", "cache/y/z": "", "a": ""}, ["a"]),
    ("Windows line ends, a comment", {".gitignore": "# no\r\n\r\na\r\nb/\r\n", "a": "", "b/x": "", "c": ""}, ["c"]),
    ("a byte order mark", {".gitignore": "\ufeffa\n", "a": "", "b": ""}, ["b"]),
    ("only an empty folder is left", {".gitignore": "x\nempty/\n", "s/x": "", "empty/": "", "e/": ""}, ["e/"]),
]  # fmt: skip


@pytest.mark.parametrize(("files", "kept"), [case[1:] for case in IGNORED], ids=[case[0] for case in IGNORED])
def test_ignore_files(tmp_path: Path, files: dict[str, str], kept: list[str]) -> None:
    found = names(make(tmp_path, files))
    assert [name for name in found if not name.endswith("ignore")] == kept


def test_what_is_left_out_is_told(tmp_path: Path) -> None:
    """By the user's patterns, or because it cannot be packed; the defaults (.git, .venv) are known to everybody."""
    files = {
        "a.py": "",
        ".git/x": "",
        ".venv/x": "",
        "venv/x": "",
        "m.pt": "",
        "sub/n.log": "",
        "sub/.gitignore": "*.log",
    }
    make(tmp_path, {**files, ".gitignore": "/data*\n", "data/x": "", **{f"data{i}": "" for i in range(4)}})
    (tmp_path / "out").symlink_to("/etc")
    with pack(tmp_path, ["*.pt"]) as package:
        assert package.ignored == {
            ".gitignore": ("data/", "data0", "data1", "data2", "data3"),
            "excludes": ("m.pt",),
            "sub/.gitignore": ("sub/n.log",),
        }
        assert package.describe_left_out() == (
            "left out of the upload: 8, data/, data0, data1 and 2 more (.gitignore); m.pt (excludes); "
            "sub/n.log (sub/.gitignore); out (a link to a target outside the directory)"
        )
    with pack(tmp_path / "sub" / "..", ["*"]) as package:
        assert package.files == 0
    with pack(tmp_path / ".git") as package:
        assert package.describe_left_out() == "" and package.files == 1


def test_excludes_are_patterns_too(tmp_path: Path) -> None:
    make(tmp_path, {"a.py": "", "data/x": "", "sub/data/x": "", "b.pt": "", "venv/x": ""})
    assert names(tmp_path, ["/data", "*.pt", "!venv"]) == ["a.py", "sub/data/x", "venv/x"]


def test_an_ignored_folder_is_not_entered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path, {".gitignore": "data/\n", "data/x": "", "a": ""})
    entered: list[str] = []
    scandir = os.scandir
    monkeypatch.setattr(
        os, "scandir", lambda path: (entered.append(os.path.basename(path)), scandir(path))[1]
    )
    assert names(tmp_path) == [".gitignore", "a"]
    assert "data" not in entered


def test_a_pattern_that_is_none(tmp_path: Path) -> None:
    make(tmp_path, {"sub/.gitignore": "ok\n!\n"})
    with pytest.raises(HeliostatError, match=re.escape("`sub/.gitignore`")) as caught:
        pack(tmp_path)
    assert (caught.value.exit_code, bool(caught.value.cause)) == (2, True)


def test_an_ignore_file_that_is_not_utf8(tmp_path: Path) -> None:
    make(tmp_path, {"a": "", "b": ""})
    (tmp_path / ".gitignore").write_bytes(b"\xff\xfe\na\n")
    assert names(tmp_path) == [".gitignore", "b"]


# --- links and other things -----------------------------------------------------------------------------------


def test_links_inside_are_followed_and_others_are_not(tmp_path: Path) -> None:
    root = make(tmp_path / "root", {"a": "text", "lib/x": "1", ".git/config": "url"})
    make(tmp_path / "root-2", {"secret": "s"})
    links = {
        "to-a": "a",
        "to-lib": "lib",
        "lib/up-a": "../a",
        "again": "to-a",
        "out": "../root-2/secret",
        "out-absolute": str(tmp_path / "root-2"),
        "back": "../root/a",
        "git": ".git",
        "broken": "nowhere",
        "self": "self",
        "passwd": "/etc/passwd",
    }
    for name, target in links.items():
        (root / name).symlink_to(target)
    with pack(root) as package, zipfile.ZipFile(package.data_path) as archive:
        assert archive.namelist() == [
            "a", "again", "back", "lib/up-a", "lib/x", "to-a", "to-lib/up-a", "to-lib/x",
        ]  # fmt: skip
        assert archive.read("to-lib/up-a") == b"text"
        assert not any(stat.S_ISLNK(info.external_attr >> 16) for info in archive.infolist())
    assert package.skipped == (
        "broken (a link without a target)",
        "git (a link to an excluded target)",
        "out (a link to a target outside the directory)",
        "out-absolute (a link to a target outside the directory)",
        "passwd (a link to a target outside the directory)",
        "self (a link without a target)",
    )


def test_links_in_a_ring_end(tmp_path: Path) -> None:
    make(tmp_path, {"a/x": "", "b/y": ""})
    (tmp_path / "a" / "top").symlink_to("..")
    (tmp_path / "a" / "b").symlink_to("../b")
    (tmp_path / "b" / "a").symlink_to("../a")
    with pack(tmp_path) as package, zipfile.ZipFile(package.data_path) as archive:
        assert archive.namelist() == ["a/b/y", "a/x", "b/a/x", "b/y"]
    assert package.skipped == tuple(
        f"{name} (a link to one of its parents)" for name in ("a/b/a", "a/top", "b/a/b", "b/a/top")
    )


def test_a_link_that_is_ignored_is_not_mentioned(tmp_path: Path) -> None:
    (make(tmp_path, {".gitignore": "data\n"}) / "data").symlink_to("/scratch/nowhere")
    with pack(tmp_path) as package:
        assert package.skipped == ()


def test_sockets_and_pipes_are_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path, {"a": ""})
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.chdir(tmp_path)  # a socket's path may have 107 characters
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind("socket")
        with pack(tmp_path) as package:
            assert package.files == 1
    assert package.skipped == (
        "pipe (not a file: a socket, a pipe or a device)",
        "socket (not a file: a socket, a pipe or a device)",
    )


NASTY = [
    "a b",
    "a\nb",
    "-rf",
    "$HOME",
    "'q'",
    '"q"',
    "é",
    "日本",
    "…",
    ".hidden",
    "a;b",
    "*",
    "[x]",
    "!x",
    "#x",
    "x ",
    "~",
]


def test_nasty_names_travel(tmp_path: Path) -> None:
    make(tmp_path, {name: name for name in NASTY} | {f"dir{name}/x": "" for name in NASTY})
    with pack(tmp_path) as package, zipfile.ZipFile(package.data_path) as archive:
        assert set(archive.namelist()) == {*NASTY, *(f"dir{name}/x" for name in NASTY)}
        assert all(archive.read(name).decode() == name for name in NASTY)
    assert package.skipped == ()


def test_names_that_cannot_travel_are_reported(tmp_path: Path) -> None:
    make(tmp_path, {"ok": "", "back\\slash": "", "c:drive": "", "sub/c:fine": ""})
    try:
        Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff\n.txt")).touch()
    except OSError:
        pytest.skip("this file system takes UTF-8 names only")
    with pack(tmp_path) as package, zipfile.ZipFile(package.data_path) as archive:
        assert archive.namelist() == ["ok", "sub/c:fine"]
    assert package.skipped == (
        "\\udcff\\n.txt (its name is not UTF-8, which a zip cannot hold)",
        "back\\slash (Ray does not unpack a name with a backslash or a drive letter)",
        "c:drive (Ray does not unpack a name with a backslash or a drive letter)",
    )


def test_a_deep_tree(tmp_path: Path) -> None:
    """Deeper than Python may recurse."""
    path = str(tmp_path / "root")
    os.mkdir(path)
    root, depth = path, 1200
    for _ in range(depth):
        path += "/d"
        os.mkdir(path)
    assert names(Path(root)) == ["d/" * depth]
    for _ in range(depth):  # pytest's own clean-up would recurse
        os.rmdir(path)
        path = os.path.dirname(path)


# --- what is refused ------------------------------------------------------------------------------------------


def test_no_such_folder(tmp_path: Path) -> None:
    with pytest.raises(HeliostatError, match="gone") as caught:
        pack(tmp_path / "gone")
    assert (caught.value.cause, caught.value.exit_code) == ("No such file or directory", 2)


def test_a_file_is_not_a_folder(tmp_path: Path) -> None:
    make(tmp_path, {"train.py": ""})
    with pytest.raises(HeliostatError, match=r"train\.py") as caught:
        pack(tmp_path / "train.py")
    assert caught.value.cause == "it is not a directory"
    assert str(tmp_path) in caught.value.hint


@pytest.mark.parametrize("where", ["open", "scandir", "ignore file"])
def test_an_unreadable_thing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    make(tmp_path, {"ok": "", "sub/secret": "x", "sub/.gitignore": ""})
    bad = {"open": "sub/secret", "scandir": "sub", "ignore file": "sub/.gitignore"}[where]
    if os.geteuid() == 0:  # who may read everything
        deny(monkeypatch, tmp_path / bad)
    else:
        (tmp_path / bad).chmod(0)
    try:
        with pytest.raises(HeliostatError, match=f"`{re.escape(bad)}/?` cannot be read") as caught:
            pack(tmp_path)
    finally:
        (tmp_path / bad).chmod(0o700)
    assert caught.value.cause == "Permission denied"
    assert ".gitignore" in caught.value.hint


def deny(monkeypatch: pytest.MonkeyPatch, bad: Path) -> None:
    """What the kernel tells a user who is not root about this path."""

    def guarded(call):  # type: ignore[no-untyped-def]
        def wrapper(path, *args, **kwargs):  # type: ignore[no-untyped-def]
            if isinstance(path, str) and path.rstrip("/") == str(bad):
                raise PermissionError(13, "Permission denied", path)
            return call(path, *args, **kwargs)

        return wrapper

    monkeypatch.setattr(os, "open", guarded(os.open))
    monkeypatch.setattr(os, "scandir", guarded(os.scandir))
    monkeypatch.setattr("builtins.open", guarded(open))


def sparse(path: Path, size: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.truncate(size)


def test_over_the_limit_names_the_biggest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path, {"train.py": "x"})
    sparse(tmp_path / "model" / "weights" / "big.pt", 300 * MIB)
    for index in range(4):
        sparse(tmp_path / "data" / f"{index}.bin", 50 * MIB)
    sparse(tmp_path / "notes.pdf", 20 * MIB)
    sparse(tmp_path / "small.bin", MIB)
    sparse(tmp_path / "smaller.bin", MIB // 2)
    monkeypatch.setattr(tempfile, "mkstemp", lambda **_: pytest.fail("a file is written"))
    with pytest.raises(HeliostatError) as caught:
        pack(tmp_path)
    error = caught.value
    assert error.message.endswith("is too big to upload: 521.5 MiB, over 500.0 MiB")
    assert error.cause == (
        "`model/weights/big.pt` 300.0 MiB, `data/` 200.0 MiB, `notes.pdf` 20.0 MiB, "
        "`small.bin` 1.0 MiB, `smaller.bin` 512.0 KiB"
    )
    assert "`/model/weights/big.pt`" in error.hint
    assert ".gitignore" in error.hint and "excludes" in error.hint


def test_at_the_limit(tmp_path: Path) -> None:
    make(tmp_path, {"a": 60 * "x", "b": 40 * "x"})
    with pack(tmp_path, limit_bytes=100) as package:
        assert package.bytes == 100
    with pytest.raises(HeliostatError):
        pack(tmp_path, limit_bytes=99)
    with pack(tmp_path, ["b"], limit_bytes=60) as package:
        assert package.bytes == 60


def test_a_huge_tree_is_given_up_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(working_dir, "_MAX_COUNTED", 10)
    make(tmp_path, {f"{index:03}": 10 * "x" for index in range(100)})
    with pytest.raises(HeliostatError, match="100 B, over 50 B"):
        pack(tmp_path, limit_bytes=50)


def test_no_room_for_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(working_dir._Writer, "_hash", full)
    with pytest.raises(HeliostatError, match="could not write the package") as caught:
        pack(make(tmp_path, {"a": ""}))
    assert caught.value.cause == "No space left on device"
    assert "TMPDIR" in caught.value.hint


def test_an_interrupt_leaves_nothing(tmp_path: Path) -> None:
    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pack(make(tmp_path, {"a": "x"}), progress=interrupt)  # own_temp looks


# --- files that change meanwhile ------------------------------------------------------------------------------


def pack_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, act: Callable[[Path], object], **options: int
) -> Package:
    """Packs `first` and `second`; act(second) happens in the middle of the reading of `second`."""
    monkeypatch.setattr(working_dir, "_CHUNK", 10)
    make(tmp_path, {"first": 10 * "1", "second": 30 * "2"})
    os.utime(tmp_path / "second", (1, 1))

    def progress(done: int, total: int) -> None:
        if done == 20:
            act(tmp_path / "second")

    return pack(tmp_path, progress=progress, **options)


def test_a_file_that_grows_is_packed_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def grow(path: Path) -> None:
        with path.open("a") as file:
            file.write("more")

    with pack_while(tmp_path, monkeypatch, grow) as package, zipfile.ZipFile(package.data_path) as archive:
        assert archive.read("second") == 30 * b"2"
        assert package.bytes == 40


def test_a_file_that_is_replaced_is_packed_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def replace(path: Path) -> None:
        path.with_name("new").write_text("short")
        path.with_name("new").replace(path)

    with pack_while(tmp_path, monkeypatch, replace) as package, zipfile.ZipFile(package.data_path) as archive:
        assert archive.read("second") == 30 * b"2"


@pytest.mark.parametrize("text", [30 * "3", "", 15 * "3"])
def test_a_file_that_is_rewritten_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    with pytest.raises(HeliostatError, match="`second` changed while it was packed"):
        pack_while(tmp_path, monkeypatch, lambda path: path.write_text(text))


def between(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    """Acts after the look at the tree and before the first file is opened."""
    mkstemp = tempfile.mkstemp
    monkeypatch.setattr(tempfile, "mkstemp", lambda **options: (act(), mkstemp(**options))[1])


def test_a_file_that_goes_away_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path, {"a": "1", "d/b": "2", "c": "3"})
    between(monkeypatch, lambda: ((tmp_path / "a").unlink(), shutil.rmtree(tmp_path / "d")))
    with pack(tmp_path) as package:
        assert (package.files, package.bytes) == (1, 1)
    assert package.skipped == ("a (deleted meanwhile)", "d/b (deleted meanwhile)")


def test_a_file_that_becomes_a_pipe_does_not_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path, {"a": "1"})
    between(monkeypatch, lambda: ((tmp_path / "a").unlink(), os.mkfifo(tmp_path / "a")))
    with pack(tmp_path) as package:
        assert package.skipped == ("a (no longer a file)",)


def test_a_file_that_grows_over_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path, {"a": "1", "b": "2"})
    between(monkeypatch, lambda: sparse(tmp_path / "b", 10**9))
    with pytest.raises(HeliostatError, match="too big") as caught:
        pack(tmp_path)
    assert caught.value.cause.startswith("`b` 953.7 MiB")


# --- Ray itself -----------------------------------------------------------------------------------------------


class FakeGcs:
    """Where the Jobs API puts a package, as a node asks for it."""

    def __init__(self, package: Package) -> None:
        self.key = package.uri.encode()
        self.value = package.data_path.read_bytes()

    async def async_internal_kv_get(self, key: bytes, **_: object) -> bytes | None:
        return self.value if key == self.key else None


@pytest.mark.needs_ray
def test_ray_unpacks_it_to_the_same_tree(tmp_path: Path) -> None:
    packaging = pytest.importorskip("ray._private.runtime_env.packaging")
    files = {name: name for name in NASTY} | {"only/one/x.py": "1", "out/": "", "run.sh": "#!/bin/sh\n"}
    source = make(tmp_path / "source", files)
    (source / "run.sh").chmod(0o755)
    (source / "only" / "one" / "x.py").chmod(0o600)
    for folder in (source, source / "only"):  # the second has one folder at its top, which must stay
        target = tmp_path / f"{folder.name}-unpacked"
        target.mkdir()
        with pack(folder) as package:
            unpack = packaging.download_and_unpack_package(package.uri, str(target), FakeGcs(package))
            local = Path(asyncio.run(unpack))
        assert local.name == package.name.removesuffix(".zip")
        assert tree(local) == tree(folder)


@pytest.mark.needs_ray
def test_ray_unpacks_an_empty_one(tmp_path: Path) -> None:
    packaging = pytest.importorskip("ray._private.runtime_env.packaging")
    (tmp_path / "source").mkdir()
    with pack(tmp_path / "source") as package:
        local = asyncio.run(
            packaging.download_and_unpack_package(package.uri, str(tmp_path), FakeGcs(package))
        )
    assert tree(Path(local)) == {}


PATTERNS = st.sampled_from(
    ["a", "b/", "/a", "*.py", "a/b", "**/c", "a/**", "/b/*", "*", "!a", "!c.py", "!/b/c.py", "# a", "", "\\!a", "[ab]", "c?py"]
)  # fmt: skip
FILES = st.sampled_from([f"{one}{two}{three}" for one in ("", "a/", "b/") for two in ("", "a/", "c/") for three in ("a.py", "c.py", "d")])  # fmt: skip
IGNORES = st.dictionaries(
    st.sampled_from([".gitignore", ".rayignore", "a/.gitignore", "b/c/.rayignore"]),
    st.lists(PATTERNS, max_size=3),
)


@pytest.mark.needs_ray
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=150)
@given(files=st.sets(FILES, min_size=1), ignores=IGNORES, excludes=st.lists(PATTERNS, max_size=2))
def test_ray_packs_the_same_files(
    tmp_path_factory: pytest.TempPathFactory,
    files: set[str],
    ignores: dict[str, list[str]],
    excludes: list[str],
) -> None:
    """Whatever Ray packs, we pack; and the other way round where nothing is negated, and no folder hides itself."""
    packaging = pytest.importorskip("ray._private.runtime_env.packaging")
    with tempfile.TemporaryDirectory(dir=tmp_path_factory.getbasetemp()) as name:
        root = make(Path(name) / "root", dict.fromkeys(sorted(files), "x"))
        make(root, {path: "\n".join(lines) for path, lines in ignores.items()})
        archive_path = Path(name) / "ray.zip"
        packaging.create_package(str(root), archive_path, include_gitignore=True, excludes=excludes)
        with zipfile.ZipFile(archive_path) as archive:
            rays = set(archive.namelist())
        ours = set(names(root, excludes))
    assert rays <= ours
    lines = [line for group in (*ignores.values(), excludes) for line in group]
    if not any(line.startswith("!") or line in ("*", "a/**", "/b/*") for line in lines):
        assert ours == rays
