"""What a Pod's status says of its one real container, in the fields that kubelet fills in."""

from __future__ import annotations

from .store import Object, now


def write(
    pod: Object,
    ip: str,
    restarts: int,
    waiting: tuple[str, str] | None = None,
    running: str = "",
    terminated: Object | None = None,
    last: Object | None = None,
    ready: bool = False,
    phase: str = "",
    initializing: bool = False,
) -> None:
    """waiting: (reason, message). running: since when. last: how the life before this one ended."""
    status = pod.setdefault("status", {})
    if waiting:
        state: Object = {"waiting": {"reason": waiting[0], **({"message": waiting[1]} if waiting[1] else {})}}
    elif terminated:
        state = {"terminated": terminated}
    else:
        earlier = (status.get("containerStatuses") or [{}])[0].get("state", {}).get("running")
        state = {"running": earlier or {"startedAt": running}}
    before = {row["name"]: row for row in status.get("containerStatuses") or []}
    status["containerStatuses"] = [
        {
            "name": c["name"], "image": c.get("image", ""), "imageID": "", "state": state, "ready": ready,
            "lastState": {"terminated": last} if last and i == 0 else before.get(c["name"], {}).get("lastState", {}),
            "started": "running" in state, "restartCount": restarts if i == 0 else 0,
        }
        for i, c in enumerate(pod["spec"]["containers"])
    ]  # fmt: skip
    _first(pod, initializing, bool(running or terminated or last))
    if running:
        status |= {"podIP": ip, "podIPs": [{"ip": ip}]}
    if phase:
        status["phase"] = phase
    elif running or terminated or last:
        status["phase"] = "Running"
    _conditions(pod, ready, initializing, bool(running), phase)


def _first(pod: Object, initializing: bool, past: bool) -> None:
    """Init containers: none of them runs here, but each is seen to."""
    containers = pod["spec"].get("initContainers") or []
    if not containers:
        return
    before = pod["status"].get("initContainerStatuses") or []
    done = past or any("terminated" in row["state"] for row in before)
    state: Object = {"waiting": {"reason": "PodInitializing"}}
    if done:
        state = {"terminated": {"exitCode": 0, "reason": "Completed"}}
    elif initializing:
        state = {"running": {"startedAt": now()}}
    pod["status"]["initContainerStatuses"] = [
        {
            "name": c["name"],
            "image": c.get("image", ""),
            "imageID": "",
            "restartCount": 0,
            "ready": done,
            "state": state,
        }
        for c in containers
    ]


def _conditions(pod: Object, ready: bool, initializing: bool, running: bool, phase: str) -> None:
    names = " ".join(container["name"] for container in pod["spec"]["containers"])
    condition(pod, {"type": "PodReadyToStartContainers", "status": "True" if running else "False"})
    if initializing:
        first = " ".join(c["name"] for c in pod["spec"].get("initContainers") or [])
        words = f"containers with incomplete status: [{first}]"
        condition(
            pod,
            {
                "type": "Initialized",
                "status": "False",
                "reason": "ContainersNotInitialized",
                "message": words,
            },
        )
    else:
        condition(pod, {"type": "Initialized", "status": "True"})
    for name in ("Ready", "ContainersReady"):
        if ready:
            condition(pod, {"type": name, "status": "True"})
        elif phase:
            reason = "PodFailed" if phase == "Failed" else "PodCompleted"
            condition(pod, {"type": name, "status": "False", "reason": reason})
        else:
            words = f"containers with unready status: [{names}]"
            condition(
                pod,
                {"type": name, "status": "False", "reason": "ContainersNotReady", "message": words},
            )


def condition(pod: Object, new: Object) -> None:
    rows = pod["status"].setdefault("conditions", [])
    old = next((row for row in rows if row["type"] == new["type"]), None)
    moved = now() if not old or old["status"] != new["status"] else old["lastTransitionTime"]
    row = {**new, "lastProbeTime": None, "lastTransitionTime": moved}
    if old:
        rows[rows.index(old)] = row
    else:
        rows.append(row)
