"""What happens to pods of a cluster that goes on: they are replaced, restarted in place, or cannot get their image."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from contract.kube import CORE
from contract.kube_life import kube, life, pod_of, server, spec, states, typed
from contract.worlds import until
from fakes.kube import Kube
from heliostat.backends.kubernetes import backend as site
from heliostat.backends.kubernetes import states as kubernetes_states
from heliostat.cluster import log_collector
from heliostat.common.errors import DeadlineError, HeliostatError
from heliostat.state.states import ClusterState
from heliostat.state.store import Store

pytestmark = pytest.mark.needs_linux
PATIENCE_S = 120.0
__all__ = ["kube", "server"]  # fixtures


@pytest.mark.parametrize("node", ["head", "w1"])
def test_a_cluster_whose_pod_is_replaced_is_not_stopping(kube: Kube, home: Path, node: str) -> None:
    """A pod that ends stays for its grace period; the operator makes another as soon as it is gone."""
    old = pod_of(life(home).up(spec(nodes=2)), node)
    kube.control("merge", kind="pods", name=old, patch={"metadata": {"finalizers": ["test/hold"]}})
    try:
        assert kube.request("DELETE", f"{CORE}/pods/{old}")[0] == 200
        view = life(home).find("lab")
    finally:
        kube.control("merge", kind="pods", name=old, patch={"metadata": {"finalizers": None}})
    assert (view.state, states(view)[node]) == (ClusterState.STARTING, "STARTING")
    assert view.record.nodes[node].reason == "its pod terminates and is replaced"

    def back() -> bool:
        found = life(home).find("lab")
        return found.state is ClusterState.READY and pod_of(found, node) != old

    until(back, "another pod has taken its place")


# -- images


DNS = (
    'failed to do request: Head "https://registry.example.org/v2/ray/manifests/2.60.0": dial tcp: '
    "lookup registry.example.org on 10.0.0.2:53: no such host"
)


def test_a_node_whose_dns_fails_for_a_while(kube: Kube, home: Path) -> None:
    """The words of a resolver are not those of a registry: the kubelet goes on trying, and so do we."""
    kube.set(pull_failure=DNS, backoff=0.2)
    life(home).up(spec(nodes=2), wait=False)
    seen = set()

    def both() -> bool:
        view = life(home).find("lab")
        seen.add(states(view)["head"])
        reason = view.record.nodes["head"].reason
        seen.update(word for word in ("ErrImagePull", "ImagePullBackOff") if reason.startswith(word))
        return {"ErrImagePull", "ImagePullBackOff"} <= seen

    until(both, "both of the kubelet's reasons were seen")
    assert "FAILED" not in seen
    kube.set(pull_failure="")
    assert life(home).up(spec(nodes=2)).state is ClusterState.READY


def test_an_image_that_does_not_come(kube: Kube, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubernetes_states, "PULL_TIMEOUT_S", 1.0)
    with pytest.raises(HeliostatError, match="did not start") as caught:
        life(home).up(spec(kubernetes={"image": "rayproject/missing:1"}))
    assert "ImagePull" in caught.value.cause and "not found" in caught.value.cause
    assert kube.names("rayclusters") == []


def test_a_name_that_is_no_images(kube: Kube, home: Path) -> None:
    with pytest.raises(HeliostatError, match="did not start") as caught:
        life(home).up(spec(kubernetes={"image": "Ray Project:1"}))
    assert "InvalidImageName" in caught.value.cause and kube.names("rayclusters") == []


# -- a command in the pods


@pytest.mark.parametrize(
    ("argv", "code", "words"),
    [
        (["nosuchprogram", "-x"], 127, "nosuchprogram: not found"),
        (["/etc/passwd"], 126, "cannot execute: Permission denied"),
        (["sh", "-c", "exit 5"], 5, ""),
        (["printf", "%s|", "a b", "$HOME", "'"], 0, ""),
    ],
    ids=["no such program", "not a program", "its own code", "words as they are"],
)
def test_a_command_in_the_pods(
    kube: Kube, home: Path, capfd: pytest.CaptureFixture[str], argv: list[str], code: int, words: str
) -> None:
    """Where the runtime cannot start a program the kubelet answers without an exit code."""
    life(home).up(spec(nodes=2))
    capfd.readouterr()
    assert typed(["exec", "lab", "--", *argv]) == code
    said = capfd.readouterr()
    assert said.err.count(words) == (2 if words else said.err.count(words)), said.err
    assert code or said.out == "".join(f"{node} | a b|$HOME|'|\n" for node in ("head", "w1  "))


def test_a_shell_and_copies_in_a_pod(kube: Kube, home: Path, tmp_path: Path) -> None:
    """`ssh` with and without a terminal, and `cp` both ways: streams, exit codes, files."""
    life(home).up(spec(nodes=2))

    def heliostat(*words: str, code: int = 0, program: Sequence[str] = (), input: str = "") -> str:
        argv = [sys.executable, "-m", "heliostat", *words]
        argv = [*program, shlex.join(argv), "/dev/null"] if program else argv
        done = subprocess.run(
            argv, input=input, capture_output=True, text=True, cwd=tmp_path, timeout=PATIENCE_S
        )
        assert done.returncode == code, (done.stdout, done.stderr)
        return done.stdout + done.stderr

    assert (
        heliostat("ssh", "lab", "w1", "--", "sh", "-c", "cat; exit 6", code=6, input="typed\n") == "typed\n"
    )
    assert "not found" in heliostat("ssh", "--", "nosuchprogram", code=127)
    shown = heliostat("ssh", "lab", "w1", "--", "sh", "-c", "tty; stty size", program=("script", "-qec"))
    assert "/dev/pts/" in shown
    (tmp_path / "made" / "sub").mkdir(parents=True)
    (tmp_path / "made" / "sub" / "big").write_bytes(os.urandom(2_000_000))
    (tmp_path / "made" / "a").write_text("text")
    there = tmp_path / "there"
    assert "copied 2 files" in heliostat("cp", "made", f"lab:w1:{there}")
    assert (there / "sub" / "big").read_bytes() == (tmp_path / "made" / "sub" / "big").read_bytes()
    heliostat("cp", f"lab:w1:{there}/sub/big", "back")
    assert (tmp_path / "back").read_bytes() == (there / "sub" / "big").read_bytes()
    assert "no such file or directory: /nothing" in heliostat("cp", "lab:/nothing", ".", code=1)
    assert sorted(path.name for path in tmp_path.iterdir() if "cp" in path.name) == []


def test_a_container_that_cannot_run_anything_says_so(kube: Kube, home: Path, monkeypatch: Any) -> None:
    """An answer without an exit code has its sentence printed."""
    view = life(home).up(spec())
    monkeypatch.setattr(site, "SHELL", ("nosuchshell",))
    done = life(home).nodes.run("lab", ["true"])["head"]
    assert done.code == 255 and 'exec: "nosuchshell": executable file not found' in done.err
    assert view.state is ClusterState.READY


# -- a machine whose kubelet does not answer


@pytest.mark.parametrize("kind", ["up", "run"])
def test_a_kubelet_that_hangs_does_not_keep_the_rest(
    kube: Kube, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Logs are asked for, for a short time; then all is deleted, and what hangs is named with the way to end it."""
    told: list[str] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(log_collector, "COLLECT_S", 1.0)
    if kind == "up":
        life(home).up(spec(nodes=2))
    else:
        command = {"argv": ["sleep", "600"], "cwd": str(tmp_path), "text": "sleep 600"}
        life(home).run(spec(nodes=2), command, lambda *_: None, detach=True)
    pods = kube.names("pods")
    kube.set(frozen=True)
    with monkeypatch.context() as patient:
        patient.setattr(site, "DELETE_TIMEOUT_S", 2.0)
        with pytest.raises(DeadlineError, match="`ml/lab` was not deleted completely") as caught:
            life(home, told).down("lab")
    assert kube.names("rayclusters") == kube.names("rayjobs") == []
    assert caught.value.hint == "heliostat down lab --now"
    assert all(pod in caught.value.cause for pod in pods) and "node-1" in caught.value.cause
    late = next(line for line in told if line.startswith("not copied within 1 s"))
    assert "the logs of head" in late and "the logs of w1" in late
    assert life(home).down("lab", now=True).state is ClusterState.ENDED  # a command of its own
    assert kube.names("pods") == []


