"""Stands in for KubeRay's operator: RayClusters become Secrets, Services and Pods, RayJobs become RayClusters.

It follows ray-operator/controllers/ray of KubeRay 1.7: what it makes, in which order, how it names and labels it, and what
it then says in the status. Left out: K8sJobMode, HTTPMode and SidecarMode of a RayJob (nothing is submitted for it), the
autoscaler (the field is honoured: no random deletion), Ingress, Redis, upgrades, groups of several hosts as one unit.
"""

from __future__ import annotations

import base64
import copy
import os
from fractions import Fraction
from typing import Any

from . import rules
from .kubelet import Kubelet
from .podspec import desired, head_pod, short, worker_pod
from .rayjob import RayJobs
from .schema import fill
from .store import RESOURCES, Object, Refused, now, suffix
from .world import World, pod_requests, show

CLUSTERS, JOBS, PODS, SECRETS, SERVICES = (
    RESOURCES[p] for p in ("rayclusters", "rayjobs", "pods", "secrets", "services")
)
PORTS = {"client": 10001, "gcs-server": 6379, "dashboard": 8265, "metrics": 8080, "serve": 8000}


class Failed(Exception):
    """A Pod could not be made or deleted: (the reason of the condition, the words)."""


class Operator(RayJobs):
    def __init__(self, world: World, kubelet: Kubelet) -> None:
        self.world, self.store, self.kubelet = world, world.store, kubelet
        self.refused: dict[str, int] = {}  # uid -> the generation that was found invalid

    async def round(self) -> None:
        for cluster in self.store.list("rayclusters"):
            live = self.store.find(
                "rayclusters", cluster["metadata"]["namespace"], cluster["metadata"]["name"]
            )
            if live is cluster:
                self.cluster(cluster)
        for job in self.store.list("rayjobs"):
            await self.job(job)

    # -- RayCluster

    def cluster(self, cluster: Object) -> None:
        meta, spec = cluster["metadata"], cluster["spec"]
        if spec.get("managedBy", "ray.io/kuberay-operator") != "ray.io/kuberay-operator":
            return
        if not self._valid(cluster) or "deletionTimestamp" in meta:
            return
        error: Failed | None = None
        try:
            self._secret(cluster)
            self._service(cluster)
            self._pods(cluster)
        except Failed as failed:
            error = failed
        except Refused as refused:
            error = Failed("", refused.message)
        status = self._status(cluster, error)
        if _settled(status) != _settled(cluster.get("status") or {}):
            cluster["status"] = status
            self.store.touch("rayclusters", cluster)

    def _valid(self, cluster: Object) -> bool:
        meta, where = cluster["metadata"], f"{cluster['metadata']['namespace']}/{cluster['metadata']['name']}"
        reason, words = "InvalidRayClusterMetadata", "The RayCluster metadata is invalid"
        try:
            rules.name("RayCluster", meta["name"], 53)
            reason, words = "InvalidRayClusterSpec", "The RayCluster spec is invalid"
            rules.cluster_spec(cluster["spec"])
        except rules.Invalid as error:
            if self.refused.get(meta["uid"]) != meta["generation"]:
                self.refused[meta["uid"]] = meta["generation"]
                self._event(cluster, "Warning", reason, f"{words} {where}: {error}")
            return False
        return True

    def _event(self, obj: Object, kind: str, reason: str, message: str) -> None:
        source = "rayjob-controller" if obj["kind"] == "RayJob" else "raycluster-controller"
        starts = {
            "Invalid": "Validate",
            "RayClusterNotFound": "Validate",
            "Deleted": "Delete",
            "FailedToDelete": "Delete",
        }
        action = next((value for key, value in starts.items() if reason.startswith(key)), "Create")
        self.world.event(obj, kind, reason, message, source, action)

    def _make(self, kind: Any, owner: Object, obj: Object) -> Object:
        meta = owner["metadata"]
        obj["metadata"]["ownerReferences"] = [
            {
                "apiVersion": owner["apiVersion"], "kind": owner["kind"], "name": meta["name"], "uid": meta["uid"],
                "controller": True, "blockOwnerDeletion": True,
            }
        ]  # fmt: skip
        if kind is PODS:  # as it would be called, so that a refusal can name it
            obj["metadata"]["name"] = obj["metadata"]["generateName"] + suffix()
        self.world.admit(kind, meta["namespace"], obj)
        return self.store.create(kind, meta["namespace"], fill(kind, obj))

    def _secret(self, cluster: Object) -> None:
        options, meta = cluster["spec"].get("authOptions"), cluster["metadata"]
        # with no mode at all (`authOptions: {}`) there is a Secret, though nobody uses it
        if options is None or options.get("mode") == "disabled" or options.get("enableK8sTokenAuth"):
            return
        if options.get("secretName") or self.store.find("secrets", meta["namespace"], short(meta["name"])):
            return
        token = base64.b64encode(os.urandom(32)).decode()
        named = {"name": short(meta["name"]), "labels": {"ray.io/cluster": meta["name"]}}
        self._make(SECRETS, cluster, {"metadata": named, "stringData": {"auth_token": token}})

    def _service(self, cluster: Object) -> None:
        meta, head = cluster["metadata"], cluster["spec"]["headGroupSpec"]
        labels = {
            "ray.io/cluster": meta["name"], "ray.io/node-type": "head", "ray.io/identifier": f"{meta['name']}-head"[-63:],
            "app.kubernetes.io/name": "kuberay", "app.kubernetes.io/created-by": "kuberay-operator",
        }  # fmt: skip
        if self.store.list(
            "services", meta["namespace"], f"ray.io/cluster={meta['name']},ray.io/node-type=head"
        ):
            return
        own = copy.deepcopy(head.get("headService") or {})
        named = (own.get("metadata") or {}).get("name") or f"{meta['name']}-head-svc"
        container = rules.containers(head)[0]
        ports = {
            p.get("name") or f"{p['containerPort']}-port": p["containerPort"]
            for p in container.get("ports") or []
        }
        ports = ports or dict(PORTS)
        ports.setdefault("metrics", PORTS["metrics"])
        rows = [{"name": n, "port": p, "appProtocol": "tcp"} for n, p in sorted(ports.items())]
        service = {
            "metadata": {"name": named, "labels": labels, "annotations": cluster["spec"].get("headServiceAnnotations") or {}},
            "spec": {"selector": labels, "ports": rows, "type": head.get("serviceType") or "ClusterIP"},
        }  # fmt: skip
        if head.get("serviceType") in (None, "", "ClusterIP"):
            service["spec"] |= {"clusterIP": "None", "publishNotReadyAddresses": True}
        try:
            self._make(SERVICES, cluster, service)
        except Refused as refused:
            words = f"Failed creating service {meta['namespace']}/{named}, {refused.message}"
            self._event(cluster, "Warning", "FailedToCreateService", words)
            raise
        self._event(cluster, "Normal", "CreatedService", f"Created service {meta['namespace']}/{named}")

    # -- its Pods

    def _listed(self, cluster: Object, labels: str = "") -> list[Object]:
        meta = cluster["metadata"]
        return self.store.list("pods", meta["namespace"], f"ray.io/cluster={meta['name']},{labels}")

    def _drop(self, cluster: Object, pods: list[Object], reason: str, words: str) -> None:
        for pod in pods:
            if "deletionTimestamp" not in pod["metadata"]:
                self.store.delete(PODS, pod["metadata"]["namespace"], pod["metadata"]["name"])
                if reason:
                    where = f"{pod['metadata']['namespace']}/{pod['metadata']['name']}"
                    self._event(cluster, "Normal", reason, words.format(pod=where))

    def _pods(self, cluster: Object) -> None:
        spec, meta = cluster["spec"], cluster["metadata"]
        state = _suspension(cluster)
        if state == "RayClusterSuspending":
            self._drop(cluster, self._listed(cluster), "", "")
            words = f"Deleted Pods for RayCluster {meta['namespace']}/{meta['name']} due to suspension"
            self._event(cluster, "Normal", "DeletedPod", words)
            return
        if state == "RayClusterSuspended" or spec.get("suspend"):
            return
        heads = self._listed(cluster, "ray.io/node-type=head")
        if len(heads) == 1:
            self._heal(cluster, heads, "DeletedHeadPod", "head")
        elif not heads:
            try:
                pod = self._make(PODS, cluster, head_pod(cluster))
            except Refused as refused:
                words = f"Failed to create head Pod {meta['namespace']}/, {refused.message}"
                self._event(cluster, "Warning", "FailedToCreateHeadPod", words)
                raise Failed("FailedCreateHeadPod", f"FailedCreateHeadPod\n{refused.message}") from None
            words = f"Created head Pod {meta['namespace']}/{pod['metadata']['name']}"
            self._event(cluster, "Normal", "CreatedHeadPod", words)
        for group in spec.get("workerGroupSpecs") or []:
            self._workers(cluster, group)

    def _heal(self, cluster: Object, pods: list[Object], reason: str, node: str) -> None:
        """Pods that will not run again are deleted now, and made again in a later round."""
        dead = [pod for pod in pods if _dead(pod) and "deletionTimestamp" not in pod["metadata"]]
        for pod in dead:
            status, policy = pod["status"]["phase"], pod["spec"].get("restartPolicy")
            words = (
                f"Deleted {node} Pod {{pod}}; Pod status: {status}; Pod restart policy: {policy}; "
                "Ray container terminated status: nil"
            )
            self._drop(cluster, [pod], reason, words)
        if dead:
            raise Failed("", f"delete {len(dead)} unhealthy {node} Pods")

    def _workers(self, cluster: Object, group: Object) -> None:
        meta, name = cluster["metadata"], group["groupName"]
        pods = self._listed(cluster, f"ray.io/group={name}")
        if group.get("suspend"):
            self._drop(cluster, pods, "DeletedWorkerPod", "Deleted worker Pod {pod}")
            return
        self._heal(cluster, pods, "DeletedWorkerPod", "worker")
        named = (group.get("scaleStrategy") or {}).get("workersToDelete") or []
        going = [pod for pod in pods if pod["metadata"]["name"] in named]
        self._drop(cluster, going, "DeletedWorkerPod", "Deleted pod {pod}")
        pods = [pod for pod in pods if pod not in going]
        more = desired(group) - len(pods)
        taken = {pod["metadata"]["labels"].get("ray.io/worker-group-replica-index") for pod in pods}
        for _ in range(more):
            index = next(i for i in range(10**6) if str(i) not in taken)
            taken.add(str(index))
            try:
                pod = self._make(PODS, cluster, worker_pod(cluster, group, index))
            except Refused as refused:
                words = f"Failed to create worker Pod for the cluster {meta['namespace']}/{meta['name']}, {refused.message}"
                self._event(cluster, "Warning", "FailedToCreateWorkerPod", words)
                raise Failed("FailedCreateWorkerPod", f"FailedCreateWorkerPod\n{refused.message}") from None
            words = f"Created worker Pod {meta['namespace']}/{pod['metadata']['name']}"
            self._event(cluster, "Normal", "CreatedWorkerPod", words)
        if more < 0 and not cluster["spec"].get("enableInTreeAutoscaling"):
            staying = [pod for pod in pods if "deletionTimestamp" not in pod["metadata"]]
            extra = len(staying) - desired(group)
            self._drop(cluster, staying[: max(0, extra)], "DeletedWorkerPod", "Deleted Pod {pod}")

    # -- its status

    def _status(self, cluster: Object, error: Failed | None) -> Object:
        meta, spec = cluster["metadata"], cluster["spec"]
        status = copy.deepcopy(cluster.get("status") or {})
        before = status.get("state", "")
        if error is None:
            _forget(status, "ReplicaFailure")
        elif error.args[0]:
            _say(status, "ReplicaFailure", True, error.args[0], error.args[1])
        pods, groups = self._listed(cluster), spec.get("workerGroupSpecs") or []
        workers = [pod for pod in pods if pod["metadata"]["labels"].get("ray.io/node-type") == "worker"]
        active = [group for group in groups if not group.get("suspend")]
        total = _resources(spec, active)
        status |= {
            "observedGeneration": meta["generation"],
            "readyWorkerReplicas": sum(_ready(pod) for pod in workers),
            "availableWorkerReplicas": sum(pod["status"].get("phase") == "Running" for pod in workers),
            "desiredWorkerReplicas": sum(desired(group) for group in groups),
            "minWorkerReplicas": sum(g.get("minReplicas", 0) * g.get("numOfHosts", 1) for g in active),
            "maxWorkerReplicas": min(
                2**31 - 1, sum(g.get("maxReplicas", 2**31 - 1) * g.get("numOfHosts", 1) for g in active)
            ),
            "desiredCPU": show("cpu", total.get("cpu", Fraction(0))),
            "desiredMemory": show("memory", total.get("memory", Fraction(0))),
            "desiredGPU": show("gpu", sum((v for k, v in total.items() if k.endswith("gpu")), Fraction(0))),
            "desiredTPU": show("tpu", total.get("google.com/tpu", Fraction(0))),
        }
        status = {key: value for key, value in status.items() if value != 0 or key == "observedGeneration"}
        running = bool(pods) and all(_ready(pod) for pod in pods)
        if error is None and running and len(pods) == status.get("desiredWorkerReplicas", 0) + 1:
            status["state"] = "ready"
        self._conditions(cluster, status, pods, running)
        if spec.get("suspend") and not pods:
            status["state"] = "suspended"
        self._addresses(cluster, status)
        status["lastUpdateTime"] = now()
        if status.get("state", "") != before:
            status.setdefault("stateTransitionTimes", {})[status["state"]] = now()
        return status

    def _conditions(self, cluster: Object, status: Object, pods: list[Object], running: bool) -> None:
        heads = [pod for pod in pods if pod["metadata"]["labels"].get("ray.io/node-type") == "head"]
        if heads:
            _say(status, "HeadPodReady", *_head_ready(heads[0]))
        else:
            _say(status, "HeadPodReady", False, "HeadPodNotFound", "Head Pod not found")
        state, suspend = _suspension({"status": status}), cluster["spec"].get("suspend")
        if not _is(status, "RayClusterProvisioned") and state != "RayClusterSuspended":
            if running:
                _say(status, "RayClusterProvisioned", True, "AllPodRunningAndReadyFirstTime", "All Ray Pods are ready for the first time")  # fmt: skip
            else:
                _say(status, "RayClusterProvisioned", False, "RayClusterPodsProvisioning", "RayCluster Pods are being provisioned for first time")  # fmt: skip
        suspending, suspended = "RayClusterSuspending", "RayClusterSuspended"
        if state == suspending:
            if not pods:
                _say(status, "RayClusterProvisioned", False, "RayClusterPodsProvisioning", "RayCluster has been suspended")  # fmt: skip
                _say(status, suspending, False, suspending)
                _say(status, suspended, True, suspended)
        elif state == suspended:
            if suspend is False:  # the field must be there and say no; without it, it stays suspended
                _say(status, suspended, False, suspended)
        else:
            _say(status, suspended, False, suspended)
            _say(status, suspending, bool(suspend), suspending)

    def _addresses(self, cluster: Object, status: Object) -> None:
        meta = cluster["metadata"]
        labels = f"ray.io/cluster={meta['name']},ray.io/node-type=head"
        services, heads = (
            self.store.list("services", meta["namespace"], labels),
            self._listed(cluster, labels),
        )
        head = {}
        if heads:
            head = {"podIP": heads[0]["status"].get("podIP", ""), "podName": heads[0]["metadata"]["name"]}
        if services:
            spec = services[0]["spec"]
            status["endpoints"] = {port["name"]: str(port["targetPort"]) for port in spec["ports"]}
            ip = head.get("podIP", "") if spec.get("clusterIP") == "None" else spec.get("clusterIP", "")
            head |= {"serviceName": services[0]["metadata"]["name"], "serviceIP": ip}
        status["head"] = {key: value for key, value in head.items() if value}


