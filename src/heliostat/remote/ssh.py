"""A host over ssh, with the user's ssh program: their configuration, agent, keys, jump hosts and known hosts.

All commands share one connection (ControlMaster), unless the user's configuration sets that up. BatchMode prevents password
prompts. The host needs a shell and the usual Unix programs, and no part of Heliostat.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import os
import random
import re
import secrets
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO

from heliostat.common.errors import Code, HeliostatError
from heliostat.common.shell import quote
from heliostat.remote.streams import copy
from heliostat.remote.transport import Completed, Local
from heliostat.state.ownership import find_unsafe

CONNECT_S = 10
ALIVE_S = 5  # between two keepalives; ssh closes the connection after three without a reply
MAX_OPENING = (
    8  # connections to one sshd that are not logged in yet; its MaxStartups drops some from the 10th on
)
OPENING_S = 3.0  # after this time a connection counts as logged in
ATTEMPTS = 6  # to connect while sshd closes the connection before its identification
BUSY = re.compile(r"(kex|ssh)_exchange_identification|not allowed at this time", re.IGNORECASE)
# behind a jump host, ssh prints the same line after the actual error
NOT_BUSY = re.compile(
    r"permission denied|forwarding failed|open failed|verification failed|could not resolve|timed out|refused|no route",
    re.IGNORECASE,
)
MAX_SOCKET_DIR = 104 - 60  # maximum length of a socket's path, less that of ssh's file name
UNIX = sys.platform != "win32"
# part of ssh's message -> our code and a hint
HINTS = {
    "identification has changed": (
        Code.SSH_HOST_KEY,
        "if its administrator confirms the change: ssh-keygen -R {target}, then ssh {target} once by hand",
    ),
    "host key verification failed": (
        Code.SSH_HOST_KEY,
        "ssh {target} once by hand, and compare the key with the one that its administrator publishes",
    ),
    "permission denied": (
        Code.SSH_AUTHENTICATION,
        "ssh {target} must work without a password: ssh-add your key, or ssh-copy-id {target}",
    ),
    "could not resolve": (
        Code.SSH_UNKNOWN_HOST,
        "check the name `{target}`: ssh -G {target} shows the settings of your ~/.ssh/config",
    ),
    "connection refused": (Code.SSH_UNREACHABLE, "check that an ssh server listens on that port"),
    "timed out": (Code.SSH_UNREACHABLE, "check the network from this host: ssh {target}"),
    "no route to host": (Code.SSH_UNREACHABLE, "check the network from this host: ssh {target}"),
    "bad configuration option": (Code.SSH_CONFIGURATION, "ssh -G {target} reads the same configuration"),
}


def connect(argv: Sequence[str]) -> Ssh:
    """The host of this command (`ssh -p 2222 zinc`); without arguments, this host. One object per host shares a connection."""
    key = tuple(argv)
    if key not in _hosts:  # several threads may request one host
        _hosts.setdefault(key, Ssh(key[-1], key[1:-1]) if key else ThisHost())
    return _hosts[key]


def connect_to(target: str) -> Ssh:
    """The host of this name, as `ssh` knows it (`user@login`)."""
    return connect(("ssh", target))


class Ssh:
    """A host over ssh; `target` and `options` are arguments of `ssh`."""

    def __init__(self, target: str, options: Sequence[str] = ()) -> None:
        self.target, self.options = target, list(options)
        self._sshd = target  # the first jump host, or the target
        self._forwards: dict[tuple[str, int], tuple[str, int]] = {}

    @functools.cached_property
    def command(self) -> list[str]:
        """ssh and its options. Keeps a ControlPath of the user's configuration."""
        base = [
            "ssh",
            *self.options,
            "-o",
            "BatchMode=yes",
            "-o",
            f"ConnectTimeout={CONNECT_S}",
            "-o",
            f"ServerAliveInterval={ALIVE_S}",
        ]
        shown = Local().run(["ssh", *self.options, "-G", self.target], timeout=20)
        if shown.code != 0:
            raise self._ssh_error(shown)
        settings = dict(line.partition(" ")[::2] for line in shown.out.splitlines())
        self._sshd = _first_hop(settings, self.target)
        if settings.get("controlpath", "none") != "none" or not UNIX:  # ssh on Windows has no ControlMaster
            return base
        sockets = _socket_dir()
        if sockets is None:
            return base
        share = ["ControlMaster=auto", "ControlPersist=60", f"ControlPath={sockets}/%C"]
        return [*base, *(argument for option in share for argument in ("-o", option))]

    def _remote_argv(self, argv: Sequence[str], marker: str) -> list[str]:
        """The ssh command that runs argv in a login bash, where PATH has the scheduler's commands.

        The marker separates the output of the shell's start files. The script is base64, because the user's login shell
        parses the line, and fish and csh quote differently."""
        return [*self.command, "--", self.target, _login_line(argv, f"echo {marker}; ")]

    def attached(self, argv: Sequence[str], *, terminal: bool) -> list[str]:
        return [*self.command, "-t" if terminal else "-T", "--", self.target, _login_line(argv)]

    def run(self, argv: Sequence[str], *, input: bytes = b"", timeout: float) -> Completed:
        marker = f"heliostat-{secrets.token_hex(8)}"
        remote_argv = self._remote_argv(argv, marker)
        for attempt in range(1, ATTEMPTS + 1):
            with _opening(self._sshd, MAX_OPENING) if attempt == 1 else _opening(f"{self._sshd} again", 1):
                done = Local().run(remote_argv, input=input, timeout=timeout + CONNECT_S)
            before, found, out = done.out.partition(f"{marker}\n")
            if found or attempt == ATTEMPTS or not BUSY.search(done.err) or NOT_BUSY.search(done.err):
                break
            time.sleep(random.uniform(0.5, 1) * min(attempt, 2))  # sshd was busy, and nothing has run
        if not found:  # ssh failed, or the login shell ended before our script
            raise self._ssh_error(replace(done, err=done.err if done.err.strip() else before))
        return Completed(tuple(argv), done.code, out, done.err)

    @contextlib.contextmanager
    def open_session(self, argv: Sequence[str]) -> Iterator[LineSession]:
        """Runs a program on the host and exchanges lines with it. The end of the block closes its input and ends it."""
        marker = f"heliostat-{secrets.token_hex(8)}"
        process = subprocess.Popen(
            self._remote_argv(argv, marker),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C must not end it before the cleanup has used it
        )
        assert process.stdin and process.stdout
        session = LineSession(process.stdin, process.stdout)
        try:
            while (line := session.read_line()) is not None and line != marker:
                pass
            yield session
        finally:
            with contextlib.suppress(OSError):
                process.stdin.close()
            try:
                process.wait(timeout=2)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            process.stdout.close()

    def _ssh_error(self, done: Completed) -> HeliostatError:
        lines = [line.strip() for line in done.err.splitlines() if line.strip()]
        text = "\n".join(lines).lower()
        known = (found for part, found in HINTS.items() if part in text)
        code, hint = next(known, (Code.SSH_FAILED, "ssh {target}"))
        return HeliostatError(
            f"could not reach `{self.target}` over ssh",
            cause=lines[-1] if lines else f"ssh ended with code {done.code}",
            hint=hint.format(target=self.target),
            code=code,
        )

    @functools.cached_property
    def home(self) -> Path:
        done = self.run(["sh", "-c", 'printf %s "$HOME"'], timeout=30)
        if done.code or not done.out.startswith("/"):
            raise HeliostatError(
                f"could not find your home directory on `{self.target}`",
                details=done.describe(),
                code=Code.SSH_FAILED,
            )
        return Path(done.out)

    def read(self, path: Path, offset: int = 0, limit: int = 1 << 20) -> bytes:
        script = f'tail -c +{offset + 1} -- "$1" | head -c {limit} | base64'
        try:
            return base64.b64decode(self.run(["sh", "-c", script, "sh", path.as_posix()], timeout=60).out)
        except (HeliostatError, ValueError):
            return b""

    def put(self, path: Path, data: bytes, mode: int = 0o600) -> None:
        """Writes the file completely or not at all, and makes its directory."""
        script = (
            'umask 077; d=$(dirname -- "$1"); mkdir -p -- "$d" && cat > "$1.$$" && '
            'chmod "$2" "$1.$$" && mv -f -- "$1.$$" "$1" || { rm -f -- "$1.$$"; exit 1; }'
        )
        done = self.run(["sh", "-c", script, "sh", path.as_posix(), f"{mode:o}"], input=data, timeout=600)
        if done.code:
            raise HeliostatError(
                f"could not write `{path}` on `{self.target}`",
                cause=done.err.strip()[-300:],
                code=Code.DISK_FULL if "No space left" in done.err else Code.SSH_WRITE,
            )

    def forward(self, host: str, port: int) -> tuple[str, int]:
        """(host, port) on this host that is forwarded to host:port of the target's network while this process runs.

        Each connection is an `ssh -W`: nothing listens or remains on the target."""
        key = (host, port)
        if key not in self._forwards:
            listener = socket.create_server(("127.0.0.1", 0), backlog=64)
            address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
            threading.Thread(target=self._accept, args=(listener, address), daemon=True).start()
            self._forwards[key] = ("127.0.0.1", listener.getsockname()[1])
        return self._forwards[key]

    def _accept(self, listener: socket.socket, address: str) -> None:
        while True:
            with contextlib.suppress(OSError):
                client, _ = listener.accept()
                threading.Thread(target=self._forward_connection, args=(client, address), daemon=True).start()

    def _forward_connection(self, client: socket.socket, address: str) -> None:
        """Runs ssh with the socket as its standard input and output. On Windows a socket is not a file: copies the bytes."""
        with client:
            process = subprocess.Popen(
                [*self.command, "-W", address, "--", self.target],
                stdin=client.fileno() if UNIX else subprocess.PIPE,
                stdout=client.fileno() if UNIX else subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
            if process.stdin and process.stdout:
                _pump(client, process.stdin, process.stdout)
        process.wait()


class LineSession:
    """A running program, with lines as messages."""

    def __init__(self, stdin: IO[bytes], stdout: IO[bytes]) -> None:
        self._stdin, self._stdout = stdin, stdout

    def send_line(self, line: str) -> None:
        with contextlib.suppress(OSError):  # read_line reports the end
            self._stdin.write(line.encode() + b"\n")
            self._stdin.flush()

    def read_line(self) -> str | None:
        """The next line; None: the program or the connection has ended."""
        line = self._stdout.readline()
        return line[:-1].decode("utf-8", "replace") if line.endswith(b"\n") else None


class ThisHost(Ssh):
    """This host with the interface of Ssh; commands run in the home directory."""

    def __init__(self) -> None:
        super().__init__("this machine")

    def _remote_argv(self, argv: Sequence[str], marker: str) -> list[str]:
        return ["sh", "-c", f'cd; echo {marker}; exec "$@"', "sh", *argv]

    def run(self, argv: Sequence[str], *, input: bytes = b"", timeout: float) -> Completed:
        return Local().run(["sh", "-c", 'cd && exec "$@"', "sh", *argv], input=input, timeout=timeout)

    def attached(self, argv: Sequence[str], *, terminal: bool) -> list[str]:
        return Local().attached(["sh", "-c", 'cd && exec "$@"', "sh", *argv], terminal=terminal)

    def forward(self, host: str, port: int) -> tuple[str, int]:
        return host, port


def _login_line(argv: Sequence[str], before: str = "") -> str:
    """A line for the user's login shell that runs argv in a login bash, in the home directory."""
    encoded = base64.b64encode(f'set -- {quote(argv)}; cd; {before}exec "$@"'.encode()).decode()
    return f"bash -lc 'eval \"$(echo {encoded} | base64 -d)\"'"


_hosts: dict[tuple[str, ...], Ssh] = {}
_slots: dict[str, threading.Semaphore] = {}


def _first_hop(configuration: dict[str, str], target: str) -> str:
    """The first sshd on the route to the target, from the output of `ssh -G`."""
    for key in ("proxyjump", "proxycommand"):
        value = configuration.get(key, "none")
        if value != "none":
            return value.partition(",")[0] if key == "proxyjump" else value
    return configuration.get("hostname", target)


@contextlib.contextmanager
def _opening(sshd: str, limit: int) -> Iterator[None]:
    """Waits while `limit` connections to this sshd are being opened: sshd would drop further ones."""
    slot = _slots.setdefault(sshd, threading.Semaphore(limit))
    slot.acquire()
    once = threading.Lock()

    def release() -> None:
        if once.acquire(blocking=False):
            slot.release()

    opened = threading.Timer(OPENING_S, release)
    opened.daemon = True
    opened.start()
    try:
        yield
    finally:
        opened.cancel()
        release()


def _pump(client: socket.socket, stdin: IO[bytes], stdout: IO[bytes]) -> None:
    """Copies bytes in both directions until both sides have ended."""

    def read_output(size: int) -> bytes:
        return os.read(stdout.fileno(), size)

    def write_input(data: bytes) -> None:
        stdin.write(data)
        stdin.flush()

    def end_output() -> None:
        client.shutdown(socket.SHUT_WR)

    thread = threading.Thread(target=copy, args=(read_output, client.sendall, end_output), daemon=True)
    thread.start()
    copy(client.recv, write_input, stdin.close)
    thread.join()
    stdout.close()


def _socket_dir() -> Path | None:
    """A directory for ssh's sockets that only this user can change.

    Its path must be short, unlike that of temporary files on macOS. A user who can create a socket there would receive all
    commands and files. None: no such directory, for example because another user took the name in /tmp; then no connection
    is shared."""
    name = f"heliostat-{os.getuid()}"
    parents = [os.environ.get("XDG_RUNTIME_DIR"), tempfile.gettempdir(), "/tmp", str(Path.home() / ".ssh")]
    for parent in parents:
        if not parent or len(os.fsencode(parent)) + len(name) >= MAX_SOCKET_DIR:
            continue
        path = Path(parent) / name
        with contextlib.suppress(OSError):
            if find_unsafe(parent, shared=True) is None:
                with contextlib.suppress(FileExistsError):
                    path.mkdir(mode=0o700)
                status = path.lstat()
                is_private = stat.S_ISDIR(status.st_mode) and not status.st_mode & 0o077
                if is_private and status.st_uid == os.getuid():
                    return path
    return None
