"""Objects of one cluster other than instances: on AWS a security group, a key pair and a role, on other clouds a key.

They have the cluster's name, so that a later command can find and remove them. Ray's own objects are shared by all Ray clusters of
the account and never removed: a group open to ssh, a key of the whole project, a role with all permissions on EC2 and S3.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypedDict

from heliostat.common.errors import Code, Refused

Json = dict[str, Any]


class OwnedResources(TypedDict, total=False):
    """The objects in the account that belong to one cluster. All but the first five are of AWS."""

    backend: str
    name: str
    mark: str  # the cluster id, as a tag of each object
    key_file: str
    key_made: bool  # Heliostat created the key
    region: str
    ssh_from: list[str]
    groups_given: bool  # the user's own security groups are used
    key_name: str | None
    role_made: bool
    policies: list[str]


GROUP_FREE_TIMEOUT_S = 300.0  # until no instance uses a security group
PERMISSION_ERRORS = ("AccessDenied", "AccessDeniedException", "UnauthorizedOperation")
ALIVE = ["pending", "running", "stopping", "stopped"]
UBUNTU = ("099720109477", "ubuntu/images/hvm-ssd-gp3/ubuntu-noble-24.04-{arch}-server-*")
WITH_DRIVER = ("amazon", "Deep Learning Base OSS Nvidia Driver GPU AMI (Ubuntu 22.04)*")
ARM = re.compile(r"^[a-z]+\d+g[a-z]*\.")
GPUS = re.compile(r"^(p\d|g\d)")


def create(config: Json, owned: OwnedResources) -> list[str]:
    """Creates the objects, or finds those of an earlier attempt, and adds them to the config. Returns their names."""
    if config["provider"]["type"] == "aws":
        return _create_aws(config, owned)
    public = _create_local_key(owned)
    config["auth"]["ssh_private_key"] = owned["key_file"]
    if config["provider"]["type"] == "azure":
        config["auth"]["ssh_public_key"] = f"{owned['key_file']}.pub"
        return ["a key"]
    for node in config[
        "available_node_types"
    ].values():  # valid for these instances, not for the whole project
        items = node["node_config"].setdefault("metadata", {}).setdefault("items", [])
        items.append({"key": "ssh-keys", "value": f"{config['auth']['ssh_user']}:{public}"})
    return ["a key"]


def remove(owned: OwnedResources) -> list[str]:
    """Removes the objects; idempotent. Raises Refused if one remains."""
    for name in ("", ".pub") if owned["key_made"] else ():
        Path(owned["key_file"] + name).unlink(missing_ok=True)
    return _remove_aws(owned) if owned["backend"] == "aws" else []


def list_remaining(config: Json, owned: OwnedResources | None) -> list[str]:
    """Sentences on objects that are not removed."""
    provider = config["provider"]
    backend, notes = provider["type"], []
    if provider.get("cache_stopped_nodes", True):
        notes.append(
            "its instances are stopped, not terminated (cache_stopped_nodes in the file): their disks cost money"
        )
    if backend == "aws" and owned is None:
        group = f"ray-autoscaler-{config['cluster_name']}"
        notes.append(
            f"objects of Ray remain in the account: a security group {group}, a key pair, a role ray-autoscaler-v1"
        )
    if backend == "gcp":
        notes.append(
            "the service account ray-autoscaler-sa-v1 remains: all Ray clusters of the project share it"
        )
    if backend == "azure":
        notes.append(
            f"the resource group {provider['resource_group']} remains: it may have objects of other users"
        )
    return notes


# -- local keys


def _create_local_key(owned: OwnedResources) -> str:
    """The public key; creates the key pair if it is missing."""
    path = Path(owned["key_file"])
    if not owned.get("key_made") or path.with_name(path.name + ".pub").exists():
        return _read_public_key(path)
    from cryptography.hazmat.primitives import serialization as form
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key = Ed25519PrivateKey.generate()
    private = key.private_bytes(form.Encoding.PEM, form.PrivateFormat.OpenSSH, form.NoEncryption())
    public = key.public_key().public_bytes(form.Encoding.OpenSSH, form.PublicFormat.OpenSSH)
    _write_private(path, private)
    path.with_name(path.name + ".pub").write_bytes(public + b"\n")
    return public.decode()


def _write_private(path: Path, data: bytes) -> None:
    path.unlink(missing_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as stream:
        stream.write(data)


def _read_public_key(private: Path) -> str:
    path = private.with_name(private.name + ".pub")
    try:
        return path.read_text().strip()
    except OSError:
        raise Refused(
            f"the public key of `{private}` is missing",
            cause=f"{path} does not exist",
            hint=f"ssh-keygen -y -f {private} > {path}",
            code=Code.CLOUD_KEY_PAIR,
        ) from None


# -- AWS


def _make_client(kind: str, region: str) -> Any:
    import boto3

    return boto3.client(kind, region_name=region)


def _error_code(error: Exception) -> str:
    return str(getattr(error, "response", {}).get("Error", {}).get("Code", ""))


@contextlib.contextmanager
def _ignore_codes(*codes: str) -> Iterator[None]:
    """Ignores these error codes: the object already exists, or is already removed."""
    try:
        yield
    except Exception as error:
        if _error_code(error) not in codes:
            raise


def _create_aws(config: Json, owned: OwnedResources) -> list[str]:
    provider, types = config["provider"], config["available_node_types"]
    ec2 = _make_client("ec2", provider["region"])
    _check_zones(ec2, provider)
    created = []
    for kind in types.values():
        node = kind["node_config"]
        if node.get("ImageId") is None:
            node["ImageId"] = _find_image(ec2, node["InstanceType"], provider["region"])
    if not owned["groups_given"]:
        group = _create_group(ec2, owned, _find_vpc(ec2, types))
        for kind in types.values():
            _attach_group(kind["node_config"], group)
        created.append(f"security group {group}")
    if owned["key_name"] is None:
        _create_key_pair(ec2, owned)
        created.append(f"key pair {owned['name']}")
    config["auth"]["ssh_private_key"] = owned["key_file"]
    for kind in types.values():
        kind["node_config"]["KeyName"] = owned["key_name"] or owned["name"]
    head = types[config["head_node_type"]]["node_config"]
    if "IamInstanceProfile" not in head:
        arn = _create_role(config, owned)
        for kind in types.values() if owned["policies"] else [{"node_config": head}]:
            kind["node_config"].setdefault("IamInstanceProfile", {"Arn": arn})
        created.append(f"role {owned['name']}")
    return created


def _attach_group(node: Json, group: str) -> None:
    """Adds the group to the node's interfaces if it has any (EFA): EC2 accepts it only there."""
    interfaces = node.get("NetworkInterfaces")
    if not interfaces:
        node["SecurityGroupIds"] = [group]
    for interface in interfaces or ():
        interface.setdefault("Groups", [group])


