"""The fake for KubeRay's operator, and for the node: what becomes of a RayCluster and a RayJob, and what goes wrong."""

from __future__ import annotations

import base64
import urllib.error
import urllib.request
from typing import Any

import pytest

from contract.kube import (
    CLUSTERS,
    CORE,
    JOBS,
    JSON,
    MERGE,
    Watching,
    cluster,
    condition,
    create,
    events,
    get,
    group,
    job,
    kube,
    ready,
    shared,
    template,
    until,
)
from fakes.kube import Kube

__all__ = ["kube", "shared"]  # fixtures


# --- what the operator makes of a RayCluster


def test_a_cluster_comes_up(kube: Kube) -> None:
    create(kube, cluster("rc", workerGroupSpecs=[group(replicas=2)]), query="?fieldValidation=Strict")
    status = ready(kube, "rc")["status"]
    assert status["observedGeneration"] == 1 and status["desiredWorkerReplicas"] == 2
    assert status["readyWorkerReplicas"] == status["availableWorkerReplicas"] == 2
    assert (status["desiredCPU"], status["desiredMemory"]) == ("3", "3Gi")
    assert status["head"]["serviceName"] == "rc-head-svc" and status["head"]["podIP"]
    assert status["endpoints"]["dashboard"] == "8265"
    found = {c["type"]: c["status"] for c in status["conditions"]}
    assert found["HeadPodReady"] == found["RayClusterProvisioned"] == "True"
    pods = kube.objects("pods")
    assert sorted(p["metadata"]["name"].rsplit("-", 1)[0] for p in pods) == [
        "rc-head",
        "rc-workers-worker",
        "rc-workers-worker",
    ]
    head = next(p for p in pods if p["metadata"]["labels"]["ray.io/node-type"] == "head")
    labels = {
        "ray.io/cluster": "rc",
        "ray.io/group": "headgroup",
        "ray.io/is-ray-node": "yes",
        "ray.io/identifier": "rc-head",
    }
    assert labels.items() <= head["metadata"]["labels"].items()
    assert head["status"]["containerStatuses"][0]["ready"] is True
    assert "ray start --head" in head["spec"]["containers"][0]["args"][0]
    assert "--num-cpus=1" in head["spec"]["containers"][0]["args"][0]


def proxied(kube: Kube, path: str, token: str = "", method: str = "GET", body: Any = None) -> tuple[int, Any]:
    headers = {"X_Ray_Authorization": f"Bearer {token}"} if token else {}
    return kube.request(method, f"{CORE}/services/http:rc-head-svc:8265/proxy{path}", body, **headers)


def secret(kube: Kube, name: str = "rc") -> str:
    return base64.b64decode(get(kube, name, f"{CORE}/secrets")["data"]["auth_token"]).decode()


def test_through_the_service_to_the_head(kube: Kube) -> None:
    status, body = proxied(kube, "/nodes?view=summary")
    assert (status, body["message"]) == (404, 'services "rc-head-svc" not found')
    create(kube, cluster("rc"))
    ready(kube, "rc")
    assert proxied(kube, "/nodes?view=summary") == (401, "Unauthorized: Missing authentication token")
    assert proxied(kube, "/nodes?view=summary", "wrong")[0] == 403
    status, body = proxied(kube, "/nodes?view=summary", secret(kube))
    rows = [row["raylet"] for row in body["data"]["summary"]]
    assert status == 200 and sorted(row["isHeadNode"] for row in rows) == [False, True]
    assert {row["state"] for row in rows} == {"ALIVE"} and rows[0]["resourcesTotal"]["CPU"] == 1.0
    assert proxied(kube, "/api/version", secret(kube))[1]["ray_version"] == "2.60.0"
    path = f"{CORE}/services/rc-head-svc:dashboard/proxy/api/version"
    status, body = kube.request("GET", path, token="nobody-token")
    assert status == 403 and 'cannot get resource "services/proxy"' in body["message"]
    assert kube.request("GET", path)[0] == 401  # Ray's own: Kubernetes has let it through


