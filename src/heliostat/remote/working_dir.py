"""Packs a working directory for Ray's Jobs API as Ray's own client does, without importing Ray.

The same as in Ray 2.60 (`ray/_private/runtime_env/packaging.py`): `.gitignore` and `.rayignore` of every directory apply,
relative to it, and one match excludes a file; the default excludes and the two environment variables; empty directories and
modes are kept; the zip has no parent directory, because Ray removes none for `gcs://`. Different from Ray: the uri depends
on modes, links to targets outside are not followed, names that Ray would drop on the node are reported here, and
`!directory/` in an ignore file works as in git.
"""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, BinaryIO

from heliostat.common.errors import Code, HeliostatError, UsageError, disk_code
from heliostat.common.units import format_bytes
from heliostat.state.ownership import temp_directory

if TYPE_CHECKING:
    from pathspec import GitIgnoreSpec

_ALWAYS_EXCLUDED = frozenset({".git", "__pycache__", ".venv", ".heliostat"})
_RAY_DEFAULT_EXCLUDES = ".git,.venv,venv,__pycache__"
_CHUNK = 1 << 20
# O_NONBLOCK: do not wait for a writer of a pipe. O_BINARY: do not convert newlines. A system may lack some of these.
_READ = os.O_RDONLY | sum(getattr(os, name, 0) for name in ("O_NONBLOCK", "O_CLOEXEC", "O_BINARY"))
_MAX_COUNTED = 100_000  # over the size limit, stop the walk after this many entries


@dataclass(frozen=True)
class Package:
    """A packed directory. As a context manager it removes its temporary file at the end.

    bytes: before compression. skipped: `path (reason)` of entries that cannot be packed. ignored: the files and directories
    that the user's patterns exclude, by the file that has the pattern; the default excludes are not in it.
    """

    uri: str
    name: str
    data_path: Path
    files: int
    bytes: int
    skipped: tuple[str, ...] = ()
    ignored: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def describe_left_out(self) -> str:
        """What the package does not have and why, on one line; "": everything is in it."""
        groups = [(paths, source) for source, paths in self.ignored.items()]
        parts = [f"{_list_few(paths)} ({source})" for paths, source in groups]
        if self.skipped:
            parts.append(_list_few(self.skipped))
        count = len(self.skipped) + sum(len(paths) for paths, _ in groups)
        return f"left out of the upload: {count}, {'; '.join(parts)}" if parts else ""

    def __enter__(self) -> Package:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.data_path.unlink(missing_ok=True)


@dataclass(frozen=True)
class _Entry:
    """A file or an empty directory; path: relative, with `/`."""

    path: str
    size: int
    is_folder: bool = False


@dataclass(frozen=True)
class _Rules:
    """The patterns of one ignore file, which apply below `base` (`` or `a/b/`). silent: those whose matches are not reported."""

    base: str
    spec: GitIgnoreSpec
    source: str
    silent: _Rules | None = None

    def excludes(self, path: str, is_folder: bool) -> bool:
        name = path[len(self.base) :]
        if not is_folder:
            return self.spec.match_file(name)
        # The last matching pattern decides, as in git; match_file of the library is for files.
        patterns = [pattern for pattern in self.spec.patterns if pattern.include is not None]
        matches = [pattern.include for pattern in patterns if pattern.match_file(name + "/")]
        if not matches or not matches[-1]:
            return False
        # `data/` with `!data/keep.csv`: Ray walks the directory and keeps that file.
        return all(pattern.include for pattern in patterns) or self.spec.match_file(name)


class _LeftOut(list[str]):
    """`path (reason)` of entries that cannot be packed; ignored: the entries that patterns exclude, by their source."""

    def __init__(self) -> None:
        super().__init__()
        self.ignored: dict[str, list[str]] = {}


