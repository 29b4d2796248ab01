"""What every test can rely on: parties that may be missing, a private home, the command, and a check for leaks."""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hypothesis
import pytest

import lab
import leaks
from fakes import definitions

HERE = Path(__file__).parent
ORDER = ("unit", "contract", "real", "e2e")  # the cheap tests speak first
CHECKED = ("real", "e2e")  # the folders whose tests start real things

# Under nohup, every command of the tests would ignore SIGHUP.
if hasattr(signal, "SIGHUP"):
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
# Never fail on wall-clock time: a busy machine is not a bug.
hypothesis.settings.register_profile("heliostat", deadline=None)
hypothesis.settings.load_profile("heliostat")


# --- parties: what a test needs beside Python -----------------------------------------------------------------


def _ray() -> str | None:
    return None if importlib.util.find_spec("ray") else "ray cannot be imported"


def _torch() -> str | None:
    return None if importlib.util.find_spec("torch") else "torch cannot be imported"


def _root() -> str | None:
    return None if os.geteuid() == 0 else "not root"


def _linux() -> str | None:
    return None if sys.platform == "linux" else f"this is {sys.platform}, not Linux"


def _programs(*names: str) -> str | None:
    missing = [name for name in names if not shutil.which(name)]
    return f"not on PATH: {', '.join(missing)}" if missing else None


def _chromium() -> str | None:
    if importlib.util.find_spec("playwright") is None:
        return "playwright cannot be imported"
    return _programs("chromium")


def _ipv6() -> str | None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError as error:
        return f"no ::1: {error}"
    return None


def _tmpfs() -> str | None:
    if reason := _linux() or _root() or _programs("mount", "umount"):
        return reason
    with tempfile.TemporaryDirectory() as folder:
        mounted = subprocess.run(
            ["mount", "-t", "tmpfs", "tmpfs", folder], capture_output=True, text=True, timeout=30
        )
        if mounted.returncode:
            return f"cannot mount a tmpfs: {mounted.stderr.strip()}"
        subprocess.run(["umount", folder], check=True, timeout=30)
    return None


# Each party is a marker, needs_NAME. The check says why the party is missing, or None.
PARTIES: dict[str, tuple[str, Callable[[], str | None]]] = {
    "ray": ("Ray can be imported", _ray),
    "torch": ("PyTorch can be imported", _torch),
    "root": ("the user is root", _root),
    "linux": ("the system is Linux", _linux),
    "ipv6": ("::1 is an address of this host", _ipv6),
    "chromium": ("Chromium, and Playwright to drive it, are installed", _chromium),
    "tmux": ("tmux is installed", lambda: _programs("tmux")),
    "openssl": ("openssl is installed", lambda: _programs("openssl")),
    "two_users": (
        "another user can be made and run as",
        lambda: _root() or _programs("useradd", "userdel", "runuser"),
    ),
    "sshd": (
        "an OpenSSH server can be started",
        lambda: _root() or _programs("/usr/sbin/sshd", "ssh", "ssh-keygen"),
    ),
    "tmpfs": ("a tmpfs can be mounted", _tmpfs),
    "slurm": ("a lab with a real Slurm can be made", lab.missing),
    "pbs": ("a lab with a PBS, a real one or the fake, can be made", lab.missing),
    "definitions": ("KubeRay's own definitions are at hand", definitions.missing),
}
# what nobody can install here: `--require all` does not mean it
ELSEWHERE = {"definitions"}


@functools.cache
def missing(party: str) -> str | None:
    """Why this party is missing, or None when it is here. Looks once."""
    return PARTIES[party][1]()


def _needs(item: pytest.Item) -> list[str]:
    names = [mark.name.removeprefix("needs_") for mark in item.iter_markers()]
    return [name for name in names if name in PARTIES]


def _required(config: pytest.Config) -> set[str]:
    return {name.strip() for name in config.getoption("--require").split(",") if name.strip()}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--require",
        metavar="LIST",
        default="",
        help=f"parties that must be here: a skip for one is a failure. A comma list of {', '.join(PARTIES)}; "
        "or `all`: any skip is a failure",
    )


def pytest_configure(config: pytest.Config) -> None:
    for name, (meaning, _) in PARTIES.items():
        config.addinivalue_line("markers", f"needs_{name}: runs only where {meaning}")
    if unknown := _required(config) - {"all", *PARTIES}:
        raise pytest.UsageError(
            f"--require: unknown {', '.join(sorted(unknown))}; known: all, {', '.join(PARTIES)}"
        )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # where several test at once, the long ones go first, and the short ones fill what is left of the time
    order = ORDER[::-1] if "PYTEST_XDIST_WORKER" in os.environ else ORDER
    items.sort(key=lambda item: order.index(folder) if (folder := _folder(item)) in order else len(order))


def _folder(item: pytest.Item) -> str:
    return item.path.relative_to(HERE).parts[0] if item.path.is_relative_to(HERE) else ""


