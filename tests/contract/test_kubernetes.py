"""What a cluster on Kubernetes does, and does when things go wrong: against the fake, which has no Ray behind it here."""

from __future__ import annotations

import base64
import json
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from contract.kube_life import ROOM, kube, lacks, life, pod_of, server, spec, states, typed
from contract.worlds import until
from fakes.kube import Kube
from heliostat.backends.kubernetes import backend as site
from heliostat.backends.kubernetes import states as kubernetes_states
from heliostat.backends.kubernetes import watch as kubernetes_watch
from heliostat.cluster import planner
from heliostat.cluster.manager import ClusterManager
from heliostat.common.errors import (
    HeliostatError,
    Interrupted,
    NotFoundError,
    PartialFailure,
    Refused,
    UsageError,
)
from heliostat.common.events import Event
from heliostat.config.spec import ClusterSpec
from heliostat.state.states import ClusterState
from heliostat.state.store import Store

pytestmark = pytest.mark.needs_linux
__all__ = ["kube", "server"]  # fixtures


# -- the way there and back


def test_up_and_down(kube: Kube, home: Path) -> None:
    told: list[str] = []
    view = life(home, told).up(spec(nodes=3))
    assert view.state is ClusterState.READY and states(view) == dict.fromkeys(("head", "w1", "w2"), "READY")
    assert view.address == "ray://lab-head-svc.ml.svc:10001"
    assert kube.names("rayclusters") == ["lab"]
    assert sorted(pod_of(view, node) for node in view.record.nodes) == sorted(kube.names("pods"))
    status = life(home).status("lab")
    assert [node["resources"]["CPU"] for node in status["nodes"]] == [[0, 2]] * 3
    assert all(node["ip"] and node["native_id"] == "ml/lab" for node in status["nodes"])
    assert status["problem"] == "" and status["ray_version"] == "2.60.0"
    ended = life(home).down("lab")
    assert ended.state is ClusterState.ENDED and kube.names("rayclusters") == kube.names("pods") == []
    assert (ended.folder.logs / "w1" / "ray-worker.log").read_text()


