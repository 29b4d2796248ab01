"""What a pod writes, and a command in it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from heliostat.backends.kubernetes import api as kube
from heliostat.common.errors import AccessDenied, HeliostatError
from heliostat.remote.transport import Completed

if TYPE_CHECKING:
    from heliostat.remote.ray_client import RayApi

RAY_LOGS = ("raylet.out", "raylet.err")
HEAD_LOGS = ("gcs_server.out", "gcs_server.err", "monitor.log", "dashboard.log")
PROTOCOL = "v4.channel.k8s.io"
OUT, ERR, END = 1, 2, 3  # channels
STAMP = re.compile(rb"\d{4}-\d\d-\d\dT[\d:.]+(Z|[+-]\d\d:\d\d)")
_last: dict[
    tuple[str, str, int], bytes
] = {}  # (pod, container, life): the time of the last line that we have
_whole: set[tuple[str, str, int]] = set()  # lives that are over, and whose log we have


def pod_logs(
    api: kube.Api, namespace: str, told: Mapping[str, Any], known: Mapping[str, int], ray: RayApi | None
) -> dict[str, bytes]:
    """What the containers of the pod, and Ray in it, have said beyond what is known, by file name."""
    place = f"/api/v1/namespaces/{namespace}/pods/{told['id']}"
    found: dict[str, bytes] = {}
    try:
        status = api.call("GET", place).get("status") or {}
    except kube.NotThere:
        return found
    for container in (*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())):
        name, life = container["name"], int(container.get("restartCount") or 0)
        now = log_name(name, life)
        found[now] = _container(api, place, (told["id"], name, life), known.get(now, 0))
        running = (container.get("state") or {}).get("running")
        if (
            life and running and (told["id"], name, life - 1) not in _whole
        ):  # else `previous` is this life again
            before = log_name(name, life - 1)
            lines = _stamped(_ask(api, place, {"container": name, "previous": "true", "timestamps": "true"}))
            found[before] = b"".join(text for _, text in lines)[known.get(before, 0) :]
            _whole.add((told["id"], name, life - 1))
    if ray:
        for name in (*RAY_LOGS, *(HEAD_LOGS if told.get("role") == "head" else ())):
            whole = ray.log(str(told["ip"]), name)
            found[name] = whole[known.get(name, 0) :]
    return found


def log_name(container: str, life: int) -> str:
    """Each life of a container has a file of its own."""
    return f"{container}.restart-{life}.log" if life else f"{container}.log"


def _container(api: kube.Api, place: str, key: tuple[str, str, int], known: int) -> bytes:
    """Whoever has begun is given what came since; whoever begins anew, the whole."""
    since = _last.get(key)
    query = {"container": key[1], "timestamps": "true", **({"sinceTime": since.decode()} if since else {})}
    lines = _stamped(_ask(api, place, query))
    if lines:
        _last[key] = max(stamp for stamp, _ in lines)
    if since:
        return b"".join(text for stamp, text in lines if stamp > since)
    return b"".join(text for _, text in lines)[known:]


def _stamped(data: bytes) -> list[tuple[bytes, bytes]]:
    """(time, line) of what the container wrote. The kubelet may answer with an error of its own in place of a log that it
    has lost: that has no time before it."""
    parts = (line.partition(b" ") for line in data.splitlines(keepends=True))
    return [(stamp, text) for stamp, _, text in parts if STAMP.fullmatch(stamp)]


def _ask(api: kube.Api, place: str, query: Mapping[str, str]) -> bytes:
    try:
        return api.raw("GET", f"{place}/log", query=query, seconds=120.0)
    except (kube.Silent, AccessDenied):
        raise
    except HeliostatError:  # a container that has not begun has no log
        return b""


def run_in_pod(
    api: kube.Api, namespace: str, pod: str, argv: Sequence[str], container: str = ""
) -> Completed:
    """The command in the pod, to its end; over a websocket, as kubectl does it."""
    import websocket

    query = [*(("command", word) for word in argv), ("stdout", "true"), ("stderr", "true")]
    query += [("container", container)] if container else []
    path = f"/api/v1/namespaces/{namespace}/pods/{pod}/exec?{urlencode(query)}"
    options = {"context": api.tls} if api.tls else {}
    try:
        socket = websocket.create_connection(
            "ws" + api.server.removeprefix("http") + path,
            header=[f"{key}: {value}" for key, value in api.authorization().items()],
            subprotocols=[PROTOCOL],
            sslopt=options,
            timeout=kube.ASK_S,
        )
    except websocket.WebSocketBadStatusException as error:
        raise api.said_no("POST", path.partition("?")[0], error.status_code, error.resp_body or b"") from None
    except (OSError, websocket.WebSocketException) as error:
        raise api.silent(error) from None
    said = {OUT: b"", ERR: b"", END: b""}
    try:
        socket.settimeout(None)  # a person ends it with Ctrl-C
        while data := socket.recv():
            frame = data.encode() if isinstance(data, str) else data
            said[frame[0]] = said.get(frame[0], b"") + frame[1:]
            if frame[0] == END and frame[1:]:
                break
    except (OSError, websocket.WebSocketException) as error:
        if not said[END]:
            raise api.silent(error) from None
    finally:
        socket.close()
    out, err = (said[channel].decode("utf-8", "replace") for channel in (OUT, ERR))
    code, words = _outcome(said[END])
    return Completed(tuple(argv), code, out, f"{err}{words}\n" if words else err)


def _outcome(status: bytes) -> tuple[int, str]:
    """(exit code, the kubelet's sentence where it has none: the command did not run)."""
    try:
        document = json.loads(status)
    except ValueError:
        return 255, "the connection ended before the command did"
    if document.get("status") == "Success":
        return 0, ""
    causes = (document.get("details") or {}).get("causes") or ()
    codes = [cause["message"] for cause in causes if cause.get("reason") == "ExitCode"]
    return (int(codes[0]), "") if codes else (255, str(document.get("message") or "it did not run"))
