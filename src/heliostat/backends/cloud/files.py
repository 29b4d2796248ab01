"""Renders Ray's launcher file and the files that are copied to each node. Pure.

Secrets are in copied files (mode 0600), never in Ray's file, which Ray prints, hashes and caches on the head.
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
from heliostat.common.documents import JsonMapping, JsonObject
from heliostat.common.errors import UsageError
from heliostat.common.shell import export, quote
from heliostat.config.ray_yaml import group_name

if TYPE_CHECKING:
    from heliostat.config.members import Member
    from heliostat.config.spec import ClusterSpec
    from heliostat.config.tables import Environment

Json = JsonObject
GCS_PORT, DASHBOARD_PORT = 6379, 8265
HEAD, WORKER = "head", "worker"  # the node types without a group
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

# arguments: directory, then name and first byte of each log; prints the name and its base64 on one line each
FETCH_LOGS = """h=$1; shift
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
    """Options of all clouds."""

    instance: str = field(default="", metadata={"help": "instance type; a group may have another"})
    image: str | None = field(default=None, metadata={"help": "image of the instances [the newest Ubuntu]"})
    disk: int = field(default=100, metadata={"help": "disk size in GB"})
    spot: bool = field(
        default=False, metadata={"help": "use spot instances for the workers, not for the head"}
    )
    zones: tuple[str, ...] = field(
        default=(), metadata={"help": "availability zones, in order of preference"}
    )
    user: str = field(default="ubuntu", metadata={"help": "ssh user of the image"})
    key: str | None = field(
        default=None, metadata={"help": "private key file, with its .pub file [a new key]"}
    )
    internal_ips: bool = field(
        default=False,
        metadata={"help": "connect to private addresses: from inside the network, or by VPN"},
    )
    wait: int = field(default=600, metadata={"help": "seconds to wait for ssh on a new instance"})
    head: JsonMapping = field(
        default_factory=dict, metadata={"help": "options that differ for the head: {instance: m5.large}"}
    )
    node: JsonMapping = field(
        default_factory=dict,
        metadata={"help": "fields of Ray's `node_config`, merged over the generated ones"},
    )
    launcher: JsonMapping = field(
        default_factory=dict,
        metadata={"help": "fields of Ray's launcher file, merged over the generated ones"},
    )
    launcher_yaml: JsonMapping | None = field(
        default=None,
        metadata={"help": "a complete launcher file, used instead of all other options"},
    )


def check_request(request: LaunchRequest, backend: str) -> None:
    """Raises UsageError for keys that a cloud does not support."""
    spec, environment = request.spec, request.spec.environment
    unsupported = {
        "network.interface": spec.network.interface,
        "network.ports": spec.network.ports or spec.network.port_offset,
        "environment.container": environment.container,
        "environment.stage": environment.stage,
        "environment.wheels": environment.wheels,
    }
    hints = {
        "environment.container": f"{backend}: {{launcher: {{docker: {{image: …, container_name: ray}}}}}}"
    }
    for key, value in unsupported.items():
        if value:
            raise UsageError(
                f"`{key}` is not supported on `{backend}`",
                cause="its instances are new and used by this cluster only",
                hint=hints.get(key, "remove it from the file"),
            )
    for name in spec.kinds if request.options.launcher_yaml is None else ():
        if name in (HEAD, WORKER):
            raise UsageError(
                f"a group cannot have the name `{name}` on `{backend}`", cause="Ray's file uses that name"
            )
    if environment.requirements and not Path(environment.requirements).expanduser().is_file():
        raise UsageError(
            f"the file `{environment.requirements}` does not exist",
            cause="`environment.requirements` names it",
        )


def ray_version(spec: ClusterSpec) -> str:
    from heliostat.config.spec import DEFAULT_RAY

    return spec.environment.ray or DEFAULT_RAY


def ray_name(request: LaunchRequest) -> str:
    """The value of Ray's cluster tag; unique, because Ray adopts all instances that have its tag."""
    return f"{request.spec.cluster_name.lower()[:26]}-{request.config['mark'][:8]}"


def remote_dir(request: LaunchRequest) -> str:
    """The cluster's directory on the nodes, relative to the home directory."""
    return f".heliostat/{request.config['mark']}"


def override_options(options: Any, changes: JsonMapping) -> Any:
    """The options with those that differ for one node type."""
    known = {one.name for one in fields(options)} - {"head", "launcher", "launcher_yaml"}
    wrong = [key for key in changes if key not in known]
    if wrong:
        raise UsageError(f"unknown key `head.{wrong[0]}`", hint=f"known keys: {', '.join(sorted(known))}")
    return replace(options, **changes)