def test_replicas_stay_between_the_bounds(kube: Kube) -> None:
    create(
        kube,
        cluster("rc", workerGroupSpecs=[group(replicas=9, maxReplicas=2), group("few", 0, minReplicas=1)]),
    )
    assert ready(kube, "rc")["status"]["desiredWorkerReplicas"] == 3


def test_workers_are_deleted_by_name(kube: Kube) -> None:
    create(kube, cluster("rc", workerGroupSpecs=[group(replicas=3)]))
    ready(kube, "rc")
    names = kube.names("pods", labels="ray.io/node-type=worker")
    change = [
        {"op": "replace", "path": "/spec/workerGroupSpecs/0/replicas", "value": 2},
        {
            "op": "add",
            "path": "/spec/workerGroupSpecs/0/scaleStrategy",
            "value": {"workersToDelete": [names[1]]},
        },
    ]
    assert kube.request("PATCH", f"{CLUSTERS}/rc", change, Content_Type=JSON)[0] == 200
    until(lambda: kube.names("pods", labels="ray.io/node-type=worker") == [names[0], names[2]])


def test_suspend_and_resume(kube: Kube) -> None:
    create(kube, cluster("rc"))
    ready(kube, "rc")
    kube.request("PATCH", f"{CLUSTERS}/rc", {"spec": {"suspend": True}}, Content_Type=MERGE)
    obj = until(lambda: (o := get(kube, "rc"))["status"]["state"] == "suspended" and o)
    assert kube.names("pods") == []
    until(lambda: condition(get(kube, "rc"), "RayClusterSuspended")["status"] == "True")
    kube.request("PATCH", f"{CLUSTERS}/rc", {"spec": {"suspend": False}}, Content_Type=MERGE)
    obj = ready(kube, "rc")
    until(lambda: condition(get(kube, "rc"), "RayClusterProvisioned")["status"] == "True")
    assert condition(obj, "RayClusterSuspended")["status"] == "False"


def test_deletion_takes_all_that_was_made(kube: Kube) -> None:
    create(kube, cluster("rc"))
    ready(kube, "rc")
    assert kube.names("services") == ["rc-head-svc"] and kube.names("secrets") == ["rc"]
    status, body = kube.request("DELETE", f"{CLUSTERS}/rc", {"propagationPolicy": "Background"})
    assert (status, body["status"]) == (200, "Success")
    until(lambda: not (kube.names("pods") or kube.names("services") or kube.names("secrets")))


def test_a_pod_that_goes_comes_again(kube: Kube) -> None:
    create(kube, cluster("rc"))
    ready(kube, "rc")
    for kind in ("head", "worker"):
        (old,) = kube.names("pods", labels=f"ray.io/node-type={kind}")
        kube.control("evict", pod=old)
        until(
            lambda old=old, kind=kind: [
                n for n in kube.names("pods", labels=f"ray.io/node-type={kind}") if n != old
            ]
        )
        assert ("Warning", "Evicted") in [row[:2] for row in events(kube, old)]
    worker = "ray.io/node-type=worker"
    (old,) = kube.names("pods", labels=worker)
    # one that has not begun goes at once, without a time to end in
    until(lambda: kube.objects("pods", labels=worker)[0]["status"].get("phase") == "Running")
    assert "deletionTimestamp" in kube.request("DELETE", f"{CORE}/pods/{old}")[1]["metadata"]
    until(lambda: len(kube.names("pods")) == 2 and old not in kube.names("pods"))


