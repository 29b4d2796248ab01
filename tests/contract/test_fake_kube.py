"""The fake for Kubernetes answers as a real API server was seen to answer. No Ray runs here."""

from __future__ import annotations

import json
import socket
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from contract.kube import (
    APPLY,
    CLUSTERS,
    CORE,
    JOBS,
    JSON,
    MERGE,
    STRATEGIC,
    Watching,
    cluster,
    create,
    get,
    group,
    job,
    kube,
    phase,
    plain,
    shared,
    template,
    until,
)
from fakes.kube import Kube

__all__ = ["kube", "shared"]  # fixtures


# --- what the server refuses, and how


def headless() -> dict[str, Any]:
    return cluster("bad", headGroupSpec=None)


def limits(value: str) -> dict[str, Any]:
    return cluster("bad", headGroupSpec={"rayStartParams": {}, "template": template("h", cpu=value)})


@pytest.mark.parametrize(
    ("obj", "words"),
    [
        (headless(), 'RayCluster.ray.io "bad" is invalid: spec.headGroupSpec: Required value'),
        (
            cluster("bad", workerGroupSpecs=[group(replicas="2")]),
            'spec.workerGroupSpecs[0].replicas: Invalid value: "string": spec.workerGroupSpecs[0].replicas in body must be of type integer: "string"',
        ),
        (
            cluster("bad", headGroupSpec={"rayStartParams": {"num-cpus": 2}, "template": template("h")}),
            'must be of type string: "integer"',
        ),
        (
            cluster("bad", authOptions={"mode": "basic"}),
            'spec.authOptions.mode: Unsupported value: "basic": supported values: "disabled", "token"',
        ),
        (
            cluster("bad", autoscalerOptions={"upscalingMode": "Fast"}),
            'Unsupported value: "Fast": supported values: "Default", "Aggressive", "Conservative"',
        ),
        (limits("two"), "in body should match"),
        (cluster("bad", managedBy="me"), "the managedBy field value must be either"),
        (cluster("Upper"), "a lowercase RFC 1123 subdomain must consist of"),
    ],
    ids=["no head", "replicas", "params", "mode", "upscaling", "cpu", "managedBy", "name"],
)
def test_the_server_refuses(kube: Kube, obj: dict[str, Any], words: str) -> None:
    status, body = kube.request("POST", CLUSTERS, obj)
    assert (status, body["reason"], body["status"]) == (422, "Invalid", "Failure")
    assert words in body["message"]
    assert body["details"]["causes"]


def test_a_rule_about_two_fields(kube: Kube) -> None:
    strategy = {"onSuccess": {"policy": "DeleteCluster"}}
    status, body = kube.request("POST", JOBS, job("bad", deletionStrategy=strategy))
    assert status == 422 and "requires either BOTH onSuccess and onFailure" in body["message"]


def test_what_may_never_change(kube: Kube) -> None:
    create(kube, cluster("rc", managedBy="ray.io/kuberay-operator"))
    change = {"spec": {"managedBy": "kueue.x-k8s.io/multikueue"}}
    status, body = kube.request("PATCH", f"{CLUSTERS}/rc", change, Content_Type=MERGE)
    assert status == 422 and "the managedBy field is immutable" in body["message"]


def test_an_unknown_field(kube: Kube) -> None:
    obj = cluster("typo", numWorkers=3)
    status, body = kube.request("POST", f"{CLUSTERS}?fieldValidation=Strict", obj)
    assert (status, body["reason"]) == (400, "BadRequest")
    assert 'strict decoding error: unknown field "spec.numWorkers"' in body["message"]
    assert "numWorkers" not in create(kube, obj)["spec"]  # unasked, it is dropped without a word


@pytest.mark.parametrize(
    "obj",
    [
        cluster("a.b.c"),
        cluster("a" * 60),
        cluster("x", headGroupSpec={"template": {"spec": {"containers": []}}}),
        cluster("x", workerGroupSpecs=[group(minReplicas=3, maxReplicas=1)]),
        cluster("x", workerGroupSpecs=[group(), group()]),
        cluster("x", headGroupSpec={"template": template("h")}),
        cluster("x", authOptions={}),
    ],
    ids=["dots", "long", "no containers", "min over max", "same name", "no params", "empty auth"],
)
def test_the_server_takes(kube: Kube, obj: dict[str, Any]) -> None:
    create(kube, obj, query="?fieldValidation=Strict")


