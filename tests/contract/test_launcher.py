"""The clouds' own promises, against fakes that keep state: moto for AWS, a small fake for Google's interface. No machine is
behind an instance here: its address refuses ssh at once."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from moto.server import ThreadedMotoServer

from contract.fake_gcp import FakeGcp
from heliostat import backends
from heliostat.backends.base import Handle, LaunchRequest, Plan
from heliostat.backends.cloud import operations
from heliostat.backends.cloud.launcher import resources
from heliostat.cluster import planner
from heliostat.cluster.manager import ClusterManager
from heliostat.common.errors import HeliostatError
from heliostat.common.events import Event
from heliostat.common.processes import process_start
from heliostat.config import loader
from heliostat.config.spec import ClusterSpec
from heliostat.remote.transport import Local
from heliostat.state.store import ClusterDirectory, Store
from shared import until

REGION = "us-west-2"
MARK = "0123456789abcdef"
KEYS = {"aws_access_key_id": "testing", "aws_secret_access_key": "testing"}


class Account:
    """One AWS account, as a person sees it."""

    def __init__(self, url: str) -> None:
        self.ec2 = boto3.client("ec2", region_name=REGION, endpoint_url=url, **KEYS)
        self.iam = boto3.client("iam", region_name=REGION, endpoint_url=url, **KEYS)
        vpc = self.ec2.create_vpc(CidrBlock="127.0.0.0/24")["Vpc"]["VpcId"]
        made = self.ec2.create_subnet(VpcId=vpc, CidrBlock="127.0.0.0/24", AvailabilityZone=f"{REGION}a")
        self.subnet = made["Subnet"]["SubnetId"]
        self.image = self.ec2.describe_images(Owners=["099720109477"])["Images"][0]["ImageId"]
        self.before = self.everything()

    def alive(self) -> list[str]:
        every = [one for r in self.ec2.describe_instances()["Reservations"] for one in r["Instances"]]
        return [one["InstanceId"] for one in every if one["State"]["Name"] != "terminated"]

    def everything(self) -> set[str]:
        groups = {group["GroupId"] for group in self.ec2.describe_security_groups()["SecurityGroups"]}
        keys = {pair["KeyName"] for pair in self.ec2.describe_key_pairs()["KeyPairs"]}
        roles = {role["RoleName"] for role in self.iam.list_roles()["Roles"]}
        profiles = {
            one["InstanceProfileName"] for one in self.iam.list_instance_profiles()["InstanceProfiles"]
        }
        return {*self.alive(), *groups, *keys, *roles, *(f"{name} (profile)" for name in profiles)}

    def new(self) -> set[str]:
        return self.everything() - self.before

    def instance(self, **tags: str) -> str:
        """Somebody else's."""
        pairs = [{"Key": key.replace("_", "-"), "Value": value} for key, value in tags.items()]
        made = self.ec2.run_instances(
            ImageId=self.image, MinCount=1, MaxCount=1, SubnetId=self.subnet,
            TagSpecifications=[{"ResourceType": "instance", "Tags": pairs}],
        )  # fmt: skip
        return str(made["Instances"][0]["InstanceId"])


@pytest.fixture(scope="module")
def moto() -> Iterator[str]:
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def account(moto: str, monkeypatch: pytest.MonkeyPatch) -> Account:
    import urllib.request

    urllib.request.urlopen(urllib.request.Request(f"{moto}/moto-api/reset", method="POST")).close()
    monkeypatch.setenv("AWS_ENDPOINT_URL", moto)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for name in ("AWS_PROFILE", "AWS_DEFAULT_REGION", "AWS_REGION"):
        monkeypatch.delenv(name, raising=False)
    return Account(moto)


def spec(account: Account, **more: Any) -> ClusterSpec:
    """A head behind an address at which nobody listens for ssh."""
    site = {
        "region": REGION,
        "image": account.image,
        "subnets": [account.subnet],
        "internal_ips": True,
        "wait": 1,
        "head": {"node": {"PrivateIpAddress": "127.0.0.9"}},
        **more.pop("aws", {}),
    }
    values = {"on": "aws", "name": "lab", "nodes": 1, "cpus_per_node": 2, "aws": site, **more}
    return loader.check(values, {}, backends)