@pytest.mark.parametrize(
    ("obj", "reason", "words"),
    [
        (cluster("a.b"), "InvalidRayClusterMetadata", "RayCluster name should be a valid DNS1035 label"),
        (
            cluster("a" * 54),
            "InvalidRayClusterMetadata",
            "RayCluster name should be no more than 53 characters",
        ),
        (
            cluster("x", headGroupSpec={"template": {"spec": {"containers": []}}}),
            "InvalidRayClusterSpec",
            "headGroupSpec should have at least one container",
        ),
        (
            cluster("x", workerGroupSpecs=[group(minReplicas=3, maxReplicas=1)]),
            "InvalidRayClusterSpec",
            "worker group workers has minReplicas 3 greater than maxReplicas 1",
        ),
        (
            cluster("x", rayVersion=None),
            "InvalidRayClusterSpec",
            "authOptions.mode is 'token' but RayVersion was not specified",
        ),
        (
            cluster("x", rayVersion="2.40.0"),
            "InvalidRayClusterSpec",
            "minimum Ray version is 2.52.0, got 2.40.0",
        ),
        (cluster("x", networkPolicy={}), "InvalidRayClusterSpec", "RayClusterNetworkPolicy feature gate"),
    ],
    ids=["dots", "long", "no containers", "min over max", "no version", "old version", "gate"],
)
def test_what_the_operator_refuses_late(kube: Kube, obj: dict[str, Any], reason: str, words: str) -> None:
    name = create(kube, obj)["metadata"]["name"]
    kind, found, message = until(lambda: events(kube, name))[0]
    assert (kind, found) == ("Warning", reason) and words in message
    assert "status" not in get(kube, name) and kube.names("pods") == []


def test_empty_auth_makes_a_secret_that_nobody_uses(kube: Kube) -> None:
    create(kube, cluster("rc", authOptions={}))
    ready(kube, "rc")
    assert kube.names("secrets") == ["rc"]
    assert proxied(kube, "/api/version")[0] == 200


def test_a_secret_of_ones_own(kube: Kube) -> None:
    create(kube, cluster("rc", authOptions={"mode": "token", "secretName": "mine"}))
    head = until(lambda: kube.objects("pods", labels="ray.io/node-type=head"))[0]["metadata"]["name"]

    def waiting() -> dict[str, Any]:
        rows = get(kube, head, f"{CORE}/pods")["status"].get("containerStatuses") or [{"state": {}}]
        return rows[0]["state"].get("waiting", {})

    until(lambda: waiting().get("reason") == "CreateContainerConfigError")
    assert waiting()["message"] == 'secret "mine" not found'
    create(kube, {"metadata": {"name": "mine"}, "stringData": {"auth_token": "t"}}, f"{CORE}/secrets")
    ready(kube, "rc")
    assert proxied(kube, "/api/version", "t")[0] == 200 and kube.names("secrets") == ["mine"]


# --- what the operator makes of a RayJob


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"ttlSecondsAfterFinished": -1}, "TTLSecondsAfterFinished must be a non-negative integer"),
        (
            {"ttlSecondsAfterFinished": 5},
            "shutdownAfterJobFinishes set to false cannot have TTLSecondsAfterFinished",
        ),
        ({"rayClusterSpec": None}, "one of RayClusterSpec or ClusterSelector must be set"),
        ({"backoffLimit": 1}, "BackoffLimit is incompatible with InteractiveMode"),
        ({"activeDeadlineSeconds": 0}, "activeDeadlineSeconds must be a positive integer"),
    ],
    ids=["negative", "ttl alone", "no cluster", "backoff", "deadline"],
)
def test_a_job_that_the_operator_refuses(kube: Kube, spec: dict[str, Any], words: str) -> None:
    create(kube, job("x", **spec), JOBS)
    status = until(lambda: get(kube, "x", JOBS).get("status"))
    assert (
        status["jobDeploymentStatus"] == status["reason"] == "ValidationFailed" and words in status["message"]
    )
    assert kube.names("rayclusters") == []


def deployed(kube: Kube, wanted: str, name: str = "rj") -> dict[str, Any]:
    def look() -> Any:
        status = get(kube, name, JOBS).get("status") or {}
        return status.get("jobDeploymentStatus") == wanted and status

    return until(look)