@pytest.mark.parametrize(
    "spec",
    [
        {"submissionMode": "Magic"},
        {"ttlSecondsAfterFinished": -1},
        {"ttlSecondsAfterFinished": 5},
        {"entrypoint": None},
    ],
    ids=["mode", "negative", "ttl alone", "no entrypoint"],
)
def test_the_server_takes_a_job(kube: Kube, spec: dict[str, Any]) -> None:
    create(kube, job("x", **spec), JOBS, "?fieldValidation=Strict")


def test_defaults_are_filled_in(kube: Kube) -> None:
    body = create(kube, cluster("rc", workerGroupSpecs=[{"groupName": "g", "template": template("w")}]))
    assert {"replicas": 0, "minReplicas": 0, "maxReplicas": 2147483647, "numOfHosts": 1}.items() <= body[
        "spec"
    ]["workerGroupSpecs"][0].items()


# --- reading and writing


def test_what_a_created_object_carries(kube: Kube) -> None:
    body = create(kube, cluster("rc"))
    assert body["metadata"]["uid"] and body["metadata"]["generation"] == 1
    assert body["metadata"]["resourceVersion"] and body["metadata"]["creationTimestamp"].endswith("Z")
    status, again = kube.request("POST", CLUSTERS, cluster("rc"))
    assert (status, again["reason"]) == (409, "AlreadyExists")
    assert again["message"] == 'rayclusters.ray.io "rc" already exists'
    status, body = kube.request("GET", f"{CLUSTERS}/none")
    assert (status, body["message"]) == (404, 'rayclusters.ray.io "none" not found')


def test_a_dry_run_leaves_nothing(kube: Kube) -> None:
    create(kube, cluster("rc"), query="?dryRun=All&fieldValidation=Strict")
    assert kube.names("rayclusters") == []


def test_no_such_namespace(kube: Kube) -> None:
    path = CLUSTERS.replace("/ml/", "/none/")
    status, body = kube.request("POST", path, cluster("rc"), token="admin-token")
    assert (status, body["message"]) == (404, 'namespaces "none" not found')


def test_a_merge_patch_replaces_the_whole_list(kube: Kube) -> None:
    create(kube, cluster("rc"))
    change = {"spec": {"workerGroupSpecs": [{"groupName": "workers", "replicas": 2}]}}
    status, body = kube.request("PATCH", f"{CLUSTERS}/rc", change, Content_Type=MERGE)
    assert status == 422 and "spec.workerGroupSpecs[0].template: Required value" in body["message"]


def test_a_json_patch_with_a_test(kube: Kube) -> None:
    create(kube, cluster("rc"))
    place = "/spec/workerGroupSpecs/0"
    change = [
        {"op": "test", "path": f"{place}/groupName", "value": "workers"},
        {"op": "replace", "path": f"{place}/replicas", "value": 3},
    ]
    status, body = kube.request("PATCH", f"{CLUSTERS}/rc", change, Content_Type=JSON)
    assert status == 200 and body["metadata"]["generation"] == 2
    change[0]["value"] = "others"
    status, body = kube.request("PATCH", f"{CLUSTERS}/rc", change, Content_Type=JSON)
    assert (status, body["reason"]) == (422, "Invalid")
    until(lambda: len(kube.names("pods")) == 4)


def test_other_kinds_of_patches(kube: Kube) -> None:
    create(kube, cluster("rc"))
    status, body = kube.request("PATCH", f"{CLUSTERS}/rc", {"spec": {}}, Content_Type=STRATEGIC)
    assert (status, body["reason"]) == (415, "UnsupportedMediaType")
    obj = {**cluster("rc"), "metadata": {"name": "rc", "labels": {"team": "a"}}}
    status, body = kube.request("PATCH", f"{CLUSTERS}/rc?fieldManager=me", obj, Content_Type=APPLY)
    assert status == 200 and body["metadata"]["labels"] == {"team": "a"}
    assert (
        kube.request("PATCH", f"{CLUSTERS}/two?fieldManager=me", cluster("two"), Content_Type=APPLY)[0] == 201
    )


def test_an_update_of_an_old_version(kube: Kube) -> None:
    old = create(kube, cluster("rc"))
    change = {"metadata": {"labels": {"a": "b"}}}
    assert kube.request("PATCH", f"{CLUSTERS}/rc", change, Content_Type=MERGE)[0] == 200
    status, body = kube.request("PUT", f"{CLUSTERS}/rc", old)
    assert (status, body["reason"]) == (409, "Conflict")
    assert "the object has been modified; please apply your changes to the latest version" in body["message"]


