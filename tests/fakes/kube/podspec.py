"""The Pods that KubeRay makes of a RayCluster: names, labels, the command that starts Ray, variables, probes."""

from __future__ import annotations

import copy
import json
from typing import Any

from . import rules
from .store import Object
from .world import quantity


def short(name: str) -> str:
    """KubeRay's CheckName: of a long name the last 50 characters, and never a digit first."""
    name = name[max(0, len(name) - 50) :]
    return "r" + name[1:] if not name[0].isalpha() else name


def token_secret(cluster: Object) -> str:
    return (cluster["spec"].get("authOptions") or {}).get("secretName") or short(cluster["metadata"]["name"])


def desired(group: Object) -> int:
    if group.get("suspend"):
        return 0
    low, high = group.get("minReplicas", 0), group.get("maxReplicas", 2**31 - 1)
    return min(max(group.get("replicas") or 0, low), high) * max(1, group.get("numOfHosts", 1))


def head_pod(cluster: Object) -> Object:
    return _pod(
        cluster, cluster["spec"]["headGroupSpec"], "head", "headgroup", f"{cluster['metadata']['name']}"
    )


def worker_pod(cluster: Object, group: Object, index: int) -> Object:
    name = group["groupName"]
    pod = _pod(cluster, group, "worker", name, f"{cluster['metadata']['name']}-{name}")
    pod["metadata"]["labels"]["ray.io/worker-group-replica-index"] = str(index)
    ray = pod["spec"]["containers"][0]
    init = {
        key: copy.deepcopy(ray[key])
        for key in ("image", "imagePullPolicy", "env", "volumeMounts")
        if key in ray
    }
    amounts = {"cpu": "200m", "memory": "256Mi"}
    init |= {"name": "wait-gcs-ready", "command": ["/bin/bash", "-c", "--"], "args": ["ray health-check"]}
    init["resources"] = {"limits": amounts, "requests": dict(amounts)}
    pod["spec"]["initContainers"] = [*(pod["spec"].get("initContainers") or []), init]
    return pod


def _pod(cluster: Object, group: Object, node: str, label: str, prefix: str) -> Object:
    meta, spec = cluster["metadata"], cluster["spec"]
    template = copy.deepcopy(group["template"])
    given = template.get("metadata") or {}
    fixed = {"ray.io/cluster": meta["name"], "ray.io/node-type": node, "ray.io/group": label}
    labels = {
        "ray.io/is-ray-node": "yes", "ray.io/identifier": f"{meta['name']}-{node}"[-63:],
        "app.kubernetes.io/name": "kuberay", "app.kubernetes.io/created-by": "kuberay-operator",
        **(given.get("labels") or {}), **(group.get("labels") or {}), **fixed,
    }  # fmt: skip
    annotations = dict(given.get("annotations") or {})
    if (meta.get("annotations") or {}).get("ray.io/overwrite-container-cmd", "").lower() == "true":
        annotations["ray.io/overwrite-container-cmd"] = "true"
    if node == "head":
        annotations["ray.io/ft-enabled"] = str(bool(spec.get("gcsFaultToleranceOptions"))).lower()
    body, container = template["spec"], template["spec"]["containers"][0]
    service = (group.get("headService") or {}).get("metadata", {}).get("name") or f"{meta['name']}-head-svc"
    address = f"{service}.{meta['namespace']}.svc.cluster.local"
    port = (spec["headGroupSpec"].get("rayStartParams") or {}).get("port", "6379")
    command = start_command(group, node, container, f"{address}:{port}")
    said = " ".join([*(container.get("command") or []), *(container.get("args") or [])])
    if "ray.io/overwrite-container-cmd" not in annotations and "ray start" not in said:
        limit = "ulimit -n ${RAY_START_ULIMIT_OPEN_FILES:-65536}"
        container["command"] = ["/bin/bash", "-c", "--"]
        container["args"] = [f"{said} && {limit}; {command}" if said else f"{limit}; {command}"]
    container["env"] = _env(cluster, container.get("env") or [], node, address, port, command)
    ports = container.setdefault("ports", [])
    if not any(p.get("name") == "metrics" for p in ports):
        ports.append({"name": "metrics", "containerPort": 8080})
    _probes(container, spec.get("rayVersion", ""), node)
    if spec.get("enableInTreeAutoscaling"):
        if node == "head":
            body["containers"].append({"name": "autoscaler", "image": container.get("image", "")})
        if (spec.get("autoscalerOptions") or {}).get("version") == "v2":
            body["restartPolicy"] = "Never"
    generated = prefix[:50].lower() + f"-{node}-"
    return {
        "metadata": {"generateName": generated, "labels": labels, "annotations": annotations},
        "spec": body,
    }