def pytest_runtest_setup(item: pytest.Item) -> None:
    for party in _needs(item):
        if reason := missing(party):
            pytest.skip(f"needs {party}: {reason}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.skipped and not hasattr(report, "wasxfail"):
        required, needs = _required(item.config), _needs(item)
        absent = {party for party in needs if missing(party)}
        # A test that finds for itself that something is missing counts as missing every party it needs.
        if ("all" in required and not absent & ELSEWHERE) or required & (absent or set(needs)):
            _fail(report)
    home = getattr(item, "funcargs", {}).get("home")
    if report.failed and home is not None and (text := leaks.story(home)):
        report.sections.append(("events and logs of the test's clusters", text))
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    if report.skipped and "all" in _required(collector.config):
        _fail(report)
    return report


def _fail(report: pytest.TestReport | pytest.CollectReport) -> None:
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    report.outcome = "failed"
    report.longrepr = f"skipped, which --require does not allow: {reason.removeprefix('Skipped: ')}"


# --- a private home, and nothing left behind ------------------------------------------------------------------


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A private HELIOSTAT_HOME, set for this test. Its path is short, as sockets under it may have 107 characters."""
    path = Path(tempfile.mkdtemp(prefix="hh-", dir="/tmp"))
    monkeypatch.setenv("HELIOSTAT_HOME", str(path))
    monkeypatch.setenv(leaks.TAG, leaks.RUN)
    # What a person's own shell may hold must not lead a test to a person's own cluster, nor change its output.
    for name in [*os.environ]:
        if name.startswith("RAY_") or name in ("COLUMNS", "FORCE_COLOR"):
            monkeypatch.delenv(name)
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(autouse=True)
def no_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails a real or e2e test that leaves a process, a temp folder or a record behind, and kills the processes."""
    if _folder(request.node) not in CHECKED:
        yield
        return
    # Asked for here, so that the home is still there when the check comes, after all other fixtures have ended.
    home: Path = request.getfixturevalue("home")
    before = leaks.look()
    yield
    left, lines = leaks.settle(before, home)
    if lines:
        story = leaks.story(home)
        leaks.kill(left)
        listing = "\n".join(f"  {line}" for line in lines)
        pytest.fail(
            f"left behind by this test (processes are killed now):\n{listing}\n{story}", pytrace=False
        )


# --- the command, as a person runs it -------------------------------------------------------------------------


@dataclass(frozen=True)
class Result:
    rc: int
    out: str
    err: str


Environment = dict[str, "str | None"]  # changes to the environment; None takes a variable away


def _environment(changes: Environment | None) -> dict[str, str]:
    merged = {**os.environ, **(changes or {})}
    return {name: value for name, value in merged.items() if value is not None}


def _kill_group(process: subprocess.Popen[Any], number: int) -> None:
    try:
        os.killpg(process.pid, number)
    except (ProcessLookupError, PermissionError):
        pass


def run_cli(
    *args: str,
    env: Environment | None = None,
    input: str | None = None,
    timeout: float = 180,
    cwd: Path | str | None = None,
) -> Result:
    """Runs `heliostat ARGS…` to its end. Fails the test when it does not end, or leaves its output open."""
    process = subprocess.Popen(
        [sys.executable, "-m", "heliostat", *map(str, args)],
        stdin=subprocess.DEVNULL if input is None else subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env=_environment(env),
        cwd=cwd,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(input, timeout)
    except subprocess.TimeoutExpired:
        ended = process.poll()
        _kill_group(process, signal.SIGKILL)
        try:
            out, err = process.communicate(timeout=5)
        except subprocess.TimeoutExpired as late:  # a process in another group holds the pipes
            out, err = (
                (text or b"").decode(errors="replace") if not isinstance(text, str) else text
                for text in (late.stdout, late.stderr)
            )
            for stream in (process.stdout, process.stderr):
                if stream:
                    stream.close()
        what = "did not end" if ended is None else f"ended with {ended}, but something holds its output open,"
        pytest.fail(
            f"heliostat {' '.join(map(str, args))}: {what} after {timeout:g} s\n"
            f"--- stdout\n{out}\n--- stderr\n{err}"
        )
    return Result(process.returncode, out, err)


@pytest.fixture
def cli(home: Path) -> Callable[..., Result]:
    """`run_cli`, in the test's own home."""
    return run_cli


@pytest.fixture
def spawn_cli(home: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts `heliostat ARGS…` in a process group of its own (so that a test can send it Ctrl-C); ends it after the test."""
    started: list[subprocess.Popen[str]] = []

    def spawn(*args: str, env: Environment | None = None, **options: Any) -> subprocess.Popen[str]:
        settings: dict[str, Any] = {
            "stdin": subprocess.DEVNULL,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
            "text": True,
            "start_new_session": True,
        }
        process = subprocess.Popen(
            [sys.executable, "-m", "heliostat", *map(str, args)],
            env=_environment(env),
            **{**settings, **options},
        )
        started.append(process)
        return process

    yield spawn
    for process in started:
        if process.poll() is None:
            _kill_group(process, signal.SIGTERM)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                _kill_group(process, signal.SIGKILL)
                process.wait(10)
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream:
                stream.close()
