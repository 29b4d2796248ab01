"""Are the fields of a RayCluster or RayJob such as its definition allows? The walk is ours, the words are the server's.

With KubeRay's own definitions (a folder with ray.io_rayclusters.v1.json and ray.io_rayjobs.v1.json) the check is whole.
Without them a few rows of the same kind stand in: what is required, and the obvious types.
"""

from __future__ import annotations

import base64
import binascii
import copy
import json
import random
import re
from pathlib import Path
from typing import Any

from .store import Object, Refused, Resource, invalid

ANY: Object = {"x-kubernetes-preserve-unknown-fields": True}
STRINGS: Object = {"type": "object", "additionalProperties": {"type": "string"}}
NUMBER, TEXT, SWITCH = {"type": "integer"}, {"type": "string"}, {"type": "boolean"}
QUANTITY: Object = {
    "anyOf": [{"type": "integer"}, {"type": "string"}],
    "x-kubernetes-int-or-string": True,
    "pattern": r"^(\+|-)?(([0-9]+(\.[0-9]*)?)|(\.[0-9]+))(([KMGTPE]i)|[numkMGTPE]|([eE](\+|-)?(([0-9]+(\.[0-9]*)?)|(\.[0-9]+))))?$",
}


def _object(required: tuple[str, ...] = (), **properties: Object) -> Object:
    return {"type": "object", "required": list(required), "properties": properties}


def _list(items: Object) -> Object:
    return {"type": "array", "items": items}


QUANTITIES: Object = {"type": "object", "additionalProperties": QUANTITY}
CONTAINER = {
    **_object(
        ("name",),
        name=TEXT,
        image=TEXT,
        command=_list(TEXT),
        args=_list(TEXT),
        resources=_object(limits=QUANTITIES, requests=QUANTITIES, claims=ANY),
        env=_list({**_object(("name",), name=TEXT, value=TEXT, valueFrom=ANY)}),
    ),
    **ANY,
}
POD: Object = {
    **_object(("containers",), containers=_list(CONTAINER), initContainers=_list(CONTAINER)),
    **ANY,
}
TEMPLATE = _object(metadata={"type": "object", **ANY}, spec=POD)
GROUP = dict(labels=STRINGS, rayStartParams=STRINGS, resources=STRINGS, template=TEMPLATE)
CLUSTER = _object(
    ("headGroupSpec",),
    headGroupSpec=_object(
        ("template",), **GROUP, enableIngress=SWITCH, headService=ANY, ingressOptions=ANY, serviceType=TEXT
    ),
    workerGroupSpecs=_list(
        _object(
            ("groupName", "maxReplicas", "minReplicas", "template"),
            **GROUP,
            groupName=TEXT,
            replicas={**NUMBER, "default": 0},
            minReplicas={**NUMBER, "default": 0},
            maxReplicas={**NUMBER, "default": 2147483647},
            numOfHosts={**NUMBER, "default": 1},
            priority={**NUMBER, "default": 0},
            idleTimeoutSeconds=NUMBER,
            suspend=SWITCH,
            scaleStrategy=_object(workersToDelete=_list(TEXT)),
        )
    ),
    authOptions=_object(
        mode={**TEXT, "enum": ["disabled", "token"]}, secretName=TEXT, enableK8sTokenAuth=SWITCH
    ),
    autoscalerOptions={
        **_object(
            upscalingMode={**TEXT, "enum": ["Default", "Aggressive", "Conservative"]},
            version={**TEXT, "enum": ["v1", "v2"]},
            idleTimeoutSeconds=NUMBER,
        ),
        **ANY,
    },
    enableInTreeAutoscaling=SWITCH,
    gcsFaultToleranceOptions=ANY,
    headServiceAnnotations=STRINGS,
    historyServerOptions=ANY,
    managedBy=TEXT,
    networkPolicy=ANY,
    rayVersion=TEXT,
    suspend=SWITCH,
    tlsOptions=ANY,
    upgradeStrategy=ANY,
)
JOB = _object(
    rayClusterSpec=CLUSTER,
    activeDeadlineSeconds=NUMBER,
    preRunningDeadlineSeconds=NUMBER,
    ttlSecondsAfterFinished={**NUMBER, "default": 0},
    backoffLimit={**NUMBER, "default": 0},
    clusterSelector=STRINGS,
    deletionStrategy={"type": "object", **ANY},
    entrypoint=TEXT,
    entrypointNumCpus={"type": "number"},
    entrypointNumGpus={"type": "number"},
    entrypointResources=TEXT,
    jobId=TEXT,
    managedBy=TEXT,
    metadata=STRINGS,
    runtimeEnvYAML=TEXT,
    shutdownAfterJobFinishes=SWITCH,
    submissionMode={**TEXT, "default": "K8sJobMode"},
    submitterConfig=ANY,
    submitterPodTemplate=ANY,
    suspend=SWITCH,
)
TYPES = {
    "object": dict,
    "array": list,
    "string": str,
    "boolean": bool,
    "integer": int,
    "number": (int, float),
}
NAMES = {dict: "object", list: "array", str: "string", bool: "boolean", int: "integer", float: "number"}


