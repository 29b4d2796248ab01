"""For whoever watches from another machine: what changes in the cluster's folder, line by line, over one connection."""

from __future__ import annotations

import base64
import glob
import io
import json
import os
import select
import time
from typing import Any, Dict, Iterator, List

from . import processes

Json = Dict[str, Any]
LOOK_S = 0.1
BEAT_S = 5.0  # a word at least so often: whoever cannot be told any more is gone
LARGEST = 1 << 20  # of one log in one line


def follow() -> Iterator[Json]:
    """In the cluster's folder. Standard input: a line of JSON with the head's process, the small files to send whole, a
    node whose logs are wanted too, and how much of each log is there already; later lines change it. Its end is ours."""
    words = io.FileIO(0)  # what is not read yet must be seen by select
    want: Json = json.loads(words.readline())
    have: Dict[str, int] = want.pop("have")
    sent: Json = {}
    spoke = 0.0
    while os.path.exists("agent.pyz"):
        alive = processes.alive(want["pid"], want["start"])  # before its last words are read
        small = {path: text(path) for path in paths(want["small"])}
        small.update((path, None) for path in sent if path not in small)
        yield from logs(want["node"], have)  # before the state that may tell of their end
        new = {path: content for path, content in small.items() if sent.get(path, "") != content}
        if new or time.monotonic() - spoke > BEAT_S:
            yield {"alive": alive, "files": new}
            spoke = time.monotonic()
            sent.update(new)
        if select.select([words], [], [], LOOK_S)[0]:
            line = words.readline()
            if not line:
                break
            want.update(json.loads(line))


def paths(small: List[str]) -> Iterator[str]:
    for name in small:
        yield from glob.glob(name + "/*.json") if os.path.isdir(name) else [name]


def text(path: str) -> Any:
    try:
        with open(path) as stream:
            return stream.read()
    except OSError:
        return None


def logs(node: Any, have: Dict[str, int]) -> Iterator[Json]:
    """What has come to the cluster's own logs, and to those of this node."""
    for path in glob.glob("logs/*.*") + (glob.glob("logs/%s/*.*" % glob.escape(node)) if node else []):
        name = path[len("logs/") :]
        try:
            with open(path, "rb") as stream:
                while os.fstat(stream.fileno()).st_size > have.get(name, 0):
                    stream.seek(have.get(name, 0))
                    data = stream.read(LARGEST)
                    yield {"log": name, "at": have.get(name, 0), "data": base64.b64encode(data).decode()}
                    have[name] = have.get(name, 0) + len(data)
        except OSError:
            pass  # a folder, or gone in this moment
