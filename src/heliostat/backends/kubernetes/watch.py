"""One RayCluster or RayJob and its pods, as the API server last told: asked once, or watched by whoever goes on looking."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping
from typing import Any

from heliostat.backends.kubernetes import api as kube
from heliostat.common.errors import HeliostatError, Refused

AGAIN_S = 10.0  # whoever looks twice within so long goes on looking, and is told of changes
WARNINGS_S = 2.0
Object = Mapping[str, Any]


class Cluster:
    def __init__(
        self, api: kube.Api, namespace: str, plural: str, name: str, uid: str, mark: str | None = None
    ) -> None:
        self.mark = mark  # the id in the label of all that is made for it
        self.api, self.namespace, self.plural, self.name, self.uid = api, namespace, plural, name, uid
        self.place = f"{kube.RAY}/namespaces/{namespace}/{plural}"
        self.path = f"{self.place}/{name}"
        self.token: str | None = None
        self.asks_token = True
        self._ray: str | None = name if plural == "rayclusters" else None
        # of its RayCluster; KubeRay makes that of a RayJob anew, under its name, where somebody deletes it
        self._ray_uids = {uid} if plural == "rayclusters" else set()
        self._looked = -AGAIN_S
        self._watches: list[_Watch] = []
        self._warned: tuple[float, list[Object]] = (-WARNINGS_S, [])

    # -- what it is

    def ray_name(self, made: Object) -> str | None:
        """The RayCluster's; that of a RayJob has one of its own, once the operator has chosen it."""
        if self._ray is None:
            self._ray = (made.get("status") or {}).get("rayClusterName") or None
        return self._ray

    def ray_spec(self, made: Object) -> Object:
        spec: Object = made.get("spec") or {}
        return spec if self.plural == "rayclusters" else spec.get("rayClusterSpec") or {}

    def authenticated(self, made: Object) -> bool:
        self.asks_token = (self.ray_spec(made).get("authOptions") or {}).get("mode") == "token"
        return self.asks_token

    def service(self, made: Object) -> str:
        status = made.get("status") or {}
        head = (status if self.plural == "rayclusters" else status.get("rayClusterStatus") or {}).get("head")
        return str((head or {}).get("serviceName") or f"{self.ray_name(made)}-head-svc")

    # -- asking

    def fetch(self) -> Object | None:
        """The object itself; None: it is gone, or another has its name."""
        try:
            made = self.api.call("GET", self.path)
        except kube.NotThere:
            return None
        return self._mine(made)

    def _mine(self, made: Object | None) -> Object | None:
        if made is None or made["metadata"]["uid"] != self.uid:
            return None
        self.ray_name(made)
        kind = {"rayclusters": "RayCluster", "rayjobs": "RayJob"}[self.plural]
        return {"kind": kind, **made}

    def exists(self) -> bool:
        """The RayCluster of a RayJob, which may be gone before its job is."""
        try:
            found = self.api.call("GET", f"{kube.RAY}/namespaces/{self.namespace}/rayclusters/{self._ray}")
        except kube.NotThere:
            return False
        uid = str(found["metadata"]["uid"])
        if self.uid not in (uid, *owners(found)):
            return False
        if uid not in self._ray_uids:
            self._ray_uids.add(uid)
            self.token = None  # each has its own
        return True

    def _own(self, pods: Iterable[Object]) -> list[Object]:
        """The pods whose owner is our RayCluster: pods of another cluster of that name have the same label.

        A RayJob's RayCluster may be gone before we have seen its uid. Its name is the operator's choice and does not come
        back, so what has its label then was its own."""
        found = list(pods)
        strange = [pod for pod in found if not self._ray_uids.intersection(owners(pod))]
        if self.plural == "rayjobs" and strange and not self.exists() and not self._ray_uids:
            return found
        return [pod for pod in found if self._ray_uids.intersection(owners(pod))]

    def delete_pod(self, name: str, **options: Any) -> None:
        """Deletes one pod of ours, known by its uid."""
        path = f"/api/v1/namespaces/{self.namespace}/pods/{name}"
        pod = self.api.call("GET", path)
        if not self._own([pod]):
            raise kube.NotThere(f"`{name}` is not a pod of `{self.name}`", details=path)
        self.api.delete(path, str(pod["metadata"]["uid"]), **options)

    @property
    def _pods(self) -> tuple[str, dict[str, str]]:
        return f"/api/v1/namespaces/{self.namespace}/pods", {"labelSelector": f"ray.io/cluster={self._ray}"}

    def list_pods(self) -> list[Object]:
        if self._ray is None:
            return []
        path, query = self._pods
        return self._own(self.api.call("GET", path, query=query)["items"])

    def remaining_pods(self) -> list[Object]:
        """Its pods, also where the object itself is gone: a machine that does not answer keeps them.

        Of a RayJob that is gone nobody can ask which RayCluster it had. Its pods have our label; those of a copy that somebody
        made of it have that too, but a RayCluster that lives and is not ours."""
        if self._ray or not self.mark:
            return self.list_pods()
        query = {"labelSelector": f"{kube.LABEL}={self.mark}"}
        clusters = self.api.call("GET", f"{kube.RAY}/namespaces/{self.namespace}/rayclusters", query=query)
        others = {one["metadata"]["uid"] for one in clusters["items"] if self.uid not in owners(one)}
        pods = self.api.call("GET", f"/api/v1/namespaces/{self.namespace}/pods", query=query)["items"]
        return [pod for pod in pods if not others.intersection(owners(pod))]

    def look(self) -> tuple[Object | None, list[Object]]:
        """(the object, its pods)."""
        again, self._looked = self.in_view, time.monotonic()
        if any(watch.closed for watch in self._watches):
            self.close()
        if len(self._watches) == 2 and all(watch.synced for watch in self._watches):
            first, pods = self._watches
            return self._mine(first.items.get(self.name)), self._own(pods.items.values())
        made = self.fetch()
        found = (made, self.list_pods() if made else [])
        if again and made and self._ray and not self._watches:
            path, query = self._pods
            self._watches = [
                _Watch(self, self.place, {"fieldSelector": f"metadata.name={self.name}"}),
                _Watch(self, path, query),
            ]
        return found

    def warnings(self) -> list[Object]:
        """Events of type Warning about it, the newest last."""
        at, known = self._warned
        if time.monotonic() - at < WARNINGS_S:
            return known
        found = []
        for name in dict.fromkeys(filter(None, (self.name, self._ray))):
            query = {"fieldSelector": f"involvedObject.name={name}"}
            try:
                listed = self.api.call("GET", f"/api/v1/namespaces/{self.namespace}/events", query=query)
            except Refused:  # without them we only know less
                continue
            # they outlive what they speak of by an hour, and its name comes back; that of a RayJob's cluster does not
            mine = [
                e for e in listed["items"] if name != self.name or e["involvedObject"].get("uid") == self.uid
            ]
            found += [event for event in mine if event.get("type") == "Warning"]
        found.sort(key=_time)
        self._warned = (time.monotonic(), found)
        return found

    @property
    def in_view(self) -> bool:
        """Somebody goes on looking."""
        return time.monotonic() - self._looked < AGAIN_S

    def stale(self) -> None:
        """We have just changed it: what was told before may be older than that."""
        self.close()
        self._looked = -AGAIN_S

    def close(self) -> None:
        for watch in self._watches:
            watch.closed = True
        self._watches = []


