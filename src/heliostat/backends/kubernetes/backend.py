"""The Kubernetes backend: a cluster is one RayCluster, and KubeRay's operator creates its nodes.

A `run` is a RayJob in InteractiveMode. Heliostat submits the job to Ray, with the working directory, and reads output and exit
code. The operator deletes the cluster after the job even if this computer is off by then.
"""

from __future__ import annotations

import base64
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from heliostat.backends.base import (
    Check,
    File,
    Handle,
    LaunchRequest,
    Observation,
    Plan,
    Platform,
    PlatformStatus,
    Question,
    Step,
)
from heliostat.backends.kubernetes import api as kube
from heliostat.backends.kubernetes import states
from heliostat.backends.kubernetes.checks import QUESTIONS, checks
from heliostat.backends.kubernetes.logs import read_pod_logs
from heliostat.backends.kubernetes.options import Options
from heliostat.backends.kubernetes.pod_exec import run_in_pod
from heliostat.backends.kubernetes.service_transport import ServiceTransport
from heliostat.backends.kubernetes.watch import Cluster, Object
from heliostat.common.documents import JsonMapping, JsonObject
from heliostat.common.errors import Code, DeadlineError, HeliostatError, NotFoundError, Refused
from heliostat.remote.transport import Completed
from heliostat.state.states import NodeState

if TYPE_CHECKING:
    from heliostat.backends.detection import Detected
    from heliostat.config.spec import ClusterSpec
    from heliostat.remote.ray_client import RayApi
    from heliostat.remote.transport import Transport
    from heliostat.state.records import NodeRecord

N = NodeState
DELETE_TIMEOUT_S = 180.0  # a pod has 30 s to terminate, and a busy operator is slow
GRACE_S = 10.0  # from SIGTERM to SIGKILL at the time limit of a `run`
OPERATOR_TIMEOUT_S = 20.0  # the operator may not run if it has not processed an object by then
TABLE_CACHE_S = 5.0  # between two reads of Ray's node table while all nodes are ready
DASHBOARD = 8265
# the kubelet reports no exit code for a missing program, a shell does; KubeRay starts Ray by this shell
SHELL = ("/bin/bash", "-c", 'exec "$@"', "bash")
PLURALS = {"RayCluster": "rayclusters", "RayJob": "rayjobs"}


