"""State of a cluster in a cloud, from the launcher's files, the instances and Ray's node table."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from heliostat.backends.base import Handle
from heliostat.backends.cloud import files as render
from heliostat.backends.cloud.files import Json
from heliostat.common.documents import JsonMapping
from heliostat.common.errors import Code, HeliostatError
from heliostat.common.processes import process_start
from heliostat.remote.transport import Local
from heliostat.state.files import read_json, write_atomic
from heliostat.state.states import NodeState

if TYPE_CHECKING:
    from heliostat.remote.ssh import Ssh
    from heliostat.state.records import NodeRecord

N = NodeState
KILL_TIMEOUT_S = 10.0
NODE_TIMEOUT_S = 20.0  # for a command on a node that may be terminating
PROCESS, ANSWER, INSTANCES, ENDED = "launcher.json", "launcher-answer.json", "instances.json", "ended.json"
LOG, OBSERVED = "launcher.log", "looked.json"
# states of the tag that Ray's launcher sets while it sets up an instance
STATUS = {
    None: (N.ALLOCATED, "its instance starts"),
    "uninitialized": (N.ALLOCATED, "its instance starts"),
    "waiting-for-ssh": (N.ALLOCATED, "waits for ssh"),
    "syncing-files": (N.STARTING, "files are copied"),
    "setting-up": (N.STARTING, "its environment is set up"),
    "update-failed": (N.STARTING, "its setup failed"),
    "up-to-date": (N.STARTING, "waits for Ray's node table"),
}
_FIELDS = (("message", "what"), ("cause", "because"))  # older versions wrote the second names
SETUP_FAILED = "New status: update-failed"
# lines of Ray's launcher and of ssh that are no output of the instance
LAUNCHER_PREFIXES = ("Cluster:", "File Mount:", "Checking ", "AWS config", "No head node found", "Usage stats", "Acquiring ", "<1/1>",
         "Traceback", "Exception in thread", "Shared connection", "Connection to ", "Warning: Permanently added")  # fmt: skip


def read_launcher_status(handle: Handle) -> tuple[str, str]:
    """("runs" | "done" | "failed", reason) of the launcher process."""
    folder = Path(handle.detail["folder"])
    answer, process = read_json(folder / ANSWER), read_json(folder / PROCESS)
    if answer is None:
        if process is None:
            return "runs", "the launcher starts"
        if process_start(int(process["pid"])) == process["start"]:
            return "runs", ""
        answer = read_json(folder / ANSWER)  # the process may have ended since the first read
    if answer is None:
        return "failed", read_last_output(folder) or "Ray's launcher ended without an error message"
    if answer["ok"]:
        return "done", ""
    message, cause = (answer.get(new) or answer.get(old) or "" for new, old in _FIELDS)
    output = read_last_output(folder) if "setup head node" in cause else ""
    hint = f"; {answer['hint']}" if answer["hint"] else ""
    return "failed", (f"{cause.rstrip('.')}: {output}" if output else cause or message) + hint


def read_last_output(folder: Path) -> str:
    """The last output of ssh or of the instance before the failure; Ray's own lines are indented."""
    from heliostat.backends.cloud.launcher.refusals import ANSI

    text = ANSI.sub(
        "", Local().read(folder / "logs" / "head" / LOG, limit=1 << 24).decode("utf-8", "replace")
    )
    lines = [line.rstrip() for line in text.split(SETUP_FAILED)[0].splitlines() if line.strip()]
    remote_lines = [line for line in lines if not line.startswith((" ", *LAUNCHER_PREFIXES))]
    return " / ".join(remote_lines[-2:])[-300:]


def name_instances(
    handle: Handle, instances: Sequence[Json], members: Sequence[NodeRecord], before: JsonMapping
) -> dict[str, Json]:
    """The instances by node name. An instance keeps its name; a new one gets a free name of its group, else a new one."""
    named: dict[str, Json] = {}
    known = {one.get("id"): name for name, one in before.items() if one.get("id")}
    unnamed = []
    for one in instances:
        name = "head" if one["role"] == "head" else known.get(one["id"])
        if name and name not in named:
            named[name] = one
        else:
            unnamed.append(one)
    for one in unnamed:
        group = handle.detail["groups"].get(one["type"])
        mine = [m.name for m in members if m.role == "worker" and m.group == group]
        stem = f"{group}-" if group else "w"
        free = (name for name in mine if name not in named)
        name = next(free, None) or next(f"{stem}{i}" for i in range(1, 10**6) if f"{stem}{i}" not in named)
        named[name] = one
    return named


