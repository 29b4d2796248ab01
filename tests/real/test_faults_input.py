"""What cannot be done is said before anything starts, or with nothing left of what did."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import stat
import string
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from real.faults import fake_ray, four_lines, make_venv, ordinary, past, refused, say, small_disk, tell_tale
from shared import PATIENCE_S, heliostat

pytestmark = pytest.mark.needs_linux


@pytest.fixture(autouse=True)
def tidy(home: Path, no_leaks: None) -> Iterator[None]:
    yield
    tell_tale(home)


def never_began(home: Path) -> None:
    assert not (home / "clusters").exists() and not (home / "history").exists()


def ended(home: Path) -> str:
    """Why the only cluster that ever was has ended: the head's own words."""
    (record,) = past(home)
    assert record["target"] == "down" and record["ended"]
    return str(record["nodes"]["head"]["reason"])


# --- scripts


@pytest.mark.parametrize("verb", [["run"], ["run", "--nodes", "2"], ["run", "--detach"]], ids=" ".join)
def test_a_script_that_is_not_there(home: Path, tmp_path: Path, verb: list[str]) -> None:
    (tmp_path / "train.py").touch()
    said = refused(heliostat(*verb, "trian.py", "--lr", "0.1", code=None, cwd=tmp_path), 2)
    assert said == {
        "error": "script `trian.py` not found",
        "cause": f"searched {tmp_path}",
        "hint": "did you mean `train.py`?",
    }
    never_began(home)


def test_a_folder_as_script(home: Path, tmp_path: Path) -> None:
    (tmp_path / "code.py").mkdir()
    said = refused(heliostat("run", "code.py", code=None, cwd=tmp_path), 2)
    assert said["error"] == "`code.py` is a directory, not a script"
    never_began(home)


@pytest.mark.needs_two_users
def test_a_script_that_may_not_be_read(home: Path, tmp_path: Path) -> None:
    folder = home / "shared"
    folder.mkdir()
    home.chmod(0o755)
    for name, mode in (("secret.py", 0o600), ("shut", 0o700)):
        (folder / name).touch() if name.endswith(".py") else (folder / name).mkdir()
        (folder / name).chmod(mode)
    said = refused(ordinary("run", folder / "secret.py", HELIOSTAT_HOME="/nonexistent/home"), 2)
    assert (
        said["error"] == f"could not read `{folder}/secret.py`"
        and said["cause"].lower() == "permission denied"
    )
    said = refused(ordinary("run", folder / "shut" / "train.py", HELIOSTAT_HOME="/nonexistent/home"), 2)
    assert said["error"] == f"could not read `{folder}/shut/train.py`"
    never_began(home)


@pytest.mark.needs_two_users
def test_a_file_that_may_not_be_read(home: Path) -> None:
    path = home / "heliostat.yaml"
    path.write_text("nodes: 2\n")
    path.chmod(0o600)
    home.chmod(0o755)
    said = refused(ordinary("up", path, HELIOSTAT_HOME="/nonexistent/home"), 2)
    assert said["error"] == f"could not read `{path}`" and said["cause"] == "Permission denied"


# --- names


NASTY = [
    "", " ", ".", "..", "-x", "a b", "a/b", "../../etc", "a_b", "a;b", "$(id)", "`id`", "a\nb", "a'b", 'a"b', "a\\b",
    "lab\n", "naïve", "🔭", "x" * 41, "*", "~",
]  # fmt: skip


@pytest.mark.parametrize("name", NASTY, ids=ascii)
def test_a_nasty_name_starts_nothing(home: Path, name: str) -> None:
    said = refused(say("up", f"--name={name}"), 2)
    assert said["error"] == "`name` cannot be used" and "40 characters at most" in said["cause"]
    never_began(home)


@pytest.mark.parametrize("name", [name for name in NASTY if name[:1] not in ("", "-")], ids=ascii)
def test_a_nasty_name_finds_nothing(home: Path, name: str) -> None:
    ghost = home / "history" / "lab-20260101-000000-abcd"
    (home / "clusters").mkdir()
    ghost.mkdir(parents=True)
    (ghost / "record.json").write_text("{}")
    for verb in ("down", "status", "logs", "jobs", "env", "restart"):
        assert " ".join(name.split()) in refused(say(verb, name), 5)["error"]
        refused(say(verb, f"../history/{ghost.name}"), 5)
    assert (ghost / "record.json").read_text() == "{}"
    ghost.joinpath("record.json").unlink()


def test_a_taken_name(home: Path, tmp_path: Path) -> None:
    venv = fake_ray(tmp_path / "v")
    heliostat("up", "--name", "lab", "--venv", venv)
    for words in (["up", "--nodes", "2"], ["run", "--", "true"]):
        said = refused(heliostat(words[0], "--name", "lab", "--venv", venv, *words[1:], code=None), 1)
        assert said["error"] == "the name `lab` is in use"
        assert "on `local` is ready" in said["cause"] and "heliostat down lab" in said["hint"]
    heliostat("down", "lab")


# --- files


