"""A Kubernetes namespace with KubeRay: one RayCluster is the cluster, and the operator makes its nodes.

For a `run` it is a RayJob in InteractiveMode: we hand the job to Ray ourselves, so that this folder goes along and output and
exit code come back whole, and the operator ends the cluster after the job even where this computer is gone by then.
"""

from __future__ import annotations

import base64
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

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
from heliostat.backends.kubernetes.checks import QUESTIONS, checks
from heliostat.backends.kubernetes.logs import pod_logs, run_in_pod
from heliostat.backends.kubernetes.options import Options
from heliostat.backends.kubernetes.states import PLAIN, absent, judge_object, name_pods, tell_pod
from heliostat.backends.kubernetes.watch import Cluster
from heliostat.common.errors import Code, DeadlineError, HeliostatError, NotFoundError, Refused, UsageError
from heliostat.remote.transport import Completed
from heliostat.state.states import NodeState

if TYPE_CHECKING:
    from heliostat.config.spec import ClusterSpec
    from heliostat.remote.ray_client import RayApi
    from heliostat.remote.transport import Transport
    from heliostat.state.records import NodeRecord

N = NodeState
END_S = 180.0  # a pod has 30 s to end, and a busy operator is slow
GRACE_S = 10.0  # from SIGTERM to SIGKILL at the time limit of a `run`
OPERATOR_S = 20.0  # an operator that has not looked by then may not be there
TABLE_S = 5.0  # between two looks at Ray's node table when nothing is expected to change
DASHBOARD = 8265
# a program that is not there has no exit code for the kubelet, but one for a shell; KubeRay starts Ray by this one
SHELL = ("/bin/bash", "-c", 'exec "$@"', "bash")
PLURALS = {"RayCluster": "rayclusters", "RayJob": "rayjobs"}


