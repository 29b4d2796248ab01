"""Which processes are ours, and that ending them leaves none, wherever they hid."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from heliostat.agent import processes

pytestmark = pytest.mark.needs_linux
SLEEP = "import time; time.sleep(600)"
# A supervisor that adopts orphans. It starts a child, which starts a grandchild as a daemon does: in a session of its own, its
# parent gone. The grandchild may have another environment. The supervisor says the pids, and waits.
SUPERVISOR = """
import os, subprocess, sys, time
from heliostat.agent import processes
processes.adopt_orphans()
environment = {"PATH": os.environ["PATH"]} if sys.argv[1] == "bare" else dict(os.environ)
child = os.fork()
if child == 0:
    os.setsid()
    if os.fork() == 0:
        os.chdir("/")
        os.execve(sys.executable, ["sleeper", "-c", "import time; time.sleep(600)"], environment)
    os._exit(0)
os.waitpid(child, 0)
while True:
    found = [pid for pid in processes.children(os.getpid()) if processes.executable(pid) == "sleeper"]
    if found:
        break
    time.sleep(0.01)
print(found[0], flush=True)
time.sleep(600)
"""


def until(true: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline, f"never: {what}"
        time.sleep(0.01)


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []

    def run(*argv: str, mark: str = "", **options: object) -> subprocess.Popen[str]:
        env = {**os.environ, **({processes.MARK: mark} if mark else {})}
        started.append(
            subprocess.Popen([sys.executable, "-c", *argv], env=env, stdout=subprocess.PIPE, text=True)
        )
        return started[-1]

    yield run
    for child in started:
        child.kill()
        child.communicate()


@pytest.mark.parametrize("kind", ["bare", "marked"])
def test_a_daemon_that_left_its_family_is_ended(
    start: Callable[..., subprocess.Popen[str]], kind: str
) -> None:
    """One that dropped its environment is found as an adopted child; one whose supervisor is gone, by its mark."""
    mark = f"test-{os.getpid()}-{kind}"
    supervisor = start(SUPERVISOR, kind, mark=mark)
    assert supervisor.stdout
    daemon = int(supervisor.stdout.readline())
    assert os.getsid(daemon) != os.getsid(supervisor.pid)
    assert (daemon in processes.marked(mark)) == (kind == "marked")
    if kind == "marked":
        supervisor.kill()
        supervisor.wait()
        assert processes.family([supervisor.pid]) == []
    assert processes.end_all([supervisor.pid], mark, 60) == []
    until(lambda: processes.start_time(daemon) is None, "the daemon ends")
    assert processes.marked(mark) == []


def test_a_family_that_goes_on_growing_is_ended(start: Callable[..., subprocess.Popen[str]]) -> None:
    grow = "import os, subprocess, sys, time\nprint(flush=True)\nwhile True:\n subprocess.Popen(['sleep', '600']); time.sleep(0.002)"
    mark = f"test-{os.getpid()}-grow"
    root = start(grow, mark=mark)
    assert root.stdout
    root.stdout.readline()
    assert processes.end_all([root.pid], mark, 20) == []
    assert processes.marked(mark) == []


def test_others_are_left_alone(start: Callable[..., subprocess.Popen[str]]) -> None:
    other, spared, mine = (start(SLEEP, mark=f"test-{os.getpid()}-{x}") for x in ("other", "mine", "mine"))
    mark = f"test-{os.getpid()}-mine"
    until(lambda: len(processes.marked(mark)) == 2, "both run")
    assert processes.end_all([], mark, 60, exclude=[spared.pid]) == []
    # whether Popen or `end_all` reaps it first is open, so its code says nothing
    assert processes.start_time(mine.pid) is None and other.poll() is None and spared.poll() is None


def test_what_would_not_go_is_told(
    start: Callable[..., subprocess.Popen[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    child = start(SLEEP)
    monkeypatch.setattr(processes, "send", lambda pids, number: None)
    assert processes.end_all([child.pid], "no such mark", 0) == [child.pid]


def test_a_family_has_its_descendants_and_no_dead(start: Callable[..., subprocess.Popen[str]]) -> None:
    two = f"import subprocess, sys; c = subprocess.Popen([sys.executable, '-c', {SLEEP!r}]); print(c.pid, flush=True); c.wait()"
    root = start(two)
    assert root.stdout
    below = int(root.stdout.readline())
    assert sorted(processes.family([root.pid])) == sorted([root.pid, below])
    assert processes.children(root.pid) == [below] and processes.executable(below).endswith("python")
    os.kill(below, signal.SIGKILL)
    root.wait(60)
    assert processes.family([root.pid]) == [] and processes.executable(below) == ""


def test_one_process_for_ever(start: Callable[..., subprocess.Popen[str]]) -> None:
    child = start(SLEEP)
    born = processes.start_time(child.pid)
    assert (
        processes.alive(child.pid, born)
        and not processes.alive(child.pid, "1")
        and not processes.alive(child.pid, None)
    )
    child.kill()
    until(lambda: not processes.alive(child.pid, born), "a zombie is not alive")
    assert processes.start_time(2**22 + 1) is None


def test_a_name_with_brackets_and_spaces(tmp_path) -> None:
    path = tmp_path / "a) S 1 ("
    path.symlink_to("/bin/sleep")
    child = subprocess.Popen([str(path), "600"])
    try:
        assert processes.start_time(child.pid) and child.pid in processes.children(os.getpid())
    finally:
        child.kill()
        child.wait()


def test_a_child_dies_with_its_parent() -> None:
    code = (
        "import os, subprocess, sys\nfrom heliostat.agent import processes\n"
        "child = subprocess.Popen(['sleep', '600'], preexec_fn=processes.die_with_parent)\n"
        "print(child.pid, flush=True); os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == -signal.SIGKILL
    until(lambda: processes.start_time(int(done.stdout)) is None, "it ends")


def test_sending_to_nobody_is_no_error() -> None:
    processes.send([2**22 + 1], signal.SIGTERM)
    processes.reap()


def test_children_go_before_their_parents(
    start: Callable[..., subprocess.Popen[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that waits for its parent's death, as srun has one, must not see it."""
    chain = "import os, time\nfor _ in range(3):\n    if os.fork(): break\ntime.sleep(600)"
    root = start(chain, mark="a chain")
    until(lambda: len(processes.family([root.pid])) == 4, "all of them")
    line = [root.pid]
    while born := processes.children(line[-1]):
        line += born
    killed: list[int] = []
    send = processes.send
    monkeypatch.setattr(processes, "send", lambda pids, number: (killed.extend(pids), send(pids, number))[1])
    assert processes.end_all([root.pid], "a chain", 60) == []
    assert list(dict.fromkeys(killed)) == line[::-1] and len(line) == 4
