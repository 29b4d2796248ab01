"""What the parts share: who may do what, what is set to go wrong, how fast things happen, and room for Pods."""

from __future__ import annotations

import copy
import itertools
import time
from dataclasses import asdict, dataclass, field, fields
from fractions import Fraction
from pathlib import Path
from typing import Any

from .schema import Schema
from .store import RESOURCES, Object, Refused, Resource, Store, micro, now

NAMESPACE = "ml"
# context -> (user, token, namespace); a token that the server does not know is one that has expired
USERS = {
    "lab": ("lab", "lab-token", NAMESPACE),
    "admin": ("kubernetes-admin", "admin-token", NAMESPACE),
    "nobody": ("nobody", "nobody-token", NAMESPACE),
    "expired": ("lab", "token-of-yesterday", NAMESPACE),
}
TOKENS = {token: user for context, (user, token, _) in USERS.items() if context != "expired"}
EVERYTHING = {"verbs": ["*"], "groups": ["*"], "resources": ["*"]}


def default_rules() -> dict[str, list[dict[str, list[str]]]]:
    return {
        "lab": [{**EVERYTHING, "namespaces": [NAMESPACE]}],
        "kubernetes-admin": [{**EVERYTHING, "namespaces": ["*"]}],
    }


# what system:basic-user gives to everybody who is somebody
OWN_REVIEWS = ("selfsubjectaccessreviews", "selfsubjectreviews")


@dataclass
class Settings:
    """Everything that a test may turn while the server runs. Seconds, where it is a time."""

    operator: bool = True  # False: nobody reads RayClusters
    crds: bool = True  # False: KubeRay was never installed
    operator_delay: float = 0.0
    schedule_delay: float = 0.0
    start_delay: float = 0.05  # an image is pulled, a container made
    ready_delay: float = 0.05  # without Ray only: with it, its own probe says when
    grace_cap: float = 5.0  # whatever grace a Pod has, no test waits longer
    backoff: float = 1.0  # the first of the waits between restarts and pulls; each next one is twice as long
    bookmark_s: float = 2.0
    missing: str = "missing"  # an image with this in its name cannot be pulled
    pull_failure: str = ""  # what every pull fails with: the network of a node, a registry that is away
    crash: str = "crash"  # the container of an image with this in its name ends at once
    memory_used: int = 0  # without Ray only: bytes of each Pod's memory that its node's figures call used
    logs_lost: bool = False  # what a container wrote before its restart is gone from the node
    frozen: bool = False  # the kubelet is stopped: containers go on, no log comes, no Pod ends but by force
    nodes: int = 1
    capacity: dict[str, str] = field(default_factory=lambda: {"cpu": "64", "memory": "256Gi", "pods": "110"})


@dataclass
class Fault:
    """What goes wrong with requests that match. `do`: a status code, cut, cut_after, slow, gone, or break."""

    id: int
    do: Any
    verb: str = "*"
    resource: str = "*"  # a plural, or with its subresource: pods/log, services/proxy
    name: str = "*"
    user: str = "*"
    times: int | None = None  # None: until cleared
    seconds: float = 1.0  # slow: how much later; 429: what Retry-After says
    after: int = 1  # break: so many whole events before the broken one
    message: str = ""
    hits: int = 0

    def meets(self, verb: str, resource: str, name: str, user: str) -> bool:
        wanted = ((self.verb, verb), (self.resource, resource), (self.name, name), (self.user, user))
        return all(want in ("*", have) for want, have in wanted) and self.times != 0


