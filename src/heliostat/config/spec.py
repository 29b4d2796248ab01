"""What a person asks for: one frozen, checked description of a cluster. Parsed at the edge, never again."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    field_validator,
    model_validator,
)

from heliostat.common.limits import MOST_NODES
from heliostat.common.units import format_bytes, parse_bytes, parse_duration, parse_walltime, parse_window

NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9-]{0,39}$")
# what Ray takes for labels (ray/_private/label_utils.py): the syntax of Kubernetes, with capitals in the prefix too
_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?"
LABEL_VALUE = re.compile(_LABEL)
LABEL_KEY = re.compile(rf"(?:(?=[^/]{{0,253}}/)(?:{_LABEL})?(?:\.(?:{_LABEL})?)*/)?{_LABEL}")
# what Ray calls its own, and where it is written here (ray/_private/parameter.py, resource_and_label_spec.py)
RAYS_RESOURCES = {
    "CPU": "cpus",
    "GPU": "gpus",
    "memory": "memory",
    "object_store_memory": "object_store",
    "node:__internal_head__": "",
}
MOST_OF_A_RESOURCE = 100 * 10**12
DEFAULT_RAY = "2.60.0"  # what set-up installs where the file names no version
HERE = ("this machine", "localhost")  # no ssh to the machine that one is on
LISTED = "ssh"  # the site whose machines are those that the file lists
HOST = re.compile(r"([^-\s@][^\s]*@)?\w[\w.:%-]*")  # its node's name is also a folder's
HIGHEST_PORT = 65535
WINDOW_PORTS = 2420  # what one `port_offset` owns: 20 ports of Ray's own services, the rest for its workers


def check_name(name: str) -> str:
    """A cluster's name is also a folder, a job name, a label and a DNS word: the narrowest of these wins."""
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise ValueError(
            f"`{str(name)[:60]}` is not a name: letters, digits and `-`, beginning with a letter or a digit, "
            "40 characters at most"
        )
    return name


def _bytes(value: object) -> object:
    return parse_bytes(value) if isinstance(value, (str, int, float)) else value


def _seconds(value: object) -> object:
    return parse_duration(value) if isinstance(value, (str, int, float)) else value


def _walltime(value: object) -> object:
    return parse_walltime(value) if isinstance(value, (str, int, float)) else value


def _count(value: object) -> object:
    if isinstance(value, bool):  # `nodes: yes` would count as 1
        raise ValueError(f"`{value}` is not a number")
    return value


