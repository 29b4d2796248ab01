"""What is made for one cluster beside its machines, and goes with it: on AWS a security group, a key pair and a role, on the
others a key. All have the cluster's own name, so that whoever ends it finds them, whatever became of the one who made them.

What Ray would make instead is shared by all Ray clusters of the account, and stays there: a group that anybody may ssh to, a
key of the whole project, a role with every right on EC2 and S3.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from heliostat.common.errors import Code, Refused

Json = dict[str, Any]
FREE_S = 300.0  # until a security group is used by nobody
NO_RIGHT = ("AccessDenied", "AccessDeniedException", "UnauthorizedOperation")
ALIVE = ["pending", "running", "stopping", "stopped"]
UBUNTU = ("099720109477", "ubuntu/images/hvm-ssd-gp3/ubuntu-noble-24.04-{arch}-server-*")
WITH_DRIVER = ("amazon", "Deep Learning Base OSS Nvidia Driver GPU AMI (Ubuntu 22.04)*")
ARM = re.compile(r"^[a-z]+\d+g[a-z]*\.")
GPUS = re.compile(r"^(p\d|g\d)")


def make(config: Json, own: Mapping[str, Any]) -> list[str]:
    """Makes them, or finds those that an earlier try has made, and puts their names into the config. What was made, in words."""
    if config["provider"]["type"] == "aws":
        return _aws(config, own)
    public = _local_key(own)
    config["auth"]["ssh_private_key"] = own["key_file"]
    if config["provider"]["type"] == "azure":
        config["auth"]["ssh_public_key"] = f"{own['key_file']}.pub"
        return ["a key"]
    for node in config["available_node_types"].values():  # of these machines alone, not of the project
        items = node["node_config"].setdefault("metadata", {}).setdefault("items", [])
        items.append({"key": "ssh-keys", "value": f"{config['auth']['ssh_user']}:{public}"})
    return ["a key"]


def remove(own: Mapping[str, Any]) -> list[str]:
    """Idempotent. Raises Refused when something of ours is still there."""
    for name in ("", ".pub") if own["key_made"] else ():
        Path(own["key_file"] + name).unlink(missing_ok=True)
    return _aws_remove(own) if own["backend"] == "aws" else []


def stays(config: Json, own: Mapping[str, Any] | None) -> list[str]:
    """What a person should know to be there still."""
    provider = config["provider"]
    backend, said = provider["type"], []
    if provider.get("cache_stopped_nodes", True):
        said.append(
            "its instances are stopped, not terminated, as the file says (cache_stopped_nodes): disks cost"
        )
    if backend == "aws" and own is None:
        group = f"ray-autoscaler-{config['cluster_name']}"
        said.append(
            f"what Ray made in the account stays: a security group {group}, a key pair, a role ray-autoscaler-v1"
        )
    if backend == "gcp":
        said.append(
            "the service account ray-autoscaler-sa-v1 stays: all Ray clusters of the project share it"
        )
    if backend == "azure":
        said.append(
            f"the resource group {provider['resource_group']} stays: it may hold more than this cluster"
        )
    return said


# -- keys of our own


def _local_key(own: Mapping[str, Any]) -> str:
    """The public half; made where there is none."""
    path = Path(own["key_file"])
    if not own.get("key_made") or path.with_name(path.name + ".pub").exists():
        return _public(path)
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


def _public(private: Path) -> str:
    path = private.with_name(private.name + ".pub")
    try:
        return path.read_text().strip()
    except OSError:
        raise Refused(
            f"the public half of `{private}` is missing",
            cause=f"there is no {path}",
            hint=f"ssh-keygen -y -f {private} > {path}",
            code=Code.CLOUD_KEY_PAIR,
        ) from None


# -- AWS


def _client(kind: str, region: str) -> Any:
    import boto3

    return boto3.client(kind, region_name=region)


def _code(error: Exception) -> str:
    return str(getattr(error, "response", {}).get("Error", {}).get("Code", ""))


@contextlib.contextmanager
def _but(*codes: str) -> Iterator[None]:
    """There already, or gone already: both are what we want."""
    try:
        yield
    except Exception as error:
        if _code(error) not in codes:
            raise


def _aws(config: Json, own: Mapping[str, Any]) -> list[str]:
    provider, types = config["provider"], config["available_node_types"]
    ec2 = _client("ec2", provider["region"])
    _check_zones(ec2, provider)
    made = []
    for kind in types.values():
        node = kind["node_config"]
        if node.get("ImageId") is None:
            node["ImageId"] = _image(ec2, node["InstanceType"], provider["region"])
    if not own["groups_given"]:
        group = _group(ec2, own, _vpc(ec2, types))
        for kind in types.values():
            _put_into(kind["node_config"], group)
        made.append(f"security group {group}")
    if own["key_name"] is None:
        _key_pair(ec2, own)
        made.append(f"key pair {own['name']}")
    config["auth"]["ssh_private_key"] = own["key_file"]
    for kind in types.values():
        kind["node_config"]["KeyName"] = own["key_name"] or own["name"]
    head = types[config["head_node_type"]]["node_config"]
    if "IamInstanceProfile" not in head:
        arn = _role(config, own)
        for kind in types.values() if own["policies"] else [{"node_config": head}]:
            kind["node_config"].setdefault("IamInstanceProfile", {"Arn": arn})
        made.append(f"role {own['name']}")
    return made


def _put_into(node: Json, group: str) -> None:
    """EC2 takes the groups of a machine whose interfaces are written out (EFA) only there."""
    interfaces = node.get("NetworkInterfaces")
    if not interfaces:
        node["SecurityGroupIds"] = [group]
    for interface in interfaces or ():
        interface.setdefault("Groups", [group])


def _check_zones(ec2: Any, provider: Json) -> None:
    """The first call: whoever has no credentials, or a wrong region, is told so here, in the cloud's own words."""
    known = [zone["ZoneName"] for zone in ec2.describe_availability_zones()["AvailabilityZones"]]
    asked = [zone.strip() for zone in (provider.get("availability_zone") or "").split(",") if zone.strip()]
    wrong = [zone for zone in asked if zone not in known]
    if wrong:
        raise Refused(
            f"there is no zone `{wrong[0]}` in {provider['region']}",
            cause=f"zones there: {', '.join(known)}",
            hint=f"zones: [{known[0]}]" if known else "",
            code=Code.CLOUD_REGION,
        )


