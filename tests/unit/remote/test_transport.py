"""The door for processes: words in, both streams out, a deadline; and a process that waits for its input to outlive us."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from heliostat.common.errors import HeliostatError
from heliostat.common.processes import process_start
from heliostat.remote.transport import Completed, Local

PYTHON = sys.executable
# waits for its input as the agent does: with none, nothing is done
WAITER = """
import sys, pathlib
said = sys.stdin.read()
pathlib.Path(sys.argv[1]).write_text("fed: " + said if said else "nobody is there")
"""


def until(true, what: str, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, f"never: {what}"
        time.sleep(0.01)


@pytest.fixture
def waiter(tmp_path: Path) -> list[str]:
    (tmp_path / "waiter.py").write_text(WAITER)
    return [PYTHON, str(tmp_path / "waiter.py"), str(tmp_path / "said")]


# -- run


def test_words_in_both_streams_and_the_code_out() -> None:
    code = "import sys; sys.stderr.write('err'); print(sys.argv[1:], sys.stdin.read()); sys.exit(3)"
    done = Local().run([PYTHON, "-c", code, "a b", "$HOME", ";"], input=b"in", timeout=60)
    assert (done.code, done.out, done.err) == (3, "['a b', '$HOME', ';'] in\n", "err")
    assert done.describe().endswith("ended with code 3")


def test_output_that_is_no_text() -> None:
    done = Local().run([PYTHON, "-c", "import os; os.write(1, bytes(range(128, 256)))"], timeout=60)
    assert len(done.out) == 128


def test_megabytes_of_both_streams() -> None:
    code = "import os\nfor i in range(32):\n os.write(1, b'o' * 65536); os.write(2, b'e' * 65536)"
    done = Local().run([PYTHON, "-c", code], input=b"x" * (1 << 20), timeout=60)
    assert (len(done.out), len(done.err)) == (2 << 20, 2 << 20)


def test_a_deadline() -> None:
    with pytest.raises(HeliostatError, match="gave no answer") as caught:
        Local().run(["sleep", "1000"], timeout=0.1)
    assert caught.value.cause == "nothing after 0.1 s" and caught.value.exit_code == 4
    assert caught.value.details == "sleep 1000"


def test_a_deadline_holds_when_a_grandchild_keeps_the_output_open() -> None:
    with pytest.raises(HeliostatError, match="gave no answer"):
        Local().run(["bash", "-c", "sleep 3 & sleep 1000"], timeout=0.1)


@pytest.mark.parametrize("name", ["no-such-program-anywhere", "/nowhere/at all", "./none"])
def test_a_program_that_is_not_there(name: str) -> None:
    with pytest.raises(HeliostatError, match="could not run") as caught:
        Local().run([name], timeout=5)
    assert caught.value.cause == "this host does not have the program"


def test_a_program_that_may_not_be_run(tmp_path: Path) -> None:
    (tmp_path / "plain").write_text("no program")
    for path, words in (
        (tmp_path / "plain", "Permission denied"),
        (tmp_path, "Permission denied"),
        (tmp_path / "plain" / "x", "Not a directory"),
    ):
        with pytest.raises(HeliostatError, match="could not run") as caught:
            Local().run([str(path)], timeout=5)
        assert caught.value.cause == words


def test_a_long_command_is_shown_short() -> None:
    assert len(Completed(("x" * 1000,), 0, "", "").describe()) < 300


# -- spawn


def test_a_process_waits_until_it_is_fed(waiter: list[str], tmp_path: Path) -> None:
    spawned = Local().spawn(waiter, log=tmp_path / "log", cwd=tmp_path)
    assert process_start(spawned.pid) == spawned.start
    assert os.getsid(spawned.pid) == spawned.pid != os.getsid(0), "a signal to our group does not reach it"
    assert not (tmp_path / "said").exists()
    spawned.feed(b"the config")
    until(lambda: process_start(spawned.pid) is None, "it ends")
    assert (tmp_path / "said").read_text() == "fed: the config"
    os.waitpid(spawned.pid, 0)


def test_megabytes_can_be_fed(waiter: list[str], tmp_path: Path) -> None:
    spawned = Local().spawn(waiter, log=tmp_path / "log", cwd=tmp_path)
    spawned.feed(b"x" * (1 << 21))
    os.waitpid(spawned.pid, 0)
    assert (tmp_path / "said").stat().st_size == (1 << 21) + len("fed: ")


def test_one_that_nobody_feeds_ends_by_itself(waiter: list[str], tmp_path: Path) -> None:
    pid = Local().spawn(waiter, log=tmp_path / "log", cwd=tmp_path).pid
    gc.collect()  # whoever held the other end forgot it
    os.waitpid(pid, 0)
    assert (tmp_path / "said").read_text() == "nobody is there"


@pytest.mark.parametrize("others", [0, 2])
def test_it_ends_by_itself_when_its_parent_is_killed(waiter: list[str], tmp_path: Path, others: int) -> None:
    """Also when the parent has started others, which must not hold the end of its pipe."""
    parent = (
        "import os, sys, signal\nfrom pathlib import Path\nfrom heliostat.remote.transport import Local\n"
        f"argv, tmp = {waiter!r}, Path({str(tmp_path)!r})\n"
        f"kept = [Local().spawn([*argv[:-1], str(tmp / f'other{{i}}')], log=tmp / 'log', cwd=tmp) for i in range({others})]\n"
        "mine = Local().spawn(argv, log=tmp / 'log', cwd=tmp)\n"
        f"kept += [Local().spawn(['sleep', '300'], log=tmp / 'log', cwd=tmp) for _ in range({min(others, 1)})]\n"
        "print(mine.pid, *(k.pid for k in kept), flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([PYTHON, "-c", parent], capture_output=True, text=True, timeout=120)
    assert done.returncode == -signal.SIGKILL, done.stderr
    pid, *kept = map(int, done.stdout.split())
    try:
        until(lambda: process_start(pid) is None, "it ends")
        assert (tmp_path / "said").read_text() == "nobody is there"
    finally:
        for other in kept[others:]:
            os.kill(other, signal.SIGKILL)


def test_feeding_one_that_is_gone_is_no_error(tmp_path: Path) -> None:
    spawned = Local().spawn(["true"], log=tmp_path / "log", cwd=tmp_path)
    os.waitpid(spawned.pid, 0)
    spawned.feed(b"x" * (1 << 20))


def test_its_words_go_to_the_log(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("before\n")
    spawned = Local().spawn(["bash", "-c", "pwd; echo $MORE; echo err >&2"], log=tmp_path / "log", cwd=tmp_path, env={"MORE": "x y"})  # fmt: skip
    os.waitpid(spawned.pid, 0)
    assert (tmp_path / "log").read_text() == f"before\n{tmp_path}\nx y\nerr\n"


def test_what_cannot_be_started(tmp_path: Path) -> None:
    for argv, cwd, log in (
        (["no-such-program"], tmp_path, tmp_path / "log"),
        (["true"], tmp_path / "none", tmp_path / "log"),
        (["true"], tmp_path, tmp_path / "none" / "log"),
    ):
        with pytest.raises(HeliostatError, match="could not start") as caught:
            Local().spawn(argv, log=log, cwd=cwd)
        assert caught.value.cause == "No such file or directory" and caught.value.details == str(log)


# -- who is who


def test_a_process_has_one_start_and_then_none() -> None:
    child = subprocess.Popen(["sleep", "300"])
    start = process_start(child.pid)
    assert start and start == process_start(child.pid) and process_start(os.getpid()) is not None
    child.kill()
    until(lambda: process_start(child.pid) is None, "a dead child that nobody has waited for is gone")
    child.wait()
    assert process_start(child.pid) is None and process_start(2**22 + 1) is None


# -- files and ports


def test_reading_a_part_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"0123456789")
    read = Local().read
    assert (read(tmp_path / "x"), read(tmp_path / "x", 7), read(tmp_path / "x", 2, 3)) == (
        b"0123456789",
        b"789",
        b"234",
    )
    assert read(tmp_path / "x", 99) == read(tmp_path / "none") == read(tmp_path) == b""


def test_a_port_of_this_computer_is_where_it_is() -> None:
    assert Local().forward("127.0.0.1", 8265) == ("127.0.0.1", 8265)
