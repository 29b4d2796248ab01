"""One RayCluster or RayJob and its pods: read by single requests, or by watches if the caller polls."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping
from typing import Any

from heliostat.backends.kubernetes import api as kube
from heliostat.common.documents import JsonMapping
from heliostat.common.errors import HeliostatError, Refused

WATCH_AFTER_S = 10.0  # a second read within this time starts the watches
WARNINGS_CACHE_S = 2.0
Object = JsonMapping


class Cluster:
    def __init__(
        self, api: kube.Api, namespace: str, plural: str, name: str, uid: str, cluster_id: str | None = None
    ) -> None:
        self.cluster_id = cluster_id  # value of the label of the cluster's objects
        self.api, self.namespace, self.plural, self.name, self.uid = api, namespace, plural, name, uid
        self.collection_path = f"{kube.RAY_API}/namespaces/{namespace}/{plural}"
        self.path = f"{self.collection_path}/{name}"
        self.token: str | None = None
        self.requires_token = True
        self._ray: str | None = name if plural == "rayclusters" else None
        # KubeRay recreates a deleted RayCluster of a RayJob under the same name, so it can have several uids
        self._ray_uids = {uid} if plural == "rayclusters" else set()
        self._observed_at = -WATCH_AFTER_S
        self._watches: list[_Watch] = []
        self._warnings: tuple[float, list[Object]] = (-WARNINGS_CACHE_S, [])

    # -- fields of the object

    def ray_name(self, obj: Object) -> str | None:
        """The RayCluster's name; for a RayJob, None until the operator has chosen it."""
        if self._ray is None:
            self._ray = (obj.get("status") or {}).get("rayClusterName") or None
        return self._ray

    def ray_spec(self, obj: Object) -> Object:
        spec: Object = obj.get("spec") or {}
        return spec if self.plural == "rayclusters" else spec.get("rayClusterSpec") or {}

    def check_token_required(self, obj: Object) -> bool:
        self.requires_token = (self.ray_spec(obj).get("authOptions") or {}).get("mode") == "token"
        return self.requires_token

    def service(self, obj: Object) -> str:
        status = obj.get("status") or {}
        head = (status if self.plural == "rayclusters" else status.get("rayClusterStatus") or {}).get("head")
        return str((head or {}).get("serviceName") or f"{self.ray_name(obj)}-head-svc")

    # -- requests

    def fetch(self) -> Object | None:
        """The object; None if it is deleted or another object has its name."""
        try:
            obj = self.api.call("GET", self.path)
        except kube.ObjectNotFound:
            return None
        return self._verify_uid(obj)

    def _verify_uid(self, obj: Object | None) -> Object | None:
        if obj is None or obj["metadata"]["uid"] != self.uid:
            return None
        self.ray_name(obj)
        kind = {"rayclusters": "RayCluster", "rayjobs": "RayJob"}[self.plural]
        return {"kind": kind, **obj}

    def ray_cluster_exists(self) -> bool:
        """Whether the RayCluster exists; that of a RayJob may be deleted before the RayJob."""
        try:
            found = self.api.call(
                "GET", f"{kube.RAY_API}/namespaces/{self.namespace}/rayclusters/{self._ray}"
            )
        except kube.ObjectNotFound:
            return False
        uid = str(found["metadata"]["uid"])
        if self.uid not in (uid, *owner_uids(found)):
            return False
        if uid not in self._ray_uids:
            self._ray_uids.add(uid)
            self.token = None  # each RayCluster has its own token
        return True

    def _filter_owned(self, pods: Iterable[Object]) -> list[Object]:
        """The pods that our RayCluster owns: pods of another cluster of that name have the same label.

        A RayJob's RayCluster may be deleted before its uid was read. The operator never reuses its name, so all pods with
        its label are its own then."""
        found = list(pods)
        not_owned = [pod for pod in found if not self._ray_uids.intersection(owner_uids(pod))]
        if self.plural == "rayjobs" and not_owned and not self.ray_cluster_exists() and not self._ray_uids:
            return found
        return [pod for pod in found if self._ray_uids.intersection(owner_uids(pod))]

    def delete_pod(self, name: str, **options: Any) -> None:
        """Deletes one pod of this cluster, by its uid."""
        path = f"/api/v1/namespaces/{self.namespace}/pods/{name}"
        pod = self.api.call("GET", path)
        if not self._filter_owned([pod]):
            raise kube.ObjectNotFound(f"`{name}` is not a pod of `{self.name}`", details=path)
        self.api.delete(path, str(pod["metadata"]["uid"]), **options)

    @property
    def _pods_query(self) -> tuple[str, dict[str, str]]:
        return f"/api/v1/namespaces/{self.namespace}/pods", {"labelSelector": f"ray.io/cluster={self._ray}"}

    def list_pods(self) -> list[Object]:
        if self._ray is None:
            return []
        path, query = self._pods_query
        return self._filter_owned(self.api.call("GET", path, query=query)["items"])

    def remaining_pods(self) -> list[Object]:
        """The cluster's pods, also after the object was deleted: a node that does not answer keeps its pods.

        A deleted RayJob no longer has the name of its RayCluster. Its pods have our label. The pods of a copied RayJob have it
        too, but their RayCluster exists and is not ours."""
        if self._ray or not self.cluster_id:
            return self.list_pods()
        query = {"labelSelector": f"{kube.ID_LABEL}={self.cluster_id}"}
        clusters = self.api.call(
            "GET", f"{kube.RAY_API}/namespaces/{self.namespace}/rayclusters", query=query
        )
        others = {one["metadata"]["uid"] for one in clusters["items"] if self.uid not in owner_uids(one)}
        pods = self.api.call("GET", f"/api/v1/namespaces/{self.namespace}/pods", query=query)["items"]
        return [pod for pod in pods if not others.intersection(owner_uids(pod))]

    def observe(self) -> tuple[Object | None, list[Object]]:
        """(the object, its pods), from the watches if they are up to date."""
        is_polled, self._observed_at = self.is_observed, time.monotonic()
        if any(watch.closed for watch in self._watches):
            self.close()
        if len(self._watches) == 2 and all(watch.synced for watch in self._watches):
            first, pods = self._watches
            return self._verify_uid(first.items.get(self.name)), self._filter_owned(pods.items.values())
        obj = self.fetch()
        found = (obj, self.list_pods() if obj else [])
        if is_polled and obj and self._ray and not self._watches:
            path, query = self._pods_query
            self._watches = [
                _Watch(self, self.collection_path, {"fieldSelector": f"metadata.name={self.name}"}),
                _Watch(self, path, query),
            ]
        return found

    def warnings(self) -> list[Object]:
        """Warning events about the cluster, the newest last."""
        at, known = self._warnings
        if time.monotonic() - at < WARNINGS_CACHE_S:
            return known
        found = []
        for name in dict.fromkeys(filter(None, (self.name, self._ray))):
            query = {"fieldSelector": f"involvedObject.name={name}"}
            try:
                listed = self.api.call("GET", f"/api/v1/namespaces/{self.namespace}/events", query=query)
            except Refused:  # events only add reasons
                continue
            # events outlive their object by an hour; the name of a RayCluster may be reused, that of a RayJob's is not
            own = [
                e for e in listed["items"] if name != self.name or e["involvedObject"].get("uid") == self.uid
            ]
            found += [event for event in own if event.get("type") == "Warning"]
        found.sort(key=_event_time)
        self._warnings = (time.monotonic(), found)
        return found

    @property
    def is_observed(self) -> bool:
        """Whether a caller has read the state recently."""
        return time.monotonic() - self._observed_at < WATCH_AFTER_S

    def invalidate(self) -> None:
        """Discards the watched state after a change: it may be older than the change."""
        self.close()
        self._observed_at = -WATCH_AFTER_S

    def close(self) -> None:
        for watch in self._watches:
            watch.closed = True
        self._watches = []


