"""`agent follow`: streams changes of the cluster's directory to a client on another host, one JSON object a line."""

from __future__ import annotations

import base64
import glob
import io
import json
import os
import select
import time
from typing import Dict, Iterator, List, Optional

from . import processes
from .protocol import FollowLine, FollowRequest

POLL_S = 0.1
HEARTBEAT_S = 5.0  # a write fails when the client is gone, so a line is written at least this often
MAX_LOG_BYTES = 1 << 20  # of one log in one line


def follow() -> Iterator[FollowLine]:
    """Yield the changes of the current directory until standard input ends.

    Each line of standard input is a `FollowRequest`; later lines change the first one."""
    stdin = io.FileIO(0)  # unbuffered: select must see what has not been read
    request: FollowRequest = json.loads(stdin.readline())
    have = request.pop("have")
    sent: Dict[str, Optional[str]] = {}
    sent_at = 0.0
    while os.path.exists("agent.pyz"):
        alive = processes.alive(request["pid"], request["start"])  # before its last report is read
        small = {path: read_text(path) for path in expand(request["small"])}
        small.update((path, None) for path in sent if path not in small)
        yield from read_logs(request["node"], have)  # before the state that may report their end
        new = {path: content for path, content in small.items() if sent.get(path, "") != content}
        if new or time.monotonic() - sent_at > HEARTBEAT_S:
            yield {"alive": alive, "files": new}
            sent_at = time.monotonic()
            sent.update(new)
        if select.select([stdin], [], [], POLL_S)[0]:
            line = stdin.readline()
            if not line:
                break
            request.update(json.loads(line))


def expand(small: List[str]) -> Iterator[str]:
    """The files, and for a directory its JSON files."""
    for name in small:
        yield from glob.glob(name + "/*.json") if os.path.isdir(name) else [name]


def read_text(path: str) -> Optional[str]:
    try:
        with open(path) as stream:
            return stream.read()
    except OSError:
        return None


def read_logs(node: Optional[str], have: Dict[str, int]) -> Iterator[FollowLine]:
    """Yield what was appended to the cluster's logs and to those of this node; updates `have`."""
    for path in glob.glob("logs/*.*") + (glob.glob("logs/%s/*.*" % glob.escape(node)) if node else []):
        name = path[len("logs/") :]
        try:
            with open(path, "rb") as stream:
                while os.fstat(stream.fileno()).st_size > have.get(name, 0):
                    stream.seek(have.get(name, 0))
                    data = stream.read(MAX_LOG_BYTES)
                    yield {"log": name, "at": have.get(name, 0), "data": base64.b64encode(data).decode()}
                    have[name] = have.get(name, 0) + len(data)
        except OSError:
            pass  # a directory, or removed meanwhile