class World:
    def __init__(self, folder: Path, definitions: Path | None, ray: str | None) -> None:
        self.folder, self.ray = folder, ray
        self.store, self.schema, self.settings = Store(), Schema(definitions), Settings()
        self.faults: list[Fault] = []
        self.rules = default_rules()
        self.requests: list[Object] = []
        self.epoch = 0  # goes up when all open connections are dropped
        self._ids = itertools.count(1)
        for name in ("default", "kube-system", NAMESPACE, "other"):
            space = {"metadata": {"name": name, "labels": {"kubernetes.io/metadata.name": name}}}
            self.store.create(RESOURCES["namespaces"], "", {**space, "spec": {"finalizers": ["kubernetes"]}})
            self.store.find("namespaces", "", name)["status"] = {"phase": "Active"}  # type: ignore[index]

    # -- who may

    def allowed(
        self, user: str, verb: str, group: str, resource: str, namespace: str, everybody: bool = True
    ) -> bool:
        if everybody and resource in OWN_REVIEWS:
            return True

        def has(rule: Object, key: str, value: str) -> bool:
            return "*" in rule[key] or value in rule[key]

        return any(
            has(rule, "verbs", verb)
            and has(rule, "groups", group)
            and (has(rule, "resources", resource) or "*" in rule["resources"])
            and ("*" in rule["namespaces"] or (namespace and namespace in rule["namespaces"]))
            for rule in self.rules.get(user, [])
        )

    # -- what goes wrong

    def add_fault(self, do: Any, **more: Any) -> int:
        fault = Fault(next(self._ids), do, **more)
        self.faults.append(fault)
        return fault.id

    def fault(self, verb: str, resource: str, name: str, user: str) -> Fault | None:
        for fault in self.faults:
            if fault.meets(verb, resource, name, user):
                fault.hits += 1
                if fault.times is not None:
                    fault.times -= 1
                return fault
        return None

    def set(self, **changes: Any) -> Object:
        known = {item.name for item in fields(Settings)}
        for key, value in changes.items():
            if key not in known:
                raise Refused(
                    400, "BadRequest", f"no such setting: {key}; there are {', '.join(sorted(known))}"
                )
            if key == "capacity":
                value = {**self.settings.capacity, **{k: str(v) for k, v in value.items()}}
            setattr(self.settings, key, value)
        self.store.wake()
        return asdict(self.settings)

    # -- events, as controllers write them

    def event(self, obj: Object, kind: str, reason: str, message: str, source: str, action: str = "") -> None:
        """Repeated ones are counted up, as client libraries do. There are two kinds: kubelet's have first and last times
        and a count; the scheduler's and KubeRay's have none of these, but an eventTime, and a series when repeated."""
        meta = obj["metadata"]
        involved = {
            "kind": obj["kind"],
            "namespace": meta.get("namespace", "default"),
            "name": meta["name"],
            "uid": meta["uid"],
            "apiVersion": obj["apiVersion"],
            "resourceVersion": meta["resourceVersion"],
        }
        modern = source != "kubelet"
        for old in self.store.list("events", involved["namespace"]):
            same = old["involvedObject"].get("uid") == meta["uid"]
            if same and (old["reason"], old["message"], old["type"]) == (reason, message, kind):
                if modern:
                    count = (old.get("series") or {}).get("count", 1) + 1
                    old["series"] = {"count": count, "lastObservedTime": micro()}
                else:
                    old["count"], old["lastTimestamp"] = old.get("count", 1) + 1, now()
                self.store.touch("events", old)
                return
        event = {
            "metadata": {"name": f"{meta['name']}.{time.time_ns() + next(self._ids):016x}"}, "involvedObject": involved,
            "reason": reason, "message": message, "type": kind, "reportingComponent": source,
        }  # fmt: skip
        if modern:
            event |= {"eventTime": micro(), "firstTimestamp": None, "lastTimestamp": None, "source": {}}
            event |= {"action": action or reason, "reportingInstance": f"{source}-0"}
        else:
            event |= {"eventTime": None, "firstTimestamp": now(), "lastTimestamp": now(), "count": 1}
            event |= {"source": {"component": source, "host": "node-1"}, "reportingInstance": "node-1"}
        self.store.create(RESOURCES["events"], involved["namespace"], event)

    # -- quotas and room

    def admit(self, kind: Resource, namespace: str, obj: Object) -> None:
        """What admission refuses on creation: a namespace that goes, a quota that is used up."""
        space = self.store.find("namespaces", "", namespace)
        name = obj["metadata"].get("name") or obj["metadata"].get("generateName", "")
        if space is None:
            raise Refused(
                404,
                "NotFound",
                f'namespaces "{namespace}" not found',
                {"name": namespace, "kind": "namespaces"},
            )
        if "deletionTimestamp" in space["metadata"]:
            words = f'{kind.full} "{name}" is forbidden: unable to create new content in namespace {namespace} because it is being terminated'
            cause = {
                "reason": "NamespaceTerminating",
                "message": f"namespace {namespace} is being terminated",
                "field": "metadata.namespace",
            }
            raise Refused(403, "Forbidden", words, {**kind.details(name), "causes": [cause]})
        wanted = demand(kind, obj)
        for quota in self.store.list("resourcequotas", namespace):
            hard = quota.get("spec", {}).get("hard", {})
            used = self.used(namespace, hard)
            for key in hard:
                if kind.plural == "pods" and key in MUST and not wanted.get(key):
                    names = [c["name"] for c in obj["spec"]["containers"]]
                    words = f"failed quota: {quota['metadata']['name']}: must specify {key} for: {','.join(names)}"
                    raise Refused(
                        403, "Forbidden", f'{kind.full} "{name}" is forbidden: {words}', kind.details(name)
                    )
            over = [key for key in hard if key in wanted and used[key] + wanted[key] > quantity(hard[key])]
            if over:

                def listed(amounts: dict[str, Any], keys: list[str] = over) -> str:
                    return ",".join(f"{key}={amounts[key]}" for key in sorted(keys))

                words = (
                    f"exceeded quota: {quota['metadata']['name']}, requested: {listed({k: show(k, wanted[k]) for k in over})}, "
                    f"used: {listed({k: show(k, used[k]) for k in over})}, limited: {listed(hard)}"
                )
                raise Refused(
                    403, "Forbidden", f'{kind.full} "{name}" is forbidden: {words}', kind.details(name)
                )

    def used(self, namespace: str, hard: dict[str, str]) -> dict[str, Fraction]:
        total = dict.fromkeys(hard, Fraction(0))
        for plural in ("pods", "rayclusters", "rayjobs", "secrets", "services", "configmaps"):
            for obj in self.store.list(plural, namespace):
                if obj.get("status", {}).get("phase") in ("Succeeded", "Failed"):
                    continue
                for key, amount in demand(RESOURCES[plural], obj).items():
                    if key in total:
                        total[key] += amount
        return total

    def count_quotas(self) -> None:
        for quota in self.store.list("resourcequotas"):
            hard = quota.get("spec", {}).get("hard", {})
            used = self.used(quota["metadata"]["namespace"], hard)
            status = {"hard": copy.deepcopy(hard), "used": {key: show(key, used[key]) for key in hard}}
            if quota.get("status") != status:
                quota["status"] = status
                self.store.touch("resourcequotas", quota)

    def shortage(self, pod: Object) -> str:
        """Why the scheduler has no node for this Pod, in its words; empty when it has."""
        wanted = pod_requests(pod["spec"])
        taken: dict[str, Fraction] = {}
        for other in self.store.list("pods"):
            ended = other.get("status", {}).get("phase") in ("Succeeded", "Failed")
            if other["spec"].get("nodeName") and not ended:
                for key, amount in pod_requests(other["spec"]).items():
                    taken[key] = taken.get(key, Fraction(0)) + amount
        nodes, room = self.settings.nodes, self.settings.capacity
        short = [
            key
            for key, amount in wanted.items()
            if amount and taken.get(key, 0) + amount > quantity(room.get(key, "0"))
        ]
        if not short:
            return ""
        listed = ", ".join(f"{nodes} Insufficient {key}" for key in sorted(short))
        return (
            f"0/{nodes} nodes are available: {listed}. no new claims to deallocate, preemption: 0/{nodes} nodes are "
            f"available: {nodes} Preemption is not helpful for scheduling."
        )