def owners(made: Object) -> list[str]:
    """The uids of the objects that own this one."""
    return [str(owner["uid"]) for owner in made["metadata"].get("ownerReferences") or ()]


def _time(event: Object) -> str:
    series = event.get("series") or {}
    times = (series.get("lastObservedTime"), event.get("lastTimestamp"), event.get("eventTime"))
    return str(next(filter(None, times), ""))


class _Watch(threading.Thread):
    """Keeps the objects of one kind up to date, until it is closed; and closes when it would have to ask again for somebody
    who looks no more: a notebook goes on for days."""

    def __init__(self, cluster: Cluster, path: str, query: Mapping[str, str]) -> None:
        super().__init__(daemon=True)
        self.cluster, self.api, self.path, self.query = cluster, cluster.api, path, query
        self.items: dict[str, Object] = {}
        self.synced = self.closed = False
        self.start()

    def run(self) -> None:
        version, pause = None, 0.2
        while not self.closed and self.cluster.in_view:
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
            except HeliostatError:  # silence, a no, or too long ago: whoever looks asks for himself meanwhile
                version, self.synced = None, False
                time.sleep(pause)
                pause = min(5.0, pause * 2)
        self.closed = True

    def _apply(self, event: Mapping[str, Any]) -> None:
        """A new table each time: whoever reads has a whole one."""
        if event["type"] == "BOOKMARK":
            return
        name = event["object"]["metadata"]["name"]
        rest = {known: item for known, item in self.items.items() if known != name}
        self.items = rest if event["type"] == "DELETED" else {**rest, name: event["object"]}
