"""Azure virtual machines, through Ray's launcher: `on: azure`.

Ray creates a network, a firewall that allows only ssh, and an identity for each cluster, and removes them with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from heliostat.backends.cloud import files as render
from heliostat.backends.cloud.backend import CloudBackend
from heliostat.backends.cloud.files import Common, Json
from heliostat.backends.cloud.instances import count_cpus, count_gpus
from heliostat.common.errors import UsageError

if TYPE_CHECKING:
    from heliostat.config.members import Member

IMAGE = "Canonical:ubuntu-24_04-lts:server:latest"


@dataclass(frozen=True)
class Options(Common):
    """The `azure:` table of the spec."""

    instance: str = field(default="Standard_D4s_v3", metadata={"help": "VM size; a group may have another"})
    region: str = field(default="westus2", metadata={"help": "location of the instances"})
    subscription: str = field(default="", metadata={"help": "subscription id"})
    resource_group: str = field(
        default="", metadata={"help": "resource group; created if missing, never removed"}
    )


class Azure(CloudBackend):
    name: ClassVar[str] = "azure"
    Options: ClassVar[type] = Options
    packages: ClassVar[Mapping[str, str]] = {
        "azure.identity": "azure-identity==1.23.1",
        "azure.mgmt.compute": "azure-mgmt-compute==35.0.0",
        "azure.mgmt.network": "azure-mgmt-network==29.0.0",
        "azure.mgmt.resource": "azure-mgmt-resource==24.0.0",
        "azure.common": "azure-common==1.1.28",
        "msrestazure": "msrestazure==0.6.4.post1",
        "cryptography": "cryptography>=41",
    }

    def provider(self, options: Any) -> Json:
        for key in ("subscription", "resource_group"):
            if not getattr(options, key):
                raise UsageError(
                    f"`azure.{key}` is missing",
                    hint="azure: {subscription: 0000-…, resource_group: ray} in the file",
                )
        return {
            "type": "azure",
            "location": options.region,
            "resource_group": options.resource_group,
            "subscription_id": options.subscription,
            **({"availability_zone": ",".join(options.zones)} if options.zones else {}),
            "use_internal_ips": options.internal_ips,
            "cache_stopped_nodes": False,
        }

    def node(self, options: Any, member: Member) -> tuple[Json, Json]:
        instance_gpus = count_gpus(options.instance)
        render.check_gpus(member, instance_gpus, options.instance, "instance: Standard_NC4as_T4_v3")
        arm: Json = {"vmSize": options.instance, "osDiskSize": options.disk, **_image(options.image or IMAGE)}
        if options.spot:
            arm.update(priority="Spot", billingProfile={"maxPrice": -1})
        cpus = member.cpus if member.cpus is not None else count_cpus(options.instance)
        gpus = member.gpus if member.gpus is not None else instance_gpus
        return {"azure_arm_parameters": arm}, render.resources(member, cpus, gpus, options.instance)


def _image(named: str) -> Json:
    """Image fields of `publisher:offer:sku:version`, or of an image id."""
    parts = named.split(":")
    if len(parts) == 4:
        names = ("imagePublisher", "imageOffer", "imageSku", "imageVersion")
        return dict(zip(names, parts, strict=True))
    if not named.startswith("/"):
        raise UsageError(f"`{named}` is not an image", hint=f"image: {IMAGE}")
    return {"imageId": named}


BACKEND = Azure()
