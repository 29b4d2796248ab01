"""The spec: one frozen, validated description of a cluster."""

from __future__ import annotations

from typing import Any

from pydantic import AliasChoices, Field, ValidationInfo, field_validator, model_validator

from heliostat.common.limits import MAX_NODES
from heliostat.common.units import format_bytes
from heliostat.config.members import count_members, hosts
from heliostat.config.tables import (
    Autoscale,
    Bytes,
    Count,
    Environment,
    Group,
    Head,
    Host,
    Idle,
    Labels,
    Model,
    Name,
    Network,
    Price,
    Security,
    Walltime,
    check_labels,
)

DEFAULT_BACKEND = "local"
USES_HOSTS = "uses_hosts"  # key of the validation context: whether the backend's nodes are the `hosts` [True]
DEFAULT_RAY = "2.60.0"  # the version that `setup` installs if the file names none


class ClusterSpec(Model):
    """A cluster as requested. Sizes in bytes, times in seconds."""

    name: Name | None = Field(None, description="the cluster's name [default: the backend's name]")
    on: str = Field(DEFAULT_BACKEND, description="the backend")
    nodes: Count = Field(1, ge=1, le=MAX_NODES, description="number of nodes, including the head")
    min_nodes: Count | None = Field(None, ge=1, description="start when this many nodes are ready")
    head: Head = Field(Head(), description="the head node; a string is its host")
    hosts: tuple[Host, ...] = Field((), description="hosts over ssh; a string is a host")
    cpus_per_node: Count | None = Field(
        None,
        ge=0,
        validation_alias=AliasChoices("cpus_per_node", "cpus"),
        description="CPUs that Ray may use on each node; deprecated alias: `cpus`",
    )
    gpus_per_node: Count | None = Field(
        None,
        ge=0,
        validation_alias=AliasChoices("gpus_per_node", "gpus"),
        description="GPUs on each node; deprecated alias: `gpus`",
    )
    memory_per_node: Bytes | None = Field(
        None,
        gt=0,
        validation_alias=AliasChoices("memory_per_node", "memory"),
        description="memory that Ray may use on each node; deprecated alias: `memory`",
    )
    object_store: Bytes | None = Field(None, description="object store on each node, at least 80M")
    price_per_node_hour: Price | None = Field(None, description="price of a node per hour, in any currency")
    time: Walltime | None = Field(
        None, gt=0, description="maximum lifetime of the cluster (walltime): 4:00:00, 90m"
    )
    environment: Environment = Environment()
    network: Network = Network()
    idle: Idle = Idle()
    autoscale: Autoscale | None = None
    groups: dict[Name, Group] = Field({}, description="worker nodes of several kinds, instead of `nodes`")
    labels: Labels = Field({}, description="Ray labels of every node")
    security: Security = Security()
    backend_tables: dict[str, dict[str, Any]] = Field(
        {}, description="one table for each backend: `slurm:`, `local:`, …", exclude=True
    )

    _labels = field_validator("labels")(lambda labels: check_labels(labels))

    @field_validator("object_store")
    @classmethod
    def _check_store(cls, size: int | None) -> int | None:
        if size is not None and size < 80 * 2**20:
            raise ValueError(
                f"an object store of {format_bytes(size)} is too small: Ray requires at least 80M"
            )
        return size

    @field_validator("head", mode="before")
    @classmethod
    def _parse_head(cls, value: object) -> object:
        return {"host": value} if isinstance(value, str) else value

    @field_validator("hosts", mode="before")
    @classmethod
    def _parse_hosts(cls, value: object) -> object:
        if isinstance(value, (list, tuple)):
            return [{"host": item} if isinstance(item, str) else item for item in value]
        return value

    @model_validator(mode="after")
    def _check_sizes(self, info: ValidationInfo) -> ClusterSpec:
        if not (info.context or {}).get(USES_HOSTS, True):
            object.__setattr__(self, "hosts", ())
        if self.hosts:
            names = [host.node for host in hosts(self)]
            duplicates = [name for name in names if names.count(name) > 1]
            if duplicates:
                raise ValueError(
                    f"two hosts have the name `{duplicates[0]}`: give one of them another `name`"
                )
            if "nodes" not in self.model_fields_set:
                object.__setattr__(self, "nodes", len(names))
            elif self.nodes > len(names):
                raise ValueError(f"`nodes` ({self.nodes}) is more than the {len(names)} hosts")
        total = count_members(self)
        if total > MAX_NODES:
            raise ValueError(f"{total} nodes are requested, and the maximum is {MAX_NODES}")
        if self.kinds and "nodes" in self.model_fields_set and self.nodes != total:
            raise ValueError(
                f"`nodes` ({self.nodes}) and `groups` (head and {total - 1} workers) disagree: keep one"
            )
        if self.min_nodes is not None and self.min_nodes > total:
            raise ValueError(f"min_nodes ({self.min_nodes}) is more than the {total} requested nodes")
        return self

    @property
    def cluster_name(self) -> str:
        return self.name or self.on

    @property
    def has_autoscaling(self) -> bool:
        """True if the number of nodes of any kind changes with Ray's demand."""
        return self.autoscale is not None or any(group.max is not None for group in self.kinds.values())

    @property
    def kinds(self) -> dict[str, Group]:
        """The groups, except on a backend with listed hosts."""
        return {} if self.hosts else self.groups