def noise(kind: str) -> bytes:
    dice = random.Random(1)
    words = ["".join(dice.choices(string.ascii_lowercase, k=8)) for _ in range(10_000)]
    return {
        "unknown keys": "\n".join(f"{word}{i}: {i}" for i, word in enumerate(words)).encode(),
        "prose": "\n".join(f"{word} {word[::-1]}, {i}." for i, word in enumerate(words)).encode(),
        "one key": "\n".join("nodes: 2" for _ in words).encode(),
        "bytes": b"\n".join(dice.randbytes(20) for _ in words),
        "brackets": b"\n".join(b"[" * 20 for _ in words),
        "a long list": b"labels:\n" + b"\n".join(b"- {a: b}" for _ in words),
        "nodes": b"groups:\n" + b"\n".join(b" g%d: {nodes: 100000}" % i for i in range(10_000)),
    }[kind]


@pytest.mark.parametrize(
    "kind", ["unknown keys", "prose", "one key", "bytes", "brackets", "a long list", "nodes"]
)
def test_ten_thousand_lines_of_noise(home: Path, tmp_path: Path, kind: str) -> None:
    path = tmp_path / "heliostat.yaml"
    path.write_bytes(noise(kind))
    said = refused(say("up", path), 2)
    assert all(len(words) < 1000 for words in said.values())
    never_began(home)


# --- environments


def test_no_ray_in_the_environment(home: Path, tmp_path: Path) -> None:
    venv = make_venv(tmp_path / "bare")
    (tmp_path / "heliostat.yaml").write_text(f"environment: {{venv: {venv}}}\n")
    said = refused(heliostat("up", "--name", "lab", code=None, cwd=tmp_path), 1)
    assert said["error"] == "the cluster `lab` did not start"
    assert said["cause"] == f"no Ray in the environment of {venv}/bin/python3" == ended(home)
    assert "pip install" in said["hint"]
    assert Path(said["details"].removeprefix("log: ")).is_dir()


@pytest.mark.needs_ray
def test_another_ray_than_asked_for(home: Path) -> None:
    said = refused(heliostat("up", "--ray-version", "2.40.0", code=None), 1)
    assert "is installed, 2.40.0 is asked for" in said["cause"] and "environment" in said["hint"]
    assert ended(home) == said["cause"]


def test_a_ray_without_authentication(home: Path, tmp_path: Path) -> None:
    """Refused before anything starts; with `auth: none` it is the user's own decision, and it starts."""
    venv = fake_ray(tmp_path / "old", "2.40.0")
    said = refused(heliostat("up", "--venv", venv, code=None), 1)
    assert said["cause"] == "Ray 2.40.0 has no authentication (2.52 is the first that does)" == ended(home)
    assert "security: {auth: none}" in said["hint"]
    assert not list(home.rglob("ray.log"))
    (tmp_path / "heliostat.yaml").write_text("security: {auth: none}\n")
    heliostat("up", "--venv", venv, cwd=tmp_path)
    heliostat("down", "local")


def test_an_environment_that_is_not_one(home: Path, tmp_path: Path) -> None:
    (tmp_path / "v").mkdir()
    said = refused(heliostat("up", "--venv", tmp_path / "v", code=None), 1)
    assert said["error"] == f"could not make the environment `{tmp_path}/v`"
    assert "is not a virtual environment: it has no bin/python" in said["cause"]
    never_began(home)


