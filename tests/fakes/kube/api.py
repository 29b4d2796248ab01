"""The API over HTTP: who asks, may they, what is asked, and the answer in the server's words."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

import yaml
from aiohttp import web

from . import patches, store, streams
from .schema import fill
from .store import RESOURCES, Object, Refused, Resource
from .watch import Watch
from .world import TOKENS, World

VERSION = {
    "major": "1", "minor": "36", "gitVersion": "v1.36.4", "gitCommit": "0" * 40, "gitTreeState": "clean",
    "buildDate": "2026-08-12T00:00:00Z", "goVersion": "go1.26.1", "compiler": "gc", "platform": "linux/amd64",
}  # fmt: skip
MEDIA = {
    "application/json-patch+json": "json",
    "application/merge-patch+json": "merge",
    "application/strategic-merge-patch+json": "strategic",
    "application/apply-patch+yaml": "apply",
}
VERBS = {"GET": "get", "HEAD": "get", "POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}


@dataclass(frozen=True)
class Target:
    kind: Resource
    namespace: str
    name: str
    sub: str
    rest: str
    verb: str

    @property
    def resource(self) -> str:
        return self.kind.plural + (f"/{self.sub}" if self.sub else "")


def parse(method: str, raw_path: str, query: Any) -> Target | None:
    """/api/v1/… or /apis/GROUP/VERSION/…; None when no resource of ours is meant."""
    head, _, rest = raw_path.partition("/proxy/") if "/proxy/" in raw_path else (raw_path, "", "")
    proxied = head != raw_path or raw_path.endswith("/proxy")
    parts = [unquote(part) for part in head.strip("/").split("/")]
    if parts[0] == "api" and len(parts) > 2:
        group, version, parts = "", parts[1], parts[2:]
    elif parts[0] == "apis" and len(parts) > 3:
        group, version, parts = parts[1], parts[2], parts[3:]
    else:
        return None
    namespace = ""
    if parts[0] == "namespaces" and len(parts) > 2 and parts[2] in RESOURCES:
        namespace, parts = parts[1], parts[2:]
    kind = RESOURCES.get(parts[0])
    if kind is None or (kind.group, kind.version) != (group, version) or len(parts) > 3:
        return None
    name, sub = (parts + ["", ""])[1:3]
    if proxied:
        sub = "proxy"
    verb = VERBS.get(method, method.lower())
    if verb == "get" and not name:
        verb = "watch" if query.get("watch") in ("true", "1") else "list"
    elif verb == "delete" and not name:
        verb = "deletecollection"
    return Target(kind, namespace, name, sub, rest, verb)


class Api:
    def __init__(self, world: World, control: Any) -> None:
        self.world, self.store, self.control = world, world.store, control

    # -- the door

    async def handle(self, request: web.Request) -> web.StreamResponse:
        path = request.rel_url.raw_path
        entry = {"method": request.method, "path": path, "query": request.rel_url.raw_query_string}
        try:
            if path != "/_control":
                self.world.requests = [*self.world.requests[-4999:], entry]
            user = TOKENS.get(request.headers.get("Authorization", "").removeprefix("Bearer ").strip())
            entry["user"] = user
            answer = await self._answer(request, path, user, entry)
        except Refused as refused:
            answer = web.json_response(refused.body(), status=refused.code)
        entry["status"] = answer.status
        return answer

    async def _answer(
        self, request: web.Request, path: str, user: str | None, entry: Object
    ) -> web.StreamResponse:
        if path == "/_control":
            if user != "kubernetes-admin":
                raise Refused(401, "Unauthorized", "Unauthorized")
            return web.json_response(await self.control(await request.json()))
        target = parse(request.method, path, request.query)
        verb, resource = (target.verb, target.resource) if target else ("get", path)
        entry |= {"verb": verb, "resource": resource}
        fault = self.world.fault(verb, resource, target.name if target else "", user or "")
        if fault and (answer := await self._wrong(request, fault)) is not None:
            return answer
        if path.rstrip("/") in ("/healthz", "/livez", "/readyz"):
            return web.Response(text="ok")
        if user is None:
            raise Refused(401, "Unauthorized", "Unauthorized")
        if target is None:
            return self._discovery(path, user)
        self._authorize(user, target, request)
        self._served(target)
        answer = await self._act(request, target, fault, user, entry)
        if fault and fault.do == "cut_after":
            return self._cut(request)
        return answer

    async def _wrong(self, request: web.Request, fault: Any) -> web.StreamResponse | None:
        if fault.do == "slow":
            await asyncio.sleep(fault.seconds)
        elif fault.do == "cut":
            return self._cut(request)
        elif isinstance(fault.do, int):
            return _fail(fault.do, fault.message, fault.seconds)
        return None

    @staticmethod
    def _cut(request: web.Request) -> web.StreamResponse:
        if request.transport is not None:
            request.transport.abort()
        return web.Response(status=499)

    def _authorize(self, user: str, target: Target, request: web.Request) -> None:
        kind = target.kind
        namespace = target.name if kind.plural == "namespaces" else target.namespace
        verbs = [target.verb]
        if target.sub == "exec" and target.verb == "get":
            verbs.append("create")  # since 1.35 a WebSocket needs both
        for verb in verbs:
            if self.world.allowed(user, verb, kind.group, target.resource, namespace):
                continue
            named = f' "{target.name}"' if target.name else ""
            where = f'in the namespace "{namespace}"' if namespace else "at the cluster scope"
            words = (
                f'{kind.full}{named} is forbidden: User "{user}" cannot {verb} resource "{target.resource}" in API group '
                f'"{kind.group}" {where}'
            )
            raise Refused(403, "Forbidden", words, kind.details(target.name))

    def _served(self, target: Target) -> None:
        """Raises where there is nothing behind the path."""
        if target.kind.custom and not self.world.settings.crds:
            raise web.HTTPNotFound(text="404 page not found\n")
        missing = target.sub and target.sub not in target.kind.subresources
        base = "get" if target.sub else target.verb
        if missing or (base not in target.kind.verbs and not target.sub):
            code = 404 if missing else 405
            reason = "NotFound" if missing else "MethodNotAllowed"
            words = (
                "the server could not find the requested resource"
                if missing
                else "the server does not allow this method on the requested resource"
            )
            raise Refused(code, reason, words)

    # -- discovery

    def _discovery(self, path: str, user: str) -> web.Response:
        path = path.rstrip("/")
        groups: dict[str, list[Resource]] = {}
        for kind in RESOURCES.values():
            if not kind.custom or self.world.settings.crds:
                groups.setdefault(kind.api_version, []).append(kind)
        if path == "/version":
            return web.json_response(VERSION)
        if path == "/api":
            return web.json_response(
                {"kind": "APIVersions", "versions": ["v1"], "serverAddressByClientCIDRs": []}
            )
        if path == "/apis":
            listed = [_group(name) for name in groups if "/" in name]
            return web.json_response({"kind": "APIGroupList", "apiVersion": "v1", "groups": listed})
        name = path.removeprefix("/apis/") if path.startswith("/apis/") else path.removeprefix("/api/")
        if name in groups and path.startswith("/api" if name == "v1" else "/apis"):
            return web.json_response(
                {
                    "kind": "APIResourceList",
                    "apiVersion": "v1",
                    "groupVersion": name,
                    "resources": [row for kind in groups[name] for row in _rows(kind)],
                }
            )
        for version in groups:
            if path == "/apis/" + version.split("/")[0]:
                return web.json_response({**_group(version), "kind": "APIGroup", "apiVersion": "v1"})
        parts = path.strip("/").split("/")
        deep = (parts[0] == "apis" and len(parts) > 3) or (parts[0] == "api" and len(parts) > 2)
        if parts[0] not in ("api", "apis", "openapi") or deep:
            space = parts[parts.index("namespaces") + 1] if "namespaces" in parts[:-1] else ""
            if not self.world.allowed(user, "get", "*", "*", space, everybody=False):
                raise Refused(403, "Forbidden", f'forbidden: User "{user}" cannot get path "{path}"')
        return web.Response(status=404, text="404 page not found\n")

    # -- what is asked

    async def _act(
        self, request: web.Request, target: Target, fault: Any, user: str, entry: Object
    ) -> web.StreamResponse:
        kind, dry = target.kind, request.query.get("dryRun") == "All"
        if target.sub == "proxy":
            return await streams.proxy(self.world, request, target)
        if target.sub == "log":
            return await streams.log(self.world, request, target)
        if target.sub == "exec":
            return await streams.execute(self.world, request, target)
        if target.sub == "eviction":
            self.store.delete(kind, target.namespace, target.name)
            return web.json_response(SUCCESS, status=201)
        if kind.plural in ("selfsubjectaccessreviews", "selfsubjectreviews"):
            return await self._review(request, kind, user)
        if target.verb == "watch":
            return await self._watch(request, target, fault)
        if target.verb == "list":
            return self._list(request, target)
        if target.verb == "get":
            return web.json_response(self.store.get(kind, target.namespace, target.name))
        if target.verb == "create":
            obj, warnings = self._read(await _body(request, kind), request, target, None)
            self.world.admit(kind, target.namespace, obj)
            made = self.store.create(kind, target.namespace, obj, dry)
            return web.json_response(made, status=201, headers=warnings)
        if target.verb == "update":
            old = self.store.get(kind, target.namespace, target.name)
            new, warnings = self._read(await _body(request, kind), request, target, old)
            if kind.custom and not new["metadata"].get("resourceVersion"):
                cause = ("FieldValueInvalid", "metadata.resourceVersion", "Invalid value: 0x0: must be specified for an update")  # fmt: skip
                raise store.invalid(kind, target.name, [cause])
            new = self.store.update(kind, target.namespace, target.name, new, target.sub == "status", dry)
            return web.json_response(new, headers=warnings)
        if target.verb == "patch":
            return await self._patch(request, target, dry)
        return await self._delete(request, target, dry, entry)

    def _read(
        self, obj: Object, request: web.Request, target: Target, old: Object | None
    ) -> tuple[Object, dict[str, str]]:
        """The object as it may be stored, and warnings about what was dropped."""
        kind = target.kind
        if obj.get("kind", kind.kind) != kind.kind:
            raise Refused(400, "BadRequest", f"{obj['kind']} in version \"{kind.version}\" cannot be handled as a {kind.kind}: the object provided is unrecognized")  # fmt: skip
        if obj.get("apiVersion", kind.api_version) != kind.api_version:
            words = f"the API version in the data ({obj['apiVersion']}) does not match the expected API version ({kind.api_version})"
            raise Refused(400, "BadRequest", words)
        meta = obj.setdefault("metadata", {})
        if kind.namespaced and meta.setdefault("namespace", target.namespace) != target.namespace:
            words = "the namespace of the provided object does not match the namespace sent on the request"
            raise Refused(400, "BadRequest", words)
        if old and meta.setdefault("name", target.name) != target.name:
            words = (
                f"the name of the object ({meta['name']}) does not match the name on the URL ({target.name})"
            )
            raise Refused(400, "BadRequest", words)
        if not old:
            store.check_metadata(
                kind, {**meta, "name": meta.get("name") or (meta.get("generateName", "") and "x")}
            )
        validation = request.query.get("fieldValidation", "Warn")
        obj, unknown = self.world.schema.check(kind, obj, validation == "Strict", old)
        obj = fill(kind, obj)
        warnings = {}
        if unknown and validation == "Warn":
            warnings["Warning"] = ", ".join(f'299 - "unknown field \\"{name}\\""' for name in unknown)
        return obj, warnings

    async def _patch(self, request: web.Request, target: Target, dry: bool) -> web.Response:
        kind, how = target.kind, MEDIA.get(request.content_type)
        accepted = [media for media, name in MEDIA.items() if name != "strategic" or not kind.custom]
        if how is None or (how == "strategic" and kind.custom):
            words = "the body of the request was in an unknown format - accepted media types include: "
            raise Refused(415, "UnsupportedMediaType", words + ", ".join(accepted))
        text = await request.text()
        try:
            patch = yaml.safe_load(text) if how == "apply" else json.loads(text)
        except (ValueError, yaml.YAMLError) as error:
            raise Refused(400, "BadRequest", f"error decoding patch: {error}") from None
        if how == "apply" and not request.query.get("fieldManager"):
            words = 'PatchOptions.meta.k8s.io "" is invalid: fieldManager: Required value: is required for apply patch'
            raise Refused(422, "Invalid", words)
        found = self.store.find(kind.plural, target.namespace, target.name)
        if found is None and how == "apply":
            obj, warnings = self._read(patch, request, target, None)
            self.world.admit(kind, target.namespace, obj)
            made = self.store.create(kind, target.namespace, obj, dry)
            return web.json_response(made, status=201, headers=warnings)
        old = self.store.get(kind, target.namespace, target.name)
        new = patches.json_patch(old, patch) if how == "json" else patches.merge(old, patch)
        new, warnings = self._read(new, request, target, old)
        new = self.store.update(kind, target.namespace, target.name, new, target.sub == "status", dry)
        return web.json_response(new, headers=warnings)

    async def _delete(self, request: web.Request, target: Target, dry: bool, entry: Object) -> web.Response:
        kind = target.kind
        text = await request.text()
        # the body takes the place of the query, as in apiserver's handlers/delete.go: nothing of the query counts then
        options = json.loads(text) if text.strip() else dict(request.query)
        entry["options"] = options
        policy = options.get("propagationPolicy") or ("Orphan" if options.get("orphanDependents") else "")
        grace = None if options.get("gracePeriodSeconds") is None else int(options["gracePeriodSeconds"])
        if target.verb == "deletecollection":
            query = request.query
            found = self.store.list(
                kind.plural, target.namespace, query.get("labelSelector", ""), query.get("fieldSelector", "")
            )
            for obj in [] if dry else found:
                self.store.delete(
                    kind, obj["metadata"].get("namespace", ""), obj["metadata"]["name"], policy, grace
                )
            return web.json_response(_listed(kind, found, {"resourceVersion": str(self.store.version)}))
        obj = self.store.get(kind, target.namespace, target.name)
        for key, words in (("uid", "UID"), ("resourceVersion", "ResourceVersion")):
            wanted, have = (options.get("preconditions") or {}).get(key), obj["metadata"][key]
            if wanted and wanted != have:
                why = (
                    f"Precondition failed: {words} in precondition: {wanted}, {words} in object meta: {have}"
                )
                raise store.conflict(kind, target.name, why)
        if not dry:
            obj = self.store.delete(kind, target.namespace, target.name, policy, grace)
        if kind.plural == "pods" or self.store.find(kind.plural, target.namespace, target.name):
            return web.json_response(obj)
        details = {**kind.details(target.name), "uid": obj["metadata"]["uid"]}
        return web.json_response({**SUCCESS, "details": details})

    async def _review(self, request: web.Request, kind: Resource, user: str) -> web.Response:
        obj = await _body(request, kind)
        if kind.plural == "selfsubjectreviews":
            status: Object = {"userInfo": {"username": user, "groups": ["system:authenticated"]}}
        else:
            want = obj.get("spec", {}).get("resourceAttributes", {})
            resource = want.get("resource", "") + (
                f"/{want['subresource']}" if want.get("subresource") else ""
            )
            may = self.world.allowed(
                user, want.get("verb", ""), want.get("group", ""), resource, want.get("namespace", "")
            )
            status = {"allowed": bool(may)}
            if may:
                status["reason"] = f'RBAC: allowed by RoleBinding "{user}/ml"'
        answer = {**obj, "apiVersion": kind.api_version, "kind": kind.kind, "status": status}
        return web.json_response(answer, status=201)

    # -- lists and watches

    def _list(self, request: web.Request, target: Target) -> web.Response:
        query = request.query
        found = self.store.list(
            target.kind.plural,
            target.namespace,
            query.get("labelSelector", ""),
            query.get("fieldSelector", ""),
        )
        rows, metadata = patches.page(
            found, int(query.get("limit") or 0), query.get("continue", ""), self.store.version
        )
        return web.json_response(_listed(target.kind, rows, metadata))

    async def _watch(self, request: web.Request, target: Target, fault: Any) -> web.StreamResponse:
        query, kind = request.query, target.kind
        matches = store.selector(kind, query.get("labelSelector", ""), query.get("fieldSelector", ""))
        since = query.get("resourceVersion", "")
        if since and not since.isdigit():
            raise Refused(400, "BadRequest", f'invalid resource version "{since}": strconv.ParseUint: parsing "{since}": invalid syntax')  # fmt: skip
        stream = Watch(self.world, request, target, matches, fault)
        await stream.run(int(since or 0), float(query.get("timeoutSeconds") or 0))
        return stream.response


SUCCESS: Object = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success"}


async def _body(request: web.Request, kind: Resource) -> Object:
    text = await request.text()
    try:
        obj = yaml.safe_load(text) if "yaml" in request.content_type else json.loads(text)
    except (ValueError, yaml.YAMLError) as error:
        words = f"the object provided is unrecognized (must be of type {kind.kind}): couldn't get version/kind; json parse error: {error}"
        raise Refused(400, "BadRequest", words) from None
    if not isinstance(obj, dict):
        raise Refused(400, "BadRequest", f"the object provided is unrecognized (must be of type {kind.kind})")
    return obj


def _fail(code: int, message: str, seconds: float) -> web.Response:
    """The codes that a fault may ask for, as servers word them."""
    if code == 429:  # the server is full: no Status, one line of text
        text = message or "Too many requests, please try again later."
        return web.Response(status=429, text=text, headers={"Retry-After": str(max(1, round(seconds)))})
    words = {
        400: ("BadRequest", "the server rejected our request for an unknown reason"),
        401: ("Unauthorized", "Unauthorized"),
        403: ("Forbidden", "forbidden"),
        404: ("NotFound", "the server could not find the requested resource"),
        409: ("Conflict", "Operation cannot be fulfilled: the object has been modified; please apply your changes to the latest version and try again"),
        410: ("Expired", "The resourceVersion for the provided list is too old."),
        500: ("InternalError", "Internal error occurred: etcdserver: request timed out"),
        503: ("ServiceUnavailable", "apiserver not ready"),
        504: ("Timeout", "Timeout: request did not complete within the allotted timeout"),
    }  # fmt: skip
    reason, said = words.get(code, ("Unknown", f"error {code}"))
    return web.json_response(Refused(code, reason, message or said).body(), status=code)


def _group(version: str) -> Object:
    group, name = version.split("/")
    served = {"groupVersion": version, "version": name}
    return {"name": group, "versions": [served], "preferredVersion": served}


def _rows(kind: Resource) -> list[Object]:
    row = {
        "name": kind.plural, "singularName": kind.kind.lower(), "namespaced": kind.namespaced, "kind": kind.kind,
        "verbs": list(kind.verbs), "shortNames": list(kind.short), **({"categories": ["all"]} if kind.custom else {}),
    }  # fmt: skip
    subs = [
        {
            "name": f"{kind.plural}/{sub}",
            "singularName": "",
            "namespaced": True,
            "kind": kind.kind,
            "verbs": ["get", "patch", "update"],
        }
        for sub in kind.subresources
    ]
    return [row, *subs]


def _listed(kind: Resource, rows: list[Object], metadata: Object) -> Object:
    items = rows
    if not kind.custom:  # only custom resources carry their kind inside a list
        items = [{k: v for k, v in row.items() if k not in ("kind", "apiVersion")} for row in rows]
    return {"kind": f"{kind.kind}List", "apiVersion": kind.api_version, "metadata": metadata, "items": items}
