"""A cluster whose folder lies on another machine (`via: user@login`), kept up to date here.

The agents write into the folder there; whoever asks reads the copy here. So nothing above knows the difference.
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
from typing import Any

from heliostat.common.errors import Code, HeliostatError
from heliostat.common.shell import SAFE, quote
from heliostat.remote.ssh import LineSession, Ssh
from heliostat.state.files import write_atomic
from heliostat.state.states import NodeState
from heliostat.state.store import ClusterDirectory

PULL_S = 0.5  # a question over ssh costs some 50 ms
STATE_FILES = ("state.json", "pulse.json", "connection.json", "connection.env", "head.json", "nodes")
MAX_LOG_CHUNK_BYTES = 1 << 20  # of one log at a time
FOLLOWER_TIMEOUT_S = 12.0  # a follower says a word every five seconds
REMOTE_ROOT = ".heliostat/via"
UNSAFE = 9  # how a script of ours ends on another machine where another user can change the cluster's folder


def pack(files: Mapping[str, bytes]) -> bytes:
    """A tar of these; what is a script may be run."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, data in files.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mtime = len(data), int(time.time())
            entry.mode = 0o700 if name.endswith(".sh") else 0o600
            archive.addfile(entry, io.BytesIO(data))
    return buffer.getvalue()


class RemoteDirectory:
    """head: its process there, {"pid", "start", "executable"}, where it can be seen from the machine with the folder.
    small: what is copied besides the logs; a worker's folder has nothing else that is wanted here."""

    def __init__(
        self,
        folder: ClusterDirectory,
        host: Ssh,
        place: Path,
        head: Mapping[str, Any] | None = None,
        small: Sequence[str] = STATE_FILES,
    ) -> None:
        self.folder, self.host, self.place, self.small = folder, host, place, small
        self.process = head if head and head.get("pid") else None
        self.head: tuple[NodeState, str] | None = None  # what was last seen of it
        self._next = 0.0
        self._follow = True
        self._follower: Follower | None = None

    def push(self, files: Iterable[tuple[Path, bytes, int]]) -> None:
        """Paths are of the other machine. One connection for all of them."""
        packed = pack({path.relative_to(self.place).as_posix(): data for path, data, _ in files})
        script = (
            SAFE
            + '\numask 077; safe . >/dev/null && mkdir -p -- "$1/logs" && cd -- "$1" && safe . >/dev/null && tar -xf -'
        )
        done = self.host.run(["sh", "-c", script, "sh", self.place.as_posix()], input=packed, timeout=600)
        if done.code:
            cause = done.err.strip()[-300:]
            raise HeliostatError(
                f"could not write `{self.place}` on `{self.host.target}`",
                cause=cause,
                code=Code.DISK_FULL if "No space left" in cause else Code.SSH_WRITE,
            )

    def add_request(self, request: dict[str, object]) -> None:
        name = f"{time.time_ns()}-{secrets.token_hex(4)}.json"
        self.host.put(self.place / "requests" / name, json.dumps(request).encode())

    def pull(self, node: str | None = None, now: bool = False) -> None:
        """What has changed there, with the logs of this node; not more often than is good for the login node, but `now`.
        Whoever looks again and again is told of each change instead."""
        if self._follower and self._follower.follows(node):
            return
        if time.monotonic() < self._next and node is None and not now:
            return
        if self._follower:
            self._follow = self._follower.spoke  # else it cannot be had there
            self._follower = None
        elif self.process and self._follow and self._next and not now:
            self._follower = Follower(self, self.process, node)
            return
        try:
            self._pull(node)
        except HeliostatError as error:
            self.head = (NodeState.UNKNOWN, f"{error.message}: {error.cause}") if self.process else None
            raise
        finally:
            self._next = time.monotonic() + PULL_S

    def have(self, node: str | None) -> list[Path]:
        """The logs that are here already, of those that may grow there."""
        logs = self.folder.logs
        places = [logs, logs / node] if node else [logs]
        places[-1].mkdir(mode=0o700, exist_ok=True)
        return [path for place in places for path in place.glob("*.*") if path.is_file()]

    def _pull(self, node: str | None) -> None:
        logs = self.folder.logs
        names = [(path.relative_to(logs).as_posix(), path.stat().st_size) for path in self.have(node)]
        cases = "".join(f" {quote([name])}) o={size};;" for name, size in names)
        script = SAFE + _PULL % {"small": " ".join(self.small), "cases": cases, "most": MAX_LOG_CHUNK_BYTES}
        process = self.process or {"pid": ""}
        argv = ["sh", "-c", script, "sh", self.place.as_posix(), node or "", str(process["pid"])]
        done = self.host.run(argv, timeout=60)
        if done.code == 3:  # not made yet, or gone
            self.head = (NodeState.GONE, "") if self.process else None
            return
        if done.code == UNSAFE:
            raise self._unsafe(done.err)
        started, small, *grown = done.out.splitlines() or ["", ""]
        self._unpack(base64.b64decode(small), replace=self.small)
        for line in grown:
            name, offset, data = line.split(" ", 2)
            self.grow(base64.b64decode(name).decode(), int(offset), base64.b64decode(data))
        if self.process:
            lives = started == self.process["start"]
            self.head = (NodeState.ALLOCATED if lives else NodeState.GONE, "")

    def grow(self, name: str, offset: int, data: bytes) -> None:
        """More of a log; a name is that of a file, or of a node and its file, whatever the other side says."""
        words = name.split("/")
        if len(words) <= 2 and ".." not in words and words[0]:
            path = self.folder.logs.joinpath(*words)
            path.parent.mkdir(mode=0o700, exist_ok=True)
            with open(path, "ab") as stream:
                if stream.tell() == offset:
                    stream.write(data)

    def _unpack(self, data: bytes, replace: Iterable[str] = ()) -> None:
        """A tar of plain files, each put whole into its place; of `replace`, what it does not have is gone there too."""
        found = set()
        if not data:
            return
        with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as archive:
            for entry in archive:
                target = Path(os.path.abspath(self.folder.path / entry.name))
                inside = target.is_relative_to(os.path.abspath(self.folder.path))
                source = archive.extractfile(entry) if entry.isfile() and inside else None
                if source:
                    self.put(entry.name, source.read())
                    found.add(entry.name.removeprefix("./"))
        for name in replace:
            if name not in found and (self.folder.path / name).is_file():
                (self.folder.path / name).unlink()

    def put(self, name: str, content: bytes | str | None) -> None:
        """A small file as it is there; None: it is gone."""
        target = self.folder.path / name
        if content is None:
            target.unlink(missing_ok=True)
        else:
            for parent in reversed(
                Path(name).parents
            ):  # never the cluster's own: one that has ended must not come back
                if parent != Path("."):
                    (self.folder.path / parent).mkdir(mode=0o700, exist_ok=True)
            write_atomic(target, content)

    def close(self) -> None:
        """Nothing more is written here."""
        if self._follower:
            self._follower.end()

    def finish(self, stop: str = "", node: Mapping[str, Any] | None = None) -> str | None:
        """All logs come here, and only then the folder there goes, but for the copy of the person's own folder, where
        results may lie: its path there. One connection.

        stop: a request for the agent there, which removes what a node that was killed has left (node: its details)."""
        self.close()
        left = [str((node or {}).get(key) or "") for key in ("temp", "executable")]
        words = ["sh", "-c", SAFE + _FINISH, "sh", self.place.as_posix(), stop, *left]
        with self.host.talk(words) as there:
            first = there.hear()
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
            there.say("ok")
            return there.hear() or None

    def _unsafe(self, why: str) -> HeliostatError:
        return HeliostatError(
            f"`{self.place.as_posix()}` on `{self.host.target}` is not safe to use",
            cause=why.strip()[-300:],
            code=Code.STORE_UNSAFE_DIRECTORY,
        )


