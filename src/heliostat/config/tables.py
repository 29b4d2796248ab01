"""The tables of a cluster's spec, and the types of their values."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import (
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    field_validator,
    model_validator,
)

from heliostat.common.documents import JsonObject
from heliostat.common.limits import MAX_NODES
from heliostat.common.units import parse_bytes, parse_duration, parse_walltime, parse_window

NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9-]{0,39}$")
# Ray's syntax of labels (ray/_private/label_utils.py): that of Kubernetes, with capitals in the prefix too
_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?"
LABEL_VALUE = re.compile(_LABEL)
LABEL_KEY = re.compile(rf"(?:(?=[^/]{{0,253}}/)(?:{_LABEL})?(?:\.(?:{_LABEL})?)*/)?{_LABEL}")
# names that Ray reserves (ray/_private/parameter.py, resource_and_label_spec.py) -> the key that sets them here
RAY_RESOURCES = {
    "CPU": "cpus",
    "GPU": "gpus",
    "memory": "memory",
    "object_store_memory": "object_store",
    "node:__internal_head__": "",
}
MAX_RESOURCE_AMOUNT = 100 * 10**12
HERE = ("this machine", "localhost")  # names of this host, which is reached without ssh
HOST = re.compile(r"([^-\s@][^\s]*@)?\w[\w.:%-]*")  # the node's name is also that of a directory
HIGHEST_PORT = 65535
WINDOW_PORTS = 2420  # ports of one `port_offset`: 20 of Ray's services, the others of its workers
# Keys of one node's resources. A table has one spelling; the other one is a deprecated alias of it.
PER_NODE_KEYS = {"cpus": "cpus_per_node", "gpus": "gpus_per_node", "memory": "memory_per_node"}


def check_name(name: str) -> str:
    """The name, which must also be valid as a directory, a job name, a label and a part of a DNS name."""
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
        raise ValueError(f"`{str(value).lower()}` is not a number")
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


def _add_aliases(schema: JsonObject) -> None:
    """Adds the deprecated spellings to a table's JSON Schema."""
    properties = schema.get("properties", {})
    for pair in PER_NODE_KEYS.items():
        for key, alias in (pair, pair[::-1]):
            if key in properties:
                note = f"deprecated alias of `{key}`"
                properties[alias] = {**properties[key], "deprecated": True, "description": note}
                break


class Model(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="forbid", str_strip_whitespace=False, json_schema_extra=_add_aliases
    )

    @model_validator(mode="before")
    @classmethod
    def _check_spellings(cls, values: object) -> object:
        given = values if isinstance(values, Mapping) else {}
        for pair in PER_NODE_KEYS.items():
            if all(key in given for key in pair):
                raise ValueError(f"`{pair[0]}` and `{pair[1]}` are the same key: keep one")
        return values


Cpus = Annotated[
    Count | None,
    Field(
        ge=0,
        validation_alias=AliasChoices("cpus", "cpus_per_node"),
        description="CPUs that Ray may use on each node; deprecated alias: `cpus_per_node`",
    ),
]
Gpus = Annotated[
    Count | None,
    Field(
        ge=0,
        validation_alias=AliasChoices("gpus", "gpus_per_node"),
        description="GPUs that Ray may use on each node; deprecated alias: `gpus_per_node`",
    ),
]
Memory = Annotated[
    Bytes | None,
    Field(
        gt=0,
        validation_alias=AliasChoices("memory", "memory_per_node"),
        description="memory that Ray may use on each node; deprecated alias: `memory_per_node`",
    ),
]


