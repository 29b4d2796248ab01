"""What Ray's launcher is told of a cluster in a cloud: golden files, each of which Ray itself takes."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from heliostat import backends
from heliostat.backends.base import Handle, LaunchRequest, Plan
from heliostat.backends.cloud import operations
from heliostat.backends.cloud.instances import count_cpus, count_gpus
from heliostat.backends.cloud.launcher import refusals
from heliostat.cluster import planner
from heliostat.common.errors import HeliostatError, UsageError
from heliostat.config import loader
from heliostat.config.spec import ClusterSpec
from heliostat.state.records import NodeRecord
from heliostat.state.store import ClusterDirectory

GOLDEN = Path(__file__).parents[1] / "golden"
FOLDER = Path("/home/ann/.heliostat/clusters/lab")
GCP: dict[str, Any] = {"project": "my-project-id"}
AZURE: dict[str, Any] = {"subscription": "00000000-0000-0000-0000-000000000000", "resource_group": "ray-lab"}
SITES: dict[str, dict[str, Any]] = {"aws": {}, "gcp": GCP, "azure": AZURE}
EVERYTHING: dict[str, dict[str, Any]] = {
    "aws": {
        "nodes": None,
        "groups": {
            "cpu": {"min": 1, "max": 4},
            "gpu": {"nodes": 0, "max": 2, "labels": {"kind": "gpu"}, "options": {"instance": "g5.xlarge", "spot": True}},
        },
        "idle": {"timeout": "1h", "window": "02:30-09:00"},
        "time": "8:00:00",
        "autoscale": {"min": 0, "max": 4, "idle": "5m"},
        "object_store": "1G",
        "price_per_node_hour": 0.096,
        "environment": {"ray": "2.55.1", "setup": ["module load cuda"], "env": {"NCCL_SOCKET_IFNAME": "ib0", "A": "b c"}},
        "aws": {
            "region": "eu-west-1",
            "zones": ["eu-west-1b", "eu-west-1a"],
            "image": "ami-0123",
            "disk": 200,
            "user": "ec2-user",
            "key": "/home/ann/.ssh/lab.pem",
            "key_name": "lab",
            "subnets": ["subnet-1"],
            "security_groups": ["sg-1"],
            "profile": "ray-head",
            "head": {"instance": "m5.xlarge"},
            "node": {"EbsOptimized": True},
            "launcher": {"provider": {"cloudwatch": {}}, "upscaling_speed": 2.0},
        },
    },
    "gcp": {
        "nodes": None,
        "groups": {"gpu": {"nodes": 2, "gpus": 4, "options": {"instance": "n1-standard-8", "gpu": "nvidia-tesla-v100"}}},
        "gcp": {**GCP, "region": "us-west1", "zones": ["us-west1-b"], "disk": 50, "spot": True},
    },
    "azure": {
        "nodes": None,
        "groups": {"gpu": {"nodes": 2, "options": {"instance": "Standard_NC6s_v3"}}},
        "autoscale": {"min": 2, "max": 10},
        "azure": {**AZURE, "region": "westeurope", "zones": ["1", "2"], "spot": True},
    },
}  # fmt: skip


def spec(site: str, **more: Any) -> ClusterSpec:
    values = {"on": site, "name": "lab", "nodes": 3, site: SITES[site], **more}
    return loader.check({key: value for key, value in values.items() if value is not None}, {}, backends)


def planned(site: str, folder: Path = FOLDER, **more: Any) -> tuple[LaunchRequest, Plan]:
    return planner.plan(ClusterDirectory(folder), spec(site, **more), cluster_id="0123456789abcdef")


def launcher(site: str, **more: Any) -> dict[str, Any]:
    made: dict[str, Any] = planned(site, **more)[1].steps[0].config["config"]
    return made


def text(plan: Plan) -> str:
    return "\n".join(f"=== {file.path.name} {file.mode:o}\n{file.text}" for file in plan.files)


def taken(made: dict[str, Any]) -> dict[str, Any]:
    """As Ray takes it, in the order in which Ray does; what AWS would be asked for is made up."""
    from ray.autoscaler import sdk
    from ray.autoscaler._private.util import prepare_config, validate_config

    sdk.fillout_defaults(made)
    for kind in made["available_node_types"].values():
        kind.setdefault("resources", {"CPU": 2})
    prepared: dict[str, Any] = prepare_config(made)
    validate_config(prepared)
    return prepared


@pytest.mark.parametrize("site", SITES)
@pytest.mark.parametrize("kind", ["plain", "everything"])
def test_golden(site: str, kind: str) -> None:
    _, plan = planned(site, **(EVERYTHING[site] if kind == "everything" else {}))
    path = GOLDEN / f"{site}-{kind}.txt"
    assert text(plan) == path.read_text()
    assert all(f"# {note}\n" in plan.files[0].text for note in plan.notes)
    assert yaml.safe_load(plan.files[0].text) == plan.steps[0].config["config"]
    for file in plan.files[1:3]:
        checked = subprocess.run(["bash", "-n"], input=file.text, text=True, capture_output=True)
        assert checked.returncode == 0, checked.stderr
    taken(plan.steps[0].config["config"])


@pytest.mark.parametrize("site", SITES)
def test_safe_by_default(site: str) -> None:
    """The token travels in a file, Ray has one version, the dashboard is on loopback, nobody else's Ray is stopped."""
    request, plan = planned(site)
    made = plan.steps[0].config["config"]
    home = f"~/.heliostat/{request.config['mark']}"
    assert made["file_mounts"][f"{home}/token"] == str(FOLDER / "token")
    starts = [made["head_start_ray_commands"][0], *made["worker_start_ray_commands"]]
    assert all(start.startswith(f". {home}/env.sh && ") for start in starts)
    assert "--dashboard-host=127.0.0.1" in starts[0] and "ray stop" not in json.dumps(made)
    files = {file.path.name: file for file in plan.files}
    assert 'RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH="$HOME/.heliostat/' in files["env.sh"].text
    assert "'ray[default]==2.60.0'" in files["setup.sh"].text
    assert made["provider"]["cache_stopped_nodes"] is False
    assert all(file.mode & 0o077 == 0 for file in plan.files)
    secret = launcher(site, environment={"env": {"MY_SECRET": "hunter2"}})
    assert "hunter2" not in json.dumps(secret), "an environment may hold secrets: it travels in a file"


