"""`heliostat run`, as a person types it: a cluster for one command, and nothing left of it."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shared import COMMAND, PATIENCE_S, document, heliostat, nothing_left, private_home, until

pytestmark = pytest.mark.needs_ray

SMALL = ["--cpus-per-node", "1", "--object-store", "100M"]


@pytest.fixture
def home() -> Iterator[Path]:
    with private_home() as path:
        yield path


@pytest.fixture(autouse=True)
def no_leaks(home: Path) -> Iterator[None]:
    with nothing_left(home):
        yield


def remembered(home: Path, name: str) -> dict[str, Any]:
    """The row of an ended cluster in the history; what is kept of it can be read."""
    (row,) = [row for row in document("history")["history"] if row["name"] == name]
    (folder,) = (home / "history").glob(f"{name}-*")
    record = json.loads((folder / "record.json").read_text())
    assert record["schema"] == 2 and {node["state"] for node in record["nodes"].values()} == {"GONE"}
    assert [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    assert not (folder / "token").exists()
    assert heliostat("ls").stdout == "" and f"{name} " in heliostat("ls", "--all").stdout
    return dict(row)


def test_a_script_on_two_nodes(home: Path, tmp_path: Path) -> None:
    """Its arguments, folder, environment, neighbours, both streams, and its exit code."""
    (tmp_path / "beside.py").write_text("WORD = 'beside'\n")
    (tmp_path / "my script.py").write_text(
        "import beside, json, os, sys, ray\n"
        "ray.init(logging_level='error', log_to_driver=False)\n"
        "nodes = sorted(node['NodeName'] for node in ray.nodes() if node['Alive'])\n"
        "there = ray.get(ray.remote(lambda: beside.WORD).remote())\n"
        "print(json.dumps([sys.argv[1:], os.getcwd(), os.environ['MINE'], beside.WORD, nodes, there]))\n"
        "print('to stderr', file=sys.stderr)\n"
        "sys.stdout.write('no end')\n"
        "sys.exit(7)\n"
    )
    words = ["a b", "it's", '"quoted"', "$HOME", "--nodes", "-q", "--json", "", "naïve"]
    options = ["--name", "two", "--nodes", "2", *SMALL]
    done = heliostat("run", *options, "my script.py", *words, code=7, cwd=tmp_path, MINE="a 'b'")
    first, last = done.stdout.split("\n")
    assert json.loads(first) == [words, str(tmp_path), "a 'b'", "beside", ["head", "w1"], "beside"]
    assert last == "no end"
    assert re.search("^to stderr$", done.stderr, re.M) and "w1: ready" in done.stderr
    row = remembered(home, "two")
    assert (row["kind"], row["nodes"], row["exit_code"]) == ("run", 2, 7)
    assert row["why"] == "the command ended with code 7" and "my script.py" in row["what"]


def test_a_command_that_floods_and_is_killed(home: Path) -> None:
    """Megabytes of any bytes arrive whole, and a death by signal is 128 and its number."""
    program = (
        "import os, random, signal, sys; random.seed(3); data = random.randbytes(8_000_000); "
        "sys.stdout.buffer.write(data); sys.stderr.write('e' * 1_000_000); sys.stdout.flush(); "
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = heliostat("run", *SMALL, "--", "python", "-c", program, code=137)
    import random

    random.seed(3)
    out = done.stdout.encode("utf-8", "surrogateescape")
    assert hashlib.sha256(out).digest() == hashlib.sha256(random.randbytes(8_000_000)).digest()
    assert done.stderr.count("e" * 1_000_000) == 1
    (row,) = document("history")["history"]
    assert row["name"].startswith("run-") and row["exit_code"] == 137
    assert row["waited_s"] > 0 and row["ran_s"] > 0 and row["node_hours"] is not None
    assert remembered(home, row["name"])["why"] == "the command ended with code 137"


def test_jobs_lists_a_run_once(tmp_path: Path) -> None:
    """Its driver is a job of Ray's, too."""
    (tmp_path / "asks.py").write_text(
        "import subprocess, sys, ray\nray.init(logging_level='error', log_to_driver=False)\n"
        "sys.exit(subprocess.call(sys.argv[1:]) or subprocess.call([sys.argv[1], 'status', 'once', '--json']))\n"
    )
    done = heliostat(
        "run", "--name", "once", *SMALL, "asks.py", COMMAND, "jobs", "once", "--json", cwd=tmp_path
    )
    jobs, status = json.loads("[" + done.stdout.replace("}\n{", "},{") + "]")
    for listed in (jobs, status):
        assert [(job["id"], job["status"]) for job in listed["jobs"]] == [("run", "RUNNING")]
    assert status["idle_s"] == 0


