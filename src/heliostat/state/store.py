"""What is remembered of clusters on disk: every path and file name, the record, the events, the history.

Homes on clusters are NFS or Lustre: a file appears by rename, whole or not at all; locks are folders with an owner;
nothing relies on modification times or on locks of the kernel.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import secrets
import shutil
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from heliostat.common.errors import Code, DeadlineError, DiskError, HeliostatError, NotFoundError
from heliostat.common.processes import process_start
from heliostat.state.files import _disk_error, read_json, write_atomic
from heliostat.state.locks import _hold_interrupts, _keep_renewing, _owner, _owners, _remove_lock, _stale
from heliostat.state.ownership import require_safe
from heliostat.state.records import Record

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]{0,39}")  # a cluster's, which is also its folder's
LEASE = "launching"
LEASE_WAIT_S = 600.0  # how long a command waits for another one that starts nodes


def _is_called(native_id: str, name: str) -> bool:
    """PBS's people know a job by its number: 12 of 12.server."""
    return name in (native_id, native_id.partition(".")[0])


class ClusterFolder:
    """`clusters/NAME` or, when it is over, `history/…`: the files of one cluster."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.token = path / "token"
        self.tls = path / "tls"
        self.agent = path / "agent.pyz"
        self.script = path / "script.sh"
        self.logs = path / "logs"
        self.events_file = path / "events.jsonl"
        self.cache = path.parent.parent / "cache"  # shared by all clusters

    @property
    def name(self) -> str:
        return self.path.name

    def record(self) -> Record:
        try:
            return Record.from_json(read_json(self.path / "record.json") or {})
        except (KeyError, TypeError, ValueError, AttributeError):
            if not self.path.exists():
                raise self._moved() from None
            raise HeliostatError(
                f"the record of `{self.name}` cannot be read",
                details=str(self.path / "record.json"),
                hint="heliostat doctor",
                code=Code.STORE_DAMAGED_RECORD,
            ) from None

    def _moved(self) -> NotFoundError:
        """Another command has put it into the history."""
        return NotFoundError(
            f"there is no cluster `{self.name}` any more",
            hint="heliostat ls --all",
            code=Code.NOT_FOUND_CLUSTER,
        )

    def save(self, record: Record) -> None:
        write_atomic(self.path / "record.json", json.dumps(record.to_json(), indent=1) + "\n")

    # what the agents write, and we only read

    def state(self) -> dict[str, Any]:
        return read_json(self.path / "state.json") or {}

    def pulse(self) -> dict[str, Any]:
        return read_json(self.path / "pulse.json") or {}

    def last_words(self, node: str) -> dict[str, Any]:
        return read_json(self.path / "nodes" / f"{node}.json") or {}

    def connection(self) -> dict[str, Any] | None:
        return read_json(self.path / "connection.json")

    def read_token(self) -> str | None:
        try:
            return self.token.read_text().strip()
        except OSError:
            return None

    def ask(self, request: Mapping[str, Any]) -> None:
        """Leaves a request for the head's agent, which looks once a second."""
        folder = self.path / "requests"
        folder.mkdir(mode=0o700, exist_ok=True)
        write_atomic(folder / f"{time.time_ns()}-{secrets.token_hex(4)}.json", json.dumps(request))

    # events: appended under the cluster's lock, one writer at a time

    def append(self, event: dict[str, Any]) -> None:
        line = json.dumps(event, separators=(",", ":")).encode() + b"\n"
        try:
            with open(
                os.open(self.events_file, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600), "rb+"
            ) as stream:
                if stream.seek(0, os.SEEK_END) and stream.seek(-1, os.SEEK_END) and stream.read() != b"\n":
                    line = b"\n" + line  # the last one was cut short: it must not spoil this one
                stream.write(line)
        except OSError as error:
            raise _disk_error(self.events_file, error) from error

    def events(self) -> Iterator[dict[str, Any]]:
        try:
            lines = self.events_file.read_bytes().splitlines()
        except OSError:
            return
        for line in lines:
            with contextlib.suppress(ValueError):  # a line that a full disk cut short
                yield json.loads(line)

    @contextlib.contextmanager
    def lock(self, seconds: float = 30.0) -> Iterator[None]:
        """One writer of the record at a time, on whatever host. Held for moments: never while a backend is asked, or told."""
        with self._hold(self.path / "lock", seconds):
            yield

    @contextlib.contextmanager
    def lease(self, seconds: float = LEASE_WAIT_S) -> Iterator[None]:
        """One command at a time starts nodes of the cluster. Held for minutes, without the record's lock, and renewed."""
        with self._hold(self.path / LEASE, seconds) as mine:
            over = threading.Event()
            thread = threading.Thread(target=_keep_renewing, args=(mine, over), daemon=True)
            thread.start()
            try:
                yield
            finally:
                over.set()
                thread.join()

    def is_leased(self) -> bool:
        return (self.path / LEASE).exists()

    @contextlib.contextmanager
    def _hold(self, folder: Path, seconds: float) -> Iterator[Path]:
        mine = folder / f"owner-{secrets.token_hex(4)}.json"
        deadline = time.monotonic() + seconds
        while True:
            # an interrupt between taking it and knowing that we have it would leave it to nobody
            release = _hold_interrupts()
            taken = False
            try:
                taken = self._take(folder, mine)
            finally:
                if not taken:
                    release()
            if taken:
                break
            if time.monotonic() > deadline:
                who = next(map(read_json, _owners(folder)), None) or {}
                raise DeadlineError(
                    f"another command is changing `{self.name}`",
                    cause=f"process {who.get('pid')} on {who.get('host')} holds its lock",
                    hint=f"heliostat status {self.name}",
                    code=Code.STORE_LOCKED,
                )
            time.sleep(0.05)
        try:
            release()
            yield mine
        finally:
            _remove_lock(folder, [mine])

    def _take(self, folder: Path, mine: Path) -> bool:
        try:
            folder.mkdir()
        except FileExistsError:
            _remove_lock(folder, _stale(folder))
            return False
        except FileNotFoundError:
            raise self._moved() from None
        except OSError as error:
            raise _disk_error(folder, error) from error
        try:
            with open(os.open(mine, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as stream:
                stream.write(_owner())
        except FileNotFoundError:
            return False  # somebody took it for an abandoned one
        except OSError:
            pass  # a full disk: it is ours, without our name on it
        except BaseException:  # Ctrl-C: what comes next may need it
            _remove_lock(folder, [mine])
            raise
        return True


class Store:
    """`$HELIOSTAT_HOME`: everything that is remembered."""

    def __init__(self, home: str | os.PathLike[str] | None = None) -> None:
        self.home = (
            Path(home or os.environ.get("HELIOSTAT_HOME") or Path.home() / ".heliostat")
            .expanduser()
            .absolute()
        )
        self.clusters = self.home / "clusters"
        self.ended = self.home / "history"
        self.cache = self.home / "cache"
        self._checked: set[str] = set()  # directories that are known to be safe

    def check(self) -> None:
        """Raises when another user can change the home or what is in it: nothing there is trusted, read or executed then."""
        if str(self.home) in self._checked:
            return
        for folder in (self.home, self.clusters, self.ended, self.cache):
            require_safe(folder, checked=self._checked)
        self._checked.add(str(self.home))  # it may be a link, or not exist yet

    def prepare(self) -> None:
        """Makes the folders. Only verbs that start something call it: looking must work on a read-only home."""
        self.check()
        for folder in (self.home, self.clusters, self.ended):
            try:
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            except OSError as error:
                raise _disk_error(folder, error) from error
        self._checked.clear()  # what was missing is there now, and may be somebody else's
        self.check()

    def names(self) -> list[str]:
        self.check()
        try:
            return sorted(entry.name for entry in os.scandir(self.clusters) if not entry.name.startswith("."))
        except OSError:
            return []

    def find(self, name: str) -> ClusterFolder | None:
        """The cluster of this name, unless there is none. Raises when another user can change its directory or its record."""
        self.check()
        path = self.clusters / name
        if not NAME.fullmatch(name) or not (path / "record.json").exists():
            return None
        require_safe(path / "record.json", checked=self._checked)
        return ClusterFolder(path)

    def open(self, name: str) -> ClusterFolder:
        """By name, or by a native id (a scheduler's job id) that a cluster has."""
        folder = self.find(name)
        for other in [] if folder else self.names():
            candidate = self.find(other)
            with contextlib.suppress(HeliostatError):  # one that cannot be read is not the one
                if candidate and any(
                    _is_called(handle["native_id"], name) for handle in candidate.record().handles
                ):
                    folder = candidate
        if folder is None:
            past = self.last_archived(name)
            if past:
                raise NotFoundError(
                    f"`{name}` has ended",
                    cause=past.record().reason,
                    hint=f"heliostat logs {name}",
                    code=Code.NOT_FOUND_CLUSTER,
                )
            raise NotFoundError(
                f"there is no cluster `{name}`",
                cause=f"clusters here: {', '.join(self.names()) or 'none'}",
                hint="heliostat ls --all",
                code=Code.NOT_FOUND_CLUSTER,
            )
        return folder

    def create(self, record: Record, files: Mapping[str, str | bytes]) -> ClusterFolder:
        """Claims the name: the folder appears with its record and files in it, or FileExistsError is raised."""
        self.prepare()
        self._sweep()
        me = f"{secrets.token_hex(4)}.{os.getpid()}.{process_start(os.getpid())}.{socket.gethostname()}"
        draft = ClusterFolder(self.clusters / f".{record.name}.{me}")
        path = self.clusters / record.name
        try:
            draft.path.mkdir(mode=0o700)
            draft.logs.mkdir(mode=0o700)
            draft.save(record)
            for name, data in files.items():
                (draft.path / name).parent.mkdir(mode=0o700, exist_ok=True)
                write_atomic(draft.path / name, data)
            draft.path.rename(path)  # fails when the name is taken: a folder with files is not replaced
        except OSError as error:
            shutil.rmtree(draft.path, ignore_errors=True)
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                raise FileExistsError(record.name) from None
            raise _disk_error(path, error) from error
        except BaseException:  # Ctrl-C too
            shutil.rmtree(draft.path, ignore_errors=True)
            raise
        return ClusterFolder(path)

    def _sweep(self) -> None:
        """Drafts whose maker was killed before it could put them in their place."""
        for draft in self.clusters.glob(".*.*.*.*.*"):
            _, _, _, pid, start, host = draft.name.split(".", 5)
            known = host == socket.gethostname() and pid.isdecimal() and start != "None"
            if known and process_start(int(pid)) != start:
                shutil.rmtree(draft, ignore_errors=True)

    def archive(self, folder: ClusterFolder, record: Record) -> ClusterFolder:
        """An ended cluster leaves `clusters/` with its last record; what could let somebody in, or is of no use now,
        goes first: on a full disk that makes the room for the record."""
        place = self.archive_path(record)
        try:
            for name in ("token", "head.json", "connection.json", "connection.env"):
                (folder.path / name).unlink(missing_ok=True)
            if folder.tls.exists():
                shutil.rmtree(folder.tls)
            try:
                folder.save(record)
            except DiskError:
                folder.agent.unlink(missing_ok=True)
                folder.save(record)
            folder.agent.unlink(missing_ok=True)
            folder.path.rename(place)
        except FileNotFoundError:
            pass  # another command was faster
        except OSError as error:
            raise _disk_error(place, error) from error
        for lock in ("lock", LEASE):
            shutil.rmtree(place / lock, ignore_errors=True)
        return ClusterFolder(place)

    def archive_path(self, record: Record) -> Path:
        stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(record.created))
        return self.ended / f"{record.name}-{stamp}-{record.id[:4]}"

    def past(self) -> list[Record]:
        """The records of the ended clusters, oldest first."""
        self.check()
        try:
            folders = [ClusterFolder(Path(entry.path)) for entry in os.scandir(self.ended)]
        except OSError:
            return []
        records = []
        for folder in folders:
            with contextlib.suppress(HeliostatError, KeyError, ValueError, TypeError):
                records.append(folder.record())
        return sorted(records, key=lambda record: record.created)

    def last_archived(self, name: str) -> ClusterFolder | None:
        """The folder of the ended cluster that had this name last."""
        self.check()
        newest: tuple[float, ClusterFolder] | None = None
        try:
            entries = [entry for entry in os.scandir(self.ended) if entry.name.startswith(f"{name}-")]
        except OSError:
            return None
        for entry in entries:
            folder = ClusterFolder(Path(entry.path))
            with contextlib.suppress(HeliostatError, KeyError, ValueError, TypeError):
                record = folder.record()
                if record.name == name and (newest is None or record.created > newest[0]):
                    newest = (record.created, folder)
        return newest[1] if newest else None
