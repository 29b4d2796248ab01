"""The backend `local`: several Ray nodes on this host, each with its own ports and directory, on a loopback address."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, cast

from heliostat.backends.base import (
    RUN_S,
    Backend,
    File,
    Handle,
    LaunchRequest,
    Observation,
    Plan,
    Step,
)
from heliostat.backends.detection import ENVIRONMENT, IDLE, Detected, output_of, spec_line
from heliostat.common.errors import Code, HeliostatError, UsageError
from heliostat.common.limits import MAX_LOCAL_NODES
from heliostat.common.processes import process_start
from heliostat.common.shell import wrap_in_shell
from heliostat.common.units import count
from heliostat.state.ownership import require_safe
from heliostat.state.states import NodeState

if TYPE_CHECKING:
    from heliostat.remote.transport import Completed, Spawner, Transport

STOP_S = 60.0
# a path, because `python -m` would import from the current directory first, which another user may control
AGENT_PACKAGE = Path(__file__).parents[1] / "agent"


@dataclass(frozen=True)
class Options:
    """The `local:` table of the file. It has no keys."""


class Local(Backend):
    name: ClassVar[str] = "local"
    Options: ClassVar[type] = Options
    is_this_host: ClassVar[bool] = True
    most_nodes: ClassVar[int] = MAX_LOCAL_NODES
    poll_interval: ClassVar[tuple[float, float]] = (0.0, 0.0)  # a query only reads /proc

    def detect(self, machine: Transport, home: Path, environ: Mapping[str, str]) -> Detected:
        gpus = output_of(machine, ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]).splitlines()
        lines = [spec_line("nodes: 1", "in all, the head included")]
        if gpus:
            lines.append(spec_line(f"gpus_per_node: {len(gpus)}", ", ".join(dict.fromkeys(gpus))))
        cpus = count(os.cpu_count() or 1, "CPU")
        return Detected(f"this computer, {cpus}, {count(len(gpus), 'GPU')}", (*lines, *ENVIRONMENT, IDLE))

    def plan(self, request: LaunchRequest) -> Plan:
        from heliostat.config.members import members
        from heliostat.remote.start_script import agent_script

        spec = request.spec
        comment = (
            f"heliostat: one node of `{spec.cluster_name}` on this host; its config comes on standard input"
        )
        script = agent_script(spec.environment, request.agent, "node", comment=comment)
        path = request.folder / "script.sh"
        # the nodes share the host's resources; a node that is added later gets the share of the first
        indices = {member.name: index for index, member in enumerate(members(spec))}
        if len(indices) > self.most_nodes:
            raise UsageError(
                f"{len(indices)} nodes are too many for one host",
                cause=f"each node has about ten processes; the limit is {self.most_nodes} nodes",
                hint="--nodes 4",
            )
        steps = []
        for member in request.members:
            config = {
                **request.config,
                "mark": f"{request.config['mark']}-{member.name}",
                "node": member.name,
                "role": member.role,
                "address": {"interface": spec.network.interface, "default": "loopback"},
                "share": [indices.get(member.name, 0), len(indices)],
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
            # set from the start, so that processes of the setup lines can be found too
            env = {"HELIOSTAT_NODE": step.config["mark"]}
            spawned = cast("Spawner", host).spawn(
                step.argv, log=logs / "agent.log", cwd=request.folder, env=env
            )
            detail = {
                "pid": spawned.pid,
                "start": spawned.start,
                "mark": step.config["mark"],
                "folder": str(request.folder),
            }
            yield Handle(f"{spawned.pid}.{spawned.start}", step.nodes, detail)
            # only after the handle is recorded: without a config the agent exits, so there are no orphans
            spawned.feed(json.dumps(step.config).encode())

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
        nodes = [
            {**handle.detail, "temp": _read_temp_directory(folder, handle.nodes[0])} for handle in handles
        ]
        request = json.dumps({"nodes": nodes, "now": now, "seconds": STOP_S}).encode()
        agent = folder / "agent.pyz"
        if not agent.exists():  # an earlier `down` deleted it because the disk was full
            agent = AGENT_PACKAGE
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
                cause=f"still running: {left}" if "left" in answer else done.err.strip()[-300:],
                details=done.describe(),
                code=Code.LOCAL_PROCESSES_LEFT,
            )

    def execute(self, node: str, handle: Handle, argv: Sequence[str], host: Transport) -> Completed:
        return host.run(wrap_in_shell(argv), timeout=RUN_S)


def _read_temp_directory(folder: Path, node: str) -> str | None:
    """The node's private temporary directory, from its agent's report."""
    try:
        report = json.loads((folder / "nodes" / f"{node}.json").read_bytes())
    except (OSError, ValueError):
        return None
    return str(report.get("temp") or "") or None


BACKEND = Local()
