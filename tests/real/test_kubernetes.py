"""Kubernetes with real Ray: behind the fake for its API server and KubeRay, or on the real cluster that
HELIOSTAT_KUBECONFIG names (its current context, and the namespace of that)."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import heliostat as api
from fakes.kube import Kube
from shared import PATIENCE_S, document, heliostat, nothing_left, private_home, until

pytestmark = [pytest.mark.needs_ray, pytest.mark.needs_linux]
NAME = "lab"
REAL = os.environ.get("HELIOSTAT_KUBECONFIG", "")  # before a private home takes it away


@pytest.fixture(scope="module")
def home() -> Iterator[Path]:
    with private_home() as path:
        yield path


@pytest.fixture(scope="module", params=["fake", *(["real"] if REAL else [])])
def kube(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kube | None]:
    """None: a real cluster, where only what a person sees can be asked for."""
    before = os.environ.get("KUBECONFIG")
    if request.param == "real":
        os.environ["KUBECONFIG"] = REAL
        yield None
    else:
        ray = str(Path(sys.executable).parent / "ray")
        with Kube(tmp_path_factory.mktemp("kube"), "--tls", "--ray-bin", ray) as made:
            os.environ["KUBECONFIG"] = str(made.kubeconfig)
            yield made
    os.environ.pop("KUBECONFIG")
    if before:
        os.environ["KUBECONFIG"] = before


@pytest.fixture(scope="module", autouse=True)
def no_leaks(home: Path, kube: Kube | None) -> Iterator[None]:
    with nothing_left(home):
        yield
        if kube:  # what the operator deletes goes a little later
            kinds = ("rayclusters", "rayjobs", "pods", "secrets")
            until(
                lambda: not any(kube.names(kind, namespace="ml") for kind in kinds), "nothing is left there"
            )


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file that serves every site: only `on` and a site's own table are of one of them."""
    path = tmp_path_factory.mktemp("file") / "heliostat.yaml"
    size = {"cpus_per_node": 1, "memory_per_node": "1G", "object_store": "100M"}
    path.write_text(yaml.safe_dump({"name": NAME, "on": "kubernetes", "nodes": 2, **size}))
    return path


@pytest.fixture(scope="module")
def cluster(home: Path, kube: Kube | None, file: Path, no_leaks: None) -> Iterator[str]:
    up = heliostat("up", str(file))
    yield up.stdout.strip()
    if (home / "clusters" / NAME).exists():
        heliostat("down", NAME)


def state(node: str) -> dict[str, Any]:
    return next(n for n in document("status", NAME)["nodes"] if n["name"] == node)


def own(text: str) -> list[str]:
    """Without Ray's own lines."""
    return [line for line in text.splitlines() if not re.search(r"INFO |Running entrypoint", line)]


def test_up_gives_the_address_alone_and_ray_knows_the_nodes(cluster: str) -> None:
    assert re.fullmatch(r"ray://lab-head-svc\.[\w-]+\.svc:10001", cluster)
    found = document("status", NAME)
    assert (found["state"], found["problem"]) == ("ready", "")
    assert [(n["name"], n["resources"]["CPU"]) for n in found["nodes"]] == [("head", [0, 1]), ("w1", [0, 1])]


def test_a_job_with_this_folder(cluster: str, tmp_path: Path) -> None:
    (tmp_path / "data.txt").write_text("forty-two")
    (tmp_path / "work.py").write_text(
        "import ray, sys\nray.init()\n"
        "@ray.remote(num_cpus=1)\ndef where():\n    import time; time.sleep(1)\n"
        "    return ray.util.get_node_ip_address()\n"
        "print(len(set(ray.get([where.remote() for _ in range(4)]))), open('data.txt').read())\nsys.exit(5)\n"
    )
    folder = str(tmp_path)
    done = heliostat("submit", NAME, "--wait", "--working-dir", folder, "--", "python", "work.py", code=5)
    assert own(done.stdout)[-1] == "2 forty-two", "on both nodes, and with what lies beside it"
    job = document("jobs", NAME)["jobs"][0]
    assert (job["status"], job["exit_code"]) == ("FAILED", 5)
    assert own(heliostat("logs", NAME, job["id"]).stdout)[-1] == "2 forty-two"


def test_a_job_is_followed_and_stopped(cluster: str) -> None:
    job = heliostat("submit", NAME, "--", "sh", "-c", "echo begun; sleep 600").stdout.strip()
    until(lambda: "begun" in heliostat("logs", NAME, job).stdout, "its first words")
    heliostat("stop", NAME, job)
    until(lambda: document("jobs", NAME)["jobs"][0]["status"] == "STOPPED", "it has stopped")


def test_from_python(cluster: str) -> None:
    found = api.connect(NAME)
    job = found.submit("echo $((40 + 2))")
    assert "42" in list(job.logs(follow=True)) and job.wait() == 0


