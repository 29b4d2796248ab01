"""Google Compute Engine, through Ray's launcher: `on: gcp`.

The ssh key is valid for the cluster's instances only, not for the whole project. Ray creates no firewall rule. The default rules
of the network `default` allow only ssh from outside.
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

IMAGE = "projects/ubuntu-os-cloud/global/images/family/ubuntu-2404-lts-amd64"
WITH_DRIVER = "projects/ml-images/global/images/family/common-cu128-ubuntu-2204-py310"


@dataclass(frozen=True)
class Options(Common):
    """The `gcp:` table of the spec."""

    instance: str = field(
        default="n2-standard-4", metadata={"help": "machine type; a group may have another"}
    )
    project: str = field(default="", metadata={"help": "project id"})
    region: str = field(default="us-west1", metadata={"help": "region of the instances"})
    gpu: str | None = field(
        default=None,
        metadata={"help": "type of the attached GPUs, for example nvidia-tesla-t4; `gpus` is their number"},
    )


class Gcp(CloudBackend):
    name: ClassVar[str] = "gcp"
    Options: ClassVar[type] = Options
    packages: ClassVar[Mapping[str, str]] = {
        "googleapiclient": "google-api-python-client>=2.100",
        "cryptography": "cryptography>=41",
    }

    def provider(self, options: Any) -> Json:
        if not options.project:
            raise UsageError("`gcp.project` is missing", hint="gcp: {project: my-project-id} in the file")
        return {
            "type": "gcp",
            "region": options.region,
            "availability_zone": options.zones[0] if options.zones else f"{options.region}-a",
            "project_id": options.project,
            "use_internal_ips": options.internal_ips,
            "cache_stopped_nodes": False,
        }

    def node(self, options: Any, member: Member) -> tuple[Json, Json]:
        instance_gpus = (member.gpus or 1) if options.gpu else count_gpus(options.instance)
        render.check_gpus(
            member, instance_gpus, options.instance, "gpu: nvidia-tesla-t4, or instance: g2-standard-4"
        )
        image = options.image or (WITH_DRIVER if instance_gpus else IMAGE)
        disk = {"diskSizeGb": options.disk, "sourceImage": image}
        node: Json = {
            "machineType": options.instance,
            "disks": [{"boot": True, "autoDelete": True, "type": "PERSISTENT", "initializeParams": disk}],
        }
        scheduling: Json = {}
        if options.gpu:
            node["guestAccelerators"] = [{"acceleratorType": options.gpu, "acceleratorCount": instance_gpus}]
        if instance_gpus:
            node["metadata"] = {"items": [{"key": "install-nvidia-driver", "value": "True"}]}
            scheduling = {"onHostMaintenance": "TERMINATE", "automaticRestart": False}
        if options.spot:
            spot = {"provisioningModel": "SPOT", "instanceTerminationAction": "DELETE"}
            scheduling = {**scheduling, "automaticRestart": False, **spot}
        if scheduling:
            node["scheduling"] = scheduling
        cpus = member.cpus if member.cpus is not None else count_cpus(options.instance)
        gpus = member.gpus if member.gpus is not None else instance_gpus
        return node, render.resources(member, cpus, gpus, options.instance)


BACKEND = Gcp()
