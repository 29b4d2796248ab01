"""The objects, as an API server keeps them: versions, selectors, patches, deletion, and what a watch has to tell."""

from __future__ import annotations

import asyncio
import copy
import random
import re
import time
import uuid
from dataclasses import dataclass, field
from typing import Any

Object = dict[str, Any]
LETTERS = "bcdfghjklmnpqrstvwxz2456789"  # of generated names: no vowels, so no words
SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
LABEL_VALUE = re.compile(r"(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?")
NAME_WORDS = (
    "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.', and must start and "
    "end with an alphanumeric character (e.g. 'example.com', regex used for validation is "
    "'[a-z0-9]([-a-z0-9]*[a-z0-9])?(\\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*')"
)
LABEL_WORDS = (
    "a valid label must be an empty string or consist of alphanumeric characters, '-', '_' or '.', and must start and "
    "end with an alphanumeric character (e.g. 'MyValue',  or 'my_value',  or '12345', regex used for validation is "
    "'(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?')"
)


class Refused(Exception):
    """An answer that is no success, with the body that a real server gives."""

    def __init__(self, code: int, reason: str, message: str, details: Object | None = None) -> None:
        super().__init__(message)
        self.code, self.reason, self.message, self.details = code, reason, message, details or {}

    def body(self) -> Object:
        return {
            "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "message": self.message,
            "reason": self.reason, "details": self.details, "code": self.code,
        }  # fmt: skip


@dataclass(frozen=True)
class Resource:
    group: str
    version: str
    plural: str
    kind: str
    namespaced: bool = True
    short: tuple[str, ...] = ()
    subresources: tuple[str, ...] = ()
    verbs: tuple[str, ...] = (
        "create",
        "delete",
        "deletecollection",
        "get",
        "list",
        "patch",
        "update",
        "watch",
    )

    @property
    def full(self) -> str:
        return f"{self.plural}.{self.group}" if self.group else self.plural

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def custom(self) -> bool:
        return self.group == "ray.io"

    def details(self, name: str = "") -> Object:
        return {
            **({"name": name} if name else {}),
            **({"group": self.group} if self.group else {}),
            "kind": self.plural,
        }


READ_ONLY = ("get", "list", "watch")
RESOURCES = {
    kind.plural: kind
    for kind in (
        Resource("", "v1", "namespaces", "Namespace", False, ("ns",)),
        Resource("", "v1", "nodes", "Node", False, ("no",)),
        Resource("", "v1", "pods", "Pod", True, ("po",), ("log", "exec", "status", "eviction")),
        Resource("", "v1", "secrets", "Secret"),
        Resource("", "v1", "services", "Service", True, ("svc",), ("proxy", "status")),
        Resource("", "v1", "events", "Event", True, ("ev",)),
        Resource("", "v1", "configmaps", "ConfigMap", True, ("cm",)),
        Resource("", "v1", "resourcequotas", "ResourceQuota", True, ("quota",), ("status",)),
        Resource("ray.io", "v1", "rayclusters", "RayCluster", True, (), ("status",)),
        Resource("ray.io", "v1", "rayjobs", "RayJob", True, (), ("status",)),
        Resource(
            "apiextensions.k8s.io",
            "v1",
            "customresourcedefinitions",
            "CustomResourceDefinition",
            False,
            ("crd", "crds"),
            (),
            READ_ONLY,
        ),
        Resource(
            "authorization.k8s.io",
            "v1",
            "selfsubjectaccessreviews",
            "SelfSubjectAccessReview",
            False,
            (),
            (),
            ("create",),
        ),
        Resource(
            "authentication.k8s.io",
            "v1",
            "selfsubjectreviews",
            "SelfSubjectReview",
            False,
            (),
            (),
            ("create",),
        ),
    )
}


def now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def micro() -> str:
    moment = time.time()
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(moment)) + f".{int(moment % 1 * 1e6):06d}Z"


def suffix() -> str:
    return "".join(random.choices(LETTERS, k=5))


def not_found(kind: Resource, name: str) -> Refused:
    return Refused(404, "NotFound", f'{kind.full} "{name}" not found', kind.details(name))


def conflict(kind: Resource, name: str, why: str = "") -> Refused:
    why = why or "the object has been modified; please apply your changes to the latest version and try again"
    words = f'Operation cannot be fulfilled on {kind.full} "{name}": {why}'
    return Refused(409, "Conflict", words, kind.details(name))


