"""What becomes of a request on its way through the API server: both sides' credentials, and no way past the service."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from heliostat.backends.kubernetes import api as kube
from heliostat.backends.kubernetes.proxy import is_upgrade, proxy_error, rewrite_request
from heliostat.common.errors import AccessDenied, HeliostatError
from heliostat.remote.ray_client import NoResponse

PATH = "/k8s/api/v1/namespaces/ml/services/http:lab-head-svc:8265/proxy"
HOST = "10.0.0.1:6443"
OURS = {"Authorization": "Bearer kube"}


def request(*lines: str, first: str = "GET /api/jobs/?x=1 HTTP/1.1") -> bytes:
    return "\r\n".join([first, *lines, "", ""]).encode("latin-1")


def sent(*lines: str, credentials: dict[str, str] | None = None, **more: str) -> tuple[str, list[str]]:
    """(the first line, the headers)."""
    whole = rewrite_request(request(*lines, **more), PATH, HOST, OURS if credentials is None else credentials)
    assert whole.endswith(b"\r\n\r\n") and whole.count(b"\r\n\r\n") == 1
    first, *headers = whole.decode("latin-1").removesuffix("\r\n\r\n").split("\r\n")
    return first, headers


def test_the_path() -> None:
    assert sent()[0] == f"GET {PATH}/api/jobs/?x=1 HTTP/1.1"
    assert sent(first="PUT / HTTP/1.0")[0] == f"PUT {PATH}/ HTTP/1.0"


def test_whose_credentials_are_whose() -> None:
    _, headers = sent("Host: 127.0.0.1:4711", "Authorization: Bearer ray", "Accept: */*")
    assert headers == [
        f"Host: {HOST}",
        "Authorization: Bearer kube",
        "Connection: close",
        "X-Ray-Authorization: Bearer ray",
        "Accept: */*",
    ]


@pytest.mark.parametrize("name", ["authorization", "AUTHORIZATION", "Authorization"])
def test_ray_never_gets_to_be_us(name: str) -> None:
    _, headers = sent(f"{name}: Bearer ray", credentials={})
    assert not [line for line in headers if line.lower().startswith("authorization:")]
    assert [line for line in headers if line.lower() == "x-ray-authorization: bearer ray"]


def test_a_header_of_rays_own_is_not_taken_from_outside() -> None:
    """It has one meaning only: what was `Authorization` here."""
    _, headers = sent("X-Ray-Authorization: Bearer other", "Authorization: Bearer ray")
    assert [line for line in headers if "ray-auth" in line.lower()] == ["X-Ray-Authorization: Bearer ray"]


@pytest.mark.parametrize("words", ["keep-alive", "Keep-Alive, x", "close", "upgrade"])
def test_a_request_is_alone_on_its_connection(words: str) -> None:
    _, headers = sent(f"Connection: {words}", "connection: keep-alive")
    assert [line for line in headers if line.lower().startswith("connection")] == ["Connection: close"]


@pytest.mark.parametrize("name", ["Host", "HOST", "host"])
def test_one_host(name: str) -> None:
    _, headers = sent(f"{name}: evil", f"{name}: again")
    assert [line for line in headers if line.lower().startswith("host:")] == [f"Host: {HOST}"]


def test_a_body_goes_along() -> None:
    _, headers = sent("Content-Length: 5", "Content-Type: application/json", first="POST /x HTTP/1.1")
    assert "Content-Length: 5" in headers and "Content-Type: application/json" in headers


# -- another protocol


def test_a_websocket() -> None:
    asked = ("Connection: keep-alive, Upgrade", "Upgrade: websocket", "Sec-WebSocket-Key: x")
    assert is_upgrade(request(*asked))
    _, headers = sent(*asked)
    assert "Upgrade: websocket" in headers and "Sec-WebSocket-Key: x" in headers
    assert [line for line in headers if line.startswith("Connection")] == ["Connection: Upgrade"]


@pytest.mark.parametrize(
    "lines",
    [
        ("Upgrade: websocket",),
        ("Connection: keep-alive", "Upgrade: x"),
        ("Connection: upgraded", "Upgrade: x"),
        ("Connection: Upgrade",),
        ("X-Upgrade: x", "X-Connection: upgrade"),
    ],
)
def test_what_only_looks_like_one_stays_alone_on_its_connection(lines: tuple[str, ...]) -> None:
    """The API server knows us by the connection's certificate: a second request on it would be ours."""
    assert not is_upgrade(request(*lines))
    _, headers = sent(*lines)
    assert "Connection: close" in headers and not [h for h in headers if h.lower().startswith("upgrade")]


# -- what is no request, or leads elsewhere