def test_a_kubelet_that_hangs_and_down_now(kube: Kube, home: Path) -> None:
    """No log is asked for then."""
    life(home).up(spec(nodes=2))
    kube.set(frozen=True)
    assert life(home).down("lab", now=True).state is ClusterState.ENDED
    assert kube.names("pods") == []


# -- a container that is restarted in place


def restarted(kube: Kube, home: Path, times: int, reason: str = "OOMKilled", code: int = 137) -> str:
    """The container of w1 ends and the kubelet starts it again in its pod, so often; the pod's name."""
    pod = pod_of(life(home).find("lab"), "w1")
    kube.set(backoff=0.1)
    for count in range(1, times + 1):
        kube.control("kill", pod=pod, reason=reason, code=code)

        def again(count: int = count) -> bool:
            status = next(p for p in kube.objects("pods") if p["metadata"]["name"] == pod)["status"]
            row = status["containerStatuses"][0]
            return row["restartCount"] == count and row["ready"]

        until(again, f"restart {count}")
        until(lambda: states(life(home).find("lab"))["w1"] == "READY", "w1 is ready again")
    return pod


def test_a_restart_in_place_is_shown(kube: Kube, home: Path, capfd: pytest.CaptureFixture[str]) -> None:
    life(home).up(spec(nodes=2))
    pod = restarted(kube, home, 2)
    words = "its container was restarted 2 times: it ended with code 137, OOMKilled"
    assert life(home).find("lab").record.nodes["w1"].reason == words
    assert pod_of(life(home).find("lab"), "w1") == pod
    capfd.readouterr()
    assert typed(["status", "lab"]) == 0
    line = next(line for line in capfd.readouterr().out.splitlines() if line.startswith("w1 "))
    assert " ready " in line and words in line
    rows = life(home).status("lab")["nodes"]
    assert [row.get("restarts") for row in rows] == [None, 2]


