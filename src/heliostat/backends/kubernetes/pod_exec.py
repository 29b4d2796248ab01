"""Commands in a pod, over a websocket as kubectl runs them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING
from urllib.parse import urlencode

from heliostat.backends.kubernetes import api as kube
from heliostat.remote.transport import Completed

if TYPE_CHECKING:
    import websocket

PROTOCOL = "v4.channel.k8s.io"
OUT, ERR, STATUS = 1, 2, 3  # channels


def open_exec(
    api: kube.Api,
    namespace: str,
    pod: str,
    argv: Sequence[str],
    container: str,
    flags: Sequence[tuple[str, str]] = (),
    protocols: Sequence[str] = (PROTOCOL,),
) -> websocket.WebSocket:
    """Starts the command in the pod; a websocket with its streams. flags: further parameters of the request."""
    import websocket

    # with a terminal, both streams are one
    streams = ("stdout",) if ("tty", "true") in flags else ("stdout", "stderr")
    query = [*(("command", argument) for argument in argv), *((name, "true") for name in streams), *flags]
    query += [("container", container)] if container else []
    path = f"/api/v1/namespaces/{namespace}/pods/{pod}/exec?{urlencode(query)}"
    options = {"context": api.tls} if api.tls else {}
    try:
        socket = websocket.create_connection(
            "ws" + api.server.removeprefix("http") + path,
            header=[f"{key}: {value}" for key, value in api.authorization().items()],
            subprotocols=list(protocols),
            sslopt=options,
            timeout=kube.REQUEST_TIMEOUT_S,
        )
    except websocket.WebSocketBadStatusException as error:
        raise api.error_from_response(
            "POST", path.partition("?")[0], error.status_code, error.resp_body or b""
        ) from None
    except (OSError, websocket.WebSocketException) as error:
        raise api.unreachable_error(error) from None
    socket.settimeout(None)  # a command may run for any time; Ctrl-C ends it
    return socket


def run_in_pod(
    api: kube.Api, namespace: str, pod: str, argv: Sequence[str], container: str = ""
) -> Completed:
    """Runs the command in the pod and waits for its end, over a websocket as kubectl does."""
    import websocket

    socket = open_exec(api, namespace, pod, argv, container)
    channels = {OUT: b"", ERR: b"", STATUS: b""}
    try:
        while data := socket.recv():
            frame = data.encode() if isinstance(data, str) else data
            channels[frame[0]] = channels.get(frame[0], b"") + frame[1:]
            if frame[0] == STATUS and frame[1:]:
                break
    except (OSError, websocket.WebSocketException) as error:
        if not channels[STATUS]:
            raise api.unreachable_error(error) from None
    finally:
        socket.close()
    out, err = (channels[channel].decode("utf-8", "replace") for channel in (OUT, ERR))
    code, message = parse_exit_status(channels[STATUS])
    return Completed(tuple(argv), code, out, f"{err}{message}\n" if message else err)


def parse_exit_status(status: bytes) -> tuple[int, str]:
    """(exit code, message). The message is the kubelet's, for a command that did not run."""
    try:
        document = json.loads(status)
    except ValueError:
        return 255, "the connection ended before the command did"
    if document.get("status") == "Success":
        return 0, ""
    causes = (document.get("details") or {}).get("causes") or ()
    codes = [cause["message"] for cause in causes if cause.get("reason") == "ExitCode"]
    return (int(codes[0]), "") if codes else (255, str(document.get("message") or "the command did not run"))