@pytest.mark.parametrize(
    "head",
    [
        b"\r\n\r\n",
        b"hello\r\n\r\n",
        b"GET /\r\n\r\n",
        b"GET / HTTP/2\r\n\r\n",
        b"GET / HTTP/1.1 more\r\n\r\n",
        b"GET  HTTP/1.1\r\n\r\n",
        b"GET x HTTP/1.1\r\n\r\n",
        b"GET s/http:other:80/proxy/ HTTP/1.1\r\n\r\n",
        b"GET http://other/ HTTP/1.1\r\n\r\n",
        b"CONNECT other:443 HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\nX: y\r\n\r\n",
        b"GET /\r HTTP/1.1\r\n\r\n",
        b"GET /\0 HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nX: a\nConnection: keep-alive\r\n\r\n",
        b"GET / HTTP/1.1\r\nX: a\n\nGET /api/v1/secrets HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nX: a\rY: b\r\n\r\n",
        b"GET / HTTP/1.1\r\n folded: into ours\r\n\r\n",
        b"GET / HTTP/1.1\r\n\tx\r\n\r\n",
        b"GET / HTTP/1.1\r\nno colon\r\n\r\n",
        b"GET / HTTP/1.1\r\nAuthorization : x\r\n\r\n",
        b"GET / HTTP/1.1\r\n: x\r\n\r\n",
        b"GET / HTTP/1.1\r\nX: a\0b\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\nGET /two HTTP/1.1\r\n\r\n",
    ],
)
def test_what_is_no_plain_request_is_refused(head: bytes) -> None:
    with pytest.raises(ValueError, match="not an HTTP/1 request"):
        rewrite_request(head, PATH, HOST, OURS)


@pytest.mark.parametrize(
    "target",
    [
        "/..",
        "/../x",
        "/a/../../../secrets",
        "/%2e%2e/x",
        "/%2E./x",
        "/a/..?x",
        "/..%2fx",
        "/..\\x",
        "/a/.%2e",
    ],
)
def test_a_path_that_leads_out_of_the_service(target: str) -> None:
    with pytest.raises(ValueError, match="leads out"):
        sent(first=f"GET {target} HTTP/1.1")


@pytest.mark.parametrize("target", ["/", "/a..b", "/...", "/x?next=../y", "/%2", "/a//b", "/api/jobs/%20"])
def test_a_path_that_does_not(target: str) -> None:
    assert sent(first=f"GET {target} HTTP/1.1")[0] == f"GET {PATH}{target} HTTP/1.1"


@given(st.lists(st.binary(max_size=40), max_size=4), st.binary(max_size=20))
def test_whatever_comes_it_is_refused_or_ours(lines: list[bytes], target: bytes) -> None:
    head = b"\r\n".join([b"GET /" + target + b" HTTP/1.1", *lines, b"", b""])
    try:
        whole = rewrite_request(head, PATH, HOST, OURS)
    except ValueError:
        return
    first, *headers = whole.removesuffix(b"\r\n\r\n").split(b"\r\n")
    assert first.startswith(f"GET {PATH}/".encode()) and first.count(b" ") == 2
    assert headers[:2] == [f"Host: {HOST}".encode(), b"Authorization: Bearer kube"]
    assert headers[2] in (b"Connection: close", b"Connection: Upgrade")
    names = [line.partition(b":")[0].lower() for line in headers[3:]]
    assert not {b"host", b"authorization", b"connection"} & set(names)
    assert b"\n" not in b"".join(headers) and b"\r" not in b"".join(headers)


# -- whose answer it is


def answered(tmp_path: Path, code: int, content: bytes) -> HeliostatError | None:
    config = {
        "clusters": [{"name": "c", "cluster": {"server": "http://127.0.0.1:9"}}],
        "contexts": [{"name": "lab", "context": {"cluster": "c", "user": "u"}}],
        "users": [{"name": "u", "user": {"token": "t"}}],
    }
    (tmp_path / "config").write_text(yaml.safe_dump({**config, "current-context": "lab"}))
    api = kube.Api(str(tmp_path / "config"), None)
    return proxy_error(api, "ml/lab", "GET", "/api/jobs/run", code, content)


def status(code: int, message: str) -> bytes:
    """As the API server answers, also where a service was asked."""
    document = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": message, "code": code}
    return json.dumps(document).encode()


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (404, 'services "lab-head-svc" not found'),
        (503, 'no endpoints available for service "http:lab-head-svc:8265"'),
        (503, "error trying to reach service: dial tcp 10.0.0.1:8265: connect: connection refused"),
        (500, "error trying to reach service: EOF"),
    ],
)
def test_a_service_that_is_gone_is_no_answer_of_rays(tmp_path: Path, code: int, message: str) -> None:
    error = answered(tmp_path, code, status(code, message))
    assert isinstance(error, NoResponse) and error.cause == message
    assert error.details == f"the API server's proxy answered {code} to GET /api/jobs/run"


def test_a_right_that_is_lacking(tmp_path: Path) -> None:
    message = (
        'services "http:lab-head-svc:8265" is forbidden: User "ann" cannot get resource "services/proxy" '
        'in API group "" in the namespace "ml"'
    )
    error = answered(tmp_path, 403, status(403, message))
    assert (
        isinstance(error, AccessDenied)
        and "services/proxy" in error.message
        and "kind: Role" in error.attachment
    )


@pytest.mark.parametrize(
    ("code", "content"),
    [
        (404, b"Job run does not exist"),
        (403, b"Forbidden: Invalid authentication token"),
        (401, b"Unauthorized: Missing authentication token"),
        (500, b'{"result": false, "msg": "Traceback"}'),
        (404, b'["kind", "Status"]'),
        (404, b""),
    ],
)
def test_what_ray_answers_is_rays(tmp_path: Path, code: int, content: bytes) -> None:
    assert answered(tmp_path, code, content) is None
