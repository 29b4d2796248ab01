"""Which pod is which node, and how each is: from pods as a real server gives them."""

from __future__ import annotations

from typing import Any

import pytest

from heliostat.backends.kubernetes.states import (
    DEFAULT_GROUP,
    name_pods,
    resolve_missing_pod,
    resolve_object_state,
    resolve_pod_status,
    role_and_group,
)
from heliostat.state.records import NodeRecord
from heliostat.state.states import NodeState

Pod = dict[str, Any]
HEAD = NodeRecord("head", "head")
PROBE = "Readiness probe failed"


def pod(
    name: str,
    group: str = DEFAULT_GROUP,
    *,
    at: int = 0,
    ends: bool = False,
    phase: str = "Running",
    node: str | None = "node-1",
    ip: str | None = "10.0.0.1",
    role: str = "worker",
    **status: Any,
) -> Pod:
    metadata: Pod = {
        "name": name,
        "namespace": "ml",
        "creationTimestamp": f"2026-01-01T00:00:{at:02}Z",
        "labels": {
            "ray.io/cluster": "lab",
            "ray.io/node-type": role,
            "ray.io/group": "headgroup" if role == "head" else group,
            "ray.io/is-ray-node": "yes",
        },
    }
    if ends:
        metadata |= {"deletionTimestamp": "2026-01-01T00:01:00Z", "deletionGracePeriodSeconds": 30}
    spec = {"containers": [{"name": f"ray-{role}"}], **({"nodeName": node} if node else {})}
    return {
        "metadata": metadata,
        "spec": spec,
        "status": {"phase": phase, **({"podIP": ip} if ip else {}), **status},
    }


def head(name: str = "lab-head-abcde", **more: Any) -> Pod:
    return pod(name, role="head", **more)


def workers(count: int, group: str | None = None) -> list[NodeRecord]:
    stem = f"{group}-" if group else "w"
    return [NodeRecord(f"{stem}{i}", "worker", group) for i in range(1, count + 1)]


def names(found: dict[str, Any]) -> dict[str, str | None]:
    return {name: one and one["metadata"]["name"] for name, one in found.items()}


def before(**pods: str) -> dict[str, Any]:
    return {name.replace("_", "-"): {"id": one} for name, one in pods.items()}


# -- which is which


def test_the_oldest_come_first() -> None:
    found = name_pods([HEAD, *workers(2)], [pod("b", at=2), pod("z", at=1), head(at=3)], {})
    assert names(found) == {"head": "lab-head-abcde", "w1": "z", "w2": "b"}


def test_nothing_is_there_yet() -> None:
    assert names(name_pods([HEAD, *workers(1)], [], {})) == {"head": None, "w1": None}


def test_a_pod_keeps_its_name() -> None:
    """Also when an older one is gone, and whatever order the server lists them in."""
    known = before(head="h", w1="a", w2="b", w3="c")
    found = name_pods([HEAD, *workers(3)], [pod("c", at=3), pod("b", at=2), head("h")], known)
    assert names(found) == {"head": "h", "w1": None, "w2": "b", "w3": "c"}


def test_another_pod_takes_the_place_of_one_that_ends() -> None:
    nodes, known = [HEAD, *workers(2)], before(head="h", w1="a", w2="b")
    ending = [head("h"), pod("a", ends=True), pod("b")]
    assert names(name_pods(nodes, ending, known))["w1"] == "a", "as long as there is no other"
    for later in ([*ending, pod("d", at=9)], [head("h"), pod("b"), pod("d", at=9)]):
        assert names(name_pods(nodes, later, known)) == {"head": "h", "w1": "d", "w2": "b"}


def test_ones_that_end_do_not_change_places() -> None:
    nodes, known = [HEAD, *workers(3)], before(w1="a", w2="b", w3="c")
    found = name_pods(nodes, [pod("c", ends=True), pod("b", ends=True, at=1)], known)
    assert names(found) == {"head": None, "w1": None, "w2": "b", "w3": "c"}
    assert names(name_pods(nodes, [pod("x", ends=True)], {}))["w1"] == "x", "one that nobody has seen before"