class Schema:
    def __init__(self, folder: Path | None) -> None:
        self.kinds = {"rayclusters": _object(spec=CLUSTER), "rayjobs": _object(spec=JOB)}
        for plural in self.kinds if folder else ():
            definition = json.loads((folder / f"ray.io_{plural}.v1.json").read_text())
            self.kinds[plural] = definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]

    def check(
        self, kind: Resource, obj: Object, strict: bool, old: Object | None = None
    ) -> tuple[Object, list[str]]:
        """The object as it is stored, defaults filled in, and the unknown fields that it lost. Raises what the server answers."""
        if kind.plural not in self.kinds:
            return obj, []
        top = {key: obj[key] for key in ("apiVersion", "kind", "metadata") if key in obj}
        unknown = [key for key in obj if key not in (*top, "spec", "status")]
        causes: list[tuple[str, str, str]] = []
        rest = {key: obj[key] for key in ("spec",) if key in obj}
        properties = {key: self.kinds[kind.plural]["properties"][key] for key in ("spec",)}
        shape = {**self.kinds[kind.plural], "properties": properties}
        result = _walk(copy.deepcopy(rest), shape, "", causes, unknown)
        if unknown and strict:
            words = ", ".join(f'unknown field "{name}"' for name in unknown)
            raise Refused(
                400,
                "BadRequest",
                f'{kind.kind} in version "{kind.version}" cannot be handled as a {kind.kind}: strict decoding error: {words}',
            )
        causes = causes or rules(result, old or {})
        if causes:
            raise invalid(kind, top["metadata"].get("name", ""), causes)
        return {**top, **result, **({"status": obj["status"]} if "status" in obj else {})}, unknown


def _walk(
    value: Any, shape: Object, path: str, causes: list[tuple[str, str, str]], unknown: list[str]
) -> Any:
    if not _typed(value, shape, path, causes):
        return value
    if isinstance(value, dict):
        return _fields(value, shape, path, causes, unknown)
    if isinstance(value, list):
        items = shape.get("items", ANY)
        if len(value) < shape.get("minItems", 0):
            words = (
                f"Invalid value: {len(value)}: {path} in body should have at least {shape['minItems']} items"
            )
            causes.append(("FieldValueInvalid", path, words))
        return [_walk(item, items, f"{path}[{i}]", causes, unknown) for i, item in enumerate(value)]
    _scalar(value, shape, path, causes)
    return value


def _typed(value: Any, shape: Object, path: str, causes: list[tuple[str, str, str]]) -> bool:
    wanted = "integer,string" if shape.get("x-kubernetes-int-or-string") else shape.get("type")
    if wanted is None:
        return True
    found = NAMES.get(type(value), "null")
    classes = (int, str) if "," in wanted else TYPES[wanted]
    if isinstance(value, classes) and not (isinstance(value, bool) and wanted != "boolean"):
        return True
    words = f'Invalid value: "{found}": {path} in body must be of type {wanted}: "{found}"'
    causes.append(("FieldValueTypeInvalid", path, words))
    return False


def _fields(
    value: Object, shape: Object, path: str, causes: list[tuple[str, str, str]], unknown: list[str]
) -> Object:
    known, more = shape.get("properties", {}), shape.get("additionalProperties")
    free = shape.get("x-kubernetes-preserve-unknown-fields") or (not known and more is None)
    result = {}
    for key, item in value.items():
        place = f"{path}.{key}" if path else key
        inner = known.get(key, more)
        if item is None and not (inner or {}).get("nullable"):
            continue  # the server drops a null
        if inner is None and not free:
            unknown.append(place)
            continue
        if more is not None and key not in known:
            place = f"{path}.{key}"
        result[key] = _walk(item, inner, place, causes, unknown) if isinstance(inner, dict) else item
    for key, inner in known.items():
        if "default" in inner and key not in result:
            result[key] = copy.deepcopy(inner["default"])
    for key in shape.get("required", ()):
        if key not in result:
            causes.append(("FieldValueRequired", f"{path}.{key}" if path else key, "Required value"))
    return result


