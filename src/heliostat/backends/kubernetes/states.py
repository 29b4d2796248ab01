"""What Kubernetes says of pods, in our words: which pod is which node, and how each is. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime
from typing import Any

from heliostat.backends.base import Observation
from heliostat.state.records import NodeRecord
from heliostat.state.states import NodeState

N = NodeState

PLAIN = "workers"  # the group of workers that have none

# the kubelet's reasons for a container without its image. It goes on trying; what went wrong it has as free text only, in
# which a resolver's `no such host` and a registry's `not found` look alike: so time decides
PULLING = (
    *("ErrImagePull", "ImagePullBackOff", "ImageInspectError"),
    *("RegistryUnavailable", "SignatureValidationFailed"),
)
UNUSABLE = ("InvalidImageName", "ErrImageNeverPull")  # no attempt can make these better
PULL_S = 120.0  # four attempts of the kubelet, whose pauses grow from 10 s on
BROKEN = ("CreateContainerConfigError", "CreateContainerError", "RunContainerError")
CRASHES = 2  # so often a container may end before it is called a failure

# how a job ended, as its RayJob says, and the exit code that this tells of
ENDED = {"SUCCEEDED": 0, "FAILED": 1, "STOPPED": None}

Pod = Mapping[str, Any]


def judge_object(made: Mapping[str, Any], exists: Callable[[], bool], launch: int) -> Observation:
    """What a RayCluster or RayJob says of itself as a whole. exists: whether the RayCluster of a RayJob is there."""
    status = made.get("status") or {}
    word = str(status.get("jobDeploymentStatus") or status.get("state") or "")
    reason = " ".join(str(status.get("message") or status.get("reason") or "").split())[:300]
    if "deletionTimestamp" in made["metadata"]:
        return Observation(N.STOPPING, "somebody has deleted it", word)
    if word == "ValidationFailed":
        return Observation(N.FAILED, reason or "KubeRay refused it", word)
    if made["kind"] != "RayJob" or word not in ("Complete", "Failed"):
        return Observation(N.ALLOCATED, "", word)
    job = str(status.get("jobStatus") or "")
    if word == "Failed" and job not in ENDED:
        late = str(status.get("reason") or "").endswith("DeadlineExceeded")
        reason = f"{'its time limit has passed' if late else 'KubeRay has given it up'}: {reason}"
    if exists():
        if word == "Complete" or job in ENDED:
            # what it left can be had until KubeRay deletes the cluster
            return Observation(N.ALLOCATED, "", word)
        return Observation(N.STOPPING if job else N.FAILED, reason, word)
    # ended by itself, as it was meant to: that is its last word
    words = {"state": "GONE" if job in ENDED else "FAILED", "reason": reason or "its job has ended"}
    return Observation(N.GONE, reason, word, {**words, "launch": launch, "exit_code": ENDED.get(job)})


def name_pods(
    nodes: Sequence[NodeRecord], pods: Sequence[Pod], before: Mapping[str, Any]
) -> dict[str, Pod | None]:
    """Which pod is which node. One keeps its name while it lives; a node whose pod is gone gets the next that has none; what
    is left came with demand, and gets a name of its own."""
    named: dict[str, Pod | None] = {node.name: None for node in nodes}
    own = {node.name: (node.role, node.group) for node in nodes}
    old = {str(words.get("id")): name for name, words in before.items()}
    loose = []
    for pod in sorted(pods, key=lambda pod: (_created(pod), pod["metadata"]["name"])):
        name = old.get(pod["metadata"]["name"])
        if name in own and named[name] is None and own[name] == kind_of(pod) and not _ends(pod):
            named[name] = pod
        else:
            loose.append(pod)
    # one that ends makes no claim to a place that another can have
    for pod in sorted(loose, key=_ends):
        name = old.get(pod["metadata"]["name"])
        free = [n for n, found in named.items() if found is None and own.get(n) == kind_of(pod)]
        if _ends(pod):
            name = (name if name in free else None) if name else next(iter(free), None)
        elif free:
            name = free[0]
        elif name is None or name in named:
            role, group = kind_of(pod)
            stem = f"{group}-" if group else "w"
            if role == "head":
                continue  # there is one
            name = next(f"{stem}{i}" for i in range(1, len(named) + 2) if f"{stem}{i}" not in named)
        if name is not None:
            named[name] = pod
    return named


def _ends(pod: Pod) -> bool:
    return "deletionTimestamp" in pod["metadata"]


def kind_of(pod: Pod) -> tuple[str, str | None]:
    """(role, group) as our record has them."""
    labels = pod["metadata"].get("labels") or {}
    if labels.get("ray.io/node-type") == "head":
        return "head", None
    group = labels.get("ray.io/group")
    return "worker", None if group == PLAIN else group


def tell_pod(
    pod: Pod,
    alive: Collection[str] | None,
    before: Mapping[str, Any],
    *,
    replaced: bool = False,
    now: float = 0.0,
) -> dict[str, Any]:
    """How the node of this pod is. alive: the addresses in Ray's node table; None: Ray did not answer. before: what was told
    of the node last. replaced: KubeRay puts another pod in the place of one that ends, because the cluster goes on and wants
    the node."""
    status = pod.get("status") or {}
    ip = status.get("podIP")
    same = before.get("id") == pod["metadata"]["name"]
    pull_since = _pull_since(status, before if same else {}, now)
    state, reason = _judge(pod, status, now - pull_since if pull_since else 0.0)
    if _ends(pod) and replaced:
        state, reason = "STARTING", "its pod ends, and another takes its place"
    elif state == "STARTING" and alive is None and same and before.get("state") in ("READY", "LOST"):
        state, reason = str(before["state"]), reason or str(before.get("reason") or "")
    elif state == "STARTING" and alive and ip in alive:
        state = "READY"
    elif state == "STARTING" and alive is not None and same and before.get("state") in ("READY", "LOST"):
        state, reason = "LOST", reason or "Ray does not hear it"
    role, group = kind_of(pod)
    return {
        "state": state,
        "reason": reason,
        "role": role,
        "group": group,
        "ip": ip,
        "host": (pod.get("spec") or {}).get("nodeName"),
        "id": pod["metadata"]["name"],
        **({"pull_since": pull_since} if pull_since else {}),
        **_restarts(status),
    }


def _restarts(status: Mapping[str, Any]) -> dict[str, Any]:
    """Of containers that the kubelet has started again in their pod: how often, when the last one ended, and a sentence."""
    rows = [row for row in status.get("containerStatuses") or () if row.get("restartCount")]
    if not rows:
        return {}

    def ended(row: Mapping[str, Any]) -> Mapping[str, Any]:
        return (row.get("lastState") or {}).get("terminated") or {}

    last = max(rows, key=lambda row: str(ended(row).get("finishedAt") or ""))
    count = sum(int(row["restartCount"]) for row in rows)
    name = "its container" if str(last["name"]).startswith("ray-") else f"its container `{last['name']}`"
    often = "once" if count == 1 else f"{count} times"
    why = f": it ended{_why(ended(last))}" if ended(last) else ""
    at = ended(last).get("finishedAt")
    since = datetime.fromisoformat(str(at).replace("Z", "+00:00")).timestamp() if at else 0.0
    return {"restarts": count, "restarted": since, "restart": f"{name} was restarted {often}{why}"}


def _pull_since(status: Mapping[str, Any], before: Mapping[str, Any], now: float) -> float | None:
    """When its image was first seen not to come; None: it has come, or nobody has failed to get it."""
    rows = (*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ()))
    fails = any(((row.get("state") or {}).get("waiting") or {}).get("reason") in PULLING for row in rows)
    if not fails and status.get("phase") != "Pending":
        return None
    known = before.get("pull_since")
    return float(known) if known else (now if fails else None)


def _judge(pod: Pod, status: Mapping[str, Any], pull_s: float) -> tuple[str, str]:
    """pull_s: how long its image has failed to come."""
    phase = status.get("phase") or "Pending"
    conditions = {c["type"]: c for c in status.get("conditions") or ()}
    if _ends(pod):
        return "STOPPING", "its pod ends"
    if phase in ("Failed", "Succeeded"):
        return "LOST", _end(status)
    scheduled = conditions.get("PodScheduled") or {}
    if phase == "Pending" and scheduled.get("status") == "False":
        words = str(scheduled.get("message") or scheduled.get("reason") or "")
        return "QUEUED", f"{scheduled.get('reason', 'Unschedulable')}: {words}"[:300]
    containers = status.get("containerStatuses") or ()
    for container in (*(status.get("initContainerStatuses") or ()), *containers):
        found = _container(container, pull_s)
        if found:
            return found
    if phase == "Running":
        return "STARTING", str(_restarts(status).get("restart") or "")
    if (pod.get("spec") or {}).get("nodeName"):
        inits = status.get("initContainerStatuses") or ()
        waits = any((c.get("state") or {}).get("running") for c in inits)
        return ("STARTING", "waits for the head") if waits else ("ALLOCATED", "its container is being made")
    return "QUEUED", "waits for a machine"


def _container(status: Mapping[str, Any], pull_s: float) -> tuple[str, str] | None:
    """A container that keeps the pod from running."""
    waiting = (status.get("state") or {}).get("waiting") or {}
    reason, words = str(waiting.get("reason") or ""), str(waiting.get("message") or "")
    last = ((status.get("lastState") or {}).get("terminated")) or {}
    if reason in PULLING or reason in UNUSABLE:
        hopeless = reason in UNUSABLE or pull_s > PULL_S
        told = f"{reason}: {words or status.get('image', '')}"[:300]
        return ("FAILED" if hopeless else "ALLOCATED"), told
    if reason in BROKEN:
        return "FAILED", f"{reason}: {words}"[:300]
    if reason == "CrashLoopBackOff" or (last and not (status.get("state") or {}).get("running")):
        told = f"its container ended{_why(last)}"
        return ("FAILED" if int(status.get("restartCount") or 0) >= CRASHES else "STARTING"), told
    return None


def _why(ended: Mapping[str, Any]) -> str:
    if not ended:
        return ""
    reason = f", {ended['reason']}" if ended.get("reason") not in (None, "Error", "Completed") else ""
    words = f": {' '.join(str(ended['message']).split())[-200:]}" if ended.get("message") else ""
    return f" with code {ended.get('exitCode')}{reason}{words}"


def _end(status: Mapping[str, Any]) -> str:
    if status.get("reason"):  # Evicted, Preempting, NodeShutdown
        return f"{status['reason']}: {status.get('message') or ''}".rstrip(": ")[:300]
    for container in status.get("containerStatuses") or ():
        ended = (container.get("state") or {}).get("terminated")
        if ended:
            return f"its container ended{_why(ended)}"
    return "its pod has ended"


def absent(events: Sequence[Mapping[str, Any]], seen: bool, old: bool) -> tuple[str, str]:
    """(state, reason) of a node that has no pod. events: warnings about the cluster, newest last. seen: the operator has
    looked at it. old: it had time to."""
    for event in reversed(events):
        reason, words = str(event.get("reason") or ""), " ".join(str(event.get("message") or "").split())
        if reason.startswith("Invalid"):
            return "FAILED", f"{reason}: {words}"[:400]
        if reason.startswith("Failed"):
            return "QUEUED", f"{reason}: {words}"[:400]
    if not seen and old:
        return "QUEUED", "the KubeRay operator has not looked at it: does it run, and watch this namespace?"
    return "QUEUED", "its pod is not made yet"


def _created(pod: Pod) -> str:
    return str(pod["metadata"].get("creationTimestamp") or "")