def test_without_a_token() -> None:
    _, plan = planned("aws", security={"auth": "none"})
    assert "token" not in text(plan).replace('"token": false', "")


def test_kinds_and_counts() -> None:
    made = launcher("aws", **EVERYTHING["aws"])
    kinds = made["available_node_types"]
    counts = {name: (kind.get("min_workers"), kind["max_workers"]) for name, kind in kinds.items()}
    assert counts == {"head": (None, 0), "cpu": (1, 4), "gpu": (0, 2)} and made["max_workers"] == 6
    assert made["idle_timeout_minutes"] == 5 and made["upscaling_speed"] == 2.0
    assert kinds["head"]["node_config"]["InstanceType"] == "m5.xlarge"
    assert [("InstanceMarketOptions" in kind["node_config"]) for kind in kinds.values()] == [
        False,
        False,
        True,
    ]
    assert all(kind["node_config"]["EbsOptimized"] for kind in kinds.values())
    assert launcher("aws", nodes=1)["available_node_types"]["worker"]["max_workers"] == 0


def test_spot_is_never_the_head() -> None:
    kinds = launcher("azure", azure={**AZURE, "spot": True})["available_node_types"]
    spot = {name: kind["node_config"]["azure_arm_parameters"].get("priority") for name, kind in kinds.items()}
    assert spot == {"head": None, "worker": "Spot"}


def test_two_clusters_of_one_name_share_no_machine() -> None:
    names = {
        planner.plan(ClusterDirectory(FOLDER), spec("aws"), cluster_id=mark)[1]
        .steps[0]
        .config["config"]["cluster_name"]
        for mark in ("0123456789abcdef", "fedcba9876543210")
    }
    assert names == {"lab-01234567", "lab-fedcba98"}


@pytest.mark.parametrize(
    ("site", "more", "what"),
    [
        ("gcp", {"gcp": {}}, "`gcp.project` is missing"),
        ("azure", {"azure": {"subscription": "x"}}, "`azure.resource_group` is missing"),
        ("aws", {"gpus_per_node": 1}, "`m5.large` has no GPU"),
        ("gcp", {"gpus_per_node": 1}, "`n2-standard-4` has no GPU"),
        ("gcp", {"gcp": {**GCP, "instance": "odd"}}, "the number of CPUs of `odd` is unknown"),
        ("azure", {"azure": {**AZURE, "image": "ubuntu"}}, "`ubuntu` is not an image"),
        ("aws", {"aws": {"head": {"size": 3}}}, "unknown key `head.size`"),
        ("aws", {"aws": {"instanc": "x"}}, "unknown key `aws.instanc`"),
        ("aws", {"network": {"interface": "eth0"}}, "`network.interface` is not supported on `aws`"),
        ("aws", {"environment": {"container": "x.sif"}}, "`environment.container` is not supported"),
        ("aws", {"environment": {"requirements": "/nowhere.txt"}}, "the file `/nowhere.txt` does not exist"),
        ("aws", {"nodes": None, "groups": {"head": {}}}, "a group cannot have the name `head`"),
    ],
)
def test_what_cannot_be_done_is_said_before(site: str, more: dict[str, Any], what: str) -> None:
    with pytest.raises(UsageError) as error:
        planned(site, **more)
    assert what in error.value.message