def test_the_status_has_a_door_of_its_own(kube: Kube) -> None:
    kube.set(operator=False)
    create(kube, {**cluster("rc"), "status": {"state": "ready"}})
    assert "status" not in get(kube, "rc")
    change = {"status": {"state": "failed"}}
    kube.request("PATCH", f"{CLUSTERS}/rc", change, Content_Type=MERGE)
    assert "status" not in get(kube, "rc")
    body = kube.request("PATCH", f"{CLUSTERS}/rc/status", change, Content_Type=MERGE)[1]
    assert body["status"] == {"state": "failed"} and body["metadata"]["generation"] == 1


def test_selectors_and_pages(kube: Kube) -> None:
    kube.set(operator=False)
    for name, team in (("a1", "a"), ("a2", "a"), ("b1", "b")):
        create(kube, {**cluster(name), "metadata": {"name": name, "labels": {"team": team}}})

    def names(query: str) -> list[str]:
        return [o["metadata"]["name"] for o in kube.request("GET", f"{CLUSTERS}?{query}")[1]["items"]]

    assert names("labelSelector=team%3Da") == ["a1", "a2"]
    assert names("labelSelector=team%20in%20(b,c)") == ["b1"]
    assert names("labelSelector=team!%3Da,team") == ["b1"]
    assert names("fieldSelector=metadata.name%3Da2") == ["a2"]
    status, body = kube.request("GET", f"{CLUSTERS}?fieldSelector=spec.suspend%3Dtrue")
    assert (status, body["message"]) == (400, "field label not supported: spec.suspend")
    first = kube.request("GET", f"{CLUSTERS}?limit=2")[1]
    rest = kube.request("GET", f"{CLUSTERS}?limit=2&continue={first['metadata']['continue']}")[1]
    assert [len(first["items"]), len(rest["items"])] == [2, 1] and "continue" not in rest["metadata"]


def test_secrets_are_kept_in_base64(kube: Kube) -> None:
    body = create(kube, {"metadata": {"name": "s"}, "stringData": {"k": "v"}}, f"{CORE}/secrets")
    assert body["data"] == {"k": "dg=="} and "stringData" not in body


# --- who may


def test_who_may(kube: Kube) -> None:
    status, body = kube.request("POST", CLUSTERS, cluster("rc"), token="nobody-token")
    assert (status, body["reason"]) == (403, "Forbidden")
    assert body["message"] == (
        'rayclusters.ray.io is forbidden: User "nobody" cannot create resource "rayclusters" in API group "ray.io" '
        'in the namespace "ml"'
    )
    status, body = kube.request("GET", "/api/v1/namespaces/other/pods")
    assert status == 403 and 'User "lab" cannot list resource "pods" in API group ""' in body["message"]
    assert "at the cluster scope" in kube.request("GET", "/api/v1/nodes")[1]["message"]
    status, body = kube.request("GET", CLUSTERS, token="token-of-yesterday")
    assert (status, body["message"]) == (401, "Unauthorized")


def test_asking_what_one_may(kube: Kube) -> None:
    kube.control("rules", user="lab", rules=[{"resources": ["rayclusters"], "verbs": ["get", "list"]}])
    path = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"

    def may(verb: str) -> bool:
        attributes = {"namespace": "ml", "verb": verb, "group": "ray.io", "resource": "rayclusters"}
        status, body = kube.request("POST", path, {"spec": {"resourceAttributes": attributes}})
        assert status == 201
        return body["status"]["allowed"]

    assert [may("list"), may("create")] == [True, False]
    assert kube.request("GET", CLUSTERS)[0] == 200
    assert kube.request("GET", f"{CORE}/secrets")[0] == 403


# --- watches


def test_a_watch_tells_what_is_and_what_comes(kube: Kube) -> None:
    kube.set(operator=False)
    create(kube, cluster("one"))
    with Watching(kube, f"{CLUSTERS}?watch=true") as watch:
        assert (first := watch.next())["type"] == "ADDED" and first["object"]["metadata"]["name"] == "one"
        kube.request("PATCH", f"{CLUSTERS}/one", {"metadata": {"labels": {"a": "b"}}}, Content_Type=MERGE)
        assert watch.next()["type"] == "MODIFIED"
        kube.request("DELETE", f"{CLUSTERS}/one")
        assert watch.next()["type"] == "DELETED"


