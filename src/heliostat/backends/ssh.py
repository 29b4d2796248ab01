"""Machines over ssh: one agent a host, started in parallel; the head's host has the cluster's folder.

Nothing has to be installed there but Python with Ray, and nothing stays there when the cluster has ended. An agent outlives
the ssh session that started it, and ends with its cluster.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

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
    by_name,
    require_programs,
)
from heliostat.common.errors import Code, HeliostatError, PartialFailure, UsageError
from heliostat.common.limits import MAX_NODES
from heliostat.common.shell import SAFE
from heliostat.remote.directory import REMOTE_ROOT, UNSAFE, pack
from heliostat.remote.ssh import connect
from heliostat.remote.transport import map_concurrently
from heliostat.state.states import NodeState

if TYPE_CHECKING:
    from heliostat.config.members import Member
    from heliostat.config.spec import ClusterSpec
    from heliostat.config.tables import Host
    from heliostat.remote.transport import Completed, Transport

N = NodeState
START_S = 60.0  # for an agent to say its first word
STOP_S = 60.0
ASK_S = 20.0


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
    autoscales: ClassVar[bool] = False
    most_nodes: ClassVar[int] = MAX_NODES
    takes_options: ClassVar[bool] = False
    reserved_short_options: ClassVar[tuple[str, ...]] = ()
    poll_interval: ClassVar[tuple[float, float]] = (0.5, 10.0)
    questions: ClassVar[Mapping[str, Question]] = by_name(
        Question("ssh", "the `ssh` command is here", "install OpenSSH's client")
    )

    def checks(self, spec: ClusterSpec | None, host: Transport) -> list[Check]:
        """What is on the hosts, whoever can send an agent there finds out."""
        try:
            version = host.run(["ssh", "-V"], timeout=ASK_S).err.strip()
        except HeliostatError as error:
            return [self.questions["ssh"].answer(False, str(error))]
        return [self.questions["ssh"].answer(True, version)]

    def nodes_of(self, table: Mapping[str, Any]) -> int | None:
        return None

    def require(self, spec: ClusterSpec, host: Transport) -> None:
        from heliostat.config.members import hosts

        if any(ssh_words(one) for one in hosts(spec)):
            require_programs(("ssh",), "install OpenSSH's client", host)

    def survey(self, options: Any, host: Transport) -> dict[str, Any]:
        return {}

    # -- planning

    def plan(self, request: LaunchRequest) -> Plan:
        from heliostat.remote.start_script import agent_script

        spec = request.spec
        if not spec.machines:
            raise UsageError("there are no `hosts`", hint="hosts: [zinc, ann@copper] in the file")
        files, steps = [], []
        for member in request.members:
            host = member.host
            assert host is not None
            environment = host.environment or spec.environment
            script = agent_script(
                environment, Path("agent.pyz"), "node", python=request.options.python,
                comment=f"heliostat: the node `{member.name}` of `{spec.cluster_name}`; its config comes on standard input",
            )  # fmt: skip
            path = _place(request, member.name) / f"start-{member.name}.sh"
            files.append(File(path, script.render(), 0o700))
            config = {
                **self._config(request, member),
                "env": {**request.config["env"], **environment.env, **host.env},
            }
            steps.append(Step((*ssh_words(host), "bash", path.as_posix()), (member.name,), config))
        return Plan(tuple(files), tuple(steps))

    def _config(self, request: LaunchRequest, member: Member) -> dict[str, Any]:
        spec = request.spec
        assert member.host is not None
        place = _place(request, member.name)
        return {
            **request.config,
            "folder": place.as_posix(),
            "token_path": (place / "token").as_posix(),
            "mark": f"{request.config['mark']}-{member.name}",
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

    def launch(self, plan: Plan, request: LaunchRequest, host: Transport) -> Iterator[Handle]:
        """The head first, as far as it takes to know where it listens; then all others at once. A host that cannot be
        reached, or refuses, has a handle too: it says so when it is asked."""
        texts = {file.path.name: file.text.encode() for file in plan.files}
        first, *rest = plan.steps
        head: Mapping[str, Any] | None = request.facts.get("head")
        if first.config["role"] == "head":
            handle = _start(request, first, texts, None)
            yield handle
            head = handle.detail.get("head")
        else:
            rest = [first, *rest]
        if head is None:  # there is nothing to join
            refused = "the head did not start"
            yield from (
                Handle(f"{s.nodes[0]}.none", s.nodes, {**_detail(request, s), "refused": refused})
                for s in rest
            )
            return
        yield from map_concurrently(lambda step: _start(request, step, texts, head), rest)

    def find_orphans(self, mark: str | None, spec: ClusterSpec, host: Transport) -> list[Handle]:
        """An agent outlives whoever started it and died before its id was on record. One whose host cannot be reached ends
        for want of its head. Where nobody has the record, the head's host is asked first: without a head there is no cluster."""
        from heliostat.config.members import hosts, members

        first, *rest = hosts(spec)

        def of(one: Host) -> list[Handle]:
            return _found(one, spec.cluster_name)

        if mark is not None:
            each = map_concurrently(
                lambda member: _stray(member, Path(REMOTE_ROOT) / mark, mark), members(spec)
            )
            return [handle for handle in each if handle]
        heads = of(first)
        if not heads:
            return []
        newest = max(heads, key=lambda handle: handle.detail["since"])
        more = [handle for found in map_concurrently(of, rest) for handle in found]
        return [newest, *(handle for handle in more if handle.detail["id"] == newest.detail["id"])]

    # -- looking

    def observe(self, handles: Sequence[Handle], host: Transport) -> dict[str, Observation]:
        return dict(zip([h.native_id for h in handles], map_concurrently(_ask, handles), strict=True))

    def cancel(self, handles: Sequence[Handle], host: Transport, *, now: bool = False) -> None:
        """Each host ends its own, all at once, and verifies. One that cannot be reached is an error, or with `now` given up:
        what runs there ends when it does not hear its head any more."""
        failed = [one for one in map_concurrently(lambda handle: _stop(handle, now), handles) if one]
        if not failed:
            return
        cause = "; ".join(words for words, _ in failed)[:400]
        if now and not any(reached for _, reached in failed):
            raise PartialFailure(
                "some hosts could not be reached, and are given up",
                cause=cause,
                hint="what runs there ends by itself when it does not hear its head any more",
                code=Code.SSH_HOSTS_LEFT,
            )
        raise HeliostatError(
            "some hosts could not be told to stop",
            cause=cause,
            hint="the same command again, when they can be reached; --now gives them up",
            code=Code.SSH_HOSTS_LEFT,
        )

    def execute(self, node: str, handle: Handle, argv: Sequence[str], host: Transport) -> Completed:
        return connect(handle.detail["ssh"]).run(argv, timeout=RUN_S)

    def collect_logs(self, handles: Sequence[Handle], folder: Path) -> list[str]:
        from heliostat.remote.directory import RemoteDirectory
        from heliostat.state.store import ClusterDirectory

        def one(handle: Handle) -> str:
            target = connect(handle.detail["ssh"])
            try:
                mirror = RemoteDirectory(ClusterDirectory(folder), target, Path(handle.detail["folder"]))
                work = mirror.collect_and_remove(_stop_request(handle, now=True), handle.detail)
            except (HeliostatError, OSError, ValueError) as error:
                there = "refused" not in handle.detail
                return f"the logs of {handle.nodes[0]} stay on {target.target}: {error}" if there else ""
            told = work and handle.detail["role"] == "head"
            return f"what the command wrote is on {target.target} in ~/{work}" if told else ""

        return [note for note in map_concurrently(one, handles) if note]

    def reach(self, handle: Handle, host: Transport) -> Transport:
        return connect(handle.detail["ssh"])


