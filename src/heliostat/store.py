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
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from heliostat.errors import Code, DeadlineError, DiskError, HeliostatError, NotFoundError, disk_code
from heliostat.ownership import require_safe
from heliostat.states import TERMINAL, ClusterState, NodeState, summary
from heliostat.transport import process_start

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]{0,39}")  # a cluster's, which is also its folder's
LEASE = "launching"
LOCK_S = 120.0  # a lock that was not renewed for so long has lost its owner, whatever host that was on
RENEW_S = LOCK_S / 4  # between two renewals of a lease
LEASE_WAIT_S = 600.0  # how long a command waits for another one that starts nodes


@dataclass
class NodeRecord:
    """One node as last known. `since` is when it came into its state, in seconds of the epoch."""

    name: str
    role: str
    group: str | None = None
    state: NodeState = NodeState.REQUESTED
    reason: str = ""
    since: float = 0.0
    handle: str | None = None  # the native id that it came with
    launch: int = 0  # which of the cluster's launches it came with; words of an earlier life mean nothing
    guest: str | None = None  # the `join` that it came with: it leaves without being missed


@dataclass
class Record:
    """All that a later command, on any host that sees the folder, needs to act on the cluster."""

    name: str
    id: str  # unique for ever; marks the cluster's processes
    site: str
    kind: str  # "up": lives until it is ended; "run": lives as long as its command
    created: float
    spec: dict[str, Any]
    target: str = "up"  # what the last command wanted: "up" or "down"
    nodes: dict[str, NodeRecord] = field(default_factory=dict)
    handles: list[dict[str, Any]] = field(default_factory=list)
    launches: int = 0  # never counts back: the name of a node that left may come back
    jobs: list[dict[str, Any]] = field(default_factory=list)
    joins: int = 0  # how many there have been
    warned: float = 0.0  # when the head last warned of something that is on record
    place: str | None = None  # its folder on the machine that it is reached through, where that is another
    command: dict[str, Any] | None = None
    ready: float | None = None  # when it could be used for the first time
    ended: float | None = None
    reason: str = ""
    exit_code: int | None = None

    def state(self) -> ClusterState:
        return summary((node.role == "head", node.state) for node in self.nodes.values())

    def is_over(self) -> bool:
        return all(node.state in TERMINAL for node in self.nodes.values())

    @staticmethod
    def from_json(data: dict[str, Any]) -> Record:
        known = {key: value for key, value in data.items() if key in Record.__dataclass_fields__}
        nodes = {
            name: NodeRecord(**{**node, "state": NodeState(node["state"])})
            for name, node in known["nodes"].items()
        }
        return Record(**{**known, "nodes": nodes})

    def to_json(self) -> dict[str, Any]:
        return {"schema": 1, **asdict(self)}


def write_atomic(path: Path, data: str | bytes, mode: int = 0o600) -> None:
    """The file appears whole or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with open(descriptor, "wb") as stream:
            stream.write(data.encode() if isinstance(data, str) else data)
        os.replace(temporary, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise _disk_error(path, error) from error


def _disk_error(path: Path, error: OSError) -> DiskError:
    hint = {
        errno.ENOSPC: "free some space there, or set HELIOSTAT_HOME to a folder on another disk",
        errno.EDQUOT: "free some space there, or set HELIOSTAT_HOME to a folder on another disk",
        errno.EACCES: "set HELIOSTAT_HOME to a folder that you may write to",
        errno.EROFS: "set HELIOSTAT_HOME to a folder that you may write to",
    }.get(error.errno or 0, "set HELIOSTAT_HOME to another folder")
    return DiskError(
        f"could not write `{path}`", cause=error.strerror or str(error), hint=hint, code=disk_code(error)
    )


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in the file; None when it is not there or not whole."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


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


def _owner() -> str:
    """Who holds a lock, and since when or renewed when."""
    pid = os.getpid()
    return json.dumps(
        {"host": socket.gethostname(), "pid": pid, "start": process_start(pid), "since": time.time()}
    )


def renew(mine: Path) -> bool:
    """Says anew that this lock is held. False: it was taken from us."""
    if not mine.exists():
        return False
    # beside the lock, not in it: whoever looks into the lock must never see half a file
    temporary = mine.parent.with_name(f".{mine.parent.name}.{secrets.token_hex(4)}")
    try:
        temporary.write_text(_owner())
        os.replace(temporary, mine)
    except OSError:  # a full disk, a directory that was archived
        temporary.unlink(missing_ok=True)
    return True


def _keep_renewing(mine: Path, over: threading.Event) -> None:
    while not over.wait(RENEW_S) and renew(mine):
        pass


def _hold_interrupts() -> Callable[[], object]:
    """Ctrl-C and its like wait until what this gives is called. Where signals cannot be held, they come as they come."""
    if not hasattr(signal, "pthread_sigmask"):
        return bool
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
    return lambda: signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _owners(lock: Path) -> list[Path]:
    try:
        return [lock / name for name in os.listdir(lock)]
    except OSError:
        return []


def _stale(lock: Path) -> list[Path] | None:
    """The files of a lock whose owner is gone; None: it is held, or was given back in this moment."""
    files = _owners(lock)
    owner = read_json(files[0]) if files else None
    if owner is None:  # being made, or its owner died between two steps
        try:
            since = lock.stat().st_mtime
        except OSError:
            return None
    elif owner["host"] == socket.gethostname() and owner.get("start"):
        # no clock is asked: one that is set anew must not break a lock that somebody holds
        return files if process_start(owner["pid"]) != owner["start"] else None
    else:
        since = owner["since"]
    return files if abs(time.time() - since) > LOCK_S else None


def _remove_lock(lock: Path, files: list[Path] | None) -> None:
    """Exactly the lock that holds these files: one that somebody has taken meanwhile holds another, and stays."""
    if files is not None:
        for path in files:
            path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            lock.rmdir()


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
            past = self.last_past(name)
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
        place = self.past_place(record)
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

    def past_place(self, record: Record) -> Path:
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

    def last_past(self, name: str) -> ClusterFolder | None:
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