def invalid(kind: Resource, name: str, causes: list[tuple[str, str, str]]) -> Refused:
    """causes: (the reason for machines, the field, the words)"""
    words = [f"{place}: {text}" for _, place, text in causes]
    group = f"{kind.kind}.{kind.group}" if kind.group else kind.kind
    said = words[0] if len(words) == 1 else f"[{', '.join(words)}]"
    details = {"name": name, **({"group": kind.group} if kind.group else {}), "kind": kind.kind}
    details["causes"] = [{"reason": r, "message": text, "field": place} for r, place, text in causes]
    return Refused(422, "Invalid", f'{group} "{name}" is invalid: {said}', details)


@dataclass
class Store:
    """Everything happens in one event loop, so nothing here waits or locks."""

    objects: dict[str, dict[tuple[str, str], Object]] = field(default_factory=dict)
    version: int = 1000
    log: list[tuple[int, str, str, Object]] = field(default_factory=list)  # (version, type, plural, object)
    oldest: int = 1000  # what happened before this version is forgotten
    watchers: set[asyncio.Event] = field(default_factory=set)

    # -- reading

    def find(self, plural: str, namespace: str, name: str) -> Object | None:
        return self.objects.get(plural, {}).get((namespace, name))

    def get(self, kind: Resource, namespace: str, name: str) -> Object:
        found = self.find(kind.plural, namespace, name)
        if found is None:
            raise not_found(kind, name)
        return found

    def list(self, plural: str, namespace: str = "", labels: str = "", fields: str = "") -> list[Object]:
        test = selector(RESOURCES[plural], labels, fields)
        rows = sorted(self.objects.get(plural, {}).items())
        return [obj for (ns, _), obj in rows if (not namespace or ns == namespace) and test(obj)]

    # -- writing

    def _tell(self, what: str, plural: str, obj: Object) -> None:
        self.version += 1
        obj["metadata"]["resourceVersion"] = str(self.version)
        self.log.append((self.version, what, plural, copy.deepcopy(obj)))
        if len(self.log) > 20_000:
            self.forget(10_000)
        self.wake()

    def wake(self) -> None:
        for watcher in self.watchers:
            watcher.set()

    def forget(self, keep: int = 0) -> None:
        """As compaction does: a watch that asks for what was before is too old."""
        self.log = self.log[len(self.log) - keep :] if keep else []
        self.oldest = self.version if not self.log else self.log[0][0] - 1

    def create(self, kind: Resource, namespace: str, obj: Object, dry: bool = False) -> Object:
        obj = copy.deepcopy(obj)
        meta = obj.setdefault("metadata", {})
        if not meta.get("name") and meta.get("generateName"):
            meta["name"] = meta["generateName"][:58] + suffix()
        check_metadata(kind, meta)
        name = meta["name"]
        if self.find(kind.plural, namespace, name) is not None:
            raise Refused(409, "AlreadyExists", f'{kind.full} "{name}" already exists', kind.details(name))
        obj["apiVersion"], obj["kind"] = kind.api_version, kind.kind
        for key in ("resourceVersion", "deletionTimestamp", "deletionGracePeriodSeconds", "selfLink"):
            meta.pop(key, None)
        meta.update(uid=str(uuid.uuid4()), creationTimestamp=now())
        if kind.namespaced:
            meta["namespace"] = namespace
        if kind.custom or kind.plural == "pods":
            meta["generation"] = 1
        if kind.custom:
            obj.pop("status", None)
        if not dry:
            self.objects.setdefault(kind.plural, {})[(namespace, name)] = obj
            self._tell("ADDED", kind.plural, obj)
        return copy.deepcopy(obj)

    def update(
        self, kind: Resource, namespace: str, name: str, new: Object, status: bool, dry: bool = False
    ) -> Object:
        """Takes the whole new object; of the rest of it (status, or all but the status) nothing is taken."""
        old = self.get(kind, namespace, name)
        meta = new.setdefault("metadata", {})
        if meta.get("uid", old["metadata"]["uid"]) != old["metadata"]["uid"]:
            raise conflict(
                kind,
                name,
                f"Precondition failed: UID in precondition: {meta['uid']}, UID in object meta: {old['metadata']['uid']}",
            )
        if (
            meta.get("resourceVersion", old["metadata"]["resourceVersion"])
            != old["metadata"]["resourceVersion"]
        ):
            raise conflict(kind, name)
        both = kind.custom or "status" in kind.subresources
        result = copy.deepcopy(old)
        if status:
            result["status"] = copy.deepcopy(new.get("status", {}))
        else:
            for key in {*new, *result} - {"apiVersion", "kind", "metadata", *(["status"] if both else [])}:
                if key in new:
                    result[key] = copy.deepcopy(new[key])
                else:
                    result.pop(key)
            for key in ("labels", "annotations", "finalizers", "ownerReferences"):
                if meta.get(key):
                    result["metadata"][key] = copy.deepcopy(meta[key])
                else:
                    result["metadata"].pop(key, None)
            check_metadata(kind, result["metadata"])
            if "generation" in result["metadata"] and result.get("spec") != old.get("spec"):
                result["metadata"]["generation"] += 1
        if result == old or dry:
            return copy.deepcopy(result)  # a write that changes nothing is no event
        self.objects[kind.plural][(namespace, name)] = result
        self._tell("MODIFIED", kind.plural, result)
        self._maybe_gone(kind, result)
        return copy.deepcopy(self.find(kind.plural, namespace, name) or result)

    def touch(self, plural: str, obj: Object) -> None:
        """A controller here has changed the stored object in place."""
        key = (obj["metadata"].get("namespace", ""), obj["metadata"]["name"])
        if self.objects.get(plural, {}).get(key) is obj:
            self._tell("MODIFIED", plural, obj)

    # -- deletion

    def delete(
        self, kind: Resource, namespace: str, name: str, policy: str = "", grace: int | None = None
    ) -> Object:
        """Returns the object as it then is. It may stay a while: finalizers, or a Pod that ends in order."""
        obj = self.get(kind, namespace, name)
        meta = obj["metadata"]
        finalizers = meta.setdefault("finalizers", [])
        if policy == "Foreground" and "foregroundDeletion" not in finalizers:
            finalizers.append("foregroundDeletion")
        if policy == "Orphan":
            self._orphan(meta["uid"])
        waits = False
        if kind.plural == "pods":
            if grace is None:
                grace = obj.get("spec", {}).get("terminationGracePeriodSeconds", 30)
            waits = grace > 0 and bool(obj.get("spec", {}).get("nodeName"))
            shorter = "deletionTimestamp" in meta and grace < meta.get("deletionGracePeriodSeconds", 0)
            if waits and ("deletionTimestamp" not in meta or shorter):
                meta["deletionGracePeriodSeconds"] = grace
        if not finalizers:
            meta.pop("finalizers")
        if finalizers or waits:
            if "deletionTimestamp" not in meta:
                meta["deletionTimestamp"] = now()
                if "generation" in meta and kind.custom:
                    meta["generation"] += 1
                self.touch(kind.plural, obj)
            return copy.deepcopy(obj)
        self.remove(kind.plural, obj)
        return copy.deepcopy(obj)

    def remove(self, plural: str, obj: Object) -> None:
        key = (obj["metadata"].get("namespace", ""), obj["metadata"]["name"])
        found = self.objects.get(plural, {}).get(key)
        if found and found["metadata"]["uid"] == obj["metadata"]["uid"]:
            del self.objects[plural][key]
            self._tell("DELETED", plural, obj)

    def _maybe_gone(self, kind: Resource, obj: Object) -> None:
        meta = obj["metadata"]
        if "deletionTimestamp" in meta and not meta.get("finalizers") and kind.plural != "pods":
            self.remove(kind.plural, obj)

    def dependents(self, uid: str) -> list[tuple[str, Object]]:
        return [
            (plural, obj)
            for plural, rows in self.objects.items()
            for obj in rows.values()
            if any(owner.get("uid") == uid for owner in obj["metadata"].get("ownerReferences", []))
        ]

    def _orphan(self, uid: str) -> None:
        for plural, obj in self.dependents(uid):
            left = [o for o in obj["metadata"]["ownerReferences"] if o.get("uid") != uid]
            obj["metadata"]["ownerReferences"] = left
            self.touch(plural, obj)

    def collect(self) -> None:
        """One round of the garbage collector."""
        living = {obj["metadata"]["uid"] for rows in self.objects.values() for obj in rows.values()}
        for plural, rows in list(self.objects.items()):
            for (namespace, name), obj in list(rows.items()):
                meta = obj["metadata"]
                owners = meta.get("ownerReferences") or []
                if (
                    owners
                    and "deletionTimestamp" not in meta
                    and not any(o.get("uid") in living for o in owners)
                ):
                    self.delete(RESOURCES[plural], namespace, name, "Background")
                if "foregroundDeletion" in meta.get("finalizers", []):
                    left = self.dependents(meta["uid"])
                    for kind, child in left:
                        if "deletionTimestamp" not in child["metadata"]:
                            self.delete(RESOURCES[kind], namespace, child["metadata"]["name"], "Foreground")
                    if not self.dependents(meta["uid"]):
                        meta["finalizers"].remove("foregroundDeletion")
                        self.touch(plural, obj)
                        self._maybe_gone(RESOURCES[plural], obj)