class Environment(Model):
    """Python and Ray of the nodes: one of venv, conda, container; without any, the user's own."""

    venv: str | None = Field(None, description="directory of a virtual environment on the nodes")
    conda: str | None = Field(None, description="name or directory of a conda environment on the nodes")
    stage: Literal["local"] | None = Field(
        None, description="`local`: each node uses a copy of the venv on its own disk"
    )
    container: str | None = Field(
        None,
        description="image that Ray and the jobs run in: a file of Apptainer (.sif) or enroot (.sqsh), or `docker://…`",
    )
    binds: tuple[str, ...] = Field(
        (), description="directories to mount in the container: `/data`, `/scratch:/scratch:ro`"
    )
    container_options: tuple[str, ...] = Field(
        (), description="any other options of `apptainer exec` or `enroot start`, verbatim"
    )
    ray: Text | None = Field(None, description="required Ray version")
    requirements: str | None = Field(None, description="requirements file on this host to install")
    project: str | None = Field(
        None, description="directory on this host of a pyproject.toml whose uv.lock is installed exactly"
    )
    wheels: str | None = Field(
        None,
        description="directory of wheels on this host to install Ray and requirements from, without internet",
    )
    setup: tuple[str, ...] = Field((), description="shell lines that run first on every node")
    env: dict[str, Text] = Field({}, description="environment variables of Ray and of the jobs")

    @model_validator(mode="after")
    def _check_combination(self) -> Environment:
        given = [key for key in ("venv", "conda", "container") if getattr(self, key)]
        if len(given) > 1:
            raise ValueError(f"`{given[0]}` and `{given[1]}` exclude each other: keep one")
        others = [key for key in ("conda", "container", "requirements", "wheels") if getattr(self, key)]
        if self.project and others:
            raise ValueError(f"`project` and `{others[0]}` exclude each other: keep one")
        needs = {"stage": "venv", "binds": "container", "container_options": "container"}
        for key, other in needs.items():
            if getattr(self, key) and not getattr(self, other):
                raise ValueError(f"`{key}` has a meaning only with `{other}`")
        if self.wheels and not (self.venv or self.conda):
            raise ValueError("`wheels` has a meaning only with `venv` or `conda`")
        return self

    @field_validator("binds")
    @classmethod
    def _check_binds(cls, binds: tuple[str, ...]) -> tuple[str, ...]:
        for bind in binds:
            if not bind.startswith(("/", "~")) or "," in bind or bind.count(":") > 2:
                raise ValueError(
                    f"`{bind}` is not a bind; write for example `/data` or `/scratch:/scratch:ro`"
                )
        return binds

    @field_validator("env")
    @classmethod
    def _check_names(cls, env: dict[str, str]) -> dict[str, str]:
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
        description="0: free ports; N: ports from 20000+N on",
    )
    ports: str | None = Field(None, description="range of all ports, including those of Ray's workers")
    ray_client: bool = Field(
        False,
        description="start Ray Client's server (`ray://`) on the head; not safe on hosts with other users",
    )
    patience: Seconds = Field(
        30,
        ge=3,
        le=3600,
        description="mark a node LOST after this long without a heartbeat; a worker stops after this long "
        "without its head",
    )

    @field_validator("ports")
    @classmethod
    def _check_range(cls, value: str | None) -> str | None:
        if value is not None:
            match = re.fullmatch(r"(\d{1,5})-(\d{1,5})", value)
            if not match or not 1024 <= int(match[1]) < int(match[2]) <= HIGHEST_PORT:
                raise ValueError(f"`{value}` is not a range of ports; write for example `20000-22419`")
            if int(match[2]) - int(match[1]) < 63:
                raise ValueError(f"`{value}` is too narrow: a node needs at least 64 ports")
        return value

    def window(self) -> tuple[int, int] | None:
        """The (first, last) port of the requested range; None: any free ports."""
        if self.ports:
            first, last = self.ports.split("-")
            return int(first), int(last)
        if self.port_offset:
            return 20000 + self.port_offset, 20000 + self.port_offset + WINDOW_PORTS - 1
        return None


class Idle(Model):
    """The cluster ends itself after `timeout` without jobs, tasks or actors."""

    timeout: Seconds | None = Field(None, gt=0, description="end the cluster after this long without work")
    window: str | None = Field(None, description="only at this time of day, local time of the head")

    @field_validator("window")
    @classmethod
    def _check_window(cls, value: str | None) -> str | None:
        if value is not None:
            parse_window(value)
        return value


class Autoscale(Model):
    """Ray's autoscaler starts and stops worker nodes on demand."""

    min: Count = Field(0, ge=0, description="minimum number of worker nodes")
    max: Count = Field(
        ..., ge=1, description="maximum number of worker nodes, also of each group without a `max`"
    )
    idle: Seconds = Field(60, gt=0, description="stop a node after this long without work")

    @model_validator(mode="after")
    def _check_order(self) -> Autoscale:
        if self.min > self.max:
            raise ValueError(f"min ({self.min}) is more than max ({self.max})")
        return self