def list_node_types(request: LaunchRequest) -> Iterator[tuple[str, Any, int, int, Member]]:
    """(type, options, minimum, maximum, resources) of each node type, the head first."""
    from heliostat.config.members import head_member, list_worker_kinds

    options = request.options
    if options.launcher_yaml is not None:
        return
    yield HEAD, override_options(options, {"spot": False, **options.head}), 0, 0, head_member(request.spec)
    for kind in list_worker_kinds(request.spec):
        group_options = request.group_options.get(kind.name or "", options)
        yield kind.name or WORKER, group_options, kind.least, kind.most, kind.member


def cost_notes(request: LaunchRequest) -> tuple[str, ...]:
    """The cost per hour of the nodes that start, where the spec has the price of each of them."""
    spec, prices, total = request.spec, [], 0.0
    for kind, _, least, _, _ in list_node_types(request):
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


def map_groups(request: LaunchRequest, config: Json) -> dict[str, str | None]:
    """The group of each node type of Ray's file."""
    if request.options.launcher_yaml is not None:
        return {kind: group_name(kind) for kind in config["available_node_types"]}
    return {kind: None if kind in (HEAD, WORKER) else kind for kind in config["available_node_types"]}


def resources(member: Member, cpus: int | None, gpus: int | None, instance: str) -> Json:
    """The resources of a node type. Raises UsageError without CPUs: Ray would never request such a node."""
    if cpus is None:
        raise UsageError(
            f"the number of CPUs of `{instance}` is unknown",
            cause="Ray needs the resources of a node before it requests one",
            hint="set cpus_per_node in the file, or `cpus` of the group",
        )
    return {"CPU": cpus, **({"GPU": gpus} if gpus else {}), **custom_resources(member)}


def custom_resources(member: Member) -> Json:
    custom = {name: int(value) for name, value in member.resources.items()}
    return {**({"memory": member.memory} if member.memory else {}), **custom}


def check_gpus(member: Member, gpus: int | None, instance: str, better: str) -> None:
    if member.gpus and gpus == 0:
        raise UsageError(
            f"`{instance}` has no GPU", cause=f"the spec has {member.gpus} GPUs per node", hint=better
        )


def read_instance_types(config: Json) -> dict[str, tuple[str, bool]]:
    """(instance type, whether it is spot) of each node type."""
    found = {}
    for kind, about in config["available_node_types"].items():
        node = about.get("node_config") or {}
        arm = node.get("azure_arm_parameters") or {}
        name = node.get("InstanceType") or node.get("machineType") or arm.get("vmSize") or "instance"
        cards = "".join(f" + {one.get('acceleratorType')}" for one in node.get("guestAccelerators") or ())
        given = node.get("scheduling")
        scheduling = given if isinstance(given, Mapping) else {}
        spot = "InstanceMarketOptions" in node or scheduling.get("provisioningModel") == "SPOT"
        found[kind] = (f"{name}{cards}", bool(spot or arm.get("priority") == "Spot"))
    return found


# -- Ray's file


def make_config(request: LaunchRequest, provider: Json, nodes: Json) -> Json:
    spec, options, remote = request.spec, request.options, f"~/{remote_dir(request)}"
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
        "file_mounts": file_mounts(request),
        "initialization_commands": [],
        "setup_commands": [f"bash {remote}/setup.sh"],
        "head_setup_commands": [f"bash {remote}/setup.sh head"],
        "worker_setup_commands": [],
        "head_start_ray_commands": head_start_commands(request),
        "worker_start_ray_commands": [f"{activation_command(request)} && {worker_start_command(request)}"],
    }
    merged: Json = merge(config, options.launcher)
    return merged


def activation_command(request: LaunchRequest) -> str:
    return f". ~/{remote_dir(request)}/env.sh && ulimit -c 0"


def head_start_commands(request: LaunchRequest) -> list[str]:
    """Commands that start the head. No `ray stop`; the dashboard listens on loopback, for ssh tunnels."""
    command = [
        "ray start --head",
        f"--port={GCS_PORT}",
        "--dashboard-host=127.0.0.1",
        f"--dashboard-port={DASHBOARD_PORT}",
        "--disable-usage-stats",
        "--autoscaling-config=~/ray_bootstrap_config.yaml",
        *_object_store_option(request.spec),
    ]
    return [f"{activation_command(request)} && {' '.join(command)}", _watch_command(request)]


def worker_start_command(request: LaunchRequest) -> str:
    return " ".join(["ray start", f"--address=$RAY_HEAD_IP:{GCS_PORT}", *_object_store_option(request.spec)])


def _object_store_option(spec: ClusterSpec) -> list[str]:
    return [f"--object-store-memory={spec.object_store}"] if spec.object_store else []


def _watch_command(request: LaunchRequest) -> str:
    """Starts the agent that terminates an idle head: Ray never terminates its head."""
    remote = f"~/{remote_dir(request)}"
    return f". {remote}/env.sh && python3 {remote}/agent.pyz watch <{remote}/watch.json"


