"""Client of a Kubernetes API server.

The official client library reads the kubeconfig and gets credentials, also from plugins. Requests are plain REST, so that the
server rejects unknown fields and each error keeps the server's message.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import re
import shutil
import ssl
import tempfile
import threading
import time
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode, urlsplit

from heliostat.common.documents import JsonMapping, JsonObject
from heliostat.common.errors import AccessDenied, Code, HeliostatError, Refused, UsageError
from heliostat.state.ownership import temp_directory

if TYPE_CHECKING:
    import urllib3

REQUEST_TIMEOUT_S = 30.0
CONNECT_TIMEOUT_S = 5.0
RETRY_DELAY_S = 3.0  # no new connection to a server that did not accept one
WATCH_TIMEOUT_S = 55  # the server ends a watch after this time
ID_LABEL = "heliostat/id"  # label of each object of a cluster; its value is the cluster id
RAY_API = "/apis/ray.io/v1"
INSTALL = 'kubectl create -k "github.com/ray-project/kuberay/ray-operator/config/default?ref=v1.7.0"'

# permissions that the user's role needs; `doctor` checks each, and an error prints the whole Role
PERMISSIONS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("ray.io", "rayclusters", ("get", "list", "watch", "create", "patch", "delete")),
    ("ray.io", "rayjobs", ("get", "list", "watch", "create", "patch", "delete")),
    ("", "pods", ("get", "list", "watch", "delete")),
    ("", "pods/log", ("get",)),
    ("", "pods/exec", ("get", "create")),
    ("", "services/proxy", ("get", "create", "update", "delete")),
    ("", "secrets", ("get",)),
    ("", "events", ("list",)),
)


_load_lock = threading.Lock()  # the library keeps its temporary files in one global table


class Unreachable(HeliostatError):
    """The API server did not answer, or is overloaded: the state of the cluster is unknown."""

    code = Code.KUBERNETES_UNREACHABLE


class ObjectNotFound(Refused):
    """404: the object does not exist."""

    code = Code.KUBERNETES_NOT_FOUND


class Conflict(Refused):
    """409: another object has the name, or another client changed it first."""

    code = Code.KUBERNETES_CONFLICT


class InvalidObject(Refused):
    """422: the object is invalid, or a `test` operation of a JSON patch failed."""

    code = Code.KUBERNETES_INVALID_OBJECT


def role_manifest(namespace: str) -> str:
    """A Role with the needed permissions, as YAML for `kubectl apply`."""
    rules = "".join(
        f'  - {{apiGroups: ["{group}"], resources: ["{resource}"], verbs: [{", ".join(verbs)}]}}\n'
        for group, resource, verbs in PERMISSIONS
    )
    return (
        "apiVersion: rbac.authorization.k8s.io/v1\nkind: Role\n"
        f"metadata: {{name: heliostat, namespace: {namespace}}}\nrules:\n{rules}"
    )


def kube_contexts(files: str) -> tuple[str | None, dict[str, str | None]]:
    """(current context, namespace of each context) of one or several kubeconfig files, separated as in KUBECONFIG.

    The first file that defines a value wins. Unreadable files are skipped. A current context without a definition is None."""
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # a kubeconfig of many clusters is long
    current, found = None, dict[str, str | None]()
    for file in filter(None, files.split(os.pathsep)):
        try:
            document = yaml.load(Path(file).expanduser().read_bytes(), loader)
        except (OSError, RuntimeError, ValueError, yaml.YAMLError):
            continue
        if not isinstance(document, dict):
            continue
        named = document.get("current-context")
        current = current or (named if isinstance(named, str) else None)
        contexts = document.get("contexts")
        for one in contexts if isinstance(contexts, list) else ():
            if isinstance(one, dict) and isinstance(one.get("name"), str):
                inside = one.get("context")
                namespace = inside.get("namespace") if isinstance(inside, dict) else None
                found.setdefault(one["name"], namespace if isinstance(namespace, str) else None)
    return (current if current in found else None), found


class Api:
    """One API server, accessed as one user. Thread-safe."""

    def __init__(self, kubeconfig: str, context: str | None) -> None:
        self.kubeconfig, self.context, self.namespace = kubeconfig, context, "default"
        self._retry_at, self._last_error = 0.0, None  # type: float, Unreachable | None
        self._load()

    def _load(self) -> None:
        """Reads the kubeconfig, or the service account of the pod that this process runs in."""
        try:
            from kubernetes.client.configuration import Configuration
            from kubernetes.config import incluster_config, kube_config
        except ImportError:
            raise UsageError(
                "a Python package for Kubernetes is missing",
                cause="the official client `kubernetes` is not installed",
                hint="pip install 'heliostat[kubernetes]'",
                code=Code.USAGE_MISSING_PACKAGE,
            ) from None
        configuration = Configuration()
        # the library writes keys that are inline in a kubeconfig to files
        private = Path(tempfile.mkdtemp(prefix="heliostat-kube-", dir=temp_directory()))
        atexit.register(shutil.rmtree, private, ignore_errors=True)  # a plugin may write more files later
        paths = [os.path.abspath(os.path.expanduser(p)) for p in self.kubeconfig.split(os.pathsep) if p]
        try:
            if not any(map(os.path.exists, paths)) and os.environ.get("KUBERNETES_SERVICE_HOST"):
                incluster_config.load_incluster_config(client_configuration=configuration)
                path = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
                self.context, self.namespace = None, path.read_text().strip()
            else:
                self.kubeconfig = os.pathsep.join(paths)
                # kubectl uses the first current-context of several files; this library uses the last
                self._choose_context(self.context or kube_contexts(self.kubeconfig)[0])
                kube_config.load_kube_config(
                    self.kubeconfig,
                    self.context,
                    configuration,
                    persist_config=False,
                    temp_file_path=str(private),
                )
            self._configuration = configuration
            self.server = str(configuration.host).rstrip("/")
            self.tls = _make_tls_context(configuration) if self.server.startswith("https:") else None
        except UsageError:
            raise
        except Exception as error:  # the library raises many types for a broken file
            raise UsageError(
                "the kubeconfig cannot be used",
                cause=" ".join(str(error).split())[:300] or type(error).__name__,
                details=os.pathsep.join(paths),
                hint="set KUBECONFIG, or `kubernetes: {kubeconfig: FILE}` in the file",
                code=Code.KUBERNETES_NO_KUBECONFIG,
            ) from None
        finally:
            kube_config._cleanup_temp_files()  # the files were read above
            shutil.rmtree(private, ignore_errors=True)
        self.tls_name = getattr(configuration, "tls_server_name", None)
        self.pool = self._make_pool()

    def _choose_context(self, context: str | None) -> None:
        from kubernetes.config import kube_config

        known, active = kube_config.list_kube_config_contexts(self.kubeconfig)
        chosen = next((c for c in known if c["name"] == context), None) if context else active
        if chosen is None:
            raise UsageError(
                f"unknown Kubernetes context `{context}`",
                cause=f"{self.kubeconfig} has {', '.join(c['name'] for c in known)}",
                hint=f"kubernetes: {{context: {known[0]['name']}}}" if known else "",
                code=Code.KUBERNETES_UNKNOWN_CONTEXT,
            )
        self.context = chosen["name"]
        self.namespace = chosen["context"].get("namespace") or "default"

    def _make_pool(self) -> urllib3.PoolManager:
        import urllib3

        retry = urllib3.Retry(
            total=5, connect=1, read=1, backoff_factor=0.3, backoff_jitter=0.3, allowed_methods=None,
            status_forcelist=(429, 500, 502, 503, 504), raise_on_status=False,
        )  # fmt: skip
        message: JsonObject = {"retries": retry, "maxsize": 8}
        if self.tls:
            message["ssl_context"] = self.tls
            name = self.tls_name
            message.update({"server_hostname": name, "assert_hostname": name} if name else {})
        proxy = self._configuration.proxy
        return urllib3.ProxyManager(proxy, **message) if proxy else urllib3.PoolManager(**message)

    def authorization(self) -> dict[str, str]:
        """The authorization header; the library renews an expired token."""
        try:
            settings = self._configuration.auth_settings().values()
        except Exception as error:  # a credential plugin may raise any type
            raise self._unauthorized(str(error)) from None
        return {str(one["key"]).title(): one["value"] for one in settings if one["value"]}

    def _unauthorized(self, message: str) -> Refused:
        return Refused(
            f"the Kubernetes cluster `{self.context}` rejected your credentials",
            cause=" ".join(message.split())[:300] or "Unauthorized",
            details=self.server,
            hint="log in again, as for kubectl",
            code=Code.KUBERNETES_UNAUTHORIZED,
        )

    # -- requests

    def call(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        query: JsonMapping | None = None,
        kind: str = "application/json",
    ) -> Any:
        """The response as a JSON document, or as text if it is not JSON."""
        data = self.raw(method, path, body, query=query, kind=kind)
        try:
            return json.loads(data)
        except ValueError:
            return data.decode("utf-8", "replace")

    def delete(self, path: str, uid: str, **options: Any) -> None:
        """Deletes the object with this uid; does nothing if it is deleted or another object has its name.

        The options are in the request's body, because the server ignores the query if there is a body."""
        body = {"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": {"uid": uid}, **options}
        try:
            self.call("DELETE", path, body)
        except ObjectNotFound:
            return
        except Conflict:
            if self.fetch_uid(path) == uid:
                raise

    def fetch_uid(self, path: str) -> str | None:
        """The uid of the object at this path; None if there is no object."""
        try:
            return str(self.call("GET", path)["metadata"]["uid"])
        except ObjectNotFound:
            return None

    def raw(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        query: JsonMapping | None = None,
        kind: str = "application/json",
        seconds: float = REQUEST_TIMEOUT_S,
    ) -> bytes:
        for last in (False, True):
            answer = self._send(method, path, body, query, kind, seconds)
            with contextlib.closing(answer):
                data = self._read(answer)
            if answer.status != 401 or last:
                break
            with _load_lock:  # the kubeconfig may have new credentials
                self._load()
        if answer.status >= 400:
            raise self.error_from_response(method, path, answer.status, data)
        return data

    def _read(self, answer: urllib3.BaseHTTPResponse) -> bytes:
        import urllib3

        try:
            return answer.read()
        except urllib3.exceptions.HTTPError as error:
            raise self.unreachable_error(error) from None

    def _send(
        self,
        method: str,
        path: str,
        body: Any,
        query: JsonMapping | None,
        kind: str,
        seconds: float,
    ) -> urllib3.BaseHTTPResponse:
        import urllib3

        url = f"{self.server}{path}" + (f"?{urlencode(dict(query), doseq=True)}" if query else "")
        headers = {**self.authorization(), "Accept": "application/json, */*", "User-Agent": "heliostat"}
        if body is not None:
            headers["Content-Type"] = kind
        timeout = urllib3.Timeout(connect=CONNECT_TIMEOUT_S, read=seconds)
        if time.monotonic() < self._retry_at:  # a command sends several requests: only the first waits
            raise self._last_error or self.unreachable_error(ConnectionError())
        try:
            return self.pool.request(
                method,
                url,
                body=None if body is None else json.dumps(body).encode(),
                headers=headers,
                timeout=timeout,
                preload_content=False,
            )
        except urllib3.exceptions.HTTPError as error:
            self._last_error = self.unreachable_error(error)
            late = isinstance(getattr(error, "reason", error), urllib3.exceptions.ConnectTimeoutError)
            self._retry_at = time.monotonic() + (RETRY_DELAY_S if late else 0.0)
            raise self._last_error from None

    def unreachable_error(self, error: Exception) -> Unreachable:
        reason = getattr(error, "reason", None) or error
        message = re.sub(r"^<[^>]*>: |HTTPS?ConnectionPool\([^)]*\): |^\([^)]*,\s*", "", str(reason))
        return Unreachable(
            f"the Kubernetes cluster `{self.context}` does not answer",
            cause=" ".join(message.split())[:300],
            details=self.server,
            hint="kubectl cluster-info",
        )

    def watch(self, path: str, query: JsonMapping) -> Iterator[JsonObject]:
        """Events from the given resource version on, until the server ends the watch. Refused (410): the version is too old."""
        import urllib3

        wanted = {**query, "watch": "1", "allowWatchBookmarks": "true", "timeoutSeconds": WATCH_TIMEOUT_S}
        answer = self._send("GET", path, None, wanted, "", WATCH_TIMEOUT_S + 10)
        with contextlib.closing(answer):
            if answer.status >= 400:
                raise self.error_from_response("GET", path, answer.status, self._read(answer))
            partial = b""
            try:
                for chunk in answer.stream(1 << 16, decode_content=True):
                    *lines, partial = (partial + chunk).split(b"\n")
                    for line in filter(None, lines):
                        event = json.loads(line)
                        if event["type"] == "ERROR":
                            code = int(event["object"].get("code") or 500)
                            raise self.error_from_response("GET", path, code, line)
                        yield event
            except (urllib3.exceptions.HTTPError, ValueError) as error:
                raise self.unreachable_error(error) from None

    # -- errors

    def error_from_response(self, method: str, path: str, status: int, data: bytes) -> HeliostatError:
        try:
            found = json.loads(data)
        except ValueError:
            found = None
        document = found.get("object", found) if isinstance(found, dict) else {}
        document = document if isinstance(document, dict) else {}
        message = str(document.get("message") or data.decode("utf-8", "replace").strip())[:600]
        details = f"{method} {path} answered {status}"
        if status == 401:
            return self._unauthorized(message)
        if status == 403:
            return self._forbidden(message, details)
        if status == 404 and path.startswith("/apis/ray.io") and not document.get("details"):
            return Refused(
                "KubeRay is not installed in this Kubernetes cluster",
                cause="the API server has no `ray.io/v1`, the API group of RayCluster",
                details=details,
                hint=f"ask the administrator of the cluster to run: {INSTALL}",
                code=Code.KUBERNETES_NO_KUBERAY,
            )
        if status in (429, 500, 502, 503, 504):
            return Unreachable(
                f"the Kubernetes cluster `{self.context}` is overloaded or restarting",
                cause=message,
                details=details,
            )
        kinds: dict[int, type[HeliostatError]] = {404: ObjectNotFound, 409: Conflict, 422: InvalidObject}
        if kind := kinds.get(status):
            return kind("Kubernetes rejected the request", cause=message, details=details)
        return Refused(
            "Kubernetes rejected the request", cause=message, details=details, code=Code.KUBERNETES_REJECTED
        )

    def _forbidden(self, message: str, details: str) -> Refused:
        found = re.search(r'cannot (\S+) resource "([^"]+)"(?:.*in the namespace "([^"]+)")?', message)
        if found is None:  # a quota or an admission webhook, not the user's role
            code = Code.KUBERNETES_QUOTA if "exceeded quota" in message else Code.KUBERNETES_ADMISSION
            return Refused("Kubernetes rejected the request", cause=message, details=details, code=code)
        verb, resource, namespace = found.groups()
        where = f" in the namespace `{namespace}`" if namespace else ""
        return AccessDenied(
            f"your role may not {verb} `{resource}`{where}",
            cause=message,
            details=details,
            hint="ask the administrator of the cluster for this Role (kubectl apply -f) and a RoleBinding to you:",
            attachment=role_manifest(namespace or self.namespace),
            code=Code.KUBERNETES_RBAC_FORBIDDEN,
        )

    # -- address, for the proxy

    @property
    def address(self) -> tuple[str, int]:
        parts = urlsplit(self.server)
        return parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)

    @property
    def prefix(self) -> str:
        """Path prefix of the server's URL (used by Rancher)."""
        return urlsplit(self.server).path


def connect(kubeconfig: str | None = None, context: str | None = None) -> Api:
    with _load_lock:
        return _connect(kubeconfig or os.environ.get("KUBECONFIG") or "~/.kube/config", context)


@lru_cache(maxsize=8)
def _connect(kubeconfig: str, context: str | None) -> Api:
    return Api(kubeconfig, context)


def _make_tls_context(configuration: Any) -> ssl.SSLContext:
    """One TLS context for all connections; reads the key file once."""
    context = ssl.create_default_context(cafile=configuration.ssl_ca_cert)
    if not configuration.verify_ssl:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    if configuration.cert_file:
        context.load_cert_chain(configuration.cert_file, configuration.key_file)
    return context
