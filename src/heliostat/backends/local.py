"""This computer: N Ray nodes side by side, each with its own ports and folder, on a loopback address."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

from heliostat.backends.base import (
    RUN_S,
    Check,
    File,
    Handle,
    LaunchRequest,
    Observation,
    Plan,
    Question,
    Step,
)
from heliostat.common.errors import Code, HeliostatError, UsageError
from heliostat.common.limits import MAX_LOCAL_NODES
from heliostat.common.processes import process_start
from heliostat.common.shell import wrap_in_shell
from heliostat.state.ownership import require_safe
from heliostat.state.states import NodeState

if TYPE_CHECKING:
    from heliostat.config.spec import ClusterSpec
    from heliostat.remote.transport import Completed, Spawner, Transport

STOP_S = 60.0
# by its path: `python -m` would look for it in the current directory first, which may be anybody's
OWN_AGENT = Path(__file__).parents[1] / "agent"


@dataclass(frozen=True)
class Options:
    """`local:` has no keys of its own."""


class Local:
    name: ClassVar[str] = "local"
    Options: ClassVar[type] = Options
    starts_ray: ClassVar[bool] = True
    shares_files: ClassVar[bool] = True
    autoscales: ClassVar[bool] = False
    most_nodes: ClassVar[int] = MAX_LOCAL_NODES
    takes_options: ClassVar[bool] = False
    reserved_short_options: ClassVar[tuple[str, ...]] = ()
    poll_interval: ClassVar[tuple[float, float]] = (0.0, 0.0)  # looking at a process costs nothing
    questions: ClassVar[Mapping[str, Question]] = {}  # this computer is looked at for everybody

    def checks(self, spec: ClusterSpec | None, host: Transport) -> list[Check]:
        return []

    def nodes_of(self, table: Mapping[str, Any]) -> int | None:
        return None

    def require(self, spec: ClusterSpec, host: Transport) -> None:
        """The agent runs with the Python that runs this, or says itself what it lacks."""

    def survey(self, options: Any, host: Transport) -> dict[str, Any]:
        return {}

    def plan(self, request: LaunchRequest) -> Plan:
        from heliostat.config.members import members
        from heliostat.remote.start_script import agent_script

        spec = request.spec
        if (spec.hosts or spec.head.host) and "on" not in spec.model_fields_set:
            raise UsageError(
                "`hosts` has no meaning on `local`",
                cause="the nodes are all on this computer, and the file names no site",
                hint="on: ssh",
            )
        comment = f"heliostat: one node of `{spec.cluster_name}` on this computer; its config comes on standard input"
        script = agent_script(spec.environment, request.agent, "node", comment=comment)
        path = request.folder / "script.sh"
        # the nodes share the machine; one that comes later gets what the first ones got
        everybody = {member.name: place for place, member in enumerate(members(spec))}
        if len(everybody) > self.most_nodes:
            raise UsageError(
                f"{len(everybody)} nodes are too many for one computer",
                cause=f"each is a Ray node of about ten processes; {self.most_nodes} are the most",
                hint="--nodes 4",
            )
        steps = []
        for member in request.members:
            share = everybody.get(member.name, 0)
            config = {
                **request.config,
                "mark": f"{request.config['mark']}-{member.name}",
                "node": member.name,
                "role": member.role,
                "address": {"interface": spec.network.interface, "default": "loopback"},
                "share": [share, len(everybody)],
                "resources": {
                    "cpus": member.cpus,
                    "gpus": member.gpus,
                    "memory": member.memory,
                    "object_store": spec.object_store,
                    "custom": member.resources,
                    "labels": member.labels,
                },
            }
            steps.append(Step(("bash", str(path)), (member.name,), config))
        return Plan((File(path, script.render(), 0o700),), tuple(steps))

    def launch(self, plan: Plan, request: LaunchRequest, host: Transport) -> Iterator[Handle]:
        for step in plan.steps:
            logs = request.folder / "logs" / step.nodes[0]
            logs.mkdir(mode=0o700, parents=True, exist_ok=True)
            # the mark from the first moment on: what the set-up lines start must be found too
            mark = {"HELIOSTAT_NODE": step.config["mark"]}
            spawned = cast("Spawner", host).spawn(
                step.argv, log=logs / "agent.log", cwd=request.folder, env=mark
            )
            detail = {
                "pid": spawned.pid,
                "start": spawned.start,
                "mark": step.config["mark"],
                "folder": str(request.folder),
            }
            yield Handle(f"{spawned.pid}.{spawned.start}", step.nodes, detail)
            spawned.feed(json.dumps(step.config).encode())

    def find_orphans(self, mark: str | None, spec: ClusterSpec, host: Transport) -> list[Handle]:
        return []  # whoever gets no config on standard input ends

    def observe(self, handles: Sequence[Handle], host: Transport) -> dict[str, Observation]:
        return {
            handle.native_id: Observation(
                NodeState.ALLOCATED
                if handle.detail["start"] and process_start(handle.detail["pid"]) == handle.detail["start"]
                else NodeState.GONE
            )
            for handle in handles
        }

    def cancel(self, handles: Sequence[Handle], host: Transport, *, now: bool = False) -> None:
        if not handles:
            return
        folder = Path(handles[0].detail["folder"])
        nodes = [{**handle.detail, "temp": _temp(folder, handle.nodes[0])} for handle in handles]
        request = json.dumps({"nodes": nodes, "now": now, "seconds": STOP_S}).encode()
        agent = folder / "agent.pyz"
        if not agent.exists():  # an earlier `down` needed its room on a full disk
            agent = OWN_AGENT
        else:
            require_safe(agent)
        done = host.run([sys.executable, str(agent), "stop"], input=request, timeout=STOP_S + 60)
        try:
            answer = json.loads(done.out)
        except ValueError:
            answer = {}
        if not answer.get("ok"):
            left = ", ".join(map(str, answer.get("left", []))) or "unknown"
            raise HeliostatError(
                "some processes could not be stopped",
                cause=f"still there: {left}" if "left" in answer else done.err.strip()[-300:],
                details=done.describe(),
                code=Code.LOCAL_PROCESSES_LEFT,
            )

    def execute(self, node: str, handle: Handle, argv: Sequence[str], host: Transport) -> Completed:
        return host.run(wrap_in_shell(argv), timeout=RUN_S)

    def collect_logs(self, handles: Sequence[Handle], folder: Path) -> list[str]:
        return []  # it is here already

    def reach(self, handle: Handle, host: Transport) -> Transport:
        return host


def _temp(folder: Path, node: str) -> str | None:
    """The private folder that the node's agent wrote down."""
    try:
        words = json.loads((folder / "nodes" / f"{node}.json").read_bytes())
    except (OSError, ValueError):
        return None
    return str(words.get("temp") or "") or None


BACKEND = Local()
