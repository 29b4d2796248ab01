"""A machine over ssh, by the person's own ssh: their configuration, agent, keys, jump hosts and known hosts.

One connection is shared by all commands (ControlMaster) unless their configuration already does so. Nothing asks for a
password: BatchMode. The far side needs a shell and the usual Unix programs, nothing of ours.
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
from heliostat.remote.transport import Completed, Local
from heliostat.state.ownership import find_unsafe

CONNECT_S = 10
ALIVE_S = 5  # three times without an answer, and the connection is given up
OPENING = 8  # connections to one sshd that are not logged in yet; its MaxStartups drops some from the 10th on
OPENING_S = 3.0  # after that a connection counts as open, whatever its command does
TRIES = 6  # of a connection that sshd closes before it says who it is
BUSY = re.compile(r"(kex|ssh)_exchange_identification|not allowed at this time", re.IGNORECASE)
# behind a jump host, what happened there is followed by the same words
NOT_BUSY = re.compile(
    r"permission denied|forwarding failed|open failed|verification failed|could not resolve|timed out|refused|no route",
    re.IGNORECASE,
)
LONGEST = 104 - 60  # a socket's path, less the name that ssh gives it
UNIX = sys.platform != "win32"
# what ssh prints: our code and a hint
HINTS = {
    "identification has changed": (
        Code.SSH_HOST_KEY,
        "if your site says why: ssh-keygen -R {target}, then ssh {target} once by hand",
    ),
    "host key verification failed": (
        Code.SSH_HOST_KEY,
        "ssh {target} once by hand, and compare the key it shows with your site's",
    ),
    "permission denied": (
        Code.SSH_AUTHENTICATION,
        "ssh {target} must work without a password: ssh-add your key, or ssh-copy-id {target}",
    ),
    "could not resolve": (
        Code.SSH_UNKNOWN_HOST,
        "is `{target}` right? ssh -G {target} shows what your ~/.ssh/config makes of it",
    ),
    "connection refused": (Code.SSH_UNREACHABLE, "does an ssh server run there, on that port?"),
    "timed out": (Code.SSH_UNREACHABLE, "can this machine reach it? ssh {target}"),
    "no route to host": (Code.SSH_UNREACHABLE, "can this machine reach it? ssh {target}"),
    "bad configuration option": (Code.SSH_CONFIGURATION, "ssh -G {target} reads the same configuration"),
}


def connect(words: Sequence[str]) -> Ssh:
    """The machine that these words reach (`ssh -p 2222 zinc`); none: this one. One object a machine, so one connection."""
    key = tuple(words)
    if key not in _known:  # several threads may ask for one machine
        _known.setdefault(key, Ssh(key[-1], key[1:-1]) if key else ThisHost())
    return _known[key]


class Ssh:
    """`target` and `options` are what one would type after `ssh`."""

    def __init__(self, target: str, options: Sequence[str] = ()) -> None:
        self.target, self.options = target, list(options)
        self._sshd = target  # what this machine connects to: the first jump host, or the target
        self._forwards: dict[tuple[str, int], tuple[str, int]] = {}

    @functools.cached_property
    def command(self) -> list[str]:
        """ssh and its options. Whoever shares connections already goes on as they do."""
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
            raise self._lost(shown)
        said = dict(line.partition(" ")[::2] for line in shown.out.splitlines())
        self._sshd = _first_hop(said, self.target)
        if said.get("controlpath", "none") != "none" or not UNIX:  # Windows' ssh cannot share
            return base
        sockets = _sockets()
        if sockets is None:
            return base
        share = ["ControlMaster=auto", "ControlPersist=60", f"ControlPath={sockets}/%C"]
        return [*base, *(word for option in share for word in ("-o", option))]

    def _words(self, argv: Sequence[str], mark: str) -> list[str]:
        """In a login bash: a scheduler's commands are often found only there. What its start files print comes before
        the mark. The person's own shell may be any, and sees one plain word: fish and csh read quotes in ways of their own."""
        script = f'set -- {quote(argv)}; cd; echo {mark}; exec "$@"'
        coded = base64.b64encode(script.encode()).decode()
        return [*self.command, "--", self.target, f"bash -lc 'eval \"$(echo {coded} | base64 -d)\"'"]

    def run(self, argv: Sequence[str], *, input: bytes = b"", timeout: float) -> Completed:
        mark = f"heliostat-{secrets.token_hex(8)}"
        words = self._words(argv, mark)
        for attempt in range(1, TRIES + 1):
            with _opening(self._sshd, OPENING) if attempt == 1 else _opening(f"{self._sshd} again", 1):
                done = Local().run(words, input=input, timeout=timeout + CONNECT_S)
            before, found, out = done.out.partition(f"{mark}\n")
            if found or attempt == TRIES or not BUSY.search(done.err) or NOT_BUSY.search(done.err):
                break
            time.sleep(random.uniform(0.5, 1) * min(attempt, 2))  # nothing has run there: sshd was too busy
        if not found:  # ssh did not get there, or the login shell did not get to our words
            raise self._lost(replace(done, err=done.err if done.err.strip() else before))
        return Completed(tuple(argv), done.code, out, done.err)

    @contextlib.contextmanager
    def talk(self, argv: Sequence[str]) -> Iterator[LineSession]:
        """A program there with which one speaks line by line. The end of the block is the end of its input, and its own."""
        mark = f"heliostat-{secrets.token_hex(8)}"
        process = subprocess.Popen(
            self._words(argv, mark),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is meant for us: what is said afterwards counts
        )
        assert process.stdin and process.stdout
        talk = LineSession(process.stdin, process.stdout)
        try:
            while (line := talk.hear()) is not None and line != mark:
                pass
            yield talk
        finally:
            with contextlib.suppress(OSError):
                process.stdin.close()
            try:
                process.wait(timeout=2)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            process.stdout.close()

    def _lost(self, done: Completed) -> HeliostatError:
        words = [line.strip() for line in done.err.splitlines() if line.strip()]
        text = "\n".join(words).lower()
        known = (found for word, found in HINTS.items() if word in text)
        code, hint = next(known, (Code.SSH_FAILED, "ssh {target}"))
        return HeliostatError(
            f"could not reach `{self.target}` over ssh",
            cause=words[-1] if words else f"ssh ended with code {done.code}",
            hint=hint.format(target=self.target),
            code=code,
        )

    @functools.cached_property
    def home(self) -> Path:
        done = self.run(["sh", "-c", 'printf %s "$HOME"'], timeout=30)
        if done.code or not done.out.startswith("/"):
            raise HeliostatError(
                f"`{self.target}` has no home folder for us", details=done.describe(), code=Code.SSH_FAILED
            )
        return Path(done.out)

    def read(self, path: Path, offset: int = 0, limit: int = 1 << 20) -> bytes:
        script = f'tail -c +{offset + 1} -- "$1" | head -c {limit} | base64'
        try:
            return base64.b64decode(self.run(["sh", "-c", script, "sh", path.as_posix()], timeout=60).out)
        except (HeliostatError, ValueError):
            return b""

    def put(self, path: Path, data: bytes, mode: int = 0o600) -> None:
        """The file appears whole or not at all; its folder is made."""
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
        """(host, port) here whose connections come out at host:port as `target` sees it, while this process lives. Each is
        an `ssh -W`: nothing listens on the far side, and nothing stays there."""
        key = (host, port)
        if key not in self._forwards:
            listener = socket.create_server(("127.0.0.1", 0), backlog=64)
            there = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
            threading.Thread(target=self._accept, args=(listener, there), daemon=True).start()
            self._forwards[key] = ("127.0.0.1", listener.getsockname()[1])
        return self._forwards[key]

    def _accept(self, listener: socket.socket, there: str) -> None:
        while True:
            with contextlib.suppress(OSError):
                client, _ = listener.accept()
                threading.Thread(target=self._carry, args=(client, there), daemon=True).start()

    def _carry(self, client: socket.socket, there: str) -> None:
        """One connection: ssh has the socket itself as its standard input and output. On Windows a socket is no file, and
        the bytes go through us."""
        with client:
            process = subprocess.Popen(
                [*self.command, "-W", there, "--", self.target],
                stdin=client.fileno() if UNIX else subprocess.PIPE,
                stdout=client.fileno() if UNIX else subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
            if process.stdin and process.stdout:
                _pump(client, process.stdin, process.stdout)
        process.wait()


class LineSession:
    def __init__(self, stdin: IO[bytes], stdout: IO[bytes]) -> None:
        self._stdin, self._stdout = stdin, stdout

    def say(self, line: str) -> None:
        with contextlib.suppress(OSError):  # whoever is gone is not heard either
            self._stdin.write(line.encode() + b"\n")
            self._stdin.flush()

    def hear(self) -> str | None:
        """The next line; None: it has ended, or the connection has."""
        line = self._stdout.readline()
        return line[:-1].decode("utf-8", "replace") if line.endswith(b"\n") else None


class ThisHost(Ssh):
    """This machine, as if it were another: the same words, in the home."""

    def __init__(self) -> None:
        super().__init__("this machine")

    def _words(self, argv: Sequence[str], mark: str) -> list[str]:
        return ["sh", "-c", f'cd; echo {mark}; exec "$@"', "sh", *argv]

    def run(self, argv: Sequence[str], *, input: bytes = b"", timeout: float) -> Completed:
        return Local().run(["sh", "-c", 'cd && exec "$@"', "sh", *argv], input=input, timeout=timeout)

    def forward(self, host: str, port: int) -> tuple[str, int]:
        return host, port


_known: dict[tuple[str, ...], Ssh] = {}
_slots: dict[str, threading.Semaphore] = {}


def _first_hop(configuration: dict[str, str], target: str) -> str:
    """The sshd that a connection begins at, of what `ssh -G` prints."""
    for key in ("proxyjump", "proxycommand"):
        value = configuration.get(key, "none")
        if value != "none":
            return value.partition(",")[0] if key == "proxyjump" else value
    return configuration.get("hostname", target)


@contextlib.contextmanager
def _opening(sshd: str, limit: int) -> Iterator[None]:
    """Waits while so many connections to this sshd are being opened: it would drop some of them."""
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
    """Until both sides have ended."""

    def back() -> None:
        with contextlib.suppress(OSError):
            while data := os.read(stdout.fileno(), 1 << 16):
                client.sendall(data)
        with contextlib.suppress(OSError):
            client.shutdown(socket.SHUT_WR)

    thread = threading.Thread(target=back, daemon=True)
    thread.start()
    with contextlib.suppress(OSError):
        while data := client.recv(1 << 16):
            stdin.write(data)
            stdin.flush()
    with contextlib.suppress(OSError):
        stdin.close()
    thread.join()
    stdout.close()


def _sockets() -> Path | None:
    """A directory that only we can change, with a path that is short enough for a socket's: macOS has long ones for temporary
    files. Whoever can put a socket there would be given every command and every file that we send. None: there is none, and
    nothing is shared; another user can take our name in /tmp, but not keep us from working."""
    name = f"heliostat-{os.getuid()}"
    parents = [os.environ.get("XDG_RUNTIME_DIR"), tempfile.gettempdir(), "/tmp", str(Path.home() / ".ssh")]
    for parent in parents:
        if not parent or len(os.fsencode(parent)) + len(name) >= LONGEST:
            continue
        place = Path(parent) / name
        with contextlib.suppress(OSError):
            if find_unsafe(parent, shared=True) is None:
                with contextlib.suppress(FileExistsError):
                    place.mkdir(mode=0o700)
                status = place.lstat()
                private = stat.S_ISDIR(status.st_mode) and not status.st_mode & 0o077
                if private and status.st_uid == os.getuid():
                    return place
    return None