# --- quantities

SUFFIXES = {
    "": 1, "m": Fraction(1, 1000), "u": Fraction(1, 10**6), "n": Fraction(1, 10**9), "k": 10**3, "M": 10**6, "G": 10**9,
    "T": 10**12, "P": 10**15, "E": 10**18, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50, "Ei": 2**60,
}  # fmt: skip
MUST = ("limits.cpu", "limits.memory", "requests.cpu", "requests.memory", "cpu", "memory")


def quantity(text: Any) -> Fraction:
    text = str(text)
    digits = text.rstrip("munkKMGTPEi")
    return Fraction(digits or "0") * SUFFIXES[text[len(digits) :]]


def show(key: str, amount: Fraction) -> str:
    """As Kubernetes writes it: memory in the largest binary unit that is whole, cpu in thousandths where it must."""
    if amount.denominator != 1:
        return f"{int(amount * 1000)}m"
    if "memory" in key.lower():
        for unit in ("Ti", "Gi", "Mi", "Ki"):
            if amount and amount % SUFFIXES[unit] == 0:
                return f"{int(amount / SUFFIXES[unit])}{unit}"
    return str(int(amount))


def _sum(spec: Object, part: str, fallback: str) -> dict[str, Fraction]:
    total: dict[str, Fraction] = {}
    for container in spec.get("containers", []):
        resources = container.get("resources") or {}
        amounts = {**(resources.get(fallback) or {}), **(resources.get(part) or {})} if fallback else resources.get(part) or {}  # fmt: skip
        for key, value in amounts.items():
            total[key] = total.get(key, Fraction(0)) + quantity(value)
    return total


def pod_requests(spec: Object) -> dict[str, Fraction]:
    """Requests; where there are none, the limits."""
    return {**_sum(spec, "requests", "limits"), "pods": Fraction(1)}


def demand(kind: Resource, obj: Object) -> dict[str, Fraction]:
    """What one object takes of a quota, by the quota's names."""
    wanted = {f"count/{kind.full}": Fraction(1)}
    if kind.plural != "pods":
        return {**wanted, kind.plural: Fraction(1)}
    for key, amount in pod_requests(obj.get("spec") or {}).items():
        wanted[key if key == "pods" else f"requests.{key}"] = amount
        if key in ("cpu", "memory"):
            wanted[key] = amount
    for key, amount in _sum(obj.get("spec") or {}, "limits", "").items():
        wanted[f"limits.{key}"] = amount
    return wanted
