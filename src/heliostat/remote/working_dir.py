"""Packs a working directory for Ray's Jobs API as Ray's own client does, without importing Ray.

What Ray 2.60 does (`ray/_private/runtime_env/packaging.py`) and we do: `.gitignore` and `.rayignore` of every
folder, each relative to its folder, and one that matches is enough to leave a file out; the same default excludes
and the same two environment variables; empty folders kept; modes kept; no parent folder in the zip, as Ray removes
none for `gcs://`. What we do otherwise: modes count in the uri, links that lead out are not followed, a name that
Ray would drop on the node is reported here, and `!folder/` in an ignore file works as in git.
"""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, BinaryIO

from heliostat.common.errors import Code, HeliostatError, UsageError, disk_code
from heliostat.common.units import format_bytes
from heliostat.state.ownership import temp_directory

if TYPE_CHECKING:
    from pathspec import GitIgnoreSpec

_NEVER = frozenset({".git", "__pycache__", ".venv", ".heliostat"})
_RAY_DEFAULT_EXCLUDES = ".git,.venv,venv,__pycache__"
_CHUNK = 1 << 20
# a pipe must not hold us up, and no newline be changed; each system has its own of these
_READ = os.O_RDONLY | sum(getattr(os, name, 0) for name in ("O_NONBLOCK", "O_CLOEXEC", "O_BINARY"))
_ENOUGH = 100_000  # over the limit and this many entries seen: more of them tell a person nothing new


@dataclass(frozen=True)
class Package:
    """A packed folder. As a context manager it removes its temporary file at the end.

    bytes: before compression. skipped: `path (why)` of what could not or should not travel.
    """

    uri: str
    name: str
    data_path: Path
    files: int
    bytes: int
    skipped: tuple[str, ...] = ()

    def __enter__(self) -> Package:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.data_path.unlink(missing_ok=True)


@dataclass(frozen=True)
class _Entry:
    """A file, or an empty folder; `path` is relative, with `/`."""

    path: str
    size: int
    is_folder: bool = False


@dataclass(frozen=True)
class _Rules:
    """The patterns of one ignore file; they speak of what is under `base` (`` or `a/b/`)."""

    base: str
    spec: GitIgnoreSpec

    def leave_out(self, path: str, is_folder: bool) -> bool:
        name = path[len(self.base) :]
        if not is_folder:
            return self.spec.match_file(name)
        # The last pattern that matches decides, as in git; the library's own answer is meant for files.
        patterns = [pattern for pattern in self.spec.patterns if pattern.include is not None]
        said = [pattern.include for pattern in patterns if pattern.match_file(name + "/")]
        if not said or not said[-1]:
            return False
        # `data/` with `!data/keep.csv`: Ray looks inside and keeps that one.
        return all(pattern.include for pattern in patterns) or self.spec.match_file(name)


@dataclass(frozen=True)
class _Folder:
    """One folder to walk: `base` is `` or `a/b/`; `above` has (device, inode) of it and of all above it."""

    base: str
    rules: tuple[_Rules, ...]
    above: frozenset[tuple[int, int]]


def pack(
    folder: Path,
    excludes: Sequence[str] = (),
    *,
    progress: Callable[[int, int], None] | None = None,
    limit_bytes: int = 500 * 2**20,
) -> Package:
    """Packs `folder`; `excludes` are patterns as in `.gitignore`, relative to it.

    progress(done, total): in bytes, before compression. The uri says what was read: the same paths, modes and
    contents give the same uri. A file that only grows meanwhile is packed as long as it was when it was opened;
    one that is rewritten in place is an error.
    """
    skipped: list[str] = []
    root = os.path.realpath(folder)
    entries = _survey(folder, root, excludes, limit_bytes, skipped)
    handle, name = tempfile.mkstemp(prefix="heliostat-", suffix=".zip", dir=temp_directory())  # 0600
    try:
        with os.fdopen(handle, "wb") as out:
            writer = _Writer(root, entries, limit_bytes, skipped, progress)
            writer.write(out)
    except OSError as error:
        _remove(name)
        raise HeliostatError(
            f"the package of `{folder}` cannot be written",
            cause=error.strerror or str(error),
            details=name,
            hint="set `TMPDIR` to a folder with room",
            code=disk_code(error),
        ) from error
    except BaseException:
        _remove(name)
        raise
    package = f"_ray_pkg_{writer.digest.hexdigest()[:16]}.zip"
    return Package(
        uri=f"gcs://{package}",
        name=package,
        data_path=Path(name),
        files=writer.files,
        bytes=writer.done,
        skipped=tuple(sorted(skipped)),
    )


