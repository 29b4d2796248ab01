"""Base of the cloud backends: Ray's launcher creates the head, and the autoscaler on the head creates the workers.

Each operation of the launcher is a separate process (`heliostat.backends.cloud.launcher`). A cluster's state has three sources:
that process, the cloud's list of instances with the cluster's tag, and Ray's node table, read over ssh.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

from heliostat.backends.base import (
    RUN_S,
    Check,
    Handle,
    LaunchRequest,
    Observation,
    Plan,
    Platform,
    PlatformStatus,
    Question,
    Step,
    by_name,
    require_programs,
)
from heliostat.backends.cloud import access, operations
from heliostat.backends.cloud import files as render
from heliostat.backends.cloud import state as cloud_state
from heliostat.backends.cloud.files import Json
from heliostat.backends.cloud.state import ANSWER, ENDED, INSTANCES, LOG, NODE_TIMEOUT_S, OBSERVED, PROCESS
from heliostat.backends.overrides import merge
from heliostat.common.documents import JsonMapping, JsonObject
from heliostat.common.errors import Code, HeliostatError, UsageError
from heliostat.remote.transport import Local
from heliostat.state.files import read_json, write_atomic
from heliostat.state.states import NodeState

if TYPE_CHECKING:
    from heliostat.config.members import Member
    from heliostat.config.spec import ClusterSpec
    from heliostat.remote.ssh import Ssh
    from heliostat.remote.transport import Completed, Spawner, Transport
    from heliostat.state.records import NodeRecord

N = NodeState
# between two requests to the cloud: while nodes start, and while all nodes are ready
STARTING_POLL_S, STEADY_POLL_S = 3.0, 15.0


class CloudBackend(Platform):
    """A cloud. A subclass renders its part of Ray's file: `provider` and `node`."""

    packages: ClassVar[Mapping[str, str]]  # required module: its name for pip
    poll_interval: ClassVar[tuple[float, float]] = (2.0, 15.0)

    def __init__(self) -> None:
        self._keepalive_times: dict[str, int] = {}

    # -- different for each cloud

    def provider(self, options: Any) -> Json:
        raise NotImplementedError

    def node(self, options: Any, member: Member) -> tuple[Json, Json]:
        """(node_config, resources) of a node type in Ray's file."""
        raise NotImplementedError

    def describe_resources(self, options: Any, name: str, cluster_id: str, folder: Path) -> Json:
        """The objects that `launcher.resources` creates for this cluster only."""
        given = Path(options.key).expanduser() if options.key else None
        key = given or folder / "key"
        return {
            "backend": self.name,
            "name": name,
            "mark": cluster_id,
            "key_file": str(key),
            "key_made": given is None,
        }

    def read_region(self, provider: JsonMapping) -> str:
        return str(provider.get("region") or provider.get("location") or "default")

    # -- checks

    questions: ClassVar[Mapping[str, Question]] = by_name(
        Question("ssh", "the `ssh` command is installed", "install ssh on this computer"),
        Question("rsync", "the `rsync` command is installed", "install rsync on this computer"),
        Question(
            "packages", "the cloud's Python packages are installed", "pip install 'heliostat[{backend}]'"
        ),
        Question(
            "account",
            "the cloud accepts your credentials and the region",
            "log in with the cloud's own command",
        ),
    )

    def checks(self, spec: ClusterSpec | None, host: Transport) -> list[Check]:
        found = []
        for program in ("ssh", "rsync"):
            argv = [program, "-V"] if program == "ssh" else [program, "--version"]
            try:
                done = host.run(argv, timeout=20)
                version = (done.err or done.out).strip().split("\n")[0]
                found.append(self.questions[program].answer(True, version))
            except HeliostatError as error:
                found.append(self.questions[program].answer(False, str(error)))
        if missing := self._missing_package():
            question = self.questions["packages"]
            return [*found, question.answer(False, f"no module `{missing}`", backend=self.name)]
        found.append(self.questions["packages"].answer(True, ", ".join(self.packages)))
        try:
            answer = self._check_account(self._make_minimal_config(spec), None, host)
            found.append(self.questions["account"].answer(True, str(answer["found"])))
        except (HeliostatError, KeyError, ValueError, TypeError) as error:
            cause = getattr(error, "cause", "") or str(error)
            hint = getattr(error, "hint", "") or None
            found.append(self.questions["account"].answer(False, cause, hint=hint))
        return found

    def _make_minimal_config(self, spec: ClusterSpec | None) -> Json:
        table = dict(spec.backend_tables.get(self.name, {})) if spec else {}
        given = table.get("launcher_yaml")
        provider = given["provider"] if given else self.provider(self.Options(**table))
        return {"cluster_name": "none", "provider": provider}

    def _check_account(self, config: Json, directory: Path | None, host: Transport) -> Json:
        operation = {"do": "check", "config": config}
        return operations.run_operation(self.name, operation, directory, host, operations.REQUEST_TIMEOUT_S)

    def _missing_package(self) -> str | None:
        import importlib.util

        for package in self.packages:
            try:
                is_installed = importlib.util.find_spec(package) is not None
            except (ImportError, ValueError):
                is_installed = False
            if not is_installed:
                return package
        return None

    def require(self, spec: ClusterSpec, host: Transport) -> None:
        if missing := self._missing_package():
            raise UsageError(
                f"a Python package for `{self.name}` is missing",
                cause=f"no module `{missing}`",
                hint=self.questions["packages"].hint.format(backend=self.name),
                code=Code.CLOUD_MISSING_PACKAGE,
            )
        require_programs(("ssh", "rsync"), "install it on this computer", host)

    def plan(self, request: LaunchRequest) -> Plan:
        render.check_request(request, self.name)
        config = self.make_config(request)
        owned, name = None, render.ray_name(request)
        if request.options.launcher_yaml is None:
            owned = self.describe_resources(request.options, name, request.config["mark"], request.folder)
        operation = {"do": "create", "config": config, "own": owned, "wait_s": request.options.wait}
        notes = render.cost_notes(request)
        files = render.render_files(request, config, notes, self.packages)
        names = tuple(member.name for member in request.members)
        return Plan(
            files,
            (Step((request.python, "-m", "heliostat.backends.cloud.launcher"), names, operation),),
            notes,
        )

    def make_config(self, request: LaunchRequest) -> Json:
        """Ray's file for this cluster."""
        options = request.options
        if options.launcher_yaml is not None:
            return render.adopt_launcher_yaml(request, options.launcher_yaml)
        nodes = {}
        for kind, type_options, least, most, member in render.list_node_types(request):
            node, resources = self.node(type_options, member)
            nodes[kind] = {
                "node_config": merge(node, type_options.node),
                **({"resources": resources} if resources else {}),
                **({"labels": dict(member.labels)} if member.labels else {}),
                **(
                    {"min_workers": least, "max_workers": most}
                    if member.role == "worker"
                    else {"max_workers": 0}
                ),
            }
        return render.make_config(request, self.provider(options), nodes)

    # -- starting

    def launch(self, plan: Plan, request: LaunchRequest, host: Transport) -> Iterator[Handle]:
        """Yields the handle before the launch: the cluster's tag finds all instances that are created later."""
        (step,) = plan.steps
        config, folder = step.config["config"], request.folder
        detail = {
            "config": config,
            "own": step.config["own"],
            "folder": str(folder),
            "home": render.remote_dir(request),
            "instances": render.read_instance_types(config),
            "groups": render.map_groups(request, config),
            "ray": render.ray_version(request.spec),
            "auth": request.spec.security.auth,
            "dashboard": render.dashboard_port(config),
            "ends": bool(request.spec.idle.timeout or request.spec.time),
            "elastic": request.spec.has_autoscaling,
        }
        name = f"{self.name}/{self.read_region(config['provider'])}/{config['cluster_name']}"
        self._check_account(config, folder, host)  # reports missing packages, credentials or regions at once
        yield Handle(name, step.nodes, detail)
        for old in (ANSWER, INSTANCES, OBSERVED, ENDED):
            (folder / old).unlink(missing_ok=True)
        log = folder / "logs" / "head" / LOG
        log.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # unbuffered, so that the lines of ssh and of the launcher keep their order
        spawned = cast("Spawner", host).spawn(step.argv, log=log, cwd=folder, env={"PYTHONUNBUFFERED": "1"})
        write_atomic(folder / PROCESS, json.dumps({"pid": spawned.pid, "start": spawned.start}))
        operation = {**step.config, "temp": str(folder / "tmp"), "answer": str(folder / ANSWER)}
        spawned.feed(json.dumps(operation).encode())

    def find_orphans(self, cluster_id: str | None, spec: ClusterSpec, host: Transport) -> list[Handle]:
        return []  # no instance is created before the handle is recorded

    # -- observation

    def observe(self, handles: Sequence[Handle], host: Transport) -> dict[str, Observation]:
        """Whether the cloud answers; `platform_status` has the states of the nodes."""
        return {handle.native_id: self._observe(handle, host) for handle in handles}

    def _observe(self, handle: Handle, host: Transport) -> Observation:
        if cloud_state.read_launcher_status(handle)[0] == "done":
            try:
                operations.observe_instances(self.name, handle, host, STEADY_POLL_S)
            except HeliostatError as error:
                return Observation(N.UNKNOWN, f"{error.message}: {error.cause}")
        return Observation(N.ALLOCATED)

    def platform_status(
        self, handle: Handle, members: Sequence[NodeRecord], before: JsonMapping, host: Transport
    ) -> PlatformStatus:
        operation, failure = cloud_state.read_launcher_status(handle)
        is_steady = bool(before) and all(one.get("state") == N.READY for one in before.values())
        seen, named, head, table = self._observe_nodes(
            handle, members, before, host, STEADY_POLL_S if is_steady else STARTING_POLL_S
        )
        if is_steady and not {one.get("internal_ip") for one in named.values()} <= (table or {}).keys():
            # a node changed: the cached instances are out of date
            seen, named, head, table = self._observe_nodes(handle, members, before, host, 0)
        nodes = {}
        for name, role, group in cloud_state.list_nodes(handle, members, named):
            state, reason = cloud_state.resolve_state(
                named.get(name), role, operation, failure, table, before.get(name) or {}, seen
            )
            if state is N.GONE and role != "head" and name not in {member.name for member in members}:
                continue  # the autoscaler added and removed it
            one = named.get(name) or {}
            if state is N.READY:
                instance, spot = handle.detail["instances"].get(one.get("type")) or ("instance", False)
                reason = f"{instance}, spot" if spot else instance
            status = {"state": str(state), "reason": reason, "role": role, "group": group}
            nodes[name] = {**status, "ip": one.get("internal_ip"), "host": one.get("id"), "id": one.get("id")}
        self._forward_keepalive(handle, head)
        # a single slow answer of the dashboard keeps the connection
        was_up = any(
            one.get("role") == "head" and one.get("state") in (N.READY, N.LOST) for one in before.values()
        )
        known = head is not None and (table is not None or was_up)
        return PlatformStatus(nodes, cloud_state.make_connection(handle, head) if head and known else None)

    def _observe_nodes(
        self,
        handle: Handle,
        nodes: Sequence[NodeRecord],
        before: JsonMapping,
        host: Transport,
        max_age_s: float,
    ) -> tuple[Json, dict[str, Json], Json | None, JsonObject | None]:
        """(answer of the cloud, instances by node name, the head's instance, Ray's node table)."""
        operation = cloud_state.read_launcher_status(handle)[0]
        try:
            seen = operations.observe_instances(self.name, handle, host, max_age_s)
        except HeliostatError:
            if operation == "done":
                raise
            seen = {"nodes": [], "ended": ""}  # the launcher reports the cause
        named = cloud_state.name_instances(handle, seen["nodes"], nodes, before)
        cloud_state.write_instances(handle, named)
        head = next((one for one in named.values() if one["role"] == "head"), None)
        table = self._read_node_table(handle, head) if head and operation != "failed" else None
        return seen, named, head, table

    def _read_node_table(self, handle: Handle, head: JsonMapping) -> JsonObject | None:
        """Ray's nodes by address; None if Ray does not answer."""
        from heliostat.remote.ray_client import RayApi

        if head.get("status") != "up-to-date" and cloud_state.read_launcher_status(handle)[0] != "done":
            return None
        try:
            host, port = access.connect_node(handle, head).forward("127.0.0.1", handle.detail["dashboard"])
            api = RayApi(host, port, cloud_state.read_token(handle), name=handle.native_id)
            return {str(node["ip"]): node for node in api.nodes()}
        except (HeliostatError, KeyError, ValueError, TypeError):
            return None

    def _forward_keepalive(self, handle: Handle, head: JsonMapping | None) -> None:
        """Touches `keepalive` on the head when the user has touched it in the cluster's local directory."""
        try:
            stamp = (Path(handle.detail["folder"]) / "keepalive").stat().st_mtime_ns
        except OSError:
            return
        if head and self._keepalive_times.get(handle.native_id) != stamp:
            with contextlib.suppress(HeliostatError):
                argv = ["touch", f"{handle.detail['home']}/keepalive"]
                access.connect_node(handle, head).run(argv, timeout=NODE_TIMEOUT_S)
                self._keepalive_times[handle.native_id] = stamp

    # -- access

    def reach(self, handle: Handle, host: Transport) -> Transport:
        head = access.find_head(handle)
        if head is None:
            found = operations.observe_instances(self.name, handle, host, STARTING_POLL_S)["nodes"]
            head = next((one for one in found if one["role"] == "head"), None)
        if head is None:
            raise HeliostatError(
                f"`{handle.native_id}` has no head", hint="heliostat status", code=Code.CLUSTER_NOT_READY
            )
        return access.connect_node(handle, head)

    def execute(self, node: str, handle: Handle, argv: Sequence[str], host: Transport) -> Completed:
        transport = access.connect_node(handle, access.find_node(handle, node))
        return transport.run(_in_environment(handle, argv), timeout=RUN_S)

    def attached(
        self, node: str, handle: Handle, argv: Sequence[str], host: Transport, *, terminal: bool
    ) -> list[str]:
        transport = access.connect_node(handle, access.find_node(handle, node))
        return transport.attached(_in_environment(handle, argv), terminal=terminal)

    def logs(
        self, handle: Handle, node: str, status: JsonMapping, known: Mapping[str, int], host: Transport
    ) -> dict[str, bytes]:
        """New bytes of the node's logs; the launcher writes its log to the local directory."""
        try:
            transport = access.connect_node(handle, access.find_node(handle, node))
            return cloud_state.fetch_logs(transport, handle.detail["home"], known)
        except (HeliostatError, KeyError, ValueError):
            return {}

    # -- changes

    def resize(self, handle: Handle, workers: Mapping[str | None, int], host: Transport) -> None:
        """Changes the worker counts in the autoscaler's file on the head."""
        config = handle.detail["config"]
        counts = {}
        for group, count in workers.items():
            known = [
                kind
                for kind, name in handle.detail["groups"].items()
                if name == group and kind != render.HEAD
            ]
            if not known:
                raise UsageError(f"unknown group `{group}`", hint="heliostat status")
            kind = known[0]
            most = int(config["available_node_types"][kind].get("max_workers") or 0)
            counts[kind] = [count, max(count, most) if handle.detail["elastic"] else count]
        access.set_worker_counts(handle, cast("Ssh", self.reach(handle, host)), counts, 60)
        operations.discard_observation(handle)

    def limited_command(self, handle: Handle, argv: Sequence[str], host: Transport) -> Sequence[str]:
        return argv  # the agent on the head enforces the time limit

    def started_job(self, handle: Handle, job: str, host: Transport) -> None:
        """Records the job on the head; the agent there terminates the cluster after it."""
        path = Path(handle.detail["home"]) / "job"
        cast("Ssh", self.reach(handle, host)).put(path, job.encode())

    def suspend(self, handle: Handle, host: Transport) -> None:
        raise UsageError(
            f"a cluster on `{self.name}` cannot be suspended",
            cause="a stopped instance loses Ray's state, and its disk still costs money",
            hint="heliostat down, and up again",
        )

    def resume(self, handle: Handle, host: Transport) -> None:
        """Does nothing: a cluster in a cloud cannot be suspended."""

    def replace_node(self, handle: Handle, node: str, status: JsonMapping, host: Transport) -> None:
        if status.get("role") == "head":
            raise UsageError("the head cannot be replaced alone", hint="heliostat restart, without --node")
        instance = access.find_node(handle, node)["id"]
        operation = {"do": "terminate_instances", "config": handle.detail["config"], "ids": [instance]}
        directory = Path(handle.detail["folder"])
        operations.run_operation(self.name, operation, directory, host, operations.REQUEST_TIMEOUT_S)
        operations.discard_observation(handle)

    # -- termination

    def cancel(self, handles: Sequence[Handle], host: Transport, *, now: bool = False) -> None:
        for handle in handles:
            cloud_state.stop_launcher(handle)
            access.stop_autoscaling(handle)
            operations.terminate(self.name, handle, host)

    def collect_logs(self, handles: Sequence[Handle], folder: Path) -> list[str]:
        """Removes objects that a cluster which terminated itself had no permission to remove."""
        notes = []
        for handle in handles:
            answer = read_json(folder / ENDED)
            if answer is None:
                try:
                    answer = operations.terminate(self.name, handle, Local())
                except HeliostatError as error:
                    notes.append(f"objects that were created for the cluster remain: {error}")
                    continue
            removed = ", ".join(answer.get("removed") or ())
            notes += [f"removed: {removed}"] if removed else []
            notes += answer.get("stays") or ()
        return notes


def _in_environment(handle: Handle, argv: Sequence[str]) -> list[str]:
    """The command in the environment of the node's jobs."""
    return ["bash", "-c", '. "./$0" && exec "$@"', f"{handle.detail['home']}/env.sh", *argv]