class Site:
    """The backend and one cluster's folder, by its seam."""

    def __init__(self, spec: ClusterSpec, folder: Path) -> None:
        self.backend: Any = backends.load(spec.on)
        place = ClusterDirectory(folder)
        self.request: LaunchRequest
        self.plan: Plan
        self.request, self.plan = planner.plan(place, spec, cluster_id=MARK)
        for file in self.plan.files:
            folder.joinpath(file.path.name).write_text(file.text)
        (folder / "token").write_text("secret")
        (folder / "agent.pyz").write_bytes(b"agent")
        self.launching = self.backend.launch(self.plan, self.request, Local())
        self.folder = folder

    def start(self) -> Handle:
        """The handle, and the operation on its way."""
        handle: Handle = next(self.launching)
        next(self.launching, None)
        return handle

    def ask(self, verb: str, **more: Any) -> dict[str, Any]:
        request = {"do": verb, **{key: self.plan.steps[0].config[key] for key in ("config", "own")}, **more}
        answer: dict[str, Any] = operations.run_operation(
            self.backend.name, request, self.folder, Local(), 120
        )
        return answer


# -- the whole way, by the lifecycle


def test_a_failed_up_leaves_nothing(account: Account, tmp_path: Path) -> None:
    other = account.instance(ray_cluster_name="lab")
    events: list[Event] = []
    life = ClusterManager(Store(tmp_path / "home"), events.append)
    with pytest.raises(HeliostatError) as error:
        life.up(spec(account))
    assert "did not start" in error.value.message and "Connection refused" in error.value.cause
    assert account.new() == {other}, "somebody else's cluster of the same name is not ours"
    assert not life.store.names() and life.store.last_archived("lab")
    (place,) = (tmp_path / "home/history").iterdir()
    assert not any((place / name).exists() for name in ("token", "key", "tmp")), sorted(place.iterdir())
    assert "secret" not in (place / "logs/head/launcher.log").read_text()
    removed = [event.text for event in events if event.text.startswith("removed: ")]
    assert len(removed) == 1 and all(
        word in removed[0] for word in ("security group sg-", "key pair", "role")
    )


def test_the_handle_is_there_before_anything_is(account: Account, tmp_path: Path) -> None:
    site = Site(spec(account), tmp_path)
    handle = next(site.launching)
    assert handle.native_id == f"aws/{REGION}/lab-01234567" and not account.new()
    site.launching.close()  # whoever asked for it died
    site.backend.cancel([handle], Local())
    assert not account.new()


def test_a_launcher_that_is_at_work_is_ended_first(account: Account, tmp_path: Path) -> None:
    site = Site(spec(account, aws={"wait": 600}), tmp_path)
    handle = site.start()
    process = json.loads((tmp_path / "launcher.json").read_text())
    until(account.alive, "an instance")
    told = site.backend.platform_status(handle, site.request.members, {}, Local())
    assert told.nodes["head"]["state"] in ("QUEUED", "ALLOCATED") and told.connection is None
    assert process_start(process["pid"]) == process["start"]
    site.backend.cancel([handle], Local())
    assert process_start(process["pid"]) is None and not account.new()
    assert not (tmp_path / "tmp").exists() and not (tmp_path / "key").exists()
    site.backend.cancel([handle], Local())  # twice is once


# -- what is ours


def test_own_things_are_made_once_and_go(account: Account, tmp_path: Path) -> None:
    site = Site(spec(account, aws={"ssh_from": ["192.0.2.0/24"]}), tmp_path)
    mine = account.ec2.create_security_group(GroupName="mine", Description="mine", VpcId=_vpc(account))[
        "GroupId"
    ]
    request = json.loads(json.dumps(site.plan.steps[0].config))
    resources.create(request["config"], request["own"])  # by one who died half way
    with pytest.raises(HeliostatError, match="rejected the request"):
        site.ask("create", wait_s=0)
    (group,) = account.ec2.describe_security_groups(
        Filters=[{"Name": "group-name", "Values": ["heliostat-lab-01234567"]}]
    )["SecurityGroups"]
    rules = {
        (rule.get("FromPort"), *(r["CidrIp"] for r in rule["IpRanges"])) for rule in group["IpPermissions"]
    }
    assert rules == {(None,), (22, "192.0.2.0/24")}
    assert len(account.alive()) == 1 and (tmp_path / "key").stat().st_mode & 0o777 == 0o600
    policy = account.iam.get_role_policy(
        RoleName="heliostat-lab-01234567", PolicyName="heliostat-lab-01234567"
    )
    assert "ray-cluster-name" in json.dumps(policy["PolicyDocument"]) and "s3" not in json.dumps(
        policy["PolicyDocument"]
    )
    answer = site.ask("terminate")
    assert len(answer["ended"]) == 1 and len(answer["removed"]) == 3 and not answer["stays"]
    assert account.new() == {mine}
    assert site.ask("terminate")["removed"] == []


