"""The bench itself: one private folder, programs run in it with a deadline, clusters that are always taken down."""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.figures import CannotMeasure
from benchmarks.processes import MARK, Family, reap_adopted

BIN = Path(sys.executable).parent
HELIOSTAT, RAY = str(BIN / "heliostat"), str(BIN / "ray")
DEADLINE_S = 300.0
SHARED = "bench"


@dataclass
class Program:
    """A process of ours that runs, its output in a file: a daemon that keeps a pipe open would hold us up."""

    process: subprocess.Popen[bytes]
    log: Path
    began: float  # time.monotonic() just before it was started
    cpu: float = 0.0  # seconds that it computed, once it has ended

    def wait(self, seconds: float = DEADLINE_S) -> float:
        """Its exit code's arrival, in seconds since it began. Wakes up at once, which Popen.wait(timeout) does not."""
        descriptor = os.pidfd_open(self.process.pid)
        try:
            poll = select.poll()
            poll.register(descriptor, select.POLLIN)
            over = bool(poll.poll(seconds * 1000))
            took = time.monotonic() - self.began
        finally:
            os.close(descriptor)
        if not over:
            raise CannotMeasure(f"{self.says()}: no end after {seconds:.0f} s")
        _, status, usage = os.wait4(self.process.pid, 0)
        self.process.returncode = os.waitstatus_to_exitcode(status)
        self.cpu = usage.ru_utime + usage.ru_stime
        return took

    def succeed(self) -> float:
        """wait(), where an exit code other than 0 is no figure."""
        took = self.wait()
        if self.process.returncode:
            raise CannotMeasure(f"{self.says()}: exit code {self.process.returncode}")
        return took

    def says(self) -> str:
        """Its command and its last line, for an error."""
        lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        words = " ".join(map(str, self.process.args)).split()  # type: ignore[arg-type]
        return f"`{' '.join(words)[:120]}` said: {' '.join(lines[-4:])[-300:]}"


class Lab:
    """Makes everything under one folder of /tmp, and removes it."""

    def __init__(self, beside: Sequence[str] = ()) -> None:
        # for the measures of whole clusters: beside what, and of what sizes
        self.beside = beside
        self.nodes: Sequence[int] = ()
        self.path = Path(tempfile.mkdtemp(prefix="hb-", dir="/tmp"))
        self.home = self.path / "home"
        for name in ("t", "logs", "user"):
            (self.path / name).mkdir()
        self.token = self.path / "token"
        self.token.touch(0o600)
        self.token.write_text(secrets.token_hex(32))
        self.families: dict[str, Family] = {}
        self.programs: list[Program] = []
        self.numbers = itertools.count(1)
        self.stack = contextlib.ExitStack()
        self.plain = self.new_mark()  # of commands that start nothing
        self.shared_family: Family | None = None

    def close(self) -> None:
        """Whatever still runs is taken down; interrupts wait until that is done."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        try:
            self.stack.close()
        finally:
            for family in self.families.values():
                family.but.clear()
                family.end()
            self._reap()
            shutil.rmtree(self.path, ignore_errors=True)

    # -- programs

    def environment(self, mark: str, more: Mapping[str, str] | None = None) -> dict[str, str]:
        """The same for both sides: nothing of the Ray or the Heliostat that the user may be inside of."""
        foreign = ("RAY_", "HELIOSTAT_", "PYTHONDONTWRITEBYTECODE")
        own = {k: v for k, v in os.environ.items() if not k.startswith(foreign)}
        return {
            **own,
            MARK: mark,
            # bytecode for both, also of a checkout that may have none; written where we remove it again
            "PYTHONPYCACHEPREFIX": str(self.path / "pyc"),
            "HOME": str(self.path / "user"),  # Ray looks for ~/.ray/auth_token
            "TMPDIR": str(self.path / "t"),
            "HELIOSTAT_HOME": str(self.home),
            "HS_TEST_RUN": self.path.name,  # tests that look for leaks leave alone what other runs started
            "RAY_USAGE_STATS_ENABLED": "0",  # a benchmark tells nobody that it ran
            **(more or {}),
        }

    def bare_environment(self) -> dict[str, str]:
        """For Ray without us: a token, as our clusters have."""
        return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(self.token)}

    def new_mark(self) -> Family:
        mark = f"{self.path.name}-{next(self.numbers)}"
        return self.families.setdefault(mark, Family(mark))

    def start(self, *argv: str, mark: str = "", more: Mapping[str, str] | None = None) -> Program:
        log = self.path / "logs" / f"{next(self.numbers)}.log"
        with open(log, "wb") as out:
            began = time.monotonic()
            process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                cwd=self.path,
                env=self.environment(mark or self.plain.mark, more),
                start_new_session=True,  # Ctrl-C is for us: we take things down in order
            )
        program = Program(process, log, began)
        self.programs.append(program)
        return program

    def run(self, *argv: str, mark: str = "", more: Mapping[str, str] | None = None) -> float:
        """Seconds from its start to its end."""
        return self.start(*argv, mark=mark, more=more).succeed()

    def output(self, *argv: str, mark: str = "", more: Mapping[str, str] | None = None) -> str:
        program = self.start(*argv, mark=mark, more=more)
        program.succeed()
        return program.log.read_text()

    def _reap(self) -> None:
        self.programs = [p for p in self.programs if p.process.poll() is None]
        reap_adopted(p.process.pid for p in self.programs)

    # -- clusters

    @contextlib.contextmanager
    def family(self) -> Iterator[Family]:
        """A cluster's processes; at the end of the block none is left, however it ends."""
        family = self.new_mark()
        try:
            yield family
        finally:
            family.but.clear()
            left = family.end()
            self._reap()
            if left:
                raise CannotMeasure(f"these processes do not end: {sorted(left)}")
            self.families.pop(family.mark, None)

    @contextlib.contextmanager
    def cluster(self, name: str, nodes: int) -> Iterator[Family]:
        """One of ours, ready."""
        with self.family() as family:
            try:
                self.run(HELIOSTAT, "up", "--name", name, "--nodes", str(nodes), mark=family.mark)
                yield family
            finally:
                self.take_down(name, family)

    def take_down(self, name: str, family: Family) -> None:
        """In order where that works; what is left after it is ended with the family."""
        with contextlib.suppress(CannotMeasure):
            self.run(HELIOSTAT, "down", name, mark=family.mark)

    def shared(self) -> str:
        """The name of a cluster of two nodes that several measures use, one after the other."""
        if self.shared_family is None:
            self.shared_family = self.stack.enter_context(self.cluster(SHARED, 2))
        return SHARED

    def no_shared(self) -> None:
        """The machine is idle again: for measures that start clusters of their own."""
        self.shared_family = None
        self.stack.close()

    def connection(self, name: str) -> dict[str, str]:
        """What a Ray program needs to reach a cluster of ours, as `heliostat env` prints it."""
        found = {}
        for line in self.output(HELIOSTAT, "env", name).splitlines():
            key, sign, value = line.removeprefix("export ").partition("=")
            if sign:
                found[key] = value.strip("'\"")
        return found

    def temp_dir(self) -> Path:
        """For `--temp-dir` of a bare Ray: short enough for its sockets."""
        return self.path / f"r{next(self.numbers)}"


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("", 0))
        return [int(one.getsockname()[1]) for one in sockets]
    finally:
        for one in sockets:
            one.close()