def _text(value: object) -> object:
    return str(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else value


Name = Annotated[str, BeforeValidator(check_name), Field(json_schema_extra={"pattern": NAME.pattern})]
Bytes = Annotated[int, BeforeValidator(_bytes, json_schema_input_type=str | int)]
Seconds = Annotated[int, BeforeValidator(_seconds, json_schema_input_type=str | int)]
Walltime = Annotated[
    int,
    BeforeValidator(_walltime, json_schema_input_type=str),
    PlainSerializer(lambda seconds: f"{seconds}s", when_used="json-unless-none"),
]
Count = Annotated[int, BeforeValidator(_count)]
Price = Annotated[float, BeforeValidator(_count), Field(gt=0, allow_inf_nan=False)]
Text = Annotated[str, BeforeValidator(_text)]
Labels = dict[str, Text]


class Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", str_strip_whitespace=False)


class Environment(Model):
    """Which Python and Ray the nodes use. One of venv, conda, container, or nothing: the user's own."""

    venv: str | None = Field(None, description="folder of a virtual environment on the nodes")
    conda: str | None = Field(None, description="name or folder of a conda environment on the nodes")
    stage: Literal["local"] | None = Field(
        None, description="`local`: each node uses a copy of the venv on its own disk"
    )
    container: str | None = Field(
        None, description="Apptainer image that Ray and the work run in: a file, or `docker://…`"
    )
    binds: tuple[str, ...] = Field(
        (), description="folders that are seen inside the container: `/data`, `/scratch:/scratch:ro`"
    )
    container_options: tuple[str, ...] = Field(
        (), description="any other options of `apptainer exec`, verbatim"
    )
    ray: Text | None = Field(None, description="the Ray version that must be there")
    requirements: str | None = Field(None, description="requirements file to install, of this machine")
    wheels: str | None = Field(
        None,
        description="folder of wheels on this machine that Ray and the rest are installed from, without internet",
    )
    setup: tuple[str, ...] = Field((), description="shell lines that run first on every node")
    env: dict[str, Text] = Field({}, description="environment variables of Ray and of the jobs")

    @model_validator(mode="after")
    def _one(self) -> Environment:
        given = [key for key in ("venv", "conda", "container") if getattr(self, key)]
        if len(given) > 1:
            raise ValueError(f"`{given[0]}` and `{given[1]}` exclude each other: keep one")
        needs = {"stage": "venv", "binds": "container", "container_options": "container"}
        for key, other in needs.items():
            if getattr(self, key) and not getattr(self, other):
                raise ValueError(f"`{key}` has a meaning only with `{other}`")
        if self.wheels and not (self.venv or self.conda):
            raise ValueError("`wheels` has a meaning only with `venv` or `conda`")
        return self

    @field_validator("binds")
    @classmethod
    def _folders(cls, binds: tuple[str, ...]) -> tuple[str, ...]:
        for bind in binds:
            if not bind.startswith(("/", "~")) or "," in bind or bind.count(":") > 2:
                raise ValueError(
                    f"`{bind}` is not a bind; write for example `/data` or `/scratch:/scratch:ro`"
                )
        return binds

    @field_validator("env")
    @classmethod
    def _names(cls, env: dict[str, str]) -> dict[str, str]:
        for key, value in env.items():
            if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", key) or "\0" in value:
                raise ValueError(f"`{key}` is not the name of an environment variable")
        return env


class Network(Model):
    """Addresses and ports. By default the kernel of each node chooses free ports."""

    interface: str | None = Field(None, description="interface name (`ib0`) or CIDR (`100.64.0.0/10`)")
    port_offset: Count = Field(
        0,
        ge=0,
        le=HIGHEST_PORT - 20000 - WINDOW_PORTS,
        description="0: ports are chosen free; N: from 20000+N on",
    )
    ports: str | None = Field(None, description="range that all ports, the workers' too, are taken from")
    ray_client: bool = Field(
        False,
        description="start Ray Client's server (`ray://`) on the head; not safe on hosts with other users",
    )
    patience: Seconds = Field(
        30,
        ge=3,
        le=3600,
        description="so long without a word, and a node is lost; a worker gives its head up",
    )

    @field_validator("ports")
    @classmethod
    def _range(cls, value: str | None) -> str | None:
        if value is not None:
            match = re.fullmatch(r"(\d{1,5})-(\d{1,5})", value)
            if not match or not 1024 <= int(match[1]) < int(match[2]) <= HIGHEST_PORT:
                raise ValueError(f"`{value}` is not a range of ports; write for example `20000-22419`")
            if int(match[2]) - int(match[1]) < 63:
                raise ValueError(f"`{value}` is too narrow: a node takes 64 ports at least")
        return value

    def window(self) -> tuple[int, int] | None:
        """The (first, last) port of the range that was asked for, or None: chosen free."""
        if self.ports:
            first, last = self.ports.split("-")
            return int(first), int(last)
        if self.port_offset:
            return 20000 + self.port_offset, 20000 + self.port_offset + WINDOW_PORTS - 1
        return None


class Idle(Model):
    """When nothing has happened on the cluster for `timeout`, it ends itself."""

    timeout: Seconds | None = Field(None, gt=0, description="end the cluster after so long without work")
    window: str | None = Field(None, description="only at this time of day, local time of the head")

    @field_validator("window")
    @classmethod
    def _window(cls, value: str | None) -> str | None:
        if value is not None:
            parse_window(value)
        return value


class Autoscale(Model):
    """Nodes come and go with Ray's demand."""

    min: Count = Field(0, ge=0, description="worker nodes that stay")
    max: Count = Field(..., ge=1, description="worker nodes at most; of each group that says nothing else")
    idle: Seconds = Field(60, gt=0, description="a node goes after so long without work")

    @model_validator(mode="after")
    def _order(self) -> Autoscale:
        if self.min > self.max:
            raise ValueError(f"min ({self.min}) is more than max ({self.max})")
        return self


class Group(Model):
    """Worker nodes of one kind."""

    nodes: Count = Field(1, ge=0, le=MOST_NODES, description="how many; with `autoscale`: to begin with")
    min: Count | None = Field(None, ge=0, description="with `autoscale`: nodes that stay")
    max: Count | None = Field(None, ge=1, description="with `autoscale`: nodes at most")
    cpus: Count | None = Field(None, ge=0, description="CPUs that Ray may use on each")
    gpus: Count | None = Field(None, ge=0, description="GPUs on each")
    memory: Bytes | None = Field(None, gt=0, description="memory that Ray may use on each")
    labels: Labels = Field({}, description="Ray labels of the nodes")
    resources: dict[str, float] = Field({}, description="custom Ray resources of each, whole numbers")
    price_per_node_hour: Price | None = Field(None, description="price of a node per hour, in any currency")
    options: dict[str, Any] = Field(
        {}, description="of the site's own table, what differs here: {partition: gpu}"
    )

    _labels = field_validator("labels")(lambda labels: check_labels(labels))
    _resources = field_validator("resources")(lambda resources: check_resources(resources))

    @model_validator(mode="after")
    def _order(self) -> Group:
        if self.min is not None and self.max is not None and self.min > self.max:
            raise ValueError(f"min ({self.min}) is more than max ({self.max})")
        return self


class Head(Model):
    """The head node."""

    host: str | None = Field(None, description="which host is the head (ssh)")
    work: bool = Field(True, description="false: no tasks or actors run on the head")
    cpus: Count | None = Field(None, ge=0)
    gpus: Count | None = Field(None, ge=0)
    memory: Bytes | None = Field(None, gt=0)


class Host(Model):
    """One machine that is reached over ssh. What is not said here is as `~/.ssh/config` has it."""

    host: str = Field(
        ..., min_length=1, description="what one would type after `ssh`: a name, user@name, an address"
    )
    name: Name | None = Field(None, description="the node's name; default: the first word of the host's")
    user: str | None = Field(None, description="who to log in as")
    port: Count | None = Field(None, ge=1, le=HIGHEST_PORT, description="the ssh server's port")
    key: str | None = Field(None, description="file of the private key")
    jump: str | None = Field(None, description="jump host, as after `ssh -J`")
    cpus: Count | None = Field(None, ge=0, description="CPUs that Ray may use")
    gpus: Count | None = Field(None, ge=0, description="GPUs that Ray may use")
    leave_cpus: Count = Field(0, ge=0, description="CPUs to leave to the machine's other users")
    labels: Labels = Field({}, description="Ray labels of the node")
    env: dict[str, Text] = Field({}, description="environment variables of Ray and of the jobs there")
    environment: Environment | None = Field(None, description="in place of the cluster's own")

    _labels = field_validator("labels")(lambda labels: check_labels(labels))

    @field_validator("host")
    @classmethod
    def _host(cls, host: str) -> str:
        if host not in HERE and not HOST.fullmatch(host):  # ssh would take `-x` for an option
            raise ValueError(f"`{host[:60]}` is not the name of a host")
        return host

    @property
    def node(self) -> str:
        """The node's name: `zinc` of ann@zinc.lab.edu; an address as it is, but for `:`, which no file's name has on Windows."""
        bare = "here" if self.host in HERE else self.host.rpartition("@")[2]
        whole = re.fullmatch(r"[\d.]+|.*:.*", bare)
        return self.name or (bare.replace(":", "-") if whole else bare.partition(".")[0])


class Security(Model):
    auth: Literal["token", "none"] = Field(
        "token", description="`none` lets anybody who reaches a port run code"
    )
    tls: bool = Field(
        False,
        description="encrypt what Ray's processes and the agents send between hosts (local, ssh, slurm, pbs)",
    )

    @model_validator(mode="after")
    def _authenticated(self) -> Security:
        if self.tls and self.auth == "none":
            raise ValueError(
                "`tls` needs `auth: token`: Ray's HTTP servers on each node take requests from anybody without it"
            )
        return self


class ClusterSpec(Model):
    """A cluster, as asked for. Sizes in bytes, times in seconds."""

    name: Name | None = Field(None, description="the cluster's name; default: the site's name")
    on: str = Field("local", description="the site")
    nodes: Count = Field(1, ge=1, le=MOST_NODES, description="nodes in all, the head included")
    min_nodes: Count | None = Field(None, ge=1, description="so many alive nodes are enough to begin")
    head: Head = Field(Head(), description="the head node; a plain word is its host")
    hosts: tuple[Host, ...] = Field((), description="machines over ssh; a plain word is a host")
    cpus_per_node: Count | None = Field(None, ge=0, description="CPUs that Ray may use on each node")
    gpus_per_node: Count | None = Field(None, ge=0, description="GPUs on each node")
    memory_per_node: Bytes | None = Field(None, gt=0, description="memory that Ray may use on each node")
    object_store: Bytes | None = Field(None, description="object store on each node, 80M at least")
    price_per_node_hour: Price | None = Field(None, description="price of a node per hour, in any currency")
    time: Walltime | None = Field(
        None, gt=0, description="how long the cluster may live (walltime): 4:00:00, 90m"
    )
    environment: Environment = Environment()
    network: Network = Network()
    idle: Idle = Idle()
    autoscale: Autoscale | None = None
    groups: dict[Name, Group] = Field({}, description="worker nodes of several kinds, instead of `nodes`")
    labels: Labels = Field({}, description="Ray labels of every node")
    security: Security = Security()
    backend_tables: dict[str, dict[str, Any]] = Field(
        {}, description="one table a site: `slurm:`, `local:`, …", exclude=True
    )

    _labels = field_validator("labels")(lambda labels: check_labels(labels))

    @field_validator("object_store")
    @classmethod
    def _store(cls, size: int | None) -> int | None:
        if size is not None and size < 80 * 2**20:
            raise ValueError(f"an object store of {format_bytes(size)} is too small: Ray wants 80M at least")
        return size

    @field_validator("head", mode="before")
    @classmethod
    def _head(cls, value: object) -> object:
        return {"host": value} if isinstance(value, str) else value

    @field_validator("hosts", mode="before")
    @classmethod
    def _hosts(cls, value: object) -> object:
        if isinstance(value, (list, tuple)):
            return [{"host": item} if isinstance(item, str) else item for item in value]
        return value

    @model_validator(mode="after")
    def _sizes(self) -> ClusterSpec:
        if self.machines:
            names = [host.node for host in hosts(self)]
            twice = [name for name in names if names.count(name) > 1]
            if twice:
                raise ValueError(f"two hosts have the name `{twice[0]}`: give one of them another `name`")
            if "nodes" not in self.model_fields_set:
                object.__setattr__(self, "nodes", len(names))
            elif self.nodes > len(names):
                raise ValueError(f"`nodes` ({self.nodes}) is more than the {len(names)} hosts")
        total = count_members(self)
        if total > MOST_NODES:
            raise ValueError(f"{total} nodes are asked for in all, and {MOST_NODES} are the most")
        if self.kinds and "nodes" in self.model_fields_set and self.nodes != total:
            raise ValueError(
                f"`nodes` ({self.nodes}) and `groups` (head and {total - 1} workers) disagree: keep one"
            )
        if self.min_nodes is not None and self.min_nodes > total:
            raise ValueError(f"min_nodes ({self.min_nodes}) is more than the {total} nodes asked for")
        return self

    @property
    def cluster_name(self) -> str:
        return self.name or self.on

    @property
    def machines(self) -> tuple[Host, ...]:
        """The hosts, on the site whose machines the file lists. One file may serve several sites: elsewhere they rest."""
        return self.hosts if self.on == LISTED else ()

    @property
    def elastic(self) -> bool:
        """Some of its nodes come and go with Ray's demand."""
        return self.autoscale is not None or any(group.max is not None for group in self.kinds.values())

    @property
    def kinds(self) -> dict[str, Group]:
        """The groups, on sites that give machines."""
        return {} if self.machines else self.groups


def check_labels(labels: Mapping[str, str]) -> Mapping[str, str]:
    for key, value in labels.items():
        if not LABEL_KEY.fullmatch(key) or not (value == "" or LABEL_VALUE.fullmatch(value)):
            raise ValueError(
                f"`{key}={value}` is not a label: letters, digits, `-`, `_`, `.`, 63 characters at most; "
                "a key may have a prefix, as `example.org/kind`"
            )
        if key.startswith("ray.io/"):
            raise ValueError(f"`{key}`: labels that begin with `ray.io/` are Ray's own")
    return labels


def check_resources(resources: Mapping[str, float]) -> Mapping[str, float]:
    """What `ray start --resources` would refuse after the machine is there."""
    for name, amount in resources.items():
        if name in RAYS_RESOURCES:
            key = RAYS_RESOURCES[name]
            raise ValueError(
                f"`{name}` is one of Ray's own resources: "
                + (f"write `{key}`" if key else "take another name")
            )
        rule = ""
        if not float(amount).is_integer():
            rule = "in whole numbers; a task may ask for a part of one"
        elif amount < 0:
            rule = "from 0 on"
        elif amount > MOST_OF_A_RESOURCE:
            rule = f"up to {MOST_OF_A_RESOURCE}"
        if rule:
            raise ValueError(f"`{name}` cannot be {amount:g}: Ray counts resources {rule}")
    return resources


class Member(Model):
    """One node, as asked for. None: whatever the allocation gives."""

    name: str
    role: Literal["head", "worker"]
    group: str | None = None
    cpus: int | None = None
    gpus: int | None = None
    memory: int | None = None
    labels: dict[str, str] = {}
    resources: dict[str, float] = {}
    host: Host | None = None


def members(spec: ClusterSpec) -> list[Member]:
    """The nodes of the cluster, head first, with what each may use. Those that come and go with demand are not among them."""
    return [
        head_member(spec),
        *worker_members(spec, spec.autoscale.min if spec.autoscale else spec.nodes - 1),
    ]


@dataclass(frozen=True)
class Kind:
    """Worker nodes of one kind: so many to begin with, `least` that stay, `most` that may come."""

    name: str | None  # the group's
    first: int
    least: int
    most: int
    member: Member  # what each of them may use


def worker_kinds(spec: ClusterSpec) -> list[Kind]:
    """The workers as one who makes machines by kind wants them."""
    least, most = (spec.autoscale.min, spec.autoscale.max) if spec.autoscale else (None, None)
    if not spec.kinds:
        given = spec.nodes - 1 if "nodes" in spec.model_fields_set or least is None else least
        return [_kind(None, given, least, most, worker_members(spec.model_copy(update={"nodes": 2}), 1)[0])]
    found = []
    for name, group in spec.kinds.items():
        one = spec.model_copy(update={"groups": {name: group.model_copy(update={"nodes": 1, "min": 1})}})
        low, high = _first(group.min, least), _first(group.max, most)
        found.append(_kind(name, group.nodes, low, high, worker_members(one, 1)[0]))
    return found


def _kind(name: str | None, given: int, least: int | None, most: int | None, member: Member) -> Kind:
    if most is None:
        return Kind(name, given, given, given, member)
    low = least or 0
    return Kind(name, max(low, min(given, most)), low, most, member)


def hosts(spec: ClusterSpec) -> list[Host]:
    """The machines that the file lists, the head's first: the one that `head` names, be it listed or not, else the first."""
    wanted = spec.head.host
    found = [host for host in spec.machines if wanted in (host.node, host.host)]
    head = found[0] if found else Host(host=wanted) if wanted else spec.machines[0]
    return [head, *(host for host in spec.machines if host is not head)]


def head_member(spec: ClusterSpec) -> Member:
    head = spec.head
    idle = {} if head.work else {"cpus": 0, "gpus": 0}
    host = hosts(spec)[0] if spec.machines else None
    return Member(
        name=host.node if host else "head",
        role="head",
        memory=_first(head.memory, spec.memory_per_node),
        labels={**spec.labels, **(host.labels if host else {})},
        host=host,
        **{
            "cpus": _first(head.cpus, host.cpus if host else None, spec.cpus_per_node),
            "gpus": _first(head.gpus, host.gpus if host else None, spec.gpus_per_node),
            **idle,
        },
    )


def worker_members(spec: ClusterSpec, count: int) -> list[Member]:
    """`count` plain workers, or, where the spec has groups or hosts, the workers of those."""
    if spec.machines:
        return [
            Member(
                name=host.node,
                role="worker",
                cpus=_first(host.cpus, spec.cpus_per_node),
                gpus=_first(host.gpus, spec.gpus_per_node),
                memory=spec.memory_per_node,
                labels={**spec.labels, **host.labels},
                host=host,
            )
            for host in hosts(spec)[1 : count + 1]
        ]
    if not spec.kinds:
        plain = {"cpus": spec.cpus_per_node, "gpus": spec.gpus_per_node, "memory": spec.memory_per_node}
        return _alike(Member(name="w", role="worker", labels=spec.labels, **plain), count)
    return [
        member
        for name, group in spec.kinds.items()
        for member in _alike(
            Member(
                name=f"{name}-",
                role="worker",
                group=name,
                cpus=_first(group.cpus, spec.cpus_per_node),
                gpus=_first(group.gpus, spec.gpus_per_node),
                memory=_first(group.memory, spec.memory_per_node),
                labels={**spec.labels, **group.labels},
                resources=group.resources,
            ),
            _steady(spec, group),
        )
    ]


def _alike(one: Member, count: int) -> list[Member]:
    """So many of a kind, numbered from 1: checked once, as thousands of checks take seconds."""
    return [one.model_copy(update={"name": f"{one.name}{i}"}) for i in range(1, count + 1)]


def count_members(spec: ClusterSpec) -> int:
    """How many `members` there are."""
    if spec.machines or not spec.kinds:
        return 1 + (spec.autoscale.min if spec.autoscale else spec.nodes - 1)
    return 1 + sum(_steady(spec, group) for group in spec.kinds.values())


def _steady(spec: ClusterSpec, group: Group) -> int:
    """How many of the group stay, whatever the demand."""
    if spec.autoscale is None and group.max is None:
        return group.nodes
    return int(_first(group.min, spec.autoscale.min if spec.autoscale else 0))


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)