class Follower(threading.Thread):
    """Puts each change into the copy, as the agent there tells it, over one connection."""

    def __init__(self, mirror: RemoteDirectory, process: Mapping[str, Any], node: str | None) -> None:
        super().__init__(daemon=True)
        self.mirror, self.process, self.node = mirror, process, node
        self.over, self._writing = False, threading.Lock()
        self._heard = time.monotonic()
        self.spoke = False
        self._talk: LineSession | None = None
        self.start()

    def follows(self, node: str | None) -> bool:
        """Whether the copy is as new as can be; the logs of this node come too from now on."""
        if not self.is_alive() or time.monotonic() - self._heard > FOLLOWER_TIMEOUT_S:
            self.over = True
            return False
        if node not in (None, self.node) and self._talk:
            self.node = node
            self._talk.say(json.dumps({"node": node}))
        return True

    def run(self) -> None:
        mirror, words = self.mirror, self.process
        script = SAFE + '\ncd -- "$1" && safe . agent.pyz >/dev/null && exec "$2" agent.pyz follow'
        argv = ["sh", "-c", script, "sh", mirror.path.as_posix(), str(words["executable"])]
        have = {
            path.relative_to(mirror.folder.logs).as_posix(): path.stat().st_size
            for path in mirror.have(self.node)
        }
        first = {
            "pid": words["pid"],
            "start": words["start"],
            "small": mirror.small,
            "node": self.node,
            "have": have,
        }
        with contextlib.suppress(HeliostatError, OSError, ValueError), mirror.host.talk(argv) as there:
            there.say(json.dumps(first))
            self._talk = there
            while (line := there.hear()) is not None:
                self._heard, self.spoke = time.monotonic(), True
                with self._writing:
                    if self.over:
                        return
                    self._take(json.loads(line))

    def _take(self, said: Mapping[str, Any]) -> None:
        mirror = self.mirror
        if "log" in said:
            return mirror.grow(said["log"], said["at"], base64.b64decode(said["data"]))
        for name, text in said["files"].items():
            if name.split("/")[0] in mirror.small and ".." not in name:
                mirror.put(name, text)
        mirror.head = (NodeState.ALLOCATED if said["alive"] else NodeState.GONE, "")

    def end(self) -> None:
        """When this returns, nothing more is written."""
        with self._writing:
            self.over = True


# one line: when the process $3 started; one: a tar of the small files; then a line for each log that has grown: name,
# offset, data
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
# $2: a request for the agent, $3: the private directory of its node, $4: its Python. A line with a tar; then, told that it has
# arrived, what may go goes, and a line says where the rest is
_FINISH = """
cd -- "$1" 2>/dev/null || { echo gone; exit 0; }
why=$(safe . 2>&1 >/dev/null) || { echo "unsafe $why"; exit 0; }
if [ "$3" ] && [ -e "$3" ] && safe . agent.pyz >/dev/null; then printf %s "$2" | "$4" agent.pyz stop >/dev/null; fi
tar -cf - logs nodes state.json 2>/dev/null | base64 -w0; echo
read -r word && [ "$word" = ok ] || exit 1
for f in *; do [ "$f" = work ] || rm -rf -- "$f"; done
if [ -d work ]; then echo "$1/work"; else d=$PWD; cd .. && rmdir -- "$d"; rmdir -- "$PWD" 2>/dev/null; echo; fi
"""
