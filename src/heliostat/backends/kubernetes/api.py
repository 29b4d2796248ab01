"""The door to a Kubernetes API server. The official client's own library reads kubeconfig and gets credentials, whatever
plugin makes them; what is asked is plain REST, so that unknown fields are refused and every no has its words.
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
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode, urlsplit

from heliostat.common.errors import AccessDenied, Code, HeliostatError, Refused, UsageError
from heliostat.state.ownership import temp_directory

if TYPE_CHECKING:
    import urllib3

ASK_S = 30.0
CONNECT_S = 5.0
AGAIN_S = 3.0  # a server that did not take a connection is not tried again before
WATCH_S = 55  # the server ends a watch after so long; one that is silent for longer hangs
LABEL = "heliostat/id"  # what marks objects as ours: the cluster's id
RAY = "/apis/ray.io/v1"
INSTALL = 'kubectl create -k "github.com/ray-project/kuberay/ray-operator/config/default?ref=v1.7.0"'

# what a person's role must let them do; `doctor` asks for each, and a refusal prints it whole
RIGHTS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("ray.io", "rayclusters", ("get", "list", "watch", "create", "patch", "delete")),
    ("ray.io", "rayjobs", ("get", "list", "watch", "create", "patch", "delete")),
    ("", "pods", ("get", "list", "watch", "delete")),
    ("", "pods/log", ("get",)),
    ("", "pods/exec", ("get", "create")),
    ("", "services/proxy", ("get", "create", "update", "delete")),
    ("", "secrets", ("get",)),
    ("", "events", ("list",)),
)


_loading = threading.Lock()  # the library keeps what it writes for a moment in one place for all


class Silent(HeliostatError):
    """The API server does not answer, or not now: nothing is known."""

    code = Code.KUBERNETES_UNREACHABLE


class NotThere(Refused):
    """404: there is no such object."""

    code = Code.KUBERNETES_NOT_FOUND


class InTheWay(Refused):
    """409: another object has the name, or another client changed it first."""

    code = Code.KUBERNETES_CONFLICT


class Invalid(Refused):
    """422: the object would not be valid, or a `test` of a JSON patch failed."""

    code = Code.KUBERNETES_INVALID_OBJECT


def role(namespace: str) -> str:
    """The Role that would do, as `kubectl apply` takes it."""
    rules = "".join(
        f'  - {{apiGroups: ["{group}"], resources: ["{resource}"], verbs: [{", ".join(verbs)}]}}\n'
        for group, resource, verbs in RIGHTS
    )
    return (
        "apiVersion: rbac.authorization.k8s.io/v1\nkind: Role\n"
        f"metadata: {{name: heliostat, namespace: {namespace}}}\nrules:\n{rules}"
    )


def kube_contexts(files: str) -> tuple[str | None, dict[str, str | None]]:
    """(the current context, the namespace of each context) of a kubeconfig, or of several, as KUBECONFIG lists them: the first
    that says a thing counts. A file that cannot be read says nothing; a current context that none of them has is none."""
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
    """One API server, as one user. Safe to use from several threads."""

    def __init__(self, kubeconfig: str, context: str | None) -> None:
        self.kubeconfig, self.context, self.namespace = kubeconfig, context, "default"
        self._again, self._last = 0.0, None  # type: float, Silent | None
        self._load()

    def _load(self) -> None:
        """Reads the kubeconfig, or inside a pod what the pod was given."""
        try:
            from kubernetes.client.configuration import Configuration
            from kubernetes.config import incluster_config, kube_config
        except ImportError:
            raise UsageError(
                "Kubernetes needs a package that is not here",
                cause="the official client `kubernetes` is not installed",
                hint="pip install 'heliostat[kubernetes]'",
                code=Code.USAGE_MISSING_PACKAGE,
            ) from None
        configuration = Configuration()
        # for keys that are inside a kubeconfig
        private = Path(tempfile.mkdtemp(prefix="heliostat-kube-", dir=temp_directory()))
        atexit.register(shutil.rmtree, private, ignore_errors=True)  # a plugin may make more of them later
        paths = [os.path.abspath(os.path.expanduser(p)) for p in self.kubeconfig.split(os.pathsep) if p]
        try:
            if not any(map(os.path.exists, paths)) and os.environ.get("KUBERNETES_SERVICE_HOST"):
                incluster_config.load_incluster_config(client_configuration=configuration)
                place = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
                self.context, self.namespace = None, place.read_text().strip()
            else:
                self.kubeconfig = os.pathsep.join(paths)
                # of several files the first that names one counts, as for kubectl; for this library it is the last
                self._choose(self.context or kube_contexts(self.kubeconfig)[0])
                kube_config.load_kube_config(
                    self.kubeconfig,
                    self.context,
                    configuration,
                    persist_config=False,
                    temp_file_path=str(private),
                )
            self._configuration = configuration
            self.server = str(configuration.host).rstrip("/")
            self.tls = _tls(configuration) if self.server.startswith("https:") else None
        except UsageError:
            raise
        except Exception as error:  # a file may be broken in any way
            raise UsageError(
                "there is no Kubernetes cluster to talk to",
                cause=" ".join(str(error).split())[:300] or type(error).__name__,
                details=os.pathsep.join(paths),
                hint="set KUBECONFIG, or `kubernetes: {kubeconfig: FILE}` in the file",
                code=Code.KUBERNETES_NO_KUBECONFIG,
            ) from None
        finally:
            kube_config._cleanup_temp_files()  # they are read by now
            shutil.rmtree(private, ignore_errors=True)
        self.tls_name = getattr(configuration, "tls_server_name", None)
        self.pool = self._make_pool()

    def _choose(self, context: str | None) -> None:
        from kubernetes.config import kube_config

        known, active = kube_config.list_kube_config_contexts(self.kubeconfig)
        chosen = next((c for c in known if c["name"] == context), None) if context else active
        if chosen is None:
            raise UsageError(
                f"there is no context `{context}`",
                cause=f"{self.kubeconfig} has {', '.join(c['name'] for c in known)}",
                hint=f"kubernetes: {{context: {known[0]['name']}}}" if known else "",
                code=Code.KUBERNETES_UNKNOWN_CONTEXT,
            )
        self.context = chosen["name"]
        self.namespace = chosen["context"].get("namespace") or "default"

    def _make_pool(self) -> urllib3.PoolManager:
        import urllib3

        again = urllib3.Retry(
            total=5, connect=1, read=1, backoff_factor=0.3, backoff_jitter=0.3, allowed_methods=None,
            status_forcelist=(429, 500, 502, 503, 504), raise_on_status=False,
        )  # fmt: skip
        words: dict[str, Any] = {"retries": again, "maxsize": 8}
        if self.tls:
            words["ssl_context"] = self.tls
            name = self.tls_name
            words.update({"server_hostname": name, "assert_hostname": name} if name else {})
        proxy = self._configuration.proxy
        return urllib3.ProxyManager(proxy, **words) if proxy else urllib3.PoolManager(**words)

    def authorization(self) -> dict[str, str]:
        """The header that says who we are; a token that has run out is made anew."""
        try:
            settings = self._configuration.auth_settings().values()
        except Exception as error:  # a credential plugin may fail in any way
            raise self._nobody(str(error)) from None
        return {str(one["key"]).title(): one["value"] for one in settings if one["value"]}

    def _nobody(self, words: str) -> Refused:
        return Refused(
            f"the Kubernetes cluster `{self.context}` does not know you",
            cause=" ".join(words.split())[:300] or "Unauthorized",
            details=self.server,
            hint="log in to it again, as for kubectl",
            code=Code.KUBERNETES_UNAUTHORIZED,
        )

    # -- questions

    def call(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        query: Mapping[str, Any] | None = None,
        kind: str = "application/json",
    ) -> Any:
        """The answer's document, or its text where it is none."""
        data = self.raw(method, path, body, query=query, kind=kind)
        try:
            return json.loads(data)
        except ValueError:
            return data.decode("utf-8", "replace")

    def delete(self, path: str, uid: str, **options: Any) -> None:
        """Deletes this one object. One that is gone, or whose name another object has by now, is left alone.

        The options are the request's body: where there is one, the server ignores those of the query."""
        body = {"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": {"uid": uid}, **options}
        try:
            self.call("DELETE", path, body)
        except NotThere:
            return
        except InTheWay:
            if self.uid_of(path) == uid:
                raise

    def uid_of(self, path: str) -> str | None:
        """The uid of the object that has this path now; None: there is none."""
        try:
            return str(self.call("GET", path)["metadata"]["uid"])
        except NotThere:
            return None

    def raw(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        query: Mapping[str, Any] | None = None,
        kind: str = "application/json",
        seconds: float = ASK_S,
    ) -> bytes:
        for last in (False, True):
            answer = self._send(method, path, body, query, kind, seconds)
            with contextlib.closing(answer):
                data = self._read(answer)
            if answer.status != 401 or last:
                break
            with _loading:  # whoever gave us our credentials may have new ones
                self._load()
        if answer.status >= 400:
            raise self.said_no(method, path, answer.status, data)
        return data

    def _read(self, answer: urllib3.BaseHTTPResponse) -> bytes:
        import urllib3

        try:
            return answer.read()
        except urllib3.exceptions.HTTPError as error:
            raise self.silent(error) from None

    def _send(
        self,
        method: str,
        path: str,
        body: Any,
        query: Mapping[str, Any] | None,
        kind: str,
        seconds: float,
    ) -> urllib3.BaseHTTPResponse:
        import urllib3

        url = f"{self.server}{path}" + (f"?{urlencode(dict(query), doseq=True)}" if query else "")
        headers = {**self.authorization(), "Accept": "application/json, */*", "User-Agent": "heliostat"}
        if body is not None:
            headers["Content-Type"] = kind
        timeout = urllib3.Timeout(connect=CONNECT_S, read=seconds)
        if time.monotonic() < self._again:  # one command asks several times: it need not wait each time
            raise self._last or self.silent(ConnectionError())
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
            self._last = self.silent(error)
            late = isinstance(getattr(error, "reason", error), urllib3.exceptions.ConnectTimeoutError)
            self._again = time.monotonic() + (AGAIN_S if late else 0.0)
            raise self._last from None

    def silent(self, error: Exception) -> Silent:
        reason = getattr(error, "reason", None) or error
        words = re.sub(r"^<[^>]*>: |HTTPS?ConnectionPool\([^)]*\): |^\([^)]*,\s*", "", str(reason))
        return Silent(
            f"the Kubernetes cluster `{self.context}` does not answer",
            cause=" ".join(words.split())[:300],
            details=self.server,
            hint="kubectl cluster-info",
        )

    def watch(self, path: str, query: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """What changes from the given version on, until the server ends it. Refused (410): it does not remember so far back."""
        import urllib3

        wanted = {**query, "watch": "1", "allowWatchBookmarks": "true", "timeoutSeconds": WATCH_S}
        answer = self._send("GET", path, None, wanted, "", WATCH_S + 10)
        with contextlib.closing(answer):
            if answer.status >= 400:
                raise self.said_no("GET", path, answer.status, self._read(answer))
            rest = b""
            try:
                for chunk in answer.stream(1 << 16, decode_content=True):
                    *lines, rest = (rest + chunk).split(b"\n")
                    for line in filter(None, lines):
                        event = json.loads(line)
                        if event["type"] == "ERROR":
                            code = int(event["object"].get("code") or 500)
                            raise self.said_no("GET", path, code, line)
                        yield event
            except (urllib3.exceptions.HTTPError, ValueError) as error:
                raise self.silent(error) from None

    # -- a no

    def said_no(self, method: str, path: str, status: int, data: bytes) -> HeliostatError:
        try:
            found = json.loads(data)
        except ValueError:
            found = None
        document = found.get("object", found) if isinstance(found, dict) else {}
        document = document if isinstance(document, dict) else {}
        words = str(document.get("message") or data.decode("utf-8", "replace").strip())[:600]
        details = f"{method} {path} answered {status}"
        if status == 401:
            return self._nobody(words)
        if status == 403:
            return self._forbidden(words, details)
        if status == 404 and path.startswith("/apis/ray.io") and not document.get("details"):
            return Refused(
                "KubeRay is not installed in this Kubernetes cluster",
                cause="it has no RayCluster: its API server does not know `ray.io/v1`",
                details=details,
                hint=f"whoever runs the cluster types: {INSTALL}",
                code=Code.KUBERNETES_NO_KUBERAY,
            )
        if status in (429, 500, 502, 503, 504):
            return Silent(
                f"the Kubernetes cluster `{self.context}` cannot answer now", cause=words, details=details
            )
        kinds: dict[int, type[HeliostatError]] = {404: NotThere, 409: InTheWay, 422: Invalid}
        if kind := kinds.get(status):
            return kind("Kubernetes said no", cause=words, details=details)
        return Refused("Kubernetes said no", cause=words, details=details, code=Code.KUBERNETES_REJECTED)

    def _forbidden(self, words: str, details: str) -> Refused:
        found = re.search(r'cannot (\S+) resource "([^"]+)"(?:.*in the namespace "([^"]+)")?', words)
        if found is None:  # a quota, an admission webhook
            code = Code.KUBERNETES_QUOTA if "exceeded quota" in words else Code.KUBERNETES_ADMISSION
            return Refused("Kubernetes said no", cause=words, details=details, code=code)
        verb, resource, namespace = found.groups()
        where = f" in the namespace `{namespace}`" if namespace else ""
        return AccessDenied(
            f"your role may not {verb} `{resource}`{where}",
            cause=words,
            details=details,
            hint="whoever runs the cluster gives you this Role (kubectl apply -f, and a RoleBinding to you):",
            attachment=role(namespace or self.namespace),
            code=Code.KUBERNETES_RBAC_FORBIDDEN,
        )

    # -- the way to a service

    @property
    def address(self) -> tuple[str, int]:
        parts = urlsplit(self.server)
        return parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)

    @property
    def prefix(self) -> str:
        """Of every path: some servers are reached below one (Rancher)."""
        return urlsplit(self.server).path


def connect(kubeconfig: str | None = None, context: str | None = None) -> Api:
    with _loading:
        return _connect(kubeconfig or os.environ.get("KUBECONFIG") or "~/.kube/config", context)


@lru_cache(maxsize=8)
def _connect(kubeconfig: str, context: str | None) -> Api:
    return Api(kubeconfig, context)


def _tls(configuration: Any) -> ssl.SSLContext:
    """One context for everything; the key's file is read here, once."""
    context = ssl.create_default_context(cafile=configuration.ssl_ca_cert)
    if not configuration.verify_ssl:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    if configuration.cert_file:
        context.load_cert_chain(configuration.cert_file, configuration.key_file)
    return context