class Group(Model):
    """Worker nodes of one kind."""

    nodes: Count = Field(1, ge=0, le=MAX_NODES, description="number of nodes; with `autoscale`: at the start")
    min: Count | None = Field(None, ge=0, description="with `autoscale`: minimum number of nodes")
    max: Count | None = Field(None, ge=1, description="with `autoscale`: maximum number of nodes")
    cpus: Cpus = None
    gpus: Gpus = None
    memory: Memory = None
    labels: Labels = Field({}, description="Ray labels of the nodes")
    resources: dict[str, float] = Field({}, description="custom Ray resources of each node, whole numbers")
    price_per_node_hour: Price | None = Field(None, description="price of a node per hour, in any currency")
    options: JsonObject = Field(
        {}, description="keys of the backend's table that differ for this group: {partition: gpu}"
    )

    _labels = field_validator("labels")(lambda labels: check_labels(labels))
    _resources = field_validator("resources")(lambda resources: check_resources(resources))

    @model_validator(mode="after")
    def _check_order(self) -> Group:
        if self.min is not None and self.max is not None and self.min > self.max:
            raise ValueError(f"min ({self.min}) is more than max ({self.max})")
        return self


class Head(Model):
    """The head node."""

    host: str | None = Field(None, description="host of the head (ssh)")
    work: bool = Field(True, description="false: no tasks or actors run on the head")
    cpus: Cpus = None
    gpus: Gpus = None
    memory: Memory = None


class Host(Model):
    """One host that is reached over ssh. `~/.ssh/config` applies to settings that are not given here."""

    host: str = Field(..., min_length=1, description="argument of `ssh`: a name, user@name, or an address")
    name: Name | None = Field(
        None, description="the node's name [default: the host's name without its domain]"
    )
    user: str | None = Field(None, description="login name")
    port: Count | None = Field(None, ge=1, le=HIGHEST_PORT, description="the ssh server's port")
    key: str | None = Field(None, description="file of the private key")
    jump: str | None = Field(None, description="jump host, as after `ssh -J`")
    cpus: Cpus = None
    gpus: Gpus = None
    leave_cpus: Count = Field(0, ge=0, description="CPUs to leave to other users of the host")
    labels: Labels = Field({}, description="Ray labels of the node")
    env: dict[str, Text] = Field({}, description="environment variables of Ray and of the jobs on this host")
    environment: Environment | None = Field(None, description="replaces the cluster's environment")

    _labels = field_validator("labels")(lambda labels: check_labels(labels))

    @field_validator("host")
    @classmethod
    def _check_host(cls, host: str) -> str:
        if host not in HERE and not HOST.fullmatch(host):  # ssh would take `-x` for an option
            raise ValueError(f"`{host[:60]}` is not the name of a host")
        return host

    @property
    def node(self) -> str:
        """The node's name: `zinc` of ann@zinc.lab.edu. An address is kept; `:` becomes `-`, which Windows allows in file names."""
        bare = "here" if self.host in HERE else self.host.rpartition("@")[2]
        is_address = re.fullmatch(r"[\d.]+|.*:.*", bare)
        return self.name or (bare.replace(":", "-") if is_address else bare.partition(".")[0])


class Security(Model):
    auth: Literal["token", "none"] = Field(
        "token", description="`none`: any user who can connect to a port can run code"
    )
    tls: bool = Field(
        False,
        description="encrypt the connections of Ray and of the agents between hosts (local, ssh, slurm, pbs)",
    )

    @model_validator(mode="after")
    def _check_auth(self) -> Security:
        if self.tls and self.auth == "none":
            raise ValueError(
                "`tls` needs `auth: token`: without it, Ray's HTTP servers on each node accept requests from any user"
            )
        return self


def check_labels(labels: Mapping[str, str]) -> Mapping[str, str]:
    """The labels. Raises ValueError for one that Ray would not accept."""
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
    """The resources. Raises ValueError for one that `ray start --resources` would reject on the node."""
    for name, amount in resources.items():
        if name in RAY_RESOURCES:
            key = RAY_RESOURCES[name]
            raise ValueError(
                f"`{name}` is one of Ray's own resources: "
                + (f"write `{key}`" if key else "take another name")
            )
        rule = ""
        if not float(amount).is_integer():
            rule = "in whole numbers; a task may ask for a part of one"
        elif amount < 0:
            rule = "from 0 on"
        elif amount > MAX_RESOURCE_AMOUNT:
            rule = f"up to {MAX_RESOURCE_AMOUNT}"
        if rule:
            raise ValueError(f"`{name}` cannot be {amount:g}: Ray counts resources {rule}")
    return resources
