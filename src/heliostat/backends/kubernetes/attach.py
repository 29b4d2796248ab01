"""Runs a command in a pod with this process's streams, as `kubectl exec` does: `python -m heliostat.backends.kubernetes.attach`.

A program of its own, so that `ssh` and `cp` start a process on every backend.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from heliostat.backends.kubernetes import api as kube
from heliostat.backends.kubernetes.pod_exec import ERR, OUT, PROTOCOL, STATUS, open_exec, parse_exit_status
from heliostat.common.errors import HeliostatError

if TYPE_CHECKING:
    import websocket

IN, RESIZE, CLOSE = 0, 4, 255  # channels
PROTOCOLS = ("v5.channel.k8s.io", PROTOCOL)  # v5 can close the command's input
CHUNK = 1 << 16


def command(
    kubeconfig: str, context: str | None, pod: Sequence[str], argv: Sequence[str], terminal: bool
) -> list[str]:
    """The argv of this program. pod: namespace, name and container."""
    options = ["--context", context] if context else []
    options += ["--terminal"] if terminal else []
    own = [sys.executable, "-m", "heliostat.backends.kubernetes.attach", "--kubeconfig", kubeconfig]
    return [*own, *options, *pod, "--", *argv]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kubeconfig", required=True)
    parser.add_argument("--context")
    parser.add_argument("--terminal", action="store_true")
    for name in ("namespace", "pod", "container"):
        parser.add_argument(name)
    parser.add_argument("argv", nargs="+")
    given = parser.parse_args(arguments)
    try:
        api = kube.connect(given.kubeconfig, given.context)
        flags = [("stdin", "true"), *([("tty", "true")] if given.terminal else [])]
        socket = open_exec(
            api, given.namespace, given.pod, given.argv, given.container, flags, protocols=PROTOCOLS
        )
        with _raw_terminal() if given.terminal else contextlib.nullcontext():
            code, message = _exchange(socket, given.terminal)
    except HeliostatError as error:
        code, message = 255, f"{error.message}: {error.cause}"
    if message:
        sys.stderr.write(f"{message}\n")
    return code


def _exchange(socket: websocket.WebSocket, terminal: bool) -> tuple[int, str]:
    """Copies the streams until the command's end: its exit code, and a message if it did not run."""
    import websocket

    threading.Thread(target=_send_input, args=(socket,), daemon=True).start()
    if terminal:
        _send_size(socket)
        signal.signal(signal.SIGWINCH, lambda *_: _send_size(socket))
    status = b""
    try:
        while data := socket.recv():
            frame = data.encode() if isinstance(data, str) else data
            if frame[0] in (OUT, ERR):
                _write(sys.stdout.fileno() if frame[0] == OUT else sys.stderr.fileno(), frame[1:])
            elif frame[0] == STATUS and frame[1:]:
                status = frame[1:]
                break
    except (OSError, websocket.WebSocketException):
        pass  # without a status, the connection was lost
    return parse_exit_status(status)


def _send_input(socket: websocket.WebSocket) -> None:
    with contextlib.suppress(Exception):  # the main thread reports a lost connection
        while data := os.read(sys.stdin.fileno(), CHUNK):
            socket.send_binary(bytes([IN]) + data)
        if socket.subprotocol == PROTOCOLS[0]:
            socket.send_binary(bytes([CLOSE, IN]))


def _send_size(socket: websocket.WebSocket) -> None:
    columns, lines = shutil.get_terminal_size()
    with contextlib.suppress(Exception):  # the main thread reports a lost connection
        socket.send_binary(bytes([RESIZE]) + json.dumps({"Width": columns, "Height": lines}).encode())


def _write(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


@contextlib.contextmanager
def _raw_terminal() -> Iterator[None]:
    """Passes every key to the pod's terminal, Ctrl-C too."""
    import termios
    import tty

    before = termios.tcgetattr(sys.stdin)
    try:
        tty.setraw(sys.stdin)
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


if __name__ == "__main__":
    sys.exit(main())