class Kubernetes(Platform):
    name: ClassVar[str] = "kubernetes"
    Options: ClassVar[type] = Options
    poll_interval: ClassVar[tuple[float, float]] = (0.3, 5.0)

    def __init__(self) -> None:
        self._clusters: dict[str, Cluster] = {}
        self._tables: dict[str, tuple[float, frozenset[str] | None]] = {}

    # -- planning

    def require(self, spec: ClusterSpec, host: Transport) -> None:
        table = spec.backend_tables.get(self.name, {})
        kube.connect(
            table.get("kubeconfig"), table.get("context")
        )  # raises without the package or a kubeconfig

    def plan(self, request: LaunchRequest) -> Plan:
        import yaml

        from heliostat.backends.kubernetes import manifest

        command = request.config.get("command")
        groups = {str(name): options for name, options in request.group_options.items()}
        document = manifest.manifest(
            request.spec,
            request.options,
            groups,
            str(request.config["id"]),
            run=command is not None,
            detached=bool(command and command.get("detached")),
        )
        manifest.refuse(document)
        text = yaml.safe_dump(document, sort_keys=False, width=110)
        path = request.folder / "manifest.yaml"
        words = ["kubectl", *(("--context", request.options.context) if request.options.context else ())]
        step = Step((*words, "create", "-f", path.as_posix()), tuple(m.name for m in request.members))
        return Plan((File(path, text),), (step,), tuple(manifest.notes(request.spec, command is not None)))

    # -- starting and ending

    def launch(self, plan: Plan, request: LaunchRequest, host: Transport) -> Iterator[Handle]:
        import yaml

        document = yaml.safe_load(plan.files[0].text)
        options, mark = request.options, request.config["id"]
        api = kube.connect(options.kubeconfig, options.context)
        namespace = options.namespace or api.namespace
        kind, name = document["kind"], document["metadata"]["name"]
        place = _place(namespace, kind)
        try:
            made = api.call("POST", place, document, query={"fieldValidation": "Strict"})
        except kube.InTheWay as error:
            made = api.call("GET", f"{place}/{name}")  # ours, where an answer was lost on the way
            if made["metadata"].get("labels", {}).get(kube.LABEL) != mark:
                raise HeliostatError(
                    f"the name `{name}` is in use in the namespace `{namespace}`",
                    cause=error.cause,
                    hint="choose another with --name, or another namespace",
                    code=Code.KUBERNETES_CONFLICT,
                ) from None
        handle = _handle(api, namespace, made, plan.steps[0].nodes)
        if kind == "RayJob" and request.spec.time:  # by our own clock: the server's may differ
            limit = {"limit": request.spec.time, "until": time.time() + request.spec.time}
            handle = replace(handle, detail={**handle.detail, **limit})
        yield handle

    def find_orphans(self, mark: str | None, spec: ClusterSpec, host: Transport) -> list[Handle]:
        from heliostat.config.members import members

        table = spec.backend_tables.get(self.name, {})
        api = kube.connect(table.get("kubeconfig"), table.get("context"))
        namespace = table.get("namespace") or api.namespace
        selector = f"{kube.LABEL}={mark}" if mark else kube.LABEL
        found = []
        for kind in PLURALS:
            listed = api.call("GET", _place(namespace, kind), query={"labelSelector": selector})
            found += [
                _handle(api, namespace, {"kind": kind, **item}, tuple(m.name for m in members(spec)))
                for item in listed["items"]
                if item["metadata"]["name"]
                == spec.cluster_name  # a copy under another name has our label too
            ]
        return found

    def observe(self, handles: Sequence[Handle], host: Transport) -> dict[str, Observation]:
        return {handle.native_id: self._observe(handle) for handle in handles}

    def _observe(self, handle: Handle) -> Observation:
        cluster = self._cluster(handle)
        try:
            made = cluster.fetch()
        except HeliostatError as error:
            return Observation(N.UNKNOWN, str(error))
        if made is None:
            return Observation(N.GONE, "somebody has deleted it")
        return judge_object(made, cluster.exists, int(handle.detail["launch"]))

    def cancel(self, handles: Sequence[Handle], host: Transport, *, now: bool = False) -> None:
        for handle in handles:
            self._cluster(handle).close()
            self._delete(handle, now)
        for handle in handles:
            self._wait_gone(handle, now)

    def _delete(self, handle: Handle, now: bool) -> None:
        """By uid: somebody may have deleted ours and made another object of that name."""
        api, cluster = _api(handle), self._cluster(handle)
        pods = cluster.remaining_pods() if now else []
        api.delete(cluster.path, cluster.uid, propagationPolicy="Background")
        for pod in pods:
            place = f"/api/v1/namespaces/{cluster.namespace}/pods/{pod['metadata']['name']}"
            api.delete(place, str(pod["metadata"]["uid"]), gracePeriodSeconds=0)

    def _wait_gone(self, handle: Handle, now: bool) -> None:
        cluster, deadline, pause = self._cluster(handle), time.monotonic() + END_S, 0.1
        while True:
            made, pods = cluster.fetch(), cluster.remaining_pods()
            if made is None and not pods:
                return
            if time.monotonic() > deadline:
                raise _still_there(handle, made, pods, now)
            time.sleep(pause)
            pause = min(1.0, pause * 1.5)

    def collect_logs(self, handles: Sequence[Handle], folder: Path) -> list[str]:
        """The RayJob of a `run` that ended by itself stays, as the record of it; ours is here."""
        for handle in handles:
            if handle.detail["object"] == "RayJob":
                try:
                    self._delete(handle, False)
                except HeliostatError as error:
                    return [f"`{handle.native_id}` is still there: {error}"]
        return []

    # -- how it is

    def platform_status(
        self, handle: Handle, nodes: Sequence[NodeRecord], before: Mapping[str, Any], host: Transport
    ) -> PlatformStatus:
        cluster = self._cluster(handle)
        made, pods = cluster.look()
        if made is None:
            return PlatformStatus(before)  # whoever observes it says that it is gone
        named = name_pods(nodes, pods, before)
        token = self._token(handle, cluster, made)
        alive = self._table(handle, cluster, named, before, token)
        events = cluster.warnings() if None in named.values() else []
        own = {node.name for node in nodes} if not made["spec"].get("suspend") else set()
        told: dict[str, Mapping[str, Any]] = {}
        for name, pod in named.items():
            if pod is None:
                node = next(node for node in nodes if node.name == name)
                told[name] = {**self._absent(made, events), "role": node.role, "group": node.group}
            else:
                told[name] = tell_pod(
                    pod, alive, before.get(name) or {}, replaced=name in own, now=time.time()
                )
        return PlatformStatus(told, self._connection(cluster, made, told, alive), token)

    def _absent(self, made: Mapping[str, Any], events: Sequence[Mapping[str, Any]]) -> dict[str, str]:
        if made["spec"].get("suspend"):
            if "kueue.x-k8s.io/queue-name" in (made["metadata"].get("labels") or {}):
                return {"state": "QUEUED", "reason": "Kueue holds it in its queue"}
            return {"state": "SUSPENDED", "reason": "put away; `heliostat up` brings it back"}
        since = datetime.fromisoformat(made["metadata"]["creationTimestamp"].replace("Z", "+00:00"))
        seen = (made.get("status") or {}).get("observedGeneration") or made["kind"] == "RayJob"
        state, reason = absent(events, bool(seen), time.time() - since.timestamp() > OPERATOR_S)
        return {"state": state, "reason": reason}

    def _token(self, handle: Handle, cluster: Cluster, made: Mapping[str, Any]) -> str | None:
        """The operator makes it, in a Secret with the cluster's name."""
        name = cluster.ray_name(made)
        if cluster.token is None and name and cluster.authenticated(made):
            try:
                place = f"/api/v1/namespaces/{cluster.namespace}/secrets/{name}"
                secret = _api(handle).call("GET", place)
                cluster.token = base64.b64decode(secret["data"]["auth_token"]).decode()
            except (kube.NotThere, KeyError):
                return None  # not made yet
        return cluster.token

    def _table(
        self,
        handle: Handle,
        cluster: Cluster,
        named: Mapping[str, Mapping[str, Any] | None],
        before: Mapping[str, Any],
        token: str | None,
    ) -> frozenset[str] | None:
        """The addresses in Ray's node table, asked for only where something may have changed."""
        running = {
            name: pod["metadata"]["name"]
            for name, pod in named.items()
            if pod and (pod.get("status") or {}).get("phase") == "Running"
        }
        if "head" not in running or (token is None and cluster.asks_token):
            return None
        ready = {n: w.get("id") for n, w in before.items() if w.get("state") == "READY"}
        at, known = self._tables.get(cluster.uid, (0.0, None))
        if known is not None and time.monotonic() - at < TABLE_S and ready == running:
            return known
        try:
            found = frozenset(str(node["ip"]) for node in self._ray(handle, token).nodes())
        except Refused:
            raise  # a right that is lacking, or credentials that have run out: nothing gets better by waiting
        except HeliostatError:
            found = None
        self._tables[cluster.uid] = (time.monotonic(), found)
        return found

    def _ray(self, handle: Handle, token: str | None) -> RayApi:
        from heliostat.remote.ray_client import RayApi

        way = _Way(self, handle)
        host, port = way.forward("127.0.0.1", DASHBOARD)
        return RayApi(host, port, token, name=handle.native_id, proxy_error=way.proxy_error)

    def _connection(
        self,
        cluster: Cluster,
        made: Mapping[str, Any],
        told: Mapping[str, Mapping[str, Any]],
        alive: frozenset[str] | None,
    ) -> dict[str, Any] | None:
        head = next((words for words in told.values() if words["role"] == "head"), {})
        if head.get("state") != "READY":
            return None
        address = f"ray://{cluster.service(made)}.{cluster.namespace}.svc:10001"
        mode = "token" if cluster.asks_token else "disabled"
        env = {"RAY_ADDRESS": address, "HELIOSTAT_HEAD_IP": head.get("ip"), "RAY_AUTH_MODE": mode}
        if cluster.asks_token:
            env["RAY_AUTH_TOKEN_PATH"] = ""  # the file here is put in its place
        version = cluster.ray_spec(made).get("rayVersion")
        return {"schema": 1, "address": address, "dashboard_port": DASHBOARD, "ray": version, "env": env}

    # -- changing it

    def resize(self, handle: Handle, workers: Mapping[str | None, int], host: Transport) -> None:
        cluster = self._cluster(handle)
        made = cluster.fetch()
        groups = cluster.ray_spec(made or {}).get("workerGroupSpecs") or []
        where = "/spec/rayClusterSpec" if handle.detail["object"] == "RayJob" else "/spec"
        patch = []
        for index, group in enumerate(groups):
            name = None if group["groupName"] == PLAIN else group["groupName"]
            if name in workers:
                path = f"{where}/workerGroupSpecs/{index}"
                # a list is patched by position: somebody may have changed it meanwhile
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

    def _patch(self, handle: Handle, patch: list[dict[str, Any]]) -> None:
        """All of it, or nothing where the object is not ours any more: the server itself tests the uid."""
        api, cluster = _api(handle), self._cluster(handle)
        whole = [{"op": "test", "path": "/metadata/uid", "value": cluster.uid}, *patch]
        query = {"fieldValidation": "Strict"}
        try:
            api.call("PATCH", cluster.path, whole, query=query, kind="application/json-patch+json")
        except (kube.NotThere, kube.Invalid):
            uid = api.uid_of(cluster.path)
            if uid == cluster.uid:
                raise
            raise NotFoundError(
                f"`{handle.native_id}` is not there any more",
                cause="somebody has deleted it"
                + (f", and another {handle.detail['object']} has its name" if uid else ""),
                hint="heliostat ls",
                code=Code.NOT_FOUND_CLUSTER,
            ) from None
        finally:
            cluster.stale()

    def replace_node(self, handle: Handle, node: str, told: Mapping[str, Any], host: Transport) -> None:
        cluster = self._cluster(handle)
        cluster.delete_pod(str(told["id"]))
        cluster.stale()

    def started_job(self, handle: Handle, job: str, host: Transport) -> None:
        if handle.detail["object"] == "RayJob":
            patch = [{"op": "add", "path": "/spec/jobId", "value": job}]
            self._patch(handle, patch)

    def limited_command(self, handle: Handle, argv: Sequence[str], host: Transport) -> Sequence[str]:
        """At the deadline KubeRay only calls the RayJob Failed and deletes the cluster a while later; so the command ends
        itself. It is told a little before, and is over at the limit."""
        if "until" not in handle.detail:
            return argv
        grace = max(1.0, min(GRACE_S, handle.detail["limit"] / 4))
        left = max(1.0, handle.detail["until"] - time.time() - grace)
        command = ["sh", "-c", argv[0]] if len(argv) == 1 else argv  # one word is a shell line
        return ["timeout", "-k", f"{grace:.0f}", f"{left:.0f}", *command]

    # -- the way in

    def reach(self, handle: Handle, host: Transport | None) -> Transport:
        return _Way(self, handle)

    def execute(self, node: str, handle: Handle, argv: Sequence[str], host: Transport) -> Completed:
        told = handle.detail["told"]
        place = self._cluster(handle).namespace
        done = run_in_pod(_api(handle), place, str(told["id"]), [*SHELL, *argv], f"ray-{told['role']}")
        return replace(done, argv=tuple(argv))

    def logs(
        self, handle: Handle, node: str, told: Mapping[str, Any], known: Mapping[str, int], host: Transport
    ) -> Mapping[str, bytes]:
        cluster = self._cluster(handle)
        if not told.get("id"):
            return {}
        ray = None
        if told.get("state") == "READY":
            made, _ = cluster.look()
            ray = self._ray(handle, self._token(handle, cluster, made) if made else None)
        return pod_logs(_api(handle), cluster.namespace, told, known, ray)

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

    def checks(self, spec: ClusterSpec | None, host: Transport) -> list[Check]:
        return list(checks((spec.backend_tables.get(self.name) if spec else None) or {}))


