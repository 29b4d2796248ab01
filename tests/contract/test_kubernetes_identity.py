"""Objects are known by their uid: what somebody else made under our name is never deleted, suspended or changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from contract.kube import CLUSTERS, CORE, JOBS, cluster, create, get, job
from contract.kube_life import kube, life, pod_of, server, spec, states, typed
from contract.worlds import until
from fakes.kube import Kube
from heliostat.common.errors import NotFoundError
from heliostat.state.states import ClusterState
from heliostat.state.store import Store

pytestmark = pytest.mark.needs_linux
__all__ = ["kube", "server"]  # fixtures


def delete(kube: Kube, path: str) -> None:
    """As another person does it, without a precondition; returns when nothing of it is left."""
    assert kube.request("DELETE", path)[0] == 200
    until(lambda: not kube.names("rayclusters") and not kube.names("rayjobs"), "it is gone")
    until(lambda: not kube.names("pods") and not kube.names("secrets"), "and what it owned")


def recreate(kube: Kube, path: str = CLUSTERS) -> dict[str, Any]:
    """Somebody deletes ours and makes another object of that name; theirs, once all its pods run."""
    delete(kube, f"{path}/lab")
    theirs = cluster("lab") if path == CLUSTERS else job("lab")
    made = create(kube, theirs, path)
    until(
        lambda: [p["status"].get("phase") for p in kube.objects("pods")] == ["Running"] * 2, "their pods run"
    )
    return made


def untouched(kube: Kube, theirs: dict[str, Any], path: str = CLUSTERS) -> None:
    """Theirs is there, nobody has asked for its end, and its pods are those that it had."""
    found = get(kube, "lab", path)
    assert found["metadata"]["uid"] == theirs["metadata"]["uid"]
    assert "deletionTimestamp" not in found["metadata"] and found["spec"] == theirs["spec"]
    pods = kube.objects("pods")
    assert len(pods) == 2 and not any("deletionTimestamp" in pod["metadata"] for pod in pods)


@pytest.fixture
def theirs_goes(kube: Kube) -> Any:
    """What the test made in somebody else's name goes at the end, before the check for leftovers."""
    yield
    for path in (JOBS, CLUSTERS):
        if kube.request("GET", f"{path}/lab")[0] == 200:
            delete(kube, f"{path}/lab")


@pytest.mark.parametrize("now", [False, True], ids=["down", "down --now"])
def test_down_leaves_another_cluster_of_the_same_name(
    kube: Kube, home: Path, now: bool, theirs_goes: None
) -> None:
    life(home).up(spec(nodes=2))
    theirs = recreate(kube)
    assert life(home).down("lab", now=now).state in (ClusterState.ENDED, ClusterState.FAILED)
    untouched(kube, theirs)
    assert Store(home).names() == []


@pytest.mark.parametrize("now", [False, True], ids=["down", "down --now"])
def test_down_leaves_a_cluster_that_another_computer_made(
    kube: Kube, home: Path, tmp_path: Path, now: bool
) -> None:
    life(home).up(spec(nodes=2))
    elsewhere = tmp_path / "elsewhere"
    life(elsewhere).up(spec(nodes=2))  # takes it over
    life(elsewhere).down("lab")
    again = life(elsewhere).up(spec(nodes=2))
    life(home).down("lab", now=now)
    found = life(elsewhere).find("lab")
    assert found.state is ClusterState.READY and found.record.id == again.record.id
    assert {node: pod_of(found, node) for node in states(found)} == {
        node: pod_of(again, node) for node in states(again)
    }
    life(elsewhere).down("lab")


def test_pods_of_another_owner_are_not_ended(kube: Kube, home: Path) -> None:
    """A pod may have the label of our cluster and belong to somebody else."""
    life(home).up(spec())
    ours = kube.objects("pods")[0]
    stranger = {
        "metadata": {"name": "stranger", "labels": ours["metadata"]["labels"]},
        "spec": {"containers": [{"name": "main", "image": "bash", "command": ["sleep", "600"]}]},
    }
    assert kube.request("POST", f"{CORE}/pods", stranger)[0] == 201
    life(home).down("lab", now=True)
    assert kube.names("pods") == ["stranger"]
    kube.request("DELETE", f"{CORE}/pods/stranger?gracePeriodSeconds=0")
    until(lambda: not kube.names("pods"), "it is gone")


def test_every_delete_names_the_uid(kube: Kube, home: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    life(home).up(spec(nodes=2))
    life(home).scaling.restart_node("lab", "w1")
    life(home).down("lab", now=True)
    assert life(home).run(spec(name="once"), COMMAND, lambda *_: None) == 0
    asked = [
        r for r in kube.control("requests") if r["verb"] == "delete" and r["resource"] != "services/proxy"
    ]
    assert {r["resource"] for r in asked} == {"pods", "rayclusters", "rayjobs"}
    assert all(r["options"].get("preconditions", {}).get("uid") for r in asked), asked


COMMAND: dict[str, Any] = {"argv": ["true"], "cwd": "/", "text": "true"}
SLEEPS: dict[str, Any] = {"argv": ["sleep", "600"], "cwd": "/", "text": "sleep 600"}


@pytest.mark.parametrize("verb", ["ls", "status", "down"])
def test_another_run_of_the_same_name_is_left(
    kube: Kube, home: Path, tmp_path: Path, monkeypatch: Any, verb: str, theirs_goes: None
) -> None:
    """`ls` puts an ended `run` into the history and deletes its RayJob: ours, never the one that has its name."""
    monkeypatch.chdir(tmp_path)
    life(home).run(spec(nodes=2), SLEEPS, lambda *_: None, detach=True)
    theirs = recreate(kube, JOBS)
    life(home)  # a command of its own
    typed([verb, *(() if verb == "ls" else ("lab",))])
    untouched(kube, theirs, JOBS)


def test_keep_does_not_suspend_another_cluster(kube: Kube, home: Path, theirs_goes: None) -> None:
    """The patch carries a `test` of the uid: the server applies all of it or nothing."""
    life(home).up(spec(nodes=2))
    theirs = recreate(kube)
    with pytest.raises(NotFoundError, match="`ml/lab` does not exist any more") as caught:
        life(home).suspend("lab")
    assert "another RayCluster has its name" in caught.value.cause
    untouched(kube, theirs)


@pytest.mark.parametrize("patched", ["suspend", "scale"])
def test_another_cluster_that_appears_in_between_is_not_changed(
    kube: Kube, home: Path, monkeypatch: Any, patched: str, theirs_goes: None
) -> None:
    """Between our look and our patch ours goes and theirs comes: only a check by the server itself can see that."""
    from heliostat.backends.kubernetes import api as kubernetes_api

    life(home).up(spec(nodes=2))
    looker, call, made = life(home), kubernetes_api.Api.call, []

    def late(api: Any, method: str, path: str, *more: Any, **named: Any) -> Any:
        if method == "PATCH" and not made:
            made.append(recreate(kube))
        return call(api, method, path, *more, **named)

    monkeypatch.setattr(kubernetes_api.Api, "call", late)
    with pytest.raises(NotFoundError, match="does not exist any more"):
        looker.suspend("lab") if patched == "suspend" else looker.scaling.scale("lab", 3)
    untouched(kube, made[0])
