"""The backend `ssh`: one agent per host, started in parallel. The head's host has the cluster's directory.

The hosts need only Python with Ray, and keep no files after the cluster's end. An agent continues after the ssh session that
started it, and exits with its cluster.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from heliostat.agent.protocol import NodeReport
from heliostat.backends.base import (
    RUN_S,
    Backend,
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
from heliostat.common.documents import JsonMapping, JsonObject
from heliostat.common.errors import Code, HeliostatError, PartialFailure, UsageError
from heliostat.common.shell import SAFE
from heliostat.remote.directory import REMOTE_ROOT, UNSAFE, pack
from heliostat.remote.ssh import connect
from heliostat.remote.transport import map_concurrently
from heliostat.state.states import NodeState

if TYPE_CHECKING:
    from heliostat.backends.detection import Detected
    from heliostat.config.members import Member
    from heliostat.config.spec import ClusterSpec
    from heliostat.config.tables import Host
    from heliostat.remote.ssh import Ssh
    from heliostat.remote.transport import Completed, Transport

N = NodeState
START_S = 60.0  # until the first report of an agent
STOP_S = 60.0
QUERY_S = 20.0


@dataclass(frozen=True)
class Options:
    """The `ssh:` table of the file."""

    python: str = field(
        default="python3", metadata={"help": "Python of hosts whose environment does not define one"}
    )


class SshBackend(Backend):
    name: ClassVar[str] = "ssh"
    Options: ClassVar[type] = Options
    shares_files: ClassVar[bool] = False
    lists_hosts: ClassVar[bool] = True
    questions: ClassVar[Mapping[str, Question]] = by_name(
        Question("ssh", "the `ssh` command is installed", "install OpenSSH's client")
    )
    detection_priority: ClassVar[int] = 1
    not_detected: ClassVar[str] = "~/.ssh/config names no host"
    first_step: ClassVar[tuple[str, str]] = ("install Ray on every host", "heliostat setup")

    def detect(self, machine: Transport, home: Path, environ: Mapping[str, str]) -> Detected | None:
        from heliostat.backends.ssh.config_file import detect

        return detect(home / ".ssh" / "config")

    def checks(self, spec: ClusterSpec | None, host: Transport) -> list[Check]:
        """Checks only this host; `doctor` runs the agent's checks on the other hosts."""
        try:
            version = host.run(["ssh", "-V"], timeout=QUERY_S).err.strip()
        except HeliostatError as error:
            return [self.questions["ssh"].answer(False, str(error))]
        return [self.questions["ssh"].answer(True, version)]

    def require(self, spec: ClusterSpec, host: Transport) -> None:
        from heliostat.config.members import hosts

        for one in hosts(spec):
            if one.key and not Path(one.key).expanduser().is_file():
                raise UsageError(
                    f"the key of `{one.host}` is not a file",
                    cause=f"`{one.key}` in `hosts`",
                    hint="key: ~/.ssh/id_ed25519",
                )
        if any(ssh_command(one) for one in hosts(spec)):
            require_programs(("ssh",), "install OpenSSH's client", host)

    # -- planning

    def plan(self, request: LaunchRequest) -> Plan:
        from heliostat.remote.start_script import agent_script

        spec = request.spec
        if not spec.hosts:
            raise UsageError("the spec has no `hosts`", hint="hosts: [zinc, ann@copper] in the file")
        files, steps = [], []
        for member in request.members:
            host = member.host
            assert host is not None
            environment = host.environment or spec.environment
            script = agent_script(
                environment, Path("agent.pyz"), "node", python=request.options.python,
                comment=f"heliostat: the node `{member.name}` of `{spec.cluster_name}`; its config comes on standard input",
            )  # fmt: skip
            path = _node_directory(request, member.name) / f"start-{member.name}.sh"
            files.append(File(path, script.render(), 0o700))
            config = {
                **self._config(request, member),
                "env": {**request.config["env"], **environment.env, **host.env},
            }
            steps.append(Step((*ssh_command(host), "bash", path.as_posix()), (member.name,), config))
        return Plan(tuple(files), tuple(steps))

    def _config(self, request: LaunchRequest, member: Member) -> JsonObject:
        spec = request.spec
        assert member.host is not None
        directory = _node_directory(request, member.name)
        return {
            **request.config,
            "folder": directory.as_posix(),
            "token_path": (directory / "token").as_posix(),
            "mark": f"{request.config['mark']}-{member.name}",
            "node": member.name,
            "role": member.role,
            "address": {"interface": spec.network.interface, "default": "connection"},
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

    # -- launch

    def launch(self, plan: Plan, request: LaunchRequest, host: Transport) -> Iterator[Handle]:
        """Starts the head until its address is known, then all workers in parallel.

        A host that is unreachable or refuses gets a handle too; `observe` reports it as FAILED."""
        texts = {file.path.name: file.text.encode() for file in plan.files}
        first, *workers = plan.steps
        head: JsonMapping | None = request.facts.get("head")
        if first.config["role"] == "head":
            handle = _start(request, first, texts, None)
            yield handle
            head = handle.detail.get("head")
        else:
            workers = [first, *workers]
        if head is None:  # the workers have no head to join
            refused = "the head did not start"
            yield from (
                Handle(f"{s.nodes[0]}.none", s.nodes, {**_detail(request, s), "refused": refused})
                for s in workers
            )
            return
        yield from map_concurrently(lambda step: _start(request, step, texts, head), workers)

    def find_orphans(self, cluster_id: str | None, spec: ClusterSpec, host: Transport) -> list[Handle]:
        """An agent continues if `launch` dies before its handle is recorded. An agent on an unreachable host exits when it
        loses its head. Without a cluster id, queries the head's host first: without a head there is no cluster."""
        from heliostat.config.members import hosts, members

        head_host, *worker_hosts = hosts(spec)

        def find(one: Host) -> list[Handle]:
            return _find_clusters(one, spec.cluster_name)

        if cluster_id is not None:
            root = Path(REMOTE_ROOT) / cluster_id
            orphans = map_concurrently(lambda member: _find_orphan(member, root, cluster_id), members(spec))
            return [handle for handle in orphans if handle]
        heads = find(head_host)
        if not heads:
            return []
        newest = max(heads, key=lambda handle: handle.detail["since"])
        workers = [handle for found in map_concurrently(find, worker_hosts) for handle in found]
        return [newest, *(handle for handle in workers if handle.detail["id"] == newest.detail["id"])]

    # -- observe and cancel

    def observe(self, handles: Sequence[Handle], host: Transport) -> dict[str, Observation]:
        return dict(zip([h.native_id for h in handles], map_concurrently(_observe, handles), strict=True))

    def cancel(self, handles: Sequence[Handle], host: Transport, *, now: bool = False) -> None:
        """The hosts stop their agents in parallel and verify it. Raises if a host is unreachable; with `now`, skips it: its agent
        exits when it loses its head."""
        failures = [one for one in map_concurrently(lambda handle: _stop(handle, now), handles) if one]
        if not failures:
            return
        cause = "; ".join(text for text, _ in failures)[:400]
        if now and not any(reached for _, reached in failures):
            raise PartialFailure(
                "some hosts are unreachable and were skipped",
                cause=cause,
                hint="their agents exit when they lose the connection to the head",
                code=Code.SSH_HOSTS_LEFT,
            )
        raise HeliostatError(
            "the agents on some hosts could not be stopped",
            cause=cause,
            hint="repeat the command when the hosts are reachable; --now skips them",
            code=Code.SSH_HOSTS_LEFT,
        )

    def execute(self, node: str, handle: Handle, argv: Sequence[str], host: Transport) -> Completed:
        return connect(handle.detail["ssh"]).run(argv, timeout=RUN_S)

    def collect_logs(self, handles: Sequence[Handle], folder: Path) -> list[str]:
        from heliostat.remote.directory import RemoteDirectory
        from heliostat.state.store import ClusterDirectory

        def collect(handle: Handle) -> str:
            target = connect(handle.detail["ssh"])
            try:
                remote = RemoteDirectory(ClusterDirectory(folder), target, Path(handle.detail["folder"]))
                work_dir = remote.collect_and_remove(_stop_request(handle, now=True), handle.detail)
            except (HeliostatError, OSError, ValueError) as error:
                was_started = "refused" not in handle.detail
                return (
                    f"the logs of {handle.nodes[0]} stay on {target.target}: {error}" if was_started else ""
                )
            has_files = work_dir and handle.detail["role"] == "head"
            return f"the command's files are on {target.target} in ~/{work_dir}" if has_files else ""

        return [note for note in map_concurrently(collect, handles) if note]

    def reach(self, handle: Handle, host: Transport) -> Transport:
        return connect(handle.detail["ssh"])

    def remote_dir(self, handle: Handle) -> tuple[Ssh, Path] | None:
        if "refused" in handle.detail:
            return None
        return connect(handle.detail["ssh"]), Path(handle.detail["folder"])

    def environment_hosts(self, spec: ClusterSpec, options: Any) -> list[tuple[Host, Transport, str]]:
        from heliostat.config.members import hosts

        if not spec.hosts:
            raise UsageError("the spec has no `hosts`", hint="hosts: [zinc, ann@copper] in the file")
        return [(one, connect(ssh_command(one)), options.python) for one in hosts(spec)]


def ssh_command(host: Host | None) -> tuple[str, ...]:
    """The command to connect to the host: `ssh -p 22 -i key -J jump user@host`. Empty for this host."""
    from heliostat.config.tables import HERE

    assert host is not None
    if host.host in HERE:
        return ()
    options = [("-p", host.port), ("-i", host.key), ("-J", host.jump), ("-l", host.user)]
    return ("ssh", *(str(part) for pair in options if pair[1] for part in pair), host.host)


def _node_directory(request: LaunchRequest, node: str) -> Path:
    """One directory per node, because hosts may share a home; `request.folder` is the head's."""
    return request.folder.parent / node


def _detail(request: LaunchRequest, step: Step) -> JsonObject:
    member = next(m for m in request.members if m.name == step.nodes[0])
    return {
        "ssh": list(ssh_command(member.host)),
        "folder": _node_directory(request, step.nodes[0]).as_posix(),
        "mark": step.config["mark"],
        "role": step.config["role"],
    }


def _start(
    request: LaunchRequest, step: Step, texts: Mapping[str, bytes], head: JsonMapping | None
) -> Handle:
    """Copy the files, start the agent and return its first report, over one connection."""
    node, detail = step.nodes[0], _detail(request, step)
    config = {**step.config, **({"head": dict(head)} if head else {})}
    script = f"start-{node}.sh"
    # only the head needs the command's working directory
    shared = {n: d for n, d in request.files.items() if detail["role"] == "head" or not n.endswith(".zip")}
    files = {script: texts[script], f"config-{node}.json": json.dumps(config).encode(), **shared}
    arguments = [detail["folder"], node, step.config["role"], step.config["mark"]]
    argv = ["sh", "-c", SAFE + _KILL_TAGGED + _START, "sh", *arguments]
    try:
        done = connect(detail["ssh"]).run(argv, input=pack(files), timeout=START_S + 30)
        answer = json.loads(done.out.strip().splitlines()[-1])
    except HeliostatError as error:
        refused = f"{error.cause or error.message}; {error.hint}"
        return Handle(f"{node}.none", step.nodes, {**detail, "refused": refused})
    except (ValueError, IndexError):
        lines = [line.strip() for line in done.err.splitlines() if line.strip() and "tar: E" not in line]
        refused = (lines or ["its agent exited without output"])[-1][:300]
        if "/bin/activate" in refused:
            refused += " (`heliostat setup` creates it)"
        return Handle(f"{node}.none", step.nodes, {**detail, "refused": refused})
    return _handle(node, {**detail, "head": answer["head"]}, answer["report"])


def _handle(node: str, detail: JsonMapping, report: JsonMapping) -> Handle:
    process = {key: report.get(key) for key in ("pid", "start", "temp", "executable")}
    return Handle(f"{node}.{report['pid']}.{report['start']}", (node,), {**detail, **process})


def _find_clusters(host: Host, cluster: str) -> list[Handle]:
    """The handles of clusters with this name on the host; none if it does not answer."""
    node, found = host.node, []
    try:
        done = connect(ssh_command(host)).run(
            ["sh", "-c", SAFE + _FIND, "sh", REMOTE_ROOT, node], timeout=QUERY_S
        )
        for line in done.out.splitlines():
            config, report = json.loads(line)
            if config["cluster"] == cluster and report.get("pid"):
                detail = {
                    "ssh": list(ssh_command(host)),
                    "folder": config["folder"],
                    "mark": config["mark"],
                    "role": config["role"],
                }
                identity = {"id": config["id"], "launch": config["launch"], "since": report["since"]}
                identity["kind"] = "run" if config.get("command") else "up"
                found.append(_handle(node, {**detail, **identity}, report))
    except (HeliostatError, ValueError, KeyError, TypeError):
        pass
    return found


def _find_orphan(member: Member, root: Path, cluster_id: str) -> Handle | None:
    """The handle of an agent that was started on the member's host; None if the host does not answer."""
    detail: JsonObject = {
        "ssh": list(ssh_command(member.host)),
        "folder": (root / member.name).as_posix(),
        "mark": f"{cluster_id}-{member.name}",
        "role": member.role,
    }
    argv = ["sh", "-c", SAFE + _KILL_TAGGED + _ORPHAN, "sh", detail["folder"], member.name, detail["mark"]]
    try:
        report = json.loads(connect(detail["ssh"]).run(argv, timeout=QUERY_S).out)
    except (HeliostatError, ValueError):
        return None
    if not report:
        return Handle(
            f"{member.name}.none", (member.name,), {**detail, "refused": "the agent was not started"}
        )
    return _handle(member.name, detail, report)


def _observe(handle: Handle) -> Observation:
    if "refused" in handle.detail:
        return Observation(N.FAILED, handle.detail["refused"])
    detail = handle.detail
    argv = ["sh", "-c", SAFE + _OBSERVE, "sh", detail["folder"], handle.nodes[0], str(detail["pid"])]
    try:
        done = connect(detail["ssh"]).run(argv, timeout=QUERY_S)
        if done.code == UNSAFE:
            return Observation(N.UNKNOWN, done.err.strip()[-300:])
        started, _, text = done.out.partition("\n")
        report: NodeReport = json.loads(text) if text.strip() else {}
    except HeliostatError as error:
        return Observation(N.UNKNOWN, f"{error.message}: {error.cause}")
    except ValueError:
        return Observation(N.UNKNOWN, f"unexpected answer: {done.out[:100]}")
    is_alive = started == detail["start"]
    return Observation(N.ALLOCATED if is_alive else N.GONE, "", report=report)


def _stop(handle: Handle, now: bool) -> tuple[str, bool] | None:
    """On failure: the cause, and whether the host was reached."""
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
    return None if answer.get("ok") else (f"{handle.nodes[0]}: still running: {answer.get('left')}", True)


def _stop_request(handle: Handle, now: bool) -> str:
    node = {key: handle.detail.get(key) for key in ("pid", "start", "mark", "temp")}
    return json.dumps({"nodes": [node], "now": now, "seconds": STOP_S})


# kill the processes of an agent that an interrupted launch started and did not record
_KILL_TAGGED = """
kill_tagged() {
  for i in 1 2 3 4 5 6 7 8 9; do
    p=$(grep -lzsxF -- "HELIOSTAT_NODE=$1" /proc/[0-9]*/environ | tr -dc '0-9\\n')
    [ "$p" ] || break
    kill -9 $p; sleep 0.2
  done
}
"""
# $1: the node's directory, relative to the home; $2: the node; $3: its role; $4: its tag. Standard input: a tar of the files
_START = """
umask 077
safe . >/dev/null && mkdir -p -- "$1/logs/$2" "$1/nodes" && cd -- "$1" && safe . >/dev/null || exit 1
[ -e "start-$2.sh" ] && kill_tagged "$4"
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
printf '{"report": %s, "head": %s}\\n' "$(tr -d '\\n' <"nodes/$2.json")" "$head"
"""
# $1: the directory of all clusters; $2: the node. Prints one line per cluster: the node's config and its report
_FIND = """
cd -- "$1" 2>/dev/null || exit 0
for d in */"$2"; do
  [ -s "$d/config-$2.json" ] && [ -s "$d/nodes/$2.json" ] || continue
  safe "./$d" "config-$2.json" nodes "nodes/$2.json" >/dev/null || continue
  printf '[%s, %s]\\n' "$(tr -d '\\n' <"$d/config-$2.json")" "$(tr -d '\\n' <"$d/nodes/$2.json")"
done
"""
# $1: the node's directory; $2: the node; $3: its tag. Prints the agent's report; kills an agent that has none
_ORPHAN = """
cd -- "$1" 2>/dev/null || exit 0
safe . >/dev/null || exit 1
[ -s "nodes/$2.json" ] || kill_tagged "$3"
cat "nodes/$2.json" 2>/dev/null || echo '{}'
"""
# $1: the node's directory; $2: the node; $3: a process id. Prints its start time in clock ticks, then the agent's report
_OBSERVE = """
cd -- "$1" 2>/dev/null || { echo gone; exit 0; }
safe . >/dev/null || exit 9
f="nodes/$2.json"
s=$(cat "/proc/$3/stat" 2>/dev/null); s=${s##*) }
set -- $s
case $1 in Z|"") echo gone ;; *) echo "${20}" ;; esac
cat "$f" 2>/dev/null
"""

# $1: the node's directory; $2: the Python of its agent. Standard input: the stop request
_STOP = """
cd -- "$1" 2>/dev/null || { echo '{"ok": true}'; exit 0; }
safe . agent.pyz >/dev/null || exit 9
exec "$2" agent.pyz stop
"""

BACKEND = SshBackend()