def test_a_watch_from_a_version_on(kube: Kube) -> None:
    kube.set(operator=False)
    create(kube, cluster("one"))
    version = kube.request("GET", CLUSTERS)[1]["metadata"]["resourceVersion"]
    create(kube, cluster("two"))
    with Watching(kube, f"{CLUSTERS}?watch=1&resourceVersion={version}&timeoutSeconds=1") as watch:
        assert watch.next()["object"]["metadata"]["name"] == "two"
        assert watch.rest() == b""  # its time is over, and it ends in order


def test_a_watch_has_bookmarks(kube: Kube) -> None:
    kube.set(bookmark_s=0.05)
    with Watching(kube, f"{CLUSTERS}?watch=1&allowWatchBookmarks=true&timeoutSeconds=20") as watch:
        event = watch.next()
    assert event["type"] == "BOOKMARK" and event["object"]["metadata"]["resourceVersion"]


def test_a_watch_that_is_too_old(kube: Kube) -> None:
    version = kube.request("GET", CLUSTERS)[1]["metadata"]["resourceVersion"]
    create(kube, cluster("one"))
    kube.control("forget")
    with Watching(kube, f"{CLUSTERS}?watch=1&resourceVersion={version}") as watch:
        event = watch.next()
    assert (
        event["type"] == "ERROR" and event["object"]["code"] == 410 and event["object"]["reason"] == "Expired"
    )


def test_a_watch_that_breaks(kube: Kube) -> None:
    kube.set(operator=False)
    create(kube, cluster("one"))
    create(kube, cluster("two"))
    kube.fault("break", verb="watch", resource="rayclusters", times=1)
    with Watching(kube, f"{CLUSTERS}?watch=1") as watch:
        assert watch.next()["type"] == "ADDED"
        with pytest.raises((ValueError, HTTPException)):
            json.loads(watch.rest())
    with Watching(kube, f"{CLUSTERS}?watch=1") as watch:
        assert [watch.next()["type"], watch.next()["type"]] == ["ADDED", "ADDED"]
        kube.control("drop")
        with pytest.raises((OSError, HTTPException)):
            broken_off(watch.rest())


def broken_off(rest: bytes) -> None:
    """An end without the last chunk is an error to some readers, and nothing more to come to others."""
    if not rest:
        raise OSError


# --- what belongs to what


def config(name: str, *owners: dict[str, Any]) -> dict[str, Any]:
    rows = [
        {
            "apiVersion": o["apiVersion"],
            "kind": o["kind"],
            "name": o["metadata"]["name"],
            "uid": o["metadata"]["uid"],
        }
        for o in owners
    ]
    return {"metadata": {"name": name, "ownerReferences": rows}}


def test_what_has_no_owner_left_is_collected(kube: Kube) -> None:
    top = create(kube, config("top"), f"{CORE}/configmaps")
    middle = create(kube, config("middle", top), f"{CORE}/configmaps")
    create(kube, config("low", middle), f"{CORE}/configmaps")
    kube.request("DELETE", f"{CORE}/configmaps/top")
    until(lambda: kube.names("configmaps") == [])


def test_the_body_of_a_delete_takes_the_place_of_its_query(kube: Kube) -> None:
    """handlers/delete.go of the API server decodes the query only where there is no body."""
    top = create(kube, config("top"), f"{CORE}/configmaps")
    create(kube, config("low", top), f"{CORE}/configmaps")
    mine = {"preconditions": {"uid": top["metadata"]["uid"]}}
    assert kube.request("DELETE", f"{CORE}/configmaps/top?propagationPolicy=Orphan", mine)[0] == 200
    until(lambda: kube.names("configmaps") == [])


def test_a_patch_whose_test_fails_changes_nothing(kube: Kube) -> None:
    create(kube, cluster("lab"))
    patch = [
        {"op": "test", "path": "/metadata/uid", "value": "another"},
        {"op": "add", "path": "/spec/suspend", "value": True},
    ]
    code, answer = kube.request("PATCH", f"{CLUSTERS}/lab", patch, Content_Type=JSON)
    assert (code, answer["reason"]) == (422, "Invalid")
    assert "suspend" not in get(kube, "lab")["spec"]


