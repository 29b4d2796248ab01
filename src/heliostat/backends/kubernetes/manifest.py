"""Renders a spec as KubeRay's RayCluster, or as a RayJob for a `run`, and validates it. Pure.

The API server accepts manifests that KubeRay's operator rejects later; the validation finds these before the launch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from heliostat.backends.kubernetes.api import ID_LABEL
from heliostat.backends.kubernetes.states import DEFAULT_GROUP
from heliostat.backends.overrides import merge
from heliostat.common.documents import JsonMapping, JsonObject
from heliostat.common.errors import UsageError
from heliostat.common.shell import quote
from heliostat.config.members import Kind, head_member, list_worker_kinds
from heliostat.config.spec import DEFAULT_RAY

if TYPE_CHECKING:
    from heliostat.backends.kubernetes.options import Options
    from heliostat.config.members import Member
    from heliostat.config.spec import ClusterSpec

DEFAULT_CPUS, DEFAULT_MEMORY = 2, 4 * 2**30  # of a pod whose size is not in the spec
JOB_TTL_S = 60  # the operator deletes the cluster of a `run` this long after its job, if Heliostat has not
DETACHED_JOB_TTL_S = 600  # output of a detached `run` is available this long
PRE_RUNNING_DEADLINE_S = 6 * 3600  # the operator fails a `run` whose job did not start
PORTS = {"gcs-server": 6379, "dashboard": 8265, "client": 10001}
DNS = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
QUALIFIED = re.compile(r"([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")


def render_manifest(
    spec: ClusterSpec,
    options: Options,
    groups: Mapping[str, Options],
    cluster_id: str,
    *,
    run: bool,
    detached: bool = False,
) -> JsonObject:
    """The RayCluster or RayJob of the spec."""
    ours = (
        {ID_LABEL: cluster_id} if cluster_id.strip("0") else {}
    )  # no label in a dry run: its manifest is for `kubectl create`
    labels = {**options.labels, "app.kubernetes.io/managed-by": "heliostat", **ours}
    metadata: JsonObject = {"name": spec.cluster_name}
    if options.namespace:
        metadata["namespace"] = options.namespace
    metadata["labels"] = labels
    if options.annotations:
        metadata["annotations"] = dict(options.annotations)
    kind, cluster = "RayCluster", _cluster(spec, options, groups)
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        if ours and "template" in group:  # finds pods whose cluster was deleted
            about = group["template"].setdefault("metadata", {})
            about["labels"] = {**(about.get("labels") or {}), **ours}
    if run:
        deadline = {"activeDeadlineSeconds": spec.time} if spec.time else {}
        kind, cluster = "RayJob", {
            # Heliostat submits the job with the working directory; the operator deletes the cluster after it in any case
            "submissionMode": "InteractiveMode",
            "shutdownAfterJobFinishes": True,
            "ttlSecondsAfterFinished": DETACHED_JOB_TTL_S if detached else JOB_TTL_S,
            "preRunningDeadlineSeconds": PRE_RUNNING_DEADLINE_S,
            **deadline,
            "rayClusterSpec": cluster,
        }  # fmt: skip
    document = {"apiVersion": "ray.io/v1", "kind": kind, "metadata": metadata, "spec": cluster}
    whole: JsonObject = json.loads(
        json.dumps(document)
    )  # copies shared values, which YAML would write as references
    return whole


def _cluster(spec: ClusterSpec, options: Options, groups: Mapping[str, Options]) -> JsonObject:
    ray, kinds = ray_version(spec, options), list_worker_kinds(spec)
    found: JsonObject = {
        "rayVersion": ray,
        "authOptions": {"mode": "token" if spec.security.auth == "token" else "disabled"},
    }
    if spec.has_autoscaling:
        idle = spec.autoscale.idle if spec.autoscale else 60
        found["enableInTreeAutoscaling"] = True
        found["autoscalerOptions"] = merge({"version": "v2", "idleTimeoutSeconds": idle}, options.autoscaler)
    if options.gcs:
        found["gcsFaultToleranceOptions"] = (
            {"redisAddress": options.gcs} if isinstance(options.gcs, str) else dict(options.gcs)
        )
    head = head_member(spec)
    start = {} if spec.head.work else {"num-cpus": "0", "num-gpus": "0"}
    found["headGroupSpec"] = _group(spec, options, head, start)
    found["workerGroupSpecs"] = [_workers(spec, groups.get(kind.name or "", options), kind) for kind in kinds]
    whole: JsonObject = merge(found, options.cluster)
    return whole


def _workers(spec: ClusterSpec, options: Options, kind: Kind) -> JsonObject:
    return {
        "groupName": kind.name or DEFAULT_GROUP,
        "replicas": kind.first,
        "minReplicas": kind.least,
        "maxReplicas": kind.most,
        **_group(spec, options, kind.member, {}),
    }


def _group(spec: ClusterSpec, options: Options, member: Member, start: dict[str, str]) -> JsonObject:
    if spec.object_store:
        start = {**start, "object-store-memory": str(spec.object_store)}
    found: JsonObject = {"rayStartParams": {**start, **options.ray_start}}
    if member.labels:
        found["labels"] = dict(member.labels)
    if member.resources:
        found["resources"] = {name: str(int(amount)) for name, amount in member.resources.items()}
    template: JsonObject = {"spec": merge(_pod(spec, options, member), _name_containers(options.pod, member))}
    about = {"labels": dict(options.labels), "annotations": dict(options.annotations)}
    about = {key: value for key, value in about.items() if value}
    found["template"] = {"metadata": about, **template} if about else template
    return found


def _pod(spec: ClusterSpec, options: Options, member: Member) -> JsonObject:
    memory = member.memory or DEFAULT_MEMORY
    idle = member.role == "head" and not spec.head.work  # Ray uses no CPUs of it, but the pod needs some
    cpus = spec.head.cpus or spec.cpus_per_node if idle else member.cpus
    size = {"cpu": str(cpus or DEFAULT_CPUS), "memory": format_quantity(memory)}
    if member.gpus:
        size[options.gpu] = str(member.gpus)
    shm = int((spec.object_store or 0.3 * memory) * 1.1) // 2**20 * 2**20  # Ray's default is 30 %
    volumes = [{"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": format_quantity(shm)}}]
    mounts = [{"name": "shm", "mountPath": "/dev/shm"}]
    for index, volume in enumerate(options.volumes):
        one, mount = _volume(volume, f"volume-{index}")
        volumes.append(one)
        mounts.append(mount)
    container: JsonObject = {
        "name": f"ray-{member.role}",
        "image": options.image or choose_image(spec, options, member),
        "resources": {"requests": size, "limits": dict(size)},
        "env": [{"name": key, "value": value} for key, value in spec.environment.env.items()],
        "volumeMounts": mounts,
    }
    if member.role == "head":
        container["ports"] = [{"name": name, "containerPort": port} for name, port in PORTS.items()]
    lines = setup_commands(spec)
    if lines:  # KubeRay runs them in the shell of `ray start`
        container["args"] = [" && ".join(lines)]
    if not container["env"]:
        del container["env"]
    pod: JsonObject = {"containers": [container], "volumes": volumes}
    more = {
        "serviceAccountName": options.service_account,
        "nodeSelector": dict(options.node_selector),
        "tolerations": [dict(one) for one in options.tolerations],
        "imagePullSecrets": [{"name": name} for name in options.pull_secrets],
    }
    return {**pod, **{key: value for key, value in more.items() if value}}


def setup_commands(spec: ClusterSpec) -> list[str]:
    """Shell commands that set up a pod: `environment.setup` and the requirements."""
    lines = list(spec.environment.setup)
    if spec.environment.requirements:
        try:
            with open(spec.environment.requirements) as stream:
                written = [line.partition(" #")[0].strip() for line in stream]
        except OSError as error:
            raise UsageError(
                f"could not read `{spec.environment.requirements}`", cause=error.strerror or str(error)
            ) from None
        wanted = [line for line in written if line and not line.startswith("#")]
        odd = next((line for line in wanted if line.startswith("-")), None)
        if odd:
            raise UsageError(
                f"`{spec.environment.requirements}` cannot be used on `kubernetes`",
                cause=f"`{odd}` refers to files that the pods do not have",
                hint="build an image with them: kubernetes: {image: …}",
            )
        lines += [quote(["pip", "install", "--quiet", *wanted])] if wanted else []
    return lines


def _volume(volume: str | JsonMapping, name: str) -> tuple[JsonObject, JsonObject]:
    """(volume, mount) of `claim:/data[:ro]`, or of a Kubernetes volume with an added `mountPath`."""
    if isinstance(volume, str):
        match = re.fullmatch(r"([a-z0-9][-a-z0-9.]*):(/[^:]*)(:ro)?", volume)
        if not match:
            raise UsageError(
                f"`{volume}` is not a volume",
                hint="kubernetes: {volumes: ['my-claim:/data', 'other:/in:ro']}",
            )
        only = {"readOnly": True} if match[3] else {}
        return (
            {"name": name, "persistentVolumeClaim": {"claimName": match[1], **only}},
            {"name": name, "mountPath": match[2], **only},
        )
    source = {key: value for key, value in volume.items() if key not in ("mountPath", "subPath", "readOnly")}
    if "mountPath" not in volume:
        raise UsageError("a volume has no `mountPath`", cause=str(dict(volume))[:200])
    name = str(source.get("name") or name)
    where = {key: volume[key] for key in ("mountPath", "subPath", "readOnly") if key in volume}
    return {**source, "name": name}, {"name": name, **where}


def ray_version(spec: ClusterSpec, options: Options) -> str:
    """The Ray version of the spec, else of the image's tag, else the default."""
    named = options.image or (spec.environment.container or "")
    tag = re.search(r":(\d+\.\d+\.\d+)", named)
    return spec.environment.ray or (tag[1] if tag else DEFAULT_RAY)


