"""Processes and files on a host: the interface, and this host (`Local`). `ssh.py` has hosts over ssh.

Every call has a deadline, keeps both output streams, and takes an argv, never a shell string.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol, TypeVar, runtime_checkable

from heliostat.common.errors import Code, HeliostatError
from heliostat.common.processes import process_start
from heliostat.common.shell import wrap_in_shell

A = TypeVar("A")
B = TypeVar("B")
MAX_CONCURRENT_HOSTS = 32


def map_concurrently(function: Callable[[A], B], items: Sequence[A]) -> list[B]:
    """The function's results for the items, in their order."""
    if len(items) < 2:
        return [function(item) for item in items]
    from concurrent.futures import ThreadPoolExecutor  # not imported for a single host

    with ThreadPoolExecutor(min(MAX_CONCURRENT_HOSTS, len(items))) as pool:
        return list(pool.map(function, items))


@dataclass(frozen=True)
class Completed:
    """A process that has ended."""

    argv: tuple[str, ...]
    code: int
    out: str
    err: str

    def describe(self) -> str:
        """The command and its exit code, for the details of an error."""
        return f"`{' '.join(self.argv)[:200]}` ended with code {self.code}"


@dataclass(frozen=True)
class Spawned:
    """A process that continues after this one. It waits for the input of `feed`.

    So the caller can record its id before it acts. If the caller is killed meanwhile, the process ends."""

    pid: int
    start: str
    feed: Callable[[bytes], None]


class Transport(Protocol):
    def run(self, argv: Sequence[str], *, input: bytes = b"", timeout: float) -> Completed: ...

    def read(self, path: Path, offset: int = 0, limit: int = 1 << 20) -> bytes: ...

    def attached(self, argv: Sequence[str], *, terminal: bool) -> list[str]:
        """The command on this host that runs argv there with the caller's streams. terminal: argv gets the caller's terminal."""
        ...

    def forward(self, host: str, port: int) -> tuple[str, int]:
        """The address on this host for connections to `host:port` of that host's network."""
        ...


@runtime_checkable
class Proxied(Protocol):
    """A transport through an HTTP proxy, which may respond itself instead of forwarding."""

    def proxy_error(self, method: str, path: str, status: int, content: bytes) -> HeliostatError | None:
        """The error of the proxy's own response; None: the server behind the proxy responded."""
        ...


class Spawner(Transport, Protocol):
    def spawn(
        self, argv: Sequence[str], *, log: Path, cwd: Path, env: Mapping[str, str] | None = None
    ) -> Spawned:
        """`env` is added to the environment."""
        ...


class Local:
    """This host."""

    def run(self, argv: Sequence[str], *, input: bytes = b"", timeout: float) -> Completed:
        pipe = subprocess.PIPE
        try:
            with subprocess.Popen(list(argv), stdin=pipe, stdout=pipe, stderr=pipe) as process:
                _running.add(process)
                try:
                    out, err = process.communicate(input, timeout)
                except BaseException:
                    process.kill()
                    raise
                finally:
                    _running.discard(process)
        except FileNotFoundError:
            raise HeliostatError(
                f"could not run `{argv[0]}`",
                cause="this host does not have the program",
                code=Code.PROGRAM_NOT_FOUND,
            ) from None
        except OSError as error:
            raise HeliostatError(
                f"could not run `{argv[0]}`", cause=error.strerror or str(error), code=Code.PROGRAM_FAILED
            ) from None
        except subprocess.TimeoutExpired:
            raise HeliostatError(
                f"`{argv[0]}` gave no answer",
                cause=f"nothing after {timeout:g} s",
                details=" ".join(argv)[:200],
                code=Code.TIMEOUT,
                exit_code=4,
            ) from None
        return Completed(tuple(argv), process.returncode, _text(out), _text(err))

    def spawn(
        self, argv: Sequence[str], *, log: Path, cwd: Path, env: Mapping[str, str] | None = None
    ) -> Spawned:
        try:
            with open(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab") as out:
                process = subprocess.Popen(
                    list(argv),
                    stdin=subprocess.PIPE,
                    stdout=out,
                    stderr=out,
                    cwd=cwd,
                    env={**os.environ, **(env or {})},
                    start_new_session=True,
                )
        except OSError as error:
            raise HeliostatError(
                f"could not start `{argv[0]}`",
                cause=error.strerror or str(error),
                details=str(log),
                code=Code.PROGRAM_FAILED,
            ) from None
        stdin = process.stdin
        assert stdin is not None
        process.returncode = 0  # suppress Python's warning about a child that still runs
        return Spawned(process.pid, process_start(process.pid) or "", lambda data: _feed(stdin, data))

    def read(self, path: Path, offset: int = 0, limit: int = 1 << 20) -> bytes:
        try:
            with open(path, "rb") as stream:
                stream.seek(offset)
                return stream.read(limit)
        except OSError:
            return b""

    def attached(self, argv: Sequence[str], *, terminal: bool) -> list[str]:
        return wrap_in_shell(argv)

    def forward(self, host: str, port: int) -> tuple[str, int]:
        return host, port


_running: set[subprocess.Popen[bytes]] = set()


def terminate_running() -> None:
    """Terminates all processes of `Local.run`, so that no thread waits for them after Ctrl-C."""
    for process in list(_running):
        process.terminate()


def replace_process(argv: Sequence[str]) -> int:
    """Runs the command instead of this process, so that signals and the exit code are its own."""
    if sys.platform == "win32":
        return subprocess.call(list(argv))
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it, and the command would too
    os.execvp(argv[0], list(argv))


def _feed(stdin: IO[bytes], data: bytes) -> None:
    try:
        stdin.write(data)
        stdin.close()
    except BrokenPipeError:
        pass  # it has ended; the next observation reports that


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace")