@pytest.mark.parametrize("site", SITES)
def test_the_examples_are_taken(site: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "requirements.txt").touch()
    monkeypatch.chdir(tmp_path)
    file = Path(__file__).parents[3] / "examples" / f"{site}.yaml"
    found = loader.load(backends, file=file, environ={}).spec
    taken(planner.plan(ClusterDirectory(FOLDER), found)[1].steps[0].config["config"])


# -- a file of Ray's launcher

THEIRS = """
cluster_name: team
max_workers: 5
provider: {type: aws, region: us-west-2}
auth: {ssh_user: ubuntu}
available_node_types:
  ray.head.default: {resources: {CPU: 2}, node_config: &node {InstanceType: m5.large}}
  ray.worker.default: {min_workers: 1, max_workers: 3, resources: {CPU: 2}, node_config: {<<: *node, KeyName: k}}
head_node_type: ray.head.default
head_start_ray_commands: [ray stop, ray start --head --dashboard-port 9000 --autoscaling-config=~/ray_bootstrap_config.yaml]
"""
LOCAL = """
cluster_name: onprem
provider: {type: local, head_ip: 10.0.0.1, worker_ips: [10.0.0.2, 10.0.0.3]}
auth: {ssh_user: ann, ssh_private_key: ~/.ssh/lab}
setup_commands: [source ~/venv/bin/activate]
"""


@pytest.fixture
def load(tmp_path: Path) -> Callable[..., ClusterSpec]:
    def load(text: str, **flags: Any) -> ClusterSpec:
        (tmp_path / "cluster.yaml").write_text(text)
        return loader.load(backends, file=tmp_path / "cluster.yaml", environ={}, flags=flags).spec

    return load


def test_a_file_of_rays_is_used_as_it_is(load: Callable[..., ClusterSpec]) -> None:
    found = load(THEIRS, **{"idle.timeout": "1h"})
    assert (found.on, found.name, found.idle.timeout) == ("aws", "team", 3600)
    assert {name: (g.nodes, g.min, g.max) for name, g in found.groups.items()} == {
        "ray-worker-default": (1, 1, 3)
    }
    request, plan = planner.plan(ClusterDirectory(FOLDER), found, cluster_id="0123456789abcdef")
    made, theirs = plan.steps[0].config["config"], yaml.safe_load(THEIRS)
    ours = ("file_mounts", "setup_commands", "head_start_ray_commands", "worker_start_ray_commands")
    assert {key: value for key, value in made.items() if key not in ours} == {
        key: value for key, value in theirs.items() if key not in ours
    }
    into = ". ~/.heliostat/0123456789abcdef/env.sh; "
    assert made["head_start_ray_commands"][:2] == [into + line for line in theirs["head_start_ray_commands"]]
    assert made["setup_commands"] == ["which ray || pip install -U 'ray[default]==2.60.0'"]
    assert plan.steps[0].config["own"] is None and [m.name for m in request.members] == [
        "head",
        "ray-worker-default-1",
    ]
    taken(made)


def test_a_record_brings_such_a_file_back(load: Callable[..., ClusterSpec]) -> None:
    found = load(THEIRS)
    again = loader.check(json.loads(json.dumps(planner.spec_json(found))), {}, backends)
    assert planner.spec_json(again) == planner.spec_json(found)


def test_hosts_of_ones_own(load: Callable[..., ClusterSpec]) -> None:
    found = load(LOCAL)
    assert found.on == "ssh" and [(h.host, h.user, h.key) for h in found.hosts] == [
        (f"10.0.0.{i}", "ann", "~/.ssh/lab") for i in (1, 2, 3)
    ]
    assert found.environment.setup == ("source ~/venv/bin/activate",) and found.nodes == 3