class Kubernetes(Platform):
    name: ClassVar[str] = "kubernetes"
    Options: ClassVar[type] = Options
    poll_interval: ClassVar[tuple[float, float]] = (0.3, 5.0)
    detection_priority: ClassVar[int] = 2
    not_detected: ClassVar[str] = "no kubeconfig has a current context: $KUBECONFIG, else ~/.kube/config"
    first_step: ClassVar[tuple[str, str]] = ("check your permissions", "heliostat doctor heliostat.yaml")

    def __init__(self) -> None:
        self._clusters: dict[str, Cluster] = {}
        self._tables: dict[str, tuple[float, frozenset[str] | None]] = {}

    # -- planning

    def require(self, spec: ClusterSpec, host: Transport) -> None:
        table = spec.backend_tables.get(self.name, {})
        kube.connect(
            table.get("kubeconfig"), table.get("context")
        )  # raises if it lacks package or kubeconfig

    def plan(self, request: LaunchRequest) -> Plan:
        import yaml

        from heliostat.backends.kubernetes import manifest

        command = request.config.get("command")
        groups = {str(name): options for name, options in request.group_options.items()}
        document = manifest.render_manifest(
            request.spec,
            request.options,
            groups,
            str(request.config["id"]),
            run=command is not None,
            detached=bool(command and command.get("detached")),
        )
        manifest.check_manifest(document)
        text = yaml.safe_dump(document, sort_keys=False, width=110)
        path = request.folder / "manifest.yaml"
        kubectl = ["kubectl", *(("--context", request.options.context) if request.options.context else ())]
        step = Step((*kubectl, "create", "-f", path.as_posix()), tuple(m.name for m in request.members))
        notes = tuple(manifest.list_notes(request.spec, command is not None))
        return Plan((File(path, text),), (step,), notes)

    # -- starting and ending

    def launch(self, plan: Plan, request: LaunchRequest, host: Transport) -> Iterator[Handle]:
        import yaml

        document = yaml.safe_load(plan.files[0].text)
        options, cluster_id = request.options, request.config["id"]
        api = kube.connect(options.kubeconfig, options.context)
        namespace = options.namespace or api.namespace
        kind, name = document["kind"], document["metadata"]["name"]
        path = _collection_path(namespace, kind)
        try:
            obj = api.call("POST", path, document, query={"fieldValidation": "Strict"})
        except kube.Conflict as error:
            obj = api.call("GET", f"{path}/{name}")  # ours, if an earlier response was lost
            if obj["metadata"].get("labels", {}).get(kube.ID_LABEL) != cluster_id:
                raise HeliostatError(
                    f"the name `{name}` is in use in the namespace `{namespace}`",
                    cause=error.cause,
                    hint="choose another with --name, or another namespace",
                    code=Code.KUBERNETES_CONFLICT,
                ) from None
        handle = _handle(api, namespace, obj, plan.steps[0].nodes)
        if kind == "RayJob" and request.spec.time:  # by the local clock: the server's may differ
            limit = {"limit": request.spec.time, "until": time.time() + request.spec.time}
            handle = replace(handle, detail={**handle.detail, **limit})
        yield handle

    def find_orphans(self, cluster_id: str | None, spec: ClusterSpec, host: Transport) -> list[Handle]:
        from heliostat.config.members import members

        table = spec.backend_tables.get(self.name, {})
        api = kube.connect(table.get("kubeconfig"), table.get("context"))
        namespace = table.get("namespace") or api.namespace
        selector = f"{kube.ID_LABEL}={cluster_id}" if cluster_id else kube.ID_LABEL
        found = []
        for kind in PLURALS:
            listed = api.call("GET", _collection_path(namespace, kind), query={"labelSelector": selector})
            found += [
                _handle(api, namespace, {"kind": kind, **item}, tuple(m.name for m in members(spec)))
                for item in listed["items"]
                # a copy under another name has our label too
                if item["metadata"]["name"] == spec.cluster_name
            ]
        return found

    def observe(self, handles: Sequence[Handle], host: Transport) -> dict[str, Observation]:
        return {handle.native_id: self._observe(handle) for handle in handles}

    def _observe(self, handle: Handle) -> Observation:
        cluster = self._cluster(handle)
        try:
            obj = cluster.fetch()
        except HeliostatError as error:
            return Observation(N.UNKNOWN, str(error))
        if obj is None:
            return Observation(N.GONE, "the object was deleted")
        return states.resolve_object_state(obj, cluster.ray_cluster_exists, int(handle.detail["launch"]))

    def cancel(self, handles: Sequence[Handle], host: Transport, *, now: bool = False) -> None:
        for handle in handles:
            self._cluster(handle).close()
            self._delete(handle, now)
        for handle in handles:
            self._wait_gone(handle, now)

    def _delete(self, handle: Handle, now: bool) -> None:
        """Deletes by uid: another object may have the name by now."""
        api, cluster = _api(handle), self._cluster(handle)
        pods = cluster.remaining_pods() if now else []
        api.delete(cluster.path, cluster.uid, propagationPolicy="Background")
        for pod in pods:
            path = f"/api/v1/namespaces/{cluster.namespace}/pods/{pod['metadata']['name']}"
            api.delete(path, str(pod["metadata"]["uid"]), gracePeriodSeconds=0)

    def _wait_gone(self, handle: Handle, now: bool) -> None:
        cluster, deadline, pause = self._cluster(handle), time.monotonic() + DELETE_TIMEOUT_S, 0.1
        while True:
            obj, pods = cluster.fetch(), cluster.remaining_pods()
            if obj is None and not pods:
                return
            if time.monotonic() > deadline:
                raise _objects_left_error(handle, obj, pods, now)
            time.sleep(pause)
            pause = min(1.0, pause * 1.5)

    def collect_logs(self, handles: Sequence[Handle], folder: Path) -> list[str]:
        """Deletes the RayJob of an ended `run`: the logs and the record are local."""
        for handle in handles:
            if handle.detail["object"] == "RayJob":
                try:
                    self._delete(handle, False)
                except HeliostatError as error:
                    return [f"`{handle.native_id}` was not deleted: {error}"]
        return []

    # -- status

    def platform_status(
        self, handle: Handle, nodes: Sequence[NodeRecord], before: JsonMapping, host: Transport
    ) -> PlatformStatus:
        cluster = self._cluster(handle)
        obj, pods = cluster.observe()
        if obj is None:
            return PlatformStatus(before)  # `observe` reports that it is gone
        named = states.name_pods(nodes, pods, before)
        token = self._read_token(handle, cluster, obj)
        alive = self._read_alive_addresses(handle, cluster, named, before, token)
        events = cluster.warnings() if None in named.values() else []
        replaced = {node.name for node in nodes} if not obj["spec"].get("suspend") else set()
        statuses: dict[str, JsonMapping] = {}
        for name, pod in named.items():
            if pod is None:
                node = next(node for node in nodes if node.name == name)
                status = self._missing_pod_status(obj, events)
                statuses[name] = {**status, "role": node.role, "group": node.group}
            else:
                statuses[name] = states.resolve_pod_status(
                    pod, alive, before.get(name) or {}, replaced=name in replaced, now=time.time()
                )
        return PlatformStatus(statuses, self._make_connection(cluster, obj, statuses), token)

    def _missing_pod_status(self, obj: Object, events: Sequence[Object]) -> dict[str, str]:
        if obj["spec"].get("suspend"):
            if "kueue.x-k8s.io/queue-name" in (obj["metadata"].get("labels") or {}):
                return {"state": "QUEUED", "reason": "queued by Kueue"}
            return {"state": "SUSPENDED", "reason": "suspended; `heliostat up` resumes it"}
        since = datetime.fromisoformat(obj["metadata"]["creationTimestamp"].replace("Z", "+00:00"))
        seen = (obj.get("status") or {}).get("observedGeneration") or obj["kind"] == "RayJob"
        is_late = time.time() - since.timestamp() > OPERATOR_TIMEOUT_S
        state, reason = states.resolve_missing_pod(events, bool(seen), is_late)
        return {"state": state, "reason": reason}

    def _read_token(self, handle: Handle, cluster: Cluster, obj: JsonMapping) -> str | None:
        """The token, from the Secret that the operator creates with the cluster's name."""
        name = cluster.ray_name(obj)
        if cluster.token is None and name and cluster.check_token_required(obj):
            try:
                path = f"/api/v1/namespaces/{cluster.namespace}/secrets/{name}"
                secret = _api(handle).call("GET", path)
                cluster.token = base64.b64decode(secret["data"]["auth_token"]).decode()
            except (kube.ObjectNotFound, KeyError):
                return None  # not created yet
        return cluster.token

    def _read_alive_addresses(
        self,
        handle: Handle,
        cluster: Cluster,
        named: Mapping[str, JsonMapping | None],
        before: JsonMapping,
        token: str | None,
    ) -> frozenset[str] | None:
        """The addresses in Ray's node table; cached while all nodes are ready. None if Ray does not answer."""
        running = {
            name: pod["metadata"]["name"]
            for name, pod in named.items()
            if pod and (pod.get("status") or {}).get("phase") == "Running"
        }
        if "head" not in running or (token is None and cluster.requires_token):
            return None
        ready = {n: w.get("id") for n, w in before.items() if w.get("state") == "READY"}
        at, known = self._tables.get(cluster.uid, (0.0, None))
        if known is not None and time.monotonic() - at < TABLE_CACHE_S and ready == running:
            return known
        try:
            found = frozenset(str(node["ip"]) for node in self._connect_ray(handle, token).nodes())
        except Refused:
            raise  # missing permissions or expired credentials: waiting does not help
        except HeliostatError:
            found = None
        self._tables[cluster.uid] = (time.monotonic(), found)
        return found

    def _connect_ray(self, handle: Handle, token: str | None) -> RayApi:
        from heliostat.remote.ray_client import RayApi

        transport = ServiceTransport(_api(handle), self._cluster(handle), handle.native_id)
        host, port = transport.forward("127.0.0.1", DASHBOARD)
        return RayApi(host, port, token, name=handle.native_id, proxy_error=transport.proxy_error)

    def _make_connection(
        self, cluster: Cluster, obj: Object, statuses: Mapping[str, Object]
    ) -> JsonObject | None:
        head = next((status for status in statuses.values() if status["role"] == "head"), {})
        if head.get("state") != "READY":
            return None
        address = f"ray://{cluster.service(obj)}.{cluster.namespace}.svc:10001"
        mode = "token" if cluster.requires_token else "disabled"
        env = {"RAY_ADDRESS": address, "HELIOSTAT_HEAD_IP": head.get("ip"), "RAY_AUTH_MODE": mode}
        if cluster.requires_token:
            env["RAY_AUTH_TOKEN_PATH"] = ""  # the caller sets the path of the local file
        version = cluster.ray_spec(obj).get("rayVersion")
        return {"schema": 1, "address": address, "dashboard_port": DASHBOARD, "ray": version, "env": env}

    # -- changes

    def resize(self, handle: Handle, workers: Mapping[str | None, int], host: Transport) -> None:
        cluster = self._cluster(handle)
        obj = cluster.fetch()
        groups = cluster.ray_spec(obj or {}).get("workerGroupSpecs") or []
        where = "/spec/rayClusterSpec" if handle.detail["object"] == "RayJob" else "/spec"
        patch = []
        for index, group in enumerate(groups):
            name = None if group["groupName"] == states.DEFAULT_GROUP else group["groupName"]
            if name in workers:
                path = f"{where}/workerGroupSpecs/{index}"
                # a patch addresses list items by position, which another client may have changed
                patch.append({"op": "test", "path": f"{path}/groupName", "value": group["groupName"]})
                patch += [
                    {"op": "add", "path": f"{path}/{key}", "value": workers[name]}
                    for key in ("replicas", "minReplicas", "maxReplicas")
                ]
        self._patch(handle, patch)

    def suspend(self, handle: Handle, host: Transport) -> None:
        self._set_suspended(handle, True)

    def resume(self, handle: Handle, host: Transport) -> None:
        self._set_suspended(handle, False)

    def _set_suspended(self, handle: Handle, value: bool) -> None:
        self._patch(handle, [{"op": "add", "path": "/spec/suspend", "value": value}])
        self._tables.pop(str(handle.detail["uid"]), None)

    def _patch(self, handle: Handle, patch: list[JsonObject]) -> None:
        """Applies the whole patch, or nothing if the object was replaced: the server tests the uid."""
        api, cluster = _api(handle), self._cluster(handle)
        guarded = [{"op": "test", "path": "/metadata/uid", "value": cluster.uid}, *patch]
        query = {"fieldValidation": "Strict"}
        try:
            api.call("PATCH", cluster.path, guarded, query=query, kind="application/json-patch+json")
        except (kube.ObjectNotFound, kube.InvalidObject):
            uid = api.fetch_uid(cluster.path)
            if uid == cluster.uid:
                raise
            raise NotFoundError(
                f"`{handle.native_id}` does not exist any more",
                cause="it was deleted"
                + (f", and another {handle.detail['object']} has its name" if uid else ""),
                hint="heliostat ls",
                code=Code.NOT_FOUND_CLUSTER,
            ) from None
        finally:
            cluster.invalidate()

    def replace_node(self, handle: Handle, node: str, status: JsonMapping, host: Transport) -> None:
        cluster = self._cluster(handle)
        cluster.delete_pod(str(status["id"]))
        cluster.invalidate()

    def started_job(self, handle: Handle, job: str, host: Transport) -> None:
        if handle.detail["object"] == "RayJob":
            self._patch(handle, [{"op": "add", "path": "/spec/jobId", "value": job}])

    def limited_command(self, handle: Handle, argv: Sequence[str], host: Transport) -> Sequence[str]:
        """The command under `timeout`: SIGTERM shortly before the time limit, SIGKILL at the limit.

        KubeRay marks the RayJob as Failed at its deadline, but deletes the cluster only later."""
        if "until" not in handle.detail:
            return argv
        grace = max(1.0, min(GRACE_S, handle.detail["limit"] / 4))
        left = max(1.0, handle.detail["until"] - time.time() - grace)
        command = ["sh", "-c", argv[0]] if len(argv) == 1 else argv  # a single argument is a shell command
        return ["timeout", "-k", f"{grace:.0f}", f"{left:.0f}", *command]

    # -- access

    def reach(self, handle: Handle, host: Transport | None) -> Transport:
        return ServiceTransport(_api(handle), self._cluster(handle), handle.native_id)

    def execute(self, node: str, handle: Handle, argv: Sequence[str], host: Transport) -> Completed:
        status = handle.detail["status"]
        namespace = self._cluster(handle).namespace
        done = run_in_pod(
            _api(handle), namespace, str(status["id"]), [*SHELL, *argv], f"ray-{status['role']}"
        )
        return replace(done, argv=tuple(argv))

    def attached(
        self, node: str, handle: Handle, argv: Sequence[str], host: Transport, *, terminal: bool
    ) -> list[str]:
        from heliostat.backends.kubernetes import attach

        status = handle.detail["status"]
        pod = (self._cluster(handle).namespace, str(status["id"]), f"ray-{status['role']}")
        api = _api(handle)
        return attach.command(api.kubeconfig, api.context, pod, [*SHELL, *argv], terminal)

    def logs(
        self, handle: Handle, node: str, status: JsonMapping, known: Mapping[str, int], host: Transport
    ) -> Mapping[str, bytes]:
        cluster = self._cluster(handle)
        if not status.get("id"):
            return {}
        ray = None
        if status.get("state") == "READY":
            obj, _ = cluster.observe()
            ray = self._connect_ray(handle, self._read_token(handle, cluster, obj) if obj else None)
        return read_pod_logs(_api(handle), cluster.namespace, status, known, ray)

    def _cluster(self, handle: Handle) -> Cluster:
        key = str(handle.detail["uid"])
        if key not in self._clusters:
            detail = handle.detail
            plural = PLURALS[detail["object"]]
            about = (detail["namespace"], plural, detail["name"], key, detail.get("id"))
            self._clusters[key] = Cluster(_api(handle), *about)
        return self._clusters[key]

    # -- for `doctor`

    questions: ClassVar[Mapping[str, Question]] = QUESTIONS

    def detect(self, machine: Transport, home: Path, environ: Mapping[str, str]) -> Detected | None:
        from heliostat.backends.kubernetes.detection import detect

        return detect(environ.get("KUBECONFIG") or str(home / ".kube" / "config"))

    def checks(self, spec: ClusterSpec | None, host: Transport) -> list[Check]:
        return list(checks((spec.backend_tables.get(self.name) if spec else None) or {}))


