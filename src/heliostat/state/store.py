"""The store of clusters on disk: paths and file names, records, events, the history.

Homes on HPC systems are NFS or Lustre. So files are written by rename, locks are directories with an owner, and nothing
depends on modification times or kernel locks.
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
from typing import cast

from heliostat.agent.protocol import ClusterReport, Connection, NodeFile, Pulse, Request
from heliostat.common.documents import EventRow
from heliostat.common.errors import Code, DeadlineError, DiskError, HeliostatError, NotFoundError
from heliostat.common.processes import process_start
from heliostat.common.suggestions import expand_prefix, nearest
from heliostat.state.files import disk_error, read_json, write_atomic
from heliostat.state.locks import (
    block_interrupts,
    describe_owner,
    find_stale,
    keep_renewing,
    list_owners,
    remove_lock,
)
from heliostat.state.ownership import require_safe
from heliostat.state.records import Record

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]{0,39}")  # of a cluster and of its directory
LEASE = "launching"
LEASE_WAIT_S = 600.0  # how long a command waits for another one that launches nodes


def _matches_id(native_id: str, name: str) -> bool:
    """True for the id, or its number alone: PBS users write 12 for 12.server."""
    return name in (native_id, native_id.partition(".")[0])


class ClusterDirectory:
    """The files of one cluster: `clusters/NAME` or, after its end, `history/…`."""

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
        """The error after another command has archived the cluster."""
        return NotFoundError(
            f"there is no cluster `{self.name}` any more",
            hint="heliostat ls --all",
            code=Code.NOT_FOUND_CLUSTER,
        )

    def save(self, record: Record) -> None:
        write_atomic(self.path / "record.json", json.dumps(record.to_json(), indent=1) + "\n")

    # files that the agents write; the client only reads them

    def state(self) -> ClusterReport:
        return cast("ClusterReport", read_json(self.path / "state.json") or {})

    def heartbeat(self) -> Pulse:
        return cast("Pulse", read_json(self.path / "pulse.json") or {})

    def node_report(self, node: str) -> NodeFile:
        return cast("NodeFile", read_json(self.path / "nodes" / f"{node}.json") or {})

    def connection(self) -> Connection | None:
        return cast("Connection | None", read_json(self.path / "connection.json"))

    def require_connection(self) -> Connection:
        """Raises HeliostatError where the cluster has no connection."""
        connection = self.connection()
        if connection is None:
            raise HeliostatError(
                f"`{self.name}` has no connection",
                hint=f"heliostat status {self.name}",
                code=Code.CLUSTER_NOT_READY,
            )
        return connection

    def read_token(self) -> str | None:
        try:
            return self.token.read_text().strip()
        except OSError:
            return None

    def add_request(self, request: Request) -> None:
        """Adds a request for the head's agent, which reads requests once a second."""
        folder = self.path / "requests"
        folder.mkdir(mode=0o700, exist_ok=True)
        write_atomic(folder / f"{time.time_ns()}-{secrets.token_hex(4)}.json", json.dumps(request))

    # events: appended while the cluster's lock is held

    def append(self, event: EventRow) -> None:
        line = json.dumps(event, separators=(",", ":")).encode() + b"\n"
        try:
            with open(
                os.open(self.events_file, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600), "rb+"
            ) as stream:
                if stream.seek(0, os.SEEK_END) and stream.seek(-1, os.SEEK_END) and stream.read() != b"\n":
                    line = b"\n" + line  # the last line is incomplete: start a new one
                stream.write(line)
        except OSError as error:
            raise disk_error(self.events_file, error) from error

    def events(self) -> Iterator[EventRow]:
        try:
            lines = self.events_file.read_bytes().splitlines()
        except OSError:
            return
        for line in lines:
            with contextlib.suppress(ValueError):  # a full disk left an incomplete line
                yield json.loads(line)

    @contextlib.contextmanager
    def lock(self, seconds: float = 30.0) -> Iterator[None]:
        """Locks the record against other writers on all hosts. Never hold it during a call to a backend."""
        with self._hold(self.path / "lock", seconds):
            yield

    @contextlib.contextmanager
    def lease(self, seconds: float = LEASE_WAIT_S) -> Iterator[None]:
        """Allows one command at a time to launch nodes. Held for minutes without the record's lock, and renewed."""
        with self._hold(self.path / LEASE, seconds) as mine:
            released = threading.Event()
            thread = threading.Thread(target=keep_renewing, args=(mine, released), daemon=True)
            thread.start()
            try:
                yield
            finally:
                released.set()
                thread.join()

    def is_leased(self) -> bool:
        return (self.path / LEASE).exists()

    @contextlib.contextmanager
    def _hold(self, folder: Path, seconds: float) -> Iterator[Path]:
        mine = folder / f"owner-{secrets.token_hex(4)}.json"
        deadline = time.monotonic() + seconds
        while True:
            # an interrupt between mkdir and the assignment would leave a lock that no code removes
            release = block_interrupts()
            taken = False
            try:
                taken = self._take(folder, mine)
            finally:
                if not taken:
                    release()
            if taken:
                break
            if time.monotonic() > deadline:
                owner = next(map(read_json, list_owners(folder)), None) or {}
                raise DeadlineError(
                    f"another command is changing `{self.name}`",
                    cause=f"process {owner.get('pid')} on {owner.get('host')} holds its lock",
                    hint=f"heliostat status {self.name}",
                    code=Code.STORE_LOCKED,
                )
            time.sleep(0.05)
        try:
            release()
            yield mine
        finally:
            remove_lock(folder, [mine])

    def _take(self, folder: Path, mine: Path) -> bool:
        try:
            folder.mkdir()
        except FileExistsError:
            remove_lock(folder, find_stale(folder))
            return False
        except FileNotFoundError:
            raise self._moved() from None
        except OSError as error:
            raise disk_error(folder, error) from error
        try:
            with open(os.open(mine, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as stream:
                stream.write(describe_owner())
        except FileNotFoundError:
            return False  # another process removed it as stale
        except OSError:
            pass  # the disk is full: the lock is held without an owner file
        except BaseException:  # Ctrl-C: the cleanup may need the lock
            remove_lock(folder, [mine])
            raise
        return True


class Store:
    """The clusters, the history and the cache in `$HELIOSTAT_HOME`."""

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
        """Raises if another user can change the home or its content, before any of it is read or executed."""
        if str(self.home) in self._checked:
            return
        for folder in (self.home, self.clusters, self.ended, self.cache):
            require_safe(folder, checked=self._checked)
        self._checked.add(str(self.home))  # not added yet if it is a link or does not exist

    def prepare(self) -> None:
        """Makes the directories. Only commands that start a cluster call it: the others must work on a read-only home."""
        self.check()
        for folder in (self.home, self.clusters, self.ended):
            try:
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            except OSError as error:
                raise disk_error(folder, error) from error
        self._checked.clear()  # a directory that was missing may now be another user's
        self.check()

    def names(self) -> list[str]:
        self.check()
        try:
            return sorted(entry.name for entry in os.scandir(self.clusters) if not entry.name.startswith("."))
        except OSError:
            return []

    def running_names(self) -> list[str]:
        """The names of the clusters whose head did not report its end. No backend is asked."""
        folders = [(name, self.find(name)) for name in self.names()]
        return [name for name, folder in folders if folder and not folder.state().get("ended")]

    def find(self, name: str) -> ClusterDirectory | None:
        """The cluster of this name, or None. Raises if another user can change its directory or its record."""
        self.check()
        path = self.clusters / name
        if not NAME.fullmatch(name) or not (path / "record.json").exists():
            return None
        require_safe(path / "record.json", checked=self._checked)
        return ClusterDirectory(path)

    def _find_by_native_id(self, native_id: str) -> ClusterDirectory | None:
        for name in self.names():
            folder = self.find(name)
            with contextlib.suppress(HeliostatError):  # skip a record that cannot be read
                if folder and any(
                    _matches_id(handle["native_id"], native_id) for handle in folder.record().handles
                ):
                    return folder
        return None

    def open(self, name: str) -> ClusterDirectory:
        """The cluster of this name, or with this native id (a scheduler's job id)."""
        folder = self.find(name) or self._find_by_native_id(name)
        if folder is None:
            archived = self.last_archived(name)
            if archived:
                raise NotFoundError(
                    f"`{name}` has ended",
                    cause=archived.record().reason,
                    hint=f"heliostat logs {name}",
                    code=Code.NOT_FOUND_CLUSTER,
                )
            near = nearest(name, self.names())
            raise NotFoundError(
                f"there is no cluster `{name}`",
                cause=f"clusters here: {', '.join(self.names()) or 'none'}",
                hint=f"did you mean `{near}`?" if near else "heliostat ls --all",
                code=Code.NOT_FOUND_CLUSTER,
            )
        return folder

    def is_known(self, name: str) -> bool:
        """Whether this is a cluster, running or ended, its scheduler's job id, or a prefix of a running cluster's name."""
        return self._names_cluster(name) or expand_prefix(name, self.names(), "cluster") != name

    def expand_name(self, name: str) -> str:
        """The name of the only running cluster that it is a prefix of; a name of a cluster, and an unknown one, unchanged."""
        return name if self._names_cluster(name) else expand_prefix(name, self.names(), "cluster")

    def _names_cluster(self, name: str) -> bool:
        return bool(self.find(name) or self._find_by_native_id(name) or self.last_archived(name))

    def create(self, record: Record, files: Mapping[str, str | bytes]) -> ClusterDirectory:
        """Creates the directory with its record and files in one step. Raises FileExistsError if the name is taken."""
        self.prepare()
        self._sweep()
        me = f"{secrets.token_hex(4)}.{os.getpid()}.{process_start(os.getpid())}.{socket.gethostname()}"
        draft = ClusterDirectory(self.clusters / f".{record.name}.{me}")
        path = self.clusters / record.name
        try:
            draft.path.mkdir(mode=0o700)
            draft.logs.mkdir(mode=0o700)
            draft.save(record)
            for name, data in files.items():
                (draft.path / name).parent.mkdir(mode=0o700, exist_ok=True)
                write_atomic(draft.path / name, data)
            draft.path.rename(
                path
            )  # fails if the name is taken: rename does not replace a directory with files
        except OSError as error:
            shutil.rmtree(draft.path, ignore_errors=True)
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                raise FileExistsError(record.name) from None
            raise disk_error(path, error) from error
        except BaseException:  # Ctrl-C too
            shutil.rmtree(draft.path, ignore_errors=True)
            raise
        return ClusterDirectory(path)

    def _sweep(self) -> None:
        """Removes drafts whose process was killed before the rename."""
        for draft in self.clusters.glob(".*.*.*.*.*"):
            _, _, _, pid, start, host = draft.name.split(".", 5)
            known = host == socket.gethostname() and pid.isdecimal() and start != "None"
            if known and process_start(int(pid)) != start:
                shutil.rmtree(draft, ignore_errors=True)

    def archive(self, folder: ClusterDirectory, record: Record) -> ClusterDirectory:
        """Moves an ended cluster to the history with its last record.

        Credentials and files without further use are removed first, which frees space for the record on a full disk."""
        target = self.archive_path(record)
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
            folder.path.rename(target)
        except FileNotFoundError:
            pass  # another command has archived it
        except OSError as error:
            raise disk_error(target, error) from error
        for lock in ("lock", LEASE):
            shutil.rmtree(target / lock, ignore_errors=True)
        return ClusterDirectory(target)

    def archive_path(self, record: Record) -> Path:
        stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(record.created))
        return self.ended / f"{record.name}-{stamp}-{record.id[:4]}"

    def archived_records(self) -> list[Record]:
        """The records of the ended clusters, oldest first."""
        self.check()
        try:
            folders = [ClusterDirectory(Path(entry.path)) for entry in os.scandir(self.ended)]
        except OSError:
            return []
        records = []
        for folder in folders:
            with contextlib.suppress(HeliostatError, KeyError, ValueError, TypeError):
                records.append(folder.record())
        return sorted(records, key=lambda record: record.created)

    def last_archived(self, name: str) -> ClusterDirectory | None:
        """The directory of the newest ended cluster of this name."""
        self.check()
        newest: tuple[float, ClusterDirectory] | None = None
        try:
            entries = [entry for entry in os.scandir(self.ended) if entry.name.startswith(f"{name}-")]
        except OSError:
            return None
        for entry in entries:
            folder = ClusterDirectory(Path(entry.path))
            with contextlib.suppress(HeliostatError, KeyError, ValueError, TypeError):
                record = folder.record()
                if record.name == name and (newest is None or record.created > newest[0]):
                    newest = (record.created, folder)
        return newest[1] if newest else None
