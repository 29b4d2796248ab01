"""What is remembered of clusters on disk: every path and file name, the record, the events, the history.

Homes on clusters are NFS or Lustre: a file appears by rename, whole or not at all; locks are folders with an owner;
nothing relies on modification times or on locks of the kernel.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import shutil
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from heliostat.errors import DeadlineError, HeliostatError, NotFoundError
from heliostat.states import TERMINAL, ClusterState, NodeState, summary

LOCK_S = 120.0  # a lock older than this has lost its owner, whatever host that was on


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
    jobs: list[dict[str, Any]] = field(default_factory=list)
    command: dict[str, Any] | None = None
    ready: float | None = None  # when it was whole for the first time
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


def _disk_error(path: Path, error: OSError) -> HeliostatError:
    hint = {
        errno.ENOSPC: "free some space there, or set HELIOSTAT_HOME to a folder on another disk",
        errno.EDQUOT: "free some space there, or set HELIOSTAT_HOME to a folder on another disk",
        errno.EACCES: "set HELIOSTAT_HOME to a folder that you may write to",
        errno.EROFS: "set HELIOSTAT_HOME to a folder that you may write to",
    }.get(error.errno or 0, "set HELIOSTAT_HOME to another folder")
    return HeliostatError(f"could not write `{path}`", because=error.strerror or str(error), hint=hint)


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in the file; None when it is not there or not whole."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


class ClusterFolder:
    """`clusters/NAME` or, when it is over, `history/…`: the files of one cluster."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.token = path / "token"
        self.agent = path / "agent.pyz"
        self.script = path / "script.sh"
        self.logs = path / "logs"
        self.events_file = path / "events.jsonl"

    @property
    def name(self) -> str:
        return self.path.name

    def record(self) -> Record:
        data = read_json(self.path / "record.json")
        if data is None:
            raise HeliostatError(
                f"the record of `{self.name}` cannot be read",
                saw=str(self.path / "record.json"),
                hint="heliostat doctor",
            )
        return Record.from_json(data)

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

    # events: appended under the cluster's lock, one writer at a time

    def append(self, event: dict[str, Any]) -> None:
        try:
            with open(
                os.open(self.events_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "a"
            ) as stream:
                stream.write(json.dumps(event, separators=(",", ":")) + "\n")
        except OSError as error:
            raise _disk_error(self.events_file, error) from error

    def events(self) -> Iterator[dict[str, Any]]:
        try:
            lines = self.events_file.read_text().splitlines()
        except OSError:
            return
        for line in lines:
            with contextlib.suppress(ValueError):  # a line that a full disk cut short
                yield json.loads(line)

    @contextlib.contextmanager
    def lock(self, seconds: float = 30.0) -> Iterator[None]:
        """One writer of the record at a time, on whatever host. Held for moments, never while waiting."""
        folder = self.path / "lock"
        owner = {"host": socket.gethostname(), "pid": os.getpid()}
        deadline = time.monotonic() + seconds
        while True:
            try:
                folder.mkdir()
                break
            except FileExistsError:
                if _is_stale(folder):
                    _break_lock(folder)
                    continue
            except FileNotFoundError:
                raise NotFoundError(
                    f"there is no cluster `{self.name}` any more", hint="heliostat ls --all"
                ) from None
            except OSError as error:
                raise _disk_error(folder, error) from error
            if time.monotonic() > deadline:
                who = read_json(folder / "owner.json") or {}
                raise DeadlineError(
                    f"another command is changing `{self.name}`",
                    because=f"process {who.get('pid')} on {who.get('host')} holds its lock",
                    hint=f"heliostat status {self.name}",
                )
            time.sleep(0.05)
        try:
            with contextlib.suppress(OSError, HeliostatError):
                write_atomic(folder / "owner.json", json.dumps({**owner, "since": time.time()}))
            yield
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _is_stale(lock: Path) -> bool:
    owner = read_json(lock / "owner.json")
    if owner is None:  # being made, or its owner died between two steps
        try:
            return time.time() - lock.stat().st_mtime > LOCK_S
        except OSError:
            return False
    if owner["host"] == socket.gethostname():
        try:
            os.kill(owner["pid"], 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            pass
    return bool(abs(time.time() - owner["since"]) > LOCK_S)


def _break_lock(lock: Path) -> None:
    aside = lock.with_name(f"lock.{secrets.token_hex(4)}")
    with contextlib.suppress(OSError):  # of several who try, the rename lets one win
        lock.rename(aside)
        shutil.rmtree(aside, ignore_errors=True)


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

    def prepare(self) -> None:
        """Makes the folders. Only verbs that start something call it: looking must work on a read-only home."""
        for folder in (self.home, self.clusters, self.ended):
            try:
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            except OSError as error:
                raise _disk_error(folder, error) from error

    def names(self) -> list[str]:
        try:
            return sorted(entry.name for entry in os.scandir(self.clusters) if not entry.name.startswith("."))
        except OSError:
            return []

    def find(self, name: str) -> ClusterFolder | None:
        path = self.clusters / name
        return ClusterFolder(path) if (path / "record.json").exists() else None

    def open(self, name: str) -> ClusterFolder:
        """By name, or by a native id (a scheduler's job id) that a cluster has."""
        folder = self.find(name) if "/" not in name else None
        for other in [] if folder else self.names():
            candidate = self.find(other)
            if candidate and any(handle["native_id"] == name for handle in candidate.record().handles):
                folder = candidate
        if folder is None:
            raise NotFoundError(
                f"there is no cluster `{name}`",
                because=f"clusters here: {', '.join(self.names()) or 'none'}",
                hint="heliostat ls --all",
            )
        return folder

    def create(self, record: Record, files: Mapping[str, str | bytes]) -> ClusterFolder:
        """Claims the name: the folder appears with its record and files in it, or FileExistsError is raised."""
        self.prepare()
        draft = ClusterFolder(self.clusters / f".{record.name}.{secrets.token_hex(4)}")
        path = self.clusters / record.name
        try:
            draft.path.mkdir(mode=0o700)
            draft.logs.mkdir(mode=0o700)
            draft.save(record)
            for name, data in files.items():
                write_atomic(draft.path / name, data)
            draft.path.rename(path)  # fails when the name is taken: a folder with files is not replaced
        except OSError as error:
            shutil.rmtree(draft.path, ignore_errors=True)
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                raise FileExistsError(record.name) from None
            raise _disk_error(path, error) from error
        except HeliostatError:
            shutil.rmtree(draft.path, ignore_errors=True)
            raise
        return ClusterFolder(path)

    def archive(self, folder: ClusterFolder, record: Record) -> ClusterFolder:
        """An ended cluster leaves `clusters/`; what could let somebody in, or is of no use now, goes."""
        for path in (folder.token, folder.agent, folder.path / "head.json"):
            path.unlink(missing_ok=True)
        place = self.past_place(record)
        try:
            folder.path.rename(place)
        except FileNotFoundError:
            pass  # another command was faster
        except OSError as error:
            raise _disk_error(place, error) from error
        shutil.rmtree(place / "lock", ignore_errors=True)
        return ClusterFolder(place)

    def past_place(self, record: Record) -> Path:
        stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(record.created))
        return self.ended / f"{record.name}-{stamp}-{record.id[:4]}"

    def past(self) -> list[Record]:
        """The records of the ended clusters, oldest first."""
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