def test_an_environment_that_cannot_be_made(home: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    said = refused(heliostat("up", "--venv", tmp_path / "file" / "v", code=None), 1)
    assert said["error"] == f"could not make the environment `{tmp_path}/file/v`" and said["cause"]
    never_began(home)


def test_an_environment_that_cannot_be_entered(home: Path, tmp_path: Path) -> None:
    """What fails before our agent is there is told in the shell's own words."""
    (tmp_path / "v" / "bin").mkdir(parents=True)
    (tmp_path / "v" / "bin" / "python").symlink_to(sys.executable)
    said = refused(heliostat("up", "--venv", tmp_path / "v", code=None), 1)
    assert f"{tmp_path}/v/bin/activate: No such file or directory" in said["cause"]
    assert said["cause"] == ended(home)


def test_a_setup_line_that_ends_the_script(home: Path, tmp_path: Path) -> None:
    said = refused(heliostat("up", "--setup", "module load cuda/99 || exit 3", code=None), 1)
    assert "module: command not found" in said["cause"] == ended(home)


def test_setup_lines_that_fail_make_noise_and_read(home: Path, tmp_path: Path) -> None:
    """As in any batch script, a line that fails is in the log and no more; none can eat the agent's config."""
    venv = fake_ray(tmp_path / "v")
    lines = [
        "false",
        "no-such-program",
        "cat",
        "echo '{\"ok\": true'",
        "head -c 3000000 /dev/zero",
        "printf 'no newline'",
    ]
    options = [word for line in lines for word in ("--setup", line)]
    done = heliostat("run", "--venv", venv, *options, "--", "python3", "-c", "print('here')")
    assert done.stdout == "here\n"
    (log,) = home.rglob("head/agent.log")
    assert b"no-such-program: command not found" in log.read_bytes()


# --- ports


@contextlib.contextmanager
def taken() -> Iterator[tuple[int, int]]:
    """(first, last) of 64 ports in a row, every one of them taken by somebody else."""
    starts = [*range(61_056, 65_400, 64)]  # above the range from which the kernel gives ports to anybody
    for first in random.sample(starts, len(starts)):
        with contextlib.ExitStack() as held:
            try:
                for port in range(first, first + 64):
                    held.enter_context(socket.create_server(("0.0.0.0", port)))
            except OSError:
                continue
            yield first, first + 63
            return
    pytest.fail("no 64 free ports in a row")


def test_every_port_of_the_range_is_taken(home: Path, tmp_path: Path) -> None:
    with taken() as (first, last):
        (tmp_path / "heliostat.yaml").write_text(f"network: {{ports: {first}-{last}}}\n")
        said = refused(heliostat("up", "--venv", fake_ray(tmp_path / "v"), code=None, cwd=tmp_path), 1)
    assert said["cause"] == f"no block of 64 free ports between {first} and {last}" == ended(home)
    assert "network.ports" in said["hint"]


def test_a_range_that_has_room_for_one_node(home: Path, tmp_path: Path) -> None:
    """The second finds none, and says so; the first lives."""
    with taken() as (first, last):
        pass
    (tmp_path / "heliostat.yaml").write_text(f"network: {{ports: {first}-{last}}}\nnodes: 2\n")
    venv = fake_ray(tmp_path / "v")
    said = refused(heliostat("up", "--name", "lab", "--venv", venv, code=None, cwd=tmp_path), 3)
    assert said["error"] == "`lab` has 1 of the 2 requested nodes"
    assert said["cause"] == f"w1: no block of 64 free ports between {first} and {last}"
    heliostat("down", "lab")


# --- memory


def with_shm(size: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Runs the command where /dev/shm is so small."""
    line = 'mount -t tmpfs -o "size=$0" tmpfs /dev/shm && exec "$@"'
    argv = [
        "unshare",
        "-m",
        "--propagation",
        "private",
        "sh",
        "-c",
        line,
        size,
        sys.executable,
        "-m",
        "heliostat",
        *words,
    ]
    return subprocess.run(
        argv,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        env=os.environ.copy(),
    )


@pytest.mark.needs_tmpfs
@pytest.mark.parametrize(
    ("size", "words", "cause"),
    [
        ("32M", [], "/dev/shm has 32 MiB free; Ray needs 80 at least"),
        (
            "32M",
            ["--object-store", "100M"],
            "an object store of 100 MiB does not fit in /dev/shm, which has 32 MiB free",
        ),
        (
            "200M",
            ["--object-store", "1G"],
            "an object store of 1024 MiB does not fit in /dev/shm, which has 200 MiB free",
        ),
    ],
)
def test_too_little_shared_memory(
    home: Path, tmp_path: Path, size: str, words: list[str], cause: str
) -> None:
    said = refused(with_shm(size, "up", "--venv", str(fake_ray(tmp_path / "v")), *words), 1)
    assert said["cause"] == cause == ended(home)
    assert "/dev/shm" in said["hint"]


# --- the home


@pytest.mark.needs_two_users
def test_a_home_that_may_not_be_written(home: Path) -> None:
    place = home / "theirs"
    place.mkdir()
    place.chmod(0o755)
    home.chmod(0o755)
    for where in (place, place / "below"):
        said = refused(ordinary("up", HELIOSTAT_HOME=str(where)), 1)
        assert said["error"].startswith(f"could not write `{where}") and said["cause"] == "Permission denied"
        assert "HELIOSTAT_HOME" in said["hint"]
        for words in (["ls"], ["ls", "--all", "--json"], ["history"]):
            assert ordinary(*words, HELIOSTAT_HOME=str(where)).returncode == 0
    assert not list(place.iterdir())


def test_a_home_that_is_a_file(home: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    said = refused(heliostat("up", code=None, HELIOSTAT_HOME=str(tmp_path / "file")), 1)
    assert said["error"].startswith(f"could not write `{tmp_path}/file") and "HELIOSTAT_HOME" in said["hint"]


@pytest.mark.needs_tmpfs
def test_a_read_only_home(home: Path) -> None:
    with small_disk(home / "disk") as disk:
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        said = refused(heliostat("up", code=None, HELIOSTAT_HOME=str(disk)), 1)
        assert said["cause"] == "Read-only file system" and "HELIOSTAT_HOME" in said["hint"]
        assert heliostat("ls", HELIOSTAT_HOME=str(disk)).stdout == ""


def test_the_home_is_private(home: Path, tmp_path: Path) -> None:
    place = tmp_path / "new" / "home"
    said = four_lines(
        heliostat("up", "--venv", make_venv(tmp_path / "bare"), code=1, HELIOSTAT_HOME=str(place)).stderr
    )
    assert "no Ray" in said["cause"]
    assert {stat.S_IMODE(path.stat().st_mode) for path in (place, place / "clusters", place / "history")} == {
        0o700
    }
