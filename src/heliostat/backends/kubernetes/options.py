"""Options of the Kubernetes backend."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


def _help(text: str, **default: Any) -> Any:
    return field(metadata={"help": text}, **(default or {"default": None}))


@dataclass(frozen=True)
class Options:
    """The `kubernetes:` table of the spec."""

    context: str | None = _help("context of the kubeconfig [current context]")
    namespace: str | None = _help("namespace [that of the context]")
    kubeconfig: str | None = _help("kubeconfig file [$KUBECONFIG, ~/.kube/config]")
    image: str | None = _help("image of the pods [rayproject/ray of the Ray version; -gpu with GPUs]")
    gpu: str = _help("resource name of a GPU", default="nvidia.com/gpu")
    service_account: str | None = _help("service account of the pods")
    node_selector: Mapping[str, str] = _help("required labels of the Kubernetes nodes", default_factory=dict)
    tolerations: tuple[Mapping[str, Any], ...] = _help(
        "tolerations of the pods, in Kubernetes' format", default=()
    )
    volumes: tuple[str | Mapping[str, Any], ...] = _help(
        "`claim:/path[:ro]`, or a Kubernetes volume with an added `mountPath`", default=()
    )
    pull_secrets: tuple[str, ...] = _help("secrets for pulling the image", default=())
    labels: Mapping[str, str] = _help("labels of the cluster and its pods", default_factory=dict)
    annotations: Mapping[str, str] = _help("annotations of the cluster and its pods", default_factory=dict)
    ray_start: Mapping[str, str] = _help("additional parameters of `ray start`", default_factory=dict)
    gcs: str | Mapping[str, Any] | None = _help(
        "GCS fault tolerance: address of a Redis, or KubeRay's gcsFaultToleranceOptions"
    )
    autoscaler: Mapping[str, Any] = _help(
        "additional fields of KubeRay's autoscalerOptions", default_factory=dict
    )
    pod: Mapping[str, Any] = _help(
        "other fields of the pods; a container without a name is Ray's", default_factory=dict
    )
    cluster: Mapping[str, Any] = _help("other fields of the RayCluster's spec", default_factory=dict)