def measure(folder: Path, excludes: Sequence[str] = (), limit_bytes: int = 500 * 2**20) -> int:
    """The bytes that `pack` would pack, before compression."""
    skipped: list[str] = []
    entries = _survey(folder, os.path.realpath(folder), excludes, limit_bytes, skipped)
    return sum(entry.size for entry in entries)


def _remove(name: str) -> None:
    with suppress(OSError):
        os.unlink(name)


# --- what to pack -------------------------------------------------------------------------------------------


def _survey(folder: Path, root: str, excludes: Sequence[str], limit: int, skipped: list[str]) -> list[_Entry]:
    """Every entry to pack, sorted; raises when they are over the limit, before anything is written."""
    try:
        about = os.stat(root)
    except OSError as error:
        raise UsageError(
            f"the working directory `{folder}` cannot be packed",
            cause=error.strerror or str(error),
            code=Code.WORKING_DIR_UNREADABLE,
        ) from error
    if not stat.S_ISDIR(about.st_mode):
        raise UsageError(
            f"the working directory `{folder}` cannot be packed",
            cause="it is not a folder",
            hint=f"name the folder that holds it: `{Path(folder).parent}`",
            code=Code.WORKING_DIR_UNREADABLE,
        )
    defaults = os.environ.get("RAY_OVERRIDE_RUNTIME_ENV_DEFAULT_EXCLUDES", _RAY_DEFAULT_EXCLUDES)
    patterns = [*(word.strip() for word in defaults.split(",")), *excludes]
    top = _Folder("", (_rules("", patterns, "excludes"),), frozenset({(about.st_dev, about.st_ino)}))
    entries: list[_Entry] = []
    total = 0
    for entry in _walk(root, top, skipped):
        entries.append(entry)
        total += entry.size
        if total > limit and len(entries) >= _ENOUGH:
            break
    if total > limit:
        raise _over(folder, entries, total, limit)
    return sorted(entries, key=lambda entry: entry.path.encode())


def _walk(root: str, top: _Folder, skipped: list[str]) -> Iterator[_Entry]:
    with_gitignore = os.environ.get("RAY_RUNTIME_ENV_IGNORE_GITIGNORE", "0") != "1"
    ignore_files = (".gitignore", ".rayignore") if with_gitignore else (".rayignore",)
    todo = [top]
    while todo:
        here = todo.pop()
        try:
            with os.scandir(os.path.join(root, here.base)) as found:
                children = sorted(found, key=lambda child: os.fsencode(child.name))
        except (FileNotFoundError, NotADirectoryError):
            skipped.append(f"{_shown(here.base)} (went away meanwhile)")
            continue
        except OSError as error:
            raise _unreadable(here.base or ".", error) from error
        if not children and here.base:
            yield _Entry(here.base, 0, is_folder=True)
        names = {child.name for child in children}
        own = [_read_rules(root, here.base, name) for name in ignore_files if name in names]
        rules = (*here.rules, *(rule for rule in own if rule is not None))
        for child in children:
            path = here.base + child.name
            if child.name in _NEVER:
                continue
            if why := _unfit(path):
                skipped.append(f"{_shown(path)} ({why})")
                continue
            found_entry = _look(root, path, child, here, rules, skipped)
            if isinstance(found_entry, _Folder):
                todo.append(found_entry)
            elif found_entry is not None:
                yield found_entry