@dataclass(frozen=True)
class _Folder:
    """One directory to walk. base: `` or `a/b/`. above: (device, inode) of it and of its parents."""

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

    progress(done, total): in bytes, before compression. The uri depends on the content that was read: the same paths,
    modes and contents give the same uri. A file that grows meanwhile is packed with its size at open; a file that is
    rewritten in place is an error.
    """
    skipped = _LeftOut()
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
            f"could not write the package of `{folder}`",
            cause=error.strerror or str(error),
            details=name,
            hint="set `TMPDIR` to a directory with enough space",
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
        ignored={source: tuple(sorted(paths)) for source, paths in sorted(skipped.ignored.items())},
    )


def measure(folder: Path, excludes: Sequence[str] = (), limit_bytes: int = 500 * 2**20) -> int:
    """The size that `pack` would pack, in bytes before compression."""
    entries = _survey(folder, os.path.realpath(folder), excludes, limit_bytes, _LeftOut())
    return sum(entry.size for entry in entries)


def _remove(name: str) -> None:
    with suppress(OSError):
        os.unlink(name)


# --- entries to pack ----------------------------------------------------------------------------------------


def _survey(folder: Path, root: str, excludes: Sequence[str], limit: int, skipped: _LeftOut) -> list[_Entry]:
    """Every entry to pack, sorted. Raises if they exceed the limit, before anything is written."""
    try:
        status = os.stat(root)
    except OSError as error:
        raise UsageError(
            f"the working directory `{folder}` cannot be packed",
            cause=error.strerror or str(error),
            code=Code.WORKING_DIR_UNREADABLE,
        ) from error
    if not stat.S_ISDIR(status.st_mode):
        raise UsageError(
            f"the working directory `{folder}` cannot be packed",
            cause="it is not a directory",
            hint=f"give its directory: `{Path(folder).parent}`",
            code=Code.WORKING_DIR_UNREADABLE,
        )
    defaults = os.environ.get("RAY_OVERRIDE_RUNTIME_ENV_DEFAULT_EXCLUDES", _RAY_DEFAULT_EXCLUDES)
    default = [pattern.strip() for pattern in defaults.split(",")]
    # one list: `excludes` may take back a default by `!venv`
    rules = (replace(_rules("", [*default, *excludes], "excludes"), silent=_rules("", default, "defaults")),)
    top = _Folder("", rules, frozenset({(status.st_dev, status.st_ino)}))
    entries: list[_Entry] = []
    total = 0
    for entry in _walk(root, top, skipped):
        entries.append(entry)
        total += entry.size
        if total > limit and len(entries) >= _MAX_COUNTED:
            break
    if total > limit:
        raise _over(folder, entries, total, limit)
    return sorted(entries, key=lambda entry: entry.path.encode())


def _walk(root: str, top: _Folder, skipped: _LeftOut) -> Iterator[_Entry]:
    with_gitignore = os.environ.get("RAY_RUNTIME_ENV_IGNORE_GITIGNORE", "0") != "1"
    ignore_files = (".gitignore", ".rayignore") if with_gitignore else (".rayignore",)
    todo = [top]
    while todo:
        here = todo.pop()
        try:
            with os.scandir(os.path.join(root, here.base)) as found:
                children = sorted(found, key=lambda child: os.fsencode(child.name))
        except (FileNotFoundError, NotADirectoryError):
            skipped.append(f"{_shown(here.base)} (deleted meanwhile)")
            continue
        except OSError as error:
            raise _unreadable(here.base or ".", error) from error
        if not children and here.base:
            yield _Entry(here.base, 0, is_folder=True)
        names = {child.name for child in children}
        found_rules = [_read_rules(root, here.base, name) for name in ignore_files if name in names]
        rules = (*here.rules, *(rule for rule in found_rules if rule is not None))
        for child in children:
            path = here.base + child.name
            if child.name in _ALWAYS_EXCLUDED:
                continue
            if reason := _invalid_name(path):
                skipped.append(f"{_shown(path)} ({reason})")
                continue
            found_entry = _classify(root, path, child, here, rules, skipped)
            if isinstance(found_entry, _Folder):
                todo.append(found_entry)
            elif found_entry is not None:
                yield found_entry


def _classify(
    root: str,
    path: str,
    child: os.DirEntry[str],
    here: _Folder,
    rules: tuple[_Rules, ...],
    skipped: _LeftOut,
) -> _Entry | _Folder | None:
    """One entry of a directory: a file to pack, a directory to walk, or None."""
    try:
        status = child.stat()  # of a link's target
    except (FileNotFoundError, NotADirectoryError):
        status = None
    except OSError as error:
        if not child.is_symlink():
            raise _unreadable(path, error) from error
        status = None
    is_folder = status is not None and stat.S_ISDIR(status.st_mode)
    for rule in rules:
        if rule.excludes(path, is_folder):
            if rule.silent is None or not rule.silent.excludes(path, is_folder):
                skipped.ignored.setdefault(_shown(rule.source), []).append(_shown(path) + "/" * is_folder)
            return None
    reason = ""
    if status is None:
        reason = "a link without a target" if child.is_symlink() else "deleted meanwhile"
    elif child.is_symlink():
        reason = _bad_link(root, os.path.realpath(child.path))
    if status is None or reason:
        skipped.append(f"{_shown(path)} ({reason})")
        return None
    if is_folder:
        identity = (status.st_dev, status.st_ino)
        if identity not in here.above:
            return _Folder(path + "/", rules, here.above | {identity})
        skipped.append(f"{_shown(path)} (a link to one of its parents)")
        return None
    if stat.S_ISREG(status.st_mode):
        return _Entry(path, status.st_size)
    skipped.append(f"{_shown(path)} (not a file: a socket, a pipe or a device)")
    return None


def _bad_link(root: str, target: str) -> str:
    if os.path.commonpath([root, target]) != root:
        return "a link to a target outside the directory"
    if _ALWAYS_EXCLUDED.intersection(os.path.relpath(target, root).split(os.sep)):
        return "a link to an excluded target"
    return ""


def _invalid_name(path: str) -> str:
    """Why Ray cannot unpack this name from a zip; empty if it can."""
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
        return _Rules(base, GitIgnoreSpec.from_lines(lines), source)
    except ValueError as error:  # the base class of pathspec's error
        raise UsageError(
            f"the patterns of `{_shown(source)}` are invalid",
            cause=str(error),
            hint="write them as for git: `man gitignore`",
        ) from error


# --- packing ------------------------------------------------------------------------------------------------


class _Writer:
    """Writes the entries into a zip and hashes the written content for the uri."""

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
                    self._hash(entry.path, 0o755, b"")
                    continue
                try:
                    handle = os.open(os.path.join(self.root, entry.path), _READ)
                except (FileNotFoundError, NotADirectoryError):
                    self.skipped.append(f"{_shown(entry.path)} (deleted meanwhile)")
                    continue
                except OSError as error:
                    raise _unreadable(entry.path, error) from error
                with os.fdopen(handle, "rb", buffering=0) as file:
                    self._add(archive, entry, file)

    def _add(self, archive: zipfile.ZipFile, entry: _Entry, file: BinaryIO) -> None:
        before = os.fstat(file.fileno())
        if not stat.S_ISREG(before.st_mode):
            self.skipped.append(f"{_shown(entry.path)} (no longer a file)")
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
                hint="try again, or exclude it with `.gitignore`, `.rayignore` or `excludes`",
                code=Code.WORKING_DIR_CHANGED,
            )
        self.files += 1
        self._hash(entry.path, mode, content.digest())

    def _hash(self, path: str, mode: int, content: bytes) -> None:
        # A path contains no NUL and a digest has a fixed length: two trees cannot give the same bytes here.
        self.digest.update(b"%s\0%o\0%s\0" % (path.encode(), mode, content))


def _info(path: str, mode: int, size: int) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo(path, date_time=(1980, 1, 1, 0, 0, 0))
    info.create_system = 3  # Unix: external_attr contains the mode
    info.external_attr = mode << 16
    info.file_size = size  # zipfile chooses ZIP64 by it
    info.compress_type = zipfile.ZIP_STORED if stat.S_ISDIR(mode) else zipfile.ZIP_DEFLATED
    return info


def _read(file: BinaryIO, size: int, path: str) -> bytes:
    try:
        return file.read(size)
    except OSError as error:
        raise _unreadable(path, error) from error


# --- messages -----------------------------------------------------------------------------------------------


def _shown(path: str) -> str:
    """The path on one line, with control characters escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in path)


