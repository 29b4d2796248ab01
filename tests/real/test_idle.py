"""A cluster that nobody uses ends itself, and whatever counts as use keeps it.

Time is counted on the head's own clock: a phase lasts until the head has looked for activity for clearly longer than
the timeout.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shared import PATIENCE_S, document, driver_words, heliostat, nothing_left, private_home, until

pytestmark = pytest.mark.needs_ray

SMALL = ["--cpus-per-node", "2", "--object-store", "100M"]
TIMEOUT_S = 3


@pytest.fixture(scope="module")
def home() -> Iterator[Path]:
    with private_home() as path:
        yield path


@pytest.fixture(scope="module", autouse=True)
def no_leaks(home: Path) -> Iterator[None]:
    with nothing_left(home):
        yield
        heliostat("down", "--all")


def pulse(folder: Path) -> dict[str, Any]:
    try:
        return dict(json.loads((folder / "pulse.json").read_text()))
    except FileNotFoundError:
        return {}


def why_it_ended(name: str) -> str:
    until(
        lambda: name not in [cluster["name"] for cluster in document("ls")["clusters"]], f"the end of {name}"
    )
    (row,) = [row for row in document("history")["history"] if row["name"] == name]
    assert row["exit_code"] is None
    return str(row["why"])


# --- nobody uses it


def test_an_unused_cluster_ends_itself_but_only_in_its_window(home: Path, tmp_path: Path, spawn_cli) -> None:
    hours = [time.strftime("%H:%M", time.localtime(time.time() + hours * 3600)) for hours in (2, 3)]
    (tmp_path / "patient.yaml").write_text(f"idle: {{timeout: 3s, window: '{hours[0]}-{hours[1]}'}}\n")
    ups = [
        spawn_cli("up", "--name", "unused", "--idle-timeout", "3s", *SMALL),
        spawn_cli("up", str(tmp_path / "patient.yaml"), "--name", "patient", *SMALL),
    ]
    for up in ups:
        _, words = up.communicate(timeout=PATIENCE_S)
        assert up.returncode == 0, words
    assert why_it_ended("unused").startswith("idle for ")
    assert "-> GONE  (idle for " in heliostat("logs", "unused").stdout
    (folder,) = (home / "history").glob("unused-*")
    assert not (folder / "token").exists()

    until(
        lambda: pulse(home / "clusters" / "patient").get("idle_s", 0) > 6, "twice the timeout, for the other"
    )
    status = document("status", "patient")
    assert status["state"] == "ready" and status["idle_s"] > 6
    assert ", idle for " in heliostat("status", "patient").stdout
    heliostat("down", "patient")


# --- somebody does


class Used:
    """A cluster with a short timeout. While `touching`, its keepalive file is touched again and again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._touching = threading.Event()
        threading.Thread(target=self._touch, daemon=True).start()

    def _touch(self) -> None:
        while True:
            self._touching.wait()
            with contextlib.suppress(OSError):
                if self.folder.is_dir():
                    (self.folder / "keepalive").touch()
            time.sleep(0.1)

    def touch(self) -> None:
        self._touching.set()

    def leave(self) -> None:
        self._touching.clear()

    def must_live(self) -> None:
        """Passes when the head does not end the cluster for clearly longer than the timeout."""
        start = pulse(self.folder)["beat"]  # each beat is a look, six looks are a timeout
        beats = 10
        until(
            lambda: not pulse(self.folder) or pulse(self.folder)["beat"] > start + beats, "beats of the head"
        )
        assert document("status", "used")["state"] == "ready"


@pytest.fixture(scope="module")
def used(home: Path, no_leaks: None) -> Iterator[Used]:
    cluster = Used(home / "clusters" / "used")
    cluster.touch()
    heliostat("up", "--name", "used", "--idle-timeout", f"{TIMEOUT_S}s", *SMALL)
    until(lambda: pulse(cluster.folder), "the first beat")
    yield cluster
    cluster.leave()


@pytest.fixture(autouse=True)
def kept(request: pytest.FixtureRequest) -> Iterator[None]:
    """Between two tests, the cluster is kept by its file."""
    yield
    if "used" in request.fixturenames:
        request.getfixturevalue("used").touch()


def test_a_running_job_keeps_it(used: Used, tmp_path: Path) -> None:
    line = f"until [ -e {tmp_path}/go ]; do sleep 0.1; done"
    job = heliostat("submit", "used", "--", "bash", "-c", line).stdout.strip()
    until(lambda: document("jobs", "used")["jobs"][0]["status"] == "RUNNING", "the job")
    used.leave()
    used.must_live()
    used.touch()
    (tmp_path / "go").touch()
    until(lambda: document("jobs", "used")["jobs"][0]["status"] == "SUCCEEDED", f"the end of {job}")


DRIVER = """
import pathlib, sys, threading, time, os
import ray

ray.init(logging_level="error", log_to_driver=False, namespace="mine")
print("connected", flush=True)
sys.stdin.readline()


@ray.remote(num_cpus=0)
class Keeper:
    def __init__(self, path):
        threading.Thread(target=self.watch, args=(path,), daemon=True).start()

    def watch(self, path):
        while not os.path.exists(path):
            time.sleep(0.1)
        os._exit(0)

    def ping(self):
        return "here"


keeper = Keeper.options(name="keeper", lifetime="detached").remote(sys.argv[1])
print(ray.get(keeper.ping.remote()), flush=True)
"""


def test_an_idle_driver_and_then_its_detached_actor_keep_it(used: Used, tmp_path: Path) -> None:
    (tmp_path / "driver.py").write_text(DRIVER)
    driver = subprocess.Popen(
        driver_words("used", tmp_path / "driver.py", tmp_path / "end"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert driver.stdout and driver.stdout.readline() == "connected\n"
    used.leave()
    used.must_live()  # the driver does nothing but be there
    used.touch()
    out, _ = driver.communicate("go on\n", timeout=PATIENCE_S)
    assert (out, driver.returncode) == ("here\n", 0)
    until(
        lambda: not [job for job in document("jobs", "used")["jobs"] if job["status"] == "RUNNING"], "its end"
    )
    used.leave()
    used.must_live()  # only the actor is left
    used.touch()
    (tmp_path / "end").touch()


def test_its_keepalive_file_keeps_it_and_then_it_ends(used: Used) -> None:
    used.must_live()
    assert (used.folder / "keepalive").exists()
    used.leave()
    assert why_it_ended("used").startswith("idle for ")
