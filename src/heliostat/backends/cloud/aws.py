"""Amazon EC2, through Ray's own launcher: `on: aws`.

A cluster has a security group, a key pair and a role of its own, which go with it (`launching.things`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from heliostat.backends.cloud import files as render
from heliostat.backends.cloud.backend import Launcher
from heliostat.backends.cloud.files import Common, Json
from heliostat.backends.cloud.instances import count_gpus

if TYPE_CHECKING:
    from heliostat.config.spec import Member


@dataclass(frozen=True)
class Options(Common):
    """The `aws:` table of the file."""

    instance: str = field(
        default="m5.large", metadata={"help": "the kind of machine; a group may have another"}
    )
    region: str = field(default="us-west-2", metadata={"help": "where the machines are"})
    ssh_from: tuple[str, ...] = field(
        default=("0.0.0.0/0",),
        metadata={"help": "addresses (CIDR) that may ssh to the machines, with the key"},
    )
    subnets: tuple[str, ...] = field(default=(), metadata={"help": "default: those of the default network"})
    security_groups: tuple[str, ...] = field(
        default=(), metadata={"help": "groups that exist, in place of one of our own"}
    )
    key_name: str | None = field(
        default=None, metadata={"help": "a key pair that exists on EC2; its private half is `key`"}
    )
    profile: str | None = field(
        default=None, metadata={"help": "an instance profile that exists, in place of a role of our own"}
    )
    policies: tuple[str, ...] = field(
        default=(), metadata={"help": "ARNs of further policies for our role; workers have it then, too"}
    )


class Aws(Launcher):
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
        # Ray asks EC2 what the instance has; what a person says of it wins
        said = {"CPU": member.cpus, "GPU": member.gpus}
        told = {name: count for name, count in said.items() if count is not None}
        return node, {**told, **render.more_resources(member)}

    def own(self, options: Any, name: str, mark: str, folder: Path) -> Json:
        return {
            **super().own(options, f"heliostat-{name}", mark, folder),
            "region": options.region,
            "ssh_from": list(options.ssh_from),
            "groups_given": bool(options.security_groups),
            "key_name": options.key_name,
            "role_made": options.profile is None,
            "policies": list(options.policies),
        }


BACKEND = Aws()