def test_a_command_that_does_not_exist_starts_nothing(home: Path) -> None:
    done = heliostat("run", *SMALL, "--", "no-such-command", code=127)
    assert done.stderr.startswith("error: command `no-such-command` not found")
    assert document("history")["history"] == []


GROUPS = """
import json, os, pathlib, sys, time, ray
ray.init(logging_level="error", log_to_driver=False)
def alive():
    return {node["NodeName"]: node for node in ray.nodes() if node["Alive"]}
first = sorted(alive())
pathlib.Path(sys.argv[1]).touch()
while len(alive()) < 2:
    time.sleep(0.1)
print(json.dumps({
    "first": first,
    "labels": {name: node["Labels"] for name, node in alive().items()},
    "resources": {name: node["Resources"] for name, node in alive().items()},
    "prefix": sys.prefix,
    "env": {name: os.environ.get(name) for name in ("FROM_SETUP", "FROM_FILE", "VIRTUAL_ENV")},
    "on the node": ray.get(ray.remote(resources={"slot": 1})(lambda: os.environ.get("FROM_FILE")).remote()),
}))
"""


def test_a_file_with_groups_an_environment_and_min_nodes(home: Path, tmp_path: Path) -> None:
    """The script begins when one node is there: the other is held back until the script asks for it."""
    (tmp_path / "script.py").write_text(GROUPS)
    go = tmp_path / "go"
    who_am_i = (
        "import json, sys; record = json.load(open('record.json')); "
        "print(*[h['nodes'][0] for h in record['handles'] if h['detail']['pid'] == int(sys.argv[1])])"
    )
    ask = shlex.join([sys.executable, "-c", who_am_i])
    config = {
        "min_nodes": 1,
        "cpus_per_node": 1,
        "object_store": "100M",
        "labels": {"team": "optics"},
        "groups": {"fast": {"nodes": 1, "labels": {"kind": "fast"}, "resources": {"slot": 2}}},
        "environment": {
            "venv": sys.prefix,
            "env": {"FROM_FILE": "a 'b' $c"},
            "setup": [
                "export FROM_SETUP='a \"b\"'",
                f'until name=$({ask} $$) && [ "$name" ]; do sleep 0.1; done',
                f'[ "$name" = head ] || until [ -e {shlex.quote(str(go))} ]; do sleep 0.1; done',
            ],
        },
    }
    (tmp_path / "heliostat.yaml").write_text(json.dumps(config))
    done = heliostat("run", "--json", "--name", "groups", "script.py", go, cwd=tmp_path)
    said = json.loads(done.stdout)
    assert (said["schema"], said["name"], said["exit_code"]) == (2, "groups", 0)
    # with --json stdout is the document's: what the script says goes to stderr
    told = json.loads(next(line for line in done.stderr.splitlines() if line.startswith("{")))
    assert told["first"] == ["head"]
    assert told["labels"]["head"]["team"] == told["labels"]["fast-1"]["team"] == "optics"
    assert told["labels"]["fast-1"]["kind"] == "fast" and "kind" not in told["labels"]["head"]
    assert told["resources"]["fast-1"]["slot"] == 2 and "slot" not in told["resources"]["head"]
    assert told["prefix"] == sys.prefix and told["on the node"] == "a 'b' $c"
    assert told["env"] == {"FROM_SETUP": 'a "b"', "FROM_FILE": "a 'b' $c", "VIRTUAL_ENV": sys.prefix}
    row = remembered(home, "groups")
    assert (row["nodes"], row["exit_code"], row["why"]) == (2, 0, "the command ended with code 0")