@pytest.mark.parametrize(
    ("old", "new", "what", "hint"),
    [
        ("team", "my_team", "`my_team` cannot be the name of a cluster", "cluster_name: my-team"),
        ("type: aws", "type: vsphere", "is for the provider `vsphere`", ""),
        ("head_node_type: ray.head.default", "head_node_type: other", "does not define its head", ""),
    ],
)
def test_files_of_rays_that_cannot_be_used(
    load: Callable[..., ClusterSpec], old: str, new: str, what: str, hint: str
) -> None:
    with pytest.raises(UsageError) as error:
        load(THEIRS.replace(old, new))
    assert what in error.value.message and hint in error.value.hint


def test_what_is_not_taken_over(load: Callable[..., ClusterSpec]) -> None:
    with pytest.raises(UsageError, match="`file_mounts` is not supported"):
        load(LOCAL + "file_mounts: {/data: /data}\n")
    with pytest.raises(UsageError, match="coordinator_address"):
        load(LOCAL.replace("head_ip: 10.0.0.1", "coordinator_address: h"))


# -- what a cloud says when it refuses


class ClientError(Exception):
    """As boto's."""


@pytest.mark.parametrize(
    ("site", "error", "code", "hint"),
    [
        ("aws", ClientError("Unable to locate credentials"), "credentials", "aws configure"),
        ("aws", ClientError("An error occurred (VcpuLimitExceeded): You have requested more"), "quota", "higher quota in here"),
        ("aws", ClientError("(InsufficientInstanceCapacity)"), "capacity", "use another zone"),
        ("aws", ClientError('Could not connect to the endpoint URL: "https://ec2.x"'), "region", "check that `here` is a region of aws"),
        ("aws", ClientError("User: x is not authorized to perform: iam:CreateRole (AccessDenied)"), "iam", "aws.profile"),
        ("aws", ClientError("(UnauthorizedOperation) You are not authorized"), "permission", "ask the administrator of the account"),
        ("aws", ModuleNotFoundError("No module named 'boto3'"), "missing_package", "pip install 'heliostat[aws]'"),
        ("gcp", ImportError("The Ray GCP VM launcher requires"), "missing_package", "pip install 'heliostat[gcp]'"),
        ("gcp", ClientError("DefaultCredentialsError: Your default credentials were not found"), "credentials", "gcloud auth"),
        ("azure", ClientError("DefaultAzureCredential failed to retrieve a token"), "credentials", "az login"),
        ("azure", ClientError("CredentialUnavailableError: Azure CLI not found on path"), "credentials", "az login"),
    ],
)  # fmt: skip
def test_refusals_say_what_to_type(site: str, error: Exception, code: str, hint: str) -> None:
    said = refusals.explain(error, {"provider": {"type": site, "region": "here"}})
    assert hint in said["hint"] and str(error)[:20] in said["cause"] and said["code"] == f"cloud.{code}"


def test_what_is_behind_an_error_is_told() -> None:
    try:
        try:
            raise ClientError("(InvalidAMIID.NotFound) The image id '[ami-1]' does not exist")
        except ClientError as inner:
            raise RuntimeError("Failed to launch instances.") from inner
    except RuntimeError as error:
        said = refusals.explain(error, {"provider": {"type": "aws", "region": "here"}})
    assert "Failed to launch instances: (InvalidAMIID" in said["cause"] and "aws.image" in said["hint"]


# -- looking


def handle(tmp_path: Path, **more: Any) -> Handle:
    request, plan = planned("aws", tmp_path, **more)
    made = next(iter(backends.load("aws").launch(plan, request, _Answers({"ok": True}))))  # type: ignore[arg-type]
    assert made.native_id == "aws/us-west-2/lab-01234567"
    return made


class _Answers:
    """A machine on which every operation gives this answer."""

    def __init__(self, answer: dict[str, Any]) -> None:
        self.answer = answer

    def run(self, argv: Any, *, input: bytes = b"", timeout: float) -> Any:
        from heliostat.remote.transport import Completed

        return Completed(tuple(argv), 0, json.dumps(self.answer) + "\n", "")


def instance(name: str, kind: str, status: str, address: str) -> dict[str, Any]:
    role = "head" if kind == "head" else "worker"
    return {
        "id": name,
        "role": role,
        "type": kind,
        "status": status,
        "internal_ip": address,
        "external_ip": None,
    }


def platform_status(
    handle: Handle, before: dict[str, Any], nodes: list[dict[str, Any]], ended: str = ""
) -> dict[str, Any]:
    site: Any = backends.load("aws")
    (Path(handle.detail["folder"]) / "looked.json").unlink(missing_ok=True)
    own = [NodeRecord("head", "head"), NodeRecord("w1", "worker"), NodeRecord("w2", "worker")]
    told = site.platform_status(handle, own, before, _Answers({"ok": True, "nodes": nodes, "ended": ended}))
    return dict(told.nodes)


