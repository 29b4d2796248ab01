"""Checks of `doctor` for Kubernetes: API server, KubeRay, permissions."""

from __future__ import annotations

from collections.abc import Iterator

from heliostat.backends.base import Check, Question, by_name
from heliostat.backends.kubernetes import api as kube
from heliostat.common.documents import JsonMapping
from heliostat.common.errors import AccessDenied, HeliostatError

REVIEWS = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
QUESTIONS = by_name(
    Question(
        "API server",
        "it answers and accepts your credentials",
        "check the kubeconfig: kubectl config get-contexts",
    ),
    Question(
        "KubeRay",
        "the RayCluster API is installed",
        "ask the administrator of the cluster to install KubeRay's operator",
    ),
    Question(
        "your role",
        "it has all needed permissions in the namespace",
        "ask the administrator of the cluster for this Role (kubectl apply -f) and a RoleBinding to you:",
    ),
)


def checks(table: JsonMapping) -> Iterator[Check]:
    """Runs the checks. table: the `kubernetes:` table of the spec."""
    try:
        api = kube.connect(table.get("kubeconfig"), table.get("context"))
        version = api.call("GET", "/version")
    except HeliostatError as error:
        yield QUESTIONS["API server"].answer(False, str(error), hint=error.hint or None)
        return
    yield QUESTIONS["API server"].answer(True, f"{api.context}, Kubernetes {version.get('gitVersion')}")
    namespace = table.get("namespace") or api.namespace
    try:
        api.call("GET", f"{kube.RAY_API}/namespaces/{namespace}/rayclusters", query={"limit": 1})
        yield QUESTIONS["KubeRay"].answer(True, "the RayCluster API is installed")
    except AccessDenied as error:  # the next check prints the Role
        yield QUESTIONS["KubeRay"].answer(False, str(error), hint="get the missing permissions below")
    except HeliostatError as error:
        yield QUESTIONS["KubeRay"].answer(False, str(error), hint=error.hint or None)
    yield _check_permissions(api, namespace)


def _check_permissions(api: kube.Api, namespace: str) -> Check:
    question = QUESTIONS["your role"]
    lacking = []
    try:
        for group, resource, verbs in kube.PERMISSIONS:
            denied = [verb for verb in verbs if not _is_allowed(api, namespace, group, resource, verb)]
            lacking += [f"{', '.join(denied)} {resource}"] if denied else []
    except HeliostatError as error:
        return question.answer(False, f"could not be checked: {error}", severity="warn", hint="")
    if lacking:
        found = f"missing in `{namespace}`: {'; '.join(lacking)}"
        return question.answer(False, found, attachment=kube.role_manifest(namespace))
    return question.answer(True, f"it has all needed permissions in `{namespace}`")


def _is_allowed(api: kube.Api, namespace: str, group: str, resource: str, verb: str) -> bool:
    name, _, subresource = resource.partition("/")
    attributes = {"namespace": namespace, "verb": verb, "group": group, "resource": name}
    attributes |= {"subresource": subresource} if subresource else {}
    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectAccessReview",
        "spec": {"resourceAttributes": attributes},
    }
    return bool(api.call("POST", REVIEWS, review)["status"]["allowed"])