def test_a_restart_that_nobody_saw_is_an_event_once(kube: Kube, home: Path) -> None:
    """It may be over between two looks: then the node was READY before and after."""
    life(home).up(spec(nodes=2))
    pod = pod_of(life(home).find("lab"), "w1")
    kube.set(backoff=0.05)
    kube.control("kill", pod=pod, reason="OOMKilled", code=137)

    def again() -> bool:
        status = next(p for p in kube.objects("pods") if p["metadata"]["name"] == pod)["status"]
        return status["containerStatuses"][0]["restartCount"] == 1 and status["containerStatuses"][0]["ready"]

    until(again, "it runs again")
    told: list[str] = []
    for _ in range(3):
        life(home, told).find("lab")
    text = "w1: its container was restarted once: it ended with code 137, OOMKilled"
    events = [event.get("text") for event in Store(home).open("lab").events()]
    assert events.count(text) == 1 and sum(text in line for line in told) == 1, (events, told)


def test_each_life_of_a_container_has_its_log(kube: Kube, home: Path) -> None:
    view = life(home).up(spec(nodes=2))
    life(home).refresh(view.folder, "w1")
    restarted(kube, home, 2)
    life(home).refresh(view.folder, "w1")
    logs = {path.name: path.read_text() for path in (view.folder.logs / "w1").iterdir()}
    assert set(logs) == {"ray-worker.log", "ray-worker.restart-1.log", "ray-worker.restart-2.log"}
    assert set(logs.values()) == {"the fake: ray start, and nothing behind it\n"}, logs
    life(home).refresh(view.folder, "w1")
    assert logs == {path.name: path.read_text() for path in (view.folder.logs / "w1").iterdir()}, "once each"


def test_the_kubelets_error_is_not_taken_for_a_log(kube: Kube, home: Path) -> None:
    """With timestamps asked for, a line without one is not the container's."""
    view = life(home).up(spec(nodes=2))
    restarted(kube, home, 1)
    kube.set(logs_lost=True)
    life(home).refresh(view.folder, "w1")
    texts = [path.read_text() for path in (view.folder.logs / "w1").iterdir()]
    assert texts and not [text for text in texts if "unable to retrieve" in text]
