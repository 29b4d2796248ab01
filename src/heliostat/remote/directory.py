"""A cluster's directory on another host (`via: user@login`), with a copy on this host.

The agents write the directory on the other host, and commands read the copy. So the callers handle both cases alike.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import os
import secrets
import tarfile
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from heliostat.agent.protocol import Request
from heliostat.common.documents import JsonMapping
from heliostat.common.errors import Code, HeliostatError
from heliostat.common.shell import SAFE, quote
from heliostat.remote.ssh import LineSession, Ssh
from heliostat.state.files import write_atomic
from heliostat.state.states import NodeState
from heliostat.state.store import ClusterDirectory

PULL_S = 0.5  # minimum between two reads; one takes about 50 ms over ssh
STATE_FILES = ("state.json", "pulse.json", "connection.json", "connection.env", "head.json", "nodes")
MAX_LOG_CHUNK_BYTES = 1 << 20  # of one log in one read
FOLLOWER_TIMEOUT_S = 12.0  # the agent sends a line at least every five seconds
REMOTE_ROOT = ".heliostat/via"
UNSAFE = 9  # exit code of the scripts below if another user can change the cluster's directory


def pack(files: Mapping[str, bytes]) -> bytes:
    """A tar of these files; scripts are executable."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, data in files.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mtime = len(data), int(time.time())
            entry.mode = 0o700 if name.endswith(".sh") else 0o600
            archive.addfile(entry, io.BytesIO(data))
    return buffer.getvalue()