# --- small questions about objects


def _dead(pod: Object) -> bool:
    status = pod.get("status") or {}
    if status.get("phase") in ("Failed", "Succeeded"):
        return True
    first = pod["spec"]["containers"][0]["name"]
    rows = [row for row in status.get("containerStatuses") or [] if row["name"] == first]
    ended = rows and "terminated" in rows[0].get("state", {})
    return bool(ended) and pod["spec"].get("restartPolicy") == "Never"


def _ready(pod: Object) -> bool:
    status = pod.get("status") or {}
    rows = [row for row in status.get("conditions") or [] if row["type"] == "Ready"]
    return status.get("phase") == "Running" and bool(rows) and rows[0]["status"] == "True"


def _head_ready(pod: Object) -> tuple[bool, str, str]:
    status = pod.get("status") or {}
    rows = [row for row in status.get("conditions") or [] if row["type"] == "Ready"]
    if not rows:
        return False, "Unknown", ""
    if rows[0]["status"] == "True":
        return True, "HeadPodRunningAndReady", ""
    reason, message = rows[0].get("reason") or "Unknown", rows[0].get("message", "")
    if reason == "ContainersNotReady":
        for row in status.get("containerStatuses") or []:
            state = row["state"].get("waiting") or row["state"].get("terminated")
            if state:
                return False, state["reason"], f"{message}; {row['name']}: {state.get('message', '')}"
    return False, reason, message