def choose_image(spec: ClusterSpec, options: Options, member: Member) -> str:
    container = spec.environment.container or ""
    if container.startswith("docker://"):
        return container.removeprefix("docker://")
    return f"rayproject/ray:{ray_version(spec, options)}" + ("-gpu" if member.gpus else "")


def format_quantity(size: int) -> str:
    """Bytes in Kubernetes' notation."""
    for unit, power in (("Gi", 30), ("Mi", 20), ("Ki", 10)):
        if size % 2**power == 0:
            return f"{size >> power}{unit}"
    return str(size)


def _name_containers(pod: JsonMapping, member: Member) -> JsonMapping:
    """The pod fields of the spec, with Ray's container name where a container has no name."""
    if not isinstance(pod.get("containers"), list) or not pod["containers"]:
        return pod
    ours = f"ray-{member.role}"
    return {**pod, "containers": [{"name": ours, **container} for container in pod["containers"]]}


def list_notes(spec: ClusterSpec, run: bool) -> Iterator[str]:
    """Notes on keys without effect: KubeRay has no time limit for a RayCluster."""
    if spec.idle.timeout and not run:
        yield "`idle` does not stop a cluster on `kubernetes`; `autoscale` removes idle workers"
    if spec.time and not run:
        yield "`time` does not stop a cluster on `kubernetes`, except that of a `run`; use heliostat down"


