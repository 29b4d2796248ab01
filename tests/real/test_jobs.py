"""Jobs on one real cluster: their output, whole and in time; their exit codes; their ends."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import heliostat as api
from shared import PATIENCE_S, document, heliostat, nothing_left, private_home, until

pytestmark = pytest.mark.needs_ray

NAME = "work"


@pytest.fixture(scope="module")
def home() -> Iterator[Path]:
    with private_home() as path:
        yield path


@pytest.fixture(scope="module", autouse=True)
def no_leaks(home: Path) -> Iterator[None]:
    with nothing_left(home):
        yield


@pytest.fixture(scope="module", autouse=True)
def cluster(home: Path, no_leaks: None) -> Iterator[None]:
    heliostat("up", "--name", NAME, "--cpus-per-node", "2", "--object-store", "100M")
    yield
    heliostat("down", NAME)


@pytest.fixture
def program(tmp_path: Path) -> Callable[[str], list[str]]:
    """The words that run this text as a Python program; `gate` in it is a file that the test makes when it likes."""

    def write(text: str) -> list[str]:
        path = tmp_path / f"program-{len(list(tmp_path.iterdir()))}.py"
        opening = f"import os, pathlib, signal, sys, time\ngate = pathlib.Path({str(tmp_path / 'gate')!r})\n"
        path.write_text(opening + text)
        return ["python", str(path)]

    return write


def submit(*words: str, code: int = 0, options: list[str] | None = None) -> str:
    """The output of a job that was waited for."""
    done = heliostat("submit", NAME, "--wait", *(options or []), "--", *words, code=code)
    return own(done.stdout)


def own(text: str) -> str:
    """A job's output, which has nothing of Ray's."""
    assert "Runtime env is setting up" not in text and "Running entrypoint for job" not in text, text[:500]
    return text


def read_until(process: subprocess.Popen[str], words: str) -> str:
    """Reads lines to the one that is `words`."""
    seen = ""
    for line in process.stdout or ():
        seen += line
        if line.rstrip("\n") == words:
            return seen
    pytest.fail(f"{words!r} never came: {seen!r}")


# --- handing in


def test_submit_prints_the_id_alone(tmp_path: Path) -> None:
    done = heliostat("submit", NAME, "--", "touch", tmp_path / "ran")
    job = done.stdout.strip()
    assert done.stdout == f"{job}\n" and job.startswith(f"{NAME}-")
    assert f"heliostat logs {NAME} {job} -f" in done.stderr
    until((tmp_path / "ran").exists, "the job's work")
    said = json.loads(heliostat("submit", "--json", "--job-id", "chosen", NAME, "--", "true").stdout)
    assert (said["cluster"], said["job"]) == (NAME, "chosen")


def test_exit_codes_are_the_jobs_own(spawn_cli, program) -> None:
    programs = {
        0: ["true"],
        3: program("sys.exit(3)"),
        137: program("os.kill(os.getpid(), signal.SIGKILL)"),
        143: program("os.kill(os.getpid(), signal.SIGTERM)"),
    }
    waiting = {code: spawn_cli("submit", NAME, "--wait", "--", *words) for code, words in programs.items()}
    found = {
        code: (process.communicate(timeout=PATIENCE_S), process.returncode)[1]
        for code, process in waiting.items()
    }
    assert found == {code: code for code in programs}


def test_words_arrive_as_they_were_typed(program) -> None:
    nasty = ["a b", "it's", '"', "$HOME;`id`", "back\\slash", "-x", "", "é*", "--json"]
    words = program("print(ascii(sys.argv[1:]))")
    assert submit(*words, *nasty) == ascii(nasty) + "\n"


def test_environment(tmp_path: Path, program) -> None:
    file = tmp_path / "runtime.yaml"
    file.write_text("env_vars: {FROM_FILE: 'yes', BOTH: file}\n")
    words = program("print(ascii([os.environ.get(n) for n in ('SPACED', 'EMPTY', 'FROM_FILE', 'BOTH')]))")
    options = [
        "--env",
        "SPACED=a 'b' = c",
        "--env",
        "EMPTY=",
        "--env",
        "BOTH=flag",
        "--runtime-env",
        str(file),
    ]
    assert submit(*words, options=options) == ascii(["a 'b' = c", "", "yes", "flag"]) + "\n"
    file.write_text("- no table\n")
    assert (
        "not a runtime environment"
        in heliostat("submit", NAME, "--runtime-env", file, "--", "true", code=2).stderr
    )


def test_the_working_dir_travels_without_what_git_ignores(tmp_path: Path) -> None:
    folder = tmp_path / "with space"
    for name, text in {
        "main.py": "import helper, os; print(sorted(os.path.join(p, n) for p, _, f in os.walk('.') for n in f"
        " if not n.endswith('.pyc')), helper.WORD)",
        "helper.py": "WORD = 'helped'",
        ".gitignore": "*.log\n/data/\n!data/\n",
        "noise.log": "x",
        "sub/.gitignore": "secret\n",
        "sub/secret": "x",
        "sub/naïve.txt": "x",
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    files = sorted(["./.gitignore", "./helper.py", "./main.py", "./sub/.gitignore", "./sub/naïve.txt"])
    assert submit("python", "main.py", options=["--working-dir", str(folder)]) == f"{files} helped\n"
    said = heliostat("submit", NAME, "--working-dir", tmp_path / "nowhere", "--", "true", code=2)
    assert "is not a directory" in said.stderr


def test_the_callers_directory_is_the_jobs(tmp_path: Path) -> None:
    """As the README has it: `submit lab -- python work.py`, in the directory of work.py."""
    folder = tmp_path / "it's here"
    folder.mkdir()
    (folder / "work.py").write_text("import os; print(os.getcwd())")
    done = heliostat("submit", NAME, "--wait", "--job-id", "here", "--", "python", "work.py", cwd=folder)
    assert own(done.stdout) == f"{folder}\n"
    line = "for word in a b; do echo $word; done; pwd"
    done = heliostat("submit", NAME, "--wait", "--", line, cwd=folder)
    assert own(done.stdout) == f"a\nb\n{folder}\n"
    (listed,) = [job for job in document("jobs", NAME)["jobs"] if job["id"] == "here"]
    assert listed["entrypoint"] == "python work.py"
    (tmp_path / "runtime.yaml").write_text(f'working_dir: "{folder}"\n')
    for options in (["--working-dir", folder], ["--runtime-env", tmp_path / "runtime.yaml"]):
        done = heliostat("submit", NAME, "--wait", *options, "--", "python", "work.py", cwd=tmp_path)
        assert "working_dir_files" in own(done.stdout)  # of an uploaded copy
    heliostat("submit", NAME, "--wait", "--no-working-dir", "--", "python", "work.py", code=2, cwd=folder)
    heliostat("submit", NAME, "--no-working-dir", "--working-dir", folder, "--", "true", code=2)


@pytest.mark.parametrize("job_id", ["a b/c", "../x", "", "-x", ".", "é", "x" * 101], ids=ascii)
def test_an_id_that_ray_cannot_use_is_refused(job_id: str) -> None:
    before = document("jobs", NAME)["jobs"]
    said = heliostat("submit", NAME, f"--job-id={job_id}", "--", "true", code=2).stderr
    assert "cannot be the id of a job" in said and "hint: --job-id " in said
    with api.connect(NAME) as cluster, pytest.raises(api.HeliostatError) as refused:
        cluster.submit("true", job_id=job_id)
    assert refused.value.exit_code == 2
    assert document("jobs", NAME)["jobs"] == before


@pytest.mark.parametrize(
    "words",
    [["submit", "nowhere", "--", "true"], ["jobs", "nowhere"], ["stop", "nowhere", "x"], ["logs", "nowhere", "x"],
     ["run", "--cluster", "nowhere", "--", "true"], ["stop", NAME, "no-such-job"], ["logs", NAME, "no-such-job"],
     ["logs", NAME, "w9"]],
    ids=" ".join,
)  # fmt: skip
def test_what_is_not_there_is_5(words: list[str]) -> None:
    done = heliostat(*words, code=5)
    assert done.stdout == "" and done.stderr.startswith("error: there is no ")


# --- output


def test_output_is_whole(program) -> None:
    """Megabytes, carriage returns, bytes that are no text, and a last line without an end."""
    words = program(
        "import hashlib, random\n"
        "random.seed(7)\n"
        "data = random.randbytes(3_000_000) + b'\\r\\n' + b'0123456789' * 300_000 + b'the end, unterminated'\n"
        "for i in range(0, len(data), 9_973):\n"
        "    sys.stdout.buffer.write(data[i : i + 9_973])\n"
        "    sys.stdout.buffer.flush()\n"
    )
    out = submit(*words).encode("utf-8", "surrogateescape")
    assert out.endswith(b"the end, unterminated") and len(out) == 6_000_023
    import random

    random.seed(7)
    expected = random.randbytes(3_000_000) + b"\r\n" + b"0123456789" * 300_000 + b"the end, unterminated"
    assert hashlib.sha256(out).digest() == hashlib.sha256(expected).digest()


def test_characters_survive_being_written_in_pieces(program) -> None:
    text = "naïve €uro 😀 ß"
    words = program(
        f"for byte in {text!r}.encode():\n"
        "    os.write(1, bytes([byte]))\n"
        "    time.sleep(0.01)\n"  # so that the pieces are read apart
    )
    assert submit(*words) == text


def test_what_is_written_in_the_last_instant_is_shown(spawn_cli, program) -> None:
    words = program("os.write(1, b'x' * 200_000 + b'|last'); os._exit(9)")
    waiting = [spawn_cli("submit", NAME, "--wait", "--", *words) for _ in range(5)]
    for process in waiting:
        out, _ = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 9
        assert own(out) == "x" * 200_000 + "|last"


GATED = """
print("first", flush=True)
while not gate.exists():
    time.sleep(0.02)