def _list_few(names: Sequence[str], count: int = 3) -> str:
    more = len(names) - count
    return ", ".join(names[:count]) + (f" and {more} more" if more > 0 else "")


def _unreadable(path: str, error: OSError) -> HeliostatError:
    return HeliostatError(
        f"`{_shown(path)}` cannot be read, so the working directory cannot be packed",
        cause=error.strerror or str(error),
        hint="make it readable, or exclude it with `.gitignore`, `.rayignore` or `excludes`",
        code=Code.WORKING_DIR_UNREADABLE,
    )


def _over(folder: Path, entries: list[_Entry], total: int, limit: int) -> HeliostatError:
    biggest = _biggest(entries)
    return UsageError(
        f"the working directory `{folder}` is too big to upload: {format_bytes(total)}, over {format_bytes(limit)}",
        cause=", ".join(f"`{_shown(path)}` {format_bytes(size)}" for path, size in biggest),
        hint=f"exclude files that the job does not need: add `/{_shown(biggest[0][0])}` to `.gitignore` or `excludes`",
        code=Code.WORKING_DIR_TOO_LARGE,
    )


def _biggest(entries: list[_Entry], count: int = 5) -> list[tuple[str, int]]:
    """The largest files and directories, without overlap. An entry with most of its directory's size replaces it."""
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
    largest: list[tuple[str, int]] = []
    for path, size in sorted(sizes.items(), key=lambda item: (-item[1], item[0])):
        inside = any(above.endswith("/") and path.startswith(above) for above, _ in largest)
        if size and not inside and heaviest.get(path, 0) <= 0.8 * size:
            largest.append((path, size))
        if len(largest) == count:
            break
    return largest
