"""From a file to KubeRay's objects: what is written, what is refused before anything is sent, what the real definitions say."""

from __future__ import annotations

import copy
import functools
import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from fakes.definitions import DEFINITIONS
from heliostat import backends
from heliostat.backends.kubernetes import manifest
from heliostat.cluster import planner
from heliostat.common.errors import UsageError
from heliostat.config import loader
from heliostat.config.spec import ClusterSpec
from heliostat.state.store import ClusterDirectory


def spec(**values: Any) -> ClusterSpec:
    return loader.check({"name": "lab", "on": "kubernetes", **values}, {}, backends)


def rendered(run: bool = False, **values: Any) -> dict[str, Any]:
    command = {"argv": ["true"], "cwd": "/", "text": "true"} if run else None
    _, plan = planner.plan(
        ClusterDirectory(Path("/nowhere/clusters/lab")), spec(**values), cluster_id="ab" * 8, command=command
    )
    assert [file.path.name for file in plan.files] == ["manifest.yaml"]
    return dict(yaml.safe_load(plan.files[0].text))


def group(document: dict[str, Any], name: str) -> dict[str, Any]:
    return next(dict(g) for g in document["spec"]["workerGroupSpecs"] if g["groupName"] == name)


def container(part: dict[str, Any]) -> dict[str, Any]:
    return dict(part["template"]["spec"]["containers"][0])


def test_a_plain_cluster() -> None:
    found = rendered(nodes=3, cpus_per_node=4, memory_per_node="8G")
    assert (found["apiVersion"], found["kind"], found["metadata"]["name"]) == (
        "ray.io/v1",
        "RayCluster",
        "lab",
    )
    assert found["metadata"]["labels"]["heliostat/id"] == "ab" * 8
    assert found["spec"]["authOptions"] == {"mode": "token"} and found["spec"]["rayVersion"] == "2.60.0"
    workers = group(found, "workers")
    assert (workers["replicas"], workers["minReplicas"], workers["maxReplicas"]) == (2, 2, 2)
    for part in (found["spec"]["headGroupSpec"], workers):
        size = container(part)["resources"]
        assert size["requests"] == size["limits"] == {"cpu": "4", "memory": "8Gi"}
        assert container(part)["image"] == "rayproject/ray:2.60.0"
        shm = part["template"]["spec"]["volumes"][0]
        assert shm["emptyDir"]["medium"] == "Memory"
        assert {"name": shm["name"], "mountPath": "/dev/shm"} in container(part)["volumeMounts"]
    ports = {p["name"]: p["containerPort"] for p in container(found["spec"]["headGroupSpec"])["ports"]}
    assert ports == {"gcs-server": 6379, "dashboard": 8265, "client": 10001}
    assert "enableInTreeAutoscaling" not in found["spec"]


def test_groups_gpus_of_any_vendor_labels_and_resources() -> None:
    found = rendered(
        groups={
            "gpu": {
                "nodes": 2,
                "gpus": 4,
                "labels": {"kind": "a100"},
                "resources": {"licence": 2, "slots": 123456789},
            },
            "amd": {
                "nodes": 1,
                "gpus": 1,
                "options": {"gpu": "amd.com/gpu", "node_selector": {"pool": "amd"}},
            },
        },
        kubernetes={"tolerations": [{"key": "gpu", "operator": "Exists"}], "node_selector": {"pool": "any"}},
    )
    gpu, amd = group(found, "gpu"), group(found, "amd")
    assert container(gpu)["resources"]["limits"]["nvidia.com/gpu"] == "4"
    assert container(gpu)["image"].endswith("-gpu")
    assert container(amd)["resources"]["requests"]["amd.com/gpu"] == "1"
    assert gpu["labels"] == {"kind": "a100"} and gpu["resources"] == {"licence": "2", "slots": "123456789"}
    assert gpu["template"]["spec"]["nodeSelector"] == {"pool": "any"}
    assert amd["template"]["spec"]["nodeSelector"] == {"pool": "amd"}
    assert amd["template"]["spec"]["tolerations"] == [{"key": "gpu", "operator": "Exists"}]