def _check_zones(ec2: Any, provider: Json) -> None:
    """The first request to EC2: it raises the cloud's error for missing credentials or a wrong region."""
    known = [zone["ZoneName"] for zone in ec2.describe_availability_zones()["AvailabilityZones"]]
    asked = [zone.strip() for zone in (provider.get("availability_zone") or "").split(",") if zone.strip()]
    wrong = [zone for zone in asked if zone not in known]
    if wrong:
        raise Refused(
            f"{provider['region']} has no zone `{wrong[0]}`",
            cause=f"its zones: {', '.join(known)}",
            hint=f"zones: [{known[0]}]" if known else "",
            code=Code.CLOUD_REGION,
        )


def _find_image(ec2: Any, instance: str, region: str) -> str:
    """The newest Ubuntu image; for GPUs, the one with Nvidia's driver."""
    owner, name = WITH_DRIVER if GPUS.match(instance) and not ARM.match(instance) else UBUNTU
    name = name.format(arch="arm64" if ARM.match(instance) else "amd64")
    filters = [{"Name": "name", "Values": [name]}, {"Name": "state", "Values": ["available"]}]
    found = ec2.describe_images(Owners=[owner], Filters=filters)["Images"]
    if not found:
        raise Refused(
            f"no image for `{instance}` in {region}",
            cause=f"{owner} has no image `{name}`",
            hint="image: ami-… in the file",
            code=Code.CLOUD_IMAGE,
        )
    return str(max(found, key=lambda image: str(image.get("CreationDate")))["ImageId"])


def _find_vpc(ec2: Any, types: Mapping[str, Any]) -> str:
    nodes = [kind["node_config"] for kind in types.values()]
    subnets = [one for node in nodes for one in node.get("SubnetIds") or ()]
    written = [one.get("SubnetId") for node in nodes for one in node.get("NetworkInterfaces") or ()]
    subnets += [one for one in written if one]
    if subnets:
        return str(ec2.describe_subnets(SubnetIds=subnets[:1])["Subnets"][0]["VpcId"])
    found = ec2.describe_vpcs(Filters=[{"Name": "isDefault", "Values": ["true"]}])["Vpcs"]
    if not found:
        raise Refused(
            "the account has no default network",
            cause="no default VPC",
            hint="subnets: [subnet-…] in the file",
            code=Code.CLOUD_NETWORK,
        )
    return str(found[0]["VpcId"])


