"""What KubeRay's operator checks late, after the API server has taken an object: its rules in its words."""

from __future__ import annotations

import re
from typing import Any

import yaml

from .store import Object

DNS1035 = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
DNS1035_WORDS = (
    "[a DNS-1035 label must consist of lower case alphanumeric characters or '-', start with an alphabetic character, "
    "and end with an alphanumeric character (e.g. 'my-name',  or 'abc-123', regex used for validation is "
    "'[a-z]([-a-z0-9]*[a-z0-9])?')]"
)
V2 = "RAY_enable_autoscaler_v2"


class Invalid(Exception):
    pass


def name(kind: str, text: str, longest: int) -> None:
    before = "The RayJob metadata is invalid: " if kind == "RayJob" else ""
    if len(text) > longest:
        raise Invalid(f"{before}{kind} name should be no more than {longest} characters")
    if not DNS1035.fullmatch(text) or len(text) > 63:
        raise Invalid(f"{before}{kind} name should be a valid DNS1035 label: {DNS1035_WORDS}")


def version(text: str) -> tuple[int, ...]:
    match = re.match(r"v?(\d+)\.(\d+)(?:\.(\d+))?", text)
    if not match:
        raise Invalid(
            f"authOptions.mode is 'token' but RayVersion format is invalid: {text}, could not parse {text!r} as version"
        )
    return tuple(int(part or 0) for part in match.groups())


def env(container: Object) -> dict[str, str]:
    return {item["name"]: item.get("value", "") for item in container.get("env") or []}


def containers(group: Object) -> list[Object]:
    return (group.get("template") or {}).get("spec", {}).get("containers") or []


def _group(label: str, group: Object) -> None:
    params = group.get("rayStartParams") or {}
    if any(params.get(key) for key in ("num-cpus", "num-gpus", "memory", "resources")) and group.get(
        "resources"
    ):
        raise Invalid(
            f"resource fields should not be set in both rayStartParams and Resources for {label} group; please use only one"
        )
    if "labels" in params:
        raise Invalid(
            f"rayStartParams['labels'] is not supported for {label} group; please use the top-level Labels field instead"
        )


def _worker(group: Object, spec: Object) -> None:
    if not containers(group):
        raise Invalid("workerGroupSpec should have at least one container")
    called, low, high = group.get("groupName"), group.get("minReplicas"), group.get("maxReplicas")
    if not spec.get("enableInTreeAutoscaling") and (low is None or high is None):
        raise Invalid(
            f"worker group {called} must set both minReplicas and maxReplicas when autoscaling is disabled"
        )
    if low is not None and low < 0:
        raise Invalid(f"worker group {called} has negative minReplicas {low}")
    if high is not None and high < 0:
        raise Invalid(f"worker group {called} has negative maxReplicas {high}")
    if low is not None and high is not None and low > high:
        raise Invalid(f"worker group {called} has minReplicas {low} greater than maxReplicas {high}")
    _group(str(called), group)
    idle = group.get("idleTimeoutSeconds")
    if idle is not None:
        if idle < 0:
            raise Invalid(f"worker group {called}: idleTimeoutSeconds must be non-negative, got {idle}")
        if (spec.get("autoscalerOptions") or {}).get("version") != "v2":
            raise Invalid(
                f"worker group {called}: idleTimeoutSeconds is set, but autoscaler v2 is not enabled. Please set "
                f".spec.autoscalerOptions.version to 'v2' (or set {V2} environment variable to 'true' in the head pod if using KubeRay < 1.4.0)"
            )


def _autoscaling(spec: Object) -> None:
    options, head = spec.get("autoscalerOptions") or {}, env(containers(spec["headGroupSpec"])[0])
    groups = spec.get("workerGroupSpecs") or []
    if not spec.get("enableInTreeAutoscaling"):
        if head.get(V2) in ("1", "true"):
            raise Invalid(
                f"environment variable {V2} cannot be set to '{head[V2]}' when enableInTreeAutoscaling is false. Please set enableInTreeAutoscaling: true to use autoscaler v2"
            )
    else:
        for group in groups:
            if group.get("suspend"):
                raise Invalid(
                    f"worker group {group['groupName']} cannot be suspended with Autoscaler enabled"
                )
        if options.get("version") and V2 in head:
            raise Invalid(
                f"both .spec.autoscalerOptions.version and head Pod env var {V2} are set, please only use the former"
            )
        if options.get("version") == "v2":
            for label, group in [
                ("head Pod", spec["headGroupSpec"]),
                *((f"worker group {g['groupName']}", g) for g in groups),
            ]:
                if (group["template"].get("spec") or {}).get("restartPolicy", "Never") not in ("", "Never"):
                    raise Invalid(
                        f"restartPolicy for {label} should be Never or unset when using autoscaler V2"
                    )
    if (options.get("idleTimeoutSeconds") or 0) < 0:
        raise Invalid(
            f"autoscalerOptions.idleTimeoutSeconds must be non-negative, got {options['idleTimeoutSeconds']}"
        )