def owner_uids(obj: Object) -> list[str]:
    """The uids of the object's owners."""
    return [str(owner["uid"]) for owner in obj["metadata"].get("ownerReferences") or ()]


def _event_time(event: Object) -> str:
    series = event.get("series") or {}
    times = (series.get("lastObservedTime"), event.get("lastTimestamp"), event.get("eventTime"))
    return str(next(filter(None, times), ""))


class _Watch(threading.Thread):
    """Keeps the objects of one kind up to date until it is closed.

    It closes itself when callers stop reading: a notebook may run for days."""

    def __init__(self, cluster: Cluster, path: str, query: Mapping[str, str]) -> None:
        super().__init__(daemon=True)
        self.cluster, self.api, self.path, self.query = cluster, cluster.api, path, query
        self.items: dict[str, Object] = {}
        self.synced = self.closed = False
        self.start()

    def run(self) -> None:
        version, pause = None, 0.2
        while not self.closed and self.cluster.is_observed:
            try:
                if version is None:
                    listed = self.api.call("GET", self.path, query=self.query)
                    self.items = {item["metadata"]["name"]: item for item in listed["items"]}
                    version, self.synced = listed["metadata"]["resourceVersion"], True
                for event in self.api.watch(self.path, {**self.query, "resourceVersion": version}):
                    version = event["object"]["metadata"]["resourceVersion"]
                    self._apply(event)
                    pause = 0.2
                    if self.closed:
                        return
            except HeliostatError:  # callers send single requests until the next list succeeds
                version, self.synced = None, False
                time.sleep(pause)
                pause = min(5.0, pause * 2)
        self.closed = True

    def _apply(self, event: JsonMapping) -> None:
        """Replaces the table, so that readers in other threads see a complete one."""
        if event["type"] == "BOOKMARK":
            return
        name = event["object"]["metadata"]["name"]
        others = {known: item for known, item in self.items.items() if known != name}
        self.items = others if event["type"] == "DELETED" else {**others, name: event["object"]}
