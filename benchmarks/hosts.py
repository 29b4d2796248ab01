"""The hosts of tests/lab, as the measures of whole clusters use them: a login node to work from, a watcher of Ray's node
table there, and one cluster after the other."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from benchmarks import batch
from benchmarks.figures import CannotMeasure
from benchmarks.lab import DEADLINE_S, Lab

REPOSITORY = Path(__file__).parents[1]
LOOK_S = 0.02
Found = TypeVar("Found")


class Site:
    """variables: of the lab, as its script has them."""

    def __init__(self, lab: Lab, size: int, **variables: str) -> None:
        self.module = _lab_of_the_tests()
        if why := self.module.missing():
            raise CannotMeasure(f"no hosts to measure on: {why}")
        self.hosts: Any = self.module.Lab(size, **variables)
        self.numbers = itertools.count(1)
        self.size = size
        lab.stack.push(self.hosts)  # before it is up: an interrupt may come at any time
        try:
            self.hosts.__enter__()
        except (RuntimeError, subprocess.SubprocessError) as error:
            raise CannotMeasure(f"no hosts to measure on: {error}") from None
        self.home: Path = self.hosts.home
        self.token: Path = self.module.ROOT / "shared" / "token"  # of bare Ray, the same for all hosts
        self.token.touch(0o600)
        self.token.write_text("0" * 64)
        shutil.chown(self.token, self.module.USER, self.module.USER)
        # an installed package has bytecode; the user of the lab may not write any into a checkout
        package = importlib.util.find_spec("heliostat")
        for folder in (package and package.submodule_search_locations) or ():
            subprocess.run([sys.executable, "-m", "compileall", "-q", folder], check=False)

    def address(self, number: int) -> str:
        """Of the host n1, n2, …"""
        return f"{self.module.NET}.{number}"

    def ask(self, *argv: str) -> str:
        done = self.hosts.run(*argv)
        if done.rc:
            raise CannotMeasure(f"`{' '.join(argv)[:80]}` said: {done.err[-300:]}")
        return str(done.out).strip()

    def until(
        self,
        what: str,
        check: Callable[[], Found],
        program: subprocess.Popen[str] | None = None,
        look_s: float = LOOK_S,
    ) -> Found:
        deadline = time.monotonic() + DEADLINE_S
        while not (found := check()):
            if program and program.poll() is not None and not (found := check()):
                said = program.communicate()[1]
                raise CannotMeasure(
                    f"the command ended with {program.returncode} before {what}: {said[-300:]}"
                )
            if time.monotonic() > deadline:
                raise CannotMeasure(f"did not come within {DEADLINE_S:.0f} s: {what}")
            time.sleep(look_s)
        return found

    def on_login(self, *argv: str) -> list[str]:
        """The words that run a program on the login node, as its user, from here."""
        shell = [str(self.module.SCRIPT), "as", self.module.USER, "ctl"]
        return [*shell, "bash", "-c", 'cd; exec "$@"', "bash", *argv]

    @contextlib.contextmanager
    def watcher(self, token: Path) -> Iterator[Watcher]:
        auth = ["env", "RAY_AUTH_MODE=token", f"RAY_AUTH_TOKEN_PATH={token}"]
        with subprocess.Popen(
            self.on_login(*auth, sys.executable, str(batch.WATCHER)),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=self.hosts.env,
        ) as process:  # fmt: skip
            try:
                yield Watcher(process)
            finally:
                process.kill()


class Watcher:
    """A process on the login node that has imported Ray before the clock starts, and asks the node table."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        if self._line() != "imported":
            raise CannotMeasure("Ray's GcsClient could not be imported on the lab's login node")

    def _line(self) -> str:
        assert self.process.stdout
        return self.process.stdout.readline().strip()

    def alive_at(self, host: str, port: int, nodes: int, going: Callable[[], object] | None = None) -> float:
        """time.time() of the moment. going: asked every second meanwhile, raises when it has become hopeless."""
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(f"{port} {host} {nodes}\n")
        self.process.stdin.flush()
        while going and not select.select([self.process.stdout], [], [], 1)[0]:
            going()
        words = self._line().split()
        if words[:1] != ["alive"]:
            raise CannotMeasure(f"{nodes} nodes did not become alive: {' '.join(words) or 'watcher died'}")
        return float(words[2])


State = tuple[bool, str]  # (the head's?, which)


def states(log: Path, head: str) -> tuple[dict[State, float], dict[State, float]]:
    """By the log of the head's agent: when the first node came to each state, and when the last."""
    first: dict[State, float] = {}
    last: dict[State, float] = {}
    for line in log.read_text().splitlines():
        event = json.loads(line)
        if event.get("node"):
            key = (event["node"] == head, str(event.get("state")))
            first.setdefault(key, event["at"])
            last[key] = event["at"]
    return first, last


def told(moments: dict[str, float | None], since: float) -> str:
    return ", ".join(f"{what} {at - since:.1f} s" for what, at in moments.items() if at is not None)


def read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _lab_of_the_tests() -> ModuleType:
    """Under a name, a net and a user of its own, so that it never meets a lab of the tests."""
    for key, value in {"LAB_NAME": "labb", "LAB_NET": "10.78.0", "LAB_USER": "labbench"}.items():
        os.environ.setdefault(key, value)
    place = REPOSITORY / "tests" / "lab" / "__init__.py"
    spec = importlib.util.spec_from_file_location("benchmarks_lab_of_the_tests", place)
    if spec is None or spec.loader is None or not place.exists():
        raise CannotMeasure(f"no hosts to measure on: no {place.relative_to(REPOSITORY)} in this checkout")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look themselves up there
    spec.loader.exec_module(module)
    return module