def test_a_head_that_was_replaced() -> None:
    known = before(head="h1")
    assert names(name_pods([HEAD], [head("h2", at=5)], known)) == {"head": "h2"}
    both = name_pods([HEAD], [head("h1", ends=True), head("h2", at=5)], known)
    assert names(both) == {"head": "h2"}, "there is one head, whatever is ending"
    assert names(name_pods([HEAD], [head("h1"), head("h2", at=5)], known)) == {"head": "h1"}


def test_nodes_that_came_with_demand_have_names_of_their_own() -> None:
    nodes = [HEAD, *workers(1)]
    first = name_pods(nodes, [head("h"), pod("a"), pod("b", at=1), pod("c", at=2)], {})
    assert names(first) == {"head": "h", "w1": "a", "w2": "b", "w3": "c"}
    known = before(head="h", w1="a", w2="b", w3="c")
    later = name_pods(nodes, [head("h"), pod("a"), pod("c", at=2)], known)
    assert names(later) == {"head": "h", "w1": "a", "w3": "c"}, "w2 has left; w3 stays w3"
    more = name_pods(nodes, [head("h"), pod("a"), pod("c", at=2), pod("d", at=3)], known)
    assert sorted(names(more)) == ["head", "w1", "w2", "w3"] and names(more)["w3"] == "c"


def test_one_that_came_with_demand_and_ends_is_not_named_anew() -> None:
    found = name_pods([HEAD], [head("h"), pod("a", ends=True), pod("b", ends=True)], before(head="h", w1="a"))
    assert names(found) == {"head": "h"}


def test_after_a_scale_down_the_rest_have_the_first_names() -> None:
    """The platform chose which of them go: whoever is left takes a name that is wanted."""
    known = before(head="h", w1="a", w2="b")
    for pods in ([head("h"), pod("a", ends=True), pod("b", at=1)], [head("h"), pod("b", at=1)]):
        assert names(name_pods([HEAD, *workers(1)], pods, known)) == {"head": "h", "w1": "b"}


def test_groups_do_not_mix() -> None:
    nodes = [HEAD, *workers(1, "cpu"), *workers(1, "gpu")]
    found = name_pods(nodes, [pod("g1", "gpu"), pod("g2", "gpu", at=1), head("h")], {})
    assert names(found) == {"head": "h", "cpu-1": None, "gpu-1": "g1", "gpu-2": "g2"}


def test_a_name_that_another_kind_had() -> None:
    """A pod's name may come back: its role and group count, too."""
    found = name_pods([HEAD, *workers(1, "cpu")], [pod("x", "gpu")], before(cpu_1="x"))
    assert names(found) == {"head": None, "cpu-1": None, "gpu-1": "x"}


def test_kinds() -> None:
    assert role_and_group(head()) == ("head", None)
    assert role_and_group(pod("a")) == ("worker", None) and role_and_group(pod("a", "gpu")) == (
        "worker",
        "gpu",
    )
    assert role_and_group({"metadata": {"name": "bare"}}) == ("worker", None)


# -- how the whole is


def ray_job(word: str, job: str = "", reason: str = "", message: str = "") -> dict[str, Any]:
    status = {"jobDeploymentStatus": word, "jobStatus": job, "reason": reason, "message": message}
    return {"kind": "RayJob", "metadata": {"name": "lab"}, "status": status}


LATE = "The RayJob has passed the activeDeadlineSeconds. StartTime: x. ActiveDeadlineSeconds: 40"
GIVEN_UP = ("Failed", "RUNNING", "JobStatusCheckTimeoutExceeded", "Failed to get job status")