class RemoteDirectory:
    """A cluster's directory on another host, and its copy in `folder`.

    head: the head's process {"pid", "start", "executable"}, if it runs on that host. state_files: the files to copy in
    addition to the logs; none for a worker's own directory."""

    def __init__(
        self,
        folder: ClusterDirectory,
        host: Ssh,
        path: Path,
        head: JsonMapping | None = None,
        state_files: Sequence[str] = STATE_FILES,
    ) -> None:
        self.folder, self.host, self.path, self.state_files = folder, host, path, state_files
        self.process = head if head and head.get("pid") else None
        self.head: tuple[NodeState, str] | None = None  # last observed state and reason
        self._next = 0.0
        self._may_follow = True
        self._follower: Follower | None = None

    def push(self, files: Iterable[tuple[Path, bytes, int]]) -> None:
        """Writes files, given by their remote paths, over one connection."""
        packed = pack({path.relative_to(self.path).as_posix(): data for path, data, _ in files})
        script = (
            SAFE
            + '\numask 077; safe . >/dev/null && mkdir -p -- "$1/logs" && cd -- "$1" && safe . >/dev/null && tar -xf -'
        )
        done = self.host.run(["sh", "-c", script, "sh", self.path.as_posix()], input=packed, timeout=600)
        if done.code:
            cause = done.err.strip()[-300:]
            raise HeliostatError(
                f"could not write `{self.path}` on `{self.host.target}`",
                cause=cause,
                code=Code.DISK_FULL if "No space left" in cause else Code.SSH_WRITE,
            )

    def add_request(self, request: Request) -> None:
        """Adds a request for the head's agent."""
        name = f"{time.time_ns()}-{secrets.token_hex(4)}.json"
        self.host.put(self.path / "requests" / name, json.dumps(request).encode())

    def pull(self, node: str | None = None, now: bool = False) -> None:
        """Updates the copy, including the logs of this node.

        Limits the rate to spare the login node, unless `now`. After the first call a Follower receives the changes."""
        if self._follower and self._follower.follows(node):
            return
        if time.monotonic() < self._next and node is None and not now:
            return
        if self._follower:
            self._may_follow = self._follower.has_reported  # False: the agent cannot run there
            self._follower = None
        elif self.process and self._may_follow and self._next and not now:
            self._follower = Follower(self, self.process, node)
            return
        try:
            self._pull(node)
        except HeliostatError as error:
            self.head = (NodeState.UNKNOWN, f"{error.message}: {error.cause}") if self.process else None
            raise
        finally:
            self._next = time.monotonic() + PULL_S

    def local_logs(self, node: str | None) -> list[Path]:
        """The copied logs, which may be longer on the host."""
        logs = self.folder.logs
        directories = [logs, logs / node] if node else [logs]
        directories[-1].mkdir(mode=0o700, exist_ok=True)
        return [path for directory in directories for path in directory.glob("*.*") if path.is_file()]

    def _pull(self, node: str | None) -> None:
        logs = self.folder.logs
        sizes = [(path.relative_to(logs).as_posix(), path.stat().st_size) for path in self.local_logs(node)]
        cases = "".join(f" {quote([name])}) o={size};;" for name, size in sizes)
        values = {"small": " ".join(self.state_files), "cases": cases, "most": MAX_LOG_CHUNK_BYTES}
        process = self.process or {"pid": ""}
        argv = [
            "sh",
            "-c",
            SAFE + _PULL % values,
            "sh",
            self.path.as_posix(),
            node or "",
            str(process["pid"]),
        ]
        done = self.host.run(argv, timeout=60)
        if done.code == 3:  # the directory does not exist
            self.head = (NodeState.GONE, "") if self.process else None
            return
        if done.code == UNSAFE:
            raise self._unsafe(done.err)
        started, archive, *chunks = done.out.splitlines() or ["", ""]
        self._unpack(base64.b64decode(archive), replace=self.state_files)
        for line in chunks:
            name, offset, data = line.split(" ", 2)
            self.append_log(base64.b64decode(name).decode(), int(offset), base64.b64decode(data))
        if self.process:
            is_alive = started == self.process["start"]
            self.head = (NodeState.ALLOCATED if is_alive else NodeState.GONE, "")

    def append_log(self, name: str, offset: int, data: bytes) -> None:
        """Appends to a copied log. The host's name for it is not trusted: only FILE and NODE/FILE are accepted."""
        parts = name.split("/")
        if len(parts) <= 2 and ".." not in parts and parts[0]:
            path = self.folder.logs.joinpath(*parts)
            path.parent.mkdir(mode=0o700, exist_ok=True)
            with open(path, "ab") as stream:
                if stream.tell() == offset:
                    stream.write(data)

    def _unpack(self, data: bytes, replace: Iterable[str] = ()) -> None:
        """Extracts a tar of plain files, each atomically. Files of `replace` that it lacks are deleted here too."""
        found = set()
        if not data:
            return
        with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as archive:
            for entry in archive:
                target = Path(os.path.abspath(self.folder.path / entry.name))
                is_inside = target.is_relative_to(os.path.abspath(self.folder.path))
                source = archive.extractfile(entry) if entry.isfile() and is_inside else None
                if source:
                    self.put(entry.name, source.read())
                    found.add(entry.name.removeprefix("./"))
        for name in replace:
            if name not in found and (self.folder.path / name).is_file():
                (self.folder.path / name).unlink()

    def put(self, name: str, content: bytes | str | None) -> None:
        """Writes a state file of the copy; None: deletes it."""
        target = self.folder.path / name
        if content is None:
            target.unlink(missing_ok=True)
        else:
            # never make the cluster's own directory: an archived cluster must not reappear
            for parent in reversed(Path(name).parents):
                if parent != Path("."):
                    (self.folder.path / parent).mkdir(mode=0o700, exist_ok=True)
            write_atomic(target, content)

    def close(self) -> None:
        """Stops the updates of the copy."""
        if self._follower:
            self._follower.stop()

    def collect_and_remove(self, stop: str = "", node: JsonMapping | None = None) -> str | None:
        """Copies all logs, then removes the remote directory, over one connection.

        The uploaded working directory, which may have results, is kept; its remote path is returned. stop: a request for
        the agent, which removes the files of a node that was killed. node: the details of that node."""
        self.close()
        details = [str((node or {}).get(key) or "") for key in ("temp", "executable")]
        argv = ["sh", "-c", SAFE + _COLLECT_AND_REMOVE, "sh", self.path.as_posix(), stop, *details]
        with self.host.open_session(argv) as session:
            first = session.read_line()
            if first is None:
                raise HeliostatError(
                    f"could not reach `{self.host.target}`",
                    cause="the connection ended",
                    code=Code.SSH_UNREACHABLE,
                )
            if first.startswith("unsafe "):
                raise self._unsafe(first.partition(" ")[2])
            if first == "gone":
                return None
            self._unpack(base64.b64decode(first))
            session.send_line("ok")
            return session.read_line() or None

    def _unsafe(self, cause: str) -> HeliostatError:
        return HeliostatError(
            f"`{self.path.as_posix()}` on `{self.host.target}` is not safe to use",
            cause=cause.strip()[-300:],
            code=Code.STORE_UNSAFE_DIRECTORY,
        )


