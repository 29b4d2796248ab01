"""How a cluster is reached: its backend, the host that runs the backend's commands, its directory on another host."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeGuard

from heliostat.agent.protocol import Request
from heliostat.backends.base import Backend, Handle, Platform
from heliostat.cluster.view import head_of
from heliostat.common.documents import JsonMapping
from heliostat.state.records import Record
from heliostat.state.store import ClusterDirectory, Store

if TYPE_CHECKING:
    from heliostat.config.spec import ClusterSpec
    from heliostat.remote.directory import RemoteDirectory
    from heliostat.remote.ssh import Ssh
    from heliostat.remote.transport import Transport


class BackendRegistry(Protocol):
    """Finds backends by name; the package `heliostat.backends` is one."""

    def names(self) -> list[str]: ...

    def load(self, backend: str) -> Backend: ...


class Access:
    """Knows for each cluster its backend, its host and its remote directory."""

    def __init__(self, store: Store, transport: Transport, registry: BackendRegistry) -> None:
        self.store, self.transport, self.registry = store, transport, registry
        self._mirrors: dict[str, RemoteDirectory] = {}  # by cluster id, since a name can be used again
        self._collected: set[str] = set()  # ids of clusters whose remote files are all on this machine

    # -- backends and hosts

    def backend(self, record: Record) -> Backend:
        return self.registry.load(record.backend)

    def platform(self, record: Record) -> Platform | None:
        """The backend, if it starts Ray itself."""
        backend = self.backend(record)
        return backend if _is_platform(backend) else None

    def gateway(self, table: JsonMapping) -> Ssh | None:
        """The host that the backend's table names in `via`; None: the backend is reached from this machine."""
        via = table.get("via")
        if not via:
            return None
        from heliostat.remote.ssh import connect_to

        return connect_to(via)

    def host_for(self, spec: ClusterSpec) -> Transport:
        """The host on which the commands of the spec's backend run."""
        return self.gateway(spec.backend_tables.get(spec.on, {})) or self.transport

    def host_of(self, record: Record) -> Transport:
        """The host on which the commands of the cluster's backend run."""
        return self._gateway_of(record) or self.transport

    def _gateway_of(self, record: Record) -> Ssh | None:
        return self.gateway(record.spec.get(record.backend) or {})

    # -- directories

    def cluster_dir(self, spec: ClusterSpec, cluster_id: str) -> ClusterDirectory:
        """The cluster's directory, as the agents see it."""
        gateway, backend = self.gateway(spec.backend_tables.get(spec.on, {})), self.registry.load(spec.on)
        if gateway is None and (backend.shares_files or not backend.starts_ray):
            return ClusterDirectory(self.store.clusters / spec.cluster_name)
        from heliostat.remote.directory import REMOTE_ROOT

        if gateway is not None:
            return ClusterDirectory(gateway.home / REMOTE_ROOT / cluster_id)
        from heliostat.config.members import head_member

        # Where each host has its own files, the path is relative to the home directory there. Each node has a directory,
        # since hosts may share a home; the head's is that of the cluster.
        return ClusterDirectory(Path(REMOTE_ROOT) / cluster_id / head_member(spec).name)

    def mirror(
        self, folder: ClusterDirectory, record: Record, node: str | None = None
    ) -> RemoteDirectory | None:
        """The cluster's remote directory or, where each host has its own, that of this node. None: it is on this machine."""
        if record.remote_dir is None or self.is_collected(record) or self.is_archived(folder):
            return None
        from heliostat.remote.directory import STATE_FILES, RemoteDirectory

        gateway = self._gateway_of(record)
        if gateway is not None:
            if record.id not in self._mirrors:
                self._mirrors[record.id] = RemoteDirectory(folder, gateway, Path(record.remote_dir))
            return self._mirrors[record.id]
        head = head_of(record).name
        handle = self._started_handle(record, head)
        if handle is None:
            return None  # no agent was started yet
        key = record.id
        if node not in (None, head) and (of_node := self._started_handle(record, str(node))):
            handle, key = of_node, f"{record.id}-{node}"
        if key not in self._mirrors and (remote := self.backend(record).remote_dir(handle)):
            files = STATE_FILES if key == record.id else ()
            self._mirrors[key] = RemoteDirectory(folder, *remote, handle.detail, files)
        return self._mirrors[key]

    def _started_handle(self, record: Record, node: str) -> Handle | None:
        """The handle of this node, if the node has a directory on its own host."""
        backend = self.backend(record)
        handles = (Handle.from_json(one) for one in record.handles if node in one["nodes"])
        return next((handle for handle in handles if backend.remote_dir(handle)), None)

    def open_mirror(self, record: Record) -> RemoteDirectory | None:
        """The cluster's remote directory, if this object has used it before."""
        return self._mirrors.get(record.id)

    def send_request(self, folder: ClusterDirectory, request: Request) -> None:
        """Writes a request for the head's agent into the cluster's directory."""
        (self.mirror(folder, folder.record()) or folder).add_request(request)

    def is_archived(self, folder: ClusterDirectory) -> bool:
        return folder.path.parent == self.store.ended

    def is_collected(self, record: Record) -> bool:
        """Whether the remote files of an ended cluster are on this machine."""
        return record.id in self._collected

    def mark_collected(self, record: Record) -> None:
        self._collected.add(record.id)


def _is_platform(backend: Backend) -> TypeGuard[Platform]:
    return not backend.starts_ray