def _suspension(cluster: Object) -> str:
    for row in (cluster.get("status") or {}).get("conditions") or []:
        if row["type"] in ("RayClusterSuspending", "RayClusterSuspended") and row["status"] == "True":
            return row["type"]
    return ""


def _is(status: Object, name: str) -> bool:
    return any(row["type"] == name and row["status"] == "True" for row in status.get("conditions") or [])


def _say(status: Object, name: str, true: bool, reason: str, message: str = "") -> None:
    rows = status.setdefault("conditions", [])
    old = next((row for row in rows if row["type"] == name), None)
    value = "True" if true else "False"
    moved = old["lastTransitionTime"] if old and old["status"] == value else now()
    row = {"type": name, "status": value, "reason": reason, "message": message, "lastTransitionTime": moved}
    if old:
        rows[rows.index(old)] = row
    else:
        rows.append(row)


def _forget(status: Object, name: str) -> None:
    if "conditions" in status:
        status["conditions"] = [row for row in status["conditions"] if row["type"] != name]


def _settled(status: Object) -> Object:
    """Without what changes by itself."""
    return {
        key: value for key, value in status.items() if key not in ("lastUpdateTime", "stateTransitionTimes")
    }


def _resources(spec: Object, groups: list[Object]) -> dict[str, Fraction]:
    total = dict(pod_requests(spec["headGroupSpec"]["template"]["spec"]))
    for group in groups:
        for key, amount in pod_requests(group["template"]["spec"]).items():
            times = (group.get("replicas") or 0) * max(1, group.get("numOfHosts", 1))
            total[key] = total.get(key, Fraction(0)) + amount * times
    return total
