"""Creates the record and the directory of a cluster; adopts a running cluster whose record is not on this machine."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping

import yaml

from heliostat.agent.protocol import CommandConfig
from heliostat.cluster import planner
from heliostat.cluster.access import Access
from heliostat.cluster.view import View
from heliostat.common.documents import JsonMapping, JsonObject
from heliostat.common.errors import HeliostatError
from heliostat.common.events import Emit, Event
from heliostat.common.units import format_duration
from heliostat.config.members import hosts, members
from heliostat.config.spec import ClusterSpec
from heliostat.remote import tls
from heliostat.state.records import NodeRecord, Record
from heliostat.state.states import ClusterState
from heliostat.state.store import ClusterDirectory


class Creator:
    def __init__(self, access: Access, emit: Emit) -> None:
        self._access, self._emit = access, emit
        self._store = access.store
        self._created = ""  # the id of the cluster that was created last

    def create(
        self,
        spec: ClusterSpec,
        command: CommandConfig | None,
        cluster_id: str | None = None,
        secret_files: Mapping[str, str | bytes] | None = None,
    ) -> ClusterDirectory:
        """Creates the cluster's directory with all its files at once, so that another command can continue with it.

        cluster_id, secret_files: of a cluster that runs already. Raises FileExistsError if the name is in use."""
        given = planner.spec_json(spec)
        now, cluster_id = time.time(), cluster_id or secrets.token_hex(8)
        directory = self._access.cluster_dir(spec, cluster_id).path
        record = Record(
            name=spec.cluster_name,
            id=cluster_id,
            remote_dir=directory.as_posix() if directory.parent != self._store.clusters else None,
            backend=spec.on,
            kind="run" if command else "up",
            created=now,
            spec=given,
            nodes={m.name: NodeRecord(m.name, m.role, m.group, since=now) for m in members(spec)},
            command=command,
        )
        event = {"at": now, "kind": "note", "text": f"requested on {record.backend}"}
        files: dict[str, str | bytes] = {
            "agent.pyz": planner.agent_archive(),
            "spec.yaml": yaml.safe_dump(given, sort_keys=False),
            "events.jsonl": json.dumps(event) + "\n",
        }
        if spec.security.auth == "token":
            files["token"] = secrets.token_hex(32)
        if spec.security.tls and not secret_files:
            files.update(tls.make(cluster_id))
        self._created = record.id
        return self._store.create(record, {**files, **(secret_files or {})})

    def is_own(self, folder: ClusterDirectory) -> bool:
        """Whether the cluster in this directory was created here: another cluster may have its name by now."""
        try:
            return folder.record().id == self._created
        except HeliostatError:
            return False

    def adopt(self, spec: ClusterSpec) -> ClusterDirectory | None:
        """Records a cluster of this name that runs on the spec's hosts and was started from another machine, or before the
        store of this machine was lost. None: there is none."""
        backend = self._access.registry.load(spec.on)
        if backend.starts_ray and not spec.hosts:
            return None
        found = backend.find_orphans(None, spec, self._access.transport)
        if not found:
            return None
        head, name = found[0].detail, spec.cluster_name
        self._emit(Event("note", f"`{name}` runs on its hosts without a record on this machine: adopting it"))
        files = {}
        if spec.security.auth == "token" and (remote := backend.remote_dir(found[0])):
            host, directory = remote
            for secret in ("token", *(tls.FILES if spec.security.tls else ())):
                files[secret] = host.read(directory / secret)
        folder = self.create(spec, None, head["id"], files)
        with folder.lock():
            record = folder.record()
            record.created, record.kind = float(head["since"]), head["kind"]
            record.launches = max(int(handle.detail["launch"]) for handle in found)
            for handle in found:
                for name in handle.nodes:
                    node = record.nodes.setdefault(name, NodeRecord(name, "worker"))
                    node.handle, node.launch = handle.native_id, int(handle.detail["launch"])
                record.handles.append(handle.to_json())
            folder.save(record)
        return folder

    def record_hosts(self, folder: ClusterDirectory, spec: ClusterSpec) -> bool:
        """Adds the hosts of the spec that the record does not have. False: the spec differs in something else."""
        if not spec.hosts:
            return False
        with folder.lock():
            record = folder.record()
            old = planner.spec_of(record)
            used = [member.host for member in members(old) if member.name in record.nodes]
            new = [m for m in members(spec) if m.name not in record.nodes]
            same = _without_hosts(old) == _without_hosts(spec) and hosts(old)[0] == hosts(spec)[0]
            if record.kind != "up" or record.target != "up" or not same:
                return False
            if not all(host in hosts(spec)[: spec.nodes] for host in used):
                return False
            if new:
                record.spec = planner.spec_json(spec)
                for member in new:
                    record.nodes[member.name] = NodeRecord(member.name, member.role, since=time.time())
                names = ", ".join(member.name for member in new)
                folder.append({"at": time.time(), "kind": "note", "text": f"hosts added: {names}"})
                folder.save(record)
        return True

    def check_name(self, name: str) -> None:
        """Raises HeliostatError for a directory without a record: it is not a cluster's, or is damaged."""
        directory = self._store.clusters / name
        if self._store.find(name) is None and directory.exists():
            raise HeliostatError(
                f"the name `{name}` cannot be used",
                cause="its directory has no record",
                details=str(directory),
                hint="move that directory away, or choose another name with --name",
            )


def check_same_spec(view: View, spec: ClusterSpec, command: CommandConfig | None) -> None:
    """Raises HeliostatError unless the existing cluster is the one that the spec describes."""
    record = view.record
    is_same_kind = command is None and record.kind == "up" and record.target == "up"
    # a suspended cluster keeps the size that `scale` gave it
    compared = _without_sizes if view.state is ClusterState.SUSPENDED else dict
    if is_same_kind and compared(record.spec) == compared(planner.spec_json(spec)):
        return
    age = format_duration(max(0.0, time.time() - record.created))
    cause = f"a cluster of that name on `{record.backend}` is {view.state}, started {age} ago"
    if is_same_kind:
        cause += ", with another spec"
    raise HeliostatError(
        f"the name `{record.name}` is in use",
        cause=cause,
        hint=f"heliostat down {record.name}, or choose another name with --name",
    )


def _without_hosts(spec: ClusterSpec) -> JsonObject:
    return {key: value for key, value in planner.spec_json(spec).items() if key not in ("hosts", "nodes")}


def _without_sizes(spec: JsonMapping) -> JsonObject:
    groups = {name: {**group, "nodes": None} for name, group in (spec.get("groups") or {}).items()}
    return {**spec, "nodes": None, "groups": groups}