# --- metadata and selectors


def check_metadata(kind: Resource, meta: Object) -> None:
    name = meta.get("name", "")
    if not name:
        words = "Required value: name or generateName is required"
        raise invalid(kind, "", [("FieldValueRequired", "metadata.name", words)])
    causes = []
    if not SUBDOMAIN.fullmatch(name) and kind.plural != "events":
        causes.append(("FieldValueInvalid", "metadata.name", f'Invalid value: "{name}": {NAME_WORDS}'))
    elif len(name) > 253:
        causes.append(
            (
                "FieldValueInvalid",
                "metadata.name",
                f'Invalid value: "{name}": must be no more than 253 characters',
            )
        )
    for value in (meta.get("labels") or {}).values():
        if not isinstance(value, str):
            raise Refused(400, "BadRequest", f"{kind.kind} in version {kind.version!r} cannot be handled as a {kind.kind}: labels must be strings")  # fmt: skip
        if len(value) > 63:
            words = f'Invalid value: "{value}": must be no more than 63 bytes'
            causes.append(("FieldValueInvalid", "metadata.labels", words))
        elif not LABEL_VALUE.fullmatch(value):
            causes.append(
                ("FieldValueInvalid", "metadata.labels", f'Invalid value: "{value}": {LABEL_WORDS}')
            )
    if causes:
        raise invalid(kind, name, causes)


