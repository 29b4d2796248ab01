"""Copies a file or a directory to or from a host, as a tar stream through a command that runs there.

The host needs `sh`, `tar`, `head` and `mktemp`. The copy is made beside its destination and then moved, so an interrupted
copy leaves no incomplete file.
"""

from __future__ import annotations

import contextlib
import io
import os
import secrets
import shutil
import stat
import subprocess
import tarfile
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from heliostat.common.errors import HeliostatError, UsageError

BLOCK, CHUNK = 512, 1 << 20
END_S = 5.0  # from the end of its input to SIGTERM, and from there to SIGKILL
TOP, END = "copy", "end"  # names in the stream: what is copied, and an empty file after it
PREFIX = ".heliostat-cp-"  # of the temporary directory beside the destination
OURS = "heliostat: "  # starts the messages of the scripts below
Progress = Callable[[int, "int | None"], None]  # bytes so far, of how many

_EXPAND = """
cd || exit; p=$1; case $p in "~") p=$HOME;; "~/"*) p=$HOME/${p#"~/"};; esac
"""
# $1: the destination; $2: the name of the source; $3: the length of the stream; $4: prefix of the temporary directory
_RECEIVE = (
    _EXPAND
    + """
if [ -d "$p" ]; then d=$p n=$2; else
  case $p in */) printf 'heliostat: no such directory: %s\\n' "$p" >&2; exit 1;; esac
  d=$(dirname -- "$p") n=$(basename -- "$p")
fi
[ -d "$d" ] || { printf 'heliostat: no such directory: %s\\n' "$d" >&2; exit 1; }
u=$(mktemp -d "$d/$4XXXXXX") || exit 1
trap 'rm -rf -- "$u"' EXIT; trap 'exit 1' HUP INT TERM
head -c "$3" | tar -xof - -C "$u" && [ -e "$u/end" ] || { echo 'heliostat: the stream ended early' >&2; exit 1; }
if [ ! -d "$d/$n" ]; then mv -f -- "$u/copy" "$d/$n"
elif [ -d "$u/copy" ]; then cp -RPp -- "$u/copy/." "$d/$n/"
else printf 'heliostat: is a directory: %s\\n' "$d/$n" >&2; exit 1; fi
"""
)
# $1: the source; $2: a line that separates the output of start files from the stream
_SEND = (
    _EXPAND
    + """
[ -e "$p" ] || { printf 'heliostat: no such file or directory: %s\\n' "$p" >&2; exit 1; }
p=$(cd -- "$(dirname -- "$p")" && readlink -f -- "$(basename -- "$p")") || exit 1
printf '%s\\n' "$2"; cd -- "$(dirname -- "$p")" || exit 2
tar -cf - -- "$(basename -- "$p")"; [ $? -le 1 ]  # 1: a file changed meanwhile
"""
)


@dataclass(frozen=True)
class Copied:
    files: int
    bytes: int