def test_the_dashboard(cluster: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = api.connect(NAME)
    resolve = socket.getaddrinfo  # a browser resolves names under `localhost` by itself
    monkeypatch.setattr(
        socket,
        "getaddrinfo",
        lambda host, *more, **options: resolve(
            "127.0.0.1" if host.endswith(".localhost") else host, *more, **options
        ),
    )
    opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
    try:
        page = opener.open(found.dashboard(), timeout=PATIENCE_S).read().decode()
        assert "Ray Dashboard" in page
    finally:
        found.close()


def test_commands_and_logs_of_the_nodes(cluster: str) -> None:
    done = heliostat("exec", NAME, "--", "sh", "-c", "echo here; exit 4", code=4)
    assert done.stdout.split("\n")[:2] == ["head | here", "w1   | here"]
    said = heliostat("logs", NAME, "head").stdout
    assert "==> ray-head.log <==" in said and "==> gcs_server.out <==" in said


def test_env(cluster: str, home: Path) -> None:
    said = heliostat("env", NAME).stdout
    assert f"RAY_ADDRESS={cluster}" in said.replace("'", "")
    assert str(home / "clusters" / NAME / "token") in said


def test_scale_up_and_down(cluster: str) -> None:
    heliostat("scale", NAME, "2")
    assert {n["name"]: n["state"] for n in document("status", NAME)["nodes"]} == dict.fromkeys(
        ("head", "w1", "w2"), "READY"
    )
    heliostat("scale", NAME, "1")
    assert {n["name"] for n in document("status", NAME)["nodes"]} == {"head", "w1"}


def test_ray_that_dies_in_its_pod_comes_back(cluster: str, kube: Kube | None) -> None:
    if kube is None:
        heliostat("restart", NAME, "--node", "w1")
    else:
        old = next(n for n in kube.objects("pods") if n["metadata"]["labels"]["ray.io/node-type"] == "worker")
        kube.control("evict", pod=old["metadata"]["name"])
        until(lambda: old["metadata"]["name"] not in kube.names("pods"), "its pod is gone")
    until(lambda: state("w1")["state"] == "READY", "w1 is in Ray's table again")


def test_down_leaves_nothing_but_the_history(cluster: str, home: Path, kube: Kube | None) -> None:
    job = document("jobs", NAME)["jobs"][-1]["id"]
    heliostat("down", NAME)
    assert kube is None or (kube.names("rayclusters") == [] and kube.names("pods") == [])
    assert "2 forty-two" in heliostat("logs", NAME, job).stdout, "a job's output outlives its cluster"
    assert "raylet" in heliostat("logs", NAME, "w1").stdout
    assert not list(home.glob("history/*/token"))


# -- one command


@pytest.fixture
def words(file: Path) -> list[str]:
    return ["-f", str(file), "--nodes", "1"]


def test_run(kube: Kube | None, words: list[str], tmp_path: Path, home: Path) -> None:
    (tmp_path / "work.py").write_text("import sys\nprint('said', sys.argv[1])\nsys.exit(7)\n")
    done = heliostat("run", "--name", "once", *words, "work.py", "so", code=7, cwd=tmp_path)
    assert own(done.stdout) == ["said so"]
    assert heliostat("ls").stdout == "" and "said so" in heliostat("logs", "once", "run").stdout
    record = next(r for r in document("history")["history"] if r["name"] == "once")
    assert record["exit_code"] == 7
    assert kube is None or kube.names("rayjobs") == []


SAVES = """
import signal, sys, time
def save(*_):
    print("saved", flush=True)
    sys.exit(9)
signal.signal(signal.SIGTERM, save)
print("begun", flush=True)
time.sleep(600)
"""


def begun(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if "begun" in line:
            return
    pytest.fail(f"it never began: {process.stderr.read() if process.stderr else ''}")


def test_ctrl_c_lets_the_script_save_and_releases(
    kube: Kube | None, words: list[str], tmp_path: Path, spawn_cli: Callable[..., subprocess.Popen[str]]
) -> None:
    (tmp_path / "work.py").write_text(SAVES)
    process = spawn_cli("run", "--name", "stopped", *words, "work.py", cwd=tmp_path)
    begun(process)
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130 and "saved" in out and "`stopped` is released" in err
    assert kube is None or kube.names("rayjobs") == []


def test_the_time_limit_lets_the_script_save(kube: Kube | None, words: list[str], tmp_path: Path) -> None:
    (tmp_path / "work.py").write_text(SAVES)
    done = heliostat("run", "--name", "limited", *words, "--time", "60s", "work.py", code=124, cwd=tmp_path)
    assert own(done.stdout) == ["begun", "saved"] and "its time limit of 1m has passed" in done.stderr
    assert kube is None or kube.names("rayjobs") == []


def test_a_run_whose_command_is_killed_is_ended_by_the_operator(
    kube: Kube | None, words: list[str], tmp_path: Path, spawn_cli: Callable[..., subprocess.Popen[str]]
) -> None:
    gate = tmp_path / "gate"
    (tmp_path / "work.py").write_text(
        f"import os, time\nprint('begun', flush=True)\nwhile not os.path.exists({str(gate)!r}): time.sleep(0.2)\n"
        if kube
        else "import time\nprint('begun', flush=True)\ntime.sleep(5)\n"
    )
    process = spawn_cli("run", "--name", "orphan", *words, "work.py", cwd=tmp_path)
    begun(process)
    process.kill()
    process.wait()
    assert document("ls")["clusters"][0]["state"] == "ready"
    if kube:  # nobody waits a minute for a clock: the operator's own patience is shortened
        kube.control("merge", kind="rayjobs", name="orphan", patch={"spec": {"ttlSecondsAfterFinished": 1}})
    gate.touch()
    until(lambda: not document("ls")["clusters"], "the operator has ended it, and the next look sees that")
    record = next(r for r in document("history")["history"] if r["name"] == "orphan")
    assert record["exit_code"] == 0
    assert kube is None or kube.names("rayjobs") == []