def _find_groups(ec2: Any, owned: OwnedResources) -> list[str]:
    found = ec2.describe_security_groups(Filters=[{"Name": "group-name", "Values": [owned["name"]]}])
    return [group["GroupId"] for group in found["SecurityGroups"]]


def _create_group(ec2: Any, owned: OwnedResources, vpc: str) -> str:
    """A group that allows all traffic between the nodes, and ssh from `ssh_from`: Ray chooses its ports freely."""
    found = _find_groups(ec2, owned)
    if not found:
        description = "Heliostat: the nodes of one Ray cluster, and ssh to them"
        created = ec2.create_security_group(
            GroupName=owned["name"],
            Description=description,
            VpcId=vpc,
            TagSpecifications=_tags("security-group", owned),
        )
        found = [created["GroupId"]]
        ec2.get_waiter("security_group_exists").wait(GroupIds=found)
    ssh = [{"CidrIp": cidr} for cidr in owned["ssh_from"]]
    rules: list[Json] = [{"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": found[0]}]}]
    if ssh:
        rules.append({"IpProtocol": "tcp", "FromPort": 22, "ToPort": 22, "IpRanges": ssh})
    for rule in rules:
        with _ignore_codes("InvalidPermission.Duplicate"):
            ec2.authorize_security_group_ingress(GroupId=found[0], IpPermissions=[rule])
    return str(found[0])


def _tags(kind: str, owned: OwnedResources) -> list[Json]:
    return [{"ResourceType": kind, "Tags": [{"Key": "heliostat", "Value": owned["mark"]}]}]


def _create_key_pair(ec2: Any, owned: OwnedResources) -> None:
    path, tags = Path(owned["key_file"]), _tags("key-pair", owned)
    if not owned["key_made"]:
        with _ignore_codes("InvalidKeyPair.Duplicate"):
            ec2.import_key_pair(
                KeyName=owned["name"],
                PublicKeyMaterial=_read_public_key(path).encode(),
                TagSpecifications=tags,
            )
        return
    if path.exists():
        return  # created by an earlier attempt
    ec2.delete_key_pair(KeyName=owned["name"])  # a key pair whose private key was lost
    created = ec2.create_key_pair(KeyName=owned["name"], KeyType="ed25519", TagSpecifications=tags)
    _write_private(path, created["KeyMaterial"].encode())


def _create_role(config: Json, owned: OwnedResources) -> str:
    """The head's role: it may create instances, and terminate those of its own cluster."""
    iam, name = _make_client("iam", config["provider"]["region"]), owned["name"]
    trust = {"Effect": "Allow", "Principal": {"Service": "ec2.amazonaws.com"}, "Action": "sts:AssumeRole"}
    with _ignore_codes("EntityAlreadyExists"):
        iam.create_role(
            RoleName=name,
            AssumeRolePolicyDocument=_render_policy([trust]),
            Tags=[{"Key": "heliostat", "Value": owned["mark"]}],
        )
    role = iam.get_role(RoleName=name)["Role"]["Arn"]
    iam.put_role_policy(
        RoleName=name, PolicyName=name, PolicyDocument=_render_policy(_role_statements(config, owned, role))
    )
    for policy in owned["policies"]:
        iam.attach_role_policy(RoleName=name, PolicyArn=policy)
    with _ignore_codes("EntityAlreadyExists"):
        iam.create_instance_profile(InstanceProfileName=name)
    with _ignore_codes("LimitExceeded"):
        iam.add_role_to_instance_profile(InstanceProfileName=name, RoleName=name)
    return str(iam.get_instance_profile(InstanceProfileName=name)["InstanceProfile"]["Arn"])


def _role_statements(config: Json, owned: OwnedResources, role: str) -> list[Json]:
    own_instances = {"StringEquals": {"ec2:ResourceTag/ray-cluster-name": config["cluster_name"]}}
    statements: list[Json] = [
        {"Effect": "Allow", "Action": ["ec2:Describe*", "ec2:RunInstances"], "Resource": "*"},
        {
            "Effect": "Allow",
            "Action": ["ec2:TerminateInstances", "ec2:CreateTags"],
            "Resource": "*",
            "Condition": own_instances,
        },
        {
            "Effect": "Allow",
            "Action": "ec2:CreateTags",
            "Resource": "*",
            "Condition": {"StringEquals": {"ec2:CreateAction": "RunInstances"}},
        },
    ]
    if owned["policies"]:  # the workers have the role too
        statements.append({"Effect": "Allow", "Action": "iam:PassRole", "Resource": role})
    return statements


