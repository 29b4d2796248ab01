"""A cloud end to end, without an account: moto answers for EC2 and IAM, and behind the addresses of its instances are the lab's
hosts with sshd. What Ray's launcher and its autoscaler do is real; a thread plays the hypervisor, and pulls the plug of an
instance that was terminated.
"""

from __future__ import annotations

import json
import logging
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from moto.server import ThreadedMotoServer

from lab import NET, ROOT, USER, Lab, wait_for
from real.faults import four_lines
from real.onlab import no_clusters, ok, past

pytestmark = [pytest.mark.needs_slurm, pytest.mark.needs_ray]

REGION = "us-west-2"
HOSTS = {f"{NET}.4": "n4", f"{NET}.5": "n5"}  # EC2 keeps the first addresses of a network for itself
HELLO = """
import ray
ray.init(logging_level="ERROR")
print("nodes", sorted(n["NodeManagerAddress"] for n in ray.nodes() if n["Alive"]))
print("beside", open("beside.txt").read())
"""


class Cloud:
    """moto, and what happens to machines whose instances end."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        self.server = ThreadedMotoServer(ip_address=f"{NET}.254", port=0)
        self.server.start()
        host, port = self.server.get_host_and_port()
        self.env = {
            "AWS_ENDPOINT_URL": f"http://{host}:{port}",
            "AWS_ACCESS_KEY_ID": "testing",
            "AWS_SECRET_ACCESS_KEY": "testing",
            "AWS_EC2_METADATA_DISABLED": "true",
        }
        keys = {
            "endpoint_url": self.env["AWS_ENDPOINT_URL"],
            "aws_access_key_id": "testing",
            "aws_secret_access_key": "testing",
        }
        self.ec2 = boto3.client("ec2", region_name=REGION, **keys)
        self.iam = boto3.client("iam", region_name=REGION, **keys)
        image = self.ec2.describe_images(Owners=["099720109477"])["Images"][0]["ImageId"]
        self.image = str(image)
        self.dark: set[str] = set()
        self.groups, self.keys = self._groups(), self._keys()
        self.subnet = ""
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._pull_plugs, daemon=True)
        self.thread.start()

    def new_network(self) -> None:
        """moto never gives the address of an instance that has ended to another."""
        vpc = self.ec2.create_vpc(CidrBlock=f"{NET}.0/24")["Vpc"]["VpcId"]
        zone = f"{REGION}a"
        made = self.ec2.create_subnet(VpcId=vpc, CidrBlock=f"{NET}.0/24", AvailabilityZone=zone)
        self.subnet, self.groups = made["Subnet"]["SubnetId"], self._groups()

    def close(self) -> None:
        self.over.set()
        self.thread.join(60)
        self.server.stop()

    def instances(self, *states: str) -> list[dict[str, Any]]:
        found = self.ec2.describe_instances()["Reservations"]
        every = [one for reservation in found for one in reservation["Instances"]]
        return [one for one in every if not states or one["State"]["Name"] in states]

    def alive(self) -> list[str]:
        return [one["InstanceId"] for one in self.instances("pending", "running", "stopping", "stopped")]

    def _groups(self) -> set[str]:
        return {group["GroupId"] for group in self.ec2.describe_security_groups()["SecurityGroups"]}

    def _keys(self) -> set[str]:
        return {pair["KeyName"] for pair in self.ec2.describe_key_pairs()["KeyPairs"]}

    def left(self) -> list[str]:
        """Whatever a cluster may leave in the account."""
        roles = [role["RoleName"] for role in self.iam.list_roles()["Roles"]]
        profiles = [
            one["InstanceProfileName"] for one in self.iam.list_instance_profiles()["InstanceProfiles"]
        ]
        more = [*(self._groups() - self.groups), *(self._keys() - self.keys)]
        return [*self.alive(), *more, *roles, *profiles]

    def _pull_plugs(self) -> None:
        seen: dict[str, str] = {}
        while not self.over.wait(0.3):
            for one in self.instances():
                name, address = one["InstanceId"], one.get("PrivateIpAddress") or ""
                if one["State"]["Name"] == "running" and name not in seen:
                    seen[name] = HOSTS.get(address, "")
                if one["State"]["Name"] in ("terminated", "shutting-down") and seen.get(name):
                    host = seen.pop(name)
                    seen[name] = ""
                    self.lab.kill(host)
                    home = ROOT / "nodes" / host / "home"
                    shutil.rmtree(home / ".heliostat", ignore_errors=True)  # a new machine comes in its place
                    for path in home.glob("ray_bootstrap*"):
                        path.unlink()
                    self.lab.boot(host)


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with Lab(5, LAB_HOMES="1") as made:
        made.put("hello.py", HELLO)
        made.put("beside.txt", "me")
        made.put(".ssh/id_ed25519.pub", (ROOT / "ssh/id.pub").read_text())
        yield made


@pytest.fixture(scope="module")
def cloud(lab: Lab) -> Iterator[Cloud]:
    made = Cloud(lab)
    yield made
    made.close()


@pytest.fixture(autouse=True)
def nothing_left(lab: Lab, cloud: Cloud) -> Iterator[None]:
    """After each test: nothing in the account, no process on any machine, no file of ours but the history."""
    cloud.new_network()
    yield
    for name in json.loads(lab.heliostat("ls", "--json", env=cloud.env).out)["clusters"]:
        lab.heliostat("down", name["name"], env=cloud.env)
    wait_for("nothing in the account", lambda: not cloud.left())
    wait_for("both machines off and on again", lambda: not any(map(lab.left_on, HOSTS.values())))
    for module in ("heliostat.backends.cloud.launcher", "heliostat"):
        wait_for(f"no {module} on the login node", lambda m=module: not lab.find("ctl", "-m", m, user=None))  # type: ignore[misc]
    assert not lab.root("ctl", "sh", "-c", "ls -d /tmp/ray* /tmp/hl-* 2>/dev/null").out
    no_clusters(lab)


def write(lab: Lab, cloud: Cloud, **more: Any) -> str:
    """lab.yaml: a head and a worker. What is given comes on top."""
    path = f"export PATH={Path(lab.python).parent}:$PATH"
    site = {
        "region": REGION,
        "image": cloud.image,
        "subnets": [cloud.subnet],
        "internal_ips": True,
        "user": USER,
        "key": "~/.ssh/id_ed25519",
        "ssh_from": ["10.0.0.0/8"],
        "head": {"node": {"PrivateIpAddress": f"{NET}.4"}},
        **more.pop("aws", {}),
    }
    base = {
        "on": "aws",
        "name": "lab",
        "cpus_per_node": 2,
        "object_store": "100M",
        "groups": {"small": {"nodes": 1, "options": {"node": {"PrivateIpAddress": f"{NET}.5"}}}},
        "environment": {"setup": [path], "env": cloud.env},
        "aws": site,
    }
    lab.put("lab.yaml", json.dumps({**base, **more}))
    return "lab.yaml"


def test_a_day_in_the_cloud(lab: Lab, cloud: Cloud) -> None:
    """up, scale, status, submit, exec, logs; then nobody does anything, and the head ends its workers and itself."""

    def heliostat(*words: str) -> str:
        return ok(lab.heliostat(*words, env=cloud.env)).out

    groups = {"small": {"nodes": 0, "options": {"node": {"PrivateIpAddress": f"{NET}.5"}}}}
    file = write(lab, cloud, idle={"timeout": "30s"}, groups=groups)
    assert heliostat("up", file).strip() == f"{NET}.4:6379"
    heliostat("submit", "lab", "--", "sleep", "1000")  # while it runs, nothing is idle
    heliostat("scale", "lab", "1", "--group", "small")
    said = json.loads(heliostat("status", "lab", "--json"))
    nodes = {node["name"]: node for node in said["nodes"]}
    assert said["state"] == "ready" and list(nodes) == ["head", "small-1"]
    assert nodes["head"]["ip"] == f"{NET}.4" and nodes["small-1"]["ip"] == f"{NET}.5"
    assert all(node["reason"] == "m5.large" for node in nodes.values())
    assert sorted(cloud.alive()) == sorted(node["host"] for node in nodes.values())
    _safe(lab, cloud)
    out = heliostat("submit", "lab", "--wait", "--working-dir", ".", "--", "python", "hello.py")
    assert f"nodes ['{NET}.4', '{NET}.5']" in out and "beside me" in out
    assert heliostat("exec", "lab", "--", "hostname").split("\n")[:2] == ["head    | n4", "small-1 | n5"]
    assert "==> launcher.log <==" in heliostat("logs", "lab", "head")
    assert "==> raylet.out <==" in heliostat("logs", "lab", "small-1")
    (job,) = [
        one["id"]
        for one in json.loads(heliostat("jobs", "lab", "--json"))["jobs"]
        if one["status"] == "RUNNING"
    ]
    heliostat("stop", "lab", job)
    wait_for("the head ends its workers and itself", lambda: not cloud.alive(), 240)
    assert cloud.left(), "what only we may remove: the group, the key, the role"
    heliostat("ls")
    assert not cloud.left(), "whoever looks next has removed them"
    assert past(lab)["state"] == "ended"


def _safe(lab: Lab, cloud: Cloud) -> None:
    """Nothing is open but ssh from where it was asked for; the token is in no file that Ray shows, and in nobody's words."""
    (group,) = cloud.ec2.describe_security_groups(Filters=[{"Name": "tag-key", "Values": ["heliostat"]}])[
        "SecurityGroups"
    ]
    ranges = [
        (rule.get("FromPort"), [r["CidrIp"] for r in rule["IpRanges"]]) for rule in group["IpPermissions"]
    ]
    assert sorted(ranges, key=str) == [(22, ["10.0.0.0/8"]), (None, [])], ranges
    within = [pair["GroupId"] for rule in group["IpPermissions"] for pair in rule["UserIdGroupPairs"]]
    assert within == [group["GroupId"]]
    token = (lab.home / ".heliostat/clusters/lab/token").read_text()
    for host in HOSTS.values():
        home = ROOT / "nodes" / host / "home"
        (path,) = home.glob(".heliostat/*/token")
        assert path.read_text() == token and path.stat().st_mode & 0o777 == 0o600
        assert path.parent.stat().st_mode & 0o777 == 0o700
        shown = lab.root(host, "ps", "-wweo", "args").out + "".join(
            p.read_text() for p in home.glob("ray_bootstrap*")
        )
        assert token not in shown
    listens = lab.root("n4", "ss", "-tlnH").out
    assert "127.0.0.1:8265" in listens and "0.0.0.0:8265" not in listens and "*:8265" not in listens