def _look(
    root: str,
    path: str,
    child: os.DirEntry[str],
    here: _Folder,
    rules: tuple[_Rules, ...],
    skipped: list[str],
) -> _Entry | _Folder | None:
    """What one name in a folder is: a file to pack, a folder to walk, or neither."""
    try:
        about = child.stat()  # of what a link leads to
    except (FileNotFoundError, NotADirectoryError):
        about = None
    except OSError as error:
        if not child.is_symlink():
            raise _unreadable(path, error) from error
        about = None
    is_folder = about is not None and stat.S_ISDIR(about.st_mode)
    if any(rule.leave_out(path, is_folder) for rule in rules):
        return None
    why = ""
    if about is None:
        why = "a link that leads nowhere" if child.is_symlink() else "went away meanwhile"
    elif child.is_symlink():
        why = _bad_link(root, os.path.realpath(child.path))
    if about is None or why:
        skipped.append(f"{_shown(path)} ({why})")
        return None
    if is_folder:
        identity = (about.st_dev, about.st_ino)
        if identity not in here.above:
            return _Folder(path + "/", rules, here.above | {identity})
        skipped.append(f"{_shown(path)} (a link to a folder that holds it)")
        return None
    if stat.S_ISREG(about.st_mode):
        return _Entry(path, about.st_size)
    skipped.append(f"{_shown(path)} (not a file: a socket, a pipe or a device)")
    return None


def _bad_link(root: str, target: str) -> str:
    if os.path.commonpath([root, target]) != root:
        return "a link that leads out of the folder"
    if _NEVER.intersection(os.path.relpath(target, root).split(os.sep)):
        return "a link to what is always left out"
    return ""


def _unfit(path: str) -> str:
    """Why a name cannot travel in a zip that Ray unpacks; empty when it can."""
    try:
        path.encode()
    except UnicodeEncodeError:
        return "its name is not UTF-8, which a zip cannot hold"
    if "\\" in path or path[1:2] == ":":
        return "Ray does not unpack a name with a backslash or a drive letter"
    return ""


def _read_rules(root: str, base: str, name: str) -> _Rules | None:
    path = os.path.join(root, base, name)
    if not os.path.isfile(path):
        return None
    try:
        with open(path, encoding="utf-8-sig", errors="surrogateescape") as file:
            lines = [line.rstrip("\n") for line in file]
    except OSError as error:
        raise _unreadable(base + name, error) from error
    return _rules(base, lines, base + name)


def _rules(base: str, lines: Sequence[str], source: str) -> _Rules:
    from pathspec import GitIgnoreSpec

    try:
        return _Rules(base, GitIgnoreSpec.from_lines(lines))
    except ValueError as error:  # pathspec's own error is one
        raise UsageError(
            f"the patterns of `{_shown(source)}` cannot be understood",
            cause=str(error),
            hint="write them as for git: `man gitignore`",
        ) from error


# --- packing ------------------------------------------------------------------------------------------------


class _Writer:
    """Writes the entries into a zip and hashes what it wrote: what was read is what the uri names."""

    def __init__(
        self,
        root: str,
        entries: list[_Entry],
        limit: int,
        skipped: list[str],
        progress: Callable[[int, int], None] | None,
    ) -> None:
        self.root = root
        self.entries = entries
        self.limit = limit
        self.skipped = skipped
        self.progress = progress
        self.total = sum(entry.size for entry in entries)
        self.done = 0
        self.files = 0
        self.digest = hashlib.sha256()

    def write(self, out: BinaryIO) -> None:
        with zipfile.ZipFile(out, "w") as archive:
            for entry in self.entries:
                if entry.is_folder:
                    archive.writestr(_info(entry.path, stat.S_IFDIR | 0o755, 0), b"")
                    self._note(entry.path, 0o755, b"")
                    continue
                try:
                    handle = os.open(os.path.join(self.root, entry.path), _READ)
                except (FileNotFoundError, NotADirectoryError):
                    self.skipped.append(f"{_shown(entry.path)} (went away meanwhile)")
                    continue
                except OSError as error:
                    raise _unreadable(entry.path, error) from error
                with os.fdopen(handle, "rb", buffering=0) as file:
                    self._add(archive, entry, file)

    def _add(self, archive: zipfile.ZipFile, entry: _Entry, file: BinaryIO) -> None:
        before = os.fstat(file.fileno())
        if not stat.S_ISREG(before.st_mode):
            self.skipped.append(f"{_shown(entry.path)} (not a file any more)")
            return
        self.total += before.st_size - entry.size
        if self.total > self.limit:
            grown = [_Entry(e.path, before.st_size) if e is entry else e for e in self.entries]
            raise _over(Path(self.root), grown, self.total, self.limit)
        content = hashlib.sha256()
        mode = stat.S_IMODE(before.st_mode) & 0o777
        left = before.st_size
        with archive.open(_info(entry.path, stat.S_IFREG | mode, left), "w") as out:
            while left and (data := _read(file, min(left, _CHUNK), entry.path)):
                out.write(data)
                content.update(data)
                left -= len(data)
                self.done += len(data)
                if self.progress is not None:
                    self.progress(self.done, self.total)
        after = os.fstat(file.fileno())
        same_size = after.st_size == before.st_size
        if left or after.st_size < before.st_size or (same_size and after.st_mtime_ns != before.st_mtime_ns):
            raise HeliostatError(
                f"`{_shown(entry.path)}` changed while it was packed",
                hint="try again, or leave it out with `.gitignore`, `.rayignore` or `excludes`",
                code=Code.WORKING_DIR_CHANGED,
            )
        self.files += 1
        self._note(entry.path, mode, content.digest())

    def _note(self, path: str, mode: int, content: bytes) -> None:
        # A path holds no NUL and a digest has one length: two trees cannot give the same bytes here.
        self.digest.update(b"%s\0%o\0%s\0" % (path.encode(), mode, content))