def _image(ec2: Any, instance: str, region: str) -> str:
    """The newest image of its maker: Ubuntu, for GPUs the one with the driver."""
    owner, name = WITH_DRIVER if GPUS.match(instance) and not ARM.match(instance) else UBUNTU
    name = name.format(arch="arm64" if ARM.match(instance) else "amd64")
    filters = [{"Name": "name", "Values": [name]}, {"Name": "state", "Values": ["available"]}]
    found = ec2.describe_images(Owners=[owner], Filters=filters)["Images"]
    if not found:
        raise Refused(
            f"there is no image for `{instance}` in {region}",
            cause=f"nothing of {owner} is called `{name}`",
            hint="image: ami-… in the file",
            code=Code.CLOUD_IMAGE,
        )
    return str(max(found, key=lambda image: str(image.get("CreationDate")))["ImageId"])


def _vpc(ec2: Any, types: Mapping[str, Any]) -> str:
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


def _groups(ec2: Any, own: Mapping[str, Any]) -> list[str]:
    found = ec2.describe_security_groups(Filters=[{"Name": "group-name", "Values": [own["name"]]}])
    return [group["GroupId"] for group in found["SecurityGroups"]]


def _group(ec2: Any, own: Mapping[str, Any], vpc: str) -> str:
    """Everything among the nodes (Ray takes its ports as it likes), ssh from where it was asked for, nothing else."""
    found = _groups(ec2, own)
    if not found:
        words = "Heliostat: the nodes of one Ray cluster, and ssh to them"
        made = ec2.create_security_group(
            GroupName=own["name"],
            Description=words,
            VpcId=vpc,
            TagSpecifications=_tags("security-group", own),
        )
        found = [made["GroupId"]]
        ec2.get_waiter("security_group_exists").wait(GroupIds=found)
    ssh = [{"CidrIp": cidr} for cidr in own["ssh_from"]]
    rules: list[Json] = [{"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": found[0]}]}]
    if ssh:
        rules.append({"IpProtocol": "tcp", "FromPort": 22, "ToPort": 22, "IpRanges": ssh})
    for rule in rules:
        with _but("InvalidPermission.Duplicate"):
            ec2.authorize_security_group_ingress(GroupId=found[0], IpPermissions=[rule])
    return str(found[0])


def _tags(kind: str, own: Mapping[str, Any]) -> list[Json]:
    return [{"ResourceType": kind, "Tags": [{"Key": "heliostat", "Value": own["mark"]}]}]


def _key_pair(ec2: Any, own: Mapping[str, Any]) -> None:
    path, tags = Path(own["key_file"]), _tags("key-pair", own)
    if not own["key_made"]:
        with _but("InvalidKeyPair.Duplicate"):
            ec2.import_key_pair(
                KeyName=own["name"], PublicKeyMaterial=_public(path).encode(), TagSpecifications=tags
            )
        return
    if path.exists():
        return  # an earlier try has made it
    ec2.delete_key_pair(KeyName=own["name"])  # one whose private half was lost
    made = ec2.create_key_pair(KeyName=own["name"], KeyType="ed25519", TagSpecifications=tags)
    _write_private(path, made["KeyMaterial"].encode())


def _role(config: Json, own: Mapping[str, Any]) -> str:
    """What the head may do: make machines, and end those of its own cluster."""
    iam, name = _client("iam", config["provider"]["region"]), own["name"]
    trust = {"Effect": "Allow", "Principal": {"Service": "ec2.amazonaws.com"}, "Action": "sts:AssumeRole"}
    with _but("EntityAlreadyExists"):
        iam.create_role(
            RoleName=name,
            AssumeRolePolicyDocument=_policy([trust]),
            Tags=[{"Key": "heliostat", "Value": own["mark"]}],
        )
    role = iam.get_role(RoleName=name)["Role"]["Arn"]
    iam.put_role_policy(RoleName=name, PolicyName=name, PolicyDocument=_policy(_rights(config, own, role)))
    for policy in own["policies"]:
        iam.attach_role_policy(RoleName=name, PolicyArn=policy)
    with _but("EntityAlreadyExists"):
        iam.create_instance_profile(InstanceProfileName=name)
    with _but("LimitExceeded"):
        iam.add_role_to_instance_profile(InstanceProfileName=name, RoleName=name)
    return str(iam.get_instance_profile(InstanceProfileName=name)["InstanceProfile"]["Arn"])


