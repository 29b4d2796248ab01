"""A cluster whose folder lies on another machine (`via: user@login`), kept up to date here.

The agents write into the folder there; whoever asks reads the copy here. So nothing above knows the difference.
"""

from __future__ import annotations

import base64
import io
import json
import os
import secrets
import tarfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from heliostat.errors import HeliostatError
from heliostat.script import quote
from heliostat.ssh import Ssh
from heliostat.store import ClusterFolder, write_atomic

PULL_S = 0.5  # a question over ssh costs some 50 ms
SMALL = ("state.json", "pulse.json", "connection.json", "connection.env", "head.json", "nodes")
LARGEST = 1 << 20  # of one log at a time
PLACE = ".heliostat/via"


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


class Mirror:
    def __init__(self, folder: ClusterFolder, host: Ssh, place: Path) -> None:
        self.folder, self.host, self.place = folder, host, place
        self._next = 0.0

    def push(self, files: Iterable[tuple[Path, bytes, int]]) -> None:
        """Paths are of the other machine. One connection for all of them."""
        packed = pack({path.relative_to(self.place).as_posix(): data for path, data, _ in files})
        script = 'umask 077; mkdir -p -- "$1/logs" && cd -- "$1" && tar -xf -'
        done = self.host.run(["sh", "-c", script, "sh", self.place.as_posix()], input=packed, timeout=600)
        if done.code:
            because = done.err.strip()[-300:]
            raise HeliostatError(f"could not write `{self.place}` on `{self.host.target}`", because=because)

    def ask(self, request: dict[str, object]) -> None:
        name = f"{time.time_ns()}-{secrets.token_hex(4)}.json"
        self.host.put(self.place / "requests" / name, json.dumps(request).encode())

    def pull(self, node: str | None = None) -> None:
        """What has changed there, with the logs of this node; not more often than is good for the login node."""
        if time.monotonic() < self._next and node is None:
            return
        logs = self.folder.logs
        places = [logs, logs / node] if node else [logs]
        places[-1].mkdir(mode=0o700, exist_ok=True)
        files = [path for place in places for path in place.glob("*.*") if path.is_file()]
        cases = "".join(f" {quote([p.relative_to(logs).as_posix()])}) o={p.stat().st_size};;" for p in files)
        script = _PULL % {"small": " ".join(SMALL), "cases": cases, "most": LARGEST}
        done = self.host.run(["sh", "-c", script, "sh", self.place.as_posix(), node or ""], timeout=60)
        self._next = time.monotonic() + PULL_S
        if done.code == 3:
            return  # not made yet, or gone
        small, *grown = done.out.splitlines() or [""]
        self._unpack(base64.b64decode(small), replace=SMALL)
        for line in grown:
            name, offset, data = line.split(" ", 2)
            path = logs / base64.b64decode(name).decode()
            if path.parent in places:
                with open(path, "ab") as stream:
                    if stream.tell() == int(offset):
                        stream.write(base64.b64decode(data))

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
                    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                    write_atomic(target, source.read())
                    found.add(entry.name.removeprefix("./"))
        for name in replace:
            if name not in found and (self.folder.path / name).is_file():
                (self.folder.path / name).unlink()

    def finish(self) -> str | None:
        """All logs come here, and the folder there goes, but for the copy of the person's own folder, where results may
        lie: its path there."""
        script = 'cd -- "$1" 2>/dev/null || exit 3; tar -cf - logs nodes state.json 2>/dev/null | base64 -w0'
        done = self.host.run(["sh", "-c", script, "sh", self.place.as_posix()], timeout=600)
        if done.code == 3:
            return None
        self._unpack(base64.b64decode(done.out.strip() or ""))
        script = (
            'cd -- "$1" && for f in *; do [ "$f" = work ] || rm -rf -- "$f"; done && '
            '{ [ -d work ] && echo "$1/work" || { d=$PWD; cd .. && rmdir -- "$d"; rmdir -- "$PWD" 2>/dev/null; }; }'
        )
        return (
            self.host.run(["sh", "-c", script, "sh", self.place.as_posix()], timeout=60).out.strip() or None
        )


# one line: a tar of the small files; then a line for each log that has grown: name, offset, data
_PULL = """
cd -- "$1" 2>/dev/null || exit 3
tar -cf - %(small)s 2>/dev/null | base64 -w0; echo
for f in logs/*.* ${2:+"logs/$2"/*.*}; do
  [ -f "$f" ] || continue
  n=${f#logs/} o=0
  case $n in %(cases)s *) ;; esac
  [ "$(wc -c <"$f")" -gt "$o" ] || continue
  printf '%%s %%s ' "$(printf %%s "$n" | base64 -w0)" "$o"
  tail -c +$((o + 1)) -- "$f" | head -c %(most)d | base64 -w0; echo
done
"""