def ssh_words(host: Host | None) -> tuple[str, ...]:
    """What one would type: `ssh -p 22 -i key -J jump user@host`. Nothing: it is this machine."""
    from heliostat.config.tables import HERE

    assert host is not None
    if host.host in HERE:
        return ()
    options = [("-p", host.port), ("-i", host.key), ("-J", host.jump), ("-l", host.user)]
    return ("ssh", *(str(word) for pair in options if pair[1] for word in pair), host.host)


def _place(request: LaunchRequest, node: str) -> Path:
    """A folder a node, also where the machines share their homes; the order's own is the head's."""
    return request.folder.parent / node


def _detail(request: LaunchRequest, step: Step) -> dict[str, Any]:
    member = next(m for m in request.members if m.name == step.nodes[0])
    return {
        "ssh": list(ssh_words(member.host)),
        "folder": _place(request, step.nodes[0]).as_posix(),
        "mark": step.config["mark"],
        "role": step.config["role"],
    }


def _start(
    request: LaunchRequest, step: Step, texts: Mapping[str, bytes], head: Mapping[str, Any] | None
) -> Handle:
    """One connection: the files go there, the agent is started, its first words come back."""
    node, detail = step.nodes[0], _detail(request, step)
    config = {**step.config, **({"head": dict(head)} if head else {})}
    script = f"start-{node}.sh"
    # the command's folder is the head's alone
    mine = {n: d for n, d in request.files.items() if detail["role"] == "head" or not n.endswith(".zip")}
    files = {script: texts[script], f"config-{node}.json": json.dumps(config).encode(), **mine}
    words = [node, step.config["role"], step.config["mark"]]
    argv = ["sh", "-c", SAFE + _SWEEP + _START, "sh", detail["folder"], *words]
    try:
        done = connect(detail["ssh"]).run(argv, input=pack(files), timeout=START_S + 30)
        answer = json.loads(done.out.strip().splitlines()[-1])
    except HeliostatError as error:
        refused = f"{error.cause or error.message}; {error.hint}"
        return Handle(f"{node}.none", step.nodes, {**detail, "refused": refused})
    except (ValueError, IndexError):
        lines = [line.strip() for line in done.err.splitlines() if line.strip() and "tar: E" not in line]
        said = (lines or ["its agent ended without a word"])[-1][:300]
        if "/bin/activate" in said:
            said += " (`heliostat setup` makes it)"
        return Handle(f"{node}.none", step.nodes, {**detail, "refused": said})
    return _handle(node, {**detail, "head": answer["head"]}, answer["words"])


