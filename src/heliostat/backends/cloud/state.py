"""What is known of a cluster in a cloud, from the files that its operations leave, its instances, and Ray's table of nodes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from heliostat.backends.base import Handle
from heliostat.backends.cloud import files as render
from heliostat.backends.cloud.files import Json
from heliostat.common.errors import Code, HeliostatError
from heliostat.common.processes import process_start
from heliostat.remote.transport import Local
from heliostat.state.files import read_json, write_atomic
from heliostat.state.states import NodeState

if TYPE_CHECKING:
    from heliostat.remote.ssh import Ssh
    from heliostat.state.records import NodeRecord

N = NodeState
KILL_S = 10.0
LAST_S = 20.0  # for the logs of a node that is about to end
PROCESS, ANSWER, INSTANCES, ENDED = "launcher.json", "launcher-answer.json", "instances.json", "ended.json"
LOG, LOOKED = "launcher.log", "looked.json"
# what Ray's launcher writes on an instance while it sets it up
STATUS = {
    None: (N.ALLOCATED, "its instance starts"),
    "uninitialized": (N.ALLOCATED, "its instance starts"),
    "waiting-for-ssh": (N.ALLOCATED, "waits for ssh"),
    "syncing-files": (N.STARTING, "files are copied there"),
    "setting-up": (N.STARTING, "its environment is made, and Ray started"),
    "update-failed": (N.STARTING, "its set-up failed"),
    "up-to-date": (N.STARTING, "waits for Ray to have it"),
}
_RENAMED = (("message", "what"), ("cause", "because"))  # older versions wrote the second names
FAILED = "New status: update-failed"
# of Ray's launcher and of ssh, around what somebody has to say
NOISE = ("Cluster:", "File Mount:", "Checking ", "AWS config", "No head node found", "Usage stats", "Acquiring ", "<1/1>",
         "Traceback", "Exception in thread", "Shared connection", "Connection to ", "Warning: Permanently added")  # fmt: skip


def operation(handle: Handle) -> tuple[str, str]:
    """How the launcher fares: ("runs" | "done" | "failed", its own last words)."""
    folder = Path(handle.detail["folder"])
    answer, process = read_json(folder / ANSWER), read_json(folder / PROCESS)
    if answer is None:
        if process is None:
            return "runs", "it has just been asked for"
        if process_start(int(process["pid"])) == process["start"]:
            return "runs", ""
        answer = read_json(folder / ANSWER)  # it may have ended in this moment
    if answer is None:
        return "failed", last_line(folder) or "Ray's launcher ended without a word"
    if answer["ok"]:
        return "done", ""
    message, cause = (answer.get(new) or answer.get(old) or "" for new, old in _RENAMED)
    said = last_line(folder) if "setup head node" in cause else ""
    hint = f"; {answer['hint']}" if answer["hint"] else ""
    return "failed", (f"{cause.rstrip('.')}: {said}" if said else cause or message) + hint


def last_line(folder: Path) -> str:
    """The last that the other party said before the launcher gave up: Ray's own lines are indented, those of ssh and of the
    commands on the machine are not."""
    from heliostat.backends.cloud.launcher.refusals import ANSI

    text = ANSI.sub(
        "", Local().read(folder / "logs" / "head" / LOG, limit=1 << 24).decode("utf-8", "replace")
    )
    lines = [line.rstrip() for line in text.split(FAILED)[0].splitlines() if line.strip()]
    theirs = [line for line in lines if not line.startswith((" ", *NOISE))]
    return " / ".join(theirs[-2:])[-300:]


def names(
    handle: Handle, instances: Sequence[Json], members: Sequence[NodeRecord], before: Mapping[str, Any]
) -> dict[str, Json]:
    """Each instance has a node's name, and keeps it. A type's are those of its members, then further ones by number."""
    named: dict[str, Json] = {}
    known = {one.get("id"): name for name, one in before.items() if one.get("id")}
    rest = []
    for one in instances:
        name = "head" if one["role"] == "head" else known.get(one["id"])
        if name and name not in named:
            named[name] = one
        else:
            rest.append(one)
    for one in rest:
        group = handle.detail["groups"].get(one["type"])
        mine = [m.name for m in members if m.role == "worker" and m.group == group]
        stem = f"{group}-" if group else "w"
        free = (name for name in mine if name not in named)
        name = next(free, None) or next(f"{stem}{i}" for i in range(1, 10**6) if f"{stem}{i}" not in named)
        named[name] = one
    return named


def roll(
    handle: Handle, members: Sequence[NodeRecord], named: Mapping[str, Json]
) -> Iterator[tuple[str, str, str | None]]:
    """(name, role, group) of everybody that there is something to say of."""
    seen = set()
    for member in members:
        seen.add(member.name)
        yield member.name, member.role, member.group
    for name, one in named.items():
        if name not in seen:
            yield name, one["role"], handle.detail["groups"].get(one["type"])


def judge(
    one: Json | None,
    role: str,
    operation: str,
    words: str,
    table: Mapping[str, Any] | None,
    before: Mapping[str, Any],
    seen: Json,
) -> tuple[N, str]:
    if operation == "failed":
        return N.FAILED, words if role == "head" else "the head did not start"
    was = N.__members__.get(str(before.get("state") or ""))
    if one is None:
        if operation == "runs":
            return N.QUEUED, words or "waits for an instance" if role == "head" else "waits for the head"
        if not seen["nodes"]:
            return (
                (N.GONE, seen["ended"])
                if seen["ended"] or role != "head"
                else (N.FAILED, "its instance is gone")
            )
        return (
            N.QUEUED,
            "its instance is gone; another is made" if was is N.READY else "waits for the autoscaler",
        )
    if table is not None and one.get("internal_ip") in table:
        return N.READY, ""
    state, reason = STATUS.get(one.get("status"), (N.STARTING, str(one.get("status"))))
    if was in (N.READY, N.LOST) and before.get("id") == one["id"]:
        return N.LOST, "Ray does not have it" if table is not None else "its head does not answer"
    return state, f"{one['id']}: {reason}"


def connection(handle: Handle, head: Json) -> Json:
    detail, ip = handle.detail, head["internal_ip"]
    address = f"{ip}:{render.GCS_PORT}"
    env = {
        "RAY_ADDRESS": address,
        "HELIOSTAT_RAY_PORT": render.GCS_PORT,
        "HELIOSTAT_HEAD_NODE": head["id"],
        "HELIOSTAT_HEAD_IP": ip,
        "HELIOSTAT_DASHBOARD_PORT": detail["dashboard"],
        "RAY_AUTH_MODE": "token" if detail["auth"] == "token" else "disabled",
        **({"RAY_AUTH_TOKEN_PATH": f"{detail['folder']}/token"} if detail["auth"] == "token" else {}),
    }
    return {
        "schema": 1,
        "address": address,
        "dashboard_port": detail["dashboard"],
        "ray": detail["ray"],
        "python": None,
        "client_port": 10001,
        "env": env,
    }


def token(handle: Handle) -> str | None:
    try:
        return (Path(handle.detail["folder"]) / "token").read_text().strip()
    except OSError:
        return None


def write_instances(handle: Handle, named: Mapping[str, Json]) -> None:
    path = Path(handle.detail["folder"]) / INSTANCES
    if read_json(path) != named and path.parent.is_dir():
        with contextlib.suppress(HeliostatError):  # looking works on a full disk
            write_atomic(path, json.dumps(named))


def fetch(there: Ssh, home: str, known: Mapping[str, int]) -> dict[str, bytes]:
    """The node's logs beyond what is known of each."""
    import base64

    words = [word for name in render.LOGS for word in (name, str(known.get(name, 0) + 1))]
    done = there.run(["sh", "-c", render.FETCH, "sh", home, *words], timeout=LAST_S)
    lines = done.out.splitlines()
    return {name: base64.b64decode(data) for name, data in zip(lines[::2], lines[1::2], strict=False)}


def end_process(handle: Handle) -> None:
    """The launcher, by its own id, and what it started."""
    process = read_json(Path(handle.detail["folder"]) / PROCESS)
    if process is None:
        return
    pid, deadline = int(process["pid"]), time.monotonic() + KILL_S
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process_start(pid) != process["start"]:
            return
        with contextlib.suppress(OSError):
            os.killpg(pid, number)  # it leads a group of its own
        while process_start(pid) == process["start"] and time.monotonic() < deadline:
            time.sleep(0.1)
        deadline = time.monotonic() + KILL_S
    if process_start(pid) == process["start"]:
        raise HeliostatError(
            "Ray's launcher could not be ended",
            cause=f"process {pid} is still there",
            code=Code.CLOUD_LAUNCHER,
        )