# -- validation


def check_manifest(document: JsonMapping) -> None:
    """Raises UsageError for a manifest that KubeRay's operator would reject by an event only."""
    for message, cause in find_problems(document):
        raise UsageError(message, cause=cause, hint="change the file or the option; see heliostat schema")


def find_problems(document: JsonMapping) -> Iterator[tuple[str, str]]:
    kind, name, spec = document["kind"], str(document["metadata"]["name"]), document["spec"]
    most = 47 if kind == "RayJob" else 53
    if len(name) > most:
        yield f"`{name}` is too long for the name of a {kind}", f"KubeRay allows {most} characters"
    if not DNS.fullmatch(name):
        cause = "it is part of host names: lower-case letters, digits and `-`, starting with a letter"
        yield f"`{name}` is not a valid name on `kubernetes`", cause
    if kind == "RayJob":
        ttl = spec.get("ttlSecondsAfterFinished", 0)
        if ttl < 0 or (ttl > 0 and not spec.get("shutdownAfterJobFinishes")):
            yield "`ttlSecondsAfterFinished` cannot be used", "it requires `shutdownAfterJobFinishes`"
        spec = spec["rayClusterSpec"]
    yield from _find_auth_problems(spec)
    groups = spec.get("workerGroupSpecs") or []
    yield from _find_worker_problems(groups, bool(spec.get("enableInTreeAutoscaling")))
    for where, group in [("head", spec["headGroupSpec"]), *((g["groupName"], g) for g in groups)]:
        yield from _find_group_problems(where, group, bool(spec.get("enableInTreeAutoscaling")))
    password = (spec.get("gcsFaultToleranceOptions") or {}).get("redisPassword") or {}
    if "value" in password:
        yield "`gcs.redisPassword.value` would be readable by other users", "name a Secret in `valueFrom`"


