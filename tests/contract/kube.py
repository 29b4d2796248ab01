"""What the tests of the fake for Kubernetes share: manifests, waiting, and one server for a whole file."""

from __future__ import annotations

import json
import os
import time
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from fakes.kube import Kube

CLUSTERS = "/apis/ray.io/v1/namespaces/ml/rayclusters"
JOBS = "/apis/ray.io/v1/namespaces/ml/rayjobs"
CORE = "/api/v1/namespaces/ml"
JSON, MERGE = "application/json-patch+json", "application/merge-patch+json"
STRATEGIC, APPLY = "application/strategic-merge-patch+json", "application/apply-patch+yaml"
DEFINITIONS = os.environ.get("KUBERAY_DEFINITIONS")  # a folder with the real ones: the same rows hold


def template(name: str, image: str = "rayproject/ray:2.60.0", **limits: str) -> dict[str, Any]:
    resources = {"limits": {"cpu": "1", "memory": "1Gi", **limits}}
    return {"spec": {"containers": [{"name": name, "image": image, "resources": resources}]}}


def group(name: str = "workers", replicas: Any = 1, **more: Any) -> dict[str, Any]:
    spec = {"groupName": name, "replicas": replicas, "minReplicas": 0, "maxReplicas": 5, "rayStartParams": {}}
    return {**spec, "template": template("ray-worker"), **more}


def cluster(name: str, **spec: Any) -> dict[str, Any]:
    base = {
        "rayVersion": "2.60.0",
        "authOptions": {"mode": "token"},
        "headGroupSpec": {"rayStartParams": {}, "template": template("ray-head")},
        "workerGroupSpecs": [group()],
    }
    wanted = {key: value for key, value in {**base, **spec}.items() if value is not None}
    return {"apiVersion": "ray.io/v1", "kind": "RayCluster", "metadata": {"name": name}, "spec": wanted}


def job(name: str, **spec: Any) -> dict[str, Any]:
    base = {"submissionMode": "InteractiveMode", "rayClusterSpec": cluster("x")["spec"]}
    wanted = {key: value for key, value in {**base, **spec}.items() if value is not None}
    return {"apiVersion": "ray.io/v1", "kind": "RayJob", "metadata": {"name": name}, "spec": wanted}


def until(look: Callable[[], Any], seconds: float = 60) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := look()):
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.03)
    return found


def create(
    kube: Kube, obj: dict[str, Any], path: str = CLUSTERS, query: str = "", **more: Any
) -> dict[str, Any]:
    status, body = kube.request("POST", path + query, obj, **more)
    assert status == 201, body
    return body


def get(kube: Kube, name: str, path: str = CLUSTERS) -> dict[str, Any]:
    return kube.request("GET", f"{path}/{name}")[1]


def ready(kube: Kube, name: str) -> dict[str, Any]:
    return until(lambda: (o := get(kube, name)).get("status", {}).get("state") == "ready" and o)


def events(kube: Kube, name: str) -> list[tuple[str, str, str]]:
    rows = kube.request("GET", f"{CORE}/events?fieldSelector=involvedObject.name={name}")[1]["items"]
    return [(row["type"], row["reason"], row["message"]) for row in rows]


def condition(obj: dict[str, Any], name: str) -> dict[str, Any]:
    return next((c for c in obj.get("status", {}).get("conditions", []) if c["type"] == name), {})


class Watching:
    """The lines of one watch, as they come."""

    def __init__(self, kube: Kube, path: str) -> None:
        request = urllib.request.Request(kube.server + path, headers={"Authorization": "Bearer lab-token"})
        self.stream = urllib.request.urlopen(request, timeout=60)

    def next(self) -> dict[str, Any]:
        return json.loads(self.stream.readline())

    def rest(self) -> bytes:
        return self.stream.read()

    def __enter__(self) -> Watching:
        return self

    def __exit__(self, *_: object) -> None:
        self.stream.close()


def plain(name: str, script: str, **spec: Any) -> dict[str, Any]:
    containers = [
        {
            "name": "main",
            "image": "bash",
            "command": ["bash", "-c", script],
            "env": [{"name": "WHO", "value": "me"}],
        }
    ]
    return {"metadata": {"name": name}, "spec": {"containers": containers, "restartPolicy": "Never", **spec}}


def phase(kube: Kube, name: str) -> str:
    return get(kube, name, f"{CORE}/pods")["status"]["phase"]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kube]:
    options = ["--definitions", DEFINITIONS] if DEFINITIONS else []
    with Kube(tmp_path_factory.mktemp("kube"), "--no-ray", *options) as kube:
        yield kube
        assert "Traceback" not in kube.log(), kube.log()


@pytest.fixture
def kube(shared: Kube) -> Iterator[Kube]:
    """One server for all, empty and healthy at the end of each test."""
    yield shared
    shared.control("reset")
    for path in (
        JOBS,
        CLUSTERS,
        f"{CORE}/pods",
        f"{CORE}/resourcequotas",
        f"{CORE}/events",
        f"{CORE}/secrets",
    ):
        assert shared.request("DELETE", path)[0] == 200
    kinds = ("rayjobs", "rayclusters", "pods", "services", "secrets")
    until(lambda: not any(shared.names(kind) for kind in kinds))