def _info(path: str, mode: int, size: int) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo(path, date_time=(1980, 1, 1, 0, 0, 0))
    info.create_system = 3  # Unix: the mode below counts
    info.external_attr = mode << 16
    info.file_size = size  # so that zipfile knows whether it needs its large form
    info.compress_type = zipfile.ZIP_STORED if stat.S_ISDIR(mode) else zipfile.ZIP_DEFLATED
    return info


def _read(file: BinaryIO, size: int, path: str) -> bytes:
    try:
        return file.read(size)
    except OSError as error:
        raise _unreadable(path, error) from error


# --- words --------------------------------------------------------------------------------------------------


def _shown(path: str) -> str:
    """The path on one line, whatever is in it."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in path)


def _unreadable(path: str, error: OSError) -> HeliostatError:
    return HeliostatError(
        f"`{_shown(path)}` cannot be read, so the working directory cannot be packed",
        cause=error.strerror or str(error),
        hint="make it readable, or leave it out with `.gitignore`, `.rayignore` or `excludes`",
        code=Code.WORKING_DIR_UNREADABLE,
    )


def _over(folder: Path, entries: list[_Entry], total: int, limit: int) -> HeliostatError:
    biggest = _biggest(entries)
    return UsageError(
        f"the working directory `{folder}` is too big to send: {format_bytes(total)}, over {format_bytes(limit)}",
        cause=", ".join(f"`{_shown(path)}` {format_bytes(size)}" for path, size in biggest),
        hint=f"add what the job does not need, say `/{_shown(biggest[0][0])}`, to `.gitignore` or `excludes`",
        code=Code.WORKING_DIR_TOO_LARGE,
    )


def _biggest(entries: list[_Entry], count: int = 5) -> list[tuple[str, int]]:
    """The files and folders to blame. Of a folder that is mostly one thing, that thing; nothing twice."""
    sizes: dict[str, int] = {}
    for entry in entries:
        parts = entry.path.split("/")
        for depth in range(1, len(parts)):
            above = "/".join(parts[:depth]) + "/"
            sizes[above] = sizes.get(above, 0) + entry.size
        sizes[entry.path] = entry.size
    heaviest: dict[str, int] = {}
    for path, size in sizes.items():
        parent = path.rstrip("/").rpartition("/")[0] + "/"
        heaviest[parent] = max(size, heaviest.get(parent, 0))
    blamed: list[tuple[str, int]] = []
    for path, size in sorted(sizes.items(), key=lambda item: (-item[1], item[0])):
        inside = any(above.endswith("/") and path.startswith(above) for above, _ in blamed)
        if size and not inside and heaviest.get(path, 0) <= 0.8 * size:
            blamed.append((path, size))
        if len(blamed) == count:
            break
    return blamed