def _find_auth_problems(spec: JsonMapping) -> Iterator[tuple[str, str]]:
    if (spec.get("authOptions") or {}).get("mode") != "token":
        return
    found = re.match(r"(\d+)\.(\d+)", str(spec.get("rayVersion") or ""))
    if not found or (int(found[1]), int(found[2])) < (2, 52):
        cause = "Ray supports tokens since 2.52; for older versions: security: {auth: none}"
        yield f"Ray {spec.get('rayVersion')} has no authentication", cause


def _find_worker_problems(groups: Sequence[JsonMapping], has_autoscaling: bool) -> Iterator[tuple[str, str]]:
    names = [str(group["groupName"]) for group in groups]
    for name in names:
        if not DNS.fullmatch(name) or name == "headgroup":
            cause = "it is part of the pods' names: lower-case letters, digits and `-`"
            yield f"`{name}` is not a valid group name on `kubernetes`", cause
        if names.count(name) > 1:
            yield f"two groups have the name `{name}`", "group names must be unique"
    for group in groups:
        least, most = group.get("minReplicas"), group.get("maxReplicas")
        if least is None or most is None:
            if not has_autoscaling:
                yield (
                    f"the group `{group['groupName']}` is incomplete",
                    "minReplicas and maxReplicas are both required",
                )
        elif not 0 <= least <= most:
            yield (
                f"the group `{group['groupName']}` has an invalid size",
                f"minimum {least}, maximum {most} nodes",
            )


def _find_group_problems(where: str, group: JsonMapping, has_autoscaling: bool) -> Iterator[tuple[str, str]]:
    pod, start = group["template"]["spec"], group.get("rayStartParams") or {}
    if not pod.get("containers"):
        yield f"the pods of `{where}` have no container", "the first of `containers` is Ray's"
        return
    sized = {"num-cpus", "num-gpus", "memory", "resources"} & start.keys()
    if sized and group.get("resources"):
        yield (
            f"the resources of `{where}` are given twice",
            f"in `resources` and as {', '.join(sorted(sized))}",
        )
    for name in group.get("resources") or ():
        if re.fullmatch(r"cpu|memory|.*gpu|.*nvidia\.com/mig-\d+g\.\d+gb", name.lower()):
            yield (
                f"`{name}` cannot be a resource of `{where}` on `kubernetes`",
                "KubeRay interprets the name as CPUs, memory or GPUs of the pod",
            )
        if "'" in name:
            yield f"`{name}` cannot be a resource of `{where}`", "KubeRay puts the name in single quotes"
    if "labels" in start:
        yield f"labels of `{where}` are in `ray_start`", "write them as `labels`"
    for key, value in (group.get("labels") or {}).items():
        if not QUALIFIED.fullmatch(key) or (
            value and not re.fullmatch(r"[A-Za-z0-9]([-\w.]{0,61}[A-Za-z0-9])?", value)
        ):
            yield f"`{key}={value}` is not a Kubernetes label", f"labels of the nodes of `{where}`"
    for key, value in start.items():
        if not isinstance(value, str):
            yield f"`ray_start.{key}` is not a string", "write it in quotes"
    if has_autoscaling and pod.get("restartPolicy", "Never") != "Never":
        yield (
            f"`restartPolicy` of `{where}` cannot be {pod['restartPolicy']}",
            "with `autoscale` it must be Never: KubeRay replaces pods",
        )
    ray = pod["containers"][0]
    for name in {str(env.get("name")) for env in ray.get("env") or ()} & {
        "RAY_REDIS_ADDRESS",
        "REDIS_PASSWORD",
        "RAY_AUTH_TOKEN",
    }:
        yield f"`{name}` cannot be set in the file", "KubeRay sets it from `gcs` and `security`"