@dataclass(frozen=True)
class _Entry:
    path: Path
    info: tarfile.TarInfo

    def header(self) -> bytes:
        return self.info.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape")

    def length(self) -> int:
        return len(self.header()) + -(-self.info.size // BLOCK) * BLOCK


def send(
    source: Path, target: str, attach: Callable[[Sequence[str]], Sequence[str]], progress: Progress
) -> Copied:
    """Copies the file or directory to the host. attach: makes the command on this host that runs an argv there."""
    entries = [*_entries(source), _Entry(source, tarfile.TarInfo(END))]
    length = sum(entry.length() for entry in entries) + 2 * BLOCK
    script = ["sh", "-c", _RECEIVE, "sh", target, source.absolute().name, str(length), PREFIX]
    with _running(attach(script), f"could not copy to `{target}`", stdin=subprocess.PIPE) as process:
        assert process.stdin
        sent = 0
        with contextlib.suppress(BrokenPipeError):  # the command's exit code and message tell why
            for entry in entries:
                for chunk in _stream(entry):
                    process.stdin.write(chunk)
                    sent += len(chunk)
                    progress(sent, length)
            process.stdin.write(bytes(2 * BLOCK))
            process.stdin.close()
    return _count([entry.info for entry in entries[:-1]])


def fetch(
    source: str, target: Path, attach: Callable[[Sequence[str]], Sequence[str]], progress: Progress
) -> Copied:
    """Copies the file or directory from the host."""
    if not hasattr(tarfile, "tar_filter"):
        raise HeliostatError(
            "this Python cannot unpack an archive safely", hint="use Python 3.10.12, 3.11.4 or later"
        )
    parent = target if target.is_dir() else target.parent
    if not parent.is_dir():
        raise UsageError(f"there is no directory `{parent}`", hint=f"mkdir -p {parent}")
    marker = f"heliostat-{secrets.token_hex(8)}"
    members: list[tarfile.TarInfo] = []
    script = ["sh", "-c", _SEND, "sh", source, marker]
    with (
        tempfile.TemporaryDirectory(prefix=PREFIX, dir=parent) as folder,
        _running(attach(script), f"could not copy `{source}`", stdout=subprocess.PIPE) as process,
    ):
        assert process.stdout
        while (line := process.stdout.readline()) and line.rstrip(b"\r\n") != marker.encode():
            pass  # output of the shell's start files
        try:
            members = _unpack(_Counted(process.stdout, progress), Path(folder)) if line else []
        except tarfile.TarError as error:
            process.stdout.close()
            process.wait()
            raise HeliostatError("the copy is incomplete", cause=process.message() or str(error)) from None
        except OSError as error:
            raise HeliostatError(
                f"could not write to `{parent}`", cause=error.strerror or str(error)
            ) from None
        process.check()
        top = members[0].name
        name = source.rstrip("/").rpartition("/")[2]
        inside = target / (top if name in ("", ".", "..", "~") else name)
        _place(Path(folder) / top, inside if parent is target else target)
    return _count(members)


def _unpack(stream: _Counted, folder: Path) -> list[tarfile.TarInfo]:
    """Unpacks the stream; a member that would leave the folder is refused."""
    members: list[tarfile.TarInfo] = []
    with tarfile.open(fileobj=stream, mode="r|", errorlevel=1) as archive:
        archive.extractall(folder, _note(archive, members), filter="tar")
    return members


def _note(archive: Iterable[tarfile.TarInfo], members: list[tarfile.TarInfo]) -> Iterator[tarfile.TarInfo]:
    for member in archive:
        members.append(member)
        yield member


def _place(copy: Path, target: Path) -> None:
    """Moves the copy to its destination; into a directory that exists, file by file."""
    if not copy.is_dir() or copy.is_symlink():
        if target.is_dir():
            raise UsageError(f"`{target}` is a directory")
        os.replace(copy, target)
    elif not target.exists():
        os.rename(copy, target)
    else:
        for folder, folders, files in os.walk(copy):
            for name in [*folders, *files]:
                path = Path(folder, name)
                goal = target / path.relative_to(copy)
                if path.is_dir() and not path.is_symlink() and goal.is_dir():
                    shutil.copystat(path, goal)
                elif not path.is_dir() or path.is_symlink() or not goal.exists():
                    os.replace(path, goal)


class _Counted(io.RawIOBase):
    """A stream to read that reports its progress."""

    def __init__(self, stream: IO[bytes], progress: Progress) -> None:
        self._stream, self._progress, self._bytes = stream, progress, 0

    def read(self, size: int = -1) -> bytes:
        data = self._stream.read(size)
        self._bytes += len(data)
        self._progress(self._bytes, None)
        return data


class _Process(subprocess.Popen[bytes]):
    """A command whose messages are in a file."""

    messages: IO[bytes]
    purpose: str

    def check(self) -> None:
        """Raises HeliostatError if the command failed."""
        if self.wait():
            cause = self.message() or f"the command ended with code {self.returncode}"
            raise HeliostatError(self.purpose, cause=cause)

    def message(self) -> str:
        """The last line that the script printed to stderr, else the last line of all."""
        self.messages.seek(0)
        lines = [line.strip() for line in self.messages.read().decode("utf-8", "replace").splitlines()]
        ours = [line.removeprefix(OURS) for line in lines if line.startswith(OURS)]
        return next(filter(None, reversed([*lines, *ours])), "")[-300:]


@contextlib.contextmanager
def _running(
    argv: Sequence[str], purpose: str, *, stdin: int = subprocess.DEVNULL, stdout: int = subprocess.DEVNULL
) -> Iterator[_Process]:
    """The command while the block runs. Raises HeliostatError if it fails."""
    with tempfile.TemporaryFile() as messages:
        process = _Process(list(argv), stdin=stdin, stdout=stdout, stderr=messages)
        process.messages, process.purpose = messages, purpose
        try:
            yield process
            process.check()
        finally:
            for stream in (process.stdin, process.stdout):
                with contextlib.suppress(OSError):
                    stream.close() if stream else None  # the script ends, and removes its directory
            for stop in (None, process.terminate, process.kill):
                if stop:
                    stop()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(END_S)


def _entries(source: Path) -> Iterator[_Entry]:
    """The file, or the directory and everything in it. Sockets, pipes and devices are left out."""
    if not os.path.exists(source):
        raise UsageError(f"there is no file or directory `{source}`")
    pending = [(Path(os.path.realpath(source)), TOP)]
    while pending:
        path, name = pending.pop()
        try:
            status = path.lstat()
            info = tarfile.TarInfo(name)
            info.mode, info.mtime = stat.S_IMODE(status.st_mode), int(status.st_mtime)
            if stat.S_ISDIR(status.st_mode):
                info.type = tarfile.DIRTYPE
                children = sorted(os.listdir(path), reverse=True)
                pending += [(path / child, f"{name}/{child}") for child in children]
            elif stat.S_ISLNK(status.st_mode):
                info.type, info.linkname = tarfile.SYMTYPE, os.readlink(path)
            elif stat.S_ISREG(status.st_mode):
                info.size = status.st_size
                if not os.access(path, os.R_OK):
                    raise PermissionError(13, "Permission denied")
            else:
                continue
        except OSError as error:
            raise UsageError(f"could not read `{path}`", cause=error.strerror or str(error)) from None
        yield _Entry(path, info)


def _stream(entry: _Entry) -> Iterator[bytes]:
    """The header and the content. Raises HeliostatError if the file changes its length meanwhile."""
    yield entry.header()
    left = entry.info.size
    if not left:
        return
    with open(entry.path, "rb") as file:
        while left:
            chunk = file.read(min(CHUNK, left))
            if not chunk:
                raise HeliostatError(f"`{entry.path}` became shorter while it was copied")
            left -= len(chunk)
            yield chunk
    yield bytes(-entry.info.size % BLOCK)


def _count(infos: Sequence[tarfile.TarInfo]) -> Copied:
    files = [info for info in infos if not info.isdir()]
    return Copied(len(files), sum(info.size for info in files))