def _at(obj: Object, path: str) -> str:
    value: Any = obj
    for part in path.split("."):
        value = value.get(part, "") if isinstance(value, dict) else ""
    return str(value)


FIELDS = {
    "pods": ("metadata.", "status.phase", "status.podIP", "spec.nodeName", "spec.restartPolicy"),
    "events": ("metadata.", "involvedObject.", "reason", "type", "source"),
}


def selector(kind: Resource, labels: str, fields: str) -> Any:
    tests = []
    for part in re.split(r",(?![^()]*\))", labels):
        if part.strip():
            tests.append(_label(part.strip()))
    for part in fields.split(","):
        if not part.strip():
            continue
        match = re.fullmatch(r"\s*([\w.]+)\s*(==|=|!=)\s*(.*)", part)
        if not match:
            raise Refused(400, "BadRequest", f"invalid field selector: {part!r}")
        path, sign, wanted = match.groups()
        known = FIELDS.get(kind.plural, ("metadata.name", "metadata.namespace"))
        if not any(path == k or (k.endswith(".") and path.startswith(k)) for k in known):
            raise Refused(400, "BadRequest", f"field label not supported: {path}")
        tests.append(lambda obj, p=path, s=sign, w=wanted: (_at(obj, p) == w) == (s != "!="))
    return lambda obj: all(test(obj) for test in tests)


def _label(part: str) -> Any:
    def of(obj: Object) -> Object:
        return obj["metadata"].get("labels") or {}

    if match := re.fullmatch(r"(\S+)\s+(in|notin)\s+\((.*)\)", part):
        key, sign, listed = match.groups()
        values = {value.strip() for value in listed.split(",")}
        return lambda obj: (of(obj).get(key) in values) == (sign == "in")
    if match := re.fullmatch(r"([^=!\s]+)\s*(==|=|!=)\s*(\S*)", part):
        key, sign, value = match.groups()
        return lambda obj: (of(obj).get(key) == value) == (sign != "!=")
    if re.fullmatch(r"!\S+", part):
        return lambda obj: part[1:] not in of(obj)
    if re.fullmatch(r"[^=!\s()]+", part):
        return lambda obj: part in of(obj)
    raise Refused(400, "BadRequest", f"unable to parse requirement: found '{part}'")