def file_mounts(request: LaunchRequest) -> dict[str, str]:
    """Files that Ray copies to the head, and from there to the workers."""
    remote, folder = f"~/{remote_dir(request)}", request.folder
    found = {f"{remote}/{name}": str(folder / name) for name in ("env.sh", "setup.sh", "watch.json")}
    found[f"{remote}/agent.pyz"] = str(request.agent)
    if request.spec.security.auth == "token":
        found[f"{remote}/token"] = str(folder / "token")
    if request.spec.environment.requirements:
        given = Path(request.spec.environment.requirements).expanduser().absolute()
        found[f"{remote}/requirements.txt"] = str(given)
    return found


def adopt_launcher_yaml(request: LaunchRequest, given: JsonMapping) -> Json:
    """The user's launcher file, with the token, a pinned Ray and the agent on the head added."""
    config = copy.deepcopy(dict(given))
    config["file_mounts"] = {**(config.get("file_mounts") or {}), **file_mounts(request)}
    version = ray_version(request.spec)
    if config.get("setup_commands") is None:  # Ray's default is the nightly build
        config["setup_commands"] = [f"which ray || pip install -U {quote([f'ray[default]=={version}'])}"]
    activate = f". ~/{remote_dir(request)}/env.sh; "
    head_commands = config.get("head_start_ray_commands") or head_start_commands(request)[:1]
    config["head_start_ray_commands"] = [
        *(activate + command for command in head_commands),
        _watch_command(request),
    ]
    workers = config.get("worker_start_ray_commands") or [worker_start_command(request)]
    config["worker_start_ray_commands"] = [activate + command for command in workers]
    return config


def dashboard_port(config: Json) -> int:
    text = " ".join(config["head_start_ray_commands"])
    found = re.search(r"--dashboard-port[= ](\d+)", text)
    return int(found[1]) if found else DASHBOARD_PORT


# -- files on the nodes


def render_files(
    request: LaunchRequest, config: Json, notes: Sequence[str], needs: Mapping[str, str]
) -> tuple[File, ...]:
    import yaml

    about = [f"heliostat: Ray's launcher file of `{request.spec.cluster_name}`", *notes]
    text = "".join(f"# {line}\n" for line in about) + yaml.safe_dump(config, sort_keys=False, width=1000)
    watch = {
        "home": remote_dir(request),
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
    """The script that each process on a node sources."""
    environment = request.spec.environment
    variables = {"RAY_USAGE_STATS_ENABLED": "0", **environment.env}
    lines = ["# heliostat: the environment of every node", *environment.setup]
    if not adopted or environment.venv or environment.conda:
        lines += _activation_lines(environment)
    lines.append(export(variables).rstrip("\n"))
    if request.spec.security.auth == "token":
        lines.append(f'export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH="$HOME/{remote_dir(request)}/token"')
    return "\n".join([*lines, "true"]) + "\n"


def _activation_lines(environment: Environment) -> list[str]:
    if environment.conda:
        return [
            'eval "$("${CONDA_EXE:-conda}" shell.bash hook)"',
            f"conda activate {quote([environment.conda])}",
        ]
    remote = _venv_path(environment)
    return [f"if [ -f {remote}/bin/activate ]; then . {remote}/bin/activate; fi"]


def _venv_path(environment: Environment) -> str:
    venv = (environment.venv or VENV).rstrip("/")
    return f"~/{quote([venv[2:]])}" if venv.startswith("~/") else quote([venv])


def setup_script(request: LaunchRequest, needs: Mapping[str, str]) -> str:
    """Installs the pinned Ray; with the argument `head`, also the packages of the autoscaler. Skips what the image has.

    needs: module -> its name for pip."""
    environment, remote = request.spec.environment, f"~/{remote_dir(request)}"
    ray = quote([f"ray[default]=={ray_version(request.spec)}"])
    version = quote([ray_version(request.spec)])
    venv = _venv_path(environment)
    make = [
        f'  [ -x {venv}/bin/python ] || python3 -m venv {venv} || {{ sudo -n apt-get update -qq; sudo -n apt-get install',
        f"    -qy python3-venv; python3 -m venv --clear {venv}; }}",
        f"  . {venv}/bin/activate",
    ]  # fmt: skip
    lines = [
        "#!/bin/bash",
        f"# heliostat: sets up a node of `{request.spec.cluster_name}`",
        f"chmod 700 {remote}",
        f". {remote}/env.sh",
        "set -e",
        "has='import importlib.metadata as m; print(m.version(\"ray\"))'",
        f'if [ "$(python3 -c "$has" 2>/dev/null)" != {version} ]; then',
        *([] if environment.conda else [make[0] + " " + make[1].strip(), make[2]]),
        f"  python3 -m pip install -q {ray}",
        "fi",
    ]
    if environment.requirements:
        lines.append(f"python3 -m pip install -q -r {remote}/requirements.txt")
    for module, package in needs.items():
        has = quote(["python3", "-c", f"import {module}"])
        lines.append(
            f'if [ "$1" = head ]; then {has} 2>/dev/null || python3 -m pip install -q {quote([package])}; fi'
        )
    return "\n".join(lines) + "\n"