def _handle(node: str, detail: Mapping[str, Any], words: Mapping[str, Any]) -> Handle:
    """words: what the agent said of itself."""
    who = {key: words.get(key) for key in ("pid", "start", "temp", "executable")}
    return Handle(f"{node}.{words['pid']}.{words['start']}", (node,), {**detail, **who})


def _found(host: Host, cluster: str) -> list[Handle]:
    """What this host has of clusters of this name; nothing where it cannot be asked."""
    node, found = host.node, []
    try:
        done = connect(ssh_words(host)).run(
            ["sh", "-c", SAFE + _FIND, "sh", REMOTE_ROOT, node], timeout=ASK_S
        )
        for line in done.out.splitlines():
            config, words = json.loads(line)
            if config["cluster"] == cluster and words.get("pid"):
                detail = {
                    "ssh": list(ssh_words(host)),
                    "folder": config["folder"],
                    "mark": config["mark"],
                    "role": config["role"],
                }
                more = {"id": config["id"], "launch": config["launch"], "since": words["since"]}
                more["kind"] = "run" if config.get("command") else "up"
                found.append(_handle(node, {**detail, **more}, words))
    except (HeliostatError, ValueError, KeyError, TypeError):
        pass
    return found


def _stray(member: Member, place: Path, mark: str) -> Handle | None:
    detail: dict[str, Any] = {
        "ssh": list(ssh_words(member.host)),
        "folder": (place / member.name).as_posix(),
        "mark": f"{mark}-{member.name}",
        "role": member.role,
    }
    argv = ["sh", "-c", SAFE + _SWEEP + _STRAY, "sh", detail["folder"], member.name, detail["mark"]]
    try:
        words = json.loads(connect(detail["ssh"]).run(argv, timeout=ASK_S).out)
    except (HeliostatError, ValueError):
        return None
    if not words:
        return Handle(f"{member.name}.none", (member.name,), {**detail, "refused": "it was not started"})
    return _handle(member.name, detail, words)


