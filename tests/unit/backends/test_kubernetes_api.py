"""The door to an API server: who we are, and every no in words. No server is there: what one says is given."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from heliostat.backends.kubernetes import api as kube
from heliostat.common.errors import HeliostatError, Refused, UsageError

CONFIG: dict[str, Any] = {
    "apiVersion": "v1",
    "kind": "Config",
    "current-context": "lab",
    "clusters": [{"name": "c", "cluster": {"server": "http://127.0.0.1:9/k8s/clusters/c-1/"}}],
    "users": [{"name": "ann", "user": {"token": "secret"}}],
    "contexts": [
        {"name": "lab", "context": {"cluster": "c", "user": "ann", "namespace": "ml"}},
        {"name": "bare", "context": {"cluster": "c", "user": "ann"}},
    ],
}
CLUSTERS = "/apis/ray.io/v1/namespaces/ml/rayclusters"


@pytest.fixture(autouse=True)
def nowhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("KUBECONFIG", "KUBERNETES_SERVICE_HOST", "HTTPS_PROXY", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


def config(folder: Path, text: str | None = None, name: str = "kubeconfig", **more: Any) -> str:
    path = folder / name
    path.write_text(yaml.safe_dump({**CONFIG, **more}) if text is None else text)
    return str(path)


@pytest.fixture
def api(tmp_path: Path) -> kube.Api:
    return kube.Api(config(tmp_path), None)


def status(code: int, reason: str, message: str, **details: Any) -> bytes:
    """As every Kubernetes answers."""
    document = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "message": message}
    document |= {"reason": reason, "code": code, **({"details": details} if details else {})}
    return json.dumps(document).encode()


# -- the role


def test_the_role_names_every_right() -> None:
    document = yaml.safe_load(kube.role_manifest("ml"))
    assert (document["kind"], document["metadata"]) == ("Role", {"name": "heliostat", "namespace": "ml"})
    given = {
        (group, resource): tuple(rule["verbs"])
        for rule in document["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
    }
    assert given == {(group, resource): verbs for group, resource, verbs in kube.PERMISSIONS}
    assert ("", "secrets") in given and "list" not in given["", "secrets"], "no more than is needed"


def test_the_documents_role_is_this_one() -> None:
    text = (Path(__file__).parents[3] / "docs" / "kubernetes.md").read_text()
    assert kube.role_manifest("ml") in text


# -- who we are


def test_a_kubeconfig(api: kube.Api, tmp_path: Path) -> None:
    assert (api.context, api.namespace) == ("lab", "ml")
    assert api.server == "http://127.0.0.1:9/k8s/clusters/c-1"
    assert (api.address, api.prefix) == (("127.0.0.1", 9), "/k8s/clusters/c-1")
    assert api.authorization() == {"Authorization": "Bearer secret"}
    assert kube.Api(config(tmp_path), "bare").namespace == "default"


def test_several_files(tmp_path: Path) -> None:
    first = config(tmp_path, name="a", contexts=[], **{"current-context": "bare"})
    second = config(tmp_path, name="b")
    assert kube.Api(os.pathsep.join([first, "", second]), None).context == "bare"


def test_a_relative_file_is_the_same_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert kube.Api("kubeconfig", None).kubeconfig == str(tmp_path / "kubeconfig")


def test_the_environment_is_asked_each_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = config(tmp_path), config(tmp_path, name="b", **{"current-context": "bare"})
    monkeypatch.setenv("KUBECONFIG", first)
    assert kube.connect().context == "lab"
    monkeypatch.setenv("KUBECONFIG", second)
    assert kube.connect().context == "bare"


def test_no_kubeconfig() -> None:
    with pytest.raises(UsageError, match="the kubeconfig cannot be used") as caught:
        kube.connect()
    assert caught.value.details.endswith("/.kube/config") and "KUBECONFIG" in caught.value.hint


def test_no_such_context(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="unknown Kubernetes context `nope`") as caught:
        kube.Api(config(tmp_path), "nope")
    assert "lab, bare" in caught.value.cause and caught.value.hint == "kubernetes: {context: lab}"


BROKEN = {
    "empty": "",
    "not yaml": "[",
    "a list": "- 1",
    "a word": "hello",
    "nothing of it": "a: b",
    "no current one": yaml.safe_dump({**CONFIG, "current-context": ""}),
    "a current one that is not there": yaml.safe_dump({**CONFIG, "current-context": "gone"}),
    "no contexts": yaml.safe_dump({**CONFIG, "contexts": []}),
    "no such cluster": yaml.safe_dump({**CONFIG, "clusters": []}),
    "no such user": yaml.safe_dump({**CONFIG, "users": []}),
    "contexts of another kind": yaml.safe_dump({**CONFIG, "contexts": "lab"}),
    "a context without its inside": yaml.safe_dump({**CONFIG, "contexts": [{"name": "lab"}]}),
    "a key that is none": yaml.safe_dump(
        {
            **CONFIG,
            "clusters": [
                {"name": "c", "cluster": {"server": "https://x", "certificate-authority-data": "%"}}
            ],
        }
    ),
    "a certificate that is none": yaml.safe_dump(
        {
            **CONFIG,
            "clusters": [
                {"name": "c", "cluster": {"server": "https://x", "certificate-authority-data": "aGVsbG8="}}
            ],
        }
    ),
    "a certificate that is not there": yaml.safe_dump(
        {
            **CONFIG,
            "clusters": [
                {"name": "c", "cluster": {"server": "https://x", "certificate-authority": "/nowhere"}}
            ],
        }
    ),
}


@pytest.mark.parametrize("text", BROKEN.values(), ids=BROKEN)
def test_a_kubeconfig_that_is_broken(tmp_path: Path, text: str) -> None:
    path = config(tmp_path, text)
    try:
        made = kube.Api(path, None)
    except UsageError as error:
        assert error.message and error.cause and path in (error.details + error.cause)
        return
    # the official client lets a user be missing: then nobody is named
    assert made.authorization() == {}


def test_nothing_of_a_key_stays_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "tmp"
    place.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(place))
    kube.Api(config(tmp_path), None)
    with pytest.raises(UsageError):
        kube.Api(config(tmp_path, BROKEN["a certificate that is none"]), None)
    assert not [p for p in place.rglob("*") if p.is_file()]


# -- a no


def test_401_nobody_knows_us(api: kube.Api) -> None:
    error = api.error_from_response("GET", CLUSTERS, 401, status(401, "Unauthorized", "Unauthorized"))
    assert isinstance(error, Refused) and "rejected your credentials" in error.message
    assert (error.cause, error.details) == ("Unauthorized", api.server)
    assert error.code == "kubernetes.unauthorized"


def test_403_of_a_role(api: kube.Api) -> None:
    words = (
        'rayclusters.ray.io is forbidden: User "ann" cannot create resource "rayclusters" in API group "ray.io" '
        'in the namespace "team"'
    )
    error = api.error_from_response(
        "POST", CLUSTERS, 403, status(403, "Forbidden", words, group="ray.io", kind="rayclusters")
    )
    assert isinstance(error, Refused) and error.code == "kubernetes.rbac_forbidden"
    assert error.message == "your role may not create `rayclusters` in the namespace `team`"
    assert error.cause == words and yaml.safe_load(error.attachment)["metadata"]["namespace"] == "team"


def test_403_of_a_part_of_a_resource(api: kube.Api) -> None:
    words = 'services "http:lab-head-svc:8265" is forbidden: User "ann" cannot get resource "services/proxy" in API group ""'
    error = api.error_from_response("GET", "/api/v1/x", 403, status(403, "Forbidden", words))
    assert error.message == "your role may not get `services/proxy`"
    assert yaml.safe_load(error.attachment)["metadata"]["namespace"] == "ml", (
        "where it does not say, it is ours"
    )


def test_403_of_a_quota(api: kube.Api) -> None:
    words = (
        'pods "lab-head" is forbidden: exceeded quota: compute, requested: cpu=4, used: cpu=8, limited: cpu=8'
    )
    error = api.error_from_response("POST", CLUSTERS, 403, status(403, "Forbidden", words))
    assert (error.message, error.cause, error.attachment) == ("Kubernetes rejected the request", words, "")
    assert error.code == "kubernetes.quota"
    webhook = status(403, "Forbidden", 'admission webhook "x" denied the request')
    assert api.error_from_response("POST", CLUSTERS, 403, webhook).code == "kubernetes.admission"


def test_404_of_the_group_and_of_an_object(api: kube.Api) -> None:
    unknown = api.error_from_response("GET", CLUSTERS, 404, b"404 page not found\n")
    assert "KubeRay is not installed" in unknown.message and "kubectl create -k" in unknown.hint
    assert not isinstance(unknown, kube.ObjectNotFound) and unknown.code == "kubernetes.no_kuberay"
    words = 'rayclusters.ray.io "lab" not found'
    gone = api.error_from_response("GET", f"{CLUSTERS}/lab", 404, status(404, "NotFound", words, name="lab"))
    assert isinstance(gone, kube.ObjectNotFound) and gone.cause == words
    pod = api.error_from_response("GET", "/api/v1/namespaces/ml/pods/x", 404, b"")
    assert isinstance(pod, kube.ObjectNotFound)


def test_409(api: kube.Api) -> None:
    words = 'rayclusters.ray.io "lab" already exists'
    error = api.error_from_response("POST", CLUSTERS, 409, status(409, "AlreadyExists", words, name="lab"))
    assert isinstance(error, kube.Conflict) and error.cause == words and error.code == "kubernetes.conflict"


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (400, 'strict decoding error: unknown field "spec.numWorkers"'),
        (422, 'RayCluster.ray.io "lab" is invalid: spec.headGroupSpec: Required value'),
        (415, "the body of the request was in an unknown format"),
    ],
)
def test_what_was_sent_is_refused_in_the_servers_words(api: kube.Api, code: int, words: str) -> None:
    error = api.error_from_response("POST", CLUSTERS, code, status(code, "Invalid", words))
    assert type(error) is (kube.InvalidObject if code == 422 else Refused)
    assert error.code == f"kubernetes.{'invalid_object' if code == 422 else 'rejected'}"
    assert error.cause == words and error.details == f"POST {CLUSTERS} answered {code}"


@pytest.mark.parametrize("code", [429, 500, 502, 503, 504])
def test_not_now_is_not_a_no(api: kube.Api, code: int) -> None:
    error = api.error_from_response("GET", CLUSTERS, code, b"<html>busy</html>")
    assert isinstance(error, kube.Unreachable) and not isinstance(error, Refused)
    assert error.cause == "<html>busy</html>"


@pytest.mark.parametrize(
    "data", [b"", b"\xff\xfe", b"[1]", b"null", b'"x"', b"{", b'{"object": 3}', b"x" * 9999]
)
@pytest.mark.parametrize("code", [400, 401, 403, 404, 409, 410, 418, 422, 503])
def test_whatever_is_said_there_are_words(api: kube.Api, code: int, data: bytes) -> None:
    error = api.error_from_response("GET", CLUSTERS, code, data)
    assert isinstance(error, HeliostatError) and error.message and len(error.cause) <= 600


def test_an_error_inside_a_watch(api: kube.Api) -> None:
    line = json.dumps({"type": "ERROR", "object": json.loads(status(410, "Expired", "too old"))}).encode()
    error = api.error_from_response("GET", CLUSTERS, 410, line)
    assert isinstance(error, Refused) and error.cause == "too old"


def test_silence_in_words(api: kube.Api) -> None:
    import urllib3

    pool = urllib3.HTTPConnectionPool("10.0.0.9", 6443)
    refused = urllib3.exceptions.NewConnectionError(
        urllib3.connection.HTTPConnection("10.0.0.9", 6443), "Failed to establish a new connection: refused"
    )
    for error in (refused, urllib3.exceptions.MaxRetryError(pool, "/x", refused)):
        told = api.unreachable_error(error)
        assert "does not answer" in told.message and told.cause.endswith("refused")
        assert "object at 0x" not in told.cause and told.details == api.server