def test_demand() -> None:
    found = rendered(autoscale={"min": 1, "max": 8, "idle": "5m"}, nodes=4)
    assert found["spec"]["enableInTreeAutoscaling"] is True
    assert found["spec"]["autoscalerOptions"] == {"version": "v2", "idleTimeoutSeconds": 300}
    workers = group(found, "workers")
    assert (workers["replicas"], workers["minReplicas"], workers["maxReplicas"]) == (3, 1, 8)
    two = rendered(groups={"a": {"nodes": 4, "min": 2, "max": 10}, "b": {"nodes": 1}})
    assert [group(two, name)["maxReplicas"] for name in "ab"] == [10, 1]


def test_a_run_is_a_job_that_the_operator_ends() -> None:
    found = rendered(run=True, nodes=2, time="1:00:00")
    job = found["spec"]
    assert (found["kind"], job["submissionMode"]) == ("RayJob", "InteractiveMode")
    assert job["shutdownAfterJobFinishes"] and job["ttlSecondsAfterFinished"] > 0
    assert job["activeDeadlineSeconds"] == 3600 and "entrypoint" not in job
    assert job["rayClusterSpec"]["workerGroupSpecs"][0]["replicas"] == 1


def test_a_head_without_work_still_has_a_machine() -> None:
    head = rendered(head={"work": False, "cpus": 8, "memory": "32G"})["spec"]["headGroupSpec"]
    assert head["rayStartParams"] == {"num-cpus": "0", "num-gpus": "0"}
    assert container(head)["resources"]["limits"] == {"cpu": "8", "memory": "32Gi"}


def test_environment_setup_requirements_and_volumes(tmp_path: Path) -> None:
    wanted = tmp_path / "requirements.txt"
    wanted.write_text("# ours\ntorch==2.13.0\nnumpy>=2,<3  # old\n\n")
    found = rendered(
        environment={"env": {"A": "b c"}, "setup": ["source /opt/x"], "requirements": str(wanted)},
        object_store="1G",
        kubernetes={
            "volumes": ["data:/data:ro", {"name": "scratch", "emptyDir": {}, "mountPath": "/scratch"}],
            "pull_secrets": ["registry"],
            "service_account": "trainer",
            "gcs": "redis:6379",
        },
    )
    head = found["spec"]["headGroupSpec"]
    pod = head["template"]["spec"]
    assert container(head)["env"] == [{"name": "A", "value": "b c"}]
    assert container(head)["args"] == ["source /opt/x && pip install --quiet torch==2.13.0 'numpy>=2,<3'"]
    assert head["rayStartParams"]["object-store-memory"] == str(2**30)
    claims = [v.get("persistentVolumeClaim") for v in pod["volumes"]]
    assert {"claimName": "data", "readOnly": True} in claims
    assert [m["mountPath"] for m in container(head)["volumeMounts"]] == ["/dev/shm", "/data", "/scratch"]
    assert pod["imagePullSecrets"] == [{"name": "registry"}] and pod["serviceAccountName"] == "trainer"
    assert found["spec"]["gcsFaultToleranceOptions"] == {"redisAddress": "redis:6379"}
    wanted.write_text("-r other.txt\n")
    with pytest.raises(UsageError, match="cannot be used on `kubernetes`"):
        rendered(environment={"requirements": str(wanted)})


