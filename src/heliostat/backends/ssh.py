"""Machines over ssh: one agent a host, started in parallel; the head's host has the cluster's folder.

Nothing has to be installed there but Python with Ray, and nothing stays there when the cluster has ended. An agent outlives
the ssh session that started it, and ends with its cluster.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from heliostat.backends.base import Check, File, Handle, Observation, Order, Plan, Step
from heliostat.errors import HeliostatError, UsageError
from heliostat.mirror import pack
from heliostat.ssh import far
from heliostat.states import NodeState

if TYPE_CHECKING:
    from heliostat.spec import ClusterSpec, Host, Member
    from heliostat.transport import Completed, Transport

N = NodeState
A = TypeVar("A")
B = TypeVar("B")
AT_ONCE = 32  # connections at a time
START_S = 60.0  # for an agent to say its first word
STOP_S = 60.0
ASK_S = 20.0
RUN_S = 86400.0
HERE = ("this machine", "localhost")  # no ssh to the machine that one is on


@dataclass(frozen=True)
class Options:
    """The `ssh:` table of the file."""

    python: str = field(
        default="python3", metadata={"help": "the Python of hosts whose environment names none"}
    )


class OverSsh:
    name: ClassVar[str] = "ssh"
    Options: ClassVar[type] = Options
    starts_ray: ClassVar[bool] = True
    shares_files: ClassVar[bool] = False
    takes_options: ClassVar[bool] = False
    letters: ClassVar[tuple[str, ...]] = ()
    pace: ClassVar[tuple[float, float]] = (0.5, 10.0)

    def checks(self, spec: ClusterSpec | None, host: Transport) -> list[Check]:
        from heliostat.spec import hosts

        return _in_parallel(_check, hosts(spec)) if spec and spec.machines else []

    def nodes_of(self, table: Mapping[str, Any]) -> int | None:
        return None

    def survey(self, options: Any, host: Transport) -> dict[str, Any]:
        return {}

    # -- planning

    def plan(self, order: Order) -> Plan:
        from heliostat.script import agent_script

        spec = order.spec
        if not spec.machines:
            raise UsageError("there are no `hosts`", hint="hosts: [zinc, ann@copper] in the file")
        if spec.autoscale is not None:
            raise UsageError(
                "`autoscale` has no meaning on `ssh`", because="these are all the machines there are"
            )
        files, steps = [], []
        for member in order.members:
            host = member.host
            assert host is not None
            environment = host.environment or spec.environment
            script = agent_script(
                environment, Path("agent.pyz"), "node", python=order.options.python,
                comment=f"heliostat: the node `{member.name}` of `{spec.cluster_name}`; its config comes on standard input",
            )  # fmt: skip
            path = _place(order, member.name) / f"start-{member.name}.sh"
            files.append(File(path, script.render(), 0o700))
            config = {
                **self._config(order, member),
                "env": {**order.config["env"], **environment.env, **host.env},
            }
            steps.append(Step((*ssh_words(host), "bash", str(path)), (member.name,), config))
        return Plan(tuple(files), tuple(steps))

    def _config(self, order: Order, member: Member) -> dict[str, Any]:
        spec = order.spec
        assert member.host is not None
        place = _place(order, member.name)
        return {
            **order.config,
            "folder": str(place),
            "token_path": str(place / "token"),
            "mark": f"{order.config['mark']}-{member.name}",
            "node": member.name,
            "role": member.role,
            "address": {"interface": spec.network.interface, "default": "ssh"},
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
        texts = {file.path.name: file.text.encode() for file in plan.files}
        first, *rest = plan.steps
        head: Mapping[str, Any] | None = order.facts.get("head")
        if first.config["role"] == "head":
            handle = _start(order, first, texts, None)
            yield handle
            head = handle.detail.get("head")
        else:
            rest = [first, *rest]
        if head is None:  # there is nothing to join
            refused = "the head did not start"
            yield from (
                Handle(f"{s.nodes[0]}.none", s.nodes, {**_detail(order, s), "refused": refused}) for s in rest
            )
            return
        yield from _in_parallel(lambda step: _start(order, step, texts, head), rest)

    def strays(self, mark: str, table: Mapping[str, Any], host: Transport) -> list[Handle]:
        return []  # what is started is on record at once; a host that was cut off in between ends for want of its head

    # -- looking

    def observe(self, handles: Sequence[Handle], host: Transport) -> dict[str, Observation]:
        seen = dict(zip([h.native_id for h in handles], _in_parallel(_ask, handles), strict=True))
        heads = [seen[h.native_id] for h in handles if h.detail["role"] == "head"]
        if all(
            one.state is N.ALLOCATED for one in heads
        ):  # then the head knows more of a silent host than we do
            for job, one in seen.items():
                if one.state is N.UNKNOWN:
                    seen[job] = replace(one, state=N.ALLOCATED)
        return seen

    def cancel(self, handles: Sequence[Handle], host: Transport, *, now: bool = False) -> None:
        """Each host ends its own, all at once, and verifies."""
        failed = [words for words in _in_parallel(lambda handle: _stop(handle, now), handles) if words]
        if failed:
            raise HeliostatError(
                "some hosts could not be told to stop",
                because="; ".join(failed)[:400],
                hint="their nodes end by themselves when their head is gone; the same command again verifies it",
            )

    def execute(self, node: str, handle: Handle, argv: Sequence[str], host: Transport) -> Completed:
        return far(handle.detail["ssh"]).run(argv, timeout=RUN_S)

    def bring_home(self, handles: Sequence[Handle], folder: Path) -> list[str]:
        from heliostat.mirror import Mirror
        from heliostat.store import ClusterFolder

        def one(handle: Handle) -> str:
            target = far(handle.detail["ssh"])
            try:
                work = Mirror(ClusterFolder(folder), target, Path(handle.detail["folder"])).finish()
            except (HeliostatError, OSError, ValueError) as error:
                there = "refused" not in handle.detail
                return f"the logs of {handle.nodes[0]} stay on {target.target}: {error}" if there else ""
            told = work and handle.detail["role"] == "head"
            return f"what the command wrote is on {target.target} in ~/{work}" if told else ""

        return [note for note in _in_parallel(one, handles) if note]

    def reach(self, handle: Handle, host: Transport) -> Transport:
        return far(handle.detail["ssh"])


def ssh_words(host: Host | None) -> tuple[str, ...]:
    """What one would type: `ssh -p 22 -i key -J jump user@host`. Nothing: it is this machine."""
    assert host is not None
    if host.host in HERE:
        return ()
    options = [("-p", host.port), ("-i", host.key), ("-J", host.jump), ("-l", host.user)]
    return ("ssh", *(str(word) for pair in options if pair[1] for word in pair), host.host)


def _place(order: Order, node: str) -> Path:
    """A folder a node, also where the machines share their homes; the order's own is the head's."""
    return order.folder.parent / node


def _detail(order: Order, step: Step) -> dict[str, Any]:
    member = next(m for m in order.members if m.name == step.nodes[0])
    return {
        "ssh": list(ssh_words(member.host)),
        "folder": str(_place(order, step.nodes[0])),
        "mark": step.config["mark"],
        "role": step.config["role"],
    }


def _start(order: Order, step: Step, texts: Mapping[str, bytes], head: Mapping[str, Any] | None) -> Handle:
    """One connection: the files go there, the agent is started, its first words come back."""
    node, detail = step.nodes[0], _detail(order, step)
    config = {**step.config, **({"head": dict(head)} if head else {})}
    script = f"start-{node}.sh"
    # the command's folder is the head's alone
    mine = {n: d for n, d in order.files.items() if detail["role"] == "head" or not n.endswith(".zip")}
    files = {script: texts[script], f"config-{node}.json": json.dumps(config).encode(), **mine}
    argv = ["sh", "-c", _START, "sh", detail["folder"], node, step.config["role"], step.config["mark"]]
    try:
        done = far(detail["ssh"]).run(argv, input=pack(files), timeout=START_S + 30)
        answer = json.loads(done.out.strip().splitlines()[-1])
    except HeliostatError as error:
        return Handle(
            f"{node}.none", step.nodes, {**detail, "refused": f"{error.what}: {error.because}; {error.hint}"}
        )
    except (ValueError, IndexError):
        words = [line for line in done.err.splitlines() if line.strip()] or [done.saw()]
        return Handle(f"{node}.none", step.nodes, {**detail, "refused": words[-1].strip()[:300]})
    words = answer["words"]
    who = {key: words.get(key) for key in ("pid", "start", "temp", "executable")}
    return Handle(
        f"{node}.{words['pid']}.{words['start']}", step.nodes, {**detail, **who, "head": answer["head"]}
    )


def _ask(handle: Handle) -> Observation:
    if "refused" in handle.detail:
        return Observation(N.FAILED, handle.detail["refused"])
    detail = handle.detail
    argv = ["sh", "-c", _LOOK, "sh", detail["folder"], handle.nodes[0], str(detail["pid"])]
    try:
        done = far(detail["ssh"]).run(argv, timeout=ASK_S)
        started, _, words = done.out.partition("\n")
        said = json.loads(words) if words.strip() else {}
    except HeliostatError as error:
        return Observation(N.UNKNOWN, f"{error.what}: {error.because}")
    except ValueError:
        return Observation(N.UNKNOWN, f"a strange answer: {done.out[:100]}")
    lives = started == detail["start"]
    return Observation(N.ALLOCATED if lives else N.GONE, "", words=said)


def _stop(handle: Handle, now: bool) -> str:
    """Words when it could not be done."""
    detail = handle.detail
    if "refused" in detail:
        return ""
    node = {key: detail.get(key) for key in ("pid", "start", "mark", "temp")}
    request = json.dumps({"nodes": [node], "now": now, "seconds": STOP_S}).encode()
    script = 'cd -- "$1" 2>/dev/null || { echo \'{"ok": true}\'; exit 0; }; exec "$2" agent.pyz stop'
    target = far(detail["ssh"])
    try:
        done = target.run(
            ["sh", "-c", script, "sh", detail["folder"], detail["executable"]],
            input=request,
            timeout=STOP_S + 60,
        )
        answer = json.loads(done.out)
    except HeliostatError as error:
        return f"{handle.nodes[0]}: {error.because or error.what}"
    except ValueError:
        return f"{handle.nodes[0]}: {done.err.strip()[-200:]}"
    return "" if answer.get("ok") else f"{handle.nodes[0]}: still there: {answer.get('left')}"


def _check(host: Host) -> Check:
    """For `doctor`: can it be reached, and what is there?"""
    words = "python3 --version 2>&1; nproc; uname -sr"
    try:
        done = far(ssh_words(host)).run(["sh", "-c", words], timeout=ASK_S)
    except HeliostatError as error:
        return Check(host.node, "fail", f"{error.what}: {error.because}", error.hint)
    return Check(host.node, "ok" if done.code == 0 else "warn", ", ".join(done.out.split("\n")).strip(", "))


def _in_parallel(do: Callable[[A], B], items: Sequence[A]) -> list[B]:
    if not items:
        return []
    with ThreadPoolExecutor(min(AT_ONCE, len(items))) as pool:
        return list(pool.map(do, items))


# $1: the cluster's folder below the home; $2: the node; $3: its role; $4: its mark. On standard input: a tar of the files.
_START = """
umask 077
mkdir -p -- "$1/logs/$2" "$1/nodes" && cd -- "$1" && tar -xf - || exit 1
rm -f -- "nodes/$2.json"; [ "$3" = head ] && rm -f head.json
HELIOSTAT_NODE=$4 setsid nohup bash "start-$2.sh" <"config-$2.json" >>"logs/$2/agent.log" 2>&1 &
pid=$! i=0
while [ $i -lt 600 ]; do
  if [ -s "nodes/$2.json" ]; then [ "$3" != head ] || [ -s head.json ] && break; fi
  kill -0 $pid 2>/dev/null || break
  sleep 0.1; i=$((i + 1))
done
[ -s "nodes/$2.json" ] || { tail -n 3 "logs/$2/agent.log" >&2; exit 1; }
head=null; [ -s head.json ] && head=$(tr -d '\\n' <head.json)
printf '{"words": %s, "head": %s}\\n' "$(tr -d '\\n' <"nodes/$2.json")" "$head"
"""
# $3: a process. First line: when it started, as the kernel counts; then the node's own words
_LOOK = """
cd -- "$1" 2>/dev/null || { echo gone; exit 0; }
f="nodes/$2.json"
s=$(cat "/proc/$3/stat" 2>/dev/null); s=${s##*) }
set -- $s
case $1 in Z|"") echo gone ;; *) echo "${20}" ;; esac
cat "$f" 2>/dev/null
"""

BACKEND = OverSsh()
