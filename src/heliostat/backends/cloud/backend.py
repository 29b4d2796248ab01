"""What the clouds share: Ray's own launcher makes the machines, and the head's autoscaler the workers.

Every operation of the launcher is a process of its own (`heliostat.backends.cloud.launcher`). What is true of the cluster comes from three
parties: that process, the cloud's list of instances that have the cluster's tag, and Ray's own table of nodes, over ssh.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import time
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
    PlatformStatus,
    Question,
    Step,
    by_name,
    require_programs,
)
from heliostat.backends.cloud import files as render
from heliostat.backends.cloud import state as about
from heliostat.backends.cloud.files import Json
from heliostat.backends.cloud.state import ANSWER, ENDED, INSTANCES, LAST_S, LOG, LOOKED, PROCESS
from heliostat.backends.overrides import merge
from heliostat.common.errors import Code, HeliostatError, UsageError
from heliostat.common.limits import MOST_NODES
from heliostat.remote.ssh import connect
from heliostat.remote.transport import Local
from heliostat.state.files import read_json, write_atomic
from heliostat.state.ownership import temp_directory
from heliostat.state.states import NodeState

if TYPE_CHECKING:
    from heliostat.config.spec import ClusterSpec, Member
    from heliostat.remote.ssh import Ssh
    from heliostat.remote.transport import Completed, Spawner, Transport
    from heliostat.state.records import NodeRecord

N = NodeState
LOOK_S = 120.0  # a question to the cloud
SOON_S, LATER_S = 3.0, 15.0  # between two such questions: while something is on its way, and else
END_S = 1200.0


class Launcher:
    """A cloud. A site says how its machines are written in Ray's file: `provider` and `node`."""

    name: ClassVar[str]
    Options: ClassVar[type]
    packages: ClassVar[Mapping[str, str]]  # modules that must be importable, and what pip calls them
    starts_ray: ClassVar[bool] = False
    shares_files: ClassVar[bool] = False
    autoscales: ClassVar[bool] = True
    most_nodes: ClassVar[int] = MOST_NODES
    takes_options: ClassVar[bool] = False
    reserved_short_options: ClassVar[tuple[str, ...]] = ()
    poll_interval: ClassVar[tuple[float, float]] = (2.0, 15.0)

    def __init__(self) -> None:
        self._kept: dict[str, int] = {}

    # -- of each site

    def provider(self, options: Any) -> Json:
        raise NotImplementedError

    def node(self, options: Any, member: Member) -> tuple[Json, Json]:
        """(node_config, resources) of a node, as Ray's file has them."""
        raise NotImplementedError

    def own(self, options: Any, name: str, mark: str, folder: Path) -> Json:
        """What `launching.things` makes for this cluster alone."""
        given = Path(options.key).expanduser() if options.key else None
        key = given or folder / "key"
        return {
            "backend": self.name,
            "name": name,
            "mark": mark,
            "key_file": str(key),
            "key_made": given is None,
        }

    def where(self, provider: Mapping[str, Any]) -> str:
        return str(provider.get("region") or provider.get("location") or "default")

    # -- before anything

    questions: ClassVar[Mapping[str, Question]] = by_name(
        Question("ssh", "the `ssh` command is here", "install ssh on this machine"),
        Question("rsync", "the `rsync` command is here", "install rsync on this machine"),
        Question("packages", "the cloud's Python packages are here", "pip install 'heliostat[{backend}]'"),
        Question(
            "account",
            "the cloud takes your credentials, and knows the region",
            "log in as the cloud's own tool says",
        ),
    )

    def checks(self, spec: ClusterSpec | None, host: Transport) -> list[Check]:
        found = []
        for program in ("ssh", "rsync"):
            argv = [program, "-V"] if program == "ssh" else [program, "--version"]
            try:
                done = host.run(argv, timeout=20)
                said = (done.err or done.out).strip().split("\n")[0]
                found.append(self.questions[program].answer(True, said))
            except HeliostatError as error:
                found.append(self.questions[program].answer(False, str(error)))
        if missing := self._missing_package():
            ask = self.questions["packages"]
            return [*found, ask.answer(False, f"no module `{missing}`", backend=self.name)]
        found.append(self.questions["packages"].answer(True, ", ".join(self.packages)))
        try:
            answer = self._ask({"do": "check", "config": self._any_config(spec)}, None, host, LOOK_S)
            found.append(self.questions["account"].answer(True, str(answer["found"])))
        except (HeliostatError, KeyError, ValueError, TypeError) as error:
            cause = getattr(error, "cause", "") or str(error)
            hint = getattr(error, "hint", "") or None
            found.append(self.questions["account"].answer(False, cause, hint=hint))
        return found

    def _any_config(self, spec: ClusterSpec | None) -> Json:
        table = dict(spec.backend_tables.get(self.name, {})) if spec else {}
        given = table.get("launcher_yaml")
        provider = given["provider"] if given else self.provider(self.Options(**table))
        return {"cluster_name": "none", "provider": provider}

    def nodes_of(self, table: Mapping[str, Any]) -> int | None:
        return None

    def _missing_package(self) -> str | None:
        import importlib.util

        for package in self.packages:
            try:
                there = importlib.util.find_spec(package) is not None
            except (ImportError, ValueError):
                there = False
            if not there:
                return package
        return None

    def require(self, spec: ClusterSpec, host: Transport) -> None:
        if missing := self._missing_package():
            raise UsageError(
                f"`{self.name}` needs a package that is not here",
                cause=f"no module `{missing}`",
                hint=self.questions["packages"].hint.format(backend=self.name),
                code=Code.CLOUD_MISSING_PACKAGE,
            )
        require_programs(("ssh", "rsync"), "install it on this machine", host)

    def survey(self, options: Any, host: Transport) -> Mapping[str, Any]:
        return {}

    def plan(self, request: LaunchRequest) -> Plan:
        render.check(request, self.name)
        config = self.config(request)
        own = None
        if request.options.launcher_yaml is None:
            own = self.own(request.options, render.ray_name(request), request.config["mark"], request.folder)
        operation = {"do": "create", "config": config, "own": own, "wait_s": request.options.wait}
        notes = render.cost_notes(request)
        files = render.files(request, config, notes, self.packages)
        names = tuple(member.name for member in request.members)
        return Plan(
            files,
            (Step((request.python, "-m", "heliostat.backends.cloud.launcher"), names, operation),),
            notes,
        )

    def config(self, request: LaunchRequest) -> Json:
        """Ray's file for this cluster."""
        options = request.options
        if options.launcher_yaml is not None:
            return render.adopt(request, options.launcher_yaml)
        nodes = {}
        for kind, mine, least, most, member in render.kinds(request):
            made, resources = self.node(mine, member)
            nodes[kind] = {
                "node_config": merge(made, mine.node),
                **({"resources": resources} if resources else {}),
                **({"labels": dict(member.labels)} if member.labels else {}),
                **(
                    {"min_workers": least, "max_workers": most}
                    if member.role == "worker"
                    else {"max_workers": 0}
                ),
            }
        return render.whole(request, self.provider(options), nodes)

    # -- starting

    def launch(self, plan: Plan, request: LaunchRequest, host: Transport) -> Iterator[Handle]:
        """The handle first: whatever happens afterwards is found by the cluster's tag."""
        (step,) = plan.steps
        config, folder = step.config["config"], request.folder
        detail = {
            "config": config,
            "own": step.config["own"],
            "folder": str(folder),
            "home": render.home(request),
            "instances": render.instances(config),
            "groups": render.groups(request, config),
            "ray": render.ray_version(request.spec),
            "auth": request.spec.security.auth,
            "dashboard": render.dashboard_port(config),
            "ends": bool(request.spec.idle.timeout or request.spec.time),
            "elastic": request.spec.elastic,
        }
        name = f"{self.name}/{self.where(config['provider'])}/{config['cluster_name']}"
        # who has no packages, no credentials or a wrong region is told so at once
        self._ask({"do": "check", "config": config}, folder, host, LOOK_S)
        yield Handle(name, step.nodes, detail)
        for old in (ANSWER, INSTANCES, LOOKED, ENDED):
            (folder / old).unlink(missing_ok=True)
        log = folder / "logs" / "head" / LOG
        log.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        spawned = cast("Spawner", host).spawn(
            step.argv, log=log, cwd=folder, env={"PYTHONUNBUFFERED": "1"}
        )  # what ssh says comes where it was said
        write_atomic(folder / PROCESS, json.dumps({"pid": spawned.pid, "start": spawned.start}))
        operation = {**step.config, "temp": str(folder / "tmp"), "answer": str(folder / ANSWER)}
        spawned.feed(json.dumps(operation).encode())

    def find_orphans(self, mark: str | None, spec: ClusterSpec, host: Transport) -> list[Handle]:
        return []  # nothing is started before its handle is on record

    def _ask(self, operation: Json, folder: Path | None, host: Transport, seconds: float) -> Json:
        """One operation, to its end. Raises what the cloud said."""
        import tempfile

        with contextlib.ExitStack() as stack:
            if folder and folder.is_dir():
                temp = str(folder / "tmp")
            else:
                made = tempfile.TemporaryDirectory(prefix="hl-", dir=temp_directory())
                temp = stack.enter_context(made)
            # by its path: `python -m` would look for it in the current directory first, which may be anybody's
            argv = [sys.executable, str(Path(__file__).parent / "launcher")]
            done = host.run(argv, input=json.dumps({**operation, "temp": temp}).encode(), timeout=seconds)
        try:
            answer: Json = json.loads(done.out.strip().splitlines()[-1])
        except (ValueError, IndexError):
            lines = [line for line in done.err.splitlines() if line.strip()]
            raise HeliostatError(
                f"Ray's launcher gave no answer for `{self.name}`",
                cause=lines[-1].strip()[:300] if lines else "",
                details=done.saw(),
                code=Code.CLOUD_LAUNCHER,
            ) from None
        if not answer["ok"]:
            raise HeliostatError(
                answer["message"], cause=answer["cause"], hint=answer["hint"], code=answer["code"]
            )
        return answer

    # -- looking

    def observe(self, handles: Sequence[Handle], host: Transport) -> dict[str, Observation]:
        """Whether it can be asked at all: how it is, `tell` tells."""
        return {handle.native_id: self._observe(handle, host) for handle in handles}

    def _observe(self, handle: Handle, host: Transport) -> Observation:
        if about.operation(handle)[0] == "done":
            try:
                self._look(handle, host, LATER_S)
            except HeliostatError as error:
                return Observation(N.UNKNOWN, f"{error.message}: {error.cause}")
        return Observation(N.ALLOCATED)

    def _look(self, handle: Handle, host: Transport, every_s: float = SOON_S) -> Json:
        """The instances of the cluster; asked for not more often than this, by whichever command."""
        detail = handle.detail
        folder = Path(detail["folder"])
        last = read_json(folder / LOOKED) or {"at": 0.0}
        if 0 <= time.time() - last["at"] < every_s:
            answer: Json = last["answer"]
            return answer
        operation = {"do": "look", "config": detail["config"], "own": detail["own"]}
        answer = self._ask(operation, folder, host, LOOK_S)
        with contextlib.suppress(HeliostatError):  # looking works on a full disk
            if folder.is_dir():
                write_atomic(folder / LOOKED, json.dumps({"at": time.time(), "answer": answer}))
        return answer

    def platform_status(
        self, handle: Handle, members: Sequence[NodeRecord], before: Mapping[str, Any], host: Transport
    ) -> PlatformStatus:
        operation, words = about.operation(handle)
        settled = bool(before) and all(one.get("state") == N.READY for one in before.values())
        seen, named, head, table = self._see(handle, members, before, host, LATER_S if settled else SOON_S)
        if settled and not {one.get("internal_ip") for one in named.values()} <= (table or {}).keys():
            seen, named, head, table = self._see(handle, members, before, host, 0)  # something has changed
        nodes = {}
        for name, role, group in about.roll(handle, members, named):
            state, reason = about.judge(
                named.get(name), role, operation, words, table, before.get(name) or {}, seen
            )
            if state is N.GONE and role != "head" and name not in {member.name for member in members}:
                continue  # it came with demand, and went with it
            one = named.get(name) or {}
            if state is N.READY:
                instance, spot = handle.detail["instances"].get(one.get("type")) or ("instance", False)
                reason = f"{instance}, spot" if spot else instance
            told = {"state": str(state), "reason": reason, "role": role, "group": group}
            nodes[name] = {**told, "ip": one.get("internal_ip"), "host": one.get("id"), "id": one.get("id")}
        self._keep_alive(handle, head)
        # a dashboard that is slow for once does not take the address away
        was_up = any(
            one.get("role") == "head" and one.get("state") in (N.READY, N.LOST) for one in before.values()
        )
        known = head is not None and (table is not None or was_up)
        return PlatformStatus(nodes, about.connection(handle, head) if head and known else None)

    def _see(
        self,
        handle: Handle,
        nodes: Sequence[NodeRecord],
        before: Mapping[str, Any],
        host: Transport,
        every_s: float,
    ) -> tuple[Json, dict[str, Json], Json | None, dict[str, Any] | None]:
        """(what the cloud says, its instances by our names, the head's, Ray's table)."""
        operation = about.operation(handle)[0]
        try:
            seen = self._look(handle, host, every_s)
        except HeliostatError:
            if operation == "done":
                raise
            seen = {"nodes": [], "ended": ""}  # the launcher will say why, or has said it
        named = about.names(handle, seen["nodes"], nodes, before)
        about.write_instances(handle, named)
        head = next((one for one in named.values() if one["role"] == "head"), None)
        table = self._table(handle, head) if head and operation != "failed" else None
        return seen, named, head, table

    def _table(self, handle: Handle, head: Mapping[str, Any]) -> dict[str, Any] | None:
        """Ray's nodes by address; None: Ray does not answer, or not yet."""
        from heliostat.remote.ray_client import RayApi

        if head.get("status") != "up-to-date" and about.operation(handle)[0] != "done":
            return None
        try:
            host, port = self._ssh(handle, head).forward("127.0.0.1", handle.detail["dashboard"])
            api = RayApi(host, port, about.token(handle), name=handle.native_id)
            return {str(node["ip"]): node for node in api.nodes()}
        except (HeliostatError, KeyError, ValueError, TypeError):
            return None

    def _keep_alive(self, handle: Handle, head: Mapping[str, Any] | None) -> None:
        """Whoever touches `keepalive` in the cluster's folder here touches it there."""
        try:
            stamp = (Path(handle.detail["folder"]) / "keepalive").stat().st_mtime_ns
        except OSError:
            return
        if head and self._kept.get(handle.native_id) != stamp:
            with contextlib.suppress(HeliostatError):
                self._ssh(handle, head).run(["touch", f"{handle.detail['home']}/keepalive"], timeout=LAST_S)
                self._kept[handle.native_id] = stamp

    # -- the way to a node

    def _ssh(self, handle: Handle, node: Mapping[str, Any]) -> Ssh:
        detail, config = handle.detail, handle.detail["config"]
        answer = read_json(Path(detail["folder"]) / ANSWER) or {}
        auth = {**config["auth"], **(answer.get("auth") or {})}
        key = auth.get("ssh_private_key") or (detail["own"] or {}).get("key_file")
        inside = config["provider"].get("use_internal_ips")
        address = node.get("internal_ip") if inside else node.get("external_ip")
        if not address:
            raise HeliostatError(
                f"`{node.get('id')}` has no address yet",
                hint="try again in a few seconds",
                code=Code.CLUSTER_NOT_READY,
            )
        options = {
            "StrictHostKeyChecking": "accept-new",  # a new machine has a key that nobody can know
            "UserKnownHostsFile": f'"{detail["folder"]}/known_hosts"',
            "HostKeyAlias": str(node["id"]),  # its address may have been another's
            "IdentitiesOnly": "yes" if key else None,
            "ProxyCommand": auth.get("ssh_proxy_command"),
            "LogLevel": "ERROR",
        }
        words = [word for name, value in options.items() if value for word in ("-o", f"{name}={value}")]
        if key:
            words += ["-i", os.path.expanduser(key)]
        return connect(("ssh", *words, "-l", str(auth["ssh_user"]), str(address)))

    def _node(self, handle: Handle, name: str) -> Mapping[str, Any]:
        known = read_json(Path(handle.detail["folder"]) / INSTANCES) or {}
        if name not in known:
            raise HeliostatError(
                f"the node `{name}` has no instance", hint="heliostat status", code=Code.CLUSTER_NOT_READY
            )
        one: Mapping[str, Any] = known[name]
        return one

    def reach(self, handle: Handle, host: Transport) -> Transport:
        known = read_json(Path(handle.detail["folder"]) / INSTANCES) or {}
        head = next((one for one in known.values() if one["role"] == "head"), None)
        if head is None:
            found = self._look(handle, host)["nodes"]
            head = next((one for one in found if one["role"] == "head"), None)
        if head is None:
            raise HeliostatError(
                f"`{handle.native_id}` has no head", hint="heliostat status", code=Code.CLUSTER_NOT_READY
            )
        return self._ssh(handle, head)

    def execute(self, node: str, handle: Handle, argv: Sequence[str], host: Transport) -> Completed:
        """In the environment of the node, as its jobs."""
        script = '. "./$0" && exec "$@"'
        there = self._ssh(handle, self._node(handle, node))
        return there.run(["bash", "-c", script, f"{handle.detail['home']}/env.sh", *argv], timeout=RUN_S)

    def logs(
        self, handle: Handle, node: str, told: Mapping[str, Any], known: Mapping[str, int], host: Transport
    ) -> dict[str, bytes]:
        """What the launcher said is in the head's folder already."""
        try:
            return about.fetch(self._ssh(handle, self._node(handle, node)), handle.detail["home"], known)
        except (HeliostatError, KeyError, ValueError):
            return {}

    # -- changing it

    def resize(self, handle: Handle, workers: Mapping[str | None, int], host: Transport) -> None:
        """The autoscaler on the head reads its file again every few seconds: this changes how many it keeps."""
        config = handle.detail["config"]
        counts = {}
        for group, count in workers.items():
            known = [
                kind
                for kind, name in handle.detail["groups"].items()
                if name == group and kind != render.HEAD
            ]
            if not known:
                raise UsageError(f"there is no group `{group}`", hint="heliostat status")
            kind = known[0]
            most = int(config["available_node_types"][kind].get("max_workers") or 0)
            counts[kind] = [count, max(count, most) if handle.detail["elastic"] else count]
        self._set_counts(handle, cast("Ssh", self.reach(handle, host)), counts, 60)
        (Path(handle.detail["folder"]) / LOOKED).unlink(missing_ok=True)

    def limited_command(self, handle: Handle, argv: Sequence[str], host: Transport) -> Sequence[str]:
        return argv  # the watch on the head has a clock

    def started_job(self, handle: Handle, job: str, host: Transport) -> None:
        """The watch on the head ends the cluster after it, whoever is there to see it."""
        path = Path(handle.detail["home"]) / "job"
        cast("Ssh", self.reach(handle, host)).put(path, job.encode())

    def suspend(self, handle: Handle, host: Transport) -> None:
        raise UsageError(
            f"a cluster on `{self.name}` cannot be suspended",
            cause="a stopped instance keeps its disk, which costs, and loses Ray's state",
            hint="heliostat down, and up again",
        )

    def resume(self, handle: Handle, host: Transport) -> None:
        """Nothing to do: no cluster is suspended."""

    def replace_node(self, handle: Handle, node: str, told: Mapping[str, Any], host: Transport) -> None:
        if told.get("role") == "head":
            raise UsageError("the head cannot be replaced alone", hint="heliostat restart, without --node")
        operation = {"do": "drop", "config": handle.detail["config"], "ids": [self._node(handle, node)["id"]]}
        self._ask(operation, Path(handle.detail["folder"]), host, LOOK_S)
        (Path(handle.detail["folder"]) / LOOKED).unlink(missing_ok=True)

    # -- the end

    def cancel(self, handles: Sequence[Handle], host: Transport, *, now: bool = False) -> None:
        for handle in handles:
            about.end_process(handle)
            self._make_none(handle)
            self._end(handle, host)

    def _end(self, handle: Handle, host: Transport) -> Json:
        detail = handle.detail
        folder = Path(detail["folder"])
        operation = {"do": "end", "config": detail["config"], "own": detail["own"]}
        answer = self._ask(operation, folder, host, END_S)
        (Path(handle.detail["folder"]) / LOOKED).unlink(missing_ok=True)
        if folder.is_dir():
            shutil.rmtree(folder / "tmp", ignore_errors=True)
            for name in (PROCESS, INSTANCES, "known_hosts"):
                (folder / name).unlink(missing_ok=True)
            write_atomic(folder / ENDED, json.dumps(answer))
        return answer

    def _make_none(self, handle: Handle) -> None:
        """As far as it goes: the autoscaler must not make anew what we end."""
        known = read_json(Path(handle.detail["folder"]) / INSTANCES) or {}
        head = next((one for one in known.values() if one["role"] == "head"), None)
        if head and head.get("status") == "up-to-date":
            with contextlib.suppress(HeliostatError, KeyError):
                kinds = handle.detail["config"]["available_node_types"]
                self._set_counts(handle, self._ssh(handle, head), {kind: [0, 0] for kind in kinds}, LAST_S)

    def _set_counts(self, handle: Handle, head: Ssh, counts: Mapping[str, list[int]], seconds: float) -> None:
        """[least, most] of each type, in the file that the autoscaler on the head reads every few seconds."""
        argv = ["bash", "-c", '. "./$0" && exec python3 -c "$1" "$2"', f"{handle.detail['home']}/env.sh"]
        done = head.run([*argv, render.RESIZE, json.dumps(counts)], timeout=seconds)
        if done.code:
            raise HeliostatError(
                "the autoscaler's file could not be changed",
                cause=done.err.strip()[-300:],
                code=Code.CLOUD_LAUNCHER,
            )

    def collect_logs(self, handles: Sequence[Handle], folder: Path) -> list[str]:
        """A cluster that ended itself could not remove what is ours beside its machines: that is done now."""
        notes = []
        for handle in handles:
            answer = read_json(folder / ENDED)
            if answer is None:
                try:
                    answer = self._end(handle, Local())
                except HeliostatError as error:
                    notes.append(f"what was made for it beside its machines stays: {error}")
                    continue
            removed = ", ".join(answer.get("removed") or ())
            notes += [f"removed: {removed}"] if removed else []
            notes += answer.get("stays") or ()
        return notes