def _rights(config: Json, own: Mapping[str, Any], role: str) -> list[Json]:
    ours = {"StringEquals": {"ec2:ResourceTag/ray-cluster-name": config["cluster_name"]}}
    rights: list[Json] = [
        {"Effect": "Allow", "Action": ["ec2:Describe*", "ec2:RunInstances"], "Resource": "*"},
        {
            "Effect": "Allow",
            "Action": ["ec2:TerminateInstances", "ec2:CreateTags"],
            "Resource": "*",
            "Condition": ours,
        },
        {
            "Effect": "Allow",
            "Action": "ec2:CreateTags",
            "Resource": "*",
            "Condition": {"StringEquals": {"ec2:CreateAction": "RunInstances"}},
        },
    ]
    if own["policies"]:  # the workers have the role too
        rights.append({"Effect": "Allow", "Action": "iam:PassRole", "Resource": role})
    return rights


def _policy(statements: list[Json]) -> str:
    return json.dumps({"Version": "2012-10-17", "Statement": statements})


def _instances(config: Json, states: list[str]) -> Iterator[Json]:
    ec2 = _client("ec2", config["provider"]["region"])
    filters = [
        {"Name": "tag:ray-cluster-name", "Values": [config["cluster_name"]]},
        {"Name": "instance-state-name", "Values": states},
    ]
    for page in ec2.get_paginator("describe_instances").paginate(Filters=filters):
        for reservation in page["Reservations"]:
            yield from reservation["Instances"]


def ending(config: Json) -> bool:
    """Instances are on their way out: while they are, nothing that they use can be removed."""
    provider = config["provider"]
    if provider["type"] != "aws":
        return False
    states = ["shutting-down"] if provider.get("cache_stopped_nodes", True) else ["shutting-down", *ALIVE]
    return any(True for _ in _instances(config, states))


def last_words(config: Json, tag: str) -> str:
    """Why the cluster ended itself: AWS remembers an instance and its tags for a while."""
    if config["provider"]["type"] != "aws":
        return ""
    for instance in _instances(config, ["shutting-down", "terminated"]):
        said = {pair["Key"]: pair["Value"] for pair in instance.get("Tags") or ()}
        if tag in said:
            return str(said[tag])
    return ""


def _aws_remove(own: Mapping[str, Any]) -> list[str]:
    ec2, iam, name, removed = _client("ec2", own["region"]), _client("iam", own["region"]), own["name"], []
    for group in _groups(ec2, own):
        _when_free(lambda group=group: ec2.delete_security_group(GroupId=group))  # type: ignore[misc]
        removed.append(f"security group {group}")
    if own["key_name"] is None:
        pairs = ec2.describe_key_pairs(Filters=[{"Name": "key-name", "Values": [name]}])["KeyPairs"]
        if pairs:
            ec2.delete_key_pair(KeyName=name)
            removed.append(f"key pair {name}")
    if own["role_made"]:
        try:
            removed += [f"role {name}"] if _remove_role(iam, name) else []
        except Exception as error:
            if _code(error) not in NO_RIGHT:
                raise
            removed.append(f"no right to look for a role {name}: without one it was not made either")
    return removed


def _when_free(delete: Callable[[], object]) -> None:
    """An instance that has ended holds its group for some seconds more."""
    deadline = time.monotonic() + FREE_S
    while True:
        try:
            with _but("InvalidGroup.NotFound"):
                delete()
            return
        except Exception as error:
            if _code(error) != "DependencyViolation" or time.monotonic() > deadline:
                raise
            time.sleep(2)


def _remove_role(iam: Any, name: str) -> bool:
    gone = ("NoSuchEntity", "NoSuchEntityException")
    with _but(*gone):
        iam.remove_role_from_instance_profile(InstanceProfileName=name, RoleName=name)
    with _but(*gone):
        iam.delete_instance_profile(InstanceProfileName=name)
    try:
        iam.get_role(RoleName=name)
    except Exception as error:
        if _code(error) in gone:
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
    """Whether this machine may ask the cloud at all. Raises what the cloud's library raises."""
    provider = config["provider"]
    if provider["type"] == "aws":
        zones = _client("ec2", provider["region"]).describe_availability_zones()["AvailabilityZones"]
        return {"found": f"{provider['region']} answers, {len(zones)} zones"}
    if provider["type"] == "gcp":
        import google.auth

        return {"found": f"credentials for the project {google.auth.default()[1]}"}
    from azure.identity import DefaultAzureCredential

    DefaultAzureCredential().get_token("https://management.azure.com/.default")
    return {"found": "credentials are there"}