def list_nodes(
    handle: Handle, members: Sequence[NodeRecord], named: Mapping[str, Json]
) -> Iterator[tuple[str, str, str | None]]:
    """(name, role, group) of the recorded nodes and of further instances."""
    seen = set()
    for member in members:
        seen.add(member.name)
        yield member.name, member.role, member.group
    for name, one in named.items():
        if name not in seen:
            yield name, one["role"], handle.detail["groups"].get(one["type"])


def resolve_state(
    one: Json | None,
    role: str,
    operation: str,
    failure: str,
    table: JsonMapping | None,
    before: JsonMapping,
    seen: Json,
) -> tuple[N, str]:
    """(state, reason) of a node. one: its instance; table: Ray's node table; seen: the instances of the cluster."""
    if operation == "failed":
        return N.FAILED, failure if role == "head" else "the head did not start"
    was = N.__members__.get(str(before.get("state") or ""))
    if one is None:
        if operation == "runs":
            return N.QUEUED, failure or "waits for an instance" if role == "head" else "waits for the head"
        if not seen["nodes"]:
            return (
                (N.GONE, seen["ended"])
                if seen["ended"] or role != "head"
                else (N.FAILED, "its instance was terminated")
            )
        return (
            N.QUEUED,
            "its instance was terminated and is replaced" if was is N.READY else "waits for the autoscaler",
        )
    if table is not None and one.get("internal_ip") in table:
        return N.READY, ""
    state, reason = STATUS.get(one.get("status"), (N.STARTING, str(one.get("status"))))
    if was in (N.READY, N.LOST) and before.get("id") == one["id"]:
        return (
            N.LOST,
            "Ray's node table does not list it" if table is not None else "the head does not answer",
        )
    return state, f"{one['id']}: {reason}"


def make_connection(handle: Handle, head: Json) -> Json:
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


def read_token(handle: Handle) -> str | None:
    try:
        return (Path(handle.detail["folder"]) / "token").read_text().strip()
    except OSError:
        return None


def write_instances(handle: Handle, named: Mapping[str, Json]) -> None:
    path = Path(handle.detail["folder"]) / INSTANCES
    if read_json(path) != named and path.parent.is_dir():
        with contextlib.suppress(HeliostatError):  # the disk may be full
            write_atomic(path, json.dumps(named))


def fetch_logs(node: Ssh, home: str, known: Mapping[str, int]) -> dict[str, bytes]:
    """New bytes of the node's logs. known: bytes read of each file."""
    import base64

    arguments = [item for name in render.LOGS for item in (name, str(known.get(name, 0) + 1))]
    done = node.run(["sh", "-c", render.FETCH_LOGS, "sh", home, *arguments], timeout=NODE_TIMEOUT_S)
    lines = done.out.splitlines()
    return {name: base64.b64decode(data) for name, data in zip(lines[::2], lines[1::2], strict=False)}


def stop_launcher(handle: Handle) -> None:
    """Stops the launcher and its child processes, by its process id."""
    process = read_json(Path(handle.detail["folder"]) / PROCESS)
    if process is None:
        return
    pid, deadline = int(process["pid"]), time.monotonic() + KILL_TIMEOUT_S
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process_start(pid) != process["start"]:
            return
        with contextlib.suppress(OSError):
            os.killpg(pid, number)  # the launcher leads a process group
        while process_start(pid) == process["start"] and time.monotonic() < deadline:
            time.sleep(0.1)
        deadline = time.monotonic() + KILL_TIMEOUT_S
    if process_start(pid) == process["start"]:
        raise HeliostatError(
            "Ray's launcher could not be stopped",
            cause=f"process {pid} is still running",
            code=Code.CLOUD_LAUNCHER,
        )