def brief(told: dict[str, Any]) -> list[tuple[str, str, str | None]]:
    return [(name, words["state"], words["id"]) for name, words in told.items()]


def test_nodes_on_their_way(tmp_path: Path) -> None:
    made = handle(tmp_path)
    told = platform_status(made, {}, [])
    assert brief(told) == [("head", "QUEUED", None), ("w1", "QUEUED", None), ("w2", "QUEUED", None)]
    told = platform_status(made, told, [instance("i-1", "head", "waiting-for-ssh", "10.0.0.4")])
    assert told["head"]["state"] == "ALLOCATED" and told["head"]["reason"] == "i-1: waits for ssh"
    head = instance("i-1", "head", "setting-up", "10.0.0.4")
    told = platform_status(made, told, [head, instance("i-3", "worker", "uninitialized", "10.0.0.6")])
    assert brief(told) == [("head", "STARTING", "i-1"), ("w1", "ALLOCATED", "i-3"), ("w2", "QUEUED", None)]
    other = instance("i-2", "worker", "uninitialized", "10.0.0.5")
    told = platform_status(made, told, [head, other, instance("i-3", "worker", "up-to-date", "10.0.0.6")])
    assert brief(told)[1:] == [("w1", "STARTING", "i-3"), ("w2", "ALLOCATED", "i-2")], "each keeps its name"
    many = [instance(f"i-{i}", "worker", "setting-up", f"10.0.1.{i}") for i in range(2, 6)]
    assert [name for name, _, _ in brief(platform_status(made, told, [head, *many]))] == [
        "head",
        "w1",
        "w2",
        "w3",
        "w4",
    ]


def test_a_launcher_that_failed(tmp_path: Path) -> None:
    made = handle(tmp_path)
    log = tmp_path / "logs/head/launcher.log"
    log.parent.mkdir(parents=True)
    log.write_text(
        "<1/1> Setting up head node\n  New status: setting-up\nno licence here\nShared connection to x closed.\n"
        "  New status: update-failed\n  !!!\nTraceback\nlater\n"
    )
    answer = {"ok": False, "message": "no", "cause": "Failed to setup head node.", "hint": ""}
    (tmp_path / "launcher-answer.json").write_text(json.dumps(answer))
    told = platform_status(made, {}, [])
    assert (
        told["head"]["state"] == "FAILED"
        and told["head"]["reason"] == "Failed to setup head node: no licence here"
    )


def test_a_cluster_that_ended_itself(tmp_path: Path) -> None:
    made = handle(tmp_path)
    (tmp_path / "launcher-answer.json").write_text('{"ok": true}')
    ready = {name: {"state": "READY", "id": f"i-{name}", "role": "worker"} for name in ("head", "w1", "w2")}
    told = platform_status(made, ready, [], "idle for 60 s")
    assert [words["state"] for words in told.values()] == ["GONE"] * 3 and told["head"][
        "reason"
    ] == "idle for 60 s"
    assert platform_status(made, ready, [])["head"]["state"] == "FAILED", "nobody said why"


def test_an_answer_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(HeliostatError, match="no quota") as error:
        operations.run_operation(
            "aws",
            {"do": "list"},
            tmp_path,
            _Answers({"ok": False, "code": "cloud.quota", "message": "no quota", "cause": "b", "hint": "h"}),  # type: ignore[arg-type]
            1,
        )
    assert (error.value.code, error.value.cause, error.value.hint) == ("cloud.quota", "b", "h")


# -- instance types and prices


def test_instance_types() -> None:
    cpus = [count_cpus(name) for name in ("g5.xlarge", "n2-standard-32", "Standard_E8s_v5", "x")]
    assert cpus == [4, 32, 8, None]
    assert [count_gpus(name) for name in ("g5.12xlarge", "m5.large", "x")] == [4, 0, None]


def test_the_cost_is_noted_where_each_price_is_given() -> None:
    groups = {"cpu": {"nodes": 2}, "gpu": {"nodes": 3, "price_per_node_hour": 1.5}}
    notes = planned("aws", nodes=None, groups=groups, price_per_node_hour=0.1)[1].notes
    assert notes == ("at 0.1, 1.5 per node-hour this cluster costs 4.80 per hour",)
    assert planned("aws", nodes=None, groups=groups)[1].notes == (), "the price of the head is unknown"
    assert planned("aws")[1].notes == ()