def _ask(handle: Handle) -> Observation:
    if "refused" in handle.detail:
        return Observation(N.FAILED, handle.detail["refused"])
    detail = handle.detail
    argv = ["sh", "-c", SAFE + _LOOK, "sh", detail["folder"], handle.nodes[0], str(detail["pid"])]
    try:
        done = connect(detail["ssh"]).run(argv, timeout=ASK_S)
        if done.code == UNSAFE:
            return Observation(N.UNKNOWN, done.err.strip()[-300:])
        started, _, words = done.out.partition("\n")
        said = json.loads(words) if words.strip() else {}
    except HeliostatError as error:
        return Observation(N.UNKNOWN, f"{error.message}: {error.cause}")
    except ValueError:
        return Observation(N.UNKNOWN, f"a strange answer: {done.out[:100]}")
    lives = started == detail["start"]
    return Observation(N.ALLOCATED if lives else N.GONE, "", report=said)


def _stop(handle: Handle, now: bool) -> tuple[str, bool] | None:
    """Words when it could not be done, and whether the host was reached."""
    detail = handle.detail
    if "refused" in detail:
        return None
    target = connect(detail["ssh"])
    try:
        done = target.run(
            ["sh", "-c", SAFE + _STOP, "sh", detail["folder"], detail["executable"]],
            input=_stop_request(handle, now).encode(),
            timeout=STOP_S + 60,
        )
        answer = json.loads(done.out)
    except HeliostatError as error:
        return f"{handle.nodes[0]}: {error.cause or error.message}", False
    except ValueError:
        return f"{handle.nodes[0]}: {done.err.strip()[-200:]}", True
    return None if answer.get("ok") else (f"{handle.nodes[0]}: still there: {answer.get('left')}", True)


def _stop_request(handle: Handle, now: bool) -> str:
    node = {key: handle.detail.get(key) for key in ("pid", "start", "mark", "temp")}
    return json.dumps({"nodes": [node], "now": now, "seconds": STOP_S})


# ends whatever has this mark: it was started by one who died before it was on record
_SWEEP = """
sweep() {
  for i in 1 2 3 4 5 6 7 8 9; do
    p=$(grep -lzsxF -- "HELIOSTAT_NODE=$1" /proc/[0-9]*/environ | tr -dc '0-9\\n')
    [ "$p" ] || break
    kill -9 $p; sleep 0.2
  done
}
"""
# $1: the cluster's folder below the home; $2: the node; $3: its role; $4: its mark. On standard input: a tar of the files.
_START = """
umask 077
safe . >/dev/null && mkdir -p -- "$1/logs/$2" "$1/nodes" && cd -- "$1" && safe . >/dev/null || exit 1
[ -e "start-$2.sh" ] && sweep "$4"
tar -xf - || exit 1
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
# $1: where clusters are; $2: the node. A line each: its config, and its own words
_FIND = """
cd -- "$1" 2>/dev/null || exit 0
for d in */"$2"; do
  [ -s "$d/config-$2.json" ] && [ -s "$d/nodes/$2.json" ] || continue
  safe "./$d" "config-$2.json" nodes "nodes/$2.json" >/dev/null || continue
  printf '[%s, %s]\\n' "$(tr -d '\\n' <"$d/config-$2.json")" "$(tr -d '\\n' <"$d/nodes/$2.json")"
done
"""
# $3: its mark. The words of the node that was started there; one that has not said any is ended here
_STRAY = """
cd -- "$1" 2>/dev/null || exit 0
safe . >/dev/null || exit 1
[ -s "nodes/$2.json" ] || sweep "$3"
cat "nodes/$2.json" 2>/dev/null || echo '{}'
"""
# $3: a process. First line: when it started, as the kernel counts; then the node's own words
_LOOK = """
cd -- "$1" 2>/dev/null || { echo gone; exit 0; }
safe . >/dev/null || exit 9
f="nodes/$2.json"
s=$(cat "/proc/$3/stat" 2>/dev/null); s=${s##*) }
set -- $s
case $1 in Z|"") echo gone ;; *) echo "${20}" ;; esac
cat "$f" 2>/dev/null
"""

# $1: the cluster's folder below the home; $2: the Python of its agent. On standard input: the request
_STOP = """
cd -- "$1" 2>/dev/null || { echo '{"ok": true}'; exit 0; }
safe . agent.pyz >/dev/null || exit 9
exec "$2" agent.pyz stop
"""

BACKEND = OverSsh()