def _scalar(value: Any, shape: Object, path: str, causes: list[tuple[str, str, str]]) -> None:
    shown = json.dumps(value)
    if "enum" in shape and value not in shape["enum"]:
        allowed = ", ".join(f'"{item}"' for item in shape["enum"])
        causes.append(
            ("FieldValueNotSupported", path, f"Unsupported value: {shown}: supported values: {allowed}")
        )
    if "pattern" in shape and isinstance(value, str) and not re.search(shape["pattern"], value):
        words = f"Invalid value: {shown}: {path} in body should match '{shape['pattern']}'"
        causes.append(("FieldValueInvalid", path, words))
    if "minimum" in shape and isinstance(value, (int, float)) and value < shape["minimum"]:
        words = (
            f"Invalid value: {shown}: {path} in body should be greater than or equal to {shape['minimum']}"
        )
        causes.append(("FieldValueInvalid", path, words))
    if shape.get("format") == "int32" and isinstance(value, int) and abs(value) > 2147483648:
        words = f'Invalid value: "{shape["type"]}": {path} in body must be of type int32: "int64"'
        causes.append(("FieldValueInvalid", path, words))


# --- the rules that the definitions write in CEL

MANAGERS = ("ray.io/kuberay-operator", "kueue.x-k8s.io/multikueue")


def rules(new: Object, old: Object) -> list[tuple[str, str, str]]:
    causes = []

    def say(path: str, value: Any, words: str) -> None:
        shown = f'"{value}"' if isinstance(value, str) else '"object"' if isinstance(value, dict) else value
        causes.append(("FieldValueInvalid", path, f"Invalid value: {shown}: {words}"))

    spec, before = new.get("spec") or {}, old.get("spec") or {}
    clusters = [("spec", spec, before)]
    if isinstance(spec.get("rayClusterSpec"), dict):
        clusters.append(("spec.rayClusterSpec", spec["rayClusterSpec"], before.get("rayClusterSpec") or {}))
    for path, part, was in clusters:
        manager = part.get("managedBy")
        if manager is not None and "managedBy" in was and was["managedBy"] != manager:
            say(f"{path}.managedBy", manager, "the managedBy field is immutable")
        if manager is not None and manager not in MANAGERS:
            say(
                f"{path}.managedBy",
                manager,
                "the managedBy field value must be either 'ray.io/kuberay-operator' or 'kueue.x-k8s.io/multikueue'",
            )
        backend = (part.get("gcsFaultToleranceOptions") or {}).get("backend")
        earlier = (was.get("gcsFaultToleranceOptions") or {}).get("backend")
        if backend is not None and earlier is not None and backend != earlier:
            say(
                f"{path}.gcsFaultToleranceOptions.backend",
                backend,
                "gcsFaultToleranceOptions.backend is immutable",
            )
    strategy = spec.get("deletionStrategy")
    if isinstance(strategy, dict):
        legacy, ruled = {"onSuccess", "onFailure"} & set(strategy), "deletionRules" in strategy
        if legacy and ruled:
            say(
                "spec.deletionStrategy",
                strategy,
                "legacy policies (onSuccess/onFailure) and deletionRules cannot be used together within the same deletionStrategy",
            )
        if len(legacy) != 2 and not ruled:
            say(
                "spec.deletionStrategy",
                strategy,
                "deletionStrategy requires either BOTH onSuccess and onFailure, OR the deletionRules field (cannot be empty)",
            )
    return causes


def fill(kind: Resource, obj: Object) -> Object:
    """What the server fills in for the core kinds that are used here."""
    obj = copy.deepcopy(obj)
    spec = obj.get("spec")
    if kind.plural == "secrets":
        data = obj.setdefault("data", {}) or {}
        for key, value in (obj.pop("stringData", None) or {}).items():
            data[key] = base64.b64encode(str(value).encode()).decode()
        for value in data.values():
            try:
                base64.b64decode(value, validate=True)
            except (binascii.Error, TypeError):
                words = 'Secret in version "v1" cannot be handled as a Secret: illegal base64 data at input byte 0'
                raise Refused(400, "BadRequest", words) from None
        obj["data"] = data
        obj.setdefault("type", "Opaque")
    elif kind.plural == "services" and isinstance(spec, dict):
        spec.setdefault("type", "ClusterIP")
        spec.setdefault("clusterIP", f"10.96.{random.randrange(250)}.{random.randrange(1, 250)}")
        for port in spec.get("ports", []):
            port.setdefault("protocol", "TCP")
            port.setdefault("targetPort", port["port"])
    elif kind.plural == "pods" and isinstance(spec, dict):
        spec.setdefault("restartPolicy", "Always")
        spec.setdefault("terminationGracePeriodSeconds", 30)
        spec.setdefault("serviceAccountName", "default")
        if "phase" not in obj.get("status", {}):
            obj["status"] = {"phase": "Pending", "qosClass": "Burstable"}
    elif kind.plural == "namespaces":
        obj.setdefault("status", {"phase": "Active"})
    return obj