@pytest.mark.parametrize(
    ("made", "exists", "state", "words"),
    [
        (ray_job("Running", "RUNNING"), True, "ALLOCATED", ""),
        (ray_job("Complete", "SUCCEEDED"), True, "ALLOCATED", ""),
        (ray_job("Failed", "FAILED", "AppFailed", "exit code 3"), True, "ALLOCATED", ""),
        (
            ray_job("Failed", "RUNNING", "DeadlineExceeded", LATE),
            True,
            "STOPPING",
            "its time limit has passed",
        ),
        (ray_job("Failed", "", "DeadlineExceeded", LATE), True, "FAILED", "its time limit has passed"),
        (ray_job("Failed", "", "PreRunningDeadlineExceeded", LATE), True, "FAILED", "its time limit has"),
        (ray_job(*GIVEN_UP), True, "STOPPING", "KubeRay stopped the job: Failed to get job status"),
        (ray_job("Failed", "RUNNING", "DeadlineExceeded", LATE), False, "GONE", "its time limit has passed"),
        (ray_job("Complete", "SUCCEEDED"), False, "GONE", ""),
        (ray_job("ValidationFailed", message="no"), False, "FAILED", "no"),
    ],
)
def test_what_an_object_says_of_itself(made: dict[str, Any], exists: bool, state: str, words: str) -> None:
    seen = resolve_object_state(made, lambda: exists, 1)
    assert str(seen.state) == state and seen.reason.startswith(words)
    if state == "GONE":
        assert seen.report["state"] == ("GONE" if words == "" else "FAILED")
    made["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    assert resolve_object_state(made, lambda: exists, 1).state is NodeState.STOPPING


# -- how it is


def waiting(reason: str, message: str = "", restarts: int = 0, last: Pod | None = None) -> dict[str, Any]:
    status = {
        "name": "ray-worker",
        "image": "rayproject/ray:2.60.0",
        "ready": False,
        "restartCount": restarts,
        "state": {"waiting": {"reason": reason, **({"message": message} if message else {})}},
        "lastState": {"terminated": last} if last else {},
    }
    return {"containerStatuses": [status]}


def ended(code: int, reason: str = "Error", message: str = "") -> Pod:
    return {"exitCode": code, "reason": reason, **({"message": message} if message else {})}


UNSCHEDULABLE = {
    "conditions": [
        {
            "type": "PodScheduled",
            "status": "False",
            "reason": "Unschedulable",
            "message": "0/3 nodes are available: 3 Insufficient nvidia.com/gpu.",
        }
    ]
}
INIT = {
    "initContainerStatuses": [
        {"name": "wait-gcs-ready", "state": {"running": {"startedAt": "2026-01-01T00:00:00Z"}}}
    ],
    "containerStatuses": [{"name": "ray-worker", "state": {"waiting": {"reason": "PodInitializing"}}}],
}
SAID: list[tuple[str, Pod, str, str]] = [
    ("no machine yet", pod("a", phase="Pending", node=None, ip=None), "QUEUED", "waits for a Kubernetes node"),
    (
        "no machine has room",
        pod("a", phase="Pending", node=None, ip=None, **UNSCHEDULABLE),
        "QUEUED",
        "Unschedulable: 0/3 nodes are available: 3 Insufficient nvidia.com/gpu.",
    ),
    (
        "a container is made",
        pod("a", phase="Pending", ip=None, **waiting("ContainerCreating")),
        "ALLOCATED",
        "its container is created",
    ),
    ("a worker waits", pod("a", phase="Pending", **INIT), "STARTING", "waits for the head"),
    ("it runs", pod("a"), "STARTING", ""),
    ("it ends", pod("a", ends=True), "STOPPING", "its pod terminates"),
    (
        "a registry that is slow",
        pod("a", phase="Pending", **waiting("ErrImagePull", "dial tcp 10.0.0.9:443: i/o timeout")),
        "ALLOCATED",
        "ErrImagePull: dial tcp 10.0.0.9:443: i/o timeout",
    ),
    (
        "an image that is not there, or not yet",
        pod("a", phase="Pending", **waiting("ErrImagePull", "x/y:1: not found")),
        "ALLOCATED",
        "ErrImagePull: x/y:1: not found",
    ),
    (
        "a resolver that fails",
        pod("a", phase="Pending", **waiting("ErrImagePull", "dial tcp: lookup x on 10.0.0.2:53: no such host")),
        "ALLOCATED",
        "ErrImagePull: dial tcp: lookup x on 10.0.0.2:53: no such host",
    ),
    (
        "a registry that says no",
        pod("a", phase="Pending", **waiting("ImagePullBackOff", "pull access denied, 401 Unauthorized")),
        "ALLOCATED",
        "ImagePullBackOff: pull access denied, 401 Unauthorized",
    ),
    (
        "a back-off that says nothing",
        pod("a", phase="Pending", **waiting("ImagePullBackOff")),
        "ALLOCATED",
        "ImagePullBackOff: rayproject/ray:2.60.0",
    ),
    (
        "a name that is none",
        pod("a", phase="Pending", **waiting("InvalidImageName", "couldn't parse")),
        "FAILED",
        "InvalidImageName: couldn't parse",
    ),
    (
        "an image that nobody may pull",
        pod("a", phase="Pending", **waiting("ErrImageNeverPull", "not present with pull policy of Never")),
        "FAILED",
        "ErrImageNeverPull: not present with pull policy of Never",
    ),
    (
        "a Secret that is not there",
        pod("a", phase="Pending", **waiting("CreateContainerConfigError", 'secret "x" not found')),
        "FAILED",
        'CreateContainerConfigError: secret "x" not found',
    ),
    (
        "a command that is not there",
        pod("a", **waiting("RunContainerError", 'exec: "x": executable file not found in $PATH')),
        "FAILED",
        'RunContainerError: exec: "x": executable file not found in $PATH',
    ),
    (
        "it ended once",
        pod("a", **waiting("CrashLoopBackOff", "back-off 10s", 1, ended(1))),
        "STARTING",
        "its container ended with code 1",
    ),
    (
        "it ended again and again",
        pod("a", **waiting("CrashLoopBackOff", "back-off 20s", 2, ended(137, "OOMKilled"))),
        "FAILED",
        "its container ended with code 137, OOMKilled",
    ),
    (
        "it said why",
        pod("a", **waiting("CrashLoopBackOff", "", 3, ended(2, "Error", "no\n  module ray\n"))),
        "FAILED",
        "its container ended with code 2: no module ray",
    ),
    (
        "it ended and runs again",
        pod(
            "a",
            containerStatuses=[
                {"name": "ray-worker", "restartCount": 5, "state": {"running": {"startedAt": "2026-01-01T00:00:00Z"}}, "lastState": {"terminated": ended(1)}}
            ],
        ),
        "STARTING",
        "its container was restarted 5 times: it ended with code 1",
    ),
    (
        "evicted",
        pod("a", phase="Failed", reason="Evicted", message="The node was low on resource: memory."),
        "LOST",
        "Evicted: The node was low on resource: memory.",
    ),
    ("preempted", pod("a", phase="Failed", reason="Preempting"), "LOST", "Preempting"),
    (
        "it ended for good",
        pod(
            "a",
            phase="Failed",
            containerStatuses=[{"name": "ray-worker", "state": {"terminated": ended(137, "OOMKilled")}}],
        ),
        "LOST",
        "its container ended with code 137, OOMKilled",
    ),
    (
        "it ended well",
        pod(
            "a",
            phase="Succeeded",
            containerStatuses=[{"name": "ray-worker", "state": {"terminated": ended(0, "Completed")}}],
        ),
        "LOST",
        "its container ended with code 0",
    ),
    ("nobody knows how", pod("a", phase="Failed"), "LOST", "its pod has ended"),
    ("without a status", {"metadata": {"name": "a"}}, "QUEUED", "waits for a Kubernetes node"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("one", "state", "reason"), [case[1:] for case in SAID], ids=[case[0] for case in SAID]
)
def test_what_a_pod_says(one: Pod, state: str, reason: str) -> None:
    told = resolve_pod_status(one, None, {})
    assert (told["state"], told["reason"]) == (state, reason)
    assert state in NodeState.__members__ and told["id"] == one["metadata"]["name"]


READY = {"id": "a", "state": "READY", "reason": ""}
LOST = {"id": "a", "state": "LOST", "reason": "Ray's node table does not list it"}


@pytest.mark.parametrize(
    ("alive", "known", "state"),
    [
        (["10.0.0.1"], {}, "READY"),
        (["10.0.0.1"], LOST, "READY"),
        (["10.0.0.2"], {}, "STARTING"),
        ([], {}, "STARTING"),
        (None, {}, "STARTING"),
        (["10.0.0.2"], READY, "LOST"),
        ([], READY, "LOST"),
        ([], LOST, "LOST"),
        (None, READY, "READY"),  # a head that is silent says nothing of others
        (None, LOST, "LOST"),
        ([], {**READY, "id": "another"}, "STARTING"),  # a new pod under its name begins anew
        (None, {**READY, "id": "another"}, "STARTING"),
    ],
    ids=str,
)
def test_ready_is_what_rays_node_table_has(
    alive: list[str] | None, known: dict[str, Any], state: str
) -> None:
    told = resolve_pod_status(pod("a"), None if alive is None else frozenset(alive), known)
    assert told["state"] == state
    assert (told["reason"] != "") == (state == "LOST")


def test_a_pod_that_ends_while_its_cluster_goes_on() -> None:
    """Another takes its place: the node is on its way, whatever Ray's table still has."""
    told = resolve_pod_status(pod("a", ends=True), frozenset({"10.0.0.1"}), READY, replaced=True)
    assert (told["state"], told["reason"]) == ("STARTING", "its pod terminates and is replaced")


def test_no_table_makes_a_pod_ready_that_does_not_run() -> None:
    for one in (pod("a", ends=True), pod("a", phase="Failed"), pod("a", phase="Pending")):
        assert resolve_pod_status(one, frozenset({"10.0.0.1"}), READY)["state"] != "READY"


def test_the_rest_of_what_is_told() -> None:
    told = resolve_pod_status(pod("a", "gpu"), None, {})
    assert (told["role"], told["group"], told["ip"], told["host"]) == ("worker", "gpu", "10.0.0.1", "node-1")


def test_an_image_that_does_not_come_fails_by_time() -> None:
    """Whatever the words; the time goes on through the kubelet's pauses and begins anew with another pod."""
    fails = {
        reason: pod("a", phase="Pending", **waiting(reason, "x/y:1: not found"))
        for reason in ("ErrImagePull", "ImagePullBackOff")
    }
    making = pod("a", phase="Pending", ip=None, **waiting("ContainerCreating"))
    told = resolve_pod_status(fails["ErrImagePull"], None, {}, now=1000.0)
    for later, one in ((30.0, fails["ImagePullBackOff"]), (60.0, making), (119.0, fails["ErrImagePull"])):
        told = resolve_pod_status(one, None, told, now=1000.0 + later)
        assert told["state"] == "ALLOCATED" and told["pull_since"] == 1000.0
    assert resolve_pod_status(fails["ImagePullBackOff"], None, told, now=1121.0)["state"] == "FAILED"
    assert (
        resolve_pod_status(fails["ImagePullBackOff"], None, {**told, "id": "b"}, now=1121.0)["state"]
        == "ALLOCATED"
    )
    assert "pull_since" not in resolve_pod_status(pod("a"), None, told, now=1121.0), "it has come"


def test_long_words_are_cut() -> None:
    one = pod("a", phase="Pending", **waiting("ErrImagePull", "not found " * 200))
    assert len(resolve_pod_status(one, None, {})["reason"]) <= 300


# -- a node without a pod


def warning(reason: str, message: str) -> dict[str, str]:
    return {"type": "Warning", "reason": reason, "message": message}


def test_why_there_is_no_pod() -> None:
    invalid = warning("InvalidRayClusterSpec", "The RayCluster spec is invalid ml/lab:\n headGroupSpec …")
    quota = warning("FailedToCreateWorkerPod", 'pods "lab-x" is forbidden: exceeded quota: compute')
    assert resolve_missing_pod([], True, True) == ("QUEUED", "its pod is not created yet")
    assert resolve_missing_pod([], False, False) == ("QUEUED", "its pod is not created yet")
    assert "operator has not processed" in resolve_missing_pod([], False, True)[1]
    assert resolve_missing_pod([quota], True, True) == (
        "QUEUED",
        f"FailedToCreateWorkerPod: {quota['message']}",
    )
    state, reason = resolve_missing_pod([invalid], False, True)
    assert state == "FAILED" and reason.startswith("InvalidRayClusterSpec: The RayCluster spec is invalid")
    assert "\n" not in reason
    assert resolve_missing_pod([quota, invalid], True, True)[0] == "FAILED", "the newest counts"
    assert resolve_missing_pod([invalid, quota], True, True)[0] == "QUEUED", "and it is last"
    assert resolve_missing_pod([warning("Unhealthy", PROBE)], True, True) == (
        "QUEUED",
        "its pod is not created yet",
    )
    assert len(resolve_missing_pod([warning("InvalidX", "x" * 5000)], True, True)[1]) <= 400