def _vpc(account: Account) -> str:
    return str(account.ec2.describe_subnets(SubnetIds=[account.subnet])["Subnets"][0]["VpcId"])


def test_what_exists_already_is_used_and_stays(account: Account, tmp_path: Path) -> None:
    group = account.ec2.create_security_group(GroupName="mine", Description="mine", VpcId=_vpc(account))[
        "GroupId"
    ]
    pair = account.ec2.create_key_pair(KeyName="mine")
    (tmp_path / "mine.pem").write_text(pair["KeyMaterial"])
    account.iam.create_instance_profile(InstanceProfileName="mine")
    given = {
        "key": str(tmp_path / "mine.pem"),
        "key_name": "mine",
        "profile": "mine",
        "security_groups": [group],
    }
    site = Site(spec(account, aws=given), tmp_path)
    before = account.new()
    with pytest.raises(HeliostatError):
        site.ask("create", wait_s=0)
    assert len(account.new() - before) == 1, "the instance, and nothing else"
    assert site.ask("terminate")["removed"] == [] and account.new() == before
    assert (tmp_path / "mine.pem").exists()


def test_interfaces_that_are_written_out_get_the_group(account: Account, tmp_path: Path) -> None:
    """As a machine with EFA needs it; EC2 takes no group beside them."""
    efa = {"DeviceIndex": 0, "SubnetId": account.subnet, "InterfaceType": "efa"}
    table = {
        "subnets": [],
        "head": {"node": {"NetworkInterfaces": [efa]}},
        "node": {"NetworkInterfaces": [efa]},
    }
    site = Site(spec(account, aws=table), tmp_path)
    with pytest.raises(HeliostatError):
        site.ask("create", wait_s=0)
    (name,) = account.alive()
    (made,) = account.ec2.describe_instances(InstanceIds=[name])["Reservations"][0]["Instances"]
    assert [group["GroupName"] for group in made["NetworkInterfaces"][0]["Groups"]] == [
        "heliostat-lab-01234567"
    ]
    site.ask("terminate")
    assert not account.new()


def test_stopped_and_not_terminated_is_said(account: Account, tmp_path: Path) -> None:
    """A file of Ray's own that leaves out cache_stopped_nodes has its default."""
    made = Site(spec(account), tmp_path).plan.steps[0].config["config"]
    theirs = {**made, "cluster_name": "team", "provider": {"type": "aws", "region": REGION}}
    ours = [account.instance(ray_cluster_name="team", ray_node_type="head")]
    values = {"on": "aws", "name": "team", "aws": {"launcher_yaml": theirs}}
    (tmp_path / "two").mkdir()
    site = Site(loader.check(values, {}, backends), tmp_path / "two")
    answer = site.ask("terminate")
    assert answer["ended"] == ours and "stopped, not terminated" in answer["stays"][0]
    assert account.alive() == ours, "it is stopped"


# -- who is refused is told what to type


@pytest.mark.parametrize(
    ("change", "what", "hint"),
    [
        ({"AWS_ACCESS_KEY_ID": None, "AWS_SECRET_ACCESS_KEY": None, "HOME": "/nowhere"}, "credentials", "aws configure"),
        ({"AWS_ENDPOINT_URL": "http://127.0.0.1:1"}, "Could not connect", f"check that `{REGION}` is a region of aws"),
        ({"PYTHONPATH": "hidden"}, "boto3", "pip install 'heliostat[aws]'"),
    ],
    ids=["no credentials", "no such region", "no packages"],
)  # fmt: skip
def test_before_anything_is_started(
    account: Account, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    change: dict[str, str | None], what: str, hint: str,
) -> None:  # fmt: skip
    (tmp_path / "hidden").mkdir()
    (tmp_path / "hidden/boto3.py").write_text(
        "raise ModuleNotFoundError(\"No module named 'boto3'\", name='boto3')\n"
    )
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    for name, value in change.items():
        path = f"{tmp_path / 'hidden'}:{os.environ.get('PYTHONPATH', '')}:{':'.join(sys.path)}"
        monkeypatch.setenv(name, path if value == "hidden" else value) if value else monkeypatch.delenv(name)
    life = ClusterManager(Store(tmp_path / "home"))
    with pytest.raises(HeliostatError) as error:
        life.up(spec(account))
    assert what in error.value.cause and hint in error.value.hint, error.value.fields()
    assert not life.store.names()
    checks = {check.name: check for check in backends.load("aws").checks(spec(account), Local())}
    assert checks["account"].verdict == "fail" and hint in checks["account"].hint