def _auth(spec: Object) -> None:
    options = spec.get("authOptions") or {}
    if options.get("mode") != "token":
        if options.get("enableK8sTokenAuth"):
            raise Invalid("authOptions.enableK8sTokenAuth is enabled but authOptions.mode not set to 'token'")
        return
    said = spec.get("rayVersion", "")
    if not said:
        raise Invalid(
            "authOptions.mode is 'token' but RayVersion was not specified. Ray version 2.52.0 or later is required"
        )
    if version(said) < (2, 52, 0):
        raise Invalid(f"authOptions.mode is 'token' but minimum Ray version is 2.52.0, got {said}")
    if options.get("enableK8sTokenAuth"):
        if version(said) < (2, 55, 0):
            raise Invalid(
                f"authOptions.enableK8sTokenAuth is enabled but minimum Ray version is 2.55.0, got {said}"
            )
        if options.get("secretName"):
            raise Invalid("authOptions.enableK8sTokenAuth is enabled and authOptions.secretName is also set")


def cluster_spec(spec: Object) -> None:
    head = spec["headGroupSpec"]
    if not containers(head):
        raise Invalid("headGroupSpec should have at least one container")
    _group("Head", head)
    for group in spec.get("workerGroupSpecs") or []:
        _worker(group, spec)  # that two groups have one name, nobody checks
    if "RAY_REDIS_ADDRESS" in env(containers(head)[0]) and not spec.get("gcsFaultToleranceOptions"):
        raise Invalid(
            "RAY_REDIS_ADDRESS is set which implicitly enables GCS fault tolerance, but GcsFaultToleranceOptions is not "
            "set. Please set GcsFaultToleranceOptions to enable GCS fault tolerance"
        )
    if (spec.get("gcsFaultToleranceOptions") or {}).get("backend") == "rocksdb":
        raise Invalid(
            "the embedded RocksDB GCS fault tolerance backend (GcsFaultToleranceOptions.Backend: 'rocksdb') requires the "
            "GCSFaultToleranceEmbeddedStorage feature gate to be enabled"
        )
    _autoscaling(spec)
    gates = {
        "historyServerOptions": "RayClusterHistoryServer feature gate is not enabled",
        "networkPolicy": "spec.networkPolicy requires the RayClusterNetworkPolicy feature gate to be enabled",
        "tlsOptions": "spec.tlsOptions requires the RayClusterMTLS feature gate to be enabled",
    }
    if spec.get("historyServerOptions") is not None:
        raise Invalid(gates["historyServerOptions"])
    _auth(spec)
    for key in ("networkPolicy", "tlsOptions"):
        if spec.get(key) is not None:
            raise Invalid(gates[key])


def job_spec(spec: Object) -> None:
    def refuse(words: str) -> None:
        raise Invalid(f"The RayJob spec is invalid: {words}")

    shut, ttl = spec.get("shutdownAfterJobFinishes", False), spec.get("ttlSecondsAfterFinished", 0)
    selected, cluster = spec.get("clusterSelector") or {}, spec.get("rayClusterSpec")
    mode, backoff = spec.get("submissionMode", "K8sJobMode"), spec.get("backoffLimit") or 0
    if spec.get("suspend") and not shut:
        refuse("a RayJob with shutdownAfterJobFinishes set to false is not allowed to be suspended")
    if ttl < 0:
        refuse("TTLSecondsAfterFinished must be a non-negative integer")
    if ttl > 0 and not shut:
        refuse("a RayJob with shutdownAfterJobFinishes set to false cannot have TTLSecondsAfterFinished")
    if (spec.get("deletionStrategy") or {}).get("deletionRules") and shut:
        refuse("spec.shutdownAfterJobFinishes and spec.deletionStrategy.deletionRules are mutually exclusive")
    if spec.get("suspend") and selected:
        refuse("the ClusterSelector mode doesn't support the suspend operation")
    if cluster is None and not selected:
        refuse("one of RayClusterSpec or ClusterSelector must be set")
    if selected:
        if not selected.get("ray.io/cluster"):
            raise Invalid("cluster name in ClusterSelector should not be empty")
        if mode == "SidecarMode":
            raise Invalid("ClusterSelector is not supported in SidecarMode")
        if backoff > 0:
            refuse("BackoffLimit is incompatible with ClusterSelector mode")
    if mode == "InteractiveMode" and backoff > 0:
        refuse("BackoffLimit is incompatible with InteractiveMode")
    if cluster is not None:
        if (cluster.get("authOptions") or {}).get("enableK8sTokenAuth"):
            refuse("K8s token auth mode is currently not supported for RayJob")
        try:
            cluster_spec(cluster)
        except Invalid as error:
            refuse(str(error))
    try:
        found: Any = yaml.safe_load(spec.get("runtimeEnvYAML") or "{}")
        if not isinstance(found, dict):
            raise ValueError("not a map")
    except (yaml.YAMLError, ValueError) as error:
        raise Invalid(f"failed to unmarshal RuntimeEnvYAML: {error}") from None
    for key in ("activeDeadlineSeconds", "preRunningDeadlineSeconds"):
        if spec.get(key) is not None and spec[key] <= 0:
            refuse(f"{key} must be a positive integer")
    if backoff < 0:
        refuse("backoffLimit must be a positive integer")
