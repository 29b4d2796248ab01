"""Several clusters on one computer at once, of one user and of two: nobody disturbs anybody."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shared import COMMAND, PATIENCE_S, document, heliostat, nothing_left, private_home
from users import User, make_user

pytestmark = [pytest.mark.needs_ray, pytest.mark.needs_linux]

SMALL = ["--cpus-per-node", "1", "--object-store", "100M"]
WHO = [
    "python",
    "-c",
    "import json, os, ray, ray.util.state as state; ray.init(logging_level='error', log_to_driver=False); "
    # in a worker Ray's state API must find its own cluster, too, among several on the host
    "there = ray.get(ray.remote(lambda: (os.getuid(), len(state.list_nodes()))).remote()); "
    "print(json.dumps([os.environ['HELIOSTAT_CLUSTER'], os.getuid(), *there]))",
]


# --- the clusters: `one` (asked for three times at once) and `two` are ours, a second `one` is the neighbour's


@pytest.fixture(scope="module")
def home() -> Iterator[Path]:
    with private_home() as path:
        yield path


@pytest.fixture(scope="module", autouse=True)
def no_leaks(home: Path) -> Iterator[None]:
    with nothing_left(home):
        yield


@pytest.fixture(scope="module")
def neighbour(no_leaks: None) -> Iterator[User | None]:
    if os.geteuid() != 0 or not shutil.which("useradd"):
        yield None  # the tests that need one say so
        return
    with make_user() as found:
        yield found


@pytest.fixture(scope="module", autouse=True)
def started(home: Path, neighbour: User | None) -> Iterator[dict[str, list[tuple[int, str, str]]]]:
    """(exit code, stdout, stderr) of each `up`; all of them began at the same moment."""
    asked = {name: [[COMMAND, "up", "--name", name, *SMALL]] * n for name, n in (("one", 3), ("two", 1))}
    if neighbour:
        asked["theirs"] = [neighbour.words(COMMAND, "up", "--name", "one", *SMALL)]
    running = {
        name: [
            subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd="/")
            for words in commands
        ]
        for name, commands in asked.items()
    }
    try:
        yield {name: [_ended(process) for process in found] for name, found in running.items()}
    finally:
        heliostat("down", "--all")
        if neighbour:
            ended = neighbour.run(COMMAND, "down", "--all")
            assert ended.returncode == 0, ended.stderr
            assert not list((neighbour.home / ".heliostat" / "clusters").iterdir())
            assert not list(neighbour.home.glob("hs-*"))


def _ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=PATIENCE_S)
    return process.returncode, out, err


def records(home: Path) -> dict[str, dict[str, Any]]:
    return {path.parent.name: json.loads(path.read_text()) for path in home.glob("clusters/*/record.json")}


def ports(home: Path) -> list[set[int]]:
    """The ports of each node of each cluster in a home."""
    words = [json.loads(path.read_text()) for path in home.glob("clusters/*/nodes/*.json")]
    return [{port for port in node["ports"].values() if isinstance(port, int)} for node in words]


# --- what must hold


def test_three_who_ask_for_one_cluster_get_one_cluster(home: Path, started) -> None:
    assert [code for code, _, _ in started["one"]] == [0, 0, 0], started["one"]
    assert len({out for _, out, _ in started["one"]}) == 1
    one = records(home)["one"]
    assert len(one["handles"]) == 1 and {node["state"] for node in one["nodes"].values()} == {"READY"}
    events = [json.loads(line) for line in (home / "clusters/one/events.jsonl").read_text().splitlines()]
    moves = [(event["from"], event["to"]) for event in events if event["kind"] == "move"]
    assert len(moves) == len(set(moves)), events  # each move was told once


def test_two_clusters_that_start_together_both_work(home: Path, started, spawn_cli) -> None:
    (code, address, words), first = started["two"][0], started["one"][0]
    assert code == 0, words
    assert address != first[1]
    a, b = ports(home)
    assert not a & b
    jobs = {name: spawn_cli("submit", name, "--wait", "--", *WHO) for name in ("one", "two")}
    for name, job in jobs.items():
        out, err = job.communicate(timeout=PATIENCE_S)
        assert job.returncode == 0, out + err
        assert json.loads(out.splitlines()[-1]) == [name, os.getuid(), os.getuid(), 1]


@pytest.mark.needs_two_users
def test_two_users_at_once(home: Path, neighbour: User, started) -> None:
    """Clusters of the same name that began at the same moment, and neither user can look into the other's."""
    ((code, address, words),) = started["theirs"]
    assert code == 0, words
    assert address not in (started["one"][0][1], started["two"][0][1])
    theirs = neighbour.home / ".heliostat"
    every = [*ports(home), *ports(theirs)]
    assert len(every) == 3 and len(set.union(*every)) == sum(map(len, every))

    done = neighbour.run(COMMAND, "submit", "one", "--wait", "--", *WHO)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == ["one", neighbour.uid, neighbour.uid, 1]

    listed = json.loads(neighbour.run(COMMAND, "ls", "--json").stdout)["clusters"]
    assert [cluster["name"] for cluster in listed] == ["one"]
    temp = json.loads((home / "clusters/one/nodes/head.json").read_text())["temp"]
    for place in (home, home / "clusters/one/token", Path(temp), Path(temp) / "ray"):
        looked = neighbour.run("ls", place)
        assert looked.returncode != 0 and "Permission denied" in looked.stderr, place
    for path in theirs.rglob("*"):
        assert path.lstat().st_uid == neighbour.uid


def test_down_of_one_leaves_the_others(home: Path, neighbour: User | None, started) -> None:
    before = records(home)["two"]
    heliostat("down", "one")
    assert [cluster["name"] for cluster in document("ls")["clusters"]] == ["two"]
    assert records(home)["two"] == before
    heliostat("submit", "two", "--wait", "--", "true")
    if neighbour:
        done = neighbour.run(COMMAND, "submit", "one", "--wait", "--", "true")
        assert done.returncode == 0, done.stdout + done.stderr
