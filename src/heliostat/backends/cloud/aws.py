"""Amazon EC2, through Ray's launcher: `on: aws`.

Each cluster has its own security group, key pair and role, which are removed with it (`launcher.resources`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from heliostat.backends.cloud import files as render
from heliostat.backends.cloud.backend import CloudBackend
from heliostat.backends.cloud.files import Common, Json
from heliostat.backends.cloud.instances import count_gpus

if TYPE_CHECKING:
    from heliostat.config.members import Member


@dataclass(frozen=True)
class Options(Common):
    """The `aws:` table of the spec."""

    instance: str = field(default="m5.large", metadata={"help": "instance type; a group may have another"})
    region: str = field(default="us-west-2", metadata={"help": "region of the instances"})
    ssh_from: tuple[str, ...] = field(
        default=("0.0.0.0/0",),
        metadata={"help": "addresses (CIDR) that may connect to port 22"},
    )
    subnets: tuple[str, ...] = field(default=(), metadata={"help": "subnets [those of the default VPC]"})
    security_groups: tuple[str, ...] = field(
        default=(), metadata={"help": "existing security groups [a new one]"}
    )
    key_name: str | None = field(
        default=None, metadata={"help": "existing key pair on EC2; `key` is its private key"}
    )
    profile: str | None = field(
        default=None, metadata={"help": "existing instance profile of the head [a new role]"}
    )
    policies: tuple[str, ...] = field(
        default=(), metadata={"help": "ARNs of additional policies of the new role; workers get the role too"}
    )


class Aws(CloudBackend):
    name: ClassVar[str] = "aws"
    Options: ClassVar[type] = Options
    packages: ClassVar[Mapping[str, str]] = {"boto3": "boto3>=1.26"}

    def provider(self, options: Any) -> Json:
        return {
            "type": "aws",
            "region": options.region,
            **({"availability_zone": ",".join(options.zones)} if options.zones else {}),
            "use_internal_ips": options.internal_ips,
            "cache_stopped_nodes": False,
        }

    def node(self, options: Any, member: Member) -> tuple[Json, Json]:
        render.check_gpus(member, count_gpus(options.instance), options.instance, "instance: g5.xlarge")
        disk = {"VolumeSize": options.disk, "VolumeType": "gp3", "DeleteOnTermination": True}
        spot = {"InstanceMarketOptions": {"MarketType": "spot"}} if options.spot else {}
        given = {
            "SubnetIds": list(options.subnets),
            "SecurityGroupIds": list(options.security_groups),
            "IamInstanceProfile": {"Name": options.profile}
            if options.profile and member.role == "head"
            else {},
        }
        node = {
            "InstanceType": options.instance,
            **({"ImageId": options.image} if options.image else {}),
            "BlockDeviceMappings": [{"DeviceName": "/dev/sda1", "Ebs": disk}],
            "MetadataOptions": {"HttpTokens": "required", "HttpPutResponseHopLimit": 2},
            **{name: value for name, value in given.items() if value},
            **spot,
        }
        # Ray reads CPUs and GPUs from EC2; values of the spec override them
        counts = {"CPU": member.cpus, "GPU": member.gpus}
        given_counts = {name: count for name, count in counts.items() if count is not None}
        return node, {**given_counts, **render.custom_resources(member)}

    def describe_resources(self, options: Any, name: str, cluster_id: str, folder: Path) -> Json:
        return {
            **super().describe_resources(options, f"heliostat-{name}", cluster_id, folder),
            "region": options.region,
            "ssh_from": list(options.ssh_from),
            "groups_given": bool(options.security_groups),
            "key_name": options.key_name,
            "role_made": options.profile is None,
            "policies": list(options.policies),
        }


BACKEND = Aws()