def test_ways_to_delete(kube: Kube) -> None:
    top = create(kube, config("top"), f"{CORE}/configmaps")
    create(kube, config("low", top), f"{CORE}/configmaps")
    wrong = {"preconditions": {"uid": "another"}}
    code, answer = kube.request("DELETE", f"{CORE}/configmaps/top", wrong)
    assert (code, answer["reason"]) == (409, "Conflict")
    assert f"UID in precondition: another, UID in object meta: {top['metadata']['uid']}" in answer["message"]
    kube.request("DELETE", f"{CORE}/configmaps/top?propagationPolicy=Orphan")
    assert kube.names("configmaps") == ["low"]
    held = {"metadata": {"name": "held", "finalizers": ["lab/hold"]}}
    create(kube, held, f"{CORE}/configmaps")
    kube.request("DELETE", f"{CORE}/configmaps/held")
    assert get(kube, "held", f"{CORE}/configmaps")["metadata"]["deletionTimestamp"]
    change = {"metadata": {"finalizers": None}}
    kube.request("PATCH", f"{CORE}/configmaps/held", change, Content_Type=MERGE)
    assert kube.request("GET", f"{CORE}/configmaps/held")[0] == 404
    top = create(kube, config("top"), f"{CORE}/configmaps")
    create(kube, {**config("low2", top)}, f"{CORE}/configmaps")
    kube.request("DELETE", f"{CORE}/configmaps/top", {"propagationPolicy": "Foreground"})
    until(lambda: kube.names("configmaps") == ["low"])
    kube.request("DELETE", f"{CORE}/configmaps")


# --- logs and commands in plain Pods


def test_a_log(kube: Kube) -> None:
    create(kube, plain("p", "echo one; echo two $WHO; echo three"), f"{CORE}/pods")
    until(lambda: phase(kube, "p") == "Succeeded")
    assert kube.request("GET", f"{CORE}/pods/p/log") == (200, "one\ntwo me\nthree\n")
    assert kube.request("GET", f"{CORE}/pods/p/log?tailLines=1") == (200, "three\n")
    stamp, _, rest = kube.request("GET", f"{CORE}/pods/p/log?timestamps=true&tailLines=1")[1].partition(" ")
    assert rest == "three\n" and stamp.endswith("Z")
    assert kube.request("GET", f"{CORE}/pods/p/log?sinceTime={stamp}")[1].endswith("three\n")
    status, body = kube.request("GET", f"{CORE}/pods/p/log?container=x")
    assert (status, body["message"]) == (400, "container x is not valid for pod p")


def test_a_log_that_is_followed(kube: Kube, tmp_path: Path) -> None:
    create(
        kube,
        plain("p", f"echo one; while [ ! -e {tmp_path}/go ]; do sleep 0.05; done; echo two"),
        f"{CORE}/pods",
    )
    until(lambda: phase(kube, "p") == "Running")
    with Watching(kube, f"{CORE}/pods/p/log?follow=true") as log:
        assert log.stream.readline() == b"one\n"
        (tmp_path / "go").touch()
        assert log.rest() == b"two\n"


def test_a_pod_ends_with_its_processes(kube: Kube) -> None:
    create(kube, plain("p", "trap '' TERM; sleep 1000 & sleep 1000"), f"{CORE}/pods")
    until(lambda: phase(kube, "p") == "Running" and len(kube.control("processes")) >= 3)
    kube.set(grace_cap=0.2)
    kube.request("DELETE", f"{CORE}/pods/p")
    until(lambda: kube.request("GET", f"{CORE}/pods/p")[0] == 404)
    assert kube.control("processes") == []


# --- the program itself


def test_it_speaks_tls(tmp_path: Path) -> None:
    with Kube(tmp_path / "k", "--no-ray", "--tls") as kube:
        assert kube.server.startswith("https://") and kube.names("namespaces")


def test_it_ends_with_whoever_started_it(tmp_path: Path) -> None:
    kube = Kube(tmp_path / "k", "--no-ray").start()
    process, port = kube.process, urlsplit(kube.server).port
    assert process and process.stdin
    try:
        create(kube, plain("p", "sleep 1000"), f"{CORE}/pods")
        until(lambda: phase(kube, "p") == "Running")
        pids = kube.control("processes")
        process.stdin.close()  # as when the test run is killed
        process.wait(60)
    finally:
        kube.stop()
    assert pids and not any(Path(f"/proc/{pid}").exists() for pid in pids)
    with pytest.raises(OSError), socket.create_connection(("127.0.0.1", port), 5):
        pass