def test_a_zone_that_is_not_there(account: Account, tmp_path: Path) -> None:
    site = Site(spec(account, aws={"zones": ["us-west-2z"]}), tmp_path)
    with pytest.raises(HeliostatError, match="has no zone `us-west-2z`") as error:
        site.ask("create")
    assert "us-west-2a" in error.value.cause and not account.new()


def test_doctor_is_content(account: Account) -> None:
    checks = backends.load("aws").checks(spec(account), Local())
    assert [check.verdict for check in checks] == ["ok"] * 4 and f"{REGION} answers" in checks[-1].found


# -- Google's


@pytest.fixture
def google(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGcp]:
    """Ray's clients for Google know no other address: it is put into them."""
    from ray.autoscaler._private.gcp import config as ray_gcp

    fake = FakeGcp()

    def led_here(make: Any) -> Any:
        def made(*words: Any, **more: Any) -> Any:
            client = make(*words, **more)
            host = client._baseUrl.split("/")[2]
            client._baseUrl = client._baseUrl.replace(host, fake.address).replace("https", "http")
            return client

        return made

    for name in ("_create_crm", "_create_iam", "_create_compute"):
        monkeypatch.setattr(ray_gcp, name, led_here(getattr(ray_gcp, name)))
    yield fake
    fake.close()


def test_google_takes_what_we_write(google: FakeGcp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bootstrap, a head and a worker with GPUs, looking, and the end."""
    from ray.autoscaler import sdk
    from ray.autoscaler._private.providers import _get_node_provider

    from heliostat.backends.cloud.launcher import __main__ as launching

    table = {"project": "my-project-id", "spot": True}
    groups = {
        "gpu": {"nodes": 1, "gpus": 1, "options": {"instance": "n1-standard-8", "gpu": "nvidia-tesla-t4"}}
    }
    values = {"on": "gcp", "name": "lab", "groups": groups, "gcp": table}
    _, plan = planner.plan(ClusterDirectory(tmp_path), loader.check(values, {}, backends), cluster_id=MARK)
    request = json.loads(json.dumps(plan.steps[0].config))
    made = request["config"]
    made["file_mounts"] = {}
    made["provider"]["gcp_credentials"] = {"type": "credentials_token", "credentials": "fake"}
    resources.create(made, request["own"])
    ready = sdk.bootstrap_config(made, no_config_cache=True)
    assert google.project == {"items": []}, "no key of the whole project"
    provider = _get_node_provider(ready["provider"], ready["cluster_name"], use_cache=False)
    for kind in ("head", "gpu"):
        role = "head" if kind == "head" else "worker"
        tags = {
            "ray-node-type": role,
            "ray-user-node-type": kind,
            "ray-node-status": "up-to-date",
            "ray-launch-config": "a",
        }
        node = {**ready["head_node"], **ready["available_node_types"][kind]["node_config"]} if kind == "head" else (
            ready["available_node_types"][kind]["node_config"]
        )  # fmt: skip
        provider.create_node(node, {**tags, "ray-node-name": f"ray-{kind}"}, 1)
    head, worker = google.instances.values()
    keys = [item["value"] for item in head["metadata"]["items"] if item["key"] == "ssh-keys"]
    assert keys[0].startswith("ubuntu:ssh-ed25519 ") and "PRIVATE" not in json.dumps(google.instances)
    assert worker["scheduling"]["provisioningModel"] == "SPOT" and "scheduling" not in head
    assert worker["guestAccelerators"][0]["acceleratorCount"] == 1
    assert (tmp_path / "key").stat().st_mode & 0o777 == 0o600
    seen = launching.list_instances({"config": made})["nodes"]
    assert [(one["role"], one["type"], one["external_ip"]) for one in seen] == [
        ("head", "head", "203.0.113.7"),
        ("worker", "gpu", "203.0.113.7"),
    ]
    google.instances["other"] = {**head, "name": "other", "labels": {"ray-cluster-name": "another"}}
    monkeypatch.setattr(launching, "RETRY_DELAY_S", 0.05)
    answer = launching.terminate(request)
    assert sorted(answer["ended"]) == sorted(one["id"] for one in seen)
    assert list(google.instances) == ["other"] and "ray-autoscaler-sa-v1" in answer["stays"][0]