def start_command(group: Object, node: str, container: Object, address: str) -> str:
    params = dict(group.get("rayStartParams") or {})
    more = {}
    for name, amount in (group.get("resources") or {}).items():
        whole, known = str(-(-quantity(amount) // 1)), {"cpu": "num-cpus", "memory": "memory"}
        if name.lower() in known or name.lower().endswith("gpu"):
            params[known.get(name.lower(), "num-gpus")] = whole
        else:
            more[name] = float(quantity(amount))
    if more:
        params["resources"] = f"'{json.dumps(more)}'"
    if group.get("labels"):
        params["labels"] = ",".join(f"{key}={value}" for key, value in sorted(group["labels"].items()))
    if node == "worker":
        params.setdefault("address", address)
    else:
        params.setdefault("dashboard-host", "0.0.0.0")
    params.setdefault("metrics-export-port", "8080")
    params.setdefault("dashboard-agent-listen-port", "52365")
    params["block"] = "true"
    limits = (container.get("resources") or {}).get("limits") or {}
    requests = (container.get("resources") or {}).get("requests") or {}
    cpu = limits.get("cpu") or requests.get("cpu")
    if cpu:
        params.setdefault("num-cpus", str(-(-quantity(cpu) // 1)))
    if limits.get("memory"):
        params.setdefault("memory", str(-(-quantity(limits["memory"]) // 1)))
    for name, amount in sorted(limits.items()):
        if name.endswith("gpu") and quantity(amount):
            params.setdefault("num-gpus", str(-(-quantity(amount) // 1)))
    words = []
    for key, value in sorted(params.items()):
        if value.lower() in ("true", "false") and key not in (
            "log-color",
            "include-dashboard",
            "include-log-monitor",
        ):
            words += [f"--{key}"] if value.lower() == "true" else []
        else:
            words.append(f"--{key}={value}")
    return " ".join(["ray start", *(["--head"] if node == "head" else []), *words])


def _env(
    cluster: Object, given: list[Object], node: str, address: str, port: str, command: str
) -> list[Object]:
    spec = cluster["spec"]
    rows, have = copy.deepcopy(given), {item["name"] for item in given}

    def add(name: str, value: str = "", **source: Any) -> None:
        if name not in have:
            rows.append({"name": name, **({"valueFrom": source} if source else {"value": value})})

    if (spec.get("authOptions") or {}).get("mode") == "token":
        add("RAY_AUTH_MODE", "token")
        add("RAY_AUTH_TOKEN", secretKeyRef={"name": token_secret(cluster), "key": "auth_token"})
    if node == "worker":
        add("FQ_RAY_IP", address)
        add("RAY_IP", address.split(".")[0])
    for name, path in (
        ("RAY_CLUSTER_NAME", "metadata.labels['ray.io/cluster']"),
        ("RAY_CLUSTER_NAMESPACE", "metadata.namespace"),
        ("RAY_CLOUD_INSTANCE_ID", "metadata.name"),
        ("RAY_NODE_TYPE_NAME", "metadata.labels['ray.io/group']"),
    ):
        add(name, fieldRef={"fieldPath": path})
    add("KUBERAY_GEN_RAY_START_CMD", command)
    add("RAY_PORT", port)
    add("RAY_ADDRESS", f"{address if node == 'worker' else '127.0.0.1'}:{port}")
    add("RAY_USAGE_STATS_KUBERAY_IN_USE", "1")
    add("RAY_DASHBOARD_ENABLE_K8S_DISK_USAGE", "1")
    return rows


def _probes(container: Object, ray_version: str, node: str) -> None:
    http = {"path": "/api/healthz", "port": 52365}
    action: Object = {"httpGet": http}
    try:
        modern = rules.version(ray_version) >= (2, 53, 0)
    except rules.Invalid:
        modern = False
    if not modern:
        check = "wget --tries 1 -T 2 -q -O- http://localhost:52365/api/local_raylet_healthz | grep success"
        action = {"exec": {"command": ["bash", "-c", check]}}
    seconds = 5 if node == "head" else 2
    for name, delay, failures in (("livenessProbe", 30, 120), ("readinessProbe", 10, 10)):
        probe = {**action, "initialDelaySeconds": delay, "timeoutSeconds": seconds, "periodSeconds": 5}
        container.setdefault(name, {**probe, "successThreshold": 1, "failureThreshold": failures})
