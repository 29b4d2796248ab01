"""Maps pods to nodes, and the state of Kubernetes objects to node states. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from datetime import datetime

from heliostat.agent.protocol import NodeReport
from heliostat.backends.base import Observation
from heliostat.common.documents import JsonMapping, JsonObject
from heliostat.state.records import NodeRecord
from heliostat.state.states import NodeState

N = NodeState

DEFAULT_GROUP = "workers"  # KubeRay's group of the workers that have no group in the spec

# the kubelet's reasons for a missing image. It retries, and reports the cause as free text only, in which DNS errors and
# missing images cannot be distinguished: so a timeout decides
PULL_ERRORS = (
    *("ErrImagePull", "ImagePullBackOff", "ImageInspectError"),
    *("RegistryUnavailable", "SignatureValidationFailed"),
)
PERMANENT_IMAGE_ERRORS = ("InvalidImageName", "ErrImageNeverPull")  # a retry cannot succeed
PULL_TIMEOUT_S = 120.0  # four attempts of the kubelet, with pauses from 10 s on
CONTAINER_ERRORS = ("CreateContainerConfigError", "CreateContainerError", "RunContainerError")
MAX_CRASHES = 2  # restarts of a container before its node is FAILED

# exit code of a job by the jobStatus of its RayJob
EXIT_CODES = {"SUCCEEDED": 0, "FAILED": 1, "STOPPED": None}

Pod = JsonMapping


def resolve_object_state(obj: JsonMapping, exists: Callable[[], bool], launch: int) -> Observation:
    """The state of a RayCluster or RayJob as a whole. exists: whether the RayCluster of a RayJob exists."""
    status = obj.get("status") or {}
    native_state = str(status.get("jobDeploymentStatus") or status.get("state") or "")
    reason = " ".join(str(status.get("message") or status.get("reason") or "").split())[:300]
    if "deletionTimestamp" in obj["metadata"]:
        return Observation(N.STOPPING, "the object was deleted", native_state)
    if native_state == "ValidationFailed":
        return Observation(N.FAILED, reason or "KubeRay rejected the spec", native_state)
    if obj["kind"] != "RayJob" or native_state not in ("Complete", "Failed"):
        return Observation(N.ALLOCATED, "", native_state)
    job = str(status.get("jobStatus") or "")
    if native_state == "Failed" and job not in EXIT_CODES:
        is_late = str(status.get("reason") or "").endswith("DeadlineExceeded")
        reason = f"{'its time limit has passed' if is_late else 'KubeRay stopped the job'}: {reason}"
    if exists():
        if native_state == "Complete" or job in EXIT_CODES:
            # output and logs are available until KubeRay deletes the cluster
            return Observation(N.ALLOCATED, "", native_state)
        return Observation(N.STOPPING if job else N.FAILED, reason, native_state)
    # the final report of a job that ended by itself
    report: NodeReport = {
        "state": "GONE" if job in EXIT_CODES else "FAILED",
        "reason": reason or "its job has ended",
        "launch": launch,
        "exit_code": EXIT_CODES.get(job),
    }
    return Observation(N.GONE, reason, native_state, report)


def name_pods(nodes: Sequence[NodeRecord], pods: Sequence[Pod], before: JsonMapping) -> dict[str, Pod | None]:
    """The pod of each node. A pod keeps its name. A node without a pod gets the next unnamed pod. The remaining pods, which
    the autoscaler added, get new names."""
    named: dict[str, Pod | None] = {node.name: None for node in nodes}
    kinds = {node.name: (node.role, node.group) for node in nodes}
    names_by_pod = {str(status.get("id")): name for name, status in before.items()}
    unmatched = []
    for pod in sorted(pods, key=lambda pod: (_created(pod), pod["metadata"]["name"])):
        name = names_by_pod.get(pod["metadata"]["name"])
        if (
            name in kinds
            and named[name] is None
            and kinds[name] == role_and_group(pod)
            and not _is_terminating(pod)
        ):
            named[name] = pod
        else:
            unmatched.append(pod)
    # running pods are matched before terminating ones
    for pod in sorted(unmatched, key=_is_terminating):
        name = names_by_pod.get(pod["metadata"]["name"])
        free = [n for n, found in named.items() if found is None and kinds.get(n) == role_and_group(pod)]
        if _is_terminating(pod):
            name = (name if name in free else None) if name else next(iter(free), None)
        elif free:
            name = free[0]
        elif name is None or name in named:
            role, group = role_and_group(pod)
            stem = f"{group}-" if group else "w"
            if role == "head":
                continue  # a cluster has one head
            name = next(f"{stem}{i}" for i in range(1, len(named) + 2) if f"{stem}{i}" not in named)
        if name is not None:
            named[name] = pod
    return named


def _is_terminating(pod: Pod) -> bool:
    return "deletionTimestamp" in pod["metadata"]


def role_and_group(pod: Pod) -> tuple[str, str | None]:
    """(role, group) of a pod, as in the record."""
    labels = pod["metadata"].get("labels") or {}
    if labels.get("ray.io/node-type") == "head":
        return "head", None
    group = labels.get("ray.io/group")
    return "worker", None if group == DEFAULT_GROUP else group


def resolve_pod_status(
    pod: Pod,
    alive: Collection[str] | None,
    before: JsonMapping,
    *,
    replaced: bool = False,
    now: float = 0.0,
) -> JsonObject:
    """The status of the node of this pod.

    alive: addresses in Ray's node table; None if Ray did not answer. before: the node's last status. replaced: KubeRay
    replaces the pod when it terminates, because the cluster still needs the node."""
    status = pod.get("status") or {}
    ip = status.get("podIP")
    same = before.get("id") == pod["metadata"]["name"]
    pull_since = _find_first_pull_failure(status, before if same else {}, now)
    state, reason = _resolve_pod_state(pod, status, now - pull_since if pull_since else 0.0)
    if _is_terminating(pod) and replaced:
        state, reason = "STARTING", "its pod terminates and is replaced"
    elif state == "STARTING" and alive is None and same and before.get("state") in ("READY", "LOST"):
        state, reason = str(before["state"]), reason or str(before.get("reason") or "")
    elif state == "STARTING" and alive and ip in alive:
        state = "READY"
    elif state == "STARTING" and alive is not None and same and before.get("state") in ("READY", "LOST"):
        state, reason = "LOST", reason or "Ray's node table does not list it"
    role, group = role_and_group(pod)
    return {
        "state": state,
        "reason": reason,
        "role": role,
        "group": group,
        "ip": ip,
        "host": (pod.get("spec") or {}).get("nodeName"),
        "id": pod["metadata"]["name"],
        **({"pull_since": pull_since} if pull_since else {}),
        **_describe_restarts(status),
    }


def _describe_restarts(status: JsonMapping) -> JsonObject:
    """Restarts of containers by the kubelet: count, end of the last container, and a sentence."""
    rows = [row for row in status.get("containerStatuses") or () if row.get("restartCount")]
    if not rows:
        return {}

    def ended(row: JsonMapping) -> JsonMapping:
        return (row.get("lastState") or {}).get("terminated") or {}

    last = max(rows, key=lambda row: str(ended(row).get("finishedAt") or ""))
    count = sum(int(row["restartCount"]) for row in rows)
    name = "its container" if str(last["name"]).startswith("ray-") else f"its container `{last['name']}`"
    often = "once" if count == 1 else f"{count} times"
    why = f": it ended{_describe_exit(ended(last))}" if ended(last) else ""
    at = ended(last).get("finishedAt")
    since = datetime.fromisoformat(str(at).replace("Z", "+00:00")).timestamp() if at else 0.0
    return {"restarts": count, "restarted": since, "restart": f"{name} was restarted {often}{why}"}


def _find_first_pull_failure(status: JsonMapping, before: JsonMapping, now: float) -> float | None:
    """Time of the first failed image pull; None if no pull failed or the image is present."""
    rows = (*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ()))
    fails = any(((row.get("state") or {}).get("waiting") or {}).get("reason") in PULL_ERRORS for row in rows)
    if not fails and status.get("phase") != "Pending":
        return None
    known = before.get("pull_since")
    return float(known) if known else (now if fails else None)


def _resolve_pod_state(pod: Pod, status: JsonMapping, pull_s: float) -> tuple[str, str]:
    """(state, reason) of a pod. pull_s: time since the first failed image pull."""
    phase = status.get("phase") or "Pending"
    conditions = {c["type"]: c for c in status.get("conditions") or ()}
    if _is_terminating(pod):
        return "STOPPING", "its pod terminates"
    if phase in ("Failed", "Succeeded"):
        return "LOST", _describe_pod_end(status)
    scheduled = conditions.get("PodScheduled") or {}
    if phase == "Pending" and scheduled.get("status") == "False":
        message = str(scheduled.get("message") or scheduled.get("reason") or "")
        return "QUEUED", f"{scheduled.get('reason', 'Unschedulable')}: {message}"[:300]
    containers = status.get("containerStatuses") or ()
    for container in (*(status.get("initContainerStatuses") or ()), *containers):
        found = _resolve_container_state(container, pull_s)
        if found:
            return found
    if phase == "Running":
        return "STARTING", str(_describe_restarts(status).get("restart") or "")
    if (pod.get("spec") or {}).get("nodeName"):
        inits = status.get("initContainerStatuses") or ()
        waits = any((c.get("state") or {}).get("running") for c in inits)
        return ("STARTING", "waits for the head") if waits else ("ALLOCATED", "its container is created")
    return "QUEUED", "waits for a Kubernetes node"


def _resolve_container_state(status: JsonMapping, pull_s: float) -> tuple[str, str] | None:
    """(state, reason) of a container that keeps the pod from running; None for other containers."""
    waiting = (status.get("state") or {}).get("waiting") or {}
    reason, message = str(waiting.get("reason") or ""), str(waiting.get("message") or "")
    last = ((status.get("lastState") or {}).get("terminated")) or {}
    if reason in PULL_ERRORS or reason in PERMANENT_IMAGE_ERRORS:
        is_permanent = reason in PERMANENT_IMAGE_ERRORS or pull_s > PULL_TIMEOUT_S
        text = f"{reason}: {message or status.get('image', '')}"[:300]
        return ("FAILED" if is_permanent else "ALLOCATED"), text
    if reason in CONTAINER_ERRORS:
        return "FAILED", f"{reason}: {message}"[:300]
    if reason == "CrashLoopBackOff" or (last and not (status.get("state") or {}).get("running")):
        text = f"its container ended{_describe_exit(last)}"
        return ("FAILED" if int(status.get("restartCount") or 0) >= MAX_CRASHES else "STARTING"), text
    return None


def _describe_exit(ended: JsonMapping) -> str:
    if not ended:
        return ""
    reason = f", {ended['reason']}" if ended.get("reason") not in (None, "Error", "Completed") else ""
    message = f": {' '.join(str(ended['message']).split())[-200:]}" if ended.get("message") else ""
    return f" with code {ended.get('exitCode')}{reason}{message}"


def _describe_pod_end(status: JsonMapping) -> str:
    if status.get("reason"):  # Evicted, Preempting, NodeShutdown
        return f"{status['reason']}: {status.get('message') or ''}".rstrip(": ")[:300]
    for container in status.get("containerStatuses") or ():
        ended = (container.get("state") or {}).get("terminated")
        if ended:
            return f"its container ended{_describe_exit(ended)}"
    return "its pod has ended"


def resolve_missing_pod(events: Sequence[JsonMapping], seen: bool, old: bool) -> tuple[str, str]:
    """(state, reason) of a node without a pod.

    events: warnings about the cluster, newest last. seen: the operator has processed the object. old: it had enough time."""
    for event in reversed(events):
        reason, message = str(event.get("reason") or ""), " ".join(str(event.get("message") or "").split())
        if reason.startswith("Invalid"):
            return "FAILED", f"{reason}: {message}"[:400]
        if reason.startswith("Failed"):
            return "QUEUED", f"{reason}: {message}"[:400]
    if not seen and old:
        return (
            "QUEUED",
            "the KubeRay operator has not processed it: check that it runs and watches this namespace",
        )
    return "QUEUED", "its pod is not created yet"


def _created(pod: Pod) -> str:
    return str(pod["metadata"].get("creationTimestamp") or "")
