"""What is written for Ray's launcher: its own file, and what goes to every machine beside it. Pure.

Secrets are in files that travel (mode 0600), never in Ray's file, which lies on the head and is hashed, printed and cached.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from heliostat.backends.base import File, LaunchRequest
from heliostat.backends.overrides import merge
from heliostat.common.errors import UsageError
from heliostat.common.shell import export, quote
from heliostat.config.ray_yaml import group_name

if TYPE_CHECKING:
    from heliostat.config.spec import ClusterSpec, Environment, Member

Json = dict[str, Any]
GCS_PORT, DASHBOARD_PORT = 6379, 8265
HEAD, PLAIN = "head", "worker"  # the names of the types whose group has none
VENV = "~/.heliostat/venv"
FILE = "cluster.yaml"
LOGS = (
    "raylet.out",
    "raylet.err",
    "monitor.log",
    "monitor.out",
    "monitor.err",
    "gcs_server.out",
    "dashboard.log",
    "watch.log",
)

# what the logs have from these bytes on: a name and its base64 on a line each
FETCH = """h=$1; shift
while [ $# -gt 1 ]; do
  case $1 in watch.log) f=$h/$1 ;; *) f=/tmp/ray/session_latest/logs/$1 ;; esac
  if [ -f "$f" ]; then echo "$1"; tail -c +"$2" "$f" | head -c 1048576 | base64 | tr -d '\\n'; echo; fi
  shift 2
done"""

RESIZE = """
import json, os, sys
path = os.path.expanduser("~/ray_bootstrap_config.yaml")
with open(path) as stream:
    config = json.load(stream)
kinds = config["available_node_types"]
for kind, (least, most) in json.loads(sys.argv[1]).items():
    kinds[kind].update(min_workers=least, max_workers=most)