def test_the_active_environment(home: Path, tmp_path: Path) -> None:
    """As with `uv tool install`: Heliostat is in another environment than the script's packages."""
    venv = tmp_path / "work" / ".venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    ours, theirs = Path(sysconfig.get_paths()["purelib"]), next(venv.glob("lib/python3*/site-packages"))
    (theirs / "ray").symlink_to(ours / "ray")
    (theirs / "others.pth").write_text(f"{ours}\n")
    (tmp_path / "work" / "show.py").write_text(
        "import sys, ray; ray.init(logging_level='error'); print(sys.prefix, ray.get(ray.remote(lambda: sys.prefix).remote()))"
    )
    expected = f"{venv} {venv}\n"
    done = heliostat("run", "-v", *SMALL, "work/show.py", cwd=tmp_path, VIRTUAL_ENV="")
    assert done.stdout == expected and f"environment: {venv} (.venv of {tmp_path / 'work'})" in done.stderr
    (tmp_path / "elsewhere.py").write_text((tmp_path / "work" / "show.py").read_text())
    done = heliostat("run", *SMALL, "elsewhere.py", cwd=tmp_path, VIRTUAL_ENV=str(venv))
    assert done.stdout == expected, "the active one"


def test_detached(home: Path, tmp_path: Path, spawn_cli) -> None:
    """Two at once: one is followed to its own end, one is stopped."""
    (tmp_path / "patient.py").write_text(
        "import os, pathlib, sys, time\n"
        "print('first', os.getpid(), flush=True)\n"
        "while not pathlib.Path('go').exists(): time.sleep(0.05)\n"
        "print('second'); sys.exit(5)\n"
    )
    for name in ("patient", "endless"):
        done = heliostat("run", "--detach", "--name", name, *SMALL, "patient.py", cwd=tmp_path)
        assert done.stdout == f"{name}\n" and f"heliostat logs {name} run -f" in done.stderr
    followers = {name: spawn_cli("logs", name, "run", "-f") for name in ("patient", "endless")}
    pids = {name: int(follower.stdout.readline().split()[1]) for name, follower in followers.items()}
    (job,) = document("status", "patient")["jobs"]
    assert (job["id"], job["status"], job["exit_code"]) == ("run", "RUNNING", None)
    assert {cluster["name"] for cluster in document("ls")["clusters"]} == {"patient", "endless"}

    assert "job `run` is stopping" in heliostat("stop", "endless", "run").stderr
    out, _ = followers["endless"].communicate(timeout=PATIENCE_S)
    assert out == ""
    until(lambda: not Path(f"/proc/{pids['endless']}").exists(), "the end of the stopped command")
    os.kill(pids["patient"], 0)  # the other is not touched

    (tmp_path / "go").touch()
    out, _ = followers["patient"].communicate(timeout=PATIENCE_S)
    assert out == "second\n"
    until(lambda: not document("ls")["clusters"], "the end of both")
    row = remembered(home, "patient")
    assert (row["exit_code"], row["why"]) == (5, "the command ended with code 5")
    assert remembered(home, "endless")["exit_code"] == 143
    assert heliostat("logs", "patient", "run").stdout == f"first {pids['patient']}\nsecond\n"
    assert heliostat("logs", "patient", "run", "-f").stdout == f"first {pids['patient']}\nsecond\n"


def test_the_time_limit_ends_it_and_says_so(home: Path) -> None:
    done = heliostat("run", "--name", "brief", "--time", "25s", *SMALL, "--", "sleep", "600", code=None)
    assert done.returncode in (1, 143), done.stderr  # 1: the machine is so slow that the command never began
    assert "the time limit of 25 s is reached" in done.stderr
    assert remembered(home, "brief")["why"] == "the time limit of 25 s is reached"