def _render_policy(statements: list[Json]) -> str:
    return json.dumps({"Version": "2012-10-17", "Statement": statements})


def _iterate_instances(config: Json, states: list[str]) -> Iterator[Json]:
    ec2 = _make_client("ec2", config["provider"]["region"])
    filters = [
        {"Name": "tag:ray-cluster-name", "Values": [config["cluster_name"]]},
        {"Name": "instance-state-name", "Values": states},
    ]
    for page in ec2.get_paginator("describe_instances").paginate(Filters=filters):
        for reservation in page["Reservations"]:
            yield from reservation["Instances"]


def has_terminating_instances(config: Json) -> bool:
    """Whether instances are terminating: the objects that they use cannot be removed until then."""
    provider = config["provider"]
    if provider["type"] != "aws":
        return False
    states = ["shutting-down"] if provider.get("cache_stopped_nodes", True) else ["shutting-down", *ALIVE]
    return any(True for _ in _iterate_instances(config, states))


def read_end_reason(config: Json, tag: str) -> str:
    """Why the cluster terminated itself, from a tag of an instance, which AWS keeps for about an hour."""
    if config["provider"]["type"] != "aws":
        return ""
    for instance in _iterate_instances(config, ["shutting-down", "terminated"]):
        tags = {pair["Key"]: pair["Value"] for pair in instance.get("Tags") or ()}
        if tag in tags:
            return str(tags[tag])
    return ""


def _remove_aws(owned: OwnedResources) -> list[str]:
    ec2, iam, name, removed = (
        _make_client("ec2", owned["region"]),
        _make_client("iam", owned["region"]),
        owned["name"],
        [],
    )
    for group in _find_groups(ec2, owned):
        _delete_when_unused(lambda group=group: ec2.delete_security_group(GroupId=group))  # type: ignore[misc]
        removed.append(f"security group {group}")
    if owned["key_name"] is None:
        pairs = ec2.describe_key_pairs(Filters=[{"Name": "key-name", "Values": [name]}])["KeyPairs"]
        if pairs:
            ec2.delete_key_pair(KeyName=name)
            removed.append(f"key pair {name}")
    if owned["role_made"]:
        try:
            removed += [f"role {name}"] if _remove_role(iam, name) else []
        except Exception as error:
            if _error_code(error) not in PERMISSION_ERRORS:
                raise
            removed.append(
                f"no permission to check for a role {name}; it was not created without that permission"
            )
    return removed


def _delete_when_unused(delete: Callable[[], object]) -> None:
    """Retries the deletion: a terminated instance uses its group for some more seconds."""
    deadline = time.monotonic() + GROUP_FREE_TIMEOUT_S
    while True:
        try:
            with _ignore_codes("InvalidGroup.NotFound"):
                delete()
            return
        except Exception as error:
            if _error_code(error) != "DependencyViolation" or time.monotonic() > deadline:
                raise
            time.sleep(2)


def _remove_role(iam: Any, name: str) -> bool:
    missing = ("NoSuchEntity", "NoSuchEntityException")
    with _ignore_codes(*missing):
        iam.remove_role_from_instance_profile(InstanceProfileName=name, RoleName=name)
    with _ignore_codes(*missing):
        iam.delete_instance_profile(InstanceProfileName=name)
    try:
        iam.get_role(RoleName=name)
    except Exception as error:
        if _error_code(error) in missing:
            return False
        raise
    for policy in iam.list_attached_role_policies(RoleName=name)["AttachedPolicies"]:
        iam.detach_role_policy(RoleName=name, PolicyArn=policy["PolicyArn"])
    for policy in iam.list_role_policies(RoleName=name)["PolicyNames"]:
        iam.delete_role_policy(RoleName=name, PolicyName=policy)
    iam.delete_role(RoleName=name)
    return True


# -- for `doctor`


def check(config: Json) -> Json:
    """Checks credentials and region. Raises the errors of the cloud's library."""
    provider = config["provider"]
    if provider["type"] == "aws":
        zones = _make_client("ec2", provider["region"]).describe_availability_zones()["AvailabilityZones"]
        return {"found": f"{provider['region']} answers, {len(zones)} zones"}
    if provider["type"] == "gcp":
        import google.auth

        return {"found": f"credentials for the project {google.auth.default()[1]}"}
    from azure.identity import DefaultAzureCredential

    DefaultAzureCredential().get_token("https://management.azure.com/.default")
    return {"found": "credentials are valid"}