def test_the_token_is_the_operators_and_is_nowhere_else(
    kube: Kube, home: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    view = life(home).up(spec())
    token = base64.b64decode(kube.objects("secrets")[0]["data"]["auth_token"]).decode()
    assert view.folder.read_token() == token and stat.S_IMODE(view.folder.token.stat().st_mode) == 0o600
    for verb in (["status", "lab"], ["--json", "status", "lab"], ["env", "lab"], ["logs", "lab"], ["ls"]):
        assert typed(verb) == 0
    said = capfd.readouterr()
    files = [path for path in view.folder.path.rglob("*") if path.is_file() and path != view.folder.token]
    everything = said.out + said.err + "".join(path.read_text(errors="replace") for path in files)
    assert token not in everything and "lab-token" not in everything
    assert f"RAY_AUTH_TOKEN_PATH={view.folder.token}" in said.out.replace("'", "")


def test_without_authentication(kube: Kube, home: Path) -> None:
    view = life(home).up(spec(security={"auth": "none"}))
    assert view.state is ClusterState.READY and kube.names("secrets") == []


def test_up_again_changes_nothing(kube: Kube, home: Path) -> None:
    first = life(home).up(spec(nodes=2))
    kube.control("requests", clear=True)
    again = life(home).up(spec(nodes=2))
    assert again.record.handles == first.record.handles
    assert [r for r in kube.control("requests") if r["verb"] in ("create", "patch", "delete")] == []
    with pytest.raises(HeliostatError, match="the name `lab` is in use"):
        life(home).up(spec(nodes=3))


def test_up_without_waiting(kube: Kube, home: Path) -> None:
    wanted = spec(nodes=2, gpus_per_node=1)
    assert life(home).up(wanted, wait=False).state is ClusterState.QUEUED
    kube.set(capacity=ROOM)
    assert life(home).up(wanted).state is ClusterState.READY


def test_a_foreign_cluster_of_that_name_is_left_alone(kube: Kube, home: Path, tmp_path: Path) -> None:
    theirs = yaml.safe_load(planner.plan(life(home).access.cluster_dir(spec(), "0"), spec())[1].files[0].text)
    assert kube.request("POST", "/apis/ray.io/v1/namespaces/ml/rayclusters", theirs)[0] == 201
    with pytest.raises(HeliostatError, match="the name `lab` is in use in the namespace `ml`"):
        life(home).up(spec())
    assert kube.names("rayclusters") == ["lab"]
    assert kube.request("DELETE", "/apis/ray.io/v1/namespaces/ml/rayclusters/lab")[0] == 200
    until(lambda: not kube.names("pods") and not kube.names("secrets"), "theirs is gone")


def test_groups_and_one_of_them_scaled(kube: Kube, home: Path) -> None:
    view = life(home).up(spec(groups={"big": {"nodes": 1, "cpus": 8}, "small": {"nodes": 2}}))
    assert set(states(view)) == {"head", "big-1", "small-1", "small-2"}
    view = life(home).scaling.scale("lab", 3, "big")
    assert set(states(view)) == {"head", "big-1", "big-2", "big-3", "small-1", "small-2"}
    assert view.state is ClusterState.READY
    with pytest.raises(UsageError, match="no group of `lab` is named"):
        life(home).scaling.scale("lab", 3)
    with pytest.raises(UsageError, match="has no group `odd`"):
        life(home).scaling.scale("lab", 3, "odd")
    view = life(home).scaling.scale("lab", 0, "small")
    assert set(states(view)) == {"head", "big-1", "big-2", "big-3"}


def test_scale_up_and_down_and_up(kube: Kube, home: Path) -> None:
    life(home).up(spec(nodes=2))
    for workers in (3, 1, 2):
        view = life(home).scaling.scale("lab", workers)
        assert set(states(view)) == {"head", *(f"w{i}" for i in range(1, workers + 1))}
        assert view.state is ClusterState.READY and len(kube.names("pods")) == workers + 1
    assert life(home).up(spec(nodes=3)).state is ClusterState.READY  # the file says by now what runs


def test_nodes_come_and_go_with_demand(kube: Kube, home: Path) -> None:
    wanted = spec(autoscale={"min": 1, "max": 4})
    view = life(home).up(wanted)
    assert set(states(view)) == {"head", "w1"}
    kube.control("scale", cluster="lab", group="workers", replicas=3)
    until(lambda: len([s for s in states(life(home).find("lab")).values() if s == "READY"]) == 4, "two more")
    found = life(home).find("lab")
    assert set(states(found)) == {"head", "w1", "w2", "w3"} and found.state is ClusterState.READY
    gone = pod_of(found, "w2")
    kube.control("scale", cluster="lab", group="workers", replicas=2, delete=[gone])
    until(
        lambda: set(states(life(home).find("lab"))) == {"head", "w1", "w3"}, "w2 has left, and is not missed"
    )
    assert life(home).up(wanted).state is ClusterState.READY
    with pytest.raises(UsageError, match="the autoscaler sets the number of nodes"):
        life(home).scaling.scale("lab", 3)


def test_nobody_can_join(kube: Kube, home: Path) -> None:
    life(home).up(spec())
    with pytest.raises(UsageError, match="no node can join `lab`"):
        life(home).joins.join("lab", spec(), None)


def test_put_away_and_brought_back(kube: Kube, home: Path) -> None:
    first = life(home).up(spec(nodes=2))
    view = life(home).suspend("lab")
    assert view.state is ClusterState.SUSPENDED and kube.names("pods") == [] and view.address is None
    assert life(home).find("lab").state is ClusterState.SUSPENDED
    with pytest.raises(HeliostatError, match="is suspended, so it cannot be used"):
        life(home).scaling.scale("lab", 3)
    again = life(home).up(spec(nodes=2))
    assert again.state is ClusterState.READY and again.record.id == first.record.id
    life(home).scaling.scale("lab", 2)
    life(home).suspend("lab")
    back = life(home).up(spec(nodes=2))  # the file as it was: it comes back as it is
    assert set(states(back)) == {"head", "w1", "w2"}
    life(home).suspend("lab")
    assert life(home).down("lab").state is ClusterState.ENDED


def test_what_the_file_asks_for_and_nobody_does_is_said(kube: Kube, home: Path) -> None:
    told: list[str] = []
    life(home, told).up(spec(idle={"timeout": "1h"}, time="2:00:00"))
    assert sum("does not stop a cluster on `kubernetes`" in line for line in told) == 2


def test_only_a_platform_keeps(home: Path, kube: Kube, capfd: pytest.CaptureFixture[str]) -> None:
    assert typed(["down", "lab", "--keep", "--now"]) == 2
    assert "exclude each other" in capfd.readouterr().err
    assert typed(["down", "lab", "--keep"]) == 5


def test_restart_a_node_and_the_whole(kube: Kube, home: Path) -> None:
    view = life(home).up(spec(nodes=3))
    others = {node: pod_of(view, node) for node in ("head", "w2")}
    old = pod_of(view, "w1")
    view = life(home).scaling.restart_node("lab", "w1")
    assert states(view) == dict.fromkeys(("head", "w1", "w2"), "READY") and pod_of(view, "w1") != old
    assert {node: pod_of(view, node) for node in others} == others
    with pytest.raises(UsageError, match="is the head of `lab`"):
        life(home).scaling.restart_node("lab", "head")
    again = life(home).restart("lab")
    assert again.state is ClusterState.READY and again.record.id != view.record.id


def test_found_again_from_another_computer(kube: Kube, home: Path, tmp_path: Path) -> None:
    first = life(home).up(spec(nodes=2))
    elsewhere = tmp_path / "elsewhere"
    found = life(elsewhere).up(spec(nodes=2))
    assert found.record.id == first.record.id and found.folder.read_token() == first.folder.read_token()
    life(elsewhere).down("lab")
    gone = life(home).find("lab")
    assert gone.state is ClusterState.FAILED and "deleted" in gone.record.nodes["head"].reason


def test_a_native_id_names_its_cluster(kube: Kube, home: Path) -> None:
    life(home).up(spec())
    assert life(home).find("ml/lab").record.name == "lab"


def test_two_clusters_know_nothing_of_each_other(kube: Kube, home: Path) -> None:
    one = life(home).up(spec(name="one", nodes=2))
    two = life(home).up(spec(name="two", nodes=2))
    life(home).down("one")
    assert one.record.id != two.record.id
    assert life(home).find("two").state is ClusterState.READY and len(kube.names("pods")) == 2


def test_logs_and_commands_on_the_nodes(kube: Kube, home: Path, capfd: pytest.CaptureFixture[str]) -> None:
    life(home).up(spec(nodes=2))
    assert typed(["logs", "lab", "w1"]) == 0
    assert "==> ray-worker.log <==" in capfd.readouterr().out
    done = life(home).nodes.run("lab", ["sh", "-c", "echo out; echo err >&2; exit 3"])
    assert {(d.code, d.out, d.err) for d in done.values()} == {(3, "out\n", "err\n")} and len(done) == 2
    with pytest.raises(NotFoundError, match="has no node `w7`"):
        life(home).nodes.run("lab", ["true"], "w7")


def test_what_a_dry_run_prints_is_taken_as_it_is(
    kube: Kube, home: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "lab.yaml"
    file.write_text(json.dumps({"name": "lab", "on": "kubernetes", "nodes": 2, "autoscale": {"max": 3}}))
    for verb, kind in (
        (["up", str(file)], "rayclusters"),
        (["run", "-f", str(file), "--", "true"], "rayjobs"),
    ):
        assert typed([*verb[:1], "--dry-run", *verb[1:]]) == 0
        document = yaml.safe_load(capfd.readouterr().out)
        place = f"/apis/ray.io/v1/namespaces/ml/{kind}?fieldValidation=Strict&dryRun=All"
        code, answer = kube.request("POST", place, document)
        assert code == 201, answer
    assert list(home.iterdir()) == [] and kube.names("rayclusters") == []


def test_doctor(kube: Kube, home: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "lab.yaml"
    file.write_text("{on: kubernetes, kubernetes: {namespace: ml}}")
    assert typed(["doctor", str(file)]) == 0
    assert "ok    your role: it has all needed permissions in `ml`" in capfd.readouterr().out
    kube.control("rules", user="lab", rules=[{"resources": ["rayclusters", "rayjobs"]}])
    assert typed(["doctor", str(file)]) == 1
    assert "missing in `ml`: get, list, watch, delete pods; get pods/log;" in capfd.readouterr().out
    kube.set(crds=False)
    assert typed(["doctor", str(file)]) == 1
    assert "KubeRay is not installed" in capfd.readouterr().out


# -- the other party says no


def test_the_rights_that_are_printed_are_enough(kube: Kube, home: Path) -> None:
    lacks(kube, "", "", "")
    view = life(home).up(spec(nodes=2))
    life(home).scaling.scale("lab", 2)
    life(home).scaling.restart_node("lab", "w1")
    life(home).nodes.run("lab", ["true"])
    life(home).refresh(view.folder, "w1")
    life(home).suspend("lab")
    life(home).up(spec(nodes=3))
    life(home).down("lab")


def test_credentials_that_are_none(kube: Kube, home: Path) -> None:
    with pytest.raises(Refused, match="rejected your credentials"):
        life(home).up(spec(kubernetes={"context": "expired"}))
    with pytest.raises(UsageError, match="unknown Kubernetes context `nowhere`"):
        life(home).up(spec(kubernetes={"context": "nowhere"}))
    assert Store(home).names() == [] and kube.names("rayclusters") == []


def test_nothing_listens(kube: Kube, home: Path, tmp_path: Path) -> None:
    document = yaml.safe_load(kube.kubeconfig.read_text())
    document["clusters"][0]["cluster"]["server"] = "https://127.0.0.1:9"
    path = tmp_path / "kubeconfig"
    path.write_text(yaml.safe_dump(document))
    with pytest.raises(HeliostatError, match="does not answer") as caught:
        life(home).up(spec(kubernetes={"kubeconfig": str(path)}))
    assert "refused" in caught.value.cause.lower() and Store(home).names() == []


def test_without_kuberay(kube: Kube, home: Path) -> None:
    kube.set(crds=False)
    with pytest.raises(Refused, match="KubeRay is not installed") as caught:
        life(home).up(spec())
    assert "kubectl create -k" in caught.value.hint and Store(home).names() == []


def test_without_an_operator(kube: Kube, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kube.set(operator=False)
    monkeypatch.setattr(site, "OPERATOR_TIMEOUT_S", 0.0)
    life(home).up(spec(), wait=False)
    reason = life(home).find("lab").record.nodes["head"].reason
    assert "operator has not processed it" in reason


def test_an_unknown_field_is_refused_by_the_server(kube: Kube, home: Path) -> None:
    with pytest.raises(Refused) as caught:
        life(home).up(spec(kubernetes={"cluster": {"numWorkers": 2}}))
    assert 'unknown field "spec.numWorkers"' in caught.value.cause
    assert kube.names("rayclusters") == []


def test_what_only_the_operator_refuses_is_told_in_its_words(kube: Kube, home: Path) -> None:
    odd = {"cluster": {"networkPolicy": {}}}  # behind a gate that is shut
    with pytest.raises(HeliostatError, match="did not start") as caught:
        life(home).up(spec(kubernetes=odd))
    assert "InvalidRayClusterSpec" in caught.value.cause and kube.names("rayclusters") == []


def test_a_head_that_cannot_start(kube: Kube, home: Path) -> None:
    with pytest.raises(HeliostatError, match="did not start") as caught:
        life(home).up(spec(kubernetes={"image": "rayproject/crash:1"}))
    assert "its container ended with code 1" in caught.value.cause and kube.names("rayclusters") == []


def test_a_group_that_cannot_start(kube: Kube, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubernetes_states, "PULL_TIMEOUT_S", 1.0)
    bad = {"bad": {"nodes": 1, "options": {"image": "rayproject/missing:1"}}, "good": {"nodes": 1}}
    with pytest.raises(PartialFailure, match="has 2 of the 3 requested nodes") as caught:
        life(home).up(spec(groups=bad))
    assert "bad-1: " in caught.value.cause
    assert states(life(home).find("lab")) == {"head": "READY", "bad-1": "FAILED", "good-1": "READY"}


def waiting(kube: Kube, home: Path, wanted: ClusterSpec, words: str) -> None:
    life(home).up(wanted, wait=False)
    told = until(
        lambda: [n.reason for n in life(home).find("lab").record.nodes.values() if words in n.reason], words
    )
    assert told and life(home).find("lab").record.has_ended() is False


def test_no_machine_has_room(kube: Kube, home: Path) -> None:
    waiting(kube, home, spec(gpus_per_node=8), "Insufficient nvidia.com/gpu")
    kube.set(capacity=ROOM)
    assert life(home).up(spec(gpus_per_node=8)).state is ClusterState.READY


def test_a_quota_is_used_up(kube: Kube, home: Path) -> None:
    quota = {
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": {"name": "few"},
        "spec": {"hard": {"pods": "1"}},
    }
    assert kube.request("POST", "/api/v1/namespaces/ml/resourcequotas", quota, "admin-token")[0] == 201
    try:
        waiting(kube, home, spec(nodes=2), "exceeded quota: few")
    finally:
        kube.request("DELETE", "/api/v1/namespaces/ml/resourcequotas/few", token="admin-token")
    assert life(home).up(spec(nodes=2)).state is ClusterState.READY


# -- things go wrong on the way


@pytest.mark.parametrize("what", [429, 500, 503, "cut", "cut_after"])
@pytest.mark.parametrize(
    ("verb", "resource"),
    [
        ("create", "rayclusters"),
        ("get", "rayclusters"),
        ("list", "pods"),
        ("get", "secrets"),
        ("delete", "rayclusters"),
    ],
)
def test_a_server_that_stumbles(kube: Kube, home: Path, what: int | str, verb: str, resource: str) -> None:
    kube.fault(what, verb=verb, resource=resource, times=2 if isinstance(what, int) else 1, seconds=0.1)
    assert life(home).up(spec(nodes=2)).state is ClusterState.READY
    assert life(home).down("lab").state is ClusterState.ENDED


def test_a_conflict_while_it_is_scaled_is_an_error_and_nothing_is_half_done(kube: Kube, home: Path) -> None:
    life(home).up(spec(nodes=2))
    kube.fault(409, verb="patch", resource="rayclusters", times=1)
    with pytest.raises(Refused):
        life(home).scaling.scale("lab", 2)
    assert set(states(life(home).find("lab"))) == {"head", "w1"}
    assert life(home).scaling.scale("lab", 2).state is ClusterState.READY


@pytest.mark.parametrize("how", ["break", "gone", "drop", "forget"])
def test_a_watch_that_breaks_is_taken_up_again(
    kube: Kube, home: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubernetes_watch, "WATCH_AFTER_S", 600.0)
    looker = life(home)
    looker.up(spec(nodes=2, gpus_per_node=1), wait=False)  # for which there is no room yet
    until(lambda: looker.find("lab") and _watches(looker), "somebody who goes on looking watches")
    if how in ("break", "gone"):
        kube.fault(how, verb="watch", times=2, after=0)
    kube.control("drop")
    if how == "forget":
        kube.control("forget")
    kube.set(capacity=ROOM)
    until(lambda: looker.find("lab").state is ClusterState.READY, "the news comes through")

    def asks_no_more() -> bool:
        kube.control("requests", clear=True)
        for _ in range(20):
            looker.find("lab")
            time.sleep(0.02)
        return not [r for r in kube.control("requests") if r["verb"] == "list" and r["resource"] == "pods"]

    until(asks_no_more, "the watch is taken up again: whoever watches does not ask")


def test_a_watch_ends_when_nobody_looks_any_more(
    kube: Kube, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody's notebook goes on; the API server hears no more of it."""
    monkeypatch.setattr(kubernetes_watch, "WATCH_AFTER_S", 600.0)
    looker = life(home)
    looker.up(spec(nodes=2))
    until(lambda: looker.find("lab") and _watches(looker), "somebody who goes on looking watches")
    threads = [watch for cluster in site.BACKEND._clusters.values() for watch in cluster._watches]
    monkeypatch.setattr(kubernetes_watch, "WATCH_AFTER_S", 0.0)
    kube.control("drop")
    until(lambda: not any(thread.is_alive() for thread in threads), "the watches have ended")
    monkeypatch.setattr(kubernetes_watch, "WATCH_AFTER_S", 600.0)
    until(lambda: looker.find("lab") and _watches(looker), "whoever comes back watches again")


def _watches(looker: ClusterManager) -> bool:
    found = site.BACKEND._clusters.values()
    return any(len(c._watches) == 2 and all(w.synced for w in c._watches) for c in found)


def test_a_server_that_falls_silent_is_not_a_dead_cluster(kube: Kube, home: Path) -> None:
    life(home).up(spec(nodes=2))
    number = kube.fault(401, verb="get", resource="rayclusters")
    view = life(home).find("lab")
    assert (
        view.state is ClusterState.UNKNOWN and "rejected your credentials" in view.record.nodes["head"].reason
    )
    assert "rejected your credentials" in life(home).status("lab")["problem"]
    kube.clear(number)
    assert life(home).find("lab").state is ClusterState.READY


def test_an_operator_that_is_slow(kube: Kube, home: Path) -> None:
    kube.set(operator_delay=1.0)
    assert life(home).up(spec(nodes=2)).state is ClusterState.READY
    assert life(home).down("lab").state is ClusterState.ENDED


def test_a_pod_is_evicted_and_another_takes_its_place(kube: Kube, home: Path) -> None:
    told: list[str] = []
    looker = life(home, told)
    old = pod_of(looker.up(spec(nodes=3)), "w1")
    kube.control("evict", pod=old, message="The node was low on resource: memory.")

    def replaced() -> bool:
        view = looker.find("lab")
        return view.state is ClusterState.READY and pod_of(view, "w1") != old

    until(replaced, "another pod is w1")
    moves = [event for event in looker.find("lab").folder.events() if event.get("node") == "w1"]
    assert [move["to"] for move in moves][-1] == "READY" and len(moves) >= 3
    assert set(states(looker.find("lab"))) == {"head", "w1", "w2"}


def test_the_head_is_evicted_and_comes_back(kube: Kube, home: Path) -> None:
    old = pod_of(life(home).up(spec(nodes=2)), "head")
    kube.control("evict", pod=old)

    def back() -> bool:
        view = life(home).find("lab")
        return view.state is ClusterState.READY and pod_of(view, "head") != old and view.address is not None

    until(back, "the operator has made another head")


def test_deleted_by_somebody_else(kube: Kube, home: Path) -> None:
    life(home).up(spec(nodes=2))
    kube.request("DELETE", "/apis/ray.io/v1/namespaces/ml/rayclusters/lab")
    until(lambda: life(home).find("lab").record.has_ended(), "it is seen to be gone")
    assert life(home).down("lab").state is ClusterState.FAILED
    assert life(home).up(spec(nodes=2)).state is ClusterState.READY


def test_what_cannot_be_deleted_is_an_error_and_stays_on_record(
    kube: Kube, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    life(home).up(spec())
    kube.control("merge", kind="rayclusters", name="lab", patch={"metadata": {"finalizers": ["ray.io/wait"]}})
    monkeypatch.setattr(site, "DELETE_TIMEOUT_S", 0.5)
    with pytest.raises(HeliostatError, match="was not deleted completely") as caught:
        life(home).down("lab")
    assert "ray.io/wait" in caught.value.cause and Store(home).names() == ["lab"]
    kube.control("merge", kind="rayclusters", name="lab", patch={"metadata": {"finalizers": None}})
    monkeypatch.undo()
    os.environ.update(KUBECONFIG=str(kube.kubeconfig), HELIOSTAT_HOME=str(home))
    assert life(home).down("lab").state is ClusterState.ENDED


def test_down_is_done_once(kube: Kube, home: Path) -> None:
    life(home).up(spec(nodes=2))
    results: list[Any] = []
    threads = [threading.Thread(target=lambda: results.append(life(home).down("lab"))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert [view.state for view in results] == [ClusterState.ENDED] * 2


def test_two_up_at_once(kube: Kube, home: Path) -> None:
    results: list[Any] = []

    def go() -> None:
        try:
            results.append(life(home).up(spec(nodes=2)).state)
        except Exception as error:
            results.append(error)

    threads = [threading.Thread(target=go) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert results == [ClusterState.READY] * 2 and kube.names("rayclusters") == ["lab"]


# -- the command ends before its time

COMMAND = """
import os, signal, sys
from heliostat import backends
from heliostat.config import loader
from heliostat.cluster.manager import ClusterManager
from heliostat.state.store import ClusterDirectory
stage, save = sys.argv[1], ClusterDirectory.save
def dying(folder, record):
    if stage == "before the id is on record" and record.handles:
        os.kill(os.getpid(), signal.SIGKILL)
    save(folder, record)
    if stage == "after the id" and record.handles:
        os.kill(os.getpid(), signal.SIGKILL)
ClusterDirectory.save = dying
ClusterManager().up(loader.check({"name": "lab", "on": "kubernetes", "nodes": 2}, {}, backends))
"""


@pytest.mark.parametrize("stage", ["before the id is on record", "after the id"])
@pytest.mark.parametrize("then", ["up", "down"])
def test_the_command_is_killed(kube: Kube, home: Path, stage: str, then: str) -> None:
    done = subprocess.run([sys.executable, "-c", COMMAND, stage], timeout=120, check=False)
    assert done.returncode == -signal.SIGKILL and kube.names("rayclusters") == ["lab"]
    if then == "up":
        assert life(home).up(spec(nodes=2)).state is ClusterState.READY
        assert kube.names("rayclusters") == ["lab"]
    assert life(home).down("lab").state is ClusterState.ENDED
    assert kube.names("rayclusters") == [] and kube.names("pods") == []


def test_ctrl_c_while_it_starts_releases_everything(kube: Kube, home: Path) -> None:
    kube.set(schedule_delay=3600.0)
    told: list[str] = []

    def emit(event: Event) -> None:
        told.append(event.text)
        if event.kind == "progress":
            raise KeyboardInterrupt

    with pytest.raises(Interrupted, match="`lab` is released"):
        ClusterManager(Store(home), emit).up(spec(nodes=2))
    assert kube.names("rayclusters") == [] and Store(home).names() == []