def _api(handle: Handle) -> kube.Api:
    return kube.connect(handle.detail["kubeconfig"], handle.detail["context"])


def _objects_left_error(
    handle: Handle, obj: JsonMapping | None, pods: Sequence[JsonMapping], now: bool
) -> DeadlineError:
    """The error with the remaining objects: a node that does not answer keeps pods after the object was deleted."""
    kind, name, space = str(handle.detail["object"]), handle.detail["name"], handle.detail["namespace"]
    left = [f"{kind} {name}"] if obj else []
    for pod in pods:
        where = (pod.get("spec") or {}).get("nodeName")
        left.append(f"pod {pod['metadata']['name']}" + (f" on {where}" if where else ""))
    finalizers = ((obj or {}).get("metadata") or {}).get("finalizers")
    if obj:
        hint = f"kubectl -n {space} describe {kind.lower()} {name}"
    elif now:
        hint = f"kubectl -n {space} describe pod {pods[0]['metadata']['name']}"
    else:  # --now deletes pods without an answer of their kubelet
        hint = f"heliostat down {name} --now"
    return DeadlineError(
        f"`{handle.native_id}` was not deleted completely",
        cause=f"left after {DELETE_TIMEOUT_S:.0f} s: {', '.join(left)}"
        + (f"; finalizers: {', '.join(finalizers)}" if finalizers else ""),
        hint=hint,
        code=Code.KUBERNETES_OBJECTS_LEFT,
    )


def _collection_path(namespace: str, kind: str) -> str:
    return f"{kube.RAY_API}/namespaces/{namespace}/{PLURALS[kind]}"


def _handle(api: kube.Api, namespace: str, obj: JsonMapping, nodes: tuple[str, ...]) -> Handle:
    about = obj["metadata"]
    since = datetime.fromisoformat(about["creationTimestamp"].replace("Z", "+00:00")).timestamp()
    detail = {
        "kubeconfig": api.kubeconfig,
        "context": api.context,  # independent of later changes of the current context
        "namespace": namespace,
        "object": obj["kind"],
        "name": about["name"],
        "uid": about["uid"],
        "kind": "run" if obj["kind"] == "RayJob" else "up",
        "id": (about.get("labels") or {}).get(kube.ID_LABEL),
        "launch": 1,
        "since": since,
    }
    return Handle(f"{namespace}/{about['name']}", nodes, detail)


BACKEND = Kubernetes()
