"""The Python API, in a program of its own, as a person writes it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shared import PATIENCE_S, document, nothing_left, private_home

pytestmark = pytest.mark.needs_ray

PROGRAM = """
import heliostat, json, socket, sys, urllib.error, urllib.request

told = {}
with heliostat.up("lab.yaml", nodes=2, name="api") as cluster:
    assert isinstance(cluster, heliostat.Cluster)
    told["name"], told["address"] = cluster.name, cluster.address
    told["nodes"] = [(node["name"], node["state"]) for node in cluster.status()["nodes"]]

    job = cluster.submit("python train.py", working_dir=".")
    told["lines"] = [line for line in job.logs(follow=True)]
    told["code"], told["status"] = job.wait(), job.status

    cluster.scale(0)
    told["fewer"] = [node["name"] for node in cluster.status()["nodes"]]
    cluster.scale(1)
    told["more"] = [node["name"] for node in cluster.status()["nodes"]]

    # a browser resolves names under `localhost` by itself; Python asks the system, which may not know them
    resolve = socket.getaddrinfo
    socket.getaddrinfo = lambda host, *more, **options: resolve(
        "127.0.0.1" if host.endswith(".localhost") else host, *more, **options)
    url = cluster.dashboard()
    opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
    told["page"] = "<html" in opener.open(url, timeout=60).read().decode().lower()
    version = opener.open(url.partition("?")[0] + "api/version", timeout=60)
    told["version"] = json.load(version)["ray_version"] == cluster.status()["ray_version"]

    again = heliostat.connect("api")
    told["same"] = again.address == cluster.address
    assert cluster.environment["RAY_ADDRESS"] == cluster.address
try:
    opener.open(url, timeout=60)
except urllib.error.URLError:
    told["closed"] = True
try:
    cluster.address
except heliostat.HeliostatError as error:
    told["after"] = error.exit_code
print(json.dumps(told))
"""

FAILING = """
import heliostat
with heliostat.up(name="falls", cpus_per_node=1, object_store="100M") as cluster:
    print(cluster.address, flush=True)
    raise LookupError("mine")
"""


@pytest.fixture
def home() -> Iterator[Path]:
    with private_home() as path:
        yield path


@pytest.fixture(autouse=True)
def no_leaks(home: Path) -> Iterator[None]:
    with nothing_left(home):
        yield


def run(program: str, folder: Path) -> subprocess.CompletedProcess[str]:
    (folder / "program.py").write_text(program)
    words = [sys.executable, "program.py"]
    return subprocess.run(
        words, cwd=folder, capture_output=True, text=True, timeout=2 * PATIENCE_S, env=os.environ
    )


def test_a_cluster_for_a_block(home: Path, tmp_path: Path) -> None:
    (tmp_path / "lab.yaml").write_text("cpus_per_node: 1\nobject_store: 100M\nnodes: 7\n")
    (tmp_path / "helper.py").write_text("STEPS = 3")
    (tmp_path / "train.py").write_text(
        "import helper, os, ray\n"
        "ray.init(logging_level='error', log_to_driver=False)\n"
        "print('step', *ray.get([ray.remote(lambda i: i).remote(i) for i in range(helper.STEPS)]))\n"
        "print('done', end='')\n"
    )
    done = run(PROGRAM, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""  # the library says nothing by itself
    told = json.loads(done.stdout)
    assert told["name"] == "api" and told["address"].count(":") == 1
    assert told["nodes"] == [["head", "READY"], ["w1", "READY"]]
    assert told["lines"][-2:] == ["step 0 1 2", "done"]
    assert (told["code"], told["status"]) == (0, "SUCCEEDED")
    assert (told["fewer"], told["more"]) == (["head"], ["head", "w1"])
    assert told["page"] and told["version"] and told["same"] and told["closed"]
    assert told["after"] == 5  # the block's end took it down
    rows = {row["name"]: row for row in document("history")["history"]}
    assert rows["api"]["why"] == "taken down" and len(rows) == 2


def test_an_exception_in_the_block_takes_it_down_too(home: Path, tmp_path: Path) -> None:
    done = run(FAILING, tmp_path)
    assert done.returncode == 1 and done.stderr.rstrip().endswith("LookupError: mine")
    assert done.stdout.strip()
    (row,) = document("history")["history"]
    assert (row["name"], row["why"]) == ("falls", "taken down")
    assert document("ls")["clusters"] == []