def test_any_other_field_goes_in() -> None:
    found = rendered(
        kubernetes={
            "pod": {
                "priorityClassName": "high",
                "containers": [
                    {"securityContext": {"runAsUser": 1000}},
                    {"name": "logger", "image": "log:1"},
                ],
            },
            "cluster": {"headServiceAnnotations": {"a": "b"}},
            "labels": {"kueue.x-k8s.io/queue-name": "team"},
        }
    )
    pod = found["spec"]["headGroupSpec"]["template"]["spec"]
    assert pod["priorityClassName"] == "high"
    assert [c["name"] for c in pod["containers"]] == ["ray-head", "logger"]
    assert pod["containers"][0]["securityContext"] == {"runAsUser": 1000} and pod["containers"][0]["image"]
    assert found["spec"]["headServiceAnnotations"] == {"a": "b"}
    assert found["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team"


def test_what_is_printed_has_no_references_and_no_id() -> None:
    _, plan = planner.plan(
        ClusterDirectory(Path("/nowhere/clusters/lab")),
        spec(nodes=2, kubernetes={"volumes": [{"emptyDir": {}, "mountPath": "/x"}]}),
    )
    assert "&id" not in plan.files[0].text and "heliostat/id" not in plan.files[0].text


def test_what_the_document_shows_is_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("requirements.txt").write_text("torch\n")
    text = (Path(__file__).parents[3] / "docs" / "kubernetes.md").read_text()
    blocks = [
        block for block in re.findall(r"```yaml\n(.*?)```", text, re.DOTALL) if "kind: Role" not in block
    ]
    assert len(blocks) >= 5
    for block in blocks:
        path = tmp_path / "heliostat.yaml"
        path.write_text(block if "\non: " in block else f"on: kubernetes\n{block}")
        found = loader.load(backends, file=path, environ={}).spec
        planner.plan(ClusterDirectory(tmp_path / "lab"), found)


REFUSED = [
    ({"name": "Upper"}, "`Upper` is not a valid name on `kubernetes`"),
    ({"name": "1st"}, "`1st` is not a valid name on `kubernetes`"),
    ({"groups": {"GPU": {"nodes": 1}}}, "`GPU` is not a valid group name"),
    ({"groups": {"headgroup": {"nodes": 1}}}, "`headgroup` is not a valid group name"),
    ({"groups": {"workers": {"nodes": 1}}, "kubernetes": {"cluster": {"workerGroupSpecs": []}}}, None),
    ({"environment": {"ray": "2.40.0"}}, "Ray 2.40.0 has no authentication"),
    ({"kubernetes": {"pod": {"containers": []}}}, "have no container"),
    ({"kubernetes": {"ray_start": {"labels": "a=b"}}}, "labels of `head` are in `ray_start`"),
    ({"kubernetes": {"pod": {"restartPolicy": "Always"}}, "autoscale": {"max": 2}}, "`restartPolicy`"),
    ({"kubernetes": {"volumes": ["data"]}}, "`data` is not a volume"),
    ({"kubernetes": {"volumes": [{"emptyDir": {}}]}}, "a volume has no `mountPath`"),
    ({"kubernetes": {"gcs": {"redisAddress": "r:1", "redisPassword": {"value": "x"}}}}, "redisPassword"),
    ({"kubernetes": {"imagee": "x"}}, "unknown key `kubernetes.imagee`"),
    ({"environment": {"env": {"RAY_AUTH_TOKEN": "x"}}}, "`RAY_AUTH_TOKEN` cannot be set in the file"),
]


@pytest.mark.parametrize(("values", "words"), REFUSED, ids=str)
def test_what_the_operator_would_refuse_later_is_refused_now(
    values: dict[str, Any], words: str | None
) -> None:
    if words is None:
        rendered(**values)
        return
    with pytest.raises(UsageError) as caught:
        rendered(**values)
    assert words in caught.value.message


def test_the_operators_own_checks() -> None:
    """On the finished object: a person's own fields may have spoilt it."""
    good = rendered(run=True, nodes=2)
    assert list(manifest.find_problems(good)) == []

    def bad(change: Any) -> str:
        document = copy.deepcopy(good)
        change(document)
        return next(what for what, _ in manifest.find_problems(document))

    def first(document: dict[str, Any]) -> dict[str, Any]:
        groups: list[dict[str, Any]] = document["spec"]["rayClusterSpec"]["workerGroupSpecs"]
        return groups[0]

    assert "too long" in bad(lambda d: d["metadata"].update(name="x" * 48))
    assert "has an invalid size" in bad(lambda d: first(d).update(minReplicas=3))
    assert "two groups" in bad(lambda d: d["spec"]["rayClusterSpec"]["workerGroupSpecs"].append(first(d)))
    assert "ttlSeconds" in bad(lambda d: d["spec"].update(shutdownAfterJobFinishes=False))
    assert "ttlSeconds" in bad(lambda d: d["spec"].update(ttlSecondsAfterFinished=-1))
    assert "given twice" in bad(
        lambda d: first(d).update(resources={"x": "1"}, rayStartParams={"num-cpus": "1"})
    )
    assert "is incomplete" in bad(lambda d: first(d).pop("minReplicas"))
    for name in ("cpu", "Memory", "mygpu", "example.org/GPU", "nvidia.com/mig-2g.32gb", "it's"):
        assert "cannot be a resource" in bad(lambda d, name=name: first(d).update(resources={name: "1"}))


# -- the real definitions


def strict(schema: Any) -> Any:
    """As the API server with fieldValidation=Strict: unknown fields are refused; an int-or-string is either."""
    if isinstance(schema, list):
        return [strict(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: strict(value) for key, value in schema.items()}
    if found.pop("x-kubernetes-int-or-string", False) is True:
        found.pop("type", None)
        found["anyOf"] = [{"type": "integer"}, {"type": "string"}]
    keeps = found.pop("x-kubernetes-preserve-unknown-fields", False)
    if isinstance(found.get("properties"), dict) and "additionalProperties" not in found and not keeps:
        found["additionalProperties"] = False
    return found


@functools.cache
def validator(kind: str) -> jsonschema.Draft202012Validator:
    path = DEFINITIONS / f"ray.io_{kind.lower()}s.v1.json"
    document = json.loads(path.read_text())
    version = next(v for v in document["spec"]["versions"] if v["name"] == "v1")
    schema = strict(version["schema"]["openAPIV3Schema"])
    schema["properties"]["metadata"] = {"type": "object"}
    return jsonschema.Draft202012Validator(schema)


FILES: list[dict[str, Any]] = [
    {"nodes": 1},
    {"nodes": 3, "cpus_per_node": 4, "gpus_per_node": 1, "memory_per_node": "8G", "object_store": "1G"},
    {"autoscale": {"min": 1, "max": 8}, "nodes": 2, "labels": {"a": "b"}},
    {
        "groups": {
            "gpu": {"nodes": 2, "gpus": 4, "min": 0, "max": 10, "resources": {"x": 2}},
            "cpu": {"nodes": 1},
        },
        "head": {"work": False},
        "environment": {"env": {"A": "b"}, "setup": ["true"]},
        "security": {"auth": "none"},
        "kubernetes": {
            "namespace": "ml",
            "volumes": ["data:/data", {"hostPath": {"path": "/x"}, "mountPath": "/y", "readOnly": True}],
            "tolerations": [{"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}],
            "node_selector": {"pool": "gpu"},
            "pull_secrets": ["r"],
            "service_account": "s",
            "gcs": {
                "redisAddress": "r:6379",
                "redisPassword": {"valueFrom": {"secretKeyRef": {"name": "r", "key": "p"}}},
            },
            "autoscaler": {"upscalingMode": "Conservative", "resources": {"limits": {"cpu": "1"}}},
            "pod": {"containers": [{"securityContext": {"runAsUser": 1}}], "priorityClassName": "p"},
            "annotations": {"a": "b"},
        },
    },
]


@pytest.mark.needs_definitions
@pytest.mark.parametrize("run", [False, True], ids=["cluster", "job"])
@pytest.mark.parametrize("values", FILES, ids=range(len(FILES)))
def test_what_is_rendered_is_what_the_definitions_allow(values: dict[str, Any], run: bool) -> None:
    document = rendered(run=run, **values)
    rules = validator(document["kind"])
    assert [error.message for error in rules.iter_errors(document)] == []
    spoilt = copy.deepcopy(document)
    spoilt["spec"]["numWorkers"] = 2
    assert not rules.is_valid(spoilt)