def test_a_file_of_rays_launcher_for_one_script(lab: Lab, cloud: Cloud) -> None:
    """As it is, with its own start commands; the token and the watch are added, and everything goes with the script."""
    cloud.iam.create_instance_profile(InstanceProfileName="mine")  # else Ray makes its own, in half a minute
    key = (ROOT / "ssh/id.pub").read_bytes()
    cloud.ec2.import_key_pair(KeyName="mine", PublicKeyMaterial=key)
    vpc = cloud.ec2.describe_subnets(SubnetIds=[cloud.subnet])["Subnets"][0]["VpcId"]
    group = cloud.ec2.create_security_group(GroupName="mine", Description="mine", VpcId=vpc)["GroupId"]
    mine = set(cloud.left())
    node = {
        "InstanceType": "m5.large",
        "ImageId": cloud.image,
        "KeyName": "mine",
        "SubnetIds": [cloud.subnet],
        "SecurityGroupIds": [group],
        "PrivateIpAddress": f"{NET}.4",
        "IamInstanceProfile": {"Name": "mine"},
    }
    start = "ray start --head --port=6379 --object-store-memory=100000000 --autoscaling-config=~/ray_bootstrap_config.yaml"
    theirs = {
        "cluster_name": "theirs",
        "max_workers": 0,
        "provider": {"type": "aws", "region": REGION, "use_internal_ips": True, "cache_stopped_nodes": False},
        "auth": {"ssh_user": USER, "ssh_private_key": "~/.ssh/id_ed25519"},
        "available_node_types": {"ray.head.default": {"resources": {"CPU": 2}, "node_config": node}},
        "head_node_type": "ray.head.default",
        "setup_commands": [],
        "head_setup_commands": [],
        "head_start_ray_commands": ["ray stop", start],
    }
    lab.put("cluster.yaml", json.dumps(theirs))
    lines = [
        f"export PATH={Path(lab.python).parent}:$PATH",
        *(f"export {k}={v}" for k, v in cloud.env.items()),
    ]
    setup = [word for line in lines for word in ("--setup", line)]
    done = ok(lab.heliostat("run", "-f", "cluster.yaml", *setup, "hello.py", env=cloud.env))
    assert f"nodes ['{NET}.4']" in done.out and "beside me" in done.out
    assert "objects of Ray remain in the account" in done.err
    assert cloud.instances("terminated") and set(cloud.left()) == mine, "what was there is there"
    cloud.iam.delete_instance_profile(InstanceProfileName="mine")
    cloud.ec2.delete_key_pair(KeyName="mine")
    cloud.ec2.delete_security_group(GroupId=group)


def test_what_fails_leaves_nothing(lab: Lab, cloud: Cloud) -> None:
    """A machine that can be reached, and not be set up: its own last words are told."""
    broken = {"setup": ["echo there is no licence here; exit 7"]}
    done = lab.heliostat("up", write(lab, cloud, groups={}, nodes=1, environment=broken), env=cloud.env)
    assert done.rc == 1 and "no licence" in four_lines(done.err)["cause"], done.err
    assert cloud.instances("terminated") and not cloud.left()


def test_kill_9_of_up(lab: Lab, cloud: Cloud) -> None:
    up = lab.start("up", write(lab, cloud), env=cloud.env)
    wait_for("an instance", cloud.alive)
    lab.root("ctl", "kill", "-9", *lab.find("ctl", "-m", "heliostat", "up", user=None))
    up.wait(60)
    assert lab.find("ctl", "-m", "heliostat.backends.cloud.launcher", user=None), "it outlives the command"
    said = json.loads(ok(lab.heliostat("status", "lab", "--json", env=cloud.env)).out)
    assert said["state"] in ("queued", "starting")
    ok(lab.heliostat("down", "lab", env=cloud.env))
    assert not cloud.left()
