"""What `doctor` asks of a Kubernetes cluster: the API server, KubeRay, and each right that is needed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from heliostat.backends.base import Check, Question, by_name
from heliostat.backends.kubernetes import api as kube
from heliostat.common.errors import AccessDenied, HeliostatError

REVIEWS = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
QUESTIONS = by_name(
    Question(
        "API server", "it answers, and knows you", "look at the kubeconfig: kubectl config get-contexts"
    ),
    Question(
        "KubeRay", "the cluster knows RayClusters", "whoever runs the cluster installs KubeRay's operator"
    ),
    Question(
        "your role",
        "it may do all that is needed in the namespace",
        "whoever runs the cluster gives you this Role (kubectl apply -f, and a RoleBinding to you):",
    ),
)


def checks(table: Mapping[str, Any]) -> Iterator[Check]:
    """table: the `kubernetes:` table of the file."""
    try:
        api = kube.connect(table.get("kubeconfig"), table.get("context"))
        version = api.call("GET", "/version")
    except HeliostatError as error:
        yield QUESTIONS["API server"].answer(False, str(error), hint=error.hint or None)
        return
    yield QUESTIONS["API server"].answer(True, f"{api.context}, Kubernetes {version.get('gitVersion')}")
    namespace = table.get("namespace") or api.namespace
    try:
        api.call("GET", f"{kube.RAY}/namespaces/{namespace}/rayclusters", query={"limit": 1})
        yield QUESTIONS["KubeRay"].answer(True, "its RayCluster is known")
    except AccessDenied as error:  # its Role is printed below, once
        yield QUESTIONS["KubeRay"].answer(False, str(error), hint="get the rights that are lacking, below")
    except HeliostatError as error:
        yield QUESTIONS["KubeRay"].answer(False, str(error), hint=error.hint or None)
    yield _rights(api, namespace)


def _rights(api: kube.Api, namespace: str) -> Check:
    question = QUESTIONS["your role"]
    lacking = []
    try:
        for group, resource, verbs in kube.RIGHTS:
            denied = [verb for verb in verbs if not _may(api, namespace, group, resource, verb)]
            lacking += [f"{', '.join(denied)} {resource}"] if denied else []
    except HeliostatError as error:
        return question.answer(False, f"could not be asked for: {error}", severity="warn", hint="")
    if lacking:
        words = f"in `{namespace}` it may not {'; '.join(lacking)}"
        return question.answer(False, words, attachment=kube.role(namespace))
    return question.answer(True, f"it may do all that is needed in `{namespace}`")


def _may(api: kube.Api, namespace: str, group: str, resource: str, verb: str) -> bool:
    whole, _, part = resource.partition("/")
    attributes = {"namespace": namespace, "verb": verb, "group": group, "resource": whole}
    attributes |= {"subresource": part} if part else {}
    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectAccessReview",
        "spec": {"resourceAttributes": attributes},
    }
    return bool(api.call("POST", REVIEWS, review)["status"]["allowed"])