@pytest.mark.parametrize(("entrypoint", "ending"), [("echo done", "Complete"), ("exit 3", "Failed")])
def test_an_interactive_job(kube: Kube, entrypoint: str, ending: str) -> None:
    create(kube, job("rj", shutdownAfterJobFinishes=True), JOBS)
    name = deployed(kube, "Waiting")["rayClusterName"]
    labels = get(kube, name)["metadata"]["labels"]
    assert name.startswith("rj-") and labels["ray.io/originated-from-cr-name"] == "rj"
    headers = {"X_Ray_Authorization": f"Bearer {secret(kube, name)}"}
    path = f"{CORE}/services/http:{name}-head-svc:8265/proxy/api/jobs/"
    assert (
        kube.request("POST", path, {"entrypoint": entrypoint, "submission_id": "mine"}, **headers)[0] == 200
    )
    kube.request("PATCH", f"{JOBS}/rj", {"spec": {"jobId": "mine"}}, Content_Type=MERGE)
    status = deployed(kube, ending)
    assert status["jobId"] == "mine" and status["jobStatus"] == (
        "SUCCEEDED" if ending == "Complete" else "FAILED"
    )
    assert status.get("reason", "") == ("" if ending == "Complete" else "AppFailed")
    until(lambda: not (kube.names("rayclusters") or kube.names("pods")))
    assert get(kube, "rj", JOBS)["metadata"]["finalizers"] == ["ray.io/rayjob-finalizer"]
    kube.request("DELETE", f"{JOBS}/rj")
    until(lambda: kube.request("GET", f"{JOBS}/rj")[0] == 404)


def test_a_job_that_takes_too_long(kube: Kube) -> None:
    create(kube, job("rj", activeDeadlineSeconds=1, preRunningDeadlineSeconds=1), JOBS)
    kube.set(operator=True)
    assert deployed(kube, "Failed")["reason"] in ("DeadlineExceeded", "PreRunningDeadlineExceeded")


# --- what can go wrong


def test_answers_that_fail(kube: Kube) -> None:
    for code, reason in (
        (401, "Unauthorized"),
        (403, "Forbidden"),
        (409, "Conflict"),
        (410, "Expired"),
        (500, "InternalError"),
    ):
        kube.fault(code, verb="list", resource="rayclusters", times=1)
        status, body = kube.request("GET", CLUSTERS)
        assert (status, body["reason"], body["kind"]) == (code, reason, "Status")
        assert kube.request("GET", CLUSTERS)[0] == 200
    kube.fault(429, verb="list", resource="rayclusters", times=1, seconds=2)
    with pytest.raises(urllib.error.HTTPError) as refused:
        Watching(kube, CLUSTERS)
    assert refused.value.code == 429 and refused.value.headers["Retry-After"] == "2"


def test_connections_that_are_cut(kube: Kube) -> None:
    kube.set(operator=False)
    kube.fault("cut", verb="create", times=1)
    with pytest.raises(OSError):
        kube.request("POST", CLUSTERS, cluster("never"))
    kube.fault("cut_after", verb="create", times=1)
    with pytest.raises(OSError):
        kube.request("POST", CLUSTERS, cluster("yet"))
    assert kube.names("rayclusters") == ["yet"]  # it was made; only the answer is lost
    number = kube.fault("slow", resource="rayclusters", seconds=0.01)
    assert kube.request("GET", CLUSTERS)[0] == 200
    kube.clear(number)
    assert kube.control("faults") and all(fault["times"] == 0 for fault in kube.control("faults"))


def test_nobody_reads_clusters(kube: Kube) -> None:
    kube.set(operator=False)
    create(kube, cluster("rc"))
    kube.set(crds=False)
    assert kube.request("GET", CLUSTERS) == (404, "404 page not found\n")
    assert kube.request("GET", "/apis/ray.io/v1", token="admin-token")[0] == 404
    groups = kube.request("GET", "/apis")[1]["groups"]
    assert "ray.io" not in [row["name"] for row in groups]
    kube.set(crds=True)
    assert "status" not in get(kube, "rc") and kube.names("pods") == []


def state_of(kube: Kube, kind: str = "head") -> dict[str, Any]:
    pods = kube.objects("pods", labels=f"ray.io/node-type={kind}")
    rows = pods[0]["status"].get("containerStatuses") if pods else None
    return rows[0]["state"].get("waiting", {}) if rows else {}