config["max_workers"] = sum(kind.get("max_workers", 0) for kind in kinds.values())
with open(os.open(path + ".new", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as stream:
    json.dump(config, stream)
os.replace(path + ".new", path)
"""


@dataclass(frozen=True)
class Common:
    """What the tables of the clouds share."""

    instance: str = field(default="", metadata={"help": "the kind of machine; a group may have another"})
    image: str | None = field(
        default=None, metadata={"help": "the machines' image; default: the newest Ubuntu"}
    )
    disk: int = field(default=100, metadata={"help": "size of the disk, in GB"})
    spot: bool = field(
        default=False, metadata={"help": "workers that the cloud may take back; the head is not"}
    )
    zones: tuple[str, ...] = field(
        default=(), metadata={"help": "availability zones, the first that has room"}
    )
    user: str = field(default="ubuntu", metadata={"help": "who to log in as: the image says"})
    key: str | None = field(
        default=None, metadata={"help": "file of a private key (its .pub beside it); default: one is made"}
    )
    internal_ips: bool = field(
        default=False,
        metadata={"help": "reach the machines by their private addresses: from inside, or by VPN"},
    )
    wait: int = field(default=600, metadata={"help": "seconds to wait for ssh on a new machine"})
    head: Mapping[str, Any] = field(
        default_factory=dict, metadata={"help": "what differs for the head: {instance: m5.large}"}
    )
    node: Mapping[str, Any] = field(
        default_factory=dict, metadata={"help": "any field of Ray's `node_config`, laid over ours"}
    )
    launcher: Mapping[str, Any] = field(
        default_factory=dict, metadata={"help": "any field of Ray's launcher file, laid over ours"}
    )
    launcher_yaml: Mapping[str, Any] | None = field(
        default=None,
        metadata={"help": "a whole launcher file of Ray's, used as it is in place of all the above"},
    )


def check(request: LaunchRequest, backend: str) -> None:
    """What a cloud cannot do is said before anything is asked of it."""
    spec, environment = request.spec, request.spec.environment
    refused = {
        "network.interface": spec.network.interface,
        "network.ports": spec.network.ports or spec.network.port_offset,
        "environment.container": environment.container,
        "environment.stage": environment.stage,
        "environment.wheels": environment.wheels,
    }
    hints = {
        "environment.container": f"{backend}: {{launcher: {{docker: {{image: …, container_name: ray}}}}}}"
    }
    for key, value in refused.items():
        if value:
            raise UsageError(
                f"`{key}` has no meaning on `{backend}`",
                cause="its machines are new ones, and only this cluster's",
                hint=hints.get(key, "take it out of the file"),
            )
    for name in spec.kinds if request.options.launcher_yaml is None else ():
        if name in (HEAD, PLAIN):
            raise UsageError(
                f"a group cannot be called `{name}` on `{backend}`", cause="Ray's file needs that name"
            )
    if environment.requirements and not Path(environment.requirements).expanduser().is_file():
        raise UsageError(
            f"there is no `{environment.requirements}`", cause="`environment.requirements` names it"
        )


def ray_version(spec: ClusterSpec) -> str:
    from heliostat.config.spec import DEFAULT_RAY

    return spec.environment.ray or DEFAULT_RAY


def ray_name(request: LaunchRequest) -> str:
    """Ray finds a cluster by this tag, and would take another one's machines of the same name for its own."""
    return f"{request.spec.cluster_name.lower()[:26]}-{request.config['mark'][:8]}"


def home(request: LaunchRequest) -> str:
    """Where our files lie on the machines, below the home."""
    return f".heliostat/{request.config['mark']}"


def instance_of(options: Any, what: Mapping[str, Any]) -> Any:
    """The table with what differs for one kind of node."""
    known = {one.name for one in fields(options)} - {"head", "launcher", "launcher_yaml"}
    wrong = [key for key in what if key not in known]
    if wrong:
        raise UsageError(f"unknown key `head.{wrong[0]}`", hint=f"known keys: {', '.join(sorted(known))}")
    return replace(options, **what)


def kinds(request: LaunchRequest) -> Iterator[tuple[str, Any, int, int, Member]]:
    """(type, its options, least, most, what each may use), the head first."""
    from heliostat.config.spec import head_member, worker_kinds

    options = request.options
    if options.launcher_yaml is not None:
        return
    yield HEAD, instance_of(options, {"spot": False, **options.head}), 0, 0, head_member(request.spec)
    for kind in worker_kinds(request.spec):
        mine = request.group_options.get(kind.name or "", options)
        yield kind.name or PLAIN, mine, kind.least, kind.most, kind.member


def cost_notes(request: LaunchRequest) -> tuple[str, ...]:
    """The cost per hour of the nodes that start, where the spec has the price of each of them."""
    spec, prices, total = request.spec, [], 0.0
    for kind, _, least, _, _ in kinds(request):
        group, count = spec.kinds.get(kind), 1 if kind == HEAD else least
        price = (group and group.price_per_node_hour) or spec.price_per_node_hour
        if count and price is None:
            return ()
        if count and price:
            prices.append(f"{price:g}")
            total += count * price
    if not prices:
        return ()
    return (f"at {', '.join(dict.fromkeys(prices))} per node-hour this cluster costs {total:.2f} per hour",)


def groups(request: LaunchRequest, config: Json) -> dict[str, str | None]:
    """The group of each type of Ray's file."""
    if request.options.launcher_yaml is not None:
        return {kind: group_name(kind) for kind in config["available_node_types"]}
    return {kind: None if kind in (HEAD, PLAIN) else kind for kind in config["available_node_types"]}


def resources(member: Member, cpus: int | None, gpus: int | None, instance: str) -> Json:
    """What Ray's file says of a node; what nobody knows is an error: Ray would never ask for such a node."""
    if cpus is None:
        raise UsageError(
            f"how many CPUs has `{instance}`?",
            cause="Ray must know what a node has before it asks for one",
            hint="cpus_per_node: N in the file, or `cpus` of the group",
        )
    return {"CPU": cpus, **({"GPU": gpus} if gpus else {}), **more_resources(member)}


def more_resources(member: Member) -> Json:
    custom = {name: int(value) for name, value in member.resources.items()}
    return {**({"memory": member.memory} if member.memory else {}), **custom}


def check_gpus(member: Member, gpus: int | None, instance: str, better: str) -> None:
    if member.gpus and gpus == 0:
        raise UsageError(
            f"`{instance}` has no GPU", cause=f"{member.gpus} on each node were asked for", hint=better
        )


def instances(config: Json) -> dict[str, tuple[str, bool]]:
    """(instance, spot) of each type, in whatever words the cloud has for it."""
    found = {}
    for kind, about in config["available_node_types"].items():
        node = about.get("node_config") or {}
        arm = node.get("azure_arm_parameters") or {}
        name = node.get("InstanceType") or node.get("machineType") or arm.get("vmSize") or "instance"
        cards = "".join(f" + {one.get('acceleratorType')}" for one in node.get("guestAccelerators") or ())
        said = node.get("scheduling")
        scheduling = said if isinstance(said, Mapping) else {}
        spot = "InstanceMarketOptions" in node or scheduling.get("provisioningModel") == "SPOT"
        found[kind] = (f"{name}{cards}", bool(spot or arm.get("priority") == "Spot"))
    return found


# -- Ray's file


def whole(request: LaunchRequest, provider: Json, nodes: Json) -> Json:
    spec, options, place = request.spec, request.options, f"~/{home(request)}"
    idle = spec.autoscale.idle if spec.autoscale else 3600
    auth = {"ssh_user": options.user}
    if options.key:
        auth["ssh_private_key"] = str(Path(options.key).expanduser())
    config = {
        "cluster_name": ray_name(request),
        "max_workers": sum(node["max_workers"] for node in nodes.values()),
        "idle_timeout_minutes": round(idle / 60, 2),
        "provider": provider,
        "auth": auth,
        "available_node_types": nodes,
        "head_node_type": HEAD,
        "file_mounts": mounts(request),
        "initialization_commands": [],
        "setup_commands": [f"bash {place}/setup.sh"],
        "head_setup_commands": [f"bash {place}/setup.sh head"],
        "worker_setup_commands": [],
        "head_start_ray_commands": head_start(request),
        "worker_start_ray_commands": [f"{first(request)} && {worker_start(request)}"],
    }
    laid: Json = merge(config, options.launcher)
    return laid


def first(request: LaunchRequest) -> str:
    return f". ~/{home(request)}/env.sh && ulimit -c 0"


def head_start(request: LaunchRequest) -> list[str]:
    """Never `ray stop`; the dashboard is for whoever comes over ssh."""
    words = [
        "ray start --head",
        f"--port={GCS_PORT}",
        "--dashboard-host=127.0.0.1",
        f"--dashboard-port={DASHBOARD_PORT}",
        "--disable-usage-stats",
        "--autoscaling-config=~/ray_bootstrap_config.yaml",
        *_store(request.spec),
    ]
    return [f"{first(request)} && {' '.join(words)}", _watch(request)]


def worker_start(request: LaunchRequest) -> str:
    return " ".join(["ray start", f"--address=$RAY_HEAD_IP:{GCS_PORT}", *_store(request.spec)])


def _store(spec: ClusterSpec) -> list[str]:
    return [f"--object-store-memory={spec.object_store}"] if spec.object_store else []


def _watch(request: LaunchRequest) -> str:
    """Ray never ends its head: our agent does, when nothing has happened for long enough."""
    place = f"~/{home(request)}"
    return f". {place}/env.sh && python3 {place}/agent.pyz watch <{place}/watch.json"


def mounts(request: LaunchRequest) -> dict[str, str]:
    """What travels to every machine: to the head from here, to the workers from the head."""
    place, folder = f"~/{home(request)}", request.folder
    found = {f"{place}/{name}": str(folder / name) for name in ("env.sh", "setup.sh", "watch.json")}
    found[f"{place}/agent.pyz"] = str(request.agent)
    if request.spec.security.auth == "token":
        found[f"{place}/token"] = str(folder / "token")
    if request.spec.environment.requirements:
        given = Path(request.spec.environment.requirements).expanduser().absolute()
        found[f"{place}/requirements.txt"] = str(given)
    return found


def adopt(request: LaunchRequest, given: Mapping[str, Any]) -> Json:
    """A file of somebody's own, as it is, but for what safety needs: the token, a Ray of one version, our watch."""
    config = copy.deepcopy(dict(given))
    config["file_mounts"] = {**(config.get("file_mounts") or {}), **mounts(request)}
    version = ray_version(request.spec)
    if config.get("setup_commands") is None:  # Ray's default is whatever was built last night
        config["setup_commands"] = [f"which ray || pip install -U {quote([f'ray[default]=={version}'])}"]
    into = f". ~/{home(request)}/env.sh; "
    theirs = config.get("head_start_ray_commands") or head_start(request)[:1]
    config["head_start_ray_commands"] = [*(into + command for command in theirs), _watch(request)]
    workers = config.get("worker_start_ray_commands") or [worker_start(request)]
    config["worker_start_ray_commands"] = [into + command for command in workers]
    return config


def dashboard_port(config: Json) -> int:
    text = " ".join(config["head_start_ray_commands"])
    found = re.search(r"--dashboard-port[= ](\d+)", text)
    return int(found[1]) if found else DASHBOARD_PORT


# -- what goes to the machines


def files(
    request: LaunchRequest, config: Json, notes: Sequence[str], needs: Mapping[str, str]
) -> tuple[File, ...]:
    import yaml

    about = [f"heliostat: what Ray's launcher is told of `{request.spec.cluster_name}`", *notes]
    text = "".join(f"# {line}\n" for line in about) + yaml.safe_dump(config, sort_keys=False, width=1000)
    watch = {
        "home": home(request),
        "dashboard": dashboard_port(config),
        "token": request.spec.security.auth == "token",
        "idle": request.config["idle"],
        "time_limit_s": request.config["time_limit_s"],
    }
    adopted = request.options.launcher_yaml is not None
    return (
        File(request.folder / FILE, text),
        File(request.folder / "env.sh", env_script(request, adopted)),
        File(request.folder / "setup.sh", setup_script(request, needs), 0o700),
        File(request.folder / "watch.json", json.dumps(watch)),
    )


def env_script(request: LaunchRequest, adopted: bool) -> str:
    """Sourced by whatever is started on a machine."""
    environment = request.spec.environment
    variables = {"RAY_USAGE_STATS_ENABLED": "0", **environment.env}
    lines = ["# heliostat: the environment of every node", *environment.setup]
    if not adopted or environment.venv or environment.conda:
        lines += _activate(environment)
    lines.append(export(variables).rstrip("\n"))
    if request.spec.security.auth == "token":
        lines.append(f'export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH="$HOME/{home(request)}/token"')
    return "\n".join([*lines, "true"]) + "\n"


def _activate(environment: Environment) -> list[str]:
    if environment.conda:
        return [
            'eval "$("${CONDA_EXE:-conda}" shell.bash hook)"',
            f"conda activate {quote([environment.conda])}",
        ]
    place = _venv(environment)
    return [f"if [ -f {place}/bin/activate ]; then . {place}/bin/activate; fi"]


def _venv(environment: Environment) -> str:
    venv = (environment.venv or VENV).rstrip("/")
    return f"~/{quote([venv[2:]])}" if venv.startswith("~/") else quote([venv])


def setup_script(request: LaunchRequest, needs: Mapping[str, str]) -> str:
    """The same pinned Ray on every machine; with `head`, also what the head's autoscaler needs. An image that has it all
    is left as it is. needs: module -> what pip calls it."""
    environment, place = request.spec.environment, f"~/{home(request)}"
    ray = quote([f"ray[default]=={ray_version(request.spec)}"])
    version = quote([ray_version(request.spec)])
    venv = _venv(environment)
    make = [
        f'  [ -x {venv}/bin/python ] || python3 -m venv {venv} || {{ sudo -n apt-get update -qq; sudo -n apt-get install',
        f"    -qy python3-venv; python3 -m venv --clear {venv}; }}",
        f"  . {venv}/bin/activate",
    ]  # fmt: skip
    lines = [
        "#!/bin/bash",
        f"# heliostat: makes the environment of a machine of `{request.spec.cluster_name}`",
        f"chmod 700 {place}",
        f". {place}/env.sh",
        "set -e",
        "has='import importlib.metadata as m; print(m.version(\"ray\"))'",
        f'if [ "$(python3 -c "$has" 2>/dev/null)" != {version} ]; then',
        *([] if environment.conda else [make[0] + " " + make[1].strip(), make[2]]),
        f"  python3 -m pip install -q {ray}",
        "fi",
    ]
    if environment.requirements:
        lines.append(f"python3 -m pip install -q -r {place}/requirements.txt")
    for module, package in needs.items():
        has = quote(["python3", "-c", f"import {module}"])
        lines.append(
            f'if [ "$1" = head ]; then {has} 2>/dev/null || python3 -m pip install -q {quote([package])}; fi'
        )
    return "\n".join(lines) + "\n"
