"""Machines over ssh: one agent a host, started in parallel; the head's host has the cluster's folder.

Nothing has to be installed there but Python with Ray, and nothing stays there when the cluster has ended. An agent outlives
the ssh session that started it, and ends with its cluster.
"""

from __future__ import annotations

import base64
import io
import json
import tarfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from heliostat.backends.base import Check, File, Handle, Observation, Order, Plan, Step
from heliostat.errors import HeliostatError, PartlyDone, UsageError
from heliostat.states import NodeState
from heliostat.transport import Local, Transport

if TYPE_CHECKING:
    from heliostat.spec import ClusterSpec, Host, Member
    from heliostat.ssh import Ssh

N = NodeState
T = TypeVar("T")
AT_ONCE = 32  # connections at a time
START_S = 60.0  # for an agent to say its first word
STOP_S = 60.0
HERE = ("this machine", "localhost")  # no ssh to the machine that one is on
PLACE = ".heliostat/ssh"  # below the home of the user there


@dataclass(frozen=True)
class Options:
    """The `ssh:` table of the file."""

    python: str = "python3"


class OverSsh:
    name: ClassVar[str] = "ssh"
    Options: ClassVar[type] = Options
    starts_ray: ClassVar[bool] = True
    shares_files: ClassVar[bool] = False
    takes_options: ClassVar[bool] = False
    pace: ClassVar[tuple[float, float]] = (0.5, 10.0)

    def checks(self, spec: ClusterSpec | None, host: Transport) -> list[Check]:
        return _in_parallel(_check, [m.host for m in _members(spec)]) if spec else []

    def survey(self, options: Any, host: Transport) -> dict[str, Any]:
        return {}

    # -- planning

    def plan(self, order: Order) -> Plan:
        from heliostat.script import agent_script

        spec = order.spec
        if not spec.hosts:
            raise UsageError("there are no `hosts`", hint="hosts: [zinc, ann@copper] in the file")
        if spec.autoscale is not None:
            raise UsageError("`autoscale` has no meaning on `ssh`", because="these are all the machines there are")
        files, steps = [], []
        for member in order.members:
            host = member.host
            assert host is not None
            environment = host.environment or spec.environment
            script = agent_script(
                environment, Path("agent.pyz"), "node", python=order.options.python,
                comment=f"heliostat: the node `{member.name}` of `{spec.cluster_name}`; its config comes on standard input",
            )  # fmt: skip
            path = order.folder / f"start-{member.name}.sh"
            files.append(File(path, script.render(), 0o700))
            config = {**self._config(order, member), "env": {**order.config["env"], **environment.env, **host.env}}
            steps.append(Step((*ssh_words(host), "bash", str(path)), (member.name,), config))
        return Plan(tuple(files), tuple(steps))

    def _config(self, order: Order, member: Member) -> dict[str, Any]:
        spec = order.spec
        assert member.host is not None
        return {
            **order.config,
            "mark": f"{order.config['mark']}-{member.name}",
            "node": member.name,
            "role": member.role,
            "address": {"interface": spec.network.interface, "default": "route"},
            "resources": {
                "cpus": member.cpus,
                "leave_cpus": member.host.leave_cpus,
                "gpus": member.gpus,
                "memory": member.memory,
                "object_store": spec.object_store,
                "custom": member.resources,
                "labels": member.labels,
            },
        }

    # -- starting

    def launch(self, plan: Plan, order: Order, host: Transport) -> Iterator[Handle]:
        """The head first, as far as it takes to know where it listens; then all others at once. A host that cannot be
        reached, or refuses, has a handle too: it says so when it is asked."""
        texts = {file.path.name: file.text for file in plan.files}
        hosts = {member.name: member.host for member in order.members}

        def start(step: Step, head: Mapping[str, Any] | None) -> Handle:
            node = step.nodes[0]
            target = _target(hosts[node])
            detail = {"ssh": list(ssh_words(hosts[node])), "folder": str(order.folder), "node": node,
                      "mark": step.config["mark"], "role": step.config["role"]}  # fmt: skip
            config = {**step.config, **({"head": dict(head)} if head else {})}
            files = {"agent.pyz": order.agent.read_bytes(), f"start-{node}.sh": texts[f"start-{node}.sh"].encode(),
                     f"config-{node}.json": json.dumps(config).encode(), **order.facts["files"]}  # fmt: skip
            try:
                done = target.run(["sh", "-c", _START, "sh", str(order.folder), node], input=_tar(files), timeout=START_S + 30)
                answer = json.loads(done.out.strip().splitlines()[-1]) if done.out.strip() else {}
                if done.code or not answer.get("pid"):
                    words = done.err.strip().splitlines() or [done.saw()]
                    return Handle(f"{node}.none", step.nodes, {**detail, "refused": words[-1][:300]})
                return Handle(f"{node}.{answer['pid']}.{answer['start']}", step.nodes, {**detail, **answer})
            except HeliostatError as error:
                return Handle(f"{node}.none", step.nodes, {**detail, "refused": f"{error.what}: {error.because}"})

        first, *rest = plan.steps
        head: Mapping[str, Any] | None = order.facts.get("head")
        if first.config["role"] == "head":
            handle = start(first, None)
            yield handle
            head = handle.detail.get("head")
            if head is None:
                return  # there is nothing to join; whoever looks sees why
        else:
            rest = [first, *rest]
        yield from _in_parallel(lambda step: start(step, head), rest)

    def strays(self, mark: str, table: Mapping[str, Any], host: Transport) -> list[Handle]:
        return []

    # -- looking

    def observe(self, handles: Sequence[Handle], host: Transport) -> dict[str, Observation]:
        seen = dict(zip([h.native_id for h in handles], _in_parallel(_ask, handles), strict=True))
        heads = [seen[h.native_id] for h in handles if h.detail["role"] == "head"]
        if all(o.state is N.ALLOCATED for o in heads):  # then the head knows more of a silent host than we do
            for job, one in seen.items():
                if one.state is N.UNKNOWN:
                    seen[job] = replace(one, state=N.ALLOCATED)
        return seen

    def cancel(self, handles: Sequence[Handle], host: Transport, *, now: bool = False) -> None:
        """Workers and head at once: each host ends its own, and verifies."""
        failed = [words for words in _in_parallel(lambda h: _stop(h, now), handles) if words]
        if failed:
            raise PartlyDone(
                "some hosts could not be told to stop",
                because="; ".join(failed)[:400],
                hint="their nodes end by themselves when their head is gone; the same command again verifies it",
            )

    def reach(self, handle: Handle, host: Transport) -> Transport:
        return Ssh_of(handle)


def ssh_words(host: Host | None) -> tuple[str, ...]:
    """What one would type: `ssh -p 22 -i key -J jump user@host`."""
    assert host is not None
    if host.host in HERE:
        return ()
    options = [("-p", host.port), ("-i", host.key), ("-J", host.jump), ("-l", host.user)]
    return ("ssh", *(str(word) for pair in options if pair[1] for word in pair), host.host)