def test_an_image_that_is_not_there(kube: Kube) -> None:
    kube.set(backoff=0.2)
    create(kube, cluster("rc", headGroupSpec={"template": template("ray-head", "rayproject/ray:missing")}))
    until(lambda: state_of(kube).get("reason") == "ErrImagePull")
    until(lambda: state_of(kube).get("reason") == "ImagePullBackOff")
    (pod,) = kube.names("pods", labels="ray.io/node-type=head")
    assert ("Warning", "Failed", "Error: ErrImagePull") in events(kube, pod)
    status, body = kube.request("GET", f"{CORE}/pods/{pod}/log")
    assert status == 400 and "is waiting to start: trying and failing to pull image" in body["message"]
    found = until(
        lambda: (
            (c := condition(get(kube, "rc"), "HeadPodReady")).get("reason")
            in ("ErrImagePull", "ImagePullBackOff")
            and c
        )
    )
    assert "not found" in found["message"] or "Back-off" in found["message"]


def test_a_container_that_crashes(kube: Kube) -> None:
    kube.set(backoff=0.05)
    create(kube, cluster("rc", headGroupSpec={"template": template("ray-head", "crash:1")}))
    until(lambda: state_of(kube).get("reason") == "CrashLoopBackOff")
    (pod,) = kube.objects("pods", labels="ray.io/node-type=head")
    row = until(
        lambda: (
            (r := kube.objects("pods", labels="ray.io/node-type=head")[0]["status"]["containerStatuses"][0])[
                "restartCount"
            ]
            > 1
            and r
        )
    )
    assert row["lastState"]["terminated"]["exitCode"] == 1
    path = f"{CORE}/pods/{pod['metadata']['name']}/log?previous=true"
    assert until(lambda: kube.request("GET", path)[1]) == "this image is one of those that crash\n"


def test_no_room_for_a_pod(kube: Kube) -> None:
    big = {**group(), "template": template("w", **{"nvidia.com/gpu": "1"})}
    create(kube, cluster("rc", workerGroupSpecs=[big]))
    pod = until(lambda: kube.names("pods", labels="ray.io/node-type=worker"))[0]
    found = until(lambda: condition(get(kube, pod, f"{CORE}/pods"), "PodScheduled"))
    assert (found["status"], found["reason"]) == ("False", "Unschedulable")
    assert found["message"].startswith("0/1 nodes are available: 1 Insufficient nvidia.com/gpu.")
    assert ("Warning", "FailedScheduling", found["message"]) in events(kube, pod)
    kube.set(capacity={"nvidia.com/gpu": "1"})
    assert ready(kube, "rc")["status"]["desiredGPU"] == "1"


def test_a_quota_that_is_used_up(kube: Kube) -> None:
    quota = {"metadata": {"name": "team"}, "spec": {"hard": {"limits.cpu": "1"}}}
    create(kube, quota, f"{CORE}/resourcequotas")
    create(kube, cluster("rc"))
    reasons = until(lambda: [e for e in events(kube, "rc") if e[1] == "FailedToCreateWorkerPod"])
    assert (
        "exceeded quota: team, requested: limits.cpu=1, used: limits.cpu=1, limited: limits.cpu=1"
        in reasons[0][2]
    )
    found = until(lambda: condition(get(kube, "rc"), "ReplicaFailure"))
    assert (found["status"], found["reason"]) == ("True", "FailedCreateWorkerPod")

    def used() -> bool:  # counted by another party, a little later
        rows = kube.request("GET", f"{CORE}/resourcequotas")[1]["items"]
        return bool(rows[0]["status"]["used"] == {"limits.cpu": "1"})

    until(used)
    kube.request("DELETE", f"{CORE}/resourcequotas/team")
    ready(kube, "rc")
    until(lambda: not condition(get(kube, "rc"), "ReplicaFailure"))


def test_a_slow_operator(kube: Kube) -> None:
    kube.set(operator_delay=0.2, schedule_delay=0.1, start_delay=0.1, ready_delay=0.1)
    create(kube, cluster("rc"))
    assert "status" not in get(kube, "rc")
    ready(kube, "rc")


def test_requests_are_remembered(kube: Kube) -> None:
    kube.control("requests", clear=True)
    kube.request("GET", f"{CORE}/pods")
    (row,) = kube.control("requests")
    assert (row["verb"], row["resource"], row["user"], row["status"]) == ("list", "pods", "lab", 200)