class Follower(threading.Thread):
    """Writes the changes that the remote agent sends over one connection into the copy."""

    def __init__(self, remote: RemoteDirectory, process: JsonMapping, node: str | None) -> None:
        super().__init__(daemon=True)
        self.remote, self.process, self.node = remote, process, node
        self.is_stopped, self._writing = False, threading.Lock()
        self._last_report = time.monotonic()
        self.has_reported = False
        self._session: LineSession | None = None
        self.start()

    def follows(self, node: str | None) -> bool:
        """Whether the copy is current. From now on it includes the logs of this node."""
        if not self.is_alive() or time.monotonic() - self._last_report > FOLLOWER_TIMEOUT_S:
            self.is_stopped = True
            return False
        if node not in (None, self.node) and self._session:
            self.node = node
            self._session.send_line(json.dumps({"node": node}))
        return True

    def run(self) -> None:
        remote, process = self.remote, self.process
        script = SAFE + '\ncd -- "$1" && safe . agent.pyz >/dev/null && exec "$2" agent.pyz follow'
        argv = ["sh", "-c", script, "sh", remote.path.as_posix(), str(process["executable"])]
        sizes = {
            path.relative_to(remote.folder.logs).as_posix(): path.stat().st_size
            for path in remote.local_logs(self.node)
        }
        first = {
            "pid": process["pid"],
            "start": process["start"],
            "small": remote.state_files,
            "node": self.node,
            "have": sizes,
        }
        with (
            contextlib.suppress(HeliostatError, OSError, ValueError),
            remote.host.open_session(argv) as session,
        ):
            session.send_line(json.dumps(first))
            self._session = session
            while (line := session.read_line()) is not None:
                self._last_report, self.has_reported = time.monotonic(), True
                with self._writing:
                    if self.is_stopped:
                        return
                    self._apply(json.loads(line))

    def _apply(self, report: JsonMapping) -> None:
        remote = self.remote
        if "log" in report:
            return remote.append_log(report["log"], report["at"], base64.b64decode(report["data"]))
        for name, text in report["files"].items():
            if name.split("/")[0] in remote.state_files and ".." not in name:
                remote.put(name, text)
        remote.head = (NodeState.ALLOCATED if report["alive"] else NodeState.GONE, "")

    def stop(self) -> None:
        """After this returns, the follower writes nothing."""
        with self._writing:
            self.is_stopped = True


# $1: the directory, $2: the node, $3: the head's pid. Prints the start time of the process, a tar of the state files, and a
# line for each log that has grown: name, offset, data
_PULL = """
cd -- "$1" 2>/dev/null || exit 3
safe . >/dev/null || exit 9
node=$2
s=$(cat "/proc/$3/stat" 2>/dev/null); s=${s##*) }; set -- $s
case $1 in Z|"") echo gone ;; *) echo "${20}" ;; esac
tar -cf - %(small)s 2>/dev/null | base64 -w0; echo
for f in logs/*.* ${node:+"logs/$node"/*.*}; do
  [ -f "$f" ] || continue
  n=${f#logs/} o=0
  case $n in %(cases)s *) ;; esac
  [ "$(wc -c <"$f")" -gt "$o" ] || continue
  printf '%%s %%s ' "$(printf %%s "$n" | base64 -w0)" "$o"
  tail -c +$((o + 1)) -- "$f" | head -c %(most)d | base64 -w0; echo
done
"""
# $2: a request for the agent, $3: the private directory of its node, $4: its Python. Prints a line with a tar. After the reply
# "ok" it removes everything but the working directory and prints that one's path.
_COLLECT_AND_REMOVE = """
cd -- "$1" 2>/dev/null || { echo gone; exit 0; }
why=$(safe . 2>&1 >/dev/null) || { echo "unsafe $why"; exit 0; }
if [ "$3" ] && [ -e "$3" ] && safe . agent.pyz >/dev/null; then printf %s "$2" | "$4" agent.pyz stop >/dev/null; fi
tar -cf - logs nodes state.json 2>/dev/null | base64 -w0; echo
read -r reply && [ "$reply" = ok ] || exit 1
for f in *; do [ "$f" = work ] || rm -rf -- "$f"; done
if [ -d work ]; then echo "$1/work"; else d=$PWD; cd .. && rmdir -- "$d"; rmdir -- "$PWD" 2>/dev/null; echo; fi
"""