print("second")
"""


def test_output_comes_while_the_job_runs(tmp_path: Path, spawn_cli, program) -> None:
    """Also to one that looks on, and to one that begins to look when the first words have been said."""
    waiting = spawn_cli("submit", NAME, "--wait", "--job-id", "gated", "--", *program(GATED))
    read_until(waiting, "first")
    follower = spawn_cli("logs", NAME, "gated", "-f")
    read_until(follower, "first")
    so_far = own(heliostat("logs", NAME, "gated").stdout)
    assert so_far == "first\n"  # without -f it ends with what there is
    assert waiting.poll() is follower.poll() is None
    (tmp_path / "gate").touch()
    for process in (waiting, follower):
        out, _ = process.communicate(timeout=PATIENCE_S)
        assert out.endswith("second\n") and process.returncode == 0
    whole = heliostat("logs", NAME, "gated").stdout
    assert own(whole) == "first\nsecond\n"
    assert heliostat("logs", NAME, "gated", "-f").stdout == whole


def test_json_leaves_stdout_to_the_document(program) -> None:
    done = heliostat(
        "submit", "--json", "--wait", NAME, "--", *program("print('hello'); sys.exit(4)"), code=4
    )
    said = json.loads(done.stdout)
    assert (said["schema"], said["cluster"], said["exit_code"]) == (2, NAME, 4)
    assert "hello\n" in done.stderr


def test_exec_of_a_command_that_does_not_exist(tmp_path: Path) -> None:
    done = heliostat("exec", NAME, "--", "no-such-command", code=127)
    assert "no-such-command: not found" in done.stderr
    assert heliostat("exec", NAME, "--", "sh", "-c", "echo 'a b'; exit 3", code=3).stdout == "head | a b\n"


# --- lists


def test_jobs(program) -> None:
    heliostat("submit", NAME, "--wait", "--job-id", "listed", "--", *program("sys.exit(6)"), code=6)
    header, first, *_ = heliostat("jobs", NAME).stdout.splitlines()
    assert header.split() == ["JOB", "STATUS", "EXIT", "AGE", "RAN", "COMMAND"]
    assert first.split()[:3] == ["listed", "failed", "6"]  # the newest is first
    jobs = document("jobs", NAME)["jobs"]
    (listed,) = [job for job in jobs if job["id"] == "listed"]
    assert (listed["status"], listed["exit_code"], listed["kind"]) == ("FAILED", 6, "job")
    assert listed["entrypoint"].startswith("python ") and listed["started"] > 0 and listed["seconds"] >= 0
    assert "listed" in [job["id"] for job in document("status", NAME)["jobs"]]
    done = heliostat("submit", NAME, "--job-id", "listed", "--", "true", code=1)  # an id is taken once
    assert (
        done.stdout == "" and "cause: ValueError: Job with submission_id listed already exists" in done.stderr
    )
    assert len(done.stderr.splitlines()) <= 4


# --- ends


def status_of(job: str) -> str:
    return next(str(found["status"]) for found in document("jobs", NAME)["jobs"] if found["id"] == job)


def test_stop(spawn_cli, program) -> None:
    words = program(
        "def last(*_):\n    print('saving', flush=True); sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, last)\nprint('up', flush=True)\ntime.sleep(600)\n"
    )
    waiting = spawn_cli("submit", NAME, "--wait", "--job-id", "halted", "--", *words)
    read_until(waiting, "up")
    assert "job `halted` is stopping" in heliostat("stop", NAME, "halted").stderr
    out, _ = waiting.communicate(timeout=PATIENCE_S)
    assert "saving" in out  # it has time for its last words
    assert waiting.returncode != 0
    assert until(lambda: status_of("halted") == "STOPPED", "the job's end")
    assert "has already ended" in heliostat("stop", NAME, "halted").stderr
    assert document("stop", NAME, "halted")["stopped"] is False


def test_without_names(program) -> None:
    """One cluster runs, so its name may be left out; a prefix of a job is enough; `logs` shows the latest job."""
    heliostat("submit", "--wait", "--job-id", "older", "--", "echo", "of the older")
    heliostat(
        "submit",
        "--job-id",
        "endless-1",
        "--",
        *program("print('of the latest', flush=True)\ntime.sleep(600)\n"),
    )
    until(lambda: own(heliostat("logs").stdout) == "of the latest\n", "the output of the latest job")
    assert own(heliostat("logs", "old").stdout) == "of the older\n"
    assert own(heliostat("logs", NAME[:2], "old").stdout) == "of the older\n"
    assert "READY" in heliostat("logs", "--events").stdout
    several = heliostat("submit", "--job-id", "older-too", "--", "true").stdout.strip()
    assert "several jobs begin with `old`" in heliostat("logs", "old", code=2).stderr
    assert document("wait", several)["reached"] is True
    assert document("stop", "endl") == {"schema": 2, "cluster": NAME, "job": "endless-1", "stopped": True}
    assert document("wait", "endl", "--for", "ended")["state"] == "STOPPED"
    assert len(document("jobs")["jobs"]) >= 3
    assert heliostat("exec", "--", "echo", "on the head").stdout == "head | on the head\n"


def test_ctrl_c_stops_the_job(tmp_path: Path, spawn_cli, program) -> None:
    words = program(
        "def last(*_):\n    print('saving', flush=True); time.sleep(4); print('saved', flush=True); sys.exit(0)\n"
        f"signal.signal(signal.SIGTERM, last)\npathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(os.getpid()))\n"
        "print('first', flush=True)\ntime.sleep(600)\n"
    )
    waiting = spawn_cli("submit", NAME, "--wait", "--job-id", "cut", "--", *words)
    read_until(waiting, "first")
    os.killpg(waiting.pid, signal.SIGINT)
    out, words_said = waiting.communicate(timeout=PATIENCE_S)
    assert waiting.returncode == 130
    assert "saved" in out and "first" not in out, "its last words, and nothing twice"
    assert "interrupted; the job `cut` is stopped" in words_said and "Traceback" not in words_said
    assert status_of("cut") == "STOPPED"
    pid = int((tmp_path / "pid").read_text())
    until(lambda: not Path(f"/proc/{pid}").exists(), "the end of its process")


# --- by other doors


def test_run_on_a_running_cluster(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("WORD = 'beside'")
    (tmp_path / "script.py").write_text(
        "import beside, os, sys; print(beside.WORD, os.getcwd(), sys.argv[1:]); sys.exit(8)"
    )
    done = heliostat("run", "--cluster", NAME, "script.py", "a b", "-v", code=8, cwd=tmp_path)
    assert own(done.stdout) == f"beside {tmp_path} ['a b', '-v']\n"
    job = heliostat("run", "--cluster", NAME, "--detach", "--", "echo", "detached").stdout.strip()
    assert own(heliostat("logs", NAME, job, "-f").stdout) == "detached\n"
    assert [cluster["name"] for cluster in document("ls")["clusters"]] == [NAME]


def test_the_python_api(tmp_path: Path, program) -> None:
    with api.connect(NAME) as cluster:
        job = cluster.submit(program(GATED), env={"A": "b"})
        lines = job.logs(follow=True)
        assert "first" in lines  # reads up to it
        assert job.status == "RUNNING" and not job.done()
        (tmp_path / "gate").touch()
        assert list(lines)[-1] == "second"
        assert job.wait() == 0 and job.status == "SUCCEEDED" and job.done()
        assert list(job.logs())[-2:] == ["first", "second"]
        assert job.id in [found.id for found in cluster.jobs()]
        assert cluster.submit("true && exit 5").wait() == 5  # a string is a shell line
        with pytest.raises(api.HeliostatError, match="already exists"):
            cluster.submit("true", job_id=job.id)
        endless = cluster.submit(["sleep", "600"])
        until(lambda: endless.status == "RUNNING", "the job")
        assert endless.stop() is True
        until(endless.done, "its end")
        assert (endless.status, endless.stop()) == ("STOPPED", False)
    assert document("status", NAME)["state"] == "ready"  # `connect` does not own it
    with pytest.raises(api.HeliostatError) as refused:
        api.connect("nowhere")
    assert refused.value.exit_code == 5


# --- afterwards: the last test, since it ends the cluster


def test_the_history_keeps_jobs_and_their_output(home: Path, program) -> None:
    words = program("print('kept'); sys.exit(11)")
    heliostat("submit", NAME, "--wait", "--job-id", "remembered", "--", *words, code=11)
    heliostat("down", NAME)
    rows: dict[str, dict[str, Any]] = {row["name"]: row for row in document("history")["history"]}
    assert rows[NAME]["kind"] == "up" and rows[NAME]["why"] == "taken down"
    job = rows[f"{NAME}/remembered"]
    assert (job["kind"], job["exit_code"], job["why"]) == ("job", 11, "failed")
    assert own(heliostat("logs", NAME, "remembered").stdout) == "kept\n"
    assert "no job or node `gone`" in heliostat("logs", NAME, "gone", code=5).stderr
    assert f"`{NAME}` has ended" in heliostat("submit", NAME, "--", "true", code=5).stderr
    assert "was already terminated" in heliostat("down", NAME).stderr
    (folder,) = (home / "history").iterdir()
    assert not (folder / "token").exists()