@dataclass
class _Way:
    """A head is reached through the API server."""

    backend: Kubernetes
    handle: Handle

    def run(self, argv: Sequence[str], *, input: bytes = b"", timeout: float) -> Completed:
        raise UsageError("a pod is reached by `heliostat exec`")

    def read(self, path: Path, offset: int = 0, limit: int = 1 << 20) -> bytes:
        return b""

    def forward(self, host: str, port: int) -> tuple[str, int]:
        from heliostat.backends.kubernetes.proxy import forward

        cluster = self.backend._cluster(self.handle)
        made, _ = cluster.look()
        if made is None:
            from heliostat.remote.ray_client import NoResponse

            raise NoResponse(f"`{self.handle.native_id}` is not there any more")
        return forward(_api(self.handle), cluster.namespace, cluster.service(made), port)

    def proxy_error(self, method: str, path: str, status: int, content: bytes) -> HeliostatError | None:
        from heliostat.backends.kubernetes.proxy import proxy_error

        return proxy_error(_api(self.handle), self.handle.native_id, method, path, status, content)


def _api(handle: Handle) -> kube.Api:
    return kube.connect(handle.detail["kubeconfig"], handle.detail["context"])


def _still_there(
    handle: Handle, made: Mapping[str, Any] | None, pods: Sequence[Mapping[str, Any]], now: bool
) -> DeadlineError:
    """What is left of it, and the one thing that may help: the object may be gone while a machine keeps its pods."""
    kind, name, space = str(handle.detail["object"]), handle.detail["name"], handle.detail["namespace"]
    left = [f"{kind} {name}"] if made else []
    for pod in pods:
        where = (pod.get("spec") or {}).get("nodeName")
        left.append(f"pod {pod['metadata']['name']}" + (f" on {where}" if where else ""))
    held = ((made or {}).get("metadata") or {}).get("finalizers")
    if made:
        hint = f"kubectl -n {space} describe {kind.lower()} {name}"
    elif now:
        hint = f"kubectl -n {space} describe pod {pods[0]['metadata']['name']}"
    else:  # a kubelet that does not answer ends no pod; by force they go without it
        hint = f"heliostat down {name} --now"
    return DeadlineError(
        f"`{handle.native_id}` could not be deleted whole",
        cause=f"still there after {END_S:.0f} s: {', '.join(left)}"
        + (f"; finalizers: {', '.join(held)}" if held else ""),
        hint=hint,
        code=Code.KUBERNETES_OBJECTS_LEFT,
    )


def _place(namespace: str, kind: str) -> str:
    return f"{kube.RAY}/namespaces/{namespace}/{PLURALS[kind]}"


def _handle(api: kube.Api, namespace: str, made: Mapping[str, Any], nodes: tuple[str, ...]) -> Handle:
    about = made["metadata"]
    since = datetime.fromisoformat(about["creationTimestamp"].replace("Z", "+00:00")).timestamp()
    detail = {
        "kubeconfig": api.kubeconfig,
        "context": api.context,  # whatever becomes the current one later
        "namespace": namespace,
        "object": made["kind"],
        "name": about["name"],
        "uid": about["uid"],
        "kind": "run" if made["kind"] == "RayJob" else "up",
        "id": (about.get("labels") or {}).get(kube.LABEL),
        "launch": 1,
        "since": since,
    }
    return Handle(f"{namespace}/{about['name']}", nodes, detail)


BACKEND = Kubernetes()
